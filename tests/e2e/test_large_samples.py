"""A sample larger than all listed ones: its step is refused by name if no rank has the memory for it, in
`secc run` and as a warning of `secc simulate`; otherwise the step is that of plain PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.wide, self.narrow = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, hidden):
        return hidden + self.narrow(F.gelu(self.wide(hidden)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(Layer(32) for _ in range(2))
        self.head = nn.Linear(32, 50)

    def forward(self, ids, labels):
        hidden = self.words(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=-100)


def model():
    return Model()


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 5000

    def __getitem__(self, i):
        ids = torch.arange(LONGEST if i == 37 else 8 + i % 5) % 50
        return {"ids": ids, "labels": ids}


def dataset():
    return Samples()
"""
CLUSTER = "nodes: 1\ndevices: 2\nkind: small\nlike: cpu\nmemory_gib: 0.003\n"
GLOBAL_BATCH, STEP_OF_SAMPLE = 8, 5


def run_secc(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "secc", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(("longest", "fits"), [(4000, False), (1000, True)])
def test_a_sample_larger_than_all_listed_ones(longest: int, fits: bool, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL.replace("LONGEST", str(longest)))
    (tmp_path / "small.yaml").write_text(CLUSTER)
    options = ("--cluster", "small.yaml", "--global-batch", GLOBAL_BATCH)
    compiled = run_secc("compile", "model.py", "-o", "plan", *options, cwd=tmp_path)
    assert compiled.returncode == 0, compiled.stderr
    section = json.loads((tmp_path / "plan/plan.json").read_text())["sections"]["model"]
    assert section["micro_batch"] > 1  # the long sample is alone although others are not

    simulated = run_secc("simulate", "plan", "--steps", 6, "--json", cwd=tmp_path)
    warnings = json.loads(simulated.stdout)["warnings"]
    run = run_secc("run", "plan", "--steps", 6, "--log-dir", "logs", cwd=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "logs/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    if fits:
        assert not warnings
        assert run.returncode == 0, run.stderr
        assert len(losses) == 6
        return
    assert run.returncode == 2
    assert f"step {STEP_OF_SAMPLE}: sample 37 (B = 1, S = {longest}) needs activations" in run.stderr
    assert "recompute=full" in run.stderr
    assert "Traceback" not in run.stderr
    assert len(losses) < STEP_OF_SAMPLE
    (warning,) = warnings
    assert f"batch {STEP_OF_SAMPLE}: sample 37" in warning
