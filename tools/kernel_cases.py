"""What tools/bench_kernels.py compares: for each fused operator its inputs at a model's sizes, and the ways
to compute it.

A way is a function of the inputs that returns tensors; the ways are secc's operator, plain PyTorch, and
Liger-Kernel where it is installed (0.8 or newer). FLOPs and bytes are what any implementation must spend:
products forward and backward, and each tensor moved once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from secc.runtime import kernels

Way = Callable[..., Any]
TEACHER_WIDTH = 5120  # hidden size of the teacher in the distillation losses


@dataclass(frozen=True)
class Sizes:
    """A model's sizes and the number of rows (tokens)."""

    name: str
    hidden: int
    vocabulary: int
    intermediate: int
    heads: int
    key_heads: int
    head: int
    rows: int = 0


MODELS = (
    Sizes("Qwen3-0.6B", 1024, 151_936, 3072, 16, 8, 128),
    Sizes("Qwen3-8B", 4096, 151_936, 12_288, 32, 8, 128),
    Sizes("Qwen3-32B", 5120, 151_936, 25_600, 64, 8, 128),
    Sizes("Llama-3.2-1B", 2048, 128_256, 8192, 32, 8, 64),
    Sizes("Llama-3.1-8B", 4096, 128_256, 14_336, 32, 8, 128),
    Sizes("Llama-3.1-70B", 8192, 128_256, 28_672, 64, 8, 128),
)
TINY = Sizes("tiny", 64, 1000, 96, 4, 2, 32, 48)


@dataclass(frozen=True)
class Case:
    """One operator: random inputs (those that get gradients first), how many of them do, the ways, and the
    least work."""

    name: str
    inputs: Callable[[Sizes, torch.dtype, torch.device], list[torch.Tensor]]
    differentiable: int
    ways: Mapping[str, Way]
    flops: Callable[[Sizes], float] = lambda s: 0.0
    entries: Callable[[Sizes], float] = lambda s: (
        0.0
    )  # read or written once forward and backward, of the inputs' dtype
    liger: str = field(default="", repr=False)


def _random(dtype: torch.dtype, device: torch.device, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float32, device=device).to(dtype) for shape in shapes]


