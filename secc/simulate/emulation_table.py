"""Emulated runs: the table of times that ranks wait by, and the comparison of their steps with simulated
ones."""

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
    """Computes the times of a plan's messages, reductions and optimizer steps. `scale` stretches all
    waits."""
    traffic = Traffic(plan)
    cluster = traffic.cluster
    links = (cluster.inside, cluster.between) if cluster is not None else (FREE_LINK, FREE_LINK)
    inside, between = ((link.latency_ns, link.message_ns(MEBIBYTE) - link.latency_ns) for link in links)
    per_node = cluster.per_node if cluster is not None else plan.world_size
    return EmulationTable(
        scale,
        per_node,
        (inside, between),
        tuple(traffic.timed_reductions),
        tuple(traffic.optimizer_ns(r) for r in range(plan.world_size)),
    )


def compare_emulated_steps(
    plan: Plan, log_dir: Path, batches: Sequence[Sequence[SampleMeta]], order: str
) -> Iterator[tuple[int, float, float]]:
    """Yields (step, emulated seconds of its program in modelled time, simulated seconds) of the last emulated
    run's steps.

    Both leave out what a step takes besides its program: an emulated run plans and exchanges metadata for
    real, before its program starts.
    """
    overheads = Traffic(plan).overheads
    lines = [
        json.loads(line) for line in (log_dir / EMULATION_FILE).read_text(encoding="utf-8").splitlines()
    ][-len(batches) :]
    for logged, (samples, programs) in zip(lines, consecutive_steps(plan, batches, order), strict=True):
        sample_count = len(samples) if programs.own_samples is None else programs.own_samples
        simulated = simulate(plan, samples, programs).end - overheads.step_ns(sample_count)
        yield logged["step"], logged["program_s"] / logged["scale"], simulated / 1e9
