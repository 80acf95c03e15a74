"""Compares emulated steps with simulated ones: real processes and the real control plane, sleeping in place
of training.

    python -m tools.bench_emulation [NAME ...] --steps 3     2 to 16 ranks; plans with 64 only by name

Each plan has the sections of `tools/schedule_mixes.py` on nodes of 8 devices, and its own samples. Wall time
over simulated time of each step except the first, in which processes warm up. Prints Markdown; `--json FILE`
writes it.
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
from secc.runtime.plan.schema import plan_to_json as plan_json
from secc.runtime.training.emulation import EMULATION_FILE, table_to_json
from secc.runtime.training.supervisor import run_plan
from secc.simulate.emulation_table import compare_emulated_steps, make_emulation_table
from secc.simulate.global_batches import load_global_batches
from tools import schedule_mixes
from tools.benchmark_table import BenchmarkTable, add_json_option

MODEL = Path(__file__).parent / "models" / "sized.py"
EMULATED_LINK = {"latency_ns": 20_000, "bytes_per_s": 10**10}
EMULATED_DEVICE = {
    "kind": "cpu",
    "backend": "cpu",
    "gflops": [["f32", 100]],
    "memory": 1 << 34,
    "memory_bytes_per_s": 10**11,
    "efficiency_percent": 50,
    "op_ns": 1,
    "reserved": 0,
    "label": "default",
}
EMULATED_CLUSTER = {
    "name": "emulated",
    "nodes": 8,
    "per_node": 8,
    "inside": EMULATED_LINK,
    "between": EMULATED_LINK | {"latency_ns": 60_000},
    "device": EMULATED_DEVICE,
}
TOKEN_ROW_WIDTH = 4096  # entries of a token's row on an edge
MEBIBYTE_IN_GIB = 2**-10  # GiB
PARAMETER_ENTRIES = 50_000_000  # entries of a section's parameter, where a plan has any

TERMS_SOURCE = """CONSTANT = 0.0
BUFFERS = ()
LEAVES = {}


def coefficients(leaves, size, pattern):
    return {}
"""
RUN_SOURCE = """import runpy
import sys
from pathlib import Path

PLAN = Path(__file__).resolve().parent
sys.path.insert(0, str(PLAN))
runpy.run_path(str(PLAN / "ranks" / "rank.py"), run_name="__main__")
"""
RANK_SOURCE = """import sys

from secc.runtime.training.launch import main

