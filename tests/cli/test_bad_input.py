"""Bad input ends with exit code 2 and one message with place, cause and remedy, never with a traceback."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from secc.cli import main

MODELS = Path(__file__).parent.parent / "models"

REFUSED = [
    ("no_model", ["no_model.py", "no model()", "what to do"]),
    ("empty_dataset", ["empty_dataset.py:", "is empty", "what to do"]),
    ("dataset_dict", ["dataset_dict.py:", "of type dict, not a map-style dataset", "such as ds['train']"]),
    ("empty_stream", ["empty_stream.py:", "dataset() gives no samples", "what to do"]),
    ("no_loss", ["no_loss.py:", "loss", "what to do"]),
    ("unknown_key", ["unknown_key.py:", "which forward does not take", "forward takes"]),
    ("batchnorm", ["batchnorm.py:", "not separable", "native_batch_norm", "what to do"]),
    ("contrastive", ["contrastive.py:", "not separable", "aten.mm", "what to do"]),
    ("reads_block_value", ["reads_block_value.py:", "what to do"]),
    ("ends_process", ["ends_process.py:18", "SystemExit: 0", "what to do"]),
    ("wrong_width", ["wrong_width.py:13", "fails in plain PyTorch too", "what to do"]),
    (
        "joined_frames",
        ["joined_frames.py:", "joined along dim 0", "sound [", "write `collate(samples) -> dict`"],
    ),
    ("some_captions", ["some_captions.py:17", "samples that lack a key have no rows", "caption of 1 of 2"]),
    (
        "some_spectra",
        ["some_spectra.py:15", "joined along dim 0, in this batch spectrum [4, 6]", "hold `value[None]`"],
    ),
    (
        "large_spectra",
        ["some_spectra.py:15", "joined along dim 0, in this batch spectrum [16, 6]", "hold `value[None]`"],
    ),
    (
        "stacked_spectra",
        ["stacked_spectra.py:", "are stacked, in this batch spectrum [2, 1, 4, 6]", "`value[0]`"],
    ),
    ("mixup", ["mixup.py:", "mixes the samples of a batch", "aten.randperm", "what to do"]),
]


NET_FILE = """
import torch
from torch import nn
SCALE = 1.0
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
    def forward(self, x):
        return (self.inner(x).square() * SCALE).mean()
"""
MODEL_FILE = """
import torch
from stale_net import Net
def model(): return Net()
def dataset(): return [{"x": torch.full((4,), float(i))} for i in range(8)]
"""


def error_message_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must end with exit code 2; returns its message."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    message = capsys.readouterr().err
    assert end.value.code == 2, message
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize(("model", "parts"), REFUSED, ids=[name for name, _ in REFUSED])
def test_model_that_cannot_be_compiled(
    model: str, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = error_message_of(capsys, "compile", str(MODELS / f"{model}.py"), "-o", str(tmp_path / "plan"))
    for part in parts:
        assert part in message
    assert not (tmp_path / "plan").exists()


def test_missing_model_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot read the model file" in error_message_of(
        capsys, "compile", str(tmp_path / "none.py"), "-o", str(tmp_path / "plan")
    )


def test_too_many_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--cluster", "local:64", "--global-batch", "8", "--no-check"]
    message = error_message_of(
        capsys, "compile", str(MODELS / "qwen_distil.py"), "-o", str(tmp_path / "plan"), *arguments
    )
    assert "expected at most" in message and "got 64" in message
    assert "what to do: use at most" in message


def test_unknown_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = error_message_of(
        capsys,
        "compile",
        str(MODELS / "qwen_distil.py"),
        "-o",
        str(tmp_path / "plan"),
        "--cluster",
        "4x8xZ80",
    )
    assert "Z80" in message and "what to do" in message
    assert "capture" not in message, "found before the model is read"


def test_output_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    model = str(MODELS / "qwen_distil.py")
    assert "cannot" in error_message_of(capsys, "compile", model, "-o", str(tmp_path / "file" / "plan"))
    assert "a file, not a directory" in error_message_of(
        capsys, "compile", model, "-o", str(tmp_path / "file")
    )


def test_output_directory_that_is_not_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious.txt").write_text("keep me")
    message = error_message_of(capsys, "compile", str(MODELS / "qwen_distil.py"), "-o", str(tmp_path))
    assert "not a plan" in message
    assert (tmp_path / "precious.txt").read_text() == "keep me"


@pytest.mark.slow
@pytest.mark.gloo
def test_plan_of_a_changed_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.py"
    shutil.copy(MODELS / "qwen_distil.py", model)
    with pytest.raises(SystemExit, match="0"):
        main(
            [
                "compile",
                str(model),
                "-o",
                str(tmp_path / "plan"),
                "--cluster",
                "local:2",
                "--global-batch",
                "8",
                "--no-check",
            ]
        )
    model.write_text(model.read_text() + "\nCHANGED = True\n")
    message = error_message_of(capfd, "run", str(tmp_path / "plan"), "--steps", "1")
    assert "has changed since the plan was made" in message
    assert "+CHANGED = True" in message


@pytest.mark.gloo
def test_plan_of_a_changed_import(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Glue comes from a file that the model file imports, which is edited after compilation."""
    (tmp_path / "stale_net.py").write_text(NET_FILE)
    (tmp_path / "model.py").write_text(MODEL_FILE)
    plan = str(tmp_path / "plan")
    arguments = ["compile", str(tmp_path / "model.py"), "-o", plan, "--cluster", "local:2"]
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--global-batch", "8", "--no-check"])
    with pytest.raises(SystemExit, match="0"):
        main(["run", plan, "--steps", "1"])
    (tmp_path / "stale_net.py").write_text(NET_FILE.replace("SCALE = 1.0", "SCALE = 3.0"))
    message = error_message_of(capfd, "run", plan, "--steps", "2")
    assert "stale_net.py: the module stale_net" in message
    assert "has changed since the plan was made" in message
    assert "+SCALE = 3.0" in message and "compile the model again" in message
    (tmp_path / "stale_net.py").unlink()
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    assert "stale_net" in error_message_of(capfd, "run", plan, "--steps", "2")


@pytest.mark.parametrize("command", ["run", "eval"])
def test_empty_log_dir(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of a variable of a script that is not set; it does not stand for the working directory."""
    message = error_message_of(capsys, command, str(tmp_path), "--log-dir", "")
    assert "argument --log-dir: must not be empty" in message


def test_missing_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot read the plan" in error_message_of(capsys, "explain", str(tmp_path))


def test_missing_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "what to do" in error_message_of(
        capsys, "export", str(tmp_path), "-o", str(tmp_path / "weights.safetensors")
    )
