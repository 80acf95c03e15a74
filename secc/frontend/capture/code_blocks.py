"""Chooses parts of the user's code as blocks where modules do not let a capture succeed: a function, or else
statements of a forward (`secc.runtime.model.function_blocks`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from torch import fx, nn

from secc.errors import UserError
from secc.frontend.capture.block_selection import CaptureNote
from secc.frontend.capture.control_flow_paths import GlueError
from secc.frontend.capture.random_op_rows import RandomOpError
from secc.runtime.model.function_blocks import add_function_block, block_path, function_blocks_of
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
_MAX_RETURNING = 12  # and ranges that return the loss
_MAX_BLOCKS = 4  # of statements
_MIN_SECONDS = 60.0  # of processor time for all tries, at least
_MAX_CAPTURES = 2.0  # and as often the time of the capture that failed
_FIRST_TRY = 5.0  # times as long for the first part, most often the right one: a loss with long loops


class TryTimeEnded(Exception):
    """Raised in a capture with parts of the user's code as blocks when the time for those has been used."""


class PartTries:
    """Bounds the processor time of captures with parts of the user's code as blocks. Captures of one model
    with other samples share it, so that none tries again in vain."""

    def __init__(self) -> None:
        self._begin = time.process_time()  # of the first capture
        self._seconds = 0.0  # of processor time for all tries
        self._start = 0.0  # of the tries of the present capture
        self._allowed = math.inf  # seconds from then on
        self._first_error: UserError | None = None  # of the present capture
        self._outcome_at = dict[str, UserError]()  # by place of the first error, what tries ended with

    def start(self, error: UserError) -> None:
        """Start to count, with the first error of a capture; the next ones end the longer time of the first
        part. Raises the error that tries after one at the same place ended with."""
        if self._first_error is not None:
            self._allowed = self._seconds
            return
        if error.where in self._outcome_at:
            known = self._outcome_at[error.where]
            raise known from known.__cause__
        now, self._first_error = time.process_time(), error
        self._seconds = self._seconds or max(_MIN_SECONDS, _MAX_CAPTURES * (now - self._begin))
        self._start, self._allowed = now, _FIRST_TRY * self._seconds

    def check(self) -> None:
        """Raise TryTimeEnded after the time limit."""
        if time.process_time() - self._start > self._allowed:
            raise TryTimeEnded(f"{self._allowed:.0f} s of processor time")

    def end(self, error: UserError) -> None:
        """End the present capture with the error that is reported."""
        if self._first_error is not None:
            self._outcome_at[self._first_error.where] = error
        self._first_error, self._allowed = None, math.inf


class FunctionChoice:
    """Chooses functions of the user's code as blocks: of those that run where a capture fails the outermost
    that can be a block."""

    def __init__(self, user: UserModel, model: nn.Module) -> None:
        self.notes = list[CaptureNote]()
        self._user, self._model = user, model
        self.unsolved: BlockError | None = None  # an error for which no function helped
        self.first_error: BlockError | None = None  # for which the present ones are tried
        self.choices = list[str]()  # instead of the last choice

    def try_next(self, error: UserError) -> bool:
        """Gives the model another function as a block. Returns False if no function helps."""
        if not isinstance(error, BlockError):
            return False
        if self.first_error is not None and error.path == block_path(self._user.function_blocks[-1]):
            self._take_back()
            if not self.choices:
                self.unsolved, self.first_error = self.first_error, None
                return False
        else:
            self.choices = [f for f in error.functions if f not in self._user.function_blocks]
            if not self.choices:
                return False
            self.first_error = error
        function = self.choices.pop(0)
        self._user.function_blocks += (function,)
        path = add_function_block(self._model, function, model_file_module(self._model))
        reason = f"this function is one block, because {self.first_error.message}"
        self.notes.append(CaptureNote(path, reason, self.first_error.where))
        return True

    def _take_back(self) -> None:
        self._user.function_blocks = self._user.function_blocks[:-1]
        delattr(self._model, self.notes.pop().path)


@dataclass(frozen=True)
class StatementBlocks:
    """Ranges of statements that are tried as blocks together, each with the error for which it is one."""

    ranges: tuple[StatementRange, ...] = ()
    errors: tuple[UserError, ...] = ()

    def with_range(self, more: StatementRange, error: UserError) -> StatementBlocks:
        return StatementBlocks((*self.ranges, more), (*self.errors, error))


