"""The file that says which evaluation was best: read back, refused if damaged, and never the end of a run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from secc.runtime.errors import UserError
from secc.runtime.training.best_checkpoint import BEST_FILE, BEST_FOLDER, BestCheckpoint, BestMetric

METRIC = BestMetric("eval/loss")


def resume(folder: Path) -> BestCheckpoint:
    return BestCheckpoint(METRIC, folder, None, None, 9)


def test_a_resumed_run_goes_on_comparing(tmp_path: Path) -> None:
    (tmp_path / BEST_FOLDER).mkdir()
    best = BestCheckpoint(METRIC, tmp_path, None, None, 0)
    assert best.is_improved(3, {"eval/loss": 0.5})
    best.record()
    resumed = resume(tmp_path)
    assert not resumed.is_improved(10, {"eval/loss": 0.5})
    assert not resumed.is_improved(10, {"eval/loss": math.nan})
    assert not resumed.is_improved(10, {"eval/loss": -math.inf})
    assert resumed.is_improved(11, {"eval/loss": 0.4})


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"metric": 1, "value": 1, "step": 1}', b"\xff"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / BEST_FOLDER / BEST_FILE
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(UserError, match="cannot read the best value so far") as error:
        resume(tmp_path)
    assert error.value.where == str(path) and error.value.remedy.startswith("remove it")


def test_a_file_that_cannot_be_written_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = BestCheckpoint(METRIC, tmp_path / "gone", None, None, 0)
    assert best.is_improved(1, {"eval/loss": 0.5})
    best.record()
    assert "cannot write" in capsys.readouterr().err
