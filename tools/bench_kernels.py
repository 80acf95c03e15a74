"""Measures secc's fused operators on this machine's GPU: first their errors, then time and peak memory next
to other implementations.

    python tools/bench_kernels.py              all operators at the sizes of Qwen3 and Llama models,
                                               4,096 to 32,768 rows
    python tools/bench_kernels.py --models Qwen3-8B --rows 8192    fewer sizes
    python tools/bench_kernels.py --tune       measures launch parameters first, and keeps them for later runs
                                               and for training
    python tools/bench_kernels.py --compile-only  runs everything once, so that compilers fill their caches
    python tools/bench_kernels.py --precision  only the errors against float64, next to unfused PyTorch's;
                                               needs no GPU

Each operator runs forward and backward, launched by PyTorch (`ms`) and, where that takes a few milliseconds
at most, replayed from a CUDA graph (`graph_ms`): the device's time alone, so that the difference is what the
host adds. Peak memory is what exists in addition to inputs and gradients. Bandwidth and FLOP/s are the least
that any implementation must move and compute, divided by the device's time, as shares of what a copy and a
matrix product reach on this machine. Writes a table, results.json and plot.svg to --out. The exit code is 1
if an operator is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from secc.runtime.kernels import backend, launch_tuning
from tools.benchmark_table import BenchmarkTable, add_json_option
from tools.kernel_cases import (
    MODEL_SIZES,
    TINY_SIZES,
    Implementation,
    KernelCase,
    ModelSizes,
    implementations_of,
    loss_cases,
    memory_bound_cases,
)

IMPLEMENTATION_COLORS = {"secc": "#2a6fb0", "eager": "#999999", "compile": "#d9a441", "liger": "#5a9a5a"}
# The tunable kernel behind an operator, where they have different names.
TUNABLE_OF_CASE = {
    "linear_cross_entropy_rows": "linear_cross_entropy",
    "rms_norm": "norm",
    "layer_norm": "norm",
    "swiglu": "gated",
    "geglu": "gated",
    "gather_rows": "rows",
    "scatter_rows": "rows",
}
MOST_REPLAYED_MS = 5.0  # what takes longer hides its launches
ERROR_SLACK = 2.0  # allowed error, relative to unfused PyTorch in the same dtype


@dataclass(frozen=True)
class DeviceCeilings:
    """What this GPU reaches, per second: bytes moved by a copy (read and written) and FLOPs of a square
    product."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class KernelResult:
    """One implementation of one operator at one size, forward and backward. `graph_ms`: replayed from a CUDA
    graph, 0 where it was not; `failure`: why there is no time."""

    case: str
    model: str
    rows: int
    way: str
    ms: float = 0.0
    graph_ms: float = 0.0
    memory_mib: float = 0.0
    of_bandwidth: float = 0.0
    of_flops: float = 0.0
    failure: str = ""


def time_milliseconds(run: Callable[[], object]) -> float:
    """Returns the median time of a run on the GPU, with the L2 cache cleared before each."""
    from triton.testing import do_bench

    return do_bench(run, warmup=50, rep=200, return_mode="median")  # pyright: ignore[reportReturnType]  # a number


def replayed_milliseconds(run: Callable[[], object]) -> float:
    """Returns the median time of a run that a CUDA graph replays; 0 if it cannot be recorded."""
    from triton.testing import do_bench_cudagraph

    try:
        return do_bench_cudagraph(run, rep=50, return_mode="median")  # pyright: ignore[reportReturnType]
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
    except RuntimeError as error:
        print(f"not recorded as a graph: {str(error).splitlines()[0]}", file=sys.stderr)
    return 0.0


