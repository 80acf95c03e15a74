"""The data plane of a rank: what all ranks know of the next global batch, and this rank's own micro-batches.

Every rank loads a share of the batch and finds each sample's pattern, sizes and leaves; one all-gather of
integers then gives all ranks the same `GlobalBatch`, from which they compute the same schedule. Where every
rank has loaded its share by the end of the step before, the integers travel with that step's sums, which
saves a collective. Only then is it clear which samples a rank needs: `batch` loads and collates them. With a
worker, the next step's share loads while this step trains. A share is a run of positions; where the user's
`sizes(i)` tells sizes ahead, it holds samples that the rank will train itself, so that few samples are loaded
twice.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from secc.runtime.data.declared_sizes import Declared, users
from secc.runtime.data.epoch_order import Epochs
from secc.runtime.data.loader_process import AHEAD, RECORDED_AHEAD, Ask, Background, Inline
from secc.runtime.data.sample_loader import Collated, Loader, Rows, Share
from secc.runtime.data.sample_metadata import Leaf, Record, Records, Skipped, leaves_of
from secc.runtime.data.sample_workers import Fetchers
from secc.runtime.errors import UserError
from secc.runtime.host.fork_pool import Pool
from secc.runtime.model.user_file import UserModel
from secc.runtime.parameters.sharded_optimizer import all_gather
from secc.runtime.plan.batch_sizes import combine
from secc.runtime.plan.schema import Plan, is_label
from secc.runtime.plan.step_program import SampleMeta, Schedule
from secc.runtime.rerecording.rerecorder import Rerecorder, Spent

Order = Callable[[Sequence[SampleMeta]], Schedule]
_REMEMBERED = 3  # steps: recordings are made up to two before their micro-batch is trained


@dataclass(frozen=True)
class GlobalBatch:
    """What every rank knows of a global batch: its samples in order, the sums of their leaves, its symbols
    and its labels that count.

    `skipped` are the dataset indices of samples that would be in it, but did not load; `kept` are the
    positions of the others, and `widths` what micro-batches are padded to.
    """

    step: int
    samples: tuple[SampleMeta, ...]
    leaves: dict[str, float]
    sizes: dict[str, int]
    tokens: int
    skipped: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    widths: tuple[tuple[str, int], ...] = ()

    def collated(self, positions: Sequence[int], section: str = "") -> Collated:
        """Asks for a micro-batch of a section: positions among the samples that were kept are not those of
        the sequence."""
        return Collated(self.step, tuple(self.kept[p] for p in positions), self.widths, section)

    @property
    def pattern(self) -> frozenset[str]:
        """The optional inputs that the whole batch has: those that any of its samples has."""
        return frozenset[str]().union(*(s.pattern for s in self.samples))


class DataPlane:
    """Global batches in order, from step `start` on, for one rank.

    `leaves` are the plan's leaf functions. `epochs` (None: no end), `shuffle` and `seed` say which samples
    make up a batch; with `skip_bad` those that do not load are left out of it, and named on stderr. `order`
    makes the schedule of samples, where their sizes are known ahead. With `workers=1` samples load in a
    background process, with more in so many and collate in one; they are forked here: make the data plane
    before process groups, threads and GPU contexts. `device` is where `batch` puts tensors. Up to `ahead`
    global batches are asked for beyond the one whose micro-batches are. `rerecorder` records glue, where the
    plan has some that values decide: where samples are collated, or with a worker in so many `recorders`,
    processes beside it.
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
        epochs: int | None = None,
        skip_bad: bool = False,
        workers: int = 0,
        order: Order | None = None,
        device: torch.device | str = "cpu",
        start: int = 0,
        ahead: int = 1,
        rerecorder: Rerecorder | None = None,
        recorders: int = 0,
    ) -> None:
        user.use_inputs(plan.inputs)
        self.plan, self.rank, self.world_size, self.device = plan, rank, world_size, torch.device(device)
        self.epochs = Epochs(len(user.dataset()), plan.global_batch, seed, shuffle, epochs)
        self._records = Records(plan, leaves)
        self._shares = _Shares(self.epochs, world_size, user, plan, order)
        fetchers = Fetchers(user, seed, workers) if workers > 1 else None
        pool = (
            Pool(rerecorder.record, recorders, "secc-recorder", held=1)
            if workers and recorders and rerecorder is not None
            else None
        )
        loader = Loader(user, self._records, self.epochs, skip_bad, fetchers, rerecorder, pool, ahead)
        requests, pools = (
            AHEAD if rerecorder is None else RECORDED_AHEAD,
            [p for p in (fetchers, pool) if p is not None],
        )
        self._source = Background(loader, pools, requests, ahead) if workers else Inline(loader)
        self._step = start - 1
        self._latest: GlobalBatch | None = None
        self._loaded: Rows | None = None  # of the next step's share
        self._found: torch.Tensor | None = (
            None  # the next step's rows of all ranks, in the order of the batch
        )
        self._waits: list[tuple[int, Spent]] = []
        self._source.request([self._share(start)])

    def next(self, group: dist.ProcessGroup | None = None) -> GlobalBatch:
        """The next global batch, the same on every rank. Collective over `group` (default: all ranks) when
        there are several ranks.

        Raises UserError, naming the dataset index and the cause, where a sample of this rank's share does not
        load.
        """
        self._step += 1
        self._waits = [(step, spent) for step, spent in self._waits if step >= self._step - _REMEMBERED]
        rows: Rows = self._loaded or self._timed(self._source.result, self._share(self._step))
        table, self._loaded, self._found = self._found, None, None
        if self.epochs.count(self._step + 1):
            self._source.request([self._share(self._step + 1)])
        for line in rows.skipped:
            sys.stderr.write(f"step {self._step + 1}: a sample is left out: {line}\n")
        if table is None:
            table = (
                self._gather(rows.table, group)
                if self.world_size > 1
                else self._in_order(rows.table[None], self._step)
            )
        found = self._records.unpack(table)
        kept, records, skipped = _split(found)
        if not records:
            raise UserError(
                f"none of the {len(found)} samples of step {self._step + 1} loads",
                remedy="run without --skip-bad-samples",
            )
        self._shares.check(records)
        self._latest = self._batch(records, kept, skipped, group)
        return self._latest

    def _batch(
        self,
        records: Sequence[Record],
        kept: tuple[int, ...],
        skipped: tuple[int, ...],
        group: dist.ProcessGroup | None,
    ) -> GlobalBatch:
        sizes = combine([r.meta.sizes for r in records], self.plan.symbols)
        padded = self.plan.widths == "global"
        widths = tuple((s.name, sizes[s.name]) for s in self.plan.symbols if s.is_padded) if padded else ()
        wider = any(
            r.meta.sizes[name] != width for r in records for name, width in widths
        )  # than some sample alone
        columns = zip(
            *(self._padded_leaves(kept, widths, group) if wider else [r.leaves for r in records]), strict=True
        )
        # fsum rounds once, so the sums do not depend on how the samples are spread over ranks.
        leaves = {
            name: math.fsum(column) for name, column in zip(self._records.leaves, columns, strict=False)
        }
        tokens = sum(r.tokens for r in records)
        return GlobalBatch(
            self._step, tuple(r.meta for r in records), leaves, sizes, tokens, skipped, kept, widths
        )

    def _padded_leaves(
        self, kept: tuple[int, ...], widths: tuple[tuple[str, int], ...], group: dist.ProcessGroup | None
    ) -> list[tuple[float, ...]]:
        """The leaves of each rank's share at the global batch's widths, where padded positions may count."""
        positions = tuple(p for p in self._share(self._step).positions if p in set(kept))
        share = Collated(self._step, positions, widths)
        if not self._records.leaves or not share.positions:
            mine: tuple[float, ...] = (0.0,) * len(self._records.leaves)
        else:
            mine = leaves_of(self._records.leaves, self._timed(self._source.result, share))
        if self.world_size == 1 or not mine:
            return [mine]
        device = self.device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        parts = [torch.empty(len(mine), dtype=torch.float64, device=device) for _ in range(self.world_size)]
        dist.all_gather(parts, torch.tensor(mine, dtype=torch.float64, device=device), group)
        return [tuple(part.tolist()) for part in parts]

    def prepare(self, batches: Iterable[tuple[Sequence[int], str]], of: GlobalBatch | None = None) -> None:
        """Announce micro-batches of a global batch (default: the latest), each with its section, in the order
        in which they will be asked for, so that a worker can run ahead."""
        self._source.request([self._of(of).collated(positions, section) for positions, section in batches])

    def batch(
        self, positions: Sequence[int], of: GlobalBatch | None = None, section: str = ""
    ) -> dict[str, Any]:
        """The samples at `positions` of a global batch (default: the latest), collated in this order, on the
        device, padded as the plan wants, with the recorded glue that a section needs."""
        batch = self._timed(self._source.result, self._of(of).collated(positions, section))
        return {
            key: v.to(self.device, non_blocking=True) if isinstance(v, torch.Tensor) else v
            for key, v in batch.items()
        }

    @property
    def waits(self) -> list[Spent]:
        """When this rank waited for the loader, in the last few steps."""
        return [spent for _, spent in self._waits]

    def _timed(self, get: Callable[[Any], Any], ask: Ask) -> Any:
        """What the loader gives; the time counts as waited for it."""
        start = time.monotonic_ns()
        found = get(ask)
        self._waits.append((self._step, Spent(start, time.monotonic_ns())))
        return found

    def _of(self, given: GlobalBatch | None) -> GlobalBatch:
        found = given or self._latest
        assert found is not None, "next() comes first"
        return found

    def close(self) -> None:
        """End the worker."""
        self._source.close()

    def __enter__(self) -> DataPlane:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _share(self, step: int) -> Share:
        return Share(step, self._shares.of(step)[self.rank])

    def exchange(
        self, values: torch.Tensor, steps: int, group: dist.ProcessGroup | None = None
    ) -> torch.Tensor:
        """Every rank's `values` (float64 [n], on this rank's device) as [ranks, n]. Collective over `group`.

        The rows of the next step, if it is before `steps`, travel along; they count where every rank has them
        already.
        """
        if self.world_size == 1:
            return values[None]
        follows = self._found is None and self._step + 1 < steps and self.epochs.count(self._step + 1) > 0
        if follows and self._loaded is None:
            self._loaded = self._timed(self._source.ready, self._share(self._step + 1))
        mine = [values.view(torch.int64)]
        if follows:
            table = self._padded(self._loaded and self._loaded.table, self._step + 1)
            mine.append(
                torch.cat([torch.tensor([self._loaded is not None]), table.view(-1)]).to(values.device)
            )
        found = self._all_gather(torch.cat(mine), group)
        told, rows = found[:, : len(values)].view(torch.float64), found[:, len(values) :].cpu()
        if follows and bool(rows[:, 0].all()):
            self._found = self._in_order(
                rows[:, 1:].reshape(self.world_size, -1, self._records.width), self._step + 1
            )
        return told

    def _gather(self, mine: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """All ranks' rows of this step in the order of the batch, from this rank's."""
        device = self.device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        return self._in_order(
            self._all_gather(self._padded(mine, self._step).to(device), group).cpu(), self._step
        )

    def _padded(self, mine: torch.Tensor | None, step: int) -> torch.Tensor:
        """This rank's rows, as many as the longest share of the step has."""
        padded = torch.zeros(max(map(len, self._shares.of(step))), self._records.width, dtype=torch.int64)
        if mine is not None:
            padded[: len(mine)] = mine
        return padded

    def _all_gather(self, mine: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Every rank's tensor, behind each other along a new first dim."""
        found = mine.new_empty(self.world_size, *mine.shape)
        all_gather(found.view(-1), mine.view(-1), group).wait()
        return found

    def _in_order(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """The rows [ranks, longest share, width] of the shares of a step by position [samples, width]."""
        shares = self._shares.of(step)
        longest, positions = rows.shape[1], [p for share in shares for p in share]
        places = [r * longest + k for r, share in enumerate(shares) for k in range(len(share))]
        return rows.flatten(0, 1)[[places[k] for k in sorted(range(len(places)), key=positions.__getitem__)]]


class _Shares:
    """Which positions each rank loads: known on all ranks without a message."""

    def __init__(
        self, epochs: Epochs, world_size: int, user: UserModel, plan: Plan, order: Order | None
    ) -> None:
        self.epochs, self.world_size, self._order = epochs, world_size, order
        said = user.has("sizes") and order is not None and not any(is_label(s.key) for s in plan.symbols)
        self.declared = Declared(user, plan.symbols, plan.inputs) if said else None
        self._of: dict[int, list[tuple[int, ...]]] = {}
        self._said: dict[int, SampleMeta] = {}  # by dataset index

    def of(self, step: int) -> list[tuple[int, ...]]:
        """Each rank's positions of a step's batch. Raises UserError for what `sizes` says of a sample."""
        if step not in self._of:
            self._of = {s: shares for s, shares in self._of.items() if s >= step - 1} | {
                step: self._made(step)
            }
        return self._of[step]

    def check(self, records: Sequence[Record]) -> None:
        """Raises UserError if a sample that was loaded is not as `sizes` said."""
        if self.declared is not None:
            for record in records:
                self.declared.check(record.meta, self._said.pop(record.meta.id, record.meta))

    def _made(self, step: int) -> list[tuple[int, ...]]:
        count = self.epochs.count(step)
        if self.declared is None or self._order is None or not count:
            return [
                tuple(range(r * count // self.world_size, (r + 1) * count // self.world_size))
                for r in range(self.world_size)
            ]
        said = [self.declared.meta(i) for i in self.epochs.indices(step)]
        self._said |= {s.id: s for s in said}
        return users(self._order(said), count)


def _split(found: Sequence[Record | Skipped]) -> tuple[tuple[int, ...], list[Record], tuple[int, ...]]:
    """The positions and records of the samples that are there, and the dataset indices of those that were
    skipped."""
    kept = tuple(p for p, r in enumerate(found) if isinstance(r, Record))
    return (
        kept,
        [r for r in found if isinstance(r, Record)],
        tuple(r.index for r in found if isinstance(r, Skipped)),
    )
