"""Compiles, checks and, if asked for, trains one row of the census in this process."""

from __future__ import annotations

import enum
import re
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import InexactPlan, UserError
from tools.census.rows import entry, model_file
from tools.compare_training import write_recording_model
from tools.rounding import WITHIN_ROUNDING, judge_by_rounding, measure_own_differences
from tools.zoo import EXACT, compare_run, glue, run_on_ranks, train_on_ranks, train_reference

CLUSTER, GLOBAL_BATCH = "local:3", 12
TRACE_LINES = 12
MOST_MESSAGES = 3  # with options of exact plans, that are followed
EXACT_IN_FLOAT64 = "exact in float64"


class Outcome(enum.StrEnum):
    """What the census says of a row."""

    NO_MODEL = "plain PyTorch has none"  # no library for it, or no loss that trains
    NOT_BUILT = "not built"  # the census makes no configuration or batch that plain PyTorch trains
    EXACT = "exact"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass
class RowResult:
    """One row. `message`, `where` and `remedy` say why it is not exact; errors are in units of the
    tolerances; `run` says of its run on ranks that it is exact (in which sense, if not in float32's
    tolerances) or what differs, "" if it was not run; `option` was named by the message that refused the row
    without it."""

    name: str
    family: str
    outcome: Outcome
    message: str = ""
    where: str = ""
    remedy: str = ""
    inputs: str = ""
    sections: dict[str, str] = field(default_factory=dict)
    glue: str = ""
    loss_error: float = 0.0
    gradient_error: float = 0.0
    run: str = ""
    option: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON."""
        return asdict(self) | {"outcome": self.outcome.value}


def check_row(name: str, ranks: int = 0) -> RowResult:
    """Checks the row `name`; trains it on `ranks` processes if that is not 0."""
    start = time.perf_counter()
    result = _check(name, ranks)
    result.seconds = round(time.perf_counter() - start, 1)
    return result


def _check(name: str, ranks: int) -> RowResult:
    family = name.partition("/")[0]
    try:
        row = entry(name)
    except Exception as error:  # what the model's own code raises in plain PyTorch
        return RowResult(name, family, _why_no_model(error), first_line(error))
    result = RowResult(name, family, Outcome.FAILED, inputs=row.inputs)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        stem = re.sub(r"\W", "_", name)
        (folder / f"{stem}.py").write_text(model_file(name))
        model = write_recording_model(stem, folder, folder)
        try:
            compiled = _compile_as_told(result, model)
            _note_check(result, compiled)
            if ranks:
                result.run = _run(result, compiled, model, folder)
                if not is_exact_run(result.run):
                    result.outcome, result.message = Outcome.FAILED, result.run
        except InexactPlan as error:
            result.message = error.message
        except UserError as error:
            result.outcome, result.message = Outcome.REFUSED, error.message
            result.where, result.remedy = str(error.where or ""), str(error.remedy or "")
        except Exception as error:
            result.message = first_line(error)
            result.where = "".join(traceback.format_exception(error)[-TRACE_LINES:])
    result.where = _without_folders(result.where, directory)
    result.message = _without_folders(result.message, directory)
    return result


def _compile_as_told(result: RowResult, model: Path) -> CompiledPlan:
    """Compiles and checks a model. If it is refused with a message that names options for an exact plan, they
    are given, as a user would; so are those that the next message names."""
    for _ in range(MOST_MESSAGES):
        try:
            return check_exactness(compile_model(model, _options(result)), required=True)
        except UserError as error:
            named = named_option(str(error.remedy or ""))
            if not named or named in result.option:
                result.option = ""
                raise
            result.option = f"{result.option} {named}".strip()
    try:
        return check_exactness(compile_model(model, _options(result)), required=True)
    except Exception:
        result.option = ""
        raise


def _options(result: RowResult) -> CompileOptions:
    given = re.findall(r"--([\w-]+)(?: ([^-]\S*))?", result.option)
    values = dict(given)
    return CompileOptions(
        cluster=values.get("cluster", CLUSTER),
        global_batch=GLOBAL_BATCH,
        global_sums="global-sums" in values,
        whole_batch=tuple(value for name, value in given if name == "whole-batch"),
    )


def named_option(remedy: str) -> str:
    """The options of an exact plan that a remedy names, "" if there are none."""
    if found := re.findall(r"--whole-batch (?![A-Z]+\b)[\w.]+", remedy):
        return " ".join(dict.fromkeys(found))
    if "--global-sums" in remedy:
        return "--global-sums"
    fewer = re.search(r"use at most (\d+) ranks?\b", remedy)
    return f"--cluster local:{fewer[1]}" if fewer else ""


def is_exact_run(run: str) -> bool:
    """Whether a row's `run` says that ranks computed what plain PyTorch does."""
    return run in (EXACT, EXACT_IN_FLOAT64) or run.startswith(WITHIN_ROUNDING)


def _run(result: RowResult, compiled: CompiledPlan, model: Path, folder: Path) -> str:
    """Trains a row on ranks and compares it: in float32, or else in float64, or else with what its reference
    differs from itself."""
    try:
        found, reference = train_on_ranks(compiled, model, folder)
        run = compare_run(found, reference)
        if run == EXACT:
            return EXACT
        if exact := _run_in_float64(result, folder):
            return exact
        own = measure_own_differences(reference, lambda n: train_reference(compiled, model, folder, n))
    except AssertionError as error:
        return f"run: {error}".splitlines()[0]
    return judge_by_rounding(found, reference, own) or run


def _run_in_float64(result: RowResult, folder: Path) -> str:
    """Trains a row on ranks once more, in float64: where terms of a gradient cancel (the bias of scores that
    are compared with each other), float32 leaves rounding noise alone, in plain PyTorch, too. Returns "" if
    that is not exact either."""
    stem = "in_float64"
    (folder / f"{stem}.py").write_text(model_file(result.name, double=True))
    (folder / "double").mkdir()
    model = write_recording_model(stem, folder, folder)
    try:
        compiled = check_exactness(compile_model(model, _options(result)), required=True)
    except UserError:
        return ""
    return EXACT_IN_FLOAT64 if run_on_ranks(compiled, model, folder / "double") == EXACT else ""


def _note_check(result: RowResult, compiled: CompiledPlan) -> None:
    """Takes what the check found into the row."""
    patterns: Any = compiled.plan.checks.get("patterns", [])
    result.outcome = Outcome.EXACT
    result.loss_error = max((p["loss_error"] for p in patterns), default=0.0)
    result.gradient_error = max((p["gradient_error"] for p in patterns), default=0.0)
    result.sections = {s.name: s.mode for s in compiled.plan.sections}
    result.glue = glue(compiled)


def _why_no_model(error: Exception) -> Outcome:
    """Whether plain PyTorch has no such model to train here, or the census does not know how to make it."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__  # type: ignore[assignment]
    none = isinstance(cause, ImportError | NotImplementedError) or re.search(
        r"no loss that trains|does not support training|not implemented|module transformers has no attribute"
        r"|Training with .* is not supported"
        r"|'_OpNamespace' '\w+' object has no attribute"  # an extension without its compiled part
        r"|ForCausalLMLoss\(\) missing",  # a loss that transformers has not
        str(error),
    )
    return Outcome.NO_MODEL if none else Outcome.NOT_BUILT


def first_line(error: BaseException) -> str:
    """The error's class and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"


def _without_folders(text: str, directory: str) -> str:
    """A text that is the same on every machine."""
    return re.sub(r"\S*/site-packages/|\S*/lib/python[\d.]+/", "", text.replace(f"{directory}/", ""))
