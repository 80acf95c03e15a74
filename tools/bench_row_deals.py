"""Measures how level the ranks of context parallelism are in attention, by how rows are dealt to them.

    python -m tools.bench_row_deals     prints a table; `--json FILE` writes it

Attention of one sequence, forward and backward, is run as each of four ranks runs it, one rank after the
other on one CPU: its rows of queries on all keys, with the rows of the mask. Rows are dealt either as one
piece for each rank or, as secc does, as a piece from the head and one from the tail. Causal attention leaves
out the keys after each run of queries; explicit masks are dense, as in plain PyTorch, and cost what their
size says.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from secc.runtime.context_parallel.row_attention import attend_causally
from secc.runtime.context_parallel.row_marks import Rows, deal_pieces, deal_rows, run_indices
from tools.benchmark_table import BenchmarkTable, add_json_option

RANKS, ROWS, HEADS, HEAD, ROUNDS = 4, 2048, 4, 32, 7
COLUMNS = ("attention", "rows", "slowest rank / mean", "least of rounds", "most")
ABOUT = (
    f"CPU time of attention, forward and backward, of {ROWS} rows in {HEADS} heads of {HEAD} on {RANKS} "
    f"ranks: the slowest rank over the mean of all, median and extremes of {ROUNDS} rounds. No GPU was used."
)


def places() -> tuple[torch.Tensor, torch.Tensor]:
    """Places of queries and keys, to compare with each other."""
    return torch.arange(ROWS)[:, None], torch.arange(ROWS)[None]


def window_mask() -> torch.Tensor:
    """Each query sees the 256 keys up to it."""
    query, key = places()
    return (key <= query) & (key > query - 256)


def prefix_mask() -> torch.Tensor:
    """Causal, after a quarter of the rows that see each other."""
    query, key = places()
    return (key <= query) | ((query < ROWS // 4) & (key < ROWS // 4))


def document_mask() -> torch.Tensor:
    """Causal inside of documents of 1,000, 24, 500 and 524 rows."""
    query, key = places()
    ends = torch.tensor([1000, 1024, 1524])
    return (key <= query) & (
        torch.bucketize(query, ends, right=True) == torch.bucketize(key, ends, right=True)
    )


MASKS: dict[str, Callable[[], torch.Tensor] | None] = {
    "causal": None,
    "window of 256, a mask": window_mask,
    "prefix of 512, a mask": prefix_mask,
    "four documents, a mask": document_mask,
    "all to all, a mask": lambda: torch.ones(ROWS, ROWS, dtype=torch.bool),
}
DEALS: dict[str, Callable[[], Rows]] = {
    "one piece": lambda: deal_pieces(tuple(range(1, ROWS + 1)), RANKS),
    "head and tail": lambda: deal_rows(ROWS, RANKS),
}


def rank_seconds(rows: Rows, rank: int, mask: torch.Tensor | None) -> float:
    """CPU seconds of one rank's attention, forward and backward."""
    generator = torch.Generator().manual_seed(rank)
    own = run_indices(rows.runs[rank], torch.device("cpu"))
    key, value = (
        torch.randn(1, HEADS, ROWS, HEAD, generator=generator, requires_grad=True) for _ in range(2)
    )
    query = torch.randn(1, HEADS, len(own), HEAD, generator=generator, requires_grad=True)
    own_mask = None if mask is None else mask[own]
    start = time.thread_time()
    out: Any = (
        attend_causally(query, key, value, rows.runs[rank], {})
        if own_mask is None
        else F.scaled_dot_product_attention(query, key, value, own_mask)
    )
    out.backward(torch.ones_like(out))
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_option(parser)
    table = BenchmarkTable(COLUMNS, ABOUT, parser.parse_args().json)
    torch.set_num_threads(1)
    for kind, make in MASKS.items():
        mask = None if make is None else make()
        for deal, make_rows in DEALS.items():
            rows, ratios = make_rows(), list[float]()
            for _ in range(ROUNDS + 1):
                seconds = [rank_seconds(rows, rank, mask) for rank in range(RANKS)]
                ratios.append(max(seconds) * RANKS / sum(seconds))
            shown = (median(ratios[1:]), min(ratios[1:]), max(ratios[1:]))
            table.add_row(kind, deal, *(f"{ratio:.2f}" for ratio in shown))


if __name__ == "__main__":
    main()
