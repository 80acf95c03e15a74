"""Samples that cannot be trained end the run with their index, after a save."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.runtime.training.supervisor import run_plan
from tests.runtime.captioner_plans import FIXTURE, UNEVEN, write_plan

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


def test_sample_that_does_not_load_is_named_after_a_save(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan, saved = tmp_path / "plan", tmp_path / "saved"
    before = "        g = torch.Generator()"
    source = (FIXTURE / "model.py").read_text()
    write_plan(
        plan, UNEVEN, source=source.replace(before, f"        assert i != 29, 'a torn page'\n{before}")
    )
    assert run_plan(plan, ["--steps", "9", "--save", str(saved)]) == 2
    errors = capfd.readouterr().err
    assert errors.count("error:") == 1 and "Traceback" not in errors
    assert "dataset()[29]" in errors and "a torn page" in errors and "--skip-bad-samples" in errors
    assert (saved / "latest").read_text() == "step_00000003\n"


def test_token_beyond_the_vocabulary_names_its_sample(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan"
    source = (FIXTURE / "model.py").read_text()
    before = "        labels = torch.cat("
    line = "        input_ids[-1] = 99 if i == 13 else input_ids[-1]\n"
    assert before in source
    write_plan(plan, UNEVEN, source=source.replace(before, line + before))
    assert run_plan(plan, ["--steps", "9"]) == 2
    errors = capfd.readouterr().err
    assert errors.count("error:") == 1 and "Traceback" not in errors
    assert "step 2: dataset()[13] has index 99, but an embedding of section" in errors
    assert "has 32 entries" in errors
