"""Compares a plan with plain PyTorch, for every activation pattern, on one rank of this process.

The plan's own sections, schedule and engine run with all meshes folded onto one rank and with small
micro-batches, so that a global batch of a few samples passes through every section in several micro-batches.
The loss and every parameter's gradient are compared, which is all that training uses. Where loss terms cancel
(advantages that add up to 0), float32 leaves few digits of the loss; whatever differs in float32 is compared
again in float64.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from secc.driver.compile import CompiledPlan, compile_model
from secc.errors import InexactPlan, UserError
from secc.frontend.capture.batch_decisions import BatchDecisions
from secc.frontend.dataset.eager_reference import (
    REFERENCE_SEED,
    LossAndGradients,
    PlanRandomness,
    ResultDifference,
    compare_results,
    copy_gradients,
    run_eager,
)
from secc.runtime.comm.p2p_channels import Transport
from secc.runtime.data.sample_metadata import compute_batch_sums
from secc.runtime.fusion.install import installed_temporarily, read_fused_source
from secc.runtime.model.user_file import UserModel
from secc.runtime.monitoring.chrome_trace import ChromeTrace
from secc.runtime.plan import schema as plan_schema
from secc.runtime.plan.batch_sizes import combine_sizes, pad_batch, read_symbol_sizes
from secc.runtime.plan.schema import Mesh, Plan
from secc.runtime.plan.step_program import MicroBatch, SampleMeta
from secc.runtime.randomness.micro_batch_draws import MicroBatchDraws
from secc.runtime.rerecording.rerecorder import Rerecorder
from secc.runtime.schedule.scheduler import schedule_batch
from secc.runtime.sections.base import SectionModule, load_plan_module, load_section_module
from secc.runtime.training.engine import EdgeDtypeMismatch, Engine, StepInput
from secc.runtime.training.evaluation import eval_mode
from secc.runtime.training.evaluation_data import evaluation_plan

CHECK_MICRO_BATCH = 2
CPU_DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class PatternCheck:
    """Result of the comparison for one input pattern; `difference` is in units of the tolerances."""

    pattern: tuple[str, ...]
    samples: int
    difference: ResultDifference

    def as_dict(self) -> dict[str, object]:
        """Returns the entry of plan.json. Errors are rounded to one digit: further digits depend on where
        tensors lie in memory, and equal inputs must give equal plans."""
        d = self.difference
        loss, gradient = (float(f"{error:.0e}") for error in (d.loss, d.gradient))
        return {
            "pattern": list(self.pattern),
            "samples": self.samples,
            "exact": d.is_exact,
            "loss_error": loss,
            "gradient_error": gradient,
            "worst_gradient": d.worst,
        }


def check_exactness(compiled: CompiledPlan, required: bool = False) -> CompiledPlan:
    """Returns the plan with the results of the comparison in `checks`.

    Raises UserError if a pattern is not exact, and, if `required`, if the model is too large to build here.
    """
    if compiled.model is None:
        if required:
            remedy = "define small_model(), the same architecture but small, and check with --small"
            raise UserError("the model is too large to be shown exact here", str(compiled.user.path), remedy)
        return _add_checks(
            compiled, {"reason": "not compared with the eager model, which is too large to be built here"}
        )
    patterns = compare_patterns(compiled, compiled.model)
    for pattern in patterns:
        if not pattern.difference.is_exact:
            return _retry_with_global_widths(compiled, pattern)
    checks: dict[str, object] = {"patterns": [p.as_dict() for p in patterns]}
    if compiled.user.defines("eval_dataset") and (reason := _why_not_evaluable(compiled, compiled.model)):
        checks["evaluation"] = reason
    return _add_checks(compiled, checks)


def _why_not_evaluable(compiled: CompiledPlan, model: nn.Module) -> str:
    """Returns why evaluations under the plan would differ from plain PyTorch in eval mode, "" if they do
    not. The plan was captured in the mode in which `model()` returns modules, so code of forward that runs in
    one mode only shows as a difference of the loss."""
    with tempfile.TemporaryDirectory() as name, eval_mode(model), torch.no_grad():
        directory = Path(name) / "plan"
        compiled.write_sections(directory)
        rank = OneRankPlan(evaluation_plan(compiled.plan), directory, compiled.user, model)
        for pattern in compiled.survey.micro_batch_patterns():
            samples = compiled.survey.compose_batches(pattern)[-1]
            draws = PlanRandomness(model, compiled.plan.draws, compiled.plan.symbols).draws_for(
                compiled.user, samples
            )
            try:
                reference = run_eager(model, compiled.user.collate(samples), draws)
                difference = _compare_step(
                    compiled, rank, samples, CHECK_MICRO_BATCH, reference, evaluates=True
                )
            except Exception as error:  # whatever the user's code raises in eval mode
                return (str(error).strip() or type(error).__name__).splitlines()[0]
            if difference.loss > 1:
                return (
                    "in eval mode forward computes another loss than the plan, which was captured in training"
                    " mode; move code that depends on self.training into a module that forward calls"
                )
    return ""


def _retry_with_global_widths(compiled: CompiledPlan, inexact: PatternCheck) -> CompiledPlan:
    """Compiles and checks again with all micro-batches padded to the widths of the global batch.

    The probe of padding can miss lengths that reach the loss only sometimes, as with a strided convolution.
    Raises UserError if this plan is not exact either, or if the user chose the widths.
    """
    if compiled.plan.widths == "global" or compiled.options.widths != "auto":
        raise _inexact_error(compiled, inexact)
    try:
        return check_exactness(
            compile_model(compiled.user.path, dataclasses.replace(compiled.options, widths="global"))
        )
    except UserError:
        raise _inexact_error(compiled, inexact) from None


def _add_checks(compiled: CompiledPlan, checks: dict[str, object]) -> CompiledPlan:
    plan = dataclasses.replace(compiled.plan, checks=compiled.plan.checks | checks)
    return dataclasses.replace(compiled, plan=plan)


def _inexact_error(compiled: CompiledPlan, inexact: PatternCheck) -> InexactPlan:
    d = inexact.difference
    pattern = ", ".join(inexact.pattern) or "no optional inputs"
    message = (
        f"the plan does not compute what plain PyTorch computes for samples with {pattern}: "
        f"the loss is off by {d.loss:.3g} and the gradient of "
        f"{d.worst} by {d.gradient:.3g} tolerances"
    )
    remedy = (
        "the model couples samples in a way that capture did not see, or keeps something from one call of a "
        "module to the next (a counter, a buffer); train it with --max-sections 1 on one rank, and report it"
    )
    if compiled.plan.draws:
        first = compiled.plan.draws[0]
        remedy = (
            f"the rows of a random op (the first is at {first.where}) may not stand sample after sample, "
            "or the number of its calls may differ "
            "between samples; switch it off to see whether it is that"
        )
    return InexactPlan(message, str(compiled.user.path), remedy)


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
        compiled.captured_model.meta,
        compiled.captured_model.capture,
    )
    for where, samples in decisions.find_differing_batches(pattern):
        draws = PlanRandomness(compiled.model, compiled.plan.draws, compiled.plan.symbols).draws_for(
            compiled.user, samples
        )
        reference = _run_reference(compiled, compiled.user.collate(samples), draws)
        try:
            parts = _compare_step(compiled, rank, samples, 1, reference)
        except UserError:
            continue  # a sample that takes its own path is refused when a run meets it
        # If one micro-batch is inexact too, decisions are not the cause.
        if not parts.is_exact and _compare_step(compiled, rank, samples, len(samples), reference).is_exact:
            message = (
                "the loss depends on a value that Python reads of the whole batch: the loss of "
                f"{len(samples)} samples together is not that of the same samples in micro-batches"
            )
            raise UserError(
                message,
                where or str(compiled.user.path),
                "decide for each sample, with torch.where or a mask",
            )


def _check_pattern(compiled: CompiledPlan, rank: OneRankPlan, pattern: frozenset[str]) -> PatternCheck:
    """Compares on the largest micro-batch of the survey: it has samples of several lengths and of smaller
    patterns."""
    samples = compiled.survey.compose_batches(pattern)[-1]
    assert compiled.model is not None
    _check_decisions(compiled, rank, pattern)
    draws = PlanRandomness(compiled.model, compiled.plan.draws, compiled.plan.symbols).draws_for(
        compiled.user, samples
    )
    batch = compiled.user.collate(samples)
    reference = _run_deterministic_reference(compiled, batch, draws)
    # Random numbers must be the same in micro-batches of any size.
    sizes = (CHECK_MICRO_BATCH, 1) if draws is not None else (CHECK_MICRO_BATCH,)
    if compiled.plan.checks.get("accepted"):
        sizes = (len(samples),)  # what was accepted is exact where there is one micro-batch
    differences = [_compare_step(compiled, rank, samples, max_samples, reference) for max_samples in sizes]
    return PatternCheck(
        tuple(sorted(pattern)), len(samples), max(differences, key=lambda d: max(d.loss, d.gradient))
    )


def _compare_step(
    compiled: CompiledPlan,
    rank: OneRankPlan,
    samples: Sequence[Mapping[str, Any]],
    max_samples: int,
    reference: LossAndGradients,
    evaluates: bool = False,
) -> ResultDifference:
    """Compares one step in micro-batches of at most `max_samples`, or its evaluation; repeats it in float64
    if float32 differs."""
    difference = compare_results(
        rank.run_step(samples, max_samples, evaluates), reference, compiled.plan.dtype
    )
    if difference.is_exact or compiled.plan.dtype:
        return difference
    double = rank.to_float64()
    try:
        draws = PlanRandomness(double.model, compiled.plan.draws, compiled.plan.symbols).draws_for(
            compiled.user, samples
        )
        double_reference = run_eager(double.model, _batch_to_float64(compiled.user.collate(samples)), draws)
        in_double = compare_results(double.run_step(samples, max_samples, evaluates), double_reference)
    except Exception:  # the model cannot compute in float64: a dtype is spelt out
        return difference
    return in_double if in_double.is_exact else difference


def _batch_to_float64(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the batch with its floating-point tensors in float64."""
    return tree_map(
        lambda v: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v, dict(batch)
    )


