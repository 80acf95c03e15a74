"""Expert parallelism for experts that are modules of their own, in an `nn.ModuleList` that the user's code
goes through one by one.

The code decides in Python which rows each expert gets, so a mixture (the module that has the list) runs
twice. In the first pass experts give zeros, and the rows that they are called with are noted. Then all rows
travel together to the ranks that hold the experts, inside a replica or across replicas
(`expert_parallel.TokenExchange`), and in the second pass each call of an expert gets its results. So a router
may do what it likes with the results: gradients of routing weights come from the second pass, those of the
rows from the first.

Rows must not depend on the results of other experts, and the code must not draw random numbers or keep a
state; the search for layouts compares results and all gradients before such a division is taken. Each pass is
checked to call the same experts with as many rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from secc.runtime.plan.replica_routes import slice_bounds
from secc.runtime.tensor_parallel.autograd_collectives import ShardedRegion
from secc.runtime.tensor_parallel.expert_parallel import TokenExchange

_PASSES_DIFFER = (
    "the two passes of a mixture of experts differ: an expert's rows depend on results of others; compile"
    " again without ep"
)


def is_expert_list(name: str, module: nn.Module) -> bool:
    """Whether a module called `name` in its parent is a list of experts: at least two modules of one class
    with parameters of the same names, matrices and vectors, and "expert" in its name or in their class's."""
    experts = list(module.children())  # without entries that are None
    if not isinstance(module, nn.ModuleList) or not 2 <= len(experts) == len(module):
        return False
    # Sizes may differ: a rank has nothing of experts that others hold.
    kinds = {(type(m), tuple((n, p.dim()) for n, p in m.named_parameters())) for m in experts}
    params = [p for m in experts for p in m.parameters()]
    if len(kinds) > 1 or len(set(params)) < len(params) or not {1, 2} >= {p.dim() for p in params} >= {2}:
        return False
    return "expert" in name.lower() or "expert" in type(experts[0]).__name__.lower()


def find_expert_list(mixture: nn.Module) -> str:
    """Returns the name of the longest list of experts among a module's children, "" without one."""
    lists = {name: len(m) for name, m in mixture.named_children() if is_expert_list(name, m)}  # pyright: ignore[reportArgumentType]
    return max(lists, key=lists.__getitem__) if lists else ""


