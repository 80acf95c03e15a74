"""Tells whether code has drawn from the generators of Python's `random` or of NumPy, which plans cannot tie
to samples: what such code does changes from call to call."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from secc.errors import UserError

REMEDY = "draw with torch, or in the dataset, where sample i is seeded by (seed, epoch, i)"


class GeneratorStates:
    """The states of both generators when this was made."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), _numpy_state()

    def find_source(self) -> str:
        """Returns the library that numbers have been drawn from since; "" for neither."""
        if random.getstate() != self._python:
            return "Python's random"
        return "NumPy" if _numpy_state() != self._numpy else ""


def draws_error(source: str, where: str) -> UserError:
    """The error of a forward with results that depend on draws from `source`."""
    message = f"forward draws random numbers from {source}, which cannot be tied to samples"
    return UserError(message, where, REMEDY)


def name_draws(error: UserError, source: str) -> None:
    """Adds draws from `source`, if any, to the message of an error, as a further cause."""
    if source and source not in error.message:
        error.message += f"; forward draws random numbers from {source}, and may change from call to call"
        error.remedy = f"{REMEDY}; or else {error.remedy}" if error.remedy else REMEDY


@contextmanager
def naming_draws() -> Iterator[None]:
    """Context manager that adds draws inside it, if any, to the message of a UserError that leaves it. Two
    results may agree by chance where draws are looked for, and differ later."""
    states = GeneratorStates()
    try:
        yield
    except UserError as error:
        name_draws(error, states.find_source())
        raise


def _numpy_state() -> tuple[object, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return ()
    kind, words, *rest = numpy.random.get_state()
    return kind, words.tobytes(), *rest
