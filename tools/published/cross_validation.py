"""Fits the constants of `frameworks.py` on some published rows, and tests them on the others.

A prediction is nearly linear in each constant. So rows are priced once as they are and once for each
constant, and what other values would predict follows from the differences. A fit minimises absolute relative
errors (least squares, weighted again until nothing changes), none of the constants negative.

    python -m tools.published.cross_validation --keep DIR [--json FILE]

Two tests: every sweep (of one model in one source) is predicted with constants that were fitted without it,
and every source with constants from the other source, as a framework that was never measured.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from secc.cluster import Framework
from tools.check_published import ROWS_FILE, Row, predict_rows, read_rows
from tools.published import frameworks
from tools.published.frameworks import PublishedFramework

HAGEMANN, LLM_FOUNDRY = "WANT (Hagemann 2023)", "MosaicML llm-foundry"
STEP = 0.2  # relative change of a constant for its derivative
LEAST_ERROR = 0.012  # relative errors below count alike
ROUNDS = 60
COMMAND = "python -m tools.published.cross_validation --keep DIR"
ABOUT = (
    "Errors of predicted steps with constants that were fitted without the rows that they are tested on: "
    "|predicted / measured - 1|. Sweeps are the models of a source."
)
Predictions = dict[str, float]


@dataclass(frozen=True)
class Constant:
    """A fitted constant. `chip`: of products or attention; "" for a habit of the framework of `source`."""

    name: str
    source: str
    chip: str = ""

    @property
    def value(self) -> float:
        """As in `frameworks.py`."""
        if self.name == "products":
            return frameworks.PRODUCT_PERCENT[self.chip]
        published = frameworks.BY_SOURCE[self.source]
        return (
            published.attention_percent[self.chip]
            if self.name == "attention"
            else getattr(published.framework, self.name)
        )

    def price_changed(self, rows: Sequence[Row], keep: Path, value: float) -> Predictions:
        """Prices rows with another value."""
        before = dict(frameworks.PRODUCT_PERCENT), dict(frameworks.BY_SOURCE)
        if self.name == "products":
            frameworks.PRODUCT_PERCENT[self.chip] = round(value)
        else:
            published = frameworks.BY_SOURCE[self.source]
            frameworks.BY_SOURCE[self.source] = (
                replace(published, attention_percent={**published.attention_percent, self.chip: round(value)})
                if self.name == "attention"
                else replace(published, framework=replace(published.framework, **{self.name: round(value)}))
            )
        try:
            return price_rows(rows, keep)
        finally:
            frameworks.PRODUCT_PERCENT.update(before[0])
            frameworks.BY_SOURCE.update(before[1])

    def concerns(self, row: Row) -> bool:
        """Whether the constant may move a row's prediction."""
        return (not self.chip or row["gpu"].startswith(self.chip)) and self.source in ("", row["source"])

    @property
    def inverse(self) -> bool:
        """Whether times are linear in the constant's inverse."""
        return self.name in ("products", "attention")


CONSTANTS = (
    *(Constant("products", "", chip) for chip in ("A100", "H100")),
    *(Constant("attention", LLM_FOUNDRY, chip) for chip in ("A100", "H100")),
    *(Constant(name, LLM_FOUNDRY) for name in ("layer_passes", "zero3_open_percent")),
    *(
        Constant(name, HAGEMANN)
        for name in (
            *("layer_passes", "lost_rows", "recompute_percent", "tp_recompute_percent"),
            *("tp_percent", "waits_of_two_stages"),
        )
    ),
)


def price_rows(rows: Sequence[Row], keep: Path) -> Predictions:
    """Seconds of a step by the row's id."""
    return {row["id"]: found.seconds for row, found in predict_rows(rows, keep) if not isinstance(found, str)}


def find_derivatives(rows: Sequence[Row], keep: Path) -> tuple[np.ndarray, np.ndarray]:
    """(predicted over measured seconds of each row, derivatives of these ratios by the relative change of
    each constant or of its inverse: [rows, constants])."""
    base = price_rows(rows, keep)
    slopes = np.zeros((len(rows), len(CONSTANTS)))
    for k, constant in enumerate(CONSTANTS):
        own = [row for row in rows if constant.concerns(row)]
        old = constant.value
        new = round(old / (1 + STEP) if constant.inverse else old * (1 + STEP))
        change = old / new - 1 if constant.inverse else new / old - 1
        changed = constant.price_changed(own, keep, new)
        for i, row in enumerate(rows):
            if row["id"] in changed:
                slopes[i, k] = (changed[row["id"]] - base[row["id"]]) / change / row["step_s"]
    return np.array([base[row["id"]] / row["step_s"] for row in rows]), slopes