class ListedExperts:
    """The forward of a mixture with experts in a list; this rank holds some of them.

    name: of the list. exchange: with other replicas, None where each replica has all experts. Replaces the
    forwards of the experts.
    """

    def __init__(
        self, module: nn.Module, region: ShardedRegion, name: str, exchange: TokenExchange | None = None
    ) -> None:
        self.module, self.inner, self.region, self.exchange = module, module.forward, region, exchange
        experts = list(module.get_submodule(name).children())
        exchanging, place = (1, 0) if exchange is None else (exchange.group.size, exchange.group.index)
        parts, part = region.group.size * exchanging, region.group.index * exchanging + place
        self.own_count = len(experts) // parts
        self.start, self.stop = slice_bounds(len(experts), region.group.index, region.group.size)
        self.own_forwards = [e.forward for e in experts[part * self.own_count :][: self.own_count]]
        for number, expert in enumerate(experts):
            expert.forward = _ExpertCall(self, number)
        self.requests: list[tuple[int, torch.Tensor]] = []
        self.answers: Iterator[tuple[int, torch.Tensor]] | None = None  # in the second pass
        self._results: dict[tuple[object, ...], torch.Tensor] = {}  # of a row of zeros, by dtype and width
        self.number = -1 if exchange is None else exchange.add_experts(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the mixture returns. Raises RuntimeError if its passes differ."""
        self.requests, self.answers = [], None
        self.inner(*args, **kwargs)
        requests, self.requests = self.requests, []
        results = self._run_requests(requests, (args, kwargs))
        sizes = [rows.shape[:-1].numel() for _, rows in requests]
        by_call = results.split(sizes) if sizes else ()
        self.answers = iter(
            [
                (expert, result.view(*rows.shape[:-1], result.shape[-1]))
                for (expert, rows), result in zip(requests, by_call, strict=True)
            ]
        )
        try:
            out = self.inner(*args, **kwargs)
            if next(self.answers, None) is not None:
                raise RuntimeError(_PASSES_DIFFER)
        finally:
            self.answers = None
        return out if self.exchange is None else _depend_on(results, out)

    def answer_call(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """Returns the results of an expert for `rows` `[..., width]`: zeros in the first pass, which notes
        the call."""
        if self.answers is None:
            self.requests.append((expert, rows))
            like = self._result_like(rows)
            return like.new_zeros(*rows.shape[:-1], like.shape[-1])
        known, result = next(self.answers, (-1, rows))
        if known != expert or result.shape[:-1] != rows.shape[:-1]:
            raise RuntimeError(_PASSES_DIFFER)
        return result

    def compute(
        self, rows: torch.Tensor, experts: torch.Tensor, called: Sequence[bool], call: object
    ) -> torch.Tensor:
        """Returns the results `[rows, width]` of this rank's experts for `rows`; `experts` are their numbers
        on this rank. Experts that were `called` without rows run, too, as their gradients are zeros then."""
        like = self._result_like(rows)
        # Without any rows, the backward still has to reach them: other ranks wait for it.
        none = rows[:0].sum(1, keepdim=True).to(like.dtype).expand(0, like.shape[1])
        places, results = [rows.new_zeros(0, dtype=torch.int64)], [none]
        for number in (n for n, is_called in enumerate(called) if is_called):
            places.append((experts == number).nonzero().flatten())
            results.append(self.own_forwards[number](rows.index_select(0, places[-1])))
        return torch.cat(results).index_select(0, torch.argsort(torch.cat(places)))

    def _run_requests(self, requests: Sequence[tuple[int, torch.Tensor]], arguments: Any) -> torch.Tensor:
        """Returns the results of all calls, one after another: `[rows, width]`."""
        numbers = [expert for expert, _ in requests]
        given = [rows.reshape(-1, rows.shape[-1]) for _, rows in requests]
        if given:
            rows = self.region(torch.cat(given))
        else:  # no expert was called, but those of this rank may be by others
            rows = next(filter(torch.is_tensor, tree_leaves(arguments))).new_zeros(0)
        chosen = torch.tensor(
            [n for n, some in zip(numbers, given, strict=True) for _ in some], device=rows.device
        ).long()
        pairs = ((chosen >= self.start) & (chosen < self.stop)).nonzero().flatten()
        called = [n in set(numbers) for n in range(self.start, self.stop)]
        own, experts = rows.index_select(0, pairs), chosen[pairs] - self.start
        if self.exchange is not None:
            if torch.is_grad_enabled() and not own.requires_grad:
                own = own.detach().requires_grad_()  # others need this rank in the backward
            results = self.exchange.run_experts(self, own, experts, called, None)
        elif given:
            results = self.compute(own, experts, called, None)
        else:
            return rows
        every = results.new_zeros(len(chosen), results.shape[-1]).index_copy(0, pairs, results)
        return self.region.reduce_output(every)

    def _result_like(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns what an expert makes of one row of zeros like `rows` `[..., width]`: `[1, width]`."""
        state = torch.is_autocast_enabled(rows.device.type), torch.get_autocast_dtype(rows.device.type)
        key = rows.dtype, rows.shape[-1], rows.device, *state
        if key not in self._results:
            with torch.no_grad():
                self._results[key] = self.own_forwards[0](rows.new_zeros(1, rows.shape[-1]))
        return self._results[key]


class _ExpertCall:
    """The forward of an expert in a list: the mixture answers."""

    def __init__(self, mixture: ListedExperts, number: int) -> None:
        self.mixture, self.number = mixture, number

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.mixture.answer_call(self.number, rows)


def _depend_on(results: torch.Tensor, out: Any) -> Any:
    """Returns `out` with its first float tensor depending on `results`, so that the backward reaches the
    exchange of rows on every rank. Raises TypeError for an output without such a tensor."""
    leaves, form = tree_flatten(out)
    place = next((i for i, t in enumerate(leaves) if torch.is_tensor(t) and t.is_floating_point()), None)
    if place is None:
        raise TypeError("a mixture of experts returned no tensor of floats")
    leaves[place] = leaves[place] + results[:0].sum().to(leaves[place].dtype)
    return tree_unflatten(leaves, form)
