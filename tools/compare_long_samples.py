"""Compares ways to train on long samples by the cost model: recomputation, tensor parallelism and context
parallelism (cp) of Llama 13B on 1x8xH100.

    python -m tools.compare_long_samples               prints a table; `--json FILE` writes it

For each length the decoder of `tools/published` is compiled for a global batch of 2**20 tokens; that gives
the row `no pin`. Other rows pin choices, as `secc explain --what-if` does, and price them from the IR that
the plan directory keeps. Nothing is in host memory unless a choice says so. Where a choice does not fit, its
row has what it needs at the least, and no step. Nothing runs on a GPU. Compiling for 131,072 tokens takes 12
GiB of memory here.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import secc
from secc.alloc.problem.types import Candidate
from secc.driver import what_if
from secc.errors import UserError
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io.module_text import parse_module
from secc.passes.allocate import Allocate
from tools.benchmark_table import BenchmarkTable, add_json_option

SECTION, CLUSTER = "model", "1x8xH100"
LENGTHS = (8192, 32768, 131072)
BATCH_TOKENS = 2**20
ONE_RANK = ("tp=1", "pp=1", "cp=1", "sharding=zero3")
ALL_TP, ALL_CP = ("tp=8", "pp=1", "cp=1"), ("tp=1", "pp=1", "cp=8", "sharding=zero3")
ON_DEVICES = "offload=none"  # unless a choice says otherwise
CHOICES = {
    "zero3": (*ONE_RANK, "recompute=none"),
    "zero3, recompute full": (*ONE_RANK, "recompute=full"),
    "zero3, recompute selective": (*ONE_RANK, "recompute=selective"),
    "zero3, offload activations": (*ONE_RANK, "recompute=none", "offload=activations"),
    "tp 8": (*ALL_TP, "recompute=none", "norms=whole"),
    "tp 8, norms on slices": (*ALL_TP, "recompute=none", "norms=sequence"),
    "tp 8, recompute full": (*ALL_TP, "recompute=full", "norms=whole"),
    "zero3, cp 2, recompute full": ("tp=1", "pp=1", "cp=2", "sharding=zero3", "recompute=full"),
    "zero3, tp 2, cp 4, recompute full": ("tp=2", "pp=1", "cp=4", "sharding=zero3", "recompute=full"),
    "zero3, cp 8": (*ALL_CP, "recompute=none"),
    "zero3, cp 8, gathered": (*ALL_CP, "recompute=none", "attention=gather"),
    "zero3, cp 8, recompute full": (*ALL_CP, "recompute=full"),
}
COLUMNS = ("tokens", "choice", "layout", "fits", "GiB on a rank", "predicted step, s")
ABOUT = (
    "Llama 13B (plain PyTorch, bf16, AdamW) on 1x8xH100, 2**20 tokens in a step, samples of one length, as "
    "the cost model predicts it: nothing has been timed on a GPU. choice: what is pinned; no pin: what secc "
    "compile chooses. fits: in 80 GiB less what is held back. GiB: of the plan, or the least that is needed "
    "where it does not fit on devices; null: it does not fit, on hosts where GiB are null, too."
)
MODEL_FILE = """
from tools.published.decoder import DecoderShape, FixedLengthTexts, LanguageModel

def model():
    return LanguageModel(DecoderShape("llama", 40, 5120, 40, 32000, 40, 13824))

def dataset():
    return FixedLengthTexts({length})
"""


def describe_layout(c: Candidate) -> str:
    """The layout of a candidate in words; what is 1 or none is left out."""
    sizes = [f"{key} {size}" for key in ("dp", "tp", "pp", "cp") if (size := getattr(c, key)) > 1]
    ways = [f"recompute {c.recompute}"] * (c.recompute != "none") + [c.sharding] * (c.sharding != "none")
    ways += [f"offload {c.offload}"] * (c.offload != "none")
    return ", ".join([*sizes, f"micro-batch {c.micro_batch}", *ways])


def price_choice(plan: Path, pins: tuple[str, ...]) -> tuple[str, str, str, str]:
    """Prices pinned choices (`tp=8`) from a plan's IR: the cells from `layout` on."""
    (allocate, *_), ir_file = what_if.load_before_allocate(plan)
    assert isinstance(allocate, Allocate)
    allocate = dataclasses.replace(
        allocate, set=tuple(f"{SECTION}.{pin}" for pin in (ON_DEVICES, *pins)), fit=False
    )
    try:
        solved = allocate.solve_closed_form(graph_of(parse_module(ir_file.read_text())))
    except UserError:  # the host has no memory for what leaves a device
        return "-", "no", "-", "-"
    chosen = solved.problem.sections[SECTION][solved.solution.assignment.choice[SECTION]]
    fits = chosen.memory <= solved.work.cluster.device.usable_memory
    seconds = f"{solved.solution.time_ns / 1e9:.2f}" if fits else "-"
    return describe_layout(chosen), "yes" if fits else "no", f"{chosen.memory / 2**30:.1f}", seconds


def iter_rows(length: int, folder: Path) -> Iterator[tuple[object, ...]]:
    """Compiles the decoder for samples of `length` tokens and yields a row for each choice."""
    model, plan = folder / "long_model.py", folder / f"plan{length}"
    model.write_text(MODEL_FILE.format(length=length))
    compiled = secc.compile(
        model,
        cluster=CLUSTER,
        global_batch=BATCH_TOKENS // length,
        out=plan,
        check=False,
        dtype="bf16",
        strategy="colocate",
        max_sections=1,
        stats_samples=2,
    ).contents
    (section,) = compiled.user_sections
    mesh = section.mesh
    made = Candidate(mesh.dp, section.micro_batch, 0, tp=mesh.tp, pp=mesh.pp, cp=mesh.cp)
    made = dataclasses.replace(
        made, recompute=section.recompute, sharding=section.sharding, offload=section.offload
    )
    seconds = compiled.predicted_step_s
    step = f"{seconds:.2f}" if seconds is not None else "-"
    yield length, "no pin", describe_layout(made), "yes", f"{section.memory_gib:.1f}", step
    for name, pins in CHOICES.items():
        yield (length, name, *price_choice(plan, pins))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_option(parser)
    table = BenchmarkTable(COLUMNS, ABOUT, parser.parse_args().json)
    with tempfile.TemporaryDirectory() as folder:
        for length in LENGTHS:
            for row in iter_rows(length, Path(folder)):
                table.add_row(*row)


if __name__ == "__main__":
    main()
