"""Raw sounds: the captures of a path may all have one number of frames although their lengths differ, or a
path may be met by sounds of one length only."""

from __future__ import annotations

from pathlib import Path

import torch

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.frontend.dataset.survey import sort_by_volume

MODEL = Path(__file__).parent.parent / "models" / "raw_sounds.py"


def test_frames_of_sounds_are_not_taken_for_constants() -> None:
    compiled = compile_model(MODEL, CompileOptions(cluster="local:3", global_batch=12))
    checked = check_exactness(compiled, required=True)
    assert "S_sounds//64" in compiled.dumps[0][1] and checked.plan.checks["patterns"]


def test_volume_counts_sounds_but_not_tokens() -> None:
    def sample(length: int, tokens: int) -> dict[str, torch.Tensor]:
        return {"sound": torch.zeros(length), "labels": torch.zeros(tokens, dtype=torch.long)}

    long, short = sample(9, 2), sample(5, 8)
    assert sort_by_volume([long, short]) == [short, long]