def measure_ceilings(dtype: torch.dtype) -> DeviceCeilings:
    """Measures the ceilings of this machine, so that shares do not refer to a data sheet."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a = torch.randn(8192, 8192, device="cuda").to(dtype)
    copy, product = time_milliseconds(lambda: target.copy_(source)), time_milliseconds(lambda: a @ a)
    return DeviceCeilings(2 * source.numel() / copy * 1e3, 2 * 8192.0**3 / product * 1e3)


def run_implementation(implementation: Implementation, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    outputs = implementation(*inputs)
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def run_forward_backward(
    case: KernelCase, way: Implementation, inputs: Sequence[torch.Tensor], upstream: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Runs forward and backward once and returns the gradients."""
    return torch.autograd.grad(
        run_implementation(way, inputs), inputs[: case.differentiable_inputs], upstream
    )


def prepare_inputs(
    case: KernelCase, sizes: ModelSizes, dtype: torch.dtype, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns (inputs, upstream gradients) of an operator, the same for all implementations."""
    torch.manual_seed(0)
    inputs = [
        x.requires_grad_(i < case.differentiable_inputs)
        for i, x in enumerate(case.make_inputs(sizes, dtype, device))
    ]
    with torch.no_grad():
        outputs = run_implementation(case.implementations["secc"], inputs)
    return inputs, [torch.ones_like(o) if o.dim() == 0 else torch.randn_like(o) for o in outputs]


def relative_errors(
    case: KernelCase,
    way: Implementation,
    inputs: Sequence[torch.Tensor],
    upstream: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
) -> list[float]:
    """Returns relative errors, by norm: of all outputs together, then of each gradient."""
    outputs = torch.cat([o.detach().double().flatten() for o in run_implementation(way, inputs)])
    results = [outputs, *run_forward_backward(case, way, inputs, upstream)]
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(results, exact, strict=True)]


def measure_precision(
    case: KernelCase, sizes: ModelSizes, dtype: torch.dtype, device: torch.device
) -> dict[str, list[float]]:
    """Returns the errors of secc's operator and of unfused PyTorch in `dtype`, against unfused PyTorch in
    float64 on the same numbers."""
    inputs, upstream = prepare_inputs(case, sizes, dtype, device)
    wide = [
        x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs
    ]
    eager, ramps = case.implementations["eager"], [u.double() for u in upstream]
    outputs = torch.cat([o.detach().flatten() for o in run_implementation(eager, wide)])
    exact = [outputs, *run_forward_backward(case, eager, wide, ramps)]
    return {
        name: relative_errors(case, case.implementations[name], inputs, upstream, exact)
        for name in ("secc", "eager")
    }


def measure_implementation(
    case: KernelCase,
    way: str,
    run: Implementation,
    sizes: ModelSizes,
    dtype: torch.dtype,
    top: DeviceCeilings,
) -> KernelResult:
    """Measures the time of an implementation, then its peak memory in one more step."""
    inputs, upstream = prepare_inputs(case, sizes, dtype, torch.device("cuda"))
    result = KernelResult(case.name, sizes.name, sizes.rows, way)
    try:
        step = partial(run_forward_backward, case, run, inputs, upstream)
        ms = time_milliseconds(step)
        graph_ms = replayed_milliseconds(step) if ms <= MOST_REPLAYED_MS else 0.0
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gradients = run_forward_backward(case, run, inputs, upstream)
        extra_bytes = (
            torch.cuda.max_memory_allocated() - before - sum(g.numel() * g.element_size() for g in gradients)
        )
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return replace(result, failure="out of memory")
    moved, on_device = case.moved_entries(sizes) * inputs[0].element_size(), graph_ms or ms
    return replace(
        result,
        ms=ms,
        memory_mib=max(extra_bytes, 0) / 2**20,
        graph_ms=graph_ms,
        of_bandwidth=moved / on_device * 1e3 / top.bytes_per_s,
        of_flops=case.flops(sizes) / on_device * 1e3 / top.flops_per_s,
    )


def results_table(results: Sequence[KernelResult]) -> str:
    """Returns the results as a Markdown table."""
    lines = [
        "| operator | model | rows | way | ms | graph ms | memory beyond, MiB | of copy | of product |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        share = [f"{100 * x:.0f} %" if x else "" for x in (r.of_bandwidth, r.of_flops)]
        graph = f"{r.graph_ms:.3f}" if r.graph_ms else ""
        numbers = [f"{r.ms:.3f}", graph, f"{r.memory_mib:,.0f}", *share]
        numbers = [r.failure, "", "", "", ""] if r.failure else numbers
        lines.append(f"| {' | '.join([r.case, r.model, f'{r.rows:,}', r.way, *numbers])} |")
    return "\n".join(lines)


def draw_results(results: Sequence[KernelResult]) -> str:
    """Returns the times as bars in SVG: one group per operator and size, relative to its slowest
    implementation."""
    groups: dict[tuple[str, str, int], list[KernelResult]] = {}
    for r in results:
        if not r.failure:
            groups.setdefault((r.case, r.model, r.rows), []).append(r)
    parts, y = [], 30
    for (case, model, rows), bars in groups.items():
        parts.append(f'<text x="10" y="{y + 11}">{case}, {model}, {rows:,} rows</text>')
        slowest = max(bar.ms for bar in bars)
        for bar in bars:
            parts.append(
                f'<rect x="360" y="{y}" width="{380 * bar.ms / slowest:.1f}" height="12" '
                f'fill="{IMPLEMENTATION_COLORS[bar.way]}"/>'
            )
            parts.append(
                f'<text x="{366 + 380 * bar.ms / slowest:.1f}" y="{y + 11}">{bar.way} {bar.ms:.3g} ms</text>'
            )
            y += 15
        y += 10
    style = "<style>text{font:11px sans-serif}</style>"
    style += '<text x="10" y="16">Forward and backward; shorter is better</text>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{y}">{style}{"".join(parts)}</svg>\n'


def check_precision(
    cases: Sequence[KernelCase],
    sizes: ModelSizes,
    dtype: torch.dtype,
    device: torch.device,
    json_file: Path | None = None,
) -> bool:
    """Prints the errors of all operators and writes them to `json_file`, if any. Returns whether all
    operators err at most `ERROR_SLACK` times as much as unfused PyTorch (plus float32's rounding)."""
    implementation = (
        "Triton kernels"
        if backend.has_kernels(torch.empty(0, dtype=dtype, device=device))
        else "PyTorch references"
    )
    about = (
        f"Relative errors against float64, {dtype}, {sizes.name} sizes, {sizes.rows} rows, {implementation}: "
        "outputs, then each gradient."
    )
    table = BenchmarkTable(("operator", "fused", "unfused", "verdict"), about, json_file)
    all_fine = True
    for case in cases:
        errors = measure_precision(case, sizes, dtype, device)
        pairs = list(zip(errors["secc"], errors["eager"], strict=True))
        is_fine = all(ours <= ERROR_SLACK * theirs + 2e-5 for ours, theirs in pairs)
        all_fine &= is_fine
        cells = [", ".join(f"{error:.1e}" for error in column) for column in zip(*pairs, strict=True)]
        table.add_row(case.name, *cells, "" if is_fine else "WRONG")
    return all_fine


def tune_kernels(
    cases: Sequence[KernelCase], sizes: Sequence[ModelSizes], dtype: torch.dtype, compile_only: bool
) -> None:
    """Measures the launch parameters of the cases' kernels at these sizes, each size class once; or only runs
    every candidate once."""
    known = set[str]()
    for s in sizes:
        widths = {"norm": s.hidden, "rows": s.hidden, "gated": s.intermediate, "rope": s.head}
        widths |= dict.fromkeys(launch_tuning.TUNABLE_KERNELS.keys() - widths.keys(), s.vocabulary)
        asked = {TUNABLE_OF_CASE.get(case.name, case.name) for case in cases}
        for name in sorted(asked & launch_tuning.TUNABLE_KERNELS.keys()):
            key = launch_tuning.measurement_key(name, widths[name], dtype, torch.device("cuda"))
            if key in known:
                continue
            known.add(key)
            if compile_only:
                launch_tuning.tune(s.rows, {name: widths[name]}, dtype, time=run_once, save=False)
                launch_tuning.forget_measured_launches()
            else:
                launch = launch_tuning.tune(s.rows, {name: widths[name]}, dtype)[name]
                print(f"tuned {name} for {s.name}: {launch}", flush=True)


def run_once(run: Callable[[], object]) -> float:
    """Runs once and takes it for a millisecond."""
    run()
    torch.cuda.synchronize()
    return 1.0


def compile_cases(cases: Sequence[KernelCase], sizes: Sequence[ModelSizes], dtype: torch.dtype) -> None:
    """Runs every implementation once."""
    for case in cases:
        for s in sizes:
            for run in implementations_of(case, compiled=True).values():
                inputs, upstream = prepare_inputs(case, s, dtype, torch.device("cuda"))
                run_forward_backward(case, run, inputs, upstream)
            torch.cuda.empty_cache()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [sizes.name for sizes in MODEL_SIZES]
    parser.add_argument("--models", nargs="*", default=names, choices=names, help="only these models' sizes")
    parser.add_argument("--rows", nargs="*", type=int, default=[4096, 8192, 32_768], help="numbers of rows")
    parser.add_argument("--compile-only", action="store_true", help="run everything once without timing it")
    parser.add_argument("--tune", action="store_true", help="measure launch parameters first")
    parser.add_argument("--precision", action="store_true", help="only the errors against float64")
    parser.add_argument("--kernels", nargs="*", help="only these operators")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench_kernels"),
        help="folder for results.json, table.md and plot.svg",
    )
    add_json_option(parser)
    return parser.parse_args()


def bench_cases(
    cases: Sequence[KernelCase], sizes: Sequence[ModelSizes], dtype: torch.dtype, out: Path
) -> None:
    """Times all implementations of all operators at all sizes; writes results as they come."""
    top, results = measure_ceilings(dtype), list[KernelResult]()
    print(
        f"{torch.cuda.get_device_name()}: copy {top.bytes_per_s / 1e12:.2f} TB/s, "
        f"product {top.flops_per_s / 1e12:.0f} TFLOP/s"
    )
    out.mkdir(parents=True, exist_ok=True)
    for case in cases:
        for s in sizes:
            for way, run in implementations_of(case, compiled=True).items():
                results.append(measure_implementation(case, way, run, s, dtype, top))
                print(results_table(results[-1:]).splitlines()[-1], flush=True)
            torch.cuda.empty_cache()
            report = {
                "device": torch.cuda.get_device_name(),
                "ceilings": asdict(top),
                "results": [asdict(r) for r in results],
            }
            (out / "results.json").write_text(json.dumps(report, indent=1))
    (out / "table.md").write_text(results_table(results) + "\n")
    (out / "plot.svg").write_text(draw_results(results))


def main() -> int:
    args = parse_arguments()
    cases = [c for c in loss_cases() + memory_bound_cases() if not args.kernels or c.name in args.kernels]
    dtype, gpu = getattr(torch, args.dtype), torch.cuda.is_available()
    right = args.compile_only or check_precision(
        cases,
        replace(MODEL_SIZES[1], rows=512) if gpu else TINY_SIZES,
        dtype,
        torch.device("cuda" if gpu else "cpu"),
        args.json,
    )
    if not right:
        print("an operator is wrong; nothing was timed", file=sys.stderr)
        return 1
    if args.precision:
        return 0
    if not gpu:
        print("no GPU found, so nothing was timed; --precision alone needs none", file=sys.stderr)
        return 2
    models = [model for model in MODEL_SIZES if model.name in args.models]
    sizes = [replace(model, rows=rows) for model in models for rows in args.rows]
    if args.tune:
        tune_kernels(cases, [replace(model, rows=8192) for model in models], dtype, args.compile_only)
    if args.compile_only:
        compile_cases(cases, sizes, dtype)
        return 0
    bench_cases(cases, sizes, dtype, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
