"""Measures this machine: messages and collectives between processes, memory bandwidth, rates of matrix
products.

Two processes (gloo on CPUs, NCCL where there are two GPUs) exchange messages; the smallest give the latency,
the largest the bandwidth. Collectives are timed over 2, 4 and 8 processes, as far as there are devices
(`secc.profile.time_collectives`). A single GPU has no links to measure. The rate of products is the best of
several runs; rates of narrow products are reported relative to it. Products of experts are timed with several
numbers of rows for each expert.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F

from secc.cluster import GIB, MeasuredRing
from secc.cluster.description import known_kind
from secc.cost.model.measured_costs import local_hardware
from secc.errors import UserError
from secc.profile import time_collectives
from secc.profile.least_squares import nonnegative_least_squares
from secc.report.text_table import TextTable

MESSAGE_SIZES = tuple(4**k for k in range(2, 13))  # bytes of messages: 16 B to 16 MiB
LARGE_PRODUCT_DIM = {"cpu": 1024, "cuda": 8192}
EXPERTS, EXPERT_DIM = 8, {"cpu": 256, "cuda": 2048}
# On a GPU enough rows that products take longer than reading the weights, which the cost model prices apart.
ROWS_PER_EXPERT = {"cpu": (16, 32, 64, 128, 256), "cuda": (512, 1024, 2048, 4096)}
NARROW_DTYPE = {"cpu": "f32", "cuda": "bf16"}
LAUNCHES = 20  # timed together on a GPU, so that the host's time to launch one is hidden
NARROW_DIMS = (16, 32, 64, 128, 256, 512)
PROBE_TIMEOUT_S = 60
COLLECTIVE_RANKS = (2, 4, 8)
RATE_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class MachineProbe:
    """Measurements of a machine.

    memory: bytes per device. rates: GFLOP/s of large products by dtype.
    narrow_percent: percent of the rate of large products by smallest dimension, in NARROW_DTYPE.
    latency_ns, bytes_per_s: of a message; None if nothing could be sent. expert_lost_rows: a product of
    several experts takes as long as one with this many further rows for each. kind: of a preset, or "".
    """

    hardware: str
    backend: str
    devices: int
    memory: int
    rates: Mapping[str, float]
    narrow_percent: Mapping[int, float]
    memory_bytes_per_s: float
    latency_ns: float | None
    bytes_per_s: float | None
    rings: Sequence[MeasuredRing] = ()
    expert_lost_rows: int = 0
    kind: str = ""

    def as_dict(self) -> dict[str, object]:
        """The measurements for JSON output."""
        return {
            "hardware": self.hardware,
            "devices": self.devices,
            "memory_gib": self.memory / GIB,
            "gflops": dict(self.rates),
            "narrow_percent": {str(k): v for k, v in self.narrow_percent.items()},
            "expert_lost_rows": self.expert_lost_rows,
            "memory_gb_s": self.memory_bytes_per_s / 1e9,
            "link_latency_us": self.latency_ns and self.latency_ns / 1e3,
            "link_gb_s": self.bytes_per_s and self.bytes_per_s / 1e9,
            "collectives": [asdict(ring) for ring in self.rings],
        }

    def to_tables(self) -> list[TextTable]:
        """The measurements for the terminal."""
        rows = [(f"large product, {n}", f"{r:.4g} GFLOP/s") for n, r in self.rates.items()]
        rows += [
            (f"product with smallest dim {d}", f"{p:.0f}% of that in {NARROW_DTYPE[self.backend]}")
            for d, p in self.narrow_percent.items()
        ]
        rows += [
            ("products of experts, lost rows of each", f"{self.expert_lost_rows}"),
            ("memory", f"{self.memory_bytes_per_s / 1e9:.3g} GB/s"),
        ]
        if self.latency_ns is not None and self.bytes_per_s is not None:
            rows.append(("link, latency", f"{self.latency_ns / 1e3:.3g} us"))
            rows.append(("link, bandwidth", f"{self.bytes_per_s / 1e9:.3g} GB/s"))
        rows += [
            (
                f"{r.collective} over {r.ranks}, a message of its ring",
                f"{r.latency_ns / 1e3:.3g} us, {r.bytes_per_s / 1e9:.3g} GB/s",
            )
            for r in self.rings
        ]
        return [TextTable(self.hardware, ("figure", "measured"), tuple(rows), f"{self.devices} devices")]


def to_cluster_yaml(probe: MachineProbe) -> str:
    """A cluster file of this machine."""
    kind = f"kind: {probe.kind}" if probe.kind else "kind: GPU\nlike: L40S    # no preset has its figures"
    links = "# one GPU has no links: those of the preset\n"
    if probe.latency_ns is not None and probe.bytes_per_s is not None:
        rings = "".join(f"\n  - {_ring_yaml(r)}" for r in probe.rings)
        latency = f"latency_us: {probe.latency_ns / 1e3:.4g}"
        link = f"\n  gb_s: {probe.bytes_per_s / 1e9:.4g}\n  {latency}\n  collectives:{rings or ' []'}"
        links = f"inside:{link}\nbetween:{link}\n"
    return (
        f"# measured on {probe.hardware}\nnodes: 1\ndevices: {probe.devices}\n{kind}\n"
        f"memory_gib: {probe.memory / GIB:.4g}\n"
        f"bf16_tflops: {probe.rates['bf16'] / 1e3:.4g}\nf32_tflops: {probe.rates['f32'] / 1e3:.4g}\n"
        f"efficiency_percent: 100    # the rates are what products reach, not peaks\n"
        f"expert_lost_rows: {probe.expert_lost_rows}\n"
        f"memory_gb_s: {probe.memory_bytes_per_s / 1e9:.4g}\n{links}"
    )


def _ring_yaml(ring: MeasuredRing) -> str:
    rates = f"gb_s: {ring.bytes_per_s / 1e9:.4g}, latency_us: {ring.latency_ns / 1e3:.4g}"
    return f"{{collective: {ring.collective}, ranks: {ring.ranks}, {rates}}}"


def probe_machine(progress: Callable[[str], None]) -> MachineProbe:
    """Measure this machine; takes some seconds. progress: called with a line for each part."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda" if gpus else "cpu")
    torch.set_num_threads(1)
    progress("time products of matrices")
    size = LARGE_PRODUCT_DIM[device.type]
    rates = {name: _measure_gflops(size, size, dtype, device) for name, dtype in RATE_DTYPES.items()}
    dtype = NARROW_DTYPE[device.type]
    narrow = {
        d: 100 * _measure_gflops(size, d, RATE_DTYPES[dtype], device) / rates[dtype] for d in NARROW_DIMS
    }
    lost = fit_lost_rows({n: _time_experts(n, device) for n in ROWS_PER_EXPERT[device.type]})
    progress("time memory")
    memory = _measure_memory_bandwidth(device)
    backend, devices = "nccl" if gpus else "gloo", gpus or max(2, len(os.sched_getaffinity(0)))
    latency = bandwidth = None
    if devices > 1:
        progress("time messages")
        times: dict[int, float] = _run_on_ranks(_time_messages, 2, backend)
        latency, largest = times[MESSAGE_SIZES[0]], MESSAGE_SIZES[-1]
        bandwidth = largest * 1e9 / max(times[largest] - latency, 1.0)
        progress("time collectives")
    rings = [
        r
        for n in COLLECTIVE_RANKS
        if n <= devices
        for r in time_collectives.fit_rings(n, time_collectives_over(n, backend))
    ]
    capacity = torch.cuda.get_device_properties(0).total_memory if gpus else _host_memory() // devices
    return MachineProbe(
        hardware=local_hardware(device).description,
        backend=device.type,
        devices=devices,
        memory=capacity,
        rates=rates,
        narrow_percent=narrow,
        memory_bytes_per_s=memory,
        latency_ns=latency,
        bytes_per_s=bandwidth,
        rings=rings,
        expert_lost_rows=lost,
        kind=(known_kind(torch.cuda.get_device_name()) or "") if gpus else "cpu",
    )


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _shortest_ns(run: Callable[[], Any], device: torch.device, repeat: int = 8) -> float:
    shortest = float("inf")
    for _ in range(repeat):
        if device.type == "cuda":
            shortest = min(shortest, _device_ns(run))
            continue
        start = time.process_time_ns()
        run()
        shortest = min(shortest, time.process_time_ns() - start)
    return max(shortest, 1.0)


