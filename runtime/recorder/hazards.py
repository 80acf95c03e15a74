"""What ops inside a block betray: values read from real tensors, batch norm in training mode, and random
numbers.

Batch norm couples the samples of a batch, which ends the exactness of a plan; random numbers must be tied to
samples. So the compiler must know them by place.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from secc.runtime.model.source_lines import SourceLines, current_source_line
from secc.runtime.recorder.block_results import is_fake
from secc.runtime.recorder.recording import Hazard, RandomOpCall

_BATCH_NORM_OPS = (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "_batch_norm_with_update",
)
_LENGTH_OPS = (torch.ops.aten._pack_padded_sequence.default, torch.ops.aten._ctc_loss.Tensor)
_DYNAMIC_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class BlockWatch:
    """Looks at the ops of one block's run, which is called at the lines `outside`. `reads`: a value of a real
    tensor decided something."""

    def __init__(self, path: str, outside: SourceLines = ()) -> None:
        self._path, self.outer_lines = path, outside
        self.reads_values = False
        self.hazards: dict[Hazard, None] = {}
        self.draws: list[RandomOpCall] = []

    def copy(self) -> BlockWatch:
        """A watch that knows what this one knows now."""
        return BlockWatch(self._path, self.outer_lines).absorb(self.reads_values, self.hazards, self.draws)

    def absorb(self, reads: bool, hazards: Iterable[Hazard], draws: Iterable[RandomOpCall]) -> BlockWatch:
        """This watch, which now knows as well what happened in a part of the block that did not run again."""
        self.reads_values |= reads
        self.hazards |= {Hazard(self._path, h.kind, h.op, h.where): None for h in hazards}
        self.draws += draws
        return self

    def observe_op(self, func: Any, args: Any, kwargs: Any) -> None:
        """An op is about to run."""
        dynamic = _is_dynamic(func)
        if func in _LENGTH_OPS or (
            dynamic and (not any(is_fake(a) for a in args) or any(map(_is_mask, tree_leaves(args))))
        ):
            self.reads_values = True
        if _is_batch_norm(func) and _uses_batch_statistics(func, args, kwargs):
            self.note_hazard("batch_norm", str(func))
        if func is torch.ops.aten.embedding.default and _argument_by_name(
            func, args, kwargs, ("scale_grad_by_freq",), False
        ):
            self.note_hazard("frequency", str(func))

    def note_hazard(self, kind: str, what: str) -> None:
        """Something of this kind happens at the present place."""
        self.hazards[Hazard(self._path, kind, what, current_source_line())] = None


@cache
def _is_dynamic(func: Any) -> bool:
    """Whether values decide an op's result or its shape."""
    return any(tag in func.tags for tag in _DYNAMIC_TAGS)


@cache
def _is_batch_norm(func: Any) -> bool:
    return func._schema.name.removeprefix("aten::").startswith(_BATCH_NORM_OPS)


def _is_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8) and not is_fake(value)


def _uses_batch_statistics(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a batch norm has the batch's own statistics. Over a batch of one it may be an instance norm."""
    return args[0].shape[0] > 1 and bool(_argument_by_name(func, args, kwargs, ("training", "train"), True))


def _argument_by_name(func: Any, args: Any, kwargs: Any, names: tuple[str, ...], default: Any) -> Any:
    """The first argument that has one of these names: given, by default of the schema, or else `default`."""
    for i, a in enumerate(func._schema.arguments):
        if a.name in names:
            return args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
    return default
