"""Notes what ops inside a block reveal: values read from real tensors, batch norm in training mode, random
numbers, rows put in the places of a mask, tensors that it remembers from an earlier call.

Batch norm couples the samples of a batch, so a plan with it is not exact; random numbers must be tied to
samples; rows go to other samples' places if a sample has more of them than places. The compiler has to know
them with their places.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from secc.runtime.model.source_lines import SourceLines, current_source_line, innermost_running_module
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
_SCATTERS = frozenset({"masked_scatter", "masked_scatter_"})
_PUTS = frozenset({"index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_"})
_SELECTIONS = frozenset({"index", "masked_select", "nonzero"})
_DYNAMIC_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class BlockWatch:
    """Observes the ops of one block's run, which was called at the source lines `outside`. `reads_values`:
    a value of a real tensor decided something."""

    def __init__(self, path: str, outside: SourceLines = ()) -> None:
        self._path, self.outer_lines = path, outside
        self.reads_values = False
        self.hazards: dict[Hazard, None] = {}
        self.draws: list[RandomOpCall] = []
        self._selecting: list[torch.Tensor] = []  # masks by which rows were selected

    def copy(self) -> BlockWatch:
        """Return an independent copy."""
        return BlockWatch(self._path, self.outer_lines).absorb(self.reads_values, self.hazards, self.draws)

    def absorb(self, reads: bool, hazards: Iterable[Hazard], draws: Iterable[RandomOpCall]) -> BlockWatch:
        """Add what happened in a part of the block that did not run again, and return this watch."""
        self.reads_values |= reads
        self.hazards |= {Hazard(self._path, h.kind, h.op, h.where): None for h in hazards}
        self.draws += draws
        return self

    def observe_op(self, func: Any, args: Any, kwargs: Any) -> None:
        """Observe an op that is about to run."""
        dynamic = _is_dynamic(func)
        if func in _LENGTH_OPS or (
            dynamic and (not any(is_fake(a) for a in args) or any(map(_is_mask, tree_leaves(args))))
        ):
            self.reads_values = True
        if _is_batch_norm(func) and _uses_batch_statistics(func, args, kwargs):
            of_module = isinstance(innermost_running_module(), _BatchNorm)
            self.note_hazard("batch_norm" if of_module else "batch_statistics", str(func))
        if func is torch.ops.aten.embedding.default and _argument_by_name(
            func, args, kwargs, ("scale_grad_by_freq",), False
        ):
            self.note_hazard("frequency", str(func))
        name = func._schema.name.removeprefix("aten::")
        if name in _SELECTIONS:
            self._selecting += filter(_is_bool, tree_leaves(args))
        elif (mask := _mask_of_places(name, args)) is not None and not any(
            _are_same_mask(mask, m) for m in self._selecting
        ):
            self.note_hazard("placed_rows", str(func))

    def note_hazard(self, kind: str, what: str) -> None:
        """Note a hazard at the current source line."""
        self.hazards[Hazard(self._path, kind, what, current_source_line())] = None


@cache
def _is_dynamic(func: Any) -> bool:
    """Whether values decide an op's result or its shape."""
    return any(tag in func.tags for tag in _DYNAMIC_TAGS)


@cache
def _is_batch_norm(func: Any) -> bool:
    return func._schema.name.removeprefix("aten::").startswith(_BATCH_NORM_OPS)


def _mask_of_places(name: str, args: Any) -> torch.Tensor | None:
    """The mask in which an op puts rows, one in each place. None for other ops, and for values that are equal
    for all places."""
    if name in _SCATTERS:
        return args[1]
    if name not in _PUTS:
        return None
    masks = [i for i in args[1] if i is not None]
    if len(masks) != 1 or not _is_bool(masks[0]):
        return None
    rows, found = args[2], 1 + args[0].dim() - masks[0].dim()
    return masks[0] if rows.dim() == found and rows.shape[0] != 1 else None


def _are_same_mask(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two masks are one, or were computed twice: `x[kind == 1]` returns to `y[kind == 1]`."""
    return a is b or (a.shape == b.shape and not is_fake(a) and not is_fake(b) and torch.equal(a, b))


def _is_bool(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def _is_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8) and not is_fake(value)


def _uses_batch_statistics(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a batch norm uses the batch's own statistics. Over a batch of one it may be an instance
    norm."""
    return args[0].shape[0] > 1 and bool(_argument_by_name(func, args, kwargs, ("training", "train"), True))


def _argument_by_name(func: Any, args: Any, kwargs: Any, names: tuple[str, ...], default: Any) -> Any:
    """Return the first argument with one of these names, or its default in the schema. `default` if the op
    has none of them."""
    for i, a in enumerate(func._schema.arguments):
        if a.name in names:
            return args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
    return default
