"""The command line: a table of commands, each in a module of its own that is imported when it is used.

Importing this package loads typer alone, so that `secc --help` answers at once and `secc opt` needs no torch.
A `UserError` that a command lets through becomes one message on stderr and exit code 2.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

COMMAND_NAMES = (
    "compile",
    "run",
    "check",
    "explain",
    "diff",
    "drift",
    "stats",
    "simulate",
    "cluster",
    "profile",
    "export",
    "opt",
)


class LazyCommands(TyperGroup):
    """Looks a command up by importing `secc.cli.NAME` and its function `command`."""

    def list_commands(self, ctx: typer.Context) -> list[str]:
        return list(COMMAND_NAMES)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> TyperCommand | None:
        if cmd_name not in COMMAND_NAMES:
            return None
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        module = importlib.import_module(f"secc.cli.{cmd_name}")
        app.command(cmd_name, no_args_is_help=True, context_settings=getattr(module, "CONTEXT", None))(
            module.command
        )
        found = typer.main.get_command(app)
        assert isinstance(found, TyperCommand)
        return found


app = typer.Typer(
    cls=LazyCommands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False
)


@app.callback()
def secc() -> None:
    """Compile compound training models into plans for unequal groups of ranks, and run them."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, by default the process's own. Exit code 2 with one message for bad input."""
    from secc.errors import UserError

    try:
        app(args=None if arguments is None else list(arguments))
    except UserError as error:
        print(f"secc: {error}", file=sys.stderr)
        _exit_process(2, ends=arguments is None)
    except SystemExit as end:
        _exit_process(end.code, ends=arguments is None)


def _exit_process(code: str | int | None, ends: bool) -> NoReturn:
    """Raise SystemExit; where the process `ends` with it, end it at once: taking apart all that it holds
    would take seconds."""
    if ends and not isinstance(code, str):
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # a closed pipe
                stream.flush()
        os._exit(code or 0)
    raise SystemExit(code) from None
