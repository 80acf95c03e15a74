"""The one type of the dialect: a tensor with size expressions as dims, with its dtype and whether it carries
a gradient."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from xdsl.dialects.builtin import ArrayAttr, BoolAttr, StringAttr
from xdsl.ir import Attribute, ParametrizedAttribute, SSAValue, TypeAttribute
from xdsl.irdl import irdl_attr_definition, param_def
from xdsl.parser import AttrParser
from xdsl.printer import Printer
from xdsl.utils.exceptions import VerifyException

from secc.ir.dialect import size_expr
from secc.ir.dialect.size_expr import Expr

LONG_DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u8": "uint8",
    "bool": "bool",
    "c64": "complex64",
    "c128": "complex128",
}
SHORT_DTYPES = {long: short for short, long in LONG_DTYPES.items()}
DTYPE_BYTES = {
    "f64": 8,
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "i64": 8,
    "i32": 4,
    "i16": 2,
    "i8": 1,
    "u8": 1,
    "bool": 1,
    "c64": 8,
    "c128": 16,
}


@irdl_attr_definition
class TensorType(ParametrizedAttribute, TypeAttribute):
    """`!sec.tensor<[B, "S - 1", 64], f32, grad>`: dims as expressions, a short dtype name, `grad` if it
    requires a gradient."""

    name = "sec.tensor"
    dims: ArrayAttr[StringAttr] = param_def()
    dtype: StringAttr = param_def()
    grad: BoolAttr = param_def()

    @staticmethod
    def from_dims(dims: Iterable[Expr | int | str], dtype: str, grad: bool = False) -> TensorType:
        """A tensor type from expressions (or their texts) and a dtype, short (`f32`) or long (`float32`)."""
        texts = [StringAttr(d if isinstance(d, str) else size_expr.format_expr(d)) for d in dims]
        return TensorType(
            ArrayAttr(texts), StringAttr(SHORT_DTYPES.get(dtype, dtype)), BoolAttr.from_bool(grad)
        )

    @property
    def shape(self) -> tuple[Expr, ...]:
        """The dims as sympy expressions."""
        return tuple(size_expr.parse_expr(d.data) for d in self.dims)

    @property
    def requires_grad(self) -> bool:
        return bool(self.grad.value.data)

    @property
    def itemsize(self) -> int:
        """Bytes of one entry."""
        return DTYPE_BYTES[self.dtype.data]

    @property
    def torch_dtype(self) -> str:
        """The dtype as torch names it, such as `float32`."""
        return LONG_DTYPES[self.dtype.data]

    @property
    def is_floating(self) -> bool:
        """Whether entries are real or complex numbers, not integers or booleans."""
        return self.dtype.data[0] in "fcb" and self.dtype.data != "bool"

    def verify(self) -> None:
        if (problem := _find_problem(self.dims, self.dtype.data)) is not None:
            raise VerifyException(problem)

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            dims = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, lambda: _parse_dim(parser))
            parser.parse_punctuation(",")
            dtype = parser.parse_identifier()
            grad = False
            if parser.parse_optional_punctuation(","):
                parser.parse_keyword("grad")
                grad = True
            if (problem := _find_problem(dims, dtype)) is not None:
                parser.raise_error(problem)
        return ArrayAttr(dims), StringAttr(dtype), BoolAttr.from_bool(grad)

    def print_parameters(self, printer: Printer) -> None:
        dims = ", ".join(d.data if re.fullmatch(r"\w+", d.data) else f'"{d.data}"' for d in self.dims)
        printer.print_string(f"<[{dims}], {self.dtype.data}{', grad' if self.requires_grad else ''}>")


def _find_problem(dims: Iterable[StringAttr], dtype: str) -> str | None:
    """The first fault of a type, None if there is none."""
    if dtype not in LONG_DTYPES:
        return f"unknown dtype {dtype}; known are {', '.join(LONG_DTYPES)}"
    for dim in dims:
        try:
            size_expr.parse_expr(dim.data)
        except ValueError as error:
            return str(error)
    return None


def _parse_dim(parser: AttrParser) -> StringAttr:
    if (number := parser.parse_optional_integer(allow_boolean=False)) is not None:
        return StringAttr(str(number))
    return StringAttr(parser.parse_identifier_or_str_literal())


def tensor_type(value: SSAValue) -> TensorType:
    """The tensor type of a value of the dialect."""
    assert isinstance(value.type, TensorType)
    return value.type
