"""Control-flow paths through forward: what tells recordings apart, and where they part.

Recordings of one path have the same ops with the same structure of arguments; only numbers, dims and
values read may differ.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from secc.errors import UserError
from secc.runtime.model.nested_batch import KEY_SEPARATOR, argument_of_key
from secc.runtime.plan.schema import EACH_SUFFIX
from secc.runtime.recorder import Recording, is_read_node
from secc.runtime.recorder.outline import recorded_glue

aten = torch.ops.aten
_CUTS = (aten.split_with_sizes.default, aten.split.Tensor, aten.unbind.int)

LabelledShapes = Mapping[str, tuple[int, ...]]

_GLUE_REMEDY = (
    "put it into an nn.Module of its own that returns rows of the samples; modules are called as they are. "
    "In the loss, add up one scalar for each sample's rows, or work on the padded batch with a mask"
)
CHANGING_GLUE = "the glue's ops change with the batch in a way that no capture explains"
LONG_WIDTH = 128  # from here on, lengths that differ a little may be one length to a stride
MIN_CAPTURES = 3  # captures that a case needs, so that sizes can be explained and checked


@dataclass(frozen=True)
class ObservedRecording:
    """A recording and the symbol values of its batch. sample_shapes: labelled shapes (`Outline.shapes`) of
    each of its samples recorded alone, if asked for."""

    recording: Recording
    sizes: Mapping[str, int]
    sample_shapes: tuple[LabelledShapes, ...] = ()
    samples: tuple[Any, ...] = field(default=(), repr=False, compare=False)


class GlueError(UserError):
    """Glue that cannot be made generic; `module` is the opened module that it belongs to, "" for the model
    itself. argument: the argument of the model's forward that holds a list, if its entries are worked on one
    by one."""

    def __init__(
        self, module: str, message: str, where: str = "", remedy: str = "", argument: str = ""
    ) -> None:
        super().__init__(message, where, remedy)
        self.module, self.argument = module, argument


@dataclass(frozen=True)
class GlueDiagnostic:
    """Glue that no expression over sizes explains: a sentence, its place, and the values it had; see
    `GlueError` for the others."""

    message: str
    where: str
    values: tuple[Any, ...] = ()
    module: str = ""
    argument: str = ""

    def to_error(self) -> GlueError:
        """Returns the diagnostic as an error of the user's input."""
        shown = ", ".join(str(v)[:60] for v in self.values[:6])
        return GlueError(
            self.module,
            self.message + (f" (it was {shown})" if shown else ""),
            self.where,
            _GLUE_REMEDY,
            self.argument,
        )


def graph_signature(graph: fx.Graph) -> Any:
    """Returns what must be equal for captures to be compared node by node: ops, structure of arguments and
    modes, but no numbers and no values read."""
    index = {n: i for i, n in enumerate(graph.nodes)}

    def constant(n: fx.Node) -> bool:
        return n.op == "get_attr" and str(n.target).startswith("_constant")

    return tuple(
        (
            n.op,
            "constant" if constant(n) else n.target,
            _argument_skeleton((n.args, n.kwargs), index),
            n.meta.get("grad"),
            n.meta.get("autocast"),
            n.meta.get("site"),
            repr(n.meta.get("settings") or ()),
            n.meta["read"][0] if is_read_node(n) else None,
            len(n.meta.get("shape") or ()),
            n.meta.get("dtype"),
        )
        for n in graph.nodes
    )


def path_signature(recording: Recording) -> Any:
    """Returns the signature of the path that Python took through forward: the structure of the glue and
    the conditions read."""
    return graph_signature(recording.graph), tuple(
        r.value for r in recording.reads if isinstance(r.value, bool)
    )


def _argument_skeleton(value: Any, index: Mapping[fx.Node, int]) -> Any:
    match value:
        case fx.Node():
            return ("node", index[value])
        case list() | tuple():
            return tuple(_argument_skeleton(v, index) for v in value)
        case dict():
            return tuple((k, _argument_skeleton(v, index)) for k, v in value.items())
        case slice():
            return ("slice", *(_argument_skeleton(v, index) for v in (value.start, value.stop, value.step)))
        case bool() | None | str():
            return value
        case int():
            return "int"
        case float():
            return "float"
        case _:
            return str(value)


