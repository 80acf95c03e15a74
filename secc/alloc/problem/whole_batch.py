"""Sections that take all samples of a step at once (`--whole-batch`): what may be chosen for them.

A replica is one rank with one micro-batch, so there is nothing to cut; only where batch norms alone couple
samples may there be several replicas, and layers that run again in the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from secc.alloc.problem.pins import Pins
from secc.errors import UserError
from secc.ir.analysis.whole_batch import ALONE, whole_batch_of_section
from secc.ir.dialect.ops import GraphOp


def pin_whole_batches(graph: GraphOp, pins: Pins) -> Pins:
    """Returns the pins with what is fixed for sections that take all samples at once. Raises UserError for
    pins that they cannot have."""
    numbers = dict(pins.numbers)
    for section in graph.sections:
        kind, name = whole_batch_of_section(graph, section), section.sym.data
        if not kind:
            continue
        fixed = dict.fromkeys(("tp", "pp", "cp", "ep"), 1) | ({"dp": 1} if kind == ALONE else {})
        _require(name, numbers.get(name, {}), fixed)
        words = pins.words.get(name, {})
        _require(name, words, {"recompute": "none"} if kind == ALONE else {})
        if words.get("sharding") == "zero3":
            raise _refusal(name, "sharding=zero3", "leave it out, or set another sharding")
        numbers[name] = {k: n for k, n in numbers.get(name, {}).items() if k != "micro_batch"} | fixed
    return replace(pins, numbers=numbers)


def refuse_micro_batches(graph: GraphOp, pins: Pins) -> None:
    """Raises UserError for pinned sizes of micro-batches of a section that takes all samples at once."""
    for section in graph.sections:
        name = section.sym.data
        chosen = pins.numbers.get(name, {}) if whole_batch_of_section(graph, section) else {}
        for key in ("micro_batch", "micro_batch_tokens", "most_samples"):
            if key in chosen:
                raise _refusal(name, f"{key}={chosen[key]}", "leave it out")


def _require(name: str, chosen: Mapping[str, object], fixed: Mapping[str, object]) -> None:
    wrong: Iterable[str] = (k for k, value in fixed.items() if chosen.get(k, value) != value)
    for key in wrong:
        raise _refusal(name, f"{key}={chosen[key]}", f"leave it out, or set {name}.{key}={fixed[key]}")


def _refusal(name: str, choice: str, remedy: str) -> UserError:
    reason = "the section takes all samples of a step at once (--whole-batch, or as a note of the plan says)"
    message = f"{name}.{choice} is impossible: {reason}"
    return UserError(message, remedy=remedy)
