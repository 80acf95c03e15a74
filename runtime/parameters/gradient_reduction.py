"""Sums gradients over replicas and tied sections, and clips them by the global norm.

A gradient is summed over every rank that holds its parameter: the replicas of its section, or of all its
sections where it is tied. Ranks contribute unequal shares, or none: who has no gradient adds zeros, and
whether anybody has one travels beside the sums, because a parameter that no sample reached must keep
`grad=None` (to AdamW a zero is not the same).

Gradients travel in flat buckets, in one order on all ranks and a few at a time. A bucket starts as soon as
the last backward of its section has made its gradients, at the latest when that backward ends; without one,
when the program says that the section is done. Where a section's optimizer is sharded, each rank gets the sum
of its shard alone: under `zero2` a bucket's own gradients are freed when it starts, under `zero1` when all
sums are there. Under `zero3` every backward has summed its own already (`secc.runtime.parameters.zero3`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from secc.runtime.parameters.bucket_limits import BUCKET_BYTES, WINDOW
from secc.runtime.parameters.mixed_precision import master_of, widen
from secc.runtime.parameters.sharded_optimizer import Flat, Piece, flatten, reduce_scatter, whole
from secc.runtime.parameters.zero3 import Scattered
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.tensor_parallel.parameter_cuts import Cut

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_
BLOCK = 1024  # entries of a gradient whose squares are added up in its own dtype


@dataclass(frozen=True)
class Holders:
    """Parameters that live in the same sections: names, sections, the ranks that sum their gradients, how
    their optimizer is sharded.

    Parameters of several sections are never sharded, because their sections may be. Under tensor parallelism
    each rank of a replica sums with the like ranks of the others. Of a parameter that is whole on all of
    them, one of these sums counts for the norm: in the others it is `repeated`. Where ranks of one replica
    sum together, only the first one's gradient counts: the others are `silent`.
    """

    names: tuple[str, ...]
    sections: tuple[str, ...]
    ranks: tuple[int, ...]
    sharding: str = "none"
    repeated: frozenset[str] = frozenset()
    silent: frozenset[int] = frozenset()


def holders(plan: Plan, names: Iterable[str], canonical: Mapping[str, str]) -> list[Holders]:
    """The parameters among `names` that get gradients, by the sections that hold them; the same list on every
    rank.

    `canonical` maps each name that plan or model use to one name of the parameter. Parameters that are held
    by sections without backward only are left out.
    """
    sections_of: dict[str, list[str]] = {}
    for section in plan.sections:
        for name in dict.fromkeys(canonical[p] for p in section.params):
            sections_of.setdefault(name, []).append(section.name)
    together: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        found = tuple(sections_of.get(name, ()))
        if any(plan.section(s).mode != "forward" for s in found):
            together.setdefault(found, []).append(name)
    order = {s.name: i for i, s in enumerate(plan.sections)}
    summed: list[Holders] = []
    for sections, members in sorted(
        together.items(), key=lambda item: (len(item[0]), [order[s] for s in item[0]])
    ):
        some = [plan.section(s) for s in sections]
        summed += (
            _of_one(some[0], members, canonical)
            if len(some) == 1
            else [_of_several(some, members, canonical)]
        )
    return summed


def _of_one(section: Section, names: Sequence[str], canonical: Mapping[str, str]) -> Iterator[Holders]:
    """A sum for each place in a replica, and one over all ranks for what each of them has a part of the
    gradient of."""
    mesh = section.mesh
    cut, partial = (
        {canonical[n] for n in some} for some in ((s.name for s in section.shards), section.partial)
    )
    own = tuple(n for n in names if n not in partial)
    for place in range(mesh.tp) if own else ():
        repeated = frozenset(n for n in own if n not in cut) if place else frozenset[str]()
        yield Holders(
            own, (section.name,), tuple(sorted(mesh.ranks[place :: mesh.tp])), section.sharding, repeated
        )
    if rest := tuple(n for n in names if n in partial):
        sharding = "zero2" if section.sharding == "zero3" else section.sharding  # they are few and stay whole
        yield Holders(rest, (section.name,), tuple(sorted(mesh.ranks)), sharding)


def _of_several(sections: Sequence[Section], names: Sequence[str], canonical: Mapping[str, str]) -> Holders:
    """One sum over the ranks of all sections. Raises ValueError where a rank's gradient holds both what
    counts and what others count."""
    first = {r for s in sections for r in s.mesh.ranks[:: s.mesh.tp]}
    silent = {r for s in sections for r in s.mesh.ranks} - first
    for s in sections:
        others = set(s.mesh.ranks) - set(s.mesh.ranks[:: s.mesh.tp])
        if others & first or not {canonical[n] for n in s.partial}.isdisjoint(names):
            raise ValueError(
                f"section {s.name} with tp={s.mesh.tp} shares {names[0]} with a section whose replicas are of another size"
            )
    return Holders(tuple(names), tuple(s.name for s in sections), _ranks(sections), silent=frozenset(silent))


def _ranks(sections: Iterable[Section]) -> tuple[int, ...]:
    return tuple(sorted({r for s in sections for r in s.mesh.ranks}))


class _Bucket:
    """Gradients of one dtype on their way through a sum over `group`; of a sharded optimizer's parameters
    where `flat` is given."""

    def __init__(
        self, params: list[nn.Parameter], group: Any, flat: Flat | None, free: bool, silent: bool
    ) -> None:
        self.params, self.group, self.flat, self.free, self.silent = params, group, flat, free, silent
        self.reached: list[bool] = []
        self.missing = set[nn.Parameter]()  # whose gradients the last backward has still to make
        self.ready = False
        self._sum = torch.empty(0)
        self._work: dist.Work | None = None

    def launch(self) -> None:
        self.reached = [p.grad is not None for p in self.params]
        own = flatten(self.params, self.flat.values.numel() if self.flat else None)
        if self.silent:
            own.zero_()
        if self.free:
            self.drop()
        if self.flat is None:
            self._sum = own
            self._work = dist.all_reduce(own, dist.ReduceOp.SUM, group=self.group, async_op=True)
        else:
            self._sum = own.new_empty(self.flat.size)
            self._work = reduce_scatter(self._sum, own, self.group)

    def landed(self) -> bool:
        return self._work is not None and self._work.is_completed()

    def land(self) -> None:
        assert self._work is not None
        self._work.wait()
        if self.flat is not None:
            self.flat.set_gradients(self._sum)
        else:
            _spread(self._sum, self.params)
        self._sum, self._work = torch.empty(0), None

    def drop(self) -> None:
        for param in self.params:
            param.grad = None


class _Collected:
    """Gradients that every backward has summed already (`zero3`)."""

    def __init__(self, flat: Scattered) -> None:
        self.params, self.flat = flat.params, flat
        self.reached: list[bool] = []
        self.ready = False

    def launch(self) -> None:
        self.reached = self.flat.reached

    def landed(self) -> bool:
        return True

    def land(self) -> None:
        self.flat.finish()

    def drop(self) -> None:
        pass


class _Reached:
    """Which parameters of a reduction's buckets any rank has a gradient for; the last of the reduction to
    travel."""

    def __init__(self, buckets: Sequence[_Bucket | _Collected], group: Any, device: torch.device) -> None:
        self.buckets, self.group, self.device = buckets, group, device
        self.ready = False
        self._flags = torch.empty(0)
        self._work: dist.Work | None = None

    def launch(self) -> None:
        self._flags = torch.tensor(
            [r for b in self.buckets for r in b.reached], dtype=torch.int32, device=self.device
        )
        self._work = dist.all_reduce(self._flags, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def landed(self) -> bool:
        return self._work is not None and self._work.is_completed()

    def land(self) -> None:
        assert self._work is not None
        self._work.wait()
        flags = iter(self._flags.tolist())
        for bucket in self.buckets:
            for param in bucket.params:
                if not next(flags):
                    param.grad = None
                    if bucket.flat is not None and param in bucket.flat.slices:
                        bucket.flat.slices[param][0].grad = None
            if bucket.flat is not None:
                bucket.drop()
        self._work = None


_Part = _Bucket | _Collected | _Reached


class Reducer:
    """Sums the gradients of this rank's parameters. Made on all ranks in the same order, because making
    groups is collective.

    `pieces` has everything that this rank's optimizer updates, `slices` what takes the places of sharded
    parameters. With `dtype`, float32 parameters compute in it, and the optimizer updates `masters` (or
    slices) in float32.
    """

    def __init__(
        self,
        held: list[Holders],
        params: Mapping[str, nn.Parameter],
        rank: int,
        device: torch.device,
        cuts: Mapping[str, Cut] | None = None,
        dtype: torch.dtype | None = None,
        gathered: Mapping[str, Sequence[Scattered]] | None = None,
    ) -> None:
        self._device, self._cuts, self._dtype = device, cuts or {}, dtype
        self._scattered = [flat for flats in (gathered or {}).values() for flat in flats if flat.trained]
        self.masters: dict[nn.Parameter, tuple[nn.Parameter, Piece]] = {}
        self.repeated = {n for h in held if rank in h.ranks for n in h.repeated}
        groups: dict[tuple[int, ...], Any] = {}
        for h in held:
            if len(h.ranks) > 1 and h.ranks not in groups:
                groups[h.ranks] = dist.new_group(list(h.ranks))
        self._queue: list[_Part] = []
        self._parts: dict[tuple[str, ...], list[_Part]] = {}
        self._sooner: dict[
            tuple[str, ...], list[_Bucket]
        ] = {}  # what may start before the section's last backward ends
        self.pieces: dict[nn.Parameter, Piece] = {}
        self.slices: dict[nn.Parameter, tuple[nn.Parameter, Piece] | None] = {}
        self._counted: list[nn.Parameter] = []
        self._params = [params[n] for h in held if rank in h.ranks for n in h.names]
        for h in held:
            if rank in h.ranks:
                if h.sharding == "zero3" and h.ranks in groups:
                    self._collect(
                        h, [f for f in (gathered or {})[h.sections[0]] if f.trained], groups[h.ranks]
                    )
                else:
                    self._add(h, params, rank, groups.get(h.ranks))
        self._next, self._flying, self._hooks = 0, deque[_Part](), list[RemovableHandle]()

    def _add(self, held: Holders, params: Mapping[str, nn.Parameter], rank: int, group: Any) -> None:
        """Buckets for parameters that the same ranks hold, last ones first, because backward makes their
        gradients first."""
        named = [(n, params[n]) for n in held.names]
        if group is None or held.sharding == "none":
            updated = [(self._updated(n, p), n, p) for n, p in named]
            self.pieces |= {u: whole(n, p, self._cuts.get(n)) for u, n, p in updated}
            self._counted += _shares([u for u, n, _ in updated if n not in held.repeated], len(held.ranks))[
                held.ranks.index(rank)
            ]
        if group is None:
            return
        buckets: list[_Bucket] = []
        for members in _by_bucket(reversed(named)):
            flat = self._flat(members, held, rank) if held.sharding != "none" else None
            buckets.append(
                _Bucket([p for _, p in members], group, flat, held.sharding == "zero2", rank in held.silent)
            )
            if flat is not None:
                self._slice(flat, [p for _, p in members], held)
        self._sooner.setdefault(held.sections, []).extend(
            buckets[:-1]
        )  # the last one has what a backward makes last
        self._sum(held, buckets, group)

    def _collect(self, held: Holders, flats: Sequence[Scattered], group: Any) -> None:
        """Parameters whose gradients every backward sums: only which of them were reached is left for the
        step's end."""
        for flat in flats:
            self._slice(flat, flat.params, held)
        self._sum(held, [_Collected(flat) for flat in flats], group)

    def _slice(self, flat: Flat, params: Sequence[nn.Parameter], held: Holders) -> None:
        self.slices |= {p: flat.slices.get(p) for p in params}
        self.pieces |= dict(flat.slices.values())
        self._counted += [p for p, piece in flat.slices.values() if piece.name not in held.repeated]

    def _sum(self, held: Holders, buckets: Sequence[_Bucket | _Collected], group: Any) -> None:
        parts = [*buckets, _Reached(buckets, group, self._device)]
        self._parts.setdefault(held.sections, []).extend(parts)
        self._queue += parts

    def _updated(self, name: str, param: nn.Parameter) -> nn.Parameter:
        """What the optimizer updates: the parameter, or its master."""
        if self._dtype is None or param.dtype != torch.float32:
            return param
        master = master_of(param, self._dtype)
        self.masters[param] = master, whole(name, master, self._cuts.get(name))
        return master

    def _flat(self, members: Sequence[tuple[str, nn.Parameter]], held: Holders, rank: int) -> Flat:
        """A bucket's parameters for a sharded optimizer."""
        dtype = self._dtype if members[0][1].dtype == torch.float32 else None
        flat = Flat(members, held.ranks.index(rank), len(held.ranks), self._cuts, dtype)
        for _, param in members if dtype is not None else ():
            widen(param)
        return flat

    def reset(self) -> None:
        """Forget the gradients of the last step."""
        for param in (*self._params, *self.pieces):
            param.grad = None
        for flat in self._scattered:
            flat.reset()

    def expect(self, section: str) -> None:
        """The next backward is the step's last one of `section` here: its buckets may start as it makes their
        gradients."""
        for bucket in self._sooner.get((section,), ()):
            bucket.missing = set(bucket.params)
            self._hooks += [
                p.register_post_accumulate_grad_hook(lambda p, b=bucket: self._made(p, b))
                for p in bucket.params
            ]

    def _made(self, param: torch.Tensor, bucket: _Bucket) -> None:
        bucket.missing.discard(cast(nn.Parameter, param))
        if not bucket.missing:
            bucket.ready = True
            self._advance()

    def start(self, section: str) -> None:
        """The gradients that belong to `section` alone are final on this rank: start to sum them."""
        self._release((section,))
        self._advance()

    def _release(self, sections: tuple[str, ...]) -> None:
        for part in self._parts.get(sections, ()):
            part.ready = True

    def finish(self) -> None:
        """Sum what is left and wait: afterwards every gradient is the one over the whole global batch, or
        None.

        It is the `.grad` of what the optimizer updates: the parameter, its slice where the optimizer is
        sharded, or its master.
        """
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        for sections in self._parts:
            self._release(sections)
        while self._next < len(self._queue) or self._flying:
            self._advance()
            if self._flying:
                self._flying.popleft().land()
        for part in self._queue:
            part.ready = False
        self._next = 0
        for param, (master, _) in self.masters.items():
            master.grad, param.grad = param.grad, None

    def _advance(self) -> None:
        """Start what may start next, in the queue's order: the same on all ranks, so that nobody waits in a
        circle."""
        while self._flying and self._flying[0].landed():
            self._flying.popleft().land()
        while self._next < len(self._queue) and len(self._flying) < WINDOW and self._queue[self._next].ready:
            self._flying.append(self._queue[self._next])
            self._next += 1
            self._flying[-1].launch()

    def squared_norm(self) -> torch.Tensor:
        """This rank's share of the squared global norm (float64, 0-dim): every entry is counted on one
        rank."""
        norms = [norm for p in self._counted if p.grad is not None for norm in _norms(p.grad)]
        return (
            torch.cat(norms).double().square().sum()
            if norms
            else torch.zeros((), dtype=torch.float64, device=self._device)
        )

    def clip(self, norm: torch.Tensor, limit: float) -> None:
        """Scale the gradients so that their global norm, now `norm`, is at most `limit`."""
        factor = (limit / (norm + _EPSILON)).clamp(max=1.0)
        for param in self.pieces:
            if param.grad is not None:
                param.grad.mul_(factor.to(param.grad.dtype))

    def gather(self) -> None:
        """After the optimizer's step: every rank gets the parameters that the others have updated.
        Collective."""
        for param, (master, _) in self.masters.items():
            param.data.copy_(master.data)
        flats = [(b.flat, b.group) for b in self._queue if isinstance(b, _Bucket) and b.flat is not None]
        for flat in (*(flat for flat, _ in flats), *self._scattered):
            flat.publish()
        for work in [flat.gather(group) for flat, group in flats]:
            work.wait()


