"""Tells whether code has drawn from the generators of Python's `random` or of NumPy, which plans cannot tie
to samples: what such code does changes from call to call."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest import mock

import numpy as np

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


@contextmanager
def extreme_draws(high: bool, files: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Lets both generators draw numbers at the low or `high` end of their range, as few draws are: what code
    does with these may not show otherwise (`if random.random() < 0.02`). files: the globals of the user's
    files, which may hold functions of the libraries under names of their own."""
    unit = 1 - 2.0**-24 if high else 0.0

    def choose_below(count: int) -> int:
        return count - 1 if high else 0

    def draw_numpy(size: Any) -> Any:
        return unit if size is None or size == () else np.full(size, unit)

    def draw_integers(low: Any, high: Any = None, size: Any = None, **_: Any) -> Any:
        first, end = (0, low) if high is None else (low, high)
        return first + np.int64((end - first - 1) * round(unit)) * (1 if size is None else np.ones(size, int))

    in_python = {"random": lambda: unit}
    in_numpy = {
        "rand": lambda *size: draw_numpy(size),
        **dict.fromkeys(("random", "random_sample", "ranf", "sample"), lambda size=None: draw_numpy(size)),
        "uniform": lambda low=0.0, high=1.0, size=None: low + (high - low) * draw_numpy(size),
        "randint": draw_integers,
    }
    with ExitStack() as stack:
        instance = random.seed.__self__  # the library's functions are its methods
        stack.enter_context(mock.patch.object(instance, "random", in_python["random"], create=True))
        stack.enter_context(mock.patch.object(instance, "_randbelow", choose_below))
        for library, functions in ((random, in_python), (np.random, in_numpy)):
            _put_in_place(stack, vars(library), files, functions)
        yield


def _put_in_place(
    stack: ExitStack,
    library: dict[str, Any],
    files: Iterable[dict[str, Any]],
    functions: Mapping[str, Callable[..., Any]],
) -> None:
    """Puts functions in the place of those of a library, there and in files, until the stack is left."""
    others = {id(library[name]): function for name, function in functions.items()}
    for names in (library, *files):
        found = {name: others[id(value)] for name, value in names.items() if id(value) in others}
        stack.enter_context(mock.patch.dict(names, found))


def _numpy_state() -> tuple[object, ...]:
    kind, words, *rest = cast(tuple[Any, ...], np.random.get_state())
    return kind, words.tobytes(), *rest
