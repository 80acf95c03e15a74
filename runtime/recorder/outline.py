"""The outline of a recording: blocks, what they are called with, and the loss; the glue that makes a block's
arguments is left out.

Glue that depends on values of the inputs has other ops in every batch, but the tensors that it hands to
blocks are the same few. An outline has one node for each of them, `recorded(label, *sources)`, in place of
the ops that make it. Outlines of several batches are compared as recordings are, and what was left out is
recorded anew for each micro-batch (`secc.runtime.recorder.glue_program`).

A *source* is where such glue starts: `input KEY`, `state NAME` (a parameter or buffer) or `result CALL PATH`
(a tensor that a block returns).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from torch import fx

from secc.runtime.plan.schema import LOOP
from secc.runtime.recorder.loss_loops import loops
from secc.runtime.recorder.nested_values import take
from secc.runtime.recorder.recording import Recording, behind

Sources = Mapping[str, Sequence[str]]  # of each label


def recorded(label: str, *sources: Any) -> NoReturn:
    """The target of nodes that stand for glue that is recorded anew."""
    raise RuntimeError(f"the glue that makes {label} is recorded for each micro-batch")


@dataclass
class Outline:
    """What is found of one recording. `made` maps the label of a tensor that a block is called with,
    `BLOCK:ARGUMENT`, to its node.

    Such a tensor is made by glue, or may be in another batch: it has its label although it is an input or a
    block's result here. What a loop over samples adds to the loss has one, too
    (`secc.runtime.recorder.loss_loops`).

    `calls` gives each block's call its label: the path, with `#1` and so on behind it from the second call
    on.
    """

    recording: Recording
    calls: dict[fx.Node, str] = field(default_factory=dict)
    made: dict[str, fx.Node] = field(default_factory=dict)

    @classmethod
    def of(cls, recording: Recording) -> Outline:
        """The outline of a recording."""
        found, met = cls(recording), Counter[str]()
        seen: set[fx.Node] = set()
        for call in recording.calls:
            path = str(call.target)
            found.calls[call] = f"{path}#{met[path]}" if met[path] else path
            met[path] += 1
            for place, node in _tensors(call):
                if node not in seen:
                    seen.add(node)
                    found.made[f"{found.calls[call]}:{place}"] = node
        for number, node in enumerate(loops(recording)):
            found.made[f"{LOOP}{number}"] = node
        return found

    def is_source(self, node: fx.Node) -> bool:
        """Whether glue starts at a node."""
        return (
            node.op == "placeholder"
            or node.target is take
            or (node.op == "get_attr" and node.target not in self.recording.constants)
        )

    def source(self, node: fx.Node) -> str:
        """The name of a source."""
        if node.target is take:
            return f"result {self.calls[node.args[0]]} {node.args[1]}"  # type: ignore[index]
        return f"{'input' if node.op == 'placeholder' else 'state'} {node.target}"

    def behind(self, *nodes: fx.Node) -> list[fx.Node]:
        """The nodes and the glue that they are computed by, sources and constants included, in the order of
        the recording; other loops are not looked into."""
        found = set(behind(nodes, lambda n: self.is_source(n) or ("loop" in n.meta and n not in nodes)))
        return [n for n in self.recording.graph.nodes if n in found]

    def sources(self) -> dict[str, list[str]]:
        """What each tensor that glue makes is made from."""
        return {
            label: [self.source(n) for n in self.behind(node) if self.is_source(n)]
            for label, node in self.made.items()
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The known shapes of the tensors that glue makes for blocks, by label, and of the blocks' results,
        by source."""
        results = (n for n in self.recording.graph.nodes if n.target is take and not n.meta["guessed"])
        return {label: n.meta["shape"] for label, n in self.made.items()} | {
            self.source(n): n.meta["shape"] for n in results
        }

    def skeleton(self, sources: Sources) -> Recording:
        """A recording of the blocks and the loss alone. `sources` says what each `recorded` node takes,
        whatever its own sources are."""
        return _Skeleton(self, sources).run()


class _Skeleton:
    """Writes the graph of an outline."""

    def __init__(self, outline: Outline, sources: Sources) -> None:
        self.outline, self.sources = outline, sources
        self.graph, self.new = fx.Graph(), dict[fx.Node, fx.Node]()
        self.given: dict[fx.Node, fx.Node] = {}  # what blocks are called with
        self.by_source = {outline.source(n): n for n in outline.recording.graph.nodes if outline.is_source(n)}
        self.made = {node: label for label, node in outline.made.items()}

    def run(self) -> Recording:
        recording = self.outline.recording
        tail = [] if recording.ended else self.outline.behind(recording.loss)
        self._heads(tail)
        for call in self.outline.calls:
            self._call(call)
        for node in tail:
            if "loop" in node.meta:
                self._recorded(node, self.made[node])
                self.new[node] = self.given[node]
            elif node not in self.new:
                self._copy(self._result(node) if node.target is take else node)
        self.graph.output(() if recording.ended else self.new[recording.loss])
        constants = {n: t for n, t in recording.constants.items() if any(n == node.target for node in tail)}
        inputs = {str(n.target): n for n in self.graph.nodes if n.op == "placeholder"}
        return replace(recording, graph=self.graph, inputs=inputs, constants=constants)

    def _heads(self, tail: Sequence[fx.Node]) -> None:
        """Inputs and state first, as in every graph."""
        wanted = {
            self.by_source[s] for found in self.sources.values() for s in found if s in self.by_source
        } | set(tail)
        heads = [n for n in self.outline.recording.graph.nodes if n.op in ("placeholder", "get_attr")]
        direct = {n for n in heads if n in wanted and (self.outline.is_source(n) or n in tail)}
        for op in ("placeholder", "get_attr"):
            for node in (n for n in heads if n in direct and n.op == op):
                self._copy(node)

    def _call(self, call: fx.Node) -> None:
        for _, node in _tensors(call):
            if node not in self.given:
                self._recorded(node, self.made[node])
        self.new[call] = self.graph.node_copy(call, lambda n: self.given[n])

    def _recorded(self, node: fx.Node, label: str) -> None:
        arguments = [
            self.new[self._result(self.by_source[s])]
            for s in self.sources.get(label, ())
            if s in self.by_source
        ]
        self.given[node] = self.graph.call_function(recorded, (label, *arguments))
        self.given[node].meta = dict(node.meta) | {
            "label": label,
            "grad": bool(node.meta.get("requires_grad")),
        }

    def _result(self, node: fx.Node) -> fx.Node:
        """A tensor of a block's result, taken where it is first needed."""
        if node.target is take and node not in self.new:
            self._copy(node)
            self.new[node].meta["label"] = self.outline.source(node)
        return node

    def _copy(self, node: fx.Node) -> None:
        if node not in self.new:
            self.new[node] = self.graph.node_copy(node, lambda n: self.new[n])


def _tensors(call: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    """The nodes in the arguments of a call, positional ones by number and others by name."""
    for name, value in (*enumerate(call.args), *call.kwargs.items()):
        yield from _leaves(value, str(name))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, fx.Node]]:
    if isinstance(value, fx.Node):
        yield path, value
    elif isinstance(value, (list, tuple, dict)):
        for name, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(child, f"{path}.{name}")
