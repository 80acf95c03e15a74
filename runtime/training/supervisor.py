"""The launcher: starts the ranks of a plan on this machine, watches them, starts them again after a failure,
and ends them. `secc run` calls it; `python -m secc.runtime.training.supervisor PLAN [options]` does the same
without the compiler.

On several nodes (`--nnodes`) each node has a launcher, and that of node 0 decides (`node_group`).

Ranks meet in a private folder (`rendezvous`), and every process of a rank belongs to the rank's own session,
which the launcher kills as a whole. A launcher that is killed itself leaves nothing behind either: its ranks
have asked the kernel to die with it (`runtime.host.parent_death`).

The first SIGINT, SIGTERM or SIGUSR1 is passed on: the ranks finish their step, save and end. The second one
ends them at once.
"""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from secc.runtime.errors import UserError
from secc.runtime.host.output_streams import drop_unwritable_output, open_closed_streams
from secc.runtime.host.private_folder import hold_private_folder
from secc.runtime.parameters.checkpoint_copies import COPIES_VARIABLE, CopyKeeper
from secc.runtime.plan.compiled_files import check_compiled_code
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.schema import Plan
from secc.runtime.training.hang_watch import HANG_EXIT_CODE
from secc.runtime.training.machine_check import check_machine
from secc.runtime.training.node_group import (
    NodeServer,
    NodesRanks,
    make_node_place,
    serve_node,
)
from secc.runtime.training.options import RunOptions, parse_options
from secc.runtime.training.rank_group import Attempt, LocalRanks, StopRequests
from secc.runtime.training.rendezvous import STORE_VARIABLE, restart_pause

_ENVIRONMENT_DEFAULTS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
_ONE_MACHINE_DEFAULTS = {"GLOO_SOCKET_IFNAME": "lo"}
# Makes the plan for a number of ranks from a plan directory, and returns the directory of the new plan.
Replanner = Callable[[Path, int], Path]
_STEADY_S = 300  # an attempt that ran longer did not fail at once


def run_plan(directory: str | Path, arguments: Sequence[str] = (), replan: Replanner | None = None) -> int:
    """Trains the plan in `directory` with all its ranks on this machine, or this node's of several;
    `arguments` are those of run.py.

    After a failure all ranks start again, `--max-restarts` times at most, from the newest checkpoint in
    `--save`. A UserError would be raised again, so it ends the run. With `--on-loss replan`, `replan` makes
    the plan for the ranks that are left; after `--rejoin-after` seconds all ranks are tried again.

    Returns 0; 2 after a UserError on the ranks, which has been printed; 1 if a rank died, after a message
    that names it; 128 + n if signal n ended the run at once. Leaves no process behind. Raises UserError for a
    plan or options that cannot be read, and for a machine without the plan's devices.
    """
    open_closed_streams()
    drop_unwritable_output(("stderr",))
    directory = Path(directory).resolve()
    options, plan = parse_options(arguments), load_plan(directory)
    own_ranks, place = range(plan.world_size), None
    if options.nnodes > 1:
        place = make_node_place(options.nnodes, options.node_rank, options.rdzv_endpoint, options.rdzv_secret)
        own_ranks = _ranks_of_nodes(plan, place.nodes, str(directory))[place.node]
    if options.emulate is None:
        check_machine(plan, own_ranks, options.share_gpus)
    if options.on_loss == "replan" and replan is None:
        raise UserError("--on-loss replan needs the compiler", remedy="start the plan by `secc run`")
    logs = options.log_dir or directory / "logs"  # also of a plan for fewer ranks
    arguments = [*arguments, "--log-dir", str(logs)]
    with (
        hold_private_folder() as folder,
        rank_environment({} if place else _ONE_MACHINE_DEFAULTS),
        StopRequests() as requests,
        _keep_copies(folder, options.replicate) as keeper,
    ):
        if place is not None and place.node:
            check_compiled_code(directory)
            return serve_node(directory, arguments, place, options, requests, _visible_devices, keeper)
        with nullcontext() if place is None else NodeServer(place, plan.hash, options, keeper) as server:
            supervisor = _Supervisor(directory, arguments, options, plan, replan, requests, server)
            code = 2  # of a UserError
            try:
                code = supervisor.run(folder)
                return code
            finally:
                if server is not None:
                    server.end_run(code)


