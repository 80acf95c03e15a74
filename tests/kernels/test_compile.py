"""Compiles every launch for a GPU that need not be present: operators run on CPU tensors, and Triton only
compiles."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from secc.runtime import kernels
from secc.runtime.kernels import (
    backend,
    divergence,
    gated,
    gather_scatter_rows,
    kl_cross_entropy,
    launch_tuning,
    norms,
    rotary,
    tile_cross_entropy,
)

triton = pytest.importorskip("triton")


class Hopper:
    """The part of a driver that Triton needs to compile."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects launches compiled for a Hopper GPU instead of running them; operators take CPU tensors for GPU
    tensors."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    found: list[Any] = []
    run = JITFunction.run
    monkeypatch.setattr(
        JITFunction,
        "run",
        lambda self, *args, **kwargs: found.append(run(self, *args, **{**kwargs, "warmup": True})),
    )
    for module in (
        divergence,
        tile_cross_entropy,
        gated,
        kl_cross_entropy,
        norms,
        rotary,
        gather_scatter_rows,
    ):
        monkeypatch.setattr(module, "has_kernels", lambda x: x.dtype in backend.KERNEL_DTYPES)
    monkeypatch.setattr(driver, "_active", Hopper())
    return found


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()


def losses() -> None:
    hidden, weight, target = random(3, 32), random(4096, 32), torch.tensor([1, 2, -100])
    with launch_tuning.use_launch("linear_cross_entropy", launch_tuning.LaunchParameters(1024, 3, 4)):
        kernels.linear_cross_entropy(hidden, weight, target)
        kernels.linear_cross_entropy(
            hidden, weight, target, bias=random(4096), softcap=30.0, label_smoothing=0.1
        )[0].backward()
    for kind in divergence.DIVERGENCE_KINDS:
        with (
            launch_tuning.use_launch("linear_kl", launch_tuning.LaunchParameters(1024, 3, 4)),
            launch_tuning.use_launch("linear_kl_ce", launch_tuning.LaunchParameters(1024, 3, 4)),
        ):
            kernels.linear_kl(hidden, weight, hidden, weight, kind=kind)
            divergences, _, entropies, _ = kernels.linear_kl_ce(
                hidden, weight, hidden, weight, target, kind=kind
            )
            (divergences + entropies).backward()


def norms_of(width: int) -> Callable[[], None]:
    def run() -> None:
        x, weight = random(5, width), random(width)
        kernels.rms_norm(x, weight).sum().backward()
        kernels.layer_norm(x, weight, random(width), residual=x)[0].sum().backward()

    return run


def entries() -> None:
    for function in (kernels.swiglu, kernels.geglu, lambda g, u: kernels.geglu(g, u, "none")):
        function(random(3, 4096), random(3, 4096)).sum().backward()
    kernels.rope(random(1, 32, 2, 128), random(1, 8, 2, 128), torch.ones(2, 128), torch.ones(2, 128))[
        0
    ].sum().backward()
    kernels.rope(random(1, 32, 2, 80), random(1, 8, 2, 80), torch.ones(2, 64), torch.ones(2, 64))


def moves() -> None:
    x, index = random(8, 4096), torch.tensor([0, 3])
    kernels.gather_rows(x, index).sum().backward()
    kernels.scatter_rows(x, index, random(2, 4096)).sum().backward()


@pytest.mark.parametrize(
    ("run", "launches"), [(losses, 28), (norms_of(128), 4), (norms_of(4096), 4), (entries, 11), (moves, 5)]
)
def test_every_launch_compiles(compiled, run, launches):
    run()
    assert len(compiled) == launches
    for kernel in compiled:
        assert kernel.asm["cubin"]
        if kernel.name == "_row_losses_kernel":  # a few numbers a row
            continue
        assert re.search(r"ld\.global\S*\.v[48]", kernel.asm["ptx"]), (
            f"{kernel.name} does not load 16 bytes at a time"
        )
