"""Messages of an edge: whatever the micro-batches of both ends, every row arrives at its place, cut and
padded to the sample's extent."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secc.runtime.comm.edge_messages import EdgeLayout
from secc.runtime.plan.batch_sizes import combine_sizes
from secc.runtime.plan.sample_predicates import is_active
from secc.runtime.plan.schema import Edge, Plan, Symbol
from secc.runtime.plan.step_program import MicroBatch, SampleMeta, Schedule
from tests.runtime.captioner_plans import APART, make_plan

PLAN = dataclasses.replace(
    make_plan(APART),
    symbols=(Symbol("B", "rows", "x", 0), Symbol("S", "width", "x", 1), Symbol("n", "rows", "images", 0)),
)
FEATURES = Edge("features", "encoder", "decoder", "float32", ("2*n", "3"), 0, "2*n", True, ("images",))
PACKED = Edge("packed", "teacher", "decoder", "float32", ("1", "n + B", "2"), 1, "n + 1", True)
HIDDEN = Edge(
    "hidden",
    "teacher",
    "decoder",
    "float32",
    ("B", "S + 1", "2"),
    0,
    "1",
    False,
    extents=((1, "S + 1", "right"),),
)
MASK = dataclasses.replace(HIDDEN, name="mask", fills=(-torch.inf,))
PAIRS = Edge(
    "pairs",
    "teacher",
    "decoder",
    "float32",
    ("B", "S + 1", "S + 1"),
    0,
    "1",
    False,
    extents=((1, "S + 1", "left"), (2, "S + 1", "right")),
    fills=(1.0, -torch.inf),
)
LEFT = dataclasses.replace(HIDDEN, extents=((1, "S + 1", "left"),))


@st.composite
def partitions(draw: st.DrawFn, n: int) -> list[list[int]]:
    """Samples 0..n-1 in micro-batches, each ascending."""
    owner = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    return [part for k in range(4) if (part := [s for s in range(n) if owner[s] == k])]


@st.composite
def steps(draw: st.DrawFn, edge: Edge) -> tuple[Schedule, list[SampleMeta]]:
    counts = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    samples = [
        SampleMeta(i, frozenset({"images"} if n else ()), {"B": 1, "S": draw(st.integers(1, 5)), "n": n})
        for i, n in enumerate(counts)
    ]
    micros: dict[str, tuple[MicroBatch, ...]] = {}
    for section, when in ((edge.src, edge.when), (edge.dst, ())):
        parts = [
            [s for s in part if is_active(when, samples[s].pattern)]
            for part in draw(partitions(len(samples)))
        ]
        micros[section] = tuple(
            MicroBatch(i, section, 0, tuple(p)) for i, p in enumerate(filter(None, parts))
        )
    return Schedule(micros, ()), samples


def rows_of(edge: Edge, sample: SampleMeta) -> torch.Tensor:
    """The sample's own piece of the edge, its values naming the sample."""
    plan = Schedule(
        {edge.src: (MicroBatch(0, edge.src, 0, (0,)),), edge.dst: (MicroBatch(0, edge.dst, 0, (0,)),)}, ()
    )
    shape = EdgeLayout(edge, PLAN, plan, [sample]).tensor_shape("src", 0)
    return 100.0 * (1 + sample.id) + torch.arange(float(torch.Size(shape).numel())).view(shape)


def whole(edge: Edge, plan: Plan, samples: list[SampleMeta], members: list[int]) -> torch.Tensor:
    """A micro-batch's tensor: its samples' pieces along the sample dim, padded to the widest."""
    width = combine_sizes([samples[s].sizes for s in members], plan.symbols)["S"] + 1
    parts = []
    for s in members:
        part = rows_of(edge, samples[s])
        for (dim, _, side), fill in zip(edge.extents, edge.fills or [0.0] * len(edge.extents), strict=True):
            missing = torch.full((*part.shape[:dim], width - part.shape[dim], *part.shape[dim + 1 :]), fill)
            part = torch.cat([missing, part] if side == "left" else [part, missing], dim=dim)
        parts.append(part)
    return torch.cat(parts, dim=edge.dim)


def carry(edge: Edge, schedule: Schedule, samples: list[SampleMeta]) -> None:
    layout = EdgeLayout(edge, PLAN, schedule, samples)
    sources = {m.index: whole(edge, PLAN, samples, list(m.samples)) for m in schedule.micro_batches[edge.src]}
    for micro, tensor in sources.items():
        assert layout.tensor_shape("src", micro) == tuple(tensor.shape)
    for consumer in schedule.micro_batches[edge.dst]:
        incoming = layout.pairs_of_micro_batch("dst", consumer.index)
        if not incoming:
            continue
        found = layout.make_padding(consumer.samples, torch.device("cpu"))
        for pair in incoming:
            message = layout.pack_message(sources[pair[0]], "src", pair)
            assert message.numel() == layout.message_numel(pair)
            layout.unpack_message(message, found, "dst", pair)
        members = [s for s in consumer.samples if is_active(edge.when, samples[s].pattern)]
        expected = whole(edge, PLAN, samples, members)
        if edge.extents:  # the consumer is as wide as all its samples
            assert found.shape[1] >= expected.shape[1]
        assert torch.equal(found, expected)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_arrive_in_the_consumers_order(data: st.DataObject) -> None:
    edge = data.draw(st.sampled_from([FEATURES, PACKED, HIDDEN, LEFT, MASK, PAIRS]))
    carry(edge, *data.draw(steps(edge)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_gradient_travels_back_in_the_same_messages(data: st.DataObject) -> None:
    edge = data.draw(st.sampled_from([FEATURES, PACKED, HIDDEN, LEFT]))
    schedule, samples = data.draw(steps(edge))
    layout = EdgeLayout(edge, PLAN, schedule, samples)
    for pair in layout.pairs:
        tensor = torch.randn(layout.tensor_shape("dst", pair[1]))
        back = torch.zeros(layout.tensor_shape("src", pair[0]))
        layout.unpack_message(layout.pack_message(tensor, "dst", pair), back, "src", pair)
        assert torch.equal(layout.pack_message(back, "src", pair), layout.pack_message(tensor, "dst", pair))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_tags_are_unique(data: st.DataObject) -> None:
    schedule, samples = data.draw(steps(PACKED))
    layout = EdgeLayout(PACKED, PLAN, schedule, samples)
    tags = {layout.pair_tag(pair) for pair in layout.pairs}
    assert len(tags) == len(layout.pairs) and all(0 <= t < 2**30 for t in tags)


def test_with_global_widths_samples_are_not_cut() -> None:
    samples = [SampleMeta(i, frozenset(), {"B": 1, "S": s, "n": 0}) for i, s in enumerate((2, 5))]
    micros = {name: tuple(MicroBatch(i, name, 0, (i,)) for i in range(2)) for name in ("teacher", "decoder")}
    layout = EdgeLayout(HIDDEN, dataclasses.replace(PLAN, widths="global"), Schedule(micros, ()), samples)
    assert layout.tensor_shape("src", 0) == layout.tensor_shape("dst", 0) == (1, 6, 2)
    assert layout.message_numel((0, 0)) == 12
