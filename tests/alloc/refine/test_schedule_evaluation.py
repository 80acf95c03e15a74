"""The evaluated step of a plan against the simulator's, on the same plan with the same prices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest

from secc.alloc.problem.build_problem import build_problem
from secc.alloc.problem.parameter_update import UpdateTimes, update_times
from secc.alloc.problem.pins import parse_pins
from secc.alloc.problem.section_load import SectionLoad
from secc.alloc.problem.types import Assignment, Problem
from secc.alloc.problem.workload import Workload, build_workload
from secc.alloc.refine import schedule_evaluation
from secc.alloc.refine.prefetch_memory import with_prefetch_buffers
from secc.alloc.refine.schedule_evaluation import Evaluation, EvaluationRequest, PlanEvaluator
from secc.bounds.traffic import Traffic
from secc.cluster import GIB, parse_cluster
from secc.ir.analysis.sample_sizes import SAMPLES_ATTRIBUTE, samples_attr
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io.module_text import parse_module
from secc.runtime.parameters.bucket_limits import BUCKET_BYTES
from secc.runtime.parameters.reduction_times import TimedReduction
from secc.runtime.plan.step_program import SampleMeta, replica_first_ranks
from secc.runtime.schedule.scheduler import find_candidate
from secc.simulate.simulator import simulate
from secc.simulate.steady_state import steady_state_steps
from tests.alloc.explain.test_least_step import staged_problem
from tests.alloc.refine.test_local_search import hand_out_ranks
from tests.simulate.test_clocks import emit_candidate

GROUPS = {"vision": "vision", "lm": "lm"}
# A frozen tower feeds a frozen teacher, that feeds a student.
CHAIN = """
sec.graph "chain" widths "own" {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.symbol "S" kind "width" key "x" dim 1
  sec.pattern when [] share "1.0" {B = 1, S = 24}
  sec.block "tower" class "Tower" params 1000 trainable 0
  sec.block "teacher" class "Teacher" params 1000 trainable 0
  sec.block "student" class "Student" params 1000 trainable 1000
  sec.section "tower" mode "forward" when [] blocks ["tower"]
  sec.section "teacher" mode "forward" when [] blocks ["teacher"]
  sec.section "student" mode "train" when [] blocks ["student"]
  sec.case "all" when [] {
    %x = sec.input "x" : !sec.tensor<[B, S], i64>
    %a = sec.call "tower" (%x) args "$0" outs [""] in @tower {flops = "4000000000*B*S", ops = 4 : i64}
      : !sec.tensor<[B, S, 8], f32>
    %t = sec.call "teacher" (%a) args "$0" outs [""] in @teacher {flops = "8000000000*B*S", ops = 4 : i64}
      : !sec.tensor<[B, S, 8], f32>
    %s = sec.call "student" (%x, %t) args "$0, $1" outs [""] in @student {
      flops = "2000000000*B*S", saved = "32*B*S", ops = 4 : i64} : !sec.tensor<[B, S, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%s) args "$0" in @student : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l) in @student
    sec.return constant "0.0"
  }
}
"""


@pytest.mark.parametrize(
    ("stages", "sharding"),
    [("pp=2", "none"), ("pp=2", "zero1"), ("chunks=2 pp=2", "zero1"), ("placement=v pp=2", "zero1")],
)
def test_the_evaluated_step_is_the_simulated_one(
    stages: str, sharding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are summed within the last backwards of each stage, and the chunks of a rank one after the
    other; messages are free here."""
    work, batch = staged_problem(8)
    pins = [f"lm.{pin}" for pin in (*stages.split(), "dp=2", "tp=1", f"sharding={sharding}")]
    asked = build_problem(work, 8, "apart", parse_pins(pins, work.loads))
    vision = next(i for i, c in enumerate(asked.sections["vision"]) if c.ranks == 4)
    assignment = Assignment({"vision": vision, "lm": 0}, GROUPS)
    assert asked.sections["lm"][0].shape.stages == (2 if stages == "pp=2" else 4)
    evaluated_ns, simulated_ns = evaluate_and_simulate(work, asked, assignment, batch, monkeypatch)
    assert evaluated_ns == simulated_ns


