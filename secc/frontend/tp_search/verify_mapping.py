"""Verifies a mapping: runs a module on all ranks, as threads, and compares its results and every gradient
with the unsplit module's."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from secc.frontend.tp_search.call_collector import copy_object
from secc.frontend.tp_search.find_mapping import ModuleCall, failure_reason
from secc.frontend.tp_search.thread_ranks import ThreadGroup, run_thread_ranks
from secc.runtime.model.module_copies import copy_module
from secc.runtime.plan.schema import ModuleStyle, Shard
from secc.runtime.plan.unsplit_reason import UnsplitKind, UnsplitReason
from secc.runtime.randomness import random_op_values
from secc.runtime.randomness import shard_coordinates as part
from secc.runtime.randomness.bits import coordinate_offsets, generate_bits, hash_key
from secc.runtime.tensor_parallel.expert_parallel import TokenExchange
from secc.runtime.tensor_parallel.parameter_cuts import ParameterCut, cut_of_shard
from secc.runtime.tensor_parallel.replica_group import LoneRank
from secc.runtime.tensor_parallel.styles import apply_styles

MAPPING_TOLERANCE = 1e-5  # of a gradient's own norm, plus
MAPPING_FLOOR = 1e-7  # of the norm of all: in float64, but a user's code may compute in float32 inside
VERIFY_SEED = 7
FLOAT32_PARAMETERS = 1 << 25  # parameters: what has more is compared in float32
FLOAT32_TOLERANCE_FACTOR = 10  # times as much may float32 differ


@dataclass(frozen=True)
class MappingVerdict:
    """Result of the comparison. reason: "" if all is exact. partial_parameters: whole parameters with
    gradients that have to be summed over ranks."""

    reason: UnsplitReason | None
    partial_parameters: tuple[str, ...] = ()


@dataclass
class ModuleRun:
    """Results and gradients of a module on one rank: of inputs that want one, and of parameters by name."""

    outs: list[torch.Tensor]
    inputs: list[torch.Tensor | None]
    gradients: dict[str, torch.Tensor | None]


class UnsplitModule:
    """A module and a call of it as the reference for mappings; its results are computed once for all of
    them."""

    def __init__(self, module: nn.Module, call: ModuleCall) -> None:
        self._module, self._call = module, call
        self._reference: tuple[nn.Module, ModuleRun] | None = None

    def reference(self) -> tuple[nn.Module, ModuleRun]:
        """Returns a copy of the module and its results."""
        self._reference = self._reference or _run_unsplit(self._module, self._call)
        return self._reference

    def compare_mapping(
        self,
        count: int,
        styles: Sequence[ModuleStyle],
        shards: Sequence[Shard],
        fuse: Callable[[nn.Module], None] = lambda module: None,
        overlap: str = "none",
    ) -> MappingVerdict:
        """Compares the module split over `count` ranks with the unsplit one.

        fuse: installs fused operators in a rank's module. overlap: which sums travel behind products.
        """
        state = torch.random.get_rng_state()
        try:
            whole, expected = self.reference()
            ranks = run_thread_ranks(
                count, lambda group: _run_rank(whole, self._call, group, styles, shards, fuse, overlap)
            )
        except Exception as error:
            return MappingVerdict(failure_reason(error))
        finally:
            torch.random.set_rng_state(state)
        return _compare_ranks(expected, ranks, _cuts_by_name(whole, shards, count))

    def compare_exchange(self, replicas: int, style: ModuleStyle, shards: Sequence[Shard]) -> MappingVerdict:
        """Compares a module of experts on several replicas, each with other experts and other tokens, with
        the unsplit one. The first replica has the last token, the last replica all others, so tokens reach
        experts in another order."""
        state = torch.random.get_rng_state()
        try:
            whole, expected = self.reference()
            ranks = run_thread_ranks(
                replicas, lambda group: _run_replica(whole, self._call, group, style, shards)
            )
        except Exception as error:
            return MappingVerdict(failure_reason(error))
        finally:
            torch.random.set_rng_state(state)
        in_order = [*ranks[1:], ranks[0]]
        joined = ModuleRun(
            [torch.cat(outs) for outs in zip(*(r.outs for r in in_order), strict=True)],
            [
                None if given[0] is None else torch.cat([g for g in given if g is not None])
                for given in zip(*(r.inputs for r in in_order), strict=True)
            ],
            {},
        )
        runs = [replace(joined, gradients=r.gradients) for r in ranks]
        return _compare_ranks(expected, runs, _cuts_of_replicas(whole, shards, replicas))


def _run_unsplit(module: nn.Module, call: ModuleCall) -> tuple[nn.Module, ModuleRun]:
    """Returns a copy of the module with its results, in float64 unless the module is large or its code
    does not support float64 (grouped products of experts)."""
    if sum(p.numel() for p in module.parameters()) < FLOAT32_PARAMETERS:
        with contextlib.suppress(Exception):
            wide = _make_trainable(copy_module(module).double())
            return wide, _run_with_gradients(wide, call)
    wide = _make_trainable(copy_module(module).float())
    return wide, _run_with_gradients(wide, call)


def _make_trainable(wide: nn.Module) -> nn.Module:
    """Returns the module with all parameters trainable."""
    for p in wide.parameters():
        p.requires_grad_(p.is_floating_point())
    return wide


def _run_rank(
    whole: nn.Module,
    call: ModuleCall,
    group: ThreadGroup,
    styles: Sequence[ModuleStyle],
    shards: Sequence[Shard],
    fuse: Callable[[nn.Module], None],
    overlap: str,
) -> ModuleRun:
    part = copy.deepcopy(whole, _parameters_of_rank(whole, _cuts_by_name(whole, shards, group.size), group))
    fuse(part)
    apply_styles(part, styles, group, shards, overlap=overlap)
    return _run_with_gradients(part, call)


def _parameters_of_rank(
    whole: nn.Module, cuts: Mapping[str, list[ParameterCut]], group: ThreadGroup
) -> dict[int, object]:
    """Returns what this rank has in place of each parameter of the whole module, by the parameter's id."""
    return {
        id(p): nn.Parameter(
            cuts[name][group.index].take_shard(p.detach()) if name in cuts else p.detach().clone(),
            p.requires_grad,
        )
        for name, p in whole.named_parameters()
    }


