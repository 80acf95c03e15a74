"""Checks of time and memory: a rank against plain PyTorch with the same kernels, predictions against
measurements, and long runs against plain PyTorch's curve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.report.html_page import report_page
from secc.runtime.model.user_file import load_model_file
from tools.compare_training import read_metrics, run_plan_ranks
from tools.gpu_day.outcome import Bench, Outcome, set_environment
from tools.gpu_day.training_checks import train_with_memory
from tools.train_plain import train_model

MODELS = Path(__file__).parent / "models"
MODEL_NAMES = ("decoder", "distillation", "llava")
MOST_STEP_RATIO, MOST_MEMORY_ERROR, MOST_BLOCK_ERROR = 1.02, 0.05, 0.03
# Losses of a plan and of plain PyTorch, relative: the limit of docs/guide/exactness.md for the first 20
# steps; later the rounding of different orders of summation grows with every step.
EARLY_STEPS, EARLY_TOLERANCE, CURVE_TOLERANCE = 20, 1e-4, 2e-2


def measure_steps(bench: Bench) -> Outcome:
    """Times steps of a few layers of the real sizes by a plan and by hand, in turn, in one process."""
    found = Outcome()
    for name in MODEL_NAMES[:1] if bench.dry else MODEL_NAMES:
        table = bench.folder / f"{name}.json"
        command = [sys.executable, "-m", "tools.bench_runtime", str(MODELS / f"{name}.py"), "--ranks", "1"]
        command += ["--global-batch", "4", "--steps", "3" if bench.dry else "15", "--json", str(table)]
        result = subprocess.run(command, env=_sized("layers", bench), capture_output=True, text=True)
        if result.returncode:
            found.failures.append(f"{name}: {result.stderr[-500:]}")
            continue
        read = json.loads(table.read_text())
        row = dict(zip(read["columns"], read["rows"][0], strict=True))
        found.figures |= {f"{name} ratio": row["ratio"], f"{name} ms": row["secc, ms"]}
        if not bench.dry and row["ratio"] > MOST_STEP_RATIO:
            found.failures.append(f"{name}: {row['ratio']} of plain PyTorch's step, aim {MOST_STEP_RATIO}")
    return found


def measure_memory(bench: Bench) -> Outcome:
    """Compares the most memory that steps allocate with the plan's prediction."""
    found = Outcome()
    os.environ |= _sized("layers", bench)
    for name in MODEL_NAMES[:1] if bench.dry else MODEL_NAMES:
        cluster = "1x1xcpu" if bench.dry else "1x1xH200"
        options = CompileOptions(cluster=cluster, global_batch=4)
        memory = train_with_memory(MODELS / f"{name}.py", bench.folder / name, 4, options)
        plan = json.loads((bench.folder / name / "plan" / "plan.json").read_text())
        predicted = sum(section["memory_gib"] for section in plan["sections"].values())
        measured = max(most for _, most in memory) / 2**30
        found.figures |= {f"{name} predicted GiB": predicted, f"{name} measured GiB": measured}
        if not bench.dry and abs(predicted - measured) > MOST_MEMORY_ERROR * measured:
            found.failures.append(f"{name}: {predicted:.2f} GiB predicted, {measured:.2f} GiB measured")
    return found


def measure_profile(bench: Bench) -> Outcome:
    """Measures blocks on the card; how far the fitted costs are from sizes that were held back."""
    found = Outcome()
    for name in MODEL_NAMES[:1] if bench.dry else MODEL_NAMES:
        costs = bench.folder / f"{name}-costs.json"
        command = [sys.executable, "-c", "from secc.cli import main; main()", "profile", "--json"]
        command += [str(MODELS / f"{name}.py"), "-o", str(costs), *(["--sizes", "6"] if bench.dry else [])]
        result = subprocess.run(command, env=_sized("layers", bench), capture_output=True, text=True)
        if result.returncode:
            found.failures.append(f"{name}: {result.stderr[-500:]}")
            continue
        blocks = json.loads(result.stdout)["blocks"]
        errors = [b[k] for b in blocks for k in ("forward_error", "backward_error") if b[k] is not None]
        found.figures |= {f"{name} median error": median(errors), f"{name} worst error": max(errors)}
        if not bench.dry and median(errors) > MOST_BLOCK_ERROR:
            found.failures.append(f"{name}: median error {median(errors):.1%}, aim {MOST_BLOCK_ERROR:.0%}")
    return found


def measure_links(bench: Bench) -> Outcome:
    """Measures rates and links of the machine, as `--cluster FILE` takes them."""
    cluster = bench.folder / "here.yaml"
    command = [sys.executable, "-c", "from secc.cli import main; main()", "profile", "--links", "--json"]
    result = subprocess.run([*command, "-o", str(cluster)], capture_output=True, text=True)
    if result.returncode:
        return Outcome(failures=[result.stderr[-500:]])
    return Outcome({"cluster": cluster.read_text()})


def check_long_runs(bench: Bench) -> Outcome:
    """Trains a LLaVA and a distillation for hundreds of steps on ranks that share the device, and compares
    the losses with plain PyTorch's."""
    found, steps = Outcome(), 6 if bench.dry else 500
    os.environ |= _sized("train", bench)
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    for name in ("llava", "distillation"):
        model, ranks = MODELS / f"{name}.py", 2
        made = compile_model(model, CompileOptions(cluster=f"1x{ranks}xcpu", global_batch=8))
        made.write_plan(bench.folder / name, report_page)
        logs = bench.folder / f"{name}-logs"
        arguments = ["--steps", str(steps), "--log-dir", str(logs), "--share-gpus"]
        run_plan_ranks(bench.folder / name, made.plan.world_size, arguments, limit_s=550)
        ours = [m["loss"] for m in read_metrics(logs)]
        _, theirs = train_model(load_model_file(model), steps, 8, device=bench.device)
        errors = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
        early, all_steps = max(errors[:EARLY_STEPS]), max(errors)
        found.figures |= {f"{name} first loss": theirs[0], f"{name} last loss": theirs[-1]}
        found.figures |= {f"{name} error of 20 steps": early, f"{name} error of all steps": all_steps}
        if early > EARLY_TOLERANCE or all_steps > CURVE_TOLERANCE:
            found.failures.append(f"{name}: losses off by {early:.1e} in 20 steps, {all_steps:.1e} in all")
    return found


def _sized(size: str, bench: Bench) -> dict[str, str]:
    """Returns the environment of model files in this size; a dry run has small ones."""
    return set_environment({"GPU_DAY_SIZE": "small" if bench.dry else size})
