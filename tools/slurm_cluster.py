"""Runs a command inside a small real Slurm cluster on this machine: munged, slurmctld and several slurmd,
each a node of its own, in one folder that is removed afterwards.

    python tools/slurm_cluster.py --nodes 2 -- bash -c 'sinfo; srun -N2 hostname'

"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
_READY_S = 60

_CONFIGURATION = """\
ClusterName=secc
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=30
InactiveLimit=0
MinJobAge=3600
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """Returns what this machine lacks to run a cluster."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return missing if os.geteuid() == 0 else [*missing, "root"]


@contextmanager
def run_cluster(nodes: int, cores: int) -> Iterator[dict[str, str]]:
    """Starts a cluster of `nodes` nodes with `cores` cores each; yields the environment for its commands. All
    daemons are gone afterwards. Raises RuntimeError, with their logs, if they do not start."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="secc_slurm_")))
        folder.chmod(0o755)  # munged refuses a socket where others cannot look
        host, ports = socket.gethostname().partition(".")[0], _free_ports(nodes + 1)
        names = [f"node{i}" for i in range(nodes)]
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cores} RealMemory=500"
            for name, port in zip(names, ports[1:], strict=True)
        ]
        configuration = folder / "slurm.conf"
        configuration.write_text(
            _CONFIGURATION.format(host=host, port=ports[0], folder=folder, nodes="\n".join(lines))
        )
        for name in ("state", *(f"spool/{n}" for n in names)):
            (folder / name).mkdir(parents=True)
        environment = {**os.environ, "SLURM_CONF": str(configuration)}
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        # Each daemon stays a child of this process, so that its end is ours to wait for.
        munge = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid"}
        munge |= {"log-file": "munged.log", "seed-file": "munge.seed"}
        daemons = [
            ["munged", "--foreground", "--force", *(f"--{k}={folder}/{v}" for k, v in munge.items())],
            ["slurmctld", "-D", "-f", str(configuration)],
            *(["slurmd", "-D", "-f", str(configuration), "-N", name] for name in names),
        ]
        started: list[subprocess.Popen[bytes]] = []
        stack.callback(_end_all, started)
        for command in daemons:
            log = stack.enter_context(
                (folder / f"{command[0]}_{command[-1].rpartition('/')[2]}.out").open("wb")
            )
            started.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            )
            if command[0] == "munged":
                _wait_until((folder / "munge.socket").exists, folder)
        _wait_until(lambda: _idle_nodes(environment) == nodes, folder)
        yield environment


def _idle_nodes(environment: dict[str, str]) -> int:
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"], env=environment, capture_output=True, text=True
    )
    return len(done.stdout.split())


def _wait_until(is_ready: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while not is_ready():
        if time.monotonic() > deadline:
            files = sorted((*folder.glob("*.log"), *folder.glob("*.out")))
            texts = [f"{p.name}:\n{p.read_text(errors='replace')[-2000:]}" for p in files]
            raise RuntimeError("the cluster did not start\n" + "\n".join(texts))
        time.sleep(0.2)


def _end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in reversed(processes):
        process.terminate()
    for process in reversed(processes):
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--cores", type=int, default=2, help="cores of each node, whatever the machine has")
    parser.add_argument("command", nargs="+", help="after --")
    options = parser.parse_args()
    if missing := missing_programs():
        print(f"needs {', '.join(missing)}: apt-get install slurm-wlm munge, as root", file=sys.stderr)
        return 2
    with run_cluster(options.nodes, options.cores) as environment:
        return subprocess.run(options.command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
