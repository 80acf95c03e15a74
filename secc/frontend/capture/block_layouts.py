"""Annotates at which dims blocks of torch's own classes take samples.

A block keeps the samples of a batch apart where it expects them. A recurrent layer that is given them in the
place of its sequence runs from sample to sample; the shapes are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.padding import _ConstantPadNd  # pyright: ignore[reportPrivateUsage]
from xdsl.dialects.builtin import ModuleOp

from secc.ir.dialect.ops import graph_of, strings_attr
from secc.ir.dialect.readable_names import SAMPLE_PLACES_ATTRIBUTE

_RANKS = range(1, 7)
_Places = Iterable[tuple[int, int]]  # (number of dims of the input, dim of the samples)


def _of_sequences(batch_first: bool) -> _Places:
    return [(3, 0 if batch_first else 1)]


def _places_of_padding(layer: Any) -> _Places:
    """Padding keeps samples apart at dims that it does not pad. Its sizes are pairs from the last dim on."""
    padded = {1 + i // 2 for i, size in enumerate(layer.padding) if size != 0}
    return [(rank, dim) for rank in _RANKS for dim in range(rank) if rank - dim not in padded]


# The places of samples by class; subclasses, too.
_PLACES: list[tuple[type[nn.Module] | tuple[type[nn.Module], ...], Callable[[Any], _Places]]] = [
    (nn.RNNBase, lambda layer: _of_sequences(layer.batch_first)),
    (nn.MultiheadAttention, lambda layer: _of_sequences(layer.batch_first)),
    (nn.Transformer, lambda layer: _of_sequences(layer.batch_first)),
    (
        (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
        lambda layer: _of_sequences(layer.self_attn.batch_first),
    ),
    (
        (nn.TransformerEncoder, nn.TransformerDecoder),
        lambda layer: _of_sequences(layer.layers[0].self_attn.batch_first),
    ),
    (_ConvNd, lambda layer: [(len(layer.kernel_size) + 2, 0)]),
    (nn.GroupNorm, lambda layer: [(rank, 0) for rank in _RANKS if rank > 1]),
    (_ConstantPadNd, _places_of_padding),
]


def annotate_block_layouts(module: ModuleOp, model: nn.Module) -> None:
    """Puts the places of samples on each block of a class in the table, as "rank dim". `model` may be on any
    device."""
    for path, block in graph_of(module).blocks.items():
        layer = model.get_submodule(path)
        places = next((find(layer) for classes, find in _PLACES if isinstance(layer, classes)), None)
        if places is not None and type(layer).__module__.startswith("torch."):
            block.attributes[SAMPLE_PLACES_ATTRIBUTE] = strings_attr(f"{rank} {dim}" for rank, dim in places)
