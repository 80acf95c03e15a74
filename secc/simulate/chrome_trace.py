"""Writes simulated steps as a Chrome trace (chrome://tracing, Perfetto), with a process for each rank, like a
traced run.

Computation events have `{kind, section, replica, stage, microbatch, samples}`, transfers `{kind: SEND|RECV,
edge, direction, src, dst, samples, bytes}`; samples are dataset indices. Transfers and reductions overlap
with computation, so they have tracks of their own; micro-batches in flight are a counter. Times are in
microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from secc.simulate.events import ComputeEvent, SimulatedStep, TransferEvent
from secc.simulate.step_measures import in_flight_over_time

TraceEvent = dict[str, Any]
COMPUTE_TRACK, SEND_TRACK, RECEIVE_TRACK, CLOSING_TRACK = range(4)
TRACK_NAMES = {
    COMPUTE_TRACK: "compute",
    SEND_TRACK: "sends",
    RECEIVE_TRACK: "receives",
    CLOSING_TRACK: "reductions and optimizer",
}


def make_chrome_trace(steps: list[SimulatedStep]) -> dict[str, Any]:
    """Trace of consecutive steps as a JSON object."""
    events: list[TraceEvent] = []
    start = 0
    for step in steps:
        events += [event | {"ts": event["ts"] + start} for event in _step_events(step)]
        start += step.end
    lanes = _separate_overlaps(events)
    for event in events:
        event["ts"] /= 1e3
        if "dur" in event:
            event["dur"] /= 1e3
    return {"traceEvents": [*_metadata_events(steps[0], lanes), *events], "displayTimeUnit": "ms"}


def _separate_overlaps(events: list[TraceEvent]) -> set[tuple[int, int]]:
    """Moves events that overlap with another one of their track to further tracks of the same name, because
    viewers draw only events that do not overlap. Returns the (rank, track) that are used."""
    ends: dict[tuple[int, int], list[int]] = {}
    used: set[tuple[int, int]] = set()
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
        lanes = ends.setdefault((event["pid"], event["tid"]), [])
        lane = next((i for i, end in enumerate(lanes) if end <= event["ts"]), len(lanes))
        lanes[lane : lane + 1] = [event["ts"] + event["dur"]]
        event["tid"] += lane * len(TRACK_NAMES)
        used.add((event["pid"], event["tid"]))
    return used


def _metadata_events(step: SimulatedStep, lanes: set[tuple[int, int]]) -> Iterator[TraceEvent]:
    for rank in range(step.plan.world_size):
        label = ", ".join(s.name for s in step.plan.sections if rank in s.mesh.ranks) or "idle"
        named = {
            "process_name": {"name": f"rank {rank}: {label}"},
            "process_sort_index": {"sort_index": rank},
        }
        yield from (
            {"ph": "M", "pid": rank, "tid": COMPUTE_TRACK, "name": name, "args": args}
            for name, args in named.items()
        )
        for track in sorted({*TRACK_NAMES, *(tid for pid, tid in lanes if pid == rank)}):
            lane, base = divmod(track, len(TRACK_NAMES))
            name = TRACK_NAMES[base] + (f" {lane + 1}" if lane else "")
            yield {"ph": "M", "pid": rank, "tid": track, "name": "thread_name", "args": {"name": name}}
            order = base * 1000 + lane
            yield {
                "ph": "M",
                "pid": rank,
                "tid": track,
                "name": "thread_sort_index",
                "args": {"sort_index": order},
            }


def _step_events(step: SimulatedStep) -> Iterator[TraceEvent]:
    for c in step.compute:
        yield _duration_event(
            c.rank,
            COMPUTE_TRACK,
            f"{c.kind} {c.section} {c.micro}",
            c.start,
            c.end,
            _computation_args(step, c),
        )
    for t in step.transfers:
        for kind, rank, track in (("SEND", t.src, SEND_TRACK), ("RECV", t.dst, RECEIVE_TRACK)):
            yield _duration_event(
                rank, track, f"{kind} {t.edge}", t.start, t.end, {"kind": kind, **_transfer_args(step, t)}
            )
    for r in step.reductions:
        for rank in r.ranks:
            yield _duration_event(
                rank,
                CLOSING_TRACK,
                f"REDUCE {', '.join(r.sections)}",
                r.start,
                r.end,
                {"kind": "REDUCE", "sections": list(r.sections)},
            )
    for rank in range(step.plan.world_size):
        if step.end > step.gradients_summed:
            yield _duration_event(
                rank, CLOSING_TRACK, "STEP", step.gradients_summed, step.end, {"kind": "STEP"}
            )
        for time, count in in_flight_over_time(step, rank):
            yield {
                "ph": "C",
                "pid": rank,
                "tid": COMPUTE_TRACK,
                "name": "in flight",
                "ts": time,
                "args": {"micro-batches": count},
            }


def _duration_event(rank: int, track: int, name: str, start: int, end: int, args: TraceEvent) -> TraceEvent:
    return {
        "ph": "X",
        "pid": rank,
        "tid": track,
        "name": name,
        "cat": args["kind"],
        "ts": start,
        "dur": end - start,
        "args": args,
    }


def _computation_args(step: SimulatedStep, c: ComputeEvent) -> TraceEvent:
    micro = step.schedule.micro_batches[c.section][c.micro]
    args = {
        "kind": c.kind,
        "section": step.plan.find_section(c.section).user_section_name,
        "replica": c.replica,
        "stage": c.stage,
        "microbatch": c.micro,
    }
    prefetch_mark = {"ahead": True} if step.schedule.is_of_next_batch(micro) else {}
    return args | {"samples": [step.samples[p].id for p in micro.samples]} | prefetch_mark


def _transfer_args(step: SimulatedStep, t: TransferEvent) -> TraceEvent:
    args = {"edge": t.edge, "direction": t.direction, "src": t.src, "dst": t.dst}
    return args | {"samples": [step.samples[p].id for p in t.samples], "bytes": t.size}
