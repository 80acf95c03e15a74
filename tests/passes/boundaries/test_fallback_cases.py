"""A fallback case is kept if it exchanges the same values between sections as captured cases, else dropped
with a note."""

from __future__ import annotations

import pytest

from secc.ir.analysis.dataflow import get_strings
from secc.ir.dialect.ops import GraphOp, graph_of
from secc.ir.text_io import module_text
from secc.passes.boundaries.fallback_cases import (
    drop_fallbacks,
    drop_incompatible_fallbacks,
    find_fallback_cases,
)

CASE = """
  sec.case "{name}" when [] {marked} {{
    %x = sec.input "x" : !sec.tensor<[B, 4], f32>
    %h = sec.call "encoder" (%x) args "$0" outs [""] in @encoder : !sec.tensor<[B, 8], f32, grad>
    %g = {glue}
    %l = sec.call "decoder" (%g) args "$0" outs [""] in @decoder : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l) in @decoder
    sec.return constant "0.0"
  }}
"""
GRAPH = """sec.graph "g" widths "own" {{
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.block "encoder" class "E" params 3 trainable 3
  sec.block "decoder" class "D" params 9 trainable 9
  sec.section "encoder" mode "train" when [] blocks ["encoder"]
  sec.section "decoder" mode "train" when [] blocks ["decoder"]
{cases}
}}
"""
TANH = 'sec.glue "aten.tanh.default" (%h) args "$0" in @{section} : !sec.tensor<[B, 8], f32, grad>'
FITTING = 'sec.glue "recorded.decoder:0" (%h) args "$0" in @decoder : !sec.tensor<[B, 8], f32, grad>'
OTHER_ROWS = 'sec.glue "recorded.decoder:0" (%h) args "$0" in @encoder : !sec.tensor<[B, 2], f32, grad>'


def graph(*glue: str) -> GraphOp:
    """A case whose decoder takes the tangent of what the encoder sends, and spare cases with other glue."""
    cases = CASE.format(name="c0", glue=TANH.format(section="decoder"), marked="")
    cases += "".join(
        CASE.format(name=f"c{i}", glue=g, marked="attributes {rerecord, spare}")
        for i, g in enumerate(glue, 1)
    )
    return graph_of(module_text.parse_module(GRAPH.format(cases=cases)))


@pytest.mark.parametrize(
    ("glue", "kept"), [(FITTING, True), (OTHER_ROWS, False), (TANH.format(section="encoder"), False)]
)
def test_a_fallback_case_is_kept_if_it_has_the_edges_of_captured_cases(glue: str, kept: bool) -> None:
    found = graph(glue)
    drop_incompatible_fallbacks(found)
    assert [c.sym.data for c in find_fallback_cases(found)] == (["c1"] if kept else [])
    assert ["will be rejected" in note for s in found.sections for note in get_strings(s, "notes")] == (
        [] if kept else [True]
    )


def test_an_incompatible_fallback_does_not_drop_the_others() -> None:
    found = graph(OTHER_ROWS, FITTING)
    drop_incompatible_fallbacks(found)
    assert [c.sym.data for c in found.cases] == ["c0", "c2"]


def test_dropped_fallbacks_are_noted_once() -> None:
    found = graph(FITTING, FITTING)
    drop_fallbacks(found, find_fallback_cases(found))
    assert find_fallback_cases(found) == [] and len(get_strings(found.sections[-1], "notes")) == 1
    drop_fallbacks(found, [])
    assert len(get_strings(found.sections[-1], "notes")) == 1
