"""Layers that are like others need not run again: a stack of eighty costs what two of its layers cost, eighty
times.

Layers are alike if class, parameters and arguments are: shapes, and for tensors that have values these too
(28 of the 32 layers of a vision tower see windows, the others whole images). What the second of them counts
is counted for each later one, whose results are made without running it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from secc.cost.counting.fused_attention import has_no_values
from secc.runtime.recorder.block_results import TensorDigests


@dataclass(frozen=True)
class OpCounts:
    """FLOPs by the narrowest dim, those of units, and whatever else is counted."""

    flops: Counter[int]
    recomputed_flops: Counter[int]
    totals: tuple[int, ...]

    def counts_since(self, before: OpCounts) -> OpCounts:
        """What came after `before`."""
        flat = tuple(a - b for a, b in zip(self.totals, before.totals, strict=True))
        return OpCounts(self.flops - before.flops, self.recomputed_flops - before.recomputed_flops, flat)


class OpCounterProtocol(Protocol):
    """What counts."""

    def snapshot_counts(self) -> OpCounts: ...
    def add_counts(self, more: OpCounts) -> None: ...


MakeTensor = Callable[[Sequence[int], Sequence[int], torch.dtype, bool], torch.Tensor]


@contextmanager
def skip_repeated_layers(
    units: Sequence[nn.Module], counter: OpCounterProtocol, makes: MakeTensor
) -> Iterator[None]:
    """Run two of alike units and count the others."""
    runs: Counter[object] = Counter()
    known: dict[object, tuple[OpCounts, Any]] = {}
    digests = TensorDigests()

    def wrapped(unit: nn.Module) -> Callable[..., Any]:
        plain, kind = unit.forward, _module_signature(unit)

        def forward(*args: Any, **kwargs: Any) -> Any:
            key = (kind, _arguments_signature((args, kwargs), digests))
            if key in known:
                more, result = known[key]
                counter.add_counts(more)
                return tree_map(made, result)
            runs[key] += 1
            before = counter.snapshot_counts()
            out = plain(*args, **kwargs)
            if runs[key] == 2 and all(
                has_no_values(t) for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)
            ):
                known[key] = counter.snapshot_counts().counts_since(before), tree_map(_layout_of_leaf, out)
            return out

        return forward

    def made(leaf: Any) -> Any:
        return (
            makes(leaf.size, leaf.stride, leaf.dtype, leaf.requires_grad)
            if isinstance(leaf, _TensorLayout)
            else leaf
        )

    changed = [u for u in units if "forward" not in vars(u)] if len(units) > 2 else []
    try:
        for unit in changed:
            unit.forward = wrapped(unit)
        yield
    finally:
        for unit in changed:
            del unit.forward


@dataclass(frozen=True)
class _TensorLayout:
    """What a tensor is like, for which it need not live on."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def _layout_of_leaf(leaf: Any) -> Any:
    return (
        _TensorLayout(leaf.size(), leaf.stride(), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else leaf
    )


def _module_signature(unit: nn.Module) -> object:
    """What tells a unit from others, its parameters' values left out."""
    return (
        type(unit),
        repr(unit),
        tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in unit.named_parameters()),
    )


def _arguments_signature(arguments: Any, digests: TensorDigests) -> object:
    leaves, structure = tree_flatten(arguments)
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        return str(structure), tuple(_leaf_signature(leaf, digests) for leaf in leaves)


def _leaf_signature(leaf: Any, digests: TensorDigests) -> object:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    layout = leaf.size(), leaf.stride(), leaf.dtype, leaf.requires_grad
    return layout if has_no_values(leaf) else (layout, digests.digest_of(leaf))
