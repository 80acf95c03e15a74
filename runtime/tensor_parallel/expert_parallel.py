"""Expert parallelism: a rank holds some of the experts of a mixture and computes the tokens that are routed
to them, those of its own samples and those of other ranks.

A module of experts takes hidden states `[..., width]`, the indices of the experts that each token is routed
to `[..., k]`, and their weights `[..., k]`. The user's code runs with one choice per token, which is what a
router with `k = 1` would give it. Weights are applied where results are summed, which is where the token came
from; so weights never travel, and their gradients are found there.

*Inside a replica* all ranks call the module with the same tokens. Each picks the (token, choice) pairs of its
own experts, and results are summed over ranks.

*Across replicas* (`TokenExchange`) the ranks at one place of consecutive replicas have different samples.
Pairs are sorted by expert and travel to the rank that holds it, and results travel back: two uneven
all-to-alls in each direction, preceded by one of the numbers of rows. Every rank of the group makes the same
calls in each pass: the schedule runs replicas in rounds, and a rank without samples in a round makes an empty
pass, in which it only computes what others send.

Sums run in a fixed order: sorts are stable, rows arrive ordered by rank, each pair has a place of its own,
and the k places of a token are added together.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from secc.runtime.model.autograd_state import is_in_backward
from secc.runtime.plan.replica_routes import slice_bounds
from secc.runtime.plan.schema import Shard
from secc.runtime.tensor_parallel.autograd_collectives import ShardedRegion
from secc.runtime.tensor_parallel.replica_group import ReplicaGroup

FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # by number, in headers


class HeldExperts(Protocol):
    """A mixture with `own_count` experts on this rank; `number` counts those that exchange tokens with the
    same ranks, in the order of their calls."""

    module: nn.Module
    own_count: int
    number: int

    def compute(
        self,
        rows: torch.Tensor,
        experts: torch.Tensor,
        called: Sequence[bool],
        call: inspect.BoundArguments | None,
    ) -> torch.Tensor:
        """Returns the results `[rows, width]` of this rank's experts for `rows` `[rows, width]`; `experts`
        are their numbers on this rank. called: which experts were called, be it without rows."""
        ...


class RoutedExperts:
    """The forward of a module of experts; this rank holds some of them.

    arguments: the names of hidden states, indices and weights in the module's forward, then those of biases
    `[experts, width]` of its results that ranks with the same experts have some entries of. shards: how the
    module's parameters are cut, by name. exchange: with other replicas, None where each replica has all
    experts. Sets the module's number of experts to that of this rank.
    """

    def __init__(
        self,
        module: nn.Module,
        region: ShardedRegion,
        arguments: Sequence[str],
        shards: Mapping[str, Shard],
        exchange: TokenExchange | None = None,
    ) -> None:
        self.module, self.inner, self.arguments = module, module.forward, arguments[:3]
        self.region, self.exchange = region, exchange
        self.signature, group = inspect.signature(module.forward), region.group
        experts, parts = count_experts(module, shards.values())
        self.summands = {n: _bounds_of_entries(shards[n], group) for n in arguments[3:]}
        exchanging = 1 if exchange is None else exchange.group.size
        self.own_count, parts_of_replica = experts // parts, parts // exchanging
        self.start, self.stop = slice_bounds(
            experts, group.index * parts_of_replica // group.size, parts_of_replica
        )
        for name in expert_count_attributes(module, experts):
            setattr(module, name, self.own_count)
        self.number = -1 if exchange is None else exchange.add_experts(self)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the sum of the experts' results for each token, weighted. Raises ValueError for arguments
        of another form."""
        call = self.signature.bind(*args, **kwargs)
        hidden, index, weights = (call.arguments[name] for name in self.arguments)
        choices = index.shape[-1]
        tokens, chosen = self.region(hidden).flatten(0, -2), index.flatten()
        # Tokens of a replica are on all of its ranks: each sees to the experts at its place.
        pairs = ((chosen >= self.start) & (chosen < self.stop)).nonzero().flatten()
        rows, experts = take_pairs(tokens, pairs, choices), chosen[pairs] - self.start
        if self.exchange is None:
            result = self.compute(rows, experts, (), call)
        else:
            if torch.is_grad_enabled() and not rows.requires_grad:
                rows = rows.detach().requires_grad_()  # others need this rank in the backward
            result = self.exchange.run_experts(self, rows, experts, (), call)
        result = result * self.region(weights).flatten()[pairs].unsqueeze(-1)
        total = sum_pairs(result, pairs, choices, len(tokens)).to(hidden.dtype)
        return self.region.reduce_output(total).view(*hidden.shape[:-1], -1)

    def compute(
        self,
        rows: torch.Tensor,
        experts: torch.Tensor,
        called: Sequence[bool],
        call: inspect.BoundArguments | None,
    ) -> torch.Tensor:
        """Returns the results `[rows, width]` of this rank's experts for `rows` `[rows, width]`; `experts`
        are their numbers on this rank.

        Without rows, the code runs on one of zeros, and the gradients of parameters are zeros.
        """
        count = len(rows)
        if not count:
            rows, experts = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), experts.new_zeros(1)
        values = (rows, experts.unsqueeze(-1), rows.new_ones(len(rows), 1))
        named = {} if call is None else dict(call.arguments)
        named |= dict(zip(self.arguments, values, strict=True))
        bound = inspect.BoundArguments(self.signature, named)  # pyright: ignore[reportArgumentType]
        with self._pad_summands():
            return self.inner(*bound.args, **bound.kwargs)[:count]

    @contextmanager
    def _pad_summands(self) -> Iterator[None]:
        """Lets the module's code see zeros for entries that other ranks with the same experts add: instance
        attributes hide parameters."""
        own = vars(self.module)
        own.update(
            {
                name: torch.nn.functional.pad(self.module.get_parameter(name), (start, size - stop))
                for name, (start, stop, size) in self.summands.items()
            }
        )
        try:
            yield
        finally:
            for name in self.summands:
                del own[name]


