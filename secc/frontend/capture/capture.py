"""Capture: the user's model as generic graphs, one or more for each activation pattern, and what is known of
its blocks and parameters.

The frontier of blocks is chosen first; every pattern is recorded at several sizes, with and without padding;
comparison makes the recordings generic. A block that turns out not to be callable from recorded arguments is
exchanged for the module around it, with a note.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from secc.frontend.capture.block_selection import Frontier, Note, Seen, Tree, choose, coarsen
from secc.frontend.capture.control_flow_paths import Diagnostic, GlueError, Observed
from secc.frontend.capture.generalize import Generic, generalise
from secc.frontend.capture.probe_batches import Batches, shapes_alone
from secc.frontend.capture.random_op_rows import find
from secc.frontend.capture.rerecorded_cases import Outlines, Rows, counted
from secc.frontend.capture.shared_explanations import Known
from secc.frontend.dataset.input_symbols import Inputs
from secc.frontend.dataset.survey import Pattern, Survey
from secc.ir.dialect.readable_names import BUFFER
from secc.runtime.model.source_lines import class_place
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.schema import Draw
from secc.runtime.recorder import BlockError, Hazard, Recorder
from secc.runtime.recorder.loss_loops import loops as loops_in
from secc.runtime.recorder.loss_loops import of_samples, rolled
from secc.runtime.recorder.match_outline import digest
from secc.runtime.recorder.recording import is_read

_IDLE = "autocast for CUDA does nothing on this machine, so the plan's ranks compute without it: compile on a machine with a GPU"


@dataclass(frozen=True)
class Block:
    """One of the user's modules that is called whole. `params` and `trainable` count entries, `layers` those
    of its component's stack."""

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
    """A way through forward: the optional keys of the batch, and the generic graph.

    `anew`: why its glue is recorded anew for each micro-batch, None for glue that holds at every size. A
    `spare` case is for micro-batches of which Python reads what no capture saw.
    """

    name: str
    pattern: Pattern
    generic: Generic
    anew: Diagnostic | None = None
    spare: bool = False


