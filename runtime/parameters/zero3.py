"""`zero3`: parameters of which each replica keeps a part, gathered layer by layer while a micro-batch passes
through them.

The values of a *unit* (a layer of a stack, or a block without one, as in `secc.runtime.sections.recompute`)
are on a rank only around its own forward and backward: each pass gathers the units one after the other, the
next one while one computes, and a backward adds every unit's gradients to the replicas' shards as soon as it
is done with it. What no unit has (embeddings, heads, what glue reads) is the *rest*, which is there for the
whole of a pass. The user's optimizer sees slices, as with any sharded optimizer
(`secc.runtime.parameters.sharded_optimizer`).

Gathers are collectives, while replicas get unequal shares of samples, of different patterns. So a pass is the
same row of collectives whatever a replica computes in it: every unit once, in one order (the reverse for
backwards), also those that its samples do not need. And the schedule gives all replicas equally many passes,
in one order: forwards and backwards run in rounds (`secc.runtime.plan.step_program.rounds`), and a replica
without samples in a round passes through with nothing to compute. That is why it is not PyTorch's FSDP2:
there a module gathers when it happens to be called, so that a replica that has fewer micro-batches, or none,
hangs the others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from secc.runtime.model.hf_weight_mapping import WeightSource
from secc.runtime.parameters.mixed_precision import accumulate_in_float32, compute_dtype
from secc.runtime.parameters.sharded_optimizer import (
    FlatParameters,
    ParameterSlice,
    flatten_gradients,
    start_reduce_scatter,
    valueless_placeholder,
)
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.step_program import gathers_parameters
from secc.runtime.sections import recompute
from secc.runtime.tensor_parallel.parameter_cuts import ParameterCut

NamedParameters = Sequence[tuple[str, nn.Parameter]]
Forward = Callable[..., Any]


class ShardedUnit(FlatParameters):
    """Parameters of one unit and dtype whose values are in one buffer while they are gathered; else each rank
    has its shard alone.

    `trained` ones collect gradients: `reduce` adds those of a backward, summed over the group, to the
    shard's.
    """

    def __init__(
        self,
        named: NamedParameters,
        group: Any,
        index: int,
        count: int,
        cuts: Mapping[str, ParameterCut],
        dtype: torch.dtype | None,
    ) -> None:
        self.parameter_names, self.params = [n for n, _ in named], [p for _, p in named]
        self.is_trained = self.params[0].requires_grad
        if not self.is_trained and dtype is not None and self.params[0].dtype == torch.float32:
            for p in self.params:
                p.data = p.data.to(dtype)
        wide = dtype if self.is_trained and self.params[0].dtype == torch.float32 else None
        super().__init__(named, index, count, cuts, wide, apart=True)
        for p in self.params if wide is not None else ():
            accumulate_in_float32(p)
        self.group = group
        self.has_gradient = [False] * len(named)
        self._buffer_views = [p.data for p in self.params]
        self._placeholders = [valueless_placeholder(p, p.device) for p in self.params]
        self._pending_gather: dist.Work | None = None
        self._gradient_sum: torch.Tensor | None = None  # of the gradients so far
        self._pending_reduce: tuple[dist.Work, torch.Tensor] | None = None
        self.release_values()

    def start_gather(self) -> None:
        """Start to gather the values. Collective, as all that follows."""
        self.buffer.untyped_storage().resize_(self.buffer.nbytes)
        self._pending_gather = self.gather_values(self.group)

    def finish_gather(self) -> None:
        """Let the parameters have their values."""
        assert self._pending_gather is not None
        self._pending_gather.wait()
        self._pending_gather = None
        for param, view in zip(self.params, self._buffer_views, strict=True):
            param.data = view

    def release_values(self) -> None:
        """Forget the values; the parameters read as NaN."""
        for param, nothing in zip(self.params, self._placeholders, strict=True):
            param.data = nothing
        self.buffer.untyped_storage().resize_(0)

    def start_reduce(self) -> None:
        """Start to sum the parameters' gradients, and forget them."""
        self.has_gradient = [
            known or p.grad is not None for known, p in zip(self.has_gradient, self.params, strict=True)
        ]
        own = flatten_gradients(self.params, self.buffer.numel())
        for param in self.params:
            param.grad = None
        part = own.new_empty(self.shard_size)
        self._pending_reduce = start_reduce_scatter(part, own, self.group), part

    def accumulate_reduced(self) -> None:
        """Wait for the sum that was started, and add it to those before."""
        if self._pending_reduce is None:
            return
        work, part = self._pending_reduce
        work.wait()
        self._gradient_sum = part if self._gradient_sum is None else self._gradient_sum.add_(part)
        self._pending_reduce = None

    def reset_gradients(self) -> None:
        """Forget all gradients."""
        self._gradient_sum, self.has_gradient = None, [False] * len(self.params)

    def finish_gradients(self) -> None:
        """Make the sums the slices' gradients."""
        self.set_gradients(
            self._gradient_sum if self._gradient_sum is not None else torch.zeros_like(self.masters)
        )
        self._gradient_sum = None


