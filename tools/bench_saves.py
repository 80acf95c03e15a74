"""Measures what a step loses to checkpoints: one in ten steps, written in the background and within the step.

    python -m tools.bench_saves --json docs/benchmarks/saves.json

A small language model trains on two ranks with `--save-every 20`. Ten steps from a save on are compared with
the ten steps without one that follow, in the same process, so that other work on the machine falls on both.
The loss is that of all such pairs: in seconds, and in seconds of CPU of the rank (not of its
writer), which other work changes less. The first pair warms up and is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tools.benchmark_table import BenchmarkTable, add_json_option

ROOT = Path(__file__).resolve().parent.parent
RANKS, BLOCK = 2, 10
COLUMNS = ("saves", "MiB", "step s", "loss %", "CPU loss %")
MODEL = """
import json, os, time
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, LAYERS, WORDS, LENGTH = 256, 6, 1000, 256


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


def on_step(result):
    if result.rank == 0:
        now = {"step": result.step, "wall_s": time.perf_counter(), "cpu_s": time.process_time()}
        with open(os.environ["SECC_BENCH_SAVES"], "a") as file:
            file.write(json.dumps(now) + "\\n")
"""


def measure_run(plan: Path, folder: Path, steps: int, option: str) -> list[str]:
    """Trains a plan with a save in every other block of steps; returns the cells of COLUMNS."""
    folder.mkdir()
    times = folder / "times"
    options = ["--steps", steps, "--save", folder / "saved", "--save-every", 2 * BLOCK, "--keep", 1]
    command = [sys.executable, "-m", "secc.runtime.training.supervisor", str(plan), *map(str, options)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SECC_BENCH_SAVES": str(times)}
    log = ["--log-dir", str(folder / "logs"), "--no-first-check"]
    subprocess.run([*command, option, *log], env=environment, check=True, stderr=subprocess.DEVNULL)
    rows: list[dict[str, Any]] = [json.loads(line) for line in times.read_text().splitlines()]
    saved: dict[str, list[float]] = {"wall_s": [], "cpu_s": []}
    plain: dict[str, list[float]] = {"wall_s": [], "cpu_s": []}
    for before, after in pairwise(rows):
        block, step = divmod(before["step"], 2 * BLOCK)
        if block < 2 or block == steps // (2 * BLOCK):
            continue  # before the first save, and the block of that save
        for key in saved:
            (saved if step < BLOCK else plain)[key].append(after[key] - before[key])
    newest = max((folder / "saved").glob("step_*"))
    size = sum(file.stat().st_size for file in newest.iterdir()) / 2**20
    step_s = sum(plain["wall_s"]) / len(plain["wall_s"])
    losses = (f"{100 * (sum(saved[key]) / sum(plain[key]) - 1):.2f}" for key in saved)
    return [str(len(saved["wall_s"]) // BLOCK), f"{size:.1f}", f"{step_s:.3f}", *losses]


def main(arguments: Sequence[str]) -> int:
    """Measures both ways of saving and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=140)
    add_json_option(parser)
    o = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="secc-saves-") as folder:
        model, plan = Path(folder) / "words.py", Path(folder) / "plan"
        model.write_text(MODEL)
        command = [sys.executable, "-m", "secc", "compile", str(model), "-o", str(plan)]
        command += ["--cluster", f"local:{RANKS}", "--global-batch", "16"]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
        table = BenchmarkTable(
            ("written", *COLUMNS),
            f"What a step on {RANKS} CPU ranks loses to one checkpoint of `MiB` in {BLOCK} steps, in seconds"
            " and in seconds of CPU of rank 0, compared with the steps without one of the same run.",
            o.json,
        )
        for name, option in (("in the background", "--save-async"), ("within the step", "--no-save-async")):
            table.add_row(name, *measure_run(plan, Path(folder) / option, o.steps, option))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
