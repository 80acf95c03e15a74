"""Which ATen ops draw random numbers, and what each computes from random bits.

An op gets `bits(shape, device)`, 64 for every entry, and returns what PyTorch's own kernel returns in
distribution, dtype and shape. A generator that is passed to it is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

BitSource = Callable[[tuple[int, ...], torch.device], torch.Tensor]
NamedArguments = dict[str, Any]  # an op's arguments by name

# Random ops without torch's tag nondeterministic_seeded.
_UNTAGGED_RANDOM_OPS = {"normal_functional", "random", "random_", "binomial", "_sample_dirichlet"}
_PROBABILITY_ARGUMENTS = ("p", "dropout_p", "dropout")
_TRAINING_ARGUMENTS = ("train", "training")
# Binary digits of a uniform number below 1.
_MANTISSA_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_WORD_MASK = 0xFFFFFFFF
_UNIFORM_OPS = ("rand", "rand_like", "uniform")
_NORMAL_OPS = ("normal", "randn", "randn_like", "log_normal")
_INTEGER_OPS = ("randint", "randint_like", "random")
_END_DIGITS = 10  # leading digits that numbers near an end of their range have in common
_DROPOUT = torch.ops.aten.native_dropout.default


def is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op call draws random numbers. Dropout with probability 0 or in eval mode does not."""
    if not _may_draw(func):
        return False
    return bool(_argument_by_name(func, args, kwargs, _PROBABILITY_ARGUMENTS, 1.0)) and bool(
        _argument_by_name(func, args, kwargs, _TRAINING_ARGUMENTS, True)
    )


@cache
def _may_draw(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload):  # operator.getitem, for one of several results
        return False
    return torch.Tag.nondeterministic_seeded in func.tags or _schema_name(func) in _UNTAGGED_RANDOM_OPS


def is_supported(func: Any) -> bool:
    """Whether `draw_op_result` can compute the op."""
    return _op_name(func) in _DISTRIBUTIONS or func is _DROPOUT


def is_dropout(func: Any) -> bool:
    """Whether a recorded op of glue belongs to dropout: PyTorch makes dropout of `bernoulli` with a
    probability, divided by it, or of `native_dropout`."""
    return func is _DROPOUT or func is torch.ops.aten.bernoulli.p


def identity_dropout(func: Any, x: torch.Tensor, p: float, *_: Any) -> Any:
    """Return what an op of `is_dropout` gives where dropout keeps everything and scales by 1."""
    if func is _DROPOUT:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    return torch.full_like(x, p)  # the division by p that follows gives exactly 1


def has_ends(func: Any) -> bool:
    """Whether `push_to_ends` can push the numbers of a random op."""
    return func is _DROPOUT or _op_name(func) in (*_UNIFORM_OPS, "bernoulli", *_NORMAL_OPS, *_INTEGER_OPS)


