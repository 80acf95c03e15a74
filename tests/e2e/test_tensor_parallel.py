"""Tensor-parallel plans train like plain PyTorch, with the user's own modules split, and with edges
between replicas of different tp."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from secc.errors import UserError
from tests.e2e.harness import (
    TrainingResult,
    compile_and_write,
    find_differences,
    read_metrics,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)

MODELS = Path(__file__).parent.parent / "models"
STEPS, GLOBAL_BATCH = 5, 12

CASES = [
    ("nano", 2, "auto", "model.tp=2 model.micro_batch=3"),
    ("vocabulary", 2, "colocate", "teacher.tp=2 layers.tp=2 layers.micro_batch=3"),
]
SLOW = [
    ("picture_tokens", 2, "colocate", "model.tp=2 model.micro_batch=3"),
    ("qwen_distil", 3, "apart", "teacher.tp=2 student.tp=1"),
    ("llava_tiny", 3, "apart", "language_model.tp=2"),
    ("nano", 4, "auto", "model.tp=4"),
    (
        "nano",
        4,
        "auto",
        "model.tp=2 model.dp=2 model.sharding=zero1 model.recompute=full model.micro_batch=2",
    ),
    (
        "nano",
        4,
        "auto",
        "model.tp=2 model.dp=2 model.sharding=zero3 model.recompute=selective model.micro_batch=3",
    ),
    ("nano", 4, "auto", "model.tp=2 model.pp=2 model.micro_batch=3"),
    ("nano_pair", 6, "apart", "encoder.tp=2 decoder.tp=4 decoder.micro_batch=3 encoder.micro_batch=5"),
    (
        "nano_pair",
        6,
        "apart",
        "encoder.tp=4 decoder.tp=2 decoder.micro_batch=3 encoder.micro_batch=4 --debug-comm",
    ),
    (
        "nano_pair",
        5,
        "apart",
        "encoder.dp=3 decoder.tp=2 decoder.dp=1 encoder.micro_batch=2 decoder.micro_batch=3",
    ),
    ("nano_pair", 5, "apart", "encoder.tp=2 decoder.dp=3 encoder.micro_batch=2 decoder.micro_batch=3"),
    ("nano_pair", 4, "colocate", "encoder.tp=4 decoder.tp=2 encoder.micro_batch=2 decoder.micro_batch=3"),
    ("nano_pair", 4, "colocate", "encoder.tp=2 decoder.dp=4 encoder.micro_batch=2 decoder.micro_batch=3"),
    ("qwen_distil", 4, "apart", "teacher.tp=2 student.tp=2 student.sharding=zero1"),
    ("two_modalities", 4, "apart", "decoder.tp=2"),
    ("vocabulary", 4, "colocate", "teacher.tp=4 layers.tp=4 layers.micro_batch=5"),
    ("vocabulary", 4, "apart", "teacher.tp=2 layers.tp=2 layers.micro_batch=2"),
    ("qwen_distil", 2, "colocate", "student.tp=2 student.micro_batch=3 --fuse"),
    ("llava_tiny", 2, "colocate", "language_model.tp=2 language_model.micro_batch=3 --fuse"),
    ("nano", 4, "auto", "model.tp=4 model.micro_batch=3 --fuse"),
    ("preference", 2, "colocate", "policy.tp=2 policy.micro_batch=3 --fuse"),
    (
        "llava_tiny",
        2,
        "colocate",
        "language_model.tp=2 language_model.norms=sequence language_model.micro_batch=3",
    ),
    (
        "llava_tiny",
        4,
        "colocate",
        "language_model.tp=2 language_model.norms=sequence "
        "language_model.sharding=zero1 language_model.recompute=full",
    ),
]


def norm(trained: TrainingResult) -> float:
    return math.sqrt(
        sum(float(g.double().square().sum()) for g in trained.gradients.values() if g is not None)
    )


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "ranks", "strategy", "choices"), CASES + [pytest.param(*c, marks=pytest.mark.slow) for c in SLOW]
)
def test_plan_trains_as_plain_pytorch(
    name: str, ranks: int, strategy: str, choices: str, tmp_path: Path
) -> None:
    model = write_recording_model(name, tmp_path, MODELS)
    reference = train_in_one_process(model, GLOBAL_BATCH, STEPS, tmp_path / "plain")
    pins = tuple(c for c in choices.split() if not c.startswith("--"))
    options: dict[str, Any] = {
        "cluster": f"local:{ranks}",
        "global_batch": GLOBAL_BATCH,
        "strategy": strategy,
        "set": pins,
    }
    made = compile_and_write(model, tmp_path / "plan", fuse="--fuse" in choices, **options)
    assert all(s.shards and s.styles for s in made.plan.sections if s.mesh.tp > 1)
    assert ("norms=sequence" in choices) == any(
        style.kind == "sequence" for s in made.plan.sections for style in s.styles
    )
    flags = [c for c in choices.split() if c.startswith("--") and c != "--fuse"]
    found = train_distributed(tmp_path / "plan", ranks, STEPS, tmp_path / "run", *flags)
    assert list(find_differences(found, reference)) == []
    assert read_metrics(tmp_path / "run")[0]["grad_norm"] == pytest.approx(norm(reference), rel=1e-5)


@pytest.mark.gloo
@pytest.mark.slow
def test_the_last_stage_may_split_the_head_alone(tmp_path: Path) -> None:
    """Its norm is whole on each rank; the head is split by tokens."""
    model = write_recording_model("heavy_head", tmp_path, MODELS)
    reference = train_in_one_process(model, 6, STEPS, tmp_path / "plain")
    pins = ("model.tp=2", "model.pp=3", "model.micro_batch=2")
    made = compile_and_write(model, tmp_path / "plan", cluster="local:6", global_batch=6, set=pins)
    last = made.plan.sections[-1]
    assert (last.blocks, last.styles, [s.name for s in last.shards]) == (("norm",), (), ["head.weight"])
    found = train_distributed(tmp_path / "plan", 6, STEPS, tmp_path / "run")
    assert list(find_differences(found, reference)) == []


@pytest.mark.gloo
@pytest.mark.slow
def test_dropout_on_parts_draws_what_one_rank_draws(tmp_path: Path) -> None:
    """GPT-2 with dropout in its attention, its layers recomputed by the user, and a vocabulary that two ranks
    cannot share evenly."""
    model = write_recording_model("gpt2_dropout", tmp_path, MODELS)
    runs: list[TrainingResult] = []
    for ranks, pins in ((1, ()), (2, ("model.tp=2",))):
        compile_and_write(
            model, tmp_path / f"plan{ranks}", cluster=f"local:{ranks}", global_batch=GLOBAL_BATCH, set=pins
        )
        runs.append(train_distributed(tmp_path / f"plan{ranks}", ranks, STEPS, tmp_path / f"run{ranks}"))
    assert list(find_differences(runs[1], runs[0])) == []


@pytest.mark.gloo
@pytest.mark.slow
def test_checkpoints_load_under_another_tp(tmp_path: Path) -> None:
    """Two steps in two parts of every matrix and a sharded optimizer, one in four parts, the rest whole: as
    plain PyTorch does all five."""
    model = write_recording_model("nano", tmp_path, MODELS)
    reference = train_in_one_process(model, GLOBAL_BATCH, STEPS, tmp_path / "plain")
    saved, losses = None, list[float]()
    found = None
    for until, ranks, pins in (
        (2, 4, "model.tp=2 model.dp=2 model.sharding=zero1"),
        (3, 4, "model.tp=4"),
        (STEPS, 2, "model.dp=2"),
    ):
        compile_and_write(
            model,
            tmp_path / f"plan{until}",
            cluster=f"local:{ranks}",
            global_batch=GLOBAL_BATCH,
            set=tuple(pins.split()),
        )
        resume = ("--resume", str(saved)) if saved else ()
        found = train_distributed(tmp_path / f"plan{until}", ranks, until, tmp_path / f"run{until}", *resume)
        saved = tmp_path / f"run{until}" / "saved"
        losses += found.losses
    assert found is not None
    first = train_distributed(tmp_path / "plan2", 4, 2, tmp_path / "again")
    assert list(find_differences(TrainingResult(losses, first.gradients, found.parameters), reference)) == []


def test_sequence_parallel_norms_are_refused_if_no_layer_was_verified(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"model\.norms=sequence is impossible: no layer of it was shown exact"
    ):
        compile_and_write(
            MODELS / "nano.py",
            tmp_path / "plan",
            cluster="local:2",
            set=("model.tp=2", "model.norms=sequence"),
        )


def test_impossible_tp_is_refused_with_the_reason(tmp_path: Path) -> None:
    for choice, ranks, reason in (
        ("student.tp=4", 4, "tp=4 does not divide 2 heads"),
        ("student.tp=3", 3, "tp=3 does not divide"),
    ):
        with pytest.raises(UserError, match=reason) as error:
            compile_and_write(
                MODELS / "qwen_distil.py",
                tmp_path / "plan",
                cluster=f"local:{ranks}",
                global_batch=GLOBAL_BATCH,
                set=(choice,),
            )
        assert error.value.remedy


@pytest.mark.gloo
def test_what_a_hook_on_gradients_sees_stays_whole(tmp_path: Path) -> None:
    """It picks rows by their numbers, which are others in a part: of the tied head, and in a layer."""
    hooked = """    found = Nano()
    for weight, first in ((found.head.weight, 48), (found.h[1].up.weight, 32)):
        weight.register_hook(lambda g, first=first: torch.cat([0 * g[:first], g[first:]]))
    return found"""
    text = (MODELS / "nano.py").read_text()
    (tmp_path / "hooked_nano.py").write_text(
        text.replace("    return Nano()", "    torch.manual_seed(0)\n" + hooked)
    )
    model = write_recording_model("hooked_nano", tmp_path, tmp_path)
    made = compile_and_write(
        model, tmp_path / "plan", cluster="local:2", global_batch=GLOBAL_BATCH, set=("model.tp=2",)
    )
    cut = {s.name for s in made.plan.sections[0].shards}
    assert any(n.startswith("h.0.") for n in cut)
    assert not any(n.startswith("h.1.") for n in cut) and not cut & {"head.weight", "wte.weight"}
    reference = train_in_one_process(model, GLOBAL_BATCH, 3, tmp_path / "plain")
    found = train_distributed(tmp_path / "plan", 2, 3, tmp_path / "run")
    assert list(find_differences(found, reference)) == []
