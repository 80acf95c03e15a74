"""Plans with context parallelism (cp) train as plain PyTorch does: decoders with different kinds of
attention, lengths that do not divide, samples shorter than cp, padding on either side, documents side by
side; with every other parallelism, dropout, and checkpoints under other plans."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from secc.driver.compile_options import CompileOptions
from secc.driver.replan_from_run import plan_pins
from secc.errors import UserError
from tests.e2e.harness import (
    compile_and_write,
    find_differences,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)
from tests.e2e.reference_runs import MODELS_FOLDER, ReferencedModel, write_named_recording_model

STEPS, GLOBAL_BATCH = 2, 6

# model -> (ranks, pins): pins without a section are of the model's one section; "bf16" is the dtype
ROWS: dict[str, list[tuple[int, str]]] = {
    "llama": [
        (4, "cp=2 tp=2 recompute=full micro_batch=2"),
        (4, "cp=4 sharding=zero3 micro_batch=3"),
        (4, "cp=2 pp=2 micro_batch=2 backward=split"),
        (8, "cp=2 pp=2 tp=2 micro_batch=1 backward=split overlap=both sharding=zero1"),
        (4, "cp=2 tp=2 norms=sequence micro_batch=2"),
        (8, "cp=2 pp=2 tp=2 norms=sequence micro_batch=1 backward=split overlap=both"),
        (8, "cp=4 tp=2 norms=sequence micro_batch=2 sharding=zero3 recompute=full overlap=both"),
    ],
    "llama_short": [
        (2, "cp=2 micro_batch=1"),
        (4, "cp=4 micro_batch=2"),
        (8, "cp=4 tp=2 norms=sequence micro_batch=1 overlap=both"),
    ],
    "qwen3": [
        (4, "cp=2 pp=2 micro_batch=3"),
        (4, "cp=4 recompute=selective"),
        (4, "cp=2 pp=2 micro_batch=1 backward=split recompute=full"),
        (4, "cp=2 tp=2 norms=sequence recompute=selective bf16"),
        (8, "cp=2 pp=2 tp=2 norms=sequence micro_batch=3 bf16 overlap=both"),
    ],
    "gemma3_text": [
        (2, "cp=2 sharding=zero1 micro_batch=2"),
        (4, "cp=4 bf16"),
        (4, "cp=2 tp=2 norms=sequence recompute=full overlap=backward"),
    ],
    "gemma3_text_left": [(2, "cp=2 recompute=full"), (4, "cp=4 micro_batch=2")],
    "mistral": [
        (4, "cp=2 dp=2 sharding=zero3"),
        (4, "cp=4 recompute=full"),
        (8, "cp=2 dp=2 tp=2 norms=sequence sharding=zero3"),
    ],
    "bloom": [(4, "cp=2 tp=2 micro_batch=3"), (4, "cp=4 micro_batch=2")],
    "whisper_padded": [
        (3, "encoder.dp=1 decoder.cp=2 decoder.sharding=zero3"),
        (5, "encoder.dp=1 decoder.cp=4 decoder.recompute=full"),
    ],
    "documents": [
        (2, "cp=2 micro_batch=1 recompute=selective"),
        (4, "cp=4 sharding=zero2 micro_batch=2"),
        (4, "cp=2 pp=2 bf16"),
        (4, "cp=2 pp=2 bf16 backward=split micro_batch=1"),
    ],
    "gemma3": [
        (3, "vision_tower.dp=1 language_model.cp=2 language_model.micro_batch=2"),
        (5, "vision_tower.dp=1 language_model.cp=4 language_model.sharding=zero1"),
        (4, "vision_tower.cp=3 language_model.dp=1 vision_tower.micro_batch=1"),
        (5, "vision_tower.dp=1 language_model.cp=2 language_model.tp=2 language_model.norms=sequence"),
    ],
    "qwen2_5_vl": [
        (3, "visual.dp=1 language_model.cp=2 language_model.recompute=full"),
        (3, "visual.cp=2 language_model.dp=1 visual.recompute=full"),
        (5, "visual.cp=3 language_model.cp=2 visual.micro_batch=1"),
        (5, "visual.dp=1 language_model.cp=4 language_model.micro_batch=2"),
        (5, "visual.dp=1 language_model.cp=2 language_model.tp=2 language_model.norms=sequence"),
    ],
    "video_frames": [
        (3, "tower.cp=2 decoder.dp=1 tower.recompute=full"),
        (4, "tower.cp=3 decoder.dp=1 tower.micro_batch=1"),
    ],
    "t5": [
        (4, "encoder.cp=2 decoder.cp=2 decoder.sharding=zero3"),
        (5, "encoder.dp=1 decoder.cp=4 decoder.micro_batch=2"),
        (6, "encoder.dp=2 decoder.dp=2 decoder.cp=2 decoder.sharding=zero3"),
        (5, "encoder.cp=2 encoder.tp=2 encoder.norms=sequence decoder.dp=1"),
    ],
    "gpt_oss": [(4, "cp=2 tp=2 micro_batch=2"), (4, "cp=4 recompute=full micro_batch=3")],
    "bamba": [(2, "cp=2 micro_batch=2"), (4, "cp=4 sharding=zero3")],
}
# The same with rows exchanged for heads; 4 heads of keys and values, of "gemma3_text" 2.
ULYSSES: dict[str, list[tuple[int, str]]] = {
    "llama_heads": [
        (2, "cp=2 micro_batch=3"),
        (4, "cp=2 tp=2 recompute=selective micro_batch=2"),
        (4, "cp=2 tp=2 norms=sequence micro_batch=2"),
        (4, "cp=4 sharding=zero3 recompute=full"),
        (4, "cp=2 pp=2 bf16"),
    ],
    "llama_heads_left": [(4, "cp=4 micro_batch=2 bf16"), (4, "cp=2 dp=2 sharding=zero2")],
    "llama_heads_short": [(4, "cp=4 micro_batch=1")],
    "gemma3_text": [(2, "cp=2 recompute=full micro_batch=2")],
}
# A tower with frames as entries of a batch: 2 to 9 of a sample, so some ranks may have none.
FRAMES = [
    (5, "blocks.cp=2 layers.cp=2 decoder.dp=1 layers.recompute=full blocks.recompute=full"),
    (6, "blocks.dp=1 layers.cp=4 decoder.dp=1 layers.micro_batch=1"),
    (6, "blocks.cp=4 blocks.sharding=zero3 layers.dp=1 decoder.dp=1 blocks.micro_batch=2"),
    (6, "blocks.dp=1 layers.cp=2 layers.pp=2 decoder.dp=1 layers.micro_batch=3"),
    (6, "blocks.dp=1 layers.cp=2 layers.tp=2 decoder.dp=1 layers.recompute=selective"),
    (8, "blocks.cp=2 layers.cp=2 layers.dp=2 decoder.cp=2 layers.sharding=zero2"),
]
CHOSEN = {"": ROWS, "gather": {"llama_heads": [(2, "cp=2")]}, "ulysses": ULYSSES}


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ReferencedModel]:
    return cache(lambda name: ReferencedModel(name, tmp_path_factory.mktemp(name), STEPS))


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "pins", "attention"),
    [(n, *row, how) for how, table in CHOSEN.items() for n, rows in table.items() for row in rows],
)
def test_a_plan_with_cp_trains_as_plain_pytorch(
    captured: Callable[[str], ReferencedModel],
    name: str,
    ranks: int,
    pins: str,
    attention: str,
    tmp_path: Path,
) -> None:
    model, dtype = captured(name), "bf16" if "bf16" in pins.split() else ""
    pins += f" attention={attention}" if attention else ""
    wanted = tuple(pin if "." in pin else f"model.{pin}" for pin in pins.split() if "=" in pin)
    wanted += tuple(f"{pin.partition('.')[0]}.cp_per=section" for pin in wanted if ".cp=" in pin)
    made = model.plan_with(
        CompileOptions(cluster=f"local:{ranks}", global_batch=GLOBAL_BATCH, set=wanted, dtype=dtype)
    )
    assert max(s.mesh.cp for s in made.plan.user_sections) == max(
        int(pin.rpartition("=")[2]) for pin in wanted if ".cp=" in pin
    )
    if "norms=sequence" in pins:
        assert "sequence" in {s.norms for s in made.plan.user_sections if s.mesh.cp > 1}
    if attention:
        assert {s.row_attention for s in made.plan.user_sections} == {attention}
        assert f"model.attention={attention}" in plan_pins(made.plan)
    assert model.list_differences(made, tmp_path) == []


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("per", ["section", "micro_batch"])
@pytest.mark.parametrize(("ranks", "pins"), FRAMES)
def test_ranks_get_whole_frames_of_a_batch(
    captured: Callable[[str], ReferencedModel], ranks: int, pins: str, per: str, tmp_path: Path
) -> None:
    model, wanted = captured("frame_batches"), tuple(pins.split())
    wanted += tuple(f"{pin.partition('.')[0]}.cp_per={per}" for pin in wanted if ".cp=" in pin)
    made = model.plan_with(CompileOptions(cluster=f"local:{ranks}", global_batch=GLOBAL_BATCH, set=wanted))
    towers = [s for s in made.plan.user_sections if s.mesh.cp > 1 and s.name != "decoder"]
    assert towers and {s.row_attention for s in towers} == {"frames"}
    assert model.list_differences(made, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pins", "reason"),
    [
        ("bloom", "model.cp=2", "not all its layers call scaled_dot_product_attention"),
        ("llama", "model.cp=4", "a divisor of its 2 heads"),
        ("llama", "model.dp=4", "cp must be above 1"),
    ],
)
def test_heads_that_ranks_cannot_divide_are_refused(
    captured: Callable[[str], ReferencedModel], name: str, pins: str, reason: str
) -> None:
    wanted = (pins, "model.attention=ulysses")
    options = CompileOptions(cluster="local:4", global_batch=GLOBAL_BATCH, set=wanted)
    with pytest.raises(UserError, match=reason):
        captured(name).plan_with(options)


@pytest.mark.slow
def test_cp_is_refused_where_no_layer_works_on_rows(captured: Callable[[str], ReferencedModel]) -> None:
    """Each layer has a state space as well as attention; in `bamba` such layers stay whole."""
    options = CompileOptions(cluster="local:2", global_batch=GLOBAL_BATCH, set=("model.cp=2",))
    with pytest.raises(UserError, match=r"no layer of it works on rows of its sequence .*conv1d mixes rows"):
        captured("falcon_h1").plan_with(options)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    "pins", ["model.cp=2 model.micro_batch=3", "model.cp=4 model.recompute=full", "model.cp=2 model.tp=2"]
)
def test_dropout_draws_the_same_on_rows(pins: str, tmp_path: Path) -> None:
    """Dropout of hidden states and inside of attention, against the plan of one rank."""
    model = write_recording_model("gpt2_dropout", tmp_path, MODELS_FOLDER)
    ranks = 2 if "micro_batch" in pins else 4
    compile_and_write(model, tmp_path / "one", cluster="local:1", global_batch=GLOBAL_BATCH)
    compile_and_write(
        model, tmp_path / "rows", cluster=f"local:{ranks}", global_batch=GLOBAL_BATCH, set=tuple(pins.split())
    )
    reference = train_distributed(tmp_path / "one", 1, 3, tmp_path / "run_one")
    found = train_distributed(tmp_path / "rows", ranks, 3, tmp_path / "run_rows")
    assert list(find_differences(found, reference)) == []


@pytest.mark.gloo
@pytest.mark.slow
def test_a_run_with_cp_continues_under_any_plan(tmp_path: Path) -> None:
    """cp 4, then tp and pp, sharded replicas, rows and replicas together, one rank, and cp again."""
    path = write_named_recording_model("qwen3", tmp_path)
    layouts = (
        (4, "model.cp=4 model.sharding=zero2"),
        (4, "model.tp=2 model.pp=2"),
        (3, "model.dp=3 model.sharding=zero3"),
        (4, "model.cp=2 model.dp=2 model.sharding=zero1"),
        (1, "model.dp=1"),
        (4, "model.cp=4 model.recompute=full"),
    )
    expected = train_in_one_process(path, GLOBAL_BATCH, len(layouts), tmp_path / "plain")
    losses: list[float] = []
    for step, (ranks, pins) in enumerate(layouts, 1):
        plan, work = tmp_path / f"plan{step}", tmp_path / f"run{step}"
        compile_and_write(
            path, plan, False, cluster=f"local:{ranks}", global_batch=GLOBAL_BATCH, set=tuple(pins.split())
        )
        resume = ("--resume", str(tmp_path / f"run{step - 1}" / "saved")) if step > 1 else ()
        found = train_distributed(plan, ranks, step, work, *resume)
        losses += found.losses
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    for name, value in expected.parameters.items():
        assert torch.allclose(found.parameters[name], value, rtol=1e-4, atol=1e-5), name
