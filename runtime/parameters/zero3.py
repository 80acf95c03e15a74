"""`zero3`: each replica stores a shard of every parameter and gathers whole layers while it computes them.

The values of a *unit* (an FSDP unit: a layer of a stack, or a block without a stack, as in
`secc.runtime.sections.recompute`) are present on a rank only during its own forward and backward. A pass
through a section gathers its units one after the other, prefetching the next one during the current one; a
backward reduce-scatters the gradients of each unit as soon as it has left it. Parameters outside of all units
(embeddings, heads, what the glue reads) form the *remainder*, gathered for the whole pass. The user's
optimizer holds slices, as with every sharded optimizer (`secc.runtime.parameters.sharded_optimizer`).

Why not PyTorch's FSDP2: gathers are collectives, but replicas receive unequal numbers of samples with
different input patterns. FSDP2 gathers when a module happens to be called, so a replica with fewer
micro-batches hangs the others. Here every pass issues the same sequence of collectives whatever it computes:
each unit once, in one order (reversed in backwards), including units that this replica's samples skip. And
the schedule gives all replicas the same number of passes in the same order: forwards and backwards run in
rounds (`secc.runtime.plan.step_program`), and a replica without samples in a round makes an empty pass.

Weights in host memory (`offload=weights`) come and go by the same hooks, as units of
`secc.runtime.parameters.offloaded_weights`; they need no rounds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from secc.runtime.model.hf_weight_mapping import WeightSource
from secc.runtime.parameters.host_copies import HostCopies
from secc.runtime.parameters.mixed_precision import accumulate_in_float32, compute_dtype
from secc.runtime.parameters.offloaded_weights import HostUnit
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
    """Parameters of one unit that share dtype and `requires_grad`. While gathered, their values are in one
    buffer; otherwise this rank holds only its shard.

    Between `start_gather` and `release_values` the parameters can be used. For trained units, `start_reduce`
    and `accumulate_reduced` add the gradients of one backward, summed over the group, to this rank's shard.
    """

    def __init__(
        self,
        named_params: NamedParameters,
        group: Any,
        index: int,
        count: int,
        cuts: Mapping[str, ParameterCut],
        dtype: torch.dtype | None,
    ) -> None:
        self.parameter_names, self.params = [n for n, _ in named_params], [p for _, p in named_params]
        self.is_trained = self.params[0].requires_grad
        if not self.is_trained and dtype is not None and self.params[0].dtype == torch.float32:
            for p in self.params:
                p.data = p.data.to(dtype)
        low_dtype = dtype if self.is_trained and self.params[0].dtype == torch.float32 else None
        super().__init__(named_params, index, count, cuts, low_dtype, apart=True)
        for p in self.params if low_dtype is not None else ():
            accumulate_in_float32(p)
        self.group = group
        self.has_gradient = [False] * len(named_params)
        self._buffer_views = [p.data for p in self.params]
        self._placeholders = [valueless_placeholder(p, p.device) for p in self.params]
        self._pending_gather: dist.Work | None = None
        self._gradient_sum: torch.Tensor | None = None  # of the gradients so far
        self._pending_reduce: tuple[dist.Work, torch.Tensor] | None = None
        self.release_values()

    def start_gather(self) -> None:
        """Allocates the buffer and starts to gather the values. Collective, like all methods below that
        communicate."""
        # Resizing the storage, instead of making a new tensor, keeps the parameters' views of it valid.
        self.buffer.untyped_storage().resize_(self.buffer.nbytes)
        self._pending_gather = self.gather_values(self.group)

    def finish_gather(self) -> None:
        """Waits for the values and points the parameters to them."""
        assert self._pending_gather is not None
        self._pending_gather.wait()
        self._pending_gather = None
        for param, view in zip(self.params, self._buffer_views, strict=True):
            param.data = view

    def release_values(self) -> None:
        """Frees the buffer; the parameters read as NaN."""
        for param, placeholder in zip(self.params, self._placeholders, strict=True):
            param.data = placeholder
        self.buffer.untyped_storage().resize_(0)

    def start_reduce(self) -> None:
        """Starts the reduce-scatter of the gradients of one backward, and drops the local ones."""
        self.has_gradient = [
            before or p.grad is not None for before, p in zip(self.has_gradient, self.params, strict=True)
        ]
        local_gradients = flatten_gradients(self.params, self.buffer.numel())
        for param in self.params:
            param.grad = None
        shard_sum = local_gradients.new_empty(self.shard_size)
        self._pending_reduce = start_reduce_scatter(shard_sum, local_gradients, self.group), shard_sum

    def accumulate_reduced(self) -> None:
        """Waits for the reduce-scatter that was started and adds its result to the gradients of earlier
        backwards."""
        if self._pending_reduce is None:
            return
        work, shard_sum = self._pending_reduce
        work.wait()
        self._gradient_sum = shard_sum if self._gradient_sum is None else self._gradient_sum.add_(shard_sum)
        self._pending_reduce = None

    def reset_gradients(self) -> None:
        """Drops the accumulated gradients."""
        self._gradient_sum, self.has_gradient = None, [False] * len(self.params)

    def finish_gradients(self) -> None:
        """Makes the accumulated sums the gradients of the slices."""
        self.set_gradients(
            self._gradient_sum if self._gradient_sum is not None else torch.zeros_like(self.masters)
        )
        self._gradient_sum = None


PassUnit = ShardedUnit | HostUnit


class UnitGatherer:
    """Gathers, releases and reduces the units of one section during the passes of its micro-batches on this
    rank.

    `units[0]` is the remainder, gathered for the whole pass. Every other unit is used at most once per pass,
    in the order of the list; the units' wrapped forwards report when one is used (`require_unit`).

    Each pass has a position in a fixed order of units. Using a unit advances the position to it, which
    gathers and leaves every unit in between, so that all replicas issue the same collectives in the same
    order.
    """

    def __init__(self, section: str, units: Sequence[Sequence[PassUnit]]) -> None:
        self.section, self.units = section, units
        # Makes the context in which this rank waits for a collective.
        self.timed: Callable[[], AbstractContextManager[None]] = nullcontext
        self._unit_order: Sequence[int] = ()
        self._position = -1
        self._is_backward = False
        self._reducing_units: Sequence[ShardedUnit] = ()

    def begin_pass(self, backward: bool) -> None:
        """Starts a pass: gathers the remainder, and starts to gather the first unit."""
        count = len(self.units)
        self._is_backward, self._position = backward, -1
        self._unit_order = range(count - 1, 0, -1) if backward else range(1, count)
        _start_gathers(self.units[0])
        self._prefetch_next()
        self._finish_gathers(self.units[0])

    def require_unit(self, unit: int) -> None:
        """Ensures that the values of `unit` are present, after releasing the units before it. Raises
        RuntimeError if the pass is already beyond it."""
        if self._position >= 0 and self._unit_order[self._position] == unit:
            return
        if unit not in self._unit_order[self._position + 1 :]:
            raise RuntimeError(
                f"section {self.section}: a layer with sharded parameters runs twice or out of turn; compile"
                f" again with --set {self.section}.sharding=zero2"
            )
        while self._position < 0 or self._unit_order[self._position] != unit:
            self._advance_to_next()

    def end_pass(self) -> None:
        """Ends the pass: issues the remaining collectives, in which other replicas may need this rank."""
        while self._position + 1 < len(self._unit_order):
            self._advance_to_next()
        if self._position >= 0:
            self._leave_unit(self._unit_order[self._position])
        self._leave_unit(0)
        self._accumulate_pending()
        self._unit_order = ()

    def _advance_to_next(self) -> None:
        """Moves to the next unit of the pass.

        The gather of the unit after it starts before this one is waited for, so it overlaps with the
        computation of this unit. Afterwards only this unit and the next one occupy memory.
        """
        self._position += 1
        self._prefetch_next()
        if self._position:
            self._leave_unit(self._unit_order[self._position - 1])
        self._finish_gathers(self.units[self._unit_order[self._position]])

    def _prefetch_next(self) -> None:
        if self._position + 1 < len(self._unit_order):
            _start_gathers(self.units[self._unit_order[self._position + 1]])

    def _leave_unit(self, unit: int) -> None:
        """Releases a unit; in a backward, first starts to reduce its gradients. Waits for the reduction of
        the unit before it, so that at most one is in flight."""
        if self._is_backward:
            self._accumulate_pending()
            self._reducing_units = [
                part for part in self.units[unit] if isinstance(part, ShardedUnit) and part.is_trained
            ]
            for part in self._reducing_units:
                part.start_reduce()
        for part in self.units[unit]:
            part.release_values()

    def _accumulate_pending(self) -> None:
        with self.timed() if self._reducing_units else nullcontext():
            for part in self._reducing_units:
                part.accumulate_reduced()
        self._reducing_units = ()

    def _finish_gathers(self, parts_of_unit: Sequence[PassUnit]) -> None:
        with self.timed():
            for part in parts_of_unit:
                part.finish_gather()

    def wrap_unit(self, unit: int, module: nn.Module) -> None:
        """Wraps the module's forward so that it requires the unit before it runs, and so that the backward
        through its outputs requires it, too."""
        inner = module.forward

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.require_unit(unit)
            given = {id(t): t.grad_fn for t in tensors_in((args, kwargs))}
            out = inner(*args, **kwargs)
            for tensor in tensors_in(out) if torch.is_grad_enabled() else ():
                # An argument may be passed on unchanged, such as T5's position bias; one that was written to
                # has another grad_fn.
                if tensor.grad_fn is not None and given.get(id(tensor)) is not tensor.grad_fn:
                    # Runs when the gradient of an output is known, before the module's own backward.
                    tensor.register_hook(lambda _: self.require_unit(unit))
            return out

        module.forward = forward


def _start_gathers(parts_of_unit: Sequence[PassUnit]) -> None:
    for part in parts_of_unit:
        part.start_gather()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in what a module returns, also inside containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from tensors_in(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from tensors_in(entry)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in vars(value).values():
            yield from tensors_in(entry)


class Zero3State:
    """All parameters of this rank that are sharded over replicas or in host memory; empty under plans without
    `zero3` and `offload=weights`.

    `gatherers`, `sharded_units` and `host_units` are keyed by section. Values that are still in files
    (`stored`) are read one unit at a time, so that no rank ever holds a whole model. Construct it at the same
    point on all ranks, because creating process groups is collective.

    `cuts`: the parameters that tensor parallelism cuts; `canonical`: one name for each name of a parameter.
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
        self.host_units: dict[str, list[HostUnit]] = {}
        self._copies = HostCopies(device)
        self._unit_modules: dict[str, list[nn.Module]] = {}
        self._first_replica_sections = set[str]()  # where this rank has tp rank 0
        params = dict(model.named_parameters())
        for section in filter(gathers_parameters, plan.sections):
            for tp_rank in range(section.mesh.tp):
                ranks = sorted(section.mesh.ranks[tp_rank :: section.mesh.tp])  # as a group numbers them
                group = dist.new_group(ranks)
                if rank in ranks:
                    self._first_replica_sections |= {section.name} if tp_rank == 0 else set()
                    sharded_params = {n: params[n] for n in zero3_parameter_names(plan, section, canonical)}
                    self._add_section(
                        plan, model, section, sharded_params, group, ranks.index(rank), device, cuts, stored
                    )

        for section in plan.sections:
            if section.offload == "weights" and rank in section.mesh.ranks:
                own = {n: params[n] for n in zero3_parameter_names(plan, section, canonical)}
                self._add_host_section(plan, model, section, own, cuts, stored)

    def _add_host_section(
        self,
        plan: Plan,
        model: nn.Module,
        section: Section,
        own: Mapping[str, nn.Parameter],
        cuts: Mapping[str, ParameterCut],
        stored: Mapping[str, WeightSource],
    ) -> None:
        """Moves the parameters `own` of one section's layers to host memory, and all others to the device."""
        modules = recompute.units_of_blocks(model, section.units)
        members = _group_by_unit(model, modules, own, section.units)
        dtype = compute_dtype(plan.dtype)
        units: list[list[HostUnit]] = []
        for k, by_kind in enumerate(members):
            for name, param in (pair for named in by_kind for pair in named):
                value = read_parameter(stored[name], param, cuts.get(name)) if name in stored else param.data
                param.data = value if k else value.to(self._copies.device)
            units.append([HostUnit(named, self._copies, cuts, dtype) for named in by_kind] if k else [])
        self.gatherers[section.name] = UnitGatherer(section.name, units)
        self.host_units[section.name] = [part for unit in units for part in unit]
        self._unit_modules[section.name] = modules

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
        """Shards the parameters `own` of one section over the process group, unit by unit."""
        modules = recompute.units_of_blocks(model, section.units)
        dtype = compute_dtype(plan.dtype)
        units: list[list[ShardedUnit]] = []
        for by_kind in _group_by_unit(model, modules, own, section.units):
            for name, param in (pair for members in by_kind for pair in members):
                value = read_parameter(stored[name], param, cuts.get(name)) if name in stored else param.data
                param.data = value.to(device)
            units.append(
                [ShardedUnit(members, group, index, section.mesh.copies, cuts, dtype) for members in by_kind]
            )
        self.gatherers[section.name] = UnitGatherer(section.name, units)
        self.sharded_units[section.name] = [part for unit in units for part in unit]
        self._unit_modules[section.name] = modules

    def wrap_units(self) -> None:
        """Wraps the forwards of all units. Call it after recomputation is installed, so that the wrapper is
        outermost."""
        for name, modules in self._unit_modules.items():
            for k, module in enumerate(modules, 1):
                self.gatherers[name].wrap_unit(k, module)

    def unit_requirement(self, section: str) -> Callable[[nn.Module], None]:
        """Returns a function that ensures that the parameters of the layer around a module are present, in
        turn; it does nothing for a section without sharded parameters."""
        modules = self._unit_modules.get(section, [])
        unit_of = {inner: k for k, module in enumerate(modules, 1) for inner in module.modules()}

        def require(module: nn.Module) -> None:
            if module in unit_of:
                self.gatherers[section].require_unit(unit_of[module])

        return require

    @property
    def parameter_names(self) -> set[str]:
        """The names of all parameters with values in slices only."""
        return {name for unit in self._all_units() for name in unit.parameter_names}

    def _all_units(self) -> Iterator[PassUnit]:
        for units in (*self.sharded_units.values(), *self.host_units.values()):
            yield from units

    @property
    def parameter_slices(self) -> dict[nn.Parameter, ParameterSlice]:
        """This rank's slice of each of these parameters: leaf tensor -> which part it is."""
        return {leaf: part for unit in self._all_units() for leaf, part in unit.slices.values()}

    def slices_to_save(
        self, cuts: Mapping[str, ParameterCut], owned: Collection[str]
    ) -> dict[nn.Parameter, ParameterSlice]:
        """Returns the slices that this rank writes into a checkpoint. Slices that all ranks of a replica hold
        are written by its first rank; of parameters in host memory, each replica has all, and the rank writes
        those `owned`."""
        saved: dict[nn.Parameter, ParameterSlice] = {}
        for section, units in self.sharded_units.items():
            for leaf, part in (pair for unit in units for pair in unit.slices.values()):
                if section in self._first_replica_sections or part.name in cuts:
                    saved[leaf] = part
        held = (pair for units in self.host_units.values() for unit in units for pair in unit.slices.values())
        return saved | {leaf: part for leaf, part in held if part.name in owned}

    def copy_masters_to_shards(self) -> None:
        """Copies the masters into the shards that are gathered, rounding them to the compute dtype."""
        for units in self.sharded_units.values():
            for unit in units:
                unit.copy_masters_to_shard()


