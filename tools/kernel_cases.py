"""The cases of tools/bench_kernels.py: for each fused operator its inputs at a model's sizes, and its
implementations.

An implementation is a function of the inputs that returns tensors: secc's operator, plain PyTorch, and
Liger-Kernel (0.8 or newer) if it is installed. FLOPs and bytes are what every implementation must spend:
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

Implementation = Callable[..., Any]
TEACHER_WIDTH = 5120  # hidden size of the teacher in the distillation losses


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model, and the number of rows (tokens)."""

    name: str
    hidden: int
    vocabulary: int
    intermediate: int
    heads: int
    key_heads: int
    head: int
    rows: int = 0


MODEL_SIZES = (
    ModelSizes("Qwen3-0.6B", 1024, 151_936, 3072, 16, 8, 128),
    ModelSizes("Qwen3-8B", 4096, 151_936, 12_288, 32, 8, 128),
    ModelSizes("Qwen3-32B", 5120, 151_936, 25_600, 64, 8, 128),
    ModelSizes("Llama-3.2-1B", 2048, 128_256, 8192, 32, 8, 64),
    ModelSizes("Llama-3.1-8B", 4096, 128_256, 14_336, 32, 8, 128),
    ModelSizes("Llama-3.1-70B", 8192, 128_256, 28_672, 64, 8, 128),
)
TINY_SIZES = ModelSizes("tiny", 64, 1000, 96, 4, 2, 32, 48)


@dataclass(frozen=True)
class KernelCase:
    """One operator: random inputs, those with gradients first; how many of them have gradients; its
    implementations; and the least work that it takes. `moved_entries`: entries of the inputs' dtype that are
    read or written, forward and backward."""

    name: str
    make_inputs: Callable[[ModelSizes, torch.dtype, torch.device], list[torch.Tensor]]
    differentiable_inputs: int
    implementations: Mapping[str, Implementation]
    flops: Callable[[ModelSizes], float] = lambda s: 0.0
    moved_entries: Callable[[ModelSizes], float] = lambda s: 0.0
    liger_name: str = field(default="", repr=False)


def _random_tensors(dtype: torch.dtype, device: torch.device, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float32, device=device).to(dtype) for shape in shapes]


