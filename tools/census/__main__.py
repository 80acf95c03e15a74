"""Compiles and checks a small random model of every model type of the installed transformers.

    python -m tools.census                          all rows, going on where the last call stopped
    python -m tools.census --only image-text/       rows whose names match a pattern, again
    python -m tools.census --sample 20              twenty rows of all
    python -m tools.census --only gpt2 --ranks 3    train the rows on three gloo ranks, too
    python -m tools.census --write                  write the table of all results so far

A row is exact, refused with place and reason, failed, or not trained by plain PyTorch. Results are appended
to `--results` as they come, one JSON object a line; the latest of a row counts, and rows of the published
table (docs/benchmarks/census.json) are known, too.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from tools.census.results import ResultFile
from tools.census.row_processes import Limits, run_rows
from tools.census.rows import rows
from tools.census.table import print_summary, read_table, write_table

RUN_EVERY = 10  # of the rows of a whole census, one in so many is trained on ranks


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="PATTERN", help="rows whose names match, whatever is known of them")
    parser.add_argument("--sample", type=int, metavar="N", help="N rows, drawn with a fixed seed")
    parser.add_argument(
        "--shuffle", action="store_true", help="in an order with a fixed seed, not family by family"
    )
    parser.add_argument("--ranks", type=int, help="train every row on so many ranks; 0: none")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="rows at a time")
    parser.add_argument("--limit", type=float, default=400, metavar="S", help="processor seconds for a row")
    parser.add_argument("--memory", type=float, default=6, metavar="GIB", help="memory of a row")
    parser.add_argument("--results", type=Path, default=Path("runs/census.jsonl"), metavar="FILE")
    parser.add_argument(
        "--known", choices=("commit", "any"), default="commit", help="which results are not repeated"
    )
    parser.add_argument("--write", action="store_true", help="write docs/census.md and its JSON, run nothing")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    results = ResultFile(options.results, _versions(), read_table())
    if options.write:
        write_table(results.latest())
        return 0
    names = [n for n in rows() if not options.only or re.search(options.only, n)]
    if options.sample:
        names = sorted(random.Random(0).sample(names, min(options.sample, len(names))))
    if options.list:
        print("\n".join(names))
        return 0
    known = set[str]() if options.only else results.known(any_commit=options.known == "any")
    every = 1 if options.ranks else RUN_EVERY
    ranks = 3 if options.ranks is None and not options.only else options.ranks or 0
    tasks = [(n, ranks if i % every == 0 else 0) for i, n in enumerate(names) if n not in known]
    if options.shuffle:  # a census that is stopped early has then seen some of every family
        random.Random(0).shuffle(tasks)
    done = []
    for result in run_rows(tasks, options.jobs, Limits(options.limit, options.memory)):
        results.append(result)
        done.append(result)
        print(
            f"{len(done)}/{len(tasks)} {result.seconds:6.1f} s  {result.name:40} {result.outcome.value:10} "
            f"{result.run and f'run: {result.run}'} {result.message[:200]}",
            flush=True,
        )
    print_summary(done)
    return 1 if any(r.outcome.value == "failed" for r in done) else 0


def _versions() -> dict[str, str]:
    """What a result depends on besides its row."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=10"], capture_output=True, text=True, check=False
    )
    return {
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "commit": commit.stdout.strip(),
    }


if __name__ == "__main__":
    sys.exit(main())