@dataclass(frozen=True)
class ExchangeUnit:
    """Mixtures that run again together in the backward, if `is_recomputed`, in the order of their calls."""

    is_recomputed: bool
    members: list[HeldExperts]


class TokenExchange:
    """The experts of one section on this rank with tokens from several replicas, in the order of their
    calls.

    `group`: the ranks at this rank's place of consecutive replicas; rank i has the i-th part of the experts
    of this place. `require`: called with the module of a mixture before this rank takes part in its exchange
    without tokens of its own, and again in the backward (zero3 gathers the parameters of its layer then).

    A forward may reach some of its mixtures only (tokens that leave early). Other ranks may reach them, so
    this rank takes part without tokens in those that it passed by, when it enters the next layer or ends.
    Each exchange then depends on the one before it, which keeps their order in the backward.
    """

    def __init__(self, group: ReplicaGroup) -> None:
        self.group = group
        self.require: Callable[[nn.Module], None] = lambda module: None
        self.experts: list[HeldExperts] = []
        self.units: list[ExchangeUnit] = []
        self.calls = 0  # in the forward that runs
        self.sent_rows = 0  # to other ranks, in forwards
        self._chain: torch.Tensor | None = None  # without entries, depends on the last exchange
        self._has_passed_by = False

    def add_experts(self, experts: HeldExperts) -> int:
        """Adds the experts that are called next; returns their number."""
        self.experts.append(experts)
        self.units.append(ExchangeUnit(False, [experts]))
        return len(self.experts) - 1

    def assign_layers(self, layers: Iterable[nn.Module], is_recomputed: Callable[[nn.Module], bool]) -> None:
        """Sets the layers that mixtures lie in. If one is recomputed, taking part in it without tokens
        includes running its experts again in the backward."""
        layer_of = {m: layer for layer in layers for m in layer.modules()}
        self.units = []
        for layer, members in itertools.groupby(self.experts, lambda e: layer_of.get(e.module)):
            unit = ExchangeUnit(layer is not None and is_recomputed(layer), [*members])
            self.units.append(unit)
            if layer is not None:
                first = unit.members[0].number
                layer.register_forward_pre_hook(lambda *_, first=first: self._enter_layer(first))

    def _enter_layer(self, first: int) -> None:
        """Takes part in the exchanges that were passed by before a layer with the mixture `first`."""
        if not is_in_backward():
            self._pass_by(first)

    def run_experts(
        self,
        experts: HeldExperts,
        rows: torch.Tensor,
        chosen: torch.Tensor,
        called: Sequence[bool],
        call: inspect.BoundArguments | None,
    ) -> torch.Tensor:
        """Returns the results for `rows` `[rows, width]`, computed by the ranks that hold the experts
        `chosen` (numbered within this place of the replicas). `rows` without width stand for none.
        called: which experts were called, be it without rows; () for those with rows.

        Raises RuntimeError if the ranks are at different modules.
        """
        if not is_in_backward():
            self._pass_by(experts.number)
            if experts.number != self.calls:
                raise RuntimeError(
                    f"a forward called mixture {experts.number} of {len(self.experts)} a second time, or out"
                    " of turn; compile again with a smaller ep"
                )
            self.calls += 1
            if self._has_passed_by and rows.dim() == 2 and self._chain is not None:
                rows = torch.cat([rows, self._chain.to(rows.dtype)[:, None].expand(0, rows.shape[1])])
        count, own = self.group.size, experts.own_count
        order = torch.argsort(chosen, stable=True)
        numbers = torch.bincount(chosen, minlength=count * own).view(count, own)
        kind = FLOAT_DTYPES.index(rows.dtype) if rows.dim() == 2 else -1
        flags = torch.tensor(called or [False] * numbers.numel(), device=numbers.device).view_as(numbers)
        about = [experts.number, rows.shape[1] if rows.dim() == 2 else 0, kind]
        header = torch.cat(
            [numbers, flags.to(numbers), numbers.new_tensor(about).expand(count, len(about))], 1
        )
        arriving = self.group.all_to_all(header, [1] * count, [1] * count)
        sent, described = numbers.sum(1).tolist(), arriving[:, 2 * own :].tolist()
        received = arriving[:, :own].sum(1).tolist()
        if {number for number, _, _ in described} != {experts.number}:
            raise RuntimeError("ranks that exchange tokens call their experts in different orders")
        if all(kind < 0 for _, _, kind in described):
            return rows[:, None]  # every rank passes by
        if rows.dim() != 2:
            width, kind = max((width, kind) for _, width, kind in described)
            rows = rows.to(FLOAT_DTYPES[kind]).view(0, 1).expand(0, width)
        arrived = exchange_rows(rows[order], sent, received, self.group)
        local = torch.arange(own, device=rows.device).repeat(count)
        used = arriving[:, : 2 * own].view(count, 2, own).sum((0, 1)).bool().tolist()
        results = experts.compute(arrived, local.repeat_interleave(arriving[:, :own].flatten()), used, call)
        back = exchange_rows(results, received, sent, self.group)
        if not is_in_backward():
            self._chain = back[:0].sum(1)
            self.sent_rows += sum(sent) - sent[self.group.index]
        return back[torch.argsort(order)]

    def run_empty_forward(self, with_grad: bool) -> torch.Tensor:
        """Takes part in the forward of a round in which this rank has no samples. Returns what its backward
        starts from: no entries."""
        self.begin_forward()
        with torch.set_grad_enabled(with_grad):
            chain = self.end_forward()
        assert chain is not None
        return chain

    def take_sent_rows(self) -> int:
        """Returns how many rows this rank has sent to experts of other ranks since the last call."""
        rows, self.sent_rows = self.sent_rows, 0
        return rows

    def begin_forward(self) -> None:
        """Call it before each forward of the section."""
        self.calls, self._chain, self._has_passed_by = 0, None, False

    def end_forward(self) -> torch.Tensor | None:
        """Call it after each forward of the section. Returns what the backward has to start from, too, if the
        last mixtures were passed by: no entries."""
        is_complete = self.calls == len(self.experts)
        self._pass_by(len(self.experts))
        chain, self._chain = self._chain, None
        return None if is_complete else chain

    def _pass_by(self, stop: int) -> None:
        """Takes part without tokens in the exchanges of mixtures before number `stop` that this forward has
        not called. Raises RuntimeError if it called others in a layer that is recomputed."""
        with_grad = torch.is_grad_enabled()
        for unit in self.units:
            missed = [e for e in unit.members if self.calls <= e.number < stop]
            if not missed:
                continue
            again = unit.is_recomputed and with_grad
            if again and len(missed) < len(unit.members):
                raise RuntimeError(
                    "a layer that is recomputed called some of its mixtures of experts only; compile again"
                    " with recompute=none for its section, or with a smaller ep"
                )
            self._has_passed_by = True
            chain = self._chain
            if chain is None:
                device = next(missed[0].module.parameters()).device
                chain = torch.zeros(0, device=device, requires_grad=with_grad)
            run = functools.partial(self._run_without_tokens, missed)
            self._chain = checkpoint(run, chain, use_reentrant=False) if again else run(chain)

    def _run_without_tokens(self, members: Sequence[HeldExperts], chain: torch.Tensor) -> torch.Tensor:
        for experts in members:
            self.require(experts.module)
            chosen = torch.zeros(0, dtype=torch.int64, device=chain.device)
            results = self.run_experts(experts, chain, chosen, (), None)
            chain = (results * torch.ones_like(results)).sum(1)
            if chain.requires_grad:
                chain.register_hook(lambda _, module=experts.module: self.require(module))
        return chain


