"""Compares the cost model with published training steps of real clusters.

    python -m tools.check_published                  all rows of docs/benchmarks/published.json: a table
    python -m tools.check_published --only want-13B  rows with this text in their id, one line each

A row is a layout that its authors measured: shapes of a decoder, devices, tensor and pipeline parallelism,
micro-batch, recomputation, sharding, seconds of a step, or that it ran out of memory. The decoder is written
in plain PyTorch (`tools/published/decoder.py`) and compiled once; each layout is then pinned, as `--set`
would, and priced by the pass `allocate`, on devices with the habits of the framework that the row was
measured with: its attention kernel, norms that are not fused, communication that it hides
(`tools/published/frameworks.py`, one named option for each source). With `--own-runtime` it is secc's own run
of that layout. What an author left unsaid is chosen by secc; such rows
are in no median.

`--json FILE` writes the rows with their predictions, `--errors` the file that `secc explain` reads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

from secc.cluster import Cluster
from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.errors import UserError
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io.module_text import parse_module
from secc.passes.allocate import Allocate
from secc.report.expected_error import ERRORS_FILE
from tools.published.frameworks import (
    FRAMEWORK_MEMORY_MARGIN,
    PRODUCT_PERCENT,
    PublishedFramework,
    framework_of,
)

ROWS_FILE = Path(__file__).parent.parent / "docs" / "benchmarks" / "published.json"
DEVICES_PER_NODE = 8
SECTION = "model"
CLUSTER_KINDS = {"A100": "A100", "A100-40": "A100_40GB", "H100": "H100"}
# Any decoder of the rows fits here; its cost does not depend on the layout that it is compiled for.
COMPILED_LENGTH = 250  # tokens; costs are expressions of the length, which is set afterwards
ROOMY_CLUSTER, ROOMY_RANKS = "64x8xB200", 512
ROOMY_LAYOUT = ("tp=1", "pp=1", "dp=512", "micro_batch=1", "sharding=zero3", "recompute=full")
PREDICTED_COLUMNS = ("predicted_s", "fits", "predicted_gib")
COLUMNS = (
    *("id", "source", "address", "model", "arch", "gpu", "gpus", "seq", "gbs", "mbs", "tp", "pp", "dp"),
    *("recompute", "sharding", "norms", "dtype", "kind", "unsaid", "note", "group", "ran", "step_s"),
    *PREDICTED_COLUMNS,
)
ABOUT = (
    "Published training steps of decoders, and what the cost model predicts. seq, gbs, mbs: tokens of a "
    "sample, samples of a global batch and of a micro-batch. ran: false if out of memory. kind: part if the "
    "authors left out the fields in unsaid. step_s, predicted_s: seconds of a step; fits, predicted_gib: "
    "predicted memory of a rank."
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Prediction:
    """seconds: of a step. fits: into the device's memory. memory_gib: of a rank."""

    seconds: float
    fits: bool
    memory_gib: float


