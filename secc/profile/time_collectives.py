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

from secc.cluster import COLLECTIVES, Ring
from secc.profile.least_squares import nonnegative
from secc.runtime.parameters.sharded_optimizer import all_gather, reduce_scatter

SIZES = tuple(4**k for k in range(6, 13))  # bytes of the whole tensor: 4 KiB to 16 MiB
REPEAT, SHORT = 12, 40  # runs of a size, and of one up to 1 MiB

Times = Mapping[str, Mapping[int, float]]  # ns by collective and size


def timed(device: torch.device) -> Times:
    """The median time of each collective and size on this rank, over all ranks. Collective."""
    return {
        collective: {size: _median_ns(collective, size, device) for size in SIZES}
        for collective in COLLECTIVES
    }


def _median_ns(collective: str, size: int, device: torch.device) -> float:
    run, times = _run(collective, size, device), list[float]()
    for _ in range(REPEAT if size > 1 << 20 else SHORT):
        dist.barrier()
        start = time.perf_counter_ns()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter_ns() - start)
    return median(times)


def _run(collective: str, size: int, device: torch.device) -> Callable[[], object]:
    """A collective of float32 numbers, as gradients are summed and parameters gathered."""
    ranks = dist.get_world_size()
    part = torch.zeros(size // 4 // ranks, device=device)
    whole = torch.zeros(part.numel() * ranks, device=device)
    match collective:
        case "all_reduce":
            return lambda: dist.all_reduce(whole)
        case "reduce_scatter":
            return lambda: reduce_scatter(part, whole, None).wait()
        case _:
            return lambda: all_gather(whole, part, None).wait()


def rings(ranks: int, times: Times) -> list[Ring]:
    """What was measured over so many ranks, as messages of rings."""
    return [_ring(collective, ranks, found) for collective, found in times.items()]


def _ring(collective: str, ranks: int, found: Mapping[int, float]) -> Ring:
    messages = (2 if collective == "all_reduce" else 1) * (ranks - 1)
    latency, a_byte = _fit([(messages, messages * size / ranks, ns) for size, ns in found.items()])
    return Ring(collective, ranks, round(latency), round(1e9 / max(a_byte, 1e-6)))


def _fit(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """ns of a message and of a byte, from numbers of messages, of bytes and times."""
    rows, wanted = zip(*((point[:2], point[2]) for point in points), strict=True)
    latency, a_byte = nonnegative(rows, wanted)
    return float(latency), float(a_byte)