def _device_ns(run: Callable[[], Any]) -> float:
    """Nanoseconds that a run takes the GPU, the mean over LAUNCHES runs in a row."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(LAUNCHES):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e6 / LAUNCHES


def _measure_gflops(size: int, narrow: int, dtype: torch.dtype, device: torch.device) -> float:
    """GFLOP/s of a product [size, narrow] x [narrow, size]."""
    a = torch.randn(size, narrow, device=device).to(dtype)
    b = torch.randn(narrow, size, device=device).to(dtype)
    return 2 * size * size * narrow / _shortest_ns(lambda: a @ b, device)


def _time_experts(rows: int, device: torch.device) -> float:
    """Nanoseconds of a grouped product in bfloat16 with `rows` rows for each expert."""
    dim = EXPERT_DIM[device.type]
    weights = torch.randn(EXPERTS, dim, dim, device=device).to(torch.bfloat16)
    inputs = torch.randn(EXPERTS * rows, dim, device=device).to(torch.bfloat16)
    ends = torch.arange(rows, EXPERTS * rows + 1, rows, dtype=torch.int32, device=device)
    return _shortest_ns(lambda: F.grouped_mm(inputs, weights, offs=ends), device)


def fit_lost_rows(ns_by_rows: Mapping[int, float]) -> int:
    """The rows that take as long as what a product of one expert takes without rows. A straight line is
    fitted to the times [ns] over the numbers of rows."""
    fixed, row = nonnegative_least_squares([(1, n) for n in ns_by_rows], [*ns_by_rows.values()])
    return round(fixed / row) if row else max(ns_by_rows)


def _measure_memory_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a copy larger than all caches."""
    source = torch.empty(64 << 20, dtype=torch.float32, device=device).zero_()
    target = torch.empty_like(source)
    return 2e9 * source.nbytes / _shortest_ns(lambda: target.copy_(source), device, 4)


