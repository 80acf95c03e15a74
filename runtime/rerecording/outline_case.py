"""A case of a plan with recorded glue: what its outline says about a micro-batch before it is recorded,
and whether a recording matches it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from secc.runtime.errors import UserError
from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.plan.schema import LOOP_LABEL_PREFIX, RerecordedCase
from secc.runtime.recorder.block_results import TensorShapes
from secc.runtime.recorder.glue_program import GlueProgram
from secc.runtime.recorder.match_outline import find_outline_mismatch
from secc.runtime.recorder.outline import Outline
from secc.runtime.sections.base import SectionCase

ResultShapes = Mapping[str, TensorShapes]  # shapes of blocks' results, by label of the call and access path


class RecordedCase:
    """One entry of `Plan.recorded`. `sources` maps the label of each recorded tensor to the names of its
    sources."""

    def __init__(self, case: RerecordedCase) -> None:
        self.name, self.when, self._nodes = case.name, frozenset(case.when), case.nodes
        self.sources = {
            n["kind"][1]: [_source_name(case.nodes, i) for i in n["sources"]]
            for n in case.nodes
            if n["kind"][0] == "recorded"
        }

    @cached_property
    def _call_numbers(self) -> dict[str, int]:
        """Numbers of the calls of blocks, by label, in the order of forward."""
        places = [i for i, n in enumerate(self._nodes) if n["kind"][0] == "call"]
        return {_call_label(self._nodes, place): number for number, place in enumerate(places)}

    @property
    def has_loops(self) -> bool:
        """Whether parts of the loss are made by loops over samples."""
        return any(label.startswith(LOOP_LABEL_PREFIX) for label in self.sources)

    @property
    def keeps_scalars(self) -> bool:
        """Whether the case has scalars or tensors that forward returns next to the loss."""
        return any("log" in n for n in self._nodes)

    def has_call_of(self, label: str) -> bool:
        """Whether the case has the call that `label` belongs to."""
        return call_of_label(label) in self._call_numbers

    def last_call_number(self, labels: Iterable[str]) -> int:
        """Number of the last block call that a recording needs to have all `labels`. Labels of calls that the
        case does not have are ignored."""
        calls = [(call, delay) for call, delay in map(_call_and_delay, labels) if call in self._call_numbers]
        return max((self._call_numbers[call] + delay for call, delay in calls), default=0)

    def shape_rules(self, sizes: Mapping[str, int]) -> ResultShapes:
        """Return the shapes of blocks' results that follow from a micro-batch's symbol sizes."""
        rules: dict[str, dict[str, tuple[int, ...]]] = {}
        for node in self._nodes:
            shape = _result_shape(node, sizes) if node["kind"][0] == "result" else None
            if shape is not None:
                rules.setdefault(_call_label(self._nodes, node["args"][0]["node"]), {})[node["kind"][1]] = (
                    shape
                )
        return rules

    def find_mismatch(
        self,
        outline: Outline,
        programs: Mapping[str, GlueProgram],
        sizes: Mapping[str, int],
        any_float: bool = False,
    ) -> UserError | None:
        """Return where a recording differs from the case in anything but its recorded glue; None if it
        matches. any_float: a float may have another dtype."""
        skeleton = outline.make_skeleton(self.sources)
        problem = find_outline_mismatch(skeleton, self._nodes, sizes, any_float)
        if problem is not None:
            return problem
        for label, program in programs.items():
            extra = [
                s for s in program.sources if s not in self.sources[label] and not s.startswith("input ")
            ]
            if extra:
                message = (
                    f"the glue that makes {label} of a micro-batch needs {extra[0].partition(' ')[2]}, "
                    "which no capture needed there"
                )
                place = outline.labelled_tensors[label].meta.get("where", "")
                return UserError(
                    message,
                    place,
                    "let dataset() show such samples earlier, or compile again with more --stats-samples",
                )
        return None

    def section_paths(self, bodies: Sequence[Sequence[SectionCase]], labels: Collection[str] | None) -> Any:
        """Return what distinguishes this case from others for the sections: the bodies they run, among
        `bodies`, and the sources of their recorded tensors."""
        taken = tuple(
            next((c.method for c in body if self.name in c.recorded_cases), None) for body in bodies
        )
        return taken, tuple(
            (label, tuple(sources))
            for label, sources in self.sources.items()
            if labels is None or label in labels
        )


def common_shape_rules(rules: Sequence[ResultShapes]) -> ResultShapes:
    """Return the shapes on which all cases of a pattern agree. Which case a micro-batch follows is not
    known before it is recorded."""
    first = rules[0] if rules else {}
    return {
        call: shapes for call, shapes in first.items() if all(other.get(call) == shapes for other in rules)
    }


def call_of_label(label: str) -> str:
    """Return the label of the call that a tensor's label belongs to."""
    return _call_and_delay(label)[0]


def _call_and_delay(label: str) -> tuple[str, int]:
    """Return the label of the call that a tensor's label belongs to, and how many calls later the tensor
    is known: arguments with the call itself, results with the next one."""
    if label.startswith("result "):
        return label.split(" ")[1], 1
    return label.partition(":")[0], 0


def _result_shape(node: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """Return the shape of a block's result; None if it depends on values or was not recorded."""
    dims = node.get("shape", [None])
    try:
        return None if None in dims else tuple(evaluate_expr(d, sizes) for d in dims)
    except ValueError:
        return None  # rows that only a recording counts


def _call_label(nodes: Sequence[Mapping[str, Any]], place: int) -> str:
    """Return the label of the call at position `place` of an outline: `#1` and so on are appended from the
    second call of a block on."""
    path = nodes[place]["kind"][1]
    earlier = sum(n["kind"][0] == "call" and n["kind"][1] == path for n in nodes[:place])
    return f"{path}#{earlier}" if earlier else path


def _source_name(nodes: Sequence[Mapping[str, Any]], number: int) -> str:
    """Return the name of the source at position `number` of an outline."""
    kind = nodes[number]["kind"]
    if kind[0] != "result":
        return f"{kind[0]} {kind[1]}"
    return f"result {_call_label(nodes, nodes[number]['args'][0]['node'])} {kind[1]}"
