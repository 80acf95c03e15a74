"""Evaluates a run's model on `eval_dataset()`: the forward of all sections without gradients, on the ranks
and in the wavefront order of training.

A set is evaluated as one batch would be: numerators of loss terms and the sums that their coefficients depend
on are added up over all its samples in float64, and the coefficients are computed once, at the end. So a mean
over tokens is the mean over all tokens of the set, whatever `--eval-batch` is and however the samples are
spread over micro-batches, and the last batch may be shorter. Where the loss depends on statistics of a batch
(`first_pass`), the set is read twice: the first time finds them. Modules are in eval mode meanwhile.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from secc.runtime.data.data_plane import GlobalBatch
from secc.runtime.errors import UserError
from secc.runtime.host.activity import Waiting
from secc.runtime.model.item_seeds import derive_item_seed
from secc.runtime.plan.batch_sizes import combine_sizes
from secc.runtime.plan.schema import Plan, is_gathered, is_statistic, logged_scalar_name
from secc.runtime.sections.batch_statistic import BatchValues
from secc.runtime.training.engine import Engine, StepInput
from secc.runtime.training.evaluation_data import SetName
from secc.runtime.training.evaluation_outputs import OutputGatherer
from secc.runtime.training.first_pass import count_first_passes, sum_statistics
from secc.runtime.training.rank_context import RankContext
from secc.runtime.training.step_batches import StepBatches

METRIC_PREFIX = "eval/"


@dataclass(frozen=True)
class EvaluationResult:
    """One evaluated set. `values`: the loss, the further scalars that forward returns, and what `metrics()`
    makes of these and of the tensors that it asks for. `samples` and `tokens` (labels that count) were
    evaluated in `seconds`."""

    name: SetName
    values: Mapping[str, float]
    samples: int
    tokens: int
    seconds: float

    def metric_names(self) -> dict[str, float]:
        """Returns the values by the names that `--keep-best` and trackers use: `eval/loss`, or
        `eval/SET_loss` if there are several sets."""
        return {metric_name(self.name, name): value for name, value in self.values.items()}


def metric_name(set_name: SetName, value: str) -> str:
    """Returns the name of a value of an evaluation set."""
    return f"{METRIC_PREFIX}{set_name}_{value}" if set_name else f"{METRIC_PREFIX}{value}"


class _SetTotals:
    """What is known of a set on every rank, and this rank's numerators of loss terms."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.batches: list[GlobalBatch] = []
        self.numerators: dict[str, torch.Tensor] = {}
        # What `metrics()` asks for, by sample in the order of the set, on the rank that gathers it.
        self.rows: dict[str, list[torch.Tensor]] = {output.name: [] for output in plan.outputs}

    def add_rows(self, rows: Mapping[str, list[torch.Tensor]]) -> None:
        """Adds the gathered tensors of a batch."""
        for name, tensors in rows.items():
            self.rows[name] += tensors

    def add_batch(self, batch: GlobalBatch, numerators: Mapping[str, torch.Tensor]) -> None:
        """Adds a batch."""
        self.batches.append(dataclasses.replace(batch, samples=(), kept_positions=()))
        self.pattern |= batch.pattern
        for name, value in numerators.items():
            if not is_gathered(name):
                self.numerators[name] = self.numerators[name] + value if name in self.numerators else value
        for term in self._plan.terms:
            if is_gathered(term.name):
                own = numerators.get(term.name, torch.zeros(len(batch.samples), term.entries).double())
                before = self.numerators.get(term.name, own[:0])
                self.numerators[term.name] = torch.cat([before, own.to(before.device)])
        self.sample_count += len(batch.samples)

    sample_count = 0
    pattern: frozenset[str] = frozenset()

    @property
    def sizes(self) -> dict[str, int]:
        """Symbol values of the whole set."""
        return combine_sizes([b.sizes for b in self.batches], self._plan.symbols)

    @property
    def batch_sums(self) -> dict[str, float]:
        """Batch-wide sums over the whole set."""
        names = self.batches[0].batch_sums if self.batches else ()
        return {name: math.fsum(b.batch_sums[name] for b in self.batches) for name in names}


