"""Loops over samples in a loss: which sums are recognised, and that a marked recording computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from secc.runtime.recorder import Replay, record_forward
from secc.runtime.recorder.fold_joins import fold_joins
from secc.runtime.recorder.loss_loops import find_loss_loops, roll_loss_loops
from secc.runtime.recorder.outline import Outline

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
BATCH = {"x": torch.arange(24.0).reshape(3, 4, 2) / 10 - 1, "n": torch.tensor([4, 2, 3])}


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.loss = nn.Linear(2, 2), loss

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return self.loss(self.body(x), n)


def each(h: torch.Tensor, n: torch.Tensor) -> list[torch.Tensor]:
    return [h[i, :length].square().mean() for i, length in enumerate(n.tolist())]


LOOPS: dict[str, Loss] = {
    "a sum": lambda h, n: sum(each(h, n)) / n.sum(),  # type: ignore[return-value]
    "a sum that is divided by what Python adds up": lambda h, n: sum(each(h, n)) / sum(n.tolist()),  # type: ignore[return-value]
    "a sum in which each is divided alike": lambda h, n: sum(part / len(n) for part in each(h, n)),  # type: ignore[return-value]
    "a sum with something else beside it": lambda h, n: torch.zeros(()) + sum(each(h, n)) + h.mean(),
    "a stack": lambda h, n: torch.stack(each(h, n)).mean() + h.mean(),
    "a sum over tensors taken apart": lambda h, n: sum(part.exp().sum() for part in h.unbind(0)),  # type: ignore[return-value]
}
NONE: dict[str, Loss] = {
    "parts of a sample": lambda h, n: sum(h[:, i].square().mean() for i in range(3)),  # type: ignore[return-value]
    "rows that are looked at twice": lambda h, n: sum(h[i].mean() * h[0].mean() for i in range(3)),  # type: ignore[return-value]
    "each with all samples": lambda h, n: sum(h[i].mean() * h.mean() for i in range(3)),  # type: ignore[return-value]
}


@pytest.mark.parametrize("loss", LOOPS.values(), ids=LOOPS)
def test_a_loop_over_samples_is_marked_and_computes_the_same(loss: Loss) -> None:
    model = Model(loss)
    found = roll_loss_loops(fold_joins(record_forward(model, BATCH, ["body"])))
    (loop,) = find_loss_loops(found)
    assert Outline.of_recording(found).labelled_tensors["loss:0"] is loop and loop.meta["shape"] == (
        (3,) if loop.target is torch.ops.aten.stack.default else ()
    )
    torch.testing.assert_close(
        Replay(model, found.graph, found.constants).compute_loss(BATCH), model(**BATCH)
    )


@pytest.mark.parametrize("loss", NONE.values(), ids=NONE)
def test_other_sums_are_not_marked(loss: Loss) -> None:
    assert not find_loss_loops(roll_loss_loops(fold_joins(record_forward(Model(loss), BATCH, ["body"]))))
