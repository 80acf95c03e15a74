"""Launch parameters of the kernels: defaults by size, measured ones from a cache, and `tune`, which measures.

A training step only looks parameters up. `tune` is called ahead of training, on the device that will train;
what it finds is kept in memory and in one JSON file (`$SECC_KERNEL_CACHE`, else `kernels.json` under the
user's cache folder, in `secc/`), by kernel, device name, dtype and size rounded up to a power of two, so that
a table measured on other hardware is never used.
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
from secc.runtime.kernels.backend import next_power_of_2

Timer = Callable[[Callable[[], object]], float]  # one run -> milliseconds
Trial = Callable[
    [int, int, torch.dtype, torch.device], Callable[[], object]
]  # rows, size, dtype, device -> one run


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched: columns and rows that one program holds, warps.

    For the linear losses `rows` and `columns` are the rows and tokens whose logits exist at a time; 0 leaves
    them to the operator.
    """

    block: int
    rows: int = 1
    warps: int = 4
    columns: int = 0


@dataclass(frozen=True)
class Tunable:
    """A kernel whose launch may be measured: its default, what to try, and one run to time, all by size (row
    length)."""

    name: str
    default: Callable[[int, torch.device], Launch]
    candidates: Callable[[int, torch.device], list[Launch]]
    trial: Trial


TUNABLES: dict[str, Tunable] = {}
_forced: dict[str, Launch] = {}


def row_launch(width: int, _: torch.device) -> Launch:
    """The default of kernels that hold whole rows: several short rows a program, more warps for long ones."""
    block = next_power_of_2(width)
    return Launch(block, max(4096 // block, 1), warps=min(max(block // 512, 4), 32))


def row_candidates(width: int, _: torch.device) -> list[Launch]:
    """Other numbers of rows and warps for kernels that hold whole rows."""
    block = next_power_of_2(width)
    return [
        Launch(block, rows, warps)
        for rows in (1, 2, 4, 8, 16)
        if rows * block <= 1 << 15
        for warps in (2, 4, 8, 16, 32)
    ]


def register(tunable: Tunable) -> None:
    """Make a kernel known to `launch` and `tune`."""
    TUNABLES[tunable.name] = tunable


def cache_path() -> Path | None:
    """Where measured parameters are kept between processes; None if `SECC_KERNEL_CACHE` is set and empty."""
    chosen = os.environ.get("SECC_KERNEL_CACHE")
    if chosen is not None:
        return Path(chosen) if chosen else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "secc" / "kernels.json"


@cache
def measured() -> dict[str, Launch]:
    """Measured parameters, read once from the cache file; a file that cannot be read counts as empty."""
    path = cache_path()
    try:
        entries = json.loads(path.read_text()) if path is not None else {}
        return {key: Launch(**entry) for key, entry in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


@cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def key(name: str, size: int, dtype: torch.dtype, device: torch.device) -> str:
    """The entry of a measurement: what it depends on."""
    return f"{_device_name(device)}/{name}/{next_power_of_2(size)}/{str(dtype).removeprefix('torch.')}"


def launch(name: str, size: int, like: torch.Tensor) -> Launch:
    """The parameters to launch a kernel with, for rows of `size` entries of `like`'s dtype on its device.
    Never measures."""
    if name in _forced:
        return _forced[name]
    if like.is_cuda:
        found = measured().get(key(name, size, like.dtype, like.device))
        if found is not None:
            return found
    return TUNABLES[name].default(size, like.device)


@contextmanager
def use(name: str, parameters: Launch) -> Iterator[None]:
    """Launch a kernel with these parameters inside the block, whatever was measured."""
    before = _forced.get(name)
    _forced[name] = parameters
    try:
        yield
    finally:
        _forced.pop(name)
        if before is not None:
            _forced[name] = before


def _milliseconds(run: Callable[[], object]) -> float:
    from triton.testing import do_bench  # here, since Triton may be missing where nothing is measured

    return do_bench(run, return_mode="median")  # pyright: ignore[reportReturnType]  # a number, without quantiles


def _best(
    tunable: Tunable, size: int, run: Callable[[], object], device: torch.device, time: Timer
) -> Launch:
    """The fastest candidate; those that the device cannot hold are passed over."""
    times: dict[Launch, float] = {}
    default = tunable.default(size, device)
    for candidate in dict.fromkeys([default, *tunable.candidates(size, device)]):
        with use(tunable.name, candidate):
            try:
                times[candidate] = time(run)
            except (RuntimeError, ValueError):  # out of memory, shared memory or registers
                continue
    return min(times, key=lambda c: times[c], default=default)


def tune(
    rows: int,
    sizes: dict[str, int],
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    *,
    time: Timer = _milliseconds,
    save: bool = True,
) -> dict[str, Launch]:
    """Measure kernels on this device and keep the best parameters.

    `sizes` names the kernels (keys of `TUNABLES`) and the length of their rows (the hidden size, or the
    vocabulary for the linear losses); `rows` is how many rows to measure with. Returns the parameters found.
    Raises UserError for an unknown kernel or without a GPU.
    """
    device = torch.device(device)
    if unknown := sizes.keys() - TUNABLES.keys():
        raise UserError(
            f"no kernel is called {sorted(unknown)[0]}", remedy=f"choose from {', '.join(sorted(TUNABLES))}"
        )
    if time is _milliseconds and not torch.cuda.is_available():
        raise UserError("kernels are tuned on the GPU that will run them, and there is none here")
    found: dict[str, Launch] = {}
    for name, size in sizes.items():
        run = TUNABLES[name].trial(rows, size, dtype, device)
        found[name] = _best(TUNABLES[name], size, run, device, time)
        measured()[key(name, size, dtype, device)] = found[name]
    if save:
        _save()
    return found


def _save() -> None:
    """Write all measurements, replacing the file in one step so that a reader never sees half of it."""
    path = cache_path()
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({k: asdict(v) for k, v in sorted(measured().items())}, indent=1))
    part.replace(path)
