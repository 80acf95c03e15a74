"""Shows a plan exact: its own sections, schedule and engine on one rank, against the eager model, for every
activation pattern.

The plan's meshes are folded onto one rank and its micro-batches made small, so that a global batch of a few
samples passes through every section in several micro-batches. What is compared is what training uses: the
loss and every parameter's gradient. Where the terms of a loss cancel (advantages that add up to 0), float32
leaves few digits of it, so what differs in float32 is compared in float64 again.
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
from secc.errors import UserError
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

CHECK_MICRO_BATCH = 2
CPU_DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class PatternCheck:
    """One pattern's comparison; differences are in units of the tolerances."""

    pattern: tuple[str, ...]
    samples: int
    difference: ResultDifference

    def as_dict(self) -> dict[str, object]:
        """For the plan; errors to one digit: others move with where tensors lie in memory, and a plan is the
        same byte for byte."""
        d = self.difference
        loss, gradient = (float(f"{error:.0e}") for error in (d.loss, d.gradient))
        return {
            "pattern": list(self.pattern), "samples": self.samples, "exact": d.is_exact, "loss_error": loss, "gradient_error": gradient,
            "worst_gradient": d.worst,
        }  # fmt: skip


def check_exactness(compiled: CompiledPlan, required: bool = False) -> CompiledPlan:
    """The plan with what the comparison showed, every pattern exact.

    Raises UserError if a pattern is not exact; if `required`, also where the model is too large to be built
    here.
    """
    if compiled.model is None:
        if required:
            remedy = "define small_model(), the same architecture but small, and check with --small"
            raise UserError("the model is too large to be shown exact here", str(compiled.user.path), remedy)
        return _add_checks(
            compiled, {"reason": "not compared with the eager model, which is too large to be built here"}
        )
    patterns = compare_patterns(compiled, compiled.model)
    for found in patterns:
        if not found.difference.is_exact:
            return _retry_with_global_widths(compiled, found)
    return _add_checks(compiled, {"patterns": [p.as_dict() for p in patterns]})


def _retry_with_global_widths(compiled: CompiledPlan, found: PatternCheck) -> CompiledPlan:
    """The plan with all micro-batches padded to the global batch's widths. Raises UserError if that is not
    exact either, or not allowed.

    Padding may reach the loss by way of a few lengths only, which the probe of widths did not meet: a
    convolution with a stride of two.
    """
    if compiled.plan.widths == "global" or compiled.options.widths != "auto":
        raise _inexact_error(compiled, found)
    try:
        return check_exactness(
            compile_model(compiled.user.path, dataclasses.replace(compiled.options, widths="global"))
        )
    except UserError:
        raise _inexact_error(compiled, found) from None


def _add_checks(compiled: CompiledPlan, checks: dict[str, object]) -> CompiledPlan:
    plan = dataclasses.replace(compiled.plan, checks=compiled.plan.checks | checks)
    return dataclasses.replace(compiled, plan=plan)


def _inexact_error(compiled: CompiledPlan, found: PatternCheck) -> UserError:
    d = found.difference
    pattern = ", ".join(found.pattern) or "no optional inputs"
    message = (
        f"the plan does not compute what plain PyTorch computes for samples with {pattern}: "
        f"the loss is off by {d.loss:.3g} and the gradient of "
        f"{d.worst} by {d.gradient:.3g} tolerances"
    )
    remedy = (
        "the model joins samples in a way secc did not see, or keeps something from one call of a module to the next (a counter, a "
        "buffer); train it with --max-sections 1 on one rank, and report the model"
    )
    if compiled.plan.draws:
        first = compiled.plan.draws[0]
        remedy = (
            f"the rows of a random op (the first is at {first.where}) may not stand sample after sample, "
            "or the number of its calls may differ "
            "between samples; switch it off to see whether it is that"
        )
    return UserError(message, str(compiled.user.path), remedy)


def compare_patterns(compiled: CompiledPlan, model: nn.Module) -> list[PatternCheck]:
    """Compare plan and eager `model` for every pattern of the survey."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "plan"
        compiled.write_sections(directory)
        rank = OneRankPlan(compiled.plan, directory, compiled.user, model)
        return [_check_pattern(compiled, rank, pattern) for pattern in compiled.survey.micro_batch_patterns()]


def _check_decisions(compiled: CompiledPlan, rank: OneRankPlan, pattern: frozenset[str]) -> None:
    """Raises UserError where the loss moves with a condition that samples alone decide otherwise than
    together."""
    assert compiled.model is not None
    if compiled.plan.checks.get("accepted"):
        return
    found = BatchDecisions(
        compiled.plan,
        compiled.user,
        compiled.survey,
        list(rank.sections.values()),
        compiled.captured_model.meta,
        compiled.captured_model.capture,
    )
    for where, samples in found.find_differing_batches(pattern):
        draws = PlanRandomness(compiled.model, compiled.plan.draws, compiled.plan.symbols).draws_for(
            compiled.user, samples
        )
        reference = _run_reference(compiled, compiled.user.collate(samples), draws)
        try:
            parts = _compare_step(compiled, rank, samples, 1, reference)
        except UserError:
            continue  # a sample that goes a way of its own is refused when it comes
        # What is inexact in one micro-batch too is no matter of decisions.
        if not parts.is_exact and _compare_step(compiled, rank, samples, len(samples), reference).is_exact:
            message = f"the loss depends on what Python reads of the whole batch: for {len(samples)} samples it is not what it is for each alone"
            raise UserError(
                message,
                where or str(compiled.user.path),
                "decide for each sample, with torch.where or a mask",
            )


def _check_pattern(compiled: CompiledPlan, rank: OneRankPlan, pattern: frozenset[str]) -> PatternCheck:
    """The largest micro-batch of the survey, which holds samples of several lengths and, where there are
    some, of smaller patterns."""
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
    found = [_compare_step(compiled, rank, samples, most, reference) for most in sizes]
    return PatternCheck(
        tuple(sorted(pattern)), len(samples), max(found, key=lambda d: max(d.loss, d.gradient))
    )


def _compare_step(
    compiled: CompiledPlan,
    rank: OneRankPlan,
    samples: Sequence[Mapping[str, Any]],
    most: int,
    reference: LossAndGradients,
) -> ResultDifference:
    """The difference of a step, in micro-batches of at most `most` samples; where it is more than allowed,
    the same in float64."""
    found = compare_results(rank.run_step(samples, most), reference, compiled.plan.dtype)
    if found.is_exact or compiled.plan.dtype:
        return found
    double = rank.to_float64()
    try:
        draws = PlanRandomness(double.model, compiled.plan.draws, compiled.plan.symbols).draws_for(
            compiled.user, samples
        )
        exact = run_eager(double.model, _batch_to_float64(compiled.user.collate(samples)), draws)
        again = compare_results(double.run_step(samples, most), exact)
    except Exception:  # the model cannot compute in float64: a dtype is spelt out
        return found
    return again if again.is_exact else found


def _batch_to_float64(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch with floats in float64."""
    return tree_map(
        lambda v: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v, dict(batch)
    )


