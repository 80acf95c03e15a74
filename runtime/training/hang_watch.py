"""Notices that a run no longer makes progress, and says which rank is the cause.

Each rank has a thread that compares the time since the rank's last instruction with a limit, and that looks
for processes of this machine's ranks, and helpers of its own, that were stopped for as long: these need no
allowance for long instructions. The first rank over the limit asks all ranks, through the run's store, what
they do. Ranks answer from their own threads, so one that waits for a message answers, and one that is stopped
does not. The cause is a rank that does not answer, else one that waits for its loader or writer or has a
stopped one, else one that computes. The report goes to stderr, and the Python stacks of all processes to
`LOGDIR/hang.txt`; then the ranks end.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from secc.runtime.host.activity import Activity, Waiting
from secc.runtime.host.process_table import (
    StoppedProcesses,
    find_descendants,
    process_name,
    process_state,
)
from secc.runtime.parameters.checkpoint_writer import WRITER_NAME

HANG_EXIT_CODE = 76
HANG_FILE = "hang.txt"
LONG_FACTOR = 6  # loading, compiling and saving may take this many times --hang-timeout
_ANSWER_S = 6.0  # for ranks to answer, on a busy machine
_LOOKS = 5  # for stopped processes, within --hang-timeout
_STACK_S = 0.3  # for a process to write its stack


class StackFile:
    """A file without a name that this process, and those that it forks afterwards, write their Python stacks
    to on SIGUSR2, whatever they are in."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(mode="w+b")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR2, self._file, all_threads=True, chain=False)

    @property
    def place(self) -> str:
        """The path of the file for other processes of this user."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def read_stacks(self) -> str:
        """Returns the stacks of this process and of those that it has started; a stopped one is continued for
        it."""
        helpers = [process.pid for process in multiprocessing.active_children() if process.pid is not None]
        return "".join(
            f"{name}:\n{_ask_for_stack(pid, Path(self.place))}\n"
            for name, pid in (("rank", os.getpid()), *((f"process {pid}", pid) for pid in helpers))
        )


class HangWatch:
    """The watch of one rank. `timeout` is in seconds, on top of the median step. `is_loading` tells whether
    the rank waits for its loader."""

    def __init__(
        self,
        activity: Activity,
        stacks: StackFile,
        store: Any,
        rank: int,
        world_size: int,
        timeout: float,
        log_dir: Path,
        is_loading: Callable[[], bool],
    ) -> None:
        self._activity, self._stacks, self._store, self._timeout = activity, stacks, store, timeout
        self._rank, self._world_size, self._log_dir = rank, world_size, log_dir
        self._is_loading, self._ended = is_loading, threading.Event()
        self._stopped, self._own_stopped = StoppedProcesses(), list[int]()
        self._looked_at = time.monotonic()
        self._local_ranks: list[int] | None = None  # processes; None until all have joined
        about = {"host": socket.gethostname(), "pid": os.getpid(), "stacks": stacks.place}
        store.set(f"secc/process/{rank}", json.dumps(about))
        self._thread = threading.Thread(target=self._watch, name="secc-hang-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the watch, before the process group is left."""
        self._ended.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        with suppress(RuntimeError):  # the store has gone, and the run with it
            while not self._ended.wait(min(1.0, self._timeout / 10)):
                if self._is_over_limit() or self._finds_stopped_process():
                    self._store.set("secc/hang", "1")
                    if self._store.add("secc/hang/reporter", 1) == 1:
                        self._report()
                        self._store.set("secc/hang/reported", "1")
                elif not self._store.check(["secc/hang"]):
                    continue
                self._answer()
                deadline = time.monotonic() + 2 * _ANSWER_S
                while time.monotonic() < deadline and not self._store.check(["secc/hang/reported"]):
                    time.sleep(0.05)
                os._exit(HANG_EXIT_CODE)

    def _is_over_limit(self) -> bool:
        # The first step of a run compiles kernels.
        takes_long = self._activity.may_take_long or not self._activity.median_step_s
        limit = self._timeout * (LONG_FACTOR if takes_long else 1)
        return time.monotonic() - self._activity.since > limit + self._activity.median_step_s

    def _finds_stopped_process(self) -> bool:
        """Tells whether a process of a rank on this machine, or a helper of this one, has been stopped for
        longer than the limit."""
        every, now = self._timeout / _LOOKS, time.monotonic()
        if now - self._looked_at < every:
            return False
        self._looked_at = now
        if self._local_ranks is None and all(
            self._store.check([f"secc/process/{r}"]) for r in range(self._world_size)
        ):
            about = [json.loads(self._store.get(f"secc/process/{r}")) for r in range(self._world_size)]
            self._local_ranks = [a["pid"] for a in about if a["host"] == socket.gethostname()]
        own, others = find_descendants(os.getpid()), self._local_ranks or []
        found = self._stopped.find_longer_than(self._timeout - every, [*own, *others])
        self._own_stopped = [pid for pid in found if pid in own]
        return bool(found)

    def _answer(self) -> None:
        """Says what this rank does."""
        activity = self._activity
        waits = Waiting.LOADER if self._is_loading() else activity.waits
        text = f"{waits.value} {activity.what}, step {activity.step}, for"
        text += f" {time.monotonic() - activity.since:.0f} s"
        for pid in self._own_stopped:
            name = process_name(pid)
            waits = Waiting.WRITER if name == WRITER_NAME else Waiting.LOADER
            text += f"; its {name} (process {pid}) is stopped"
        answer = {"waits": waits.name, "text": text, "stacks": self._stacks.read_stacks()}
        self._store.set(f"secc/hang/{self._rank}", json.dumps(answer))

    def _report(self) -> None:
        """Collects the answers, prints the cause, and writes all stacks."""
        self._answer()
        deadline = time.monotonic() + _ANSWER_S
        missing = set(range(self._world_size))
        while missing and time.monotonic() < deadline:
            missing = {r for r in missing if not self._store.check([f"secc/hang/{r}"])}
            time.sleep(0.05)
        answers: dict[int, dict[str, str]] = {
            r: json.loads(self._store.get(f"secc/hang/{r}"))
            if r not in missing
            else self._describe_silent_rank(r)
            for r in range(self._world_size)
        }
        kinds = {r: answer["waits"] for r, answer in answers.items()}
        causes = next(
            (
                found
                for kind in ("SILENT", "LOADER", "WRITER", "NOTHING")
                if (found := [r for r in kinds if kinds[r] == kind])
            ),
            list(kinds),
        )
        lines = [f"error: the run makes no progress: {_describe_causes(causes, kinds)}"]
        lines += [f"  rank {r} {answer['text']}" for r, answer in answers.items()]
        place = self._log_dir / HANG_FILE
        with suppress(OSError):
            place.write_text(
                "\n".join([*lines, "", *(f"rank {r}\n{a['stacks']}" for r, a in answers.items())])
            )
            lines.append(f"  Python stacks of all processes: {place}")
        lines.append("  what to do: correct what the stacks show; --hang-timeout says how long to wait")
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()

    def _describe_silent_rank(self, rank: int) -> dict[str, str]:
        """Returns what can be said about a rank that does not answer; its stack if it runs on this
        machine."""
        answer = {"waits": "SILENT", "text": "does not answer", "stacks": ""}
        if not self._store.check([f"secc/process/{rank}"]):
            return answer | {"text": "has not joined"}
        about = json.loads(self._store.get(f"secc/process/{rank}"))
        if about["host"] == socket.gethostname():
            state = process_state(about["pid"])
            answer["text"] += f": process {about['pid']} is {state}"
            answer["stacks"] = _ask_for_stack(about["pid"], Path(about["stacks"]))
        return answer


def _describe_causes(causes: list[int], kinds: dict[int, str]) -> str:
    named = f"rank{'s' if len(causes) > 1 else ''} {', '.join(map(str, causes))}"
    match kinds[causes[0]]:
        case "SILENT":
            return f"{named} did not answer"
        case "LOADER":
            return f"the loader of {named} brings no samples"
        case "WRITER":
            return f"the process that writes checkpoints of {named} does not finish"
        case "NOTHING":
            return f"{named} did not finish an instruction"
        case _:
            return "all ranks wait for each other"


def _ask_for_stack(pid: int, file: Path) -> str:
    """Makes a process write its stack to the end of `file`, and returns it. Continues a stopped process."""
    try:
        before = file.stat().st_size
        os.kill(pid, signal.SIGUSR2)
        os.kill(pid, signal.SIGCONT)
        time.sleep(_STACK_S)
        return file.read_bytes()[before:].decode(errors="replace")
    except OSError as error:
        return f"no stack: {error.strerror}\n"
