"""Code written for whole tensors, run on parts: tensors bear marks that say how they are cut, and a mode
answers with whole sizes.

A user's attention may say `view(B, T, self.heads, C // self.heads)` or `split(self.width, dim=2)`. Inside a
`Shapes` mode the shape of a marked tensor reads as that of the whole one, and a size that the code gives is
cut down to the rank's part (`rules`). A tensor without a mark that meets a marked one is whole: of a dim that
the other has a part of, its part is taken.

What has no rule raises `Refused`. That happens when a plan is made, never in a run: a mapping is accepted
only after the same code has gone through and its gradients were compared.
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
    """Whether the code that runs sees whole sizes, so that parts must bear marks."""
    return getattr(_thread_state, "depth", 0) > 0


class WholeShapeMode(TorchFunctionMode):
    """Whole sizes on the parts of rank `index` of `count`. `enter` sums the gradients of whole activations
    that meet parts."""

    def __init__(
        self, index: int, count: int, enter: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    ) -> None:
        super().__init__()
        self.index, self.count, self._copy_to_shards = index, count, enter
        self.drew_random_numbers = False  # whether random numbers were drawn for parts
        self.head_counts = set[int]()  # the numbers of heads that were shared out

    def copy_to_shards(self, whole: torch.Tensor) -> torch.Tensor:
        """A whole tensor that meets parts: each rank's gradient of it is a part of the sum. Those of
        parameters are summed once a step."""
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
        found = collect_marks((args, kwargs))
        if not found:
            return func(*args, **kwargs)
        rule: Callable[..., Any] = find_rule(func)
        return rule(self, func, args, kwargs, found)

    def local_length(self, parts: Sequence[int]) -> int:
        """How many of these entries a rank has; the same on every rank."""
        return sum(part // self.count for part in parts)

    def whole_shape(self, tensor: torch.Tensor) -> list[int]:
        """The shape of the whole tensor that this one is a part of."""
        shape, found = list(tensor.shape), mark_of(tensor)
        if found is not None:
            shape[found.dim] = found.whole_size
        return shape

    @contextmanager
    def draw_shard(self, found: ShardMark) -> Iterator[None]:
        """Random ops inside draw the rank's part of the whole numbers."""
        self.drew_random_numbers = True
        with part.drawing_shard(found.dim, self.rank_ranges(found.parts)):
            yield

    def rank_ranges(self, parts: Sequence[int]) -> list[tuple[int, int]]:
        """This rank's entries of a whole dim."""
        starts = [0, *accumulate(parts)]
        own = (slice_bounds(size, self.index, self.count) for size in parts)
        return [(offset + start, offset + stop) for offset, (start, stop) in zip(starts, own, strict=False)]

    def take_shard(self, whole: torch.Tensor, dim: int, parts: Sequence[int]) -> torch.Tensor:
        """This rank's part of a whole tensor."""
        pieces = [whole.narrow(dim, start, stop - start) for start, stop in self.rank_ranges(parts)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
