"""Runs code written for whole tensors on parts: tensors carry marks (`rules.mark`), and a torch function mode
answers with whole sizes.

A user's attention may call `view(B, T, self.heads, C // self.heads)` or `split(self.width, dim=2)`. Inside
`WholeShapeMode` the shape of a marked tensor reads as that of the whole one, and sizes in the code are
reduced to the rank's part (`rules`). A tensor without a mark is whole; where it meets a marked one, its
matching part is taken.

A function without a rule raises `UnshardableCode`. That happens while a plan is made, never in a run, because
a mapping is accepted only after the same code has run and its gradients have been compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from secc.runtime.plan.replica_routes import slice_bounds
from secc.runtime.randomness import shard_coordinates as part
from secc.runtime.tensor_parallel.rules import find_rule
from secc.runtime.tensor_parallel.rules.mark import ShardMark, collect_marks, mark_of

_thread_state = threading.local()


def in_whole_shape_mode() -> bool:
    """Whether the running code sees whole sizes, so that parts must be marked."""
    return getattr(_thread_state, "depth", 0) > 0


class WholeShapeMode(TorchFunctionMode):
    """Presents whole sizes to code that runs on the parts of rank `index` of `count`. `enter` is applied to
    whole activations that meet parts: the identity, with gradients summed over ranks."""

    def __init__(
        self, index: int, count: int, enter: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    ) -> None:
        super().__init__()
        self.index, self.count, self._copy_to_shards = index, count, enter
        self.drew_random_numbers = False  # whether random ops have drawn for parts
        self.head_counts = set[int]()  # numbers of heads that have been split over ranks

    def copy_to_shards(self, whole: torch.Tensor) -> torch.Tensor:
        """Prepares a whole tensor (any shape) for use with parts. Each rank's gradient of an activation is
        then a summand, so it is summed over ranks; gradients of parameters are summed once per step
        instead."""
        return (
            whole
            if isinstance(whole, torch.nn.Parameter) or not whole.requires_grad
            else self._copy_to_shards(whole)
        )

    def __enter__(self) -> WholeShapeMode:
        _thread_state.depth = getattr(_thread_state, "depth", 0) + 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _thread_state.depth -= 1
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        marks = collect_marks((args, kwargs))
        if not marks:
            return func(*args, **kwargs)
        rule: Callable[..., Any] = find_rule(func)
        return rule(self, func, args, kwargs, marks)

    def local_length(self, parts: Sequence[int]) -> int:
        """Returns the number of entries of `parts` that a rank has; the same on every rank."""
        return sum(part // self.count for part in parts)

    def whole_shape(self, tensor: torch.Tensor) -> list[int]:
        """Returns the shape of the whole tensor that `tensor` is a part of."""
        shape, mark = list(tensor.shape), mark_of(tensor)
        if mark is not None:
            shape[mark.dim] = mark.whole_size
        return shape

    @contextmanager
    def draw_shard(self, mark: ShardMark) -> Iterator[None]:
        """Makes random ops inside draw this rank's part of the numbers of the whole tensor."""
        self.drew_random_numbers = True
        with part.drawing_shard(mark.dim, self.rank_ranges(mark.parts)):
            yield

    def rank_ranges(self, parts: Sequence[int]) -> list[tuple[int, int]]:
        """Returns this rank's entries of a whole dim, as (start, stop) for each part."""
        starts = [0, *accumulate(parts)]
        shares = (slice_bounds(size, self.index, self.count) for size in parts)
        return [
            (offset + start, offset + stop) for offset, (start, stop) in zip(starts, shares, strict=False)
        ]

    def take_shard(self, whole: torch.Tensor, dim: int, parts: Sequence[int]) -> torch.Tensor:
        """Returns this rank's part of a whole tensor along `dim`; `parts` are the sizes of the parts of that
        dim that are each split evenly."""
        pieces = [whole.narrow(dim, start, stop - start) for start, stop in self.rank_ranges(parts)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
