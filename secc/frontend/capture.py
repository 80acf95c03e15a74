"""Capture: the user's model as generic graphs, one or more for each activation pattern, and what is known of its blocks and parameters.

The frontier of blocks is chosen first; every pattern is recorded at several sizes, with and without padding; comparison makes the
recordings generic. A block that turns out not to be callable from recorded arguments is exchanged for the module around it, with a note.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from secc.errors import UserError
from secc.frontend.compare import Generic, generalise
from secc.frontend.draws import find
from secc.frontend.fold import fold
from secc.frontend.frontier import Frontier, Note, choose, coarsen, component, layers
from secc.frontend.inputs import Inputs
from secc.frontend.survey import Pattern, Survey
from secc.frontend.ways import Diagnostic, GlueError, Observed, way
from secc.ir.naming import BUFFER
from secc.runtime.plan import Draw
from secc.runtime.recorder import BlockError, Hazard, Recorder
from secc.runtime.recorder.places import class_place
from secc.runtime.sizes import pad_batch, sizes_of
from secc.runtime.user_model import UserModel

_TURNS = 3  # choices of samples that are tried for micro-batches whose sizes move independently


@dataclass(frozen=True)
class Block:
    """One of the user's modules that is called whole. `params` and `trainable` count entries, `layers` those of its component's stack."""

    path: str
    cls: str
    where: str
    parameters: tuple[str, ...]
    params: int
    trainable: int
    component: str
    layers: int


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool


@dataclass(frozen=True)
class Case:
    """A way through forward: the optional keys of the batch, and the generic graph."""

    name: str
    pattern: Pattern
    generic: Generic


@dataclass
class Capture:
    """Everything the compiler knows of the user's forward.

    `hazards` are ops in blocks that couple the samples of a batch, `draws` the random ops, `buffers` those outside of blocks that glue
    reads and whose values are known here.
    """

    inputs: Inputs
    optional: frozenset[str]
    cases: list[Case]
    blocks: dict[str, Block]
    parameters: dict[str, Parameter]
    ties: list[tuple[str, ...]]
    hazards: list[Hazard]
    draws: list[Draw]
    notes: list[Note]
    buffers: dict[str, torch.Tensor]

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """The tensors that forward makes of Python data, of all cases, and what buffers hold that glue reads."""
        made = {name: tensor for case in self.cases for name, tensor in case.generic.constants.items()}
        return made | {BUFFER + name: tensor for name, tensor in self.buffers.items()}


def capture(
    user: UserModel, model: nn.Module, survey: Survey, inputs: Inputs, cut: Collection[str] = (), blocks: Sequence[str] = ()
) -> Capture:
    """Capture `model` (meta or real) for every pattern that the survey's samples can form.

    `cut` names components whose layers are to be blocks, `blocks` modules that the user wants as blocks. Raises UserError, with file:line
    and remedy, for what cannot be captured.
    """
    batches = {p: _Batches(user, survey, inputs, p) for p in survey.unions()}
    recorder = Recorder(model, ())
    frontier = choose(model, [b.ragged[0].batch for b in batches.values()], cut, blocks, recorder)
    cases, observed = _captured(recorder, frontier, batches, frozenset(survey.patterns))
    hazards = list(dict.fromkeys(h for o in observed for h in o.recording.hazards))
    draws = find(observed, inputs)
    called = {str(n.target): n for case in reversed(cases) for n in case.generic.graph.nodes if n.op == "call_module"}
    blocks_called = {path: _block(model, path, call) for path, call in called.items()}
    buffers = _buffers(model, cases, blocks_called)
    return Capture(inputs, survey.optional, cases, blocks_called, _parameters(model), ties(model), hazards, draws, frontier.notes, buffers)


@dataclass(frozen=True)
class _Batch:
    """A collated micro-batch and its sizes."""

    batch: Mapping[str, Any]
    sizes: Mapping[str, int]


class _Batches:
    """The micro-batches of a pattern: ragged ones, which collate pads, and even ones, which need no padding."""

    def __init__(self, user: UserModel, survey: Survey, inputs: Inputs, pattern: Pattern) -> None:
        def collated(samples: list[Any]) -> _Batch:
            batch = user.collate(samples)
            return _Batch(batch, sizes_of(batch, inputs.symbols, len(samples)))

        self._inputs = inputs
        self.free = frozenset(s.name for s in inputs.symbols if s.kind == "width")
        turns = ((turn, [collated(s) for s in survey.batches(pattern, turn=turn)]) for turn in range(_TURNS))
        turn, self.ragged = _most_independent(turns)
        self.even = [collated(s) for s in survey.batches(pattern, even=True, turn=turn)]

    def record(self, recorder: Recorder) -> list[Observed]:
        """Ragged and even micro-batches recorded; of the even ones only the first if forward takes the same way through it."""
        self._recorder = recorder
        found = [self._observe(b) for b in (*self.ragged, self.even[0])]
        if way(found[-1].recording) not in [way(o.recording) for o in found[:-1]]:
            found += [self._observe(b) for b in self.even[1:]]
        return found

    def _observe(self, b: _Batch) -> Observed:
        return Observed(fold(self._recorder.record(b.batch)), b.sizes)

    def __call__(self, name: str, size: int) -> Observed | None:
        """A probe: the ragged micro-batch that is narrowest along the width symbol `name`, padded to `size`."""
        b = min(self.ragged, key=lambda b: b.sizes[name])
        try:
            return self._observe(_Batch(pad_batch(b.batch, self._inputs.inputs, {name: size}), {**b.sizes, name: size}))
        except (UserError, ValueError):
            return None  # the model or collate refuses this width


def _most_independent(turns: Iterable[tuple[int, list[_Batch]]]) -> tuple[int, list[_Batch]]:
    """The micro-batches in which the fewest sizes follow from others by chance (26 tokens less one for each sample)."""
    best, most = (0, list[_Batch]()), 0
    for turn, batches in turns:
        rows = torch.tensor([[1, *b.sizes.values()] for b in batches], dtype=torch.float64)
        moving = 1 + sum(len(set(column)) > 1 for column in rows.T.tolist())
        rank = int(torch.linalg.matrix_rank(rows))
        if rank > most:
            best, most = (turn, batches), rank
        if rank == min(moving, len(batches)):
            break
    return best


def _captured(
    recorder: Recorder, frontier: Frontier, batches: Mapping[Pattern, _Batches], needed: Collection[Pattern]
) -> tuple[list[Case], list[Observed]]:
    """Record every pattern and make it generic. What cannot be, in a module that is no block, is hidden in a block: that module."""
    while True:
        recorder.use(frontier.blocks)
        try:
            observed = {p: b.record(recorder) for p, b in batches.items()}
            return _generic(observed, frontier, needed, batches), [o for seen in observed.values() for o in seen]
        except (BlockError, GlueError) as error:
            around = error.coarser if isinstance(error, BlockError) else error.module or None
            if around is None or around in frontier.blocks:
                raise
            frontier.notes.append(Note(around, f"one block, because {error.message}", error.where))
            frontier.blocks = coarsen(frontier.blocks, around)


def _generic(
    observed: Mapping[Pattern, Sequence[Observed]], frontier: Frontier, needed: Collection[Pattern], probes: Mapping[Pattern, _Batches]
) -> list[Case]:
    """The cases of all patterns. A pattern that no sample alone has may be left out, with a note."""
    cases: list[Case] = []
    for pattern, seen in observed.items():
        try:
            found, problems = generalise(seen, probes[pattern])
        except GlueError as error:
            if pattern in needed or error.module:
                raise
            found, problems = [], [Diagnostic(error.message, error.where)]
        frontier.notes += [Note("", p.message, p.where) for p in problems]
        cases += [_named(Case(f"c{len(cases) + i}", pattern, g)) for i, g in enumerate(found)]
    return cases


def _named(case: Case) -> Case:
    """Name the case's constants after what they hold, so that equal ones of several cases are one."""
    generic = case.generic
    names = {old: f"constant_{_digest(tensor)}" for old, tensor in generic.constants.items()}
    for node in generic.graph.nodes:
        if node.op == "get_attr" and node.target in names:
            node.target = names[str(node.target)]
    generic.constants = {names[old]: tensor for old, tensor in generic.constants.items()}
    return case


