"""Micro-batches of which Python reads what no capture saw are recorded anew: for each way of reading, as plain PyTorch computes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secc.check import OneRank
from secc.compiler import Compiled, Options, compile_model
from secc.frontend.reference import compare, eager

RARE = 777  # an index that no survey of this dataset draws
SOURCE = """
import torch
from torch import nn
from torch.nn import functional as F


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.decoder = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.head = nn.Linear(8, 5)

    def forward(self, x, flag, y):
        h = self.encoder(x)
        {read}
        {branch}
        return F.cross_entropy(self.head(self.decoder(h)), y)


def model():
    return Reader()


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        flag = torch.tensor(5 if i == 777 else i % 3)
        return dict(x=torch.randn(8, generator=g), flag=flag, y=torch.randint(5, (), generator=g))


def dataset():
    return Data()
"""
BRANCH = "h = torch.where((flag == 5)[:, None], h.tanh(), h) if {} else h"
READS = {
    "item": "rare = (flag == 5).sum().item()",
    "bool": "rare = bool((flag == 5).any())",
    "tolist": "rare = 5 in flag.tolist() or min(flag.tolist()) < 0",
    "numpy": "rare = 5 in flag.numpy()",
    "nonzero": "rare = len((flag == 5).nonzero())",
    "mask index": "rare = flag[flag == 5].numel()",
}


def compiled(folder: Path, read: str, branch: str = BRANCH.format("rare")) -> Compiled:
    path = folder / "reader.py"
    path.write_text(SOURCE.replace("{read}", read).replace("{branch}", branch))
    return compile_model(path, Options(cluster="local:2", global_batch=4, sections=("front=encoder", "back=decoder+head")))


def rank_of(made: Compiled, folder: Path) -> OneRank:
    made.write_sections(folder / "plan")
    assert made.model is not None
    return OneRank(made.plan, folder / "plan", made.user, made.model)


@pytest.mark.parametrize("kind", READS)
def test_a_branch_that_no_capture_took_is_recorded_anew(tmp_path: Path, kind: str) -> None:
    made = compiled(tmp_path, READS[kind])
    rank = rank_of(made, tmp_path)
    assert [s.name for s in made.plan.sections] == ["front", "back"]
    for indices in ([1, 2, 3, 4], [1, RARE, 3, 4]):
        samples = [made.user.sample(i) for i in indices]
        difference = compare(rank.step(samples), eager(made.model, made.user.collate(samples)))
        assert difference.exact, (indices, difference)
    branches = torch.tensor([float(s["flag"] == 5) for s in samples])
    assert branches.sum() == 1