def _run_replica(
    whole: nn.Module, call: ModuleCall, group: ThreadGroup, style: ModuleStyle, shards: Sequence[Shard]
) -> ModuleRun:
    """Runs a module of experts on one of several replicas that exchange tokens."""
    part = copy.deepcopy(
        whole, _parameters_of_rank(whole, _cuts_of_replicas(whole, shards, group.size), group)
    )
    apply_styles(part, [style], LoneRank(), shards, TokenExchange(group))
    args, kwargs = call
    given = inspect.signature(whole.forward).bind(*args, **kwargs).arguments
    count = len(next(v for v in given.values() if isinstance(v, torch.Tensor)))
    last = slice(0, count - 1 if group.index == group.size - 1 else 0)
    rows = slice(count - 1, count) if group.index == 0 else last
    arguments = {
        n: v[rows].detach().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v
        for n, v in given.items()
    }
    return _run_with_gradients(part, ((), arguments), rows, count)


def _cuts_of_replicas(
    module: nn.Module, shards: Sequence[Shard], replicas: int
) -> dict[str, list[ParameterCut]]:
    """Returns the parts of a module of experts by replica."""
    return {
        s.name: [cut_of_shard(s, module.get_parameter(s.name).shape, 0, 1, r) for r in range(replicas)]
        for s in shards
    }


def _cuts_by_name(module: nn.Module, shards: Sequence[Shard], count: int) -> dict[str, list[ParameterCut]]:
    shapes = {n: p.shape for n, p in module.named_parameters(remove_duplicate=False)}
    first: dict[nn.Parameter, str] = {}
    names = {n: first.setdefault(p, n) for n, p in module.named_parameters(remove_duplicate=False)}
    return {names[s.name]: [cut_of_shard(s, shapes[s.name], i, count) for i in range(count)] for s in shards}