class StatementChoice:
    """Chooses statements of a forward as blocks: few rather than many, and only as a last resort those that
    return the loss, which then takes all samples of a step at once. Where a block moves the error to other
    statements, these may be a further block."""

    def __init__(self, user: UserModel, model: nn.Module) -> None:
        self.notes = list[CaptureNote]()
        self._user, self._model = user, model
        self.first_error: UserError | None = None  # for which statements are tried
        self._present = StatementBlocks()
        # Around the place of an error, and its argument or module.
        self._ranges_at = dict[tuple[str, str | None], list[StatementRange]]()
        self._choices = list[StatementBlocks]()  # in place of the present ones, the next one first
        self._later, self._last = (
            list[StatementBlocks](),
            list[StatementBlocks](),
        )  # more blocks; with the loss

    @property
    def chosen_paths(self) -> list[str]:
        """Paths of the blocks."""
        return [note.path for note in self.notes]

    @property
    def choices_left(self) -> int:
        """The number of choices that are not tried."""
        return len(self._choices) + len(self._later) + len(self._last)

    def check_results(self, graphs: Iterable[fx.Graph]) -> None:
        """Raises BlockError if a block returns a trainable scalar next to the loss that is no sum over
        samples, or adds to a scalar that it takes: a block that makes the scalar may be exact."""
        for node in (n for graph in graphs for n in graph.nodes if n.target is take_at_path):
            call = node.args[0]
            if call.target not in self.chosen_paths or not _is_trainable_scalar(node):
                continue
            if len(call.users) > 1 and not node.meta.get("summed"):
                raise BlockError(call.target, None, "it returns a trainable scalar", call.meta["where"])
            if node.meta.get("summed") and any(map(_is_trainable_scalar, call.all_input_nodes)):
                raise BlockError(call.target, None, "it takes a trainable scalar", call.meta["where"])

    def try_next(self, error: UserError) -> bool:
        """Gives the model other statements as blocks. Returns False if there are none for this error. Raises
        the error for which statements were tried if none of them can be blocks, and one that no block
        would mend."""
        if self.first_error is None:
            if not isinstance(error, BlockError | GlueError):
                return False
            why_not = list[str]()
            inside, returning = self._find_ranges(error, why_not)
            if not inside and not returning:
                error.message += f"; its statements cannot be a block: {why_not[0]}" if why_not else ""
                return False
            self.first_error = error
            self._choices = [StatementBlocks().with_range(r, error) for r in inside]
            self._last = [StatementBlocks().with_range(r, error) for r in returning]
        else:
            self._add_choices(error)
            self._take_back()
        if isinstance(error, RandomOpError):  # it draws in any block, too
            raise error from error.__cause__
        waiting = self._choices or self._later or self._last
        if not waiting:
            raise self.first_error from self.first_error.__cause__
        self._make_blocks(waiting.pop(0))
        return True

    def _add_choices(self, error: UserError) -> None:
        """Adds choices with the present blocks and a further one, for an error at another place."""
        if not isinstance(error, BlockError | GlueError) or len(self.notes) == _MAX_BLOCKS:
            return
        if isinstance(error, BlockError) and error.path in self.chosen_paths:
            return
        place = (error.where, error.argument if isinstance(error, GlueError) else error.path)
        if place not in self._ranges_at:
            self._ranges_at[place], _ = self._find_ranges(error, [])
        inside = self._ranges_at[place]
        free = [r for r in inside if not any(map(r.shares_statements, self._present.ranges))]
        more = [self._present.with_range(r, error) for r in free]
        lists = {e.argument for e in self._present.errors if isinstance(e, GlueError)}
        if isinstance(error, GlueError) and error.argument and error.argument not in lists:
            self._choices[:0] = more  # what the present blocks are for is done
        else:
            self._later += more[: _MAX_RANGES - len(self._later)]

    def _make_blocks(self, chosen: StatementBlocks) -> None:
        self._present = chosen
        for statements, error in zip(chosen.ranges, chosen.errors, strict=True):
            self._user.function_blocks += (str(statements),)
            path = add_function_block(self._model, str(statements), model_file_module(self._model))
            reason = f"these lines are one block, because {error.message}"
            self.notes.append(CaptureNote(path, reason, error.where, error.remedy))

    def _take_back(self) -> None:
        self._user.function_blocks = self._user.function_blocks[: -len(self.notes)]
        for note in self.notes:
            delattr(self._model, note.path)
        self.notes.clear()

    def _find_ranges(
        self, error: BlockError | GlueError, why_not: list[str]
    ) -> tuple[list[StatementRange], list[StatementRange]]:
        """Returns ranges of statements around the place of an error, in the module outside of blocks that it
        belongs to and in those around it, and ranges that return the loss; the smallest of the innermost
        module come first. Adds to `why_not` why others cannot be taken out."""
        path = error.module if isinstance(error, GlueError) else error.path
        listed = error.argument if isinstance(error, GlueError) else ""
        # One number is the whole batch's: a branch on it would go another way in a micro-batch.
        decides = isinstance(error, BlockError) and error.reads_scalar
        file, _, number = error.where.rpartition(":")
        line = int(number) if number.isdigit() else 0
        inside, returning, called = list[StatementRange](), list[StatementRange](), ""
        while True:
            with suppress(AttributeError):

                def is_wanted(returns: bool, of_model: bool = not path) -> bool:
                    if returns:
                        return of_model and len(returning) < _MAX_RETURNING
                    return not decides and len(inside) < _MAX_RANGES

                around = ranges_around(self._model, path, file, line, called, listed, why_not, is_wanted)
                for statements, returns in around:
                    (returning if returns else inside).append(statements)
            if not path:
                return inside, returning
            path, _, called = path.rpartition(".")


