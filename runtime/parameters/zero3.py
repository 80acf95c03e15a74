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

from secc.runtime.model.hf_weight_mapping import Source
from secc.runtime.parameters.mixed_precision import dtype_of, widen
from secc.runtime.parameters.sharded_optimizer import Flat, Piece, flatten, reduce_scatter, without_values
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.step_program import gathers
from secc.runtime.sections import recompute
from secc.runtime.tensor_parallel.parameter_cuts import Cut

Named = Sequence[tuple[str, nn.Parameter]]
Forward = Callable[..., Any]


class Scattered(Flat):
    """Parameters of one unit and dtype whose values are in one buffer while they are gathered; else each rank
    has its shard alone.

    `trained` ones collect gradients: `reduce` adds those of a backward, summed over the group, to the
    shard's.
    """

    def __init__(
        self,
        named: Named,
        group: Any,
        index: int,
        count: int,
        cuts: Mapping[str, Cut],
        dtype: torch.dtype | None,
    ) -> None:
        self.names, self.params = [n for n, _ in named], [p for _, p in named]
        self.trained = self.params[0].requires_grad
        if not self.trained and dtype is not None and self.params[0].dtype == torch.float32:
            for p in self.params:
                p.data = p.data.to(dtype)
        wide = dtype if self.trained and self.params[0].dtype == torch.float32 else None
        super().__init__(named, index, count, cuts, wide, apart=True)
        for p in self.params if wide is not None else ():
            widen(p)
        self.group = group
        self.reached = [False] * len(named)
        self._views = [p.data for p in self.params]
        self._released = [without_values(p, p.device) for p in self.params]
        self._gathering: dist.Work | None = None
        self._total: torch.Tensor | None = None  # of the gradients so far
        self._adding: tuple[dist.Work, torch.Tensor] | None = None
        self.release()

    def start(self) -> None:
        """Start to gather the values. Collective, as all that follows."""
        self.values.untyped_storage().resize_(self.values.nbytes)
        self._gathering = self.gather(self.group)

    def wait(self) -> None:
        """Let the parameters have their values."""
        assert self._gathering is not None
        self._gathering.wait()
        self._gathering = None
        for param, view in zip(self.params, self._views, strict=True):
            param.data = view

    def release(self) -> None:
        """Forget the values; the parameters read as NaN."""
        for param, nothing in zip(self.params, self._released, strict=True):
            param.data = nothing
        self.values.untyped_storage().resize_(0)

    def reduce(self) -> None:
        """Start to sum the parameters' gradients, and forget them."""
        self.reached = [
            known or p.grad is not None for known, p in zip(self.reached, self.params, strict=True)
        ]
        own = flatten(self.params, self.values.numel())
        for param in self.params:
            param.grad = None
        part = own.new_empty(self.size)
        self._adding = reduce_scatter(part, own, self.group), part

    def add(self) -> None:
        """Wait for the sum that was started, and add it to those before."""
        if self._adding is None:
            return
        work, part = self._adding
        work.wait()
        self._total = part if self._total is None else self._total.add_(part)
        self._adding = None

    def reset(self) -> None:
        """Forget all gradients."""
        self._total, self.reached = None, [False] * len(self.params)

    def finish(self) -> None:
        """Make the sums the slices' gradients."""
        self.set_gradients(self._total if self._total is not None else torch.zeros_like(self.masters))
        self._total = None


class Passes:
    """The passes of a section's micro-batches through its units on this rank.

    The first of `units` is the rest. Each other one is needed once in a pass, in the order in which they
    stand: what computes says so.
    """

    def __init__(self, section: str, units: Sequence[Sequence[Scattered]]) -> None:
        self.section, self.units = section, units
        self._order: Sequence[int] = ()
        self._at = -1
        self._backward = False
        self._adding: Sequence[Scattered] = ()

    def begin(self, backward: bool) -> None:
        """A pass begins: what every unit needs is there."""
        count = len(self.units)
        self._backward, self._at = backward, -1
        self._order = range(count - 1, 0, -1) if backward else range(1, count)
        _start(self.units[0])
        self._start_next()
        _wait(self.units[0])

    def need(self, unit: int) -> None:
        """Let a unit have its values; those before it are done with theirs. Raises RuntimeError where it
        comes out of turn."""
        if self._at >= 0 and self._order[self._at] == unit:
            return
        if unit not in self._order[self._at + 1 :]:
            raise RuntimeError(
                f"section {self.section}: a layer whose parameters are sharded runs twice or out of turn; compile again with "
                f"--set {self.section}.sharding=zero2"
            )
        while self._at < 0 or self._order[self._at] != unit:
            self._step()

    def end(self) -> None:
        """The pass is over: this rank takes part in what is left of it."""
        while self._at + 1 < len(self._order):
            self._step()
        if self._at >= 0:
            self._leave(self._order[self._at])
        self._leave(0)
        self._settle()
        self._order = ()

    def _step(self) -> None:
        self._at += 1
        self._start_next()
        if self._at:
            self._leave(self._order[self._at - 1])
        _wait(self.units[self._order[self._at]])

    def _start_next(self) -> None:
        if self._at + 1 < len(self._order):
            _start(self.units[self._order[self._at + 1]])

    def _leave(self, unit: int) -> None:
        if self._backward:
            self._settle()
            self._adding = [flat for flat in self.units[unit] if flat.trained]
            for flat in self._adding:
                flat.reduce()
        for flat in self.units[unit]:
            flat.release()

    def _settle(self) -> None:
        for flat in self._adding:
            flat.add()
        self._adding = ()

    def wrap(self, unit: int, module: nn.Module) -> None:
        """Let the module's forward, and the backward of what it returns, ask for the unit."""
        inner = module.forward

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.need(unit)
            out = inner(*args, **kwargs)
            for tensor in tensors(out) if torch.is_grad_enabled() else ():
                if tensor.grad_fn is not None:
                    tensor.register_hook(lambda _: self.need(unit))
            return out

        module.forward = forward


