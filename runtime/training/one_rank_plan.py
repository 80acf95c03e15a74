"""Runs a plan on one rank of this process, and compares it with plain PyTorch.

The plan's own sections, schedule and engine run with all meshes folded onto one rank and with small
micro-batches, so that a global batch of a few samples passes through every section in several micro-batches.
The loss and every parameter's gradient are compared, which is all that training uses. Where loss terms cancel
(advantages that add up to 0), float32 leaves few digits of the loss; whatever differs in float32 is compared
again in float64.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from secc.runtime.comm.p2p_channels import Transport
from secc.runtime.data.sample_metadata import compute_batch_sums
from secc.runtime.fusion.install import installed_temporarily, read_fused_source
from secc.runtime.model.user_file import UserModel
from secc.runtime.monitoring.chrome_trace import ChromeTrace
from secc.runtime.plan import schema as plan_schema
from secc.runtime.plan.batch_sizes import combine_sizes, pad_batch, read_symbol_sizes
from secc.runtime.plan.schema import Mesh, Plan
from secc.runtime.plan.step_program import MicroBatch, SampleMeta
from secc.runtime.rerecording.rerecorder import Rerecorder
from secc.runtime.schedule.scheduler import schedule_batch
from secc.runtime.sections.base import SectionModule, load_plan_module, load_section_module
from secc.runtime.training.eager_reference import (
    REFERENCE_SEED,
    LossAndGradients,
    PlanRandomness,
    ResultDifference,
    compare_results,
    copy_gradients,
    run_eager,
)
from secc.runtime.training.engine import EdgeDtypeMismatch, Engine, StepInput

CHECK_MICRO_BATCH = 2
CPU_DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class StepComparison:
    """What a plan computed for one global batch, what plain PyTorch computes, and how far they are apart."""

    result: LossAndGradients
    reference: LossAndGradients
    difference: ResultDifference


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

    def compare_step(
        self,
        samples: Sequence[Mapping[str, Any]],
        max_samples: int,
        reference: LossAndGradients,
        dtype: str = "",
        evaluates: bool = False,
    ) -> StepComparison:
        """Compares one global batch, in micro-batches of at most `max_samples`, with the eager model's result
        `reference`; repeats it in float64 if float32 differs. dtype: what modules compute in, "" for
        float32. evaluates: compares an evaluation."""
        result = self.run_step(samples, max_samples, evaluates)
        found = StepComparison(result, reference, compare_results(result, reference, dtype))
        if found.difference.is_exact or dtype:
            return found
        double = self.to_float64()
        try:
            expected = double.run_eager(samples)
            result = double.run_step(samples, max_samples, evaluates)
        except Exception:  # the model cannot compute in float64: a dtype is spelt out
            return found
        in_double = StepComparison(result, expected, compare_results(result, expected))
        return in_double if in_double.difference.is_exact else found

    def run_eager(self, samples: Sequence[Mapping[str, Any]]) -> LossAndGradients:
        """Returns loss and gradients of plain PyTorch for one global batch, with the plan's random
        numbers."""
        draws = PlanRandomness(self.model, self.plan.draws, self.plan.symbols).draws_for(self.user, samples)
        batch = self.user.collate(samples)
        return run_eager(self.model, _batch_to_float64(batch) if self._in_float64 else batch, draws)

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


def _batch_to_float64(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the batch with its floating-point tensors in float64."""
    return tree_map(
        lambda v: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v, dict(batch)
    )


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
