"""Checks of the fused operators: exact on many shapes, the same bits twice, no bad access, and fast."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
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

SHAPES = 500
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
    """Compares values and gradients with float64 on random shapes, next to unfused PyTorch's errors."""
    found, worst = Outcome(), dict.fromkeys(DTYPES, 0.0)
    count = 30 if bench.dry else SHAPES
    for case, sizes, dtype in random_cases(count):
        if bench.dry:
            sizes = replace(sizes, rows=min(sizes.rows, 40), vocabulary=min(sizes.vocabulary, 500))
        errors = measure_precision(case, sizes, dtype, bench.device)
        for ours, theirs in zip(errors["secc"], errors["eager"], strict=True):
            worst[dtype] = max(worst[dtype], ours)
            if not ours <= ERROR_SLACK * theirs + ROUNDING[dtype]:
                found.failures.append(f"{case.name} {dtype} {sizes}: error {ours:.2e}, eager {theirs:.2e}")
    found.figures["shapes"] = count
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


def check_memory_accesses(bench: Bench) -> Outcome:
    """Runs every operator under compute-sanitizer, for accesses out of bounds and for races."""
    found, tool = Outcome(), shutil.which("compute-sanitizer")
    script = [sys.executable, "-m", "tools.gpu_day", "--run", "kernels-same-bits", "--out", str(bench.folder)]
    if bench.dry:
        found.figures["sanitizer"] = "not run on the CPU"
        return found
    if tool is None:
        found.failures.append("compute-sanitizer is not installed")
        return found
    environment = set_environment({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    for kind in ("memcheck", "racecheck"):
        command = [tool, "--tool", kind, "--error-exitcode", "9", *script]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        found.figures[kind] = result.returncode
        if result.returncode:
            found.failures.append(f"{kind}: {result.stdout[-800:]}")
    return found


def measure_speed(bench: Bench) -> Outcome:
    """Times every operator next to eager PyTorch, torch.compile and Liger-Kernel, at an 8B model's sizes."""
    found, out = Outcome(), bench.folder / "speed"
    command = [sys.executable, "tools/bench_kernels.py", "--out", str(out)]
    command += ["--precision"] if bench.dry else ["--quick", "--tune"]
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
            by_case.setdefault(row["case"], {})[row["way"]] = row
    for case, ways in by_case.items():
        for way, row in ways.items():
            found.figures[f"{case} {way} ms"] = row["ms"]
            found.figures[f"{case} {way} MiB"] = row["memory_mib"]
        ours = ways.get("secc")
        if ours is None:
            continue
        share = ours["of_flops"] or ours["of_bandwidth"]
        found.figures[f"{case} share of the card"] = share
        aim = LEAST_OF_PRODUCT if ours["of_flops"] else LEAST_OF_COPY
        if share < aim:
            found.failures.append(f"{case}: {share:.2f} of what the card reaches, aim {aim}")
        if case == "linear_kl" and "eager" in ways:
            time, memory = (ours[k] / ways["eager"][k] for k in ("ms", "memory_mib"))
            found.figures |= {"linear_kl time of eager": time, "linear_kl memory of eager": memory}
            if time > MOST_KL_TIME or memory > MOST_KL_MEMORY:
                found.failures.append(f"linear_kl: {time:.2f} of eager's time, {memory:.3f} of its memory")
        slower = [w for w in ("liger", "compile") if w in ways and ways[w]["ms"] < ours["ms"]]
        if slower:
            found.failures.append(f"{case}: slower than {', '.join(slower)}")
    return found
