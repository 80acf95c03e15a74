"""Runs a plan on one rank of this process, and compares it with plain PyTorch.

The plan's own sections, schedule and engine run with all meshes folded onto one rank and with small
micro-batches, so that a global batch of a few samples passes through every section in several micro-batches.
The loss and every parameter's gradient are compared, which is all that training uses. Where loss terms cancel
(advantages that add up to 0), float32 leaves few digits of the loss; whatever differs in float32 is compared
again in float64.

A model that computes in 16 bits is compared twice: in its own dtypes, within what their rounding allows, and
with float32 in place of 16 bits, within the tolerances of float32.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from secc.runtime.comm.edge_messages import EdgeLayout
from secc.runtime.comm.p2p_channels import Transport
from secc.runtime.data.drawn_sums import find_drawn_sums
from secc.runtime.data.sample_metadata import compute_batch_sums
from secc.runtime.errors import UserError
from secc.runtime.fusion.install import installed_temporarily, read_fused_source
from secc.runtime.model.nested_batch import unflatten_batch
from secc.runtime.model.source_lines import error_source_line
from secc.runtime.model.user_file import UserModel, extract_tensors
from secc.runtime.monitoring.chrome_trace import ChromeTrace
from secc.runtime.plan import schema as plan_schema
from secc.runtime.plan.batch_sizes import combine_sizes, pad_batch, read_symbol_sizes
from secc.runtime.plan.schema import Mesh, Plan
from secc.runtime.plan.step_program import MicroBatch, SampleMeta, Schedule
from secc.runtime.rerecording.rerecorder import Rerecorder
from secc.runtime.schedule.scheduler import schedule_batch
from secc.runtime.sections.base import SectionModule, load_plan_module, load_section_module
from secc.runtime.sections.batch_statistic import BatchValues
from secc.runtime.training.eager_reference import (
    FLOAT32_TOLERANCES,
    REFERENCE_SEED,
    LossAndGradients,
    PlanRandomness,
    ResultDifference,
    Tolerances,
    compare_results,
    copy_gradients,
    derive_tolerances,
    run_eager,
)
from secc.runtime.training.engine import Engine, StepInput
from secc.runtime.training.evaluation_outputs import OutputGatherer
from secc.runtime.training.first_pass import FirstPass, count_first_passes
from secc.runtime.training.widened_floats import (
    is_missing_kernel,
    narrower_floats,
    own_floats,
    widen_batch,
    widened_floats,
)

CHECK_MICRO_BATCH = 2


class SizeTrend(Enum):
    """How micro-batches of a step differ in size from section to section, in the order of the data: from one
    sample to all, or from all to one. Then each edge regroups samples of all lengths, and pads them."""

    GROWING = auto()
    SHRINKING = auto()


MicroBatchSizes = int | SizeTrend  # most samples of a micro-batch, for all sections, or a trend
CPU_DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class Reference:
    """What plain PyTorch computes with a global batch, and the tolerances of the dtypes that it computes in.
    result: None if this machine's CPU has no kernels for a dtype."""

    result: LossAndGradients | None
    tolerances: Tolerances


@dataclass(frozen=True)
class StepComparison:
    """What a plan computed for one global batch, what plain PyTorch computes, and how far they are apart in
    units of `tolerances`. widened: the same step with float32 in place of 16 bits, under the tolerances of
    float32; None if nothing has 16 bits, or if this cannot be compared."""

    result: LossAndGradients
    reference: LossAndGradients
    difference: ResultDifference
    tolerances: Tolerances = FLOAT32_TOLERANCES
    widened: StepComparison | None = None

    @property
    def is_exact(self) -> bool:
        """Whether all that was compared is within the tolerances."""
        return self.difference.is_exact and (self.widened is None or self.widened.is_exact)

    @property
    def decisive(self) -> StepComparison:
        """The comparison in the model's own dtypes, unless only the widened one is inexact."""
        return self.widened if self.widened and self.difference.is_exact and not self.is_exact else self


_OUTPUT_ROUND_OFFS = (
    100  # by which an output may differ, in units of its dtype's, of it and of its largest entry
)


@dataclass(frozen=True)
class _ExecutedStep:
    """A step that ran: its engine, what it ran on, and the loss without its constant."""

    engine: Engine
    step: StepInput
    loss: torch.Tensor


@dataclass(frozen=True)
class SentTensor:
    """The tensor of an edge in one of its producer's micro-batches, with these samples."""

    edge: plan_schema.Edge
    layout: EdgeLayout
    samples: tuple[int, ...]
    tensor: torch.Tensor


