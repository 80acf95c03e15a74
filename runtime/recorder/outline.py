"""The outline of a recording: blocks, their arguments, the loss, and what a run logs or evaluates besides,
without the glue that makes the arguments.

Glue that depends on values of the inputs has different ops in every batch, but the tensors that it passes to
blocks are the same few. An outline has one node for each of them, `recorded_glue(label, *sources)`, in place
of the ops that make it. Outlines of several batches are compared as recordings are, and the glue that was
left out is recorded for each micro-batch (`secc.runtime.recorder.glue_program`).

A *source* is where such glue starts: `input KEY`, `state NAME` (a parameter or buffer) or `result CALL PATH`
(a tensor that a block returns).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from torch import fx

from secc.runtime.plan.schema import LOOP_LABEL_PREFIX
from secc.runtime.recorder.loss_loops import find_loss_loops
from secc.runtime.recorder.nested_values import take_at_path
from secc.runtime.recorder.recording import Recording, iter_nodes_behind

SourcesByLabel = Mapping[str, Sequence[str]]  # of each label


def recorded_glue(label: str, *sources: Any) -> NoReturn:
    """Target of nodes that stand for glue that is recorded for each micro-batch. Never called."""
    raise RuntimeError(f"the glue that makes {label} is recorded for each micro-batch")


@dataclass
class Outline:
    """The outline of one recording.

    labelled_tensors: by label `BLOCK:ARGUMENT`, the node of each tensor that a block is called with. A tensor
    has its label even if it is an input or a block's result here, because it may be made by glue in another
    batch. The result of a loop over samples has a label, too (`secc.runtime.recorder.loss_loops`).

    call_labels: by node, the label of each block's call: its path, with `#1` and so on appended from the
    second call on.
    """

    recording: Recording
    call_labels: dict[fx.Node, str] = field(default_factory=dict)
    labelled_tensors: dict[str, fx.Node] = field(default_factory=dict)

    @classmethod
    def of_recording(cls, recording: Recording) -> Outline:
        """Make the outline of a recording."""
        outline, calls_of_path = cls(recording), Counter[str]()
        seen: set[fx.Node] = set()
        for call in recording.block_calls:
            path = str(call.target)
            outline.call_labels[call] = f"{path}#{calls_of_path[path]}" if calls_of_path[path] else path
            calls_of_path[path] += 1
            for place, node in _call_argument_nodes(call):
                if node not in seen:
                    seen.add(node)
                    outline.labelled_tensors[f"{outline.call_labels[call]}:{place}"] = node
        for number, node in enumerate(find_loss_loops(recording)):
            outline.labelled_tensors[f"{LOOP_LABEL_PREFIX}{number}"] = node
        return outline

    def is_source(self, node: fx.Node) -> bool:
        """Whether glue starts at a node."""
        return (
            node.op == "placeholder"
            or node.target is take_at_path
            or (node.op == "get_attr" and node.target not in self.recording.constants)
        )

    def source_name(self, node: fx.Node) -> str:
        """Return the name of a source node."""
        if node.target is take_at_path:
            return f"result {self.call_labels[node.args[0]]} {node.args[1]}"  # type: ignore[index]
        return f"{'input' if node.op == 'placeholder' else 'state'} {node.target}"

    def nodes_behind(self, *nodes: fx.Node) -> list[fx.Node]:
        """Return the nodes and the glue that computes them, with its sources and constants, in the order
        of the recording. Other loops are not entered."""
        nodes_to_keep = set(
            iter_nodes_behind(nodes, lambda n: self.is_source(n) or ("loop" in n.meta and n not in nodes))
        )
        return [n for n in self.recording.graph.nodes if n in nodes_to_keep]

    def sources_by_label(self) -> dict[str, list[str]]:
        """Return the sources of each labelled tensor."""
        return {
            label: [self.source_name(n) for n in self.nodes_behind(node) if self.is_source(n)]
            for label, node in self.labelled_tensors.items()
        }

    def known_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the known shapes of labelled tensors, by label, and of blocks' results, by source."""
        results = (
            n for n in self.recording.graph.nodes if n.target is take_at_path and not n.meta["guessed"]
        )
        return {label: n.meta["shape"] for label, n in self.labelled_tensors.items()} | {
            self.source_name(n): n.meta["shape"] for n in results
        }

    def make_skeleton(self, sources: SourcesByLabel) -> Recording:
        """Return a recording of only the blocks, the loss, and the scalars and tensors kept next to it.
        `sources` says what each `recorded_glue` node takes, regardless of its sources in this recording."""
        return _SkeletonWriter(self, sources).run()