def read_parameter(source: WeightSource, param: nn.Parameter, cut: ParameterCut | None) -> torch.Tensor:
    """Reads this rank's part of a stored parameter."""
    value = torch.empty(param.shape if cut is None else cut.shape, dtype=param.dtype)
    source.read_into(value)
    return value if cut is None else cut.take_shard(value)


def zero3_parameter_names(plan: Plan, section: Section, canonical: Mapping[str, str]) -> list[str]:
    """Returns the canonical names of the parameters that the replicas of `section` shard: all that no other
    section holds.

    Parameters with partial gradients on the ranks of a replica (norms under sequence parallelism) are few and
    small, and stay whole. Experts that replicas hold different ones of are divided already.
    """
    others = {canonical[p] for s in plan.sections if s.name != section.name for p in s.params}
    stay = others | {canonical[p] for p in section.partial}
    stay |= {canonical[s.name] for s in section.shards if s.replicas > 1}
    return [n for n in dict.fromkeys(canonical[p] for p in section.params) if n not in stay]


def _group_by_unit(
    model: nn.Module,
    modules: Sequence[nn.Module],
    params: Mapping[str, nn.Parameter],
    blocks: Sequence[str],
) -> list[list[list[tuple[str, nn.Parameter]]]]:
    """Returns the named parameters of the remainder and of each of `modules`, the units of `blocks`, grouped
    by dtype and `requires_grad`."""
    of_unit = units_of_parameters(model, modules, blocks)
    units: list[dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]]] = [
        {} for _ in range(len(modules) + 1)
    ]
    for name, param in params.items():
        units[of_unit.get(param, 0)].setdefault((param.dtype, param.requires_grad), []).append((name, param))
    return [list(by_kind.values()) for by_kind in units]


def units_of_parameters(
    model: nn.Module, modules: Sequence[nn.Module], blocks: Sequence[str]
) -> dict[nn.Parameter, int]:
    """Returns the unit of each parameter of the model: k + 1 if only `modules[k]` contains it, else 0, the
    remainder. `modules` are the units of `blocks`; a block without units may be part of another one (a layer
    that statements call, and forward, too), and its parameters are in the remainder."""
    units_of_param: dict[nn.Parameter, set[int]] = {}
    unit_of_module: dict[nn.Module, int] = {m: k for k, unit in enumerate(modules, 1) for m in unit.modules()}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            units_of_param.setdefault(param, set()).add(unit_of_module.get(module, 0))
    for block in map(model.get_submodule, blocks):
        for param in () if recompute.recompute_units(block) else block.parameters():
            units_of_param[param].add(0)
    return {param: next(iter(units)) if len(units) == 1 else 0 for param, units in units_of_param.items()}
