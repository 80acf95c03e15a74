"""Captures the user's model as generic graphs, one or more for each activation pattern, with what is known
of its blocks and parameters.

Blocks are selected first. Every pattern is recorded at several sizes, with and without padding; comparing
the recordings makes them generic. A block that cannot be called from recorded arguments is replaced by the
module around it, with a note.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from secc.errors import UserError
from secc.frontend.capture.block_selection import (
    BlockSelection,
    CaptureNote,
    ModuleCalls,
    ModuleTree,
    replace_with_parent,
    select_blocks,
)
from secc.frontend.capture.code_blocks import (
    FunctionChoice,
    PartTries,
    StatementChoice,
    TryTimeEnded,
    choose_next_part,
    describe_time_ended,
    take_back_parts,
)
from secc.frontend.capture.control_flow_paths import (
    CHANGING_GLUE,
    GlueDiagnostic,
    GlueError,
    ObservedRecording,
)
from secc.frontend.capture.generalize import GenericGraph, generalize_captures
from secc.frontend.capture.known_recordings import KnownRecordings
from secc.frontend.capture.mixed_rows import find_mixed_rows
from secc.frontend.capture.probe_batches import ProbeBatches
from secc.frontend.capture.random_op_rows import find_random_ops
from secc.frontend.capture.rerecorded_cases import OutlinedCaptures, RowSymbols, add_row_symbols
from secc.frontend.capture.shared_explanations import SharedExplanations
from secc.frontend.capture.summed_results import mark_summed_results
from secc.frontend.dataset.input_symbols import ModelInputs
from secc.frontend.dataset.survey import DatasetSurvey, InputPattern
from secc.ir.dialect.readable_names import BUFFER_CONSTANT_PREFIX
from secc.runtime.model.function_blocks import FunctionBlock, StatementBlock
from secc.runtime.model.source_lines import format_source_line, forward_source_line
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.sample_predicates import describe_pattern
from secc.runtime.plan.schema import RandomOp
from secc.runtime.recorder import BlockError, Hazard, Recorder
from secc.runtime.recorder.loss_loops import find_loss_loops as loops_in
from secc.runtime.recorder.loss_loops import reads_per_sample, roll_loss_loops
from secc.runtime.recorder.match_outline import constant_digest
from secc.runtime.recorder.recording import has_drawn_rows, is_read_node

_NOT_LOGGED = "further results of forward are not logged"
_IDLE_AUTOCAST_NOTE = (
    "autocast for CUDA does nothing on this machine, so the plan's ranks compute without it: compile on a "
    "machine with a GPU"
)


@dataclass(frozen=True)
class CapturedBlock:
    """One of the user's modules that is called as it is. `layer_count` counts the layers of its
    component's stack; a block `outside_stack`, such as a head, has none of them. `layer` is the layer that
    it is a part of, "" for other blocks."""

    path: str
    class_name: str
    where: str
    parameter_names: tuple[str, ...]
    parameter_count: int
    trainable_count: int
    component: str
    layer_count: int
    outside_stack: bool = False
    layer: str = ""


@dataclass(frozen=True)
class CapturedParameter:
    """Shape, dtype and trainability of a parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool


@dataclass(frozen=True)
class CapturedCase:
    """A control-flow path through forward: the optional keys of the batch, and the generic graph.

    rerecord_reason: why its glue is re-recorded for each micro-batch; None for glue that is valid at every
    size. is_fallback: it serves micro-batches that take a data-dependent branch not seen during capture.
    """

    name: str
    pattern: InputPattern
    generic: GenericGraph
    rerecord_reason: GlueDiagnostic | None = None
    is_fallback: bool = False


@dataclass
class Capture:
    """Everything the compiler knows about the user's forward.

    hazards: ops in blocks that couple the samples of a batch. draws: random ops. buffers: buffers outside
    of blocks that glue reads, with known values. recorder: what the captures were recorded with; it knows
    the results of blocks. module_calls: what calls of modules showed. chosen_blocks: modules that the user
    wants as blocks.
    """

    inputs: ModelInputs
    optional_keys: frozenset[str]
    cases: list[CapturedCase]
    blocks: dict[str, CapturedBlock]
    parameters: dict[str, CapturedParameter]
    ties: list[tuple[str, ...]]
    hazards: list[Hazard]
    draws: list[RandomOp]
    notes: list[CaptureNote]
    buffers: dict[str, torch.Tensor]
    recorder: Recorder
    module_calls: Mapping[str, ModuleCalls]
    chosen_blocks: Sequence[str] = ()

    @property
    def has_fallbacks(self) -> bool:
        """Whether there are fallback cases, which a plan can do without."""
        return any(c.is_fallback for c in self.cases)

    def without_fallbacks(self) -> Capture:
        """Returns the capture without fallback cases."""
        return replace(self, cases=[c for c in self.cases if not c.is_fallback])

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """Tensors that forward makes from Python data, over all cases, and contents of buffers that glue
        reads, by name."""
        made = {name: tensor for case in self.cases for name, tensor in case.generic.constants.items()}
        return made | {BUFFER_CONSTANT_PREFIX + name: tensor for name, tensor in self.buffers.items()}


