"""The memory of this host that a process may still use."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_CGROUP_FILES = (  # of this container: limit, use
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Returns the bytes that this host, and the container around this process, have left; infinity if neither
    says."""
    left = float("inf")
    with suppress(OSError, ValueError, IndexError):
        lines = (proc / "meminfo").read_text(encoding="utf-8").splitlines()
        left = next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    for limit, used in _CGROUP_FILES:
        with suppress(OSError, ValueError):  # "max" is no limit
            left = min(left, _read_number(cgroup / limit) - _read_number(cgroup / used))
    return left


def _read_number(path: Path) -> int:
    return int(path.read_text(encoding="utf-8"))
