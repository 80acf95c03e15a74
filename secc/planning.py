"""From a capture to the lowered IR: the passes, and what stages and tensor parallelism need of the model between them.

`allocate` chooses before anyone tried to cut the model. Where a choice turns out impossible (`Impossible`), the passes run again without
it, unless the user has pinned it, and the plan says so. Where it chose stages, the towers concerned are captured layer by layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from xdsl.dialects.builtin import ModuleOp

from secc import pipeline, staging
from secc.codegen.fused import fused_module, rewrites
from secc.cost.examples import Samples
from secc.errors import Impossible, UserError
from secc.frontend.capture import Capture, capture
from secc.frontend.cuts.annotate import annotate
from secc.frontend.inputs import Inputs
from secc.frontend.survey import Survey
from secc.ir.dialect import graph_of
from secc.ir.text import parse, print_module
from secc.runtime.user_model import UserModel

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
    """The lowered IR, the capture it was made of, the dumps on the way, and choices that were taken back, with the reason."""

    module: ModuleOp
    captured: Capture
    dumps: list[tuple[str, str]]
    refused: dict[str, str]


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
        """Plan, taking back choices that cannot be carried out. Raises UserError for those that the user has pinned."""
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
        module, start, captured = parse(self.first), self.first, self.source.captured
        passes, run = self._run(module, self.source.text(**options))
        if (staged := staging.find(module, self.source.meta, dict(run.dumps))).cut:
            with self.step("capture layers"):
                captured = self._layers(staged)
            module = self.source.make(captured)
            start = print_module(module)
            stages = tuple(pin for pin in staged.stages if pin.partition("=")[0] not in self.pinned)
            text = self.source.text(**options, sections=staged.sections, stages=stages, known=staged.known)
            try:
                passes, run = self._run(module, text)
            except UserError as error:
                raise staged.impossible(error) from error
        done = [pipeline.described(step) for step in passes if step.name not in _behind(passes)]
        with self.step("cut blocks over ranks"):
            told = staging.tell(staged, module)
            if self._annotate(module, captured) or told:
                run.dumps[-1] = (run.dumps[-1][0], pipeline.header(done) + print_module(module))
        with self.step("passes"):
            rest = pipeline.run(module, passes[len(done) :], dump=True, progress=self.progress, made=done)
        return Planned(module, captured, [("capture", start), *run.dumps, *rest.dumps], refused)

    def _run(self, module: ModuleOp, text: str) -> tuple[tuple[pipeline.ModulePass, ...], pipeline.Run]:
        """The passes up to the choice, on `module`."""
        passes = pipeline.parse(text)
        with self.step("passes"):
            front = passes[: len(passes) - len(_behind(passes))]
            return passes, pipeline.run(module, front, dump=True, progress=self.progress)

    def _annotate(self, module: ModuleOp, captured: Capture) -> bool:
        source, graph = self.source, graph_of(module)
        samples, fused = Samples(source.batches, captured.constants), (rewrites(graph), fused_module(graph))
        return annotate(module, source.meta, source.model, source.user, source.drawn, samples, fused)

    def _layers(self, staged: staging.Staging) -> Capture:
        """The capture with towers opened down to their layers. Raises Impossible where they have to stay whole."""
        source = self.source
        try:
            captured = capture(source.user, source.meta, source.drawn, source.inputs, staged.cut, recorder=source.captured.recorder)
            staging.check(staged, captured)
        except UserError as error:
            raise staged.impossible(error) from error
        return captured


def _behind(passes: tuple[pipeline.ModulePass, ...]) -> list[str]:
    names = [step.name for step in passes]
    return names[names.index(BEHIND) :]
