from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secc.runtime.errors import UserError
from secc.runtime.kernels import gather_rows, launch_tuning, ragged_index, scatter_rows
from tests.kernels.float64_comparison import (
    TENSOR_LAYOUTS,
    assert_agree,
    check_operator_registrations,
    example_count,
    strided_tensor,
    tensor_seeds,
)

TRAILING = st.sampled_from([(), (1,), (5,), (11,), (2, 3)])
INDEX = st.lists(st.integers(-1, 5), max_size=9)


def plain_scatter(base, index, rows):
    out = list(base.unbind())
    for i, row in zip(index.tolist(), rows.unbind() if len(rows) else [], strict=True):
        if i >= 0:
            out[i] = row
    return torch.stack(out)


def plain_gather(x, index):
    rows = [x[i] if i >= 0 else torch.zeros_like(x[0]) for i in index.tolist()]
    return torch.stack(rows) if rows else x[:0]


@settings(max_examples=example_count(40))
@given(trailing=TRAILING, index=INDEX, layout=TENSOR_LAYOUTS, seed=tensor_seeds())
def test_gathering_agrees_with_float64(trailing, index, layout, seed):
    picks = torch.tensor(index, dtype=torch.int64)
    with launch_tuning.use_launch("rows", launch_tuning.LaunchParameters(8)):
        assert_agree(
            lambda x: gather_rows(x, picks),
            lambda x: plain_gather(x, picks),
            [strided_tensor([6, *trailing], layout, seed)],
            2e-5,
        )


@settings(max_examples=example_count(40))
@given(trailing=TRAILING, index=INDEX, layout=TENSOR_LAYOUTS, seed=tensor_seeds())
def test_scattering_agrees_with_float64(trailing, index, layout, seed):
    places = torch.tensor(index, dtype=torch.int32)
    inputs = [
        strided_tensor([6, *trailing], layout, seed),
        strided_tensor([len(index), *trailing], "plain", seed + 1),
    ]
    with launch_tuning.use_launch("rows", launch_tuning.LaunchParameters(8)):
        assert_agree(
            lambda b, r: scatter_rows(b, places, r), lambda b, r: plain_scatter(b, places, r), inputs, 2e-5
        )


def test_image_features_replace_their_tokens():
    tokens = torch.tensor([[7, 9, 9, 1], [9, 3, 0, 0]])
    embeddings, features = torch.randn(2, 4, 5), torch.randn(3, 5)
    places = (tokens.flatten() == 9).nonzero().squeeze(1)
    found = scatter_rows(embeddings.flatten(0, 1), places, features).view(2, 4, 5)
    assert torch.equal(found, embeddings.masked_scatter((tokens == 9).unsqueeze(2), features))


def test_ragged_samples_are_packed_and_unpacked():
    offsets = torch.tensor([0, 2, 2, 5, 6])
    chosen = torch.tensor([2, 1, 0])
    index = ragged_index(offsets, chosen)
    assert index.tolist() == [2, 3, 4, 0, 1]
    x = torch.randn(6, 3)
    assert torch.equal(scatter_rows(torch.zeros(6, 3), index, gather_rows(x, index))[:5], x[:5])


def test_gradients_of_a_row_picked_often_sum_in_float32():
    x = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    gather_rows(x, torch.zeros(300, dtype=torch.int64)).sum().backward()
    assert x.grad[0, 0] == 300  # one by one in bfloat16 it would stay at 256


def test_gradients_of_rows_picked_far_apart():
    index = torch.arange(700) % 350  # a search goes over several blocks
    index[3::7], index[5::11] = -1, 4
    upstream, x = torch.randn(700, 3), torch.zeros(350, 3, requires_grad=True)
    (found,) = torch.autograd.grad(gather_rows(x, index), x, upstream)
    kept = index >= 0
    expected = torch.zeros(350, 3, dtype=torch.float64).index_add_(0, index[kept], upstream[kept].double())
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_integer_tensors():
    assert gather_rows(torch.arange(4), torch.tensor([3, -1])).tolist() == [3, 0]


def test_invalid_arguments_are_rejected():
    with pytest.raises(UserError, match="row 3 of 3 does not exist"):
        gather_rows(torch.ones(3, 2), torch.tensor([3]))
    with pytest.raises(UserError, match="do not fit"):
        scatter_rows(torch.ones(3, 2), torch.tensor([0]), torch.ones(1, 3))
    with pytest.raises(UserError, match="integers"):
        gather_rows(torch.ones(3, 2), torch.tensor([True, False, True]))


def test_operator_registrations():
    x, index = torch.randn(4, 3, requires_grad=True), torch.tensor([2, 0, 2, -1])
    check_operator_registrations("gather_rows", x, index)
    check_operator_registrations("scatter_rows", x, index, torch.randn(4, 3, requires_grad=True))
