"""Times a model's blocks for real, under the conditions of a step: forward and backward, over the sizes of
the dataset's samples and micro-batches of them.

Blocks take turns as in a step: all forwards of a micro-batch, then all backwards, gradients adding up over
some micro-batches, so that a block finds the caches as other blocks left them. On a CPU other processes
meanwhile do the same, as many as a node has other ranks, and a call counts the processor time of its thread,
which waiting for a core does not add to; on a GPU events count. The median of the turns is taken: a step has
many calls, and takes what they take in the mean. On CPUs the gauge comes before each micro-batch; its median
says at what speed of the processor these times were taken, and prices are given for its mean speed, which a
run of many steps has. Prices (`secc.cost.model.measured_costs`) are fitted to two thirds of the sizes, none
negative, with relative errors weighing alike; the others tell the error.
"""

from __future__ import annotations

import copy
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
from secc.runtime.plan.expr_eval import evaluate_expr

MAX_BUILT_BYTES = 4 << 30  # of a block's parameters, and of a call's operands, that are built here
HELD_OUT_EVERY = 3  # every third size
MAX_ROUNDS, MIN_TIMING_S = 40, 4.0  # for each block, where its runs are short
MICRO_BATCHES_PER_STEP = 4  # micro-batches whose gradients add up


@dataclass(frozen=True)
class SizedBatch:
    """A collated micro-batch and its sizes."""

    batch: Mapping[str, Any]
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class TimedCall:
    """One call at one size: what it works and moves, the nanoseconds of forward and backward, and whether it
    was held out."""

    cost: Mapping[str, float]
    forward: float
    backward: float
    held_out: bool


@dataclass(frozen=True)
class BlockReport:
    """A block that was timed, with its points; or one that was not, and why."""

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
    """Time every kind of call once, as on one of `ranks` ranks of a node. `module` has counted costs; `model`
    may be on the meta device."""
    kinds: dict[str, _CallKind] = {}
    for case in graph_of(module).cases:
        for call in (op for op in case.ops if isinstance(op, CallOp)):
            block = model.get_submodule(call.target.data)
            name = call_digest(call, block)
            fitting = [b for b in batches if _matches_case(module, case, b)]
            if name not in kinds and fitting:
                kinds[name] = _prepare_call_kind(call, block, fitting, constants, device)
    speeds = _SpeedLog(device)
    for group in _groups_that_fit([k for k in kinds.values() if not k.reason]):
        progress(f"time {', '.join(k.path for k in group)}")
        with background_load(
            partial(_run_round, group, 0, _SpeedLog(device)), ranks - 1 if device.type == "cpu" else 0
        ):
            _time_kinds(group, repeat, speeds)
    reports = {name: k.make_report() for name, k in kinds.items()}
    found = {
        name: r.measured.scale_times(speeds.mean_over_median)
        for name, r in reports.items()
        if r.measured is not None
    }
    return MeasuredCosts(local_hardware(device), found, gauge_ns=speeds.mean_gauge_ns), list(reports.values())


def _matches_case(module: ModuleOp, case: CaseOp, batch: SizedBatch) -> bool:
    return set(strings_of(graph_of(module).optional)) & batch.batch.keys() == set(strings_of(case.when))


@dataclass
class _CallKind:
    """One kind of call: a run for each size and the times of its turns; or `reason`, why it is not timed.
    `size`: bytes of parameters."""

    path: str
    class_name: str
    size: int
    runs: list[_TimedRun] = field(default_factory=list["_TimedRun"])
    reason: str = ""

    def make_report(self) -> BlockReport:
        if self.reason:
            return BlockReport(self.path, self.class_name, (), None, self.reason)
        timed = [
            TimedCall(run.cost, *run.median_times(), i % HELD_OUT_EVERY == 1)
            for i, run in enumerate(self.runs)
        ]
        if len(timed) < 2 * HELD_OUT_EVERY:
            return BlockReport(
                self.path, self.class_name, timed, None, f"the dataset gives it only {len(timed)} sizes"
            )
        backward = _fit_prices(timed, lambda t: t.backward) if any(t.backward for t in timed) else None
        return BlockReport(
            self.path,
            self.class_name,
            timed,
            MeasuredBlock(self.class_name, _fit_prices(timed, lambda t: t.forward), backward),
        )


def _prepare_call_kind(
    call: CallOp,
    block: nn.Module,
    batches: Sequence[SizedBatch],
    constants: Mapping[str, torch.Tensor],
    device: torch.device,
) -> _CallKind:
    size = sum(p.numel() * p.element_size() for p in block.parameters())
    found = _CallKind(call.target.data, type(block).__name__, size)
    if size > MAX_BUILT_BYTES:
        found.reason = f"its {size / 2**30:.1f} GiB of parameters are not built here"
    elif not all(isinstance(call.attributes.get(part), StringAttr) for part in PRICED_PARTS[1:]):
        found.reason = "its costs were not counted"
    else:
        real = _materialize_block(block, device)
        fitting = [b for b in batches if _call_bytes(call, b) <= MAX_BUILT_BYTES]
        found.runs = [
            _TimedRun(call, real, b, compute_operand_values(call, b.batch, b.sizes, constants), device)
            for b in fitting
        ]
    return found


def _groups_that_fit(kinds: Sequence[_CallKind]) -> Iterator[list[_CallKind]]:
    """Kinds that take turns: as many in a row as fit together."""
    group: list[_CallKind] = []
    for kind in kinds:
        if group and sum(k.size for k in (*group, kind)) > MAX_BUILT_BYTES:
            yield group
            group = []
        group.append(kind)
    if group:
        yield group


