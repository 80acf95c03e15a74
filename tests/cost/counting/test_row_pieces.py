"""Which pieces of a vision tower's rows ranks get whole, and what attention exchanges then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secc.cost.counting.meta_run import BlockCounts, ValuelessTensors, run_on_meta
from secc.runtime.sections.recompute import recompute_units

WIDTH, FRAME, FRAMES = 8, 16, 6
KEYS_AND_VALUES = 2 * FRAMES * FRAME * WIDTH * 4  # bytes of a layer


class FrameLayer(nn.Module):
    """Attention within pieces of `per_piece` rows, or across all rows."""

    def __init__(self, per_piece: int) -> None:
        super().__init__()
        self.per_piece, self.qkv = per_piece, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x)[None].chunk(3, -1)
        pieces = zip(*(t.split(self.per_piece, 1) for t in parts), strict=True)
        return x + torch.cat([F.scaled_dot_product_attention(*piece) for piece in pieces], 1)[0]


class Tower(nn.Module):
    def __init__(self, *per_piece: int) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(map(FrameLayer, per_piece))

    def forward(self, patches: torch.Tensor, ends: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
        x = self.embed(patches)
        for layer in self.layers:
            x = layer(x, windows if layer.per_piece < FRAME else ends)
        return x


def count_block(*per_piece: int) -> BlockCounts:
    tower, rows = Tower(*per_piece), FRAMES * FRAME

    def make_arguments(make: ValuelessTensors) -> tuple[list[Any], dict[str, Any]]:
        ends = [torch.arange(0, rows + 1, size) for size in (FRAME, FRAME // 4)]
        return [make((rows, 4), (4, 1), torch.float32), *ends], {}

    return run_on_meta(tower, make_arguments, True, recompute_units(tower), ValuelessTensors(fake=True))


@pytest.mark.parametrize(
    "shape", [(FRAMES, FRAME, WIDTH), (FRAMES, 2, FRAME, WIDTH)], ids=["rows", "pictures"]
)
def test_entries_of_a_batch_are_counted(shape: tuple[int, ...]) -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), layers)

    def make_arguments(make: ValuelessTensors) -> tuple[list[Any], dict[str, Any]]:
        return [make(shape, torch.empty(shape, device="meta").stride(), torch.float32)], {}

    counts = run_on_meta(tower, make_arguments, True, list(layers.children()))
    assert (counts.pieces, counts.entries) == (0, FRAMES)
    assert counts.unshared == torch.Size(shape).numel() * 4  # what the first map keeps


@pytest.mark.parametrize(
    ("per_piece", "pieces", "parts", "exchanged"),
    [
        ((FRAME,) * 4, FRAMES, 0, 0),
        ((FRAME // 4, FRAME // 4, FRAME, FRAME, FRAME, FRAME // 4), 4 * FRAMES, FRAMES, 3),
        ((FRAME, FRAME, FRAME * FRAMES), FRAMES, 1, 1),  # the last layer attends across frames
    ],
    ids=["frames", "windows, then frames", "across frames"],
)
def test_layers_within_pieces_exchange_nothing(
    per_piece: tuple[int, ...], pieces: int, parts: int, exchanged: int
) -> None:
    found = count_block(*per_piece)
    assert (found.pieces, found.parts) == (pieces, parts)
    assert found.exchanged == exchanged * KEYS_AND_VALUES
    assert found.unshared == FRAMES * FRAME * 4 * 4  # what the embedding keeps
