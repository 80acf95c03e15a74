"""Plans with optimizer states, weights or activations in host memory are bit-equal to the same plans without,
and go on from each other's checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secc.errors import UserError
from secc.runtime.parameters import host_copies
from secc.runtime.parameters.checkpoint import load_full_state_dict
from tests.e2e.harness import compile_and_write, read_metrics, run_plan_ranks, write_recording_model
from tests.e2e.reference_runs import MODELS_FOLDER
from tests.runtime.parameters.test_checkpoint import assert_same_contents

GLOBAL_BATCH = 8
# (model, ranks, choices, sections that offload, dtype)
CASES: list[tuple[str, int, tuple[str, ...], dict[str, str], str]] = [
    ("nano", 2, ("model.dp=2", "model.sharding=zero1"), {"model": "optimizer"}, "bf16"),
    (
        "frozen_middle",
        2,
        ("middle.recompute=full", "middle.dp=2", "encoder.with=middle", "head.with=middle"),
        {"middle": "weights", "head": "optimizer"},
        "",
    ),
    ("nano", 2, ("model.pp=2", "model.micro_batch=2"), {"model": "activations"}, "bf16"),
]
SLOW: list[tuple[str, int, tuple[str, ...], dict[str, str], str]] = [
    ("qwen_distil", 3, ("teacher.pp=2",), {"teacher": "weights"}, ""),
    ("nano", 2, ("model.pp=2", "model.recompute=full"), {"model": "optimizer"}, ""),
    ("nano", 2, ("model.dp=2", "model.sharding=zero3"), {"model": "optimizer"}, "bf16"),
    (
        "llava_tiny",
        3,
        ("language_model.sharding=zero2", "language_model.dp=2", "vision_tower.recompute=full"),
        {"language_model": "optimizer", "vision_tower": "optimizer"},
        "bf16",
    ),
    ("qwen_distil", 2, ("student.tp=2", "teacher.with=student"), {"student": "optimizer"}, ""),
    (
        "qwen_distil",
        3,
        ("teacher.dp=2", "student.dp=1"),
        {"teacher": "weights", "student": "optimizer"},
        "bf16",
    ),
    ("qwen_distil", 2, ("teacher.tp=2", "student.with=teacher"), {"teacher": "weights"}, ""),
    ("nano", 2, ("model.tp=2", "model.recompute=full", "model.micro_batch=2"), {"model": "activations"}, ""),
    (
        "nano",
        2,
        ("model.dp=2", "model.sharding=zero3", "model.micro_batch=2"),
        {"model": "activations"},
        "bf16",
    ),
    (
        "nano",
        2,
        ("model.cp=2", "model.recompute=selective", "model.micro_batch=2"),
        {"model": "activations"},
        "",
    ),
    (
        "llava_tiny",
        3,
        ("language_model.sharding=zero2", "language_model.dp=2", "vision_tower.recompute=full"),
        {"language_model": "activations", "vision_tower": "activations"},
        "bf16",
    ),
    (
        "qwen_distil",
        3,
        ("teacher.dp=2", "student.dp=1", "student.recompute=full"),
        {"teacher": "weights", "student": "activations"},
        "bf16",
    ),
]
# A frozen stack between layers that train: its backward needs the weights again.
FROZEN_MIDDLE = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu())

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(8, 16), nn.Linear(16, 1)
        self.middle = Stack().requires_grad_(False)

    def forward(self, x, y):
        return (self.head(self.middle(self.encoder(x))) - y).square().mean()

def model():
    return Model()

def dataset():
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(8, generator=generator), "y": torch.ones(1)} for _ in range(32)]
"""


def train(plan: Path, ranks: int, steps: int, work: Path, *arguments: str) -> list[dict[str, float]]:
    common = ["--steps", str(steps), "--workers", "0", "--log-dir", str(work / "logs"), *arguments]
    run_plan_ranks(plan, ranks, common, {"GRADIENTS": str(work), host_copies.COPY_RATE_VARIABLE: "1e8"})
    return [{key: row[key] for key in ("loss", "grad_norm")} for row in read_metrics(work / "logs")]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "ranks", "choices", "offloading", "dtype"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_offloading_changes_no_bit(
    name: str, ranks: int, choices: tuple[str, ...], offloading: dict[str, str], dtype: str, tmp_path: Path
) -> None:
    """Three steps each; then each plan resumes from the other's first step."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "frozen_middle.py").write_text(FROZEN_MIDDLE)
    folder = tmp_path / "models" if name == "frozen_middle" else MODELS_FOLDER
    model = write_recording_model(name, tmp_path, folder)
    rows: dict[str, list[dict[str, float]]] = {}
    pins = tuple(f"{section}.offload={what}" for section, what in offloading.items())
    for plan, extra in (("kept", ()), ("offloaded", pins)):
        compiled = compile_and_write(
            model,
            tmp_path / plan,
            check=False,
            cluster=f"local:{ranks}",
            global_batch=GLOBAL_BATCH,
            set=(*choices, *extra),
            dtype=dtype,
            sections=("encoder=encoder", "middle=middle", "head=head") if name == "frozen_middle" else (),
        )
        found = {s.name: s.offload for s in compiled.plan.user_sections if s.name in offloading}
        assert found == (dict.fromkeys(offloading, "none") if plan == "kept" else offloading)
        assert all(s.units for s in compiled.plan.sections if s.offload == "weights")
        assert compiled.plan.world_size == ranks
        saved = ("--save", str(tmp_path / f"{plan}-saved"), "--save-every", "1")
        rows[plan] = train(tmp_path / plan, ranks, 3, tmp_path / f"{plan}-run", *saved)
    assert rows["kept"] == rows["offloaded"]
    last = [tmp_path / f"{plan}-saved" / "step_00000003" for plan in rows]
    assert_same_contents(*last)
    for first, second in (("kept", "offloaded"), ("offloaded", "kept")):
        from_first = ("--resume", str(tmp_path / f"{first}-saved" / "step_00000001"))
        again = tmp_path / f"{second}-again"
        found_rows = train(tmp_path / second, ranks, 3, again, *from_first, "--save", str(again / "saved"))
        assert found_rows == rows["kept"][1:]
        assert_same_contents(again / "saved" / "step_00000003", last[0])
    assert not any(torch.isnan(t).any() for t in load_full_state_dict(tmp_path / "offloaded-saved").values())


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (("teacher.offload=optimizer",), "teacher.offload=optimizer is impossible: it trains nothing"),
        (("student.offload=weights",), "student.offload=weights is impossible: it trains, and only weights"),
        (
            ("teacher.offload=weights", "teacher.sharding=zero3"),
            "weights is impossible: zero3 gathers",
        ),
        (("student.offload=disk",), "unknown offload 'disk'"),
        (("teacher.offload=activations",), "teacher.offload=activations is impossible: it has no backward"),
        (
            ("student.offload=activations", "student.pp=2", "student.backward=split"),
            "activations is impossible: both parts of a split backward",
        ),
    ],
)
def test_impossible_offloads_are_refused(choices: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        compile_and_write(
            MODELS_FOLDER / "qwen_distil.py",
            tmp_path / "plan",
            cluster="local:2",
            global_batch=8,
            set=choices,
        )
