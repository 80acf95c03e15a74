"""Sentences decide nothing: with all of them replaced by other texts, secc makes the same plans."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from secc.runtime.plan.unsplit_reason import SENTENCES, UnsplitKind, UnsplitReason

MODELS = Path(__file__).parent.parent / "models"
SCRIPT = Path(__file__).parent / "reworded_compile.py"


@pytest.mark.parametrize(
    ("model", "cluster"),
    [
        pytest.param("nano.py", "1x2xH100"),
        pytest.param("llava_tiny.py", "1x4xH100", marks=pytest.mark.slow),
        pytest.param("nano_pair.py", "1x4xH100", marks=pytest.mark.slow),
        pytest.param("logged.py", "1x2xH100", marks=pytest.mark.slow),
        pytest.param("loops.py", "1x2xH100", marks=pytest.mark.slow),
    ],
)
def test_other_sentences_make_the_same_plan(model: str, cluster: str) -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), mode, str(MODELS / model), cluster],
            stdout=subprocess.PIPE,
            text=True,
        )
        for mode in ("KEEP", "REPLACE")
    ]
    original, reworded = (run.communicate()[0] for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert original and reworded == original


def test_every_reason_has_a_sentence_that_uses_its_fields_only() -> None:
    for kind in UnsplitKind:
        assert str(UnsplitReason(kind, "softmax", 8, 2)) and kind in SENTENCES
