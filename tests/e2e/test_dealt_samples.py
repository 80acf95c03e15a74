"""Plans in which each micro-batch has its own cp train as plain PyTorch does: all ranks share the rows of
long samples, subgroups of them those of shorter ones, and each computes short ones whole."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from secc.driver.compile import CompiledPlan
from secc.driver.compile_options import CompileOptions
from secc.driver.replan_from_run import plan_pins
from secc.runtime.model.packed_collate import is_packed
from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.plan.schema import Section
from tests.e2e.harness import (
    compile_and_write,
    find_differences,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)
from tests.e2e.reference_runs import MODELS_FOLDER, ReferencedModel, write_named_recording_model

STEPS, GLOBAL_BATCH = 2, 12
LONGEST_WHOLE = 14  # tokens of a sample that one rank may compute whole

FAST = [(2, "cp=2 micro_batch=1")]
# model -> (ranks, pins): pins without a section are of the model's one section; "bf16" is the dtype,
# "by=2" deals to subgroups of 2 ranks only
ROWS: dict[str, list[tuple[int, str]]] = {
    "llama_tail": [
        *FAST,
        (4, "cp=4 micro_batch=2 sharding=zero3"),
        (4, "cp=2 tp=2 micro_batch=2 recompute=full"),
        (4, "cp=2 dp=2 micro_batch=1 sharding=zero3 recompute=selective"),
        (4, "cp=4 micro_batch=1 bf16"),
        (4, "cp=4 micro_batch=1"),
        (4, "cp=4 micro_batch=2 by=2"),
        (4, "cp=4 micro_batch=2 sharding=zero3 recompute=full by=2"),
        (4, "cp=4 micro_batch=2 attention=gather recompute=selective sharding=zero1 by=2"),
        (8, "cp=4 tp=2 micro_batch=1 by=2"),
        (4, "cp=2 tp=2 norms=sequence micro_batch=2 recompute=full"),
        (8, "cp=4 tp=2 norms=sequence micro_batch=1 overlap=both by=2"),
        (8, "cp=4 dp=2 micro_batch=1 sharding=zero2 by=2"),
        (4, "cp=4 micro_batch=2 bf16 by=2"),
        (6, "cp=6 micro_batch=1 by=3"),
        (6, "cp=6 micro_batch=1 attention=gather by=2"),
        (4, "cp=2 pp=2 micro_batch=1"),
        (8, "cp=4 pp=2 micro_batch=2 by=2"),
        (8, "cp=2 pp=2 tp=2 micro_batch=1 recompute=full"),
        (8, "cp=2 pp=2 tp=2 norms=sequence micro_batch=1 sharding=zero1"),
        (8, "cp=4 pp=2 micro_batch=1 recompute=selective sharding=zero1"),
        (8, "cp=2 pp=2 dp=2 micro_batch=2 sharding=zero3"),
        (4, "cp=2 pp=2 micro_batch=1 bf16"),
        (4, "cp=2 pp=2 micro_batch=1 backward=split"),
        (4, "cp=2 pp=2 micro_batch=1 backward=split bf16 recompute=full"),
        (8, "cp=4 pp=2 micro_batch=2 backward=split recompute=selective by=2"),
        (8, "cp=2 pp=2 tp=2 norms=sequence micro_batch=1 backward=split overlap=both sharding=zero1"),
        (8, "cp=2 pp=2 dp=2 micro_batch=2 backward=split sharding=zero2"),
    ],
    "llama_tail_left": [
        (4, "cp=2 dp=2 sharding=zero2 micro_batch=2"),
        (4, "cp=4 micro_batch=2 by=2"),
        (4, "cp=2 pp=2 micro_batch=2"),
    ],
    "qwen_distil": [
        (6, "teacher.cp=2 teacher.pp=2 student.dp=2"),
        (5, "teacher.dp=1 student.cp=2 student.pp=2 student.sharding=zero3"),
        (6, "teacher.cp=4 student.cp=2 teacher.micro_batch=2"),
        (4, "teacher.dp=2 student.cp=2 student.sharding=zero3"),
        (3, "teacher.cp=2 student.dp=1"),
        (6, "teacher.cp=4 student.cp=2 teacher.micro_batch=2 by=2"),
        (5, "teacher.dp=1 student.cp=4 student.sharding=zero3 student.recompute=full by=2"),
        (5, "teacher.dp=1 student.cp=2 student.pp=2 student.backward=split"),
    ],
    "whisper_padded": [
        (5, "encoder.dp=1 decoder.cp=4 decoder.recompute=full"),
        (5, "encoder.dp=1 decoder.cp=4 decoder.micro_batch=2 by=2"),
    ],
    "gemma3": [
        (4, "vision_tower.dp=2 language_model.cp=2 language_model.micro_batch=2"),
        (5, "vision_tower.dp=1 language_model.cp=4 language_model.micro_batch=2 by=2"),
        (5, "vision_tower.dp=1 language_model.cp=2 language_model.pp=2 language_model.backward=split"),
    ],
    "qwen2_5_vl": [
        (5, "visual.dp=1 language_model.cp=4 language_model.sharding=zero1"),
        (5, "visual.dp=1 language_model.cp=4 language_model.recompute=full by=2"),
    ],
    "video_frames": [
        (3, "tower.cp=2 decoder.dp=1 tower.micro_batch=2"),
        (5, "tower.cp=4 decoder.dp=1 tower.micro_batch=1 tower.recompute=full by=2"),
    ],
    "qwen3_moe": [
        (4, "cp=2 dp=2 ep=2 micro_batch=1"),
        (4, "cp=2 tp=2 ep=2 micro_batch=1 recompute=full"),
        (8, "cp=4 dp=2 ep=2 micro_batch=1 by=2"),
        (4, "cp=2 dp=2 ep=2 micro_batch=1 recompute=full sharding=zero3"),
        (8, "cp=2 pp=2 dp=2 ep=2 micro_batch=1"),
    ],
    "t5": [
        (4, "encoder.cp=2 decoder.cp=2 decoder.sharding=zero3"),
        (4, "encoder.cp=4 decoder.cp=4 by=2"),
    ],
}


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ReferencedModel]:
    return cache(lambda name: ReferencedModel(name, tmp_path_factory.mktemp(name), STEPS))


def limit_subgroups(made: CompiledPlan, tokens: int, ranks: int) -> CompiledPlan:
    """The plan with memory for samples of at most so many tokens on one rank of cp (0: as it is), dealt to
    subgroups of `ranks` ranks only (0: of any size)."""
    sizes = {s.name: 1 if s.kind == "rows" else tokens for s in made.plan.symbols}

    def limit(section: Section) -> Section:
        if not section.may_deal:
            return section
        whole = section.subgroups[0].cost.saved
        limited = replace(section, subgroup_bytes=evaluate_expr(whole, sizes)) if tokens else section
        found = tuple(s for s in section.subgroups if s.ranks == ranks) if ranks else section.subgroups
        return replace(limited, subgroups=found)

    return replace(made, plan=replace(made.plan, sections=tuple(map(limit, made.plan.sections))))


def count_forwards(trace: Path, section: Section) -> Counter[int]:
    """Counts forwards in a run's trace by how many ranks of cp share the rows."""
    computed: Counter[tuple[int, ...]] = Counter()
    for event in json.loads(trace.read_text())["traceEvents"]:
        args = event.get("args", {})
        at = args.get("kind"), args.get("section"), args.get("stage")
        if at == ("F", section.user_section_name, section.stage) and args["samples"]:
            computed[tuple(args["samples"])] += 1
    assert all(ranks % section.mesh.tp == 0 for ranks in computed.values())
    return Counter(ranks // section.mesh.tp for ranks in computed.values())


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "ranks", "pins"),
    [
        pytest.param(name, *row, marks=[] if row in FAST else [pytest.mark.slow])
        for name, rows in ROWS.items()
        for row in rows
    ],
)
def test_dealt_samples_train_as_plain_pytorch(
    captured: Callable[[str], ReferencedModel], name: str, ranks: int, pins: str, tmp_path: Path
) -> None:
    words = pins.split()
    model, dtype = captured(name), "bf16" if "bf16" in words else ""
    size = next((int(w.removeprefix("by=")) for w in words if w.startswith("by=")), 0)
    wanted = tuple(w if "." in w else f"model.{w}" for w in words if "=" in w and not w.startswith("by="))
    wanted += tuple(f"{pin.partition('.')[0]}.cp_per=micro_batch" for pin in wanted if ".cp=" in pin)
    made = model.plan_with(
        CompileOptions(cluster=f"local:{ranks}", global_batch=GLOBAL_BATCH, set=wanted, dtype=dtype)
    )
    assert set(wanted) <= set(plan_pins(made.plan))
    made = limit_subgroups(made, LONGEST_WHOLE if name == "llama_tail" else 0, size)
    trace = tmp_path / "trace.json"
    assert model.list_differences(made, tmp_path, "--trace", str(trace)) == []
    for section in (s for s in made.plan.sections if s.may_deal):
        forwards, cp = count_forwards(trace, section), section.mesh.cp
        assert set(forwards) <= {cp, *(s.ranks for s in section.subgroups)}
        assert sum(count for ranks, count in forwards.items() if ranks < cp) > 1 or not section.subgroups
        assert forwards[cp] > 0 or size or name != "llama_tail"


