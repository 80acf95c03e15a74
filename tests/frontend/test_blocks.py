"""What is learnt of a block while its result's shape is: rows that masks choose, random numbers, samples that it couples."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import nn

from secc.runtime.recorder import record

BATCH = {"x": torch.arange(20.0).reshape(4, 5) / 10 - 1, "keep": torch.tensor([True, False, True, True])}


def line_free(call: str) -> str:
    """The name of a random op without its line numbers."""
    return re.sub(r"test_blocks.py:\d+", "LINE", call)


def test_a_mask_filled_in_the_shape_of_a_result_chooses_rows_inside_a_block() -> None:
    """UDOP marks the patches that have words in a tensor made by `full_like` of what it embedded."""

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            h = self.embed(x)
            rest, written = torch.full_like(h[:, 0], True).bool(), torch.zeros_like(h)
            rest[: len(keep) // 2] = False
            written[:2] = h[:2]
            if self.training and bool(rest.all()):
                return h
            return torch.cat([h[rest], written])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = Patches()

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            return self.patches(x, keep).sum()

    (call,) = record(Model(), BATCH, ["patches"]).calls
    count = len(BATCH["x"])
    assert next(iter(call.users)).meta["shape"] == (2 * count - len(BATCH["keep"]) // 2, 5)
    assert next(iter(call.users)).meta["requires_grad"]


def test_random_numbers_and_batch_norm_inside_blocks_are_told() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.1), nn.Dropout(0.0), nn.BatchNorm1d(5))

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            return self.tower(x).mean()

    found = record(Noisy(), BATCH, ["tower"])
    assert {(h.path, h.kind) for h in found.hazards} == {("tower", "batch_norm")}
    assert [(line_free(d.call), d.shape, d.known) for d in found.draws] == [("tower.1@LINE#0", (len(BATCH["x"]), 5), True)]
    quiet = record(Noisy().eval(), BATCH, ["tower"])
    assert quiet.hazards == [] and quiet.draws == []


def test_random_ops_of_alike_layers_have_names_of_their_own() -> None:
    class Layer(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.p, self.linear = p, nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.linear(x), self.p) if self.p else self.linear(x)

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Sequential(*(Layer(p) for p in (0.0, 0.1, 0.1, 0.2)))

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            return self.tower(self.tower(x)).mean()

    for blocks in (["tower"], [f"tower.{i}" for i in range(4)]):
        names = [line_free(d.call) for d in record(Deep(), BATCH, blocks).draws]
        assert names == [f"tower.{i}@LINE<LINE#{time}" for time in range(2) for i in (1, 2, 3)]
