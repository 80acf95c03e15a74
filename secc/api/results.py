"""What the Python interface returns: typed results that print as tables, show as HTML in notebooks and become
data frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secc.report.table_renderers import render_html, render_text, to_data_frame
from secc.report.text_table import TextTable

if TYPE_CHECKING:
    from secc.baselines.compare import BaselineResult
    from secc.runtime.plan.schema import Plan
    from secc.simulate.step_measures import StepMeasures


@dataclass(frozen=True)
class Result:
    """Facts, as (name, text), and tables. `print(result)` shows them in at most 100 columns."""

    facts: tuple[tuple[str, str], ...] = field(repr=False)
    tables: tuple[TextTable, ...] = field(repr=False)

    def __str__(self) -> str:
        return render_text(self.facts, self.tables)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return render_html(self.facts, self.tables)

    def table(self, title: str) -> TextTable:
        """Returns the table with this title. Raises KeyError if there is none."""
        for table in self.tables:
            if table.title == title:
                return table
        raise KeyError(f"no table {title!r}; there are {', '.join(t.title for t in self.tables)}")

    def to_pandas(self, title: str | None = None) -> Any:
        """Returns the table with this title, or the first one, as a pandas data frame; needs pandas."""
        return to_data_frame(self.table(title) if title is not None else self.tables[0])


@dataclass(frozen=True, repr=False)
class Explanation(Result):
    """What a plan decides, and why. `plan`: the contents of plan.json as dataclasses."""

    plan: Plan


@dataclass(frozen=True, repr=False)
class Simulation(Result):
    """A simulated step: `measures` in seconds, GiB and shares, and the best layout of each `baselines`
    scheme."""

    measures: StepMeasures
    baselines: Mapping[str, BaselineResult]


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """The differences from plan `before` to plan `after`; no tables if there are none."""

    before: Plan
    after: Plan

    @property
    def step_ratio(self) -> float:
        """Predicted step time after over before."""
        from secc.report.plan_differences import comparable_steps

        before, after = comparable_steps(self.before, self.after)
        return after / before if before and after is not None else float("nan")


@dataclass(frozen=True, repr=False)
class ExactnessCheck(Result):
    """The comparison of a plan with plain PyTorch. `patterns`: for each combination of optional inputs its
    errors, in units of the tolerances. `checked`: the function that made the model, model() or
    small_model()."""

    plan: Plan
    checked: str

    @property
    def patterns(self) -> list[dict[str, Any]]:
        """The entries of plan.json's `checks.patterns`."""
        return list(self.plan.checks.get("patterns", ()))

    @property
    def is_exact(self) -> bool:
        """Whether loss and gradients are those of plain PyTorch, within the documented tolerances."""
        return bool(self.patterns) and all(p["exact"] for p in self.patterns)


@dataclass(frozen=True, repr=False)
class RunResult(Result):
    """A finished run: `metrics` and `evaluations` are the lines of metrics.jsonl that it wrote."""

    log_dir: Path
    metrics: tuple[dict[str, Any], ...]
    evaluations: tuple[dict[str, Any], ...]

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [float(m["loss"]) for m in self.metrics]