class _SkeletonWriter:
    """Writes the graph of an outline."""

    def __init__(self, outline: Outline, sources: SourcesByLabel) -> None:
        self.outline, self.sources = outline, sources
        self.graph, self.new_nodes = fx.Graph(), dict[fx.Node, fx.Node]()
        self.call_arguments: dict[fx.Node, fx.Node] = {}  # what blocks are called with
        self.by_source = {
            outline.source_name(n): n for n in outline.recording.graph.nodes if outline.is_source(n)
        }
        self.labels_by_node = {node: label for label, node in outline.labelled_tensors.items()}

    def run(self) -> Recording:
        recording = self.outline.recording
        kept = [n for n in recording.graph.nodes if "log" in n.meta]
        tail = [] if recording.ends_early else self.outline.nodes_behind(recording.loss, *kept)
        self._copy_heads(tail)
        for call in self.outline.call_labels:
            self._copy_call(call)
        for node in tail:
            if "loop" in node.meta:
                self._write_recorded(node, self.labels_by_node[node])
                self.new_nodes[node] = self.call_arguments[node]
            elif node not in self.new_nodes:
                self._copy_node(self._copy_result(node) if node.target is take_at_path else node)
        self.graph.output(() if recording.ends_early else self.new_nodes[recording.loss])
        constants = {n: t for n, t in recording.constants.items() if any(n == node.target for node in tail)}
        inputs = {str(n.target): n for n in self.graph.nodes if n.op == "placeholder"}
        return replace(recording, graph=self.graph, inputs=inputs, constants=constants)

    def _copy_heads(self, tail: Sequence[fx.Node]) -> None:
        """Copy inputs and state first, as in every graph."""
        wanted = {
            self.by_source[s] for found in self.sources.values() for s in found if s in self.by_source
        } | set(tail)
        heads = [n for n in self.outline.recording.graph.nodes if n.op in ("placeholder", "get_attr")]
        direct = {n for n in heads if n in wanted and (self.outline.is_source(n) or n in tail)}
        for op in ("placeholder", "get_attr"):
            for node in (n for n in heads if n in direct and n.op == op):
                self._copy_node(node)

    def _copy_call(self, call: fx.Node) -> None:
        for _, node in _call_argument_nodes(call):
            if node not in self.call_arguments:
                self._write_recorded(node, self.labels_by_node[node])
        self.new_nodes[call] = self.graph.node_copy(call, lambda n: self.call_arguments[n])

    def _write_recorded(self, node: fx.Node, label: str) -> None:
        arguments = [
            self.new_nodes[self._copy_result(self.by_source[s])]
            for s in self.sources.get(label, ())
            if s in self.by_source
        ]
        self.call_arguments[node] = self.graph.call_function(recorded_glue, (label, *arguments))
        self.call_arguments[node].meta = {k: v for k, v in node.meta.items() if k != "results"} | {
            "label": label,
            "grad": bool(node.meta.get("requires_grad")),
        }

    def _copy_result(self, node: fx.Node) -> fx.Node:
        """Take a tensor of a block's result where it is first needed."""
        if node.target is take_at_path and node not in self.new_nodes:
            self._copy_node(node)
            self.new_nodes[node].meta["label"] = self.outline.source_name(node)
        return node

    def _copy_node(self, node: fx.Node) -> None:
        if node not in self.new_nodes:
            self.new_nodes[node] = self.graph.node_copy(node, lambda n: self.new_nodes[n])


def _call_argument_nodes(call: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    """Iterate over (path, node) in the arguments of a call: positional ones by number, others by name."""
    for name, value in (*enumerate(call.args), *call.kwargs.items()):
        yield from _iter_argument_nodes(value, str(name))


def _iter_argument_nodes(value: Any, path: str) -> Iterator[tuple[str, fx.Node]]:
    if isinstance(value, fx.Node):
        yield path, value
    elif isinstance(value, (list, tuple, dict)):
        for name, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _iter_argument_nodes(child, f"{path}.{name}")
