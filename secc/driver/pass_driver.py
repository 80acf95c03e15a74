"""From a capture to the lowered IR: the passes, and what stages and tensor parallelism need of the model
between them.

`allocate` chooses before anyone tried to cut the model. Where a choice turns out impossible (`Impossible`),
the passes run again without it, unless the user has pinned it, and the plan says so. Where it chose stages,
the towers concerned are captured layer by layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from xdsl.dialects.builtin import ModuleOp

from secc import pass_pipeline, process_map
from secc.codegen.fused_module import fused_module, rewrites
from secc.cost.counting.example_arguments import Samples
from secc.driver import layer_capture
from secc.errors import Impossible, UserError
from secc.frontend.capture.capture import Capture, capture
from secc.frontend.dataset.input_symbols import Inputs
from secc.frontend.dataset.survey import Survey
from secc.frontend.tp_search.annotate_layouts import NOTHING, Fused, Subject, annotate, seek
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io.module_text import parse, print_module
from secc.runtime.model.user_file import UserModel

# the first pass behind the choice: layers are captured for what was chosen, wherever its ranks are
PLACED = "place"
BEHIND = "split-stages"  # the first of the passes that carry choices out


@dataclass(frozen=True)
class Source:
    """A captured model: `model` has weights if it fits here, `batches` are samples collated one by one.

    `make` gives the IR of a capture, `text` the pipeline with options changed.
    """

    user: UserModel
    meta: nn.Module
    model: nn.Module | None
    drawn: Survey
    inputs: Inputs
    batches: Sequence[Mapping[str, Any]]
    captured: Capture
    make: Callable[[Capture], ModuleOp]
    text: Callable[..., str]


@dataclass(frozen=True)
class Planned:
    """The lowered IR, the capture it was made of, the dumps on the way, and choices that were taken back,
    with the reason."""

    module: ModuleOp
    captured: Capture
    dumps: list[tuple[str, str]]
    refused: dict[str, str]


@dataclass(frozen=True)
class _Chosen:
    """A module with its choices made: its text before, the capture it was made of, and the passes with what
    they dumped so far."""

    module: ModuleOp
    start: str
    captured: Capture
    passes: tuple[pass_pipeline.ModulePass, ...]
    run: pass_pipeline.Run


class Planner:
    """Runs the passes on a captured model."""

    def __init__(
        self, source: Source, pinned: tuple[str, ...], step: Callable[[str], contextlib.AbstractContextManager[None]],
        progress: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.source, self.step, self.progress = source, step, progress
        self.asked, self.pinned = pinned, {pin.partition("=")[0] for pin in pinned}
        self.first = print_module(source.make(source.captured))

    def plan(self) -> Planned:
        """Plan, taking back choices that cannot be carried out. Raises UserError for those that the user has
        pinned."""
        refused: dict[str, str] = {}
        while True:
            try:
                return self._plan(refused)
            except Impossible as error:
                new = set(error.choices) - refused.keys()
                if not new or any(choice.partition("=")[0] in self.pinned for choice in new):
                    raise
                refused |= dict.fromkeys(sorted(new), error.message)

    def _plan(self, refused: dict[str, str]) -> Planned:
        options = {"refused": tuple(refused)}
        first = parse(self.first)
        chosen = whole = self._choose(first, self.first, self.source.captured, self.source.text(**options))
        sought = NOTHING
        if (staged := layer_capture.find(first, self.source.meta, dict(whole.run.dumps))).cut:
            # Layers of a tower are the same once it is opened. What is sought is wanted last, behind the
            # captured layers' own choices.
            with process_map.beside(lambda: seek(first, *self._subject(whole)), patient=True) as seeking:
                chosen = self._staged(staged, options)
                sought = seeking()
        module, passes, dumps = chosen.module, chosen.passes, [("capture", chosen.start), *chosen.run.dumps]
        dumps += self._run(module, _before(BEHIND, passes), len(_before(PLACED, passes))).dumps
        with self.step("cut blocks over ranks"):
            told = layer_capture.tell(staged, module)
            if annotate(module, *self._subject(chosen), sought) or told:
                done = [pass_pipeline.described(step) for step in _before(BEHIND, passes)]
                dumps[-1] = (dumps[-1][0], pass_pipeline.header(done) + print_module(module))
        dumps += self._run(module, passes, len(_before(BEHIND, passes))).dumps
        return Planned(module, chosen.captured, dumps, refused)

    def _choose(self, module: ModuleOp, start: str, captured: Capture, text: str) -> _Chosen:
        """The passes up to the choice, on `module`."""
        passes = pass_pipeline.parse(text)
        return _Chosen(module, start, captured, passes, self._run(module, _before(PLACED, passes)))

    def _run(
        self, module: ModuleOp, passes: tuple[pass_pipeline.ModulePass, ...], done: int = 0
    ) -> pass_pipeline.Run:
        """Passes, of which so many have been `done`."""
        with self.step("passes"):
            made = [pass_pipeline.described(step) for step in passes[:done]]
            return pass_pipeline.run(module, passes[done:], dump=True, progress=self.progress, made=made)

    def _staged(self, staged: layer_capture.Staging, options: Mapping[str, tuple[str, ...]]) -> _Chosen:
        """The choice again, with towers opened down to their layers."""
        with self.step("capture layers"):
            captured = self._layers(staged)
        module = self.source.make(captured)
        start = print_module(module)
        stages = tuple(pin for pin in staged.stages if pin.partition("=")[0] not in self.pinned)
        text = self.source.text(
            **options, sections=staged.sections, stages=stages, known=staged.known, proven=staged.proven
        )
        try:
            return self._choose(module, start, captured, text)
        except UserError as error:
            raise staged.impossible(error) from error

    def _subject(self, chosen: _Chosen) -> tuple[Subject, Fused]:
        """What mappings are sought for, and the fused operators with which they are to be shown."""
        source, graph = self.source, graph_of(chosen.module)
        samples = Samples(source.batches, chosen.captured.constants)
        return Subject(source.meta, source.model, source.user, source.drawn, samples), (
            rewrites(graph),
            fused_module(graph),
        )

    def _layers(self, staged: layer_capture.Staging) -> Capture:
        """The capture with towers opened down to their layers. Raises Impossible where they have to stay
        whole."""
        source = self.source
        try:
            captured = capture(
                source.user, source.meta, source.drawn, source.inputs, staged.cut, before=source.captured
            )
            layer_capture.check(staged, captured)
        except UserError as error:
            raise staged.impossible(error) from error
        return captured


def _before(name: str, passes: tuple[pass_pipeline.ModulePass, ...]) -> tuple[pass_pipeline.ModulePass, ...]:
    return passes[: [step.name for step in passes].index(name)]