def time_collectives_over(ranks: int, backend: str) -> time_collectives.CollectiveTimes:
    """Time collectives over `ranks` processes of this machine."""
    return _run_on_ranks(time_collectives.time_collectives, ranks, backend)


def _run_on_ranks(measure: Callable[[torch.device], Any], ranks: int, backend: str) -> Any:
    """Run `measure` on `ranks` processes in one process group; returns the result of rank 0. Raises
    UserError on timeout."""
    queue = mp.get_context("spawn").SimpleQueue()
    arguments = (backend, find_free_port(), ranks, measure, queue)
    spawn: Any = mp.spawn  # pyright: ignore[reportPrivateImportUsage]
    context: Any = spawn(_run_rank, arguments, nprocs=ranks, join=False)
    deadline = time.monotonic() + PROBE_TIMEOUT_S
    try:
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                raise UserError(
                    f"processes of this machine did not reach each other within {PROBE_TIMEOUT_S} s",
                    remedy="check firewalls and GLOO_SOCKET_IFNAME",
                )
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return queue.get()


def find_free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _run_rank(
    rank: int, backend: str, port: int, ranks: int, measure: Callable[[torch.device], Any], queue: Any
) -> None:
    """Entry point of a spawned process."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    result = measure(device)
    if rank == 0:
        queue.put(result)
    dist.destroy_process_group()


def _time_messages(device: torch.device) -> dict[int, float]:
    """On two ranks: nanoseconds of a message by size, half of the shortest round trip."""
    rank, ns_by_size = dist.get_rank(), dict[int, float]()
    for size in MESSAGE_SIZES:
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        times = []
        for _ in range(12 if size > 1 << 20 else 40):
            start = time.perf_counter_ns()
            (dist.send if rank == 0 else dist.recv)(message, 1 - rank)
            (dist.recv if rank == 0 else dist.send)(message, 1 - rank)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append((time.perf_counter_ns() - start) / 2)
        ns_by_size[size] = min(times)
    return ns_by_size
