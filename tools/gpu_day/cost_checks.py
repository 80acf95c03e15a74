"""Checks of time and memory: a rank against plain PyTorch with the same kernels, predictions against
measurements, and long runs against plain PyTorch's curve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.report.html_page import report_page
from secc.runtime.model.user_file import load_model_file
from tools.bench_runtime import WARM_UP_STEPS, PlainTrainer, join_training, run_on_ranks, time_step
from tools.compare_training import read_metrics, run_plan_ranks
from tools.gpu_day.outcome import Bench, Outcome, set_environment
from tools.train_plain import train_model

MODELS = Path(__file__).parent / "models"
STEP_MODELS = ("decoder", "distillation", "llava", "mixture")
STEP_BATCH, PROFILED_STEPS = 4, 3
TURN_STEPS = 5  # steps of one trainer before the other's, so that their ends overlap as in a run
MOST_STEP_RATIO, MOST_MEMORY_ERROR, MOST_BLOCK_ERROR = 1.02, 0.05, 0.03
# Losses of a plan and of plain PyTorch, relative: the limit of docs/guide/exactness.md for the first 20
# steps; later the rounding of different orders of summation grows with every step.
EARLY_STEPS, EARLY_TOLERANCE, CURVE_TOLERANCE = 20, 1e-4, 2e-2


def compile_step_plans(bench: Bench) -> Outcome:
    """Compiles the plans that `measure_steps` times, all at once while nothing is timed."""
    os.environ |= _sized("layers", bench)
    cases = [(name, fuse) for name in STEP_MODELS for fuse in (True, False)]
    plans = [_step_plan(name, fuse, bench) for name, fuse in cases]
    with ProcessPoolExecutor(1 if bench.dry else len(cases), get_context("spawn")) as pool:
        list(pool.map(_compile_for_steps, cases, plans, [bench.dry] * len(cases)))
    return Outcome({"plans": len(plans)})


def measure_steps(name: str, bench: Bench) -> Outcome:
    """Times steps of a few layers of the real sizes by a plan and by hand, in turn, in one process: with the
    same kernels, and with fused ones. Compares the plan's memory with the prediction."""
    found = Outcome()
    os.environ |= _sized("layers", bench)
    for fuse in (True, False):
        label = "fused" if fuse else "same kernels"
        try:
            (measured,) = run_on_ranks(time_rank, _step_plan(name, fuse, bench), 1, 1 if bench.dry else 4)
        except EOFError as error:
            found.failures.append(f"{label}: {error!r}"[:500])
            continue
        _judge_steps(label, measured, found, judged=not bench.dry, same=not fuse)
    return found


def _step_plan(name: str, fuse: bool, bench: Bench) -> Path:
    """Returns the folder of a plan, which the checks of one run share."""
    return bench.folder.parent / "step-plans" / f"{name}-{fuse:d}"


def _compile_for_steps(case: tuple[str, bool], plan: Path, dry: bool) -> None:
    """Compiles a model file, with fused operators or without."""
    name, fuse = case
    cluster = "1x1xcpu" if dry else "local:1"
    options = CompileOptions(cluster=cluster, global_batch=STEP_BATCH, fuse=fuse)
    compile_model(MODELS / f"{name}.py", options).write_plan(plan, report_page)


def time_rank(plan: Path, rank: int, world: int, port: int, turns: int, pipe: Any) -> None:
    """Sends a rank's figures: the most memory in GiB, the median step of the plan and of plain PyTorch in
    seconds with the median of their ratios, and the seconds that the device computes in a step of each. Plan
    and plain PyTorch take turns of `TURN_STEPS` steps."""
    steps = turns * TURN_STEPS + PROFILED_STEPS
    with join_training(plan, rank, world, port, steps) as (context, trainer, batches):
        device, figures = context.device, dict[str, float]()

        def train_planned_step() -> object:
            return trainer.train_step(next(batches))

        for _ in range(WARM_UP_STEPS):
            train_planned_step()
        if device.type == "cuda":
            figures["memory"] = torch.cuda.max_memory_allocated(device) / 2**30
            figures["predicted memory"] = max(s.memory_gib for s in context.plan.sections)
        user = load_model_file(context.user_model.path)
        plain = PlainTrainer(user, context.plan.global_batch, device)
        for _ in range(WARM_UP_STEPS):
            plain.train_step()
        before = _allocation_retries(device)
        trainers = train_planned_step, plain.train_step
        times = [tuple(_turn_seconds(step, device) for step in trainers) for _ in range(turns)]
        ours, theirs = zip(*times, strict=True)
        figures |= {"seconds": median(ours), "plain seconds": median(theirs)}
        figures["ratio"] = median(a / b for a, b in times)
        figures["allocation retries"] = _allocation_retries(device) - before
        if device.type == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(True)  # as PyTorch chooses by itself
            figures["plain seconds with cuDNN"] = median(
                _turn_seconds(plain.train_step, device) for _ in range(turns)
            )
            torch.backends.cuda.enable_cudnn_sdp(False)
            figures["busy"] = _device_seconds(train_planned_step)
            figures["plain busy"] = _device_seconds(plain.train_step)
        pipe.send(figures)


