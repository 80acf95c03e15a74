"""Follows where tensors inside of blocks come from: from weights alone, or from what another block was given.

A position bias that a block computes from weights alone belongs to no sample and is the same in every
micro-batch of its widths. A tensor that a block stores for another block to read bypasses the arguments that
a plan transfers, so the block that stores it has to be split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from secc.runtime.randomness.random_op_values import is_random
from secc.runtime.recorder.glue_ops import argument_tensors, written_tensors

# Ops that use only the shape of their argument.
_NEW_TENSOR_OPS = frozenset(
    ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
)
NO_NAMES: Mapping[int, str] = {}


class TensorOrigins:
    """Follows the ops of blocks' runs. `state` has the ids of parameters and buffers, `names` their names
    by their memory."""

    def __init__(self, state: Iterable[int], names: Mapping[int, str] = NO_NAMES) -> None:
        self._state, self._names = set(state), dict(names)
        self._running_block, self._run, self._runs = (
            "",
            0,
            0,
        )  # the present run's number, and how many there were
        self._independent_tensors: dict[
            int, torch.Tensor
        ] = {}  # made in this run of nothing that it was given
        self._making_blocks: Any = (
            WeakTensorKeyDictionary()
        )  # tensors that blocks made of what they were given: the block and its run

    @contextmanager
    def running_block(self, block: str, fixed: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Context in which a block runs, or a part of one that runs once for all equal parts. fixed:
        arguments (any shapes) that no input decides."""
        before = self._running_block, self._run, self._independent_tensors
        if block != self._running_block:  # else a part of it
            self._runs += 1
            self._run = self._runs
        self._running_block, self._independent_tensors = block, {id(t): t for t in fixed}
        try:
            yield
        finally:
            self._running_block, self._run, self._independent_tensors = before

    def note_result(self, func: Any, args: Any, kwargs: Any, out: Any) -> list[str]:
        """Note that an op of the running block returned `out`. Returns the parameters and buffers that it
        changed by what the block was given."""
        if not self._running_block:
            return []
        inputs = argument_tensors(args, kwargs)
        takes_shape_only = func._schema.name.removeprefix("aten::") in _NEW_TENSOR_OPS
        independent = (takes_shape_only or all(map(self.is_input_independent, inputs))) and not is_random(
            func, args, kwargs
        )
        changed = [] if independent else written_tensors(func, args, kwargs)
        if changed:
            self._forget_written(changed)
        for tensor in argument_tensors((out,), {}):
            self._note_tensor(tensor, independent)
        names = (self._names.get(t.untyped_storage()._cdata) for t in changed)
        return [name for name in names if name is not None]

    def _forget_written(self, changed: list[torch.Tensor]) -> None:
        """Forget that these tensors and their views are independent of inputs: what a block was given was
        written into them."""
        memory = {t.untyped_storage()._cdata for t in changed}
        self._independent_tensors = {
            i: t for i, t in self._independent_tensors.items() if t.untyped_storage()._cdata not in memory
        }
        self._state.difference_update(map(id, changed))

    def _note_tensor(self, tensor: torch.Tensor, alone: bool) -> None:
        if alone:
            self._independent_tensors[id(tensor)] = tensor
        else:
            self._independent_tensors.pop(id(tensor), None)
            self._making_blocks[tensor] = self._running_block, self._run

    def adopt_result(self, tensor: torch.Tensor, alone: bool) -> None:
        """Note a tensor (any shape) that a part of the running block returns, without having run again."""
        if self._running_block:
            self._note_tensor(tensor, alone)

    def is_input_independent(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor (any shape) is a weight, or was made in this run without anything that the block
        was given, other than fixed arguments."""
        return id(tensor) in self._state or id(tensor) in self._independent_tensors

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor (any shape) is a weight, or was made in a block in this run."""
        return self.is_input_independent(tensor) or self._making_blocks.get(tensor) is not None

    def making_block(self, tensor: torch.Tensor) -> str:
        """Return the other block that made a tensor (any shape) from what it was given, "" if there is
        none."""
        block, _ = self._making_blocks.get(tensor) or ("", 0)
        return "" if block == self._running_block else block

    def was_made_in_earlier_run(self, tensor: torch.Tensor) -> bool:
        """Whether an earlier run of the running block made a tensor (any shape) from what it was given."""
        block, run = self._making_blocks.get(tensor) or ("", 0)
        return block == self._running_block and run != self._run
