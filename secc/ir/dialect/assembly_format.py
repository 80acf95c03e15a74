"""The common text form of the dialect's ops: a headline, operands, keyword properties, an attribute
dictionary, result types.

    %0 = sec.call "model.tower" (%px) args "$0" outs ["[0]"] in @tower at "model.py:12" : !sec.tensor<[B, 64],
      f32>

One printer and one parser serve all ops: a keyword property prints as its keyword (`in` for `section`, `at`
for `where`) and its value; a flag prints as its keyword alone.

xDSL's declarative `assembly_format` does not serve: it needs the types of operands in the text, or rules to
infer them. Here operands stand above in straight-line code, which keeps lines short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

from xdsl.dialects.builtin import ArrayAttr, IntAttr, StringAttr, SymbolRefAttr, UnitAttr
from xdsl.ir import Attribute, Region, SSAValue
from xdsl.irdl import IRDLOperation
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.utils.mlir_lexer import MLIRLexer

TEXT_KIND, TEXTS_KIND, NUMBER_KIND, SECTION_KIND, FLAG_KIND = "text", "texts", "number", "section", "flag"
RECORD_KIND = "record"  # an attribute with fields (`secc.ir.dialect.typed_attributes`)
RECORDS_KIND = "records"  # a list of attributes with fields (`secc.ir.dialect.typed_attributes`)
Keywords = tuple[tuple[str, str, str], ...]


class LineOp(IRDLOperation):
    """An op in the common form. Subclasses declare properties and list their keywords in the order in which
    they print."""

    HEADLINE: ClassVar[str | None] = None  # the property that prints first, in quotes
    KEYWORDS: ClassVar[Keywords] = ()  # (property, keyword, kind)

    def print(self, printer: Printer) -> None:
        if self.HEADLINE is not None:
            headline = self.properties[self.HEADLINE]
            assert isinstance(headline, StringAttr)
            printer.print_string(f" {quote_text(headline.data)}")
        if self.operands:
            printer.print_string(" ")
            with printer.in_parens():
                printer.print_list(self.operands, printer.print_operand)
        for name, keyword, kind in self.KEYWORDS:
            value = self.properties.get(name)
            if value is None:
                continue
            if kind in (RECORD_KIND, RECORDS_KIND):
                printer.print_string(f" {keyword} ")
                printer.print_attribute(value)
            else:
                printer.print_string(f" {keyword}{_format_value(value)}")
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
        operands = (
            parser.parse_optional_comma_separated_list(parser.Delimiter.PAREN, lambda: _parse_operand(parser))
            or []
        )
        for name, keyword, kind in cls.KEYWORDS:
            if parser.parse_optional_keyword(keyword) is not None:
                properties[name] = _parse_value(parser, kind)
        regions_expected = cls.get_irdl_definition().regions
        attributes = _parse_attributes(parser, keyword=bool(regions_expected))
        results: Sequence[Attribute] = []
        if parser.parse_optional_punctuation(":"):
            results = parser.parse_comma_separated_list(parser.Delimiter.NONE, parser.parse_type)
        regions = [parser.parse_region() for _ in regions_expected]
        return cls.create_from_parts(operands, results, properties, attributes, regions)

    @classmethod
    def create_from_parts(
        cls,
        operands: Sequence[SSAValue],
        results: Sequence[Attribute],
        properties: dict[str, Attribute],
        attributes: dict[str, Attribute],
        regions: Sequence[Region],
    ) -> Self:
        """Build the op from its flat parts; the dialect's ops have at most one variadic operand and result
        group."""
        return cls.create(
            operands=operands,
            result_types=results,
            properties=properties,
            attributes=attributes,
            regions=regions,
        )


def _parse_operand(parser: Parser) -> SSAValue:
    """An operand that stands above: the dialect has straight-line code only, so types need not be
    repeated."""
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


def quote_text(string: str) -> str:
    """A text as a literal, with letters beyond ASCII as they are."""
    if string.isprintable() and "\\" not in string and '"' not in string:
        return f'"{string}"'
    kept = (
        c if c != '"' and c.isprintable() else "".join(f"\\{b:02X}" for b in c.encode())
        for c in string.replace("\\", "\\\\")
    )
    return f'"{"".join(kept)}"'


def _format_value(value: Attribute) -> str:
    """The text behind the keyword of a property."""
    match value:
        case UnitAttr():
            return ""
        case StringAttr(data=text):
            return f" {quote_text(text)}"
        case IntAttr(data=number):
            return f" {number}"
        case SymbolRefAttr(root_reference=root):
            is_bare = MLIRLexer.bare_identifier_regex.fullmatch(root.data)
            return f" @{root.data if is_bare else quote_text(root.data)}"
        case _:
            assert isinstance(value, ArrayAttr), value
            return f" [{', '.join(quote_text(text.data) for text in value if isinstance(text, StringAttr))}]"


def _parse_value(parser: Parser, kind: str) -> Attribute:
    match kind:
        case _ if kind == TEXT_KIND:
            return StringAttr(parser.parse_str_literal())
        case _ if kind == NUMBER_KIND:
            return IntAttr(parser.parse_integer())
        case _ if kind == SECTION_KIND:
            return SymbolRefAttr(parser.parse_symbol_name())
        case _ if kind == RECORD_KIND:
            return parser.parse_attribute()
        case _ if kind == RECORDS_KIND:
            return ArrayAttr(
                parser.parse_comma_separated_list(parser.Delimiter.SQUARE, parser.parse_attribute)
            )
        case _ if kind == TEXTS_KIND:
            texts = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, parser.parse_str_literal)
            return ArrayAttr([StringAttr(t) for t in texts])
        case _:
            return UnitAttr()
