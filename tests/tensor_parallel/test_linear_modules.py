"""Which modules tensor parallelism may cut."""

from __future__ import annotations

from torch import nn

from secc.runtime.tensor_parallel.linear_modules import as_embedding, as_linear


def test_modules_that_compute_their_weights_are_not_cut() -> None:
    assert as_linear(nn.Linear(4, 6)) is not None and as_embedding(nn.Embedding(4, 6)) is not None
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
    tied_bias = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6), "bias")
    table = nn.utils.parametrizations.weight_norm(nn.Embedding(4, 6))
    assert as_linear(normed) is None and as_linear(tied_bias) is None and as_embedding(table) is None
