"""Copies of a checkpoint in the launcher's memory stand in for files that storage has lost, if whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from secc.runtime.host.signed_channel import ForeignPeer, connect_to_peer
from secc.runtime.parameters import checkpoint_copies, checkpoint_writer
from secc.runtime.parameters.checkpoint import load_full_state_dict, make_manifest
from secc.runtime.parameters.checkpoint_copies import COPIES_VARIABLE, CopyKeeper, CopyName, link_copies
from secc.runtime.parameters.checkpoint_folder import FoundCheckpoint, find_checkpoint
from secc.runtime.parameters.checkpoint_writer import CheckpointSaver
from tests.runtime.run_processes import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyKeeper]:
    with CopyKeeper(tmp_path / "copies") as made:
        monkeypatch.setenv(COPIES_VARIABLE, str(made.path))
        yield made


def save(directory: Path, step: int) -> None:
    """Saves a model with all weights `step`, with copies."""
    state = {f"model/{name}": torch.full_like(t, step) for name, t in model().state_dict().items()}
    saver = CheckpointSaver()
    saver.start_save(
        directory, state, make_manifest(model(), step, 0, False, 1), 2, copy_name=CopyName("0", step)
    )
    saver.finish_save()


SECRET = b"a secret that nobody guesses"


def model() -> torch.nn.Module:
    return torch.nn.Linear(4, 2)


def find(directory: Path) -> tuple[FoundCheckpoint, float]:
    found = find_checkpoint(directory, copies=link_copies(directory))
    return found, float(load_full_state_dict(found)["weight"][0, 0])


@pytest.mark.usefixtures("keeper")
def test_copies_are_read_instead_of_lost_files(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    save(saved, 1)
    save(saved, 2)
    for lose in (
        lambda: None,
        lambda: next(saved.glob("*2/*.distcp")).unlink(),
        lambda: shutil.rmtree(saved),
    ):
        lose()
        found, value = find(saved)
        assert found.copies is not None and found.path == saved / "step_00000002" and value == 2
        assert "copies of step_00000002 in memory" in "".join(found.notes())


@pytest.mark.usefixtures("keeper")
def test_damaged_copies_are_not_read(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    save(saved, 3)
    copies = link_copies(saved)
    assert copies is not None
    damaged = next(copies.glob("*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.unlink()
    damaged.write_bytes(content)
    found = find_checkpoint(saved, copies=copies)
    assert found.copies is None and found.path == saved / "step_00000003"
    assert "SHA-256" in found.damaged[0].message


@pytest.mark.usefixtures("keeper")
def test_copies_of_an_older_step_than_the_latest_are_not_preferred(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    save(saved, 1)
    copies = link_copies(saved)
    assert copies is not None
    save(saved, 2)
    shutil.rmtree(saved / "step_00000001")
    assert find_checkpoint(saved, copies=copies).path.name == "step_00000002"


def test_a_checkpoint_with_a_missing_copy_does_not_replace_the_copies_before(
    tmp_path: Path, keeper: CopyKeeper, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved"
    save(saved, 1)
    put = checkpoint_writer.put_copy

    def fail(name: CopyName, file: Path) -> str:
        if file.name == "checkpoint.json":
            raise OSError("the host has too little memory for 7 bytes")
        return put(name, file)

    monkeypatch.setattr(checkpoint_writer, "put_copy", fail)
    for step in (2, 3):
        save(saved, step)
    assert capfd.readouterr().err.count("checkpoint.json in memory is missing: the host has too little") == 2
    assert files_of(keeper) == [(1, 3), (3, 2)]  # those of step 2 are gone
    shutil.rmtree(saved)
    assert find(saved)[1] == 1


def test_a_file_that_is_not_sent_whole_is_not_kept(nodes: list[CopyKeeper]) -> None:
    channel = connect_to_peer(nodes[0].listen("127.0.0.2", SECRET), SECRET)
    channel.send({"kind": "put", "save": "s", "step": 1, "file": "data", "size": 100})
    assert not channel.receive(5)
    channel.send_bytes(b"half of it")
    channel.close()  # the sender is killed
    channel = connect_to_peer(nodes[0].listen("127.0.0.2", SECRET), SECRET)
    channel.send({"kind": "get", "save": "s", "step": 1, "file": "data"})
    assert channel.receive(5) is None and files_of(nodes[0]) == []


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[CopyKeeper]]:
    """The launchers of three nodes."""
    with ExitStack() as stack:
        made = [stack.enter_context(CopyKeeper(tmp_path / f"copies_{node}")) for node in range(3)]
        connect(made)
        yield made


def connect(keepers: list[CopyKeeper]) -> None:
    addresses = {node: keeper.listen(f"127.0.0.{2 + node}", SECRET) for node, keeper in enumerate(keepers)}
    for node, keeper in enumerate(keepers):
        keeper.set_peers(node, addresses)


def files_of(keeper: CopyKeeper) -> list[tuple[int, int]]:
    return [(name.step, len(checkpoint.files)) for name, checkpoint in keeper._kept.items()]


def test_the_next_node_has_a_copy_and_a_lost_one_gets_it_back(
    tmp_path: Path, nodes: list[CopyKeeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "saved"
    monkeypatch.setenv(COPIES_VARIABLE, str(nodes[1].path))
    for step in (1, 2):
        save(saved, step)
    assert [files_of(keeper) for keeper in nodes] == [[(2, 0)], [(2, 3)], [(2, 3)]]
    shutil.rmtree(saved)
    nodes[1].__exit__()  # the machine is lost, and a launcher starts on another
    with CopyKeeper(tmp_path / "copies_new") as new:
        connect([nodes[0], new, nodes[2]])
        for node in (new, nodes[0]):
            monkeypatch.setenv(COPIES_VARIABLE, str(node.path))
            found, value = find(saved)
            assert found.copies is not None and value == 2
        assert files_of(new) == files_of(nodes[0]) == [(2, 3)]
        save(saved, 3)  # by ranks of node 0
        assert [files_of(keeper) for keeper in (nodes[0], new, nodes[2])] == [[(3, 3)], [(3, 3)], [(3, 0)]]


def test_no_copies_are_read_if_a_node_cannot_get_one(
    tmp_path: Path, nodes: list[CopyKeeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, place = tmp_path / "saved", tmp_path / "store"
    monkeypatch.setenv(COPIES_VARIABLE, str(nodes[0].path))
    save(saved, 4)
    monkeypatch.setattr(checkpoint_copies, "_MEMORY_SHARE", 0.0)  # node 2 would have to make room for them
    found: dict[int, Path | None] = {}

    def link(rank: int, path: Path) -> None:
        code = "import sys; from pathlib import Path; import torch.distributed as d\n"
        code += "from secc.runtime.parameters import checkpoint_copies as c; c._MEMORY_SHARE = 0.0\n"
        code += "s = d.FileStore(sys.argv[1], -1)\n"
        code += "print(c.link_copies(Path(sys.argv[2]), s, int(sys.argv[3]), 2))"
        command = [sys.executable, "-c", code, str(place), str(saved), str(rank)]
        environment = os.environ | {COPIES_VARIABLE: str(path)}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found[rank] = None if result.stdout.strip() == "None" else Path(result.stdout.strip())

    for keepers, expected in ((nodes[:2], True), (nodes[::2], False)):
        place.unlink(missing_ok=True)
        threads = [threading.Thread(target=link, args=(r, k.path)) for r, k in enumerate(keepers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[rank] is not None for rank in (0, 1)] == [expected, expected]


def test_a_next_node_that_does_not_answer_is_named_and_nothing_else_is_lost(
    tmp_path: Path,
    nodes: list[CopyKeeper],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    nodes[2].__exit__()
    monkeypatch.setenv(COPIES_VARIABLE, str(nodes[1].path))
    save(tmp_path / "saved", 5)
    notes = capfd.readouterr().err
    assert notes.count("in memory is missing: the launcher at 127.0.0.4:") == 3
    assert files_of(nodes[1]) == [(5, 3)]
    assert find(tmp_path / "saved")[0].copies is not None


def test_strangers_get_no_copies(
    tmp_path: Path, nodes: list[CopyKeeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COPIES_VARIABLE, str(nodes[0].path))
    save(tmp_path / "saved", 6)
    with pytest.raises(ForeignPeer):
        connect_to_peer(nodes[0].listen("127.0.0.2", SECRET), b"a secret that is another one")


def test_only_the_newest_checkpoint_stays_in_memory(tmp_path: Path, keeper: CopyKeeper) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for step in (5, 6, 7, 7, 3):  # step 7 is saved again, and then the run goes back
        save(tmp_path / "saved", step)
        counts = {len(checkpoint.files) for checkpoint in keeper._kept.values()}
        assert counts == {3}  # data, index, manifest
        wait_until(lambda: len(os.listdir("/proc/self/fd")) == before + 3)
    copies = link_copies(tmp_path / "saved")
    assert copies is not None and copies.name == "step_00000003"
