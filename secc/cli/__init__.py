"""The command line. Each command is a module of its own, which is imported when the command is used.

Importing this package imports only typer, so that `secc --help` answers immediately and `secc opt` needs no
torch. A `UserError` raised by a command becomes one message on stderr and exit code 2.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

COMMAND_NAMES = (
    "compile",
    "run",
    "launch-files",
    "eval",
    "check",
    "explain",
    "diff",
    "drift",
    "report",
    "stats",
    "simulate",
    "cluster",
    "profile",
    "export",
    "opt",
)


class LazyCommands(TyperGroup):
    """Looks up a command by importing `secc.cli.NAME` (- is _ there) and taking its function `command`."""

    def list_commands(self, ctx: typer.Context) -> list[str]:
        """Names of all commands, in the order of --help."""
        return list(COMMAND_NAMES)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> TyperCommand | None:
        """Import a command; None if there is no such command."""
        if cmd_name not in COMMAND_NAMES:
            return None
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        module = importlib.import_module(f"secc.cli.{cmd_name.replace('-', '_')}")
        function = module.command
        if hasattr(module, "rank_options"):
            from secc.cli.run import add_options

            function = add_options(function, module.rank_options())
        app.command(cmd_name, no_args_is_help=True, context_settings=getattr(module, "CONTEXT", None))(
            _refuse_exits(function)
        )
        command = typer.main.get_command(app)
        assert isinstance(command, TyperCommand)
        return command


def _refuse_exits(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command that ends with a UserError if the user's code, which it runs, ends the process:
    otherwise it would seem to have succeeded."""

    @functools.wraps(command)
    def refusing(*arguments: Any, **options: Any) -> None:
        from secc.errors import UserError

        try:
            command(*arguments, **options)
        except SystemExit as exit_:
            from secc.runtime.model.source_lines import error_source_line

            message = f"code of the model ends the process: SystemExit: {exit_.code}"
            raise UserError(message, error_source_line(exit_), "raise another exception there") from exit_

    return refusing


app = typer.Typer(cls=LazyCommands, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(requested: bool) -> None:
    if requested:
        from secc import __version__

        print(f"secc {__version__}")
        raise typer.Exit


VERSION_OPTION = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
]


@app.callback()
def secc(version: VERSION_OPTION = False) -> None:
    """Compile compound training models into plans for unequal groups of ranks, and run them."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. arguments: of this process by default. Exits with code 2 and one message for bad
    input."""
    from secc.errors import UserError
    from secc.runtime.host.output_streams import open_closed_streams, replace_unencodable_output

    open_closed_streams()
    replace_unencodable_output()
    # Threads of PyTorch that wait for each other would otherwise keep their cores busy, and a command would
    # take several times as long on a busy machine. It is read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app(args=None if arguments is None else list(arguments), prog_name="secc")
    except UserError as error:
        print(f"secc: {error}", file=sys.stderr)
        _exit_process(2, immediately=arguments is None)
    except SystemExit as exit_:
        _exit_process(exit_.code, immediately=arguments is None)


def _exit_process(code: str | int | None, immediately: bool) -> NoReturn:
    """Raise SystemExit, or, with `immediately`, end the process without freeing its objects, which would
    take seconds."""
    if immediately and not isinstance(code, str):
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # a closed pipe
                stream.flush()
        os._exit(code or 0)
    raise SystemExit(code) from None
