"""Numbers that say what code compares them with.

A block that reads a number of a tensor into Python may compare it much later, after arithmetic, with what no
line spells out: `int(task) - offset == BASE + 3`, `task.item() in IDS`, `bisect(bounds, n)`, `match`. So
where code reads a number, it gets a subclass of int or float which tells a listener of each comparison; what
is computed from it does so, too. `int` and `float` would make plain numbers of them, so they have stand-ins
in the files of that code while it is watched.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from secc.driver.cached_functions import find_cached_functions

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = ("add", "sub", "mul", "floordiv", "truediv", "mod", "and", "or", "xor", "lshift", "rshift")
_JUMPING = ("mod", "floordiv", "and", "or__", "shift", "invert", "round", "floor", "ceil", "trunc")
_FARTHEST = 4096  # from a number that code has read to one that is tried
_STEPS = {"__floor__": 0.0, "__ceil__": 0.0, "__trunc__": 1.0, "__round__": 0.5}  # where these jump
_UNARY = ("neg", "pos", "abs", "invert", "round", "floor", "ceil", "trunc")


class Listener(Protocol):
    """What watched numbers tell of."""

    def note_numbers(self, comparison: str, number: float, values: Sequence[float], origin: Origin) -> float:
        """Code compares `values`, which come from a tensor, with a number. Returns what to take off them."""
        ...

    def note_step(self, value: float, step: float) -> float:
        """Code makes a whole number of `value`, which jumps at `step`. Returns what to take off it."""
        ...

    def note_key(self, value: float, origin: Origin) -> None:
        """Code looks for `value` in a set or a dict, or makes a text of it."""


@dataclass(frozen=True)
class Origin:
    """A number of a tensor, and the steps by which code computes another from it. jumps: whether one of them
    is a remainder, a quotient or on bits, so that nothing but a search finds numbers with a given result."""

    number: float
    steps: tuple[Callable[[Any], Any], ...] = ()
    jumps: bool = False

    def with_step(self, step: Callable[[Any], Any], jumps: bool) -> Origin:
        """Returns the origin of the result of a further step."""
        return Origin(self.number, (*self.steps, step), self.jumps or jumps)

    def find_nearest_numbers(self, is_met: Callable[[Any], bool]) -> list[int]:
        """Returns the next whole number above and below this one for which the steps give a result that meets
        a condition, if there is one within `_FARTHEST`."""
        ways = (range(_FARTHEST), range(0, -_FARTHEST, -1))
        start = int(self.number)
        found = (next((start + d for d in way if self._meets(start + d, is_met)), None) for way in ways)
        return list(dict.fromkeys(number for number in found if number is not None))

    def _meets(self, number: int, is_met: Callable[[Any], bool]) -> bool:
        try:
            return is_met(functools.reduce(lambda value, step: step(value), self.steps, number))
        except (ArithmeticError, ValueError, TypeError):  # a shift by a negative number
            return False


class _Watched:
    """What watched integers and floats have in common."""

    listener: Listener
    origin: Origin

    def __reduce_ex__(self, _protocol: Any) -> Any:
        base = int if isinstance(self, int) else float
        return base, (base(self),)  # type: ignore[arg-type, call-overload]

    def __deepcopy__(self, _memo: Any) -> Any:
        return self


class WatchedInt(_Watched, int):
    """A whole number from a tensor."""


class WatchedFloat(_Watched, float):
    """A number from a tensor."""


def watched_number(value: Any, listener: Listener, origin: Origin | None = None) -> Any:
    """Returns an integer or a float as one that is watched, and lists of them; anything else as it is. It
    comes from a tensor itself if no origin is given."""
    if isinstance(value, list):
        return [watched_number(inner, listener) for inner in value]
    if type(value) not in (int, float):
        return value
    made = WatchedInt(value) if type(value) is int else WatchedFloat(value)
    made.listener, made.origin = listener, origin or Origin(value)
    return made


def is_watched(value: Any) -> bool:
    """Whether this is a watched number."""
    return isinstance(value, _Watched)


def plain_number(value: Any) -> Any:
    """Returns a watched number as one of Python's own."""
    if isinstance(value, WatchedInt):
        return int.__pos__(value)
    return float.__pos__(value) if isinstance(value, WatchedFloat) else value


