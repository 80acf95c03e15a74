"""The recorder: what a user's forward does between its blocks, as a graph. The compiler captures with it,
ranks record anew with it."""

from secc.runtime.recorder.nested_values import take
from secc.runtime.recorder.recorder import Observer, Recorder, record
from secc.runtime.recorder.recording import BlockError, Hazard, Read, Recording, is_read, read_value
from secc.runtime.recorder.replay import Replay

__all__ = [
    "BlockError",
    "Hazard",
    "Observer",
    "Read",
    "Recorder",
    "Recording",
    "Replay",
    "is_read",
    "read_value",
    "record",
    "take",
]
