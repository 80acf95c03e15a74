"""The bytes of tensors with any strides."""

from __future__ import annotations

import pytest
import torch

from secc.runtime.host.tensor_bytes import view_bytes
from secc.runtime.recorder.block_results import hash_values

NUMBERS = torch.arange(96)


@pytest.mark.parametrize(
    "tensor",
    [
        NUMBERS.view(2, 48)[1:, 0],  # contiguous, with a stride of 48
        NUMBERS[::2],
        NUMBERS.view(2, 48).T,
        NUMBERS[3],
        NUMBERS[:0],
        NUMBERS[5:9].bfloat16(),
        NUMBERS[:9] > 4,
        torch.ones(3, requires_grad=True),
    ],
)
def test_bytes_are_those_of_the_entries_in_order(tensor: torch.Tensor) -> None:
    entries = torch.tensor(tensor.tolist(), dtype=tensor.dtype).reshape(tensor.shape)
    assert torch.equal(view_bytes(tensor), view_bytes(entries))
    assert view_bytes(tensor).numel() == tensor.numel() * tensor.element_size()
    assert hash_values(tensor) == hash_values(entries)


def test_bytes_of_a_contiguous_tensor_are_a_view() -> None:
    tensor = torch.zeros(2, dtype=torch.int16)
    view_bytes(tensor)[2] = 7
    assert tensor.tolist() == [0, 7]