def _materialize_block(block: nn.Module, device: torch.device) -> nn.Module:
    """A copy with small random weights; buffers keep values that they have."""
    real = copy.deepcopy(block)
    for module in real.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            made = torch.empty(p.shape, dtype=p.dtype, device=device)
            made = made.normal_(0.0, 0.02) if p.is_floating_point() else made.zero_()
            setattr(module, name, nn.Parameter(made, requires_grad=p.requires_grad))
        for name, b in list(module.named_buffers(recurse=False)):
            setattr(
                module,
                name,
                torch.zeros(b.shape, dtype=b.dtype, device=device) if b.is_meta else b.to(device),
            )
    return real


def _call_bytes(call: CallOp, batch: SizedBatch) -> int:
    return sum(_tensor_bytes(tensor_type(o), batch.sizes) for o in (*call.operands, *call.results))


def _tensor_bytes(kind: TensorType, sizes: Mapping[str, int]) -> int:
    return int(size_expr.evaluate_expr(count_entries(kind), sizes)) * kind.itemsize


def _call_parts(call: CallOp, sizes: Mapping[str, int]) -> dict[str, float]:
    found = {part: call.attributes[part] for part in PRICED_PARTS[1:]}
    return {
        part: evaluate_expr(text.data, sizes) for part, text in found.items() if isinstance(text, StringAttr)
    }


class _TimedRun:
    """One call at one size: what it works and moves, and the nanoseconds that its forwards and backwards
    took."""

    def __init__(
        self, call: CallOp, block: nn.Module, batch: SizedBatch, known: Any, device: torch.device
    ) -> None:
        self.sizes, self.block, self.cost = batch.sizes, block, _call_parts(call, batch.sizes)
        self._call, self._known_values, self._device = call, known, device
        self._owes = call.no_grad is None and any(tensor_type(r).requires_grad for r in call.results)
        self._out: Any = None
        self._times: list[tuple[float, float]] = []
        self._forward = 0.0

    def forward(self) -> None:
        args, kwargs = random_arguments(self._call, self.sizes, self._known_values, self._device)
        with torch.set_grad_enabled(self._owes):
            self._forward, self._out = _time_call(lambda: self.block(*args, **kwargs), self._device)

    def backward(self) -> None:
        """The backward of the last forward. Gradients stay."""
        outs = [
            t for t in tree_leaves(_as_pytree(self._out)) if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        self._out, spent = None, 0.0
        if outs:
            grads = [torch.ones_like(t) for t in outs]
            spent, _ = _time_call(lambda: torch.autograd.backward(outs, grads), self._device)
        self._times.append((self._forward, spent))

    def discard_times(self) -> None:
        """Whatever came before does not count."""
        self._times = []

    def median_times(self) -> tuple[float, float]:
        forward, backward = zip(*self._times, strict=True)
        return statistics.median(forward), statistics.median(backward)


def _as_pytree(out: Any) -> Any:
    """What a block returns, as a structure that can be walked."""
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
    """What the gauge took from time to time; nothing on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._gauge, self._gauge_times = SpeedGauge() if device.type == "cpu" else None, list[int]()

    def record_speed(self) -> None:
        """Gauge the processor's speed."""
        if self._gauge is not None:
            self._gauge_times.append(self._gauge.measure_ns())

    @property
    def mean_gauge_ns(self) -> int:
        """What the gauge takes at the mean speed."""
        return round(time_at_mean_speed(self._gauge_times)) if self._gauge_times else 0

    @property
    def mean_over_median(self) -> float:
        return (
            time_at_mean_speed(self._gauge_times) / statistics.median(self._gauge_times)
            if self._gauge_times
            else 1.0
        )


def _time_kinds(kinds: Sequence[_CallKind], repeat: int, speeds: _SpeedLog) -> None:
    """`repeat` turns after one to warm up, and more where they are short. What does not run on drawn values
    is left out from then on."""
    for kind in kinds:
        try:
            for run in kind.runs:
                run.forward()
                run.backward()
                run.discard_times()
        except (
            RuntimeError,
            ValueError,
            IndexError,
            TypeError,
        ) as error:  # whatever the user's code does on drawn values
            kind.reason = f"it does not run on drawn values: {type(error).__name__}: {str(error)[:120]}"
    running = [kind for kind in kinds if not kind.reason]
    start, turn = time.process_time(), 0
    while turn < repeat or (turn < MAX_ROUNDS and time.process_time() - start < MIN_TIMING_S * len(running)):
        _run_round(running, turn, speeds)
        turn += 1


def _run_round(kinds: Sequence[_CallKind], turn: int, speeds: _SpeedLog) -> None:
    """Every size once, each as a micro-batch that passes through all blocks and back."""
    for i in range(max((len(kind.runs) for kind in kinds), default=0)):
        runs = [kind.runs[i] for kind in kinds if i < len(kind.runs)]
        if (i + turn) % MICRO_BATCHES_PER_STEP == 0:
            for p in (p for run in runs for p in run.block.parameters()):
                p.grad = None
        speeds.record_speed()
        for run in runs:
            run.forward()
        for run in reversed(runs):
            run.backward()


def _fit_prices(timed: Sequence[TimedCall], of: Callable[[TimedCall], float]) -> CallPrices:
    used = [t for t in timed if not t.held_out]
    solved = nonnegative_least_squares(
        [[1.0, *(t.cost[part] for part in PRICED_PARTS[1:])] for t in used], [of(t) for t in used]
    )
    prices = CallPrices(tuple(float(x) for x in solved), 0.0)
    errors = [abs(prices.predict_ns(t.cost) / of(t) - 1) for t in timed if t.held_out and of(t)]
    return CallPrices(prices.values, statistics.median(errors) if errors else 0.0)
