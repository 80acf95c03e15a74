"""Checks of the fused operators: exact on many shapes, the same bits twice, no bad access, and fast."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

from tools.bench_kernels import (
    ERROR_SLACK,
    measure_ceilings,
    measure_precision,
    prepare_inputs,
    run_forward_backward,
    run_implementation,
)
from tools.gpu_day.outcome import Bench, Outcome, set_environment
from tools.kernel_cases import TINY_SIZES, KernelCase, ModelSizes, loss_cases, memory_bound_cases

SHAPES, KERNEL_PROCESSES = 500, 7
SPEED_OPTIONS = ["--models", "Qwen3-8B", "Qwen3-32B", "Llama-3.1-8B", "--rows", "8192", "--tune"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Rounding that unfused PyTorch may lack by chance on a few numbers, relative, by dtype.
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# What the fused operators aim at, of what a copy or a product reaches on the same card.
LEAST_OF_COPY, LEAST_OF_PRODUCT = 0.85, 0.70
MOST_KL_TIME, MOST_KL_MEMORY = 0.70, 1 / 20  # of eager


def describe_card(bench: Bench) -> Outcome:
    """Names the card and the software, and measures what a copy and a product reach."""
    found = Outcome({"torch": torch.__version__})
    if bench.dry:
        return found
    import triton

    ceilings = measure_ceilings(torch.bfloat16)
    found.figures |= {
        "card": torch.cuda.get_device_name(),
        "memory_gib": torch.cuda.get_device_properties(0).total_memory / 2**30,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "copy_tb_per_s": ceilings.bytes_per_s / 1e12,
        "product_tflop_per_s": ceilings.flops_per_s / 1e12,
    }
    return found


def random_cases(count: int, seed: int = 0) -> Iterator[tuple[KernelCase, ModelSizes, torch.dtype]]:
    """Yields operators at random sizes in turn, a third of them in each dtype."""
    chance, cases = random.Random(seed), loss_cases() + memory_bound_cases()
    for i in range(count):
        head = 2 * chance.randint(1, 80)
        sizes = ModelSizes(
            f"random {i}",
            hidden=chance.choice([chance.randint(1, 300), chance.randint(1, 2048)]),
            vocabulary=chance.choice([chance.randint(2, 500), chance.randint(2, 20_000)]),
            intermediate=chance.randint(1, 4096),
            heads=chance.randint(1, 12),
            key_heads=chance.randint(1, 4),
            head=head,
            rows=chance.choice([chance.randint(4, 40), chance.randint(4, 1500)]),
        )
        yield cases[i % len(cases)], sizes, DTYPES[i // len(cases) % len(DTYPES)]


def check_exactness(bench: Bench) -> Outcome:
    """Compares values and gradients with float64 on random shapes, next to unfused PyTorch's errors. Several
    processes share the shapes, since most of the time goes into compiling kernels."""
    if bench.dry:
        return _compare_shapes(bench, 30, 0, 1)
    parts = KERNEL_PROCESSES
    with ProcessPoolExecutor(parts, get_context("spawn")) as pool:
        results = pool.map(_compare_shapes, [bench] * parts, [SHAPES] * parts, range(parts), [parts] * parts)
        found = Outcome()
        for result in results:
            found.failures += result.failures
            for name, value in result.figures.items():
                known = found.figures.get(name, 0)
                assert isinstance(value, int | float) and isinstance(known, int | float)
                found.figures[name] = known + value if name == "shapes" else max(known, value)
    return found


def _compare_shapes(bench: Bench, count: int, part: int, parts: int) -> Outcome:
    """Compares each `parts`-th of `count` random shapes, from number `part` on."""
    found, worst = Outcome({"shapes": 0}), dict.fromkeys(DTYPES, 0.0)
    for case, sizes, dtype in list(random_cases(count))[part::parts]:
        if bench.dry:
            sizes = replace(sizes, rows=min(sizes.rows, 40), vocabulary=min(sizes.vocabulary, 500))
        try:
            errors = measure_precision(case, sizes, dtype, bench.device)
        except RuntimeError as error:
            found.failures.append(f"{case.name} {dtype} {sizes}: {str(error)[:300]}")
            continue
        for ours, theirs in zip(errors["secc"], errors["eager"], strict=True):
            worst[dtype] = max(worst[dtype], ours)
            if not ours <= ERROR_SLACK * theirs + ROUNDING[dtype]:
                found.failures.append(f"{case.name} {dtype} {sizes}: error {ours:.2e}, eager {theirs:.2e}")
        found.figures["shapes"] = int(found.figures["shapes"] or 0) + 1
    for dtype, error in worst.items():
        found.figures[f"worst_error_{str(dtype).removeprefix('torch.')}"] = error
    return found


def check_same_bits(bench: Bench) -> Outcome:
    """Runs every operator twice in each dtype and compares bits."""
    found = Outcome()
    for case in loss_cases() + memory_bound_cases():
        for dtype in DTYPES:
            sizes = replace(TINY_SIZES, hidden=1024, vocabulary=32_000, rows=2048)
            sizes = TINY_SIZES if bench.dry else sizes
            inputs, upstream = prepare_inputs(case, sizes, dtype, bench.device)
            runs = [
                [
                    *run_implementation(case.implementations["secc"], inputs),
                    *run_forward_backward(case, case.implementations["secc"], inputs, upstream),
                ]
                for _ in range(2)
            ]
            if not all(torch.equal(a, b) for a, b in zip(*runs, strict=True)):
                found.failures.append(f"{case.name} {dtype}: two runs differ")
    found.figures["compared"] = len(DTYPES) * len(loss_cases() + memory_bound_cases())
    return found


def run_operators() -> None:
    """Runs every operator forward and backward once on the GPU at small uneven sizes, in each dtype."""
    sizes = replace(TINY_SIZES, hidden=200, vocabulary=1003, rows=67)
    for case in loss_cases() + memory_bound_cases():
        for dtype in DTYPES:
            inputs, upstream = prepare_inputs(case, sizes, dtype, torch.device("cuda"))
            run_forward_backward(case, case.implementations["secc"], inputs, upstream)
    torch.cuda.synchronize()


def check_memory_accesses(bench: Bench) -> Outcome:
    """Runs every operator under compute-sanitizer, for accesses out of bounds and for races."""
    found, tool = Outcome(), shutil.which("compute-sanitizer")
    if bench.dry:
        found.figures["sanitizer"] = "not run on the CPU"
        return found
    if tool is None:
        found.failures.append("compute-sanitizer is not installed")
        return found
    script = "from tools.gpu_day.kernel_checks import run_operators; run_operators()"
    environment = set_environment({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    started = {
        kind: subprocess.Popen(
            [tool, "--tool", kind, "--error-exitcode", "9", sys.executable, "-c", script],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for kind in ("memcheck", "racecheck")
    }
    for kind, process in started.items():
        output, _ = process.communicate()
        found.figures[kind] = process.returncode
        if process.returncode:
            found.failures.append(f"{kind} ended with {process.returncode}: {output[-1500:]}")
    return found


def compile_launches(bench: Bench) -> Outcome:
    """Runs whatever `measure_speed` times once, in several processes, so that compilers have filled their
    caches before time is measured."""
    if bench.dry:
        return Outcome({"compiled": "not on the CPU"})
    cases = [case.name for case in memory_bound_cases()]
    groups = [[case.name for case in loss_cases()], cases[::3], cases[1::3], cases[2::3]]
    command = [sys.executable, "tools/bench_kernels.py", *SPEED_OPTIONS, "--compile-only", "--kernels"]
    started = [
        subprocess.Popen([*command, *group], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for group in groups
    ]
    found = Outcome({"compiled": len(cases) + len(groups[0])})
    for process in started:
        output, _ = process.communicate()
        if process.returncode:
            found.failures.append(f"ended with {process.returncode}: {output[-1500:]}")
    return found


def measure_speed(bench: Bench) -> Outcome:
    """Times every operator next to eager PyTorch, torch.compile and Liger-Kernel, at sizes of 8B and 32B
    models."""
    found, out = Outcome(), bench.folder / "speed"
    command = [sys.executable, "tools/bench_kernels.py", "--out", str(out)]
    command += ["--precision"] if bench.dry else SPEED_OPTIONS
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        found.failures.append(f"bench_kernels ended with {result.returncode}: {result.stderr[-500:]}")
    if bench.dry or not (out / "results.json").exists():
        return found
    return _judge_speed(out / "results.json", found)


def _judge_speed(file: Path, found: Outcome) -> Outcome:
    """Compares the measured times with the aims."""
    rows = json.loads(file.read_text())["results"]
    by_case: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        if not row["failure"]:
            by_case.setdefault(f"{row['case']} {row['model']}", {})[row["way"]] = row
    for case, ways in by_case.items():
        for way, row in ways.items():
            found.figures[f"{case} {way} ms"] = row["ms"]
            found.figures[f"{case} {way} graph ms"] = row["graph_ms"]
            found.figures[f"{case} {way} MiB"] = row["memory_mib"]
        ours = ways.get("secc")
        if ours is None:
            continue
        share = ours["of_flops"] or ours["of_bandwidth"]
        found.figures[f"{case} share of the card"] = share
        aim = LEAST_OF_PRODUCT if ours["of_flops"] else LEAST_OF_COPY
        if share < aim:
            found.failures.append(f"{case}: {share:.2f} of what the card reaches, aim {aim}")
        if case.startswith("linear_kl ") and "eager" in ways:
            time, memory = (ours[k] / ways["eager"][k] for k in ("ms", "memory_mib"))
            found.figures |= {f"{case} time of eager": time, f"{case} memory of eager": memory}
            if time > MOST_KL_TIME or memory > MOST_KL_MEMORY:
                found.failures.append(f"{case}: {time:.2f} of eager's time, {memory:.3f} of its memory")
        # Launched by PyTorch, and on the device alone where both were replayed from a graph.
        for measure, kind in (("ms", "launched"), ("graph_ms", "replayed")):
            slower = [w for w in ("liger", "compile") if w in ways and 0 < ways[w][measure] < ours[measure]]
            if slower:
                found.failures.append(f"{case}: slower than {', '.join(slower)} ({kind})")
    return found
