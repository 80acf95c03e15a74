"""A Chrome trace of a run: one track per rank, written in parts by the ranks and joined by rank 0.

Times are microseconds since a moment that all ranks share. On one machine the monotonic clock is common;
ranks on different machines agree on zero at a barrier. On a GPU every event waits for the device, so a traced
run is slower than an untraced one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from secc.runtime.host.activity import Activity, Waiting
from secc.runtime.monitoring.json_lines import say

# Events in which a rank meets all others, and events that may take as long as many steps.
_COLLECTIVE_KINDS = frozenset({"METADATA", "GRADIENTS", "NORM", "TOTALS", "SAVE"})
_TRACK_NAMES = ("computes and messages", "recordings", "steps")
_LONG_KINDS = frozenset({"SAVE", "EVALUATE"})


class ChromeTrace:
    """Collects the events of this rank; keeps nothing if `path` is None. `start_trace` and `close` are
    collective. `activity` is the event that goes on, for the watch against hangs."""

    def __init__(self, path: Path | None, rank: int, device: torch.device) -> None:
        self.path, self.rank = path, rank
        self._device = device
        self.activity = Activity()
        self._zero_ns = 0
        self._events: list[dict[str, Any]] = []

    @property
    def is_active(self) -> bool:
        """Whether events are recorded."""
        return self.path is not None

    def start_trace(self, label: str) -> None:
        """Agrees on time zero with the other ranks; `label` names this rank's track."""
        if self.path is None:
            return
        named = {
            "process_name": {"name": f"rank {self.rank}: {label}"},
            "process_sort_index": {"sort_index": self.rank},
        }
        self._events = [
            {"ph": "M", "pid": self.rank, "tid": 0, "name": name, "args": args}
            for name, args in named.items()
        ]
        self._events += [
            {"ph": "M", "pid": self.rank, "tid": track, "name": "thread_name", "args": {"name": name}}
            for track, name in enumerate(_TRACK_NAMES)
        ]
        dist.barrier()
        self._zero_ns = _agree_on_zero(self._device)

    @contextmanager
    def record_event(self, name: str, **args: Any) -> Iterator[None]:
        """Records the body as one event. `args` are shown in the viewer and read by other tools."""
        start = self._now_ns() if self.is_active else 0
        kind = args.get("kind")
        waits = Waiting.PEERS if kind in _COLLECTIVE_KINDS else Waiting.NOTHING
        with self.activity.during(name, waits, may_take_long=kind in _LONG_KINDS):
            yield
        if self.is_active:
            self._append_event(name, 0, start, self._now_ns(), args)

    @contextmanager
    def record_step(self, step: int) -> Iterator[None]:
        """Records the body as one step, on a track of its own."""
        start = self._now_ns() if self.is_active else 0
        yield
        if self.is_active:
            self._append_event(f"step {step}", 2, start, self._now_ns(), {"kind": "STEP", "step": step})

    def record_background_event(self, name: str, start: int, end: int, **args: Any) -> None:
        """Records an event of another process of this rank, on its own track; `start` and `end` are
        nanoseconds of this machine's monotonic clock."""
        if self.path is not None:
            self._append_event(name, 1, start, end, args)

    def _append_event(self, name: str, track: int, start: int, end: int, args: dict[str, Any]) -> None:
        event = {
            "ph": "X",
            "pid": self.rank,
            "tid": track,
            "name": name,
            "cat": args.get("kind", ""),
            "args": args,
        }
        begins, takes = (start - self._zero_ns) / 1e3, (end - start) / 1e3
        flow = args.pop("flow", None)
        self._events.append(event | {"ts": begins, "dur": takes})
        if flow is not None:
            # An arrow from the SEND to the RECV of a message; each end lies within its event. All events have
            # `args`, for readers that look for them.
            ends = {"SEND": {"ph": "s"}, "RECV": {"ph": "f", "bp": "e"}}[args["kind"]]
            self._events.append(
                {"pid": self.rank, "tid": track, "name": "message", "cat": "message", "id": flow, "args": {}}
                | ends
                | {"ts": begins + takes / 2 if args["kind"] == "SEND" else begins + takes}
            )

    def close(self) -> None:
        """Writes this rank's part; rank 0 joins the parts."""
        if self.path is None:
            return
        try:
            _rank_part_path(self.path, self.rank).write_text(json.dumps(self._events))
        except OSError as error:
            say(f"warning: rank {self.rank}: cannot write its part of {self.path}: {error.strerror}")
        dist.barrier()
        if self.rank == 0:
            try:
                merge_rank_parts(self.path, dist.get_world_size())
            except (OSError, ValueError) as error:  # full disk, or a torn part
                say(f"warning: cannot write the trace {self.path}: {error}")

    def _now_ns(self) -> int:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic_ns()


def merge_rank_parts(path: Path, world_size: int) -> None:
    """Joins the ranks' parts next to `path` into one Chrome trace and deletes them."""
    parts = [_rank_part_path(path, rank) for rank in range(world_size)]
    events = [
        event for part in parts if part.exists() for event in json.loads(part.read_text(encoding="utf-8"))
    ]
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    os.replace(scratch, path)
    for part in parts:
        part.unlink(missing_ok=True)


def _rank_part_path(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.rank_{rank:05d}")


def _agree_on_zero(device: torch.device) -> int:
    """Returns this rank's monotonic time in nanoseconds at the common time zero: rank 0's clock on its own
    machine, this rank's clock on others. Call it right after a barrier."""
    now = time.monotonic_ns()
    host = _host_id()
    first = torch.tensor([host, now], dtype=torch.int64, device=device)
    dist.broadcast(first, 0)
    return int(first[1]) if int(first[0]) == host else now


def _host_id() -> int:
    """Returns a number that identifies the running machine (its boot)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    except OSError:
        boot = os.uname().nodename
    return int.from_bytes(boot.encode()[:7], "little")