def capture_model(
    user: UserModel,
    model: nn.Module,
    survey: DatasetSurvey,
    inputs: ModelInputs,
    cut: Collection[str] = (),
    blocks: Sequence[str] = (),
    before: Capture | None = None,
    tries: PartTries | None = None,
) -> Capture:
    """Captures `model` (on the meta device or with weights) for every pattern that the survey's samples
    can form.

    cut: components that are split into their layers as blocks, and layers that are split into their parts.
    blocks: modules that the user wants as blocks.
    before: an earlier capture of the model with the same samples, and with blocks of the user's. tries: of
    captures with other samples.
    Raises UserError, with file:line and remedy, for what cannot be captured.
    """
    tries = tries or PartTries()
    blocks = before.chosen_blocks if before is not None else blocks
    functions, statements = FunctionChoice(user, model), StatementChoice(user, model)
    known_parts = len(user.function_blocks)
    while True:
        recorder = Recorder(model, ()) if before is None else before.recorder
        try:
            capture = _capture_with_blocks(user, model, survey, inputs, cut, blocks, before, recorder, tries)
            graphs = [case.generic.graph for case in capture.cases]
            mark_summed_results(user, model, survey, graphs, statements.chosen_paths)
            statements.check_results(graphs)
            capture.hazards += find_mixed_rows(user, model, survey, capture.inputs, graphs)
            capture.notes[:0] = [*statements.notes, *functions.notes]
            return capture
        except TryTimeEnded as ended:
            failed = describe_time_ended(ended, functions, statements)
        except UserError as error:
            if before is not None:
                raise
            failed = choose_next_part(error, functions, statements, tries)
        if failed is not None:
            tries.end(failed)
            take_back_parts(user, model, known_parts)
            raise failed from failed.__cause__


def _capture_with_blocks(
    user: UserModel,
    model: nn.Module,
    survey: DatasetSurvey,
    inputs: ModelInputs,
    cut: Collection[str],
    blocks: Sequence[str],
    before: Capture | None,
    recorder: Recorder,
    tries: PartTries,
) -> Capture:
    """Captures `model` with the functions that it has as blocks; see `capture_model`."""
    recorder.kept_tensors, recorder.follows_draws = user.metric_tensors, True
    known = KnownRecordings(user, recorder)
    batches = {
        p: ProbeBatches(user, survey, inputs, p, known, tries.check) for p in survey.micro_batch_patterns()
    }
    frontier = select_blocks(
        model,
        [b.ragged_batches[0].batch for b in batches.values()],
        cut,
        blocks,
        recorder,
        before and before.module_calls,
    )
    recorder.start_capture()
    row_symbols = RowSymbols({s.name for s in inputs.symbols})
    cases, recordings = _CaseFinder(
        model, frontier, frozenset(survey.pattern_counts), batches, cut, row_symbols
    ).find_cases(recorder)
    _require_metric_tensors(user, cases, frontier.notes)
    inputs = add_row_symbols(inputs, row_symbols, survey, known.shapes_of_sample)
    hazards = list(dict.fromkeys(h for o in recordings for h in o.recording.hazards))
    frontier.notes += [CaptureNote("", _IDLE_AUTOCAST_NOTE, h.where) for h in hazards if h.kind == "autocast"]
    draws = find_random_ops(recordings, inputs)
    call_of_block = {
        str(n.target): n
        for case in reversed(cases)
        for n in case.generic.graph.nodes
        if n.op == "call_module"
    }
    tree = ModuleTree(model)
    blocks_called = {path: _describe_block(tree, path, call) for path, call in call_of_block.items()}
    buffers = _readable_buffers(model, cases, blocks_called)
    parameters, ties = _describe_parameters(model), find_tied_parameters(model)
    return Capture(
        inputs,
        survey.optional_keys,
        cases,
        blocks_called,
        parameters,
        ties,
        hazards,
        draws,
        frontier.notes,
        buffers,
        recorder,
        frontier.module_calls,
        blocks,
    )


