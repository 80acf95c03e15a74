"""Tells whether results depend on how far an iterator is that forward keeps (`itertools.count()`, a Python
generator): its state is in no attribute, but what it gives can be replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from secc.driver.watched_numbers import Listener, watched_number
from secc.runtime.model.kept_values import NUMBERS, KeptValue, is_plain_object

_MOST_OTHERS = 3  # values in place of one that an iterator gives
Change = Callable[[Any], Any]


class ChangedIterator:
    """Gives what an iterator gives, changed by a function. given: how many times it did so."""

    def __init__(self, iterator: Any, change: Change) -> None:
        self._iterator, self._change = iterator, change
        self.given, self.gave_others = 0, False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._give(next(self._iterator))

    def send(self, value: Any) -> Any:
        """Sends a value to a Python generator."""
        return self._give(self._iterator.send(value))

    def _give(self, content: Any) -> Any:
        self.given += 1
        self.gave_others |= not isinstance(content, (*NUMBERS, torch.Tensor))
        return self._change(content)


def find_advanced_iterators(contents: Iterable[KeptValue], compute: Callable[[], object]) -> list[KeptValue]:
    """Returns the iterators among what is kept, with a state that is in no attribute, which `compute`
    advances; it is not called if there are none."""
    kept = [(v, v.read()) for v in contents]
    iterators = [(v, c) for v, c in kept if isinstance(c, Iterator) and not is_plain_object(c)]
    if not iterators:
        return []
    changed = [(value, ChangedIterator(content, lambda given: given)) for value, content in iterators]
    try:
        for value, stand_in in changed:
            value.write(stand_in)
        compute()
    finally:
        for value, content in iterators:
            value.write(content)
    return [value for value, stand_in in changed if stand_in.given]


def is_iterator_read(
    value: KeptValue,
    results_differ: Callable[[], bool],
    other_values: Callable[[Any], Iterator[Any]],
    numbers_asked_for: Callable[[Callable[[Listener], None]], Iterator[int]],
) -> bool:
    """Whether results change where an iterator that forward advances gives `other_values` of its own, or
    numbers that change the answer of a comparison. One that gives anything but numbers and tensors counts as
    read. `results_differ` computes and compares; `numbers_asked_for` computes with numbers that a listener
    watches, and yields those that comparisons ask for."""
    content = value.read()

    def put_changed(change: Change) -> ChangedIterator:
        changed = ChangedIterator(content, change)
        value.write(changed)
        return changed

    def put_watched(listener: Listener) -> None:
        put_changed(lambda given: watched_number(given, listener))

    try:
        plain = put_changed(lambda given: given)
        if results_differ() or plain.gave_others:
            return True
        for place in range(_MOST_OTHERS):
            put_changed(lambda given, place=place: _nth_or_last(other_values(given), place, given))
            if results_differ():
                return True
        for number in numbers_asked_for(put_watched):
            put_changed(lambda _, number=number: number)
            if results_differ():
                return True
    except Exception:  # as an index beyond a table, or a text in place of an iterator
        return True
    finally:
        value.write(content)
    return False


def _nth_or_last(values: Iterator[Any], place: int, content: Any) -> Any:
    """Returns the value at a place, the last one if there are fewer, `content` if there are none."""
    for number, value in enumerate(values):
        content = value
        if number == place:
            break
    return content