def cluster_of(row: Row) -> str:
    """The cluster of a row as `--cluster` takes it."""
    nodes, devices = -(-row["gpus"] // DEVICES_PER_NODE), min(row["gpus"], DEVICES_PER_NODE)
    return f"{nodes}x{devices}x{CLUSTER_KINDS[row['gpu']]}"


def pins_of(row: Row) -> tuple[str, ...]:
    """The layout of a row as `--set` takes it."""
    choices = {key: row[key] for key in ("tp", "pp", "dp", "recompute", "sharding")} | {"offload": "none"}
    if row.get("mbs"):
        choices["micro_batch"] = row["mbs"]
    if row["tp"] > 1:  # what hid sums over tp is a habit of the framework
        choices["overlap"] = "none"
        choices["norms"] = row.get("norms") or "whole"
    return tuple(f"{SECTION}.{key}={value}" for key, value in choices.items())


def write_model_file(row: Row, folder: Path) -> Path:
    """Writes the model file of a row's decoder."""
    family, given = row["arch"]
    shape = {
        "family": family,
        **{key: given[key] for key in ("layers", "hidden", "heads", "vocab", "tied")},
        "kv": given.get("kv", given["heads"]),
        "ffn": given.get("ffn", 4 * given["hidden"]),
        "bias": given.get("bias", False),
    }
    path = folder / "published_model.py"
    path.write_text(
        "from tools.published.decoder import DecoderShape, FixedLengthTexts, LanguageModel\n\n"
        "import torch\n\n"
        f"def model():\n    made = LanguageModel(DecoderShape(**{shape!r}))\n"
        f"    return made.to(torch.bfloat16) if {row['dtype'] == 'bf16'} else made\n\n"
        f"def dataset():\n    return FixedLengthTexts({COMPILED_LENGTH})\n"
    )
    return path


def compile_until_allocate(row: Row) -> str:
    """Compiles a row's decoder. Returns its IR before `allocate`."""
    with tempfile.TemporaryDirectory() as folder:
        options = CompileOptions(
            cluster=ROOMY_CLUSTER,
            global_batch=ROOMY_RANKS,
            set=tuple(f"{SECTION}.{choice}" for choice in ROOMY_LAYOUT),
            dtype="" if row["dtype"] == "bf16" else "bf16",
            strategy="colocate",
            widths="global",
            max_sections=1,
            stats_samples=2,
        )
        compiled = compile_model(write_model_file(row, Path(folder)), options)
    names = [name for name, _ in compiled.dumps]
    return compiled.dumps[names.index(Allocate.name) - 1][1]


def set_length(ir_text: str, length: int) -> str:
    """Returns the IR with samples of `length` tokens in place of `COMPILED_LENGTH`."""
    mean = f"S = {COMPILED_LENGTH:e}"
    if mean not in ir_text or f"1,{COMPILED_LENGTH}" not in ir_text:
        raise ValueError(f"expected samples of {COMPILED_LENGTH} tokens in the IR")
    return ir_text.replace(mean, f"S = {length:e}").replace(f"1,{COMPILED_LENGTH}", f"1,{length}")


def set_attention_rate(ir_text: str, product_percent: int, attention_percent: int) -> str:
    """Returns the IR with attention at a percentage of the peak, where large products reach another one."""
    slowness = Fraction(product_percent, attention_percent)

    def scale(terms: str, factor: Fraction) -> str:
        return re.sub(r"\d+", lambda found: str(round(int(found[0]) * factor)), terms)

    def rewrite_call(call: re.Match[str]) -> str:
        text, attention, work = call[0], call[1], call[2]
        # Second runs contain attention once.
        again = re.search(r'(?<= again = ")[^"]*', text)
        if again is not None:
            less = f"{again[0]} - ({work}) + {scale(attention, slowness)}"
            text = text.replace(f' again = "{again[0]}"', f' again = "{less}"')
        return text.replace(f'attention_work = "{work}"', f'attention_work = "{scale(attention, slowness)}"')

    return re.sub(r'.* attention = "([^"]*)", attention_work = "([^"]*)".*', rewrite_call, ir_text)


@dataclass(frozen=True)
class AllocateOnFramework(Allocate):
    """`allocate` on devices that run another framework's code. chip: such as A100; None: secc's own."""

    chip: str = ""
    published: PublishedFramework | None = None

    def read_cluster(self) -> Cluster:
        """The cluster with the framework's habits."""
        cluster = super().read_cluster()
        if self.published is None:
            return cluster
        device = replace(
            cluster.device,
            efficiency_percent=PRODUCT_PERCENT[self.chip],
            memory_percent=100,  # the framework's passes over layers are fitted at the full rate
            framework=self.published.framework,
            memory_margin=FRAMEWORK_MEMORY_MARGIN,
        )
        return replace(cluster, device=device)


def predict_row(row: Row, ir_text: str, own_runtime: bool = False) -> Prediction:
    """Prices a row's layout as the framework runs it that it was measured with, or as secc's runtime does."""
    chip = row["gpu"].partition("-")[0]
    published = None if own_runtime else framework_of(row["source"], row.get("note", ""))
    ir_text = set_length(ir_text, row["seq"])
    if published is not None:
        ir_text = set_attention_rate(ir_text, PRODUCT_PERCENT[chip], published.attention_percent[chip])
    graph = graph_of(parse_module(ir_text))
    allocate = AllocateOnFramework(
        cluster=cluster_of(row),
        global_batch=row["gbs"],
        set=pins_of(row),
        strategy="colocate",
        fit=False,
        chip=chip,
        published=published,
    )
    solved = allocate.solve_closed_form(graph)
    chosen = solved.problem.sections[SECTION][solved.solution.assignment.choice[SECTION]]
    capacity = solved.work.cluster.device.usable_memory
    return Prediction(solved.solution.time_ns / 1e9, chosen.memory <= capacity, chosen.memory / 2**30)


def predict_rows(
    rows: Iterable[Row], keep: Path | None = None, own_runtime: bool = False
) -> Iterator[tuple[Row, Prediction | str]]:
    """Yields each row with its prediction (`predict_row`), or with the message of the error that refuses it.

    keep: a folder where the IR of each decoder stays; existing files are read instead of compiling again.
    """
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    by_model: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_model[json.dumps([row["arch"], row["dtype"]])].append(row)
    for model, of_model in by_model.items():
        file = keep and keep / f"{hashlib.sha256(model.encode()).hexdigest()[:16]}.mlir"
        ir_text = file.read_text() if file and file.exists() else compile_until_allocate(of_model[0])
        if file and not file.exists():
            file.write_text(ir_text)
        for row in of_model:
            try:
                yield row, predict_row(row, ir_text, own_runtime)
            except UserError as error:
                yield row, error.message
        print(".", end="", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Summary:
    """Of the rows of a group. error: median of |predicted / measured - 1|; p90: what nine in ten stay below;
    bias: median of predicted / measured. order: Spearman's rank correlation, NaN below three rows.
    refused: layouts that ran, predicted not to fit. accepted: layouts that ran out of memory, predicted to
    fit.
    """

    steps: int
    error: float
    p90: float
    bias: float
    order: float
    refused: int
    ran: int
    accepted: int
    failed: int


def summarize_rows(rows: Sequence[Row]) -> Summary:
    """Summarizes rows that have predictions."""
    timed = [r for r in rows if r["ran"] and r["kind"] == "full"]
    ratios = [r["predicted_s"] / r["step_s"] for r in timed]
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    failed = [r for r in rows if not r["ran"]]
    return Summary(
        steps=len(timed),
        error=median(errors) if errors else math.nan,
        p90=errors[math.ceil(0.9 * len(errors)) - 1] if errors else math.nan,
        bias=median(ratios) if ratios else math.nan,
        order=rank_correlation([r["predicted_s"] for r in timed], [r["step_s"] for r in timed]),
        refused=sum(not r["fits"] for r in rows if r["ran"]),
        ran=sum(r["ran"] for r in rows),
        accepted=sum(r["fits"] for r in failed),
        failed=len(failed),
    )


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation of two sequences without ties; NaN below three entries."""
    if len(a) < 3:
        return math.nan
    ranks = [{i: rank for rank, i in enumerate(sorted(range(len(x)), key=x.__getitem__))} for x in (a, b)]
    squares = sum((ranks[0][i] - ranks[1][i]) ** 2 for i in range(len(a)))
    return 1 - 6 * squares / (len(a) * (len(a) ** 2 - 1))


def add_prediction(row: Row, prediction: Prediction | str) -> Row:
    """Returns a row with its prediction."""
    if isinstance(prediction, str):
        return row | {"refused_because": prediction}
    return row | {
        "predicted_s": round(prediction.seconds, 4),
        "fits": prediction.fits,
        "predicted_gib": round(prediction.memory_gib, 2),
    }


def format_summary(name: str, summary: Summary) -> str:
    """A row of the Markdown table."""
    order = "-" if math.isnan(summary.order) else f"{summary.order:.2f}"
    return (
        f"| {name} | {summary.steps} | {summary.error:.1%} | {summary.p90:.1%} | {summary.bias:.2f} "
        f"| {order} | {summary.refused} of {summary.ran} | {summary.accepted} of {summary.failed} |"
    )


def print_summaries(rows: Sequence[Row]) -> None:
    """Prints the Markdown table: all rows, by source, device, and group."""
    print(
        "| rows | steps | median error | nine in ten below | median ratio | order "
        "| refused, ran | accepted, failed |"
    )
    print("| --- |" + " --- |" * 7)
    print(format_summary("all", summarize_rows(rows)))
    for key in ("source", "gpu", "group"):
        for value in sorted({r[key] for r in rows}):
            print(format_summary(value, summarize_rows([r for r in rows if r[key] == value])))


def read_rows(path: Path) -> list[Row]:
    """Reads the rows of a table, without cells that are empty and without earlier predictions."""
    table = json.loads(path.read_text())
    named_rows = (dict(zip(table["columns"], row, strict=True)) for row in table["rows"])
    return [
        {name: cell for name, cell in row.items() if cell is not None and name not in PREDICTED_COLUMNS}
        for row in named_rows
    ]


def format_rows(rows: Sequence[Row]) -> str:
    """The text of a table: one line for each row."""
    head = {"command": "python -m tools.check_published", "about": ABOUT, "columns": COLUMNS}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    cells = ",\n".join(f"  {json.dumps([row.get(name) for name in COLUMNS])}" for row in rows)
    return "\n".join(["{", *lines, ' "rows": [', cells, " ]", "}", ""])


def format_errors(rows: Sequence[Mapping[str, Any]]) -> str:
    """The text of `published_errors.json`: [kind, tp, pp, sharding, recompute, predicted over measured]."""
    timed = (r for r in rows if r["ran"] and r["kind"] == "full")
    layouts = [
        [
            CLUSTER_KINDS[r["gpu"]],
            *(r[key] for key in ("tp", "pp", "sharding", "recompute")),
            round(r["predicted_s"] / r["step_s"], 3),
        ]
        for r in timed
    ]
    lines = ",\n".join(f"  {json.dumps(layout)}" for layout in layouts)
    command = "python -m tools.check_published --own-runtime --errors"
    return f'{{\n "command": "{command}",\n "layouts": [\n{lines}\n ]\n}}\n'


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, default=ROWS_FILE, help="the rows, as JSON")
    parser.add_argument("--only", default="", help="rows whose id has this text, one line each")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="a folder for the decoders' IR, which is used again"
    )
    parser.add_argument(
        "--own-runtime", action="store_true", help="as secc runs the layouts, not as their frameworks did"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows with predictions")
    parser.add_argument(
        "--errors",
        action="store_true",
        help="renew the errors that `secc explain` shows with predictions, with --own-runtime",
    )
    options = parser.parse_args(arguments)
    if options.errors and not options.own_runtime:
        parser.error("--errors needs --own-runtime: plans are priced for secc's runtime")
    rows = [row for row in read_rows(options.rows) if options.only in row["id"]]
    predicted = [
        add_prediction(row, prediction)
        for row, prediction in predict_rows(rows, options.keep, options.own_runtime)
    ]
    print(file=sys.stderr)
    for row in (r for r in predicted if "refused_because" in r):
        print(f"{row['id']}: {row['refused_because']}")
    known: list[Mapping[str, Any]] = [r for r in predicted if "predicted_s" in r]
    if options.only:
        for row in known:
            measured = (
                f"{row['step_s']:.2f} s, ratio {row['predicted_s'] / row['step_s']:.2f}"
                if row["ran"]
                else "no memory"
            )
            print(
                f"{row['id']}: {row['predicted_s']:.2f} s, {row['predicted_gib']:.0f} GiB; "
                f"measured {measured}"
            )
    print_summaries([dict(r) for r in known])
    if options.errors:
        ERRORS_FILE.write_text(format_errors(known))
    if options.json:
        options.json.write_text(format_rows(predicted))


if __name__ == "__main__":
    main()
