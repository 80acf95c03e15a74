"""Reads the streams of a run batch by batch: all samples of each global batch, on every rank.

Which rank trains a sample is decided from the sizes of all samples of the batch, so no rank can know ahead
which samples of a stream it may leave out. Reading is what every rank repeats; collating, which is where
decoding and tokenising belong, is done by the ranks that need a sample only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from secc.runtime.data.mixed_order import MixedOrder
from secc.runtime.model.stream_reader import LOOKAHEAD, StreamPosition, StreamReader, StreamSample
from secc.runtime.model.stream_state import digest_value


class StreamBatches:
    """The streams of a run from step `start` on.

    `resumed`: what the checkpoint recorded of the data; `accepts_change`: go on if a stream is another one.
    `saves`: whether positions are asked for, which costs reading one sample ahead.
    """

    def __init__(
        self,
        order: MixedOrder,
        start: int = 0,
        resumed: Mapping[str, Any] | None = None,
        accepts_change: bool = False,
        saves: bool = False,
    ) -> None:
        self._order, self._start, self._saves = order, start, saves
        self._resumed, self._accepts_change = resumed, accepts_change
        self._readers = {
            number: StreamReader(s, order.seed, order.length if order.epoch_count else None)
            for number, s in enumerate(order.sources)
            if s.is_stream
        }
        self._is_at_start = False
        self._ended: set[int] = set()  # sources with an end that was noted
        self._notes: list[str] = []

    def is_streamed(self, step: int, position: int) -> bool:
        """Whether the sample at `position` of the step's batch comes from a stream."""
        return self._order.source_sample(step, position)[0] in self._readers

    def read_batch(self, step: int, keep_from: int) -> Iterator[None]:
        """Reads what the step's batch has of streams, and stops after each sample, so that a caller can do
        other work. Samples of steps before `keep_from` are dropped. Raises StreamFailure if a stream cannot
        be read on."""
        if not self._is_at_start:
            self._go_to_start()
        if keep_from >= self._start:
            for number, taken in enumerate(self._order.taken_before(keep_from)):
                if number in self._readers:
                    self._readers[number].forget_before(taken)
        for reader in self._readers.values():
            reader.raise_failure()
        for position in range(self._order.samples_in_step(step)):
            if self._find_sample(step, position) is not None:
                yield
        for number, reader in self._readers.items():
            for length in () if self._order.epoch_count else reader.ended_epochs:
                if number not in self._ended:
                    self._ended.add(number)
                    expression = self._order.sources[number].expression
                    self._notes.append(f"{expression} has ended after {length} samples and begins again")
            reader.ended_epochs.clear()

    def load_item(self, step: int, position: int) -> dict[str, Any]:
        """Returns a sample of a stream. Raises UserError if the stream raised in its place."""
        sample = self._find_sample(step, position)
        assert sample is not None
        if sample.error is not None:
            raise sample.error
        return sample.item

    def sample_id(self, step: int, position: int) -> int:
        """Returns the number that stands for a sample of a stream: that in its epoch, counted from the
        source's first id."""
        sample = self._find_sample(step, position)
        assert sample is not None
        return self._order.sources[self._order.source_sample(step, position)[0]].first_id + sample.index

    def digest_batch(self, step: int) -> int:
        """Returns a digest of all samples of a batch that come from streams, in their order."""
        samples = [self._find_sample(step, p) for p in range(self._order.samples_in_step(step))]
        return digest_value([s.digest for s in samples if s is not None])

    def take_notes(self) -> tuple[str, ...]:
        """Returns what happened since the last call, in sentences."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def find_position(self, step: int) -> dict[str, Any] | None:
        """Returns what a checkpoint records of the data before batch `step`, which is the next one to be
        read; None if nothing is saved."""
        if not self._saves:
            return None
        sources: dict[str, Any] = {}
        for number, taken in enumerate(self._order.taken_before(step)):
            source, entry = self._order.sources[number], {"taken": taken}
            if number in self._readers and self._order.samples_in_step(step):
                self._readers[number].mark_places(self._places_ahead(step, number))
                entry = self._readers[number].find_position(taken).as_json()
            sources[source.name] = entry | {"parts": source.parts}
        origin = {"number": self._order.origin.number, "taken": dict(self._order.origin.taken)}
        return {"samples": step * self._order.global_batch, "origin": origin, "sources": sources}

    def _places_ahead(self, step: int, source: int) -> Iterator[int]:
        """Yields the places at the ends of later batches that are read for the position before `step`."""
        first = taken = self._order.taken_before(step)[source]
        while taken < first + LOOKAHEAD:
            step += 1
            taken = self._order.taken_before(step)[source]
            yield taken

    def _find_sample(self, step: int, position: int) -> StreamSample | None:
        source, number = self._order.source_sample(step, position)
        return self._readers[source].read(number) if source in self._readers else None

    def _go_to_start(self) -> None:
        """Goes to where step `start` begins, in every stream."""
        self._is_at_start = True
        entries: Mapping[str, Any] = (self._resumed or {}).get("sources", {})
        for number, taken in enumerate(self._order.taken_before(self._start)):
            if number not in self._readers:
                continue
            reader, source = self._readers[number], self._order.sources[number]
            if self._saves:
                reader.mark_places(self._places_ahead(self._start, number))
            position = StreamPosition.from_json(entries.get(source.name, {}))
            if position is None or position.taken != taken:
                reader.skip(taken)
            elif taken:
                how = reader.resume(position, self._accepts_change)
                self._notes.append(f"{source.expression} goes on after {taken} samples: {how}")