def _run_reference(
    compiled: CompiledPlan, batch: Mapping[str, Any], draws: MicroBatchDraws | None
) -> LossAndGradients:
    """Returns loss and gradients of plain PyTorch. Raises UserError if it fails or its loss is not finite."""
    assert compiled.model is not None
    try:
        result = run_eager(compiled.model, batch, draws)
        if math.isfinite(result.loss):
            return result
        message = (
            f"plain PyTorch's own loss of a batch is {result.loss}, so that no plan can be compared with it"
        )
        remedy = "a mean over no labels is nan: divide a sum by max(count, 1)"
        raise UserError(message, compiled.user.forward_source_line or str(compiled.user.path), remedy)
    except UserError:
        raise
    except Exception as error:  # whatever the user's code raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        message = f"plain PyTorch cannot train the model: {reason}"
        raise UserError(
            message, compiled.user.forward_source_line or str(compiled.user.path), "correct the model"
        ) from error


def _run_deterministic_reference(
    compiled: CompiledPlan, batch: Mapping[str, Any], draws: MicroBatchDraws | None
) -> LossAndGradients:
    """Returns the reference, and raises UserError if it depends on Python's or NumPy's random numbers, which
    cannot be tied to samples.

    A model may draw such numbers without using them (layers skipped with probability 0); so the reference is
    computed twice before it is refused.
    """
    before = random.getstate(), _numpy_random_state()
    result = _run_reference(compiled, batch, draws)
    if (random.getstate(), _numpy_random_state()) != before and not _equal_bitwise(
        result, _run_reference(compiled, batch, draws)
    ):
        source = "Python's random" if random.getstate() != before[0] else "NumPy"
        remedy = "draw with torch, or in the dataset, where sample i is seeded by (seed, epoch, i)"
        raise UserError(
            f"forward draws random numbers from {source}, which cannot be tied to samples",
            str(compiled.user.path),
            remedy,
        )
    return result


