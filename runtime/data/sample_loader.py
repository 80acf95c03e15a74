"""Loading: the samples of global batches, their collated tensors, and what all ranks must know of them.

A sample is made with random numbers that belong to (seed, epoch, index), so any rank may load it, as often as
needed, and gets the same. Items are kept as long as their step may ask for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from secc.runtime.data.epoch_order import Epochs
from secc.runtime.data.sample_metadata import Record, Records, Skipped
from secc.runtime.data.sample_workers import Fetchers, ItemKey
from secc.runtime.errors import UserError
from secc.runtime.host.fork_pool import Pool
from secc.runtime.model.item_seeds import borrowed
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.batch_sizes import pad_batch
from secc.runtime.rerecording.rerecorder import Rerecorder


class Share(NamedTuple):
    """Asks for the rows of metadata of the samples at `positions` of the step's global batch."""

    step: int
    positions: tuple[int, ...]


class Collated(NamedTuple):
    """Asks for the samples at `positions` of the step's global batch as one batch on the CPU, padded to
    `widths` (names and sizes).

    `section` will run it, and may need its glue recorded; "" for none.
    """

    step: int
    positions: tuple[int, ...]
    widths: tuple[tuple[str, int], ...] = ()
    section: str = ""


class Rows(NamedTuple):
    """Answers a Share: `table` as `Records.pack` makes it, and one line for each sample that was skipped."""

    table: torch.Tensor
    skipped: tuple[str, ...]


class Loader:
    """Loads samples of one dataset in this process, or from `fetchers`. Steps must not go back by more than
    `ahead` and one.

    `rerecorder` records glue where the plan wants it; with `recorders`, processes that do it, `begin` and
    `finished` let them.

    With `skip_bad` a sample that does not load, or cannot be collated, is left out of its global batch
    instead of ending the run.
    """

    def __init__(
        self,
        user: UserModel,
        records: Records,
        epochs: Epochs,
        skip_bad: bool = False,
        fetchers: Fetchers | None = None,
        rerecorder: Rerecorder | None = None,
        recorders: Pool | None = None,
        ahead: int = 1,
    ) -> None:
        self.user, self.records, self.epochs, self.skip_bad = user, records, epochs, skip_bad
        self._fetchers, self.rerecorder, self._ahead = fetchers, rerecorder, ahead
        self.recorders = recorders
        self._recorded: dict[Collated, dict[str, Any]] = {}  # batches that the recorders have
        self._items: dict[int, dict[str, Any]] = {}  # by number in the sequence

    def share(self, ask: Share) -> Iterator[Record | Skipped]:
        """The records asked for, one at a time, so that a caller can do other work in between."""
        self._items = {
            n: item
            for n, item in self._items.items()
            if n >= (ask.step - self._ahead - 1) * self.epochs.global_batch
        }
        if self._fetchers is not None:
            self._fetchers.request(
                [
                    self._key(ask.step, p)
                    for p in ask.positions
                    if self._number(ask.step, p) not in self._items
                ]
            )
        for position in ask.positions:
            index = self.epochs.sample(ask.step, position)[1]
            try:
                alone = self._alone(ask.step, position)
            except UserError as error:
                if not self.skip_bad:
                    raise
                yield Skipped(index, f"{error.where}: {error.message}" if error.where else error.message)
                continue
            yield self.records.of(
                index, self.rerecorder.with_rows(alone) if self.rerecorder is not None else alone
            )

    def rows(self, records: Sequence[Record | Skipped]) -> Rows:
        """The answer to a Share, from all its records."""
        return Rows(self.records.pack(records), tuple(r.reason for r in records if isinstance(r, Skipped)))

    def collated(self, ask: Collated) -> dict[str, Any]:
        """The batch asked for."""
        batch = self._batch(ask)
        if self.rerecorder is None or not ask.section:
            return batch
        return self.rerecorder.with_glue(batch, len(ask.positions), ask.section)

    def begin(self, ask: Collated) -> dict[str, Any] | None:
        """The batch asked for, or None where `finished` will give it."""
        if self.recorders is None or self.rerecorder is None or not ask.section:
            return self.collated(ask)
        batch, samples = self._batch(ask), len(ask.positions)
        found = self.rerecorder.kept_glue(batch, samples, ask.section)
        if found is None:
            self._recorded[ask] = batch
            self.recorders.give(ask, batch, samples, ask.section)
        return found

    def finished(self) -> Iterator[tuple[Collated, dict[str, Any] | Exception]]:
        """The batches that were begun and whose recordings are there now."""
        for ask, answer in self.recorders.take(timeout=0) if self.recorders is not None else ():
            batch = self._recorded.pop(ask)
            if isinstance(answer, Exception) or self.rerecorder is None:
                yield ask, answer
            else:
                yield ask, self.rerecorder.keep(batch, len(ask.positions), ask.section, *answer)

    def _batch(self, ask: Collated) -> dict[str, Any]:
        with borrowed():
            items = [self._item(ask.step, p) for p in ask.positions]
        batch = self.user.collate(items)
        if ask.widths:
            batch = pad_batch(batch, self.records.plan.inputs, dict(ask.widths))
        return batch

    def _alone(self, step: int, position: int) -> dict[str, Any]:
        """`collate([sample])`. Raises UserError, naming the dataset index, where the sample does not load or
        cannot be collated."""
        item = self._item(step, position)
        try:
            return self.user.collate([item])
        except UserError as error:
            index = self.epochs.sample(step, position)[1]
            raise UserError(
                f"dataset()[{index}] cannot be collated: {error.message}", error.where, error.remedy
            ) from error

    def _item(self, step: int, position: int) -> dict[str, Any]:
        """The sample at `position` of the step's global batch."""
        number = self._number(step, position)
        if number not in self._items:
            key = self._key(step, position)
            self._items[number] = (
                self._fetchers.result(key)
                if self._fetchers
                else self.user.sample(key.index, self.epochs.seed, key.epoch)
            )
        return self._items[number]

    def _number(self, step: int, position: int) -> int:
        return step * self.epochs.global_batch + position

    def _key(self, step: int, position: int) -> ItemKey:
        return ItemKey(*self.epochs.sample(step, position))
