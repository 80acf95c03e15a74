"""Baselines: whatever they pack and in whatever order, the checks accept it and every sample passes; the
command names each one's best."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from secc.alloc.problem.types import Candidate
from secc.alloc.problem.workload import build_workload
from secc.baselines.compare import BaselineComparison, describe_layout, peak_rank_bytes, simulate_step
from secc.baselines.layout import BaselineContext, BaselineLayout, SectionLayout, plan_from_layout
from secc.baselines.layout_bound import layout_lower_bound
from secc.baselines.packing import (
    BaselineBatch,
    cut_micro_batches,
    pack_dataset_order,
    pack_first_fit,
    pack_largest_first,
    pack_stratified,
)
from secc.baselines.schemes import SCHEMES, BaselineScheme
from secc.baselines.search_space import BaselineSpace
from secc.bounds.bounds import schedule_bound
from secc.bounds.traffic import Traffic
from secc.cli import main
from secc.cluster import parse_cluster
from secc.cost.model.memory import RankMemory
from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.schedule.scheduler import FixedSchedule
from secc.simulate.global_batches import load_global_batches
from tests.alloc.mixture_graph import mixture_graph
from tests.alloc.problem.test_row_parts import LONG, SHORT
from tests.alloc.problem.test_row_parts import build_long_workload as long_workload
from tests.runtime.schedule.plan_strategies import (
    make_plan,
    make_sample,
    make_section,
    make_stages,
    random_batches,
    random_plans,
    stage_edges,
)
from tests.simulate.test_simulator import IMAGE, cluster, vlm

MODEL = Path(__file__).parent.parent / "models" / "llava_tiny.py"


def layout(samples, ahead=()):
    return BaselineLayout({}, samples, frozenset(ahead))


def packed(p):
    """The plan without a limit on the samples of a micro-batch, as baselines have it, and on a cluster."""
    return dataclasses.replace(
        p,
        sections=tuple(dataclasses.replace(s, micro_batch=99) for s in p.sections),
        cluster=cluster(latency=30),
    )


@given(
    random_plans(),
    random_batches,
    st.sampled_from(sorted(SCHEMES)),
    st.integers(1, 4),
    st.sets(st.integers(0, 3)),
)
@settings(max_examples=100, deadline=None)
def test_every_order_gives_a_valid_step_that_is_no_shorter_than_its_bound(p, samples, name, size, ahead):
    p = packed(p)
    found = simulate_step(
        p, samples, SCHEMES[name], layout(size, (f"s{i}" for i in ahead))
    )  # refuses a schedule that is not valid
    assert schedule_bound(p, samples).ns <= found.end


@given(
    random_plans(),
    random_batches,
    st.sampled_from([pack_dataset_order, pack_largest_first, pack_stratified]),
    st.integers(1, 4),
)
@settings(max_examples=100, deadline=None)
def test_every_sample_passes_each_of_its_sections_once(p, samples, order, size):
    assume(samples)
    batch = BaselineBatch(packed(p), samples)
    for name, cut in cut_micro_batches(batch, order, size).items():
        assert sorted(position for _, lot in cut for position in lot) == batch.active_positions(name)
        assert all(lot and 0 <= replica < batch.replica_count(name) for replica, lot in cut)


@given(random_plans(), random_batches, st.sampled_from(sorted(SCHEMES)), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_no_order_is_shorter_than_the_layout_bound(p, samples, name, size):
    p, order = packed(p), SCHEMES[name].order
    cut = cut_micro_batches(BaselineBatch(p, samples), order, size)
    assert layout_lower_bound(p, PredictedCosts(p, samples), cut) <= FixedSchedule(p, samples, cut).makespan


def test_the_layout_bound_counts_earlier_stages():
    """Two micro-batches of 10 and 20 in three stages: the last one waits for twice 10, and its backwards are
    followed by twice 20."""
    lm = make_stages("lm", [[0], [1], [2]], forward="S", backward="2*S")
    p = packed(make_plan(lm, stage_edges(lm), 3))
    samples = [make_sample(0, length=10), make_sample(1, length=20)]
    assert (
        layout_lower_bound(p, PredictedCosts(p, samples), {"lm": [(0, (0,)), (0, (1,))]})
        == 3 * (10 + 20) + 2 * 10 + 2 * 20
    )


def test_first_fit_fills_what_is_open_before_it_opens_more():
    assert pack_first_fit(range(5), [4, 3, 2, 9, 1], 6) == [[0, 2], [1, 4], [3]]


def test_the_smallest_micro_batches_come_first_and_last():
    p = packed(make_plan([make_section("lm", [0], forward="10*S", backward="0")], [], 1))
    lots, _ = pack_largest_first(
        BaselineBatch(p, [make_sample(i, length=n) for i, n in enumerate((30, 10, 20))]), 1
    )
    assert lots == [[[1], [2], [0]]]


def test_excess_samples_are_deferred_to_lighter_micro_batches():
    samples = [
        make_sample(0, *IMAGE, images=4),
        make_sample(1),
        make_sample(2),
        make_sample(3, *IMAGE, images=4),
    ]
    p = packed(vlm())
    deferred, lots = pack_stratified(BaselineBatch(p, samples), 2)
    assert sorted(len([s for s in lot if s in (0, 3)]) for lot in lots[0]) == [1, 1]  # encoder work is level
    assert max(map(len, deferred[0])) <= 2 and sorted(s for lot in deferred[0] for s in lot) == [0, 1, 2, 3]


def with_room(p, space, **room):
    """The plan with as many bytes on a rank for what micro-batches keep: one for each place of the longest
    sample."""
    cost = dataclasses.replace(p.sections[0].cost, saved="S")
    return dataclasses.replace(
        p, sections=tuple(dataclasses.replace(s, cost=cost, room_bytes=space, **room) for s in p.sections)
    )


def test_micro_batches_of_several_samples_fit_the_in_flight_bytes():
    p = with_room(packed(make_plan([make_section("lm", [0], forward="10*S", backward="10*S")], [], 1)), 25)
    samples = [make_sample(i, length=n) for i, n in enumerate((20, 10, 20, 40))]
    assert [lot for _, lot in cut_micro_batches(BaselineBatch(p, samples), pack_dataset_order, 99)["lm"]] == [
        (0, 1),
        (2,),
        (3,),
    ]  # the last is too large even alone


@pytest.mark.parametrize(("space", "held"), [(99, 10 + 20 + 30), (45, 10 + 20)])
def test_the_fullest_rank_has_fixed_memory_and_the_most_in_flight(space, held):
    p = with_room(packed(vlm()), space, in_flight=9)
    samples = [make_sample(i, *IMAGE, length=10 * (i + 1)) for i in range(3)]
    one = on_one(p)
    assert peak_rank_bytes(simulate_step(p, samples, SCHEMES["uniform"], one), one) == 1100 + held


@pytest.mark.parametrize(("alone", "held"), [(1, 12 + 10 + 12), (9, 40)])
def test_a_sample_larger_than_all_listed_counts_as_the_largest_listed(alone, held):
    p = with_room(packed(vlm()), 99, in_flight=9)
    samples = [make_sample(i, *IMAGE, length=n) for i, n in enumerate((40, 10, 20))]
    one = on_one(p, alone, largest=12)
    assert peak_rank_bytes(simulate_step(p, samples, SCHEMES["uniform"], one), one) == 1100 + held


def on_one(p, samples=1, largest=0):
    """A layout of the plan's sections on their ranks."""
    memory = RankMemory(parameters=1000, gradients=100, optimizer=0, activation=50, largest_sample=largest)
    return BaselineLayout(
        {s.name: SectionLayout(Candidate(1, 1, 0), s.mesh.ranks, memory) for s in p.sections}, samples
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan with the sections apart on four ranks."""
    path = tmp_path_factory.mktemp("plan") / "plan"
    compile_model(MODEL, CompileOptions(cluster="local:4", strategy="apart")).write_plan(
        path, lambda plan: ""
    )
    return path


def bytes_at_limit(p, layout, rank):
    """Bytes on a rank if the micro-batches in flight use their whole in-flight budget."""
    total = 0
    for s in (s for s in p.sections if rank in s.mesh.ranks):
        part = layout.sections[s.user_section_name]
        counted = part.counted_in_flight(s.stage)
        budget_left = max(0, s.room_bytes - part.memory.activation_bytes(counted))
        total += part.memory.total_bytes(counted) + budget_left
    return total


def test_every_layout_of_every_baseline_runs_on_the_same_devices(directory):
    own, comparison = load_plan(directory), BaselineComparison(directory)
    samples = next(load_global_batches(directory, own))
    anchor = BaselineBatch(comparison.base.plan, samples).anchor
    assert anchor == "language_model"
    for name, scheme in SCHEMES.items():
        layouts = scheme.layouts(comparison.space, anchor)
        assert layouts, name
        for one in layouts:
            p = plan_from_layout(comparison.base, one)
            assert (
                max(bytes_at_limit(p, one, rank) for rank in range(p.world_size)) <= comparison.space.capacity
            )
            assert p.world_size <= own.world_size and {s.user_section_name for s in p.sections} == {
                s.user_section_name for s in own.sections
            }
            assert (
                schedule_bound(p, samples).ns
                <= simulate_step(p, samples, BaselineScheme(scheme.layouts, scheme.order), one).end
            )


def test_layouts_are_simulated_until_one_fits(directory, monkeypatch):
    comparison = BaselineComparison(directory)
    samples = next(load_global_batches(directory, load_plan(directory)))
    scheme, real = SCHEMES["uniform"], BaselineComparison._simulate_if_fits
    layouts = scheme.layouts(comparison.space, BaselineBatch(comparison.base.plan, samples).anchor)
    monkeypatch.setattr("secc.baselines.compare.SIMULATED_AT_ONCE", 1)
    shortest = layouts[comparison._rank_by_order(layouts, scheme, samples)[0]]
    monkeypatch.setattr(
        BaselineComparison,
        "_simulate_if_fits",
        lambda self, layout, *rest: None if layout == shortest else real(self, layout, *rest),
    )
    found = comparison.find_best("uniform", [samples])
    assert found.step_time_s is not None and found.layout != describe_layout(shortest)


def test_the_command_prints_each_baseline(directory, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(directory), "--json", "--baselines", "all"])
    assert ended.value.code in (0, None)
    found = json.loads(capsys.readouterr().out)["baselines"]
    assert list(found) == list(SCHEMES)
    assert all(b["step_time_s"] > 0 and 1 <= b["gpus"] <= 4 for b in found.values())


def test_an_unknown_baseline_is_named(directory, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(directory), "--baselines", "uniform,other"])
    assert ended.value.code == 2
    assert "expected names of baselines, got 'other'" in capsys.readouterr().err


def test_layouts_have_experts_in_parts_that_exist_once_in_a_group():
    """24e9 parameters of experts with their states fit eight devices only in parts."""
    table = {"lm.mlp.experts": "bfloat16[64, 2048, 768] train", "lm.q": "bfloat16[64, 2048] train"}
    section = dataclasses.replace(make_section("lm", [0]), params=tuple(table))
    plan = make_plan([section], [], 1)
    plan = dataclasses.replace(plan, model=dataclasses.replace(plan.model, parameters=table), global_batch=64)
    nodes = parse_cluster("1x8xH100")
    work = build_workload(mixture_graph(24_000_000_000), nodes, 64)
    base = BaselineContext(dataclasses.replace(plan, cluster=dataclasses.asdict(nodes)), work, 8, frozenset())
    for scheme in ("uniform", "mimo"):
        layouts = SCHEMES[scheme].layouts(BaselineSpace(base), "lm")
        found = next(part for part in layouts if part.sections["lm"].chosen.ep == 8)
        made = plan_from_layout(base, found)
        c, traffic = found.sections["lm"].chosen, Traffic(made)
        assert 8 % c.tp == 0 and {s.mesh.ep for s in made.sections} == {8}
        assert "ep8" in describe_layout(found)
        assert traffic.bytes_on_rank("lm.mlp.experts") == 64 * 2048 * 768 * 2 // 8
        assert {g.names: len(g.ranks) for g in traffic.reduction_groups} == {
            ("lm.q",): c.dp,
            ("lm.mlp.experts",): c.dp * c.tp // 8,
        }


def test_layouts_divide_rows_where_samples_are_long():
    """A sample of 128k tokens keeps 262 GB, and 30 GB of keys and values where these are gathered:
    without recomputation, devices of 80 GiB hold it from cp 8 on."""
    work, plan = long_workload(LONG), make_plan([make_section("lm", [0], forward="S", backward="S")], [], 1)
    plan = dataclasses.replace(plan, global_batch=64, cluster=dataclasses.asdict(work.cluster))
    base = BaselineContext(plan, work, 8, frozenset())
    samples = [make_sample(i, length=100 + i) for i in range(64)]
    for scheme, expected in (("uniform", {2, 4, 8}), ("mimo", {8})):
        layouts = SCHEMES[scheme].layouts(BaselineSpace(base), "lm")
        degrees = {part.sections["lm"].chosen.cp for part in layouts}
        assert degrees == expected
        for part in layouts[:3]:
            made, c = plan_from_layout(base, part), part.sections["lm"].chosen
            assert {(s.mesh.cp, s.mesh.dp) for s in made.sections} == {(c.cp, c.dp)}
            assert f"cp{c.cp}" in describe_layout(part)
            assert schedule_bound(made, samples).ns <= simulate_step(made, samples, SCHEMES[scheme], part).end
    short = BaselineSpace(dataclasses.replace(base, work=long_workload(SHORT)))
    assert {part.sections["lm"].chosen.cp for part in SCHEMES["mimo"].layouts(short, "lm")} == {1}
