"""Measures what `--pack` gains: the step of a plan with samples side by side in one row against the step of
one that pads them.

    python -m tools.bench_packing       prints a table; `--json FILE` writes it

A small Llama is compiled twice, with `--pack never` and `--pack always`, and both plans run forward and
backward of the same global batches on one CPU rank, in turns. What is compared is CPU time, which other
processes on the machine change less than wall time: the ratio of each round, packed over padded, its mean,
and its extremes. Packed and padded micro-batches have as many tokens at most (`micro_batch_tokens`).

Lengths are assumptions: instructions with a mean of 40 tokens, most of them short, and texts of nearly one
length. Both are ten times shorter than real ones, as the model is small.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import mean

import torch

import secc
from secc.runtime.model.user_file import load_model_file
from secc.runtime.training.one_rank_plan import OneRankPlan
from tools.benchmark_table import BenchmarkTable, add_json_option

GLOBAL_BATCH, ROUNDS = 32, 4
LENGTHS = {
    "instructions, mean 40": "min(400, max(4, round(random.lognormvariate(3.2, 1.0))))",
    "texts, 120 to 128": "random.randint(120, 128)",
}
BUDGETS = (256, 1024)  # tokens of a micro-batch
COLUMNS = ("lengths", "tokens of a micro-batch", "packed / padded", "least", "most")
ABOUT = (
    "CPU time of forward and backward of 32 samples on one CPU rank: a Llama of 4 layers of width 128, "
    "packed over padded, mean and extremes of 4 rounds in which both run one after the other. No GPU was "
    "used."
)
MODEL_FILE = """
import random
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def model():
    sizes = dict(hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=8)
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, use_cache=False, pad_token_id=0, **sizes))

def dataset():
    random.seed(0)
    lengths = [{draw} for _ in range({count})]
    texts = [torch.randint(1, 512, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    return [{{"input_ids": t, "labels": t}} for t in texts]
"""


def compile_plan(path: Path, folder: Path, pack: str, tokens: int) -> OneRankPlan:
    """Compiles the model for one CPU rank and makes the plan ready to run here."""
    made = secc.compile(
        path,
        cluster="local:1",
        global_batch=GLOBAL_BATCH,
        out=folder / f"{pack}{tokens}",
        check=False,
        pack=pack,
        set=(f"model.micro_batch_tokens={tokens}",),
    )
    user = load_model_file(path)
    user = user.pack_samples() if pack == "always" else user
    torch.manual_seed(0)
    return OneRankPlan(made.contents, folder / f"{pack}{tokens}", user, user.build_model())


def cpu_seconds(plan: OneRankPlan, samples: list[dict[str, torch.Tensor]]) -> float:
    """CPU seconds of one forward and backward of `samples`, in the plan's micro-batches."""
    start = time.process_time()
    plan.run_step(samples, len(samples))
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_option(parser)
    table = BenchmarkTable(COLUMNS, ABOUT, parser.parse_args().json)
    with tempfile.TemporaryDirectory() as name:
        for number, (kind, draw) in enumerate(LENGTHS.items()):
            path = Path(name) / f"packed_{number}.py"
            path.write_text(MODEL_FILE.format(draw=draw, count=GLOBAL_BATCH * (ROUNDS + 1)))
            data = load_model_file(path)
            batches = [
                [dict(data.load_sample(i)) for i in range(r * GLOBAL_BATCH, (r + 1) * GLOBAL_BATCH)]
                for r in range(ROUNDS + 1)
            ]
            for tokens in BUDGETS:
                folder = Path(name) / str(number)
                plans = [compile_plan(path, folder, pack, tokens) for pack in ("never", "always")]
                times = [[cpu_seconds(plan, batch) for plan in plans] for batch in batches][1:]
                ratios = [packed / padded for padded, packed in times]
                figures = (mean(ratios), min(ratios), max(ratios))
                table.add_row(kind, tokens, *(f"{ratio:.3f}" for ratio in figures))


if __name__ == "__main__":
    main()
