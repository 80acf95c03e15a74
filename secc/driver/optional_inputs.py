"""Finds the optional input that changes samples which lack it, where a plan is not exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from secc.driver.compile import CompiledPlan
from secc.errors import UserError
from secc.frontend.dataset.survey import InputPattern
from secc.runtime.training.eager_reference import PlanRandomness
from secc.runtime.training.eager_watch import run_forward
from secc.runtime.training.one_rank_plan import OneRankPlan

Samples = Sequence[Mapping[str, Any]]
_TOLERANCE = 1e-4  # of a row's norm
_TRIED = 4  # samples without the input: random numbers may hide for one of them what it changes


@dataclass(frozen=True)
class ChangingInput:
    """An optional input, and the first line of forward that uses it. module: the first module that returns
    something else for a sample without it when another sample has it; "" if none was seen to. is_drawn: the
    line draws random numbers more often for samples with the input than for those without."""

    key: str
    where: str
    module: str = ""
    is_drawn: bool = False


def find_changing_input(
    compiled: CompiledPlan, rank: OneRankPlan, pattern: InputPattern
) -> ChangingInput | None:
    """Returns an optional input with which samples that have it and samples that lack it are exact, but not
    both together; None if there is none."""
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
            and not all(_is_exact(rank, [having[0], s]) for s in lacking[:_TRIED])
            and (line := next(_lines_using(compiled, pattern, key), ""))
        ):
            if drawn := _find_shifted_draws(rank, having[0], lacking[0]):
                return ChangingInput(key, drawn, is_drawn=True)
            return ChangingInput(key, line, _find_changed_module(rank, lacking[0], having[0]))
    return None


def _find_shifted_draws(rank: OneRankPlan, having: Mapping[str, Any], lacking: Mapping[str, Any]) -> str:
    """Returns a line that draws for both samples, but not equally often; "" if there is none. What such a
    line draws is told apart by its order, so a sample's first numbers may be its second ones in a batch."""
    with_input, without = (_count_draws(rank, sample) for sample in (having, lacking))
    shifted = {site for site, number in without.items() if 0 < number != with_input.get(site, number)}
    return next((d.where for d in rank.plan.draws if d.call.rpartition("#")[0] in shifted), "")


def _count_draws(rank: OneRankPlan, sample: Mapping[str, Any]) -> Mapping[str, int]:
    """Returns how often each place of forward draws random numbers for a sample that is alone."""
    draws = PlanRandomness(rank.model, rank.plan.draws, rank.plan.symbols).draws_for(rank.user, [sample])
    if draws is None:
        return {}
    with torch.no_grad(), draws.forward():
        run_forward(rank.model, rank.user.collate([sample]))
    return draws.calls_by_site


def _find_changed_module(rank: OneRankPlan, sample: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Returns the first module, in the order in which calls end, that gives a sample other rows when another
    sample stands behind it; "" if none does, or if rows differ from run to run."""
    alone, again = _run_modules(rank, [sample]), _run_modules(rank, [sample])
    if any(not _have_equal_rows(a, again.get(call)) for call, a in alone.items()):
        return ""
    among = _run_modules(rank, [sample, other])
    changed = (path for (path, n), a in alone.items() if not _have_equal_rows(a, among.get((path, n))))
    return next(changed, "")


def _run_modules(rank: OneRankPlan, samples: Samples) -> dict[tuple[str, int], torch.Tensor]:
    """Runs plain PyTorch on samples. Returns the first row of what each module returns, by its path and the
    number of the call; nothing if it fails."""
    rows, calls = dict[tuple[str, int], torch.Tensor](), Counter[str]()

    def keep_first_row(path: str, result: Any) -> None:
        calls[path] += 1
        if isinstance(result, torch.Tensor) and result.is_floating_point() and len(result) == len(samples):
            rows[path, calls[path]] = result[0].detach()

    hooks = [
        module.register_forward_hook(lambda _, __, result, path=path: keep_first_row(path, result))
        for path, module in rank.model.named_modules()
        if path
    ]
    try:
        with torch.no_grad():
            run_forward(rank.model, rank.user.collate(samples))
    except Exception:  # whatever the user's code raises
        return {}
    finally:
        for hook in hooks:
            hook.remove()
    return rows


def _have_equal_rows(row: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether two rows are equal; true for what cannot be compared, such as rows of different widths."""
    if other is None or other.shape != row.shape:
        return True
    return not float((row - other).norm()) > _TOLERANCE * float(row.norm())


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