class OneRankPlan:
    """A plan folded onto one rank, run in this process. If it `evaluates`, dropout in glue is off."""

    def __init__(
        self, plan: Plan, directory: Path, user: UserModel, model: nn.Module, evaluates: bool = False
    ) -> None:
        mesh = Mesh((0,))
        folded = tuple(dataclasses.replace(s, mesh=mesh) for s in plan.sections)
        self.plan = dataclasses.replace(plan, world_size=1, sections=folded)
        self.user, self.model, self._fused_source = user, model, read_fused_source(directory)
        self._widened_to: torch.dtype | None = None
        self._evaluates = evaluates
        self.sections: dict[str, SectionModule] = {
            s.name: load_section_module(directory, s, model) for s in plan.sections
        }
        self.terms_module: Any = load_plan_module(directory / "sections" / "terms.py")
        self.rerecorder = Rerecorder(plan, lambda: model, lambda _: list(self.sections.values()))

    def run_reference(self, samples: Sequence[Mapping[str, Any]]) -> Reference:
        """Runs plain PyTorch on one global batch, with the plan's random numbers."""
        try:
            result = self.run_eager(samples)
        except Exception as error:
            if is_missing_kernel(error):
                return Reference(None, FLOAT32_TOLERANCES)
            raise
        return Reference(result, derive_tolerances(result.narrow))

    def run_eager(
        self, samples: Sequence[Mapping[str, Any]], backward: bool = True, watches: bool = True
    ) -> LossAndGradients:
        """Returns loss and gradients of plain PyTorch for one global batch, with the plan's random numbers;
        without `backward` only the loss, without `watches` as `run_eager` does."""
        draws = PlanRandomness(self.model, self.plan.draws, self.plan.symbols).draws_for(self.user, samples)
        with self._kept_changes() as changes:
            batch = self._widen(self.user.collate(samples))
            result = run_eager(self.model, batch, draws, watches, backward)
        return dataclasses.replace(result, changes=changes)

    def compare_step(
        self, samples: Sequence[Mapping[str, Any]], sizes: MicroBatchSizes, reference: Reference
    ) -> StepComparison:
        """Compares one global batch, in micro-batches of these sizes, with the eager model's
        result; repeats it in float64 if float32 differs. What has 16 bits is compared in its own dtypes, and
        with float32 in place of them.

        Raises UserError if the plan fails where plain PyTorch did not.
        """
        if reference.result is None:
            widened = self._compare_widened(samples, sizes, torch.float32)
            if widened is None:
                raise UserError(
                    "this CPU lacks kernels of a dtype of the model, and float32 cannot take its place",
                    self.user.forward_source_line or str(self.user.path),
                    "check on a machine with other kernels, or with the model in float32",
                )
            return widened
        found = self._compare_own(samples, sizes, reference.result, reference.tolerances)
        if reference.tolerances == FLOAT32_TOLERANCES:
            in_float64 = None if found.is_exact else self._compare_widened(samples, sizes, torch.float64)
            return in_float64 if in_float64 and in_float64.is_exact else found
        widened = self._compare_widened(samples, sizes, torch.float32)
        if widened is not None and not widened.is_exact:
            in_float64 = self._compare_widened(samples, sizes, torch.float64)
            widened = in_float64 if in_float64 and in_float64.is_exact else widened
        if widened is None or widened.is_exact:
            return dataclasses.replace(found, widened=widened)
        # Code that reads dtypes (`torch.finfo(x.dtype).eps`) computes something else in float32 than what a
        # plan has recorded. Then even one micro-batch of all samples differs, though not in own dtypes.
        undivided = self._compare_widened(samples, len(samples), torch.float32)
        reads_dtypes = (
            undivided is not None
            and not undivided.is_exact
            and self._compare_own(samples, len(samples), reference.result, FLOAT32_TOLERANCES).is_exact
        )
        return dataclasses.replace(found, widened=None if reads_dtypes else widened)

    def _compare_own(
        self,
        samples: Sequence[Mapping[str, Any]],
        sizes: MicroBatchSizes,
        reference: LossAndGradients,
        tolerances: Tolerances,
    ) -> StepComparison:
        try:
            result = self.run_step(samples, sizes)
        except UserError:
            raise
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"the plan fails where plain PyTorch computes a loss: {reason}",
                error_source_line(error) or str(self.user.path),
                "let sizes here depend on the sizes of the inputs alone, of padded inputs, too; or put this"
                " line and those that make its arguments into one nn.Module, which secc calls as it is",
            ) from error
        return StepComparison(result, reference, compare_results(result, reference, tolerances), tolerances)

    def _compare_widened(
        self, samples: Sequence[Mapping[str, Any]], sizes: MicroBatchSizes, dtype: torch.dtype
    ) -> StepComparison | None:
        """Compares one global batch with `dtype` in place of narrower floats in both model and plan, under
        the tolerances of float32; None if one of them cannot compute so (an op asks for the dtypes of its
        inputs)."""
        wide = self._widened(dtype)
        try:
            with widened_floats(self.model, dtype):
                reference = wide.run_eager(samples)
                result = wide.run_step(samples, sizes)
        except Exception:
            return None
        return StepComparison(result, reference, compare_results(result, reference))

    def _widened(self, dtype: torch.dtype) -> OneRankPlan:
        """Returns the same plan, sections and model for steps within `widened_floats(model, dtype)`: edges
        and batches have `dtype` in place of narrower floats."""
        wide = copy.copy(self)
        name, narrow = _dtype_name(dtype), {_dtype_name(d) for d in narrower_floats(dtype)}
        edges = (dataclasses.replace(e, dtype=name) if e.dtype in narrow else e for e in self.plan.edges)
        wide.plan, wide._widened_to = dataclasses.replace(self.plan, edges=tuple(edges)), dtype
        return wide

    def _widen(self, batch: dict[str, Any]) -> dict[str, Any]:
        return widen_batch(batch, self._widened_to) if self._widened_to else batch

    def run_step(
        self, samples: Sequence[Mapping[str, Any]], sizes: MicroBatchSizes = CHECK_MICRO_BATCH
    ) -> LossAndGradients:
        """Returns loss and gradients of one global batch, in micro-batches of these sizes."""
        self.model.zero_grad(set_to_none=True)
        with self._kept_changes() as changes:
            loss = self._execute(samples, sizes).loss
        loss_value = float(loss) + self.terms_module.CONSTANT
        result = LossAndGradients(loss_value, copy_gradients(self.model), changes)
        self.model.zero_grad(set_to_none=True)
        return result

    @contextmanager
    def _kept_changes(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yields what is filled at the end with the changes of the model's buffers and parameters, by name,
        where sections take the whole batch and may change them. Gives them back their values."""
        changes = dict[str, torch.Tensor]()
        if not any(s.whole_batch for s in self.plan.sections):
            yield changes
            return
        before = {n: (b, b.clone()) for n, b in self.model.named_buffers()}
        weights = {n: (p, p.data, p.detach().clone()) for n, p in self.model.named_parameters()}
        try:
            yield changes
        finally:
            for name, (buffer, value) in before.items():
                owner, _, key = name.rpartition(".")
                module = self.model.get_submodule(owner)
                if buffer.is_floating_point():
                    changes[name] = module.get_buffer(key) - value
                setattr(module, key, buffer)
                buffer.data.copy_(value)
            for name, (parameter, data, value) in weights.items():
                if not torch.equal(parameter.detach(), value):
                    changes[name] = parameter.detach() - value
                    parameter.data = data.copy_(value)

    @torch.no_grad()
    def find_sent_tensors(self, samples: Sequence[Mapping[str, Any]]) -> list[SentTensor]:
        """Returns what sections send each other, in micro-batches of as many of the samples as possible. For
        a plan that evaluates."""
        results: dict[str, list[dict[str, torch.Tensor]]] = {name: [] for name in self.sections}

        def keep_result(section: nn.Module, _: Any, result: tuple[dict[str, torch.Tensor], Any]) -> None:
            results[cast(SectionModule, section).name].append(result[0])

        hooks = [s.register_forward_hook(keep_result) for s in self.sections.values()]
        try:
            done = self._execute(samples, len(samples))
        finally:
            for hook in hooks:
                hook.remove()
        schedule, sent = done.step.schedule, list[SentTensor]()
        layouts = {
            e.name: EdgeLayout(e, done.engine.plan, schedule, done.step.samples)
            for e in self.plan.edges
            if e.dim >= 0
        }
        for name, computed in results.items():
            ran = [i.micro for i in schedule.programs[0] if i.kind == "F" and i.section == name]
            micros = [m for k in ran if (m := schedule.micro_batches[name][k]).samples]
            sent += [
                SentTensor(layout.edge, layout, micro.samples, tensors[edge])
                for micro, tensors in zip(micros, computed, strict=True)
                for edge, layout in layouts.items()
                if edge in tensors
            ]
        return sent

    def find_inexact_output(self, samples: Sequence[Mapping[str, Any]], max_samples: int) -> str:
        """Returns the name of a tensor that `metrics()` asks for and that plain PyTorch's forward of all
        samples gives otherwise than the plan in micro-batches of at most `max_samples`; "" if there is none.
        For a plan that evaluates."""
        done = self._execute(samples, max_samples)
        gatherer = OutputGatherer(done.engine.plan, 0)
        metas, everything = done.step.samples, tuple(range(len(samples)))
        found = gatherer.gather_batch(metas, done.step.schedule, done.engine.outputs)
        whole = {s.name: (MicroBatch(0, s.name, 0, everything),) for s in self.plan.sections}
        batch, names = unflatten_batch(self.user.collate(samples)), [o.name for o in self.plan.outputs]
        tensors = extract_tensors(batch, names) | extract_tensors(self.model(**batch), names)
        kept = {(name, 0): tensor for name, tensor in tensors.items()}
        expected = gatherer.gather_batch(metas, Schedule(whole, ()), kept)
        return next((n for n in names if not all(map(_agree, found[n], expected[n]))), "")

    def _execute(self, samples: Sequence[Mapping[str, Any]], sizes: MicroBatchSizes) -> _ExecutedStep:
        """Runs one global batch, in micro-batches of these sizes."""
        plan = dataclasses.replace(
            self.plan, sections=_with_micro_batches(self.plan.sections, sizes, len(samples))
        )
        self.rerecorder.takes_any_float = self._widened_to is not None
        with own_floats():
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
        leaves = self._sum_leaves(padded) | self._sum_drawn_leaves(padded, metas, widths)
        coefficients = self.terms_module.coefficients(leaves, total, pattern)

        def batch_of(micro: MicroBatch) -> dict[str, Any]:
            with own_floats():  # in which glue is recorded, the batch included
                batch = self.user.collate([samples[i] for i in micro.samples])
                batch = pad_batch(batch, self.plan.inputs, widths)
                batch = self.rerecorder.add_recorded_glue(batch, len(micro.samples), micro.section)
            return self._widen(batch)

        engine = Engine(
            plan,
            self.sections,
            Transport(plan, 0, CPU_DEVICE),
            lambda _: None,
            ChromeTrace(None, 0, CPU_DEVICE),
            evaluates=self._evaluates,
        )
        with installed_temporarily(self.model, plan.rewrites, self._fused_source):
            statistics: BatchValues = {}
            if count_first_passes(plan):
                first = FirstPass(plan, self.model, engine)
                statistics = first.find_statistics(
                    metas, batch_of, coefficients, REFERENCE_SEED, lambda own: own
                )
            schedule = schedule_batch(plan, metas)
            step = StepInput(schedule, metas, batch_of, coefficients, REFERENCE_SEED, statistics=statistics)
            return _ExecutedStep(engine, step, engine.run_step(step))

    def _sum_leaves(self, singles: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        columns = zip(
            *(compute_batch_sums(self.terms_module.LEAVES, batch) for batch in singles), strict=True
        )
        return dict(zip(self.terms_module.LEAVES, map(sum, columns), strict=False))

    def _sum_drawn_leaves(
        self, singles: Sequence[Mapping[str, Any]], metas: Sequence[SampleMeta], widths: Mapping[str, int]
    ) -> dict[str, float]:
        drawn = find_drawn_sums(self.terms_module, self.plan, lambda _: REFERENCE_SEED, self._evaluates)
        if drawn is None:
            return {}
        columns = zip(
            *(drawn.compute_sums(0, metas, (i,), batch, widths) for i, batch in enumerate(singles)),
            strict=True,
        )
        return dict(zip(drawn.functions, map(sum, columns), strict=True))


def _agree(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors are equal but for round-off."""
    if result.shape != expected.shape or not expected.is_floating_point():
        return torch.equal(result, expected)
    rtol = _OUTPUT_ROUND_OFFS * torch.finfo(expected.dtype).eps
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return torch.allclose(result, expected, rtol=rtol, atol=rtol * scale, equal_nan=True)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _with_micro_batches(
    sections: Sequence[plan_schema.Section], sizes: MicroBatchSizes, samples: int
) -> tuple[plan_schema.Section, ...]:
    """Returns the sections with micro-batches of these sizes, for a global batch of `samples`. Stages of one
    pipeline have equal micro-batches.

    Of CHECK_MICRO_BATCH, every second section has one sample more, so that edges have to regroup rows. Other
    numbers are used as they are.
    """
    position_of = {name: i for i, name in enumerate(dict.fromkeys(s.pipeline or s.name for s in sections))}
    last = max(1, len(position_of) - 1)

    def count(s: plan_schema.Section) -> int:
        position = position_of[s.pipeline or s.name]
        match sizes:
            case SizeTrend.GROWING:
                return 1 + (samples - 1) * position // last
            case SizeTrend.SHRINKING:
                return 1 + (samples - 1) * (last - position) // last
            case int() if sizes > CHECK_MICRO_BATCH:
                return sizes
            case int():
                return min(s.micro_batch, sizes) + (position % 2 if sizes == CHECK_MICRO_BATCH else 0)

    return tuple(dataclasses.replace(s, micro_batch=count(s)) for s in sections)
