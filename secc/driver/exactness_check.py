"""Compares a plan with plain PyTorch, for every activation pattern, on one rank of this process
(`secc.runtime.training.one_rank_plan`), and looks for another plan if it is not exact."""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secc.codegen.plan_files import build_terms_files
from secc.codegen.plan_writer import write_plan_files
from secc.driver.batch_of_one import describe_fault_of_one, find_fault_of_one
from secc.driver.batch_wide_values import KinkSearch
from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions, TakenBack
from secc.driver.edge_fills import PaddingSeen, describe_varying, find_block_padding, find_padding, with_fills
from secc.driver.global_switches import GlobalSwitch, find_global_switch
from secc.driver.kept_state import is_in_any, refuse_kept_state
from secc.driver.loaded_values import refuse_loaded_values
from secc.driver.optional_inputs import ChangingInput, find_changing_input
from secc.driver.process_values import refuse_process_values
from secc.driver.python_draws import (
    MAKERS,
    GeneratorStates,
    draws_error,
    extreme_draws,
    naming_draws,
    select_generators,
)
from secc.driver.set_between_steps import refuse_set_values
from secc.driver.size_branches import find_equal_sizes, find_size_branch
from secc.driver.start_state import values_of_start
from secc.driver.taken_back import DIVIDED_LAYERS
from secc.driver.unmet_values import (
    MOST_TRIES,
    AskedNumber,
    ComparisonWatch,
    UnmetValue,
    inputs_of_blocks,
    inputs_of_own_blocks,
    is_single,
    iter_unmet_values,
    least_value,
    next_value,
    put_numbers,
    unmet_value,
    whole_numbers,
)
from secc.driver.user_backwards import user_backwards
from secc.errors import InexactPlan, NotEnoughMemory, UserError
from secc.frontend.capture.batch_decisions import MAX_BATCH_SAMPLES, BatchDecisions, DecisionCause
from secc.frontend.capture.eager_failure import blame_compute_dtype, find_eager_failure
from secc.frontend.capture.result_sizes import find_result_without_padding, find_size_of_values
from secc.frontend.dataset.light_samples import count_entries, select_light_samples
from secc.frontend.dataset.padding_policy import WidthsReason
from secc.frontend.dataset.survey import BATCH_SAMPLE_COUNTS
from secc.frontend.tp_search.token_mixing import find_coupled_blocks, find_token_mixing
from secc.ir.analysis.layers import is_part_of_layer
from secc.ir.dialect.ops import ParamOp, PlacedRowsOp, graph_of
from secc.ir.text_io.verifier import source_line
from secc.runtime.data.sample_metadata import check_placed_rows, find_placed_rows
from secc.runtime.host.cpu_threads import limit_threads, restore_threads
from secc.runtime.host.gc_control import slow_gc
from secc.runtime.model.kept_values import iter_contents, user_files, user_functions
from secc.runtime.model.source_lines import error_source_line, forward_source_line
from secc.runtime.plan.batch_sizes import read_symbol_sizes
from secc.runtime.plan.sample_predicates import describe_pattern
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.unsplit_reason import TOKEN_MIXING_REMEDY
from secc.runtime.randomness.micro_batch_draws import ExtremeCoins
from secc.runtime.sections import gradient_hooks
from secc.runtime.sections.base import load_plan_module
from secc.runtime.training.eager_reference import FLOAT32_TOLERANCES, LossAndGradients, compare_results
from secc.runtime.training.evaluation import eval_mode
from secc.runtime.training.evaluation_data import evaluation_plan
from secc.runtime.training.one_rank_plan import (
    CHECK_MICRO_BATCH,
    MicroBatchSizes,
    OneRankPlan,
    Reference,
    SizeTrend,
    StepComparison,
)

_LOADED_AGAIN = 4  # samples that are loaded in what stands for another process
_MOST_UNMET_VALUES = 6  # that samples are compared with
_MOST_FAILURES = 2  # of plain PyTorch with other values in an input of several numbers
_HOOK_SCALE = 1024.0  # of the gradients that hooks see once more: those of a run may be larger than a check's
_EXTREME_COINS = 4  # comparisons with random numbers close to an end of their range
_DRAWN_COPIES = 4  # of each sample where random numbers may decide whether padding is read
# Numbers in the largest tensor of a batch that is compared, where there are lighter samples: 2 GiB.
_MOST_ENTRIES = 1 << 29
_MOST_NAMED = 6  # blocks in a message
_SIZE_REMEDY = (
    "micro-batches have fewer samples and rows than the batch: decide by no number of them; in place of a"
    " branch, a weight of 0 or 1 from a sum over the batch (`mask.sum() > n`) is exact"
)
_SUM_REMEDY = (
    "decide for each sample, with torch.where or a mask; or in place of the branch multiply a part of the"
    " loss by a weight of 0 or 1 from the sum (`(mask.sum() > n).float()`), which is exact"
)
_SIDES_REMEDY = (
    "decide for each sample (`h.flatten(1).norm(dim=1) > c`, then torch.where or a mask), or take the line"
    " out if no sample ever gets there"
)
_BRANCH_REMEDY = (
    "a branch of forward on an input that some samples lack (`if x is None`) is taken for the whole batch:"
    " choose by sample (a mask, torch.where), or let the branch only add a term to the loss"
)

_SHIFTED_DRAWS_REMEDY = (
    "draw for all inputs at once, before the branch and whether or not they are there"
    " (`coins = torch.rand(len(x), 2)`), and let each input take its own numbers"
)


@dataclass(frozen=True)
class PatternCheck:
    """Result of the comparison for one input pattern. coins: what it was drawn with, if not as usual."""

    pattern: tuple[str, ...]
    samples: int
    comparison: StepComparison
    coins: ExtremeCoins | None = None

    def as_dict(self) -> dict[str, object]:
        """Returns the entry of plan.json. Errors are rounded to one digit: further digits depend on where
        tensors lie in memory, and equal inputs must give equal plans."""
        d = self.comparison.difference
        loss, gradient = (float(f"{error:.0e}") for error in (d.loss, d.gradient))
        return {
            "pattern": list(self.pattern),
            "samples": self.samples,
            "exact": self.comparison.is_exact,
            "loss_error": loss,
            "gradient_error": gradient,
            "worst_gradient": d.worst,
        } | self._describe_tolerances()

    def _describe_tolerances(self) -> dict[str, object]:
        """Returns what the report says about a comparison in 16 bits; nothing in float32."""
        if self.comparison.tolerances == FLOAT32_TOLERANCES:
            return {}
        strict = "; also exact with float32 in place of 16 bits" if self.comparison.widened else ""
        return {"tolerances": f"{self.comparison.tolerances}{strict}"}


