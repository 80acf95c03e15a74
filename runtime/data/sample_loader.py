"""Loads and collates the samples of global batches, and makes their metadata.

A sample is made with random numbers that belong to (seed, epoch, index), so any rank may load it, several
times if needed, and gets the same. Items are kept as long as a request of their step may come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from secc.runtime.data.epoch_order import EpochOrder
from secc.runtime.data.sample_metadata import RecordCodec, SampleRecord, SkippedSample
from secc.runtime.data.sample_workers import SampleKey, SampleWorkers
from secc.runtime.data.stream_batches import StreamBatches
from secc.runtime.errors import LostProcess, UserError
from secc.runtime.host.fork_pool import WorkerPool
from secc.runtime.model.item_seeds import shared_rng_restore
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.batch_sizes import pad_batch
from secc.runtime.rerecording.rerecorder import Rerecorder


class MetadataRequest(NamedTuple):
    """Asks for the metadata rows of the samples at `positions` of the step's global batch."""

    step: int
    positions: tuple[int, ...]


class BatchRequest(NamedTuple):
    """Asks for the samples at `positions` of the step's global batch, collated on the CPU and padded to
    `widths` (symbol, size).

    `section` is the section that will run the batch and may need recorded glue; "" for none.
    """

    step: int
    positions: tuple[int, ...]
    widths: tuple[tuple[str, int], ...] = ()
    section: str = ""


class MetadataRows(NamedTuple):
    """The answer to a MetadataRequest: `table` from `RecordCodec.pack_records`, and the errors of samples
    that do not load. With streams also a digest of all samples of the batch, what a checkpoint after it
    records of the data if one may be written, and what a user should know, in sentences."""

    table: torch.Tensor
    errors: tuple[UserError, ...]
    digest: int = 0
    position: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


class StreamProgress:
    """Stands between records for a sample that was read from a stream."""


_READ_ONE = StreamProgress()


