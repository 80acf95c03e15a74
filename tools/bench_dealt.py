"""Measures on CPU ranks what cp for each micro-batch (dynamic cp) gains over one cp for all samples.

    python -m tools.bench_dealt       prints a table; `--json FILE` writes it

A small Llama with `cp` 2 is compiled with `cp_per=section` and with `cp_per=micro_batch`. Both plans train
the same global batches on two gloo ranks, one run after the other, for some rounds. Lengths are those
of articles of Wikipedia (`tools/workloads/parts/long_texts.py`), 16 times shorter, or follow Pareto's law
with the exponent of `long_32b`. What is compared is the time of a step, median of a run: the ratio of each
round, per micro-batch over per section, its median, and its extremes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import secc
from tools.benchmark_table import BenchmarkTable, add_json_option
from tools.compare_training import read_metrics, run_plan_ranks

RANKS, GLOBAL_BATCH, STEPS, ROUNDS = 2, 32, 4, 3
RUN_LIMIT_S = 900
KINDS = {
    "articles of Wikipedia, 16 times shorter": "CountedTexts(64, 128_000, shrink=16)",
    "Pareto's law, 16 to 1,024 tokens": "LongTexts(16, 1024)",
}
COLUMNS = ("lengths", "per micro-batch / per section", "least of rounds", "most")
ABOUT = (
    f"A Llama of 4 layers of width 128 with cp 2 on two gloo ranks of one machine, {GLOBAL_BATCH} samples a "
    f"step: time of a step, median over {ROUNDS} rounds of the ratio of two runs, in turns. No GPU "
    "was used."
)
MODEL_FILE = """
import sys
sys.path.insert(0, {workloads!r})
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from parts.long_texts import CountedTexts, LongTexts

def model():
    sizes = dict(hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=8)
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, use_cache=False, pad_token_id=0, **sizes))

def dataset():
    made = {texts}
    lengths = [made.length(i) for i in range({count})]
    texts = [torch.randint(1, 512, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    return [{{"input_ids": t, "labels": t}} for t in texts]
"""


def compile_plan(path: Path, plan: Path, per: str) -> None:
    """Compiles the model with cp 2, for each section or for each micro-batch."""
    pins = ("model.cp=2", f"model.cp_per={per}")
    options = {"cluster": f"local:{RANKS}", "global_batch": GLOBAL_BATCH}
    secc.compile(path, out=plan, check=False, set=pins, **options)  # pyright: ignore[reportArgumentType]


def run_plan(plan: Path, work: Path) -> float:
    """Seconds of a step, the median of a run without its first step."""
    work.mkdir()
    arguments = ["--steps", str(STEPS), "--log-dir", str(work), "--workers", "0", "--no-first-check"]
    run_plan_ranks(plan, RANKS, arguments, limit_s=RUN_LIMIT_S)
    return statistics.median(m["step_time_s"] for m in read_metrics(work)[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_option(parser)
    table = BenchmarkTable(COLUMNS, ABOUT, parser.parse_args().json)
    workloads = Path(__file__).parent / "workloads"
    for number, (kind, texts) in enumerate(KINDS.items()):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            path = folder / f"dealt_{number}.py"
            path.write_text(
                MODEL_FILE.format(workloads=str(workloads), texts=texts, count=GLOBAL_BATCH * STEPS)
            )
            ways = ("section", "micro_batch")
            for per in ways:
                compile_plan(path, folder / per, per)
            ratios = list[float]()
            for turn in range(ROUNDS):
                divided, dealt = (run_plan(folder / per, folder / f"{per}{turn}") for per in ways)
                ratios.append(dealt / divided)
            shown = (statistics.median(ratios), min(ratios), max(ratios))
            table.add_row(kind, *(f"{ratio:.2f}" for ratio in shown))


if __name__ == "__main__":
    main()
