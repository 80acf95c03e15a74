"""The effect of torch's functions on tensors that hold a rank's rows: one rule for each kind of function, by
its name.

A rule runs the function on rows and marks the results. What it cannot do on rows it does on gathered tensors,
so a missing rule costs time and memory, but is never wrong. Only what writes into rows cannot be done so: it
raises `RowsNotWritable`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from secc.runtime.context_parallel.row_attention import attention_rule
from secc.runtime.context_parallel.row_exchange import sum_over_ranks
from secc.runtime.context_parallel.row_flex_attention import flex_attention_rule
from secc.runtime.context_parallel.row_marks import (
    RowMark,
    Rows,
    mark_of,
    marked_tensors,
    note_repeat,
    set_mark,
)

if TYPE_CHECKING:
    from secc.runtime.context_parallel.row_mode import RowMode

Arguments = list[Any]
Named = dict[str, Any]
RowRule = Callable[["RowMode", Any, Arguments, Named], Any]


class RowsNotWritable(Exception):
    """Raised by code that writes into a tensor of rows in a way that has no rule."""


def function_name(func: Any) -> str:
    """Returns the name that rules are listed by."""
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.name.rpartition("::")[2]
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = f"{getattr(getattr(func, '__self__', None), '__name__', '')}.get"
    return name


def find_rule(func: Any) -> RowRule:
    """Returns the rule for a torch function."""
    if isinstance(func, torch._ops.OpOverload) and func._schema.name in _ATEN_RULES:
        return _ATEN_RULES[func._schema.name]
    name = function_name(func)
    if getattr(func, "__module__", "") == "secc.runtime.fusion.operators":
        return elementwise_rule if name in ("swiglu", "geglu", "rotate") else fused_norm_rule
    rule = FUNCTION_RULES.get(name)
    if rule is not None:
        return rule
    if name.endswith("_") and not name.startswith("__"):
        return refusing_rule
    return gathering_rule


def gathering_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """Functions without a rule."""
    if "out" in kwargs or _writes_if_asked(func, args, kwargs):
        return refusing_rule(mode, func, args, kwargs)
    return mode.gather_for(func, args, kwargs)


def _writes_if_asked(func: Any, args: Arguments, kwargs: Named) -> bool:
    """Whether a function of torch.nn.functional is called with `inplace`."""
    if not inspect.isfunction(func) or "inplace" not in (parameters := inspect.signature(func).parameters):
        return False
    return bool(_argument(args, kwargs, list(parameters).index("inplace"), "inplace", False))


def refusing_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """Functions that write into one of their arguments: right if that one is whole."""
    target = kwargs.get("out", args[0] if args else None)
    if next(marked_tensors(target), None) is not None:
        raise RowsNotWritable(f"{function_name(func)} writes into rows of a sequence")
    return mode.gather_for(func, args, kwargs)


def _require_mark(tensor: Any) -> RowMark:
    mark = mark_of(tensor)
    assert mark is not None
    return mark


def _mark_all(value: Any, mark: RowMark) -> Any:
    return tree_map(lambda t: set_mark(t, mark) if isinstance(t, torch.Tensor) else t, value)


def _argument(args: Arguments, kwargs: Named, place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


# -- sizes and properties


def shape_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    return torch.Size(mode.whole_shape(args[0]))


def size_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    whole, dim = torch.Size(mode.whole_shape(args[0])), _argument(args, kwargs, 1, "dim")
    return whole if dim is None else whole[dim]


def numel_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    return prod(mode.whole_shape(args[0]))


def len_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    return mode.whole_shape(args[0])[0]


def unchanged_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """Functions that do not depend on sizes, and those that make whole tensors of given sizes."""
    return func(*args, **kwargs)


# -- entry by entry


def elementwise_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """Functions that work entry by entry on operands that broadcast."""
    if "out" in kwargs:
        return refusing_rule(mode, func, args, kwargs)
    writes = _writes_first(function_name(func))
    operands = [t for t in [*args, *kwargs.values()] if isinstance(t, torch.Tensor)]
    if writes and mark_of(args[0]) is None:
        return mode.gather_for(func, args, kwargs)
    first = args[0] if writes else _widest_marked(operands)
    mark, ndim = _require_mark(first), max(t.ndim for t in operands)
    common = mark.at_dim(mark.dim - first.ndim)  # counted from the end, as in broadcasting
    if not all(_fits(mode, t, common) for t in operands):
        return mode.gather_for(func, args, kwargs)
    args, kwargs = (
        [mode.match_rows(t, common) for t in args],
        {k: mode.match_rows(t, common) for k, t in kwargs.items()},
    )
    return _mark_all(func(*args, **kwargs), mark.at_dim(ndim + common.dim))


def _writes_first(name: str) -> bool:
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__",)
    return name.endswith("_")


def _widest_marked(operands: Sequence[torch.Tensor]) -> torch.Tensor:
    return max((t for t in operands if mark_of(t) is not None), key=lambda t: t.ndim)


def _fits(mode: RowMode, tensor: torch.Tensor, common: RowMark) -> bool:
    """Whether a tensor's size is that of the rows of `common`, or broadcasts."""
    return -common.dim > tensor.ndim or mode.whole_shape(tensor)[common.dim] in (1, common.whole_size)


