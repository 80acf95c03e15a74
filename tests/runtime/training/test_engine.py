"""The engine on two hand-written sections: in-place writes to received tensors, missing gradients, bad
programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from secc.runtime.comm.p2p_channels import Message, Transport, plan_channels
from secc.runtime.monitoring.chrome_trace import ChromeTrace
from secc.runtime.plan.schema import PLAN_VERSION, Edge, Mesh, ModelRef, Plan, Section, Symbol
from secc.runtime.plan.step_program import SampleMeta, parse_schedule
from secc.runtime.schedule.scheduler import schedule_batch
from secc.runtime.sections.base import Batch, SectionCase, Tensors
from secc.runtime.sections.base import SectionModule as Module
from secc.runtime.training.engine import Engine, StepInput
from tests.runtime.gloo_ranks import run_ranks

pytestmark = pytest.mark.gloo
SAMPLES = [SampleMeta(i, frozenset(), {"B": 1}) for i in range(4)]


def make_plan(src: int, dst: int) -> Plan:
    sections = tuple(
        Section(n, "", "train", (), (), (), Mesh((r,)), 2) for n, r in (("front", src), ("back", dst))
    )
    edges = (Edge("h", "front", "back", "float32", ("B", "3"), 0, "1", True),)
    symbols = (Symbol("B", "rows", "x", 0),)
    return Plan(
        PLAN_VERSION,
        "",
        ModelRef("", ""),
        1 + max(src, dst),
        4,
        "own",
        symbols,
        (),
        sections,
        edges,
        (),
        (),
        {},
        {},
        {},
    )


class Front(Module):
    name = "front"
    cases = (SectionCase("run", sends=("h",)),)

    def __init__(self) -> None:
        super().__init__(nn.Module())
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)

    def run(self, batch: Batch, edges: Tensors) -> tuple[Tensors, Tensors]:
        return {"h": self.layer(batch["x"])}, {}


class Back(Module):
    """`use` turns the received tensor into the numerator of the loss."""

    name = "back"
    cases = (SectionCase("run", receives=("h",), terms=("t",)),)

    def __init__(self, use: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(nn.Module())
        self.use = use

    def run(self, batch: Batch, edges: Tensors) -> tuple[Tensors, Tensors]:
        return {}, {"t": self.use(edges["h"])}


def inputs() -> torch.Tensor:
    return torch.arange(12.0).view(4, 3) / 10


def execute(
    src: int, dst: int, use: Callable[[torch.Tensor], torch.Tensor], debug: bool = False
) -> list[tuple[float, Any]]:
    """Runs a step with coefficient 0.5; returns (share of the loss, gradient of the front weight) by rank."""
    plan = make_plan(src, dst)

    def target(rank: int) -> tuple[float, Any]:
        dist.init_process_group("gloo")
        front, back, cpu = Front(), Back(use), torch.device("cpu")
        held: dict[str, Module] = {
            s.name: m for s, m in zip(plan.sections, (front, back), strict=True) if rank in s.mesh.ranks
        }
        engine = Engine(
            plan, held, Transport(plan, rank, cpu, debug), lambda section: None, ChromeTrace(None, rank, cpu)
        )
        step = StepInput(
            schedule_batch(plan, SAMPLES), SAMPLES, lambda m: {"x": inputs()[list(m.samples)]}, {"t": 0.5}, 0
        )
        return float(engine.run_step(step)), front.layer.weight.grad

    return run_ranks(plan.world_size, target)


def expected(use: Callable[[torch.Tensor], torch.Tensor]) -> tuple[float, torch.Tensor | None]:
    front = Front()
    loss = 0.5 * use(front.layer(inputs()))
    if loss.requires_grad:
        loss.backward()
    return loss.item(), front.layer.weight.grad


def square(h: torch.Tensor) -> torch.Tensor:
    return h.square().sum()


def in_place(h: torch.Tensor) -> torch.Tensor:
    return h.mul_(2.0).relu_().sum()


def detached(h: torch.Tensor) -> torch.Tensor:
    return h.detach().sum()


@pytest.mark.parametrize("use", [square, in_place, detached])
@pytest.mark.parametrize(("src", "dst"), [(0, 0), (0, 1), (1, 0)])
def test_gradients_return_over_edges(src: int, dst: int, use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """On one rank and on two. A loss that does not depend on the edge leaves no gradient instead of zeros."""
    results = execute(src, dst, use)
    loss, gradient = expected(use)
    assert results[dst][0] == pytest.approx(loss, rel=1e-6)
    assert (results[src][1] is None) == (gradient is None)
    if gradient is not None:
        torch.testing.assert_close(results[src][1], gradient)


def test_headers_are_checked() -> None:
    """A receiver that expects other samples rejects the message."""
    plan = make_plan(0, 1)

    def target(rank: int) -> str:
        dist.init_process_group("gloo")
        transport = Transport(plan, rank, torch.device("cpu"), debug=True)
        engine = Engine(
            plan, {}, transport, lambda section: None, ChromeTrace(None, rank, torch.device("cpu"))
        )
        wrong = parse_schedule(SWAPPED) if rank else schedule_batch(plan, SAMPLES)
        engine.sections = {"front": Front(), "back": Back(square)}
        step = StepInput(wrong, SAMPLES, lambda m: {"x": inputs()[list(m.samples)]}, {"t": 0.5}, 0)
        try:
            engine.run_step(step)
        except RuntimeError as error:
            return str(error)
        return ""

    said = run_ranks(2, target)[1]
    assert said == f"the header of {Message('h', 'fwd', (0, 0), 0)} from rank 0 differs in samples and part"


SWAPPED = """
section front
  micro 0 replica 0 samples 0 2
  micro 1 replica 0 samples 1 3
section back
  micro 0 replica 0 samples 0 2
  micro 1 replica 0 samples 1 3
rank 0
rank 1
  RECV h fwd 0>0 from 0
  F back 0
""".strip()


def test_each_direction_has_its_own_group() -> None:
    """Two ranks that send to each other on one communicator could block each other."""
    plan = make_plan(0, 1)
    both = Mesh((0, 1), 2)
    crossed = tuple(Section(s.name, "", "train", (), (), (), both, 2) for s in plan.sections)
    assert plan_channels(plan) == {("h", "fwd", True): [0, 1], ("h", "bwd", False): [0, 1]}
    ways = plan_channels(Plan(**{**vars(plan), "sections": crossed}))
    assert set(ways) == {("h", way, upward) for way in ("fwd", "bwd") for upward in (True, False)}