def _comparing(base: type, name: str) -> Callable[..., Any]:
    plain = getattr(base, f"__{name}__")

    def note_and_compare(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)) or isinstance(other, (bool, _Watched)):
            return plain(self, other)
        value = plain_number(self)
        move = self.listener.note_numbers(name, other, [value], self.origin)
        return getattr(operator, name)(value - move, other) if move else plain(self, other)

    return note_and_compare


def _computing(base: type, method: str) -> Callable[..., Any]:
    plain = getattr(base, method)
    jumps = any(name in method for name in _JUMPING)

    def compute_watched(self: Any, *others: Any) -> Any:
        others = tuple(map(plain_number, others))
        is_mixed = base is int and any(isinstance(o, float) for o in others) and hasattr(float, method)

        def step(number: Any) -> Any:
            return getattr(float, method)(float(number), *others) if is_mixed else plain(number, *others)

        if method in _STEPS and not others and base is float:
            value = plain_number(self)
            return watched_number(
                step(value - self.listener.note_step(value, _STEPS[method])),
                self.listener,
                self.origin.with_step(step, jumps),
            )
        return watched_number(step(plain_number(self)), self.listener, self.origin.with_step(step, jumps))

    return compute_watched


def _keying(base: type, method: str) -> Callable[..., Any]:
    plain = getattr(base, method)

    def look_up(self: Any, *arguments: Any) -> Any:
        self.listener.note_key(plain_number(self), self.origin)
        return plain(self, *arguments)

    return look_up


for _base, _class in ((int, WatchedInt), (float, WatchedFloat)):
    for _name in _COMPARISONS:
        setattr(_class, f"__{_name}__", _comparing(_base, _name))
    for _name in (*_UNARY, *_ARITHMETIC, *(f"r{n}" for n in _ARITHMETIC)):
        if hasattr(_base, f"__{_name}__"):
            setattr(_class, f"__{_name}__", _computing(_base, f"__{_name}__"))
    for _name in ("hash", "str", "format"):
        setattr(_class, f"__{_name}__", _keying(_base, f"__{_name}__"))


class _StandIn(type):
    """The metaclass of stand-ins for `int` and `float`: type checks against one take the real class."""

    stands_for: type

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.stands_for)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.stands_for)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.stands_for

    def __hash__(cls) -> int:
        return hash(cls.stands_for)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.stands_for, name)

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and isinstance(arguments[0], (torch.Tensor, np.ndarray)):
            arguments = (arguments[0].item(),)
        plain = list(map(plain_number, arguments))
        watched = [a for a in arguments if isinstance(a, _Watched)]
        if not watched:
            return cls.stands_for(*plain, **options)
        jumps = cls.stands_for is int and isinstance(watched[0], float)
        if jumps:
            plain[0] -= watched[0].listener.note_step(plain[0], _STEPS["__trunc__"])
        made = cls.stands_for(*plain, **options)
        return watched_number(made, watched[0].listener, watched[0].origin.with_step(cls.stands_for, jumps))


class _Int(metaclass=_StandIn):
    stands_for = int


class _Float(metaclass=_StandIn):
    stands_for = float


@contextmanager
def watched_conversions(files: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Lets `int(...)` and `float(...)` keep numbers watched in files, which are given by their globals, and
    lets their functions with a cache (`functools.lru_cache`) compute what they may have computed before."""
    files = list(files)
    cached = find_cached_functions(files)
    changed = [(f, name) for f in files for name in ("int", "float") if name not in f]
    for function in cached:
        function.replace_by(function.without_cache)
    for file, name in changed:
        file[name] = _Int if name == "int" else _Float
    try:
        yield
    finally:
        for file, name in changed:
            del file[name]
        for function in cached:
            function.replace_by(function.function)
