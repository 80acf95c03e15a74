"""Measured costs: what `secc profile` writes and `secc compile --costs` reads.

The time of a block's forward, and of its backward, is `base + work + moved` with a measured price each:
nanoseconds for the call, for a FLOP of products, of attention, and for a byte that other operations move.
What a block works and moves at any size is counted (`secc.cost.counting.annotate_calls`), so a table holds
for sizes that nobody profiled. A table belongs to the hardware it was measured on.

Beside blocks it may have what a rank's step took beyond computing (`Overheads`): the graph takes it along to
`allocate`, in whose clusters of that backend it replaces what presets assume.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from xdsl.dialects.builtin import ModuleOp, StringAttr

from secc.cluster import Cluster, Overheads
from secc.cost.model.step_overheads import annotate_overheads
from secc.errors import UserError
from secc.ir.dialect.ops import CallOp, graph_of

COSTS_VERSION = 2
PRICED_PARTS = ("base", "work", "attention_work", "moved")  # what prices are of
_PRICE_UNITS_PER_NS = 10**6  # prices are texts of whole numbers: millionths of a nanosecond


@dataclass(frozen=True)
class Hardware:
    """What was measured on: torch's device type, the name of the processor or GPU, threads (0 on GPUs)."""

    backend: str
    name: str
    threads: int

    @property
    def description(self) -> str:
        return f"{self.name} ({self.backend}{f', {self.threads} threads' if self.threads > 1 else ''})"


def local_hardware(device: torch.device) -> Hardware:
    """The hardware of this machine."""
    if device.type == "cuda":
        return Hardware("cuda", torch.cuda.get_device_name(device), 0)
    return Hardware("cpu", _processor_name(), torch.get_num_threads())


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return found or platform.processor() or platform.machine()


@dataclass(frozen=True)
class CallPrices:
    """Nanoseconds for a call (`base`), and for each FLOP and byte, in the order of PARTS; the median relative
    error on held-out sizes."""

    values: tuple[float, ...]
    error: float

    def scale_times(self, factor: float) -> CallPrices:
        """The same where everything takes so many times as long."""
        return CallPrices(tuple(factor * v for v in self.values), self.error)

    def predict_ns(self, cost: Mapping[str, float]) -> float:
        """The time of a call that works and moves this much."""
        return self.values[0] + sum(
            v * cost[part] for v, part in zip(self.values[1:], PRICED_PARTS[1:], strict=True)
        )

    def time_expression(self, call: CallOp) -> str:
        """The time as an expression over the micro-batch's symbols."""
        terms = [
            f"{round(v * _PRICE_UNITS_PER_NS)}*({found.data})"
            for v, part in zip(self.values[1:], PRICED_PARTS[1:], strict=True)
            if isinstance(found := call.attributes.get(part), StringAttr)
            and found.data != "0"
            and round(v * _PRICE_UNITS_PER_NS)
        ]
        return f"{round(self.values[0])}" + (
            f" + ({' + '.join(terms)})//{_PRICE_UNITS_PER_NS}" if terms else ""
        )


@dataclass(frozen=True)
class MeasuredBlock:
    """One kind of call: the block's class, prices of its forward, and of its backward where it owes one."""

    block: str
    forward: CallPrices
    backward: CallPrices | None

    def scale_times(self, factor: float) -> MeasuredBlock:
        """The same where everything takes so many times as long."""
        return MeasuredBlock(
            self.block, self.forward.scale_times(factor), self.backward and self.backward.scale_times(factor)
        )


@dataclass(frozen=True)
class MeasuredCosts:
    """Entries by `key`, the hardware, and what a step took beside its blocks, where that was measured.

    All times are of a processor on which the gauge (`secc.profile.speed_gauge`) takes `gauge_ns`; 0 where it was
    not taken.
    """

    hardware: Hardware
    entries: Mapping[str, MeasuredBlock]
    overheads: Overheads | None = None
    gauge_ns: int = 0

    def to_json(self) -> str:
        blocks = {k: asdict(e) for k, e in self.entries.items()}
        found = {
            "version": COSTS_VERSION,
            "hardware": asdict(self.hardware),
            "gauge_ns": self.gauge_ns,
            "blocks": blocks,
        }
        return json.dumps(found | ({"overheads": asdict(self.overheads)} if self.overheads else {}), indent=1)

    def check_hardware(self, cluster: Cluster) -> None:
        """Raise UserError where the table is not of the cluster's hardware."""
        mine, device = self.hardware, cluster.device
        local = local_hardware(torch.device("cpu"))
        words = mine.name.lower().replace("-", " ").split()
        fits = (
            device.kind.lower() in words
            if mine.backend == "cuda"
            else (mine.backend, mine.name) == (local.backend, local.name)
        )
        if mine.backend != device.backend or not fits:
            wanted = device.kind if device.backend == "cuda" else local.description
            raise UserError(
                f"the costs were measured on {mine.description}, and the cluster {cluster.name} has {wanted}",
                remedy="profile the model there (secc profile MODEL.py -o FILE), or leave --costs out",
            )

    def annotate_module(self, module: ModuleOp, model: nn.Module) -> None:
        """Note measured times on the calls that the table knows, and measured overheads on the graph."""
        if self.overheads is not None:
            annotate_overheads(graph_of(module), self.overheads, self.hardware.backend)
        for case in graph_of(module).cases:
            for call in (op for op in case.ops if isinstance(op, CallOp)):
                entry = self.entries.get(call_digest(call, model.get_submodule(call.target.data)))
                if entry is not None:
                    call.attributes["forward_ns"] = StringAttr(entry.forward.time_expression(call))
                    if entry.backward is not None:
                        call.attributes["backward_ns"] = StringAttr(entry.backward.time_expression(call))


def call_digest(call: CallOp, block: nn.Module) -> str:
    """What calls with equal costs have in common: the block's structure, its parameters, what the call
    passes."""
    parameters = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in block.named_parameters()]
    types = [str(o.type) for o in call.operands]
    text = repr(
        (type(block).__qualname__, repr(block), parameters, call.args.data, types, call.no_grad is None)
    )
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def read_measured_costs(path: Path) -> MeasuredCosts:
    """A table from its file. Raises UserError for what is none."""
    try:
        data = json.loads(path.read_text())
        if data["version"] != COSTS_VERSION:
            raise UserError(
                f"the costs are of version {data['version']}, not {COSTS_VERSION}",
                str(path),
                "profile the model again",
            )
        overheads = Overheads(**data["overheads"]) if "overheads" in data else None
        entries = {k: _block_from_json(e) for k, e in data["blocks"].items()}
        return MeasuredCosts(Hardware(**data["hardware"]), entries, overheads, int(data.get("gauge_ns", 0)))
    except OSError as error:
        raise UserError(
            f"cannot read the costs: {error.strerror}",
            str(path),
            "make them with secc profile MODEL.py -o FILE",
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "make one with secc profile MODEL.py -o FILE"
        raise UserError(
            f"this is no file of measured costs ({type(error).__name__})", str(path), remedy
        ) from None


def _block_from_json(data: Mapping[str, Any]) -> MeasuredBlock:
    backward = data["backward"]
    return MeasuredBlock(
        str(data["block"]),
        _prices_from_json(data["forward"]),
        None if backward is None else _prices_from_json(backward),
    )


def _prices_from_json(data: Mapping[str, Any]) -> CallPrices:
    values = tuple(float(v) for v in data["values"])
    if len(values) != len(PRICED_PARTS) or not all(0 <= v < float("inf") for v in values):
        raise ValueError("prices")
    return CallPrices(values, float(data["error"]))