def _start(flats: Sequence[Scattered]) -> None:
    for flat in flats:
        flat.start()


def _wait(flats: Sequence[Scattered]) -> None:
    for flat in flats:
        flat.wait()


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a module returns: also in containers, and in attributes of objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in vars(value).values():
            yield from tensors(part)


class Gathered:
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
        cuts: Mapping[str, Cut],
        canonical: Mapping[str, str],
        stored: Mapping[str, Source],
    ) -> None:
        self.passes: dict[str, Passes] = {}
        self.flats: dict[str, list[Scattered]] = {}
        self._modules: dict[str, list[nn.Module]] = {}
        self._first = set[str]()  # sections in whose replicas this rank is the first
        params = dict(model.named_parameters())
        for section in filter(gathers, plan.sections):
            for place in range(section.mesh.tp):
                ranks = sorted(section.mesh.ranks[place :: section.mesh.tp])  # as a group numbers them
                group = dist.new_group(ranks)
                if rank in ranks:
                    self._first |= {section.name} if place == 0 else set()
                    own = {n: params[n] for n in scattered(plan, section, canonical)}
                    self._add(plan, model, section, own, group, ranks.index(rank), device, cuts, stored)

    def _add(
        self,
        plan: Plan,
        model: nn.Module,
        section: Section,
        own: Mapping[str, nn.Parameter],
        group: Any,
        index: int,
        device: torch.device,
        cuts: Mapping[str, Cut],
        stored: Mapping[str, Source],
    ) -> None:
        modules = [unit for path in section.units for unit in recompute.units(model.get_submodule(path))]
        of_unit = _assigned(model, modules, own)
        dtype = dtype_of(plan.dtype)
        units: list[list[Scattered]] = []
        for k in range(len(modules) + 1):
            alike: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
            for name, param in own.items():
                if of_unit[name] == k:
                    alike.setdefault((param.dtype, param.requires_grad), []).append((name, param))
            for name, param in (pair for some in alike.values() for pair in some):
                value = read(stored[name], param, cuts.get(name)) if name in stored else param.data
                param.data = value.to(device)
            units.append(
                [Scattered(some, group, index, section.mesh.dp, cuts, dtype) for some in alike.values()]
            )
        self.passes[section.name] = Passes(section.name, units)
        self.flats[section.name] = [flat for some in units for flat in some]
        self._modules[section.name] = modules

    def install(self) -> None:
        """Wrap the units' forwards; around those that recompute."""
        for name, modules in self._modules.items():
            for k, module in enumerate(modules, 1):
                self.passes[name].wrap(k, module)

    @property
    def names(self) -> set[str]:
        return {name for some in self.flats.values() for flat in some for name in flat.names}

    @property
    def pieces(self) -> dict[nn.Parameter, Piece]:
        """This rank's piece of each parameter."""
        return {
            part: piece
            for some in self.flats.values()
            for flat in some
            for part, piece in flat.slices.values()
        }

    def written(self, cuts: Mapping[str, Cut]) -> dict[nn.Parameter, Piece]:
        """The pieces that this rank writes into a checkpoint: what other ranks of its replica have, too, the
        first of them writes."""
        found: dict[nn.Parameter, Piece] = {}
        for name, flats in self.flats.items():
            for part, piece in (found for flat in flats for found in flat.slices.values()):
                if name in self._first or piece.name in cuts:
                    found[part] = piece
        return found

    def publish(self) -> None:
        """The shards that are gathered get the values of their masters."""
        for flat in (flat for some in self.flats.values() for flat in some):
            flat.publish()


def read(source: Source, param: nn.Parameter, cut: Cut | None) -> torch.Tensor:
    """What this rank has of a stored parameter."""
    value = torch.empty(param.shape if cut is None else cut.shape, dtype=param.dtype)
    source.read_into(value)
    return value if cut is None else cut.take(value)


def scattered(plan: Plan, section: Section, canonical: Mapping[str, str]) -> list[str]:
    """The parameters, by their first names, that the replicas of a section that gathers share out: those that
    are its own alone.

    Those whose gradient is spread over a replica's ranks are few and small (norms), and stay.
    """
    others = {canonical[p] for s in plan.sections if s.name != section.name for p in s.params}
    stay = others | {canonical[p] for p in section.partial}
    return [n for n in dict.fromkeys(canonical[p] for p in section.params) if n not in stay]


def _assigned(
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
