"""Rows that routers send to experts, counted on drawn samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from secc.frontend.tp_search.routing_counts import busiest_parts, count_routing
from secc.runtime.training import eager_watch


class Experts(nn.Module):
    """Four experts in stacked parameters; called with rows, indices of experts and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 3, 5))
        self.down = nn.Parameter(torch.randn(4, 5, 3))

    def forward(self, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """rows [N, 3], index [N, k], weights [N, k] -> [N, 3]."""
        inner = torch.einsum("nd,nkdh->nkh", rows, self.up[index])
        return torch.einsum("nkh,nkhd,nk->nd", inner, self.down[index], weights)


class Routed(nn.Module):
    """Token t goes to experts t % 4 and (t + 1) % 4, and a buffer counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [N] -> [N, 3]."""
        self.calls += 1
        index = torch.stack([ids % 4, (ids + 1) % 4], 1)
        return self.experts(torch.rand(len(ids), 3), index, torch.ones(len(ids), 2))


def test_rows_of_each_expert_are_counted_by_sample() -> None:
    model, before = Routed(), torch.random.get_rng_state()
    counts = count_routing(model, [{"ids": torch.tensor([0, 0, 1])}, {"ids": torch.tensor([3])}])
    assert [rows.tolist() for rows in counts["experts"]] == [[2, 3, 1, 0], [1, 0, 0, 1]]
    assert model.calls == 0 and torch.equal(before, torch.random.get_rng_state())
    assert count_routing(nn.Linear(2, 2), [{"input": torch.ones(1, 2)}]) == {}
    assert count_routing(model, [{"ids": torch.tensor([0])}, {"unknown": torch.tensor([3])}]) == {}
    assert model.calls == 0


class Scored(Routed):
    """Scores of words behind the mixture."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [N] -> [N, 1000]."""
        return super().forward(ids) @ torch.ones(3, 1000)


def test_rows_are_counted_of_samples_with_scores_that_take_too_much_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eager_watch, "_LARGE", 1)
    monkeypatch.setattr(eager_watch, "available_memory", lambda: 4000)
    counts = count_routing(Scored(), [{"ids": torch.tensor([0, 0, 1])}])
    assert [rows.tolist() for rows in counts["experts"]] == [[2, 3, 1, 0]]


def test_the_busiest_part_is_that_of_as_many_samples_as_parts() -> None:
    rows = [torch.tensor([2, 3, 1, 0]), torch.tensor([1, 0, 0, 1])]
    # Together [3, 3, 1, 1]: of two parts one has 6 of 8 rows, of four parts 3 of 8.
    assert busiest_parts([rows]) == [(2, 1500), (4, 1500)]
    even = [torch.tensor([1, 1, 1, 1])] * 2
    assert busiest_parts([even]) == [(2, 1000), (4, 1000)]
    assert busiest_parts([rows, even]) == [(2, 1000 * 2 * (6 + 4) // 16), (4, 1000 * 4 * (3 + 2) // 16)]
