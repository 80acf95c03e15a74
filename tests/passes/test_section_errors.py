"""Errors of the passes on sections: each has a place and a remedy, and none is a traceback."""

from __future__ import annotations

import re

import pytest

from secc import pass_pipeline
from secc.errors import UserError
from secc.ir.analysis.dataflow import get_strings
from secc.ir.dialect.ops import graph_of, strings_of
from secc.ir.text_io import module_text

HEAD = """
sec.graph "g" optional ["px"] widths "own" {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.symbol "n" kind "rows" key "px" dim 0
  sec.block "a" class "A" params 10 trainable 10 component "a" layers 2 when []
  sec.block "b" class "B" params 10 trainable 10 component "b" layers 2 when []
"""
SECTIONS = """
  sec.section "a" mode "train" when [] blocks ["a"]
  sec.section "b" mode "train" when [] blocks ["b"]
"""
INPUT = '%x = sec.input "x" : !sec.tensor<[B, 8], f32>'
SUM = '%l = sec.glue "aten.sum.default" (%h) args "$0" in @b : !sec.tensor<[], f32, grad>'
END = SUM + '\nsec.term "loss" (%l) in @b\nsec.return constant "0.0"'


def call(result: str, block: str, operand: str, dims: str = "B, 8") -> str:
    return (
        f'%{result} = sec.call "{block}" (%{operand}) args "$0" outs [""] in @{block} at "m.py:7" : '
        f"!sec.tensor<[{dims}], f32, grad>"
    )


def case(*lines: str, name: str = "c", when: str = "") -> str:
    return "\n".join([f'sec.case "{name}" when [{when}] {{', INPUT, *lines, "}"])


def unplaced(source: str) -> str:
    """The text without its sections."""
    return re.sub(r" in @\w+", "", source)


CHAIN = case(call("y", "a", "x"), call("h", "b", "y"), END)


def refusal(source: str, passes: str) -> UserError:
    with pytest.raises(UserError) as caught:
        pass_pipeline.run_passes(
            module_text.parse_module(HEAD + source + "}"), pass_pipeline.parse_pipeline(passes)
        )
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("by=layer", "unknown value 'layer' for by="),
        ("max-sections=0", "expected max-sections= of 1 or more, got 0"),
        ("small-stacks=keep", "needs a cluster"),
        ('sections="one"', "cannot read the section 'one'"),
        ('sections="one=nothing"', "no block at or below 'nothing'"),
        ('sections="one=a","two=a"', "a is in section 'one' already"),
        ('sections="one=a","two=b" max-sections=1', "can be merged"),
    ],
)
def test_coarsen_names_the_option_that_is_wrong(options: str, message: str) -> None:
    assert message in refusal(unplaced(CHAIN), f"coarsen{{{options}}}").message


def test_a_named_section_cannot_surround_another() -> None:
    block = '  sec.block "a2" class "A" params 10 trainable 10 component "a2" layers 2 when []\n'
    lines = [call("y", "a", "x"), call("z", "b", "y"), call("h", "a2", "z").replace("@a2", "@b"), END]
    source = block + unplaced(case(*lines))
    assert "data flows one way" in refusal(source, 'coarsen{sections="outer=a+a2"}').remedy


def test_a_tensor_without_rows_cannot_cross() -> None:
    error = refusal(SECTIONS + case(call("y", "a", "x", "8"), call("h", "b", "y"), END), "insert-transfers")
    assert error.where == "m.py:7"
    assert "the result [8] of a would go from section 'a' to section 'b'" in error.message


ALONE = case(call("h", "b", "x"), END, name="text")
BOTH = case(call("y", "a", "x"), call("h", "b", "y"), END, name="image", when='"px"')


def test_an_edge_that_some_cases_lack_must_have_no_rows_there() -> None:
    error = refusal(SECTIONS + ALONE + "\n" + BOTH, "insert-transfers")
    assert "case 'text' computes without it" in error.message


def test_sink_boundaries_merges_what_insert_transfers_would_refuse() -> None:
    module = module_text.parse_module(HEAD + SECTIONS + ALONE + "\n" + BOTH + "}")
    pass_pipeline.run_passes(module, pass_pipeline.parse_pipeline("sink-boundaries,insert-transfers,lower"))
    (section,) = graph_of(module).sections
    assert strings_of(section.blocks) == ("a", "b")
    assert "case 'text' computes without it" in get_strings(section, "notes")[0]


def test_lower_requires_transfers() -> None:
    assert "insert-transfers before lower" in refusal(SECTIONS + CHAIN, "lower").remedy


def test_a_constant_that_depends_on_the_case_is_refused() -> None:
    other = CHAIN.replace('"c"', '"d"').replace("when []", 'when ["px"]').replace("0.0", "1.0")
    assert "0.0, 1.0" in refusal(SECTIONS + CHAIN + "\n" + other, "insert-transfers,lower").message


def test_a_leaf_that_cases_compute_differently_is_refused() -> None:
    def counted(op: str, **named: str) -> str:
        leaf = (
            f'%s = sec.glue "{op}" (%x) args "$0" : !sec.tensor<[], f32>\n%n = sec.leaf "count" (%s) : '
            "!sec.tensor<[], f64>"
        )
        weight = '%w = sec.glue "aten.reciprocal.default" (%n) args "$0" : !sec.tensor<[], f64>'
        return case(
            leaf,
            weight,
            call("y", "a", "x"),
            call("h", "b", "y"),
            END.replace("(%l) in", "(%l, %w) in"),
            **named,
        )

    source = counted("aten.sum.default") + "\n" + counted("aten.mean.default", name="d", when='"px"')
    assert (
        "'count', a sum over the global batch" in refusal(SECTIONS + source, "insert-transfers,lower").message
    )
