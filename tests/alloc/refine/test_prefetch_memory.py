"""Memory to run ahead with: what plans give it, and what it takes from the rest."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from secc.alloc.problem.build_problem import build_problem
from secc.alloc.problem.pins import Pins
from secc.alloc.problem.workload import build_workload
from secc.alloc.refine.prefetch_memory import PREFETCHED_PER_CONSUMER, with_prefetch_buffers
from secc.cluster import parse_cluster
from secc.codegen.plan_builder import attribute_value
from secc.errors import UserError
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io.module_text import parse_module
from tests.alloc.test_allocate import VLM, allocate_model, prediction, section_attribute

FROZEN = (
    VLM.read_text()
    .replace('class "Vision" params 600000 trainable 600000', 'class "Vision" params 600000 trainable 0')
    .replace('"vision" mode "train"', '"vision" mode "forward"')
)
GIB = 1 << 30


def run_ahead_gib(module) -> float:
    return attribute_value(graph_of(module), "run_ahead_gib", 0.0)


def test_a_frozen_section_on_its_own_ranks_gets_prefetch_memory() -> None:
    pins = ("vision.dp=1", "lm.dp=2", "vision.micro_batch=1", "lm.micro_batch=2")
    module = allocate_model(FROZEN, strategy="apart", set=pins)
    features = 16 * 64 * 4  # of a sample, which has one image
    assert run_ahead_gib(module) == (PREFETCHED_PER_CONSUMER + 1) * 2 * 2 * features / GIB
    assert run_ahead_gib(allocate_model(FROZEN, strategy="apart", set=pins, run_ahead="0")) == 0
    assert run_ahead_gib(allocate_model(FROZEN, strategy="colocate")) == 0
    assert run_ahead_gib(allocate_model(strategy="apart")) == 0


def test_consumers_do_not_wait_for_prefetched_results() -> None:
    always = FROZEN.replace(
        'when [] share "0.5"', 'when [] share "0.0"'
    )  # no text to train on until the first images are encoded
    pins = ("vision.dp=1", "lm.dp=2", "vision.micro_batch=1", "lm.micro_batch=2")
    found = [allocate_model(always, strategy="apart", run_ahead=text, set=pins) for text in ("auto", "0")]
    times = [prediction(module)["step_time_s"] for module in found]
    simulated = [
        json.loads(attribute_value(graph_of(module), "solver", "{}"))["simulated_s"] for module in found
    ]
    assert simulated[0] < simulated[1]
    assert times[0] < times[1]


def test_closed_forms_count_the_wait_where_no_memory_is_left_for_results() -> None:
    work = build_workload(graph_of(parse_module(FROZEN)), parse_cluster("1x3xcpu"), 16)
    asked = build_problem(work, 3, "apart", Pins())
    (edge,) = asked.edges
    vision, features = asked.sections["vision"], 2 * 16 * 64 * 4  # of two samples, which have one image each

    def waits(capacity: int, size: int | None) -> list[int]:
        ahead = with_prefetch_buffers(replace(asked, capacity=capacity), work, size)
        columns = zip(edge.latency_ns, ahead.edges[0].latency_ns, vision, strict=True)
        return [after - (before - c.fill_ns) for before, after, c in columns]

    needed = [
        c.memory_ahead + b + features * c.micro_batch for c, b in zip(vision, edge.sent_bytes, strict=True)
    ]
    fills = [c.fill_ns for c in vision]
    assert waits(max(needed), None) == waits(0, 1) == [0] * len(vision)
    assert waits(min(needed) - 1, None) == fills and min(fills) > 0
    assert waits(needed[0], None)[0] == 0 and waits(needed[0] - 1, None)[0] == fills[0]


def test_requested_prefetch_memory_counts_in_the_plan() -> None:
    plain, more = (allocate_model(FROZEN, strategy="apart", run_ahead=text) for text in ("0", "0.5"))
    assert section_attribute(more, "vision", "memory_gib") == pytest.approx(
        section_attribute(plain, "vision", "memory_gib") + 0.5, abs=1e-3
    )
    assert section_attribute(more, "lm", "memory_gib") == section_attribute(plain, "lm", "memory_gib")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (FROZEN, {"run_ahead": "much"}, "expected a number of GiB"),
        (FROZEN, {"run_ahead": "-1"}, "expected a number of GiB"),
        ("", {"run_ahead": "1"}, "no section can run ahead"),
        (FROZEN, {"run_ahead": "1", "strategy": "colocate"}, "shares ranks with a section that trains"),
    ],
)
def test_impossible_run_ahead_is_refused(source: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        allocate_model(source, **options)
