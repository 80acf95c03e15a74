"""Launch parameters of kernels: defaults by size, measured ones from a cache, and `tune`, which measures
them.

A training step only looks parameters up. `tune` is called before training, on the device that will train. Its
results are kept in memory and in a JSON file (`$SECC_KERNEL_CACHE`, else `secc/kernels.json` in the user's
cache folder), keyed by kernel, device name, dtype and size rounded up to a power of two, so that a table
measured on other hardware is never used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from secc.runtime.errors import UserError
from secc.runtime.kernels.backend import OutOfResources, next_power_of_2

TimeRun = Callable[[Callable[[], object]], float]  # one run -> milliseconds
MakeTrial = Callable[
    [int, int, torch.dtype, torch.device], Callable[[], object]
]  # rows, size, dtype, device -> one run


@dataclass(frozen=True)
class LaunchParameters:
    """How a kernel is launched: `block` columns and `rows` rows per program, and warps.

    For the linear losses, `rows` and `columns` are the rows and tokens with logits at the same time; 0 leaves
    them to the operator. `stages`: in a loop over tiles, how many are in flight at a time.
    """

    block: int
    rows: int = 1
    warps: int = 4
    columns: int = 0
    stages: int = 1


@dataclass(frozen=True)
class TunableKernel:
    """A kernel with launch parameters that can be measured: defaults, candidates, and one run to time, all by
    size (row length)."""

    name: str
    default_launch: Callable[[int, torch.device], LaunchParameters]
    launch_candidates: Callable[[int, torch.device], list[LaunchParameters]]
    make_trial: MakeTrial


TUNABLE_KERNELS: dict[str, TunableKernel] = {}
_forced_launches: dict[str, LaunchParameters] = {}
_chosen_launches: dict[tuple[str, int, torch.dtype, torch.device], LaunchParameters] = {}


def default_row_launch(width: int, _: torch.device) -> LaunchParameters:
    """Defaults for kernels that hold whole rows: several short rows per program, more warps for long ones."""
    block = next_power_of_2(width)
    return LaunchParameters(block, max(4096 // block, 1), warps=min(max(block // 512, 4), 32))


def row_launch_candidates(width: int, _: torch.device) -> list[LaunchParameters]:
    """Other numbers of rows, warps and stages for kernels that hold whole rows: 4 to 32 entries a thread, and
    tiles in flight that fit into shared memory."""
    block = next_power_of_2(width)
    return [
        LaunchParameters(block, rows, warps, stages=stages)
        for rows in (1, 2, 4, 8, 16)
        for warps in (1, 2, 4, 8, 16, 32)
        if rows * block <= 1 << 15 and 4 <= rows * block / (32 * warps) <= 32
        for stages in (1, 2, 3)
        if rows * block * (stages - 1) <= 1 << 14
    ]


def register_kernel(tunable: TunableKernel) -> None:
    """Registers a kernel for `choose_launch` and `tune`."""
    TUNABLE_KERNELS[tunable.name] = tunable


def cache_path() -> Path | None:
    """Returns the file of measured parameters; None if `SECC_KERNEL_CACHE` is set and empty."""
    chosen = os.environ.get("SECC_KERNEL_CACHE")
    if chosen is not None:
        return Path(chosen) if chosen else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "secc" / "kernels.json"


@cache
def measured_launches() -> dict[str, LaunchParameters]:
    """Returns measured parameters, read once from the cache file; an unreadable file counts as empty."""
    path = cache_path()
    try:
        entries = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
        return {key: LaunchParameters(**entry) for key, entry in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


@cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def measurement_key(name: str, size: int, dtype: torch.dtype, device: torch.device) -> str:
    """Returns the key of a measurement: everything that it depends on."""
    return f"{_device_name(device)}/{name}/{next_power_of_2(size)}/{str(dtype).removeprefix('torch.')}"


def choose_launch(name: str, size: int, like: torch.Tensor) -> LaunchParameters:
    """Returns the parameters for rows of `size` entries of `like`'s dtype on its device; the shape of `like`
    does not matter. Never measures."""
    if name in _forced_launches:
        return _forced_launches[name]
    key = name, size, like.dtype, like.device
    chosen = _chosen_launches.get(key)
    if chosen is None:
        chosen = _chosen_launches[key] = _look_up_launch(name, size, like.dtype, like.device)
    return chosen


def _look_up_launch(name: str, size: int, dtype: torch.dtype, device: torch.device) -> LaunchParameters:
    measured = None
    if device.type == "cuda":
        measured = measured_launches().get(measurement_key(name, size, dtype, device))
    return TUNABLE_KERNELS[name].default_launch(size, device) if measured is None else measured


def forget_measured_launches() -> None:
    """Forgets parameters that were measured or read; the cache file stays and is read again when needed."""
    measured_launches.cache_clear()
    _chosen_launches.clear()


@contextmanager
def use_launch(name: str, parameters: LaunchParameters) -> Iterator[None]:
    """Uses these parameters inside the block, whatever was measured."""
    before = _forced_launches.get(name)
    _forced_launches[name] = parameters
    try:
        yield
    finally:
        _forced_launches.pop(name)
        if before is not None:
            _forced_launches[name] = before


def _time_milliseconds(run: Callable[[], object]) -> float:
    """Returns the time of a run on the device, replayed from a CUDA graph: launched one by one, short kernels
    would wait for the host."""
    # Imported here, because Triton may be missing where nothing is measured.
    from triton.testing import do_bench, do_bench_cudagraph

    run()  # a candidate that does not fit raises here, not while recording
    try:
        return do_bench_cudagraph(run, return_mode="median")  # pyright: ignore[reportReturnType]  # a number
    except RuntimeError:  # what a graph cannot record
        return do_bench(run, return_mode="median")  # pyright: ignore[reportReturnType]


def _find_fastest(
    tunable: TunableKernel, size: int, run: Callable[[], object], device: torch.device, time: TimeRun
) -> LaunchParameters:
    """Returns the fastest candidate; candidates that the device cannot hold are skipped."""
    times: dict[LaunchParameters, float] = {}
    default = tunable.default_launch(size, device)
    for candidate in dict.fromkeys([default, *tunable.launch_candidates(size, device)]):
        with use_launch(tunable.name, candidate):
            try:
                times[candidate] = time(run)
            except (RuntimeError, ValueError, OutOfResources):  # of memory, shared memory or registers
                continue
    return min(times, key=lambda c: times[c], default=default)


def tune(
    rows: int,
    sizes: dict[str, int],
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    *,
    time: TimeRun = _time_milliseconds,
    save: bool = True,
) -> dict[str, LaunchParameters]:
    """Measures kernels on this device and keeps the best parameters.

    `sizes`: kernel name (a key of `TUNABLE_KERNELS`) -> length of its rows (the hidden size, or the
    vocabulary for the linear losses). `rows`: the number of rows to measure with. Returns the parameters
    found. Raises UserError for an unknown kernel or without a GPU.
    """
    device = torch.device(device)
    if unknown := sizes.keys() - TUNABLE_KERNELS.keys():
        raise UserError(
            f"unknown kernel {sorted(unknown)[0]}",
            remedy=f"choose from {', '.join(sorted(TUNABLE_KERNELS))}",
        )
    if time is _time_milliseconds and not torch.cuda.is_available():
        raise UserError("kernels are tuned on the GPU that will run them, and there is none here")
    best: dict[str, LaunchParameters] = {}
    for name, size in sizes.items():
        run = TUNABLE_KERNELS[name].make_trial(rows, size, dtype, device)
        best[name] = _find_fastest(TUNABLE_KERNELS[name], size, run, device, time)
        measured_launches()[measurement_key(name, size, dtype, device)] = best[name]
        _chosen_launches.clear()
    if save:
        _save_measured()
    return best


def _save_measured() -> None:
    """Writes all measurements; the file is replaced atomically."""
    path = cache_path()
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({k: asdict(v) for k, v in sorted(measured_launches().items())}, indent=1))
    part.replace(path)