def _require_metric_tensors(
    user: UserModel, cases: Sequence[CapturedCase], notes: Sequence[CaptureNote]
) -> None:
    """Raises UserError if no case has a tensor that the user's `metrics()` asks for, or if it is a parameter
    or a buffer."""
    nodes = [n for case in cases for n in case.generic.graph.nodes if n.meta.get("shape")]
    kept = {name for n in nodes for name in n.meta.get("log", ())}
    asked = user.metric_tensors
    if missing := [name for name in asked if name not in kept]:
        why = next((f": {n.reason}" for n in notes if n.reason.startswith(_NOT_LOGGED)), "")
        raise UserError(
            f"metrics() asks for {missing[0]!r}, which is no tensor that forward returns or gets{why}",
            user.function_source_line("metrics"),
            "let forward return it by this name, next to the loss; scalars are in metrics()'s first argument",
        )
    constant = next((n for n in nodes if n.op == "get_attr" and {*n.meta.get("log", ())} & {*asked}), None)
    if constant is not None:
        name = next(name for name in constant.meta["log"] if name in asked)
        raise UserError(
            f"metrics() asks for {name!r}, the model's {constant.target}, which has no rows of samples",
            user.function_source_line("metrics"),
            "return a tensor with one row, or a number of rows, for each sample",
        )


