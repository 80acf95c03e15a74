"""Compiles every Triton kernel of secc for GPUs that need not be present, and prints what each takes there.

    python tools/compile_kernels.py                            Ampere, Hopper and Blackwell, three dtypes
    python tools/compile_kernels.py --arch 90 --dtypes bfloat16

The launches are those of a training step at the sizes of Qwen3 and Llama models: operators are called on
small CPU tensors with the launch parameters of the real size, and Triton compiles in place of launching.
Registers are per thread. `stack` is what the compiler keeps in a thread's local memory: bytes that did not
fit into registers (spills). The exit code is 1 if a launch has any.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from secc.runtime import kernels
from secc.runtime.kernels import backend, divergence, launch_tuning
from secc.runtime.randomness import bits_triton
from tools.benchmark_table import BenchmarkTable, add_json_option

ARCHITECTURES = {80: "A100", 90: "H100, H200", 100: "B200"}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VOCABULARY = 151_936
NORM_WIDTHS = (128, 1024, 2048, 4096, 5120, 8192)
GATE_WIDTHS = (3072, 12_288, 28_672)
HEAD_WIDTHS = (64, 80, 128)
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class OperatorLaunches:
    """Calls of an operator, forward and backward, as a training step makes them: `run(dtype)`."""

    name: str
    run: Callable[[torch.dtype], None]


@dataclass(frozen=True)
class KernelResources:
    """What a compiled kernel takes: registers and stack bytes of a thread, shared memory of a program."""

    kernel: str
    warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int


class _AbsentGpu:
    """The part of a driver that Triton needs to compile."""

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextmanager
def compile_only(architecture: int) -> Iterator[list[Any]]:
    """Inside the block operators take CPU tensors for GPU tensors, and each launch is compiled for the
    architecture (90: Hopper) instead of run. Yields the list that compiled kernels are added to."""
    found: list[Any] = []
    run = JITFunction.run

    def compile_launch(self: Any, *arguments: Any, **options: Any) -> None:
        found.append(run(self, *arguments, **{**options, "warmup": True}))

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(JITFunction, "run", compile_launch))
        stack.enter_context(patch.object(driver, "_active", _AbsentGpu(architecture)))
        for module in _kernel_modules():
            if module is not backend and hasattr(module, "has_kernels"):
                patched = patch.object(module, "has_kernels", lambda x: x.dtype in backend.KERNEL_DTYPES)
                stack.enter_context(patched)
        yield found


def _kernel_modules() -> Iterator[Any]:
    for info in pkgutil.iter_modules(kernels.__path__, kernels.__name__ + "."):
        yield importlib.import_module(info.name)


def measure_resources(kernel: Any) -> KernelResources:
    """Reads registers, stack and shared memory from a compiled kernel's machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = _RESOURCES.search(text)
    assert usage is not None, f"cuobjdump printed no resources of {kernel.name}: {text}"
    registers, stack, _, local = (int(number) for number in usage.groups())
    name = str(kernel.name).strip("_")
    return KernelResources(
        name, kernel.metadata.num_warps, registers, max(stack, local), kernel.metadata.shared
    )


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def _run_cross_entropy(dtype: torch.dtype) -> None:
    hidden, weight, target = _random(dtype, 3, 32), _random(dtype, 4096, 32), torch.tensor([1, 2, -100])
    with _use_launch_of("linear_cross_entropy", VOCABULARY):
        kernels.linear_cross_entropy(hidden, weight, target)
        kernels.linear_cross_entropy(hidden, weight, target)[0].backward()
        kernels.linear_cross_entropy(
            hidden, weight, target, bias=_random(dtype, 4096), softcap=30.0, label_smoothing=0.1
        )[0].backward()
        kernels.linear_cross_entropy_rows(hidden, weight, target).sum().backward()
        kernels.linear_cross_entropy_rows(
            hidden, weight, target, bias=_random(dtype, 4096), softcap=30.0
        ).sum().backward()


def _run_divergence(kind: Any) -> Callable[[torch.dtype], None]:
    def run(dtype: torch.dtype) -> None:
        hidden, weight, target = _random(dtype, 3, 32), _random(dtype, 4096, 32), torch.tensor([1, 2, -100])
        with _use_launch_of("linear_kl", VOCABULARY), _use_launch_of("linear_kl_ce", VOCABULARY):
            kernels.linear_kl(hidden, weight, hidden, weight, kind=kind)
            divergences, _, entropies, _ = kernels.linear_kl_ce(
                hidden, weight, hidden, weight, target, kind=kind
            )
            (divergences + entropies).backward()
            more: dict[str, Any] = {"kind": kind, "student_softcap": 30.0, "teacher_softcap": 30.0}
            more |= {"student_bias": _random(dtype, 4096), "teacher_bias": _random(dtype, 4096)}
            kernels.linear_kl(hidden, weight, hidden, weight, torch.ones(3), **more)[0].backward()
            kernels.linear_kl_ce(hidden, weight, hidden, weight, target, torch.ones(3), **more)[0].backward()

    return run