def _is_trainable_scalar(node: fx.Node) -> bool:
    return not node.meta.get("shape", (0,)) and bool(node.meta.get("requires_grad"))


def choose_next_part(
    error: UserError, functions: FunctionChoice, statements: StatementChoice, tries: PartTries
) -> UserError | None:
    """Gives the model another part of its code as a block after a capture failed. Returns None, or the error
    to report if there is none."""
    try:
        tries.start(error)
        if not statements.chosen_paths and functions.try_next(error):
            return None
        return None if statements.try_next(functions.unsolved or error) else functions.unsolved or error
    except UserError as unsolved:
        return unsolved


def take_back_parts(user: UserModel, model: nn.Module, known: int) -> None:
    """Leaves the model with the first `known` of the parts of its code that are blocks."""
    for path in list(function_blocks_of(model))[known:]:
        delattr(model, path)
    user.function_blocks = user.function_blocks[:known]


def describe_time_ended(
    ended: TryTimeEnded, functions: FunctionChoice, statements: StatementChoice
) -> UserError:
    """Returns the error for which parts of the code were tried until the time ended, with what was left
    out."""
    error = statements.first_error or functions.first_error
    left = len(functions.choices) + statements.choices_left
    assert error is not None, "nothing was tried"
    more = f", and {left} more {'was' if left == 1 else 'were'} not" if left else ""
    error.message += f"; parts of forward were tried as one block for {ended}{more}"
    return error


def ranges_around(
    model: nn.Module,
    path: str,
    file: str,
    line: int,
    called: str,
    listed: str,
    why_not: list[str],
    is_wanted: Callable[[bool], bool],
) -> Iterator[tuple[StatementRange, bool]]:
    """Yields ranges of statements of a module's forward, and whether they return its result: around those
    that read the argument `listed`, or a line, or the statement that calls the function with this line, or
    else the submodule `called`. Those without lists that later statements read come first, small ones before
    large ones. is_wanted: whether more ranges that return the result, or that do not, are wanted: to take one
    out takes time."""
    module = model.get_submodule(path)
    name = name_forward(module, is_model_file_module)
    if name is None:
        return
    forward = find_function(name, model_file_module(model))
    try:
        source = ForwardSource(forward, module)
    except NotOutlinable as error:
        why_not.append(str(error))
        return
    reading = source.statements_that_read(listed) if listed else ()
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
    for first in range(min(reading, default=number) + 1):
        for last in range(max(reading, default=number), len(source.statements)):
            try:
                spans.add(source.widen_range(first, last))
            except NotOutlinable as error:
                why_not.append(str(error))
    for first, last in sorted(spans, key=lambda s: (source.lists_read_after(*s), s[1] - s[0], -s[0])):
        returns = source.returns_in(first, last)
        if not is_wanted(returns):
            continue
        try:
            outline_statements(forward, module, first, last)
        except NotOutlinable as error:
            why_not.append(str(error))
        else:
            yield StatementRange(name, first, last, path), returns