class _CaseFinder:
    """Finds the cases of all patterns, and the blocks that let their capture succeed."""

    def __init__(
        self,
        model: nn.Module,
        frontier: BlockSelection,
        needed: Collection[InputPattern],
        batches: Mapping[InputPattern, ProbeBatches],
        cut: Collection[str],
        rows: RowSymbols,
    ) -> None:
        self.model, self.frontier, self.required_patterns, self.batches, self.opened_components, self.rows = (
            model,
            frontier,
            needed,
            batches,
            cut,
            rows,
        )
        self.tried_blocks = set[frozenset[str]]()
        self.has_drawn_rows = False  # in the present recordings, so that glue cannot be re-recorded
        self.why_not_rerecorded = ""

    def find_cases(self, recorder: Recorder) -> tuple[list[CapturedCase], list[ObservedRecording]]:
        """Records every pattern and makes the recordings generic; returns the cases and all recordings.

        If code of a module cannot be captured, that module becomes a block, and all patterns are recorded
        again.
        """
        frontier = self.frontier
        while True:
            self.tried_blocks.add(frozenset(frontier.blocks))
            recorder.use_blocks(frontier.blocks)
            self.rows.name_by_dim.clear()
            try:
                recordings = {p: b.record_paths() for p, b in self.batches.items()}
                self.has_drawn_rows = any(
                    has_drawn_rows(o.recording.graph) for seen in recordings.values() for o in seen
                )
                return self._generalize_patterns(recordings), [
                    o for seen in recordings.values() for o in seen
                ]
            except (BlockError, GlueError) as error:
                if recorder.follows_draws and self.has_drawn_rows and isinstance(error, GlueError):
                    recorder.follows_draws = False  # a block that holds such rows may do
                    continue
                is_wish = isinstance(error, BlockError) and error.is_wish  # raised once, so it is met now
                if recorder.keeps_scalars and recorder.found_scalars and not is_wish:
                    recorder.keeps_scalars = False
                    frontier.notes.append(
                        CaptureNote(
                            "",
                            f"{_NOT_LOGGED}, because {error.message}",
                            error.where,
                        )
                    )
                    continue
                frontier.blocks = self._replace_failing_block(error)
                if (
                    frozenset(frontier.blocks) in self.tried_blocks
                ):  # larger blocks want smaller ones, and these the larger ones
                    raise error from error.__cause__

    def _replace_failing_block(self, error: BlockError | GlueError) -> list[str]:
        """Returns other blocks, after a capture failed, that may let it succeed, and notes the change. Raises
        `error` if there are none."""
        blocks = self.frontier.blocks
        around = error.coarser if isinstance(error, BlockError) else error.module or None
        calls = self.frontier.module_calls.get(around or "")
        if isinstance(error, BlockError) and error.functions and calls is not None and calls.returned_loss:
            raise error  # a function hides less
        if isinstance(error, BlockError) and (error.parts or error.is_wish):
            parts = error.suggest_blocks(blocks) or []
            if error.is_wish:
                self.tried_blocks.discard(frozenset(blocks))
                if frozenset(parts) in self.tried_blocks:  # they could not be blocks
                    return blocks
            self.frontier.notes.append(
                CaptureNote(error.path, f"its parts are blocks, because {error.message}", error.where)
            )
            return parts
        if around is None or around in blocks:
            raise error
        self.frontier.notes.append(CaptureNote(around, f"one block, because {error.message}", error.where))
        return replace_with_parent(blocks, around)

    def _generalize_patterns(
        self, observed: Mapping[InputPattern, Sequence[ObservedRecording]]
    ) -> list[CapturedCase]:
        """Returns the cases of all patterns. A pattern that no sample alone has may be left out, with a
        note."""
        cases: list[CapturedCase] = []
        notes: list[CaptureNote] = []
        known = SharedExplanations()
        for pattern, seen in observed.items():
            self.batches[pattern].explanations = known
            rerecord_reason, outlines = None, OutlinedCaptures(seen)
            try:
                generics, problems = generalize_captures(seen, self.batches[pattern])
            except GlueError as error:
                if self.has_drawn_rows:
                    raise
                logged = any("log" in n.meta for o in seen for n in o.recording.graph.nodes)
                rerecorded = self._build_rerecorded_case(pattern, error, seen)
                if rerecorded is None and (logged or pattern in self.required_patterns or error.module):
                    if self.why_not_rerecorded:
                        error.message += f"; recorded again for each micro-batch, {self.why_not_rerecorded}"
                    raise
                rerecord_reason = GlueDiagnostic(error.message, error.where, (), error.module)
                generics, problems = (
                    ([rerecorded], [_rerecording_note(pattern, rerecord_reason)])
                    if rerecorded is not None
                    else ([], [rerecord_reason])
                )
            notes += [CaptureNote("", p.message, p.where) for p in problems]
            cases += [
                _name_constants(CapturedCase(f"c{len(cases) + i}", pattern, g, rerecord_reason))
                for i, g in enumerate(generics)
            ]
            if rerecord_reason is None and (one_sided_read := _find_one_sided_read(generics)) is not None:
                fallbacks = (
                    []
                    if self.has_drawn_rows
                    else outlines.build_cases_by_path(self.rows, self.batches[pattern])
                )
                cases += [
                    _name_constants(
                        CapturedCase(f"c{len(cases) + i}", pattern, g, one_sided_read, is_fallback=True)
                    )
                    for i, g in enumerate(fallbacks)
                ]
        self.frontier.notes += notes
        return cases

    def _build_rerecorded_case(
        self, pattern: InputPattern, error: GlueError, before: Sequence[ObservedRecording]
    ) -> GenericGraph | None:
        """Returns the pattern's case with glue that is re-recorded for each micro-batch; None if a larger
        block is the better remedy. Notes why it cannot be.

        It is better unless it would join components that can train apart, or hide a loop over samples in
        the loss. The recordings `before` are used up.
        """
        loop_choices = [False] if self._would_join_components(error.module) else []
        if all(loops_in(roll_loss_loops(o.recording)) for o in before):
            loop_choices.append(True)
        # Recordings of layers take long, and most that fail do so with the fewest.
        if self.opened_components and loop_choices == [False] and not self._fewest_fit(pattern):
            return None
        recordings = self.batches[pattern].record_with_sample_shapes() if loop_choices else []
        for loops in loop_choices:  # what is outlined without loops stays as it is, for the other outline
            if _loss_reads_vary(recordings, loops):
                continue
            try:
                outlines = OutlinedCaptures(recordings, loops)
                case = outlines.build_case(self.rows, self.batches[pattern])
                if loops:
                    outlines.check_other_batches(
                        case, self.batches[pattern].record_samples_alone(), self.rows
                    )
                return case
            except GlueError as why_not:
                cause = why_not.message.removeprefix(f"{CHANGING_GLUE}: ")
                self.why_not_rerecorded = f"{cause} ({why_not.where})"
        return None

    def _fewest_fit(self, pattern: InputPattern) -> bool:
        """Whether one case fits the fewest recordings of a pattern that show what sizes do. What explains no
        more than these explains no others."""
        batches, rows = self.batches[pattern], copy.deepcopy(self.rows)
        known, batches.explanations = batches.explanations, SharedExplanations()
        try:
            OutlinedCaptures(batches.record_with_sample_shapes(fewest=True)).build_case(rows, batches)
            return True
        except GlueError:
            return False
        finally:
            batches.explanations = known

    def _would_join_components(self, path: str) -> bool:
        """Whether a module as one block would hold blocks of several components, or several layers of a
        component that is split into layers. The model itself would."""
        if not path:
            return True
        inside, tree = [b for b in self.frontier.blocks if b.startswith(f"{path}.")], ModuleTree(self.model)
        cut = any(path == c or path.startswith(f"{c}.") for c in self.opened_components)
        return len({tree.component_of(b) for b in inside}) > 1 or (cut and len(inside) > 1)