def find_first_difference(groups: list[list[ObservedRecording]]) -> GlueDiagnostic | None:
    """Returns where the two most common paths differ first; None with fewer than two paths."""
    if len(groups) < 2:
        return None
    a, b = (g[0].recording.graph for g in sorted(groups, key=len, reverse=True)[:2])
    for x, y, s, t in zip(a.nodes, b.nodes, graph_signature(a), graph_signature(b), strict=False):
        if s != t:
            return _describe_difference(x, y)
    return None


def _describe_difference(x: fx.Node, y: fx.Node) -> GlueDiagnostic:
    """Returns what tells two nodes apart, the first ones that differ."""
    looped = next((n for n in (x, y) if _takes_one_part(n)), None)
    if looped is not None and (call := _called_with(looped)) is not None:
        message = f"{CHANGING_GLUE}: a loop calls {call.target} for one part of the batch after the other"
        module = looped.meta.get("module", "")
        # A list of tensors of one shape is taken apart before forward, at no line of the loop.
        place = call if call.meta.get("module", "") == module else looped
        return GlueDiagnostic(message, place.meta.get("where", ""), (), module)
    for node in (x, y):
        if not (key := _unpacked_list(node)):
            continue
        message = f"{CHANGING_GLUE}: the entries of the list {key} are worked on one by one"
        user = _first_use(node) or node
        return GlueDiagnostic(message, user.meta.get("where", ""), (), "", argument_of_key(key))
    for call, other in ((x, y), (y, x)):
        if call.op == "call_module" and str(other.meta.get("label", "")).startswith(f"{call.target}:"):
            message = (
                f"{CHANGING_GLUE}: {call.target} is called with more tensors in one batch than in another"
            )
            return GlueDiagnostic(message, call.meta.get("where", ""), (), call.meta.get("module", ""))
    # A loop over parts of the batch has more or fewer rounds: its line is in one recording more often.
    placed = [n for n in (x, y) if n.meta.get("where")] or [y]
    place = next((n for n in placed if _count_at(n, x.graph) != _count_at(n, y.graph)), placed[0])
    return GlueDiagnostic(
        f"{CHANGING_GLUE}: they differ first here",
        place.meta.get("where", ""),
        (_format_node(x), _format_node(y)),
        place.meta.get("module", ""),
    )


def _count_at(node: fx.Node, graph: fx.Graph) -> int:
    """Returns how many nodes of a graph are of the line of a node."""
    return sum(n.meta.get("where") == node.meta["where"] for n in graph.nodes)


def _unpacked_list(node: fx.Node) -> str:
    """Returns the list of the batch that a node cuts into its entries, or takes an entry of; "" for other
    nodes."""
    source: Any = node.args[0] if node.target is operator.getitem else node
    if not isinstance(source, fx.Node) or source.target not in _CUTS:
        return ""
    while isinstance(source, fx.Node) and source.op == "call_function":
        source = source.args[0] if source.args else None
    if not isinstance(source, fx.Node) or source.op != "placeholder":
        return ""
    steps = str(source.target).split(KEY_SEPARATOR)
    return KEY_SEPARATOR.join(s for s in steps if s != EACH_SUFFIX) if EACH_SUFFIX in steps else ""


def _first_use(cut: fx.Node) -> fx.Node | None:
    """Returns the first node that uses an entry of a list, after those that make the list."""
    queue, place = [cut], cut.meta.get("where")
    for node in queue:
        for user in node.users:
            if user.meta.get("where", place) != place:
                return user
            queue.append(user)
    return None


def _takes_one_part(node: fx.Node) -> bool:
    """Whether a node takes one of several parts of a tensor."""
    name = str(getattr(node.target, "__name__", node.target))
    return node.op == "call_function" and name.startswith(("getitem", "select", "slice"))


def _called_with(node: fx.Node) -> fx.Node | None:
    """Returns the next call of a block that takes what a node gives, through glue; None if there is none."""
    queue, seen = [node], {node}
    while queue:
        for user in queue.pop(0).users:
            if user.op == "call_module":
                return user
            if user not in seen:
                seen.add(user)
                queue.append(user)
    return None


def _format_node(node: fx.Node) -> str:
    if node.target is recorded_glue:
        block, _, argument = str(node.args[0]).partition(":")
        return f"{argument} of {block}"
    name = (
        f"read {node.meta['read'][0]}"
        if is_read_node(node)
        else getattr(node.target, "__name__", node.target)
    )
    return f"{name}{node.args}"
