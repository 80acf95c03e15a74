"""Products of parts: what is summed over must be whole, or be what the ranks sum afterwards."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from secc.runtime.tensor_parallel.rules.common import Args, entered, like, own_mark
from secc.runtime.tensor_parallel.rules.mark import Mark, Refused, mark, set_mark, sources_of

if TYPE_CHECKING:
    from secc.runtime.tensor_parallel.shape_mode import Shapes


def matmul(mode: Shapes, func: Any, args: Args, kwargs: dict[str, Any], found: list[Mark]) -> Any:
    a, b = (
        args[i] if len(args) > i else kwargs[k]
        for i, k in ((0, "input"), (1, "other" if "other" in kwargs else "mat2"))
    )
    of_a, of_b = mark(a), mark(b)
    if min(a.ndim, b.ndim) < 2:
        raise Refused("a part is multiplied with a vector", sources_of(found))
    if (of_a and of_a.dim == a.ndim - 1) or (of_b and of_b.dim == b.ndim - 2):
        raise Refused("a product sums over a dim of which ranks have parts", sources_of(found))
    rows, columns = of_a is not None and of_a.dim == a.ndim - 2, of_b is not None and of_b.dim == b.ndim - 1
    if rows or columns:
        if len(found) > 1:
            raise Refused("a product has parts along several dims", sources_of(found))
        out = func(*entered(mode, (a, b)))
        return set_mark(out, found[0].at(out.ndim - (2 if rows else 1)))
    a, b = (
        like(mode, t, m, other.ndim)
        for t, m, other in ((a, of_b or of_a, b if of_b else a), (b, of_a or of_b, a if of_a else b))
    )
    out = func(a, b)
    first = of_a or of_b
    assert first is not None
    return set_mark(
        out, Mark(first.dim + out.ndim - (a.ndim if of_a else b.ndim), first.parts, sources_of(found))
    )


def linear(mode: Shapes, func: Any, args: Args, kwargs: dict[str, Any], found: list[Mark]) -> Any:
    """A linear map of whole weights; one whose weight has this rank's inputs alone makes what the ranks have
    to sum."""
    own = own_mark(found, args)
    if (
        len(found) == 1
        and own.dim == args[0].ndim - 1
        and args[1].shape[1] == mode.length(own.parts) < own.size
    ):
        return func(*args, **kwargs)
    if len(found) > 1 or own.dim == args[0].ndim - 1:
        raise Refused("a product sums over a dim of which ranks have parts", sources_of(found))
    return set_mark(func(*entered(mode, args), **entered(mode, kwargs)), own)


def attention(mode: Shapes, func: Any, args: Args, kwargs: dict[str, Any], found: list[Mark]) -> Any:
    """scaled_dot_product_attention: heads or batch may be cut, the same way for all of its operands."""
    q = args[0] if args else kwargs["query"]
    own = mark(q)
    if own is None or own.dim >= q.ndim - 2:
        raise Refused("attention mixes entries of which ranks have parts", sources_of(found))
    heads = own.dim == q.ndim - 3
    names = ("query", "key", "value", "attn_mask")
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    for name in ("key", "value"):
        other = mark(given[name])
        if other is None or other.dim != own.dim or not (heads or other.parts == own.parts):
            raise Refused("attention has parts of queries but not of keys and values", sources_of(found))
    if given.get("attn_mask") is not None:
        given["attn_mask"] = like(mode, given["attn_mask"], own, q.ndim)
    rest = {k: v for k, v in kwargs.items() if k not in names} | dict(
        zip(("dropout_p", "is_causal", "scale", "enable_gqa"), args[4:], strict=False)
    )
    with mode.drawing(own) if rest.get("dropout_p") else nullcontext():
        out = func(**given, **rest)
    return set_mark(out, Mark(own.dim, own.parts, sources_of(found)))


def einsum(mode: Shapes, func: Any, args: Args, kwargs: dict[str, Any], found: list[Mark]) -> Any:
    equation, *operands = args
    operands = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], tuple | list) else operands
    text = equation.replace(" ", "")
    if "->" not in text or "." in text:
        raise Refused(f"einsum of {equation!r} on parts", sources_of(found))
    inputs, output = text.split("->")
    labels = {
        names[m.dim]: m
        for names, t in zip(inputs.split(","), operands, strict=True)
        if (m := mark(t)) is not None
    }
    if len(labels) != 1 or (letter := next(iter(labels))) not in output:
        raise Refused("a product sums over a dim of which ranks have parts", sources_of(found))
    parts = labels[letter].parts
    local = [
        t
        if mark(t) is not None
        else mode.part_of(mode.enter(t), names.index(letter), parts)
        if letter in names
        else mode.enter(t)
        for names, t in zip(inputs.split(","), operands, strict=True)
    ]
    return set_mark(func(equation, *local), Mark(output.index(letter), parts, sources_of(found)))
