"""Recorded glue as data: a list of ops that a rank runs to make one tensor for a block, cut out of the
recording of a micro-batch.

What inputs alone decide need not be computed again where it is small: integers and truth values (positions,
indices, masks) were computed while the glue was recorded, and travel as values. All else, and all that
gradients flow through, is run again on the rank's device.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from secc.runtime.recorder.nested_values import take
from secc.runtime.recorder.outline import Outline
from secc.runtime.recorder.recording import behind
from secc.runtime.sections.autograd_functions import PREFIX, Applied

_FOLDED = 1 << 20  # entries of a value that travels; what is larger is computed again


class Slot(NamedTuple):
    """The value at a place of a program: first the sources, then the constants, then the results of the
    steps."""

    number: int


class Step(NamedTuple):
    """One op. `draw` is the name of its random numbers, `autocast` the state that a user's own function runs
    in; "" for none."""

    target: str
    args: Any
    kwargs: Any
    grad: bool
    draw: str
    autocast: str


class Host(Protocol):
    """What a program asks of the section that runs it."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def draw(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of a random op under its name."""
        ...

    def function(self, name: str) -> Callable[..., Any]:
        """The user's own autograd function of a name."""
        ...


@dataclass
class Program:
    """Makes one tensor. `sources` are names as in `secc.runtime.recorder.outline`, `shapes` those of blocks'
    results among them."""

    sources: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    values: list[torch.Tensor] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    result: int = 0

    def run(self, source: Callable[[str], torch.Tensor], host: Host) -> torch.Tensor:
        """The tensor. `source` gives a source's tensor."""
        device = host.device
        slots: list[Any] = [*map(source, self.sources), *(_expanded(v, device) for v in self.values)]
        last = self._last_uses()
        for number, step in enumerate(self.steps, len(slots)):
            args, kwargs = (_filled(value, slots, device) for value in (step.args, step.kwargs))
            function = (
                host.function(step.target) if step.target.startswith(PREFIX) else _function(step.target)
            )
            with torch.set_grad_enabled(step.grad and torch.is_grad_enabled()), _autocast(step.autocast):
                slots.append(
                    host.draw(step.draw, function, *args, **kwargs)
                    if step.draw
                    else function(*args, **kwargs)
                )
            for used in last.get(number, ()):
                slots[used] = None
        return slots[self.result]

    @property
    def nbytes(self) -> int:
        """The memory of its values."""
        return sum(_tensor(v).nbytes for v in self.values)

    def _last_uses(self) -> dict[int, list[int]]:
        """The slots that are not needed after each step."""
        first = len(self.sources) + len(self.values)
        last = {
            used: number
            for number, step in enumerate(self.steps, first)
            for used in _used((step.args, step.kwargs))
        }
        last.pop(self.result, None)
        found: dict[int, list[int]] = {}
        for used, number in last.items():
            found.setdefault(number, []).append(used)
        return found


def programs(
    outline: Outline, batch: Mapping[str, Any], labels: Collection[str] | None = None
) -> tuple[dict[str, Program], frozenset[str]]:
    """A program for each tensor that glue makes (with `labels` for these), and the inputs whose values went
    into them.

    `batch` is what was recorded; its values give those that inputs decide.
    """
    values = _Values(outline, batch)
    wanted = {label: node for label, node in outline.made.items() if labels is None or label in labels}
    found = {label: _Writer(outline, values).write(node) for label, node in wanted.items()}
    return found, frozenset(values.read)


class _Writer:
    """Writes one program."""

    def __init__(self, outline: Outline, values: _Values) -> None:
        self._outline, self._values = outline, values
        self._program, self._slots = Program(), dict[fx.Node, Slot]()

    def write(self, node: fx.Node) -> Program:
        needed = self._needed(node)
        sources = [n for n in needed if self._outline.is_source(n)]
        values = [n for n in needed if n not in sources and self._is_value(n)]
        for n in (*sources, *values, *(n for n in needed if n not in {*sources, *values})):
            self._slots[n] = Slot(len(self._slots))
        program = self._program
        program.sources = [self._outline.source(n) for n in sources]
        program.shapes = {self._outline.source(n): n.meta["shape"] for n in sources if n.target is take}
        program.values = [_compact(self._values.of(n)) for n in values]
        program.steps = [self._step(n) for n in needed if n not in {*sources, *values}]
        program.result = self._slots[node].number
        return program

    def _needed(self, root: fx.Node) -> list[fx.Node]:
        """What the program has to hold or to compute, in order."""
        found = set(behind([root], lambda n: self._outline.is_source(n) or self._is_value(n)))
        return [n for n in self._outline.recording.graph.nodes if n in found]

    def _is_value(self, node: fx.Node) -> bool:
        return node.op == "get_attr" or self._values.folds(node)

    def _step(self, node: fx.Node) -> Step:
        args, kwargs = (_data(value, self._slots) for value in (node.args, node.kwargs))
        target = "getitem" if node.target is operator.getitem else str(node.target)
        autocast = node.meta["autocast"] if isinstance(node.target, Applied) else ""
        return Step(
            target, args, kwargs, bool(node.meta.get("grad", True)), node.meta.get("draw") or "", autocast
        )


