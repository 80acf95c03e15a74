"""What an edge can carry: rows that add up over samples, other dims that both ends know."""

from __future__ import annotations

import pytest

from secc.ir.analysis.transferable_values import (
    NotTransferable,
    TransferLayout,
    require_rows_covered,
    row_layout,
)
from secc.ir.dialect.ops import GraphOp, graph_of
from secc.ir.dialect.tensor_type import TensorType
from secc.ir.text_io import module_text

GRAPH = """
sec.graph "g" optional ["px"] widths "WIDTHS" {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "n" kind "rows" key "px" dim 0
  sec.symbol "S" kind "width" key "ids" dim 1
  sec.symbol "T" kind "width" key "sound" dim 1
  %ids = sec.key "ids" pads ["1 left 0"] : !sec.tensor<[B, S], i64>
  %sound = sec.key "sound" pads ["1 right 0"] : !sec.tensor<[B, T], f32>
}
"""


def graph(widths: str = "own") -> GraphOp:
    return graph_of(module_text.parse_module(GRAPH.replace("WIDTHS", widths)))


def kind(*dims: str) -> TensorType:
    return TensorType.from_dims(dims, "f32")


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        (("B", "8"), TransferLayout(0, "B")),
        (("576*n", "8"), TransferLayout(0, "576*n")),
        (("1", "2*n + B", "8"), TransferLayout(1, "B + 2*n")),
        (("B", "S", "8"), TransferLayout(0, "B", ((1, "S", "left"),))),
        (("B", "S - 1", "8"), TransferLayout(0, "B", ((1, "max(S - 1, 0)", "left"),))),
        (("B", "T - 2"), TransferLayout(0, "B", ((1, "max(T - 2, 0)", "right"),))),
        (("B", "(T + 3)//4"), TransferLayout(0, "B", ((1, "max((T + 3)//4, 0)", "right"),))),
    ],
)
def test_rows_and_extents(dims: tuple[str, ...], expected: TransferLayout) -> None:
    assert row_layout(graph(), kind(*dims)) == expected


@pytest.mark.parametrize(
    "dims",
    [
        *((), ("S", "8"), ("B", "n"), ("B*n",), ("B + 1",), ("(n + 1)//2",), ("B*S", "8")),
        ("B", "S + 1"),  # positions joined behind padding would be cut off
        ("B", "2*T"),
        ("B", "S + T"),
        ("B", "(S + 3)//4"),  # windows of a sample stand elsewhere in a batch padded at the left
    ],
)
def test_rows_that_do_not_add_up_and_dims_that_cannot_be_cut_are_refused(dims: tuple[str, ...]) -> None:
    with pytest.raises(NotTransferable):
        row_layout(graph(), kind(*dims))


@pytest.mark.parametrize(("dims", "rows"), [(("B*S", "8"), "B*S"), (("B", "S - 1"), "B")])
def test_with_the_global_width_nothing_is_cut(dims: tuple[str, ...], rows: str) -> None:
    assert row_layout(graph("global"), kind(*dims)) == TransferLayout(0, rows)


def test_a_conditional_section_has_no_rows_of_other_samples() -> None:
    g = graph()
    require_rows_covered(g, TransferLayout(0, "4*n"), ["px"], [])
    require_rows_covered(g, TransferLayout(0, "B"), ["px"], ["px"])
    require_rows_covered(g, TransferLayout(0, "B"), [], ["px"])
    with pytest.raises(NotTransferable, match="active for samples with px, and others have rows"):
        require_rows_covered(g, TransferLayout(0, "B"), ["px"], [])
