"""Finds the optional input that changes samples which lack it, where a plan is not exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from secc.driver.compile import CompiledPlan
from secc.errors import UserError
from secc.frontend.dataset.survey import InputPattern
from secc.runtime.training.one_rank_plan import OneRankPlan

Samples = Sequence[Mapping[str, Any]]


def find_changing_input(
    compiled: CompiledPlan, rank: OneRankPlan, pattern: InputPattern
) -> tuple[str, str] | None:
    """Returns an optional input and the first line of forward that uses it, if a sample without it gets
    another result among samples that have it, and only there; None if there is none."""
    samples = compiled.survey.compose_batches(pattern)[-1]
    patterns = [frozenset(compiled.user.collate([s]).keys() & pattern) for s in samples]
    for key in sorted(pattern):
        having = [s for s, p in zip(samples, patterns, strict=True) if key in p]
        lacking = [s for s, p in zip(samples, patterns, strict=True) if key not in p]
        if (
            having
            and lacking
            and _is_exact(rank, [*having[:1] * 2])
            and _is_exact(rank, [*lacking[:1] * 2])
            and not _is_exact(rank, [having[0], lacking[0]])
            and (line := next(_lines_using(compiled, pattern, key), ""))
        ):
            return key, line
    return None


def _is_exact(rank: OneRankPlan, samples: Samples) -> bool:
    """Whether samples in micro-batches of their own are computed as together; false if they fail."""
    try:
        return rank.compare_step(samples, 1, rank.run_reference(samples)).is_exact
    except UserError:
        return False


def _lines_using(compiled: CompiledPlan, pattern: InputPattern, key: str) -> Iterator[str]:
    """Yields the lines of forward that use an input, in order."""
    for case in compiled.captured_model.capture.cases:
        node = case.generic.inputs.get(key) if case.pattern == pattern else None
        yield from (
            user.meta["where"] for user in (node.users if node is not None else ()) if user.meta.get("where")
        )
