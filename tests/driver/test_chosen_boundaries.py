"""Blocks move into another section only if the plan has the shorter step then: a teacher's head moves into
the student if its logits are large, and stays if the messages that this saves are small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from xdsl.dialects.builtin import ModuleOp

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.section_variants import choose_sections
from secc.ir.analysis.dataflow import get_strings
from secc.ir.dialect.ops import graph_of, strings_of
from secc.ir.text_io.module_text import parse_module
from secc.pass_pipeline import parse_pipeline, run_passes
from secc.passes.coarsen import Coarsen
from secc.passes.sink_boundaries import CutOutcome, SinkBoundaries

TESTS = Path(__file__).parent.parent
GRAPH = re.sub(
    "^ *sec.section .*$|in @(teacher|student)",
    "",
    (TESTS / "passes" / "sink_teacher_head.mlir").read_text(),
    flags=re.MULTILINE,
)
# The vocabulary, the samples' tokens, and what the parts compute for a token.
LARGE = {
    "160]": "160000]",
    "S = 100": "S = 4000",
    "2560*": "2560000*",
    "10000*": "40000000*",
    "20000*": "50000000*",
}


def choose_cut(cluster: str, replaced: dict[str, str]) -> tuple[SinkBoundaries, ModuleOp]:
    """The chosen pass, and the module after it."""
    text = GRAPH
    for old, new in replaced.items():
        text = text.replace(old, new)
    allocate = f'allocate{{cluster="{cluster}" global-batch=64 strategy=apart}}'
    passes = parse_pipeline(f'sink-boundaries{{cluster="{cluster}"}},{allocate}')
    module = parse_module(text)
    chosen = choose_sections(module, (Coarsen(cluster=cluster), *passes))
    run_passes(module, chosen[:2])
    assert isinstance(chosen[1], SinkBoundaries)
    return chosen[1], module


@pytest.mark.parametrize(
    ("cluster", "replaced", "moves"),
    [("1x3xcpu", {}, False), ("2x8xH100", {}, False), ("2x8xH100", LARGE, True)],
    ids=["few bytes on CPUs", "few bytes", "many bytes"],
)
def test_a_head_moves_only_if_the_step_gets_shorter(
    cluster: str, replaced: dict[str, str], moves: bool
) -> None:
    sink, module = choose_cut(cluster, replaced)
    (outcome,) = map(CutOutcome.from_text, sink.outcomes)
    assert outcome.moved == moves and outcome.other_ns is not None and outcome.step_ns < outcome.other_ns
    student = next(s for s in graph_of(module).sections if s.sym.data == "student")
    assert ("teacher.head" in strings_of(student.blocks)) == moves
    assert any(str(outcome) in note for note in get_strings(student, "notes"))


def test_pinned_sections_compare_nothing() -> None:
    passes = parse_pipeline(
        'sink-boundaries{cluster="2x8xH100" pinned="teacher"},allocate{cluster="2x8xH100"}'
    )
    chosen = choose_sections(parse_module(GRAPH), (Coarsen(cluster="2x8xH100"), *passes))
    assert chosen[1] == passes[0]


@pytest.mark.slow
def test_layers_that_are_captured_for_stages_keep_the_boundary() -> None:
    """The second plan neither compares again nor decides otherwise, whichever of two similar plans the first
    comparison took."""
    options = CompileOptions(cluster="local:3", global_batch=12, set=("student.pp=2",), strategy="apart")
    compiled = compile_model(TESTS / "models" / "qwen_distil.py", options)
    text = next(text for name, text in compiled.dumps if name == "sink-boundaries")
    (outcome,) = map(CutOutcome.from_text, re.findall(r'"(teacher>student:[^"]*)"', text.splitlines()[0]))
    assert ("fixed" in text.splitlines()[0]) is not outcome.moved
    held = [s.pipeline or s.name for s in compiled.plan.sections if "teacher.lm_head" in s.blocks]
    assert held == ["student" if outcome.moved else "teacher"]
    layers = {
        n: s.blocks for n, s in ((s.name, s) for s in compiled.plan.sections) if n.startswith("student")
    }
    assert len(layers) == 2 and any("layers.0" in block for blocks in layers.values() for block in blocks)
