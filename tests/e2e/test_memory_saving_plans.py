"""Plans that shard optimizer states and recompute activations train like plain PyTorch, with Hugging Face
models and their caches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from secc.runtime.model.user_file import load_model_file
from tests.e2e.harness import (
    compile_and_write,
    find_differences,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)

MODELS = Path(__file__).parent.parent / "models"
STEPS, GLOBAL_BATCH = 5, 12

CASES = [
    (
        "llava_tiny",
        (
            "language_model.sharding=zero1",
            "language_model.recompute=selective",
            "vision_tower.recompute=full",
        ),
    ),
    pytest.param(
        "qwen_distil",
        ("student.sharding=zero2", "student.recompute=full", "student.dp=2"),
        marks=pytest.mark.slow,
    ),
    ("loops", ("model.sharding=zero3", "model.recompute=full", "model.dp=2")),  # layers that run twice
    ("smoothed_layers", ("model.sharding=zero3", "model.dp=2")),  # weights that code outside of layers takes
    ("in_place_layers", ("model.sharding=zero3", "model.dp=2")),
    (
        "qwen_distil",
        (
            "student.sharding=zero3",
            "student.recompute=selective",
            "student.dp=2",
            "teacher.sharding=zero3",
            "teacher.dp=2",
        ),
    ),
]


@pytest.mark.gloo
@pytest.mark.parametrize(("name", "choices"), CASES)
def test_plan_trains_as_plain_pytorch(name: str, choices: tuple[str, ...], tmp_path: Path) -> None:
    model = write_recording_model(name, tmp_path, MODELS)
    reference = train_in_one_process(model, GLOBAL_BATCH, STEPS, tmp_path / "plain")
    compiled = compile_and_write(
        model, tmp_path / "plan", cluster="local:3", global_batch=GLOBAL_BATCH, set=choices
    )
    for choice in choices:
        section, _, text = choice.rpartition(".")
        key, _, value = text.partition("=")
        assert key == "dp" or getattr(compiled.plan.find_section(section), key) == value
    found = train_distributed(tmp_path / "plan", compiled.plan.world_size, STEPS, tmp_path / "run")
    assert list(find_differences(found, reference)) == []


@pytest.mark.gloo
@pytest.mark.parametrize("choices", [("model.dp=2",), ("model.dp=2", "model.tp=2")])
def test_shards_are_read_from_files_a_layer_at_a_time(choices: tuple[str, ...], tmp_path: Path) -> None:
    """The weights that `model()` makes of a seed, once made and once read."""
    model = write_recording_model("nano", tmp_path, MODELS)
    torch.manual_seed(7)
    state = load_model_file(model).build_model().state_dict()
    (tmp_path / "weights").mkdir()
    save_file(
        {name: t for name, t in state.items() if name != "head.weight"},
        tmp_path / "weights" / "model.safetensors",
    )
    options = {
        "cluster": f"local:{2 ** len(choices)}",
        "global_batch": GLOBAL_BATCH,
        "set": (*choices, "model.sharding=zero3"),
    }
    made = compile_and_write(model, tmp_path / "plan", check=False, **options)
    made_of_seed = train_distributed(
        tmp_path / "plan", made.plan.world_size, 2, tmp_path / "made", "--seed", "7"
    )
    found = train_distributed(
        tmp_path / "plan", made.plan.world_size, 2, tmp_path / "read", "--init", str(tmp_path / "weights")
    )
    assert found.losses == made_of_seed.losses
    assert all(torch.equal(t, made_of_seed.parameters[name]) for name, t in found.parameters.items())
