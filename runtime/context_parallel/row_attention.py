"""`scaled_dot_product_attention` on the rows of several ranks, in one of two ways.

*Gather*: a rank's query rows attend to the keys and values of all ranks, which are gathered in one exchange
for each call. A mask gives up the rows of the queries. Causal attention becomes one call for each run of
adjacent queries, over the keys up to its end: the lower right corner of the triangle. On GPUs there are
fused kernels for that. On CPUs torch would write a mask of queries by keys and keep it for the backward;
with queries in reverse order, its entries depend on the sum of row and column alone, so it is an
overlapping view of one row.

*Ulysses* (Jacobs et al., "DeepSpeed Ulysses", 2023): ranks exchange rows for heads, so that each has all
rows of its share of the heads, and the results go back. Nothing but its share stays on a rank, and
attention runs as in plain PyTorch. The ranks must divide the heads of queries, keys and values; masks are
the same for all heads. Calls that do not fit gather.

Where ranks have whole entries of the batch (frames of a video), attention exchanges nothing in either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from secc.runtime.context_parallel import row_exchange
from secc.runtime.context_parallel.row_marks import RowMark, Run, mark_of, repeat_of, set_mark

if TYPE_CHECKING:
    from secc.runtime.context_parallel.row_mode import RowMode

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def attention_rule(mode: RowMode, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Runs attention on query rows [..., rows, width]."""
    given = kwargs | dict(zip(_NAMES, args, strict=False))
    query, key, value, mask = (given.get(name) for name in _NAMES[:4])
    assert (
        isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
    )
    mark, more = (
        mark_of(query),
        {k: v for k, v in given.items() if k in ("scale", "enable_gqa") and v is not None},
    )
    if mark is not None and mark.dim < query.ndim - 2:
        return _attend_in_entries(mode, mark, given, more)
    if mark is None or mark.dim != query.ndim - 2 or not mark.is_plain or query.ndim < key.ndim:
        return mode.gather_for(func, args, kwargs)
    if not given.get("dropout_p") and mark_of(mask) is None and _is_on_one_rank(mark, key, value):
        with torch._C.DisableTorchFunction():  # sizes are those of the rank: all rows, or none
            mask = None if not query.shape[-2] else mask
            more |= {"is_causal": bool(given.get("is_causal"))}
            return set_mark(F.scaled_dot_product_attention(query, key, value, mask, **more), mark)
    if mode.attention == "ulysses" and not given.get("dropout_p"):
        exchanged = _exchange_heads(mode, query, key, value, mask)
        if exchanged is not None:
            query, key, value, mask = exchanged
            more |= {"is_causal": bool(given.get("is_causal"))}
            repeated = {"enable_gqa": True} if key.shape[-3] < query.shape[-3] else {}
            heads = F.scaled_dot_product_attention(query, key, value, mask, **more | repeated)
            return set_mark(row_exchange.heads_to_rows(heads, mark.rows, mode.group), mark)
    key, value = mode.gather([key, value])
    own, dropout, is_causal = mark.at_dim(-2), given.get("dropout_p") or 0.0, bool(given.get("is_causal"))
    if isinstance(mask, torch.Tensor):
        mask = _mask_of_rows(mode, mask, own)
    elif is_causal and (dropout or key.shape[-2] < mark.rows.size):
        rows = mark.entries(mode.group.index, query.device)
        mask = rows[:, None] >= torch.arange(key.shape[-2], device=query.device)
    elif is_causal:
        runs = mark.rows.runs[mode.group.index]
        return set_mark(attend_causally(query, key, value, runs, more), mark)
    if not dropout:
        return set_mark(F.scaled_dot_product_attention(query, key, value, mask, **more), mark)
    with mode.drawing(mark, query.device):
        return set_mark(F.scaled_dot_product_attention(query, key, value, mask, dropout, **more), mark)


def _attend_in_entries(mode: RowMode, mark: RowMark, given: dict[str, Any], more: dict[str, Any]) -> Any:
    """Runs attention on a rank's entries of a batch dim (frames, or heads of frames), with the same entries
    of keys, values and masks; where these have other sizes, on gathered tensors."""
    query, dropout = given["query"], given.get("dropout_p") or 0.0
    common, size = mark.at_dim(mark.dim - query.ndim), mark.whole_size
    operands = {name: given.get(name) for name in _NAMES[:4]}
    shapes = [mode.whole_shape(t) for t in operands.values() if isinstance(t, torch.Tensor)]
    sizes = [shape[common.dim] if len(shape) >= -common.dim else 1 for shape in shapes]
    broadcasts = any(len(shape) > query.ndim for shape in shapes)
    if broadcasts or sizes[:3] != [size] * 3 or any(n not in (1, size) for n in sizes):
        return mode.gather_for(F.scaled_dot_product_attention, [], given)
    own = {name: mode.match_rows(t, common) for name, t in operands.items() if t is not None}
    with mode.drawing(mark, query.device) if dropout else nullcontext():
        out = F.scaled_dot_product_attention(
            **own, dropout_p=dropout, is_causal=bool(given.get("is_causal")), **more
        )
    return set_mark(out, mark)


