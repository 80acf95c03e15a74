"""Sums of packed rows by differences of a cumulative sum are refused, and exact as the remedy writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError
from tests.models import pooled_sets

OPTIONS = CompileOptions(cluster="local:2", global_batch=8)


def test_a_cumulative_sum_over_packed_rows_is_exact_as_the_remedy_writes_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cumsum") as refused:
        compile_model(Path(pooled_sets.__file__), OPTIONS)
    _, place, _, sums, _ = refused.value.remedy.split("`")
    old = """total = torch.cat([h.new_zeros(1, 16), h.cumsum(0)])
            sums = total[offsets[1:]] - total[offsets[:-1]]"""
    text = Path(pooled_sets.__file__).read_text()
    assert old in text
    (tmp_path / "model.py").write_text(text.replace(old, f"{place}\n            sums = {sums}"))
    made = check_exactness(compile_model(tmp_path / "model.py", OPTIONS), required=True)
    assert all(pattern["exact"] for pattern in made.plan.checks["patterns"])
