"""Times forward and backward of a model's blocks under the conditions of a step, for the sizes of dataset
samples.

Blocks run as in a step: the forwards of a micro-batch through all blocks, then all backwards, with gradients
accumulated over several micro-batches, so that each block finds the caches as other blocks left them. On a
CPU, other processes do the same meanwhile, one for each other rank of a node, and the processor time of a
call's process counts, which excludes waiting for a core. On a GPU, CUDA events are used. The time of a call
is the median over rounds.

On CPUs, the speed gauge runs before each micro-batch. Its median tells at which processor speed the times
were measured; prices are scaled to its mean speed, which is what a run of many steps sees. Prices
(`secc.cost.model.measured_costs`) are fitted to two thirds of the sizes by non-negative least squares of
relative errors. The remaining sizes give the reported error.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from xdsl.dialects.builtin import ModuleOp, StringAttr

from secc.cost.counting.example_arguments import compute_operand_values
from secc.cost.model.default_estimate import count_entries
from secc.cost.model.measured_costs import (
    PRICED_PARTS,
    CallPrices,
    MeasuredBlock,
    MeasuredCosts,
    call_digest,
    local_hardware,
)
from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import CallOp, CaseOp, graph_of, strings_of
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.profile.background_load import background_load
from secc.profile.least_squares import nonnegative_least_squares
from secc.profile.random_arguments import random_arguments
from secc.profile.speed_gauge import SpeedGauge, time_at_mean_speed
from secc.runtime.model.module_copies import copy_module
from secc.runtime.plan.expr_eval import evaluate_expr

MAX_BUILT_BYTES = 4 << 30  # of the parameters of a group of blocks, and of the operands and results of a call
HELD_OUT_EVERY = 3  # one of three sizes is held out of the fit
MAX_ROUNDS, MIN_TIMING_S = 40, 4.0  # limits for short blocks: rounds, and seconds per block
MICRO_BATCHES_PER_STEP = 4  # gradients are accumulated over these


@dataclass(frozen=True)
class SizedBatch:
    """A collated micro-batch and its symbol values."""

    batch: Mapping[str, Any]
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class TimedCall:
    """One call at one size. cost: FLOPs and bytes by priced part. forward, backward: nanoseconds.
    held_out: not used in the fit."""

    cost: Mapping[str, float]
    forward: float
    backward: float
    held_out: bool


@dataclass(frozen=True)
class BlockReport:
    """Timings and fitted prices of a block, or the reason why there are none."""

    path: str
    class_name: str
    timings: Sequence[TimedCall]
    measured: MeasuredBlock | None
    reason: str = ""


def time_blocks(
    module: ModuleOp,
    model: nn.Module,
    batches: Sequence[SizedBatch],
    constants: Mapping[str, torch.Tensor],
    device: torch.device,
    repeat: int,
    progress: Callable[[str], None],
    ranks: int = 1,
) -> tuple[MeasuredCosts, list[BlockReport]]:
    """Time every kind of call once.

    module: IR with counted costs. model: may be on the meta device. batches: micro-batches of several sizes.
    constants: tensors of any shape made of Python data. repeat: minimum number of timed rounds.
    progress: called with a line for each group of blocks. ranks: ranks of a node that compute at the same
        time.

    Returns the measured costs, and a report for each kind of call.
    """
    kinds: dict[str, _CallKind] = {}
    for case in graph_of(module).cases:
        for call in (op for op in case.ops if isinstance(op, CallOp)):
            block = model.get_submodule(call.target.data)
            name = call_digest(call, block)
            matching = [b for b in batches if _matches_case(module, case, b)]
            if name not in kinds and matching:
                kinds[name] = _prepare_call_kind(call, block, matching, constants, device)
    speeds = _SpeedLog(device)
    for group in _groups_that_fit([k for k in kinds.values() if not k.reason]):
        progress(f"time {', '.join(k.path for k in group)}")
        other_ranks = ranks - 1 if device.type == "cpu" else 0
        with background_load(partial(_run_round, group, 0, _SpeedLog(device)), other_ranks):
            _time_kinds(group, repeat, speeds)
    reports = {name: k.make_report() for name, k in kinds.items()}
    entries = {
        name: r.measured.scale_times(speeds.mean_over_median)
        for name, r in reports.items()
        if r.measured is not None
    }
    return MeasuredCosts(local_hardware(device), entries, gauge_ns=speeds.mean_gauge_ns), list(
        reports.values()
    )


def _matches_case(module: ModuleOp, case: CaseOp, batch: SizedBatch) -> bool:
    return set(strings_of(graph_of(module).optional)) & batch.batch.keys() == set(strings_of(case.when))


@dataclass
class _CallKind:
    """One kind of call, with a run for each size, or the `reason` why it is not timed. parameter_bytes: of
    its block."""

    path: str
    class_name: str
    parameter_bytes: int
    runs: list[_TimedRun] = field(default_factory=list["_TimedRun"])
    reason: str = ""

    def make_report(self) -> BlockReport:
        if self.reason:
            return BlockReport(self.path, self.class_name, (), None, self.reason)
        timings = [
            TimedCall(run.cost, *run.median_times(), i % HELD_OUT_EVERY == 1)
            for i, run in enumerate(self.runs)
        ]
        if len(timings) < 2 * HELD_OUT_EVERY:
            return BlockReport(
                self.path,
                self.class_name,
                timings,
                None,
                (
                    f"the dataset has samples of only {len(timings)} sizes for it, at least "
                    f"{2 * HELD_OUT_EVERY} are needed"
                ),
            )
        backward = _fit_prices(timings, lambda t: t.backward) if any(t.backward for t in timings) else None
        return BlockReport(
            self.path,
            self.class_name,
            timings,
            MeasuredBlock(self.class_name, _fit_prices(timings, lambda t: t.forward), backward),
        )


def _prepare_call_kind(
    call: CallOp,
    block: nn.Module,
    batches: Sequence[SizedBatch],
    constants: Mapping[str, torch.Tensor],
    device: torch.device,
) -> _CallKind:
    size = sum(p.numel() * p.element_size() for p in block.parameters())
    call_kind = _CallKind(call.target.data, type(block).__name__, size)
    if size > MAX_BUILT_BYTES:
        call_kind.reason = (
            f"its parameters take {size / 2**30:.1f} GiB, more than the "
            f"{MAX_BUILT_BYTES >> 30} GiB that are timed"
        )
    elif not all(isinstance(call.attributes.get(part), StringAttr) for part in PRICED_PARTS[1:]):
        call_kind.reason = "its costs were not counted"
    else:
        materialized = _materialize_block(block, device)
        small_enough = [b for b in batches if _call_bytes(call, b) <= MAX_BUILT_BYTES]
        call_kind.runs = [
            _TimedRun(
                call, materialized, b, compute_operand_values(call, b.batch, b.sizes, constants), device
            )
            for b in small_enough
        ]
    return call_kind


def _groups_that_fit(kinds: Sequence[_CallKind]) -> Iterator[list[_CallKind]]:
    """Split the kinds into groups that fit into memory together; a group is timed in common rounds."""
    group: list[_CallKind] = []
    for kind in kinds:
        if group and sum(k.parameter_bytes for k in (*group, kind)) > MAX_BUILT_BYTES:
            yield group
            group = []
        group.append(kind)
    if group:
        yield group


def _materialize_block(block: nn.Module, device: torch.device) -> nn.Module:
    """Copy a block with small random weights; buffers keep their values if they have any."""
    materialized = copy_module(block)
    for module in materialized.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            tensor = torch.empty(p.shape, dtype=p.dtype, device=device)
            tensor = tensor.normal_(0.0, 0.02) if p.is_floating_point() else tensor.zero_()
            setattr(module, name, nn.Parameter(tensor, requires_grad=p.requires_grad))
        for name, b in list(module.named_buffers(recurse=False)):
            values = torch.zeros(b.shape, dtype=b.dtype, device=device) if b.is_meta else b.to(device)
            setattr(module, name, values)
    return materialized


def _call_bytes(call: CallOp, batch: SizedBatch) -> int:
    return sum(_tensor_bytes(tensor_type(o), batch.sizes) for o in (*call.operands, *call.results))


def _tensor_bytes(type_: TensorType, sizes: Mapping[str, int]) -> int:
    return int(size_expr.evaluate_size(count_entries(type_), sizes)) * type_.itemsize


def _call_parts(call: CallOp, sizes: Mapping[str, int]) -> dict[str, float]:
    costs = {part: call.attributes[part] for part in PRICED_PARTS[1:]}
    return {
        part: evaluate_expr(text.data, sizes) for part, text in costs.items() if isinstance(text, StringAttr)
    }


class _TimedRun:
    """One call at one size, with the nanoseconds of its forwards and backwards."""

    def __init__(
        self, call: CallOp, block: nn.Module, batch: SizedBatch, known_values: Any, device: torch.device
    ) -> None:
        self.sizes, self.block, self.cost = batch.sizes, block, _call_parts(call, batch.sizes)
        self._call, self._known_values, self._device = call, known_values, device
        self._has_backward = call.no_grad is None and any(tensor_type(r).requires_grad for r in call.results)
        self._out: Any = None
        self._times: list[tuple[float, float]] = []
        self._forward = 0.0

    def forward(self) -> None:
        """Run the forward on new arguments."""
        args, kwargs = random_arguments(self._call, self.sizes, self._known_values, self._device)
        with torch.set_grad_enabled(self._has_backward):
            self._forward, self._out = _time_call(lambda: self.block(*args, **kwargs), self._device)

    def backward(self) -> None:
        """Run the backward of the last forward. Gradients accumulate."""
        outputs = [
            t for t in tree_leaves(_as_pytree(self._out)) if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        self._out, backward_ns = None, 0.0
        if outputs:
            grads = [torch.ones_like(t) for t in outputs]
            backward_ns, _ = _time_call(lambda: torch.autograd.backward(outputs, grads), self._device)
        self._times.append((self._forward, backward_ns))

    def discard_times(self) -> None:
        """Forget all times so far, those of warm-up."""
        self._times = []

    def median_times(self) -> tuple[float, float]:
        """(forward, backward) medians in nanoseconds."""
        forward, backward = zip(*self._times, strict=True)
        return statistics.median(forward), statistics.median(backward)


def _as_pytree(out: Any) -> Any:
    """A block's result as a structure that torch's pytree functions can traverse."""
    return dict(out) if isinstance(out, Mapping) else out


def _time_call(run: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    if device.type != "cuda":
        start = time.process_time_ns()
        out = run()
        return float(time.process_time_ns() - start), out
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    out = run()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) * 1e6, out


class _SpeedLog:
    """Times of the speed gauge over the measurement; empty on GPUs."""

    def __init__(self, device: torch.device) -> None:
        self._gauge, self._gauge_times = SpeedGauge() if device.type == "cpu" else None, list[int]()

    def record_speed(self) -> None:
        """Run the gauge once."""
        if self._gauge is not None:
            self._gauge_times.append(self._gauge.measure_ns())

    @property
    def mean_gauge_ns(self) -> int:
        """Time of the gauge at its mean speed."""
        return round(time_at_mean_speed(self._gauge_times)) if self._gauge_times else 0

    @property
    def mean_over_median(self) -> float:
        """Time of the gauge at its mean speed over its median time."""
        if not self._gauge_times:
            return 1.0
        return time_at_mean_speed(self._gauge_times) / statistics.median(self._gauge_times)


def _time_kinds(kinds: Sequence[_CallKind], repeat: int, speeds: _SpeedLog) -> None:
    """Run at least `repeat` rounds after a warm-up, and more if rounds are short.

    Kinds that fail on random values get that as their reason and are left out.
    """
    for kind in kinds:
        try:
            for run in kind.runs:
                run.forward()
                run.backward()
                run.discard_times()
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            kind.reason = f"it does not run on random values: {type(error).__name__}: {str(error)[:120]}"
    running = [kind for kind in kinds if not kind.reason]
    start, round_ = time.process_time(), 0
    while round_ < repeat or (
        round_ < MAX_ROUNDS and time.process_time() - start < MIN_TIMING_S * len(running)
    ):
        _run_round(running, round_, speeds)
        round_ += 1


def _run_round(kinds: Sequence[_CallKind], round_: int, speeds: _SpeedLog) -> None:
    """Run each size once, as a micro-batch that passes through all blocks and back."""
    for i in range(max((len(kind.runs) for kind in kinds), default=0)):
        runs = [kind.runs[i] for kind in kinds if i < len(kind.runs)]
        if (i + round_) % MICRO_BATCHES_PER_STEP == 0:
            for p in (p for run in runs for p in run.block.parameters()):
                p.grad = None
        speeds.record_speed()
        for run in runs:
            run.forward()
        for run in reversed(runs):
            run.backward()


def _fit_prices(timings: Sequence[TimedCall], time_of: Callable[[TimedCall], float]) -> CallPrices:
    fitted = [t for t in timings if not t.held_out]
    solution = nonnegative_least_squares(
        [[1.0, *(t.cost[part] for part in PRICED_PARTS[1:])] for t in fitted], [time_of(t) for t in fitted]
    )
    prices = CallPrices(tuple(float(x) for x in solution), 0.0)
    errors = [abs(prices.predict_ns(t.cost) / time_of(t) - 1) for t in timings if t.held_out and time_of(t)]
    return CallPrices(prices.values, statistics.median(errors) if errors else 0.0)
