"""Small towers become sections of their own if the plan with them has the shorter step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from xdsl.passes import ModulePass

from secc.driver.section_variants import choose_sections
from secc.ir.dialect.ops import graph_of, strings_of
from secc.ir.text_io.module_text import parse_module
from secc.pass_pipeline import format_pass, parse_pipeline, run_passes
from secc.passes.coarsen import BY_SHARE, KEEP, MERGE, Coarsen

GRAPH = Path(__file__).parent.parent / "passes" / "coarsen_small_stacks.mlir"


def pipeline(cluster: str, **coarsen: Any) -> tuple[ModulePass, ...]:
    cluster_option = f'{{cluster="{cluster}"}}'
    allocate = f'allocate{{cluster="{cluster}" global-batch=16}}'
    text = f"coarsen,sink-boundaries{cluster_option},{allocate}"
    return (Coarsen(cluster=cluster, min_share=0.05, **coarsen), *parse_pipeline(text)[1:])


def choose(cluster: str, **coarsen: Any) -> Coarsen:
    chosen = choose_sections(parse_module(GRAPH.read_text()), pipeline(cluster, **coarsen))[0]
    assert isinstance(chosen, Coarsen)
    return chosen


def test_closed_forms_decide_if_they_differ_clearly() -> None:
    """Fewer replicas sum the tower's many gradients if it has ranks of its own."""
    chosen = choose("1x3xcpu")
    assert chosen.small_stacks == KEEP and not chosen.simulated
    assert chosen.step_ns[0] < chosen.step_ns[1]


def test_simulated_steps_decide_if_closed_forms_are_close() -> None:
    chosen = choose("1x1xcpu")
    assert chosen.small_stacks == MERGE and chosen.simulated and len(chosen.step_ns) == 2


@pytest.mark.parametrize("options", [{"by": "block"}, {"max_sections": 1}])
def test_nothing_is_compared_if_both_variants_have_the_same_sections(options: dict[str, Any]) -> None:
    assert choose("1x3xcpu", **options).small_stacks == BY_SHARE


def test_the_dump_header_reproduces_the_choice() -> None:
    module = parse_module(GRAPH.read_text())
    passes = choose_sections(module, pipeline("1x3xcpu"))
    run_passes(module, passes[:1])
    again = parse_module(GRAPH.read_text())
    run_passes(again, parse_pipeline(format_pass(passes[0])))
    sections = [[strings_of(s.blocks) for s in graph_of(m).sections] for m in (module, again)]
    notes = [[s.attributes.get("notes") for s in graph_of(m).sections] for m in (module, again)]
    assert sections[0] == sections[1] == [("audio",), ("decoder",)] and notes[0] == notes[1]