@slow_gc()
@naming_draws()
@restore_threads()
def check_exactness(compiled: CompiledPlan, required: bool = False) -> CompiledPlan:
    """Returns the plan with the results of the comparison in `checks`.

    Raises UserError if a pattern is not exact, and, if `required`, if the model is too large to build here.
    """
    if compiled.model is None:
        if required:
            remedy = "define small_model(), the same architecture but small, and check with --small"
            raise UserError("the model is too large to be shown exact here", str(compiled.user.path), remedy)
        return _leave_uncompared(compiled, "which is too large to be built here")
    limit_threads(compiled.model)
    light = select_light_samples(compiled.survey, compiled.model, _MOST_ENTRIES)
    why = (
        f"a batch of heavier ones has over {_MOST_ENTRIES:,} numbers in a tensor, such as the scores of a"
        " vocabulary"
    )
    compared = compiled if light is compiled.survey else dataclasses.replace(compiled, survey=light)
    while True:
        try:
            checked = _compare_with_eager(compared, compiled.model)
        except NotEnoughMemory as error:
            lighter = compared.survey.with_lighter_samples()
            if lighter is not compared.survey:
                compared = dataclasses.replace(compiled, survey=lighter)
                why = "heavier ones take more memory than this machine has"
            elif required:
                raise
            else:
                without_model = dataclasses.replace(compiled, model=None)
                return _leave_uncompared(without_model, f"which takes too much memory here: {error.message}")
        else:
            return checked if compared is compiled else _note_light_samples(checked, compiled, why)


def _note_light_samples(checked: CompiledPlan, compiled: CompiledPlan, why: str) -> CompiledPlan:
    """Returns a plan that was compared on light samples only with a note that says so, and the survey of
    `compiled`."""
    note = f"compared on light samples of the dataset: {why}"
    notes: dict[str, object] = {"notes": [*checked.plan.checks.get("notes", []), note]}
    return dataclasses.replace(_add_checks(checked, notes), survey=compiled.survey)


def _leave_uncompared(compiled: CompiledPlan, reason: str) -> CompiledPlan:
    """Returns the plan with the reason why it was not compared, and what its sections send as padding, as far
    as that is found without the model."""
    padding = find_block_padding(compiled)
    checks: dict[str, object] = {"reason": f"not compared with the eager model, {reason}"}
    if known := [name for name, found in padding.items() if found.is_constant]:
        checks["padding_seen"] = known
    return _add_checks(with_fills(compiled, padding), checks)


def _compare_with_eager(compiled: CompiledPlan, model: nn.Module) -> CompiledPlan:
    """Returns the plan with the results of the comparison. Raises UserError if it is not exact."""
    compared = _check_drawn_rows(compiled)
    padding = find_padding(compared)
    compiled, compared = with_fills(compiled, padding), with_fills(compared, padding)
    for pattern in compared.survey.micro_batch_patterns():
        samples = compared.survey.compose_batches(pattern)[-1]
        refuse_kept_state(compiled.plan, compiled.user, model, samples, compiled.start, compiled.unloaded)
    try:
        patterns = compare_patterns(compared, model)
        for pattern in patterns:
            if not pattern.comparison.is_exact:
                with pattern.coins.in_use() if pattern.coins else nullcontext():
                    raise _inexact_error(compared, pattern)
    except NotEnoughMemory:
        raise
    except UserError as error:
        return _check_other_plans(compiled, error, padding)
    checks: dict[str, object] = {"patterns": [p.as_dict() for p in patterns]}
    if compiled.user.defines("eval_dataset") and (reason := _why_not_evaluable(compiled, model)):
        checks["evaluation"] = reason
    return _add_checks(compiled, checks)


def _check_drawn_rows(compiled: CompiledPlan) -> CompiledPlan:
    """Raises UserError for a drawn sample with another number of places than of rows for them. Returns what
    to compare: without shortened samples if some of these have lost places of their rows."""
    if not any(isinstance(op, PlacedRowsOp) for op in compiled.module.walk()):
        return compiled
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "plan"
        write_plan_files(directory, build_terms_files(compiled.module, compiled.constants))
        placed = find_placed_rows(load_plan_module(directory / "sections" / "terms.py"))

    def check(name: str, sample: Mapping[str, Any]) -> None:
        batch = compiled.user.collate([sample])
        check_placed_rows(placed, name, batch, read_symbol_sizes(batch, compiled.plan.symbols))

    survey = compiled.survey
    for drawn in survey.drawn_samples:
        if drawn.sample is not None:
            check(compiled.user.sample_name(drawn.index), drawn.sample)
    try:
        for pattern in survey.micro_batch_patterns() if survey.has_crops else ():
            for sample in survey.compose_batches(pattern)[-1]:
                check("", sample)
    except UserError:
        return dataclasses.replace(compiled, survey=survey.without_crops())
    return compiled


def _why_not_evaluable(compiled: CompiledPlan, model: nn.Module) -> str:
    """Returns why evaluations under the plan would differ from plain PyTorch in eval mode, "" if they do
    not. The plan was captured in the mode in which `model()` returns modules, so code of forward that runs in
    one mode only shows as a difference of the loss."""
    with tempfile.TemporaryDirectory() as name, eval_mode(model), torch.no_grad():
        directory = Path(name) / "plan"
        compiled.write_sections(directory)
        rank = OneRankPlan(evaluation_plan(compiled.plan), directory, compiled.user, model, evaluates=True)
        for pattern in compiled.survey.micro_batch_patterns():
            samples = compiled.survey.compose_batches(pattern)[-1]
            try:
                reference = rank.run_reference(samples)
                found = [rank.compare_step(samples, n, reference) for n in _padding_sizes(compiled.plan)]
                output = rank.find_inexact_output(samples, 1) if compiled.plan.outputs else ""
            except Exception as error:  # whatever the user's code raises in eval mode
                return (str(error).strip() or type(error).__name__).splitlines()[0]
            if any(c.difference.loss > 1 or (c.widened and c.widened.difference.loss > 1) for c in found):
                return (
                    "in eval mode forward computes another loss than the plan, which was captured in training"
                    " mode; move code that depends on self.training into a module that forward calls"
                )
            if output:
                return (
                    f"{output!r}, which metrics() asks for, differs for a sample alone and among others:"
                    " compute it without padded positions, or compile with --widths global"
                )
    return ""


