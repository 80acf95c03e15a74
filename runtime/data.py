"""The data plane of a rank: what all ranks know of the next global batch, and this rank's own micro-batches.

Every rank loads its share of the batch, a run of positions, and finds each sample's pattern, sizes and leaves; one all-gather of
integers then gives all ranks the same `GlobalBatch`, from which they compute the same schedule. Only then is it clear which samples a
rank needs: `batch` loads and collates them. With a worker, the next step's share loads while this step trains.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from secc.runtime.loader import Collated, Loader, Share
from secc.runtime.metadata import Leaf, Records, leaves_of
from secc.runtime.plan import Plan
from secc.runtime.program import SampleMeta
from secc.runtime.sizes import combine, pad_batch
from secc.runtime.user_model import UserModel
from secc.runtime.worker import Background, Inline


@dataclass(frozen=True)
class GlobalBatch:
    """What every rank knows of a global batch: its samples in order, the sums of their leaves, its symbols and its labels that count."""

    step: int
    samples: tuple[SampleMeta, ...]
    leaves: dict[str, float]
    sizes: dict[str, int]
    tokens: int

    @property
    def pattern(self) -> frozenset[str]:
        """The optional inputs that the whole batch has: those that any of its samples has."""
        return frozenset[str]().union(*(s.pattern for s in self.samples))


class DataPlane:
    """Global batches in order, from step `start` on, for one rank.

    `leaves` are the plan's leaf functions. With `workers=1` samples load in a background process, which is forked here: make the data
    plane before process groups, threads and GPU contexts. `device` is where `batch` puts tensors.
    """

    def __init__(
        self,
        user: UserModel,
        plan: Plan,
        rank: int,
        world_size: int,
        seed: int = 0,
        *,
        leaves: Mapping[str, Leaf],
        shuffle: bool = False,
        workers: int = 0,
        device: torch.device | str = "cpu",
        start: int = 0,
    ) -> None:
        if workers not in (0, 1):
            raise ValueError(f"a rank has at most one loading process, not {workers}")
        user.use_inputs(plan.inputs)
        self.plan, self.rank, self.world_size, self.device = plan, rank, world_size, torch.device(device)
        self._records = Records(plan, leaves)
        loader = Loader(user, self._records, plan.global_batch, seed, shuffle)
        self._source = Background(loader) if workers else Inline(loader)
        self._step, self._widths = start - 1, dict[str, int]()
        self._source.request([self._share(start)])

    def next(self, group: dist.ProcessGroup | None = None) -> GlobalBatch:
        """The next global batch, the same on every rank. Collective over `group` (default: all ranks) when there are several ranks.

        Raises UserError, naming the dataset index and the cause, where a sample of this rank's share does not load.
        """
        self._step += 1
        rows = self._source.result(self._share(self._step))
        self._source.request([self._share(self._step + 1)])
        records = self._records.unpack(self._gather(rows, group) if self.world_size > 1 else rows)
        sizes = combine([r.meta.sizes for r in records], self.plan.symbols)
        if self.plan.widths == "global":
            self._widths = {s.name: sizes[s.name] for s in self.plan.symbols if s.kind == "width"}
        columns = zip(*(self._padded_leaves(group) if self._widths else [r.leaves for r in records]), strict=True)
        # fsum rounds once, so the sums do not depend on how the samples are spread over ranks.
        leaves = {name: math.fsum(column) for name, column in zip(self._records.leaves, columns, strict=False)}
        return GlobalBatch(self._step, tuple(r.meta for r in records), leaves, sizes, sum(r.tokens for r in records))

    def _padded_leaves(self, group: dist.ProcessGroup | None) -> list[tuple[float, ...]]:
        """The leaves of each rank's share at the global batch's widths, where padded positions may count."""
        share = Collated(self._step, tuple(range(*self._bounds(self.rank))))
        if not self._records.leaves or not share.positions:
            mine: tuple[float, ...] = (0.0,) * len(self._records.leaves)
        else:
            mine = leaves_of(self._records.leaves, pad_batch(self._source.result(share), self.plan.inputs, self._widths))
        if self.world_size == 1 or not mine:
            return [mine]
        device = self.device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        parts = [torch.empty(len(mine), dtype=torch.float64, device=device) for _ in range(self.world_size)]
        dist.all_gather(parts, torch.tensor(mine, dtype=torch.float64, device=device), group)
        return [tuple(part.tolist()) for part in parts]

    def prepare(self, batches: Iterable[Sequence[int]]) -> None:
        """Announce the batches of this step in the order in which they will be asked for, so that a worker can run ahead."""
        self._source.request([Collated(self._step, tuple(positions)) for positions in batches])

    def batch(self, positions: Sequence[int]) -> dict[str, Any]:
        """The samples at `positions` of the current global batch, collated in this order, on the device, padded as the plan wants."""
        batch = self._source.result(Collated(self._step, tuple(positions)))
        if self._widths:
            batch = pad_batch(batch, self.plan.inputs, self._widths)
        return {key: v.to(self.device, non_blocking=True) if isinstance(v, torch.Tensor) else v for key, v in batch.items()}

    def close(self) -> None:
        """End the worker."""
        self._source.close()

    def __enter__(self) -> DataPlane:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _share(self, step: int) -> Share:
        return Share(step, *self._bounds(self.rank))

    def _bounds(self, rank: int) -> tuple[int, int]:
        """The positions that a rank loads: from the first up to, not including, the last."""
        n = self.plan.global_batch
        return rank * n // self.world_size, (rank + 1) * n // self.world_size

    def _gather(self, share: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """All ranks' rows in the order of the batch, from this rank's."""
        bounds = [self._bounds(r) for r in range(self.world_size)]
        device = self.device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        mine = share.new_zeros(max(last - first for first, last in bounds), share.shape[1])
        mine[: len(share)] = share
        parts = [torch.empty_like(mine, device=device) for _ in bounds]
        dist.all_gather(parts, mine.to(device), group)
        rows = [part[: last - first] for part, (first, last) in zip(parts, bounds, strict=True)]
        return torch.cat(rows).cpu()
