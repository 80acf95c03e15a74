"""Recorded glue as data: a list of ops that a rank runs to make one tensor for a block, cut out of a
recording.

Values that depend on inputs alone need not be computed again if they are small: integers and booleans
(positions, indices, masks) were computed while the glue was recorded, and are stored in the program.
Everything else, and all that gradients flow through, is computed again on the rank's device.
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

from secc.runtime.recorder.nested_values import take_at_path
from secc.runtime.recorder.outline import Outline
from secc.runtime.recorder.recording import iter_nodes_behind
from secc.runtime.sections.autograd_functions import FUNCTION_PREFIX, UserFunctionCall

_MAX_FOLDED_ENTRIES = 1 << 20  # larger values are computed again instead of stored


class ValueSlot(NamedTuple):
    """The number of a value in a program: first sources, then stored values, then results of steps."""

    number: int


class ProgramStep(NamedTuple):
    """One op. `draw` names its random numbers, `autocast` the state that a user's own function runs in; ""
    for none."""

    target: str
    args: Any
    kwargs: Any
    grad: bool
    draw: str
    autocast: str


class ProgramHost(Protocol):
    """What a program needs from the section that runs it."""

    @property
    def device(self) -> torch.device:
        """The device on which the program computes."""
        ...

    def draw(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a random op under its name."""
        ...

    def function(self, name: str) -> Callable[..., Any]:
        """Return the user's own autograd function of a name."""
        ...


@dataclass
class GlueProgram:
    """Computes one tensor. `sources` are names as in `secc.runtime.recorder.outline`; `shapes` are those
    of blocks' results among them."""

    sources: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    values: list[torch.Tensor] = field(default_factory=list)
    steps: list[ProgramStep] = field(default_factory=list)
    result: int = 0

    def run(self, source: Callable[[str], torch.Tensor], host: ProgramHost) -> torch.Tensor:
        """Compute the tensor, in the shape that the recorded micro-batch gives it. `source` returns the
        tensor of a source."""
        device = host.device
        slots: list[Any] = [*map(source, self.sources), *(_expand_value(v, device) for v in self.values)]
        last = self._last_uses()
        for number, step in enumerate(self.steps, len(slots)):
            args, kwargs = (_fill_slots(value, slots, device) for value in (step.args, step.kwargs))
            function = (
                host.function(step.target)
                if step.target.startswith(FUNCTION_PREFIX)
                else _resolve_op(step.target)
            )
            with (
                torch.set_grad_enabled(step.grad and torch.is_grad_enabled()),
                _autocast_context(step.autocast),
            ):
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
        """Bytes of the stored values."""
        return sum(_stored_values(v).nbytes for v in self.values)

    def _last_uses(self) -> dict[int, list[int]]:
        """Slots that are not needed after a step, by the step's slot."""
        first = len(self.sources) + len(self.values)
        last = {
            used: number
            for number, step in enumerate(self.steps, first)
            for used in _slots_used((step.args, step.kwargs))
        }
        last.pop(self.result, None)
        freed_after: dict[int, list[int]] = {}
        for used, number in last.items():
            freed_after.setdefault(number, []).append(used)
        return freed_after


def write_programs(
    outline: Outline, batch: Mapping[str, Any], labels: Collection[str] | None = None
) -> tuple[dict[str, GlueProgram], frozenset[str]]:
    """Write a program for each tensor that glue makes (with `labels`, for these only), and return them with
    the inputs from which values were stored.

    `batch` is the recorded batch; it supplies values that depend on inputs alone.
    """
    values = _InputValues(outline, batch)
    wanted = {
        label: node for label, node in outline.labelled_tensors.items() if labels is None or label in labels
    }
    programs = {label: _ProgramWriter(outline, values).write(node) for label, node in wanted.items()}
    return programs, frozenset(values.read_inputs)


class _ProgramWriter:
    """Writes one program."""

    def __init__(self, outline: Outline, values: _InputValues) -> None:
        self._outline, self._values = outline, values
        self._program, self._slots = GlueProgram(), dict[fx.Node, ValueSlot]()

    def write(self, node: fx.Node) -> GlueProgram:
        needed = self._needed_nodes(node)
        sources = [n for n in needed if self._outline.is_source(n)]
        values = [n for n in needed if n not in sources and self._is_value(n)]
        for n in (*sources, *values, *(n for n in needed if n not in {*sources, *values})):
            self._slots[n] = ValueSlot(len(self._slots))
        program = self._program
        program.sources = [self._outline.source_name(n) for n in sources]
        program.shapes = {
            self._outline.source_name(n): n.meta["shape"] for n in sources if n.target is take_at_path
        }
        program.values = [_compact_tensor(self._values.value_of(n)) for n in values]
        program.steps = [self._make_step(n) for n in needed if n not in {*sources, *values}]
        program.result = self._slots[node].number
        return program

    def _needed_nodes(self, root: fx.Node) -> list[fx.Node]:
        """What the program has to hold or to compute, in order."""
        needed = set(iter_nodes_behind([root], lambda n: self._outline.is_source(n) or self._is_value(n)))
        return [n for n in self._outline.recording.graph.nodes if n in needed]

    def _is_value(self, node: fx.Node) -> bool:
        return node.op == "get_attr" or self._values.is_folded(node)

    def _make_step(self, node: fx.Node) -> ProgramStep:
        args, kwargs = (_encode_argument(value, self._slots) for value in (node.args, node.kwargs))
        target = "getitem" if node.target is operator.getitem else str(node.target)
        autocast = node.meta["autocast"] if isinstance(node.target, UserFunctionCall) else ""
        return ProgramStep(
            target, args, kwargs, bool(node.meta.get("grad", True)), node.meta.get("draw") or "", autocast
        )


