"""A model with a step that takes more memory than this machine has is planned like one that is too large to
be built here, and `secc check` says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver import exactness_check
from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import NotEnoughMemory
from secc.runtime.training import eager_watch

MODELS = Path(__file__).parent.parent / "models"


def test_a_step_without_memory_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_watch, "_LARGE", 1)
    monkeypatch.setattr(eager_watch, "available_memory", lambda: 1)
    compiled = compile_model(MODELS / "nano.py", CompileOptions(cluster="local:2", global_batch=8))
    checks = check_exactness(compiled).plan.checks
    assert "not compared with the eager model, which takes too much memory here" in str(checks["reason"])
    assert "patterns" not in checks
    with pytest.raises(NotEnoughMemory, match="needs more memory than this machine has") as error:
        check_exactness(compiled, required=True)
    assert "small_dataset()" in error.value.remedy


def test_light_samples_are_compared_where_others_take_too_much_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        (MODELS / "nano.py").read_text()
        + "\n\ndef dataset():\n"
        + "    rows = [torch.arange(3 + 20 * (i % 2) + i % 3) for i in range(24)]\n"
        + "    return [{'input_ids': row, 'labels': row} for row in rows]\n"
    )
    options = CompileOptions(cluster="local:2", global_batch=8)
    assert "notes" not in check_exactness(compile_model(path, options)).plan.checks
    with monkeypatch.context() as limit:
        limit.setattr(exactness_check, "_MOST_ENTRIES", 7 * 10 * 96)
        checks = check_exactness(compile_model(path, options), required=True).plan.checks
        assert checks["patterns"] and "a batch of heavier ones has over" in str(checks["notes"])
    monkeypatch.setattr(eager_watch, "_LARGE", 1)
    # Scores of seven samples of 5 tokens fit, not those of 23: 7 x 23 x 96 floats, four times.
    monkeypatch.setattr(eager_watch, "available_memory", lambda: 7 * 16 * 96 * 4 * 4)
    checks = check_exactness(compile_model(path, options), required=True).plan.checks
    assert checks["patterns"] and "compared on light samples of the dataset" in str(checks["notes"])