def _check_other_plans(
    compiled: CompiledPlan, error: UserError, padding: Mapping[str, PaddingSeen]
) -> CompiledPlan:
    """Compiles and checks other plans than the one that the check refused with `error`, with `padding` on its
    edges; returns the first exact one. Raises `error` if there is none, or why nothing fits without the
    choices that it took back."""
    refusal = error
    for options in _other_options(compiled, error):
        try:
            checked = check_exactness(compile_model(compiled.user.path, options))
        except UserError as other:
            if options.taken_back != compiled.options.taken_back and not isinstance(other, InexactPlan):
                refusal = other
            if isinstance(other, InexactPlan) and options.widths == "own" != compiled.options.widths:
                refusal = _no_width_error(error)
            continue
        if options.widths == compiled.options.widths:
            return checked
        reason = WidthsReason.INEXACT if options.widths == "global" else WidthsReason.NEEDED
        masks = describe_varying(padding, compiled.plan.edges) if options.widths == "global" else ""
        return _add_checks(checked, {"widths": reason.value + masks})
    raise _blame_pinned_stages(compiled, refusal)


def _no_width_error(error: UserError) -> UserError:
    """Returns the error of a model that fails at the global batch's widths with `error`, and is inexact at
    its own."""
    message = (
        "no width of micro-batches is right: padding reaches the loss, so they need the width of the global "
        f"batch, and padded to it, {error.message}"
    )
    remedy = (
        "let padding change nothing (mask what convolutions and sums see of it), or give what forward makes "
        "(as by durations) the width of an input, `F.pad(y, (0, 0, 0, mel.shape[1] - y.shape[1]))`"
    )
    return UserError(message, error.where, remedy)


def _blame_pinned_stages(compiled: CompiledPlan, refusal: UserError) -> UserError:
    """Returns an error that names the stages that the user pinned, if the plan without them is exact; else
    the refusal itself."""
    options = compiled.options
    staged = {f"{name}.pp" for name, stages in compiled.plan.pipelines.items() if len(stages) > 1}
    pins = [pin for pin in options.set if pin.partition("=")[0] in staged]
    if not pins:
        return refusal
    others = tuple(pin for pin in options.set if pin not in pins)
    try:
        check_exactness(compile_model(compiled.user.path, dataclasses.replace(options, set=others)))
    except UserError:
        return refusal
    message = f"{' with '.join(pins)} is impossible: captured layer by layer, {refusal.message}"
    return UserError(message, refusal.where, f"leave {' or '.join(p.partition('=')[0] for p in pins)} out")


def _other_options(compiled: CompiledPlan, error: UserError) -> Iterator[CompileOptions]:
    """Yields options for other plans, but for what the user chose: for an inexact plan with all micro-batches
    padded to the widths of the global batch, because the probe of padding can miss lengths that reach the
    loss only sometimes, as with a strided convolution; for a plan that fails at those widths without padding,
    because forward may compute the one width that fits a sample, as the sum of its durations; then with whole
    layers in each stage, and without stages, for which the model was captured by layers."""
    options = compiled.options
    inexact = isinstance(error, InexactPlan)
    if options.widths == "auto" and inexact == (compiled.plan.widths == "own"):
        yield dataclasses.replace(options, widths="global" if inexact else "own")
    pinned = {pin.partition("=")[0] for pin in options.set}
    staged = {f"{name}.pp" for name, stages in compiled.plan.pipelines.items() if len(stages) > 1}
    divides = any(map(is_part_of_layer, graph_of(compiled.module).blocks.values()))
    if staged and divides and all(record.choice != DIVIDED_LAYERS for record in options.taken_back):
        whole = TakenBack(DIVIDED_LAYERS, error.message, error.where)
        yield dataclasses.replace(options, taken_back=(*options.taken_back, whole))
    found = tuple(TakenBack(choice, error.message, error.where) for choice in sorted(staged - pinned))
    if found:
        others = (record for record in options.taken_back if record.choice != DIVIDED_LAYERS)
        yield dataclasses.replace(options, taken_back=(*others, *found))


def _add_checks(compiled: CompiledPlan, checks: dict[str, object]) -> CompiledPlan:
    plan = dataclasses.replace(compiled.plan, checks=compiled.plan.checks | checks)
    return dataclasses.replace(compiled, plan=plan)


def _inexact_error(compiled: CompiledPlan, inexact: PatternCheck) -> InexactPlan:
    decisive = inexact.comparison.decisive
    d, pattern = decisive.difference, describe_pattern(inexact.pattern)
    where = "" if decisive is inexact.comparison else " of float32, computed in place of 16 bits"
    where += " where random numbers are close to an end of their range, as few are" if inexact.coins else ""
    if mixing := _find_token_mixing(compiled, inexact.pattern):
        module, line = next(iter(mixing.items()))
        message = (
            f"experts of {module} give a token another result when other tokens come with it (a capacity for"
            " the batch, tokens dropped by position), so micro-batches compute another loss than the batch"
        )
        return InexactPlan(message, line, TOKEN_MIXING_REMEDY)
    if math.isinf(d.gradient) and (line := _find_parameter_line(compiled, d.worst)):
        message = (
            f"forward uses {d.worst} for all samples of a batch or for none, by the inputs that some of them"
            f" have ({pattern}): samples in micro-batches of their own are computed otherwise"
        )
        return InexactPlan(message, line, _BRANCH_REMEDY)
    if inexact.pattern and (found := _find_changing_input(compiled, inexact.pattern)):
        remedy = _SHIFTED_DRAWS_REMEDY if found.is_drawn else _BRANCH_REMEDY
        return InexactPlan(_describe_changing_input(found, pattern), found.where, remedy)
    together = compiled.survey.compose_batches(frozenset(inexact.pattern))[-1]
    if error := _find_coupling(compiled, together):
        return error
    if switch := _find_global_switch(compiled, inexact.pattern):
        message = (
            f"forward switches {switch.name}, which the code of this module may read, from {switch.first!r}"
            f" to {switch.other!r} while it runs: ranks follow attributes of modules, not of classes or files"
        )
        remedy = "keep the switch in each module, as `self.NAME`, and let forward set it there"
        return InexactPlan(message, switch.where, remedy)
    message = (
        f"the plan does not compute what plain PyTorch computes for samples with {pattern}: "
        f"the loss is off by {d.loss:.3g} and the gradient of {d.worst} by {d.gradient:.3g} tolerances"
        f"{where}"
    )
    example = (
        f" (such as code under `if {inexact.pattern[0]} is not None` that changes samples without it, too)"
        if inexact.pattern
        else ""
    )
    blocks = sorted({block for section in compiled.plan.sections for block in section.blocks})
    more = ", …" if len(blocks) > _MOST_NAMED else ""
    remedy = (
        f"the model couples samples in a way that capture did not see{example}, or keeps something from one "
        "call of a module to the next (a counter, a buffer); --whole-batch BLOCK computes such a block "
        f"exactly (blocks are {', '.join(blocks[:_MOST_NAMED])}{more}); put code outside of them into "
        "an nn.Module of its own for that"
    )
    if compiled.options.widths == "own":
        remedy = f"leave --widths own out, so that wider micro-batches are tried, too; else {remedy}"
    if inexact.coins:
        places = sorted({draw.where for draw in compiled.plan.draws})
        remedy = (
            "let what forward does for rare random numbers change only the samples that draw them, not others"
            f" of the batch (numbers are drawn at {', '.join(places[:_MOST_NAMED])}); or {remedy}"
        )
    elif compiled.plan.draws:
        first = compiled.plan.draws[0]
        remedy = (
            f"the rows of a random op (the first is at {first.where}) may not stand sample after sample, "
            "or the number of its calls may differ "
            "between samples; switch it off to see whether it is that"
        )
    recorded = next((c for c in compiled.plan.recorded if set(c.when) == set(inexact.pattern)), None)
    if recorded is None or recorded.spare:
        return InexactPlan(message, str(compiled.user.path), remedy)
    remedy = f"let this line decide nothing by the number of samples (`if len(x) > 6`); else {remedy}"
    return InexactPlan(f"{message}; {recorded.why}", recorded.where, remedy)


