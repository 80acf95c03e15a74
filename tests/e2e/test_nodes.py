"""Runs on several nodes, which are network namespaces of this machine that reach each other over a bridge."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from secc.runtime.parameters.checkpoint import load_full_state_dict
from secc.runtime.training.supervisor import run_plan
from tests.e2e.harness import compile_and_write
from tests.runtime.run_processes import process_of_rank, ranks_of, steps_of, wait_for_step, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.gloo, pytest.mark.timeout(900)]
MODEL = Path(__file__).parents[2] / "tools" / "models" / "repeats.py"
ADDRESSES = ("10.97.31.1", "10.97.31.2", "10.97.31.3")  # of two nodes and of a stranger
PORT = 29633
FOREIGN = """
import socket, sys
from datetime import timedelta
import torch.distributed as dist
from secc.runtime.host.signed_channel import connect_to_peer
host, port = sys.argv[1], int(sys.argv[2])
for attempt in (
    lambda: connect_to_peer((host, port), b"what a stranger makes up"),
    lambda: dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=2)).set("k", "v"),
):
    try:
        attempt()
        print("joined")
    except Exception as error:
        print("refused", type(error).__name__)
for _ in range(20):
    with socket.create_connection((host, port)) as connection:
        connection.sendall(b"garbage" * 100)
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def spaces() -> Iterator[list[str]]:
    """Makes a network namespace for each address; skips the test where that is not permitted."""
    names, bridge = [f"secc-{os.getpid()}-{i}" for i in range(len(ADDRESSES))], f"sb{os.getpid()}"
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("network namespaces are not permitted here")
    try:
        for i, (name, address) in enumerate(zip(names, ADDRESSES, strict=True)):
            ip("netns", "add", name)
            ip("link", "add", f"{bridge}v{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{bridge}v{i}", "master", bridge, "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for i, name in enumerate(names):  # a link goes some time after its namespace, and its name with it
            subprocess.run(["ip", "link", "del", f"{bridge}v{i}"], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


class Nodes:
    """A run with one rank on each of two nodes."""

    def __init__(self, spaces: list[str], folder: Path, *options: str) -> None:
        self.spaces, self.folder, self.plan = spaces, folder, folder / "plan"
        self.saved, secret = folder / "saved", folder / "secret"
        compile_and_write(MODEL, self.plan, check=False, cluster="local:2", global_batch=4, strategy="apart")
        secret.write_text("a secret that nobody guesses")
        secret.chmod(0o600)
        self.common = ["--save-every", "5", "--no-first-check"]
        self.options = ["--nnodes", "2", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}", *options]
        self.options += ["--rdzv-secret", str(secret), "--save", str(self.saved)]

    def start(self, node: int) -> subprocess.Popen[str]:
        """Starts the launcher of a node in its namespace."""
        command = ["-m", "secc", "run", str(self.plan), *self.common, *self.options]
        return self._execute(node, [sys.executable, *command, "--node-rank", str(node)])

    def start_torchrun(self, node: int, backend: str, endpoint: str, *options: str) -> subprocess.Popen[str]:
        """Starts torchrun on a node in its namespace, without secc's launcher."""
        command = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        command += ["--rdzv-backend", backend, "--rdzv-endpoint", endpoint, "--rdzv-id", "mine"]
        if backend == "c10d":  # torch looks up its host's name, which namespaces share
            command += ["--rdzv-conf", f"is_host={int(node == 0)}"]
        command += ["--local-addr", ADDRESSES[node], "--max-restarts", "2", str(self.plan / "run.py")]
        command += [*self.common, "--save", str(self.saved), *options]
        return self._execute(node, [sys.executable, *command], GLOO_SOCKET_IFNAME="eth0")

    def _execute(self, node: int, command: list[str], **variables: str) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", self.spaces[node], *command]
        environment = os.environ | {"PYTHONPATH": os.getcwd()}
        environment.pop("GLOO_SOCKET_IFNAME", None)
        environment |= variables
        with (self.folder / f"messages_{node}").open("a") as messages:
            return subprocess.Popen(
                command, env=environment, stdout=messages, stderr=messages, text=True, start_new_session=True
            )

    def messages(self, node: int) -> str:
        return (self.folder / f"messages_{node}").read_text()

    def train_on_one_machine(self, steps: int) -> dict[str, torch.Tensor]:
        """Returns the weights after an undisturbed run."""
        whole = self.folder / "whole"
        options = [*self.common, "--steps", str(steps), "--log-dir", str(self.folder / "whole_logs")]
        assert run_plan(self.plan, [*options, "--save", str(whole)]) == 0
        return load_full_state_dict(whole)


def kill_node(nodes: Nodes, launcher: subprocess.Popen[str], node: int) -> None:
    """Kills all processes of a node at once."""
    found = subprocess.run(
        ["ip", "netns", "pids", nodes.spaces[node]], capture_output=True, text=True, check=True
    )
    for pid in map(int, found.stdout.split()):
        os.kill(pid, signal.SIGKILL)
    launcher.wait()


def test_strangers_stay_out_and_a_lost_node_comes_back(spaces: list[str], tmp_path: Path) -> None:
    steps = 400  # the run goes on while the stranger starts
    nodes = Nodes(spaces, tmp_path, "--steps", str(steps), "--max-restarts", "3")
    launchers = [nodes.start(0), nodes.start(1)]
    wait_for_step(nodes.plan, 3, launchers[0])
    stranger = [sys.executable, "-c", FOREIGN, ADDRESSES[0], str(PORT)]
    answers = subprocess.run(
        ["ip", "netns", "exec", spaces[2], *stranger], capture_output=True, text=True, check=False
    )
    assert answers.stdout.split()[::2] == ["refused", "refused"], answers.stdout + answers.stderr
    listening = subprocess.run(
        ["ip", "netns", "exec", spaces[0], "cat", "/proc/net/tcp"], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in listening.stdout.splitlines()[1:]]
    local = {row[1].partition(":")[0] for row in rows if row[3] == "0A"}
    assert local == {"011F610A"}  # 10.97.31.1, in the kernel's byte order
    kill_node(nodes, launchers[1], 1)
    wait_until(lambda: "node 1 with rank 1 is lost" in nodes.messages(0), launchers[0])
    launchers[1] = nodes.start(1)
    assert [launcher.wait(400) for launcher in launchers] == [0, 0], nodes.messages(0)
    assert "restart 1 of 3" in nodes.messages(0) and "Traceback" not in nodes.messages(0)
    assert steps_of(nodes.plan / "logs")[-1]["step"] == steps
    weights = load_full_state_dict(nodes.saved)
    for name, tensor in nodes.train_on_one_machine(steps).items():
        assert torch.equal(weights[name], tensor), name
    assert not list(ranks_of(nodes.plan))


@pytest.fixture
def etcd(spaces: list[str], tmp_path: Path) -> Iterator[str]:
    """An etcd server in the first namespace: its HOST:PORT."""
    program = shutil.which("etcd")
    if program is None or find_spec("etcd") is None:
        pytest.skip("needs the program etcd (Debian: etcd-server) and the package python-etcd")
    url = f"http://{ADDRESSES[0]}:2379"
    options = [
        "--enable-v2",
        "--data-dir",
        str(tmp_path / "etcd"),
        "--listen-peer-urls",
        "http://127.0.0.1:0",
    ]
    options += ["--listen-client-urls", url, "--advertise-client-urls", url]
    with (tmp_path / "messages_etcd").open("w") as messages:
        server = subprocess.Popen(
            ["ip", "netns", "exec", spaces[0], program, *options], stdout=messages, stderr=messages
        )
    yield f"{ADDRESSES[0]}:2379"
    server.kill()
    server.wait()


@pytest.mark.parametrize("backend", ["c10d", "etcd"])
def test_torchrun_starts_the_ranks_of_all_nodes_again(
    spaces: list[str], tmp_path: Path, backend: str, request: pytest.FixtureRequest
) -> None:
    endpoint = request.getfixturevalue("etcd") if backend == "etcd" else f"{ADDRESSES[0]}:{PORT}"
    nodes = Nodes(spaces, tmp_path)
    options = (backend, endpoint, "--steps", "60", "--resume", "auto")
    launchers = [nodes.start_torchrun(node, *options) for node in (0, 1)]
    wait_for_step(nodes.plan, 12, launchers[0])
    os.kill(process_of_rank(nodes.plan, 1), signal.SIGKILL)
    messages = [nodes.messages(0), nodes.messages(1)]
    assert [launcher.wait(400) for launcher in launchers] == [0, 0], messages
    text = nodes.messages(0) + nodes.messages(1)
    assert "restart 1:" in text and "were lost and are computed again" in text
    assert steps_of(nodes.plan / "logs")[-1]["step"] == 60
    weights = load_full_state_dict(nodes.saved)
    for name, tensor in nodes.train_on_one_machine(60).items():
        assert torch.equal(weights[name], tensor), name
    assert not list(ranks_of(nodes.plan))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_continues_from_its_neighbours_copies(
    spaces: list[str], tmp_path: Path, lost: int
) -> None:
    """Also if it is the node that all others have joined: the same command starts it again."""
    nodes = Nodes(spaces, tmp_path, "--steps", "60", "--max-restarts", "3", "--replicate", "--resume", "auto")
    launchers = [nodes.start(0), nodes.start(1)]
    wait_for_step(nodes.plan, 25, launchers[0])
    wait_until(lambda: (nodes.saved / "step_00000020").exists(), launchers[0])
    wait_until(lambda: steps_of(nodes.plan / "logs")[-1]["step"] > 35, launchers[0])
    kill_node(nodes, launchers[lost], lost)
    noticed = ["node 0 does not answer; trying to join it again", "waiting for node 1 to join"][lost]
    wait_until(lambda: noticed in nodes.messages(1 - lost), launchers[1 - lost])
    shutil.rmtree(nodes.saved)  # so that nothing can be read from storage
    launchers[lost] = nodes.start(lost)
    assert [launcher.wait(400) for launcher in launchers] == [0, 0], nodes.messages(0) + nodes.messages(1)
    messages = nodes.messages(0)
    read = re.findall(r"reading copies of step_(\d+) in memory", messages)
    assert read and int(read[0]) >= 15 and f"continuing from {nodes.saved}/step_{read[0]}" in messages
    assert "Traceback" not in messages + nodes.messages(1)
    steps = [line["step"] for line in steps_of(nodes.plan / "logs")]
    back = next(i for i in range(1, len(steps)) if steps[i] <= steps[i - 1])
    assert steps[back] == int(read[0]) + 1 and steps[-1] == 60
    weights = load_full_state_dict(nodes.saved)
    for name, tensor in nodes.train_on_one_machine(60).items():
        assert torch.equal(weights[name], tensor), name
    assert not list(ranks_of(nodes.plan))


@pytest.fixture
def hosts(spaces: list[str]) -> Iterator[list[Path]]:
    """The files of the namespaces that give names to addresses: there, node0.test is the first node."""
    folders = [Path("/etc/netns") / name for name in spaces]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(f"{ADDRESSES[0]} node0.test\n")
    yield [folder / "hosts" for folder in folders]
    for folder in folders:
        shutil.rmtree(folder)


def test_node_0_starts_on_another_machine(spaces: list[str], tmp_path: Path, hosts: list[Path]) -> None:
    """Its name then stands for another address; node 1 goes on waiting for it, with its copies in memory."""
    nodes = Nodes(spaces, tmp_path, "--steps", "60", "--max-restarts", "3", "--replicate", "--resume", "auto")
    nodes.options[nodes.options.index("--rdzv-endpoint") + 1] = f"node0.test:{PORT}"
    launchers = [nodes.start(0), nodes.start(1)]
    wait_until(lambda: (nodes.saved / "step_00000020").exists(), launchers[0])
    wait_until(lambda: steps_of(nodes.plan / "logs")[-1]["step"] > 35, launchers[0])
    kill_node(nodes, launchers[0], 0)
    wait_until(lambda: "node 0 does not answer; trying to join it again" in nodes.messages(1), launchers[1])
    shutil.rmtree(nodes.saved)
    for file in hosts:
        file.write_text(f"{ADDRESSES[2]} node0.test\n")
    nodes.spaces = [spaces[2], spaces[1]]
    launchers[0] = nodes.start(0)
    assert [launcher.wait(400) for launcher in launchers] == [0, 0], nodes.messages(0) + nodes.messages(1)
    messages = nodes.messages(0)
    assert re.search(r"reading copies of step_\d+ in memory", messages)
    assert "Traceback" not in messages + nodes.messages(1)
    assert steps_of(nodes.plan / "logs")[-1]["step"] == 60
    weights = load_full_state_dict(nodes.saved)
    for name, tensor in nodes.train_on_one_machine(60).items():
        assert torch.equal(weights[name], tensor), name


def test_all_nodes_start_again_with_another_endpoint(spaces: list[str], tmp_path: Path) -> None:
    """The machine of node 0 is gone for good, and its address with it."""
    nodes = Nodes(spaces, tmp_path, "--steps", "60", "--resume", "auto")
    launchers = [nodes.start(0), nodes.start(1)]
    wait_for_step(nodes.plan, 25, launchers[0])
    kill_node(nodes, launchers[0], 0)
    wait_until(lambda: "node 0 does not answer; trying to join it again" in nodes.messages(1), launchers[1])
    launchers[1].send_signal(signal.SIGTERM)
    assert launchers[1].wait(30) == 128 + signal.SIGTERM
    nodes.options[nodes.options.index("--rdzv-endpoint") + 1] = f"{ADDRESSES[2]}:{PORT}"
    nodes.spaces = [spaces[2], spaces[1]]
    launchers = [nodes.start(0), nodes.start(1)]
    assert [launcher.wait(400) for launcher in launchers] == [0, 0], nodes.messages(0) + nodes.messages(1)
    steps = [line["step"] for line in steps_of(nodes.plan / "logs")]
    back = next(i for i in range(1, len(steps)) if steps[i] <= steps[i - 1])
    assert steps[back] > 15 and steps[-1] == 60
    weights = load_full_state_dict(nodes.saved)
    for name, tensor in nodes.train_on_one_machine(60).items():
        assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize("fault", ["killed", "cut off"])
def test_a_lost_node_is_planned_around_and_returned_to(spaces: list[str], tmp_path: Path, fault: str) -> None:
    loss = ["--on-loss", "replan", "--rejoin-after", "3", "--max-restarts", "3"]
    nodes = Nodes(spaces, tmp_path, "--steps", "3000", *loss)
    launchers = [nodes.start(0), nodes.start(1)]
    wait_for_step(nodes.plan, 7, launchers[0])
    if fault == "killed":
        kill_node(nodes, launchers[1], 1)
    else:
        ip("-n", spaces[1], "link", "set", "eth0", "down")
    wait_until(lambda: "going on with 1 ranks under" in nodes.messages(0), launchers[0])
    began = steps_of(nodes.plan / "logs")[-1]["step"]
    wait_until(lambda: steps_of(nodes.plan / "logs")[-1]["step"] > began + 2, launchers[0])
    if fault == "killed":
        launchers[1] = nodes.start(1)
    else:
        assert launchers[1].poll() is None
        ip("-n", spaces[1], "link", "set", "eth0", "up")
    wait_until(lambda: "rank 1 is tried again: returning to" in nodes.messages(0), launchers[0])
    steps = len(steps_of(nodes.plan / "logs"))
    wait_until(lambda: len(steps_of(nodes.plan / "logs")) > steps + 3, launchers[0])
    launchers[0].send_signal(signal.SIGTERM)
    assert [launcher.wait(200) for launcher in launchers] == [0, 0], nodes.messages(0)
    end = steps_of(nodes.plan / "logs")[-1]["step"]
    weights = load_full_state_dict(nodes.saved)
    for name, tensor in nodes.train_on_one_machine(end).items():
        assert torch.allclose(weights[name], tensor, rtol=1e-4, atol=1e-6), name
    assert not list(ranks_of(nodes.plan))
