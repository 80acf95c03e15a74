"""Argument templates: formatting and parsing are inverse, and the structure is that of the recorded call."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from secc.ir.dialect import argument_template, size_expr
from secc.ir.dialect.argument_template import CallArguments, DottedName, OperandRef

sizes = st.sampled_from(["B", "S - 1", "B*S", "(S + 3)//4", "max(1, n)", "B % 2", "-B", "0.5*B", "1/B"]).map(
    size_expr.parse_expr
)
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-9, 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=6),
    sizes,
    st.builds(OperandRef, st.integers(0, 12)),
    st.sampled_from(
        [DottedName("torch.float32"), DottedName("device"), DottedName("torch.contiguous_format")]
    ),
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    bound = st.one_of(st.none(), st.integers(-9, 9), sizes)
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=2),
        st.builds(slice, bound, bound, bound),
    )


values = st.recursive(plain, nested, max_leaves=8)
names = st.sampled_from(["dtype", "dim", "keepdim", "attention_mask"])


@given(st.lists(values, max_size=4), st.dictionaries(names, values, max_size=3))
def test_arguments_survive_being_written_and_read(args: list[Any], kwargs: dict[str, Any]) -> None:
    found = argument_template.parse_arguments(argument_template.format_arguments(CallArguments(args, kwargs)))
    assert found == CallArguments(args, kwargs)
    assert [type(a) for a in found.args if not isinstance(a, sympy.Expr)] == [
        type(a) for a in args if not isinstance(a, sympy.Expr)
    ]


def test_the_structure_of_a_call() -> None:
    found = argument_template.parse_arguments(
        "$0, [B, S - 1, 64], '$1', dtype=torch.float32, other=$2, scale=float('-inf')"
    )
    assert found.args == [OperandRef(0), [size_expr.parse_expr("B"), size_expr.parse_expr("S - 1"), 64], "$1"]
    assert found.kwargs == {
        "dtype": DottedName("torch.float32"),
        "other": OperandRef(2),
        "scale": float("-inf"),
    }


def test_an_object_is_a_dict_with_its_class() -> None:
    text = "encoder_outputs=built('package.module:Output', {'state': $0, 'more': ($1, listed({'*': $2}))})"
    found = argument_template.parse_arguments(text)
    assert found.kwargs == {
        "encoder_outputs": {
            "*class": "package.module:Output",
            "state": OperandRef(0),
            "more": (OperandRef(1), {"*": OperandRef(2)}),
        }
    }
    assert argument_template.format_arguments(found) == text


def test_operands_are_named_by_the_caller() -> None:
    assert (
        argument_template.format_arguments(
            argument_template.parse_arguments("$1, [$0, None], dim=-1"), lambda ref: "xy"[ref.index]
        )
        == "y, [x, None], dim=-1"
    )


def test_map_leaves_visits_every_leaf() -> None:
    found = argument_template.parse_arguments("[$0, ($1, 2)], {'a': slice($2, None)}, k=B")
    assert [leaf for leaf in found.leaves() if isinstance(leaf, OperandRef)] == [
        OperandRef(0),
        OperandRef(1),
        OperandRef(2),
    ]
    doubled = found.map_leaves(
        lambda leaf: OperandRef(2 * leaf.index) if isinstance(leaf, OperandRef) else leaf
    )
    assert argument_template.format_arguments(doubled) == "[$0, ($2, 2)], {'a': slice($4, None, None)}, k=B"


@pytest.mark.parametrize(
    "text", ["$0,, 1", "1)", "open('x')", "[x for x in y]", "a.b.c()", "lambda: 0", "$0.item()"]
)
def test_text_that_is_no_argument_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        argument_template.parse_arguments(text)


def test_a_value_without_a_text_is_refused() -> None:
    with pytest.raises(ValueError, match="object"):
        argument_template.format_arguments(CallArguments([object()]))