def _describe_changing_input(found: ChangingInput, pattern: str) -> str:
    if found.is_drawn:
        return (
            f"this line draws random numbers more often if samples of a batch have {found.key!r} ({pattern}),"
            " and its draws are told apart by their order: in micro-batches of their own, samples get other"
            " numbers"
        )
    if found.module:
        return (
            f"samples without {found.key!r} are computed otherwise where other samples of the batch have it"
            f" ({pattern}), in the code around this use of it: {found.module} returns something else for such"
            " a sample than alone"
        )
    return (
        f"samples with and without {found.key!r} in one batch ({pattern}) get another loss than in"
        " micro-batches of their own, though samples of one kind do not: the code around this use of it may"
        " compute samples without it otherwise"
    )


def _find_changing_input(compiled: CompiledPlan, pattern: Sequence[str]) -> ChangingInput | None:
    """Returns an optional input that changes samples without it, if there is one."""
    assert compiled.model is not None
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "plan"
        compiled.write_sections(directory)
        rank = OneRankPlan(compiled.plan, directory, compiled.user, compiled.model)
        return find_changing_input(compiled, rank, frozenset(pattern))


def _find_coupling(compiled: CompiledPlan, samples: Sequence[Mapping[str, Any]]) -> InexactPlan | None:
    """Returns an error that names the blocks in which a sample's results depend on the others of its batch;
    None if there are none."""
    if compiled.model is None:
        return None
    paths = [b for s in compiled.plan.sections if not s.whole_batch for b in s.blocks]
    coupled = find_coupled_blocks(compiled.model, ((), compiled.user.collate(samples)), paths, len(samples))
    if not coupled:
        return None
    names = " and ".join(coupled)
    message = (
        f"{names} {'give' if len(coupled) > 1 else 'gives'} a sample another result when other samples come "
        "with it (a value over the batch, what is chosen by one, or rows in another order), so micro-batches "
        "compute another loss than the batch"
    )
    options = " ".join(f"--whole-batch {path}" for path in coupled)
    remedy = (
        f"compute nothing over the samples there; or {options}, exact: all samples of a step are then "
        "computed at once"
    )
    return InexactPlan(message, forward_source_line(type(compiled.model.get_submodule(coupled[0]))), remedy)


def _find_global_switch(compiled: CompiledPlan, pattern: Sequence[str]) -> GlobalSwitch | None:
    """Returns the class attribute or global that forward switches for samples of a pattern, if it does."""
    if compiled.model is None:
        return None
    samples = compiled.survey.compose_batches(frozenset(pattern))[-1]
    with torch.no_grad():
        return find_global_switch(compiled.model, compiled.user.collate(samples))


def _find_parameter_line(compiled: CompiledPlan, name: str) -> str:
    """Returns the line of forward that uses a parameter outside of blocks, "" if there is none."""
    uses = (
        use.operation
        for op in compiled.module.walk()
        if isinstance(op, ParamOp) and op.path.data == name
        for use in op.results[0].uses
    )
    lines = sorted(filter(None, map(source_line, uses)), key=lambda line: (len(line), line))
    return lines[0] if lines else ""


def _find_token_mixing(compiled: CompiledPlan, pattern: Sequence[str]) -> dict[str, str]:
    """Returns the mixtures of experts, with their source lines, in which tokens depend on each other."""
    if compiled.model is None:
        return {}
    samples = compiled.survey.compose_batches(frozenset(pattern))[-1]
    return find_token_mixing(compiled.model, ((), compiled.user.collate(samples)))


