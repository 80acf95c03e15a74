"""The simulator executes programs as ranks do: computed by hand where that is easy, like the order's own
timeline, above the bounds."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secc.bounds import traffic as traffic_module
from secc.bounds.bounds import schedule_bound
from secc.bounds.traffic import Traffic
from secc.cluster import parse_cluster
from secc.cost.model.roofline import OPTIMIZER_MEMORY_PASSES
from secc.runtime.plan.schema import ModelRef, Shard
from secc.runtime.schedule.scheduler import schedule_batch, schedule_with_makespan
from secc.runtime.validation.full_check import ScheduleError
from secc.simulate.simulator import simulate
from secc.simulate.step_measures import find_busiest_rank, in_flight_over_time, measure_step, memory_over_time
from tests.runtime.schedule.plan_strategies import (
    make_edge,
    make_plan,
    make_sample,
    make_section,
    random_batches,
    random_plans,
)

IMAGE = ("images",)
ROW = 32  # bytes of a sample's row on the edges of these plans


def cluster(latency=10, gb_s=1, per_node=8, **overheads):
    link = {"latency_ns": latency, "bytes_per_s": gb_s * 10**9}
    device = {
        "kind": "cpu",
        "backend": "cpu",
        "gflops": [["f32", 20]],
        "memory": 1 << 40,
        "memory_bytes_per_s": 10**9,
        "efficiency_percent": 50,
        "op_ns": 1,
        "reserved": 0,
        "label": "default",
        "overheads": overheads,
    }
    far = {"latency_ns": 10 * latency, "bytes_per_s": gb_s * 10**9}
    return {
        "name": "test",
        "nodes": 4,
        "per_node": per_node,
        "inside": link,
        "between": far,
        "device": device,
    }


def vlm(encoders=1, replicas=1, mode="train", **kwargs):
    """An encoder of 100 ns forward an image, and a language model of 50 ns forward a sample; backwards take
    twice as long."""
    vision = make_section("vision", range(encoders), when=IMAGE, mode=mode, forward="100*B", backward="200*B")
    lm = make_section("lm", range(encoders, encoders + replicas), forward="50*B", backward="100*B")
    return dataclasses.replace(
        make_plan([vision, lm], [make_edge("vision", "lm", grad=mode == "train")], encoders + replicas),
        **kwargs,
    )


def trained(p, **params):
    """The plan with one parameter for each section named, of so many float32 entries."""
    sections = tuple(
        dataclasses.replace(s, params=(f"{s.name}.w",)) if s.name in params else s for s in p.sections
    )
    table = {f"{name}.w": f"float32[{n}] train" for name, n in params.items()}
    return dataclasses.replace(p, sections=sections, model=ModelRef("", "", table))


def run(p, samples, order="wavefront"):
    return simulate(p, samples, schedule_batch(p, samples, order=order))


@pytest.mark.parametrize(
    ("sharding", "messages", "updated"), [("none", 2, 1000), ("zero1", 4 + 1, 500), ("zero3", 0, 500)]
)
def test_sharded_optimizers_sum_gather_and_update_their_parts(sharding, messages, updated):
    """gloo's reduce-scatter takes four messages of half of the bytes over two ranks, the all-gather one;
    under zero3 passes have both."""
    p = trained(vlm(replicas=2, cluster=cluster(tensor=0)), lm=1000)
    p = dataclasses.replace(
        p,
        sections=tuple(
            dataclasses.replace(s, sharding=sharding) if s.name == "lm" else s for s in p.sections
        ),
    )
    traffic = Traffic(p)
    (found,) = traffic.timed_reductions
    assert found.sum_ns + found.gather_ns == messages * traffic.cluster.inside.message_ns(2000)
    assert traffic.optimizer_ns(1) == OPTIMIZER_MEMORY_PASSES * 4 * updated


@pytest.mark.parametrize(
    ("stored", "computes_in", "moved"),
    [("bfloat16", "", 7 * 2), ("float32", "bf16", 7 * 4 + 2), ("float32", "", 7 * 4)],
)
def test_gradients_are_summed_in_float32_and_parameters_gathered_as_modules_have_them(
    stored, computes_in, moved
):
    """Masters are updated in float32 and rounded; a model of 16 bits updates its own parameters."""
    gathered = 4 if (stored, computes_in) == ("float32", "") else 2
    p = dataclasses.replace(vlm(replicas=2, cluster=cluster(tensor=0)), dtype=computes_in)
    p = dataclasses.replace(trained(p, lm=1000), model=ModelRef("", "", {"lm.w": f"{stored}[1000] train"}))
    traffic = Traffic(p)
    (held,), message = traffic.reduction_groups, traffic.cluster.inside.message_ns
    assert (traffic.sum_ns(held), traffic.gather_ns(held)) == (2 * message(2000), 0)
    held = dataclasses.replace(held, sharding="zero1")
    assert (traffic.sum_ns(held), traffic.gather_ns(held)) == (4 * message(2000), message(500 * gathered))
    assert traffic.optimizer_ns(1) == 1000 * moved


@pytest.mark.parametrize(
    ("units", "hidden"),
    [(("lm.embed", "lm.layers.0", "lm.layers.1"), 2), (("lm",), 2), (("lm.embed",), 0)],
    ids=["stage", "whole", "outside"],
)
def test_a_forward_hides_gathers_of_all_layers_but_one(units, hidden):
    """Of four equal parameters: an embedding, a norm, and two layers, that are blocks of a stage or lie in
    the section's block."""
    p = dataclasses.replace(vlm(replicas=2), cluster=json.loads(parse_cluster("1x4xH100").to_json()))
    names = ("lm.embed.weight", "lm.norm.weight", "lm.layers.0.up.weight", "lm.layers.1.up.weight")
    lm = dataclasses.replace(p.sections[1], params=names, units=units, sharding="zero1")
    table = {name: "float32[1000] train" for name in names}
    p = dataclasses.replace(p, sections=(p.sections[0], lm), model=ModelRef("", "", table))
    (found,) = Traffic(p).timed_reductions
    assert found.open_share == Fraction(4 - max(0, hidden - 1), 4)


