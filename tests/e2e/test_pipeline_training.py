"""Sections in pipeline stages train like plain PyTorch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from secc.errors import UserError
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.schema import plan_to_json
from secc.runtime.schedule.scheduler import schedule_batch
from secc.simulate.global_batches import load_global_batches
from tests.e2e.harness import (
    TrainingResult,
    compile_and_write,
    find_differences,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)

MODELS = Path(__file__).parent.parent / "models"
STEPS, GLOBAL_BATCH = 4, 12

# (model file, ranks, choices); ranks that the choices leave over train nothing
CASES = [
    ("skips", 3, ("model.pp=3", "model.backward=split", "model.micro_batch=2")),
    ("masked_distil", 3, ("student.pp=2",)),
]
SLOW = [
    ("llava_tiny", 3, ("language_model.pp=2", "vision_tower.dp=1")),
    ("skips", 4, ("model.pp=2", "model.dp=2", "model.sharding=zero3", "model.recompute=full")),
    (
        "skips",
        4,
        (
            "model.pp=2",
            "model.dp=2",
            "model.sharding=zero1",
            "model.recompute=selective",
            "model.micro_batch=2",
        ),
    ),
    ("skips", 5, ("model.pp=5", "model.micro_batch=1")),
    ("skips", 4, ("model.pp=2", "model.dp=2", "model.sharding=zero2", "model.backward=split")),
    (
        "llava_tiny",
        5,
        ("language_model.pp=2", "language_model.dp=2", "vision_tower.dp=1", "language_model.backward=split"),
    ),
    ("qwen_distil", 2, ("student.pp=2", "teacher.with=student")),
    ("qwen_distil", 4, ("student.pp=2", "teacher.pp=2")),
    ("qwen_distil", 5, ("student.pp=2", "teacher.pp=3")),
    ("llava_tiny", 4, ("language_model.pp=2", "vision_tower.pp=2")),
    ("llava_tiny", 4, ("language_model.pp=2", "language_model.dp=2", "vision_tower.with=language_model")),
    ("whisper_tiny", 4, ("decoder.pp=2", "encoder.pp=2")),
    ("llava_tiny", 5, ("language_model.pp=2", "language_model.tp=2", "vision_tower.dp=1")),
]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "ranks", "choices"), CASES + [pytest.param(*c, marks=pytest.mark.slow) for c in SLOW]
)
def test_stages_train_as_plain_pytorch(
    name: str, ranks: int, choices: tuple[str, ...], tmp_path: Path
) -> None:
    model = write_recording_model(name, tmp_path, MODELS)
    reference = train_in_one_process(model, GLOBAL_BATCH, STEPS, tmp_path / "plain")
    compiled = compile_and_write(
        model, tmp_path / "plan", cluster=f"local:{ranks}", global_batch=GLOBAL_BATCH, set=choices
    )
    sections = json.loads((tmp_path / "plan" / "plan.json").read_text())["sections"]
    for section, pp in (
        (choice.partition(".pp=")[0], choice.partition(".pp=")[2]) for choice in choices if ".pp=" in choice
    ):
        assert (sections[section]["mesh"]["pp"], len(sections[section]["stages"])) == (int(pp), int(pp))
    if name == "llava_tiny":  # what joined before its towers were opened is still told
        assert any(
            "multi_modal_projector joined" in n for n in compiled.plan.reasons["vision_tower"]["formed"]
        )
    found = train_distributed(tmp_path / "plan", compiled.plan.world_size, STEPS, tmp_path / "run")
    assert list(find_differences(found, reference)) == []


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_some_backwards_run_whole_where_memory_is_short(recompute: str, tmp_path: Path) -> None:
    """The largest samples have no room between the parts of a split backward."""
    model = write_recording_model("skips", tmp_path, MODELS)
    reference = train_in_one_process(model, GLOBAL_BATCH, STEPS, tmp_path / "plain")
    pins = tuple(f"model.{pin}" for pin in ("pp=3", "backward=split", "micro_batch=1"))
    compile_and_write(
        model,
        tmp_path / "plan",
        cluster="local:3",
        global_batch=GLOBAL_BATCH,
        set=(*pins, f"model.recompute={recompute}"),
    )
    plan = load_plan(tmp_path / "plan")
    samples = next(iter(load_global_batches(tmp_path / "plan", plan)))
    costs, singles = PredictedCosts(plan, samples), [(p,) for p in range(GLOBAL_BATCH)]
    sizes = {
        s.name: sorted(map(int.__add__, costs.saved_bytes(s, singles), split.between_bytes))
        for s in plan.sections
        if (split := costs.split_backwards(s, singles)).between_bytes
    }
    plan = replace(
        plan,
        sections=tuple(
            replace(s, room_bytes=sizes.get(s.name, [s.room_bytes])[-1] - 1) for s in plan.sections
        ),
    )
    whole = schedule_batch(plan, samples).whole_backwards
    assert whole.keys() == sizes.keys() and all(0 < len(m) < GLOBAL_BATCH for m in whole.values())
    (tmp_path / "plan" / "plan.json").write_text(plan_to_json(plan))
    found = train_distributed(tmp_path / "plan", plan.world_size, STEPS, tmp_path / "run")
    assert list(find_differences(found, reference)) == []


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        (("pp=2",), ("pp=1", "dp=2", "sharding=zero1"), ("pp=3", "recompute=full")),
        (
            ("pp=2", "placement=v", "sharding=zero1"),
            ("pp=1", "dp=2", "sharding=zero1"),
            ("pp=2", "chunks=2", "backward=split"),
        ),
    ],
    ids=["stages", "chunks"],
)
def test_a_checkpoint_may_change_its_stages(layouts: tuple[tuple[str, ...], ...], tmp_path: Path) -> None:
    model = write_recording_model("skips", tmp_path, MODELS)
    reference, losses, options = (
        train_in_one_process(model, GLOBAL_BATCH, 6, tmp_path / "plain"),
        list[float](),
        tuple[str, ...](),
    )
    for steps, choices in zip((2, 4, 6), layouts, strict=True):
        plan, work = tmp_path / f"plan{steps}", tmp_path / f"run{steps}"
        pins = tuple(f"model.{choice}" for choice in choices)
        compiled = compile_and_write(
            model, plan, check=False, cluster="local:3", global_batch=GLOBAL_BATCH, set=pins
        )
        found = train_distributed(plan, compiled.plan.world_size, steps, work, *options)
        losses += found.losses
        options = ("--resume", str(work / "saved"))
    assert (
        list(find_differences(replace(found, losses=losses, gradients=reference.gradients), reference)) == []
    )


@pytest.mark.gloo
@pytest.mark.slow
def test_random_ops_and_clipping_are_independent_of_stages(tmp_path: Path) -> None:
    model = write_recording_model("gpt2_dropout", tmp_path, MODELS)
    runs: list[TrainingResult] = []
    for ranks, pins in ((1, ()), (4, ("model.pp=2", "model.dp=2", "model.micro_batch=2"))):
        plan = tmp_path / f"plan{ranks}"
        compile_and_write(model, plan, cluster=f"local:{ranks}", global_batch=GLOBAL_BATCH, set=pins)
        runs.append(train_distributed(plan, ranks, STEPS, tmp_path / f"run{ranks}", "--clip", "0.5"))
    assert list(find_differences(runs[1], runs[0])) == []


REFUSED = [
    ("skips", "model.pp=6", "model.pp=6 is impossible: the section has 5 layers to cut between", "at most 5"),
    (
        "llava_tiny",
        "language_model.pp=3",
        "language_model.pp=3 is impossible: the section has 2 layers to cut between",
        "at most 2",
    ),
    (
        "skips",
        "model.chunks=6",
        "model.chunks=6 with pp=2 is impossible: the section has 5 layers to cut between, and 12 stages need",
        "set model.chunks to at most 2",
    ),
    ("padded_mean", "model.placement=v", "model.chunks=2 with pp=1 is impossible: the section has 0", ""),
    ("padded_mean", "model.pp=2", "model.pp=2 is impossible: the section has 0 layers to cut between", ""),
]


@pytest.mark.parametrize(("name", "choice", "message", "remedy"), REFUSED)
def test_impossible_stages_are_refused(
    name: str, choice: str, message: str, remedy: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        compile_and_write(
            MODELS / f"{name}.py",
            tmp_path / "plan",
            cluster="local:8",
            global_batch=GLOBAL_BATCH,
            set=(choice,),
        )
    assert message in error.value.message and remedy in error.value.remedy


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("choices", [(), ("model.sharding=zero2", "model.recompute=full")])
def test_stages_with_neighbouring_replicas(choices: tuple[str, ...], tmp_path: Path) -> None:
    """Where messages between two nodes take long, each has one stage's replicas, and a replica's ranks are
    not in a row."""
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("{nodes: 2, devices: 2, kind: cpu, between: {latency_us: 100000}}")
    model = write_recording_model("skips", tmp_path, MODELS)
    reference = train_in_one_process(model, GLOBAL_BATCH, STEPS, tmp_path / "plain")
    pins = ("model.pp=2", "model.dp=2", *choices)
    compiled = compile_and_write(
        model, tmp_path / "plan", cluster=str(cluster), global_batch=GLOBAL_BATCH, set=pins
    )
    assert compiled.plan.user_sections[0].mesh.ranks == (0, 2, 1, 3)
    assert [s.mesh.ranks for s in compiled.plan.sections] == [(0, 1), (2, 3)]
    found = train_distributed(tmp_path / "plan", compiled.plan.world_size, STEPS, tmp_path / "run")
    assert list(find_differences(found, reference)) == []