def _turn_seconds(step: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of a step in a turn of several, which ends when the device is done."""

    def run_turn() -> None:
        for _ in range(TURN_STEPS):
            step()

    return time_step(run_turn, device)[0] / TURN_STEPS


def _allocation_retries(device: torch.device) -> int:
    """Returns how often the GPU's memory was too full for an allocation, which then waits for the device."""
    return torch.cuda.memory_stats(device).get("num_alloc_retries", 0) if device.type == "cuda" else 0


def _device_seconds(step: Callable[[], object]) -> float:
    """Returns the seconds that kernels and copies of a step take on the device, by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / PROFILED_STEPS / 1e6


def _judge_steps(label: str, measured: Mapping[str, float], found: Outcome, judged: bool, same: bool) -> None:
    """Adds the figures of a plan, and what misses the aims."""
    found.figures |= {f"{label} {name}": value for name, value in measured.items()}
    if not judged:
        return
    if same and measured["ratio"] > MOST_STEP_RATIO:
        found.failures.append(f"{label}: {measured['ratio']:.3f} of plain PyTorch's step")
    predicted = measured["predicted memory"]
    if abs(predicted - measured["memory"]) > MOST_MEMORY_ERROR * measured["memory"]:
        found.failures.append(f"{label}: {predicted:.2f} GiB predicted, {measured['memory']:.2f} measured")


def measure_profile(name: str, bench: Bench) -> Outcome:
    """Measures a model's blocks on the card; how far the fitted costs are from sizes that were held back."""
    costs = bench.folder / f"{name}-costs.json"
    command = [sys.executable, "-c", "from secc.cli import main; main()", "profile", "--json"]
    command += [str(MODELS / f"{name}.py"), "-o", str(costs), *(["--sizes", "6"] if bench.dry else [])]
    result = subprocess.run(command, env=_sized("layers", bench), capture_output=True, text=True)
    if result.returncode:
        return Outcome(failures=[result.stderr[-500:]])
    (bench.folder / f"{name}-blocks.json").write_text(result.stdout)
    blocks = json.loads(result.stdout)["blocks"]
    errors = [b[k] for b in blocks for k in ("forward_error", "backward_error") if b[k] is not None]
    found = Outcome({"median error": median(errors), "worst error": max(errors)})
    if not bench.dry and median(errors) > MOST_BLOCK_ERROR:
        found.failures.append(f"median error {median(errors):.1%}, aim {MOST_BLOCK_ERROR:.0%}")
    return found


def measure_links(bench: Bench) -> Outcome:
    """Measures rates and links of the machine, as `--cluster FILE` takes them."""
    cluster = bench.folder / "here.yaml"
    command = [sys.executable, "-c", "from secc.cli import main; main()", "profile", "--links", "--json"]
    result = subprocess.run([*command, "-o", str(cluster)], capture_output=True, text=True)
    if result.returncode:
        return Outcome(failures=[result.stderr[-500:]])
    return Outcome({"cluster": cluster.read_text()})


def check_long_run(name: str, bench: Bench) -> Outcome:
    """Trains a model for hundreds of steps on ranks that share the device, each section on a rank of its own,
    and compares the losses with plain PyTorch's."""
    found, steps, model = Outcome(), 6 if bench.dry else 500, MODELS / f"{name}.py"
    os.environ |= _sized("train", bench)
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    cluster = f"1x2x{'cpu' if bench.dry else 'H100'}"
    made = compile_model(model, CompileOptions(cluster=cluster, global_batch=4, strategy="apart", fuse=True))
    made.write_plan(bench.folder / name, report_page)
    logs = bench.folder / f"{name}-logs"
    arguments = ["--steps", str(steps), "--log-dir", str(logs), "--share-gpus", "--no-first-check"]
    with ThreadPoolExecutor(1) as pool:  # plain PyTorch meanwhile
        plain = pool.submit(train_model, load_model_file(model), steps, 4, device=bench.device)
        run_plan_ranks(bench.folder / name, made.plan.world_size, arguments, limit_s=550)
        _, theirs = plain.result()
    ours = [m["loss"] for m in read_metrics(logs)]
    errors = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
    early, all_steps = max(errors[:EARLY_STEPS]), max(errors)
    found.figures["sections"] = ", ".join(s.name for s in made.plan.sections)
    found.figures |= {"first loss": theirs[0], "last loss": theirs[-1]}
    found.figures |= {"error of 20 steps": early, "error of all steps": all_steps}
    found.figures["losses"] = " ".join(f"{loss:.4f}" for loss in ours[:: max(1, steps // 20)])
    if early > EARLY_TOLERANCE or all_steps > CURVE_TOLERANCE:
        found.failures.append(f"losses off by {early:.1e} in 20 steps, {all_steps:.1e} in all")
    return found


def _sized(size: str, bench: Bench) -> dict[str, str]:
    """Returns the environment of model files in this size; a dry run has small ones."""
    return set_environment({"GPU_DAY_SIZE": "small" if bench.dry else size})