@given(random_plans(), random_batches, st.sampled_from(["wavefront", "dataset"]))
@settings(max_examples=100)
def test_without_a_cluster_a_step_takes_the_makespan(p, samples, order):
    programs, makespan = schedule_with_makespan(p, samples, order=order)
    end = simulate(p, samples, programs).end
    # A forward that got room only because nothing else could run starts sooner than the order thinks:
    # programs do not wait for room.
    assert end == makespan or (end < makespan and any(s.in_flight for s in p.sections))


def test_zero3_replicas_take_the_longest_forward_and_backward():
    """One job does both in the last section, and no micro-batch is the longest in both."""
    p = make_plan(
        [make_section("lm", [0, 1], micro_batch=2, sharding="zero3", forward="7*B", backward="5*I + 3*S")],
        [],
        2,
    )
    samples = [make_sample(0, length=1), make_sample(1, length=1), make_sample(2, *IMAGE, length=1)]
    programs, makespan = schedule_with_makespan(p, samples)
    assert simulate(p, samples, programs).end == makespan == 14 + 8


@given(random_plans(), random_batches, st.sampled_from(["wavefront", "dataset"]), st.integers(1, 5))
@settings(max_examples=100)
def test_no_step_with_messages_is_shorter_than_its_bound(p, samples, order, per_node):
    p = dataclasses.replace(p, cluster=cluster(latency=30, per_node=per_node))
    assert schedule_bound(p, samples).ns <= run(p, samples, order).end


@given(random_plans(), random_batches)
@settings(max_examples=50)
def test_a_rank_does_one_thing_at_a_time_and_everything_once(p, samples):
    step = run(dataclasses.replace(p, cluster=cluster()), samples)
    for rank in range(p.world_size):
        mine = sorted((c for c in step.compute if c.rank == rank), key=lambda c: (c.start, c.end))
        assert all(a.end <= b.start for a, b in pairwise(mine))
        assert all(c.free_at <= c.in_transit_from <= c.start <= c.end for c in mine)
    done = [(c.rank, c.kind, c.section, c.micro) for c in step.compute]
    assert (
        len(set(done))
        == len(done)
        == sum(i.kind in ("F", "B", "W") for program in step.schedule.programs for i in program)
    )


def test_a_message_takes_its_latency_and_its_bytes():
    step = run(vlm(cluster=cluster()), [make_sample(0, *IMAGE)])
    wait, back = 10 + ROW, 10 + ROW + 4  # a gradient is followed by a flag
    assert [(c.kind, c.section, c.start) for c in step.compute] == [
        ("F", "vision", 0),
        ("F", "lm", 100 + wait),
        ("B", "lm", 150 + wait),
        ("B", "vision", 250 + wait + back),
    ]
    assert step.end == 450 + wait + back
    assert [(t.direction, t.src, t.dst, t.size) for t in step.transfers] == [
        ("fwd", 0, 1, ROW),
        ("bwd", 1, 0, ROW + 4),
    ]


def test_messages_of_one_sender_share_its_link():
    """Two images are ready at once and go to two ranks: the second waits until the first has left the
    sender."""
    p = vlm(replicas=2, mode="forward", cluster=cluster())
    p = dataclasses.replace(p, sections=(dataclasses.replace(p.sections[0], micro_batch=2), p.sections[1]))
    step = run(p, [make_sample(0, *IMAGE), make_sample(1, *IMAGE)])
    assert sorted((t.start, t.end) for t in step.transfers) == [
        (100 * 2, 210 + ROW),
        (200 + ROW, 210 + 2 * ROW),
    ]