def _run_reference(
    compiled: CompiledPlan, batch: Mapping[str, Any], draws: MicroBatchDraws | None
) -> LossAndGradients:
    """What plain PyTorch computes. Raises UserError where it fails."""
    assert compiled.model is not None
    try:
        found = run_eager(compiled.model, batch, draws)
        if math.isfinite(found.loss):
            return found
        message = (
            f"plain PyTorch's own loss of a batch is {found.loss}, so that no plan can be compared with it"
        )
        remedy = "a mean over no labels is nan: divide a sum by max(count, 1)"
        raise UserError(message, compiled.user.forward_source_line or str(compiled.user.path), remedy)
    except UserError:
        raise
    except Exception as error:  # whatever the user's code raises
        message = f"plain PyTorch cannot train the model: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        raise UserError(
            message, compiled.user.forward_source_line or str(compiled.user.path), "correct the model"
        ) from error


def _run_deterministic_reference(
    compiled: CompiledPlan, batch: Mapping[str, Any], draws: MicroBatchDraws | None
) -> LossAndGradients:
    """The reference, which must not move with random numbers from Python or NumPy: nothing ties those to
    samples.

    A model may draw some without a use, to skip layers with a probability of 0.
    """
    before = random.getstate(), _numpy_random_state()
    found = _run_reference(compiled, batch, draws)
    if (random.getstate(), _numpy_random_state()) != before and not _equal_bitwise(
        found, _run_reference(compiled, batch, draws)
    ):
        source = "Python's random" if random.getstate() != before[0] else "NumPy"
        remedy = "draw with torch, or in the dataset, where sample i is seeded by (seed, epoch, i)"
        raise UserError(
            f"forward draws random numbers from {source}, which cannot be tied to samples",
            str(compiled.user.path),
            remedy,
        )
    return found


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
    """A plan folded onto one rank, in this process."""

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
        """The same in float64."""
        return OneRankPlan(*self._constructor_arguments, copy.deepcopy(self.model).double(), double=True)

    def run_step(
        self, samples: Sequence[Mapping[str, Any]], most: int = CHECK_MICRO_BATCH
    ) -> LossAndGradients:
        """Loss and gradients of one global batch, in micro-batches of at most `most` samples.

        The model that is compared is in float32, also what the user's has in 16 bits: edges then have the
        dtypes that they turn out to have.
        """
        while True:
            try:
                return self._run_step_once(samples, most)
            except EdgeDtypeMismatch as found:
                edges = (
                    dataclasses.replace(e, dtype=found.dtype) if e.name == found.edge else e
                    for e in self.plan.edges
                )
                self.plan = dataclasses.replace(self.plan, edges=tuple(edges))

    def _run_step_once(self, samples: Sequence[Mapping[str, Any]], most: int) -> LossAndGradients:
        plan = dataclasses.replace(self.plan, sections=_with_uneven_micro_batches(self.plan.sections, most))
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
        )
        with installed_temporarily(self.model, plan.rewrites, self._fused_source):
            loss = engine.run_step(
                StepInput(schedule_batch(plan, metas), metas, batch_of, coefficients, REFERENCE_SEED)
            )
        found = LossAndGradients(float(loss) + self.terms_module.CONSTANT, copy_gradients(self.model))
        self.model.zero_grad(set_to_none=True)
        return found

    def _sum_leaves(self, singles: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        columns = zip(
            *(compute_batch_sums(self.terms_module.LEAVES, batch) for batch in singles), strict=True
        )
        return dict(zip(self.terms_module.LEAVES, map(sum, columns), strict=False))


def _with_uneven_micro_batches(
    sections: Sequence[plan_schema.Section], most: int
) -> tuple[plan_schema.Section, ...]:
    """The sections with micro-batches of at most `most` samples, every second one with one more: edges deal
    rows out anew.

    Stages of one pipeline have the same; samples that are to be alone, or all together, are.
    """
    places = {name: i for i, name in enumerate(dict.fromkeys(s.pipeline or s.name for s in sections))}

    def count(s: plan_schema.Section) -> int:
        if most > CHECK_MICRO_BATCH:
            return most
        return min(s.micro_batch, most) + (
            places[s.pipeline or s.name] % 2 if most == CHECK_MICRO_BATCH else 0
        )

    return tuple(dataclasses.replace(s, micro_batch=count(s)) for s in sections)