def first_argument_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """Functions of one tensor, entry by entry; another one only gives its dtype."""
    if mark_of(args[0]) is None:
        return func(*args, **kwargs)
    return _mark_all(func(*args, **kwargs), _require_mark(args[0]))


def complex_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """view_as_complex, number by number if the last dim, which has the two parts, is not that of the rows."""
    mark = mark_of(args[0])
    rule = gathering_rule if mark is not None and mark.dim == args[0].ndim - 1 else first_argument_rule
    return rule(mode, func, args, kwargs)


def prelu_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """prelu, entry by entry if it has one weight and not one for each entry of dim 1."""
    weight = _argument(args, kwargs, 1, "weight")
    rule = elementwise_rule if weight.numel() == 1 else gathering_rule
    return rule(mode, func, args, kwargs)


def dropout_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """Dropout draws the random numbers of the rank's rows."""
    mark = _require_mark(args[0])
    p, training = _argument(args, kwargs, 1, "p", 0.5), _argument(args, kwargs, 2, "training", True)
    with mode.drawing(mark, args[0].device) if p and training else nullcontext():
        return set_mark(func(*args, **kwargs), mark)


def setitem_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """x[index] = value, where the index does not touch the rows or is a mask over them."""
    target, index, value = args
    if mark_of(target) is None:
        return mode.gather_for(func, args, kwargs)
    mark = _require_mark(target)
    if isinstance(index, tuple) and len(index) == 2 and index[1] == slice(None):
        index = index[0]
    if (
        isinstance(index, torch.Tensor)
        and index.dtype == torch.bool
        and mark.dim < index.ndim
        and mark.is_plain
    ):
        (index, value) = mode.gather([index, value])
        own = mode.take(index, mark)
        if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] != 1:
            numbers = torch.zeros(index.shape, dtype=torch.int64, device=index.device)
            numbers[index] = torch.arange(value.shape[0], device=index.device)
            value = value[set_mark(mode.take(numbers, mark), None)[set_mark(own, None)]]
        target[set_mark(own, None)] = value
        return None
    raise RowsNotWritable("an assignment writes into rows of a sequence")


# -- the same entries in another shape


def view_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    sizes: Sequence[Any] = args[1:] or [kwargs[k] for k in ("size", "shape", "dtype") if k in kwargs]
    if isinstance(sizes[0], torch.dtype):
        return mode.gather_for(func, args, kwargs)
    wanted = [int(s) for s in (sizes[0] if isinstance(sizes[0], tuple | list | torch.Size) else sizes)]
    return _view(mode, args[0], wanted)


def view_as_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    wanted = mode.whole_shape(args[1])
    return _view(mode, args[0], wanted) if mark_of(args[0]) is not None else args[0].reshape(wanted)


def flatten_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    whole = mode.whole_shape(args[0])
    start = _argument(args, kwargs, 1, "start_dim", 0) % len(whole)
    end = _argument(args, kwargs, 2, "end_dim", -1) % len(whole)
    return _view(mode, args[0], [*whole[:start], prod(whole[start : end + 1]), *whole[end + 1 :]])


def unflatten_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    whole = mode.whole_shape(args[0])
    dim, sizes = _argument(args, kwargs, 1, "dim") % len(whole), list(_argument(args, kwargs, 2, "sizes"))
    if -1 in sizes:
        sizes[sizes.index(-1)] = whole[dim] // -prod(sizes)
    return _view(mode, args[0], [*whole[:dim], *sizes, *whole[dim + 1 :]])


