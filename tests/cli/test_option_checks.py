"""Options that are wrong whatever the model is are refused before it is read; what it returns is checked
without a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.cli import main
from tests.cli.test_bad_input import error_message_of

MODEL = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
    def forward(self, x):
        return self.inner(x).square().mean()
def model(): return Model()
def dataset(): return [{"x": torch.full((4,), float(i))} for i in range(6)]
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path / "model.py"


@pytest.mark.parametrize(
    ("option", "value", "part"),
    [
        ("--strategy", "foo", "unknown strategy 'foo'"),
        ("--objective", "foo", "unknown objective 'foo'"),
        ("--step-time", "1.5", "expected a positive, finite step time with the objective gpus"),
        ("--global-batch", "0", "--global-batch: expected at least 1, got 0"),
        ("--global-batch", "4000000", "expected at most 131,072 samples, got 4,000,000"),
        ("--run-ahead", "lots", "expected a number of GiB"),
        ("--stats", "no.json", "no.json: cannot read the statistics"),
        ("--section", "lm", "cannot read the section 'lm'"),
        ("--stats-samples", "0", "--stats-samples: expected at least 1, got 0"),
        ("--max-sections", "0", "--max-sections: expected at least 1, got 0"),
        ("--widths", "foo", "unknown widths 'foo'"),
        ("--set", "inner.zero=3", "write inner.sharding=zero3"),
    ],
)
def test_wrong_option_is_found_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, part: str
) -> None:
    arguments = ["compile", str(tmp_path / "missing.py"), "-o", str(tmp_path / "plan"), option, value]
    message = error_message_of(capsys, *arguments)
    assert part in message and "what to do" in message


@pytest.mark.parametrize(
    ("option", "value", "part"),
    [
        (
            "--set",
            "iner.dp=1",
            "unknown section 'iner'\n  what to do: sections are named after modules, such as",
        ),
        ("--set", "inner.with=lm", "unknown section 'lm'\n  what to do: sections are named after modules;"),
        ("--section", "a=outer", "no block at or below 'outer'"),
        ("--gather", "outer", "the model has no such block"),
        ("--whole-batch", "outer", "the model has no such block"),
    ],
)
def test_a_name_that_the_model_lacks_is_found_before_blocks_are_measured(
    model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, part: str
) -> None:
    arguments = ["--cluster", "local:1", option, value]
    message = error_message_of(capsys, "compile", str(model_file), "-o", str(tmp_path / "plan"), *arguments)
    assert part in message and "what to do" in message
    assert "capture" in message and "find possible tp" not in message


LATER = "measure blocks"  # a step of a compilation that takes long


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        (
            "Linear(4, 4)",
            "Linear(4, 4).requires_grad_(False)",
            ["model.py:10: no parameter of the model requires"],
        ),
        ("def model(): return Model()", "", ["model.py: the model file has no model()"]),
        ("def dataset()", "def data()", ["model.py: the model file has no dataset()"]),
        (
            "import torch\n",
            "import torch\nfrom .layers import L\n",
            ["model.py:3:", "`from layers import Layer`"],
        ),
        ("import torch\n", "import torch, not_there\n", ["model.py:2:", "install not_there into this"]),
        (
            "import torch\n",
            "import torch, sys\nsys.exit(len(sys.argv))\n",
            ["SystemExit: 1", "`if __name__ =="],
        ),
        (
            "return [",
            "return open('rows.txt') or [",
            ["model.py:11:", "paths start at the folder of the command, /"],
        ),
        (
            "",
            "def collate(rows): return {'x': torch.stack([r['x'] for r in rows]).numpy()}\n",
            ["NumPy array for 'x'"],
        ),
    ],
)
def test_faults_of_a_model_file_are_found_early_and_say_what_to_do(
    model_file: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, parts: list[str]
) -> None:
    model_file.write_text(MODEL.replace(old, new, 1) if old else MODEL + new)
    message = error_message_of(capsys, "check", str(model_file))
    assert all(part in message for part in (*parts, "what to do")) and LATER not in message


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        (".mean()", ".mean() * float('nan')", "model.py:8: plain PyTorch's own loss of a batch is nan"),
        ("self.inner(x)", "self.inner(x[:, 1:])", "model.py:9: forward fails in plain PyTorch too"),
    ],
)
def test_faults_of_forward_are_those_of_plain_pytorch(
    model_file: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, part: str
) -> None:
    model_file.write_text(MODEL.replace(old, new, 1))
    message = error_message_of(capsys, "check", str(model_file))
    assert part in message and "what to do" in message


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (
            "def optimizer(params): return list(params)",
            "optimizer() returns an object of type list, not a torch",
        ),
        (
            "def optimizer(params): return torch.optim.SGD(Model().parameters(), 0.1)",
            "optimizer() updates 2 tensors that are not",
        ),
        (
            "def optimizer(params): return torch.optim.SGD(params.values(), 0.1)",
            "optimizer() raises AttributeError",
        ),
    ],
)
def test_check_refuses_an_optimizer_that_cannot_train(
    model_file: Path, capsys: pytest.CaptureFixture[str], function: str, part: str
) -> None:
    model_file.write_text(f"{MODEL}{function}\n")
    message = error_message_of(capsys, "check", str(model_file))
    assert f"model.py:12: {part}" in message and "what to do" in message


def test_a_model_file_does_not_see_the_arguments_of_secc(model_file: Path) -> None:
    parsed = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    inside = "def model(): argparse.ArgumentParser().parse_args(); return Model()"
    model_file.write_text(parsed + MODEL.replace("def model(): return Model()", inside))
    with pytest.raises(SystemExit, match="0"):
        main(["check", str(model_file), "--ranks", "1"])


@pytest.mark.gloo
def test_dataset_smaller_than_the_global_batch_is_said(
    model_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = str(tmp_path / "plan")
    said = "dataset() has 6 samples, fewer than the global batch of 8: a step trains samples more than once"
    arguments = ["--cluster", "local:1", "--global-batch"]
    for global_batch in ("6", "8"):
        with pytest.raises(SystemExit, match="0"):
            main(["compile", str(model_file), "-o", plan, *arguments, global_batch])
        captured = capfd.readouterr().out
        assert (said in " ".join(captured.split())) == (global_batch == "8")
        assert "1 section on 1 rank of local:1, global batch" in captured
        assert "shown to be exact for 1 input pattern\n" in captured
    with pytest.raises(SystemExit, match="0"):
        main(["run", plan, "--steps", "1"])
    assert capfd.readouterr().err.count(said) == 1
