"""Compares predicted memory of ranks that share parameters, states or rows with their resident memory.

    python -m tools.check_sharded_memory [WAY ...]     prints a table; `--json FILE` writes it

A language model of eight layers trains on two gloo ranks, distributed in each way. Ways named `long` train
one of four layers on a sample of 8,192 tokens, with and without ranks that share its rows. Measured is the
peak resident memory of a process during the second and third step, without what it had before it built the
model, and without pages of libraries, which training reads in under each way. A rank reuses freed memory in
the next step; here its C library is set to map tensors one by one, parameters too, so that freed ones are
returned and resident memory is in use.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path

from secc.bounds.traffic import parameter_bytes
from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.report.html_page import report_page
from tools.benchmark_table import BenchmarkTable, add_json_option
from tools.compare_training import run_plan_ranks

TWO_REPLICAS = ("dp=2",)
RUN_LIMIT_S = 1200
STATE_COPIES = 4  # parameters, gradients, two moments of AdamW


@dataclass(frozen=True)
class MeasuredShape:
    """A model (`layers` of width `hidden`) and its samples of `tokens`; `batch` samples in a step, in
    micro-batches of `micro_batch`."""

    layers: int
    hidden: int
    tokens: int
    batch: int
    micro_batch: int


SHORT, LONG = MeasuredShape(8, 512, 384, 8, 2), MeasuredShape(4, 256, 8192, 1, 1)
PINS_BY_WAY = {  # pins of the section
    "none": TWO_REPLICAS,
    "zero1": (*TWO_REPLICAS, "sharding=zero1"),
    "zero2": (*TWO_REPLICAS, "sharding=zero2"),
    "zero3": (*TWO_REPLICAS, "sharding=zero3"),
    "tp 2": ("dp=1", "tp=2"),
    "pp 2": ("dp=1", "pp=2"),
    "long": ("dp=1",),
    "long, cp 2": ("dp=1", "cp=2"),
    "long, cp 2, zero3": ("dp=1", "cp=2", "sharding=zero3"),
    "long, tp 2": ("dp=1", "tp=2"),
    "long, cp 2, tp 2": ("dp=1", "cp=2", "tp=2"),
    "long, pp 2": ("dp=1", "pp=2"),
    "long, cp 2, pp 2": ("dp=1", "cp=2", "pp=2"),
}
DEGREES = ("dp=", "cp=", "tp=", "pp=")
MEASURED_MODEL_TEXT = """
import ctypes
import os
import torch
import transformers as T

def used(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024

BEFORE = [0]

def map_tensors():
    library = ctypes.CDLL(None)
    library.mallopt(-1, 1 << 16)  # M_TRIM_THRESHOLD; below: M_MMAP_THRESHOLD
    library.mallopt(-3, 1 << 16)
    library.malloc_trim(0)  # free heap memory would be used first

def model():
    map_tensors()
    config = T.Qwen3Config(
        num_hidden_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HIDDEN // 64,
        num_key_value_heads=HIDDEN // 128, head_dim=64, intermediate_size=3 * HIDDEN, vocab_size=4000,
        use_cache=False, max_position_embeddings=TOKENS,
    )
    BEFORE[0] = BEFORE[0] or used("RssAnon")
    return T.AutoModelForCausalLM.from_config(config)

def optimizer(params):
    made = torch.optim.AdamW(params, lr=1e-4, foreach=False)

    def note(*_):
        with open(os.path.join(os.environ["MEMORY"], os.environ["RANK"]), "w") as file:
            file.write(str(used("VmHWM") - used("RssFile") - BEFORE[0]))
        if made.steps == 0:
            open("/proc/self/clear_refs", "w").write("5")  # reset the peak
        made.steps += 1

    made.steps = 0
    if "MEMORY" in os.environ:
        made.register_step_post_hook(note)
    return made

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        words = torch.randint(10, 1000, (TOKENS,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": words, "labels": words.clone()}

def dataset():
    return Samples()
"""


def compare_resident_memory(way: str, folder: Path) -> tuple[float, float, float]:
    """(predicted, measured, parameters and states alone) bytes of the rank with most resident memory."""
    path, plan = folder / "model.py", folder / "plan"
    shape = LONG if way.startswith("long") else SHORT
    constants = f"LAYERS, HIDDEN, TOKENS = {shape.layers}, {shape.hidden}, {shape.tokens}\n"
    path.write_text(constants + MEASURED_MODEL_TEXT)
    first = ("sharding=none", f"micro_batch={shape.micro_batch}", "recompute=none")
    pins = tuple(f"model.{pin}" for pin in (*first, *PINS_BY_WAY[way]))
    ranks = prod(int(pin.partition("=")[2]) for pin in PINS_BY_WAY[way] if pin.startswith(DEGREES))
    options = CompileOptions(
        cluster=f"local:{ranks}", global_batch=shape.batch, max_sections=1, fuse=False, set=pins
    )
    compiled = compile_model(path, options)
    compiled.write_plan(plan, report_page)
    arguments = [
        "--steps",
        "2" if shape is LONG else "3",
        "--workers",
        "0",
        "--log-dir",
        str(folder / "logs"),
    ]
    run_plan_ranks(plan, ranks, arguments, {"MEMORY": str(folder)}, RUN_LIMIT_S)
    resident, rank = max((float((folder / str(r)).read_text()), r) for r in range(ranks))
    section = next(s for s in compiled.plan.sections if rank in s.mesh.ranks)
    states = STATE_COPIES * sum(parameter_bytes(compiled.plan, name) for name in section.params)
    sharing = section.mesh.dp * section.mesh.cp if section.sharding == "zero3" else 1
    return section.memory_gib * 2**30, resident, states / (section.mesh.tp * sharing)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ways", nargs="*", metavar="WAY", default=list(PINS_BY_WAY))
    add_json_option(parser)
    options = parser.parse_args()
    table = BenchmarkTable(
        ("way", "predicted, MiB", "resident, MiB", "error", "of these activations, MiB"),
        "Predicted against resident memory of gloo ranks; the rank that has most. Activations: resident "
        "without the rank's parameters, gradients and optimizer states.",
        options.json,
    )
    for way in options.ways:
        with tempfile.TemporaryDirectory() as name:
            predicted, resident, states = compare_resident_memory(way, Path(name))
        error = f"{predicted / resident - 1:+.1%}"
        kept = f"{(resident - states) / 2**20:.0f}" if way.startswith(("none", "long")) else "-"
        table.add_row(way, f"{predicted / 2**20:.0f}", f"{resident / 2**20:.0f}", error, kept)


if __name__ == "__main__":
    main()
