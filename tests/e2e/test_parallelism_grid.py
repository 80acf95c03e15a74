"""Every parallelism combined with every other: six models under plans of two to six ranks train like plain
PyTorch.

A model is captured once for each dtype and planned again for each row; ranks are forked from one server
that has imported everything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from secc.driver.compile_options import CompileOptions
from tests.e2e.reference_runs import ReferencedModel

STEPS, GLOBAL_BATCH = 3, 12

# model file -> (ranks, pins): "S.tp=2 S.dp=2"; a pin without a section is of the model's one section; "bf16"
# is the dtype
FAST = {
    "nano": [
        (4, "tp=2 dp=2 sharding=zero3 recompute=full micro_batch=2 overlap=both"),
        (4, "tp=2 pp=2 micro_batch=3 sharding=zero1"),
        (4, "cp=2 tp=2 sharding=zero1 micro_batch=2"),
    ],
    "llava_tiny": [
        (4, "language_model.tp=2 vision_tower.dp=2 vision_tower.micro_batch=2 language_model.overlap=both"),
    ],
    "qwen_distil": [
        (4, "teacher.dp=2 teacher.sharding=zero3 student.tp=2"),
    ],
    "whisper_tiny": [
        (3, "encoder.dp=1 decoder.pp=2 decoder.backward=split"),
    ],
    "llama_deep": [(4, "tp=2 pp=2 placement=v sharding=zero1 micro_batch=3")],
    "qwen3_moe": [
        (2, "tp=2 sharding=zero1 micro_batch=5"),
        (2, "tp=2 ep=2 sharding=zero1 micro_batch=5"),
        (2, "dp=2 ep=2 micro_batch=5"),
    ],
}
SLOW = {
    "nano": [
        (4, "tp=4 micro_batch=5 overlap=both"),
        (4, "tp=2 cp=2 micro_batch=2 overlap=both sharding=zero1"),
        (4, "tp=2 dp=2 sharding=zero2 recompute=selective micro_batch=1 overlap=both bf16"),
        (4, "tp=2 pp=2 micro_batch=2 backward=split overlap=both"),
        (4, "tp=2 pp=2 micro_batch=1 recompute=full overlap=backward"),
        (2, "cp=2 micro_batch=1"),
        (4, "cp=4 recompute=full micro_batch=5"),
        (4, "cp=2 dp=2 sharding=zero3 recompute=selective micro_batch=2"),
        (4, "cp=2 pp=2 sharding=zero2 micro_batch=3"),
        (6, "cp=3 dp=2 sharding=zero1 micro_batch=2"),
        (2, "cp=2 sharding=zero3 micro_batch=2"),
        (4, "cp=2 tp=2 recompute=full micro_batch=2 bf16"),
        (2, "dp=2 micro_batch=1"),
        (3, "dp=3 sharding=zero1 recompute=full micro_batch=1"),
        (2, "dp=2 sharding=zero2 recompute=selective"),
        (5, "dp=5 sharding=zero3 micro_batch=1"),
        (4, "tp=4 micro_batch=5"),
        (4, "tp=2 dp=2 sharding=zero1 recompute=selective micro_batch=1"),
        (6, "tp=2 dp=3 sharding=zero2 recompute=full"),
        (2, "pp=2 micro_batch=1 backward=split"),
        (2, "pp=2 micro_batch=1 backward=split recompute=full"),
        (4, "tp=2 pp=2 micro_batch=2 backward=split recompute=selective overlap=both sharding=zero1"),
        (4, "pp=2 dp=2 micro_batch=2 backward=split recompute=full bf16"),
        (4, "pp=2 dp=2 sharding=zero1 micro_batch=2 backward=split"),
        (6, "pp=2 dp=3 sharding=zero3 micro_batch=1"),
        (4, "tp=2 pp=2 recompute=full micro_batch=1"),
        (4, "tp=2 dp=2 sharding=zero3 recompute=full micro_batch=2 bf16"),
        (4, "pp=2 dp=2 sharding=zero1 micro_batch=2 backward=split bf16"),
        (4, "tp=2 pp=2 micro_batch=2 backward=split"),
        (5, "dp=5 sharding=zero2 micro_batch=1 bf16"),
    ],
    "llava_tiny": [
        (5, "language_model.pp=2 language_model.dp=2 language_model.sharding=zero2 vision_tower.dp=1"),
        (2, "language_model.dp=2 vision_tower.with=language_model language_model.micro_batch=3"),
        (3, "language_model.cp=2 language_model.recompute=full vision_tower.dp=1"),
        (4, "language_model.cp=2 language_model.dp=2 vision_tower.with=language_model"),
        (5, "language_model.cp=4 vision_tower.dp=1 vision_tower.micro_batch=2"),
        (3, "language_model.dp=2 language_model.sharding=zero1 vision_tower.dp=1 vision_tower.micro_batch=1"),
        (
            4,
            "language_model.dp=3 language_model.sharding=zero3 vision_tower.dp=1 vision_tower.recompute=full",
        ),
        (
            5,
            "language_model.dp=3 language_model.sharding=zero2 vision_tower.dp=2 vision_tower.sharding=zero3",
        ),
        (4, "language_model.tp=2 vision_tower.tp=2 vision_tower.micro_batch=2"),
        (
            6,
            "language_model.tp=2 language_model.dp=2 language_model.sharding=zero1 "
            "vision_tower.dp=2 vision_tower.sharding=zero2",
        ),
        (6, "language_model.tp=2 language_model.pp=2 vision_tower.pp=2"),
        (5, "language_model.tp=2 language_model.pp=2 language_model.backward=split vision_tower.dp=1"),
        (4, "language_model.pp=2 vision_tower.tp=2 language_model.micro_batch=2"),
        (
            3,
            "language_model.pp=2 language_model.backward=split "
            "vision_tower.dp=1 language_model.micro_batch=1",
        ),
        (5, "language_model.pp=2 language_model.dp=2 language_model.sharding=zero2 vision_tower.dp=1 bf16"),
        (
            6,
            "language_model.tp=2 language_model.dp=2 language_model.sharding=zero3 "
            "vision_tower.dp=2 vision_tower.sharding=zero1 bf16",
        ),
    ],
    "qwen_distil": [
        (3, "teacher.pp=2 student.dp=1 student.recompute=selective"),
        (5, "teacher.cp=2 teacher.dp=1 student.tp=2 student.recompute=full"),
        (6, "teacher.cp=4 student.cp=2 student.sharding=zero2"),
        (4, "teacher.cp=2 student.cp=2 bf16"),
        (2, "student.dp=2 student.sharding=zero2 teacher.with=student"),
        (4, "student.dp=3 student.sharding=zero1 student.recompute=full teacher.dp=1 teacher.micro_batch=4"),
        (5, "student.dp=2 student.sharding=zero3 teacher.dp=3 teacher.sharding=zero3"),
        (6, "student.tp=2 student.dp=2 student.sharding=zero2 teacher.tp=2"),
        (5, "student.dp=3 student.micro_batch=2 teacher.tp=2 teacher.micro_batch=5"),
        (5, "student.pp=2 teacher.pp=3 student.backward=split"),
        (6, "student.pp=2 student.dp=2 student.sharding=zero3 teacher.tp=2"),
        (6, "student.tp=2 student.pp=2 student.recompute=selective teacher.pp=2"),
        (4, "teacher.dp=2 teacher.sharding=zero3 student.tp=2 student.recompute=selective bf16"),
        (5, "student.pp=2 teacher.pp=3 student.backward=split bf16"),
        (5, "student.tp=2 student.pp=2 student.norms=sequence student.backward=split teacher.dp=1"),
        (5, "student.tp=2 student.pp=2 student.backward=split teacher.dp=1 bf16"),
        (5, "student.tp=2 student.pp=2 student.backward=split student.overlap=both teacher.dp=1"),
        (4, "teacher.tp=2 teacher.overlap=both student.tp=2 student.recompute=full student.overlap=both"),
    ],
    "llama_deep": [  # several chunks of layers on a rank
        (4, "tp=2 pp=2 placement=v micro_batch=1 overlap=both sharding=zero1"),
        (2, "tp=2 norms=sequence recompute=full micro_batch=3 overlap=both"),
        (4, "tp=2 dp=2 norms=sequence micro_batch=2 overlap=both bf16"),
        (4, "tp=2 dp=2 norms=sequence sharding=zero3 micro_batch=2 overlap=both"),
        (4, "tp=2 pp=2 norms=sequence backward=split micro_batch=2 overlap=both"),
        (2, "pp=2 chunks=2 micro_batch=1"),
        (2, "pp=2 placement=v micro_batch=1 backward=split recompute=full"),
        (4, "tp=2 pp=2 chunks=2 sharding=zero1 micro_batch=3"),
        (4, "tp=2 pp=2 placement=v micro_batch=1 backward=split"),
        (4, "tp=2 pp=2 placement=v norms=sequence recompute=selective micro_batch=2"),
        (4, "pp=2 dp=2 placement=v sharding=zero1 recompute=full micro_batch=2 bf16"),
        (4, "cp=2 pp=2 placement=v micro_batch=3"),
        (5, "pp=2 dp=2 chunks=2 sharding=zero2 micro_batch=1 backward=split"),
        (4, "pp=2 dp=2 placement=v sharding=zero3 recompute=full micro_batch=1"),
        (2, "pp=2 chunks=2 micro_batch=2 offload=activations"),
        (4, "tp=2 cp=2 micro_batch=3 offload=activations overlap=both"),
        (2, "cp=2 recompute=full micro_batch=2 offload=activations"),
        (4, "tp=2 pp=2 placement=v recompute=selective micro_batch=2 offload=activations bf16"),
    ],
    "qwen2_5_vl": [(3, "visual.pp=2 visual.micro_batch=1 language_model.dp=1")],
    "t5": [  # the sections share embeddings
        (2, "decoder.with=encoder encoder.tp=2 decoder.cp=2"),
        (2, "decoder.with=encoder encoder.tp=2 decoder.tp=2 encoder.overlap=both decoder.overlap=both"),
        (4, "decoder.with=encoder encoder.dp=4 decoder.tp=2 decoder.pp=2 bf16"),
        (4, "encoder.tp=2 decoder.tp=2 decoder.sharding=zero3"),
    ],
    "whisper_tiny": [
        (4, "encoder.tp=2 decoder.dp=2 decoder.sharding=zero3 decoder.micro_batch=2"),
        (2, "encoder.with=decoder decoder.dp=2 decoder.micro_batch=1"),
        (4, "encoder.cp=2 decoder.cp=2 decoder.micro_batch=2"),
        (3, "encoder.dp=1 decoder.cp=2 decoder.sharding=zero1"),
        (3, "encoder.dp=2 encoder.sharding=zero1 decoder.dp=1 decoder.recompute=full"),
        (
            4,
            "encoder.dp=1 encoder.recompute=selective "
            "decoder.dp=3 decoder.sharding=zero2 decoder.micro_batch=2",
        ),
        (5, "encoder.dp=2 encoder.sharding=zero3 decoder.dp=3 decoder.sharding=zero3"),
        (4, "encoder.tp=2 decoder.tp=2 decoder.micro_batch=3"),
        (6, "encoder.dp=2 encoder.sharding=zero2 decoder.tp=2 decoder.dp=2 decoder.sharding=zero1"),
        (4, "encoder.pp=2 decoder.pp=2 decoder.micro_batch=2"),
        (6, "encoder.pp=2 decoder.tp=2 decoder.pp=2"),
        (4, "encoder.tp=2 decoder.dp=2 decoder.sharding=zero3 decoder.micro_batch=2 bf16"),
        (6, "encoder.pp=2 decoder.tp=2 decoder.pp=2 bf16"),
    ],
    "qwen3_moe": [
        (2, "cp=2 micro_batch=3"),
        (4, "tp=2 dp=2 sharding=zero3 recompute=full micro_batch=2"),
        (4, "tp=2 pp=2 micro_batch=3 recompute=selective"),
        (4, "tp=2 dp=2 sharding=zero2 bf16"),
        (4, "tp=2 ep=2 dp=2 sharding=zero3 recompute=full micro_batch=2"),
        (4, "tp=2 ep=2 pp=2 micro_batch=3 recompute=selective"),
        (4, "tp=2 ep=2 pp=2 micro_batch=2 backward=split"),
        (4, "tp=2 pp=2 micro_batch=2 backward=split"),
        (4, "tp=2 ep=2 dp=2 sharding=zero2 bf16"),
        (4, "dp=4 ep=4 sharding=zero1 micro_batch=2"),
        (4, "dp=4 ep=2 sharding=zero2 recompute=full micro_batch=1"),
        (4, "dp=4 ep=2 sharding=zero3 recompute=selective micro_batch=1"),
        (4, "tp=2 dp=2 ep=4 sharding=zero1 recompute=full micro_batch=2"),
        (4, "pp=2 dp=2 ep=2 micro_batch=3 sharding=zero1"),
        (4, "dp=4 ep=4 recompute=full micro_batch=2 bf16"),
        (4, "tp=2 ep=2 cp=2 sharding=zero1 micro_batch=2"),
        (4, "dp=2 ep=2 cp=2 recompute=full micro_batch=1"),
        (4, "dp=2 ep=2 cp=2 sharding=zero3 recompute=selective micro_batch=2"),
        (6, "dp=2 ep=2 cp=3 sharding=zero2 micro_batch=1"),
        (8, "dp=2 tp=2 ep=4 cp=2 sharding=zero1 micro_batch=2 bf16"),
    ],
    "gpt_oss": [
        (2, "cp=2 micro_batch=2"),
        (4, "tp=2 dp=2 sharding=zero1"),
        (4, "tp=2 dp=2 sharding=zero3 recompute=full micro_batch=1"),
        (4, "tp=2 ep=2 dp=2 recompute=full micro_batch=1"),
        (4, "dp=4 ep=4 sharding=zero1 micro_batch=1"),
    ],
    "gpt_oss_tiny": [
        (4, "tp=4 ep=2 micro_batch=2"),
        (4, "tp=4 ep=2 sharding=zero1 recompute=full micro_batch=1"),
        (4, "tp=4 ep=2 recompute=selective bf16"),
    ],
    "deepseek_v3": [
        (4, "tp=4 ep=4 sharding=zero1 micro_batch=3"),
        (4, "tp=4 ep=2 recompute=full micro_batch=2"),
        (4, "tp=2 ep=2 pp=2 micro_batch=3"),
        (4, "tp=2 pp=2 micro_batch=2 backward=split"),
        (4, "dp=4 ep=4 sharding=zero1 recompute=full micro_batch=1"),
    ],
    "mixtral": [(4, "tp=2 ep=2 dp=2 sharding=zero2 micro_batch=1")],
    "glm4_moe": [(2, "tp=2 ep=2 recompute=selective micro_batch=3 overlap=both")],
}
EXPERTS = (
    "qwen3_moe",
    "gpt_oss",
    "gpt_oss_tiny",
    "deepseek_v3",
    "mixtral",
    "glm4_moe",
)  # which tp cuts by their inner width, or with ep into whole experts


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ReferencedModel]:
    return cache(lambda name: ReferencedModel(name, tmp_path_factory.mktemp(name), STEPS))


def _rows(table: dict[str, list[tuple[int, str]]]) -> list[tuple[str, int, str]]:
    return [(name, ranks, pins) for name, rows in table.items() for ranks, pins in rows]


def _pins(text: str) -> tuple[str, ...]:
    return tuple(pin if "." in pin else f"model.{pin}" for pin in text.split() if "=" in pin)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "ranks", "pins"),
    [*_rows(FAST), *(pytest.param(*row, marks=pytest.mark.slow) for row in _rows(SLOW))],
)
def test_a_plan_trains_as_plain_pytorch(
    captured: Callable[[str], ReferencedModel], name: str, ranks: int, pins: str, tmp_path: Path
) -> None:
    model, dtype = captured(name), "bf16" if "bf16" in pins.split() else ""
    made = model.plan_with(
        CompileOptions(cluster=f"local:{ranks}", global_batch=GLOBAL_BATCH, set=_pins(pins), dtype=dtype)
    )
    held = {s.name: s for s in made.plan.user_sections}
    for section, key, value in ((*pin.split("=")[0].split("."), pin.split("=")[1]) for pin in _pins(pins)):
        if key in ("tp", "pp", "dp", "cp", "ep"):
            assert getattr(held[section].mesh, key) == int(value)
        elif key in ("sharding", "recompute", "chunks", "placement", "overlap", "offload"):
            assert str(getattr(held[section], key)) == value
    kinds = {style.kind for s in made.plan.sections for style in s.styles} & {"experts", "routed"}
    cut = name in EXPERTS and any(max(s.mesh.tp, s.mesh.ep) > 1 for s in made.plan.sections)
    assert kinds == ({"routed" if "ep=" in pins else "experts"} if cut else set())
    assert model.list_differences(made, tmp_path) == []


@pytest.mark.gloo
@pytest.mark.slow
def test_pieces_of_layers_that_no_pin_asked_for_train_as_plain_pytorch(
    captured: Callable[[str], ReferencedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocation weighs them for GPUs; here for CPUs, to train on them, and whatever they cost."""
    monkeypatch.setattr("secc.passes.allocate.PLAIN_BACKENDS", set())
    monkeypatch.setattr("secc.alloc.refine.interleaved_stages.FIRST_BATCH_MARGIN", 9)
    margins = {"one": 0, "split": 0, "loop": -9, "v": -9}
    monkeypatch.setattr("secc.alloc.refine.interleaved_stages.MARGINS", margins)
    model = captured("llama_deep")
    made = model.plan_with(
        CompileOptions(cluster="local:2", global_batch=GLOBAL_BATCH, set=_pins("pp=2 micro_batch=1"))
    )
    assert {s.chunks for s in made.plan.user_sections} == {2}
    assert model.list_differences(made, tmp_path) == []