class Evaluator:
    """Evaluates the model with the sections and process groups of the training `engine`. All ranks make it
    and call it at the same points."""

    def __init__(self, context: RankContext, model: nn.Module, engine: Engine) -> None:
        assert context.evaluation_data is not None
        self._context, self._model, self._data = context, model, context.evaluation_data
        reason = context.plan.checks.get("evaluation")
        if reason:
            raise UserError(f"the plan cannot be evaluated: {reason}", str(context.user_model.path))
        plan = self._data.plan
        self._engine = Engine(
            plan,
            engine.sections,
            engine.transport.for_plan(plan),
            lambda section: None,
            context.trace,
            groups=engine.groups,
            passes=engine.gatherers,
            evaluates=True,
            exchanges=engine.exchanges,
            norms=engine.norms,
            stopwatch=engine.stopwatch,
        )
        self._terms = [t.name for t in plan.terms if not is_statistic(t.name)]
        self._outputs = OutputGatherer(plan, context.rank)

    def evaluate(self) -> list[EvaluationResult]:
        """Evaluates all sets; every rank returns the same. Collective."""
        seconds, statistics = dict.fromkeys(self._data.lengths, 0.0), dict[SetName, BatchValues]()
        for _ in range(count_first_passes(self._data.plan)):
            for name, found in self._run_pass(seconds, statistics).items():
                statistics[name] = sum_statistics(
                    self._data.plan,
                    found.numerators,
                    self._coefficients(found),
                    found.sample_count,
                    self._sum_vector,
                )
        totals = self._run_pass(seconds, statistics)
        sums = self._sum_over_ranks(totals)
        return [self._make_result(name, t, sums[name], seconds[name]) for name, t in totals.items()]

    def _run_pass(
        self, seconds: dict[SetName, float], statistics: Mapping[SetName, BatchValues]
    ) -> dict[SetName, _SetTotals]:
        """Runs all batches of all sets, adds the time to `seconds`, and returns what was found."""
        totals, started = (
            {name: _SetTotals(self._data.plan) for name in self._data.lengths},
            time.perf_counter(),
        )
        seed = derive_item_seed(self._context.seed, -2, 0)  # the same numbers in every evaluation
        with eval_mode(self._model), torch.no_grad(), self._engine.stopwatch.paused():
            for name, step in self._data.plan_pass(int(self._context.records_ahead)):
                batches = StepBatches(self._data.data_plane, step, self._context.trace)
                evaluated = StepInput(
                    step.schedule,
                    step.samples,
                    batches.load_batch,
                    coefficients=None,
                    seed=seed,
                    statistics=statistics.get(name, {}),
                    first_sample=totals[name].sample_count,
                )
                self._engine.run_step(evaluated)
                totals[name].add_batch(step.batch, self._engine.numerators)
                if self._data.plan.outputs:
                    with self._context.trace.activity.during("outputs for metrics()", Waiting.PEERS):
                        kept = self._engine.outputs
                        totals[name].add_rows(self._outputs.gather_batch(step.samples, step.schedule, kept))
                now = time.perf_counter()
                seconds[name], started = seconds[name] + now - started, now
        return totals

    def _coefficients(self, totals: _SetTotals) -> dict[str, float]:
        return self._context.loss_coefficients(totals.batch_sums, totals.sizes, totals.pattern)

    def _sum_vector(self, own: torch.Tensor) -> torch.Tensor:
        """Sums a float64 vector over ranks. Collective."""
        gathered = self._data.data_plane.exchange_values(own.to(self._context.device), 0)
        return gathered.sum(0).cpu()

    def _sum_over_ranks(self, totals: Mapping[SetName, _SetTotals]) -> dict[SetName, dict[str, float]]:
        """Sums each term's numerator over all ranks, by set. Collective."""
        zero = torch.zeros((), dtype=torch.float64, device=self._context.device)
        shares = [t.numerators.get(term, zero) for t in totals.values() for term in self._terms]
        if not shares:
            return {name: {} for name in totals}
        sums = iter(self._data.data_plane.exchange_values(torch.stack(shares), 0).sum(0).tolist())
        return {name: {term: next(sums) for term in self._terms} for name in totals}

    def _make_result(
        self, name: SetName, totals: _SetTotals, numerators: Mapping[str, float], seconds: float
    ) -> EvaluationResult:
        values = {"loss": self._context.terms.CONSTANT}
        for term, coefficient in self._coefficients(totals).items():
            if is_statistic(term):
                continue
            value = logged_scalar_name(term) or "loss"
            values[value] = values.get(value, 0.0) + coefficient * numerators.get(term, 0.0)
        tokens = sum(b.tokens for b in totals.batches)
        counts = {"samples": float(totals.sample_count), "tokens": float(tokens)}
        computed = None
        if self._outputs.is_target:
            computed = self._context.user_model.compute_metrics(counts | values, totals.rows)
        metrics = self._outputs.share_values(computed) if self._context.user_model.defines("metrics") else {}
        return EvaluationResult(name, values | metrics, totals.sample_count, tokens, seconds)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Calls `model.eval()`, and gives every module its own mode back at the end."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
