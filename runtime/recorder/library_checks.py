"""Recognises checks by which torch's own functions refuse values: `if torch.any(var < 0): raise ValueError`.

`F.gaussian_nll_loss` and distributions check their arguments like this. The values are not known while a
forward is recorded. Where they decide only whether torch raises, forward goes on as if it did not.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType

from secc.runtime.recorder.compared_numbers import parse_file

_INTERCEPTING = ("secc.", "torch._dynamo.", "torch._compile.")  # they run between a read and the recorder


def find_outcome_without_error() -> bool | None:
    """Returns which truth value keeps the innermost function of torch that runs now from raising, if it asks
    for a truth value and does nothing else with it; None for other code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and f"{frame.f_globals.get('__name__')}.".startswith(_INTERCEPTING):
        frame = frame.f_back
    if frame is None or not str(frame.f_globals.get("__name__")).startswith("torch."):
        return None
    return _outcome_of_test(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=256)
def _outcome_of_test(code: CodeType, offset: int) -> bool | None:
    """Returns the truth value, asked for at an offset of bytecode, that avoids an error; None if it decides
    more."""
    tree, position = parse_file(code.co_filename), list(code.co_positions())[offset // 2]
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            raises = True
        elif isinstance(node, ast.Assert):
            raises = False
        else:
            continue
        parts = list(_iter_parts(node.test, raises))  # Python may place the question at the whole statement
        outcomes = {not value for part, value in parts if position in (_span_of(node), _span_of(part))}
        if outcomes:
            return outcomes.pop() if len(outcomes) == 1 else None
    return None


def _span_of(node: ast.stmt | ast.expr) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _iter_parts(test: ast.expr, raises: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Yields the parts of a test that Python looks at, each with its truth value that may lead to an error
    if the test does so where it is `raises`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _iter_parts(test.operand, not raises)
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _iter_parts(part, raises)
    else:
        yield test, raises
