"""The loss tables against numbers, for a sample of torch's ops and modules; `python -m
tests.passes.op_claims` compares all."""

from __future__ import annotations

import pytest

SAMPLE = (
    "cumsum", "chunk", "cross", "constant_pad_nd", "diag", "logsumexp", "nn.functional.conv1d",
    "nn.functional.pad", "nn.ConvTranspose1d", "nn.GRU", "nn.GroupNorm", "sort", "sum", "view_copy",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_no_op_that_mixes_samples_is_taken_for_separable(name: str) -> None:
    from tests.passes.op_claims import Verdict, all_entries, claims_of_entry

    claims = [c for entry in all_entries() if entry.name == name for c in claims_of_entry(entry)]
    assert claims and not [c for c in claims if c.verdict is Verdict.FALSE_SEPARABLE]