def test_overheads_of_ranks_take_time():
    """A sender is busy with its message before it moves, the optimizer with each tensor, a step with each
    sample of its batch."""
    samples = [make_sample(0, *IMAGE)]
    p = trained(vlm(cluster=cluster()), lm=4)
    plain = run(p, samples).end
    assert (
        run(dataclasses.replace(p, cluster=cluster(message=7)), samples).end == plain + 2 * 7
    )  # there, and back
    assert run(dataclasses.replace(p, cluster=cluster(tensor=5)), samples).end == plain + 5
    busier = dataclasses.replace(p, cluster=cluster(step=1000, sample=30))
    assert run(busier, samples).end == plain + 1030
    assert schedule_bound(busier, samples).ns == schedule_bound(p, samples).ns + 1030


def test_ranks_of_other_nodes_are_further_away():
    near, far = (run(vlm(cluster=cluster(per_node=n)), [make_sample(0, *IMAGE)]).end for n in (2, 1))
    assert far - near == 2 * 90


def test_gradients_are_reduced_and_the_optimizer_waits_for_all():
    p = trained(vlm(replicas=2, cluster=cluster()), lm=100)
    step = run(p, [make_sample(0), make_sample(1), make_sample(2)])
    reduce = 2 * (10 + 200)  # 400 bytes over two ranks
    assert [(r.sections, r.start, r.end) for r in step.reductions] == [(("lm",), 300, 300 + reduce)]
    assert (step.gradients_summed, step.end) == (300 + reduce, 300 + reduce + 7 * 400)


def test_sums_begin_within_the_last_backward_and_end_a_bucket_after_it(monkeypatch):
    """Ten buckets of 40 bytes; the last backward runs from 200 to 300, and each sum takes 2 * (10 + 200)."""
    monkeypatch.setattr(traffic_module, "BUCKET_BYTES", 40)
    p = trained(vlm(replicas=2, cluster=cluster()), lm=100)
    step = run(p, [make_sample(0), make_sample(1), make_sample(2)])
    assert [(r.start, r.end) for r in step.reductions] == [(210, 210 + 420)]
    slow = dataclasses.replace(p, cluster=cluster(latency=1, gb_s=100))  # 6 ns in all, a bucket is one of ten
    step = run(slow, [make_sample(0), make_sample(1), make_sample(2)])
    assert [(r.start, r.end) for r in step.reductions] == [(210, 300)]


def test_groups_of_one_section_keep_one_order_on_all_ranks():
    """Each of two parts of experts is summed by two of four replicas, everything else by all four: the parts
    are summed at the same time, whichever rank comes last."""
    section = make_section("lm", range(4), forward="50*B", backward="100*B")
    shard = Shard("lm.experts", 0, (4,), ep=1, replicas=2)
    section = dataclasses.replace(
        section,
        mesh=dataclasses.replace(section.mesh, ep=2),
        params=("lm.w", "lm.experts"),
        shards=(shard,),
    )
    p = dataclasses.replace(make_plan([section], [], 4), cluster=cluster())
    table = {"lm.w": "float32[100] train", "lm.experts": "float32[4, 1000] train"}
    p = dataclasses.replace(p, model=ModelRef("", "", table))
    step = run(p, [make_sample(i) for i in range(5)])
    ends = {r.ranks: r.end - r.start for r in step.reductions}
    assert sorted(ends) == [(0, 1, 2, 3), (0, 2), (1, 3)]
    assert {r.start for r in step.reductions if len(r.ranks) == 2} == {
        next(r.end for r in step.reductions if len(r.ranks) == 4)
    }


def test_parameters_tied_over_sections_are_reduced_at_the_end():
    p = vlm(cluster=cluster())
    sections = tuple(dataclasses.replace(s, params=("w",)) for s in p.sections)
    p = dataclasses.replace(p, sections=sections, model=ModelRef("", "", {"w": "float32[100] train"}))
    step = run(p, [make_sample(0)])
    assert [(set(r.sections), r.ranks, r.start) for r in step.reductions] == [({"vision", "lm"}, (0, 1), 150)]


def test_an_invalid_schedule_is_not_simulated():
    p, samples = vlm(), [make_sample(0, *IMAGE)]
    programs = schedule_batch(p, samples)
    lost = dataclasses.replace(programs, programs=(programs.programs[0][1:], programs.programs[1]))
    with pytest.raises(ScheduleError):
        simulate(p, samples, lost)


