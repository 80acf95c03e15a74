"""The rules of `fuse-blocks`: a pattern, its replacement, and sizes at which the two are compared.

Patterns are Python expressions over operations of `graph_algebra`; a name stands for any tensor, the same
at each place. Casts are not written: the kernels compute in float32, and a comparison in every dtype
decides whether that is what the user's code means. `SPELLINGS` list expressions with the same meaning;
they apply first, from the innermost outwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TrialShape = tuple[int, ...]
TrialSizes = Mapping[str, TrialShape]

PARAMETER_NAMES = frozenset(
    {"weight", "bias"}
)  # names in patterns that stand for what depends on parameters alone, [H]
NUMBER_NAMES = frozenset({"eps"})  # names that stand for numbers
H = -1  # a dim of a trial that the site's parameters decide


@dataclass(frozen=True)
class FusionRule:
    """`pattern` may be computed as `replacement`, with functions of `secc.runtime.fusion.operators`.

    required_op: the operation without which the rule is not expected to match. trials: sizes of its
    tensors for the comparison.
    """

    name: str
    pattern: str
    replacement: str
    required_op: str
    trials: tuple[TrialSizes, ...]


_NORM_TRIALS: tuple[TrialSizes, ...] = ({"x": (3, 7, H)}, {"x": (1, H)}, {"x": (2, 3, 5, H)})
_GATED_TRIALS: tuple[TrialSizes, ...] = tuple(
    {"gate": shape, "up": shape} for shape in ((3, 5, 24), (1, 8), (4, 33))
)


def _rotary_trials(width: int) -> tuple[TrialSizes, ...]:
    """Sizes with heads before positions, after them, and packed positions without a batch; tables for each
    sample and for all."""
    shapes = (
        ((2, 4, 5, 8), (2, 1, 5)),
        ((2, 5, 4, 8), (2, 5, 1)),
        ((5, 4, 8), (5, 1)),
        ((3, 2, 1, 8), (1, 1, 1)),
    )
    return tuple({"x": x, "cos": (*table, width), "sin": (*table, width)} for x, table in shapes)


_ROTARY_PARTS_TRIALS: tuple[TrialSizes, ...] = tuple(
    {"a": (*t["x"][:-1], 4), "b": (*t["x"][:-1], 4), "cos": t["cos"], "sin": t["sin"]}
    for t in _rotary_trials(4)
)

SPELLINGS = (
    ("x * x", "square(x)"),
    ("pow(x, 2)", "square(x)"),
    ("pow(x, -0.5)", "rsqrt(x)"),
    ("pow(x, 0.5)", "sqrt(x)"),
    ("1 / sqrt(x)", "rsqrt(x)"),
    ("y / sqrt(x)", "y * rsqrt(x)"),
    ("var(x)", "mean(square(x - mean(x)))"),
    ("x * sigmoid(x)", "silu(x)"),
    ("0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * pow(x, 3))))", "gelu_tanh(x)"),
    ("0.5 * x * (1 + tanh(0.7978845608028654 * x * (1 + 0.044715 * x * x)))", "gelu_tanh(x)"),
    ("0.5 * x * (1 + erf(x / 1.4142135623730951))", "gelu(x)"),
    ("cat(-high(x), low(x))", "rotate_half(x)"),
)

FUSION_RULES = (
    FusionRule(
        "layer-norm",
        "(x - mean(x)) * rsqrt(mean(square(x - mean(x))) + eps) * weight + bias",
        "layer_norm(x, weight, bias, eps)",
        "rsqrt",
        _NORM_TRIALS,
    ),
    FusionRule(
        "layer-norm",
        "(x - mean(x)) * rsqrt(mean(square(x - mean(x))) + eps) * weight",
        "layer_norm(x, weight, None, eps)",
        "rsqrt",
        _NORM_TRIALS,
    ),
    FusionRule(
        "layer-norm",
        "(x - mean(x)) * rsqrt(mean(square(x - mean(x))) + eps)",
        "layer_norm(x, None, None, eps)",
        "rsqrt",
        _NORM_TRIALS,
    ),
    FusionRule(
        "layer-norm",
        "layer_norm(x, weight, bias, eps)",
        "torch_layer_norm(x, weight, bias, eps)",
        "layer_norm",
        _NORM_TRIALS,
    ),
    FusionRule(
        "rms-norm",
        "x * rsqrt(mean(square(x)) + eps) * weight",
        "rms_norm(x, weight, eps)",
        "rsqrt",
        _NORM_TRIALS,
    ),
    FusionRule(
        "rms-norm", "x * rsqrt(mean(square(x)) + eps)", "rms_norm(x, None, eps)", "rsqrt", _NORM_TRIALS
    ),
    FusionRule(
        "rms-norm", "rms_norm(x, weight, eps)", "torch_rms_norm(x, weight, eps)", "rms_norm", _NORM_TRIALS
    ),
    FusionRule("swiglu", "silu(gate) * up", "swiglu(gate, up)", "silu", _GATED_TRIALS),
    FusionRule("geglu", "gelu_tanh(gate) * up", "geglu(gate, up, 'tanh')", "gelu_tanh", _GATED_TRIALS),
    FusionRule("geglu", "gelu(gate) * up", "geglu(gate, up, 'none')", "gelu", _GATED_TRIALS),
    FusionRule(
        "rope", "x * cos + rotate_half(x) * sin", "rotate(x, cos, sin)", "rotate_half", _rotary_trials(8)
    ),
    FusionRule(
        "rope",
        "cat(low(x) * cos - high(x) * sin, high(x) * cos + low(x) * sin)",
        "rotate(x, twice(cos), twice(sin))",
        "high",
        _rotary_trials(4),
    ),
    FusionRule(
        "rope",
        "cat(a * cos - b * sin, b * cos + a * sin)",
        "rotate_parts(a, b, cos, sin)",
        "cat",
        _ROTARY_PARTS_TRIALS,
    ),
)

RULE_NAMES = tuple(dict.fromkeys(rule.name for rule in FUSION_RULES))
