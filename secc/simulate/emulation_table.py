"""Emulated runs: the table of times that ranks wait by, and how their steps compare with simulated ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from secc.bounds.traffic import FREE_LINK, Traffic
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import SampleMeta
from secc.runtime.training.emulation import EMULATION_FILE, EmulationTable
from secc.simulate.simulator import simulate
from secc.simulate.steady_state import consecutive_steps

MEBIBYTE = 1 << 20


def make_emulation_table(plan: Plan, scale: float = 1.0) -> EmulationTable:
    """The times of a plan's messages, reductions and optimizer steps."""
    traffic = Traffic(plan)
    cluster = traffic.cluster
    links = (cluster.inside, cluster.between) if cluster is not None else (FREE_LINK, FREE_LINK)
    inside, between = ((link.latency_ns, link.message_ns(MEBIBYTE) - link.latency_ns) for link in links)
    held = sorted(
        traffic.reduction_groups, key=lambda h: len(h.sections) > 1
    )  # tied over sections: reduced at the end
    sums = tuple((h.sections, h.ranks, traffic.reduce_ns(h)) for h in held if len(h.ranks) > 1)
    per_node = cluster.per_node if cluster is not None else plan.world_size
    return EmulationTable(
        scale,
        per_node,
        (inside, between),
        sums,
        tuple(traffic.optimizer_ns(r) for r in range(plan.world_size)),
    )


def compare_emulated_steps(
    plan: Plan, log_dir: Path, batches: Sequence[Sequence[SampleMeta]], order: str
) -> Iterator[tuple[int, float, float]]:
    """(step, emulated seconds of its program in modelled time, simulated seconds) of the last emulated run's
    steps.

    Neither has what a step takes beside its program: an emulated run plans and exchanges for real, before its
    program starts.
    """
    overheads = Traffic(plan).overheads
    lines = [json.loads(line) for line in (log_dir / EMULATION_FILE).read_text().splitlines()][
        -len(batches) :
    ]
    for told, (samples, programs) in zip(lines, consecutive_steps(plan, batches, order), strict=True):
        own = len(samples) if programs.own_samples is None else programs.own_samples
        simulated = simulate(plan, samples, programs).end - overheads.step_ns(own)
        yield told["step"], told["program_s"] / told["scale"], simulated / 1e9