def fit_changes(ratios: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    """The relative changes of the constants with the least absolute errors of `ratios` [rows] with `slopes`
    [rows, constants]. Constants that no row concerns stay."""
    moved = np.abs(slopes).sum(0) > 0
    weights = np.ones(len(ratios))
    changes = np.zeros(slopes.shape[1])
    damping = 0.05 * np.eye(int(moved.sum()))
    for _ in range(ROUNDS):
        left = np.vstack([slopes[:, moved] * weights[:, None], damping])
        right = np.concatenate([(1 - ratios) * weights, np.zeros(len(damping))])
        changes[moved] = np.maximum(np.linalg.lstsq(left, right, rcond=None)[0], -1)
        weights = 1 / np.sqrt(np.maximum(np.abs(ratios + slopes @ changes - 1), LEAST_ERROR))
    return changes


def predict_left_out(
    rows: Sequence[Row], ratios: np.ndarray, slopes: np.ndarray, fold_of: Callable[[Row], str]
) -> np.ndarray:
    """Predicted over measured seconds of each row, with constants fitted on the rows of the other folds."""
    folds = np.array([fold_of(row) for row in rows])
    found = np.array(ratios)
    for fold in sorted(set(folds)):
        out = folds == fold
        found[out] = ratios[out] + slopes[out] @ fit_changes(ratios[~out], slopes[~out])
    return found


def sweep_of(row: Row) -> str:
    """The sweep of a row: one model (and length, where authors swept layouts) of a source."""
    return row["group"] if row["source"] == HAGEMANN else f"{row['source']} {row['model']}"


def price_as_unknown(rows: Sequence[Row], keep: Path, teacher: PublishedFramework) -> Predictions:
    """Prices rows as if nothing were known of their framework but its attention kernel: habits are those of
    `teacher`, and of tensor parallelism and stages what links say."""
    habits = Framework(layer_passes=teacher.framework.layer_passes, lost_rows=teacher.framework.lost_rows)
    before = dict(frameworks.BY_SOURCE)
    for source, published in before.items():
        frameworks.BY_SOURCE[source] = replace(published, framework=habits)
    try:
        return price_rows(rows, keep)
    finally:
        frameworks.BY_SOURCE.update(before)


def describe(name: str, ratios: Iterable[float]) -> list[object]:
    """[name, rows, median error, error that nine in ten stay below, median ratio]."""
    found = [float(ratio) for ratio in ratios]
    errors = sorted(abs(ratio - 1) for ratio in found)
    return [
        name,
        len(found),
        round(median(errors), 4),
        round(errors[math.ceil(0.9 * len(errors)) - 1], 4),
        round(median(found), 4),
    ]


def validate(rows: Sequence[Row], keep: Path) -> list[list[object]]:
    """The table of both tests."""
    ratios, slopes = find_derivatives(rows, keep)
    changed = ratios + slopes @ fit_changes(ratios, slopes)
    without = predict_left_out(rows, ratios, slopes, sweep_of)
    table = [
        describe("all constants fitted on all rows", changed),
        describe("each sweep left out of its fit", without),
    ]
    for source, teacher in ((HAGEMANN, LLM_FOUNDRY), (LLM_FOUNDRY, HAGEMANN)):
        own = [source == row["source"] for row in rows]
        table.append(describe(f"{source}, each sweep left out", without[np.array(own)]))
        held = [row for row in rows if row["source"] == source]
        priced = price_as_unknown(held, keep, frameworks.BY_SOURCE[teacher])
        unknown: Mapping[str, float] = {row["id"]: priced[row["id"]] / row["step_s"] for row in held}
        table.append(describe(f"{source}, habits of {teacher}", unknown.values()))
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Cross-validates the constants of published frameworks.")
    parser.add_argument("--keep", type=Path, required=True, help="folder for the IR of decoders")
    parser.add_argument("--json", type=Path, help="write the table")
    options = parser.parse_args(arguments)
    rows = [
        row
        for row in read_rows(ROWS_FILE)
        if row["ran"] and row["kind"] == "full" and row["source"] in (HAGEMANN, LLM_FOUNDRY)
    ]
    table = validate(rows, options.keep)
    for cells in table:
        print("| " + " | ".join(map(str, cells)) + " |")
    if options.json:
        text = ",\n".join(f"  {json.dumps(cells)}" for cells in table)
        head = f'"command": {json.dumps(COMMAND)},\n "about": {json.dumps(ABOUT)}'
        columns = '"columns": ["test", "steps", "median error", "nine in ten below", "median ratio"]'
        options.json.write_text(f'{{\n {head},\n {columns},\n "rows": [\n{text}\n ]\n}}\n')


if __name__ == "__main__":
    main()