@dataclass
class Capture:
    """Everything the compiler knows of the user's forward.

    `hazards` are ops in blocks that couple the samples of a batch, `draws` the random ops, `buffers` those
    outside of blocks that glue reads and whose values are known here. `recorder` is what it was recorded
    with, and knows what blocks return; `seen` is what calls of modules showed.
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
    recorder: Recorder
    seen: Mapping[str, Seen]

    @property
    def spare(self) -> bool:
        """Whether there are cases that a plan can do without."""
        return any(c.spare for c in self.cases)

    def without_spare(self) -> Capture:
        """The capture without them."""
        return replace(self, cases=[c for c in self.cases if not c.spare])

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """The tensors that forward makes of Python data, of all cases, and what buffers hold that glue
        reads."""
        made = {name: tensor for case in self.cases for name, tensor in case.generic.constants.items()}
        return made | {BUFFER + name: tensor for name, tensor in self.buffers.items()}


def capture(
    user: UserModel, model: nn.Module, survey: Survey, inputs: Inputs, cut: Collection[str] = (), blocks: Sequence[str] = (),
    before: Capture | None = None,
) -> Capture:  # fmt: skip
    """Capture `model` (meta or real) for every pattern that the survey's samples can form.

    `cut` names components whose layers are to be blocks, `blocks` modules that the user wants as blocks.
    `before` is an earlier capture of the model and these samples. Raises UserError, with file:line and
    remedy, for what cannot be captured.
    """
    recorder = Recorder(model, ()) if before is None else before.recorder
    recorder.logs = True
    batches = {p: Batches(user, survey, inputs, p, recorder) for p in survey.unions()}
    frontier = choose(
        model, [b.ragged[0].batch for b in batches.values()], cut, blocks, recorder, before and before.seen
    )
    rows = Rows({s.name for s in inputs.symbols})
    cases, observed = _Cases(model, frontier, frozenset(survey.patterns), batches, cut, rows).found(recorder)
    inputs = counted(inputs, rows, survey, lambda sample: shapes_alone(recorder, user, sample))
    hazards = list(dict.fromkeys(h for o in observed for h in o.recording.hazards))
    frontier.notes += [Note("", _IDLE, h.where) for h in hazards if h.kind == "autocast"]
    draws = find(observed, inputs)
    called = {
        str(n.target): n
        for case in reversed(cases)
        for n in case.generic.graph.nodes
        if n.op == "call_module"
    }
    tree = Tree(model)
    blocks_called = {path: _block(tree, path, call) for path, call in called.items()}
    buffers = _buffers(model, cases, blocks_called)
    parameters, tied = _parameters(model), ties(model)
    return Capture(
        inputs, survey.optional, cases, blocks_called, parameters, tied, hazards, draws, frontier.notes, buffers, recorder,
        frontier.seen,
    )  # fmt: skip


class _Cases:
    """Finds the cases of all patterns, and for that the blocks with which there are some."""

    def __init__(
        self, model: nn.Module, frontier: Frontier, needed: Collection[Pattern], batches: Mapping[Pattern, Batches], cut: Collection[str],
        rows: Rows,
    ) -> None:  # fmt: skip
        self.model, self.frontier, self.needed, self.batches, self.cut, self.rows = (
            model,
            frontier,
            needed,
            batches,
            cut,
            rows,
        )
        self.tried = set[frozenset[str]]()

    def found(self, recorder: Recorder) -> tuple[list[Case], list[Observed]]:
        """Record every pattern and make it generic. What cannot be, in a module that is no block, is hidden
        in a block: that module."""
        frontier = self.frontier
        while True:
            self.tried.add(frozenset(frontier.blocks))
            recorder.use(frontier.blocks)
            self.rows.names.clear()
            try:
                observed = {p: b.record() for p, b in self.batches.items()}
                return self._generic(observed), [o for seen in observed.values() for o in seen]
            except (BlockError, GlueError) as error:
                if recorder.logs and recorder.logged:
                    recorder.logs = False
                    frontier.notes.append(
                        Note(
                            "",
                            f"what forward returns beside the loss is not logged, because {error.message}",
                            error.where,
                        )
                    )
                    continue
                frontier.blocks = self._other_blocks(error)
                if (
                    frozenset(frontier.blocks) in self.tried
                ):  # larger blocks want smaller ones, and these the larger ones
                    raise error from None

    def _other_blocks(self, error: BlockError | GlueError) -> list[str]:
        """Blocks with which a capture may succeed where it failed, with a note. Raises the error where there
        are none."""
        blocks = self.frontier.blocks
        around = error.coarser if isinstance(error, BlockError) else error.module or None
        if isinstance(error, BlockError) and error.parts:
            self.frontier.notes.append(
                Note(error.path, f"its parts are blocks, because {error.message}", error.where)
            )
            return error.blocks(blocks) or []
        if around is None or around in blocks:
            raise error
        self.frontier.notes.append(Note(around, f"one block, because {error.message}", error.where))
        return coarsen(blocks, around)

    def _generic(self, observed: Mapping[Pattern, Sequence[Observed]]) -> list[Case]:
        """The cases of all patterns. A pattern that no sample alone has may be left out, with a note."""
        cases: list[Case] = []
        notes: list[Note] = []
        known = Known()
        for pattern, seen in observed.items():
            self.batches[pattern].known = known
            anew, outlines = None, Outlines(seen)
            try:
                found, problems = generalise(seen, self.batches[pattern])
            except GlueError as error:
                if any("log" in n.meta for o in seen for n in o.recording.graph.nodes):
                    raise
                again = self._anew(pattern, error, seen)
                if again is None and (pattern in self.needed or error.module):
                    raise
                anew = Diagnostic(error.message, error.where, (), error.module)
                found, problems = ([again], [_recorded(pattern, anew)]) if again is not None else ([], [anew])
            notes += [Note("", p.message, p.where) for p in problems]
            cases += [_named(Case(f"c{len(cases) + i}", pattern, g, anew)) for i, g in enumerate(found)]
            if anew is None and (read := _undecided(found)) is not None:
                spare = outlines.cases(self.rows, self.batches[pattern])
                cases += [
                    _named(Case(f"c{len(cases) + i}", pattern, g, read, spare=True))
                    for i, g in enumerate(spare)
                ]
        self.frontier.notes += notes
        return cases

    def _anew(self, pattern: Pattern, error: GlueError, before: Sequence[Observed]) -> Generic | None:
        """The pattern's case with glue that is recorded anew, where a larger block would join what can train
        apart, or hide a loop over samples in the loss; else None. Those of `before` are used up."""
        ways = [False] if self._joins(error.module) else []
        for loops in [*ways, True] if all(loops_in(rolled(o.recording)) for o in before) else ways:
            seen = self.batches[pattern].record_with_parts()
            if _decides_loss(seen, loops):
                continue
            with suppress(GlueError):
                outlines = Outlines(seen, loops)
                found = outlines.case(self.rows, self.batches[pattern])
                if loops:
                    outlines.check(found, self.batches[pattern].alone(), self.rows)
                return found
        return None

    def _joins(self, path: str) -> bool:
        """Whether a module as one block would hold blocks of several components, or of one that is to be cut;
        the model itself is none."""
        if not path:
            return True
        inside, tree = [b for b in self.frontier.blocks if b.startswith(f"{path}.")], Tree(self.model)
        cut = any(path == c or path.startswith(f"{c}.") for c in self.cut)
        return len({tree.component(b) for b in inside}) > 1 or (cut and len(inside) > 1)


def _decides_loss(seen: Sequence[Observed], loops: bool) -> bool:
    """Whether Python reads a number behind the last block that moves with the batch: no glue for a block
    hangs on it, the loss may.

    Such a branch would be taken by what a micro-batch holds, where plain PyTorch takes it by the whole global
    batch. With `loops` over samples each may have numbers of its own.
    """
    values: dict[str, set[str]] = {}
    for observed in seen:
        nodes = list(observed.recording.graph.nodes)
        last = max((i for i, n in enumerate(nodes) if n.op == "call_module"), default=0)
        reads = [n for n in nodes[last:] if is_read(n) and not isinstance(n.meta["read"][1], bool)]
        for node in (n for n in reads if not (loops and of_samples(n, observed.sizes["B"]))):
            values.setdefault(node.meta["where"], set()).add(repr(node.meta["read"][1]))
    return any(len(seen) > 1 for seen in values.values())


def _undecided(cases: Sequence[Generic]) -> Diagnostic | None:
    """A value that Python reads of inputs and that another batch may have otherwise than all captures; None
    if there is none."""
    values: dict[tuple[str, int], set[str]] = {}
    for guard in (g for case in cases for g in case.guards):
        values.setdefault((guard.meta["where"], guard.meta["order"]), set()).add(repr(guard.meta["read"][1]))
    for (where, _), seen in values.items():
        if seen != {"True", "False"}:
            return Diagnostic(
                f"Python reads a value of the inputs, of which captures saw {' and '.join(sorted(seen))[:60]}",
                where,
            )
    return None


def _recorded(pattern: Pattern, why: Diagnostic) -> Diagnostic:
    """Says that a pattern's glue is recorded anew."""
    samples = f"samples with {', '.join(sorted(pattern))}" if pattern else "samples without optional inputs"
    return Diagnostic(
        f"glue is recorded anew for each micro-batch of {samples}, because {why.message}", why.where
    )


