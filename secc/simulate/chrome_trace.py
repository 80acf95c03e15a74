"""A simulated step as a Chrome trace (chrome://tracing, Perfetto): a process for each rank, as a traced run
writes it.

Events of computation carry `{kind, section, replica, stage, microbatch, samples}`, those of transfers `{kind:
SEND|RECV, edge, direction, src, dst, samples, bytes}`; samples are dataset indices. Transfers run beside
computation, so they have tracks of their own within the rank, as have reductions; memory in flight is a
counter. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from secc.simulate.events import Compute, Simulated, Transfer
from secc.simulate.step_measures import in_flight

Event = dict[str, Any]
COMPUTE, SENDS, RECEIVES, CLOSING = range(4)
TRACKS = {COMPUTE: "compute", SENDS: "sends", RECEIVES: "receives", CLOSING: "reductions and optimizer"}


def chrome(steps: list[Simulated]) -> dict[str, Any]:
    """The trace of consecutive steps as a JSON object."""
    events, start = list(_names(steps[0])), 0
    for step in steps:
        for event in _events(step):
            events.append(
                event
                | {"ts": (event["ts"] + start) / 1e3}
                | ({"dur": event["dur"] / 1e3} if "dur" in event else {})
            )
        start += step.end
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(step: Simulated) -> Iterator[Event]:
    for rank in range(step.plan.world_size):
        label = ", ".join(s.name for s in step.plan.sections if rank in s.mesh.ranks) or "idle"
        named = {
            "process_name": {"name": f"rank {rank}: {label}"},
            "process_sort_index": {"sort_index": rank},
        }
        yield from (
            {"ph": "M", "pid": rank, "tid": COMPUTE, "name": name, "args": args}
            for name, args in named.items()
        )
        for track, name in TRACKS.items():
            yield {"ph": "M", "pid": rank, "tid": track, "name": "thread_name", "args": {"name": name}}


def _events(step: Simulated) -> Iterator[Event]:
    for c in step.compute:
        yield _event(c.rank, COMPUTE, f"{c.kind} {c.section} {c.micro}", c.start, c.end, _computed(step, c))
    for t in step.transfers:
        for kind, rank, track in (("SEND", t.src, SENDS), ("RECV", t.dst, RECEIVES)):
            yield _event(rank, track, f"{kind} {t.edge}", t.start, t.end, {"kind": kind, **_sent(step, t)})
    for r in step.reductions:
        for rank in r.ranks:
            yield _event(
                rank,
                CLOSING,
                f"REDUCE {', '.join(r.sections)}",
                r.start,
                r.end,
                {"kind": "REDUCE", "sections": list(r.sections)},
            )
    for rank in range(step.plan.world_size):
        if step.end > step.synced:
            yield _event(rank, CLOSING, "STEP", step.synced, step.end, {"kind": "STEP"})
        for time, count in in_flight(step, rank):
            yield {
                "ph": "C",
                "pid": rank,
                "tid": COMPUTE,
                "name": "in flight",
                "ts": time,
                "args": {"micro-batches": count},
            }


def _event(rank: int, track: int, name: str, start: int, end: int, args: Event) -> Event:
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


def _computed(step: Simulated, c: Compute) -> Event:
    micro = step.schedule.micro_batches[c.section][c.micro]
    args = {
        "kind": c.kind,
        "section": step.plan.section(c.section).whole,
        "replica": c.replica,
        "stage": c.stage,
        "microbatch": c.micro,
    }
    ahead = {"ahead": True} if step.schedule.is_later(micro) else {}
    return args | {"samples": [step.samples[p].id for p in micro.samples]} | ahead


def _sent(step: Simulated, t: Transfer) -> Event:
    args = {"edge": t.edge, "direction": t.direction, "src": t.src, "dst": t.dst}
    return args | {"samples": [step.samples[p].id for p in t.samples], "bytes": t.size}
