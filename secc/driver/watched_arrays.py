"""NumPy arrays that say what code compares their numbers with.

Code that takes a tensor as an array compares it with what no line spells out: `(task.numpy() == BASE + 3)`.
Such an array tells a listener of each comparison, as numbers do (`secc.driver.watched_numbers`), and so does
what is computed from it. An element of it is an array without dims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from secc.driver.watched_numbers import Listener, Origin, is_watched, plain_number, watched_number

_COMPARISONS = {
    "equal": ("eq", "eq"),
    "not_equal": ("ne", "ne"),
    "less": ("lt", "gt"),
    "less_equal": ("le", "ge"),
    "greater": ("gt", "lt"),
    "greater_equal": ("ge", "le"),
}  # of an array with a number, and of a number with an array
_JUMPING = ("mod", "remainder", "divide", "and", "or", "shift", "invert", "rint", "floor", "ceil", "trunc")
_as_array = np.asarray  # not what `watched_array_functions` puts in its place
_MOST_NUMBERS = 64  # that one call compares an array with


class WatchedArray(np.ndarray[Any, Any]):
    """Numbers of a tensor."""

    listener: Listener | None = None
    origin: Origin | None = None

    def __array_finalize__(self, other: Any) -> None:
        self.listener, self.origin = getattr(other, "listener", None), getattr(other, "origin", None)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        """Computes with plain arrays, tells of comparisons, and watches numbers that result."""
        plain = [_plain(value) for value in inputs]
        if out is not None:
            options["out"] = tuple(map(_plain, out))
        place = next(
            i for i, value in enumerate(inputs) if isinstance(value, WatchedArray) or is_watched(value)
        )
        if method == "__call__" and ufunc.__name__ in _COMPARISONS:
            if not any(isinstance(v, WatchedArray) or is_watched(v) for v in inputs[place + 1 :]):
                name = _COMPARISONS[ufunc.__name__][place]
                if move := inputs[place].note_comparison(name, plain[1 - place]):
                    plain[place] = plain[place] - move
            return getattr(ufunc, method)(*plain, **options)
        result = getattr(ufunc, method)(*plain, **options)
        if out is not None or self.listener is None or self.origin is None:
            return result if out is None else out[0]
        others = [value for i, value in enumerate(plain) if i != place]
        origin = Origin(self.origin.number)
        if method == "__call__" and all(np.ndim(value) == 0 for value in others):

            def apply_step(number: Any) -> Any:
                return ufunc(*plain[:place], number, *plain[place + 1 :])

            origin = self.origin.with_step(apply_step, any(name in ufunc.__name__ for name in _JUMPING))
        return watched_array(result, self.listener, origin)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Tells of functions that compare by themselves."""
        name = func.__name__
        if name in ("isin", "in1d") and isinstance(args[0], WatchedArray):
            args[0].note_comparison("eq", args[1])
        elif name == "searchsorted" and isinstance(args[1], WatchedArray):
            args[1].note_comparison("ge", args[0])
        elif name == "digitize" and isinstance(args[0], WatchedArray):
            args[0].note_comparison("ge", args[1])
        return super().__array_function__(func, types, args, kwargs)

    def note_comparison(self, comparison: str, others: Any) -> float:
        """Tells the listener what the numbers of this array are compared with. Returns what it takes off
        them."""
        numbers = _as_array(_plain(others)).ravel()[:_MOST_NUMBERS]
        if self.listener is not None and self.origin is not None and numbers.dtype.kind in "iuf":
            values = self.view(np.ndarray).ravel().tolist()
            moves = [self.listener.note_numbers(comparison, n, values, self.origin) for n in numbers.tolist()]
            return next(filter(None, moves), 0.0)
        return 0.0

    def __getitem__(self, key: Any) -> Any:
        return self._watch(super().__getitem__(_plain(key)))

    def _watch(self, value: Any) -> Any:
        if self.listener is None or self.origin is None:
            return value
        return watched_array(value, self.listener, self.origin)

    def item(self, *places: Any) -> Any:
        """Returns a number that is watched."""
        value = self.view(np.ndarray).item(*places)
        return value if self.listener is None else watched_number(value, self.listener, self.origin)

    def tolist(self) -> Any:
        """Returns numbers that are watched."""
        value = self.view(np.ndarray).tolist()
        return value if self.listener is None else watched_number(value, self.listener)

    def _note_key(self) -> Any:
        value = self.view(np.ndarray)[()]
        if self.listener is not None and self.origin is not None and not self.ndim:
            self.listener.note_key(value.item(), self.origin)
        return value

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self._note_key())

    def __str__(self) -> str:
        return str(self._note_key())

    def __format__(self, form: str) -> str:
        return format(self._note_key(), form)


def watched_array(value: Any, listener: Listener, origin: Origin | None = None) -> Any:
    """Returns numbers of NumPy as an array that is watched; anything else as it is. The first one comes from
    a tensor itself if no origin is given."""
    if isinstance(value, tuple):
        return tuple(watched_array(inner, listener, origin) for inner in value)
    if not isinstance(value, (np.ndarray, np.generic)) or value.dtype.kind not in "iuf" or not value.size:
        return value
    plain = _as_array(value)
    made = plain.view(WatchedArray)
    made.listener, made.origin = listener, origin or Origin(plain.flat[0].item())
    return made


def _plain(value: Any) -> Any:
    """Returns what is watched as what it stands for."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.view(np.ndarray) if isinstance(value, WatchedArray) else plain_number(value)


@contextmanager
def watched_array_functions() -> Iterator[None]:
    """Lets `np.array` and `np.asarray` keep arrays watched, and those that they make of tensors."""

    def keep_watched(made_of: Callable[..., Any]) -> Callable[..., Any]:
        def make_array(value: Any, *others: Any, **options: Any) -> Any:
            if isinstance(value, torch.Tensor) and not value.requires_grad:
                value = value.numpy(force=True)
            made = made_of(value, *others, **options)
            if not isinstance(value, WatchedArray) or value.listener is None:
                return made
            return watched_array(made, value.listener, value.origin)

        return make_array

    plain = np.array, np.asarray
    np.array, np.asarray = map(keep_watched, plain)
    try:
        yield
    finally:
        np.array, np.asarray = plain
