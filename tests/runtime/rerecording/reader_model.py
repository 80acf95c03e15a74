"""A model file with glue that has different ops in every batch: the rows of a sample are averaged, in a
loop over numbers that Python reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.runtime.model.meta_build import build_meta_model
from secc.runtime.rerecording.rerecorder import Rerecorder
from secc.runtime.sections.base import SectionModule, load_section_module

SOURCE = """
import torch
from torch import nn


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6))
        self.decoder = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
        self.scale, self.twice = nn.Parameter(torch.ones(6)), False

    def forward(self, x, counts, y):
        h = self.body(x)
        rows, start = [], 0
        for n in counts.tolist():
            rows.append(h[start : start + n].mean(0))
            start += n
        z = torch.stack(rows) * self.scale + y[:, None]
        z = self.decoder(z)
        return (z.tanh() if self.twice else z).square().sum()


def model():
    return Reader()


def dataset():
    samples = []
    for i in range(40):
        g = torch.Generator().manual_seed(i)
        n = 1 + i % 5
        x, y = torch.randn(n, 4, generator=g), torch.randn((), generator=g)
        samples.append(dict(x=x, counts=torch.tensor(n), y=y))
    return samples


def collate(samples):
    x = torch.cat([s["x"] for s in samples])
    return dict(x=x, **{k: torch.stack([s[k] for s in samples]) for k in ("counts", "y")})
"""


def compiled(folder: Path, source: str = SOURCE) -> CompiledPlan:
    """The model's plan for one rank."""
    (folder / "reader.py").write_text(source)
    return compile_model(
        folder / "reader.py",
        CompileOptions(cluster="local:1", global_batch=4, sections=("front=body", "back=decoder")),
    )


def rerecorder(made: CompiledPlan, folder: Path, only: str = "", **changes: Any) -> Rerecorder:
    """What records its micro-batches for all sections or for one, on a model with these attributes
    changed."""
    made.write_sections(folder / "plan")

    def model() -> torch.nn.Module:
        found = build_meta_model(made.user)
        for name, value in changes.items():
            setattr(found, name, value)
        return found

    def sections(model: torch.nn.Module) -> list[SectionModule]:
        return [
            load_section_module(folder / "plan", s, model) for s in made.plan.sections if only in ("", s.name)
        ]

    return Rerecorder(made.plan, model, sections)