def _equal_bitwise(a: LossAndGradients, b: LossAndGradients) -> bool:
    """Whether two results agree bit by bit."""
    pairs = ((g, b.gradients[name]) for name, g in a.gradients.items())
    return a.loss == b.loss and all(
        x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs
    )


def _numpy_random_state() -> tuple[object, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return ()
    kind, words, *rest = numpy.random.get_state()
    return kind, words.tobytes(), *rest


class OneRankPlan:
    """A plan folded onto one rank, run in this process."""

    def __init__(
        self, plan: Plan, directory: Path, user: UserModel, model: nn.Module, double: bool = False
    ) -> None:
        self._constructor_arguments, self._in_float64 = (plan, directory, user), double
        mesh = Mesh((0,))
        folded = tuple(dataclasses.replace(s, mesh=mesh) for s in plan.sections)
        edges = tuple(
            dataclasses.replace(e, dtype="float64" if double and e.dtype == "float32" else e.dtype)
            for e in plan.edges
        )
        self.plan = dataclasses.replace(plan, world_size=1, sections=folded, edges=edges)
        self.user, self.model, self._fused_source = user, model, read_fused_source(directory)
        self.sections: dict[str, SectionModule] = {
            s.name: load_section_module(directory, s, model) for s in plan.sections
        }
        self.terms_module: Any = load_plan_module(directory / "sections" / "terms.py")
        self.rerecorder = Rerecorder(plan, lambda: model, lambda _: list(self.sections.values()))

    def to_float64(self) -> OneRankPlan:
        """Returns the same plan and model in float64."""
        return OneRankPlan(*self._constructor_arguments, copy.deepcopy(self.model).double(), double=True)

    def run_step(
        self,
        samples: Sequence[Mapping[str, Any]],
        max_samples: int = CHECK_MICRO_BATCH,
        evaluates: bool = False,
    ) -> LossAndGradients:
        """Returns loss and gradients of one global batch, in micro-batches of at most `max_samples` samples.
        If it `evaluates`, dropout in glue is off.

        The compared model is in float32 even if the user's is partly in 16 bits; section edges then take the
        dtypes that their tensors turn out to have.
        """
        while True:
            try:
                return self._run_step_once(samples, max_samples, evaluates)
            except EdgeDtypeMismatch as found:
                edges = (
                    dataclasses.replace(e, dtype=found.dtype) if e.name == found.edge else e
                    for e in self.plan.edges
                )
                self.plan = dataclasses.replace(self.plan, edges=tuple(edges))

    def _run_step_once(
        self, samples: Sequence[Mapping[str, Any]], max_samples: int, evaluates: bool
    ) -> LossAndGradients:
        plan = dataclasses.replace(
            self.plan, sections=_with_uneven_micro_batches(self.plan.sections, max_samples)
        )
        singles = [self.rerecorder.add_row_counts(self.user.collate([s])) for s in samples]
        optional = {i.key for i in self.plan.inputs if i.optional}
        metas = [
            SampleMeta(i, frozenset(optional & b.keys()), read_symbol_sizes(b, self.plan.symbols))
            for i, b in enumerate(singles)
        ]
        total = combine_sizes([m.sizes for m in metas], self.plan.symbols)
        pattern = frozenset[str]().union(*(m.pattern for m in metas))
        widths = (
            {s.name: total[s.name] for s in self.plan.symbols if s.is_padded}
            if self.plan.widths == "global"
            else {}
        )
        padded = [pad_batch(b, self.plan.inputs, widths) for b in singles]
        coefficients = self.terms_module.coefficients(self._sum_leaves(padded), total, pattern)

        def batch_of(micro: MicroBatch) -> dict[str, Any]:
            batch = pad_batch(
                self.user.collate([samples[i] for i in micro.samples]), self.plan.inputs, widths
            )
            batch = self.rerecorder.add_recorded_glue(batch, len(micro.samples), micro.section)
            return _batch_to_float64(batch) if self._in_float64 else batch

        self.model.zero_grad(set_to_none=True)
        engine = Engine(
            plan,
            self.sections,
            Transport(plan, 0, CPU_DEVICE),
            lambda _: None,
            ChromeTrace(None, 0, CPU_DEVICE),
            evaluates=evaluates,
        )
        with installed_temporarily(self.model, plan.rewrites, self._fused_source):
            loss = engine.run_step(
                StepInput(schedule_batch(plan, metas), metas, batch_of, coefficients, REFERENCE_SEED)
            )
        result = LossAndGradients(float(loss) + self.terms_module.CONSTANT, copy_gradients(self.model))
        self.model.zero_grad(set_to_none=True)
        return result

    def _sum_leaves(self, singles: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        columns = zip(
            *(compute_batch_sums(self.terms_module.LEAVES, batch) for batch in singles), strict=True
        )
        return dict(zip(self.terms_module.LEAVES, map(sum, columns), strict=False))


def _with_uneven_micro_batches(
    sections: Sequence[plan_schema.Section], max_samples: int
) -> tuple[plan_schema.Section, ...]:
    """Returns the sections with micro-batches of at most `max_samples`, one more in every second section, so
    that edges have to regroup rows.

    Stages of one pipeline have equal micro-batches. Sizes other than CHECK_MICRO_BATCH are used as they are.
    """
    position_of = {name: i for i, name in enumerate(dict.fromkeys(s.pipeline or s.name for s in sections))}

    def count(s: plan_schema.Section) -> int:
        if max_samples > CHECK_MICRO_BATCH:
            return max_samples
        return min(s.micro_batch, max_samples) + (
            position_of[s.pipeline or s.name] % 2 if max_samples == CHECK_MICRO_BATCH else 0
        )

    return tuple(dataclasses.replace(s, micro_batch=count(s)) for s in sections)
