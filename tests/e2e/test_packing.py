"""Samples side by side in one row: plans compute what plain PyTorch computes from padded batches, and models
that do not are refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from secc.api.plan import compile_to_directory
from secc.driver.compile_options import CompileOptions
from secc.errors import UserError
from secc.frontend.dataset.packing_check import check_packing
from secc.runtime.model.packed_collate import PackedCollate, is_packed
from secc.runtime.model.user_file import load_model_file
from tests.e2e.harness import compile_and_write, find_differences, train_distributed, train_in_one_process
from tests.e2e.reference_runs import write_named_recording_model

GLOBAL_BATCH = 8


def test_packed_samples_lie_side_by_side_and_count_from_zero() -> None:
    samples: list[dict[str, Any]] = [
        {"input_ids": torch.tensor(i), "labels": torch.tensor(i), "kind": 3, "attention_mask": [1] * len(i)}
        for i in ([5, 6, 7], [8, 9])
    ]
    batch = PackedCollate.fit(samples, ("input_ids", "labels", "position_ids", "kind"))(samples)
    assert {key: value.tolist() for key, value in batch.items()} == {
        "input_ids": [[5, 6, 7, 8, 9]],
        "labels": [[-100, 6, 7, -100, 9]],
        "position_ids": [[0, 1, 2, 0, 1]],
        "kind": [3, 3],
    }
    assert samples[0]["labels"].tolist() == [5, 6, 7]  # the user's own tensor
    samples[1]["attention_mask"] = [1, 0]
    with pytest.raises(UserError, match="padding in its attention_mask"):
        PackedCollate.fit(samples, ("position_ids",))(samples)


MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(9, 8), nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, input_ids, labels, position_ids=None):
        places = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        h = self.words(input_ids) + self.places(places)
        logits = self.head(MIX)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)

def model():
    return Net()

def dataset():
    return [{"input_ids": torch.arange(i % 5 + 2), "labels": torch.arange(i % 5 + 2)} for i in range(16)]
"""
WITHIN_SAMPLES = "h + torch.where(places[..., None] > 0, h.roll(1, 1), 0.0)"


@pytest.mark.parametrize(
    ("mix", "more", "message"),
    [
        (WITHIN_SAMPLES, "", ""),
        ("h.cumsum(1)", "", "in one row give another result"),
        ("F.dropout(h, 0.5)", "", "draws random numbers by their places"),
        ("h + torch.zeros(6, 1)[: h.shape[1]]", "", "forward fails on samples in one row .RuntimeError"),
        (
            WITHIN_SAMPLES,
            "def collate(samples):\n    return samples[0]\n",
            "collate.. of the model file makes",
        ),
    ],
    ids=["exact", "mixes", "draws", "fails", "collates"],
)
def test_packing_is_compared_with_padding(mix: str, more: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(MODEL.replace("MIX", mix) + more)
    user = load_model_file(path)
    torch.manual_seed(0)
    model = user.build_model()
    if not message:
        check_packing(user, user.pack_samples(), model)
        return
    with pytest.raises(UserError, match=message) as refused:
        check_packing(user, user.pack_samples(), model)
    assert "leave --pack out" in refused.value.remedy and refused.value.where.startswith(str(path))


def test_forward_without_positions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(MODEL.replace("MIX", "h").replace("position_ids", "start"))
    user = load_model_file(path)
    with pytest.raises(UserError, match="forward takes no position_ids"):
        user.pack_samples().collate([user.load_sample(0)])


@pytest.mark.slow
@pytest.mark.parametrize("packs", [True, False])
def test_auto_packs_where_the_step_is_shorter_and_says_why(packs: bool, tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(MODEL.replace("MIX", "h.cumsum(1)"))
    path = write_named_recording_model("llama", tmp_path) if packs else path
    options = CompileOptions(cluster="local:1", global_batch=GLOBAL_BATCH, pack="auto")
    made = compile_to_directory(path, options, tmp_path / "plan")
    (note,) = (n for n in made.plan.checks["notes"] if n.startswith("--pack auto"))
    if not packs:
        assert "in one row give another result" in note and not is_packed(made.plan.inputs)
        return
    padded, packed = (float(n) for n in re.findall(r"([\d.]+) ms", note))
    assert is_packed(made.plan.inputs) == (packed < 0.98 * padded)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "pins"),
    [
        ("llama", 2, "model.dp=2 model.micro_batch=3"),
        ("mistral", 4, "model.dp=2 model.tp=2 model.sharding=zero2"),
        ("gemma3_text", 2, "model.cp=2 model.micro_batch=2"),
        ("gemma3_text", 4, "model.pp=2 model.cp=2 model.micro_batch=2"),
        ("gemma3_text", 2, "model.pp=2 model.micro_batch=1"),
        ("llama", 4, "model.pp=2 model.dp=2 model.micro_batch=3 model.sharding=zero2"),
        ("llama", 3, "model.dp=3 model.sharding=zero3 model.recompute=full"),
    ],
)
def test_packed_runs_train_as_plain_pytorch_with_padding(
    name: str, ranks: int, pins: str, tmp_path: Path
) -> None:
    path = write_named_recording_model(name, tmp_path)
    options: dict[str, Any] = {
        "cluster": f"local:{ranks}",
        "global_batch": GLOBAL_BATCH,
        "set": tuple(pins.split()),
    }
    compile_and_write(path, tmp_path / "plan", pack="always", **options)
    expected = train_in_one_process(path, GLOBAL_BATCH, 2, tmp_path / "plain")
    found = train_distributed(tmp_path / "plan", ranks, 2, tmp_path / "run")
    assert list(find_differences(found, expected)) == []


@pytest.mark.gloo
@pytest.mark.slow
def test_packed_and_padded_runs_agree_for_50_steps(tmp_path: Path) -> None:
    path, losses = write_named_recording_model("llama", tmp_path), list[list[float]]()
    for pack in ("always", "never"):
        plan, pins = tmp_path / pack, ("model.dp=2", "model.micro_batch=4")
        compile_and_write(path, plan, cluster="local:2", global_batch=GLOBAL_BATCH, set=pins, pack=pack)
        losses.append(train_distributed(plan, 2, 50, tmp_path / f"run_{pack}").losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and len(losses[0]) == 50