class _Values:
    """The values of what inputs alone decide, computed when they are wanted."""

    def __init__(self, outline: Outline, batch: Mapping[str, Any]) -> None:
        self._outline, self._batch = outline, batch
        self._known: dict[fx.Node, Any] = {}
        self._alone: dict[fx.Node, bool] = {}
        self.read = set[str]()
        for node in outline.recording.graph.nodes:
            self._alone[node] = self._decide(node)

    def _decide(self, node: fx.Node) -> bool:
        if node.op == "placeholder" or (
            node.op == "get_attr" and node.target in self._outline.recording.constants
        ):
            return True
        if node.op != "call_function" or node.target is take or node.meta.get("draw"):
            return False
        return all(self._alone[n] for n in node.all_input_nodes)

    def folds(self, node: fx.Node) -> bool:
        """Whether a node's value travels in place of the ops that make it."""
        if node.op != "call_function" or not self._alone[node] or "shape" not in node.meta:
            return False
        kind: torch.dtype = node.meta["dtype"]
        if kind.is_floating_point or kind.is_complex:
            return False
        return self.of(node).untyped_storage().nbytes() <= _FOLDED * kind.itemsize

    def of(self, node: fx.Node) -> torch.Tensor:
        """The value of a node."""
        for n in self._outline.behind(node):
            if n not in self._known:
                self._known[n] = self._compute(n)
        return self._known[node]

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            self.read.add(str(node.target))
            return input_of(self._batch, str(node.target))
        if node.op == "get_attr":
            return self._outline.recording.constants[str(node.target)]
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self._known[n])  # type: ignore[misc]
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]


def input_of(batch: Mapping[str, Any], name: str) -> torch.Tensor:
    """A tensor of a batch by the name of its placeholder: `input_ids`, or `images[0]` where the batch
    nests."""
    key, bracket, rest = name.partition("[")
    return take(batch[key], bracket + rest)


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with memory for its own entries only, and one entry along dims that repeat."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            return _Expanded(_compact(tensor.narrow(dim, 0, 1)), tuple(tensor.shape))  # type: ignore[return-value]
    return tensor.detach().clone(memory_format=torch.contiguous_format)


class _Expanded(NamedTuple):
    """A tensor that repeats along some dims."""

    tensor: Any
    shape: tuple[int, ...]


def _tensor(value: Any) -> torch.Tensor:
    return _tensor(value.tensor) if isinstance(value, _Expanded) else value


def _expanded(value: Any, device: torch.device) -> torch.Tensor:
    if isinstance(value, _Expanded):
        return _expanded(value.tensor, device).expand(value.shape)
    return value.to(device, non_blocking=True)


def _data(value: Any, slots: Mapping[fx.Node, Slot]) -> Any:
    """Arguments as plain Python data."""
    match value:
        case fx.Node():
            return slots[value]
        case list() | tuple():
            return [_data(v, slots) for v in value]
        case dict():
            return {k: _data(v, slots) for k, v in value.items()}
        case slice():
            return slice(*(_data(v, slots) for v in (value.start, value.stop, value.step)))
        case _:
            return value


def _filled(value: Any, slots: Sequence[Any], device: torch.device) -> Any:
    """Arguments with the values of slots; the recording's device is exchanged for the rank's."""
    match value:
        case Slot():
            return slots[value.number]
        case list():
            return [_filled(v, slots, device) for v in value]
        case dict():
            return {k: _filled(v, slots, device) for k, v in value.items()}
        case torch.device():
            return device
        case _:
            return value


def _used(value: Any) -> list[int]:
    if isinstance(value, Slot):
        return [value.number]
    if isinstance(value, (list, tuple, dict)):
        return [n for v in (value.values() if isinstance(value, dict) else value) for n in _used(v)]
    return []


def _autocast(state: str) -> AbstractContextManager[Any]:
    """The autocast state of a text such as "cpu bfloat16"; "" leaves it."""
    if not state:
        return nullcontext()
    device, dtype = state.split()
    return torch.autocast(device, dtype=getattr(torch, dtype))


@cache
def _function(target: str) -> Callable[..., Any]:
    """The op of a name such as `aten.add.Tensor`."""
    return operator.getitem if target == "getitem" else operator.attrgetter(target)(torch.ops)