def _run_with_gradients(
    module: nn.Module, call: ModuleCall, rows: slice = slice(None), count: int = 0
) -> ModuleRun:
    """Runs a module and the backward of its results, with made-up gradients. `rows`: of `count`, that the
    call is about, where it is about some."""
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float64)
    args, kwargs = tree_map(partial(prepare_argument, dtype), call)
    with torch.enable_grad(), reproducible_draws():
        outs = [t for t in tree_leaves(module(*args, **kwargs)) if isinstance(t, torch.Tensor)]
        ends = [t for t in outs if t.requires_grad]
        torch.autograd.backward(ends, cotangents(ends, rows, count))
    inputs = [t.grad for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    return ModuleRun([t.detach() for t in outs], inputs, {n: p.grad for n, p in module.named_parameters()})


def cotangents(ends: Sequence[torch.Tensor], rows: slice = slice(None), count: int = 0) -> list[torch.Tensor]:
    """Returns made-up gradients of results, the same on every rank: of the `rows` that the results are about,
    out of `count`, where they are about some."""
    generator = torch.Generator().manual_seed(VERIFY_SEED)
    held = len(range(count)[rows])
    per_row = [t.shape[0] // held if held else 1 for t in ends]  # a row may have several tokens
    shapes = [(count * n, *t.shape[1:]) if count else t.shape for t, n in zip(ends, per_row, strict=True)]
    gradients = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    if count:
        start, stop, _ = rows.indices(count)
        gradients = [g[start * n : stop * n] for g, n in zip(gradients, per_row, strict=True)]
    return [g.to(t.dtype) for t, g in zip(ends, gradients, strict=True)]


def reproducible_draws() -> TorchDispatchMode:
    """Returns a mode in which random numbers depend on an entry's coordinates, not on the ranks."""
    return _CoordinateRandomness()


class _CoordinateRandomness(TorchDispatchMode):
    """Derives random numbers from an entry's coordinates and the number of the draw: the same on one rank
    as on several."""

    def __init__(self) -> None:
        super().__init__()
        self.draw_count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not random_op_values.is_random(func, args, kwargs) or not random_op_values.is_supported(func):
            return func(*args, **kwargs)
        self.draw_count += 1

        def draw_bits(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
            return generate_bits(
                [coordinate_offsets(d, at) for d, at in enumerate(part.global_coordinates(shape, device))],
                hash_key(self.draw_count),
                device,
            )

        return random_op_values.draw_op_result(func, args, kwargs, draw_bits)


def prepare_argument(dtype: torch.dtype, value: Any) -> Any:
    """Returns a copy of an argument; floats are cast to `dtype`."""
    if not isinstance(value, torch.Tensor):
        return copy_object(value)
    own = value.detach().clone()
    return own.to(dtype).requires_grad_(value.requires_grad) if own.is_floating_point() else own


def compare_summed_gradients(expected: ModuleRun, ranks: Sequence[ModuleRun]) -> UnsplitReason | None:
    """Returns why ranks that each have a summand of every parameter's gradient differ from one rank."""
    return _compare_ranks(expected, ranks, {}, summands=True).reason


def _compare_ranks(
    expected: ModuleRun,
    ranks: Sequence[ModuleRun],
    cuts: Mapping[str, list[ParameterCut]],
    summands: bool = False,
) -> MappingVerdict:
    total = (
        sum(
            float(g.double().square().sum())
            for g in [*expected.gradients.values(), *expected.inputs]
            if g is not None
        )
        ** 0.5
    )
    for found in ranks:
        if len(found.outs) != len(expected.outs) or not all(map(_outputs_match, found.outs, expected.outs)):
            return MappingVerdict(UnsplitReason(UnsplitKind.RESULTS_DIFFER))
        if not all(_gradients_match(a, b, total) for a, b in zip(found.inputs, expected.inputs, strict=True)):
            return MappingVerdict(UnsplitReason(UnsplitKind.INPUT_GRADIENTS_DIFFER))
    partial: list[str] = []
    for name, gradient in expected.gradients.items():
        rank_gradients = [r.gradients[name] for r in ranks]
        if summands:
            found = [g for g in rank_gradients if g is not None]
            if not _gradients_match(torch.stack(found).sum(0) if found else None, gradient, total):
                return MappingVerdict(UnsplitReason(UnsplitKind.GRADIENT_DIFFERS, name))
            continue
        if name in cuts:
            if not all(
                _gradients_match(g, None if gradient is None else c.take_shard(gradient), total)
                for g, c in zip(rank_gradients, cuts[name], strict=True)
                if c.local_shape.numel()
            ):
                return MappingVerdict(UnsplitReason(UnsplitKind.GRADIENT_DIFFERS, name))
        elif not all(_gradients_match(g, gradient, total) for g in rank_gradients):
            if any(g is None for g in rank_gradients) or not _gradients_match(
                torch.stack([g for g in rank_gradients if g is not None]).sum(0), gradient, total
            ):
                return MappingVerdict(UnsplitReason(UnsplitKind.GRADIENT_DIFFERS, name))
            partial.append(name)
    return MappingVerdict(None, tuple(partial))


def _outputs_match(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    finite = torch.isfinite(b)
    return bool(torch.equal(torch.isfinite(a), finite)) and _gradients_match(a[finite], b[finite], 0.0)


def _gradients_match(a: torch.Tensor | None, b: torch.Tensor | None, total: float) -> bool:
    if a is None or b is None:
        return a is b
    scale = 1 if b.dtype == torch.float64 else FLOAT32_TOLERANCE_FACTOR
    return a.shape == b.shape and float((a - b).norm()) <= scale * (
        MAPPING_TOLERANCE * float(b.norm()) + MAPPING_FLOOR * total
    )