def _is_on_one_rank(mark: RowMark, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether one rank holds all queries, keys and values: a picture, or a frame of a video, by itself."""
    if sum(map(bool, mark.rows.counts)) != 1:
        return False
    return all((m := mark_of(t)) is not None and m.is_plain and m.rows == mark.rows for t in (key, value))


def _exchange_heads(
    mode: RowMode, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """Returns queries, keys and values [samples, heads, rows, width] with all rows of this rank's share of
    the heads, and the whole mask; None if they cannot be exchanged so.

    Where code repeats heads of keys and values (grouped queries), what it repeats is exchanged."""
    rows = [mark_of(t) for t in (query, key, value)]
    if any(m is None or not m.is_plain or m.dim != 2 or m.rows != rows[0].rows for m in rows):  # type: ignore[union-attr]
        return None
    if not (query.ndim == key.ndim == value.ndim == 4 and query.dtype == key.dtype == value.dtype):
        return None
    if isinstance(mask, torch.Tensor) and mask.ndim > 2 and mask.shape[-3] != 1:
        return None
    key, value = (_before_repeats(t) for t in (key, value))
    heads = [t.shape[1] for t in (query, key, value)]
    if any(n % mode.group.size for n in heads) or heads[1] != heads[2] or heads[0] % heads[1]:
        return None
    query, key, value = row_exchange.rows_to_heads([query, key, value], rows[0].rows, mode.group)  # type: ignore[union-attr]
    if isinstance(mask, torch.Tensor):
        (mask,) = mode.gather([mask])
    return query, key, value, mask


def _before_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Returns keys or values without the copies of heads for groups of queries, if they follow each other
    and lie in dim 1, as `enable_gqa` makes them; else the tensor."""
    repeat = repeat_of(tensor)
    if repeat is None or not repeat.in_order:
        return tensor
    source = (
        repeat.source.squeeze(2) if repeat.source.ndim == 5 and repeat.source.shape[2] == 1 else repeat.source
    )
    alike = source.ndim == 4 and source.shape[0] == tensor.shape[0] and source.shape[2:] == tensor.shape[2:]
    return source if alike else tensor


def _mask_of_rows(mode: RowMode, mask: torch.Tensor, own: RowMark) -> torch.Tensor:
    """Returns the rows of a mask [..., queries or 1, keys] that belong to the queries."""
    mark = mark_of(mask)
    if mark is not None and mark.at_dim(mark.dim - mask.ndim) == own:
        return mask
    (mask,) = mode.gather([mask])
    if mask.ndim < 2 or mask.shape[-2] != own.rows.size:
        return mask
    return set_mark(mode.take(mask, own.at_dim(mask.ndim - 2)), None)


def attend_causally(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    runs: Sequence[Run],
    more: dict[str, Any],
) -> torch.Tensor:
    """Returns causal attention of a rank's `runs` of queries [samples, heads, rows, width], each over the
    keys up to its end; keys and values are [samples, heads, all rows, width]. more: options of the call."""
    outs = list[torch.Tensor]()
    pieces = query.split([stop - start for start, stop in runs], -2) if runs else ()
    for (start, stop), piece in zip(runs, pieces, strict=True):
        keys, values = key[..., :stop, :], value[..., :stop, :]
        if piece.device.type == "cpu":
            mask = _reversed_causal_mask(piece, stop)
            outs.append(F.scaled_dot_product_attention(piece.flip(-2), keys, values, mask, **more).flip(-2))
            continue
        from torch.nn.attention.bias import causal_lower_right  # imports the compiler of torch: 1.3 s

        with _disable_current_modes():  # under a dispatch mode, no tensor subclass can be made
            bias: Any = causal_lower_right(stop - start, stop)
        outs.append(F.scaled_dot_product_attention(piece, keys, values, bias, **more))
    # Without a query, keys and values still take part in the exchange of gradients.
    return torch.cat(outs, -2) if outs else F.scaled_dot_product_attention(query, key, value, **more)


def _reversed_causal_mask(query: torch.Tensor, stop: int) -> torch.Tensor:
    """Returns the mask [queries, keys] to add to scores of the last queries before place `stop`, in reverse
    order, with all keys before `stop`."""
    count = query.shape[-2]
    line = query.new_zeros(count + stop - 1)
    line[stop:] = -torch.inf
    return line.as_strided((count, stop), (1, 1))