def test_waits_for_messages_and_for_ranks_are_separate():
    """The language model waits for the encoder's forward, then for the message; the encoder for both ways and
    the round trip."""
    step = run(vlm(cluster=cluster()), [make_sample(0, *IMAGE)])
    m = measure_step(step)
    wait, back = 10 + ROW, 10 + ROW + 4
    assert m.exposed_communication_s == pytest.approx((wait + back) / 2 / 1e9)
    lm, vision = 100 + (back + 200), wait + 150
    assert m.waiting_s == pytest.approx((lm + vision) / 2 / 1e9)
    assert m.sections["lm"].busy == pytest.approx(150 / step.end)
    assert m.schedule_bound_s == pytest.approx((450 + 2 * wait) / 1e9)


def test_the_busiest_rank_is_the_one_others_wait_for():
    p = trained(vlm(replicas=2, cluster=cluster(tensor=5)), lm=100)
    b = find_busiest_rank(run(p, [make_sample(0, *IMAGE)]))
    wait, back = 10 + ROW, 10 + ROW + 4
    assert b is not None and (b.rank, b.sections) == (0, "vision")
    assert (b.computing_s, b.exposed_s, b.waiting_s) == pytest.approx(
        (300e-9, back / 1e9, (wait + 150) / 1e9)
    )
    assert b.closing_s == pytest.approx((7 * 400 + 5 + max(0, 2 * (10 + 200) - back - 200)) / 1e9)
    assert find_busiest_rank(run(vlm(), [])) is None


def test_memory_follows_what_is_in_flight():
    p = trained(vlm(mode="train"), vision=10, lm=10)
    costs = [dataclasses.replace(s.cost, saved=f"{n}*B") for s, n in zip(p.sections, (7, 5), strict=True)]
    p = dataclasses.replace(
        p, sections=tuple(dataclasses.replace(s, cost=c) for s, c in zip(p.sections, costs, strict=True))
    )
    step = run(p, [make_sample(i, *IMAGE) for i in range(3)])
    assert max(n for _, n in in_flight_over_time(step, 0)) == 3  # the encoder runs ahead
    assert max(n for _, n in in_flight_over_time(step, 1)) == 1
    assert max(b for _, b in memory_over_time(step, 0) or ()) == 10 * 4 * 4 + 2 * 7  # gradients, one is freed
    assert (memory_over_time(step, 1) or [])[-1][1] == 10 * 4 * 4
    assert measure_step(step).peak_memory_gib == pytest.approx((160 + 14) / 2**30)
    assert measure_step(run(vlm(), [make_sample(0)])).peak_memory_gib is None


@pytest.mark.parametrize(
    ("sharding", "computes_in", "bytes_of_an_entry"),
    [
        ("none", "", 16),
        ("zero1", "", 8 + 2 + 4),
        ("zero3", "", 8),
        ("zero1", "bf16", 2 + 4 + 2 + 4 + 2),
        ("zero3", "bf16", 1 + 2 + 4 + 2),
    ],
)
@pytest.mark.parametrize("degree", ["dp", "cp"])
def test_ranks_share_what_they_shard(degree, sharding, computes_in, bytes_of_an_entry):
    """Of a float32 parameter and its gradient, two states and, in mixed precision, its master; in the end its
    bucket is on its way, if it is not summed already (zero3)."""
    p = dataclasses.replace(trained(vlm(replicas=2), lm=100), dtype=computes_in)
    mesh = dataclasses.replace(p.sections[1].mesh, **{"dp": 1, degree: 2})
    cost = dataclasses.replace(p.sections[1].cost, saved="B")
    lm = dataclasses.replace(p.sections[1], sharding=sharding, mesh=mesh, cost=cost)
    step = run(dataclasses.replace(p, sections=(p.sections[0], lm)), [make_sample(0)])
    bucket = 0 if sharding == "zero3" else 4
    assert (memory_over_time(step, 1) or [])[-1][1] == 100 * (bytes_of_an_entry + bucket)


def test_use_of_the_hardware_counts_the_models_operations():
    lm = make_section("lm", [0], forward="100*B", backward="200*B")
    lm = dataclasses.replace(
        lm, cost=dataclasses.replace(lm.cost, flops="1000*B", backward_flops="2000*B", dtype="f32")
    )
    p = dataclasses.replace(make_plan([lm], [], 1), cluster=cluster())
    assert measure_step(run(p, [make_sample(0), make_sample(1)])).mfu == pytest.approx(6000 / 20 / 600)
    assert measure_step(run(vlm(cluster=cluster()), [make_sample(0)])).mfu is None


def test_an_empty_batch_takes_no_time():
    m = measure_step(run(vlm(), []))
    assert (m.step_time_s, m.schedule_bound_s, m.in_flight) == (0, 0, 0)
