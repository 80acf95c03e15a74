"""A finite stream as a dataset of numbered samples: for evaluations, which go through it again and again."""

from __future__ import annotations

from typing import Any

from secc.runtime.errors import UserError
from secc.runtime.model.sample_sources import SampleSource
from secc.runtime.model.stream_reader import StreamReader

MAX_COUNTED = 1_000_000


class CountedStream:
    """The samples of a stream by number. It is read forward; a number below those that are kept, the last
    `window`, reads it from its beginning.

    Raises UserError for a stream without samples, and for one that has no end within MAX_COUNTED samples.
    """

    def __init__(self, source: SampleSource, window: int) -> None:
        self._source, self._window = source, window
        self._kept: dict[int, dict[str, Any] | UserError] = {}  # oldest first
        length = source.declared_length
        self._length = self._count_samples() if length is None else length
        self._reader = StreamReader(source, epoch_length=self._length)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i not in self._kept and i < self._reader.next_number:
            self._reader = StreamReader(self._source, epoch_length=self._length)
        while i not in self._kept:
            number = self._reader.next_number
            sample = self._reader.read(number)
            self._reader.forget_before(number + 1)
            self._kept.pop(number, None)
            self._kept[number] = sample.error or sample.item
            while len(self._kept) > self._window:
                del self._kept[next(iter(self._kept))]
        item = self._kept[i]
        if isinstance(item, UserError):
            raise item
        return item

    def _count_samples(self) -> int:
        reader = StreamReader(self._source)
        for number in range(MAX_COUNTED):
            sample = reader.read(number)
            reader.raise_failure()
            if sample.epoch:
                return number
            reader.forget_before(number)
        raise UserError(
            f"{self._source.expression} has more than {MAX_COUNTED} samples, or no end",
            self._source.place,
            "evaluate on a part of it, such as ds.take(1000)",
        )
