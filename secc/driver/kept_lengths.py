"""Lengths of lists, queues, sets and texts that a model keeps, as values: some code counts calls by what it
appends."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import nn

from secc.runtime.model.kept_values import KeptValue, iter_contents
from secc.runtime.model.user_file import UserModel

_COLLECTIONS = (list, deque, set, str)


def iter_lengths(model: nn.Module, user: UserModel) -> Iterator[KeptValue]:
    """Yields the length of each list, queue, set and text among what is kept. One that is replaced leaves out
    the last entries, or repeats the last one."""
    for value in iter_contents(model, user):
        if isinstance(value.read(), _COLLECTIONS):
            length = _Length(value)
            yield KeptValue(
                f"the length of {value.name}", value.owner, length.read_length, length.write_length
            )


class _Length:
    """The length of a collection at a place."""

    def __init__(self, place: KeptValue) -> None:
        self._place = place
        self._entries: list[Any] | None = None  # all of them, before the length is replaced

    def read_length(self) -> int:
        """Returns the length; 0 if there is no collection any longer."""
        content = self._place.read()
        return len(content) if isinstance(content, _COLLECTIONS) else 0

    def write_length(self, length: int) -> None:
        """Gives the collection another length."""
        content = self._place.read()
        if not isinstance(content, _COLLECTIONS):
            return
        if self._entries is None:
            self._entries = list(content)
        last = self._entries[-1] if self._entries else " " if isinstance(content, str) else 0
        more = (object() for _ in itertools.count()) if isinstance(content, set) else itertools.repeat(last)
        entries = list(itertools.islice(itertools.chain(self._entries, more), length))
        if isinstance(content, str):
            self._place.write("".join(entries))
        elif isinstance(content, set):
            content.clear()
            content.update(entries)
        else:
            content.clear()
            content.extend(entries)
