"""The dialect's rules: each broken rule is named, and drawn with a caret under its op."""

from __future__ import annotations

import pytest

from secc.errors import UserError
from secc.ir.text_io import module_text

HEAD = """
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.block "net" class "Net" params 1 trainable 1
  sec.section "one" mode "train" when [] blocks ["net"]
"""
X = '%x = sec.input "x" : !sec.tensor<[B, 8], f32>'
CALL = '%y = sec.call "net" (%x) args "$0" outs [""] in @one : !sec.tensor<[B, 8], f32, grad>'
RETURN = "sec.return (%x)"


def graph(*lines: str, head: str = "") -> str:
    body = "\n    ".join([X, *lines])
    return f'sec.graph "g" {{{HEAD}{head}\n  sec.case "all" when [] {{\n    {body}\n  }}\n}}\n'


ROWS = "!sec.tensor<[B, 8], f32>"


def glue(target: str, args: str) -> str:
    return f'%y = sec.glue "{target}" (%x) args "{args}" : {ROWS}'


def transfer(to: str, dim: int) -> str:
    return f'%z = sec.transfer "e" (%x) from @one to @{to} dim {dim} rows "B" : {ROWS}'


BROKEN = {
    "an operand without a use": (graph(glue("aten.neg.default", "1"), RETURN), "use operands"),
    "an operand that is not there": (graph(glue("aten.neg.default", "$0, $1"), RETURN), "use operands"),
    "no argument list": (graph(glue("aten.neg.default", "$0,,"), RETURN), "not an argument list"),
    "mutating glue": (graph(glue("aten.add_.Tensor", "$0, 1"), RETURN), "mutates its argument"),
    "an unknown block": (graph(CALL.replace('"net"', '"missing"'), RETURN), "block missing is not declared"),
    "access paths": (graph(CALL.replace('outs [""]', "outs []"), RETURN), "0 access paths for 1 results"),
    "an unknown section": (graph(CALL.replace("@one", "@two"), RETURN), "section @two is not declared"),
    "an unknown symbol": (graph(CALL.replace("[B, 8]", "[T, 8]"), RETURN), "symbols ['T'] are not declared"),
    "a case without an end": (graph(CALL), "a case ends with sec.return"),
    "a numerator that is no scalar": (
        graph('sec.term "loss" (%x)', RETURN),
        "numerator and coefficient are scalars",
    ),
    "a transfer along no dim": (graph(transfer("one", 2), RETURN), "dim 2 of a tensor with 2 dims"),
    "a transfer to nowhere": (graph(transfer("two", 0), RETURN), "section @two is not declared"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_drawn_under_its_op(name: str) -> None:
    source, message = BROKEN[name]
    with pytest.raises(UserError) as error:
        module_text.parse_module(source, "graph.mlir")
    shown = str(error.value).splitlines()
    assert shown[0] == "graph.mlir: the IR breaks a rule"
    marked = next(i for i, line in enumerate(shown) if message in line)
    assert any("^" in line for line in shown[marked - 2 : marked + 1])


def test_the_excerpt_shows_the_lines_around_the_op() -> None:
    with pytest.raises(UserError) as error:
        module_text.parse_module(graph(CALL.replace("@one", "@two"), RETURN))
    assert 'sec.input "x"' in str(error.value) and 'sec.call "net"' in str(error.value)
    assert len(str(error.value).splitlines()) < 10


def test_a_module_holds_one_graph_and_nothing_else() -> None:
    with pytest.raises(UserError, match=r"only sec\.graph may stand in a module"):
        module_text.parse_module('sec.symbol "B" kind "rows" key "x" dim 0')


def test_a_module_without_violations_parses() -> None:
    assert len(list(module_text.parse_module(graph(CALL, RETURN)).ops)) == 1