def _head(s: Sizes, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    hidden, weight = _random(dtype, device, (s.rows, s.hidden), (s.vocabulary, s.hidden))
    return [hidden, weight.mul_(2 * s.hidden**-0.5), torch.randint(s.vocabulary, (s.rows,), device=device)]


def _heads(s: Sizes, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    width = min(TEACHER_WIDTH, 2 * s.hidden)
    teacher, teacher_weight = _random(dtype, device, (s.rows, width), (s.vocabulary, width))
    hidden, weight, target = _head(s, dtype, device)
    return [hidden, weight, teacher, teacher_weight.mul_(2 * width**-0.5), target]


def _plain_kl(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: torch.Tensor,
    teacher_weight: torch.Tensor,
    *_: torch.Tensor,
) -> torch.Tensor:
    with torch.no_grad():
        wanted = F.log_softmax(teacher @ teacher_weight.T, -1)
    return F.kl_div(F.log_softmax(hidden @ weight.T, -1), wanted, log_target=True, reduction="batchmean")


def _wide(logits: torch.Tensor) -> torch.Tensor:
    """As Hugging Face's losses take logits: float32 of 16 bits."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _plain_ce(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(_wide(hidden @ weight.T), target)


def _plain_kl_ce(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: torch.Tensor,
    teacher_weight: torch.Tensor,
    target: torch.Tensor,
) -> torch.Tensor:
    with torch.no_grad():
        wanted = F.log_softmax(teacher @ teacher_weight.T, -1)
    logits = hidden @ weight.T
    divergence = F.kl_div(F.log_softmax(logits, -1), wanted, log_target=True, reduction="batchmean")
    return divergence + F.cross_entropy(_wide(logits), target)


def _mean(sums: tuple[torch.Tensor, ...]) -> torch.Tensor:
    means = [total / count for total, count in zip(sums[::2], sums[1::2], strict=True)]
    return torch.stack(means).sum()


def _student_flops(s: Sizes) -> float:
    return 6.0 * s.rows * s.hidden * s.vocabulary


def _teacher_flops(s: Sizes) -> float:
    return 2.0 * s.rows * min(TEACHER_WIDTH, 2 * s.hidden) * s.vocabulary


def losses() -> list[Case]:
    """The losses on linear heads, as means over rows."""
    return [
        Case(
            "linear_cross_entropy", _head, 2,
            {"secc": lambda h, w, t: _mean(kernels.linear_cross_entropy(h, w, t)), "eager": _plain_ce},
            flops=_student_flops, liger="fused_linear_cross_entropy",
        ),
        Case(
            "linear_kl", _heads, 2, {"secc": lambda h, w, g, v, _: _mean(kernels.linear_kl(h, w, g, v)), "eager": _plain_kl},
            flops=lambda s: _student_flops(s) + _teacher_flops(s), liger="fused_linear_jsd",
        ),
        Case(
            "linear_kl_ce", _heads, 2, {"secc": lambda *x: _mean(kernels.linear_kl_ce(*x)), "eager": _plain_kl_ce},
            flops=lambda s: _student_flops(s) + _teacher_flops(s),
        ),
    ]  # fmt: skip


def _norm_inputs(s: Sizes, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    return _random(dtype, device, (s.rows, s.hidden), (s.hidden,), (s.hidden,))


def _gate_inputs(s: Sizes, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    return _random(dtype, device, (s.rows, s.intermediate), (s.rows, s.intermediate))


def _rope_inputs(s: Sizes, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    q, k = (
        t.transpose(1, 2)
        for t in _random(dtype, device, (1, s.rows, s.heads, s.head), (1, s.rows, s.key_heads, s.head))
    )
    angles = torch.arange(s.rows, device=device).unsqueeze(1) * 10_000.0 ** -torch.linspace(
        0, 1, s.head // 2, device=device
    )
    angles = torch.cat([angles, angles], 1).unsqueeze(0)
    return [q, k, angles.cos().to(dtype), angles.sin().to(dtype)]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)


def _row_inputs(s: Sizes, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    return [*_random(dtype, device, (s.rows, s.hidden)), torch.randperm(s.rows, device=device)]


def _scatter_inputs(s: Sizes, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    base, rows = _random(dtype, device, (s.rows, s.hidden), (s.rows // 4, s.hidden))
    return [base, rows, torch.randperm(s.rows, device=device)[: s.rows // 4]]


def _plain_rms(x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    wide = _wide(x)
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def entries() -> list[Case]:
    """The operators that memory bounds. Forward and backward: norms move 5 tensors of [rows, hidden], gates 8
    of [rows, intermediate]."""

    def norm(s: Sizes) -> float:
        return 5.0 * s.rows * s.hidden

    def gate(s: Sizes) -> float:
        return 8.0 * s.rows * s.intermediate

    return [
        Case(
            "rms_norm", _norm_inputs, 2, {"secc": lambda x, w, _: kernels.rms_norm(x, w), "eager": _plain_rms},
            entries=norm, liger="rms_norm",
        ),
        Case(
            "layer_norm", _norm_inputs, 3,
            {"secc": kernels.layer_norm, "eager": lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b)}, entries=norm, liger="layer_norm",
        ),
        Case("swiglu", _gate_inputs, 2, {"secc": kernels.swiglu, "eager": lambda g, u: F.silu(g) * u}, entries=gate, liger="swiglu"),
        Case(
            "geglu", _gate_inputs, 2, {"secc": kernels.geglu, "eager": lambda g, u: F.gelu(g, approximate="tanh") * u},
            entries=gate, liger="geglu",
        ),
        Case(
            "rope", _rope_inputs, 2,
            {"secc": kernels.rope, "eager": lambda q, k, cos, sin: (_rotate(q, cos, sin), _rotate(k, cos, sin))},
            entries=lambda s: 4.0 * s.rows * (s.heads + s.key_heads) * s.head, liger="rope",
        ),
        Case(
            "gather_rows", _row_inputs, 1, {"secc": kernels.gather_rows, "eager": lambda x, i: x.index_select(0, i)},
            entries=lambda s: 4.0 * s.rows * s.hidden,
        ),
        Case(
            "scatter_rows", _scatter_inputs, 2,
            {"secc": lambda b, r, i: kernels.scatter_rows(b, i, r), "eager": lambda b, r, i: b.index_copy(0, i, r)},
            entries=lambda s: 4.0 * s.rows * s.hidden,
        ),
    ]  # fmt: skip


def _liger_ways() -> dict[str, Way]:
    from liger_kernel.transformers import functional as liger  # pyright: ignore[reportMissingImports]

    return {
        "fused_linear_cross_entropy": liger.liger_fused_linear_cross_entropy,
        "fused_linear_jsd": lambda h, w, g, v, _: liger.liger_fused_linear_jsd(h, w, g, v, jsd_beta=0.0),
        "rms_norm": lambda x, w, _: liger.liger_rms_norm(
            x, w, 1e-6, in_place=False
        ),  # the upstream gradient is used again
        "layer_norm": lambda x, w, b: liger.liger_layer_norm(x, w, b, 1e-5),
        "swiglu": liger.liger_swiglu,
        "geglu": liger.liger_geglu,
        "rope": liger.liger_rope,
    }


def ways_of(case: Case, compiled: bool) -> dict[str, Way]:
    """The ways to time: secc, eager, torch.compile of eager, and Liger's where it is installed and has
    one."""
    ways = dict(case.ways)
    if compiled:
        ways["compile"] = torch.compile(case.ways["eager"], dynamic=False)
    if case.liger and importlib.util.find_spec("liger_kernel") is not None:
        ways["liger"] = _liger_ways()[case.liger]
    return ways
