"""Skips repeated layers of a stack: two equal layers run, the others are counted as the second one.

Layers are equal if class, code, settings, parameters and arguments are. Arguments are compared by shape, and
by value where they have values (28 of the 32 layers of a vision tower attend within windows, the others to
whole images). Settings are the numbers and strings among the attributes of their modules (a window, a
scale), without one that counts the layers. Code is that of the class, or fused code by the name of the
function that replaces a method; a layer with another `forward` of its own always runs. The first layer may
differ in what it allocates; therefore the second one's counts are repeated. Results of skipped layers are
created without running them.
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
from secc.runtime.fusion.install import rewrites_installed_in
from secc.runtime.recorder.block_results import TensorDigests


@dataclass(frozen=True)
class OpCounts:
    """FLOPs by smallest weight dimension, those that recomputation units need again, those at their ends that
    they do not, those of grouped products, and all other totals."""

    flops: Counter[int]
    recomputed_flops: Counter[int]
    unneeded_flops: Counter[int]
    routed_flops: Counter[int]
    totals: tuple[int, ...]

    def counts_since(self, before: OpCounts) -> OpCounts:
        """The counts added after the snapshot `before`."""
        totals = tuple(a - b for a, b in zip(self.totals, before.totals, strict=True))
        return OpCounts(
            self.flops - before.flops,
            self.recomputed_flops - before.recomputed_flops,
            self.unneeded_flops - before.unneeded_flops,
            self.routed_flops - before.routed_flops,
            totals,
        )


class OpCounterProtocol(Protocol):
    """Counter of a run, as far as skipping layers needs it."""

    def snapshot_counts(self) -> OpCounts: ...
    def add_counts(self, more: OpCounts) -> None: ...


MakeTensor = Callable[[Sequence[int], Sequence[int], torch.dtype, bool], torch.Tensor]


@contextmanager
def skip_repeated_layers(
    units: Sequence[nn.Module], counter: OpCounterProtocol, make_tensor: MakeTensor
) -> Iterator[None]:
    """Run two of each set of equal units within the context, and add the counts of the second one for the
    others.

    make_tensor: creates results of skipped units from size, stride, dtype and requires_grad.
    """
    runs: Counter[object] = Counter()
    known_results: dict[object, tuple[OpCounts, Any]] = {}
    digests = TensorDigests()

    def with_skipping(unit: nn.Module) -> Callable[..., Any]:
        original_forward, signature = unit.forward, signatures[unit]

        def forward(*args: Any, **kwargs: Any) -> Any:
            key = (signature, _arguments_signature((args, kwargs), digests))
            if key in known_results:
                counts, result = known_results[key]
                counter.add_counts(counts)
                return tree_map(result_of, result)
            runs[key] += 1
            before = counter.snapshot_counts()
            out = original_forward(*args, **kwargs)
            if runs[key] == 2 and all(
                has_no_values(t) for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)
            ):
                known_results[key] = (
                    counter.snapshot_counts().counts_since(before),
                    tree_map(_layout_of_leaf, out),
                )
            return out

        return forward

    def result_of(leaf: Any) -> Any:
        return (
            make_tensor(leaf.size, leaf.stride, leaf.dtype, leaf.requires_grad)
            if isinstance(leaf, _TensorLayout)
            else leaf
        )

    wrapped = [u for u in units if not _has_own_forward(u)] if len(units) > 2 else []
    signatures = dict(zip(wrapped, _layer_signatures(wrapped), strict=True))
    installed = {unit: vars(unit)["forward"] for unit in wrapped if "forward" in vars(unit)}
    try:
        for unit in wrapped:
            unit.forward = with_skipping(unit)
        yield
    finally:
        for unit in wrapped:
            if unit in installed:
                unit.forward = installed[unit]
            else:
                del unit.forward


@dataclass(frozen=True)
class _TensorLayout:
    """Layout of a tensor, kept instead of the tensor so that it can be freed."""

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


def _has_own_forward(unit: nn.Module) -> bool:
    """Whether a module of the unit has a `forward` that its class does not have, other than a fused one."""
    return any("forward" in vars(m) and "forward" not in rewrites_installed_in(m) for m in unit.modules())


def _layer_signatures(units: Sequence[nn.Module]) -> list[object]:
    """What distinguishes each of the units, in the order of a stack, from others: class, configuration,
    fused code, settings, and layout of its parameters."""
    settings = [_plain_attributes(unit) for unit in units]
    counting = {
        (cls, name)
        for cls in {type(unit) for unit in units}
        for values in [[s for unit, s in zip(units, settings, strict=True) if type(unit) is cls]]
        for name, first in values[0].items()
        if type(first) is int and [s.get(name) for s in values] == [*range(first, first + len(values))]
    }
    return [
        (
            type(unit),
            repr(unit),
            tuple((path, *rewrites_installed_in(m).items()) for path, m in unit.named_modules()),
            tuple(item for item in values.items() if (type(unit), item[0]) not in counting),
            tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in unit.named_parameters()),
        )
        for unit, values in zip(units, settings, strict=True)
    ]


def _plain_attributes(unit: nn.Module) -> dict[tuple[str, str], object]:
    """The numbers and strings among the attributes of a unit's modules, by path and name."""
    return {
        (path, name): value
        for path, module in unit.named_modules()
        for name, value in vars(module).items()
        if value is None or isinstance(value, (int, float, str))
    }


def _arguments_signature(arguments: Any, digests: TensorDigests) -> object:
    leaves, structure = tree_flatten(arguments)
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        return str(structure), tuple(_leaf_signature(leaf, digests) for leaf in leaves)


def _leaf_signature(leaf: Any, digests: TensorDigests) -> object:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    layout = leaf.size(), leaf.stride(), leaf.dtype, leaf.requires_grad
    return layout if has_no_values(leaf) else (layout, digests.digest_of(leaf))
