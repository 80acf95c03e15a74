"""Runs code written for whole sequences on a rank's rows: a torch function mode shows whole sizes and applies
the rules of `row_rules`.

A `torch.autograd.Function` is called without torch's function dispatch, so `apply` is wrapped: a function
with the class attribute `works_on_rows` computes on rows as they are, any other gets gathered tensors. One
that divides a rank's rows further, over ranks of tp, names their dim as `divided_dim`; its results have no
marks (`secc.runtime.tensor_parallel.sequence_parallel`). Code that the user's own `torch.utils.checkpoint`
runs again in the backward enters the mode of its forward.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import tree_map

from secc.runtime.context_parallel import row_exchange
from secc.runtime.context_parallel.row_marks import (
    RowMark,
    deal_entries,
    deal_pieces,
    deal_rows,
    mark_of,
    marked_tensors,
    repeat_of,
    set_mark,
)
from secc.runtime.model.flex_attention import intercept_flex_attention
from secc.runtime.randomness import shard_coordinates
from secc.runtime.tensor_parallel.replica_group import ReplicaGroup

_thread_state = threading.local()
Tensors = dict[str, torch.Tensor]


def active_row_mode() -> RowMode | None:
    """Returns the mode that the running code is in, None outside of one and inside a rule."""
    return getattr(_thread_state, "mode", None)


class RowMode(TorchFunctionMode):
    """Presents whole sizes to code that runs on the rows of one rank of `group`.

    attention: "gather" keys and values for a rank's queries, "ulysses": exchange rows for heads where that is
    possible (`row_attention`), or "frames": a rank's rows are whole entries of the batch of a layer's hidden
    states, so that attention exchanges nothing. gathered: how often functions without a rule got gathered
    tensors, by name.
    """

    def __init__(self, group: ReplicaGroup, attention: str = "gather") -> None:
        super().__init__()
        self.group, self.attention = group, attention
        self.gathered = Counter[str]()
        self._outer: list[RowMode | None] = []

    def __enter__(self) -> RowMode:
        self._outer.append(active_row_mode())
        _thread_state.mode = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _thread_state.mode = self._outer.pop()
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        # Inside a rule, sizes are those of the rows.
        if active_row_mode() is not self or next(marked_tensors((args, kwargs)), None) is None:
            return func(*args, **kwargs)
        return self.apply_rule(func, args, kwargs)

    def apply_rule(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs a function with marked arguments by its rule."""
        from secc.runtime.context_parallel.row_rules import find_rule

        _thread_state.mode, outer = None, active_row_mode()
        try:
            rule: Callable[..., Any] = find_rule(func)
            return rule(self, func, list(args), kwargs)
        finally:
            _thread_state.mode = outer

    def whole_shape(self, tensor: torch.Tensor) -> list[int]:
        """Returns the shape of the whole tensor that `tensor` holds rows of."""
        shape, mark = list(tensor.shape), mark_of(tensor)
        if mark is not None:
            shape[mark.dim] = mark.whole_size
        return shape

    def take_own_rows(self, whole: torch.Tensor, dim: int, ends: Sequence[int] = ()) -> torch.Tensor:
        """Returns this rank's rows of a whole tensor along `dim`, marked. ends: where pieces end that attend
        to themselves; ranks get whole pieces if there are enough."""
        size, count = whole.shape[dim], self.group.size
        rows = deal_pieces(tuple(ends), count) if len(ends) >= count else deal_rows(size, count)
        return self.take(whole, RowMark(dim, rows))

    def take_own_part(self, hidden: torch.Tensor, arguments: Sequence[Any]) -> torch.Tensor:
        """Returns this rank's part of the whole hidden states of a layer called with `arguments`, marked:
        entries of the batch under "frames", else rows."""
        if self.attention == "frames":
            return self.take(hidden, RowMark(0, deal_entries(hidden.shape[0], self.group.size)))
        return self.take_own_rows(hidden, hidden.ndim - 2, ends_of_pieces(hidden, arguments))

    def take(self, whole: torch.Tensor, mark: RowMark) -> torch.Tensor:
        """Returns the rows of a whole tensor that match `mark`, marked."""
        return set_mark(row_exchange.take_rows(whole, mark, self.group.index), mark)

    def match_rows(self, value: Any, common: RowMark) -> Any:
        """Returns an operand's rows that match `common`, where its dim, counted from the end, is not of size
        1; values that are no tensors as they are."""
        if not isinstance(value, torch.Tensor):
            return value
        mark = mark_of(value)
        if mark is not None:
            if mark.at_dim(mark.dim - value.ndim) == common:
                return value
            (value,) = self.gather([value])
        if -common.dim > value.ndim or (value.shape[common.dim] == 1 and common.whole_size != 1):
            return value
        return self.take(value, common.at_dim(value.ndim + common.dim))

    def gather(self, values: Any, contiguous: bool = False) -> Any:
        """Returns nested values with whole tensors for those that hold rows, in one exchange where that is
        possible, `contiguous` in memory if asked. Of tensors that repeat entries, only what they repeat is
        exchanged."""
        found = list({id(t): t for t in marked_tensors(values)}.values())
        if not found:
            return values
        repeats = [repeat_of(t) for t in found]
        sources = [t if r is None else r.source for t, r in zip(found, repeats, strict=True)]
        gathered = row_exchange.gather_rows(sources, self.group)
        whole = {
            id(t): g if r is None else r.rebuild(g) for t, r, g in zip(found, repeats, gathered, strict=True)
        }
        if contiguous:
            whole = {key: t.contiguous() for key, t in whole.items()}
        return tree_map(lambda t: whole.get(id(t), t) if isinstance(t, torch.Tensor) else t, values)

    def count_gathered(self, name: str) -> None:
        """Counts a function that gets gathered tensors."""
        self.gathered[name] += 1

    def gather_for(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs a function on gathered tensors: right for every function, but each rank does all its work.

        Views may depend on the order in memory, so gathered tensors are contiguous."""
        self.count_gathered(getattr(func, "__name__", str(func)))
        args, kwargs = self.gather((list(args), kwargs), contiguous=True)
        return func(*args, **kwargs)

    def run_opaque(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs code on this rank's rows as if they were all; results of as many rows are rows. A rank without
        rows runs it on one row of zeros, which does not count."""
        first = next(marked_tensors((args, kwargs)))
        mark = mark_of(first)
        assert mark is not None
        size, dim = self.local_size(mark), mark.dim

        def fill(t: Any) -> Any:
            if not isinstance(t, torch.Tensor) or (found := mark_of(t)) is None:
                return t
            if size:
                return t.view_as(t)
            return t.new_zeros([*t.shape[: found.dim], 1, *t.shape[found.dim + 1 :]])

        def restore(t: Any) -> Any:
            if not isinstance(t, torch.Tensor) or t.ndim <= dim or t.shape[dim] != max(1, size):
                return t
            return set_mark(t if size else t.narrow(dim, 0, 0), mark)

        _thread_state.mode, outer = None, active_row_mode()
        try:
            args, kwargs = tree_map(fill, (args, kwargs))
            return tree_map(restore, forward(*args, **kwargs))
        finally:
            _thread_state.mode = outer

    def local_size(self, mark: RowMark) -> int:
        """Returns the size along a marked dim on this rank."""
        return mark.local_size(self.group.index)

    @contextmanager
    def drawing(self, mark: RowMark, device: torch.device) -> Iterator[None]:
        """Makes random ops inside draw the numbers of this rank's rows."""
        with shard_coordinates.drawing_entries(mark.dim, mark.entries(self.group.index, device)):
            yield

    def run_section(
        self,
        forward: Callable[[Any, Tensors], tuple[Tensors, Tensors]],
        batch: Any,
        edges: Tensors,
    ) -> tuple[Tensors, Tensors]:
        """Runs a section's `forward(batch, edges)`; what enters and leaves it is whole."""
        entered = {name: row_exchange.enter_section(t, self.group) for name, t in edges.items()}
        with self:
            sends, terms = forward(batch, entered)
        return self._leave(sends), self._leave(terms)

    def _leave(self, tensors: Tensors) -> Tensors:
        return {name: row_exchange.leave_section(t, self.group) for name, t in tensors.items()}


def bind_active_mode(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `call`, entering the mode that is active now whenever it runs: recomputation runs in the
    backward."""
    mode = active_row_mode()
    if mode is None:
        return call

    def run(*args: Any, **kwargs: Any) -> Any:
        if active_row_mode() is mode:
            return call(*args, **kwargs)
        with mode:
            return call(*args, **kwargs)

    return run


def split_first_input(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the forward of a layer, so that it gets a rank's rows of its first tensor [samples, rows, width]
    or [rows, width] if that is whole. The latter are, in towers, the patches of several pictures: ranks get
    whole pictures, or frames of a video, if there are enough and an argument says where each ends. Under
    "frames", it gets a rank's entries of its first tensor [entries, rows, width] or [entries, ...] of four
    dims."""

    def run(*args: Any, **kwargs: Any) -> Any:
        mode = active_row_mode()
        if mode is None:
            return forward(*args, **kwargs)
        find = find_batched_state if mode.attention == "frames" else find_hidden_state
        place, first = find(args, kwargs)
        if first is None or mark_of(first) is not None:
            return forward(*args, **kwargs)
        own = mode.take_own_part(first, (*args, *kwargs.values()))
        if isinstance(place, str):
            return forward(*args, **kwargs | {place: own})
        return forward(*args[:place], own, *args[place + 1 :], **kwargs)

    return run


def find_hidden_state(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int | str, torch.Tensor | None]:
    """Returns the place of a layer's hidden states among its arguments, and the tensor: the first one
    [samples, rows, width], else the first one [rows, width]; None if there is none."""
    floats = _float_arguments(args, kwargs)
    found = [(p, t) for ndim in (3, 2) for p, t in floats if t.ndim == ndim]
    return found[0] if found else (0, None)


def find_batched_state(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int | str, torch.Tensor | None]:
    """Returns the place of a layer's hidden states of several entries among its arguments, and the tensor:
    the first one [entries, rows, width] or, of pictures, of four dims; None if there is none."""
    return next(((p, t) for p, t in _float_arguments(args, kwargs) if t.ndim in (3, 4)), (0, None))


def _float_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[int | str, torch.Tensor]]:
    given: Sequence[tuple[int | str, Any]] = (*enumerate(args), *kwargs.items())
    return [(p, t) for p, t in given if isinstance(t, torch.Tensor) and t.is_floating_point()]


def ends_of_pieces(hidden: torch.Tensor, arguments: Sequence[Any]) -> tuple[int, ...]:
    """Returns where pictures end in `hidden` [rows, width]: cumulative lengths among the arguments, from 0 to
    the number of rows (variable-length attention takes them so). () if there are none."""
    for lengths in arguments:
        if (
            hidden.ndim == 2
            and isinstance(lengths, torch.Tensor)
            and lengths.dtype in (torch.int32, torch.int64)
            and lengths.ndim == 1
            and len(lengths) > 1
        ):
            ends: list[int] = lengths.tolist()  # pyright: ignore[reportUnknownMemberType]
            if ends[0] == 0 and ends[-1] == len(hidden) and ends == sorted(ends):
                return tuple(end for end in sorted(set(ends)) if end)
    return ()


def run_on_own_rows(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the forward of a module without rules for its code that works on each row by itself (experts, a
    function with its own gradient): it runs on a rank's rows as if they were all."""

    def run(*args: Any, **kwargs: Any) -> Any:
        mode = active_row_mode()
        first = next(marked_tensors((args, kwargs)), None) if mode is not None else None
        if mode is None or first is None:
            return forward(*args, **kwargs)
        return mode.run_opaque(forward, args, kwargs)

    return run


def gather_inputs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the forward of a layer that works on whole sequences only."""

    def run(*args: Any, **kwargs: Any) -> Any:
        mode = active_row_mode()
        if mode is not None:
            args, kwargs = mode.apply_rule(_whole_arguments, (args, kwargs), {})
        return forward(*args, **kwargs)

    return run


def _whole_arguments(args: Any, kwargs: Any) -> Any:
    """The arguments of a call; as it has no rule, they are gathered."""
    return args, kwargs


def _apply_on_rows(cls: Any, *args: Any, **kwargs: Any) -> Any:
    mode = active_row_mode()
    marked = next(marked_tensors(args), None) if mode is not None else None
    if mode is None or marked is None:
        return _function_apply(cls, *args, **kwargs)
    if cls is torch_checkpoint.CheckpointFunction and any(getattr(t, "requires_grad", False) for t in args):
        function, preserve, *inputs = args  # the reentrant way; the other one has the same gradients
        return torch_checkpoint.checkpoint(
            function, *inputs, use_reentrant=False, preserve_rng_state=preserve
        )
    if not getattr(cls, "works_on_rows", False):
        _thread_state.mode = None
        try:
            mode.count_gathered(cls.__name__)
            args = mode.gather(args)
        finally:
            _thread_state.mode = mode
        return _function_apply(cls, *args, **kwargs)
    mark = mark_of(marked)
    with torch._C.DisableTorchFunction():  # sizes are those of the rows
        out = _function_apply(cls, *args, **kwargs)
    return out if mark is not None and mark.dim == getattr(cls, "divided_dim", None) else set_mark(out, mark)


def _recompute_in_mode(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Marks the inputs again when code runs again: hooks on saved tensors (offloading) give back others."""
    marks = [mark_of(value) for value in args]  # settings of the checkpoint first, then the inputs

    def run_again(*inputs: Any, **named: Any) -> Any:
        for value, mark in zip(inputs, marks[len(marks) - len(inputs) :], strict=True):
            if mark is not None:
                set_mark(value, mark)
        return function(*inputs, **named)

    return _checkpoint_generator(bind_active_mode(run_again if any(marks) else function), *args, **kwargs)


intercept_flex_attention(lambda: active_row_mode() is not None)
# Modules have the name `checkpoint` already, so what it calls is replaced.
_checkpoint_generator = torch_checkpoint._checkpoint_without_reentrant_generator  # pyright: ignore
torch_checkpoint._checkpoint_without_reentrant_generator = _recompute_in_mode  # pyright: ignore
_function_apply = torch.autograd.Function.apply.__func__  # pyright: ignore
torch.autograd.Function.apply = classmethod(_apply_on_rows)  # pyright: ignore