def _digest(tensor: torch.Tensor) -> str:
    text = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.flatten().tolist()}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _block(model: nn.Module, path: str, call: fx.Node) -> Block:
    """A block from its module and a call of it, whose place stands for a class that is torch's own."""
    module = model.get_submodule(path)
    parameters = dict(module.named_parameters(prefix=path))
    around = component(model, path)
    return Block(
        path,
        type(module).__name__,
        call.meta["where"] if type(module).__module__.startswith("torch.") else class_place(type(module)),
        tuple(parameters),
        sum(p.numel() for p in parameters.values()),
        sum(p.numel() for p in parameters.values() if p.requires_grad),
        around,
        layers(model, around),
    )


def _parameters(model: nn.Module) -> dict[str, Parameter]:
    return {n: Parameter(tuple(p.shape), p.dtype, p.requires_grad) for n, p in model.named_parameters(remove_duplicate=False)}


def _buffers(model: nn.Module, cases: Iterable[Case], blocks: Collection[str]) -> dict[str, torch.Tensor]:
    """The buffers that glue reads and that no block can change, as far as they have values."""
    read = {str(n.target) for case in cases for n in case.generic.graph.nodes if n.op == "get_attr"}
    inside = lambda name: any(name.startswith(f"{path}.") for path in blocks)  # noqa: E731
    return {name: b.detach() for name, b in model.named_buffers() if name in read and not b.is_meta and not inside(name)}


def ties(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of parameters that have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(n) for n in names.values() if len(n) > 1]
