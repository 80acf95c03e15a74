"""Finds drawn samples that take a path through forward which no capture took.

Captures record few samples, since a recording takes milliseconds. The conditions on inputs that tell their
paths apart, the guards of the cases, are quickly evaluated for all drawn samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from secc.errors import UserError
from secc.frontend.capture.capture import Capture, CapturedCase
from secc.frontend.dataset.survey import HEAVY_SAMPLE_ENTRIES, DatasetSurvey, DrawnSample, Sample
from secc.ir.dialect.size_expr import evaluate_size
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.batch_sizes import read_symbol_sizes
from secc.runtime.randomness.random_op_values import is_random
from secc.runtime.recorder.recording import iter_nodes_behind

MAX_RARE_SAMPLES = 4  # of a pattern, each with other outcomes of its conditions


class _UnknownOutcome(Exception):
    """Raised if a condition cannot be evaluated here."""


def find_rare_samples(
    user: UserModel, survey: DatasetSurvey, capture: Capture, seed: int = 0
) -> dict[int, Sample]:
    """Returns drawn samples, by index, with outcomes of conditions under which no case of their pattern was
    captured; the first sample of each combination of outcomes. Large samples are left out, and samples that
    failed to load again."""
    found = dict[int, Sample]()
    for pattern in survey.pattern_counts:
        cases = [c for c in capture.cases if c.pattern == pattern]
        compiled = [c for c in cases if c.rerecord_reason is None]
        if not compiled or any(c.rerecord_reason is not None and not c.is_fallback for c in cases):
            continue
        guarded = [c for c in compiled if c.generic.guards]
        if len(guarded) < len(compiled):  # a case without conditions takes every sample
            continue
        met = set[tuple[bool, ...]]()
        for drawn in survey.drawn_samples:
            if drawn.pattern != pattern or drawn.sample is not None or _entries(drawn) > HEAVY_SAMPLE_ENTRIES:
                continue
            try:
                sample = user.load_sample(drawn.index, seed)
                batch = user.collate([sample])
                outcomes = _decide_guards(guarded, batch, read_symbol_sizes(batch, capture.inputs.symbols, 1))
            except (UserError, _UnknownOutcome):
                continue
            if any(all(of_case) for of_case in outcomes):
                continue
            key = tuple(holds for of_case in outcomes for holds in of_case)
            if key not in met and len(met) < MAX_RARE_SAMPLES:
                met.add(key)
                found[drawn.index] = sample
    return found


def find_uncovered_line(
    user: UserModel, capture: Capture, pattern: frozenset[str], sample: Mapping[str, Any]
) -> str:
    """Returns the place of a condition that keeps a sample from every case of its pattern, "" if a case takes
    it, glue is re-recorded for it, or conditions cannot be evaluated."""
    cases = [c for c in capture.cases if c.pattern == pattern]
    if not cases or any(c.rerecord_reason is not None or not c.generic.guards for c in cases):
        return ""
    batch = user.collate([dict(sample)])
    try:
        outcomes = _decide_guards(cases, batch, read_symbol_sizes(batch, capture.inputs.symbols, 1))
    except _UnknownOutcome:
        return ""
    if any(map(all, outcomes)):
        return ""
    failed = (
        guard.meta["where"]
        for case, of_case in zip(cases, outcomes, strict=True)
        for guard, holds in zip(case.generic.guards, of_case, strict=True)
        if not holds
    )
    return next(filter(None, failed), "")


def _entries(drawn: DrawnSample) -> int:
    return sum(torch.Size(shape).numel() for shape in drawn.shapes.values())


def _decide_guards(
    cases: Sequence[CapturedCase], batch: Mapping[str, Any], sizes: Mapping[str, int]
) -> list[list[bool]]:
    """Returns, for each case, whether each of its guards has the value that the captures saw."""
    return [
        [_evaluate_guard(case, guard, batch, sizes) == guard.meta["read"][1] for guard in case.generic.guards]
        for case in cases
    ]


def _evaluate_guard(
    case: CapturedCase, guard: fx.Node, batch: Mapping[str, Any], sizes: Mapping[str, int]
) -> object:
    """Returns the value that Python reads at `guard` for a micro-batch. Raises _UnknownOutcome if it depends
    on more than the inputs."""
    needed = set(iter_nodes_behind(guard.all_input_nodes))
    values = dict[fx.Node, Any]()

    def value_of(argument: Any) -> Any:
        match argument:
            case fx.Node():
                return values[argument]
            case sympy.Expr():
                return evaluate_size(argument, sizes)
            case list() | tuple():
                return type(argument)(value_of(a) for a in argument)
            case dict():
                return {key: value_of(a) for key, a in argument.items()}
            case _:
                return argument

    with torch.no_grad():
        for node in case.generic.graph.nodes:
            if node not in needed:
                continue
            name = str(node.target)
            if node.op == "placeholder" and name in batch:
                values[node] = batch[name]
            elif node.op == "get_attr" and name in case.generic.constants:
                values[node] = case.generic.constants[name]
            elif node.op == "call_function":
                try:
                    args, kwargs = value_of(node.meta["args"]), value_of(node.meta["kwargs"])
                    if is_random(node.target, args, kwargs):
                        raise _UnknownOutcome
                    values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
                except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
                    raise _UnknownOutcome from error
            else:
                raise _UnknownOutcome
    tensor = values[guard.all_input_nodes[0]]
    return tensor.tolist() if isinstance(tensor, torch.Tensor) else tensor