@pytest.mark.gloo
@pytest.mark.slow
def test_sections_with_edges_deal_where_that_is_shorter(
    captured: Callable[[str], ReferencedModel], tmp_path: Path
) -> None:
    """Unpinned, one section after the other."""
    model, pins = captured("qwen_distil"), ("teacher.cp=2", "student.cp=2")
    made = model.plan_with(CompileOptions(cluster="local:4", global_batch=GLOBAL_BATCH, set=pins))
    assert any(s.may_deal for s in made.plan.sections)
    assert model.list_differences(made, tmp_path) == []


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("pins", ["model.cp=2 model.micro_batch=3", "model.cp=4 model.recompute=full"])
def test_dropout_draws_the_same_on_dealt_samples(pins: str, tmp_path: Path) -> None:
    """Dropout of hidden states and inside of attention, against the plan of one rank."""
    model = write_recording_model("gpt2_dropout", tmp_path, MODELS_FOLDER)
    ranks = 2 if "micro_batch" in pins else 4
    compile_and_write(model, tmp_path / "one", cluster="local:1", global_batch=GLOBAL_BATCH)
    dealt = (*pins.split(), "model.cp_per=micro_batch")
    compile_and_write(
        model, tmp_path / "dealt", cluster=f"local:{ranks}", global_batch=GLOBAL_BATCH, set=dealt
    )
    reference = train_distributed(tmp_path / "one", 1, 3, tmp_path / "run_one")
    found = train_distributed(tmp_path / "dealt", ranks, 3, tmp_path / "run_dealt")
    assert list(find_differences(found, reference)) == []


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "pins"),
    [
        ("llama", 2, "model.cp=2 model.micro_batch=2"),
        ("gemma3_text", 4, "model.cp=2 model.dp=2 model.micro_batch=1 model.sharding=zero3"),
        ("llama", 4, "model.cp=4 model.micro_batch=2 model.recompute=full"),
    ],
)
def test_packed_samples_are_dealt(name: str, ranks: int, pins: str, tmp_path: Path) -> None:
    """Each rank computes some samples of a micro-batch in a row of their own, against plain PyTorch with
    padding."""
    model, trace = write_named_recording_model(name, tmp_path), tmp_path / "trace.json"
    dealt = (*pins.split(), "model.cp_per=micro_batch")
    made = compile_and_write(
        model,
        tmp_path / "plan",
        cluster=f"local:{ranks}",
        global_batch=GLOBAL_BATCH,
        set=dealt,
        pack="always",
    )
    found = train_distributed(tmp_path / "plan", ranks, STEPS, tmp_path / "run", "--trace", str(trace))
    forwards = count_forwards(trace, made.plan.user_sections[0])
    assert is_packed(made.plan.inputs) and forwards[1] > 1
    expected = train_in_one_process(model, GLOBAL_BATCH, STEPS, tmp_path / "plain")
    assert list(find_differences(found, expected)) == []
