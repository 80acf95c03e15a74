"""Times all-reduces, reduce-scatters, all-gathers and all-to-alls of several sizes on this machine.

A latency and a bandwidth are fitted to the median times by least squares of relative errors. They are stored
as the time of one message of a ring (`secc.cluster.MeasuredRing`), so that they apply to other numbers of
ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
import torch.distributed as dist

from secc.cluster import COLLECTIVES, MeasuredRing
from secc.profile.least_squares import nonnegative_least_squares
from secc.runtime.parameters.sharded_optimizer import start_all_gather, start_reduce_scatter

COLLECTIVE_SIZES = tuple(4**k for k in range(6, 13))  # bytes of the full tensor: 4 KiB to 16 MiB
LARGE_REPEATS, SMALL_REPEATS = 12, 40  # above 1 MiB, and up to it

CollectiveTimes = Mapping[str, Mapping[int, float]]  # ns by collective and bytes


def time_collectives(device: torch.device) -> CollectiveTimes:
    """Median nanoseconds of each collective and size on this rank. Must be called on all ranks of the
    process group."""
    return {
        collective: {size: _median_ns(collective, size, device) for size in COLLECTIVE_SIZES}
        for collective in COLLECTIVES
    }


def _median_ns(collective: str, size: int, device: torch.device) -> float:
    run, times = _make_collective(collective, size, device), list[float]()
    for _ in range(LARGE_REPEATS if size > 1 << 20 else SMALL_REPEATS):
        dist.barrier()
        start = time.perf_counter_ns()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter_ns() - start)
    return median(times)


def _make_collective(collective: str, size: int, device: torch.device) -> Callable[[], object]:
    """A collective on float32 tensors, as the runtime issues it for gradients, parameters and rows of tokens.
    size: bytes of the full tensor."""
    ranks = dist.get_world_size()
    shard = torch.zeros(size // 4 // ranks, device=device)
    full = torch.zeros(shard.numel() * ranks, device=device)
    match collective:
        case "all_reduce":
            return lambda: dist.all_reduce(full)
        case "reduce_scatter":
            return lambda: start_reduce_scatter(shard, full, None).wait()
        case "all_to_all":
            arrived = torch.empty_like(full)
            return lambda: dist.all_to_all_single(arrived, full)
        case _:
            return lambda: start_all_gather(full, shard, None).wait()


def fit_rings(ranks: int, times: CollectiveTimes) -> list[MeasuredRing]:
    """Fit the messages of a ring to the times of each collective over `ranks` ranks."""
    return [_fit_ring(collective, ranks, ns_by_size) for collective, ns_by_size in times.items()]


def _fit_ring(collective: str, ranks: int, ns_by_size: Mapping[int, float]) -> MeasuredRing:
    messages = (2 if collective == "all_reduce" else 1) * (ranks - 1)
    latency, byte_ns = _fit_latency_and_byte_time(
        [(messages, messages * size / ranks, ns) for size, ns in ns_by_size.items()]
    )
    return MeasuredRing(collective, ranks, round(latency), round(1e9 / max(byte_ns, 1e-6)))


def _fit_latency_and_byte_time(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(ns per message, ns per byte) from (messages, bytes, ns)."""
    rows, times = zip(*((point[:2], point[2]) for point in points), strict=True)
    latency, byte_ns = nonnegative_least_squares(rows, times)
    return float(latency), float(byte_ns)
