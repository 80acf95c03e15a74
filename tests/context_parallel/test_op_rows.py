"""Rules for rows against whole ops, for a sample of torch's ops; `python -m tests.context_parallel.op_rows`
compares all."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from secc.frontend.tp_search.thread_ranks import ThreadGroup, run_thread_ranks
from secc.runtime.context_parallel import row_exchange
from secc.runtime.context_parallel.row_mode import RowMode
from secc.runtime.context_parallel.row_rules import RowsNotWritable

X = torch.arange(60.0).view(3, 5, 4).cos()
DIMS = {
    "roll by two along rows": lambda x: x.roll(2, 1),
    "roll of all entries": lambda x: torch.roll(x, 1),
    "flip of rows and samples": lambda x: x.flip(0, 1),
    "two best rows": lambda x: x.topk(2, 1).values,
    "norm of all entries": lambda x: x.norm(2),
    "norm along rows": lambda x: torch.norm(x, 2, 1),
    "unit columns": lambda x: F.normalize(x, 2, 1),
    "differences of rows": lambda x: torch.diff(x, 2, 1),
    "unbiased or not": lambda x: x.std(False),
    "layout in memory": lambda x: x.as_strided((15, 4), (4, 1)),
    "rows as parts of numbers": lambda x: torch.view_as_complex(x[:, :2].transpose(1, 2).contiguous()).real,
    "weights by channel": lambda x: F.prelu(x, torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])),
}


@pytest.mark.parametrize("name", DIMS)
def test_dims_are_found_wherever_a_function_takes_them(name: str) -> None:
    def run(group: ThreadGroup) -> torch.Tensor:
        mode = RowMode(group)
        rows = mode.take_own_rows(X, 1)
        with mode:
            out = DIMS[name](rows)
        return row_exchange.leave_section(out, group)

    for found in run_thread_ranks(2, run):
        torch.testing.assert_close(found, DIMS[name](X))


def test_functions_that_write_if_asked_are_refused() -> None:
    def run(group: ThreadGroup) -> None:
        mode = RowMode(group)
        rows = mode.take_own_rows(X, 1)
        with mode:
            F.threshold(rows, 0.0, 0.0, True)

    with pytest.raises(RowsNotWritable, match="threshold writes into rows"):
        run_thread_ranks(2, run)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cat", "cumsum", "diff", "matmul", "norm", "roll", "sum", "topk", "where"])
def test_ops_on_rows_are_as_whole(name: str) -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    from tests.context_parallel.op_rows import iter_claims

    claims = [claim for op in op_db if op.name == name for claim in iter_claims(op)]
    assert claims and not [claim for claim in claims if claim.difference]
