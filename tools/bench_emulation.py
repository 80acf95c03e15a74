"""Compares emulated steps with simulated ones: real processes and the real control plane, with waits in place
of training.

python -m tools.bench_emulation [NAME ...] --steps 3      plans with 2 to 16 ranks; those with 64 only if
named

Each plan has the sections of `tools/schedule_mixes.py` on a machine of 8 devices a node, and its own samples. Wall
time over simulated time of each step but the first, in which processes still warm up. Prints Markdown.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median

from secc.runtime.plan.schema import Input, ModelRef, Plan
from secc.runtime.plan.schema import to_json as plan_json
from secc.runtime.training.emulation import FILE, to_json
from secc.runtime.training.launch import run_plan
from secc.simulate.emulation_table import compared, table
from secc.simulate.global_batches import global_batches
from tools import schedule_mixes

MODEL = Path(__file__).parent / "models" / "sized.py"
LINK = {"latency_ns": 20_000, "bytes_per_s": 10**10}
DEVICE = {
    "kind": "cpu", "backend": "cpu", "gflops": [["f32", 100]], "memory": 1 << 34, "memory_bytes_per_s": 10**11, "efficiency_percent": 50,
    "op_ns": 1, "reserved": 0, "label": "default",
}  # fmt: skip
CLUSTER = {
    "name": "emulated",
    "nodes": 8,
    "per_node": 8,
    "inside": LINK,
    "between": LINK | {"latency_ns": 60_000},
    "device": DEVICE,
}
WIDTH = 4096  # entries of a token's row on an edge
MEBIBYTE = 2**-10  # GiB
PARAMETERS = 50_000_000  # entries of a section's parameter, where a plan has any

TERMS = """CONSTANT = 0.0
BUFFERS = ()
LEAVES = {}


def coefficients(leaves, size, pattern):
    return {}
"""
RUN = """import runpy
import sys
from pathlib import Path

PLAN = Path(__file__).resolve().parent
sys.path.insert(0, str(PLAN))
runpy.run_path(str(PLAN / "ranks" / "rank.py"), run_name="__main__")
"""
RANK = """import sys

from secc.runtime.training.launch import main

