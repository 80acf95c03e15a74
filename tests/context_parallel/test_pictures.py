"""Towers on the rows of several ranks: whole pictures and frames go to ranks, and only a picture that
ranks have to share is exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from secc.frontend.tp_search.thread_ranks import ThreadGroup
from secc.runtime.context_parallel.row_marks import deal_pieces
from tests.context_parallel.test_row_mode import assert_same

SIZES: dict[str, Any] = {
    "attn_implementation": "sdpa",
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "intermediate_size": 48,
    "out_hidden_size": 32,
}


def _qwen2_5() -> nn.Module:
    """Windows in the first layer, whole frames in the second."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as code

    config: Any = hf.Qwen2_5_VLConfig(vision_config=SIZES | {"fullatt_block_indexes": [1], "window_size": 56})
    return code.Qwen2_5_VisionTransformerPretrainedModel(config.vision_config)


def _qwen3() -> nn.Module:
    from transformers.models.qwen3_vl import modeling_qwen3_vl as code

    config: Any = hf.Qwen3VLConfig(
        vision_config=SIZES | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    )
    return code.Qwen3VLVisionModel(config.vision_config)


class Tower(nn.Module):
    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.tower, self.weight = tower, nn.Parameter(torch.randn(32))

    def forward(self, pixel_values: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return (self.tower(pixel_values, grid_thw=grid).pooler_output * self.weight).sin().sum()


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("make", [_qwen2_5, _qwen3])
@pytest.mark.parametrize(
    ("grids", "shared"),
    [([[7, 4, 4]], False), ([[5, 4, 4], [1, 4, 8]], False), ([[1, 4, 4]], True)],
    ids=["video", "video and picture", "one picture"],
)
def test_ranks_get_whole_frames(
    make: Any, grids: Sequence[Any], shared: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values travel for a picture that ranks share, and nothing else inside of layers."""
    torch.manual_seed(0)
    sent, gather = list[int](), ThreadGroup.all_gather

    def all_gather(group: ThreadGroup, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        sent.append(tensor.numel())
        return gather(group, tensor, lengths)

    monkeypatch.setattr(ThreadGroup, "all_gather", all_gather)
    model, grid = Tower(make()), torch.tensor(grids)
    patches = int(grid.prod(1).sum())
    pixels = torch.randn(patches, 3 * 2 * model.tower.config.patch_size**2).double()
    assert_same(model, {"pixel_values": pixels, "grid": grid}, count)
    # Patches merge on their ranks. Qwen2.5's tower then sorts windows back, on gathered rows.
    results = 32 * patches // 4 if make is _qwen2_5 else 0
    if shared:
        keys_and_values = 2 * 2 * patches * 32  # of two layers
        assert keys_and_values + results <= sum(sent) <= keys_and_values + 2 * 32 * patches
    else:
        assert sum(sent) == results


def test_pieces_stay_whole() -> None:
    rows = deal_pieces((4, 6, 16, 20), 3)
    assert rows.runs == (((0, 6),), ((6, 16),), ((16, 20),)) and rows.is_in_order
    assert deal_pieces((2, 20), 3).counts == (0, 2, 18) or deal_pieces((2, 20), 3).counts == (2, 18, 0)


def test_rows_that_become_one_stay_on_their_rank() -> None:
    rows = deal_pieces((4, 12, 16), 2)
    merged = rows.merge_adjacent_rows(4)
    assert merged is not None and (merged.size, merged.runs) == (4, (((0, 1),), ((1, 4),)))
    assert rows.merge_adjacent_rows(8) is None
