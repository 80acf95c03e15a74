"""The common form of the dialect's ops: a headline, operands, keyword properties, an attribute dictionary, result types.

    %0 = sec.call "model.vision_tower" (%px) args "$0" outs ["[0]"] in @vision_tower at "model.py:12" : !sec.tensor<[B, 64], f32>

One printer and one parser serve all ops, so the text form is the same everywhere: a keyword property prints as its keyword
(`in` for `section`, `at` for `where`) and its value; a flag prints as its keyword alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

from xdsl.dialects.builtin import ArrayAttr, IntAttr, StringAttr, SymbolRefAttr, UnitAttr
from xdsl.ir import Attribute, Region, SSAValue
from xdsl.irdl import IRDLOperation
from xdsl.parser import Parser
from xdsl.printer import Printer

TEXT, TEXTS, NUMBER, SECTION, FLAG = "text", "texts", "number", "section", "flag"
Keywords = tuple[tuple[str, str, str], ...]


class LineOp(IRDLOperation):
    """An op in the common form. Subclasses declare properties and list their keywords in the order in which they print."""

    HEADLINE: ClassVar[str | None] = None  # the property that prints first, in quotes
    KEYWORDS: ClassVar[Keywords] = ()  # (property, keyword, kind)

    def print(self, printer: Printer) -> None:
        if self.HEADLINE is not None:
            headline = self.properties[self.HEADLINE]
            assert isinstance(headline, StringAttr)
            printer.print_string(" ")
            printer.print_string_literal(headline.data)
        if self.operands:
            printer.print_string(" ")
            with printer.in_parens():
                printer.print_list(self.operands, printer.print_operand)
        for name, keyword, kind in self.KEYWORDS:
            if name in self.properties:
                printer.print_string(f" {keyword}")
                _print_value(printer, kind, self.properties[name])
        if self.attributes:
            # A region opens with a brace, too, so the dictionary of such an op needs a keyword.
            printer.print_op_attributes(self.attributes, print_keyword=bool(self.regions))
        if self.results:
            printer.print_string(" : ")
            printer.print_list(self.result_types, printer.print_attribute)
        for region in self.regions:
            printer.print_string(" ")
            printer.print_region(region)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        properties: dict[str, Attribute] = {}
        if cls.HEADLINE is not None:
            properties[cls.HEADLINE] = StringAttr(parser.parse_str_literal())
        operands = parser.parse_optional_comma_separated_list(parser.Delimiter.PAREN, lambda: _parse_operand(parser)) or []
        for name, keyword, kind in cls.KEYWORDS:
            if parser.parse_optional_keyword(keyword) is not None:
                properties[name] = _parse_value(parser, kind)
        regions_expected = cls.get_irdl_definition().regions
        attributes = _parse_attributes(parser, keyword=bool(regions_expected))
        results: Sequence[Attribute] = []
        if parser.parse_optional_punctuation(":"):
            results = parser.parse_comma_separated_list(parser.Delimiter.NONE, parser.parse_type)
        regions = [parser.parse_region() for _ in regions_expected]
        return cls.make(operands, results, properties, attributes, regions)

    @classmethod
    def make(
        cls,
        operands: Sequence[SSAValue],
        results: Sequence[Attribute],
        properties: dict[str, Attribute],
        attributes: dict[str, Attribute],
        regions: Sequence[Region],
    ) -> Self:
        """Build the op from its flat parts; the dialect's ops have at most one variadic operand and result group."""
        return cls.create(operands=operands, result_types=results, properties=properties, attributes=attributes, regions=regions)


def _parse_operand(parser: Parser) -> SSAValue:
    """An operand that stands above: the dialect has straight-line code only, so types need not be repeated."""
    operand = parser.parse_unresolved_operand()
    values = parser.ssa_values.get(operand.operand_name, ())
    if operand.index >= len(values):
        parser.raise_error("a value that is not defined above", operand.span)
    return values[operand.index]


def _parse_attributes(parser: Parser, keyword: bool) -> dict[str, Attribute]:
    if not keyword:
        return parser.parse_optional_attr_dict()
    found = parser.parse_optional_attr_dict_with_keyword()
    return dict(found.data) if found is not None else {}


def _print_value(printer: Printer, kind: str, value: Attribute) -> None:
    match value:
        case UnitAttr():
            return
        case StringAttr(data=text):
            printer.print_string(" ")
            printer.print_string_literal(text)
        case IntAttr(data=number):
            printer.print_string(f" {number}")
        case SymbolRefAttr():
            printer.print_string(" ")
            printer.print_attribute(value)
        case _:
            assert kind == TEXTS, kind
            printer.print_string(" ")
            printer.print_attribute(value)


def _parse_value(parser: Parser, kind: str) -> Attribute:
    match kind:
        case _ if kind == TEXT:
            return StringAttr(parser.parse_str_literal())
        case _ if kind == NUMBER:
            return IntAttr(parser.parse_integer())
        case _ if kind == SECTION:
            return SymbolRefAttr(parser.parse_symbol_name())
        case _ if kind == TEXTS:
            texts = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, parser.parse_str_literal)
            return ArrayAttr([StringAttr(t) for t in texts])
        case _:
            return UnitAttr()
