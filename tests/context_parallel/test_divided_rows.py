"""Each rank of cp has some rows of a sequence, and the ranks of tp in it divide these rows for norms. With
threads as ranks, loss and gradients of small models are those of one rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from secc.frontend.tp_search.find_mapping import TpMapping, find_mapping, mapping_shards
from secc.frontend.tp_search.thread_ranks import ThreadExchange, ThreadGroup, run_thread_ranks
from secc.runtime.context_parallel.row_marks import deal_rows, mark_of
from secc.runtime.plan.replica_routes import slice_bounds
from secc.runtime.plan.schema import Shard
from secc.runtime.sections.recompute import recompute_units
from secc.runtime.tensor_parallel.parameter_cuts import cut_of_shard
from secc.runtime.tensor_parallel.styles import apply_styles
from tests.context_parallel.test_row_mode import MODELS, Batch, WithLoss, make_batch, run_on_rows


class _Grid:
    """Threads as ranks of `tp` times `cp`; those of tp are adjacent."""

    def __init__(self, tp: int, cp: int) -> None:
        self.tp, self.cp = tp, cp
        self.rows = [ThreadExchange(cp) for _ in range(tp)]
        self.parts = [ThreadExchange(tp) for _ in range(cp)]

    def groups(self, rank: int) -> tuple[ThreadGroup, ThreadGroup]:
        """The ranks that share a rank's rows (tp), and those that share its parameters (cp)."""
        row, part = divmod(rank, self.tp)
        return ThreadGroup(part, self.tp, self.parts[row]), ThreadGroup(row, self.cp, self.rows[part])


def _find_layers(model: nn.Module, batch: Batch, tp: int) -> dict[str, tuple[TpMapping, list[Shard]]]:
    """Returns for each layer how it is divided, and its divided parameters."""
    paths = {module: path for path, module in model.named_modules()}
    calls: dict[nn.Module, Any] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda m, args, kwargs: calls.setdefault(m, (args, kwargs)) and None, with_kwargs=True
        )
        for layer in recompute_units(model)
    ]
    model(**batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    found = {paths[m]: (m, find_mapping(m, call, tp)) for m, call in calls.items()}
    return {path: (mapping, mapping_shards(m, mapping)) for path, (m, mapping) in found.items()}


def _run_rank(
    model: nn.Module,
    batch: Batch,
    layers: dict[str, tuple[TpMapping, list[Shard]]],
    overlap: str,
    attention: str,
    groups: tuple[ThreadGroup, ThreadGroup],
) -> tuple[Any, dict[str, Any]]:
    tp, cp = groups
    part = copy.deepcopy(model)
    seen: list[int] = []
    for path, (mapping, shards) in layers.items():
        layer = part.get_submodule(path)
        for shard in shards:
            parameter = layer.get_parameter(shard.name)
            cut = cut_of_shard(shard, parameter.shape, tp.index, tp.size)
            parameter.data = cut.take_shard(parameter.data)
        for name, norm in layer.named_modules():
            if "layernorm" in name:  # not those of queries and keys
                norm.register_forward_pre_hook(
                    lambda _, args: seen.append(_own_positions(args[0], attention))
                )
        apply_styles(layer, mapping.sequence_styles(mapping.draws_random), tp, shards, overlap=overlap)
    loss, gradients, mode = run_on_rows(part, batch, cp, attention)
    length = batch["input_ids"].shape[1]
    rows = length if attention == "frames" else deal_rows(length, cp.size).counts[cp.index]
    start, stop = slice_bounds(rows, tp.index, tp.size)
    assert set(seen) == {stop - start} and not mode.gathered
    return loss, gradients


def _own_positions(hidden: torch.Tensor, attention: str) -> int:
    assert (mark_of(hidden) is None) == (attention != "frames")
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        return hidden.shape[1]


@pytest.mark.parametrize("overlap", ["none", "both"])
@pytest.mark.parametrize("length", [13, 3])
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("grouped queries", "gather"),
        ("grouped queries", "ulysses"),
        ("grouped queries", "frames"),
        ("eager attention", "gather"),
        ("windows", "gather"),
    ],
)
def test_norms_work_on_positions_of_rows(name: str, attention: str, length: int, overlap: str) -> None:
    """Of 13 positions ranks of cp get 4 or 3, which 2 ranks do not divide; of 3, some get none. Of frames,
    which are the 2 entries of the batch, two ranks of cp get one and two none."""
    torch.manual_seed(0)
    model, batch, grid = WithLoss(MODELS[name]()), make_batch(length, padded=True), _Grid(2, 4)
    layers = _find_layers(model, batch, grid.tp)
    assert all(mapping.sequence_styles(False) for mapping, _ in layers.values())
    model.double().zero_grad()
    loss = model(**batch)
    loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    ranks = run_thread_ranks(
        grid.tp * grid.cp, lambda g: _run_rank(model, batch, layers, overlap, attention, grid.groups(g.index))
    )
    for found, _ in ranks:
        assert torch.allclose(found, loss.detach(), rtol=1e-6)
    divided = {f"{path}.{s.name}": s for path, (_, shards) in layers.items() for s in shards}
    total = sum(float(g.square().sum()) for g in expected.values() if g is not None) ** 0.5
    for key, gradient in expected.items():
        if gradient is None:
            continue
        sums = [
            torch.stack([g[key] for _, g in ranks[part :: grid.tp] if g[key] is not None]).sum(0)
            for part in range(grid.tp)
        ]
        if key in divided:
            cuts = [cut_of_shard(divided[key], gradient.shape, i, grid.tp) for i in range(grid.tp)]
            wanted = [cut.take_shard(gradient) for cut in cuts]
        else:
            inside = key.startswith(tuple(f"{path}." for path in layers))
            # Outside of layers, and inside of cut scopes, ranks of tp have equal gradients.
            equal = not inside or torch.allclose(sums[0], gradient, rtol=1e-5, atol=1e-9 * total)
            sums, wanted = ([sums[0]] if equal else [sums[0] + sums[1]]), [gradient]
        for found, own in zip(sums, wanted, strict=True):
            difference = float((found - own).norm())
            assert difference <= 1e-5 * float(own.norm()) + 1e-7 * total, (key, difference, total)
