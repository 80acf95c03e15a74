"""Records what a user's forward does between its blocks, as a graph. The compiler captures with it; ranks
record again with it."""

from secc.runtime.recorder.nested_values import take_at_path
from secc.runtime.recorder.recorder import CallObserver, Recorder, record_forward
from secc.runtime.recorder.recording import (
    BlockError,
    Hazard,
    Read,
    Recording,
    is_gradient_error,
    is_read_node,
    read_value,
)
from secc.runtime.recorder.replay import Replay

__all__ = [
    "BlockError",
    "CallObserver",
    "Hazard",
    "Read",
    "Recorder",
    "Recording",
    "Replay",
    "is_gradient_error",
    "is_read_node",
    "read_value",
    "record_forward",
    "take_at_path",
]
