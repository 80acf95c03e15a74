"""A checkpoint may come from a stranger: reading it runs no code, and a damaged one is refused in a line."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from secc.runtime.errors import UserError
from secc.runtime.parameters import sliced_tensor_store
from secc.runtime.parameters.checkpoint import load_full_state_dict, load_optimizer_state
from secc.runtime.parameters.checkpoint_folder import MANIFEST_FILE, CheckpointManifest, read_manifest

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
WEIGHT = torch.arange(12.0).view(3, 4)


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def write_alone(directory: Path, state: dict[str, Any]) -> None:
    written = sliced_tensor_store.write_entries(directory, 0, state)
    sliced_tensor_store.write_index(directory, [written])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of one parameter in two parts, with the states of an optimizer and a scheduler."""
    directory = tmp_path / "saved"
    directory.mkdir()
    first = sliced_tensor_store.TensorSlice(WEIGHT.view(-1), WEIGHT.shape, 0)
    options = [(["weight"], {"lr": 0.1, "betas": (0.9, 0.99), "foreach": None})]
    state: dict[str, Any] = {"model/weight": first, "optimizer/weight/step": torch.tensor(3.0)}
    state |= {"groups/0": options, "scheduler/0": {"last_epoch": 3, "_last_lr": [0.1]}}
    write_alone(directory, state)
    manifest = CheckpointManifest(3, 0, False, 8, ("weight",), {})
    fields = {key: value for key, value in asdict(manifest).items() if key != "files"}
    (directory / MANIFEST_FILE).write_text(json.dumps(fields))
    return directory


def read_objects(checkpoint: Path) -> dict[str, Any]:
    target: dict[str, Any] = {"groups/0": None, "scheduler/0": None}
    sliced_tensor_store.read_entries(checkpoint, target, alone=True)
    return target


def test_what_was_written_is_read(checkpoint: Path) -> None:
    assert torch.equal(load_full_state_dict(checkpoint)["weight"], WEIGHT)
    objects = read_objects(checkpoint)
    assert objects["groups/0"] == [(["weight"], {"lr": 0.1, "betas": (0.9, 0.99), "foreach": None})]
    assert objects["scheduler/0"] == {"last_epoch": 3, "_last_lr": [0.1]}


def test_metadata_that_would_run_code_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Hostile(f"touch {mark}")))
    with pytest.raises(UserError, match=r"it names posix.system, which may run code"):
        load_full_state_dict(checkpoint)
    with pytest.raises(UserError, match=r"it names posix.system, which may run code"):
        load_optimizer_state(checkpoint, None, None, {}, 0)
    with pytest.raises(UserError, match=r"it names posix.system, which may run code"):
        sliced_tensor_store.read_entries(checkpoint, {"model/weight": torch.empty(3, 4)}, alone=True)
    assert not mark.exists()


def test_an_object_that_would_run_code_is_refused(tmp_path: Path) -> None:
    mark, directory = tmp_path / "ran", tmp_path / "saved"
    directory.mkdir()
    write_alone(directory, {"groups/0": [Hostile(f"touch {mark}")]})
    with pytest.raises(
        UserError, match=r"the checkpoint's entry 'groups/0' holds posix.system, which may run"
    ):
        sliced_tensor_store.read_entries(directory, {"groups/0": None}, alone=True)
    assert not mark.exists()


def test_a_class_of_a_checkpoint_cannot_be_changed_by_one(checkpoint: Path) -> None:
    """A pickle may set attributes of the classes that it names."""
    content = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadataIndex\nN}\x8c\x07__eq__\xffNs\x86b."
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match="refused"):
        load_full_state_dict(checkpoint)


def test_files_outside_of_the_checkpoint_are_not_read(checkpoint: Path) -> None:
    (checkpoint.parent / "else.distcp").write_bytes((checkpoint / "__0_0.distcp").read_bytes())
    metadata = (checkpoint / ".metadata").read_bytes()
    changed = metadata.replace(b"\x8c\x0c__0_0.distcp", b"\x8c\x0e../else.distcp")
    assert changed != metadata
    frames = bytearray(changed)
    frames[3:11] = (len(changed) - 11).to_bytes(8, "little")
    (checkpoint / ".metadata").write_bytes(bytes(frames))
    with pytest.raises(UserError, match="outside of the checkpoint"):
        load_full_state_dict(checkpoint)


@pytest.mark.parametrize("kept", [0, 1, 100, 2000])
def test_a_short_data_file_is_refused_before_anything_is_read(kept: int, checkpoint: Path) -> None:
    data = checkpoint / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"its file '__0_0\.distcp' is too short"):
        load_full_state_dict(checkpoint)


def test_a_missing_data_file_is_refused(checkpoint: Path) -> None:
    (checkpoint / "__0_0.distcp").unlink()
    with pytest.raises(UserError, match=r"its file '__0_0\.distcp' is missing"):
        load_full_state_dict(checkpoint)


def test_a_parameter_without_some_of_its_parts_is_refused(tmp_path: Path) -> None:
    part = sliced_tensor_store.TensorSlice(torch.arange(5.0), torch.Size((2, 4)), 0)
    (tmp_path / "saved").mkdir()
    write_alone(tmp_path / "saved", {"model/weight": part})
    with pytest.raises(UserError, match=r"the parts of 'model/weight' do not fill its shape \[2, 4\]"):
        sliced_tensor_store.stored_entries(tmp_path / "saved")


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", MANIFEST_FILE])
def test_changed_bytes_are_refused_in_one_line_or_read(file: str, checkpoint: Path) -> None:
    draw, path = random.Random(24), checkpoint / file
    original = path.read_bytes()
    for _ in range(150):
        content = bytearray(original)
        at = draw.randrange(len(content))
        match draw.choice(("flip", "cut", "zero", "insert")):
            case "flip":
                content[at] ^= 1 << draw.randrange(8)
            case "cut":
                del content[at : at + draw.randrange(1, 9)]
            case "zero":
                content[at : at + 8] = bytes(len(content[at : at + 8]))
            case _:
                content[at:at] = draw.randbytes(3)
        path.write_bytes(bytes(content))
        try:
            load_full_state_dict(checkpoint)
            read_objects(checkpoint)
        except UserError as error:
            assert "\n" not in error.message and "\x1b" not in error.message
            assert len(error.message) < 500


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b"\xff", b'{"step": 1}', b'{"names": 3}', b"[" * 100_000],
)
def test_other_manifests_are_refused(content: bytes, checkpoint: Path) -> None:
    (checkpoint / MANIFEST_FILE).write_bytes(content)
    with pytest.raises(UserError, match="checkpoint"):
        read_manifest(checkpoint)


def test_reading_asks_for_no_more_memory_than_the_file_has(checkpoint: Path) -> None:
    """A pickle may ask for an array of any length."""
    (checkpoint / ".metadata").write_bytes(b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".")
    with pytest.raises(UserError, match="refused"):
        load_full_state_dict(checkpoint)
    buffer = io.BytesIO(b"\x80\x04Nr\xff\xff\xff\x7f.")
    (checkpoint / ".metadata").write_bytes(buffer.getvalue())
    with pytest.raises(UserError):
        load_full_state_dict(checkpoint)
