"""Measures what a step loses to checkpoints: one in ten steps, written in the background and within the step.

    python -m tools.bench_saves --steps 660 --ranks 1 --json docs/benchmarks/saves.json

A small language model trains with `--save-every 20`. Ten steps from a save on are compared with
the ten steps without one before and after them, in the same process. Compared are seconds of CPU of a rank's
process (not of its writer), which other work on the machine changes little, and wall time, which also has
the writers' work if the machine has no core to spare. "calls" is the CPU time inside the calls that save,
which is measured directly and so varies less; it leaves out what they cost later, in caches. The loss is the
mean over all saves, as a share of these steps without saves, of the rank that loses most; the interval is
twice the standard error of the mean. The first saves warm up and are left out.

Wall time needs a free core for each rank's writer: writers have a low priority, and on a busy machine a
save that lasts longer than the steps to the next one is waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

from tools.benchmark_table import BenchmarkTable, add_json_option

ROOT = Path(__file__).resolve().parent.parent
BLOCK = 10
WARM_UP = 2  # saves
COLUMNS = ("saves", "MiB", "step CPU ms", "calls %", "±", "CPU loss %", "±", "wall loss %", "wall ±")
MODEL = """
import json, os, time
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, LAYERS, WORDS, LENGTH = 128, 4, 1000, 64


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids, labels):
        hidden = self.words(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def model():
    return Model()


class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, i):
        ids = (torch.arange(LENGTH) * (i + 1)) % WORDS
        return {"ids": ids, "labels": ids}


def dataset():
    return Words()


SAVES = {"calls": 0.0, "depth": 0}


def measure(owner, name):
    function = getattr(owner, name)

    def measured(*arguments, **named):
        began = time.process_time()
        SAVES["depth"] += 1
        try:
            return function(*arguments, **named)
        finally:
            SAVES["depth"] -= 1
            if not SAVES["depth"]:  # they call each other
                SAVES["calls"] += time.process_time() - began

    setattr(owner, name, measured)


if "RANK" in os.environ:
    from secc.runtime.parameters.checkpoint_writer import CheckpointSaver
    from secc.runtime.training.trainer import Trainer

    measure(Trainer, "save_checkpoint")
    for name in ("is_stage_done", "end_stage"):
        measure(CheckpointSaver, name)


def on_step(result):
    now = {"step": result.step, "wall_s": time.perf_counter(), "cpu_s": time.process_time()}
    now["calls"] = SAVES["calls"]
    with open(f"{os.environ['SECC_BENCH_SAVES']}.{result.rank}", "a") as file:
        file.write(json.dumps(now) + "\\n")
"""


def measure_run(plan: Path, folder: Path, ranks: int, steps: int, option: str) -> list[str]:
    """Trains a plan with a save in every other block of steps; returns the cells of COLUMNS."""
    folder.mkdir()
    times = folder / "times"
    options = ["--steps", steps, "--save", folder / "saved", "--save-every", 2 * BLOCK, "--keep", 1]
    command = [sys.executable, "-m", "secc.runtime.training.supervisor", str(plan), *map(str, options)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SECC_BENCH_SAVES": str(times)}
    log = ["--log-dir", str(folder / "logs"), "--no-first-check"]
    subprocess.run([*command, option, *log], env=environment, check=True, stderr=subprocess.DEVNULL)
    losses = [_measure_losses(Path(f"{times}.{rank}")) for rank in range(ranks)]
    worst = max(losses, key=lambda loss: mean(loss["calls"]))
    newest = max((folder / "saved").glob("step_*"))
    size = sum(file.stat().st_size for file in newest.iterdir()) / 2**20
    cells = [
        f"{100 * of(worst[key]):.2f}" for key in ("calls", "cpu_s", "wall_s") for of in (mean, _interval)
    ]
    step_ms = f"{1000 * mean(worst['step']):.1f}"
    return [str(len(worst["cpu_s"])), f"{size:.1f}", step_ms, *cells]


def _measure_losses(file: Path) -> dict[str, list[float]]:
    """Returns for each save of a rank the share of the steps around it that it costs; under "step" the
    seconds of CPU of such a step."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    rows: dict[int, dict[str, float]] = {row["step"]: row for row in lines}
    losses: dict[str, list[float]] = {"calls": [], "cpu_s": [], "wall_s": [], "step": []}
    for save in range(2 * BLOCK * (1 + WARM_UP), max(rows) - 2 * BLOCK + 1, 2 * BLOCK):
        for key in ("cpu_s", "wall_s"):
            before, at, after, end = (rows[save + i * BLOCK][key] for i in (-1, 0, 1, 2))
            plain = (at - before + end - after) / 2
            losses[key].append((after - at) / plain - 1)
            if key == "cpu_s":
                losses["step"].append(plain / BLOCK)
                calls = rows[save + 2 * BLOCK]["calls"] - rows[save]["calls"]
                losses["calls"].append(calls / plain)
    return losses


def _interval(values: Sequence[float]) -> float:
    return 2 * stdev(values) / sqrt(len(values))


def main(arguments: Sequence[str]) -> int:
    """Measures both ways of saving and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--ranks", type=int, default=2, help="with as many free cores, wall time counts")
    add_json_option(parser)
    o = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="secc-saves-") as folder:
        model, plan = Path(folder) / "words.py", Path(folder) / "plan"
        model.write_text(MODEL)
        command = [sys.executable, "-m", "secc", "compile", str(model), "-o", str(plan)]
        command += ["--cluster", f"local:{o.ranks}", "--global-batch", "8"]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
        table = BenchmarkTable(
            ("written", *COLUMNS),
            f"What a step on {o.ranks} CPU rank(s) loses to one checkpoint of `MiB` in {BLOCK} steps,"
            " compared with those without one around them: CPU time in the calls that save, CPU time"
            " of the rank that loses most, and wall time.",
            o.json,
        )
        for name, option in (("in the background", "--save-async"), ("within the step", "--no-save-async")):
            table.add_row(name, *measure_run(plan, Path(folder) / option, o.ranks, o.steps, option))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
