"""Trains a tiny model for many steps and looks at what each process of the run holds.

    python -m tools.soak --steps 20000 --json docs/benchmarks/soak.json
    python -m tools.soak --emulate 64 --minutes 60 --json docs/benchmarks/soak_emulated.json

Three ranks with a loader, a recorder and a writer each train `tools/models/repeats.py` and save every 50
steps; with `--emulate`, that many ranks plan steps and sleep for their predicted times. Every few seconds the
tool reads memory, descriptors and threads of each process, and the bytes in the folders of checkpoints and
logs. The table compares the first fifth after the warm-up with the last fifth of the readings; the run is
flat if memory grows by less than `MOST_GROWTH` and 1 MiB, and nothing else grows but logs, by lines of steps.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from secc.runtime.training.emulation import EMULATION_FILE
from tools.benchmark_table import BenchmarkTable, add_json_option

ROOT = Path(__file__).resolve().parent.parent
RANKS, SAVE_EVERY, READ_EVERY_S, WARM_UP = 3, 50, 5.0, 0.2
SCALE = 100  # of emulated times: a step takes some seconds
MOST_GROWTH = 0.02  # of a process's own memory
COLUMNS = (
    "process",
    "readings",
    "MiB",
    "MiB, end",
    "descriptors",
    "descriptors, end",
    "threads",
    "threads, end",
)


class Readings:
    """What the processes of a run held, by process name, in the order of time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.memory: dict[str, list[float]] = defaultdict(list)
        self.descriptors: dict[str, list[int]] = defaultdict(list)
        self.threads: dict[str, list[int]] = defaultdict(list)
        self.saved_bytes: list[int] = []
        self.log_bytes = 0  # at the last reading

    def read_processes(self, launcher: int) -> None:
        """Adds a reading of each process."""
        for pid, name in _processes_of(self._folder, launcher):
            with suppress(OSError, StopIteration):  # it ends just now
                place = Path(f"/proc/{pid}")
                lines = (place / "smaps_rollup").read_text().splitlines()
                # What is this process's own: pages shared after a fork belong to all of them.
                own = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
                status = (place / "status").read_text().splitlines()
                threads = next(int(line.split()[1]) for line in status if line.startswith("Threads:"))
                descriptors = len(os.listdir(place / "fd"))
                self.memory[name].append(own / 1024)
                self.descriptors[name].append(descriptors)
                self.threads[name].append(threads)
        with suppress(OSError):  # a checkpoint is removed just now
            files = (self._folder / "saved").rglob("*")
            self.saved_bytes.append(sum(file.stat().st_size for file in files if file.is_file()))
        self.log_bytes = sum(file.stat().st_size for file in (self._folder / "logs").glob("*"))


def _processes_of(folder: Path, launcher: int) -> Iterator[tuple[int, str]]:
    """Yields the processes of the run with names such as "rank 1" and "rank 1 secc-loader"."""
    yield launcher, "launcher"
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            text = (entry / "environ").read_bytes() if entry.name.isdecimal() else b""
            variables = dict(v.split(b"=", 1) for v in text.split(b"\0") if b"=" in v)
            if variables.get(b"SECC_SOAK") == str(folder).encode() and b"RANK" in variables:
                helper = (entry / "comm").read_text().strip()
                name = f"rank {variables[b'RANK'].decode()}"
                yield int(entry.name), f"{name} {helper}" if helper.startswith("secc-") else name


def split_readings(values: Sequence[float]) -> tuple[float, float]:
    """Returns the medians of the first fifth after the warm-up and of the last fifth."""
    after = values[int(len(values) * WARM_UP) :]
    part = max(1, len(after) // 5)
    return median(after[:part]), median(after[-part:])


def soak(plan: Path, folder: Path, steps: int, minutes: float, emulates: bool) -> tuple[Readings, int]:
    """Runs the plan for some steps, or minutes if these are over first; returns the readings and the number
    of steps."""
    command = [sys.executable, "-m", "secc.runtime.training.supervisor", str(plan)]
    options = ["--save", folder / "saved", "--save-every", SAVE_EVERY, "--keep", 2, "--recorders", 1]
    if emulates:
        command = [sys.executable, "-m", "secc", "run", str(plan), "--emulate", "--scale", str(SCALE)]
        options = []
    options += ["--log-dir", folder / "logs", "--steps", steps]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SECC_SOAK": str(folder)}
    process = subprocess.Popen([*command, *map(str, options)], env=environment, stderr=subprocess.DEVNULL)
    readings, began = Readings(folder), time.monotonic()
    log = folder / "logs" / (EMULATION_FILE if emulates else "metrics.jsonl")
    while process.poll() is None and time.monotonic() - began < 60 * minutes:
        time.sleep(READ_EVERY_S)
        if log.exists() and log.stat().st_size:
            readings.read_processes(process.pid)
    process.send_signal(signal.SIGTERM)
    code = process.wait()
    if code and not emulates:  # emulated ranks end at once
        raise SystemExit(f"the run ended with {code}")
    return readings, sum(1 for _ in log.open())


def main(arguments: Sequence[str]) -> int:
    """Prints what each process held. Returns 1 if something grew."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=600.0, help="end the run after M minutes")
    parser.add_argument("--steps", type=int, default=10**9, help="end the run after N steps")
    parser.add_argument("--emulate", type=int, metavar="RANKS", help="emulate that many ranks")
    add_json_option(parser)
    o = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="secc-soak-") as name:
        folder = Path(name)
        model = ROOT / "tools" / "models" / "repeats.py"
        command = [sys.executable, "-m", "secc", "compile", str(model), "-o", str(folder / "plan")]
        command += ["--cluster", f"local:{o.emulate or RANKS}", "--global-batch", f"{4 * (o.emulate or 1)}"]
        if o.emulate:  # the solver would leave most of them out
            command += ["--set", f"pixels.dp={o.emulate // 4}"]
            command += ["--set", f"head.dp={o.emulate - o.emulate // 4}"]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
        readings, steps = soak(folder / "plan", folder, o.steps, o.minutes, bool(o.emulate))
    saved = [0.0, 0.0] if o.emulate else [size / 2**20 for size in split_readings(readings.saved_bytes)]
    table = BenchmarkTable(
        COLUMNS,
        f"What the processes of a run of {steps} steps held: medians of the first fifth after the warm-up"
        f" and of the last fifth of the readings. The folder of checkpoints had {saved[0]:.2f} MiB, and"
        f" {saved[1]:.2f} at the end; the logs had {readings.log_bytes / steps:.0f} bytes a"
        " step.",
        o.json,
    )
    grown = saved[1] > 1.5 * saved[0]
    for process in sorted(readings.memory):
        memory = split_readings(readings.memory[process])
        counts = [split_readings(counted[process]) for counted in (readings.descriptors, readings.threads)]
        grown |= memory[1] > memory[0] * (1 + MOST_GROWTH) + 1 or any(after > at for at, after in counts)
        cells = [f"{value:.1f}" for value in memory] + [f"{n:.0f}" for pair in counts for n in pair]
        table.add_row(process, len(readings.memory[process]), *cells)
    print(f"{steps} steps: {'something grew' if grown else 'flat'}")
    return int(grown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