def _loss_reads_vary(seen: Sequence[ObservedRecording], loops: bool) -> bool:
    """Whether Python reads a number after the last block that changes with the batch: the loss may depend
    on it.

    A micro-batch would take such a branch by its own values, where plain PyTorch takes it by those of the
    global batch. With `loops` over samples each sample may have its own numbers.
    """
    values: dict[str, set[str]] = {}
    for observed in seen:
        nodes = list(observed.recording.graph.nodes)
        last = max((i for i, n in enumerate(nodes) if n.op == "call_module"), default=0)
        reads = [n for n in nodes[last:] if is_read_node(n) and not isinstance(n.meta["read"][1], bool)]
        for node in (n for n in reads if not (loops and reads_per_sample(n, observed.sizes["B"]))):
            values.setdefault(node.meta["where"], set()).add(repr(node.meta["read"][1]))
    return any(len(seen) > 1 for seen in values.values())


def _find_one_sided_read(cases: Sequence[GenericGraph]) -> GlueDiagnostic | None:
    """Returns a value that Python reads of the inputs and that another batch may have otherwise than all
    captures; None if there is none."""
    values: dict[tuple[str, int], set[str]] = {}
    for guard in (g for case in cases for g in case.guards):
        values.setdefault((guard.meta["where"], guard.meta["order"]), set()).add(repr(guard.meta["read"][1]))
    for (where, _), seen in values.items():
        if seen != {"True", "False"}:
            captured = " and ".join(sorted(seen))[:60]
            message = f"Python reads a value of the inputs that was {captured} in all captures"
            return GlueDiagnostic(message, where)
    return None


def _rerecording_note(pattern: InputPattern, why: GlueDiagnostic) -> GlueDiagnostic:
    """Returns the note that a pattern's glue is re-recorded."""
    samples = f"samples with {describe_pattern(pattern)}" if pattern else "samples without optional inputs"
    return GlueDiagnostic(
        f"glue is re-recorded for each micro-batch of {samples}, because {why.message}", why.where
    )


def _name_constants(case: CapturedCase) -> CapturedCase:
    """Names the case's constants by a digest of their contents, so that equal constants of several cases
    become one."""
    generic = case.generic
    new_names = {old: constant_digest(tensor) for old, tensor in generic.constants.items()}
    for node in generic.graph.nodes:
        if node.op == "get_attr" and node.target in new_names:
            node.target = new_names[str(node.target)]
    generic.constants = {new_names[old]: tensor for old, tensor in generic.constants.items()}
    return case


def _describe_block(tree: ModuleTree, path: str, call: fx.Node) -> CapturedBlock:
    """Describes a block by its module and one call of it; the call's place stands for classes of torch
    itself, and for statements."""
    module = tree.modules[path]
    if isinstance(module, FunctionBlock) and not isinstance(module, StatementBlock):
        code = module.function.__code__
        where = format_source_line(code, code.co_firstlineno)
    elif isinstance(module, StatementBlock) or type(module).__module__.startswith("torch."):
        where = call.meta["where"]
    else:
        where = forward_source_line(type(module))
    parameters = dict(module.named_parameters(prefix=path))
    around = tree.component_of(path)
    return CapturedBlock(
        path,
        type(module).__name__,
        where,
        tuple(parameters),
        sum(p.numel() for p in parameters.values()),
        sum(p.numel() for p in parameters.values() if p.requires_grad),
        around,
        tree.stack_depth(around),
        tree.stack_depth(around) > 0 and not tree.is_part_of_stack(path, around),
        tree.layer_around(path),
    )


def _describe_parameters(model: nn.Module) -> dict[str, CapturedParameter]:
    return {
        n: CapturedParameter(tuple(p.shape), p.dtype, p.requires_grad)
        for n, p in model.named_parameters(remove_duplicate=False)
    }


def _readable_buffers(
    model: nn.Module, cases: Iterable[CapturedCase], blocks: Collection[str]
) -> dict[str, torch.Tensor]:
    """Returns the buffers that glue reads and that no block can change, if their values are known."""
    read_names = {str(n.target) for case in cases for n in case.generic.graph.nodes if n.op == "get_attr"}

    def is_inside_block(name: str) -> bool:
        return any(name.startswith(f"{path}.") for path in blocks)

    return {
        name: b.detach()
        for name, b in model.named_buffers()
        if name in read_names and not b.is_meta and not is_inside_block(name)
    }


def find_tied_parameters(model: nn.Module) -> list[tuple[str, ...]]:
    """Returns the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(n) for n in names.values() if len(n) > 1]
