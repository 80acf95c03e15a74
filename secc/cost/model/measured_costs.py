"""Measured costs: the file that `secc profile` writes and `secc compile --costs` reads.

The forward and backward time of a block is `base + work + attention + moved`, each with a measured price:
nanoseconds per call, per FLOP of products, per FLOP of attention, and per byte that other operations move.
FLOPs and bytes at any size are counted (`secc.cost.counting.annotate_calls`), so the prices also hold for
sizes that were not profiled. Prices belong to the hardware they were measured on.

The file may also hold the overheads of a step on a rank (`Overheads`). They travel to the `allocate` pass as
an attribute of the graph, and there replace what presets assume for clusters of the same backend.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from xdsl.dialects.builtin import ModuleOp, StringAttr

from secc.cluster import Cluster, Overheads
from secc.cost.model.step_overheads import annotate_overheads
from secc.errors import UserError
from secc.ir.dialect.ops import CallOp, graph_of
from secc.runtime.plan import json_shapes as shapes

COSTS_VERSION = 2
_MAX_BYTES, _MAX_PRICE = 1 << 26, 1e18
PRICED_PARTS = ("base", "work", "attention_work", "moved")
_PRICE_UNITS_PER_NS = 10**6  # expressions are integral, so prices are in millionths of a nanosecond


@dataclass(frozen=True)
class Hardware:
    """Hardware of a measurement: torch device type, name of the processor or GPU, number of threads (0 on
    GPUs)."""

    backend: str
    name: str
    threads: int

    @property
    def description(self) -> str:
        """The hardware as text for messages."""
        return f"{self.name} ({self.backend}{f', {self.threads} threads' if self.threads > 1 else ''})"


def local_hardware(device: torch.device) -> Hardware:
    """The hardware of this machine."""
    if device.type == "cuda":
        return Hardware("cuda", torch.cuda.get_device_name(device), 0)
    return Hardware("cpu", _processor_name(), torch.get_num_threads())


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()


@dataclass(frozen=True)
class CallPrices:
    """Nanoseconds per call, FLOP and byte, in the order of PRICED_PARTS. error: median relative error on
    sizes held out of the fit."""

    values: tuple[float, ...]
    error: float

    def scale_times(self, factor: float) -> CallPrices:
        """The prices of a machine on which everything takes `factor` times as long."""
        return CallPrices(tuple(factor * v for v in self.values), self.error)

    def predict_ns(self, cost: Mapping[str, float]) -> float:
        """Predict the nanoseconds of a call from its FLOPs and bytes by part."""
        return self.values[0] + sum(
            v * cost[part] for v, part in zip(self.values[1:], PRICED_PARTS[1:], strict=True)
        )

    def time_expression(self, call: CallOp) -> str:
        """The nanoseconds of a call as an expression over its micro-batch's symbols."""
        terms = [
            f"{round(v * _PRICE_UNITS_PER_NS)}*({count.data})"
            for v, part in zip(self.values[1:], PRICED_PARTS[1:], strict=True)
            if isinstance(count := call.attributes.get(part), StringAttr)
            and count.data != "0"
            and round(v * _PRICE_UNITS_PER_NS)
        ]
        return f"{round(self.values[0])}" + (
            f" + ({' + '.join(terms)})//{_PRICE_UNITS_PER_NS}" if terms else ""
        )


@dataclass(frozen=True)
class MeasuredBlock:
    """Prices of one kind of call. block: class of the block. backward: None if the call has none."""

    block: str
    forward: CallPrices
    backward: CallPrices | None

    def scale_times(self, factor: float) -> MeasuredBlock:
        """The prices of a machine on which everything takes `factor` times as long."""
        return MeasuredBlock(
            self.block, self.forward.scale_times(factor), self.backward and self.backward.scale_times(factor)
        )


