"""Loading: which dataset samples make up a global batch, and their collated tensors.

Global batch k holds the samples kN .. (k+1)N-1 of an endless sequence of epochs; every epoch runs through the dataset once, in its
own order or in a permutation drawn from (seed, epoch). A sample is made with random numbers that belong to (seed, epoch, index), so
any rank may load it, as often as needed, and gets the same. Items are kept as long as their step may ask for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from secc.runtime.errors import UserError
from secc.runtime.metadata import Record, Records
from secc.runtime.seeding import item_seed
from secc.runtime.user_model import UserModel


class Share(NamedTuple):
    """Asks for the rows of metadata of the samples at positions `first` .. `last`-1 of the step's global batch."""

    step: int
    first: int
    last: int


class Collated(NamedTuple):
    """Asks for the samples at `positions` of the step's global batch as one batch on the CPU."""

    step: int
    positions: tuple[int, ...]


class Loader:
    """Loads samples of one dataset in this process. Steps must not go back by more than one."""

    def __init__(self, user: UserModel, records: Records, global_batch: int, seed: int, shuffle: bool) -> None:
        self.user, self.records, self.global_batch = user, records, global_batch
        self.seed, self.shuffle = seed, shuffle
        self.length = len(user.dataset())
        self._items: dict[int, dict[str, Any]] = {}  # by number in the endless sequence
        self._permutation: tuple[int, list[int]] = (-1, [])

    def share(self, ask: Share) -> Iterator[Record]:
        """The records asked for, one at a time, so that a caller can do other work in between."""
        self._items = {n: item for n, item in self._items.items() if n >= (ask.step - 1) * self.global_batch}
        for position in range(ask.first, ask.last):
            index = self.sample(ask.step * self.global_batch + position)[1]
            item = self.item(ask.step, position)
            try:
                alone = self.user.collate([item])
            except UserError as error:
                raise UserError(f"dataset()[{index}] cannot be collated: {error.message}", error.where, error.remedy) from error
            yield self.records.of(index, alone)

    def collated(self, ask: Collated) -> dict[str, Any]:
        """The batch asked for, at its own widths."""
        return self.user.collate([self.item(ask.step, p) for p in ask.positions])

    def item(self, step: int, position: int) -> dict[str, Any]:
        """The sample at `position` of the step's global batch. Raises UserError, naming its dataset index, where it does not load."""
        number = step * self.global_batch + position
        if number not in self._items:
            epoch, index = self.sample(number)
            self._items[number] = self.user.sample(index, self.seed, epoch)
        return self._items[number]

    def sample(self, number: int) -> tuple[int, int]:
        """(epoch, dataset index) of a number in the endless sequence."""
        epoch, index = divmod(number, self.length)
        return epoch, self._order(epoch)[index] if self.shuffle else index

    def _order(self, epoch: int) -> list[int]:
        if self._permutation[0] != epoch:
            generator = torch.Generator().manual_seed(item_seed(self.seed, epoch, -1))
            self._permutation = epoch, torch.randperm(self.length, generator=generator).tolist()
        return self._permutation[1]
