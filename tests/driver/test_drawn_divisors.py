"""A loss is divided by the sum of a mask that forward draws in the size of hidden states."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from tests.models import masked_features

MODEL = Path(masked_features.__file__)
MASK = "torch.rand_like(h[..., 0]) < 0.3"


@pytest.mark.parametrize(
    "mask",
    [
        MASK,
        "torch.bernoulli(h.new_full(h.shape[:2], 0.3))",
        "torch.empty_like(h[..., 0]).uniform_() < 0.3",
    ],
)
def test_masks_drawn_in_the_size_of_hidden_states_count_what_the_loss_is_divided_by(
    tmp_path: Path, mask: str
) -> None:
    text = MODEL.read_text()
    assert MASK in text
    (tmp_path / "model.py").write_text(text.replace(MASK, mask))
    made = compile_model(tmp_path / "model.py", CompileOptions(cluster="local:2", global_batch=8))
    checked = check_exactness(made, required=True)
    assert all(pattern["exact"] for pattern in checked.plan.checks["patterns"])