@dataclass(frozen=True)
class MeasuredCosts:
    """Prices of calls by digest (`call_digest`), the hardware, and the overheads of steps if they were
    measured.

    gauge_ns: time of the speed gauge (`secc.profile.speed_gauge`) at the processor speed that all times refer
    to; 0 if it was not measured.
    """

    hardware: Hardware
    entries: Mapping[str, MeasuredBlock]
    overheads: Overheads | None = None
    gauge_ns: int = 0

    def to_json(self) -> str:
        """The file as text."""
        blocks = {k: asdict(e) for k, e in self.entries.items()}
        data = {
            "version": COSTS_VERSION,
            "hardware": asdict(self.hardware),
            "gauge_ns": self.gauge_ns,
            "blocks": blocks,
        }
        return json.dumps(data | ({"overheads": asdict(self.overheads)} if self.overheads else {}), indent=1)

    def check_hardware(self, cluster: Cluster) -> None:
        """Raise UserError unless the costs were measured on the cluster's hardware."""
        measured, device = self.hardware, cluster.device
        here = local_hardware(torch.device("cpu"))
        words = measured.name.lower().replace("-", " ").split()
        fits = (
            device.kind.lower() in words
            if measured.backend == "cuda"
            else (measured.backend, measured.name) == (here.backend, here.name)
        )
        if measured.backend != device.backend or not fits:
            required = device.kind if device.backend == "cuda" else here.description
            raise UserError(
                f"{cluster.name} has {required}, but the costs were measured on {measured.description}",
                remedy="profile the model there (secc profile MODEL.py -o FILE), or leave --costs out",
            )

    def annotate_module(self, module: ModuleOp, model: nn.Module) -> None:
        """Write measured times on calls with prices, and measured overheads on the graph."""
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
    """A digest of what determines the time of a call: the block's structure and parameters, and the
    arguments' types."""
    parameters = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in block.named_parameters()]
    types = [str(o.type) for o in call.operands]
    text = repr(
        (type(block).__qualname__, repr(block), parameters, call.args.data, types, call.no_grad is None)
    )
    return hashlib.sha256(text.encode()).hexdigest()[:24]


_PRICES = shapes.dataclass_of(
    CallPrices,
    {
        "values": shapes.row_of(*[shapes.number(0, _MAX_PRICE)] * len(PRICED_PARTS)),
        "error": shapes.number(0, _MAX_PRICE),
    },
)
_COSTS = shapes.record(
    {
        "version": shapes.integer(),
        "hardware": shapes.dataclass_of(
            Hardware, {"backend": shapes.text, "name": shapes.text, "threads": shapes.integer(0, 1 << 20)}
        ),
        "blocks": shapes.mapping_of(
            shapes.dataclass_of(
                MeasuredBlock,
                {"block": shapes.text, "forward": _PRICES, "backward": shapes.nullable(_PRICES)},
            )
        ),
    },
    {
        "gauge_ns": shapes.integer(0),
        "overheads": shapes.dataclass_of(
            Overheads,
            {"label": shapes.text}
            | {name: shapes.integer(0, 10**15) for name in ("job", "message", "tensor", "sample", "step")},
        ),
    },
)


def read_measured_costs(path: Path) -> MeasuredCosts:
    """Read measured costs from their file. Raises UserError if it cannot be read or is not such a file."""
    try:
        data = shapes.read_json(path, _MAX_BYTES)
        version = data.get("version") if isinstance(data, dict) else None
        if version is not None and version != COSTS_VERSION:
            got = shapes.show_value(version)
            message = f"expected measured costs of version {COSTS_VERSION}, got version {got}"
            raise UserError(message, str(path), "profile the model again")
        values = _COSTS(data)
        return MeasuredCosts(
            values["hardware"], values["blocks"], values.get("overheads"), values.get("gauge_ns", 0)
        )
    except OSError as error:
        raise UserError(
            f"cannot read the costs: {error.strerror}",
            str(path),
            "make them with secc profile MODEL.py -o FILE",
        ) from None
    except shapes.MalformedValue as error:
        remedy = "make one with secc profile MODEL.py -o FILE"
        raise UserError(f"expected a file of measured costs ({error})", str(path), remedy) from None