class UnitGatherer:
    """The passes of a section's micro-batches through its units on this rank.

    The first of `units` is the rest. Each other one is needed once in a pass, in the order in which they
    stand: what computes says so.
    """

    def __init__(self, section: str, units: Sequence[Sequence[ShardedUnit]]) -> None:
        self.section, self.units = section, units
        self._unit_order: Sequence[int] = ()
        self._position = -1
        self._is_backward = False
        self._reducing_units: Sequence[ShardedUnit] = ()

    def begin_pass(self, backward: bool) -> None:
        """A pass begins: what every unit needs is there."""
        count = len(self.units)
        self._is_backward, self._position = backward, -1
        self._unit_order = range(count - 1, 0, -1) if backward else range(1, count)
        _start_gathers(self.units[0])
        self._prefetch_next()
        _finish_gathers(self.units[0])

    def require_unit(self, unit: int) -> None:
        """Let a unit have its values; those before it are done with theirs. Raises RuntimeError where it
        comes out of turn."""
        if self._position >= 0 and self._unit_order[self._position] == unit:
            return
        if unit not in self._unit_order[self._position + 1 :]:
            raise RuntimeError(
                f"section {self.section}: a layer whose parameters are sharded runs twice or out of turn; compile again with "
                f"--set {self.section}.sharding=zero2"
            )
        while self._position < 0 or self._unit_order[self._position] != unit:
            self._advance_to_next()

    def end_pass(self) -> None:
        """The pass is over: this rank takes part in what is left of it."""
        while self._position + 1 < len(self._unit_order):
            self._advance_to_next()
        if self._position >= 0:
            self._leave_unit(self._unit_order[self._position])
        self._leave_unit(0)
        self._accumulate_pending()
        self._unit_order = ()

    def _advance_to_next(self) -> None:
        self._position += 1
        self._prefetch_next()
        if self._position:
            self._leave_unit(self._unit_order[self._position - 1])
        _finish_gathers(self.units[self._unit_order[self._position]])

    def _prefetch_next(self) -> None:
        if self._position + 1 < len(self._unit_order):
            _start_gathers(self.units[self._unit_order[self._position + 1]])

    def _leave_unit(self, unit: int) -> None:
        if self._is_backward:
            self._accumulate_pending()
            self._reducing_units = [flat for flat in self.units[unit] if flat.is_trained]
            for flat in self._reducing_units:
                flat.start_reduce()
        for flat in self.units[unit]:
            flat.release_values()

    def _accumulate_pending(self) -> None:
        for flat in self._reducing_units:
            flat.accumulate_reduced()
        self._reducing_units = ()

    def wrap_unit(self, unit: int, module: nn.Module) -> None:
        """Let the module's forward, and the backward of what it returns, ask for the unit."""
        inner = module.forward

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.require_unit(unit)
            out = inner(*args, **kwargs)
            for tensor in tensors_in(out) if torch.is_grad_enabled() else ():
                if tensor.grad_fn is not None:
                    tensor.register_hook(lambda _: self.require_unit(unit))
            return out

        module.forward = forward


def _start_gathers(flats: Sequence[ShardedUnit]) -> None:
    for flat in flats:
        flat.start_gather()


def _finish_gathers(flats: Sequence[ShardedUnit]) -> None:
    for flat in flats:
        flat.finish_gather()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a module returns: also in containers, and in attributes of objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in vars(value).values():
            yield from tensors_in(part)


