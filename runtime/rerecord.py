"""Recording glue anew: what a rank's helper does for each micro-batch whose glue values of the inputs decide.

The helper has a model without weights of its own, since recording changes how modules are called. It runs ahead of the step, where batches
are loaded. What it finds goes with the batch: a program for each tensor that glue makes for a block, and the numbers of rows that values
decide. A micro-batch that goes another way than the plan's is refused there, before its step.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from secc.runtime.errors import UserError
from secc.runtime.plan import Plan, Recorded, is_label
from secc.runtime.recorder import Recorder, Recording, is_read
from secc.runtime.recorder.fold import fold
from secc.runtime.recorder.match import mismatch
from secc.runtime.recorder.outline import Outline
from secc.runtime.recorder.program import Program, input_of, programs
from secc.runtime.section import RECORDED, Section
from secc.runtime.sizes import sizes_of

_KEPT = 256  # recordings that the cache holds
_DYNAMIC = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Extent(NamedTuple):
    """Stands in a batch for a tensor of which only the shape is known."""

    shape: tuple[int, ...]


class Spent(NamedTuple):
    """When a recording was made, in the machine's monotonic nanoseconds."""

    start: int
    end: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end - self.start) / 1e9


@dataclass(frozen=True)
class Glue:
    """The recorded glue of one micro-batch, for a case of the plan. `spent`: when it was recorded, None where the cache had it."""

    case: str
    programs: Mapping[str, Program]
    planned: Mapping[str, Sequence[str]]
    spent: Spent | None

    def run(self, section: Section, batch: Mapping[str, Any], label: str, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor with this label; `sources` are those that the plan has for it."""
        given = dict(zip(self.planned[label], sources, strict=True))

        def source(name: str) -> torch.Tensor:
            if name in given:
                return given[name]
            kind, _, rest = name.partition(" ")
            return input_of(batch, rest) if kind == "input" else section.value(rest)

        return self.programs[label].run(source, section)


class Rerecorder:
    """Records micro-batches anew. `model` makes a model of its own when the first is recorded; `sections` are those that will run them."""

    def __init__(self, plan: Plan, model: Callable[[], nn.Module], sections: Callable[[nn.Module], Sequence[Section]]) -> None:
        self.plan, self._make, self._make_sections = plan, model, sections
        self._when = {s.name: frozenset(s.when) for s in plan.sections}
        self._cases = [_Case(c) for c in plan.recorded]
        self._optional = frozenset(i.key for i in plan.inputs if i.optional)
        self._counted = [s for s in plan.symbols if is_label(s.key)]
        self._recorder: Recorder | None = None
        self._sections: Sequence[Section] = ()
        self._cache: OrderedDict[bytes, _Found] = OrderedDict()
        self._deciding = frozenset[str]()
        self._recordings = 0

    def with_rows(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A sample's batch with the numbers of rows that values decide, if the plan has such symbols."""
        return batch | self._extents(self._find(batch)) if self._counted else batch

    def with_glue(self, batch: dict[str, Any], samples: int) -> dict[str, Any]:
        """A micro-batch of so many samples with its recording, where a section needs it. Raises UserError where it goes another way."""
        pattern = self._optional.intersection(batch)
        cases = [c for c in self._cases if c.when == pattern]
        active = (s for s in self._ready() if not self._when[s.name] or self._when[s.name] & pattern) if cases else ()
        if not any(s.wants_recording(batch) for s in active):
            return batch
        start = time.monotonic_ns()
        before = self._recordings
        found = self._find(batch)
        known = batch | self._extents(found)
        sizes = sizes_of(known, self.plan.symbols, samples)
        problems = [c.problem(found, sizes) for c in cases]
        fitting = next((c for c, problem in zip(cases, problems, strict=True) if problem is None), None)
        if fitting is None:
            raise problems[0] or UserError("no case of the plan fits")
        spent = Spent(start, time.monotonic_ns()) if self._recordings > before else None
        return known | {RECORDED: Glue(fitting.name, found.programs, fitting.sources, spent)}

    def _ready(self) -> Sequence[Section]:
        if self._recorder is None:
            model = self._make()
            self._sections = self._make_sections(model)
            self._recorder = Recorder(model, {*self.plan.fused, *(b for s in self.plan.sections for b in s.blocks)})
        return self._sections

    def _extents(self, found: _Found) -> dict[str, Extent]:
        shapes = found.outline.shapes()
        return {s.key: Extent(shapes[s.key]) for s in self._counted if s.key in shapes}

    def _find(self, batch: Mapping[str, Any]) -> _Found:
        key = self._key(batch)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        self._ready()
        assert self._recorder is not None
        self._recordings += 1
        outline = Outline.of(fold(self._recorder.record(batch)))
        made, read = programs(outline, batch)
        deciding = read | _deciding(outline.recording)
        if not deciding <= self._deciding:  # keys so far left out what has decided something now
            self._deciding |= deciding
            self._cache.clear()
            key = self._key(batch)
        self._cache[key] = _Found(outline, made)
        if len(self._cache) > _KEPT:
            self._cache.popitem(last=False)
        return self._cache[key]

    def _key(self, batch: Mapping[str, Any]) -> bytes:
        """What decides a recording: the shapes of all inputs, and the values of those that Python or a shape depends on."""
        digest = hashlib.sha256()
        for key, value in sorted(batch.items()):
            if not isinstance(value, torch.Tensor):
                continue
            digest.update(f"{key} {value.dtype} {tuple(value.shape)};".encode())
            if key in self._deciding:
                digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.digest()


@dataclass(frozen=True)
class _Found:
    """A recording as outline and programs."""

    outline: Outline
    programs: Mapping[str, Program]


class _Case:
    """A case of the plan that is recorded anew."""

    def __init__(self, case: Recorded) -> None:
        self.name, self.when, self._nodes = case.name, frozenset(case.when), case.nodes
        self.sources = {n["kind"][1]: [_source(case.nodes, i) for i in n["sources"]] for n in case.nodes if n["kind"][0] == "recorded"}

    def problem(self, found: _Found, sizes: Mapping[str, int]) -> UserError | None:
        """Where a recording differs from the plan's case in anything but the glue that is recorded; None if it does not."""
        problem = mismatch(found.outline.skeleton(self.sources), self._nodes, sizes)
        if problem is not None:
            return problem
        for label, program in found.programs.items():
            extra = [s for s in program.sources if s not in self.sources[label] and not s.startswith("input ")]
            if extra:
                message = f"the glue that makes {label} of a micro-batch needs {extra[0].partition(' ')[2]}, which no capture needed there"
                place = found.outline.made[label].meta.get("where", "")
                return UserError(message, place, "let dataset() show such samples earlier, or compile again with more --stats-samples")
        return None


def _source(nodes: Sequence[Mapping[str, Any]], number: int) -> str:
    """The name of a source by its place in an outline."""
    kind = nodes[number]["kind"]
    if kind[0] != "result":
        return f"{kind[0]} {kind[1]}"
    call = nodes[number]["args"][0]["node"]
    path = nodes[call]["kind"][1]
    earlier = sum(n["kind"][0] == "call" and n["kind"][1] == path for n in nodes[:call])
    return f"result {path}#{earlier} {kind[1]}" if earlier else f"result {path} {kind[1]}"


def _deciding(recording: Recording) -> frozenset[str]:
    """The inputs whose values decided something: a read, the shape of an op's result, or what a block does."""
    roots: list[Any] = []
    for node in recording.graph.nodes:
        dynamic = any(tag in _DYNAMIC for tag in getattr(node.target, "tags", ()))
        if is_read(node) or dynamic or node.meta.get("reads"):
            roots.append(node)
    seen, queue = set[Any](), roots
    while queue:
        node = queue.pop()
        if node not in seen:
            seen.add(node)
            queue += node.all_input_nodes
    return frozenset(str(n.target).partition("[")[0] for n in seen if n.op == "placeholder")