def _view(mode: RowMode, tensor: torch.Tensor, wanted: list[int]) -> torch.Tensor:
    """Views a rank's rows as its rows of the whole tensor viewed as `wanted`."""
    mark, whole = _require_mark(tensor), mode.whole_shape(tensor)
    if -1 in wanted:
        others = -prod(wanted)
        wanted = [prod(whole) // others if size == -1 and others else size for size in wanted]
    found = _find_rows(whole, wanted, mark)
    if found is None or prod(wanted) != prod(whole):
        return mode.gather([tensor])[0].reshape(wanted)
    own = [*wanted]
    own[found.dim] = mode.local_size(found)
    out = set_mark(tensor.reshape(own), found)
    return note_repeat(out, tensor, lambda t: t.reshape(wanted), in_order=True)


def _find_rows(whole: Sequence[int], wanted: Sequence[int], mark: RowMark) -> RowMark | None:
    """Returns where the rows are in another view of a tensor; None if no dim holds whole rows. Adjacent rows
    may become one (the patches that a vision tower merges), if every rank has all of each."""
    if list(whole[: mark.dim + 1]) == list(wanted[: mark.dim + 1]):
        return mark
    merged = whole[mark.dim] // max(1, wanted[mark.dim]) if len(wanted) > mark.dim + 1 else 0
    if (
        merged > 1
        and mark.is_plain
        and list(whole[: mark.dim]) == list(wanted[: mark.dim])
        and whole[mark.dim] == merged * wanted[mark.dim]
        and (rows := mark.rows.merge_adjacent_rows(merged)) is not None
    ):
        return replace(mark, rows=rows)
    before, size = prod(whole[: mark.dim]) * mark.outer, mark.rows.size
    fits = list[RowMark]()
    for dim, length in enumerate(wanted):
        ahead = prod(wanted[:dim])
        outer = before // ahead if ahead and before % ahead == 0 else 0
        if outer and length and length % (outer * size) == 0:
            fits.append(replace(mark, dim=dim, outer=outer, inner=length // (outer * size)))
    return min(fits, key=lambda m: (m.outer > 1, m.inner > 1), default=None)


def permute_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """Functions that only move dims, found by applying them to a meta tensor of distinct sizes."""
    mark = _require_mark(args[0])
    moved = func(torch.empty([d + 2 for d in range(args[0].ndim)], device="meta"), *args[1:], **kwargs)
    out = set_mark(func(*args, **kwargs), mark.at_dim(list(moved.shape).index(mark.dim + 2)))
    return note_repeat(out, args[0], lambda t: func(t, *args[1:], **kwargs))


def squeeze_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    mark, whole = _require_mark(args[0]), mode.whole_shape(args[0])
    given = _argument(args, kwargs, 1, "dim")
    dims = range(len(whole)) if given is None else [given] if isinstance(given, int) else list(given)
    gone = sorted({d % len(whole) for d in dims if whole[d] == 1})
    if mark.dim in gone:
        return mode.gather_for(func, args, kwargs)
    out = args[0]
    for d in reversed(gone):
        out = out.squeeze(d)
    return set_mark(out, mark.at_dim(mark.dim - sum(d < mark.dim for d in gone)))


def expand_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    mark, sizes = _require_mark(args[0]), args[1:] or [kwargs["size"]]
    sizes = list(sizes[0] if isinstance(sizes[0], tuple | list | torch.Size) else sizes)
    dim = mark.dim + len(sizes) - args[0].ndim
    if sizes[dim] not in (-1, mark.whole_size):
        return mode.gather_for(func, args, kwargs)
    sizes[dim] = -1
    out = set_mark(args[0].expand(sizes), mark.at_dim(dim))
    repeats = prod(mode.whole_shape(out)) > prod(mode.whole_shape(args[0]))  # a rank may have no rows
    return note_repeat(out, args[0], lambda t: t.expand(sizes), starts=repeats, in_order=True)


def expand_as_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    wanted, mark = mode.whole_shape(args[1]), mark_of(args[1])
    if mark_of(args[0]) is not None:
        return expand_rule(mode, func, [args[0], wanted], {})
    assert mark is not None
    matched = mode.match_rows(args[0], mark.at_dim(mark.dim - args[1].ndim))
    if mark_of(matched) is None:
        return set_mark(set_mark(matched, None).expand(args[1].shape), mark)
    return expand_rule(mode, func, [matched, wanted], {})


# -- slices, and tensors put together


def getitem_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    tensor, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    mark = mark_of(tensor)
    plain = all(i is None or i is Ellipsis or isinstance(i, slice | int) for i in index) and not any(
        isinstance(i, bool) for i in index
    )
    if mark is None or not plain:
        return mode.gather_for(func, args, kwargs)
    taken = sum(i is not None and i is not Ellipsis for i in index)
    where = next((k for k, i in enumerate(index) if i is Ellipsis), len(index))
    index = (*index[:where], *[slice(None)] * (tensor.ndim - taken), *index[where + 1 :])
    place = [k for k, i in enumerate(index) if i is not None][mark.dim]
    own = index[place]
    if not isinstance(own, slice):
        return mode.gather_for(func, args, kwargs)
    start, stop, step = own.indices(mark.whole_size)
    piece = _narrow(mode, tensor, mark.dim, start, max(start, stop)) if step == 1 else None
    if piece is None:
        return mode.gather_for(func, args, kwargs)
    before = sum(not isinstance(i, int) for i in index[:place])
    local = (*index[:place], slice(None), *index[place + 1 :])
    return set_mark(piece[local], _require_mark(piece).at_dim(before))


def _narrow(mode: RowMode, tensor: torch.Tensor, dim: int, start: int, stop: int) -> torch.Tensor | None:
    """Returns entries `start` to `stop` of a whole dim; None if these are no rows."""
    mark = _require_mark(tensor)
    if dim != mark.dim or (start == 0 and stop == mark.whole_size):
        return tensor if dim == mark.dim else set_mark(tensor.narrow(dim, start, stop - start), mark)
    if not mark.is_plain:
        return None
    held = sorted(row for run in mark.rows.runs[mode.group.index] for row in run_bounds(run, start, stop))
    first = sum(max(0, min(b, start) - a) for a, b in mark.rows.runs[mode.group.index])
    piece = tensor.narrow(dim, first, len(held))
    return set_mark(piece, replace(mark, rows=mark.rows.window(start, stop)))


def run_bounds(run: tuple[int, int], start: int, stop: int) -> range:
    """Returns the rows of a run between `start` and `stop`."""
    return range(max(run[0], start), min(run[1], stop))


def narrow_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    dim, start, count = (_argument(args, kwargs, i, k) for i, k in ((1, "dim"), (2, "start"), (3, "length")))
    piece = None
    if isinstance(start, int):
        piece = _narrow(mode, args[0], dim % args[0].ndim, start, start + count)
    return mode.gather_for(func, args, kwargs) if piece is None else piece


def slice_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """aten.slice(x, dim, start, end, step)."""
    dim, start, stop, step = (
        _argument(args, kwargs, i, k, d)
        for i, k, d in ((1, "dim", 0), (2, "start", None), (3, "end", None), (4, "step", 1))
    )
    dim %= args[0].ndim
    first, last, _ = slice(start, stop).indices(mode.whole_shape(args[0])[dim])
    piece = _narrow(mode, args[0], dim, first, max(first, last)) if step == 1 else None
    return mode.gather_for(func, args, kwargs) if piece is None else piece


def select_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    mark, dim = _require_mark(args[0]), _argument(args, kwargs, 1, "dim") % args[0].ndim
    if dim == mark.dim:
        return mode.gather_for(func, args, kwargs)
    return set_mark(func(*args, **kwargs), mark.at_dim(mark.dim - (dim < mark.dim)))


def unbind_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    mark, dim = _require_mark(args[0]), _argument(args, kwargs, 1, "dim", 0) % args[0].ndim
    if dim == mark.dim:
        return mode.gather_for(func, args, kwargs)
    return _mark_all(tuple(args[0].unbind(dim)), mark.at_dim(mark.dim - (dim < mark.dim)))


def iter_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    return iter(unbind_rule(mode, func, [args[0], 0], {}))


def split_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """split, chunk and the like, along another dim or along the rows."""
    mark, dim = _require_mark(args[0]), _argument(args, kwargs, 2, "dim", 0) % args[0].ndim
    if dim != mark.dim:
        return _mark_all(func(*args, **kwargs), mark)
    whole = func(torch.empty(mode.whole_shape(args[0]), device="meta"), *args[1:], **kwargs)
    ends = list(accumulate(piece.shape[dim] for piece in whole))
    pieces = [_narrow(mode, args[0], dim, a, b) for a, b in zip([0, *ends], ends, strict=False)]
    return mode.gather_for(func, args, kwargs) if any(p is None for p in pieces) else tuple(pieces)


def cat_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    tensors = list(args[0] if args else kwargs["tensors"])
    tensors = [t for t in tensors if t.numel() or mark_of(t) is not None] or tensors  # an empty cache of keys
    first = next(marked_tensors(tensors))
    if len(tensors) == 1:
        return first
    mark, dim = _require_mark(first), _argument(args, kwargs, 1, "dim", 0) % first.ndim
    if any(t.ndim != first.ndim for t in tensors):
        return mode.gather_for(func, args, kwargs)
    if dim == mark.dim:
        marks = [m for t in tensors if (m := mark_of(t)) is not None and m.is_plain and m.dim == dim]
        if len(marks) < len(tensors):
            return mode.gather_for(func, args, kwargs)
        rows = reduce(Rows.join, (m.rows for m in marks))  # samples side by side: each rank keeps its rows
        return set_mark(torch.cat(tensors, dim), replace(mark, rows=rows))
    own = [_match_exactly(mode, t, mark) for t in tensors]
    return set_mark(torch.cat(own, dim), mark)


def stack_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    tensors = list(args[0] if args else kwargs["tensors"])
    mark = _require_mark(next(marked_tensors(tensors)))
    dim = _argument(args, kwargs, 1, "dim", 0) % (tensors[0].ndim + 1)
    own = [_match_exactly(mode, t, mark) for t in tensors]
    return set_mark(torch.stack(own, dim), mark.at_dim(mark.dim + (dim <= mark.dim)))


def _match_exactly(mode: RowMode, tensor: torch.Tensor, mark: RowMark) -> torch.Tensor:
    """Returns the rows of a tensor of as many dims as `mark` belongs to."""
    found = mark_of(tensor)
    if found == mark:
        return tensor
    (whole,) = mode.gather([tensor])
    return mode.take(whole, mark)


def index_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """gather and take_along_dim: an index of the same dims, along another dim than the rows."""
    tensor, dim, index = args[0], _argument(args, kwargs, 1, "dim"), _argument(args, kwargs, 2, "index")
    if not isinstance(dim, int):  # take_along_dim(x, index, dim)
        dim, index = index, dim
    mark = mark_of(tensor)
    whole = mode.whole_shape(index) if isinstance(index, torch.Tensor) else []
    if mark is None or not isinstance(dim, int) or len(whole) != tensor.ndim or dim % tensor.ndim == mark.dim:
        return mode.gather_for(func, args, kwargs)
    if whole[mark.dim] != mark.whole_size:
        return mode.gather_for(func, args, kwargs)
    own = _match_exactly(mode, index, mark)
    if function_name(func) == "take_along_dim":  # counts negative indices from the end
        return set_mark(torch.take_along_dim(tensor, own, dim), mark)
    return set_mark(torch.gather(tensor, dim, own), mark)


def repeat_interleave_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    mark = mark_of(args[0])
    times, dim = _argument(args, kwargs, 1, "repeats"), _argument(args, kwargs, 2, "dim")
    if (
        mark is None
        or not isinstance(times, int)
        or not isinstance(dim, int)
        or dim % args[0].ndim == mark.dim
    ):
        return mode.gather_for(func, args, kwargs)
    out = set_mark(func(*args, **kwargs), mark)
    repeat: Callable[[torch.Tensor], torch.Tensor] = lambda t: func(t, *args[1:], **kwargs)  # noqa: E731
    return note_repeat(out, args[0], repeat, starts=times > 1, in_order=True)


# -- products


def linear_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    mark = mark_of(args[0])
    if (
        mark is None
        or mark.dim == args[0].ndim - 1
        or next(marked_tensors((args[1:], kwargs)), None) is not None
    ):
        return mode.gather_for(func, args, kwargs)
    return set_mark(func(*args, **kwargs), mark)


def addmm_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """addmm(bias, x, weight)."""
    mark = mark_of(args[1])
    if (
        mark is None
        or mark.dim
        or mark_of(args[0]) is not None
        or mark_of(args[2]) is not None
        or args[0].ndim > 1
    ):
        return mode.gather_for(func, args, kwargs)
    return set_mark(func(*args, **kwargs), mark)


def matmul_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """Products of matrices: rows of the first operand stay rows, as queries of attention do; rows that are
    summed over, or are columns of the result, are gathered, as keys and values are."""
    a, b = args
    if function_name(func) == "__rmatmul__":
        a, b = b, a
    if min(a.ndim, b.ndim) < 2:
        return mode.gather_for(func, args, kwargs)
    left, right = (None if (m := mark_of(t)) is None else m.at_dim(m.dim - t.ndim) for t in (a, b))
    common = next((m for m in (left, right) if m is not None and m.dim < -2), None)
    if common is not None:
        a, b = mode.match_rows(a, common), mode.match_rows(b, common)
    elif left is not None and left.dim == -2:
        common, (b,) = left, mode.gather([b])
    elif right is not None and right.dim == -1:
        common, (a,) = right, mode.gather([a])
    else:
        return mode.gather_for(func, args, kwargs)
    out = torch.matmul(a, b)
    return set_mark(out, common.at_dim(out.ndim + common.dim))


def baddbmm_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """baddbmm(bias, a, b): the bias of attention scores and their product."""
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    a, b = _argument(args, kwargs, 1, "batch1"), _argument(args, kwargs, 2, "batch2")
    with mode:
        scores = torch.bmm(a, b) * alpha
        return scores if beta == 0 else scores + args[0] * beta


def einsum_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    equation, operands = args[0], args[1:]
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return mode.gather_for(func, args, kwargs)
    inputs, out = equation.replace(" ", "").split("->")
    letters = inputs.split(",")
    marked = [
        (names[m.dim], m) for names, t in zip(letters, operands, strict=True) if (m := mark_of(t)) is not None
    ]
    kept = next(((letter, m) for letter, m in marked if letter in out), None)
    if kept is None:
        return mode.gather_for(func, args, kwargs)
    letter, mark = kept
    own = list[torch.Tensor]()
    for names, t in zip(letters, operands, strict=True):
        if letter in names:
            own.append(_match_exactly(mode, t, mark.at_dim(names.index(letter))))
        else:
            own += mode.gather([t])
    return set_mark(torch.einsum(equation, own), mark.at_dim(out.index(letter)))


# -- along dims


def along_dim_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """Functions of one tensor that mix or reduce along dims."""
    mark, tensor = mark_of(args[0]), args[0]
    dims = _given_dims(function_name(func), args, kwargs)
    others = [t for t in (*args[1:], *kwargs.values()) if isinstance(t, torch.Tensor)]
    if mark is None or others or not dims or mark.dim in [d % tensor.ndim for d in dims]:
        return gathering_rule(mode, func, args, kwargs)
    gone = sum(d % tensor.ndim < mark.dim for d in dims)

    def mark_result(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        return set_mark(t, mark if t.ndim == tensor.ndim else mark.at_dim(mark.dim - gone))

    return tree_map(mark_result, func(*args, **kwargs))


def _given_dims(name: str, args: Arguments, kwargs: Named) -> list[int] | None:
    """Returns the dims that a function along dims is called with; None where they are left out, as they then
    may be all, or the last."""
    place = _PLACES_OF_DIMS.get(name, 1)
    given = next((kwargs[n] for n in ("dim", "axis", "dims") if n in kwargs), None)
    if given is None and len(args) > place:
        given = args[place:] if name == "flip" and isinstance(args[place], int) else args[place]
    if isinstance(given, int) and not isinstance(given, bool):  # std(True): unbiased
        return [given]
    return list(given) if isinstance(given, tuple | list) else None


def sum_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """sum, over ranks too where it runs along the rows."""
    mark, tensor = _require_mark(args[0]), args[0]
    dims = _given_dims("sum", args, kwargs)
    if dims and mark.dim not in [d % tensor.ndim for d in dims]:
        return along_dim_rule(mode, func, args, kwargs)
    if tensor.is_floating_point() or tensor.dtype == torch.int64:
        return sum_over_ranks(func(*args, **kwargs), mode.group)
    return mode.gather_for(func, args, kwargs)


def mean_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """mean, over ranks too where it runs along the rows."""
    mark, tensor = _require_mark(args[0]), args[0]
    dims = _given_dims("mean", args, kwargs) or list(range(tensor.ndim))
    if mark.dim not in [d % tensor.ndim for d in dims]:
        return along_dim_rule(mode, func, args, kwargs)
    count = prod(mode.whole_shape(tensor)[d] for d in dims)
    keeps = _argument(args, kwargs, 2, "keepdim", False)
    total = torch.sum(tensor, dims, keeps, dtype=kwargs.get("dtype"))
    return sum_over_ranks(total, mode.group) / count


def normalization_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """layer_norm and rms_norm, which mix the last dims."""
    mark, shape = mark_of(args[0]), _argument(args, kwargs, 1, "normalized_shape")
    if mark is None or mark.dim >= args[0].ndim - len(shape):
        return mode.gather_for(func, args, kwargs)
    return set_mark(func(*args, **kwargs), mark)


def batched_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """Functions that compute each entry of a batch, dim 0 of their first tensor, by itself."""
    mark, fewest = mark_of(args[0]) if args else None, BATCHED_FUNCTIONS[function_name(func)]
    others = next(marked_tensors((args[1:], kwargs)), None)
    if mark is None or mark.dim or args[0].ndim < fewest or others is not None:
        return gathering_rule(mode, func, args, kwargs)
    return set_mark(func(*args, **kwargs), mark)


def pad_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """pad, of dims behind the rows."""
    mark, pad = mark_of(args[0]) if args else None, _argument(args, kwargs, 1, "pad")
    if mark is None or mark.dim >= args[0].ndim - len(pad) // 2:
        return gathering_rule(mode, func, args, kwargs)
    return set_mark(func(*args, **kwargs), mark)


def multi_head_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """torch.nn.MultiheadAttention with queries, keys and values [rows, entries, width] of the same entries on
    each rank, and without masks or dropout."""
    given = dict(zip(inspect.signature(func).parameters, args, strict=False)) | kwargs
    attended = {name: given[name] for name in ("query", "key", "value")}
    mark = next((m for t in attended.values() if (m := mark_of(t)) is not None), None)
    masks = any(given.get(name) is not None for name in ("key_padding_mask", "attn_mask"))
    drops = given.get("training", True) and given["dropout_p"]
    alike = mark is not None and all(
        t.ndim == 3 and mode.whole_shape(t)[1] == mark.whole_size for t in attended.values()
    )
    if mark is None or mark.dim != 1 or not alike or masks or drops:
        return mode.gather_for(func, args, kwargs)
    own = {name: mode.match_rows(t, mark.at_dim(-2)) for name, t in attended.items()}
    out, weights = func(**given | own)
    return set_mark(out, mark), None if weights is None else set_mark(weights, mark.at_dim(0))


def fused_norm_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """Fused norms over the last dim (`secc.runtime.fusion.operators`)."""
    mark = mark_of(args[0])
    if mark is None or mark.dim == args[0].ndim - 1:
        return mode.gather_for(func, args, kwargs)
    return set_mark(func(*args, **kwargs), mark)


def embedding_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    ids, weight = args[0], _argument(args, kwargs, 1, "weight")
    if mark_of(ids) is None or mark_of(weight) is not None:
        return mode.gather_for(func, args, kwargs)
    return set_mark(func(*args, **kwargs), _require_mark(ids))


def aten_embedding_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    weight, ids = args[0], args[1]
    if mark_of(ids) is None or mark_of(weight) is not None:
        return mode.gather_for(func, args, kwargs)
    return set_mark(func(*args, **kwargs), _require_mark(ids))


def cross_entropy_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """cross_entropy of logits [tokens, classes] or [samples, classes, tokens, ...] and class numbers: a
    summand of its sum on each rank."""
    mark, logits = mark_of(args[0]), args[0]
    names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    if isinstance(func, torch._ops.OpOverload):
        names = ("weight", "reduction", "ignore_index", "label_smoothing")
    given = kwargs | dict(zip(names, args[2:], strict=False))
    target = _argument(args, kwargs, 1, "target")
    kind = given.get("reduction", "mean")
    kind = {0: "none", 1: "mean", 2: "sum"}.get(kind, kind)
    weight, has_old_names = (
        given.get("weight"),
        any(given.get(k) is not None for k in ("size_average", "reduce")),
    )
    plain = target.ndim == logits.ndim - 1 >= 1 and not has_old_names and kind in ("none", "sum", "mean")
    if mark is None or mark.dim == 1 or not plain or (weight is not None and kind == "mean"):
        return mode.gather_for(func, args, kwargs)
    mark = _mark_of_targets(mark)
    own, ignored = _match_exactly(mode, target, mark), given.get("ignore_index", -100)
    losses = F.cross_entropy(
        logits,
        own,
        weight,
        ignore_index=ignored,
        reduction="none" if kind == "none" else "sum",
        label_smoothing=given.get("label_smoothing", 0.0),
    )
    if kind == "none":
        return set_mark(losses, mark)
    total = sum_over_ranks(losses, mode.group)
    if kind == "sum":
        return total
    return total / sum_over_ranks((own != ignored).sum(), mode.group)


def _mark_of_targets(mark: RowMark) -> RowMark:
    """Returns the mark of class numbers, which lack dim 1 of their logits."""
    return mark if mark.dim == 0 else mark.at_dim(mark.dim - 1)


def aten_nll_loss_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """aten.nll_loss_forward(log_probabilities [tokens, classes], target, weight, reduction, ignored) and
    aten.nll_loss2d_forward of [samples, classes, height, width]: what captured code has for a cross entropy.
    Results are the loss and the total weight of targets."""
    log_probabilities, target, weight, reduction, ignored = args
    mark, mean = mark_of(log_probabilities), 1
    if mark is None or mark.dim == 1 or log_probabilities.ndim < 2 or mark_of(weight) is not None:
        return mode.gather_for(func, args, kwargs)
    mark, log_probabilities = _mark_of_targets(mark), log_probabilities.contiguous()  # as nll_loss2d requires
    own = _match_exactly(mode, target, mark)
    if reduction == 0:
        losses, total = func(log_probabilities, own, weight, 0, ignored)
        return set_mark(losses, mark), total
    loss, total = func(log_probabilities, own, weight, 2, ignored)
    loss, total = sum_over_ranks(loss, mode.group), sum_over_ranks(total, mode.group)
    return (loss / total if reduction == mean else loss), total


def pointwise_loss_rule(mode: RowMode, func: Any, args: Arguments, kwargs: Named) -> Any:
    """Losses of an input and a target of one shape, entry by entry (mse_loss, kl_div): a summand of the sum
    on each rank."""
    is_op = isinstance(func, torch._ops.OpOverload)
    names = [a.name for a in func._schema.arguments] if is_op else list(inspect.signature(func).parameters)
    given = dict(zip(names, args, strict=False)) | kwargs
    asked: Any = given.get("reduction", "mean")
    reduction = {0: "none", 1: "mean", 2: "sum"}.get(asked, str(asked))
    tensors = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
    first = _widest_marked(list(tensors.values()))
    mark, whole = _require_mark(first), mode.whole_shape(first)
    common = mark.at_dim(mark.dim - first.ndim)
    has_old_names = any(given.get(name) is not None for name in ("size_average", "reduce"))
    fits = all(_fits(mode, t, common) and t.ndim <= first.ndim for t in tensors.values())
    alike = all(mode.whole_shape(tensors[n]) == whole for n in names[:2])
    divisors = {"none": 1, "sum": 1, "mean": prod(whole), "batchmean": whole[0]}
    if has_old_names or not fits or not alike or reduction not in divisors:
        return mode.gather_for(func, args, kwargs)
    given |= {name: mode.match_rows(t, common) for name, t in tensors.items()}
    if reduction == "none":
        return set_mark(func(**given), mark)
    total = sum_over_ranks(func(**given | {"reduction": 2 if is_op else "sum"}), mode.group)
    return total / divisors[reduction]


# fmt: off
UNCHANGED_FUNCTIONS = (
    "dim", "ndimension", "ndim.get", "dtype.get", "device.get", "requires_grad.get", "is_contiguous",
    "is_floating_point", "element_size", "is_cuda.get", "layout.get", "grad_fn.get", "is_complex",
    "stride", "get_device", "is_meta.get", "is_leaf.get", "_version.get", "is_sparse.get",
    "is_nested.get", "register_hook", "requires_grad_", "__hash__", "type", "is_quantized.get",
    "is_mps.get", "is_xla.get", "is_cpu.get", "itemsize.get", "retain_grad", "is_inference",
    "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "__format__", "__repr__",
)
ELEMENTWISE_FUNCTIONS = (
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide",
    "remainder", "fmod", "pow", "neg", "negative", "abs", "absolute", "sign", "exp", "exp2", "expm1", "log",
    "log2", "log10", "log1p", "sqrt", "rsqrt", "square", "reciprocal", "sin", "cos", "tan", "tanh", "sinh",
    "cosh", "asin", "acos", "atan", "atan2", "sigmoid", "erf", "erfc", "floor", "ceil", "round", "trunc",
    "frac", "clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum", "where", "masked_fill", "lerp",
    "addcmul", "addcdiv", "eq", "ne", "lt", "le", "gt", "ge", "not_equal", "less", "greater", "less_equal",
    "greater_equal", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or",
    "bitwise_not", "bitwise_xor", "isnan", "isinf", "isfinite", "isclose", "nan_to_num", "rsub",
    "logaddexp", "hypot", "relu", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu",
    "softplus", "softsign", "hardswish", "hardsigmoid", "hardtanh", "logsigmoid", "tanhshrink",
    "threshold", "sinc", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__",
    "__rtruediv__", "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__pow__", "__rpow__",
    "__neg__", "__pos__", "__abs__", "__invert__", "__and__", "__rand__", "__or__", "__ror__", "__xor__",
    "__rxor__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__iadd__", "__isub__",
    "__imul__", "__itruediv__", "__iand__", "__ior__", "add_", "sub_", "mul_", "div_", "masked_fill_",
    "neg_", "clamp_", "exp_", "relu_", "silu_", "sigmoid_", "tanh_", "sqrt_", "pow_", "zero_", "fill_",
    "copy_", "xlogy",
)
FIRST_ARGUMENT_FUNCTIONS = (
    "to", "float", "double", "half", "bfloat16", "int", "long", "bool", "type_as", "contiguous", "clone",
    "detach", "cpu", "cuda", "zeros_like", "ones_like", "empty_like", "full_like", "data.get", "real.get",
    "imag.get", "alias", "_to_copy", "lift_fresh", "requires_grad", "view_as_real",
)
DIM_MOVING_FUNCTIONS = (
    "transpose", "permute", "movedim", "swapaxes", "swapdims", "moveaxis", "t", "T.get", "mT.get", "adjoint",
    "unsqueeze",
)
ALONG_DIM_FUNCTIONS = (
    "softmax", "log_softmax", "_softmax", "_log_softmax", "amax", "amin", "max", "min", "var", "std", "norm",
    "prod", "cumsum", "cumprod", "argmax", "argmin", "topk", "sort", "argsort", "logsumexp", "flip", "roll",
    "normalize", "all", "any", "median", "glu", "softmin", "diff", "vector_norm", "count_nonzero",
)
POINTWISE_LOSS_FUNCTIONS = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div", "soft_margin_loss", "poisson_nll_loss",
)
BATCHED_FUNCTIONS = {  # with the fewest dims that a tensor with a batch has
    **{f"{name}{n}d": n + 2 for n in (1, 2, 3) for name in ("conv", "conv_transpose", "avg_pool")},
    **{f"adaptive_avg_pool{n}d": n + 2 for n in (1, 2, 3)},
    "group_norm": 2, "interpolate": 3, "pixel_shuffle": 4, "pixel_unshuffle": 4,
}
_PLACES_OF_DIMS: dict[str, int] = {  # others: 1
    name: 2 for name in ("topk", "norm", "vector_norm", "normalize", "diff", "roll")
}
DROPOUT_FUNCTIONS = ("dropout", "alpha_dropout", "feature_dropout", "dropout1d")
# fmt: on
FUNCTION_RULES: dict[str, RowRule] = {
    "shape.get": shape_rule,
    "size": size_rule,
    "numel": numel_rule,
    "nelement": numel_rule,
    "__len__": len_rule,
    **dict.fromkeys(UNCHANGED_FUNCTIONS, unchanged_rule),
    **dict.fromkeys(ELEMENTWISE_FUNCTIONS, elementwise_rule),
    **dict.fromkeys(FIRST_ARGUMENT_FUNCTIONS, first_argument_rule),
    "prelu": prelu_rule,
    **dict.fromkeys(DROPOUT_FUNCTIONS, dropout_rule),
    "__setitem__": setitem_rule,
    "view": view_rule,
    "reshape": view_rule,
    "_unsafe_view": view_rule,
    "view_as": view_as_rule,
    "reshape_as": view_as_rule,
    "flatten": flatten_rule,
    "unflatten": unflatten_rule,
    **dict.fromkeys(DIM_MOVING_FUNCTIONS, permute_rule),
    "view_as_complex": complex_rule,
    "squeeze": squeeze_rule,
    "expand": expand_rule,
    "expand_as": expand_as_rule,
    "__getitem__": getitem_rule,
    "narrow": narrow_rule,
    "slice": slice_rule,
    "select": select_rule,
    "unbind": unbind_rule,
    "__iter__": iter_rule,
    **dict.fromkeys(("split", "chunk", "split_with_sizes"), split_rule),
    **dict.fromkeys(("cat", "concat", "concatenate"), cat_rule),
    "stack": stack_rule,
    **dict.fromkeys(("gather", "take_along_dim"), index_rule),
    "repeat_interleave": repeat_interleave_rule,
    "linear": linear_rule,
    "addmm": addmm_rule,
    **dict.fromkeys(("matmul", "__matmul__", "__rmatmul__", "bmm", "mm"), matmul_rule),
    "baddbmm": baddbmm_rule,
    "einsum": einsum_rule,
    "scaled_dot_product_attention": attention_rule,
    "attend_flexibly": flex_attention_rule,
    **dict.fromkeys(ALONG_DIM_FUNCTIONS, along_dim_rule),
    "sum": sum_rule,
    "mean": mean_rule,
    **dict.fromkeys(("layer_norm", "rms_norm"), normalization_rule),
    **dict.fromkeys(BATCHED_FUNCTIONS, batched_rule),
    "pad": pad_rule,
    "multi_head_attention_forward": multi_head_rule,
    "embedding": embedding_rule,
    **dict.fromkeys(("cross_entropy", "cross_entropy_loss"), cross_entropy_rule),
    **dict.fromkeys(POINTWISE_LOSS_FUNCTIONS, pointwise_loss_rule),
}
_ATEN_RULES: dict[str, RowRule] = {
    "aten::embedding": aten_embedding_rule,
    "aten::slice": slice_rule,
    "aten::nll_loss_forward": aten_nll_loss_rule,
    "aten::nll_loss2d_forward": aten_nll_loss_rule,
}
