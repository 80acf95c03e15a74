"""The tensors that `metrics()` asks for leave a section in evaluations only: under cp, training would gather
their rows for nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from secc.frontend.tp_search.thread_ranks import ThreadGroup, run_thread_ranks
from secc.runtime.context_parallel.row_mode import split_first_input
from secc.runtime.sections.base import Batch, SectionCase, SectionModule, Tensors


class Section(SectionModule):
    name = "body"

    def whole(self, batch: Batch, edges: Tensors) -> tuple[Tensors, Tensors]:
        rows = self.whole_model(batch["x"])
        return {}, {"loss": rows.square().sum(), "output:rows": rows}


class CountingGroup(ThreadGroup):
    gathers = 0

    def all_gather(self, tensor: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        self.gathers += 1
        return super().all_gather(tensor, lengths)


@pytest.mark.parametrize("evaluates", [True, False])
def test_outputs_are_gathered_in_evaluations_only(evaluates: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 3), torch.randn(2, 5, 3)
    expected = model(x)
    model.forward = split_first_input(model.forward)

    def run(group: ThreadGroup) -> tuple[Tensors, int]:
        section = Section(model)
        rows = CountingGroup(group.index, group.size, group._exchange)  # pyright: ignore
        section.row_groups = {2: rows}  # pyright: ignore
        _, terms = section(SectionCase("whole"), {"x": x}, {}, evaluates, 2)
        return terms, rows.gathers

    for terms, gathers in run_thread_ranks(2, run):
        assert torch.allclose(terms["loss"], expected.square().sum())
        assert set(terms) == ({"loss", "output:rows"} if evaluates else {"loss"})
        assert gathers == int(evaluates)
        assert not evaluates or torch.allclose(terms["output:rows"], expected)