def count_experts(module: nn.Module, shards: Iterable[Shard]) -> tuple[int, int]:
    """Returns the number of experts on all ranks, and the number of parts (ep) that they form, of a module
    with cut parameters."""
    shard = next(iter(shards))
    own = module.get_parameter(shard.name.rpartition(".")[2]).shape[0]
    experts = own * shard.ep if shard.dim else sum(shard.parts)
    return experts, experts // own


def _bounds_of_entries(shard: Shard, group: ReplicaGroup) -> tuple[int, int, int]:
    """Returns start and stop of this rank's entries of a bias, and how many there are."""
    size, sharing = sum(shard.parts), group.size // shard.ep
    return *slice_bounds(size, group.index % sharing, sharing), size


def expert_count_attributes(module: nn.Module, experts: int) -> list[str]:
    """Returns the attributes of a module that hold its number of experts, by name and value."""
    return [
        name
        for name, value in vars(module).items()
        if type(value) is int and value == experts and "expert" in name
    ]


class _TakePairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, pairs: torch.Tensor, choices: int) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(pairs)
        ctx.choices, ctx.count = choices, len(tokens)
        return tokens[pairs // choices]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return sum_pairs(gradient, ctx.saved_tensors[0], ctx.choices, ctx.count), None, None


class _SumPairs(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, values: torch.Tensor, pairs: torch.Tensor, choices: int, count: int
    ) -> torch.Tensor:
        ctx.save_for_backward(pairs)
        ctx.choices = choices
        spread = values.new_zeros(count * choices, values.shape[-1])
        spread[pairs] = values
        return spread.view(count, choices, values.shape[-1]).sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return take_pairs(gradient, ctx.saved_tensors[0], ctx.choices), None, None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: ReplicaGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return group.all_to_all(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return exchange_rows(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def take_pairs(tokens: torch.Tensor, pairs: torch.Tensor, choices: int) -> torch.Tensor:
    """Returns a row of `tokens` `[tokens, width]` for each of some (token, choice) pairs, numbered
    `token * choices + choice`. The gradient of a token is the sum over its pairs."""
    return _TakePairs.apply(tokens, pairs, choices)  # pyright: ignore[reportUnknownMemberType,reportReturnType]


def sum_pairs(values: torch.Tensor, pairs: torch.Tensor, choices: int, count: int) -> torch.Tensor:
    """Sums the rows of `values` `[pairs, width]`, one for each (token, choice) pair, over the choices of each
    of `count` tokens: `[tokens, width]`. The order of the sum is that of the choices."""
    return _SumPairs.apply(values, pairs, choices, count)  # pyright: ignore[reportUnknownMemberType,reportReturnType]


def exchange_rows(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: ReplicaGroup
) -> torch.Tensor:
    """Sends `sent[i]` rows `[rows, width]` to rank i, and returns `received[i]` rows of each rank i, in the
    order of ranks. Gradients travel back."""
    return _ExchangeRows.apply(rows, sent, received, group)  # pyright: ignore[reportUnknownMemberType,reportReturnType]
