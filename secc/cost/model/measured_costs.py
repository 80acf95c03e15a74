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
from secc.cost.model.step_overheads import note_overheads
from secc.errors import UserError
from secc.ir.dialect.ops import CallOp, graph_of

VERSION = 2
PARTS = ("base", "work", "attention_work", "moved")  # what prices are of
_UNIT = 10**6  # prices are texts of whole numbers: millionths of a nanosecond


@dataclass(frozen=True)
class Hardware:
    """What was measured on: torch's device type, the name of the processor or GPU, threads (0 on GPUs)."""

    backend: str
    name: str
    threads: int

    @property
    def text(self) -> str:
        return f"{self.name} ({self.backend}{f', {self.threads} threads' if self.threads > 1 else ''})"


def here(device: torch.device) -> Hardware:
    """The hardware of this machine."""
    if device.type == "cuda":
        return Hardware("cuda", torch.cuda.get_device_name(device), 0)
    return Hardware("cpu", _processor(), torch.get_num_threads())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return found or platform.processor() or platform.machine()


@dataclass(frozen=True)
class Prices:
    """Nanoseconds for a call (`base`), and for each FLOP and byte, in the order of PARTS; the median relative
    error on held-out sizes."""

    values: tuple[float, ...]
    error: float

    def stretched(self, factor: float) -> Prices:
        """The same where everything takes so many times as long."""
        return Prices(tuple(factor * v for v in self.values), self.error)

    def ns(self, cost: Mapping[str, float]) -> float:
        """The time of a call that works and moves this much."""
        return self.values[0] + sum(
            v * cost[part] for v, part in zip(self.values[1:], PARTS[1:], strict=True)
        )

    def text(self, call: CallOp) -> str:
        """The time as an expression over the micro-batch's symbols."""
        terms = [
            f"{round(v * _UNIT)}*({found.data})"
            for v, part in zip(self.values[1:], PARTS[1:], strict=True)
            if isinstance(found := call.attributes.get(part), StringAttr)
            and found.data != "0"
            and round(v * _UNIT)
        ]
        return f"{round(self.values[0])}" + (f" + ({' + '.join(terms)})//{_UNIT}" if terms else "")


@dataclass(frozen=True)
class Entry:
    """One kind of call: the block's class, prices of its forward, and of its backward where it owes one."""

    block: str
    forward: Prices
    backward: Prices | None

    def stretched(self, factor: float) -> Entry:
        """The same where everything takes so many times as long."""
        return Entry(
            self.block, self.forward.stretched(factor), self.backward and self.backward.stretched(factor)
        )


@dataclass(frozen=True)
class Table:
    """Entries by `key`, the hardware, and what a step took beside its blocks, where that was measured.

    All times are of a processor on which the gauge (`secc.profile.speed_gauge`) takes `gauge_ns`; 0 where it was
    not taken.
    """

    hardware: Hardware
    entries: Mapping[str, Entry]
    overheads: Overheads | None = None
    gauge_ns: int = 0

    def to_json(self) -> str:
        blocks = {k: asdict(e) for k, e in self.entries.items()}
        found = {
            "version": VERSION,
            "hardware": asdict(self.hardware),
            "gauge_ns": self.gauge_ns,
            "blocks": blocks,
        }
        return json.dumps(found | ({"overheads": asdict(self.overheads)} if self.overheads else {}), indent=1)

    def check(self, cluster: Cluster) -> None:
        """Raise UserError where the table is not of the cluster's hardware."""
        mine, device = self.hardware, cluster.device
        local = here(torch.device("cpu"))
        words = mine.name.lower().replace("-", " ").split()
        fits = (
            device.kind.lower() in words
            if mine.backend == "cuda"
            else (mine.backend, mine.name) == (local.backend, local.name)
        )
        if mine.backend != device.backend or not fits:
            wanted = device.kind if device.backend == "cuda" else local.text
            raise UserError(
                f"the costs were measured on {mine.text}, and the cluster {cluster.name} has {wanted}",
                remedy="profile the model there (secc profile MODEL.py -o FILE), or leave --costs out",
            )

    def write(self, module: ModuleOp, model: nn.Module) -> None:
        """Note measured times on the calls that the table knows, and measured overheads on the graph."""
        if self.overheads is not None:
            note_overheads(graph_of(module), self.overheads, self.hardware.backend)
        for case in graph_of(module).cases:
            for call in (op for op in case.ops if isinstance(op, CallOp)):
                entry = self.entries.get(key(call, model.get_submodule(call.target.data)))
                if entry is not None:
                    call.attributes["forward_ns"] = StringAttr(entry.forward.text(call))
                    if entry.backward is not None:
                        call.attributes["backward_ns"] = StringAttr(entry.backward.text(call))


def key(call: CallOp, block: nn.Module) -> str:
    """What calls with equal costs have in common: the block's structure, its parameters, what the call
    passes."""
    parameters = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in block.named_parameters()]
    types = [str(o.type) for o in call.operands]
    text = repr(
        (type(block).__qualname__, repr(block), parameters, call.args.data, types, call.no_grad is None)
    )
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def read(path: Path) -> Table:
    """A table from its file. Raises UserError for what is none."""
    try:
        data = json.loads(path.read_text())
        if data["version"] != VERSION:
            raise UserError(
                f"the costs are of version {data['version']}, not {VERSION}",
                str(path),
                "profile the model again",
            )
        overheads = Overheads(**data["overheads"]) if "overheads" in data else None
        entries = {k: _entry(e) for k, e in data["blocks"].items()}
        return Table(Hardware(**data["hardware"]), entries, overheads, int(data.get("gauge_ns", 0)))
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


def _entry(data: Mapping[str, Any]) -> Entry:
    backward = data["backward"]
    return Entry(
        str(data["block"]), _prices(data["forward"]), None if backward is None else _prices(backward)
    )


def _prices(data: Mapping[str, Any]) -> Prices:
    values = tuple(float(v) for v in data["values"])
    if len(values) != len(PARTS) or not all(0 <= v < float("inf") for v in values):
        raise ValueError("prices")
    return Prices(values, float(data["error"]))