sys.exit(main(lambda options: sys.exit("there is nothing to train: start it with --emulate")))
"""


@dataclass(frozen=True)
class EmulationCase:
    """A plan: how many samples a step has, and what runs where. `mix` draws samples, `plan` lays out the
    sections for them."""

    samples: int
    build_plan: Callable[[schedule_mixes.SampleList], Plan]
    draw_samples: Callable[[int, int], schedule_mixes.SampleList] = lambda count, seed: (
        schedule_mixes.multimodal_batch(count, 0.33, seed)
    )


def _shared_ranks_plan(samples: schedule_mixes.SampleList, ranks: int) -> Plan:
    """An encoder and a language model on the same ranks."""
    plan = schedule_mixes.vlm_plan(samples, ranks, ranks, 0.5)
    moved = (replace(s, mesh=replace(s.mesh, ranks=tuple(range(ranks)))) for s in plan.sections)
    return replace(plan, sections=tuple(moved), world_size=ranks)


def _sharded_plan(samples: schedule_mixes.SampleList, ranks: int, way: str) -> Plan:
    """The plan of `_shared_ranks_plan` with 16-bit parameters and ZeRO mode `way`: ranks share optimizer
    states, or all states."""
    plan = _shared_ranks_plan(samples, ranks)
    names = {s.name: f"{s.name}.weight" for s in plan.sections}
    sections = tuple(replace(s, sharding=way, params=(names[s.name],)) for s in plan.sections)
    parameters = {name: f"bfloat16[{PARAMETER_ENTRIES}] train" for name in names.values()}
    return replace(plan, sections=sections, model=replace(plan.model, parameters=parameters))


def _prefetching_plan(
    samples: schedule_mixes.SampleList, teachers: int, students: int, stages: int = 1
) -> Plan:
    """A teacher that runs ahead of its students, which may have stages."""
    pipeline = schedule_mixes.PipelineShape(stages, 2 * stages if stages > 1 else 0, stages > 1)
    return replace(
        schedule_mixes.teacher_student_plan(samples, teachers, students, 1.0, pipeline),
        run_ahead_gib=200 * MEBIBYTE_IN_GIB,
    )


EMULATION_CASES = {
    "2 ranks, encoder → LM": EmulationCase(8, lambda s: schedule_mixes.vlm_plan(s, 1, 1, 0.8)),
    "2 ranks, shared": EmulationCase(8, lambda s: _shared_ranks_plan(s, 2)),
    "3 ranks, encoder → LM of 2 stages": EmulationCase(
        8, lambda s: schedule_mixes.vlm_plan(s, 1, 1, 0.8, pipeline=schedule_mixes.PipelineShape(2, 4, True))
    ),
    "3 ranks, teacher → student, ahead": EmulationCase(
        8, lambda s: _prefetching_plan(s, 1, 2), schedule_mixes.distillation_batch
    ),
    "4 ranks, encoder → LM of 3 stages": EmulationCase(
        8, lambda s: schedule_mixes.vlm_plan(s, 1, 1, 0.8, pipeline=schedule_mixes.PipelineShape(3, 6))
    ),
    "4 ranks, teacher → student of 2 stages, ahead": EmulationCase(
        8, lambda s: _prefetching_plan(s, 2, 1, stages=2), schedule_mixes.distillation_batch
    ),
    "8 ranks, teacher → student of 2 stages, ahead": EmulationCase(
        16, lambda s: _prefetching_plan(s, 2, 3, stages=2), schedule_mixes.distillation_batch
    ),
    "4 ranks, shared, zero1": EmulationCase(16, lambda s: _sharded_plan(s, 4, "zero1")),
    "8 ranks, shared": EmulationCase(32, lambda s: _shared_ranks_plan(s, 8)),
    "8 ranks, shared, zero3": EmulationCase(32, lambda s: _sharded_plan(s, 8, "zero3")),
    "16 ranks, encoder → LM of 4 stages": EmulationCase(
        48, lambda s: schedule_mixes.vlm_plan(s, 4, 3, 0.8, pipeline=schedule_mixes.PipelineShape(4, 8, True))
    ),
    "64 ranks, encoder → LM of 4 stages": EmulationCase(
        128,
        lambda s: schedule_mixes.vlm_plan(s, 16, 12, 0.8, pipeline=schedule_mixes.PipelineShape(4, 8, True)),
    ),
}
LARGE_CASES = [name for name in EMULATION_CASES if name.startswith("64")]


def write_plan_directory(directory: Path, case: EmulationCase, batches: int) -> Plan:
    """Writes a plan directory that can be emulated; its dataset has the samples of `batches` steps."""
    samples = [s for seed in range(batches) for s in case.draw_samples(case.samples, seed)]
    text = MODEL.read_text()
    plan_of_case = case.build_plan(samples[: case.samples])
    plan = replace(
        plan_of_case,
        model=ModelRef("model.py", hashlib.sha256(text.encode()).hexdigest(), plan_of_case.model.parameters),
        sections=tuple(replace(s, module=f"sections/{s.name}.py") for s in plan_of_case.sections),
        global_batch=case.samples,
        inputs=(Input("ids", "int64", ("1", "T")), Input("images", "float32", ("I",), optional=True)),
        symbols=tuple(s for s in schedule_mixes.MIX_SYMBOLS if s.name in "TI"),
        cluster=EMULATED_CLUSTER,
    )
    active = {s.name: s.when for s in plan.sections}
    plan = replace(
        plan,
        edges=tuple(
            replace(e, dims=("T", str(TOKEN_ROW_WIDTH)), rows="T", when=active[e.src]) for e in plan.edges
        ),
    )
    for name, content in (
        ("model.py", text),
        ("sizes.json", json.dumps([dict(s.sizes) for s in samples])),
        ("plan.json", plan_json(plan)),
        ("run.py", RUN_SOURCE),
        ("ranks/rank.py", RANK_SOURCE),
        ("sections/__init__.py", ""),
        ("sections/terms.py", TERMS_SOURCE),
    ):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)
    return plan


def run_emulated(
    directory: Path, plan: Plan, steps: int, scale: float = 1.0
) -> list[tuple[int, float, float]]:
    """(step, emulated seconds, simulated seconds) of the run's steps. Raises RuntimeError if it ends
    early."""
    logs = directory / "logs"
    logs.mkdir(exist_ok=True)
    (logs / "table.json").write_text(table_to_json(make_emulation_table(plan, scale)))
    (logs / EMULATION_FILE).unlink(missing_ok=True)
    if run_plan(
        directory, ["--steps", str(steps), "--log-dir", str(logs), "--emulate", str(logs / "table.json")]
    ):
        raise RuntimeError(f"the run of {directory} ended early")
    return list(
        compare_emulated_steps(
            plan, logs, list(islice(load_global_batches(directory, plan, steps=steps), steps)), "wavefront"
        )
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="; ".join(EMULATION_CASES))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="stretch all sleeps")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    table = BenchmarkTable(
        ("plan", "emulated, s", "simulated, s", "ratio"),
        "Wall time of real, sleeping ranks over the simulated step: median (least to most).",
        options.json,
    )
    for name in options.names or [name for name in EMULATION_CASES if name not in LARGE_CASES]:
        with tempfile.TemporaryDirectory() as directory:
            plan = write_plan_directory(Path(directory), EMULATION_CASES[name], options.steps)
            found = run_emulated(Path(directory), plan, options.steps, options.scale)[1:]
        took, expected = (median(column) for column in list(zip(*found, strict=True))[1:])
        ratios = [e / s for _, e, s in found]
        spread = f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        table.add_row(name, f"{took:.3f}", f"{expected:.3f}", spread)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