def _named(case: Case) -> Case:
    """Name the case's constants after what they hold, so that equal ones of several cases are one."""
    generic = case.generic
    names = {old: digest(tensor) for old, tensor in generic.constants.items()}
    for node in generic.graph.nodes:
        if node.op == "get_attr" and node.target in names:
            node.target = names[str(node.target)]
    generic.constants = {names[old]: tensor for old, tensor in generic.constants.items()}
    return case


def _block(tree: Tree, path: str, call: fx.Node) -> Block:
    """A block from its module and a call of it, whose place stands for a class that is torch's own."""
    module = tree.modules[path]
    parameters = dict(module.named_parameters(prefix=path))
    around = tree.component(path)
    return Block(
        path,
        type(module).__name__,
        call.meta["where"] if type(module).__module__.startswith("torch.") else class_place(type(module)),
        tuple(parameters),
        sum(p.numel() for p in parameters.values()),
        sum(p.numel() for p in parameters.values() if p.requires_grad),
        around,
        tree.depth(around),
    )


def _parameters(model: nn.Module) -> dict[str, Parameter]:
    return {
        n: Parameter(tuple(p.shape), p.dtype, p.requires_grad)
        for n, p in model.named_parameters(remove_duplicate=False)
    }


def _buffers(model: nn.Module, cases: Iterable[Case], blocks: Collection[str]) -> dict[str, torch.Tensor]:
    """The buffers that glue reads and that no block can change, as far as they have values."""
    read = {str(n.target) for case in cases for n in case.generic.graph.nodes if n.op == "get_attr"}
    inside = lambda name: any(name.startswith(f"{path}.") for path in blocks)  # noqa: E731
    return {
        name: b.detach()
        for name, b in model.named_buffers()
        if name in read and not b.is_meta and not inside(name)
    }


def ties(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of parameters that have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(n) for n in names.values() if len(n) > 1]