@pytest.mark.parametrize("images", [1, 4, 7])
def test_wide_replicas_sum_gradients_before_sections_that_end_later(
    images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder's last backwards come behind those of the language model, which has replicas of two ranks.
    With few images some ranks have no backward of the encoder."""
    work, batch = staged_problem(8)
    pins = ["lm.pp=1", "lm.tp=2", "lm.dp=4", "lm.sharding=none", "vision.dp=8", "vision.sharding=none"]
    asked = build_problem(work, 8, "colocate", parse_pins(pins, work.loads))
    assignment = Assignment(dict.fromkeys(asked.sections, 0), {"vision": "vision", "lm": "vision"})
    assert asked.sections["lm"][0].width and all(cs[0].ranks == 8 for cs in asked.sections.values())
    with_images = [x for x in batch if x.pattern][:images]
    some = [*with_images, *(x for x in batch if not x.pattern)]
    some = [replace(x, id=i) for i, x in enumerate(some)]
    evaluated_ns, simulated_ns = evaluate_and_simulate(work, asked, assignment, some, monkeypatch)
    assert evaluated_ns == simulated_ns


@pytest.mark.parametrize(("strategy", "between"), [("apart", 1), ("colocate", 2)])
def test_replicas_of_a_stage_are_neighbours_only_on_ranks_of_their_own(
    strategy: str, between: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On shared ranks another section needs their order, so other stages lie between replicas of a stage."""
    work, _ = staged_problem(8)
    ranks = 8 if strategy == "colocate" else 4
    asked = build_problem(work, 8, strategy, parse_pins(["lm.pp=2", "lm.tp=1"], work.loads))
    group = {"vision": "vision", "lm": "vision" if strategy == "colocate" else "lm"}
    vision, lm = (next(i for i, c in enumerate(asked.sections[s]) if c.ranks == ranks) for s in GROUPS)
    seen, price = set[tuple[str, int]](), update_times

    def seen_times(work: Workload, load: SectionLoad, dp: int, sharding: str, stages: int) -> UpdateTimes:
        seen.add((load.name, stages))
        return price(work, load, dp, sharding, stages)

    monkeypatch.setattr(schedule_evaluation, "update_times", seen_times)
    evaluator, assignment = PlanEvaluator(work, asked), Assignment({"vision": vision, "lm": lm}, group)
    evaluator.evaluate_batch(assignment, hand_out_ranks(asked, assignment))
    assert {stages for name, stages in seen if name == "lm"} == {between}
    over_nodes = replace(work, cluster=parse_cluster("2x8xH100"))
    load = over_nodes.rank_load(over_nodes.loads["lm"], asked.sections["lm"][lm].shape)
    near, far = (update_times(over_nodes, load, 8, "none", stages).sums for stages in (1, 2))
    assert near < far


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_prefetching_sections_wait_for_those_that_feed_them(micro_batch: int) -> None:
    """The teacher's forwards for the next step wait for the tower's, in large micro-batches long."""
    graph = graph_of(parse_module(CHAIN))
    listed = [(frozenset[str](), {"B": 1, "S": 8 + 8 * k % 40}) for k in range(16)]
    graph.attributes[SAMPLES_ATTRIBUTE] = samples_attr(["B", "S"], listed)
    work = build_workload(graph, parse_cluster("1x8xH100"), 32)
    sizes = {"tower": (2, micro_batch), "teacher": (4, 1), "student": (2, 1)}
    pins = [f"{name}.{pin}" for name, (dp, n) in sizes.items() for pin in (f"dp={dp}", f"micro_batch={n}")]
    asked = build_problem(work, 8, "apart", parse_pins([*pins, "student.sharding=none"], work.loads))
    asked = with_prefetch_buffers(asked, work, GIB)
    assignment = Assignment(dict.fromkeys(asked.sections, 0), {name: name for name in asked.sections})
    evaluator, ranks = PlanEvaluator(work, asked, GIB), hand_out_ranks(asked, assignment)
    evaluator.message_ns = {}
    (batch, *_), chosen = evaluator.batches, {name: cs[0] for name, cs in asked.sections.items()}
    plan = evaluator._build_plan(assignment, chosen, ranks)
    samples, schedule = next(iter(steady_state_steps(plan, [batch])))
    assert schedule.prefetched.keys() == {"tower", "teacher"}
    evaluated_ns = evaluator.evaluate_batch(assignment, ranks).time_ns
    ends_ns = evaluated_ns - work.cluster.device.overheads.step_ns(len(batch))
    # Without parameters in the plan the simulation has no optimizer.
    assert ends_ns == pytest.approx(simulate(plan, samples, schedule).end, abs=10_000)


def evaluate_and_simulate(
    work: Workload,
    asked: Problem,
    assignment: Assignment,
    batch: Sequence[SampleMeta],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[int, int]:
    """Returns the step of a plan in ns as it is evaluated and as it is simulated, without messages."""
    evaluator = PlanEvaluator(work, asked)
    evaluator.batches = [batch]
    evaluator.message_ns = {}
    monkeypatch.setattr(PlanEvaluator, "_stage_message_ns", lambda *_: 0)
    chosen = {s: cs[assignment.choice[s]] for s, cs in asked.sections.items()}
    plan = evaluator._build_plan(assignment, chosen, hand_out_ranks(asked, assignment))
    traffic, optimizer_ns, reductions = Traffic(plan), Counter[int](), list[TimedReduction]()
    for s in plan.sections:
        c = chosen[s.user_section_name]
        load = work.rank_load(work.loads[s.user_section_name], c.shape, stage=s.stage)
        update = update_times(work, load, c.dp, c.sharding)
        sums, gathers = update.sums // c.chunks, update.gathers // c.chunks
        ranks = tuple(replica_first_ranks(s))
        share = min(Fraction(1), Fraction(BUCKET_BYTES * c.chunks, load.cost.trainable_bytes))
        if sums or gathers:
            reductions.append(TimedReduction((s.name,), ranks, sums, gathers, share, update.open_share))
        optimizer_ns.update(dict.fromkeys(ranks, update.optimizer // c.chunks))
    assert reductions
    traffic.__dict__["timed_reductions"] = reductions
    monkeypatch.setattr(Traffic, "optimizer_ns", lambda _, rank: optimizer_ns[rank])
    step = simulate(plan, batch, emit_candidate(find_candidate(plan, batch)), traffic)
    evaluated = evaluator.evaluate_batch(assignment, hand_out_ranks(asked, assignment))
    return evaluated.time_ns - work.cluster.device.overheads.step_ns(len(batch)), step.end


def test_a_plan_is_evaluated_once_in_all_problems_of_the_same_work() -> None:
    """Candidates may have other numbers in another problem; with another price they are other plans."""
    work, _ = staged_problem(8)
    asked = build_problem(work, 8, "apart", parse_pins(["lm.pp=2", "lm.tp=1"], work.loads))
    evaluated: list[EvaluationRequest] = []

    def evaluate(requests: Sequence[EvaluationRequest]) -> list[Evaluation]:
        evaluated.extend(requests)
        return [Evaluation(1000 + len(evaluated), True, 1)] * len(requests)

    plan = Assignment({"vision": 0, "lm": 1}, GROUPS)
    ranks = {"vision": [6, 7], "lm": [*range(6)]}
    first = PlanEvaluator(work, asked)
    known = first.evaluate_once([(plan, ranks, None), (plan, ranks, 0)], evaluate)
    assert len(evaluated) == 2
    turned = replace(asked, sections={s: cs[::-1] for s, cs in asked.sections.items()})
    same = Assignment(
        {"vision": len(asked.sections["vision"]) - 1, "lm": len(asked.sections["lm"]) - 2}, GROUPS
    )
    second = PlanEvaluator(work, turned, known=first.known)
    assert (
        second.evaluate_once([(same, ranks, None), (same, ranks, 0)], evaluate) == known
        and len(evaluated) == 2
    )
    assert second.evaluate_once([(same, ranks, 1)], evaluate) != known[1:] and len(evaluated) == 3
    lm = asked.sections["lm"]
    dearer = (lm[0], replace(lm[1], time_ns=2 * lm[1].time_ns), *lm[2:])
    third = PlanEvaluator(work, replace(asked, sections={**asked.sections, "lm": dearer}), known=first.known)
    third.evaluate_once([(plan, ranks, 0)], evaluate)
    assert len(evaluated) == 4
