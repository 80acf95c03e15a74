"""Finds blocks that cannot be opened down to their layers, before a section of them gets pipeline stages.

Only a capture with opened blocks can tell. What most often fails there is glue between layers that changes
with the batch, so first two micro-batches of each pattern are recorded with all blocks opened, and only those
blocks are captured in which other ops ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from secc.errors import UserError
from secc.frontend.capture.block_selection import CaptureNote, ModuleTree, select_blocks
from secc.frontend.capture.capture import Capture, capture_model
from secc.frontend.dataset.input_symbols import ModelInputs
from secc.frontend.dataset.survey import DatasetSurvey
from secc.runtime.model.user_file import UserModel
from secc.runtime.recorder import Recording

_COMPARED_BATCHES = 2  # of each pattern


def find_whole_blocks(
    user: UserModel, model: nn.Module, survey: DatasetSurvey, inputs: ModelInputs, capture: Capture
) -> dict[str, CaptureNote]:
    """Returns the blocks of a capture of `model` that hold a stack of layers and stay whole if they are to be
    opened, each with the reason. Blocks with the same glue in all micro-batches are not tried."""
    tree = ModuleTree(model)
    opened = [path for path in capture.blocks if holds_layers(tree, path)]
    try:
        changing = _find_changing_blocks(user, model, survey, capture, opened) if opened else []
        if not changing:
            return {}
        found = capture_model(user, model, survey, inputs, changing, before=capture)
    except UserError:  # a capture for stages will meet it again, if there is one
        return {}
    return {path: note for path, note in blocks_left_whole(changing, found) if note is not None}


def _find_changing_blocks(
    user: UserModel, model: nn.Module, survey: DatasetSurvey, capture: Capture, opened: Sequence[str]
) -> list[str]:
    """Returns those of the blocks `opened` in which not all micro-batches of a pattern run the same ops."""
    recorder = capture.recorder
    recorder.use_blocks(select_blocks(model, (), opened, (), recorder, capture.module_calls).blocks)
    changing = set[str]()
    for pattern in survey.micro_batch_patterns():
        recordings = [
            recorder.record(user.collate(samples))
            for samples in survey.compose_batches(pattern)[:_COMPARED_BATCHES]
        ]
        changing |= {
            path for path in opened if len({_ops_inside(recording, path) for recording in recordings}) > 1
        }
    return sorted(changing)


def _ops_inside(recording: Recording, path: str) -> tuple[str, ...]:
    """Returns what ran in a block, in order."""
    return tuple(
        str(node.target)
        for node in recording.graph.nodes
        if f"{node.meta.get('module', '')}.".startswith(f"{path}.")
    )


def holds_layers(tree: ModuleTree, path: str) -> bool:
    """Whether a block holds a stack of layers, and is not itself in a layer."""
    return tree.stack_depth(path) > 0 and not any(
        f"{path}.".startswith(f"{layer}.") for layer in tree.stack_layers()
    )


def blocks_left_whole(opened: Iterable[str], captured: Capture) -> Iterator[tuple[str, CaptureNote | None]]:
    """Yields those of the blocks `opened` that stayed whole in a capture in which they were to be opened,
    each with the note of the capture about it."""
    for path in opened:
        around = next((b for b in captured.blocks if path == b or path.startswith(f"{b}.")), None)
        if around is not None:
            yield path, next((n for n in captured.notes if n.path == around), None)