def _shares(params: Iterable[nn.Parameter], count: int) -> list[list[nn.Parameter]]:
    """Parameters whose gradients `count` ranks have in common, dealt to them so that each has about as many
    entries."""
    shares, entries = [list[nn.Parameter]() for _ in range(count)], [0] * count
    for param in params:
        least = entries.index(min(entries))
        shares[least].append(param)
        entries[least] += param.numel()
    return shares


def _norms(gradient: torch.Tensor) -> Iterator[torch.Tensor]:
    """Norms [n] whose squares add up to that of a gradient.

    Adding up in float64 takes a CPU four times as long as in float32, where the norm of a short block is as
    exact as its entries.
    """
    flat = (torch.view_as_real(gradient) if gradient.is_complex() else gradient).reshape(-1)
    if flat.dtype == torch.float32 and flat.device.type == "cpu" and flat.numel() >= BLOCK:
        whole = flat.numel() // BLOCK * BLOCK
        yield torch.linalg.vector_norm(flat[:whole].view(-1, BLOCK), dim=1)
        flat = flat[whole:]
    if flat.numel():
        yield torch.linalg.vector_norm(flat, dtype=torch.float64).view(1)


def _spread(total: torch.Tensor, params: Sequence[nn.Parameter]) -> None:
    """Make the sums in a flat buffer the parameters' gradients, as views of it: each takes the place of the
    rank's own one."""
    for param, part in zip(params, total.split([p.numel() for p in params]), strict=True):
        param.grad = part.view(param.shape).to(param.grad_dtype or param.dtype)


def _by_bucket(named: Iterable[tuple[str, nn.Parameter]]) -> list[list[tuple[str, nn.Parameter]]]:
    """Parameters of one dtype each, in order, up to `BUCKET_BYTES` together."""
    buckets: list[list[tuple[str, nn.Parameter]]] = []
    open_buckets: dict[torch.dtype, tuple[list[tuple[str, nn.Parameter]], int]] = {}
    for name, param in named:
        members, size = open_buckets.get(param.dtype, ([], BUCKET_BYTES))
        if size + param.nbytes > BUCKET_BYTES:
            members, size = [], 0
            buckets.append(members)
        members.append((name, param))
        open_buckets[param.dtype] = (members, size + param.nbytes)
    return buckets