class SampleLoader:
    """Loads the samples of one dataset in this process, or with `fetchers`. Requested steps must not go back
    by more than `ahead` + 1.

    `streams` reads the samples of streams, for every position of a batch. `rerecorder` records glue if the
    plan needs it. With `recorders`, processes that do this, `begin_batch` starts a recording and
    `take_finished_batches` returns the result. A sample that does not load, collate or fit the plan is left
    out and named; the data plane decides whether that ends the run.
    """

    def __init__(
        self,
        user: UserModel,
        records: RecordCodec,
        epochs: EpochOrder,
        fetchers: SampleWorkers | None = None,
        rerecorder: Rerecorder | None = None,
        recorders: WorkerPool | None = None,
        ahead: int = 1,
        streams: StreamBatches | None = None,
    ) -> None:
        self.user, self.codec, self.epochs, self.streams = user, records, epochs, streams
        self._fetchers, self.rerecorder, self._ahead = fetchers, rerecorder, ahead
        self.recorders = recorders
        self._batches_in_recording: dict[BatchRequest, dict[str, Any]] = {}
        self._items: dict[int, dict[str, Any]] = {}  # by number of the sample in the sequence of epochs

    def iter_records(self, ask: MetadataRequest) -> Iterator[SampleRecord | SkippedSample | StreamProgress]:
        """Iterate over the records asked for, so that a caller can do other work between samples."""
        self._items = {
            n: item
            for n, item in self._items.items()
            if n >= (ask.step - self._ahead - 1) * self.epochs.global_batch
        }
        if self._fetchers is not None:
            self._fetchers.request_ahead(
                [
                    self._sample_key(ask.step, p)
                    for p in ask.positions
                    if self._sequence_number(ask.step, p) not in self._items
                    and not self._is_streamed(ask.step, p)
                ]
            )
        if self.streams is not None:
            for _ in self.streams.read_batch(ask.step, keep_from=ask.step - self._ahead - 1):
                yield _READ_ONE
        for position in ask.positions:
            index = self._sample_id(ask.step, position)
            try:
                alone = self._collate_alone(ask.step, position)
                if self.rerecorder is not None:
                    alone = self.rerecorder.add_row_counts(alone)
                record = self.codec.make_record(index, alone)
            except LostProcess:
                raise
            except UserError as error:
                yield SkippedSample(index, error)
            else:
                yield record

    def pack_rows(
        self, ask: MetadataRequest, records: Sequence[SampleRecord | SkippedSample | StreamProgress]
    ) -> MetadataRows:
        """Make the answer to a MetadataRequest from all that `iter_records` has given."""
        own = [r for r in records if not isinstance(r, StreamProgress)]
        rows = MetadataRows(
            self.codec.pack_records(own),
            tuple(r.error for r in own if isinstance(r, SkippedSample) and r.error is not None),
        )
        if self.streams is None:
            return rows
        digest, notes = self.streams.digest_batch(ask.step), self.streams.take_notes()
        return rows._replace(digest=digest, notes=notes, position=self.streams.find_position(ask.step + 1))

    def load_batch(self, ask: BatchRequest) -> dict[str, Any]:
        """Return the batch asked for, with recorded glue if its section needs it."""
        batch = self._collate_batch(ask)
        if self.rerecorder is None or not ask.section:
            return batch
        return self.rerecorder.add_recorded_glue(batch, len(ask.positions), ask.section)

    def begin_batch(self, ask: BatchRequest) -> dict[str, Any] | None:
        """Return the batch asked for, or None if its glue is being recorded; `take_finished_batches`
        returns it then."""
        if self.recorders is None or self.rerecorder is None or not ask.section:
            return self.load_batch(ask)
        batch, samples = self._collate_batch(ask), len(ask.positions)
        ready = self.rerecorder.add_cached_glue(batch, samples, ask.section)
        if ready is None:
            self._batches_in_recording[ask] = batch
            self.recorders.submit_work(ask, batch, samples, ask.section)
        return ready

    def take_finished_batches(self) -> Iterator[tuple[BatchRequest, dict[str, Any] | Exception]]:
        """Iterate over the batches from `begin_batch` for which recordings have arrived; an exception in
        place of one that failed, and of all of them if a recorder has ended."""
        if self.recorders is None:
            return
        try:
            results = self.recorders.collect_results(timeout=0)
        except LostProcess as error:
            results = [(ask, error) for ask in self._batches_in_recording]
        for ask, answer in results:
            batch = self._batches_in_recording.pop(ask)
            if isinstance(answer, Exception) or self.rerecorder is None:
                yield ask, answer
            else:
                yield ask, self.rerecorder.cache_recording(batch, len(ask.positions), ask.section, *answer)

    def _collate_batch(self, ask: BatchRequest) -> dict[str, Any]:
        with shared_rng_restore():
            items = [self._load_item(ask.step, p) for p in ask.positions]
        batch = self.user.collate(items)
        if ask.widths:
            batch = pad_batch(batch, self.codec.plan.inputs, dict(ask.widths))
        return batch

    def _collate_alone(self, step: int, position: int) -> dict[str, Any]:
        """Return `collate([sample])`. Raises UserError that names the dataset index if the sample does not
        load or collate."""
        item = self._load_item(step, position)
        try:
            return self.user.collate([item])
        except UserError as error:
            name = self.user.sample_name(self._sample_id(step, position))
            raise UserError(
                f"{name} cannot be collated: {error.message}", error.where, error.remedy
            ) from error

    def _load_item(self, step: int, position: int) -> dict[str, Any]:
        """Return the sample at `position` of the step's global batch."""
        if self.streams is not None and self._is_streamed(step, position):
            return self.streams.load_item(step, position)
        number = self._sequence_number(step, position)
        if number not in self._items:
            key = self._sample_key(step, position)
            self._items[number] = (
                self._fetchers.wait_for_result(key)
                if self._fetchers
                else self.user.load_sample(key.index, self.epochs.seed, key.epoch)
            )
        return self._items[number]

    def _is_streamed(self, step: int, position: int) -> bool:
        return self.streams is not None and self.streams.is_streamed(step, position)

    def _sample_id(self, step: int, position: int) -> int:
        """Return the dataset index of a sample, or the number that stands for it."""
        if self.streams is not None and self._is_streamed(step, position):
            return self.streams.sample_id(step, position)
        return self.epochs.locate_sample(step, position)[1]

    def _sequence_number(self, step: int, position: int) -> int:
        return step * self.epochs.global_batch + position

    def _sample_key(self, step: int, position: int) -> SampleKey:
        return SampleKey(*self.epochs.locate_sample(step, position))
