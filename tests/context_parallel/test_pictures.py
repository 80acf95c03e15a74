"""Towers on the rows of several ranks: whole pictures and frames go to ranks, and only a picture that
ranks have to share is exchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from secc.frontend.cp_search.find_row_layer import find_row_layer
from secc.frontend.tp_search.thread_ranks import ThreadGroup
from secc.runtime.context_parallel.row_marks import deal_pieces
from secc.runtime.plan.unsplit_reason import UnsplitKind
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


TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 8,
}
WINDOWS: dict[str, Any] = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "window_size": 4}
BATCHED: dict[str, Callable[[], nn.Module]] = {
    "clip": lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**TINY)),
    "siglip": lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**TINY)),
    "dinov2": lambda: hf.Dinov2Model(hf.Dinov2Config(**TINY)),
    "swin": lambda: hf.SwinModel(hf.SwinConfig(**WINDOWS, depths=[2, 2], num_heads=[2, 4])),
    "convnext": lambda: hf.ConvNextModel(
        hf.ConvNextConfig(hidden_sizes=[8, 16], depths=[2, 2], num_stages=2)
    ),
}


class BatchedTower(nn.Module):
    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower.eval()  # some drop whole samples in training

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.tower(pixel_values).last_hidden_state.sin().sum()


@pytest.mark.parametrize(("frames", "count"), [(5, 2), (5, 3), (2, 3)])
@pytest.mark.parametrize("name", BATCHED)
def test_ranks_get_whole_entries_of_a_batch(
    name: str, frames: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing travels inside a tower in which frames are entries of a batch."""
    torch.manual_seed(0)

    def all_gather(group: ThreadGroup, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        raise AssertionError("ranks exchange rows")

    monkeypatch.setattr(ThreadGroup, "all_gather", all_gather)
    pixels = torch.randn(frames, 3, 16, 16).double()
    assert_same(BatchedTower(BATCHED[name]()), {"pixel_values": pixels}, count, "frames")


class TemporalLayer(nn.Module):
    """Attention over the patches of a frame, then over all `FRAMES` frames at each patch."""

    FRAMES = 3

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = (nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True) for _ in "ab")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.space(x).unflatten(0, (-1, self.FRAMES)).transpose(1, 2)
        return self.time(x.flatten(0, 1)).view_as(x).transpose(1, 2).flatten(0, 1)


def test_frames_that_layers_mix_are_not_shared() -> None:
    call: Any = ((torch.randn(6, 4, 32).requires_grad_(),), {})
    layer = TemporalLayer()
    assert find_row_layer(layer.space, call, 2, attention="frames").reason is None
    mixed = find_row_layer(layer, call, 4, attention="frames").reason  # two ranks would have whole videos
    assert mixed is not None and mixed.kind == UnsplitKind.NO_ROWS
    one: Any = ((torch.randn(1, 4, 32).requires_grad_(),), {})
    assert find_row_layer(layer.space, one, 2, attention="frames").reason is not None  # shows nothing


def test_pieces_stay_whole() -> None:
    rows = deal_pieces((4, 6, 16, 20), 3)
    assert rows.runs == (((0, 6),), ((6, 16),), ((16, 20),)) and rows.is_in_order
    assert deal_pieces((2, 20), 3).counts == (0, 2, 18) or deal_pieces((2, 20), 3).counts == (2, 18, 0)


def test_rows_that_become_one_stay_on_their_rank() -> None:
    rows = deal_pieces((4, 12, 16), 2)
    merged = rows.merge_adjacent_rows(4)
    assert merged is not None and (merged.size, merged.runs) == (4, (((0, 1),), ((1, 4),)))
    assert rows.merge_adjacent_rows(8) is None