class Zero3State:
    """Everything on a rank whose parameters are sharded over replicas; empty under plans without `zero3`.

    `passes` by section, `flats` by section, `names` of all these parameters, `pieces`: what the rank has of
    them, by leaves that share the shards' memory. Values that are still in files (`stored`) are read for one
    unit after the other, so that no rank holds more than one. Made on all ranks in the same order, because
    making groups is collective.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        rank: int,
        device: torch.device,
        cuts: Mapping[str, ParameterCut],
        canonical: Mapping[str, str],
        stored: Mapping[str, WeightSource],
    ) -> None:
        self.gatherers: dict[str, UnitGatherer] = {}
        self.sharded_units: dict[str, list[ShardedUnit]] = {}
        self._unit_modules: dict[str, list[nn.Module]] = {}
        self._first_replica_sections = set[str]()  # sections in whose replicas this rank is the first
        params = dict(model.named_parameters())
        for section in filter(gathers_parameters, plan.sections):
            for place in range(section.mesh.tp):
                ranks = sorted(section.mesh.ranks[place :: section.mesh.tp])  # as a group numbers them
                group = dist.new_group(ranks)
                if rank in ranks:
                    self._first_replica_sections |= {section.name} if place == 0 else set()
                    own = {n: params[n] for n in zero3_parameter_names(plan, section, canonical)}
                    self._add_section(
                        plan, model, section, own, group, ranks.index(rank), device, cuts, stored
                    )

    def _add_section(
        self,
        plan: Plan,
        model: nn.Module,
        section: Section,
        own: Mapping[str, nn.Parameter],
        group: Any,
        index: int,
        device: torch.device,
        cuts: Mapping[str, ParameterCut],
        stored: Mapping[str, WeightSource],
    ) -> None:
        modules = [
            unit for path in section.units for unit in recompute.recompute_units(model.get_submodule(path))
        ]
        of_unit = _assign_to_units(model, modules, own)
        dtype = compute_dtype(plan.dtype)
        units: list[list[ShardedUnit]] = []
        for k in range(len(modules) + 1):
            alike: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
            for name, param in own.items():
                if of_unit[name] == k:
                    alike.setdefault((param.dtype, param.requires_grad), []).append((name, param))
            for name, param in (pair for some in alike.values() for pair in some):
                value = read_parameter(stored[name], param, cuts.get(name)) if name in stored else param.data
                param.data = value.to(device)
            units.append(
                [ShardedUnit(some, group, index, section.mesh.dp, cuts, dtype) for some in alike.values()]
            )
        self.gatherers[section.name] = UnitGatherer(section.name, units)
        self.sharded_units[section.name] = [flat for some in units for flat in some]
        self._unit_modules[section.name] = modules

    def wrap_units(self) -> None:
        """Wrap the units' forwards; around those that recompute."""
        for name, modules in self._unit_modules.items():
            for k, module in enumerate(modules, 1):
                self.gatherers[name].wrap_unit(k, module)

    @property
    def parameter_names(self) -> set[str]:
        return {
            name for some in self.sharded_units.values() for flat in some for name in flat.parameter_names
        }

    @property
    def parameter_slices(self) -> dict[nn.Parameter, ParameterSlice]:
        """This rank's piece of each parameter."""
        return {
            part: piece
            for some in self.sharded_units.values()
            for flat in some
            for part, piece in flat.slices.values()
        }

    def slices_to_save(self, cuts: Mapping[str, ParameterCut]) -> dict[nn.Parameter, ParameterSlice]:
        """The pieces that this rank writes into a checkpoint: what other ranks of its replica have, too, the
        first of them writes."""
        found: dict[nn.Parameter, ParameterSlice] = {}
        for name, flats in self.sharded_units.items():
            for part, piece in (found for flat in flats for found in flat.slices.values()):
                if name in self._first_replica_sections or piece.name in cuts:
                    found[part] = piece
        return found

    def copy_masters_to_shards(self) -> None:
        """The shards that are gathered get the values of their masters."""
        for flat in (flat for some in self.sharded_units.values() for flat in some):
            flat.copy_masters_to_shard()


def read_parameter(source: WeightSource, param: nn.Parameter, cut: ParameterCut | None) -> torch.Tensor:
    """What this rank has of a stored parameter."""
    value = torch.empty(param.shape if cut is None else cut.shape, dtype=param.dtype)
    source.read_into(value)
    return value if cut is None else cut.take_shard(value)


def zero3_parameter_names(plan: Plan, section: Section, canonical: Mapping[str, str]) -> list[str]:
    """The parameters, by their first names, that the replicas of a section that gathers share out: those that
    are its own alone.

    Those whose gradient is spread over a replica's ranks are few and small (norms), and stay.
    """
    others = {canonical[p] for s in plan.sections if s.name != section.name for p in s.params}
    stay = others | {canonical[p] for p in section.partial}
    return [n for n in dict.fromkeys(canonical[p] for p in section.params) if n not in stay]


def _assign_to_units(
    model: nn.Module, modules: Sequence[nn.Module], own: Mapping[str, nn.Parameter]
) -> dict[str, int]:
    """The unit of each parameter: number k + 1 for what is in `modules[k]` and nowhere else, else 0, the
    rest."""
    inside: dict[nn.Parameter, set[int]] = {}
    within: dict[nn.Module, int] = {m: k for k, unit in enumerate(modules, 1) for m in unit.modules()}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            inside.setdefault(param, set()).add(within.get(module, 0))
    return {name: next(iter(inside[p])) if len(inside.get(p, ())) == 1 else 0 for name, p in own.items()}
