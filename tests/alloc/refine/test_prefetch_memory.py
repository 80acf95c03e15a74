"""Memory to run ahead with: what plans give it, and what it takes from the rest."""

from __future__ import annotations

import json

import pytest

from secc.alloc.refine.prefetch_memory import PREFETCHED_PER_CONSUMER
from secc.codegen.plan_builder import attribute_value
from secc.errors import UserError
from secc.ir.dialect.ops import graph_of
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