class _InputValues:
    """Values that depend on inputs alone, computed on demand."""

    def __init__(self, outline: Outline, batch: Mapping[str, Any]) -> None:
        self._outline, self._batch = outline, batch
        self._computed: dict[fx.Node, Any] = {}
        self._input_only: dict[fx.Node, bool] = {}
        self.read_inputs = set[str]()
        for node in outline.recording.graph.nodes:
            self._input_only[node] = self._decides_from_inputs(node)

    def _decides_from_inputs(self, node: fx.Node) -> bool:
        if node.op == "placeholder" or (
            node.op == "get_attr" and node.target in self._outline.recording.constants
        ):
            return True
        if node.op != "call_function" or node.target is take_at_path or node.meta.get("draw"):
            return False
        return all(self._input_only[n] for n in node.all_input_nodes)

    def is_folded(self, node: fx.Node) -> bool:
        """Whether a node's value is stored in place of the ops that compute it."""
        if node.op != "call_function" or not self._input_only[node] or "shape" not in node.meta:
            return False
        kind: torch.dtype = node.meta["dtype"]
        if kind.is_floating_point or kind.is_complex:
            return False
        return self.value_of(node).untyped_storage().nbytes() <= _MAX_FOLDED_ENTRIES * kind.itemsize

    def value_of(self, node: fx.Node) -> torch.Tensor:
        """Return the value of a node."""
        for n in self._outline.nodes_behind(node):
            if n not in self._computed:
                self._computed[n] = self._compute_node(n)
        return self._computed[node]

    def _compute_node(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            self.read_inputs.add(str(node.target))
            return batch_tensor(self._batch, str(node.target))
        if node.op == "get_attr":
            return self._outline.recording.constants[str(node.target)]
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self._computed[n])  # type: ignore[misc]
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]


def batch_tensor(batch: Mapping[str, Any], name: str) -> torch.Tensor:
    """Return a tensor of a batch by the name of its placeholder: `input_ids`, or `images[0]` in a nested
    value."""
    key, bracket, rest = name.partition("[")
    return take_at_path(batch[key], bracket + rest)


def _compact_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with memory for its own entries only; dims that repeat are stored once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            return _RepeatedTensor(_compact_tensor(tensor.narrow(dim, 0, 1)), tuple(tensor.shape))  # type: ignore[return-value]
    return tensor.detach().clone(memory_format=torch.contiguous_format)


class _RepeatedTensor(NamedTuple):
    """A tensor that repeats along some dims."""

    tensor: Any
    shape: tuple[int, ...]


def _stored_values(value: Any) -> torch.Tensor:
    return _stored_values(value.tensor) if isinstance(value, _RepeatedTensor) else value


def _expand_value(value: Any, device: torch.device) -> torch.Tensor:
    if isinstance(value, _RepeatedTensor):
        return _expand_value(value.tensor, device).expand(value.shape)
    return value.to(device, non_blocking=True)


def _encode_argument(value: Any, slots: Mapping[fx.Node, ValueSlot]) -> Any:
    """Encode arguments as plain Python data."""
    match value:
        case fx.Node():
            return slots[value]
        case list() | tuple():
            return [_encode_argument(v, slots) for v in value]
        case dict():
            return {k: _encode_argument(v, slots) for k, v in value.items()}
        case slice():
            return slice(*(_encode_argument(v, slots) for v in (value.start, value.stop, value.step)))
        case _:
            return value


def _fill_slots(value: Any, slots: Sequence[Any], device: torch.device) -> Any:
    """Replace slots by their values, and the device of the recording by the rank's."""
    match value:
        case ValueSlot():
            return slots[value.number]
        case list():
            return [_fill_slots(v, slots, device) for v in value]
        case dict():
            return {k: _fill_slots(v, slots, device) for k, v in value.items()}
        case torch.device():
            return device
        case _:
            return value


def _slots_used(value: Any) -> list[int]:
    if isinstance(value, ValueSlot):
        return [value.number]
    if isinstance(value, (list, tuple, dict)):
        return [n for v in (value.values() if isinstance(value, dict) else value) for n in _slots_used(v)]
    return []


def _autocast_context(state: str) -> AbstractContextManager[Any]:
    """Return the autocast context of a state such as "cpu bfloat16"; "" changes nothing."""
    if not state:
        return nullcontext()
    device, dtype = state.split()
    return torch.autocast(device, dtype=getattr(torch, dtype))


@cache
def _resolve_op(target: str) -> Callable[..., Any]:
    """Return the op with a name such as `aten.add.Tensor`."""
    return operator.getitem if target == "getitem" else operator.attrgetter(target)(torch.ops)
