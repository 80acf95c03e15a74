"""Attributes with fields, for what passes decide by: layouts of modules under tensor parallelism, and extents
of edges.

Each is a plan dataclass in the IR's text, `#sec.shard<"head.weight", 0, [61]>`: `of` makes it from the
dataclass, and `value` gives that back. The fields print in order, texts in quotes, so that a test can spell
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from xdsl.dialects.builtin import ArrayAttr, IntAttr, StringAttr
from xdsl.ir import Attribute, ParametrizedAttribute
from xdsl.irdl import irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer

from secc.runtime.plan.schema import ModuleStyle, Shard
from secc.runtime.plan.unsplit_reason import SharedSize, UnsplitKind, UnsplitReason


class _RecordAttribute(ParametrizedAttribute):
    """Fields in angle brackets: texts in quotes, whole numbers, lists of them in square brackets."""

    # Values of the last fields that are left out of the text.
    DEFAULTS: ClassVar[tuple[Attribute, ...]] = ()

    def print_parameters(self, printer: Printer) -> None:
        shown = [*self.parameters]
        defaults = [*self.DEFAULTS]
        while defaults and shown[-1] == defaults[-1]:
            shown, defaults = shown[:-1], defaults[:-1]
        with printer.in_angle_brackets():
            printer.print_list(shown, lambda field: _print_field(printer, field))

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            fields = parser.parse_comma_separated_list(parser.Delimiter.NONE, lambda: _parse_field(parser))
        left_out = len(cls.get_irdl_definition().parameters) - len(fields)
        return [*fields, *(cls.DEFAULTS[-left_out:] if left_out else ())]


def _print_field(printer: Printer, field: Attribute) -> None:
    match field:
        case StringAttr(data=text):
            printer.print_string_literal(text)
        case IntAttr(data=number):
            printer.print_string(str(number))
        case _:
            assert isinstance(field, ArrayAttr), field
            with printer.in_square_brackets():
                printer.print_list(field.data, lambda entry: _print_field(printer, entry))


def _parse_field(parser: AttrParser) -> Attribute:
    if (text := parser.parse_optional_str_literal()) is not None:
        return StringAttr(text)
    if (
        fields := parser.parse_optional_comma_separated_list(
            parser.Delimiter.SQUARE, lambda: _parse_field(parser)
        )
    ) is not None:
        return ArrayAttr(fields)
    return IntAttr(parser.parse_integer())


@irdl_attr_definition
class ShardAttr(_RecordAttribute):
    """A parameter that is split over the ranks of a replica: name, dim, and the sizes of the parts that lie
    side by side along it. Each part is split evenly. `ep`: blocks of dim 0 that are split off before.
    `replicas`: consecutive replicas with different parts. `holder`: the part that has everything, or -1."""

    name = "sec.shard"
    parameter: StringAttr
    dim: IntAttr
    parts: ArrayAttr[IntAttr]
    ep: IntAttr
    replicas: IntAttr
    holder: IntAttr
    DEFAULTS = (IntAttr(1), IntAttr(1), IntAttr(-1))

    @classmethod
    def of(cls, shard: Shard) -> ShardAttr:
        """The attribute of a shard."""
        parts = ArrayAttr([IntAttr(part) for part in shard.parts])
        numbers = (IntAttr(n) for n in (shard.ep, shard.replicas, shard.holder))
        return cls(StringAttr(shard.name), IntAttr(shard.dim), parts, *numbers)

    @property
    def value(self) -> Shard:
        """The shard."""
        parts = tuple(part.data for part in self.parts)
        numbers = (self.ep.data, self.replicas.data, self.holder.data)
        return Shard(self.parameter.data, self.dim.data, parts, *numbers)


@irdl_attr_definition
class StyleAttr(_RecordAttribute):
    """How a module works on its parts: its path and a kind such as "colwise"
    (`secc.runtime.tensor_parallel.styles`)."""

    name = "sec.style"
    module: StringAttr
    kind: StringAttr
    arguments: ArrayAttr[StringAttr]
    DEFAULTS = (ArrayAttr[StringAttr]([]),)

    @classmethod
    def of(cls, style: ModuleStyle) -> StyleAttr:
        """The attribute of a style."""
        names = ArrayAttr([StringAttr(name) for name in style.arguments])
        return cls(StringAttr(style.module), StringAttr(style.kind), names)

    @property
    def value(self) -> ModuleStyle:
        """The style."""
        return ModuleStyle(self.module.data, self.kind.data, tuple(name.data for name in self.arguments))


@irdl_attr_definition
class UnsplitAttr(_RecordAttribute):
    """Why a module stays whole: its path, then kind, subject, size and tp of the reason."""

    name = "sec.unsplit"
    module: StringAttr
    kind: StringAttr
    subject: StringAttr
    size: IntAttr
    tp: IntAttr

    @classmethod
    def of(cls, module: str, reason: UnsplitReason) -> UnsplitAttr:
        """The attribute of a reason."""
        return cls(
            StringAttr(module),
            StringAttr(reason.kind.value),
            StringAttr(reason.subject),
            IntAttr(reason.size),
            IntAttr(reason.tp),
        )

    @property
    def value(self) -> UnsplitReason:
        """The reason."""
        return UnsplitReason(UnsplitKind(self.kind.data), self.subject.data, self.size.data, self.tp.data)

    def __str__(self) -> str:
        """The reason for people: "PATH: SENTENCE"."""
        return f"{self.module.data}: {self.value}"


@irdl_attr_definition
class CouplingAttr(_RecordAttribute):
    """What makes a block's samples depend on each other: the kind of hazard ("batch_norm", "frequency" or
    "state", `secc.runtime.recorder.hazards`), the op or tensor, and the user's file:line."""

    name = "sec.coupling"
    kind: StringAttr
    subject: StringAttr
    where: StringAttr

    @classmethod
    def of(cls, kind: str, subject: str, where: str) -> CouplingAttr:
        """The attribute of a hazard."""
        return cls(StringAttr(kind), StringAttr(subject), StringAttr(where))


@irdl_attr_definition
class SharedSizeAttr(_RecordAttribute):
    """A size that ranks of a replica share evenly, and its unit."""

    name = "sec.shared"
    size: IntAttr
    unit: StringAttr

    @classmethod
    def of(cls, shared: SharedSize) -> SharedSizeAttr:
        """The attribute of a size."""
        return cls(IntAttr(shared.size), StringAttr(shared.unit))

    @property
    def value(self) -> SharedSize:
        """The size."""
        return SharedSize(self.size.data, self.unit.data)


@irdl_attr_definition
class ExtentAttr(_RecordAttribute):
    """A dim of an edge's tensor that is cut to the sample's own extent: the dim, the extent as an expression
    over symbols, and the side on which it is padded."""

    name = "sec.extent"
    dim: IntAttr
    expression: StringAttr
    side: StringAttr

    @classmethod
    def of(cls, extent: tuple[int, str, str]) -> ExtentAttr:
        """The attribute of (dim, expression, side)."""
        dim, expression, side = extent
        return cls(IntAttr(dim), StringAttr(expression), StringAttr(side))

    @property
    def value(self) -> tuple[int, str, str]:
        """(dim, expression, side), as plan.json has it."""
        return self.dim.data, self.expression.data, self.side.data
