"""Tells whether code has drawn from generators of Python's `random` or of NumPy: the libraries' own, or ones
that the user's code keeps or makes. Plans cannot tie such numbers to samples.
"""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest import mock

import numpy as np

from secc.errors import UserError
from secc.runtime.model.kept_values import KeptValue

REMEDY = "draw with torch, or in the dataset, where sample i is seeded by (seed, epoch, i)"
MAKERS = frozenset({"default_rng", "Random", "SystemRandom", "RandomState"})  # of generators, by name
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_MOST_EXTREME = 4096  # draws; then usual ones follow, which end loops that wait for one
_FAR = 6.0  # standard deviations


class GeneratorStates:
    """The states of both libraries' generators when this was made, and of those in `kept`."""

    def __init__(self, kept: Iterable[KeptValue] = ()) -> None:
        self._python, self._numpy = random.getstate(), _numpy_state()
        self._kept = [(value, _state_of(value.read())) for value in kept]

    def find_source(self) -> str:
        """Returns what numbers have been drawn from since; "" for nothing."""
        if random.getstate() != self._python:
            return "Python's random"
        if _numpy_state() != self._numpy:
            return "NumPy"
        drawn = (value.name for value, state in self._kept if _state_of(value.read()) != state)
        return next((f"the generator {_short_name(name)}" for name in drawn), "")


def select_generators(values: Iterable[KeptValue]) -> list[KeptValue]:
    """Returns those of the values that are generators of Python's `random` or of NumPy."""
    return [value for value in values if isinstance(value.read(), _GENERATORS)]


def _short_name(name: str) -> str:
    return name.removeprefix("the global ").removesuffix(".__self__")


def _state_of(generator: Any) -> bytes:
    """Returns what draws from a generator change; nothing for one of the operating system's numbers."""
    return b"" if isinstance(generator, random.SystemRandom) else pickle.dumps(generator)


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
def extreme_draws(
    high: bool, files: Iterable[dict[str, Any]], kept: Iterable[KeptValue] = ()
) -> Iterator[None]:
    """Lets generators draw numbers at the low or `high` end of their range, as few draws are: what code does
    with these may not show otherwise (`if random.random() < 0.02`). files: the globals of the user's files,
    which may hold functions of the libraries under names of their own. kept: generators that code keeps;
    those that it makes without a seed draw so, too."""
    in_python, in_numpy = _python_functions(high), _numpy_functions(high)
    own_python = type("ExtremeRandom", (random.Random,), _as_methods(in_python))
    own_numpy = type("ExtremeGenerator", (np.random.Generator,), _as_methods(in_numpy))
    own_state = type("ExtremeState", (np.random.RandomState,), _as_methods(in_numpy))

    def make_generator(seed: Any = None) -> Any:
        return make_default(seed) if seed is not None else own_numpy(np.random.PCG64(0))

    def make_random(*seed: Any) -> random.Random:
        return random_class(*seed) if seed else own_python(0)

    make_default, random_class = np.random.default_rng, random.Random
    with ExitStack() as stack:
        for value in kept:
            content = value.read()
            stack.callback(value.write, content)
            if isinstance(content, random.Random):
                value.write(own_python(0))
            else:
                is_new = isinstance(content, np.random.Generator)
                value.write(own_numpy(np.random.PCG64(0)) if is_new else own_state(0))
        instance = random.seed.__self__  # the library's functions are its methods
        for name in ("random", "_randbelow", "getrandbits"):
            stack.enter_context(mock.patch.object(instance, name, in_python[name], create=True))
        made = {"Random": make_random, "SystemRandom": make_random}
        for library, functions in (
            (random, in_python | made),
            (np.random, in_numpy | {"default_rng": make_generator}),
        ):
            _put_in_place(stack, vars(library), files, functions)
        yield


def _as_methods(functions: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    return {name: staticmethod(function) for name, function in functions.items()}


def _limit_draws(extreme: Callable[..., Any], usual: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that gives the numbers of another one at last: code may wait for one of them."""
    calls = itertools.count()
    return lambda *arguments: (extreme if next(calls) < _MOST_EXTREME else usual)(*arguments)


def _python_functions(high: bool) -> dict[str, Callable[..., Any]]:
    """Returns functions in place of those of `random`."""
    usual, far = random.Random(0), _FAR if high else -_FAR
    draw = _limit_draws(lambda: 1 - 2.0**-24 if high else 0.0, usual.random)

    def draw_normal(mu: float = 0.0, sigma: float = 1.0) -> float:
        return mu + far * sigma

    return {
        "random": draw,
        "_randbelow": _limit_draws(lambda n: n - 1 if high else 0, lambda n: usual.randrange(n)),
        "getrandbits": _limit_draws(lambda k: (1 << k) - 1 if high else 0, usual.getrandbits),
        "gauss": draw_normal,
        "normalvariate": draw_normal,
    }


def _numpy_functions(high: bool) -> dict[str, Callable[..., Any]]:
    """Returns functions in place of those of `numpy.random` and of its generators."""
    usual, far = np.random.default_rng(0), _FAR if high else -_FAR
    draw_unit = _limit_draws(lambda: 1 - 2.0**-24 if high else 0.0, usual.random)

    def draw_numbers(size: Any = None, *_: Any, **__: Any) -> Any:
        return draw_unit() if size is None or size == () else np.full(size, draw_unit())

    def draw_uniform(low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        return low + (high - low) * draw_numbers(size)

    def draw_integers(
        low: Any, high: Any = None, size: Any = None, dtype: Any = np.int64, endpoint: bool = False
    ) -> Any:
        first, end = (0, low) if high is None else (low, high)
        return first + np.int64((end + endpoint - first - 1) * round(draw_unit())) * (
            1 if size is None else np.ones(size, int)
        )

    def draw_normal(loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:
        return loc + scale * (far if size is None or size == () else np.full(size, far))

    def choose_entries(a: Any, size: Any = None, *_: Any, **__: Any) -> Any:
        entries = np.arange(a) if np.ndim(a) == 0 else np.asarray(a)
        return entries[draw_integers(len(entries), size=size)]

    return {
        **dict.fromkeys(("random", "random_sample", "ranf", "sample"), draw_numbers),
        **dict.fromkeys(("randint", "integers"), draw_integers),
        "rand": lambda *size: draw_numbers(size),
        "uniform": draw_uniform,
        "normal": draw_normal,
        "standard_normal": lambda size=None, *_, **__: draw_normal(size=size),
        "randn": lambda *size: draw_normal(size=size),
        "choice": choose_entries,
    }


def _put_in_place(
    stack: ExitStack,
    library: dict[str, Any],
    files: Iterable[dict[str, Any]],
    functions: Mapping[str, Callable[..., Any]],
) -> None:
    """Puts functions in the place of those of a library, there and in files, until the stack is left."""
    others = {id(library[name]): function for name, function in functions.items() if name in library}
    for names in (library, *files):
        found = {name: others[id(value)] for name, value in names.items() if id(value) in others}
        stack.enter_context(mock.patch.dict(names, found))


def _numpy_state() -> tuple[object, ...]:
    kind, words, *rest = cast(tuple[Any, ...], np.random.get_state())
    return kind, words.tobytes(), *rest
