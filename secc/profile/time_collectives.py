"""What collectives take on this machine, by the number of ranks: all-reduces, reduce-scatters and all-gathers
of several sizes.

The median time of each size is fitted with a latency and a bandwidth, relative errors weighing alike, and
kept as what one message of a ring takes (`secc.cluster.Ring`), so that it holds for other numbers of ranks.
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

COLLECTIVE_SIZES = tuple(4**k for k in range(6, 13))  # bytes of the whole tensor: 4 KiB to 16 MiB
LARGE_REPEATS, SMALL_REPEATS = 12, 40  # runs of a size, and of one up to 1 MiB

CollectiveTimes = Mapping[str, Mapping[int, float]]  # ns by collective and size


def time_collectives(device: torch.device) -> CollectiveTimes:
    """The median time of each collective and size on this rank, over all ranks. Collective."""
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
    """A collective of float32 numbers, as gradients are summed and parameters gathered."""
    ranks = dist.get_world_size()
    part = torch.zeros(size // 4 // ranks, device=device)
    whole = torch.zeros(part.numel() * ranks, device=device)
    match collective:
        case "all_reduce":
            return lambda: dist.all_reduce(whole)
        case "reduce_scatter":
            return lambda: start_reduce_scatter(part, whole, None).wait()
        case _:
            return lambda: start_all_gather(whole, part, None).wait()


def fit_rings(ranks: int, times: CollectiveTimes) -> list[MeasuredRing]:
    """What was measured over so many ranks, as messages of rings."""
    return [_fit_ring(collective, ranks, found) for collective, found in times.items()]


def _fit_ring(collective: str, ranks: int, found: Mapping[int, float]) -> MeasuredRing:
    messages = (2 if collective == "all_reduce" else 1) * (ranks - 1)
    latency, a_byte = _fit_latency_and_byte_time(
        [(messages, messages * size / ranks, ns) for size, ns in found.items()]
    )
    return MeasuredRing(collective, ranks, round(latency), round(1e9 / max(a_byte, 1e-6)))


def _fit_latency_and_byte_time(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """ns of a message and of a byte, from numbers of messages, of bytes and times."""
    rows, wanted = zip(*((point[:2], point[2]) for point in points), strict=True)
    latency, a_byte = nonnegative_least_squares(rows, wanted)
    return float(latency), float(a_byte)
