"""Which samples a global batch holds if they come from streams, or from several sources with weights.

The sequence of a mixture is made of blocks. A block has a fixed number of samples of each source, its parts,
in an order drawn from (seed, block). So shares are exact in every block, the order is the same on every
machine, and how many samples of a source come before a place follows from the place. Each source goes
through epochs of its own and begins again when it ends.

A checkpoint records how many samples of each source were taken. A resumed run with other weights, or with
further sources, starts its blocks there and goes on with each source where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from secc.runtime.data.epoch_order import EpochOrder
from secc.runtime.errors import UserError
from secc.runtime.model.item_seeds import derive_item_seed
from secc.runtime.model.sample_sources import SampleSource
from secc.runtime.model.user_file import UserModel

_KEPT_BLOCKS = 4


@dataclass(frozen=True)
class MixtureOrigin:
    """Where the blocks of a mixture start: at sample `number` of the run, after `taken` samples of each
    source by name."""

    number: int = 0
    taken: Mapping[str, int] = field(default_factory=dict[str, int])


class MixedOrder(EpochOrder):
    """The sequence of samples of `sources` in batches of `global_batch`. `epochs`: for a single stream with
    a length, None for an endless sequence."""

    def __init__(
        self,
        sources: Sequence[SampleSource],
        global_batch: int,
        seed: int = 0,
        shuffle: bool = False,
        epochs: int | None = None,
        origin: MixtureOrigin | None = None,
    ) -> None:
        self.sources, self.origin = tuple(sources), origin or MixtureOrigin()
        super().__init__(_epoch_length(sources, epochs) or 0, global_batch, seed, shuffle, epochs)
        self._parts = [s.parts for s in sources]
        self._taken = [self.origin.taken.get(s.name, 0) for s in sources]
        self._numbered = [
            EpochOrder(s.length, 1, derive_item_seed(seed, -3, number), shuffle) if s.length else None
            for number, s in enumerate(sources)
        ]
        self._blocks: dict[int, list[tuple[int, int]]] = {}

    @property
    def has_streams(self) -> bool:
        """Whether some source is a stream."""
        return any(order is None for order in self._numbered)

    def source_sample(self, step: int, position: int) -> tuple[int, int]:
        """Returns the source of the sample at `position` of the step's batch, and its number among that
        source's samples."""
        block, place = divmod(step * self.global_batch + position - self.origin.number, sum(self._parts))
        source, rank = self._block(block)[place]
        return source, self._taken[source] + block * self._parts[source] + rank

    def locate_sample(self, step: int, position: int) -> tuple[int, int]:
        """Returns (epoch, id) of the sample at `position` of the step's batch, which is of a map-style
        source."""
        source, number = self.source_sample(step, position)
        order = self._numbered[source]
        assert order is not None
        epoch, index = order.locate_sample(number, 0)
        return epoch, self.sources[source].first_id + index

    def taken_before(self, step: int) -> list[int]:
        """Returns how many samples of each source the batches before `step` hold; earlier runs count."""
        block, place = divmod(step * self.global_batch - self.origin.number, sum(self._parts))
        begun = [source for source, _ in self._block(block)[:place]]
        return [
            taken + block * parts + begun.count(source)
            for source, (taken, parts) in enumerate(zip(self._taken, self._parts, strict=True))
        ]

    def _block(self, block: int) -> list[tuple[int, int]]:
        """Returns (source, number of earlier samples of it in the block) by place in the block."""
        if block not in self._blocks:
            while len(self._blocks) >= _KEPT_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            generator = torch.Generator().manual_seed(derive_item_seed(self.seed, -2, block))
            drawn = torch.randperm(sum(self._parts), generator=generator).tolist()
            ends = list(accumulate(self._parts))
            counts = [0] * len(self._parts)
            places: list[tuple[int, int]] = []
            for number in drawn:
                source = next(k for k, end in enumerate(ends) if number < end)
                places.append((source, counts[source]))
                counts[source] += 1
            self._blocks[block] = places
        return self._blocks[block]


def _epoch_length(sources: Sequence[SampleSource], epochs: int | None) -> int | None:
    """Returns the samples of an epoch. Raises UserError if `epochs` are asked for and it is not known."""
    if epochs is None:
        return None
    remedy = "give --steps N"
    if len(sources) > 1:
        message = "--epochs: a mixture has no epochs of its own, since each source begins again when it ends"
        raise UserError(message, sources[0].place, remedy)
    length = sources[0].length or sources[0].declared_length
    if length is None:
        message = f"--epochs: the number of samples of {sources[0].expression}, a stream, is not known"
        raise UserError(message, sources[0].place, f"{remedy}, or give the stream a __len__")
    return length


def make_sample_order(
    user: UserModel,
    global_batch: int,
    seed: int = 0,
    shuffle: bool = False,
    epochs: int | None = None,
    resumed: Mapping[str, Any] | None = None,
) -> EpochOrder:
    """Returns the order of the samples of a model file. `resumed`: what the checkpoint to resume from
    recorded of the data. Raises UserError for options that do not fit the data."""
    sources = user.sources()
    if (length := user.sample_count) is not None and not sources[0].name:
        return EpochOrder(length, global_batch, seed, shuffle, epochs)
    if shuffle and all(s.is_stream for s in sources):
        raise UserError(
            f"--shuffle: the samples of {sources[0].expression}, a stream, have no numbers",
            sources[0].place,
            "shuffle in the stream, with a seed of its own",
        )
    return MixedOrder(sources, global_batch, seed, shuffle, epochs, _find_origin(sources, resumed))


def _find_origin(sources: Sequence[SampleSource], resumed: Mapping[str, Any] | None) -> MixtureOrigin | None:
    """Returns where blocks start: as in the run that is resumed, or at its end if the mixture has
    changed."""
    if resumed is None:
        return None
    entries: Mapping[str, Mapping[str, Any]] = resumed["sources"]
    if {name: e["parts"] for name, e in entries.items()} == {s.name: s.parts for s in sources}:
        origin = resumed["origin"]
        return MixtureOrigin(origin["number"], origin["taken"])
    return MixtureOrigin(resumed["samples"], {name: int(e["taken"]) for name, e in entries.items()})