def compare_patterns(compiled: CompiledPlan, model: nn.Module) -> list[PatternCheck]:
    """Compares the plan with the eager `model` for every pattern of the survey."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "plan"
        compiled.write_sections(directory)
        rank = OneRankPlan(compiled.plan, directory, compiled.user, model)
        return [_check_pattern(compiled, rank, pattern) for pattern in compiled.survey.micro_batch_patterns()]


def _check_decisions(compiled: CompiledPlan, rank: OneRankPlan, pattern: frozenset[str]) -> None:
    """Raises UserError if the loss depends on a condition on the whole batch that micro-batches decide
    differently."""
    assert compiled.model is not None
    if compiled.plan.checks.get("accepted"):
        return
    decisions = BatchDecisions(
        compiled.plan,
        compiled.user,
        compiled.survey,
        list(rank.sections.values()),
        compiled.captured_model.capture,
    )
    for cause, where, samples in decisions.find_differing_batches(pattern):
        if cause is DecisionCause.BLOCK_RESULT and count_entries(compiled.model, samples) > _MOST_ENTRIES:
            samples = samples[: max(BATCH_SAMPLE_COUNTS)]  # any samples show what blocks decide
        try:
            reference = _run_reference(compiled, rank, samples)
        except NotEnoughMemory:
            if cause is not DecisionCause.BLOCK_RESULT:
                raise
            samples = samples[: max(BATCH_SAMPLE_COUNTS)]
            reference = _run_reference(compiled, rank, samples)
        size = CHECK_MICRO_BATCH if cause is DecisionCause.SIZE else 1
        try:
            parts = rank.compare_step(samples, size, reference)
        except UserError:
            continue  # a sample that takes its own path is refused when a run meets it
        if cause is DecisionCause.SIZE and not parts.is_exact:
            message = f"{cause}: {len(samples)} samples take another way than few of them"
            raise UserError(message, where or str(compiled.user.path), _SIZE_REMEDY)
        # If one micro-batch is inexact too, decisions are not the cause.
        if not parts.is_exact and rank.compare_step(samples, len(samples), reference).is_exact:
            _refuse_gradient_hooks(rank, samples, size)
            refuse_faults_of_one(compiled, rank, samples, reference)
            off = parts.difference
            if off.loss <= 1 and len(samples) > 2 and rank.compare_step(samples, 2, reference).is_exact:
                raise describe_fault_of_one(compiled.user, rank.model, off.worst, off.gradient)
            if cause is DecisionCause.BLOCK_RESULT and (error := _find_coupling(compiled, samples)):
                raise UserError(f"{cause}: {error.message}", error.where, error.remedy)
            message = (
                f"{cause}: the loss of {len(samples)} samples together is not that of the same samples in"
                " micro-batches"
            )
            remedy = "decide for each sample, with torch.where or a mask"
            if cause is DecisionCause.BLOCK_RESULT:
                remedy += "; and compute nothing over the samples, such as a maximum of all of them"
            raise UserError(message, where or str(compiled.user.path), remedy)


def _check_pattern(compiled: CompiledPlan, rank: OneRankPlan, pattern: frozenset[str]) -> PatternCheck:
    """Compares the plan for one pattern. Raises UserError if plain PyTorch fails on samples alone."""
    try:
        return _compare_pattern(compiled, rank, pattern)
    except Exception as error:
        if not isinstance(error, UserError) or error.__cause__ is not None:
            refuse_small_batches(compiled, compiled.survey.compose_batches(pattern)[-1])
        raise


def _compare_pattern(compiled: CompiledPlan, rank: OneRankPlan, pattern: frozenset[str]) -> PatternCheck:
    """Compares on the largest micro-batch of the survey, which has samples of several lengths and of smaller
    patterns, and samples of rare paths and with flags that these lack."""
    assert compiled.model is not None
    rare = compiled.survey.rare_samples(pattern) + compiled.survey.flagged_samples(pattern)
    samples = compiled.survey.compose_batches(pattern)[-1] + rare
    watch = _watch_comparisons(compiled)
    try:
        with watch:
            reference = _run_deterministic_reference(compiled, rank, samples)
    except UserError:
        if not compiled.survey.has_crops:
            raise
        # Other inputs, such as lengths, may contradict shortened sequences.
        compiled = dataclasses.replace(compiled, survey=compiled.survey.without_crops())
        samples = compiled.survey.compose_batches(pattern)[-1] + rare
        watch = _watch_comparisons(compiled)
        with watch:
            reference = _run_deterministic_reference(compiled, rank, samples)
    _check_decisions(compiled, rank, pattern)
    sizes, drawn_once = _padding_sizes(compiled.plan), samples
    if len(sizes) > 1 and _may_draw_padding(compiled.plan):
        samples = list(samples) * _DRAWN_COPIES  # each with other numbers
        reference = _run_deterministic_reference(compiled, rank, samples)
    if compiled.plan.draws:
        sizes.append(1)  # random numbers must be the same in micro-batches of any size
    if compiled.plan.checks.get("accepted"):
        sizes = [len(samples)]  # what was accepted is exact where there is one micro-batch
    try:
        comparisons = [rank.compare_step(samples, size, reference) for size in sizes]
    except UserError as error:
        if error.__cause__ is not None:  # a section failed
            _refuse_sizes_of_values(compiled, samples)
        raise
    worst = max(comparisons, key=lambda c: (not c.is_exact, max(c.difference.loss, c.difference.gradient)))
    check = PatternCheck(tuple(sorted(pattern)), len(samples), worst)
    if not worst.is_exact:
        _refuse_gradient_hooks(rank, samples)
        refuse_faults_of_one(compiled, rank, samples, reference)
        return check
    with gradient_hooks.scaled_gradient_hooks(rank.model, _HOOK_SCALE):
        _refuse_gradient_hooks(rank, samples)
    if reference.result is not None and reference.tolerances == FLOAT32_TOLERANCES:
        refuse_loaded_values(
            compiled.plan, compiled.user, rank.model, samples, reference.result, compiled.unloaded
        )
    if not compiled.plan.checks.get("accepted"):
        loaded = [d.index for d in compiled.survey.drawn_samples if d.sample is not None][:_LOADED_AGAIN]
        refuse_process_values(
            compiled.plan, compiled.user, compiled.write_sections, rank.model, samples, loaded
        )
    _refuse_bounded_backwards(compiled, rank, samples)
    _compare_numbers_of_samples(compiled, rank, samples)
    if not compiled.plan.checks.get("accepted"):
        refuse_set_values(
            compiled.user,
            rank.model,
            lambda: rank.compare_step(samples, CHECK_MICRO_BATCH, rank.run_reference(samples)).is_exact,
        )
        needs_watch = reference.result is None or reference.result.needs_watch
        _compare_unmet_values(compiled, rank, samples, watch, needs_watch)
        _compare_whole_numbers(compiled, rank, pattern, samples, watch)
    if compiled.plan.draws and 1 in sizes:
        check = _compare_extreme_coins(compiled, rank, drawn_once, check)
    if check.comparison.is_exact and not compiled.plan.checks.get("accepted"):
        _refuse_batch_wide_values(compiled, rank, drawn_once)
    return check


def _watch_comparisons(compiled: CompiledPlan, follows_numbers: bool = False) -> ComparisonWatch:
    """Returns what notes the comparisons of values in blocks."""
    assert compiled.model is not None
    # Those of the plan lack a block that returned an argument as it is.
    return ComparisonWatch(compiled.model, compiled.captured_model.capture.blocks, follows_numbers)


def _compare_unmet_values(
    compiled: CompiledPlan,
    rank: OneRankPlan,
    samples: Sequence[Mapping[str, Any]],
    watch: ComparisonWatch,
    needs_watch: bool,
) -> None:
    """Compares samples with values that blocks ask for and that none of `samples` has. Raises UserError if
    they are not exact. needs_watch: whether plain PyTorch needs to be watched for `samples`."""
    if watch.reads_numbers:
        watch = _follow_numbers(compiled, rank, samples, needs_watch) or watch
    answers = dict(watch.answers)
    tries, compared = itertools.count(), itertools.count()
    trials = dict[tuple[str, float], ComparisonWatch | None]()
    changing = dict[str, list[ComparisonWatch]]()  # trials with other values, by key
    failed = Counter[
        str
    ]()  # of inputs of several numbers: plain PyTorch needs each as it is, as places of rows
    keys = inputs_of_blocks(compiled.captured_model.capture.cases, {key for s in samples for key in s})
    for asked, unmet in iter_unmet_values(answers, samples, keys):
        least, points = least_value(samples, unmet.key), list[tuple[float, float]]()
        if least is not None and watch.compared[asked]:
            points.append((least, min(watch.compared[asked])))
        while unmet is not None and len(answers[asked]) == 1:
            tried = unmet.key, unmet.value
            if tried not in trials:
                if (
                    watch.is_unmoved(asked, changing.get(unmet.key, ()))
                    or failed[unmet.key] == _MOST_FAILURES
                ):
                    break
                if next(tries) == MOST_TRIES:
                    return
                trials[tried] = trial = _follow_numbers(compiled, rank, unmet.samples)
                failed[unmet.key] += trial is None and not is_single(samples, unmet.key)
                if trial is not None and unmet.differs_from(samples):
                    changing.setdefault(unmet.key, []).append(trial)
            trial = trials[tried]
            if trial is None:
                break  # plain PyTorch does not take the value
            if _shows_more(trial, answers, asked):
                if next(compared) == _MOST_UNMET_VALUES:
                    return
                _compare_unmet_value(compiled, rank, unmet)
            for other, found in trial.answers.items():
                answers.setdefault(other, set()).update(found)
            new = trial.compared.get(asked, set()) - watch.compared[asked]
            points += [(unmet.value, value) for value in sorted(new)[:1]]
            value = next_value(asked, points) if new and len(points) > 1 else None
            unmet = None if value is None else unmet_value(asked, samples, unmet.key, value)


def _shows_more(trial: ComparisonWatch, answers: Mapping[AskedNumber, set[bool]], asked: AskedNumber) -> bool:
    """Whether code took another way in a trial: a comparison has an answer that it never had, or `asked` is
    not met. Numbers that code may compare count for `asked` only."""
    if asked not in trial.answers:
        return True
    certain = ((a, found) for a, found in trial.answers.items() if a == asked or not a.is_guess)
    return any(not answers.get(a, set()) >= found for a, found in certain)


def _follow_numbers(
    compiled: CompiledPlan,
    rank: OneRankPlan,
    samples: Sequence[Mapping[str, Any]],
    needs_watch: bool = True,
) -> ComparisonWatch | None:
    """Returns what blocks compare numbers with when forward of plain PyTorch runs, watched for its memory if
    need be; None if it fails."""
    watch = _watch_comparisons(compiled, follows_numbers=True)
    try:
        with values_of_start(compiled.start, rank.model, compiled.user), watch:
            loss = rank.run_eager(samples, backward=False, watches=needs_watch).loss
    except NotEnoughMemory:
        raise
    except Exception:  # whatever the user's code raises for such samples
        return None
    return watch if math.isfinite(loss) else None


def _compare_unmet_value(compiled: CompiledPlan, rank: OneRankPlan, unmet: UnmetValue) -> None:
    """Raises UserError if samples with an unmet value are not exact."""
    try:
        reference = _run_reference(compiled, rank, unmet.samples)
        sizes = [1, *_padding_sizes(compiled.plan)[1:]]
        comparisons = [rank.compare_step(unmet.samples, size, reference) for size in sizes]
    except NotEnoughMemory:
        raise
    except UserError:
        return  # a run refuses such samples
    if inexact := next((c for c in comparisons if not c.is_exact), None):
        what = f"{unmet.value:g}, which this line asks for and no compared sample has"
        raise _unmet_value_error(compiled, unmet.key, what, unmet.where, unmet.samples, inexact)


def _compare_whole_numbers(
    compiled: CompiledPlan,
    rank: OneRankPlan,
    pattern: frozenset[str],
    samples: Sequence[Mapping[str, Any]],
    watch: ComparisonWatch,
) -> None:
    """Compares samples with other whole numbers in inputs that are one for a sample and reach a block. Raises
    UserError if they are not exact."""
    assert compiled.model is not None
    numbers_of = whole_numbers(compiled.survey, samples, watch.answers)
    cases = compiled.captured_model.capture.cases
    if not (keys := inputs_of_own_blocks(cases, compiled.model, numbers_of)):
        return
    samples = _without_padding(compiled, rank, pattern) or samples
    sizes = [1, *_padding_sizes(compiled.plan)[1:]]
    for key in keys:
        count = sum(key in sample for sample in samples)
        values, tries = numbers_of[key], 0
        waiting = [values[i : i + count] for i in range(0, len(values), count)]
        while waiting and tries < MOST_TRIES:
            numbers, tries = waiting.pop(0), tries + 1
            changed = put_numbers(samples, key, numbers)
            try:
                reference = _run_reference(compiled, rank, changed)
                comparisons = [rank.compare_step(changed, size, reference) for size in sizes]
            except NotEnoughMemory:
                raise
            except UserError:  # plain PyTorch does not take one of them, or a run refuses it
                comparisons = []
            inexact = next((c for c in comparisons if not c.is_exact), None)
            if inexact and len(numbers) == 1:
                what = f"{numbers[0]}, which no compared sample has"
                raise _unmet_value_error(compiled, key, what, "", changed, inexact)
            if len(numbers) > 1 and (inexact or not comparisons):
                waiting[:0] = [numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]]


def _without_padding(
    compiled: CompiledPlan, rank: OneRankPlan, pattern: frozenset[str]
) -> list[dict[str, Any]] | None:
    """Returns different samples of one length, among which no number moves the end of padding; None if there
    are none that plain PyTorch takes."""
    even = compiled.survey.compose_batches(pattern, even=True)[-1]
    if len({id(sample) for sample in even}) < len(even):
        return None
    try:
        _run_reference(compiled, rank, even)
    except NotEnoughMemory:
        raise
    except UserError:
        return None
    return even


def _unmet_value_error(
    compiled: CompiledPlan,
    key: str,
    value: str,
    where: str,
    samples: Sequence[Mapping[str, Any]],
    comparison: StepComparison,
) -> InexactPlan:
    what = f"where {key!r} is {value}, "
    if coupling := _find_coupling(compiled, samples):
        return InexactPlan(what + coupling.message, where or coupling.where, coupling.remedy)
    d = comparison.decisive.difference
    message = (
        f"{what}micro-batches compute another loss than the batch: it is off by {d.loss:.3g} and the gradient"
        f" of {d.worst} by {d.gradient:.3g} tolerances"
    )
    remedy = (
        "decide for each sample, with torch.where or a mask, and compute nothing over the samples; or take"
        " the line out if no sample ever has this value"
    )
    return InexactPlan(message, where or compiled.user.forward_source_line, remedy)


def _compare_extreme_coins(
    compiled: CompiledPlan, rank: OneRankPlan, samples: Sequence[Mapping[str, Any]], check: PatternCheck
) -> PatternCheck:
    """Compares samples again where forward draws numbers that may decide about them, with those close to an
    end of their range: what few samples meet (a modality that is dropped for 2% of them) may be what makes
    micro-batches inexact. Returns the first comparison that fails, else `check`."""
    for coins in map(ExtremeCoins, range(_EXTREME_COINS)):
        with coins.in_use():
            try:
                reference = _run_reference(compiled, rank, samples)
                sizes = [1, *_padding_sizes(compiled.plan)[1:]] if coins.were_drawn else []
                comparisons = [rank.compare_step(samples, size, reference) for size in sizes]
            except NotEnoughMemory:
                raise
            except UserError:
                continue  # such coins may leave no rows for a mean, or take a path of their own
        if not coins.were_drawn:
            break
        if inexact := next((c for c in comparisons if not c.is_exact), None):
            return dataclasses.replace(check, comparison=inexact, coins=coins)
    return check


def _padding_sizes(plan: Plan) -> list[MicroBatchSizes]:
    """Returns sizes of micro-batches that show whether what edges pad is read."""
    pads = plan.widths == "own" and any(edge.extents for edge in plan.edges)
    return [CHECK_MICRO_BATCH, *(SizeTrend if pads else ())]


def _may_draw_padding(plan: Plan) -> bool:
    """Whether random numbers may choose for single samples what edges pad (`torch.rand(n) < 0.1`): glue
    draws, or a block does and an edge carries a mask."""
    blocks = [block for section in plan.sections for block in section.blocks]
    paths = [op.call.partition("@")[0] for op in plan.draws]
    if any(not any(f"{path}.".startswith(f"{block}.") for block in blocks) for path in paths):
        return True
    return bool(paths) and any(edge.extents and not edge.grad for edge in plan.edges)


def _refuse_gradient_hooks(
    rank: OneRankPlan, samples: Sequence[Mapping[str, Any]], size: int = CHECK_MICRO_BATCH
) -> None:
    """Raises InexactPlan if the plan is exact in micro-batches of `size` samples without the user's hooks on
    gradients, and not with them; names the first that makes it inexact by itself."""

    def is_exact() -> bool:
        return rank.compare_step(samples, size, rank.run_reference(samples)).is_exact

    hooks = list(gradient_hooks.iter_gradient_hooks(rank.model))
    if not hooks or is_exact():
        return
    with gradient_hooks.only_gradient_hooks(rank.model):
        if not is_exact():
            return
    for name, table, key in hooks:
        with gradient_hooks.only_gradient_hooks(rank.model, table, key):
            if is_exact():
                continue
        function, where = gradient_hooks.describe_hook(table[key])
        message = (
            f"the hook {function} on the gradient of {name} gives another gradient for micro-batches than for"
            " the whole batch: it sees a part of the sum"
        )
        remedy = (
            "let hooks only watch, or treat a sum as its summands (a factor, a mask); gradients of the whole"
            " batch are clipped by secc run --clip"
        )
        raise InexactPlan(message, where or str(rank.user.path), remedy)


def _refuse_bounded_backwards(
    compiled: CompiledPlan, rank: OneRankPlan, samples: Sequence[Mapping[str, Any]]
) -> None:
    """Raises InexactPlan if the plan, which is exact, is not so where a backward of the user's, or a hook
    that forward registers on a tensor, sees larger gradients."""
    found = user_backwards(rank.model, compiled.user)
    if not found.functions and not found.hooked:
        return
    with gradient_hooks.scaled_backwards(found.functions, _HOOK_SCALE):
        comparison = rank.compare_step(samples, CHECK_MICRO_BATCH, _run_reference(compiled, rank, samples))
    if comparison.is_exact:
        return
    message = (
        f"where gradients are {_HOOK_SCALE:g} times as large, a backward of your own or a hook on a tensor"
        f" ({', '.join(found.qualified_names)}) gives another gradient for micro-batches than for the whole"
        " batch: it sees a part of the samples"
    )
    remedy = (
        "treat the gradient of each sample by itself (a factor, `g.clamp`, a norm over its own dims);"
        " gradients of the whole batch are clipped by secc run --clip"
    )
    raise InexactPlan(message, found.source_line or str(rank.user.path), remedy)


def _compare_numbers_of_samples(
    compiled: CompiledPlan, rank: OneRankPlan, samples: Sequence[Mapping[str, Any]]
) -> None:
    """Raises UserError if the plan, which is exact, is not so for as many samples as a global batch has, or
    for a number of samples that code of blocks may treat otherwise than others."""
    assert compiled.model is not None
    count = min(compiled.plan.global_batch, MAX_BATCH_SAMPLES)
    blocks = [b for section in compiled.plan.sections if not section.whole_batch for b in section.blocks]
    if compiled.plan.recorded:
        blocks.append("")  # the whole model: statements between modules run for each micro-batch, too
    if compiled.plan.checks.get("accepted"):
        return
    inside, outside = find_size_branch(compiled.model, blocks), find_equal_sizes(compiled.model, blocks)
    named = [(n, f.where) for f in (outside, inside) if f is not None for n in f.numbers]
    # A plan may hold a function of the size that is right for all recorded sizes, and for these, by chance.
    named += [(n + 1, where) for n, where in named] if outside is not None else []
    places = {n: where for n, where in reversed(named) if n <= count}
    compared = [(number, 1) for number in sorted(places)]
    if (found := inside or outside) is not None and len(samples) < count and count not in places:
        places[count] = found.where
        compared.append((count, CHECK_MICRO_BATCH))
    for number, size in compared:
        some = [dict(sample) for sample in itertools.islice(itertools.cycle(samples), number)]
        if count_entries(compiled.model, some) > _MOST_ENTRIES:
            return
        if rank.compare_step(some, size, _run_reference(compiled, rank, some)).is_exact:
            continue
        if coupling := _find_coupling(compiled, some):
            raise InexactPlan(f"with {number} samples, {coupling.message}", places[number], coupling.remedy)
        message = f"{DecisionCause.SIZE}: {number} samples take another way than few of them"
        raise InexactPlan(message, places[number], _SIZE_REMEDY)


def _refuse_batch_wide_values(
    compiled: CompiledPlan, rank: OneRankPlan, samples: Sequence[Mapping[str, Any]]
) -> None:
    """Raises InexactPlan if the plan, which is exact, is not so where samples lie on both sides of a number
    with which a block compares a value of all of them."""
    whole = [b for section in compiled.plan.sections if section.whole_batch for b in section.blocks]
    blocks = compiled.captured_model.capture.blocks
    undivided = [block for block in blocks if is_in_any(block, whole)]

    def is_exact(size: int) -> bool | None:
        try:
            return rank.compare_step(samples, size, _run_reference(compiled, rank, samples)).is_exact
        except NotEnoughMemory:
            raise
        except UserError:  # plain PyTorch fails there, or a run refuses such samples
            return None

    def run_forward(some: Sequence[Mapping[str, Any]]) -> LossAndGradients:
        return rank.run_eager(some, backward=False)

    of_one_width = compiled.plan.widths == "global"
    search = KinkSearch(rank.model, blocks, samples, run_forward, is_exact, of_one_width, undivided)
    most_samples = math.inf if compiled.survey.has_crops else compiled.plan.global_batch
    for where, watch in search.find_kinks_of_sums(most_samples):
        step = rank.run_step(samples, 1)
        with watch:
            other = _run_reference(compiled, rank, samples)
        if other.result and not compare_results(step, other.result, other.tolerances).is_exact:
            raise InexactPlan(
                f"{DecisionCause.READ_VALUE}, and no micro-batch reaches the number that this line compares"
                " with while the batch may",
                where,
                _SUM_REMEDY,
            )
    if (found := search.find_coupling_kink()) is None:
        return
    with search.watch_kinks(found.moves):
        coupling = _find_coupling(compiled, samples)
    message = (
        "this line decides by a value of all samples of a batch, and all compared samples lie on one side of"
        " it; where some lie on the other side, micro-batches compute another loss than the batch"
    )
    named = " ".join(f"--whole-batch {block}" for block in found.blocks)
    remedy = coupling.remedy.partition("; or ")[2] if coupling else f"{named}, exact: one call in a step"
    raise InexactPlan(message, found.where, f"{_SIDES_REMEDY}; or {remedy}")


def refuse_small_batches(compiled: CompiledPlan, samples: Sequence[Mapping[str, Any]]) -> None:
    """Raises UserError if plain PyTorch computes these samples together and fails for one of them alone."""
    assert compiled.model is not None
    if find_eager_failure(compiled.user, compiled.model, [dict(s) for s in samples]) is not None:
        return  # the error at hand says more
    for sample in samples:
        failure = find_eager_failure(compiled.user, compiled.model, [dict(sample)])
        if failure is not None:
            raise failure


def _refuse_sizes_of_values(compiled: CompiledPlan, samples: Sequence[Mapping[str, Any]]) -> None:
    """Raises UserError if a block returns other sizes for these samples, or for one of them, than captures
    showed, or than inputs have that are padded to the global batch's widths."""
    assert compiled.model is not None
    capture, symbols = compiled.captured_model.capture, compiled.plan.symbols
    batches = [samples, *([sample] for sample in samples)]
    fault = find_size_of_values(compiled.user, compiled.model, capture, symbols, batches)
    if fault is None and compiled.plan.widths == "global":
        fault = find_result_without_padding(
            compiled.user, compiled.model, compiled.plan.inputs, symbols, samples
        )
    if fault is not None:
        raise fault