def _head_inputs(s: ModelSizes, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    hidden, weight = _random_tensors(dtype, device, (s.rows, s.hidden), (s.vocabulary, s.hidden))
    return [hidden, weight.mul_(2 * s.hidden**-0.5), torch.randint(s.vocabulary, (s.rows,), device=device)]


def _two_head_inputs(s: ModelSizes, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    width = min(TEACHER_WIDTH, 2 * s.hidden)
    teacher, teacher_weight = _random_tensors(dtype, device, (s.rows, width), (s.vocabulary, width))
    hidden, weight, target = _head_inputs(s, dtype, device)
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


def _at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    """Converts logits to float32, as Hugging Face's losses do; float64 stays."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _plain_ce(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(_at_least_float32(hidden @ weight.T), target)


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
    return divergence + F.cross_entropy(_at_least_float32(logits), target)


def _mean_of_sums(sums: tuple[torch.Tensor, ...]) -> torch.Tensor:
    means = [total / count for total, count in zip(sums[::2], sums[1::2], strict=True)]
    return torch.stack(means).sum()


def _student_flops(s: ModelSizes) -> float:
    return 6.0 * s.rows * s.hidden * s.vocabulary


def _teacher_flops(s: ModelSizes) -> float:
    return 2.0 * s.rows * min(TEACHER_WIDTH, 2 * s.hidden) * s.vocabulary


def loss_cases() -> list[KernelCase]:
    """Returns the losses on linear heads, as means over rows."""
    return [
        KernelCase(
            "linear_cross_entropy",
            _head_inputs,
            2,
            {
                "secc": lambda h, w, t: _mean_of_sums(kernels.linear_cross_entropy(h, w, t)),
                "eager": _plain_ce,
            },
            flops=_student_flops,
            liger_name="fused_linear_cross_entropy",
        ),
        KernelCase(
            "linear_cross_entropy_rows",
            _head_inputs,
            2,
            {"secc": lambda *x: kernels.linear_cross_entropy_rows(*x).mean(), "eager": _plain_ce},
            flops=_student_flops,
        ),
        KernelCase(
            "linear_kl",
            _two_head_inputs,
            2,
            {"secc": lambda h, w, g, v, _: _mean_of_sums(kernels.linear_kl(h, w, g, v)), "eager": _plain_kl},
            flops=lambda s: _student_flops(s) + _teacher_flops(s),
            liger_name="fused_linear_jsd",
        ),
        KernelCase(
            "linear_kl_ce",
            _two_head_inputs,
            2,
            {"secc": lambda *x: _mean_of_sums(kernels.linear_kl_ce(*x)), "eager": _plain_kl_ce},
            flops=lambda s: _student_flops(s) + _teacher_flops(s),
        ),
    ]


def _norm_inputs(s: ModelSizes, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    return _random_tensors(dtype, device, (s.rows, s.hidden), (s.hidden,), (s.hidden,))


def _gate_inputs(s: ModelSizes, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    return _random_tensors(dtype, device, (s.rows, s.intermediate), (s.rows, s.intermediate))


def _rope_inputs(s: ModelSizes, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    q, k = (
        t.transpose(1, 2)
        for t in _random_tensors(
            dtype, device, (1, s.rows, s.heads, s.head), (1, s.rows, s.key_heads, s.head)
        )
    )
    angles = torch.arange(s.rows, device=device).unsqueeze(1) * 10_000.0 ** -torch.linspace(
        0, 1, s.head // 2, device=device
    )
    angles = torch.cat([angles, angles], 1).unsqueeze(0)
    return [q, k, angles.cos().to(dtype), angles.sin().to(dtype)]


def _plain_rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)


def _row_inputs(s: ModelSizes, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    return [*_random_tensors(dtype, device, (s.rows, s.hidden)), torch.randperm(s.rows, device=device)]


def _scatter_inputs(s: ModelSizes, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    base, rows = _random_tensors(dtype, device, (s.rows, s.hidden), (s.rows // 4, s.hidden))
    return [base, rows, torch.randperm(s.rows, device=device)[: s.rows // 4]]


def _plain_rms(x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    wide = _at_least_float32(x)
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def memory_bound_cases() -> list[KernelCase]:
    """Returns the memory-bound operators. Forward and backward, norms move 5 tensors of [rows, hidden], gated
    activations 8 of [rows, intermediate]."""

    def norm(s: ModelSizes) -> float:
        return 5.0 * s.rows * s.hidden

    def gate(s: ModelSizes) -> float:
        return 8.0 * s.rows * s.intermediate

    return [
        KernelCase(
            "rms_norm",
            _norm_inputs,
            2,
            {"secc": lambda x, w, _: kernels.rms_norm(x, w), "eager": _plain_rms},
            moved_entries=norm,
            liger_name="rms_norm",
        ),
        KernelCase(
            "layer_norm",
            _norm_inputs,
            3,
            {"secc": kernels.layer_norm, "eager": lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b)},
            moved_entries=norm,
            liger_name="layer_norm",
        ),
        KernelCase(
            "swiglu",
            _gate_inputs,
            2,
            {"secc": kernels.swiglu, "eager": lambda g, u: F.silu(g) * u},
            moved_entries=gate,
            liger_name="swiglu",
        ),
        KernelCase(
            "geglu",
            _gate_inputs,
            2,
            {"secc": kernels.geglu, "eager": lambda g, u: F.gelu(g, approximate="tanh") * u},
            moved_entries=gate,
            liger_name="geglu",
        ),
        KernelCase(
            "rope",
            _rope_inputs,
            2,
            {
                "secc": kernels.rope,
                "eager": lambda q, k, cos, sin: (_plain_rotate(q, cos, sin), _plain_rotate(k, cos, sin)),
            },
            moved_entries=lambda s: 4.0 * s.rows * (s.heads + s.key_heads) * s.head,
            liger_name="rope",
        ),
        KernelCase(
            "gather_rows",
            _row_inputs,
            1,
            {"secc": kernels.gather_rows, "eager": lambda x, i: x.index_select(0, i)},
            moved_entries=lambda s: 4.0 * s.rows * s.hidden,
        ),
        KernelCase(
            "scatter_rows",
            _scatter_inputs,
            2,
            {
                "secc": lambda b, r, i: kernels.scatter_rows(b, i, r),
                "eager": lambda b, r, i: b.index_copy(0, i, r),
            },
            moved_entries=lambda s: 4.0 * s.rows * s.hidden,
        ),
    ]


def _liger_implementations() -> dict[str, Implementation]:
    from liger_kernel.transformers import functional as liger  # pyright: ignore[reportMissingImports]

    return {
        "fused_linear_cross_entropy": liger.liger_fused_linear_cross_entropy,
        "fused_linear_jsd": lambda h, w, g, v, _: liger.liger_fused_linear_jsd(h, w, g, v, jsd_beta=0.0),
        # Not in place, because the upstream gradient is used again.
        "rms_norm": lambda x, w, _: liger.liger_rms_norm(x, w, 1e-6, in_place=False),
        "layer_norm": lambda x, w, b: liger.liger_layer_norm(x, w, b, 1e-5),
        "swiglu": liger.liger_swiglu,
        "geglu": liger.liger_geglu,
        "rope": liger.liger_rope,
    }


def implementations_of(case: KernelCase, compiled: bool) -> dict[str, Implementation]:
    """Returns the implementations to time: secc, eager, torch.compile of eager, and Liger's if it is
    installed and has the operator."""
    ways = dict(case.implementations)
    if compiled:
        ways["compile"] = torch.compile(case.implementations["eager"], dynamic=False)
    if case.liger_name and importlib.util.find_spec("liger_kernel") is not None:
        ways["liger"] = _liger_implementations()[case.liger_name]
    return ways
