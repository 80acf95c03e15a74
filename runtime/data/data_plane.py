"""The data plane of a rank: what all ranks know of the next global batch, and this rank's own micro-batches.

Every rank loads a share of the batch and finds each sample's pattern, sizes and summands of batch-wide sums.
One all-gather of integers then gives all ranks the same `GlobalBatch`, from which they compute the same
schedule. If every rank has loaded its share by the end of the previous step, the integers travel with that
step's gradient norms instead, which saves a collective.

Only then is it clear which samples a rank trains: `load_micro_batch` loads and collates them. With a worker
process, the next step's share loads while this step trains. A share is a range of positions; if the user's
`sizes(i)` gives sizes ahead, it is a set of samples that the rank will train itself, so that few samples are
loaded twice.

Samples of streams are read by every rank (`stream_batches`), and digests of what the ranks have read are
compared before a step.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from secc.runtime.data.declared_sizes import DeclaredSizes, positions_by_rank
from secc.runtime.data.drawn_sums import DrawnSums
from secc.runtime.data.epoch_order import EpochOrder
from secc.runtime.data.loader_process import (
    MAX_REQUESTS,
    MAX_REQUESTS_WITH_RECORDING,
    InlineLoader,
    LoaderProcess,
    LoaderRequest,
)
from secc.runtime.data.mixed_order import MixedOrder, make_sample_order
from secc.runtime.data.sample_loader import BatchRequest, MetadataRequest, MetadataRows, SampleLoader
from secc.runtime.data.sample_metadata import (
    BatchSumFunction,
    PlacedRows,
    RecordCodec,
    SampleRecord,
    SkippedSample,
    compute_batch_sums,
)
from secc.runtime.data.sample_workers import SampleWorkers
from secc.runtime.data.stream_batches import StreamBatches
from secc.runtime.errors import UserError, printable_text
from secc.runtime.host.fork_pool import WorkerPool
from secc.runtime.model.stream_reader import StreamFailure
from secc.runtime.model.user_file import UserModel
from secc.runtime.parameters.sharded_optimizer import start_all_gather
from secc.runtime.plan.batch_sizes import combine_sizes
from secc.runtime.plan.schema import Plan, is_tensor_label
from secc.runtime.plan.step_program import SampleMeta, Schedule
from secc.runtime.rerecording.rerecorder import Rerecorder, TimeSpan

ScheduleFunction = Callable[[Sequence[SampleMeta]], Schedule]
_WAIT_HISTORY_STEPS = 3  # recordings are made up to two steps before their micro-batch is trained


@dataclass(frozen=True)
class GlobalBatch:
    """What every rank knows of a global batch.

    samples: metadata in the order of the batch. batch_sums: batch-wide sums that coefficients of the loss
    need. sizes: symbols of the whole batch. tokens: labels that count. skipped_indices: dataset indices of
    samples that did not load and are left out. kept_positions: positions, in the sequence of epochs, of the
    samples that are kept. widths: (symbol, size) that all micro-batches are padded to.
    """

    step: int
    samples: tuple[SampleMeta, ...]
    batch_sums: dict[str, float]
    sizes: dict[str, int]
    tokens: int
    skipped_indices: tuple[int, ...] = ()
    kept_positions: tuple[int, ...] = ()
    widths: tuple[tuple[str, int], ...] = ()

    def batch_request(self, positions: Sequence[int], section: str = "") -> BatchRequest:
        """Return the request for a micro-batch of a section. `positions` count kept samples only; the
        request counts all."""
        return BatchRequest(self.step, tuple(self.kept_positions[p] for p in positions), self.widths, section)

    @property
    def pattern(self) -> frozenset[str]:
        """Optional inputs that at least one sample of the batch has."""
        return frozenset[str]().union(*(s.pattern for s in self.samples))


class BadSampleError(UserError):
    """Samples of a global batch do not load. Raised on all ranks at the same point, so that they can save
    first; a rank that did not try to load them leaves the message to others."""

    def __init__(self, errors: Sequence[UserError], indices: Sequence[int]) -> None:
        first = errors[0] if errors else UserError(f"samples {list(indices)} do not load")
        remedy = first.remedy or "correct the dataset"
        if not isinstance(first, StreamFailure):
            remedy += ", or leave out such samples with --skip-bad-samples"
        super().__init__(first.message, first.where, remedy)
        self.reported_elsewhere = not errors


class DataPlane:
    """Provides the global batches of one rank in order, from step `start` on.

    - `leaves`: the plan's functions for batch-wide sums, by name; `drawn`: those that need random numbers;
      `placed_rows`: what each sample's numbers of rows must be equal to.
    - `shuffle`, `epochs` (None: endless), `seed`: which samples make up a batch.
    - `skip_bad`: leave out samples that do not load, and name them on stderr.
    - `workers`: 0 loads in this process, 1 in a background process; more load samples in that many processes
      and collate in one. They are forked here, so make the data plane before process groups, threads and GPU
      contexts.
    - `order`: makes the schedule of samples with known sizes, to choose which samples each rank loads.
    - `device`: where `load_micro_batch` puts tensors.
    - `ahead`: number of global batches requested beyond the one that is trained.
    - `batches`: which samples make up each batch, in place of the epochs of training.
    - `resumed`: what the checkpoint of step `start` recorded of the data; `accepts_change`: go on if streams
      give other samples there; `saves`: whether `position_after` will be asked for.
    - `rerecorder`: records glue that depends on values, where samples are collated or, with workers, in
      `recorders` further processes.
    """

    def __init__(
        self,
        user: UserModel,
        plan: Plan,
        rank: int,
        world_size: int,
        seed: int = 0,
        *,
        leaves: Mapping[str, BatchSumFunction],
        drawn: DrawnSums | None = None,
        placed_rows: Sequence[PlacedRows] = (),
        shuffle: bool = False,
        epochs: int | None = None,
        skip_bad: bool = False,
        workers: int = 0,
        order: ScheduleFunction | None = None,
        device: torch.device | str = "cpu",
        start: int = 0,
        ahead: int = 1,
        rerecorder: Rerecorder | None = None,
        recorders: int = 0,
        batches: EpochOrder | None = None,
        resumed: Mapping[str, Any] | None = None,
        accepts_change: bool = False,
        saves: bool = False,
    ) -> None:
        user.use_plan_inputs(plan.inputs)
        self.plan, self.rank, self.world_size, self.device = plan, rank, world_size, torch.device(device)
        self._place = user.sources()[0].place
        self.epochs = batches or make_sample_order(user, plan.global_batch, seed, shuffle, epochs, resumed)
        streams = (
            StreamBatches(self.epochs, start, resumed, accepts_change, saves)
            if isinstance(self.epochs, MixedOrder)
            else None
        )
        self._has_streams = isinstance(self.epochs, MixedOrder) and self.epochs.has_streams
        self._positions: dict[int, Mapping[str, Any]] = {} if resumed is None else {start: resumed}
        # Widths, by symbol, of the set that a step's batch is a part of, if that set is to be one batch.
        self.widths_of_set: Callable[[int], Mapping[str, int]] = lambda step: {}
        self._codec, self._drawn = RecordCodec(plan, leaves, user.sample_name, placed_rows), drawn
        self._shares = _LoadShares(self.epochs, world_size, user, plan, order)
        fetchers = SampleWorkers(user, seed, workers) if workers > 1 else None
        pool = (
            WorkerPool(rerecorder.record_micro_batch, recorders, "secc-recorder", max_requests=1)
            if workers and recorders and rerecorder is not None
            else None
        )
        loader = SampleLoader(user, self._codec, self.epochs, fetchers, rerecorder, pool, ahead, streams)
        requests, pools = (
            MAX_REQUESTS if rerecorder is None else MAX_REQUESTS_WITH_RECORDING,
            [p for p in (fetchers, pool) if p is not None],
        )
        self._loader = LoaderProcess(loader, pools, requests, ahead) if workers else InlineLoader(loader)
        self._step = start - 1
        self._latest: GlobalBatch | None = None
        self._next_rows: MetadataRows | None = None  # of this rank's share of the next step
        self._next_table: torch.Tensor | None = None  # all ranks' rows of the next step, by position
        self._waits: list[tuple[int, TimeSpan]] = []
        self.is_waiting = False  # for the loader
        self._skip_bad = skip_bad
        self._loader.request_ahead([self._metadata_request(start)])

    def next_batch(self, group: dist.ProcessGroup | None = None) -> GlobalBatch:
        """Return the next global batch, the same on every rank. Collective over `group` (default: all ranks).

        Raises BadSampleError on all ranks, with dataset index and cause, if a sample does not load.
        """
        self._step += 1
        self._waits = [
            (step, spent) for step, spent in self._waits if step >= self._step - _WAIT_HISTORY_STEPS
        ]
        rows: MetadataRows = self._next_rows or self._time_wait(
            self._loader.wait_for_result, self._metadata_request(self._step)
        )
        table, self._next_rows, self._next_table = self._next_table, None, None
        if self.epochs.samples_in_step(self._step + 1):
            self._loader.request_ahead([self._metadata_request(self._step + 1)])
        self._note_position(rows)
        for error in rows.errors if self._skip_bad else ():
            place = f"{error.where}: " if error.where else ""
            sys.stderr.write(
                f"step {self._step + 1}: a sample is left out: {printable_text(place + error.message)}\n"
            )
        if table is None and self.world_size > 1:
            table = self._gather_rows(rows, group)
        elif table is None:
            table = self._rows_by_position(self._pad_rows(rows, self._step)[None], self._step)
        kept, records, skipped = _split_skipped(self._codec.unpack_records(table))
        if skipped and not self._skip_bad:
            raise BadSampleError(rows.errors, skipped)
        if not records:
            first = f": {rows.errors[0].message}" if rows.errors else ""
            message = f"none of the {len(skipped)} samples of step {self._step + 1} can be trained{first}"
            raise UserError(message, remedy="run without --skip-bad-samples")
        self._shares.check_declared(records)
        self._latest = self._assemble_batch(records, kept, skipped, group)
        return self._latest

    def _assemble_batch(
        self,
        records: Sequence[SampleRecord],
        kept: tuple[int, ...],
        skipped: tuple[int, ...],
        group: dist.ProcessGroup | None,
    ) -> GlobalBatch:
        of_set = self.widths_of_set(self._step)
        metas = [replace(r.meta, sizes={**r.meta.sizes, **of_set}) for r in records]
        sizes = combine_sizes([m.sizes for m in metas], self.plan.symbols)
        padded = self.plan.widths == "global"
        widths = tuple((s.name, sizes[s.name]) for s in self.plan.symbols if s.is_padded) if padded else ()
        wider = any(
            r.meta.sizes[name] != width for r in records for name, width in widths
        )  # than some sample alone
        columns = zip(
            *(self._gather_padded_sums(kept, widths, group) if wider else [r.sample_sums for r in records]),
            strict=True,
        )
        # fsum rounds once, so the sums do not depend on how the samples are spread over ranks.
        leaves = {
            name: math.fsum(column) for name, column in zip(self._codec.sum_functions, columns, strict=False)
        }
        if self._drawn is not None:
            leaves |= self._gather_drawn_sums(self._drawn, records, kept, widths, group)
        tokens = sum(r.tokens for r in records)
        return GlobalBatch(self._step, tuple(metas), leaves, sizes, tokens, skipped, kept, widths)

    def _gather_padded_sums(
        self, kept: tuple[int, ...], widths: tuple[tuple[str, int], ...], group: dist.ProcessGroup | None
    ) -> list[tuple[float, ...]]:
        """Return the batch-wide sums of each rank's share, padded to the global batch's widths, as padded
        positions may count in them."""
        share = self._own_share(kept, widths)
        if not self._codec.sum_functions or not share.positions:
            mine: tuple[float, ...] = (0.0,) * len(self._codec.sum_functions)
        else:
            mine = compute_batch_sums(
                self._codec.sum_functions, self._time_wait(self._loader.wait_for_result, share)
            )
        return self._gather_sums(mine, group)

    def _gather_drawn_sums(
        self,
        drawn: DrawnSums,
        records: Sequence[SampleRecord],
        kept: tuple[int, ...],
        widths: tuple[tuple[str, int], ...],
        group: dist.ProcessGroup | None,
    ) -> dict[str, float]:
        """Return the batch-wide sums that random numbers decide, by name. `kept` are the positions of
        `records`."""
        share = self._own_share(kept, widths)
        mine = (0.0,) * len(drawn.functions)
        if share.positions:
            batch = self._time_wait(self._loader.wait_for_result, share)
            own = [kept.index(p) for p in share.positions]
            mine = drawn.compute_sums(self._step, [r.meta for r in records], own, batch, dict(widths))
        columns = zip(*self._gather_sums(mine, group), strict=True)
        return {name: math.fsum(column) for name, column in zip(drawn.functions, columns, strict=True)}

    def _own_share(self, kept: tuple[int, ...], widths: tuple[tuple[str, int], ...]) -> BatchRequest:
        """Return the request of this rank's share of the step's samples, padded to `widths`."""
        positions = tuple(p for p in self._metadata_request(self._step).positions if p in set(kept))
        return BatchRequest(self._step, positions, widths)

    def _gather_sums(
        self, mine: tuple[float, ...], group: dist.ProcessGroup | None
    ) -> list[tuple[float, ...]]:
        """Return the sums of every rank."""
        if self.world_size == 1 or not mine:
            return [mine]
        device = self.device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        parts = [torch.empty(len(mine), dtype=torch.float64, device=device) for _ in range(self.world_size)]
        dist.all_gather(parts, torch.tensor(mine, dtype=torch.float64, device=device), group)
        return [tuple(part.tolist()) for part in parts]

    def announce_micro_batches(
        self, batches: Iterable[tuple[Sequence[int], str]], of: GlobalBatch | None = None
    ) -> None:
        """Announce micro-batches (positions, section) of a global batch (default: the latest) in the order
        in which they will be asked for, so that a worker can load ahead."""
        self._loader.request_ahead(
            [self._given_or_latest(of).batch_request(positions, section) for positions, section in batches]
        )

    def load_micro_batch(
        self, positions: Sequence[int], of: GlobalBatch | None = None, section: str = ""
    ) -> dict[str, Any]:
        """Return the samples at `positions` of a global batch (default: the latest), collated in this
        order, padded as the plan says, on the device, with the recorded glue that `section` needs."""
        batch = self._time_wait(
            self._loader.wait_for_result, self._given_or_latest(of).batch_request(positions, section)
        )
        return {
            key: v.to(self.device, non_blocking=True) if isinstance(v, torch.Tensor) else v
            for key, v in batch.items()
        }

    @property
    def loader_waits(self) -> list[TimeSpan]:
        """Times at which this rank waited for the loader in the last few steps."""
        return [spent for _, spent in self._waits]

    def _time_wait(self, get: Callable[[Any], Any], ask: LoaderRequest) -> Any:
        """Return `get(ask)`, and count the time as waiting for the loader."""
        start = time.monotonic_ns()
        self.is_waiting = True
        result = get(ask)
        self.is_waiting = False
        self._waits.append((self._step, TimeSpan(start, time.monotonic_ns())))
        return result

    def _given_or_latest(self, given: GlobalBatch | None) -> GlobalBatch:
        batch = given or self._latest
        assert batch is not None, "next_batch() must be called first"
        return batch

    def close(self) -> None:
        """End the worker processes."""
        self._loader.close()

    def __enter__(self) -> DataPlane:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _metadata_request(self, step: int) -> MetadataRequest:
        return MetadataRequest(step, self._shares.positions_of_step(step)[self.rank])

    def exchange_values(
        self, values: torch.Tensor, steps: int, group: dist.ProcessGroup | None = None
    ) -> torch.Tensor:
        """Gather every rank's `values` (float64 [n], on this rank's device) as [ranks, n]. Collective over
        `group`.

        The metadata rows of the next step, if it is before `steps`, travel along. They are used if every rank
        has them already.
        """
        if self.world_size == 1:
            return values[None]
        sends_next = (
            self._next_table is None
            and self._step + 1 < steps
            and self.epochs.samples_in_step(self._step + 1) > 0
        )
        if sends_next and self._next_rows is None:
            self._next_rows = self._time_wait(
                self._loader.take_if_ready, self._metadata_request(self._step + 1)
            )
        # One collective of integers: the values' bits, then whether this rank has its rows, then the rows.
        mine = [values.view(torch.int64)]
        if sends_next:
            table = self._pad_rows(self._next_rows, self._step + 1)
            mine.append(
                torch.cat([torch.tensor([self._next_rows is not None]), table.view(-1)]).to(values.device)
            )
        gathered = self._all_gather_tensor(torch.cat(mine), group)
        all_values, rows = gathered[:, : len(values)].view(torch.float64), gathered[:, len(values) :].cpu()
        if sends_next and bool(rows[:, 0].all()):
            self._next_table = self._rows_by_position(
                rows[:, 1:].reshape(self.world_size, -1, self._codec.width), self._step + 1
            )
        return all_values

    def _gather_rows(self, mine: MetadataRows, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Gather all ranks' rows of this step, in the order of the batch."""
        device = self.device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        return self._rows_by_position(
            self._all_gather_tensor(self._pad_rows(mine, self._step).to(device), group).cpu(), self._step
        )

    def _pad_rows(self, mine: MetadataRows | None, step: int) -> torch.Tensor:
        """Pad this rank's rows to the length of the step's longest share: [longest, width]. With streams one
        row more holds the digest of what this rank has read."""
        longest = max(map(len, self._shares.positions_of_step(step)))
        padded = torch.zeros(longest + self._has_streams, self._codec.width, dtype=torch.int64)
        if mine is not None:
            padded[: len(mine.table)] = mine.table
            if self._has_streams:
                padded[longest, 0] = mine.digest
        return padded

    def _all_gather_tensor(self, mine: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Gather every rank's tensor along a new first dim."""
        gathered = mine.new_empty(self.world_size, *mine.shape)
        start_all_gather(gathered.view(-1), mine.view(-1), group).wait()
        return gathered

    def _rows_by_position(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Reorder rows [ranks, longest share, width] of a step's shares by position: [samples, width]."""
        shares = self._shares.positions_of_step(step)
        if self._has_streams:
            self._compare_digests(rows[:, -1, 0].tolist(), step)
            rows = rows[:, :-1]
        longest, positions = rows.shape[1], [p for share in shares for p in share]
        places = [r * longest + k for r, share in enumerate(shares) for k in range(len(share))]
        return rows.flatten(0, 1)[[places[k] for k in sorted(range(len(places)), key=positions.__getitem__)]]

    def _compare_digests(self, digests: Sequence[int], step: int) -> None:
        """Raise UserError, on all ranks, if ranks have read different samples of streams."""
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is None:
            return
        first, count = step * self.epochs.global_batch, self.epochs.samples_in_step(step)
        raise UserError(
            f"ranks 0 and {other} have read different samples for step {step + 1} (samples {first} to"
            f" {first + count - 1} of the run); every rank must see the whole stream in the same order",
            self._place,
            "do not split the stream by rank, and shuffle it with a fixed seed",
        )

    def _note_position(self, rows: MetadataRows) -> None:
        """Keep what a checkpoint after this step records of the data, and print what has happened."""
        if rows.position is not None:
            oldest = self._step - _WAIT_HISTORY_STEPS
            self._positions = {step: p for step, p in self._positions.items() if step >= oldest}
            self._positions[self._step + 1] = rows.position
        for note in rows.notes if self.rank == 0 else ():
            sys.stderr.write(f"step {self._step + 1}: {printable_text(note)}\n")

    def position_after(self, steps: int) -> Mapping[str, Any] | None:
        """Return what a checkpoint after `steps` steps records of the data; None for a map-style dataset:
        there the number of the step decides the samples."""
        return self._positions.get(steps)


class _LoadShares:
    """Assigns positions of each batch to the ranks that load them. All ranks compute the same without
    communicating."""

    def __init__(
        self, epochs: EpochOrder, world_size: int, user: UserModel, plan: Plan, order: ScheduleFunction | None
    ) -> None:
        self.epochs, self.world_size, self._schedule = epochs, world_size, order
        uses_declared = (
            user.defines("sizes")
            and order is not None
            and not any(is_tensor_label(s.key) for s in plan.symbols)
        )
        self.declared = DeclaredSizes(user, plan.symbols, plan.inputs) if uses_declared else None
        self._positions_by_step: dict[int, list[tuple[int, ...]]] = {}
        self._declared_by_index: dict[int, SampleMeta] = {}  # by dataset index

    def positions_of_step(self, step: int) -> list[tuple[int, ...]]:
        """Return each rank's positions of a step's batch. Raises UserError if `sizes` fails on a sample."""
        if step not in self._positions_by_step:
            self._positions_by_step = {
                s: shares for s, shares in self._positions_by_step.items() if s >= step - 1
            } | {step: self._assign_positions(step)}
        return self._positions_by_step[step]

    def check_declared(self, records: Sequence[SampleRecord]) -> None:
        """Raise UserError if a loaded sample differs from what `sizes` declared."""
        if self.declared is not None:
            for record in records:
                self.declared.check_sample(
                    record.meta, self._declared_by_index.pop(record.meta.id, record.meta)
                )

    def _assign_positions(self, step: int) -> list[tuple[int, ...]]:
        count = self.epochs.samples_in_step(step)
        if self.declared is None or self._schedule is None or not count:
            return [
                tuple(range(r * count // self.world_size, (r + 1) * count // self.world_size))
                for r in range(self.world_size)
            ]
        declared = [self.declared.sample_metadata(i) for i in self.epochs.dataset_indices(step)]
        self._declared_by_index |= {s.id: s for s in declared}
        return positions_by_rank(self._schedule(declared), count)


def _split_skipped(
    records: Sequence[SampleRecord | SkippedSample],
) -> tuple[tuple[int, ...], list[SampleRecord], tuple[int, ...]]:
    """Return the positions and the records of samples that loaded, and the dataset indices of skipped
    samples."""
    kept_positions = tuple(p for p, r in enumerate(records) if isinstance(r, SampleRecord))
    return (
        kept_positions,
        [r for r in records if isinstance(r, SampleRecord)],
        tuple(r.index for r in records if isinstance(r, SkippedSample)),
    )
