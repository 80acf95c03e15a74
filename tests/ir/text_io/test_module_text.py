"""IR text: every op prints and parses back to the same, whatever its texts hold; errors point into the
text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xdsl.dialects.builtin import IntAttr, ModuleOp, StringAttr

from secc.errors import UserError
from secc.ir.dialect.ops import (
    BlockOp,
    CaseOp,
    GlueOp,
    GraphOp,
    InputOp,
    ReturnOp,
    SecDialect,
    make_region,
    strings_attr,
)
from secc.ir.dialect.tensor_type import LONG_DTYPES, TensorType
from secc.ir.text_io import module_text

EVERY_OP = (Path(__file__).parent / "every_op.mlir").read_text()


def test_every_op_of_the_dialect_survives_printing_and_parsing() -> None:
    module = module_text.parse_module(EVERY_OP)
    assert module_text.print_module(module) == EVERY_OP
    assert {op.name for op in module.walk()} - {"builtin.module"} == {op.name for op in SecDialect.operations}


@given(st.text(max_size=20), st.lists(st.text(max_size=8), max_size=3))
def test_any_text_survives(name: str, keys: list[str]) -> None:
    numbers = {"params": IntAttr(3), "trainable": IntAttr(0)}
    block = BlockOp.create(
        properties={"path": StringAttr(name), "cls": StringAttr("A"), "when": strings_attr(keys), **numbers}
    )
    block.attributes["note"] = StringAttr(name)
    module = ModuleOp([GraphOp.create(properties={"sym": StringAttr(name)}, regions=[make_region([block])])])
    assert module.is_structurally_equivalent(module_text.parse_module(module_text.print_module(module)))


@given(
    st.lists(
        st.one_of(st.integers(0, 9), st.sampled_from(["B", "S - 1", "B*(S + 1)", "(S + 3)//4", "max(1, n)"])),
        max_size=4,
    ),
    st.sampled_from(list(LONG_DTYPES)),
    st.booleans(),
)
def test_any_type_survives(dims: list[int | str], dtype: str, grad: bool) -> None:
    x = InputOp.create_source("x", TensorType.from_dims(dims, dtype, grad))
    body = make_region([x, ReturnOp.create(operands=[x.result])])
    case = CaseOp.create(properties={"sym": StringAttr("c"), "when": strings_attr([])}, regions=[body])
    module = ModuleOp([GraphOp.create(properties={"sym": StringAttr("g")}, regions=[make_region([case])])])
    symbols = "".join(f'sec.symbol "{s}" kind "rows" key "x" dim 0\n' for s in "BSn")
    again = module_text.parse_module(
        module_text.print_module(module).replace('sec.graph "g" {', 'sec.graph "g" {\n' + symbols)
    )
    found = next(op for op in again.walk() if isinstance(op, InputOp))
    assert found.result.type == x.result.type


def test_names_of_values_are_kept() -> None:
    graph = (
        'sec.graph "g" {\n sec.case "a" when [] {\n %loss = sec.input "l" : !sec.tensor<[], f32>\n '
        "sec.return (%loss)\n }\n}"
    )
    assert "%loss = sec.input" in module_text.print_module(module_text.parse_module(graph))


@pytest.mark.parametrize(
    "hints", [["x", "x", "x", "x_2_2"], ["x_2_2", "x", "x", "x"], ["x", "x_1_1", "x", "x_1_1"]]
)
def test_values_whose_names_would_meet_survive(hints: list[str]) -> None:
    inputs = [InputOp.create_source(f"k{i}", TensorType.from_dims([], "f32")) for i in range(len(hints))]
    for op, hint in zip(inputs, hints, strict=True):
        op.result.name_hint = hint
    body = make_region([*inputs, ReturnOp.create(operands=[op.result for op in inputs])])
    case = CaseOp.create(properties={"sym": StringAttr("c"), "when": strings_attr([])}, regions=[body])
    module = ModuleOp([GraphOp.create(properties={"sym": StringAttr("g")}, regions=[make_region([case])])])
    assert module.is_structurally_equivalent(module_text.parse_module(module_text.print_module(module)))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('sec.block "a" class', "str"),
        ('sec.block "a" clazz "A"', "clazz"),
        ("sec.nonsense", "nonsense"),
        ('%x = sec.input "x" : !sec.tensor<[B], f33>', "unknown dtype f33"),
        ('%x = sec.input "x" : !sec.tensor<["B.real"], f32>', "not a size expression"),
        ("sec.return (%missing)", "missing"),
    ],
)
def test_text_that_does_not_parse_is_drawn_with_a_caret(body: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        module_text.parse_module(f'sec.graph "g" {{\n  {body}\n}}', "graph.mlir")
    assert "^" in str(error.value) and message in str(error.value)
    assert str(error.value).startswith("graph.mlir: cannot read the IR")


def test_a_file_that_is_missing_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        module_text.read_module(tmp_path / "missing.mlir")
    (tmp_path / "binary.mlir").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not text"):
        module_text.read_module(tmp_path / "binary.mlir")


def test_a_glue_op_knows_its_base_name() -> None:
    assert GlueOp.create_call("aten.sum.dim_IntList", [], "", []).base_name == "sum"
    assert GlueOp.create_call("operator.neg", [], "", []).base_name == "operator.neg"