def refuse_faults_of_one(
    compiled: CompiledPlan, rank: OneRankPlan, samples: Sequence[Mapping[str, Any]], reference: Reference
) -> None:
    """Raises UserError if plain PyTorch gives a sample alone another gradient than twice in one batch, while
    the loss is the same; no plan can mend that. Models that draw random numbers or compute in 16 bits, by
    `reference`, are left out: their gradients differ without a fault."""
    if compiled.plan.draws or reference.tolerances != FLOAT32_TOLERANCES:
        return
    states = GeneratorStates()
    if (fault := find_fault_of_one(compiled.user, rank.model, samples[:2])) is not None:
        source = states.find_source()
        raise draws_error(source, str(compiled.user.path)) if source else fault


def _run_reference(
    compiled: CompiledPlan, rank: OneRankPlan, samples: Sequence[Mapping[str, Any]]
) -> Reference:
    """Runs plain PyTorch. Raises UserError if it fails or its loss is not finite."""
    try:
        reference = rank.run_reference(samples)
    except UserError:
        raise
    except Exception as error:  # whatever the user's code raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        failure = UserError(
            f"plain PyTorch cannot train the model: {reason}",
            error_source_line(error) or compiled.user.forward_source_line or str(compiled.user.path),
            "correct the model",
        )
        raise blame_compute_dtype(failure, compiled.options.dtype, rank.model) from error
    loss = reference.result.loss if reference.result else 0.0
    if math.isfinite(loss):
        return reference
    message = f"plain PyTorch's own loss of a batch is {loss}, so that no plan can be compared with it"
    remedy = "a mean over no labels is nan: divide a sum by max(count, 1)"
    raise UserError(message, compiled.user.forward_source_line or str(compiled.user.path), remedy)


