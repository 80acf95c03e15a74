"""Chooses parts of the user's code as blocks where modules do not let a capture succeed: a function, or else
statements of a forward (`secc.runtime.model.function_blocks`)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

from torch import fx, nn

from secc.errors import UserError
from secc.frontend.capture.block_selection import CaptureNote
from secc.frontend.capture.control_flow_paths import GlueError
from secc.runtime.model.function_blocks import add_function_block, block_path
from secc.runtime.model.outlined_forward import (
    ForwardSource,
    NotOutlinable,
    StatementRange,
    find_function,
    function_at,
    name_forward,
    outline_statements,
)
from secc.runtime.model.user_file import UserModel, is_model_file_module, model_file_module
from secc.runtime.recorder import BlockError, take_at_path

_MAX_RANGES = 12  # ranges of statements that are tried for one error; each costs a capture
_MAX_RETURNING = 6  # and ranges that return the loss
_MAX_SECONDS = 60.0  # of processor time for all of them


class FunctionChoice:
    """Chooses functions of the user's code as blocks: of those that run where a capture fails the outermost
    that can be a block."""

    def __init__(self, user: UserModel, model: nn.Module) -> None:
        self.notes = list[CaptureNote]()
        self._user, self._model = user, model
        self.unsolved: BlockError | None = None  # an error for which no function helped
        self._choices = list[str]()  # instead of the last choice
        self._first_error: BlockError | None = None

    def try_next(self, error: UserError) -> bool:
        """Gives the model another function as a block. Returns False if no function helps."""
        if not isinstance(error, BlockError):
            return False
        if self._first_error is not None and error.path == block_path(self._user.function_blocks[-1]):
            self._take_back()
            if not self._choices:
                self.unsolved, self._first_error = self._first_error, None
                return False
        else:
            self._choices = [f for f in error.functions if f not in self._user.function_blocks]
            if not self._choices:
                return False
            self._first_error = error
        function = self._choices.pop(0)
        self._user.function_blocks += (function,)
        path = add_function_block(self._model, function, model_file_module(self._model))
        reason = f"this function is one block, because {self._first_error.message}"
        self.notes.append(CaptureNote(path, reason, self._first_error.where))
        return True

    def _take_back(self) -> None:
        self._user.function_blocks = self._user.function_blocks[:-1]
        delattr(self._model, self.notes.pop().path)


class StatementChoice:
    """Chooses statements of a forward as a block: few rather than many, and only as a last resort those that
    return the loss, which then takes all samples of a step at once."""

    def __init__(self, user: UserModel, model: nn.Module) -> None:
        self.notes = list[CaptureNote]()
        self._user, self._model = user, model
        self._choices: Iterator[StatementRange] = iter(())  # instead of the last choice
        self._until = 0.0  # processor time after which no more are tried
        self._first_error: UserError | None = None

    @property
    def chosen_path(self) -> str | None:
        """Path of the block; None before a choice."""
        return self.notes[-1].path if self.notes else None

    def check_results(self, graphs: Iterable[fx.Graph]) -> None:
        """Raises BlockError if the block returns a trainable scalar next to the loss: nothing says that it is
        a sum over samples."""
        for node in (n for graph in graphs for n in graph.nodes if n.target is take_at_path):
            call = node.args[0]
            is_scalar = not node.meta.get("shape", (0,)) and node.meta.get("requires_grad")
            if is_scalar and call.target == self.chosen_path and len(call.users) > 1:
                raise BlockError(call.target, None, "it returns a trainable scalar", call.meta["where"])

    def try_next(self, error: UserError) -> bool:
        """Gives the model other statements as a block. Returns False if there are none for this error; raises
        the error for which statements were tried if none of them can be a block."""
        if self._first_error is None:
            if not isinstance(error, BlockError | GlueError) or not (ranges := self._find_ranges(error)):
                return False
            self._first_error, self._choices = error, iter(ranges)
            self._until = time.process_time() + _MAX_SECONDS
        else:
            self._user.function_blocks = self._user.function_blocks[:-1]
            delattr(self._model, self.notes.pop().path)
        chosen = next(self._choices, None)
        if chosen is None or time.process_time() > self._until:
            raise self._first_error from self._first_error.__cause__
        self._user.function_blocks += (str(chosen),)
        path = add_function_block(self._model, str(chosen), model_file_module(self._model))
        reason = f"these lines are one block, because {self._first_error.message}"
        first = self._first_error
        self.notes.append(CaptureNote(path, reason, first.where, first.remedy))
        return True

    def _find_ranges(self, error: BlockError | GlueError) -> list[StatementRange]:
        """Returns ranges of statements around the place of an error, in the module outside of blocks that it
        belongs to and in those around it; the smallest of the innermost module come first."""
        path = error.module if isinstance(error, GlueError) else error.path
        # One number is the whole batch's: a branch on it would go another way in a micro-batch.
        decides = isinstance(error, BlockError) and error.reads_scalar
        file, _, number = error.where.rpartition(":")
        line = int(number) if number.isdigit() else 0
        inside, returning, called = list[StatementRange](), list[StatementRange](), ""
        while True:
            with suppress(NotOutlinable, AttributeError):
                ranges = list(_ranges_around(self._model, path, file, line, called))
                inside += [r for r, returns in ranges if not (returns or decides)]
                returning += [r for r, returns in ranges if returns and not path]
            if not path:
                return [*inside[:_MAX_RANGES], *returning[:_MAX_RETURNING]]
            path, _, called = path.rpartition(".")


def _ranges_around(
    model: nn.Module, path: str, file: str, line: int, called: str
) -> Iterator[tuple[StatementRange, bool]]:
    """Yields ranges of statements of a module's forward, and whether they return its result: around a line,
    or the statement that calls the function with this line, or else the submodule `called`. Those without
    lists that later statements read come first, small ones before large ones."""
    module = model.get_submodule(path)
    name = name_forward(module, is_model_file_module)
    if name is None:
        return
    forward = find_function(name, model_file_module(model))
    source = ForwardSource(forward)
    number = None
    if forward.__code__.co_filename.rpartition("/")[2] == file:
        number = source.statement_at(line)
        if number is None and (function := function_at(forward.__code__.co_filename, line)) is not None:
            number = source.statement_that_calls(function)
    if number is None and called:
        number = source.statement_that_calls(called)
    if number is None and not path:  # the place says nothing: what is left is the loss
        number = len(source.statements) - 1
    if number is None:
        return
    spans = set[tuple[int, int]]()
    for first in range(number + 1):
        for last in range(number, len(source.statements)):
            with suppress(NotOutlinable):
                spans.add(source.widen_range(first, last))
    for first, last in sorted(spans, key=lambda s: (source.lists_read_after(*s), s[1] - s[0], -s[0])):
        with suppress(NotOutlinable):
            returns = outline_statements(forward, type(module), first, last).returns
            yield StatementRange(name, first, last, path), returns
