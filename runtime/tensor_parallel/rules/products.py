"""Rules for products of parts: the summed dim must be whole, or its partial sums are summed over ranks
later."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from secc.runtime.plan.unsplit_reason import UnsplitKind, UnsplitReason
from secc.runtime.tensor_parallel.rules.common import (
    FunctionArguments,
    copy_whole_operands,
    first_mark,
    match_shard,
)
from secc.runtime.tensor_parallel.rules.mark import ShardMark, UnshardableCode, mark_of, set_mark, sources_of

if TYPE_CHECKING:
    from secc.runtime.tensor_parallel.shape_mode import WholeShapeMode


def matmul_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    a, b = (
        args[i] if len(args) > i else kwargs[k]
        for i, k in ((0, "input"), (1, "other" if "other" in kwargs else "mat2"))
    )
    of_a, of_b = mark_of(a), mark_of(b)
    if min(a.ndim, b.ndim) < 2:
        raise UnshardableCode(UnsplitReason(UnsplitKind.TIMES_VECTOR), sources_of(marks))
    if (of_a and of_a.dim == a.ndim - 1) or (of_b and of_b.dim == b.ndim - 2):
        raise UnshardableCode(UnsplitReason(UnsplitKind.SUMS_OVER_PARTS), sources_of(marks))
    rows, columns = of_a is not None and of_a.dim == a.ndim - 2, of_b is not None and of_b.dim == b.ndim - 1
    if rows or columns:
        if len(marks) > 1:
            raise UnshardableCode(UnsplitReason(UnsplitKind.PARTS_OF_SEVERAL_DIMS), sources_of(marks))
        out = func(*copy_whole_operands(mode, (a, b)))
        return set_mark(out, marks[0].at_dim(out.ndim - (2 if rows else 1)))
    a, b = (
        match_shard(mode, t, m, other.ndim)
        for t, m, other in ((a, of_b or of_a, b if of_b else a), (b, of_a or of_b, a if of_a else b))
    )
    out = func(a, b)
    first = of_a or of_b
    assert first is not None
    return set_mark(
        out, ShardMark(first.dim + out.ndim - (a.ndim if of_a else b.ndim), first.parts, sources_of(marks))
    )


def linear_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    """A linear map with whole weights. If the weight has this rank's inputs only, the result is a partial
    sum, which the module's style sums over ranks."""
    mark = first_mark(marks, args)
    if (
        len(marks) == 1
        and mark.dim == args[0].ndim - 1
        and args[1].shape[1] == mode.local_length(mark.parts) < mark.whole_size
    ):
        return func(*args, **kwargs)
    if len(marks) > 1 or mark.dim == args[0].ndim - 1:
        raise UnshardableCode(UnsplitReason(UnsplitKind.SUMS_OVER_PARTS), sources_of(marks))
    return set_mark(func(*copy_whole_operands(mode, args), **copy_whole_operands(mode, kwargs)), mark)


def attention_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    """scaled_dot_product_attention: heads or batch may be cut, in the same way for all operands."""
    q = args[0] if args else kwargs["query"]
    mark = mark_of(q)
    if mark is None or mark.dim >= q.ndim - 2:
        raise UnshardableCode(UnsplitReason(UnsplitKind.ATTENTION_OVER_PARTS), sources_of(marks))
    heads = mark.dim == q.ndim - 3
    names = ("query", "key", "value", "attn_mask")
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    for name in ("key", "value"):
        other = mark_of(given[name])
        if other is None or other.dim != mark.dim or not (heads or other.parts == mark.parts):
            raise UnshardableCode(UnsplitReason(UnsplitKind.ATTENTION_WHOLE_KEYS), sources_of(marks))
    if given.get("attn_mask") is not None:
        given["attn_mask"] = match_shard(mode, given["attn_mask"], mark, q.ndim)
    options = {k: v for k, v in kwargs.items() if k not in names} | dict(
        zip(("dropout_p", "is_causal", "scale", "enable_gqa"), args[4:], strict=False)
    )
    with mode.draw_shard(mark) if options.get("dropout_p") else nullcontext():
        out = func(**given, **options)
    return set_mark(out, ShardMark(mark.dim, mark.parts, sources_of(marks)))


def einsum_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    equation, *operands = args
    operands = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], tuple | list) else operands
    text = equation.replace(" ", "")
    if "->" not in text or "." in text:
        raise UnshardableCode(
            UnsplitReason(UnsplitKind.NO_RULE, f"einsum of {equation!r}"), sources_of(marks)
        )
    inputs, output = text.split("->")
    labels = {
        names[m.dim]: m
        for names, t in zip(inputs.split(","), operands, strict=True)
        if (m := mark_of(t)) is not None
    }
    if len(labels) != 1 or (letter := next(iter(labels))) not in output:
        raise UnshardableCode(UnsplitReason(UnsplitKind.SUMS_OVER_PARTS), sources_of(marks))
    parts = labels[letter].parts
    local = [
        t
        if mark_of(t) is not None
        else mode.take_shard(mode.copy_to_shards(t), names.index(letter), parts)
        if letter in names
        else mode.copy_to_shards(t)
        for names, t in zip(inputs.split(","), operands, strict=True)
    ]
    return set_mark(func(equation, *local), ShardMark(output.index(letter), parts, sources_of(marks)))
