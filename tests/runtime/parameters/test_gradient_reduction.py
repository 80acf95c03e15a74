"""Reducing gradients over replicas and tied sections, and the global norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from secc.runtime.parameters import gradient_reduction
from secc.runtime.parameters.gradient_reduction import (
    GradientReducer,
    ReductionGroup,
    _device_norms,  # pyright: ignore[reportPrivateUsage]
    build_reduction_groups,
)
from tests.runtime.captioner_plans import APART, UNEVEN, make_plan
from tests.runtime.gloo_ranks import run_ranks

GROUPS = [
    ReductionGroup(("a", "b", "c"), ("one",), (0, 1)),
    ReductionGroup(("tied",), ("one", "two"), (0, 1, 2)),
    ReductionGroup(("d",), ("two",), (2,)),
]
SHAPES = {"a": (3, 2), "b": (4,), "c": (2,), "tied": (5,), "d": (3,)}
CPU = torch.device("cpu")


def canonical(names: Mapping[str, str]) -> dict[str, str]:
    return {n: {"decoder.gate": "encoder.gate", "head.weight": "embed.weight"}.get(n, n) for n in names}


def test_reduction_groups_follow_sections_and_ties() -> None:
    plan = make_plan(UNEVEN)
    names = canonical(plan.model.parameters)
    trainable = [n for n in dict.fromkeys(names.values()) if plan.model.parameters[n].endswith("train")]
    groups = {group.sections: group for group in build_reduction_groups(plan, trainable, names)}
    assert groups.keys() == {("decoder",), ("encoder",), ("encoder", "decoder")}
    assert groups["encoder", "decoder"] == ReductionGroup(
        ("encoder.gate",), ("encoder", "decoder"), (0, 1, 2)
    )
    assert groups["decoder",].ranks == (1, 2) and "embed.weight" in groups["decoder",].names
    # The teacher's section has no backward.
    assert build_reduction_groups(make_plan(APART), ["teacher.mix.weight"], names) == []


def reduce(values: Mapping[str, Mapping[int, float]], limit: float | None = None) -> list[dict[str, Any]]:
    """Sets the given gradients on each rank (none where no value is given), reduces them, and returns what
    each rank has."""

    def target(rank: int) -> dict[str, Any]:
        dist.init_process_group("gloo")
        params = {n: nn.Parameter(torch.zeros(s)) for n, s in SHAPES.items()}
        for name, by_rank in values.items():
            if rank in by_rank:
                params[name].grad = torch.full(SHAPES[name], by_rank[rank])
        reducer = GradientReducer(GROUPS, params, rank, CPU)
        reducer.start_section("one")
        reducer.finish_reduction()
        square = reducer.squared_norm()
        dist.all_reduce(square)
        if limit is not None:
            reducer.clip_gradients(float(square.sqrt()), limit)
        return {"norm": float(square.sqrt()), **{n: p.grad for n, p in params.items()}}

    return run_ranks(3, target)


@pytest.mark.gloo
def test_sums_missing_gradients_and_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_reduction, "BUCKET_BYTES", 30)  # several buckets
    ranks = reduce({"a": {0: 1.0, 1: 2.0}, "b": {1: 5.0}, "tied": {0: 1.0, 2: 3.0}, "d": {2: 7.0}})
    for rank in (0, 1):
        assert torch.equal(ranks[rank]["a"], torch.full((3, 2), 3.0))
        assert torch.equal(ranks[rank]["b"], torch.full((4,), 5.0))
        assert ranks[rank]["c"] is None  # no rank has a gradient
    assert all(torch.equal(r["tied"], torch.full((5,), 4.0)) for r in ranks)
    assert torch.equal(ranks[2]["d"], torch.full((3,), 7.0))
    norm = math.sqrt(6 * 9 + 4 * 25 + 5 * 16 + 3 * 49)
    assert all(r["norm"] == pytest.approx(norm, rel=1e-12) for r in ranks)


def test_a_rank_drops_the_gradients_that_it_repeats_of_one_section() -> None:
    tied = nn.Parameter(torch.zeros(2))
    group = ReductionGroup(("tied",), ("one", "two"), (0,), repeated=frozenset({("one", 0), ("two", 1)}))
    reducer = GradientReducer([group], {"tied": tied}, 0, CPU)
    for section, factor in (("two", 1), ("one", 10), ("two", 100)):
        with reducer.dropping_repeated(section):
            (factor * tied).sum().backward()
    assert tied.grad is not None and tied.grad.tolist() == [101, 101]


@pytest.mark.parametrize(
    "size", [3, gradient_reduction.NORM_BLOCK_ENTRIES, 5 * gradient_reduction.NORM_BLOCK_ENTRIES + 7]
)
def test_norm_equals_float64_norm(size: int) -> None:
    """Also if the entries of one gradient differ by orders of magnitude."""
    params = {n: nn.Parameter(torch.zeros(s)) for n, s in {"a": (size,), "b": (4, size)}.items()}
    for param in params.values():
        param.grad = torch.randn(param.shape) * 10 ** torch.linspace(-6, 3, size)
    square = GradientReducer([ReductionGroup(("a", "b"), ("one",), (0,))], params, 0, CPU).squared_norm()
    expected = sum(p.grad.double().square().sum() for p in params.values() if p.grad is not None)
    assert square.dtype == torch.float64 and float(square) == pytest.approx(float(expected), rel=1e-7)


@pytest.mark.gloo
def test_clipping_scales_all_gradients_by_one_factor() -> None:
    ranks = reduce({"a": {0: 3.0}, "tied": {1: 4.0}, "d": {2: 1.0}}, limit=1.0)
    norm = math.sqrt(6 * 9 + 5 * 16 + 3)
    assert float(ranks[1]["a"][0, 0]) == pytest.approx(3 / norm, rel=1e-5)
    assert float(ranks[2]["tied"][0]) == pytest.approx(4 / norm, rel=1e-5)
    assert float(ranks[2]["d"][0]) == pytest.approx(1 / norm, rel=1e-5)


@pytest.mark.gloo
def test_buckets_of_all_groups_start_in_the_order_of_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of the second layer are ready before the first layer's other parameters."""
    monkeypatch.setattr(gradient_reduction, "BUCKET_BYTES", 8)
    names = ("embed", "w0", "experts0", "w1", "experts1")
    others, experts = (tuple(n for n in names if ("experts" in n) == routed) for routed in (False, True))
    groups = [ReductionGroup(others, ("lm",), (0, 1)), ReductionGroup(experts, ("lm",), (1, 0))]

    def target(rank: int) -> list[str]:
        dist.init_process_group("gloo")
        params = {n: nn.Parameter(torch.zeros(2)) for n in names}
        reducer = GradientReducer(groups, params, rank, CPU)
        dist.barrier()  # rank 0 has the store that rank 1 joins by
        of = {p: n for n, p in params.items()}
        queue = reducer._queue  # pyright: ignore[reportPrivateUsage]
        return [of[b.params[0]] if hasattr(b, "params") else "presence" for b in queue]  # pyright: ignore

    assert run_ranks(2, target) == [["experts1", "w1", "experts0", "w0", "embed", "presence", "presence"]] * 2


def test_norms_in_one_launch_equal_those_of_blocks() -> None:
    torch.manual_seed(0)
    dtypes = torch.float32, torch.bfloat16, torch.float64, torch.complex64
    gradients = [torch.randn(n, dtype=dtype) for n in (0, 1, 100, 70_000) for dtype in dtypes]
    expected = sum(float(g.abs().double().square().sum()) for g in gradients)
    assert float(_device_norms(gradients).square().sum()) == pytest.approx(expected, rel=1e-5)