def _run_norms(width: int) -> Callable[[torch.dtype], None]:
    def run(dtype: torch.dtype) -> None:
        x, weight = _random(dtype, 5, width), _random(dtype, width)
        normed = kernels.rms_norm(x, weight)
        assert isinstance(normed, torch.Tensor)
        normed.sum().backward()
        kernels.layer_norm(x, weight, _random(dtype, width), residual=x)[0].sum().backward()
        for both in (
            kernels.layer_norm(x, weight, _random(dtype, width), residual=x),
            kernels.rms_norm(x, weight, residual=x),
        ):
            (both[0] + both[1]).sum().backward()  # the sum is used, too

    return run


def _run_gates(width: int) -> Callable[[torch.dtype], None]:
    def run(dtype: torch.dtype) -> None:
        for gate in (kernels.swiglu, kernels.geglu, lambda g, u: kernels.geglu(g, u, "none")):
            gate(_random(dtype, 3, width), _random(dtype, 3, width)).sum().backward()

    return run


def _run_rotation(width: int) -> Callable[[torch.dtype], None]:
    def run(dtype: torch.dtype) -> None:
        rotated = width if width & (width - 1) == 0 else width - 16  # a part of each head
        tables = [torch.ones(2, rotated, dtype=dtype)] * 2
        q, k = _random(dtype, 1, 32, 2, width), _random(dtype, 1, 8, 2, width)
        kernels.rope(q, k, *tables)[0].sum().backward()

    return run


def _run_rows(width: int) -> Callable[[torch.dtype], None]:
    def run(dtype: torch.dtype) -> None:
        x, index = _random(dtype, 8, width), torch.tensor([0, 3])
        kernels.gather_rows(x, index).sum().backward()
        kernels.scatter_rows(x, index, _random(dtype, 2, width)).sum().backward()

    return run


def _run_random_bits(dtype: torch.dtype) -> None:
    bits_triton.random_bits(torch.zeros(4, dtype=torch.int64), torch.zeros(64, dtype=torch.int64))


def _use_launch_of(name: str, size: int) -> contextlib.AbstractContextManager[None]:
    default = launch_tuning.TUNABLE_KERNELS[name].default_launch(size, torch.device("cpu"))
    return launch_tuning.use_launch(name, default)


def all_launches() -> list[OperatorLaunches]:
    """Returns all operators, each at the sizes at which its kernel is launched in another way."""
    return [
        OperatorLaunches("linear_cross_entropy", _run_cross_entropy),
        *(
            OperatorLaunches(f"linear_kl {kind}", _run_divergence(kind))
            for kind in divergence.DIVERGENCE_KINDS
        ),
        *(OperatorLaunches(f"norms {width}", _run_norms(width)) for width in NORM_WIDTHS),
        *(OperatorLaunches(f"gates {width}", _run_gates(width)) for width in GATE_WIDTHS),
        *(OperatorLaunches(f"rope {width}", _run_rotation(width)) for width in HEAD_WIDTHS),
        *(OperatorLaunches(f"rows {width}", _run_rows(width)) for width in (1024, 8192)),
        OperatorLaunches("random bits", _run_random_bits),
    ]


def compile_launches(
    launches: Sequence[OperatorLaunches], architecture: int, dtype: torch.dtype
) -> list[tuple[str, KernelResources]]:
    """Compiles and measures the kernels of the launches; returns (operator, resources), each only once."""
    found: list[tuple[str, KernelResources]] = []
    for launch in launches:
        with compile_only(architecture) as compiled:
            launch.run(dtype)
        found += [(launch.name, measure_resources(kernel)) for kernel in compiled]
    return list(dict.fromkeys(found))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", type=int, nargs="*", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    parser.add_argument("--dtypes", nargs="*", choices=names, default=names)
    add_json_option(parser)
    options = parser.parse_args()
    about = (
        "Each kernel as compiled for a GPU at the launch of a training step: registers and stack (spilled)"
        f" bytes of a thread, shared memory of a program in bytes. Triton {triton.__version__}."
    )
    columns = ("kernel", "operator", "dtype", "architecture", "warps", "registers", "stack", "shared")
    table, spilled = BenchmarkTable(columns, about, options.json), 0
    for architecture in options.arch:
        for name in options.dtypes:
            for operator, r in compile_launches(all_launches(), architecture, getattr(torch, name)):
                numbers = (r.warps, r.registers, r.stack_bytes, r.shared_bytes)
                table.add_row(r.kernel, operator, name, f"sm_{architecture}", *numbers)
                spilled += r.stack_bytes > 0
    print(f"\n{len(table.rows)} kernels compiled, {spilled} with spills")
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
