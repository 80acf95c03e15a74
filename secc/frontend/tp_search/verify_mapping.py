"""Shows a mapping exact: a module on all ranks, as threads, against the whole module: its results and every
gradient."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from secc.frontend.tp_search.find_mapping import Call
from secc.frontend.tp_search.thread_ranks import ThreadGroup, run_ranks
from secc.runtime.plan.schema import Shard, Style
from secc.runtime.randomness import random_op_values
from secc.runtime.randomness import shard_coordinates as part
from secc.runtime.randomness.bits import bits, coordinates, key
from secc.runtime.tensor_parallel.parameter_cuts import Cut
from secc.runtime.tensor_parallel.styles import apply

TOLERANCE = 1e-5  # of a gradient's own norm, plus
FLOOR = 1e-7  # of the norm of all: in float64, but a user's code may compute in float32 inside
SEED = 7
LARGE = 1 << 25  # parameters: what has more is compared in float32
ROUNDING = 10  # times as much may float32 differ


@dataclass(frozen=True)
class Verdict:
    """What the comparison showed: `reason` is "" where all is exact; `partial` are whole parameters whose
    gradients must be summed."""

    reason: str
    partial: tuple[str, ...] = ()


@dataclass
class _Result:
    outs: list[torch.Tensor]
    inputs: list[torch.Tensor | None]
    gradients: dict[str, torch.Tensor | None]


class Whole:
    """A module and a call of it, with which mappings are compared: what the whole module computes is found
    once for all of them."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        self._module, self._call = module, call
        self._found: tuple[nn.Module, _Result] | None = None

    def compare(
        self,
        count: int,
        styles: Sequence[Style],
        shards: Sequence[Shard],
        fuse: Callable[[nn.Module], None] = lambda module: None,
    ) -> Verdict:
        """Compare the module cut over `count` ranks with the whole one. `fuse` puts fused operators into a
        rank's module."""
        state = torch.random.get_rng_state()
        try:
            self._found = whole, expected = self._found or _whole(self._module, self._call)
            ranks = run_ranks(count, lambda group: _rank(whole, self._call, group, styles, shards, fuse))
        except Exception as error:
            return Verdict(
                f"its code fails on parts: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            )
        finally:
            torch.random.set_rng_state(state)
        return _compare(expected, ranks, _cuts(whole, shards, count))


def _whole(module: nn.Module, call: Call) -> tuple[nn.Module, _Result]:
    """A copy of the module with what it computes: in float64 unless it is large, or its code knows none
    (grouped products of experts)."""
    if sum(p.numel() for p in module.parameters()) < LARGE:
        with contextlib.suppress(Exception):
            wide = _trained(copy.deepcopy(module).double())
            return wide, _run(wide, call)
    wide = _trained(copy.deepcopy(module).float())
    return wide, _run(wide, call)


def _trained(wide: nn.Module) -> nn.Module:
    """The module, of which all parameters train."""
    for p in wide.parameters():
        p.requires_grad_(p.is_floating_point())
    return wide


def _rank(
    whole: nn.Module,
    call: Call,
    group: ThreadGroup,
    styles: Sequence[Style],
    shards: Sequence[Shard],
    fuse: Callable[[nn.Module], None],
) -> _Result:
    cuts = _cuts(whole, shards, group.size)
    own = {
        p: cuts[n][group.index].take(p.detach()) if n in cuts else p.detach().clone()
        for n, p in whole.named_parameters()
    }
    memo: dict[int, object] = {id(p): nn.Parameter(values, p.requires_grad) for p, values in own.items()}
    part = copy.deepcopy(whole, memo)
    fuse(part)
    apply(part, styles, group, {s.name: s.parts for s in shards})
    return _run(part, call)


def _cuts(module: nn.Module, shards: Sequence[Shard], count: int) -> dict[str, list[Cut]]:
    shapes = {n: p.shape for n, p in module.named_parameters(remove_duplicate=False)}
    first: dict[nn.Parameter, str] = {}
    names = {n: first.setdefault(p, n) for n, p in module.named_parameters(remove_duplicate=False)}
    return {
        names[s.name]: [Cut(shapes[s.name], s.dim, s.parts, i, count) for i in range(count)] for s in shards
    }


def _run(module: nn.Module, call: Call) -> _Result:
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float64)
    args, kwargs = tree_map(partial(_input, dtype), call)
    generator = torch.Generator().manual_seed(SEED)
    with torch.enable_grad(), _Fixed():
        outs = [t for t in tree_leaves(module(*args, **kwargs)) if isinstance(t, torch.Tensor)]
        ends = [t for t in outs if t.requires_grad]
        torch.autograd.backward(
            ends, [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in ends]
        )
    inputs = [t.grad for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    return _Result([t.detach() for t in outs], inputs, {n: p.grad for n, p in module.named_parameters()})


class _Fixed(TorchDispatchMode):
    """Random numbers by an entry's coordinates and the number of the draw: the same on one rank as on
    several."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not random_op_values.is_random(func, args, kwargs) or not random_op_values.supported(func):
            return func(*args, **kwargs)
        self.count += 1

        def drawn(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
            return bits(
                [coordinates(d, at) for d, at in enumerate(part.places(shape, device))],
                key(self.count),
                device,
            )

        return random_op_values.draw(func, args, kwargs, drawn)


def _input(dtype: torch.dtype, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    own = value.detach().clone()
    return own.to(dtype).requires_grad_(value.requires_grad) if own.is_floating_point() else own


def _compare(expected: _Result, ranks: Sequence[_Result], cuts: Mapping[str, list[Cut]]) -> Verdict:
    total = (
        sum(
            float(g.double().square().sum())
            for g in [*expected.gradients.values(), *expected.inputs]
            if g is not None
        )
        ** 0.5
    )
    for found in ranks:
        if len(found.outs) != len(expected.outs) or not all(map(_alike, found.outs, expected.outs)):
            return Verdict("its results differ on parts")
        if not all(_near(a, b, total) for a, b in zip(found.inputs, expected.inputs, strict=True)):
            return Verdict("gradients of its inputs differ on parts")
    partial: list[str] = []
    for name, gradient in expected.gradients.items():
        own = [r.gradients[name] for r in ranks]
        if name in cuts:
            if not all(
                _near(g, None if gradient is None else c.take(gradient), total)
                for g, c in zip(own, cuts[name], strict=True)
            ):
                return Verdict(f"the gradient of {name} differs on parts")
        elif not all(_near(g, gradient, total) for g in own):
            if any(g is None for g in own) or not _near(
                torch.stack([g for g in own if g is not None]).sum(0), gradient, total
            ):
                return Verdict(f"the gradient of {name} differs on parts")
            partial.append(name)
    return Verdict("", tuple(partial))


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    finite = torch.isfinite(b)
    return bool(torch.equal(torch.isfinite(a), finite)) and _near(a[finite], b[finite], 0.0)


def _near(a: torch.Tensor | None, b: torch.Tensor | None, total: float) -> bool:
    if a is None or b is None:
        return a is b
    scale = 1 if b.dtype == torch.float64 else ROUNDING
    return a.shape == b.shape and float((a - b).norm()) <= scale * (
        TOLERANCE * float(b.norm()) + FLOOR * total
    )
