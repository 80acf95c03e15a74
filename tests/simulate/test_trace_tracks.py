"""Tracks of a simulated trace: viewers draw only events that do not overlap on their track."""

from __future__ import annotations

import itertools

from secc.simulate.chrome_trace import make_chrome_trace
from tests.runtime.schedule.plan_strategies import make_sample
from tests.simulate.test_simulator import IMAGE, cluster, run, trained, vlm


def test_events_of_a_track_do_not_overlap_and_every_track_has_a_name() -> None:
    step = run(trained(vlm(replicas=2, cluster=cluster())), [make_sample(i, *IMAGE) for i in range(12)])
    events = make_chrome_trace([step, step])["traceEvents"]
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in (e for e in events if e["ph"] == "X"):
        tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert tracks.keys() <= named
    for spans in map(sorted, tracks.values()):
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(spans))
