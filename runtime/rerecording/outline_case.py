"""A case of a plan whose glue is recorded anew: what its outline says of a micro-batch before and after it is
recorded."""

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

ResultShapes = Mapping[str, TensorShapes]  # of blocks' results, by call and access path


class RecordedCase:
    """One of `Plan.recorded`."""

    def __init__(self, case: RerecordedCase) -> None:
        self.name, self.when, self._nodes = case.name, frozenset(case.when), case.nodes
        self.sources = {
            n["kind"][1]: [_source_name(case.nodes, i) for i in n["sources"]]
            for n in case.nodes
            if n["kind"][0] == "recorded"
        }

    @cached_property
    def _call_numbers(self) -> dict[str, int]:
        """The calls of blocks in order, with their numbers."""
        places = [i for i, n in enumerate(self._nodes) if n["kind"][0] == "call"]
        return {_call_label(self._nodes, place): number for number, place in enumerate(places)}

    @property
    def has_loops(self) -> bool:
        """Whether loops over samples make something of the loss."""
        return any(label.startswith(LOOP_LABEL_PREFIX) for label in self.sources)

    def has_call_of(self, label: str) -> bool:
        """Whether the case has the call that a label is of."""
        return call_of_label(label) in self._call_numbers

    def last_call_number(self, labels: Iterable[str]) -> int:
        """The number of the call up to which a recording has to go to have all these labels, as far as the
        case has them."""
        return max(
            (
                self._call_numbers[call] + after
                for call, after in map(_call_and_delay, labels)
                if call in self._call_numbers
            ),
            default=0,
        )

    def shape_rules(self, sizes: Mapping[str, int]) -> ResultShapes:
        """The shapes of blocks' results that the sizes of a micro-batch tell ahead."""
        found: dict[str, dict[str, tuple[int, ...]]] = {}
        for node in self._nodes:
            shape = _result_shape(node, sizes) if node["kind"][0] == "result" else None
            if shape is not None:
                found.setdefault(_call_label(self._nodes, node["args"][0]["node"]), {})[node["kind"][1]] = (
                    shape
                )
        return found

    def find_mismatch(
        self, outline: Outline, programs: Mapping[str, GlueProgram], sizes: Mapping[str, int]
    ) -> UserError | None:
        """Where a recording differs from the case in anything but the glue that is recorded; None if it does
        not."""
        problem = find_outline_mismatch(outline.make_skeleton(self.sources), self._nodes, sizes)
        if problem is not None:
            return problem
        for label, program in programs.items():
            extra = [
                s for s in program.sources if s not in self.sources[label] and not s.startswith("input ")
            ]
            if extra:
                message = f"the glue that makes {label} of a micro-batch needs {extra[0].partition(' ')[2]}, which no capture needed there"
                place = outline.labelled_tensors[label].meta.get("where", "")
                return UserError(
                    message,
                    place,
                    "let dataset() show such samples earlier, or compile again with more --stats-samples",
                )
        return None

    def section_paths(self, bodies: Sequence[Sequence[SectionCase]], labels: Collection[str] | None) -> Any:
        """What sections do in this case: the bodies that they take, of those they have, and what they give
        recorded glue."""
        taken = tuple(
            next((c.method for c in body if self.name in c.recorded_cases), None) for body in bodies
        )
        return taken, tuple(
            (label, tuple(found))
            for label, found in self.sources.items()
            if labels is None or label in labels
        )


def common_shape_rules(found: Sequence[ResultShapes]) -> ResultShapes:
    """The shapes that all cases of a pattern agree on: which way a micro-batch goes is not known ahead."""
    first = found[0] if found else {}
    return {
        call: shapes for call, shapes in first.items() if all(other.get(call) == shapes for other in found)
    }


def call_of_label(label: str) -> str:
    """The call that a label is of."""
    return _call_and_delay(label)[0]


def _call_and_delay(label: str) -> tuple[str, int]:
    """The call that has a label, and how many calls further it is known: what a block is called with when it
    is called."""
    if label.startswith("result "):
        return label.split(" ")[1], 1
    return label.partition(":")[0], 0


def _result_shape(node: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """The shape of a block's result; None where values decide it, or nobody asked for it."""
    dims = node.get("shape", [None])
    try:
        return None if None in dims else tuple(evaluate_expr(d, sizes) for d in dims)
    except ValueError:
        return None  # rows that only a recording counts


def _call_label(nodes: Sequence[Mapping[str, Any]], place: int) -> str:
    """The label of the call at a place of an outline."""
    path = nodes[place]["kind"][1]
    earlier = sum(n["kind"][0] == "call" and n["kind"][1] == path for n in nodes[:place])
    return f"{path}#{earlier}" if earlier else path


def _source_name(nodes: Sequence[Mapping[str, Any]], number: int) -> str:
    """The name of a source by its place in an outline."""
    kind = nodes[number]["kind"]
    if kind[0] != "result":
        return f"{kind[0]} {kind[1]}"
    return f"result {_call_label(nodes, nodes[number]['args'][0]['node'])} {kind[1]}"