def decides_by_rows(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether single numbers of a random op may decide something, however many it draws for a sample, as
    those of a mask do. Noise and the entries of dropout do not."""
    is_of_dropout = func is _DROPOUT or isinstance(named_arguments(func, args, kwargs).get("p"), float)
    return _op_name(func) not in _NORMAL_OPS and not is_of_dropout


def push_to_ends(func: Any, args: Any, kwargs: Any, bits: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return the random bits of an op (`has_ends`), changed so that it draws from the lowest 0.1% of its
    range where `low` is true, and from the highest 0.1% elsewhere; a normal number is then beyond 3 standard
    deviations. `low` has the shape of `bits`; uniform numbers pushed to the same end keep their order."""
    given, name = named_arguments(func, args, kwargs), _op_name(func)
    if name in _NORMAL_OPS:
        return _push_to_tails(bits, low)
    if name in _INTEGER_OPS:
        start, stop = _integer_range(given, _result_spec(func, given).dtype)
        place = (bits & (1 << 63) - 1) % max((stop - start) >> _END_DIGITS, 1)
        return torch.where(low, place, stop - start - 1 - place)
    pushed = (bits >> _END_DIGITS) & (1 << 64 - _END_DIGITS) - 1
    pushed = torch.where(low, pushed, ~pushed)
    has_signed_threshold = name not in _UNIFORM_OPS and not isinstance(
        given.get("p", given.get("self")), torch.Tensor
    )
    return pushed ^ -(1 << 63) if has_signed_threshold else pushed


def _push_to_tails(bits: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return random bits that `_standard_normal` turns into numbers below -3 where `low` is true, and above 3
    elsewhere."""
    radius = (bits >> 32 & _WORD_MASK) >> _END_DIGITS
    angle = (bits & _WORD_MASK) >> 4  # at most a sixteenth of a turn
    return radius << 32 | torch.where(low, angle | 1 << 31, angle)


def draw_op_result(func: Any, args: Any, kwargs: Any, bits: BitSource) -> Any:
    """Compute the op's result from `bits`, in place if the op works in place."""
    given = named_arguments(func, args, kwargs)
    if func is _DROPOUT:
        return _native_dropout(given, bits)
    target = _result_spec(func, given)
    value = _DISTRIBUTIONS[_op_name(func)](given, target, bits)
    if "out" in given:
        return given["out"].copy_(value)
    return given["self"].copy_(value) if func._schema.is_mutable else value.to(target.dtype)


def named_arguments(func: Any, args: Any, kwargs: Any) -> NamedArguments:
    """Return the op's arguments by name, defaults included."""
    schema = func._schema.arguments
    given = {a.name: a.default_value for a in schema if a.has_default_value()}
    return given | dict(zip((a.name for a in schema), args, strict=False)) | dict(kwargs)


def _schema_name(func: Any) -> str:
    return func._schema.name.partition("::")[2]


def _op_name(func: Any) -> str:
    """Name of the op, the same for its in-place form."""
    return _schema_name(func).removesuffix("_").removesuffix("_functional")


def _argument_by_name(func: Any, args: Any, kwargs: Any, names: tuple[str, ...], default: Any) -> Any:
    """Return the first argument with one of these names, or its default in the schema. `default` if the op
    has none of them."""
    for i, a in enumerate(func._schema.arguments):
        if a.name in names:
            return args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
    return default


class _ResultSpec:
    """Shape, dtype and device of an op's result."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device


def _result_spec(func: Any, given: NamedArguments) -> _ResultSpec:
    like = next(
        (given[n] for n in ("out", "self", "mean", "std") if isinstance(given.get(n), torch.Tensor)), None
    )
    name = _op_name(func)
    if "size" in given or name == "randperm":
        shape = tuple(given["size"]) if "size" in given else (given["n"],)
        default = torch.int64 if name in ("randint", "randperm") else torch.get_default_dtype()
    else:
        assert like is not None
        shape, default = tuple(like.shape), like.dtype
        if name == "normal" and all(isinstance(given.get(n), torch.Tensor) for n in ("mean", "std")):
            shape = tuple(torch.broadcast_shapes(given["mean"].shape, given["std"].shape))
        if name == "multinomial":
            shape, default = (*shape[:-1], given["num_samples"]), torch.int64
    device = given.get("device") or (like.device if like is not None else torch.device("cpu"))
    dtype = given.get("dtype")  # a schema's default is a number
    return _ResultSpec(shape, dtype if isinstance(dtype, torch.dtype) else default, torch.device(device))


# -- numbers from bits -----------------------------------------------------------------------------------


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _uniform_from_bits(z: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Uniform in [0, 1), with as many binary digits as `dtype` has."""
    digits = _MANTISSA_DIGITS.get(dtype, 24)
    return ((z >> 64 - digits) & (1 << digits) - 1).to(_compute_dtype(dtype)) * 2.0**-digits


def _open_uniform(word: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Uniform in (0, 1), from the low 32 bits."""
    return ((word & _WORD_MASK).to(_compute_dtype(dtype)) + 0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)


def _true_with_probability(z: torch.Tensor, p: Any) -> torch.Tensor:
    """True with probability `p`, a number or a tensor."""
    if isinstance(p, torch.Tensor):
        return _uniform_from_bits(z, p.dtype if p.dtype.is_floating_point else torch.float32) < p
    return z < int(p * 2**64) - 2**63 if p < 1 else torch.ones_like(z, dtype=torch.bool)


def _standard_normal(z: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Standard normal, by the Box-Muller transform of two 32-bit halves."""
    radius = _open_uniform(z >> 32, dtype).log_().mul_(-2).sqrt_()
    return radius * _open_uniform(z, dtype).mul_(2 * math.pi).cos_()


def _standard_exponential(z: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Standard exponential; never 0, and finite."""
    return _open_uniform(z >> 32, dtype).neg_().log1p_().neg_()


# -- ops -------------------------------------------------------------------------------------------------


def _bernoulli(given: NamedArguments, target: _ResultSpec, bits: BitSource) -> torch.Tensor:
    return _true_with_probability(bits(target.shape, target.device), given.get("p", given["self"]))


def _rand(given: NamedArguments, target: _ResultSpec, bits: BitSource) -> torch.Tensor:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return _uniform_from_bits(bits(target.shape, target.device), target.dtype) * (high - low) + low


def _randn(given: NamedArguments, target: _ResultSpec, bits: BitSource) -> torch.Tensor:
    return _standard_normal(bits(target.shape, target.device), target.dtype) * given.get(
        "std", 1.0
    ) + given.get("mean", 0.0)


def _randint(given: NamedArguments, target: _ResultSpec, bits: BitSource) -> torch.Tensor:
    start, stop = _integer_range(given, target.dtype)
    return (bits(target.shape, target.device) & (1 << 63) - 1) % (stop - start) + start


def _integer_range(given: NamedArguments, dtype: torch.dtype) -> tuple[int, int]:
    """The first integer that an op may draw, and the one behind the last."""
    start, stop = given.get("low", given.get("from", 0)) or 0, given.get("high", given.get("to"))
    if stop is None:
        stop = 2 ** _MANTISSA_DIGITS[dtype] if dtype.is_floating_point else torch.iinfo(dtype).max
    return start, stop


def _randperm(given: NamedArguments, target: _ResultSpec, bits: BitSource) -> torch.Tensor:
    return bits(target.shape, target.device).argsort()


def _exponential(given: NamedArguments, target: _ResultSpec, bits: BitSource) -> torch.Tensor:
    return _standard_exponential(bits(target.shape, target.device), target.dtype) / given.get("lambd", 1.0)


def _log_normal(given: NamedArguments, target: _ResultSpec, bits: BitSource) -> torch.Tensor:
    return (
        _standard_normal(bits(target.shape, target.device), target.dtype) * given.get("std", 2.0)
        + given.get("mean", 1.0)
    ).exp()


def _cauchy(given: NamedArguments, target: _ResultSpec, bits: BitSource) -> torch.Tensor:
    angle = (_open_uniform(bits(target.shape, target.device) >> 32, target.dtype) - 0.5) * math.pi
    return angle.tan() * given.get("sigma", 1.0) + given.get("median", 0.0)


def _geometric(given: NamedArguments, target: _ResultSpec, bits: BitSource) -> torch.Tensor:
    trials = _standard_exponential(bits(target.shape, target.device), target.dtype) / -math.log1p(
        -min(given["p"], 1 - 1e-12)
    )
    return trials.ceil().clamp_(min=1)


def _multinomial(given: NamedArguments, target: _ResultSpec, bits: BitSource) -> torch.Tensor:
    """With replacement, by the inverse of the distribution function. Without, the largest of weights
    divided by exponential numbers (Efraimidis and Spirakis 2006)."""
    weights = given["self"]
    if given.get("replacement"):
        shares = weights.cumsum(-1)
        at = _uniform_from_bits(bits(target.shape, target.device), weights.dtype) * shares[..., -1:]
        return torch.searchsorted(shares, at.to(shares.dtype), right=True).clamp_(max=weights.shape[-1] - 1)
    noise = _standard_exponential(bits(tuple(weights.shape), target.device), weights.dtype)
    return (weights / noise).topk(given["num_samples"], dim=-1).indices


def _native_dropout(given: NamedArguments, bits: BitSource) -> tuple[torch.Tensor, torch.Tensor]:
    x, p = given["input"], given["p"]
    keep = _true_with_probability(bits(tuple(x.shape), x.device), 1 - p)
    return x * keep * (0.0 if p == 1 else 1 / (1 - p)), keep


_DISTRIBUTIONS: dict[str, Callable[[NamedArguments, _ResultSpec, BitSource], torch.Tensor]] = {
    "bernoulli": _bernoulli,
    "cauchy": _cauchy,
    "exponential": _exponential,
    "geometric": _geometric,
    "log_normal": _log_normal,
    "multinomial": _multinomial,
    "normal": _randn,
    "rand": _rand,
    "rand_like": _rand,
    "randint": _randint,
    "randint_like": _randint,
    "randn": _randn,
    "randn_like": _randn,
    "random": _randint,
    "randperm": _randperm,
    "uniform": _rand,
}