class _Supervisor:
    """Runs one attempt after the other, under the plan or one for fewer ranks. `_lost`: ranks of the plan
    that the present attempt does without. `_rejoin_at`: when they are tried again. `server`: of a run on
    several nodes."""

    def __init__(
        self,
        directory: Path,
        arguments: Sequence[str],
        options: RunOptions,
        plan: Plan,
        replan: Replanner | None,
        requests: StopRequests,
        server: NodeServer | None,
    ) -> None:
        self._arguments, self._server = list(arguments), server
        self._run = secrets.token_hex(8)
        self._directory, self._options, self._world_size = directory, options, plan.world_size
        self._nodes = _ranks_of_nodes(plan, options.nnodes, str(directory))
        self._make_plan, self._requests = replan, requests
        self._plan, self._lost = directory, list[int]()
        self._rejoin_at, self._quarantine_s = float("inf"), options.rejoin_after
        self._failures, self._quick_failures = 0, 0

    def run(self, folder: Path) -> int:
        """Returns the exit code of the run; `folder` is private to it."""
        for attempt in itertools.count():
            began, requests = time.monotonic(), self._requests
            if self._server is not None:
                self._server.wait_for_nodes(self._needed_nodes(), requests)
                if requests.count:
                    return 128 + requests.last
            with self._start_ranks(attempt, folder / f"store_{attempt}") as ranks:
                watched = Attempt(ranks, requests)
                codes = watched.wait(self._may_return)
            if requests.count > 1 or (requests.count and any(codes.values())):
                return 128 + requests.last
            # Ranks that are still starting when they are asked end without a save, and so do their peers.
            if watched.was_asked_to_finish and not requests.count and 2 not in codes.values():
                sys.stderr.write(f"rank {self._lost_text()} is tried again: returning to {self._directory}\n")
                self._plan, self._lost, self._rejoin_at = self._directory, [], float("inf")
                continue
            result, causes = watched.report_failures(codes)
            ended = self._failures == self._options.max_restarts or self._options.on_loss == "stop"
            if result != 1 or ended:
                if causes and HANG_EXIT_CODE not in codes.values():  # the report of a hang says it
                    sys.stderr.write(f"  what to do: {self._remedy(codes, causes)}\n")
                return result
            self._failures += 1
            steady = time.monotonic() - began > _STEADY_S
            self._quick_failures = 1 if steady else self._quick_failures + 1
            if self._options.on_loss == "replan" and causes:
                self._go_on_without(causes)
            pause = restart_pause(self._quick_failures)
            saved = self._options.save
            source = f"the newest checkpoint in {saved}" if saved else "the beginning (no --save)"
            sys.stderr.write(
                f"restart {self._failures} of {self._options.max_restarts} in {pause} s from {source}\n"
            )
            if requests.wait(pause):
                return 128 + requests.last
        raise AssertionError("unreachable")

    def _start_ranks(self, attempt: int, store: Path) -> LocalRanks | NodesRanks:
        """Starts all ranks of the present plan; `store` is the file in which those of one machine meet.
        Raises UserError if code of the plan is lost or changed."""
        check_compiled_code(self._plan)
        limit, lost, left = self._options.hang_timeout, self._lost, self._world_size - len(self._lost)
        if self._server is None:
            devices, place = _visible_devices(self._world_size, lost), {STORE_VARIABLE: str(store)}
            return LocalRanks(self._plan, self._arguments, 0, left, left, place, attempt, devices, limit)
        self._server.table.clear()
        first = 0
        ranks_of_node, lost_of_node = dict[int, range](), dict[int, list[int]]()
        for node, own in enumerate(self._nodes):
            lost_of_node[node] = [rank - own.start for rank in own if rank in lost]
            ranks_of_node[node] = range(first, first + len(own) - len(lost_of_node[node]))
            first = ranks_of_node[node].stop
        local, here = None, ranks_of_node[0]
        if here:
            place = self._server.place.rank_variables(self._server.own_address, self._run)
            devices = _visible_devices(len(self._nodes[0]), lost_of_node[0])
            local = LocalRanks(
                self._plan, self._arguments, 0, len(here), left, place, attempt, devices, limit
            )
        message = {"plan": self._plan.name, "world_size": left, "attempt": attempt, "run": self._run}
        return NodesRanks(self._server, local, ranks_of_node, message, lost_of_node)

    def _needed_nodes(self) -> list[int]:
        """Returns the nodes other than this one with ranks that are not lost."""
        return [n for n, ranks in enumerate(self._nodes) if n and not {*ranks} <= {*self._lost}]

    def _may_return(self) -> bool:
        """Tells whether lost ranks can be tried again."""
        if time.monotonic() <= self._rejoin_at:
            return False
        nodes = range(1, self._options.nnodes)
        return self._server is None or all(node in self._server.members for node in nodes)

    def _remedy(self, codes: Mapping[int, int], causes: Sequence[int]) -> str:
        """Returns what a user can do after ranks have ended by themselves and are not started again."""
        cause = "read what the rank has printed"
        if any(codes.get(rank) == -signal.SIGKILL for rank in causes):
            cause = "see whether the host was out of memory (dmesg)"
        if self._options.save is None:
            return f"{cause}; with --save DIR and --max-restarts N a run continues by itself"
        return f"{cause}; continue with --resume auto, by itself with --max-restarts N"

    def _go_on_without(self, causes: Collection[int]) -> None:
        """Plans for the ranks that are left after `causes` were lost; if that cannot be done, all ranks start
        again."""
        assert self._make_plan is not None
        present = [r for r in range(self._world_size) if r not in self._lost]
        self._lost = sorted({*self._lost, *(present[rank] for rank in causes)})
        left = self._world_size - len(self._lost)
        began = time.monotonic()
        try:
            if left < 1:
                raise UserError("no rank is left")
            self._plan = self._make_plan(self._directory, left)
        except UserError as error:
            sys.stderr.write(f"cannot go on with {left} ranks, so all are started again: {error.message}\n")
            self._plan, self._lost, self._rejoin_at = self._directory, [], float("inf")
            return
        now = time.monotonic()
        self._rejoin_at = now + self._quarantine_s
        sys.stderr.write(
            f"rank {self._lost_text()} is lost: going on with {left} ranks under {self._plan}, planned in"
            f" {now - began:.1f} s\n"
        )
        self._quarantine_s *= 2  # a device that fails again is tried less often

    def _lost_text(self) -> str:
        return ", ".join(map(str, self._lost))


