"""Ops on vocabulary shards: which values the ranks of a replica may hold split over the vocabulary, and how
each op works on them.

Under tensor parallelism each rank of a head has the logits of some tokens (as in Megatron-LM's
vocabulary-parallel cross entropy, Shoeybi et al. 2019). What the user's code computes from logits entry by
entry, row by row, or by a softmax over the tokens works on shards, with a few numbers per row exchanged, so
that no rank holds whole logits. A table says how an op works on shards (`VocabOp`); an op without an entry
gets whole tensors, which are gathered for it. Where a whole value meets shards, its gradient is the sum of
the ranks' gradients ("enter").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
from xdsl.ir import Operation, SSAValue

from secc.ir.analysis import random_ops
from secc.ir.dialect import argument_template
from secc.ir.dialect.argument_template import DottedName, OperandRef
from secc.ir.dialect.ops import CallOp, GlueOp, GraphOp, ParamOp, TieOp, strings_of
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import TensorType, tensor_type

VOCAB_OP_PREFIX = "parts."  # of glue that `secc.runtime.tensor_parallel.vocab_parallel_ops` computes
VOCAB_SIZE_ATTRIBUTE = "parts"  # the attribute of glue that works on parts: the entries of the whole
SHARD_LENGTH = DottedName("parts.length")  # in arguments: this rank's entries
HEAD_WIDTH_RATIO = (
    2  # a linear map with more than this many times as many outputs as inputs is a head; so is an embedding
)
UNAVERAGED_REDUCTIONS = (0, 2)  # reductions of torch's losses: none and sum


@dataclass(frozen=True)
class VocabPart:
    """A value is split along `axis`, where the whole value has `size` entries."""

    axis: int
    size: int


@dataclass(frozen=True)
class VocabOp:
    """How an op works on shards: for each result how it is split (None: whole), the op to call and its
    arguments.

    enter: whole operands with a gradient that is summed over ranks.
    cut: whole operands, with the axis along which each rank takes its part. summed: the ranks' results are
    addends of the whole result.
    """

    results: tuple[VocabPart | None, ...]
    target: str
    args: str
    enter: tuple[int, ...] = ()
    cut: Mapping[int, int] = field(default_factory=dict[int, int])
    summed: bool = False


def is_wide(tokens: int, width: int) -> bool:
    """Whether a matrix [tokens, width] is split by tokens, because it has many more tokens than columns."""
    return tokens > HEAD_WIDTH_RATIO * width


def find_sharded_heads(graph: GraphOp, ops: Sequence[Operation]) -> dict[SSAValue, VocabPart]:
    """The values that tensor parallelism splits by tokens: results of `ops` that call wide linear maps, and
    wide matrices that they read."""
    tied = {name for op in graph.body.block.ops if isinstance(op, TieOp) for name in strings_of(op.names)}
    found, blocks = dict[SSAValue, VocabPart](), graph.blocks
    for op in ops:
        weight = blocks[op.target.data].attributes.get("weight") if isinstance(op, CallOp) else None
        if (
            isinstance(op, CallOp)
            and isinstance(weight, TensorType)
            and _is_cut(weight, f"{op.target.data}.weight" in tied)
        ):
            found[op.results[0]] = VocabPart(len(tensor_type(op.results[0]).dims) - 1, int(weight.shape[0]))
        for value in op.operands if isinstance(op, GlueOp) else ():
            if isinstance(value.owner, ParamOp) and _is_cut(
                tensor_type(value), value.owner.path.data in tied
            ):
                found[value] = VocabPart(0, int(tensor_type(value).shape[0]))
    return found


def _is_cut(weight: TensorType, tied: bool) -> bool:
    sizes = weight.shape
    return len(sizes) == 2 and (tied or is_wide(int(sizes[0]), int(sizes[1])))


class VocabSpread:
    """Follows vocabulary shards through ops, from `sources`. `steps` has the ops that work on shards; any
    other op that reads a value in `parts` needs it whole."""

    def __init__(self, ops: Iterable[Operation], sources: Mapping[SSAValue, VocabPart]) -> None:
        self.parts, self.steps = dict(sources), dict[Operation, VocabOp]()
        for op in ops:
            if (
                isinstance(op, GlueOp)
                and any(o in self.parts for o in op.operands)
                and random_ops.RANDOM_OP_ATTRIBUTE not in op.attributes
            ):
                rule = VOCAB_RULES.get(op.base_name)
                step = (
                    rule(_OpReader(op, [self.parts.get(o) for o in op.operands]))
                    if rule is not None
                    else None
                )
                if step is not None:
                    self.steps[op] = step
                    self.parts |= {
                        r: p for r, p in zip(op.results, step.results, strict=False) if p is not None
                    }

    def vocabulary_size(self, op: Operation) -> int:
        """The entries of the whole vocabulary that an op in `steps` works on."""
        return next(self.parts[o].size for o in op.operands if o in self.parts)


@dataclass
class _OpReader:
    """An op, and the parts that its operands are."""

    op: GlueOp
    parts: list[VocabPart | None]

    def __post_init__(self) -> None:
        self.types = [tensor_type(o) for o in self.op.operands]
        self.arguments = self.op.arguments
        self.shapes = [t.shape for t in self.types]

    @property
    def axis(self) -> int:
        """The split axis of operand 0, -1 if it is whole."""
        first = self.parts[0]
        return -1 if first is None else first.axis

    @property
    def rank(self) -> int:
        return len(self.shapes[0])

    def has_only_first_part(self) -> bool:
        return self.parts[0] is not None and not any(self.parts[1:])

    def read_dim(
        self, position: int = 1, name: str = "dim", default: Any = None, rank: int = 0
    ) -> int | None:
        """An argument as a dim of operand 0, counted from the front."""
        value = self.arguments.get(position, name, default)
        return None if not isinstance(value, int) else value % (rank or self.rank)

    def make_step(self, *results: VocabPart | None, target: str = "", args: str = "", **more: Any) -> VocabOp:
        return VocabOp(results, target or self.op.target.data, args or self.op.args.data, **more)

    def shard_along(self, axis: int | None, **more: Any) -> VocabOp | None:
        """Every result is a part along `axis`."""
        first = self.parts[0]
        if axis is None or first is None:
            return None
        return self.make_step(*[VocabPart(axis, first.size) for _ in self.op.results], **more)

    def make_whole(self, name: str, **more: Any) -> VocabOp:
        """An op of the runtime that makes whole results of parts."""
        return self.make_step(*[None for _ in self.op.results], target=VOCAB_OP_PREFIX + name, **more)

    def operands_entering(self, *places: int) -> tuple[int, ...]:
        """The operands at `places` that are whole and require a gradient."""
        return tuple(i for i in places if self.parts[i] is None and self.types[i].requires_grad)


def _shard_elementwise(r: _OpReader) -> VocabOp | None:
    """Operands are aligned at their last dims; a whole one that runs along the vocabulary is cut, too."""
    back = {p.axis - len(shape) for p, shape in zip(r.parts, r.shapes, strict=True) if p is not None}
    sizes = {p.size for p in r.parts if p is not None}
    if len(back) > 1 or len(sizes) > 1:
        return None
    place, size = back.pop(), sizes.pop()
    whole = [i for i, p in enumerate(r.parts) if p is None]
    cut = {
        i: len(r.shapes[i]) + place
        for i in whole
        if len(r.shapes[i]) >= -place and r.shapes[i][place] == size and size != 1
    }
    enter = r.operands_entering(*(i for i in whole if i not in cut))
    return r.make_step(
        *[VocabPart(len(tensor_type(v).dims) + place, size) for v in r.op.results], enter=enter, cut=cut
    )


def _shard_factory(r: _OpReader) -> VocabOp | None:
    """`new_zeros(x, size)`: of `x` only the dtype counts."""
    return r.make_step(*[None for _ in r.op.results])


def _shard_reshape(r: _OpReader) -> VocabOp | None:
    before, after = r.shapes[0], tensor_type(r.op.results[0]).shape
    sizes = r.arguments.get(1, "size", r.arguments.kwargs.get("shape"))
    if not r.has_only_first_part() or not isinstance(sizes, list):
        return None
    front = _product_of_dims(before[: r.axis])
    new = next(
        (i for i, n in enumerate(after) if n == before[r.axis] and _product_of_dims(after[:i]) == front), None
    )
    if new is None:
        return None
    return r.shard_along(new, args=_with_size(r, sizes, new, SHARD_LENGTH))


def _shard_expand(r: _OpReader) -> VocabOp | None:
    sizes = r.arguments.get(1, "size")
    if not r.has_only_first_part() or not isinstance(sizes, list):
        return None
    new = r.axis + len(sizes) - r.rank
    return r.shard_along(new, args=_with_size(r, sizes, new, -1))


def _with_size(r: _OpReader, sizes: list[Any], place: int, value: object) -> str:
    """The arguments with one of the sizes replaced; one that torch finds out itself stays."""
    if sizes[place] != -1:
        sizes[place] = value
    return argument_template.format_arguments(r.arguments)


def _product_of_dims(dims: Sequence[Expr]) -> Expr:
    return sympy.expand(sympy.Mul(*dims))


def _shard_permute(r: _OpReader) -> VocabOp | None:
    if not r.has_only_first_part():
        return None
    if r.op.base_name in {"t", "numpy_T"}:
        return r.shard_along(r.rank - 1 - r.axis)
    if r.op.base_name == "permute":
        dims = r.arguments.get(1, "dims")
        return r.shard_along([d % r.rank for d in dims].index(r.axis)) if isinstance(dims, list) else None
    a, b = r.read_dim(1, "dim0"), r.read_dim(2, "dim1")
    return r.shard_along({a: b, b: a}.get(r.axis, r.axis))


def _shard_unsqueeze(r: _OpReader) -> VocabOp | None:
    dim = r.read_dim(rank=r.rank + 1)
    return r.shard_along(r.axis + (dim <= r.axis)) if dim is not None else None


def _shard_squeeze(r: _OpReader) -> VocabOp | None:
    value = r.arguments.get(1, "dim", [i for i, n in enumerate(r.shapes[0]) if n == 1])
    gone = [d % r.rank for d in (value if isinstance(value, list | tuple) else [value])]
    return (
        r.shard_along(r.axis - sum(d < r.axis and r.shapes[0][d] == 1 for d in gone))
        if r.axis not in gone
        else None
    )


def _shard_row_selection(r: _OpReader) -> VocabOp | None:
    """Some rows are taken: `slice`, `split`, … along another dim than the vocabulary's; `select` and `unbind`
    take the dim away."""
    dim = r.read_dim(
        *((2, "dim", 0) if r.op.base_name in {"split", "split_with_sizes", "chunk"} else (1, "dim", 0))
    )
    if dim is None or dim == r.axis or not r.has_only_first_part():
        return None
    return r.shard_along(r.axis - (r.op.base_name in {"select", "unbind"} and dim < r.axis))


def _shard_index(r: _OpReader) -> VocabOp | None:
    """Rows picked by masks or indices of the leading dims."""
    indices = r.arguments.args[1]
    if not r.has_only_first_part() or not all(isinstance(i, OperandRef) for i in indices):
        return None
    kinds = [r.types[i.index] for i in indices]
    taken = sum(len(kind.dims) if kind.dtype.data == "bool" else 1 for kind in kinds)
    return (
        r.shard_along(r.axis - r.rank + len(tensor_type(r.op.results[0]).dims)) if taken <= r.axis else None
    )


def _shard_reduction(r: _OpReader) -> VocabOp | None:
    """A reduction over other dims works on parts as it is; over the vocabulary, sums are summed over ranks,
    and some ops know how."""
    given = (
        None
        if r.op.target.data.endswith(".default") and len(r.arguments.args) < 2
        else r.arguments.get(1, "dim")
    )
    dims = (
        [d % r.rank for d in (given if isinstance(given, list | tuple) else [given])]
        if given not in (None, [])
        else list(range(r.rank))
    )
    if not r.has_only_first_part():
        return None
    if r.axis not in dims:
        kept = len(tensor_type(r.op.results[0]).dims) == r.rank
        return r.shard_along(r.axis if kept else r.axis - sum(d < r.axis for d in dims))
    if r.op.base_name == "sum":
        return r.make_step(None, summed=True)
    if r.op.base_name == "mean":
        return r.make_whole("mean")
    if (
        dims != [r.axis]
        or given is None
        or (r.op.base_name != "logsumexp" and tensor_type(r.op.results[0]).requires_grad)
    ):
        return None
    return r.make_whole(r.op.base_name) if r.op.base_name in {"logsumexp", "amax", "argmax"} else None


def _shard_softmax(r: _OpReader) -> VocabOp | None:
    if not r.has_only_first_part() or (
        not r.op.base_name.startswith("_") and len(r.arguments.args) + len(r.arguments.kwargs) > 2
    ):
        return None
    return r.shard_along(
        r.axis, target=VOCAB_OP_PREFIX + r.op.base_name.lstrip("_") if r.read_dim() == r.axis else ""
    )


def _shard_nll_loss(r: _OpReader) -> VocabOp | None:
    """`nll_loss`: the label's entry of each row; the tokens' dim is 1, or 0 of a single row. Its second
    result must be unused."""
    spatial, weight = "2d" in r.op.base_name, r.arguments.get(2, "weight")
    unread = not any(True for v in r.op.results[1:] for _ in v.uses)
    if (
        not r.has_only_first_part()
        or r.axis != min(1, r.rank - 1)
        or r.arguments.get(3, "reduction", 1) not in UNAVERAGED_REDUCTIONS
        or not unread
    ):
        return None
    cut = {weight.index: 0} if isinstance(weight, OperandRef) else {}
    return r.make_step(None, target=f"{VOCAB_OP_PREFIX}nll_loss{'2d' if spatial else ''}", cut=cut)


def _shard_gather(r: _OpReader) -> VocabOp | None:
    """`gather` and `topk` along the vocabulary."""
    position = 1 if r.op.base_name == "gather" else 2
    if (
        not r.has_only_first_part()
        or r.read_dim(position, "dim", -1) != r.axis
        or r.arguments.get(3, "largest", True) is False
    ):
        return None
    return r.make_whole(r.op.base_name)


def _shard_linear(r: _OpReader) -> VocabOp | None:
    """`linear(hidden, weight, bias)` with a weight cut by outputs."""
    places = _direct_operands(r)
    if len(places) < 2 or r.parts[places[0]] is not None:
        return None
    return _shard_head(r, places[0], places[1], 0, places[2] if len(places) > 2 else None)


def _shard_matmul(r: _OpReader) -> VocabOp | None:
    """`mm(hidden, weight.T)`, `addmm(bias, hidden, weight.T)`."""
    places = _direct_operands(r)
    if len(places) < 2 or len(r.shapes[places[-1]]) != 2 or r.arguments.kwargs:
        return None
    return _shard_head(r, places[-2], places[-1], 1, places[0] if r.op.base_name == "addmm" else None)


def _direct_operands(r: _OpReader) -> list[int]:
    """The operands that are arguments themselves, in order."""
    return [a.index for a in r.arguments.args if isinstance(a, OperandRef)]


def _shard_head(r: _OpReader, hidden: int, weight: int, out: int, bias: int | None) -> VocabOp | None:
    part = r.parts[weight]
    if part is None or part.axis != out or r.parts[hidden] is not None:
        return None
    cut = {bias: 0} if bias is not None and r.parts[bias] is None else {}
    last = len(tensor_type(r.op.results[0]).dims) - 1
    return r.make_step(VocabPart(last, part.size), enter=r.operands_entering(hidden), cut=cut)


def _shard_fused_loss(r: _OpReader) -> VocabOp | None:
    """The losses on linear heads; their operators sum the hidden states' gradient over the ranks."""
    places = _direct_operands(r)
    biases = [r.arguments.kwargs.get(name) for name in ("bias", "student_bias", "teacher_bias")]
    first, *weights = [places[i] for i in ((1, 3) if "linear_kl" in r.op.base_name else (1,))]
    part = r.parts[first]
    if (
        part is None
        or any(r.shapes[w][0] != part.size or r.parts[w] not in (None, part) for w in weights)
        or part.axis != 0
    ):
        return None
    others = [*weights, *(b.index for b in biases if isinstance(b, OperandRef))]
    cut = {w: 0 for w in others if r.parts[w] is None}
    return r.make_whole(r.op.target.data.removeprefix("secc."), cut=cut)


