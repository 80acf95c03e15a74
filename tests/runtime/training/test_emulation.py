"""An emulated run: every rank executes its program, sleeps for the modelled times, and trains nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from secc.cli import main
from secc.runtime.errors import UserError
from secc.runtime.parameters.bucket_limits import BUCKET_BYTES
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.schedule.scheduler import schedule_batch
from secc.runtime.training.emulation import (
    EMULATION_FILE,
    instruction_durations,
    read_table,
    reductions_end,
    table_to_json,
)
from secc.simulate.emulation_table import make_emulation_table
from secc.simulate.global_batches import load_global_batches
from secc.simulate.simulator import simulate
from secc.simulate.steady_state import consecutive_steps
from tests.runtime.captioner_plans import UNEVEN, write_plan
from tests.runtime.schedule.plan_strategies import make_edge, make_plan, make_sample, make_section
from tests.simulate.test_simulator import cluster, trained
from tools import bench_emulation


def ranks_waited(steps: list[tuple[float, float]]) -> bool:
    """Whether all steps together, each given as (emulated, simulated) seconds, took nine tenths of the
    simulated time or more. On a busy machine a step that ends late makes the next one look short; how much
    longer steps take is the machine's."""
    return sum(took for took, _ in steps) > 0.9 * sum(simulated for _, simulated in steps) > 0


@pytest.mark.gloo
def test_emulated_step_takes_at_least_the_simulated_time(tmp_path, capfd):
    write_plan(tmp_path / "plan", UNEVEN)
    with pytest.raises(SystemExit) as ended:
        main(["run", str(tmp_path / "plan"), "--emulate", "--scale", "10000", "--steps", "2", "--json"])
    assert ended.value.code in (0, None)
    steps = json.loads(capfd.readouterr().out)
    assert [s["step"] for s in steps] == [1, 2]
    assert ranks_waited([(s["emulated_s"], s["simulated_s"]) for s in steps])
    lines = [
        json.loads(line) for line in (tmp_path / "plan" / "logs" / EMULATION_FILE).read_text().splitlines()
    ]
    assert [line["samples"] for line in lines] == [8, 8] and all(line["step_time_s"] > 0 for line in lines)
    assert not (tmp_path / "plan" / "logs" / "metrics.jsonl").exists()


SMALL = ["2 ranks, shared"]
LARGER = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in bench_emulation.EMULATION_CASES
    if name not in SMALL
]


@pytest.mark.gloo
@pytest.mark.parametrize("name", [*SMALL, *LARGER])
def test_all_kinds_of_plans_are_emulated(tmp_path, name):
    """Stages, co-located sections, and prefetching sections: every rank ends, and no wait is too short."""
    case = bench_emulation.EMULATION_CASES[name]
    plan = bench_emulation.write_plan_directory(tmp_path, case, batches=2)
    steps = bench_emulation.run_emulated(tmp_path, plan, steps=2, scale=0.25)
    assert f"{plan.world_size} ranks" == name.split(",")[0]
    assert [step for step, _, _ in steps] == [1, 2]
    assert ranks_waited([(took, expected) for _, took, expected in steps])
    lines = [json.loads(line) for line in (tmp_path / "logs" / EMULATION_FILE).read_text().splitlines()]
    assert [line["samples"] for line in lines] == [case.samples] * 2


def test_emulated_plans_prefetch(tmp_path):
    case = bench_emulation.EMULATION_CASES["3 ranks, teacher → student, ahead"]
    plan = bench_emulation.write_plan_directory(tmp_path, case, batches=2)
    first, last = consecutive_steps(plan, list(load_global_batches(tmp_path, plan, steps=2)))
    assert first[1].own_samples == case.samples and last[1].prefetched["teacher"]


def test_durations_equal_those_of_the_simulator(tmp_path):
    """Including the two parts of a split backward."""
    plan = bench_emulation.write_plan_directory(
        tmp_path, bench_emulation.EMULATION_CASES["3 ranks, encoder → LM of 2 stages"], batches=1
    )
    ((samples, programs),) = consecutive_steps(plan, list(load_global_batches(tmp_path, plan)))
    waits = instruction_durations(plan, programs, PredictedCosts(plan, samples))
    step = simulate(plan, samples, programs)
    assert {c.kind for c in step.compute} == {"F", "B", "W"}
    assert all(c.end - c.start == waits[c.kind, c.section][c.micro] for c in step.compute)


def test_table_has_the_times_of_the_cost_model(tmp_path):
    lm = trained(make_plan([make_section("lm", range(4))], [], 4), lm=1000)
    found = make_emulation_table(
        dataclasses.replace(lm, cluster=cluster(latency=10, gb_s=1, per_node=2)), scale=3.0
    )
    assert found.message_ns(0, 1, 1 << 20) == (10, pytest.approx((1 << 20) * 1.0, rel=0.01))
    assert found.message_ns(1, 2, 0) == (100, 0)
    (sums,) = found.reductions
    assert (sums.sections, sums.ranks) == (("lm",), (0, 1, 2, 3)) and sums.sum_ns > 0
    assert len(found.optimizer) == 4
    path = tmp_path / "table.json"
    path.write_text(table_to_json(found))
    assert read_table(path) == found


@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_sums_run_behind_the_last_backward_as_simulated(sharding):
    """A section has four buckets of gradients here, so only the last one is summed after its backward."""
    lm = make_section("lm", range(2), forward="100000000*B", backward="200000000*B")
    vision = make_section("vision", range(2), when=("images",), forward="100000000*B", backward="100000000*B")
    entries = BUCKET_BYTES  # of 4 bytes
    plan = trained(make_plan([vision, lm], [make_edge("vision", "lm")], 2), vision=entries, lm=entries)
    plan = dataclasses.replace(
        plan,
        cluster=cluster(latency=10, gb_s=20, per_node=2),
        sections=tuple(dataclasses.replace(s, sharding=sharding) for s in plan.sections),
    )
    samples = [make_sample(0, "images"), make_sample(1, "images"), make_sample(2), make_sample(3)]
    step = simulate(plan, samples, schedule_batch(plan, samples))
    times = [
        [*(t for name in ("vision", "lm") for t in _times_of(step, name, rank)), step.program_ends[rank]]
        for rank in (0, 1)
    ]
    table = make_emulation_table(plan)
    in_the_open = max(step.program_ends) + sum(r.sum_ns + r.gather_ns for r in table.reductions)
    assert reductions_end(table, ["vision", "lm"], times) == step.gradients_summed < in_the_open


def _times_of(step, section, rank):
    """Start and end of a section's last backward on a rank, and the length of its first forward."""
    of_section = [c for c in step.compute if (c.section, c.rank) == (section, rank)]
    first, last = (
        next(c for c in found if c.kind == kind)
        for found, kind in ((of_section, "F"), (of_section[::-1], "B"))
    )
    return last.start, last.end, first.end - first.start


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--epochs", "1"], "does not support --epochs"), (["--log-dir", "/dev/null/logs"], "cannot write")],
)
def test_errors_are_one_message(tmp_path, capsys, arguments, message):
    write_plan(tmp_path / "plan", UNEVEN)
    with pytest.raises(SystemExit) as ended:
        main(["run", str(tmp_path / "plan"), "--emulate", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_malformed_table_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text("{}")
    with pytest.raises(UserError, match="cannot read the table"):
        read_table(path)
