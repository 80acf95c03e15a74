"""Pipelines that divide a layer between two stages train as plain PyTorch does, with every other
parallelism."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from secc.driver.compile_options import CompileOptions
from secc.runtime.plan.schema import Plan
from tests.e2e.reference_runs import ReferencedModel

STEPS, GLOBAL_BATCH = 2, 6

CASES = [("llama_odd", 2, "pp=2 micro_batch=2")]
SLOW = [
    ("llama_odd", 4, "pp=2 tp=2 micro_batch=1 backward=split overlap=both"),
    ("llama_odd", 4, "pp=2 tp=2 micro_batch=2 recompute=full"),
    ("llama_odd", 4, "pp=2 tp=2 norms=sequence micro_batch=2"),
    ("llama_odd", 4, "pp=2 cp=2 micro_batch=1 backward=split recompute=full"),
    ("llama_odd", 4, "pp=2 dp=2 sharding=zero3 recompute=selective micro_batch=2"),
    ("llama_odd", 2, "pp=2 offload=optimizer"),
    ("llama_odd", 2, "pp=2 bf16"),
    ("mixture_odd", 2, "pp=2 micro_batch=2 recompute=full"),
    ("mixture_odd", 4, "pp=2 dp=2 ep=2 micro_batch=1"),
    ("mixture_odd", 4, "pp=2 tp=2 micro_batch=1 backward=split"),
]


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ReferencedModel]:
    return cache(lambda name: ReferencedModel(name, tmp_path_factory.mktemp(name), STEPS))


def divided_layers(plan: Plan) -> set[str]:
    """The layers with parts on two stages."""
    stages = [{path.rpartition(".")[0] for path in s.blocks} for s in plan.sections]
    return {layer for a, b in pairwise(stages) for layer in a & b if layer[-1].isdecimal()}


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "ranks", "pins"), CASES + [pytest.param(*row, marks=pytest.mark.slow) for row in SLOW]
)
def test_a_layer_between_two_stages_trains_as_plain_pytorch(
    captured: Callable[[str], ReferencedModel], name: str, ranks: int, pins: str, tmp_path: Path
) -> None:
    wanted = tuple(f"model.{pin}" for pin in pins.split() if "=" in pin)
    wanted += ("model.cp_per=section",) if "cp=" in pins else ()
    dtype = "bf16" if "bf16" in pins.split() else ""
    options = CompileOptions(cluster=f"local:{ranks}", global_batch=GLOBAL_BATCH, set=wanted, dtype=dtype)
    made = captured(name).plan_with(options)
    assert divided_layers(made.plan) and "taken_back" not in made.plan.checks
    assert captured(name).list_differences(made, tmp_path) == []