sys.exit(main(lambda options: sys.exit("there is nothing to train: start it with --emulate")))
"""


@dataclass(frozen=True)
class Case:
    """A plan: how many samples a step has, and what runs where. `mix` draws samples, `plan` lays out the
    sections for them."""

    samples: int
    plan: Callable[[schedule_mixes.Samples], Plan]
    mix: Callable[[int, int], schedule_mixes.Samples] = lambda count, seed: schedule_mixes.multimodal(
        count, 0.33, seed
    )


def _shared(samples: schedule_mixes.Samples, ranks: int) -> Plan:
    """An encoder and a language model on the same ranks."""
    plan = schedule_mixes.vlm(samples, ranks, ranks, 0.5)
    moved = (replace(s, mesh=replace(s.mesh, ranks=tuple(range(ranks)))) for s in plan.sections)
    return replace(plan, sections=tuple(moved), world_size=ranks)


def _sharded(samples: schedule_mixes.Samples, ranks: int, way: str) -> Plan:
    """The same, with 16-bit parameters whose optimizer states, or all of which, the ranks share."""
    plan = _shared(samples, ranks)
    names = {s.name: f"{s.name}.weight" for s in plan.sections}
    sections = tuple(replace(s, sharding=way, params=(names[s.name],)) for s in plan.sections)
    parameters = {name: f"bfloat16[{PARAMETERS}] train" for name in names.values()}
    return replace(plan, sections=sections, model=replace(plan.model, parameters=parameters))


def _ahead(samples: schedule_mixes.Samples, teachers: int, students: int, stages: int = 1) -> Plan:
    """A teacher that runs ahead of its students, which may have stages."""
    pipeline = schedule_mixes.Pipeline(stages, 2 * stages if stages > 1 else 0, stages > 1)
    return replace(
        schedule_mixes.teacher_student(samples, teachers, students, 1.0, pipeline),
        run_ahead_gib=200 * MEBIBYTE,
    )


CASES = {
    "2 ranks, encoder → LM": Case(8, lambda s: schedule_mixes.vlm(s, 1, 1, 0.8)),
    "2 ranks, shared": Case(8, lambda s: _shared(s, 2)),
    "3 ranks, encoder → LM of 2 stages": Case(
        8, lambda s: schedule_mixes.vlm(s, 1, 1, 0.8, pipeline=schedule_mixes.Pipeline(2, 4, True))
    ),
    "3 ranks, teacher → student, ahead": Case(8, lambda s: _ahead(s, 1, 2), schedule_mixes.distillation),
    "4 ranks, encoder → LM of 3 stages": Case(
        8, lambda s: schedule_mixes.vlm(s, 1, 1, 0.8, pipeline=schedule_mixes.Pipeline(3, 6))
    ),
    "4 ranks, teacher → student of 2 stages, ahead": Case(
        8, lambda s: _ahead(s, 2, 1, stages=2), schedule_mixes.distillation
    ),
    "8 ranks, teacher → student of 2 stages, ahead": Case(
        16, lambda s: _ahead(s, 2, 3, stages=2), schedule_mixes.distillation
    ),
    "4 ranks, shared, zero1": Case(16, lambda s: _sharded(s, 4, "zero1")),
    "8 ranks, shared": Case(32, lambda s: _shared(s, 8)),
    "8 ranks, shared, zero3": Case(32, lambda s: _sharded(s, 8, "zero3")),
    "16 ranks, encoder → LM of 4 stages": Case(
        48, lambda s: schedule_mixes.vlm(s, 4, 3, 0.8, pipeline=schedule_mixes.Pipeline(4, 8, True))
    ),
    "64 ranks, encoder → LM of 4 stages": Case(
        128, lambda s: schedule_mixes.vlm(s, 16, 12, 0.8, pipeline=schedule_mixes.Pipeline(4, 8, True))
    ),
}
LARGE = [name for name in CASES if name.startswith("64")]


def write(directory: Path, case: Case, batches: int) -> Plan:
    """A plan directory that can be emulated, whose dataset has the samples of so many steps."""
    samples = [s for seed in range(batches) for s in case.mix(case.samples, seed)]
    text = MODEL.read_text()
    made = case.plan(samples[: case.samples])
    plan = replace(
        made,
        model=ModelRef("model.py", hashlib.sha256(text.encode()).hexdigest(), made.model.parameters),
        global_batch=case.samples,
        inputs=(Input("ids", "int64", ("1", "T")), Input("images", "float32", ("I",), optional=True)),
        symbols=tuple(s for s in schedule_mixes.SYMBOLS if s.name in "TI"),
        cluster=CLUSTER,
    )
    plan = replace(plan, edges=tuple(replace(e, dims=("T", str(WIDTH)), rows="T") for e in plan.edges))
    for name, content in (
        ("model.py", text),
        ("sizes.json", json.dumps([dict(s.sizes) for s in samples])),
        ("plan.json", plan_json(plan)),
        ("run.py", RUN),
        ("ranks/rank.py", RANK),
        ("sections/__init__.py", ""),
        ("sections/terms.py", TERMS),
    ):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)
    return plan


def emulated(directory: Path, plan: Plan, steps: int, scale: float = 1.0) -> list[tuple[int, float, float]]:
    """(step, emulated seconds, simulated seconds) of the run's steps. Raises RuntimeError if it ends
    early."""
    logs = directory / "logs"
    logs.mkdir(exist_ok=True)
    (logs / "table.json").write_text(to_json(table(plan, scale)))
    (logs / FILE).unlink(missing_ok=True)
    if run_plan(
        directory, ["--steps", str(steps), "--log-dir", str(logs), "--emulate", str(logs / "table.json")]
    ):
        raise RuntimeError(f"the run of {directory} ended early")
    return list(
        compared(plan, logs, list(islice(global_batches(directory, plan, steps=steps), steps)), "wavefront")
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="; ".join(CASES))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="stretch all waits")
    options = parser.parse_args(arguments)
    print("| plan | emulated, s | simulated, s | ratio |\n| --- | --- | --- | --- |")
    for name in options.names or [name for name in CASES if name not in LARGE]:
        with tempfile.TemporaryDirectory() as directory:
            plan = write(Path(directory), CASES[name], options.steps)
            found = emulated(Path(directory), plan, options.steps, options.scale)[1:]
        took, expected = (median(column) for column in list(zip(*found, strict=True))[1:])
        ratios = [e / s for _, e, s in found]
        print(
            f"| {name} | {took:.3f} | {expected:.3f} | {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
