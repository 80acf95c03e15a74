"""Trains mixtures of experts on gloo ranks under layouts with `ep`, and compares with plain PyTorch.

    python -m tools.compare_experts                          all rows; `--json FILE` writes them
    python -m tools.compare_experts --only glm4_moe "dp=4 ep=4 micro_batch=1"    one row again

Models are those of `tests/models` and of the zoo, small and random. A row has the cut that secc found for
the experts, the rows of hidden states that travelled to other ranks in the forwards of a step (one for each
expert that a token chose on another rank), and errors: of the first loss, relative, and the largest of the
first step's gradients, as a share of what [the contract](../docs/guide/exactness.md) allows. A row that
breaks the contract says so.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.errors import UserError
from secc.report.html_page import report_page
from secc.runtime.plan.schema import Plan, Section, Shard
from secc.runtime.training.eager_reference import GRADIENT_FLOOR, GRADIENT_TOLERANCE
from tools.benchmark_table import BenchmarkTable, add_json_option
from tools.compare_training import (
    TrainingResult,
    find_differences,
    read_metrics,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)
from tools.zoo_models import entry

STEPS, BATCH = 2, 6  # samples: more than replicas, and no multiple of 4, so that some replicas have fewer
TEST_MODELS = Path(__file__).parent.parent / "tests" / "models"
# model -> (ranks, pins of its section; a pin with a dot is of another one)
LAYOUTS: dict[str, tuple[tuple[int, str], ...]] = {
    "qwen3_moe": (
        (2, "tp=2 ep=2 sharding=zero1"),
        (4, "tp=4 ep=4"),
        (2, "dp=2 ep=2 recompute=full"),
        (4, "dp=4 ep=4 micro_batch=1"),
        (4, "tp=2 dp=2 ep=4 sharding=zero1"),
        (4, "pp=2 dp=2 ep=2 micro_batch=2"),
        (4, "dp=2 cp=2 ep=2 micro_batch=2"),
    ),
    "gpt_oss_tiny": (
        (2, "tp=2 ep=2 recompute=full"),
        (4, "tp=4 ep=2"),
        (4, "tp=4 ep=4"),
        (4, "dp=4 ep=4 sharding=zero1"),
        (4, "pp=2 dp=2 ep=2"),
    ),
    "mixtral": (
        (2, "tp=2 ep=2"),
        (4, "tp=4 ep=4"),
        (2, "dp=2 ep=2 sharding=zero1"),
        (4, "dp=4 ep=4 recompute=full"),
    ),
    "deepseek_v3": ((4, "tp=4 ep=2"), (4, "tp=4 ep=4"), (4, "dp=4 ep=4 sharding=zero1"), (2, "dp=2 ep=2")),
    "glm4_moe": (
        (2, "tp=2 ep=2"),
        (4, "tp=4 ep=4"),
        (4, "dp=4 ep=4 micro_batch=1"),
        (4, "dp=4 ep=2 recompute=full"),
        (4, "tp=2 dp=2 ep=4"),
    ),
    "qwen3_vl_moe_tiny": (
        (3, "language_model.tp=2 language_model.ep=2 visual.dp=1"),
        (4, "language_model.tp=4 language_model.ep=4 visual.with=language_model"),
        (3, "language_model.dp=2 language_model.ep=2 visual.dp=1"),
        (4, "language_model.dp=4 language_model.ep=4 visual.with=language_model"),
    ),
    "listed_experts": ((2, "tp=2 ep=2"), (4, "dp=4 ep=4 micro_batch=1"), (4, "dp=4 ep=2 sharding=zero1")),
    "one_expert": (
        (2, "tp=2 ep=2"),
        (4, "tp=4 ep=4"),
        (2, "dp=2 ep=2"),
        (4, "dp=4 ep=2 sharding=zero1"),
        (4, "dp=4 ep=4"),
    ),
    "early_exit": ((2, "dp=2 ep=2 micro_batch=1"), (4, "dp=4 ep=4 micro_batch=1")),
    "moe_distil": ((4, "teacher.dp=2 teacher.ep=2 student.dp=2 student.ep=2"),),
}
COLUMNS = ("model", "layout", "ranks", "cut", "rows that travel", "loss error", "gradient error", "exact")
ABOUT = (
    "Small random mixtures of experts on gloo ranks against plain PyTorch, 6 samples a step. cut: what a "
    "rank holds of each mixture. rows that travel: rows of hidden states sent to experts on other ranks in "
    "the forwards of a step; 0 where tokens are on all ranks of a replica already. loss error: of the first "
    "step, relative. gradient error: the largest of the first step's, 1 is what the contract allows. exact: "
    "the contract holds for losses, gradients and parameters of two steps."
)


def describe_cut(plan: Plan) -> str:
    """What a rank holds of the experts of each section that divides them."""
    return "; ".join(dict.fromkeys(text for s in plan.sections for text in _cuts_of_section(s))) or "whole"


def _cuts_of_section(section: Section) -> Iterator[str]:
    shards = {s.name: s for s in section.shards}
    for style in section.styles:
        own = [s for name, s in shards.items() if name.startswith(f"{style.module}.")]
        if style.kind == "routed" and own:
            yield _describe_stacked(own)
        elif style.kind == "listed":
            parts = section.mesh.tp * max(s.replicas for s in own)
            yield f"modules of a list in {parts} parts"
        elif style.kind == "experts":
            yield "inner width"


def _describe_stacked(own: list[Shard]) -> str:
    inner = [s.dim for s in own if s.ep > 1]
    parts = max(s.ep for s in own)
    if inner:
        return f"whole experts in {parts} parts, each by inner width"
    replicas = max(s.replicas for s in own)
    return f"whole experts{f', over {replicas} replicas' if replicas > 1 else ', in a replica'}"


def gradient_error(found: TrainingResult, reference: TrainingResult) -> float:
    """The largest error of a gradient, as a share of what the contract allows."""
    known = {n: g for n, g in reference.gradients.items() if g is not None}
    total = math.sqrt(sum(float(g.norm()) ** 2 for g in known.values()))
    errors = [0.0]
    for name, expected in known.items():
        got = found.gradients.get(name)
        allowed = GRADIENT_TOLERANCE * float(expected.norm()) + GRADIENT_FLOOR * total
        errors.append(math.inf if got is None else float((got - expected).norm()) / allowed)
    return max(errors)


class ModelRows:
    """The rows of one model, with its reference."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        source = TEST_MODELS
        if not (TEST_MODELS / f"{name}.py").exists():
            source = folder
            (folder / f"{name}.py").write_text(entry(name).source())
        self.path = write_recording_model(name, folder, source)
        self.reference = cache(lambda: train_in_one_process(self.path, BATCH, STEPS, folder / "plain"))

    def compare(self, ranks: int, layout: str) -> tuple[object, ...]:
        """The cells of a row."""
        pins = tuple(p if "." in p else f"model.{p}" for p in layout.split())
        options = CompileOptions(cluster=f"local:{ranks}", global_batch=BATCH, set=pins)
        work = self.folder / layout.replace(" ", "_")
        work.mkdir()
        try:
            made = compile_model(self.path, options)
        except UserError as refused:
            return self.name, layout, ranks, f"refused: {refused.message}", "-", "-", "-", "-"
        made.write_plan(work / "plan", report_page)
        found, expected = train_distributed(work / "plan", ranks, STEPS, work / "run"), self.reference()
        travelled = read_metrics(work / "run")[0].get("expert_rows_sent", 0)
        loss = abs(found.losses[0] - expected.losses[0]) / abs(expected.losses[0])
        differences = list(find_differences(found, expected))
        return (
            self.name,
            layout,
            ranks,
            describe_cut(made.plan),
            int(travelled),
            f"{loss:.1e}",
            f"{gradient_error(found, expected):.2f}",
            f"no: {differences[0]}" if differences else "yes",
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar=("MODEL", "LAYOUT"), help="one model, or one row of it")
    add_json_option(parser)
    arguments = parser.parse_args()
    model, layout = (*(arguments.only or ()), "", "")[:2]
    table = BenchmarkTable(COLUMNS, ABOUT, arguments.json)
    for name, layouts in LAYOUTS.items():
        if model in ("", name):
            with tempfile.TemporaryDirectory() as folder:
                rows = ModelRows(name, Path(folder))
                for ranks, pins in layouts:
                    if layout in ("", pins):
                        table.add_row(*rows.compare(ranks, pins))


if __name__ == "__main__":
    main()
