"""The comparison with published steps (`tools/check_published.py`)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tools.check_published import (
    ROWS_FILE,
    Row,
    add_prediction,
    pins_of,
    predict_rows,
    rank_correlation,
    read_rows,
    set_attention_rate,
    summarize_rows,
)
from tools.published.frameworks import framework_of


def timed_row(predicted_s: float, step_s: float) -> Row:
    return {"ran": True, "kind": "full", "fits": True, "predicted_s": predicted_s, "step_s": step_s}


def test_a_summary_counts_errors_and_memory() -> None:
    rows = [timed_row(1.1, 1.0), timed_row(1.8, 2.0), timed_row(3.0, 3.0)]
    rows.append({"ran": False, "kind": "full", "fits": True, "predicted_s": 1.0})
    summary = summarize_rows(rows)
    assert (summary.steps, summary.accepted, summary.failed, summary.refused) == (3, 1, 1, 0)
    assert summary.error == pytest.approx(0.1) and summary.bias == pytest.approx(1.0)


def test_rank_correlation_is_that_of_spearman() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 40, 30]) == pytest.approx(0.8)
    assert math.isnan(rank_correlation([1, 2], [1, 2]))


def test_a_row_pins_its_layout() -> None:
    row = next(r for r in read_rows(ROWS_FILE) if r["id"] == "want-13B-2k-32-m8t2p2s")
    assert set(pins_of(row)) == {
        *("model.tp=2", "model.pp=2", "model.dp=8", "model.recompute=none"),
        *("model.sharding=zero1", "model.micro_batch=8", "model.norms=sequence"),
        *("model.overlap=none", "model.offload=none"),
    }
    without = next(r for r in read_rows(ROWS_FILE) if r["tp"] > 1 and not r.get("norms"))
    assert "model.norms=whole" in pins_of(without)


def test_a_source_names_its_framework() -> None:
    """Sources with other names have the framework that their name contains, or the most common habits."""
    assert framework_of("Megatron-LM 2021").framework.tp_hidden_percent == 0
    assert framework_of("Megatron-LM README 2025").framework.tp_hidden_percent > 0
    assert framework_of("a new library").framework.name == "unknown"
    staged = framework_of("Megatron-LM 2021", "3 virtual stages; fp16")
    assert staged.framework == replace(framework_of("Megatron-LM 2021").framework, virtual_stages=3)


def test_the_attention_kernel_of_a_framework_is_priced() -> None:
    """In forward, backward and second forwards: 60% of large products' rate by default, here 30% of the peak
    where products reach 90%."""
    call = ' again = "50*B*S*S + 7*B*S", attention = "30*B*S*S", attention_work = "50*B*S*S", moved = "9*B*S"'
    assert set_attention_rate(call, 90, 30) == (
        ' again = "50*B*S*S + 7*B*S - (50*B*S*S) + 90*B*S*S", attention = "30*B*S*S", '
        'attention_work = "90*B*S*S", moved = "9*B*S"'
    )


@pytest.mark.slow
def test_the_file_has_the_predictions_of_this_cost_model(tmp_path: Path) -> None:
    """Fails when the cost model has changed: run `python -m tools.check_published --json FILE`."""
    table = json.loads(ROWS_FILE.read_text())
    id_column, predicted = (table["columns"].index(name) for name in ("id", "predicted_s"))
    stored = {row[id_column]: row[predicted] for row in table["rows"]}
    rows = [row for row in read_rows(ROWS_FILE) if row["id"].startswith("want-13B-2k-32-m1")]
    assert len(rows) == 6
    for row, prediction in predict_rows(rows):
        found = add_prediction(row, prediction)["predicted_s"]
        assert found == pytest.approx(stored[row["id"]], rel=1e-3)
