"""Blocks that do most of a section's work stay in it, and copies that blocks are given stay copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness

HEAD = """
import torch
from torch import nn
from torch.utils.data import Dataset

class Stack(nn.Module):
    def __init__(self, inside, width, layers, outside):
        super().__init__()
        self.enter = nn.Linear(inside, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
        self.leave = nn.Linear(width, outside)
    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)

class Samples(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return {"x": torch.randn(4, 8, generator=g)}

def dataset():
    return Samples()
"""
# The encoder's results are smaller than the teacher's, so the fewest bytes cross between these two.
DISTILLATION = (
    HEAD
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 8).requires_grad_(False)
        self.teacher = Stack(8, 256, 4, 64).requires_grad_(False)
        self.student = Stack(8, 32, 2, 64)
    def forward(self, x):
        seen = self.encoder(x)
        return (self.student(seen) - self.teacher(seen)).square().mean()
def model():
    return Model()
"""
)
DIFFUSION = (
    HEAD
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.text_encoder = Stack(8, 16, 2, 8).requires_grad_(False)
        self.vae = nn.Linear(8, 4).requires_grad_(False)
        self.teacher = Stack(12, 256, 4, 64).requires_grad_(False)
        self.student = Stack(12, 64, 2, 64)
    def forward(self, x):
        seen = torch.cat([self.text_encoder(x), self.vae(x)], -1)
        return (self.student(seen) - self.teacher(seen)).square().mean()
def model():
    return Model()
"""
)
COPIED = (
    HEAD
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = Stack(8, 16, 2, 8)
        self.b = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))
    def forward(self, x):
        h = self.a(x)
        y = self.b(h.to(h.dtype, copy=True)) + self.b(h + 0) + self.b(h * 1)
        return (y + h).square().mean()
def model():
    return Model()
"""
)


def compile_source(folder: Path, source: str, **options: object) -> CompiledPlan:
    (folder / "model.py").write_text(source)
    chosen = CompileOptions(cluster="local:3", global_batch=12, **options)  # pyright: ignore[reportArgumentType]
    return check_exactness(compile_model(folder / "model.py", chosen))


@pytest.mark.parametrize("source", [DISTILLATION, DIFFUSION], ids=["distillation", "diffusion"])
@pytest.mark.parametrize("pins", [(), ("teacher=teacher",)], ids=["free", "pinned"])
def test_a_frozen_teacher_stays_a_section(source: str, pins: tuple[str, ...], tmp_path: Path) -> None:
    plan = compile_source(tmp_path, source, strategy="apart" if pins else "auto", sections=pins).plan
    blocks = {s.name: s.blocks for s in plan.sections}
    assert any(b.startswith("teacher") for b in blocks["teacher"])
    assert not any(b.startswith("teacher") for b in blocks["student"])


def test_in_place_blocks_write_into_their_own_copies(tmp_path: Path) -> None:
    assert compile_source(tmp_path, COPIED).plan.checks["patterns"][0]["exact"]