ELEMENTWISE_OPS = frozenset({
    "add", "sub", "rsub", "mul", "div", "neg", "exp", "exp2", "expm1", "log", "log2", "log1p", "tanh",
    "sigmoid", "relu", "square", "sqrt", "rsqrt", "reciprocal", "pow", "abs", "sign", "clamp",
    "clamp_min", "clamp_max", "maximum", "minimum", "where", "masked_fill", "eq", "ne", "lt", "le",
    "gt", "ge", "isfinite", "isnan", "isinf", "logical_and", "logical_or", "logical_not",
    "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not", "to", "_to_copy", "clone", "detach",
    "alias", "contiguous", "positive", "lift_fresh", "zeros_like", "ones_like", "full_like", "xlogy",
    "softplus", "silu", "gelu", "erf", "nan_to_num", "sin", "cos", "atan", "floor", "ceil", "round",
    "lerp", "addcmul", "addcdiv", "logaddexp", "special_xlog1py",
})  # fmt: skip

VOCAB_RULES: dict[str, Callable[[_OpReader], VocabOp | None]] = (
    dict.fromkeys(ELEMENTWISE_OPS, _shard_elementwise)
    | dict.fromkeys(["new_zeros", "new_ones", "new_full", "new_empty"], _shard_factory)
    | dict.fromkeys(["view", "_unsafe_view", "reshape"], _shard_reshape)
    | dict.fromkeys(["t", "numpy_T", "transpose", "permute"], _shard_permute)
    | dict.fromkeys(
        ["slice", "select", "narrow", "unbind", "split", "split_with_sizes", "chunk", "index_select"],
        _shard_row_selection,
    )
    | dict.fromkeys(
        ["sum", "mean", "logsumexp", "amax", "amin", "argmax", "argmin", "prod", "any", "all"],
        _shard_reduction,
    )
    | dict.fromkeys(["_softmax", "_log_softmax", "softmax", "log_softmax"], _shard_softmax)
    | dict.fromkeys(["nll_loss_forward", "nll_loss2d_forward"], _shard_nll_loss)
    | dict.fromkeys(["gather", "topk"], _shard_gather)
    | dict.fromkeys(["mm", "addmm", "matmul"], _shard_matmul)
    | dict.fromkeys(
        [f"secc.linear_{name}" for name in ("cross_entropy", "cross_entropy_rows", "kl", "kl_ce")],
        _shard_fused_loss,
    )
    | {
        "expand": _shard_expand,
        "unsqueeze": _shard_unsqueeze,
        "squeeze": _shard_squeeze,
        "index": _shard_index,
        "linear": _shard_linear,
    }
)
