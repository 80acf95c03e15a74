"""Flex attention on CPUs equals `scaled_dot_product_attention` with its mask and bias, and block masks stay
the same masks as tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

from secc.runtime.model.dense_block_mask import DenseBlockMask, find_blocks, make_dense
from secc.runtime.model.flex_attention import prepare_flex_attention

SAMPLES, HEADS, ROWS, WIDTH = 2, 4, 150, 8
LENGTHS = torch.tensor([60, 90, 149, 1])
DOCUMENTS = torch.arange(4).repeat_interleave(LENGTHS).view(SAMPLES, ROWS)


def sees_document(sample: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
    return (query >= key) & (DOCUMENTS[sample, query] == DOCUMENTS[sample, key])


def subtract_distance(score: Any, sample: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
    return score - 2.0 ** -(head + 1) * (query - key)


@pytest.fixture(autouse=True)
def prepared() -> None:
    prepare_flex_attention()


def document_mask() -> BlockMask:
    return create_block_mask(sees_document, SAMPLES, None, ROWS, ROWS, device="cpu")


def draw_heads() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(SAMPLES, HEADS, ROWS, WIDTH, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("dense", [False, True])
def test_results_and_gradients_on_cpus_are_those_of_a_mask_and_a_bias(dense: bool) -> None:
    heads, mask = draw_heads(), document_mask()
    mask = make_dense(mask) if dense else mask
    found = flex_attention(*heads, score_mod=subtract_distance, block_mask=mask)
    places = torch.arange(ROWS)
    slopes = 2.0 ** -torch.arange(1, HEADS + 1)
    bias = -slopes[:, None, None] * (places[:, None] - places)
    seen = (DOCUMENTS[:, None, :, None] == DOCUMENTS[:, None, None, :]) & (places[:, None] >= places)
    expected = F.scaled_dot_product_attention(*heads, attn_mask=bias.masked_fill(~seen, -torch.inf))
    weights = torch.randn_like(expected)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, heads, weights), torch.autograd.grad(expected, heads, weights), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_dense_mask_has_the_blocks_of_its_function() -> None:
    """Off CPUs, kernels skip blocks by them."""
    mask = document_mask()
    dense = make_dense(mask)
    assert isinstance(dense, BlockMask) and make_dense(dense) is dense
    expected = create_mask(sees_document, SAMPLES, 1, ROWS, ROWS, device="cpu")
    assert dense.allowed.equal(expected)
    assert find_blocks(expected).to_dense().equal(mask.to_dense())
    assert create_mask(dense.mask_mod, SAMPLES, HEADS, ROWS, ROWS, device="cpu").equal(
        expected.expand(-1, HEADS, -1, -1)
    )


def test_a_replaced_tensor_replaces_the_mask() -> None:
    """Recorders put tensors without values in place of a dense mask's."""
    dense = make_dense(document_mask())
    everything = torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool)
    dense.allowed = everything
    q, k, v = draw_heads()
    torch.testing.assert_close(
        flex_attention(q, k, v, block_mask=dense), F.scaled_dot_product_attention(q, k, v)
    )
    assert DenseBlockMask(everything).allowed is everything
