"""More short samples in a micro-batch than memory was counted for mean ones, by the scheduled step."""

from __future__ import annotations

import pytest

from secc.alloc.problem.candidate_memory import candidate_memory
from secc.alloc.problem.candidates import with_sample_limit
from secc.alloc.problem.pins import Pins, parse_pins
from secc.alloc.refine import sample_limits
from secc.alloc.refine.sample_limits import raise_sample_limits
from secc.errors import UserError
from tests.alloc.refine.test_larger_micro_batches import mixture_plan

PLAN = ("lm.micro_batch=1",)


def test_limits_that_make_the_step_shorter_are_taken() -> None:
    evaluator, won, ranks = mixture_plan(*PLAN)
    found = raise_sample_limits(evaluator, won, ranks, Pins())
    limited, before = (p.sections["vision"][0] for p in (found.problem, evaluator.problem))
    assert (limited.micro_batch, limited.time_ns) == (before.micro_batch, before.time_ns)
    steps = found.step_ns["vision"]
    assert [*steps] == [1 << i for i in range(len(steps))] and [*steps][-1] == limited.most_samples > 1
    assert list(steps.values()) == sorted(steps.values(), reverse=True)
    assert steps[1] == won.evaluation.time_ns and found.refined.evaluation.fits
    assert found.refined.evaluation.time_ns == min(min(by.values()) for by in found.step_ns.values())


def test_a_pinned_limit_is_priced_as_one_that_was_found() -> None:
    evaluator, won, ranks = mixture_plan(*PLAN)
    found = raise_sample_limits(evaluator, won, ranks, Pins())
    limits = [f"{s}.most_samples={cs[0].most_samples}" for s, cs in found.problem.sections.items()]
    pinned, same, _ = mixture_plan(*PLAN, *limits)
    assert same.evaluation.time_ns == found.refined.evaluation.time_ns
    for name, (c, *_) in pinned.problem.sections.items():
        own = found.problem.sections[name][0]
        assert (own.most_samples, own.memory, own.memory_ahead) == (c.most_samples, c.memory, c.memory_ahead)
    with pytest.raises(UserError, match=r"lm\.most_samples=1 is impossible with lm\.micro_batch=2"):
        mixture_plan("lm.micro_batch=2", "lm.most_samples=1")


def test_what_passes_need_for_a_time_is_that_of_as_many_samples() -> None:
    evaluator, _, _ = mixture_plan(*PLAN)
    c, work = evaluator.problem.sections["lm"][0], evaluator.work
    load = work.rank_load(work.loads["lm"], c.shape)
    limited = with_sample_limit(work, load, c, 8)
    before, after = (candidate_memory(work, load, one) for one in (c, limited))
    assert after.activation == before.activation and after.working >= before.working
    assert limited.memory - c.memory == max(0, after.total_bytes(1) - before.total_bytes(1))


@pytest.mark.parametrize("pin", ["micro_batch=1", "most_samples=1"])
def test_pinned_sections_stay_as_they_are(pin: str) -> None:
    evaluator, won, ranks = mixture_plan(*PLAN)
    pins = parse_pins([f"{s}.{pin}" for s in ("vision", "lm")], ["vision", "lm"])
    found = raise_sample_limits(evaluator, won, ranks, pins)
    assert found.step_ns == {} and found.refined == won and found.problem is evaluator.problem


def test_limits_that_save_too_little_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_limits, "STEP_RESOLUTION", 1)  # a step has to be half as long
    evaluator, won, ranks = mixture_plan(*PLAN)
    assert raise_sample_limits(evaluator, won, ranks, Pins()).step_ns == {}