def _ranks_of_nodes(plan: Plan, nodes: int, where: str) -> list[range]:
    """Returns the ranks of each node: as many as its devices if the plan is for several nodes, the rest on
    the last one, else the same number on each. Raises UserError for another number of nodes."""
    count, is_for_several = plan.world_size, int(plan.cluster.get("nodes", 1)) > 1
    per_node = int(plan.cluster["per_node"]) if is_for_several and nodes > 1 else count // nodes
    if not per_node or -(-count // per_node) != nodes:
        message = f"the plan's {count} ranks do not fill {nodes} nodes"
        raise UserError(message, where, "give the plan's --nnodes, or compile for these nodes")
    return [range(node * per_node, min(count, (node + 1) * per_node)) for node in range(nodes)]


def _visible_devices(world_size: int, lost: Collection[int]) -> str | None:
    """Returns CUDA_VISIBLE_DEVICES for the ranks that are left; None if all devices stay."""
    if not lost:
        return None
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(world_size)))).split(",")
    return ",".join(device for rank, device in enumerate(devices) if rank not in lost)


@contextmanager
def _keep_copies(folder: Path, replicates: bool) -> Iterator[CopyKeeper | None]:
    """Keeps copies of checkpoints for the ranks, if the run asks for it."""
    if not replicates:
        yield None
        return
    with CopyKeeper(folder / "copies") as keeper:
        os.environ[COPIES_VARIABLE] = str(keeper.path)
        try:
            yield keeper
        finally:
            del os.environ[COPIES_VARIABLE]


@contextmanager
def rank_environment(more: Mapping[str, str] = _ONE_MACHINE_DEFAULTS) -> Iterator[None]:
    """Sets the environment of the ranks: one thread, and `more` (the loopback device), unless given
    otherwise, and this secc on the import path."""
    defaults = _ENVIRONMENT_DEFAULTS | dict(more)
    before = {name: os.environ.get(name) for name in (*defaults, "PYTHONPATH")}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [before["PYTHONPATH"], str(Path(__file__).parents[3])])
    )
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


if __name__ == "__main__":
    try:
        sys.exit(run_plan(sys.argv[1], sys.argv[2:]))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
