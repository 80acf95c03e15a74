"""Text in and out: parsing and printing of modules, and errors drawn into the text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from io import StringIO
from pathlib import Path

from xdsl.context import Context
from xdsl.dialects.builtin import Builtin, ModuleOp
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.utils.diagnostic import Diagnostic
from xdsl.utils.exceptions import ParseError, VerifyException
from xdsl.utils.mlir_lexer import MLIRLexer

from secc.errors import UserError
from secc.ir.dialect.assembly_format import quote_text
from secc.ir.dialect.ops import SecDialect
from secc.ir.text_io.verifier import find_violations
from secc.runtime.host.regular_files import read_regular_file

# The same strings as by xDSL's own pattern, which takes exponential time for one that does not end.
MLIRLexer._unescaped_characters_regex = re.compile(  # pyright: ignore[reportPrivateUsage]
    r'"(?:[^"\\\n\v\f]++|\\(?:["nt\\]|[0-9A-Fa-f]{2}))*+"'
)
MAX_BYTES = 1 << 26  # of a file: a plan of a thousand blocks has less than a tenth of it
_CONTEXT_LINES = 2
_SHOWN_CHARACTERS, _SHOWN_LINES = 200, 20  # of a text in a message
_CACHED_TEXTS = (
    1 << 17
)  # texts of attributes: a compilation prints one module some thirty times, and little of it changes


class _TextParser(Parser):
    """xDSL's parser, for which a text with escapes and letters beyond ASCII is bytes; here it is a text (a
    path, a key)."""

    def parse_optional_str_literal(self) -> str | None:
        found = super().parse_optional_str_literal()
        if found is None and (data := self.parse_optional_bytes_literal()) is not None:
            try:
                return data.decode()
            except UnicodeDecodeError:
                self.raise_error("a text must be UTF-8")
        return found


class _TextPrinter(Printer):
    """xDSL's printer, with letters beyond ASCII as they are. Attributes never change, so their texts are
    kept."""

    def print_string(self, text: str, *, indent: int | None = None) -> None:
        if "\n" in text or self.stream is None:
            super().print_string(text, indent=indent)
        else:  # nearly all of it; `print`, which xDSL calls for it, takes several times as long
            self._current_column += len(text)
            self.stream.write(text)

    def print_ssa_value(self, value: SSAValue) -> str:
        """Names values as xDSL does, but keeps names apart that xDSL would give twice: the third value with
        the hint `x`, and one with the hint `x_2`."""
        hint = value.name_hint
        if not hint or value in self._ssa_values:
            return super().print_ssa_value(value)
        number = self.ssa_names.get(hint, 0)
        while number and f"{hint}_{number}" in self.ssa_names:
            number += 1
        name = f"{hint}_{number}" if number else hint
        self.ssa_names[hint] = number + 1
        self.ssa_names.setdefault(name, 1)
        self._ssa_values[value] = name
        self.print_string(f"%{name}")
        return name

    def print_string_literal(self, string: str) -> None:
        self.print_string(quote_text(string))

    def print_attribute(self, attribute: Attribute) -> None:
        self.print_string(_format_attribute(attribute))

    def print_attr_dict(self, attr_dict: Mapping[str, Attribute]) -> None:
        self.print_string(
            f"{{{', '.join(_format_entry(name, attribute) for name, attribute in attr_dict.items())}}}"
        )


class _AttributePrinter(Printer):
    """Prints one attribute, whole."""

    print_string_literal = _TextPrinter.print_string_literal


@lru_cache(_CACHED_TEXTS)
def _format_attribute(attribute: Attribute) -> str:
    stream = StringIO()
    _AttributePrinter(stream=stream).print_attribute(attribute)
    return stream.getvalue()


@lru_cache(_CACHED_TEXTS)
def _format_entry(name: str, attribute: Attribute) -> str:
    """An entry of a dictionary of attributes."""
    stream = StringIO()
    _AttributePrinter(stream=stream).print_attr_dict({name: attribute})
    return stream.getvalue()[1:-1]


def make_context() -> Context:
    """An xDSL context with secc's dialects."""
    found = Context()
    found.load_dialect(Builtin)
    found.load_dialect(SecDialect)
    return found


def parse_module(text: str, name: str = "<text>") -> ModuleOp:
    """Parses and verifies a module. Raises UserError with the place drawn into the text."""
    try:
        module = _TextParser(make_context(), text, name).parse_module()
        verify_module(module, name)
    except ParseError as error:
        lines = [line[:_SHOWN_CHARACTERS] for line in str(error).splitlines()[:_SHOWN_LINES]]
        raise UserError("\n".join(["cannot read the IR", *lines]), name) from None
    except RecursionError:
        raise UserError("cannot read the IR: it is nested too deeply", name) from None
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        OverflowError,
        VerifyException,
    ) as error:
        # What neither xDSL nor an op's format checks while it builds an op.
        cause = f"{type(error).__name__}: {error}"[:_SHOWN_CHARACTERS]
        raise UserError(f"cannot read the IR: not what the compiler writes ({cause})", name) from None
    return module


def read_text(path: str | Path) -> str:
    """The text of a file. Raises UserError if it cannot be read or has more than `MAX_BYTES`."""
    try:
        return read_regular_file(Path(path), MAX_BYTES).decode()
    except OSError as error:
        raise UserError(f"cannot read the file: {error.strerror}", str(path)) from None
    except UnicodeDecodeError:
        raise UserError("cannot read the file: it is not text", str(path)) from None


def read_module(path: str | Path) -> ModuleOp:
    """Parses and verifies a file."""
    return parse_module(read_text(path), str(path))


def print_module(module: Operation) -> str:
    """The text of a module; `parse_module` reads it back to an equal one."""
    stream = StringIO()
    _TextPrinter(stream=stream).print_op(module)
    return stream.getvalue().rstrip() + "\n"


def verify_module(module: ModuleOp, name: str = "<text>") -> None:
    """Checks the rules of xDSL and of the dialect. Raises UserError with the first violation drawn under its
    op."""
    for op, message in find_violations(module):
        raise UserError(f"the IR breaks a rule\n{draw_excerpt(module, op, message)}", name)
    try:
        module.verify()
    except VerifyException as error:
        raise UserError(f"the IR breaks a rule\n{error}", name) from None


def draw_excerpt(module: ModuleOp, op: Operation, message: str) -> str:
    """The lines around `op` with `message` and a caret below it."""
    diagnostic = Diagnostic()
    diagnostic.add_message(op, message)
    stream = StringIO()
    _TextPrinter(stream=stream, diagnostic=diagnostic).print_op(module)
    lines = stream.getvalue().splitlines()
    first = next((i for i, line in enumerate(lines) if line.lstrip().startswith("^")), len(lines) - 1)
    return "\n".join(lines[max(0, first - 1 - _CONTEXT_LINES) : first + 2 + _CONTEXT_LINES])