def _run_deterministic_reference(
    compiled: CompiledPlan, rank: OneRankPlan, samples: Sequence[Mapping[str, Any]]
) -> Reference:
    """Returns the reference, and raises UserError if it depends on Python's or NumPy's random numbers, which
    cannot be tied to samples.

    A model may draw such numbers without using them (layers skipped with probability 0); so the reference is
    computed twice before it is refused, and with numbers at both ends of their range.
    """
    states = GeneratorStates(select_generators(iter_contents(rank.model, compiled.user)))
    reference = _run_reference(compiled, rank, samples)
    source = states.find_source()
    functions = user_functions(rank.model, compiled.user)
    if not source and all(MAKERS.isdisjoint(f.__code__.co_names) for f in functions):
        return reference
    is_fixed = not source or _equal_bitwise(reference.result, _run_reference(compiled, rank, samples).result)
    if not is_fixed or (reference.result and _reads_extreme_draws(compiled, rank, samples, reference.result)):
        raise draws_error(source or "a generator without a seed", str(compiled.user.path))
    return reference


def _reads_extreme_draws(
    compiled: CompiledPlan,
    rank: OneRankPlan,
    samples: Sequence[Mapping[str, Any]],
    reference: LossAndGradients,
) -> bool:
    """Whether plain PyTorch has another loss where Python and NumPy draw numbers that few draws are."""
    kept = select_generators(iter_contents(rank.model, compiled.user))
    for high in (False, True):
        with extreme_draws(high, user_files(rank.model, compiled.user), kept), suppress(Exception):
            if rank.run_eager(samples, backward=False).loss != reference.loss:
                return True
    return False


def _equal_bitwise(a: LossAndGradients | None, b: LossAndGradients | None) -> bool:
    """Whether two results agree bit by bit."""
    if a is None or b is None:
        return a is b
    pairs = ((g, b.gradients[name]) for name, g in a.gradients.items())
    return a.loss == b.loss and all(
        x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs
    )
