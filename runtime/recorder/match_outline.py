"""Compares the recording of a micro-batch with the plan's case, node by node: blocks, their arguments, the
loss, and the scalars and tensors that forward returns next to it.

A plan keeps the outline of a case as plain data, with sizes as expressions. Recorded glue may be anything.
Everything outside of it is compiled, and must be exactly what the plan has.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from secc.runtime.errors import UserError
from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.recorder.block_results import hash_values
from secc.runtime.recorder.nested_values import take_at_path
from secc.runtime.recorder.outline import recorded_glue
from secc.runtime.recorder.recording import Recording

OutlineNodes = Sequence[Mapping[str, Any]]

aten = torch.ops.aten
# Missing in a recording if a batch of one sample has the wanted layout already, so it is not compared.
_CLONE: Any = aten.clone.default


def node_kind(node: fx.Node) -> list[Any]:
    """Return what a node of an outline does, without its arguments, as plain data."""
    match node.op:
        case "placeholder":
            return ["input", str(node.target)]
        case "get_attr":
            return ["state", str(node.target)]
        case "call_module":
            return ["call", str(node.target), bool(node.meta["grad"]), node.meta["autocast"]]
        case "output":
            return ["loss"]
    if node.target is recorded_glue:
        return ["recorded", str(node.args[0]), str(node.meta["dtype"]), len(node.meta["shape"])]
    if node.target is take_at_path:
        return ["result", str(node.args[1]), str(node.meta["dtype"]), len(node.meta["shape"])]
    name = "getitem" if node.target is operator.getitem else str(node.target)
    return ["op", name, bool(node.meta["grad"])]


def constant_digest(tensor: torch.Tensor) -> str:
    """Return a name for a constant of any shape, from its shape, dtype and contents."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(hash_values(tensor))
    return f"constant_{digest.hexdigest()[:12]}"


def find_outline_mismatch(
    recording: Recording, nodes: OutlineNodes, sizes: Mapping[str, int], any_float: bool = False
) -> UserError | None:
    """Return where the outline of a micro-batch differs from the plan's `nodes`; None if it does not. `sizes`
    are the micro-batch's symbols. any_float: a float may have another dtype than in the plan.

    Of a recording that ended early, the part that exists is compared.
    """
    return _OutlineMatcher(recording, nodes, sizes, any_float).run()


class _OutlineMatcher:
    """Compares node by node."""

    def __init__(
        self, recording: Recording, nodes: OutlineNodes, sizes: Mapping[str, int], any_float: bool
    ) -> None:
        self._found, self._nodes, self._sizes, self._any_float = recording, nodes, sizes, any_float
        self._planned_number: dict[fx.Node, int] = {}

    def run(self) -> UserError | None:
        heads = [n for n in self._found.graph.nodes if n.op in ("placeholder", "get_attr")]
        left_out = (
            ("placeholder", "get_attr", "output") if self._found.ends_early else ("placeholder", "get_attr")
        )
        present = [n for n in self._found.graph.nodes if n.op not in left_out and n.target is not _CLONE]
        planned = [
            (i, n)
            for i, n in enumerate(self._nodes)
            if n["kind"][0] not in ("input", "state") and not n.get("made")
        ]
        planned = [(i, n) for i, n in planned if list(n["kind"][:2]) != ["op", str(_CLONE)]]
        self._number_heads(heads)
        if (head := next((n for n in heads if not self._is_kept_as_planned(n)), None)) is not None:
            return _mismatch_error(head)
        for node, (number, expected) in zip(present, planned, strict=False):
            self._planned_number[node] = number
            if not self._node_matches(node, expected):
                return _mismatch_error(node)
        if len(present) != len(planned) and not (self._found.ends_early and len(present) < len(planned)):
            longer = present[len(planned) :] or present[-1:]
            return _mismatch_error(longer[0])
        return None

    def _number_heads(self, heads: Sequence[fx.Node]) -> None:
        """Give inputs and state the numbers of the plan. A constant may be the plan's own, or one that the
        plan computes from sizes."""
        known = {tuple(n["kind"]): i for i, n in enumerate(self._nodes) if n["kind"][0] in ("input", "state")}
        for node in heads:
            constant = self._found.constants.get(str(node.target)) if node.op == "get_attr" else None
            name = tuple(node_kind(node)) if constant is None else ("state", constant_digest(constant))
            if name in known:
                self._planned_number[node] = known[name]
            elif constant is not None:
                self._planned_number[node] = self._find_made_constant(constant)

    def _find_made_constant(self, constant: torch.Tensor) -> int:
        """Return the number of the node that computes a constant from sizes in the plan, -1 if there is
        none."""
        for number, node in enumerate(self._nodes):
            if (
                node.get("made")
                and torch.equal(self._evaluate_node(node), constant)
                and self._evaluate_node(node).dtype == constant.dtype
            ):
                return number
        return -1

    def _evaluate_node(self, node: Mapping[str, Any]) -> torch.Tensor:
        """Evaluate an op of numbers at these sizes."""
        function: Any = operator.attrgetter(node["kind"][1])(torch.ops)
        args, kwargs = (self._evaluate_argument(node[part]) for part in ("args", "kwargs"))
        return function(*args, **kwargs)

    def _evaluate_argument(self, value: Any) -> Any:
        match value:
            case {"size": text, **rest}:
                whole, over = (
                    evaluate_expr(text, self._sizes),
                    evaluate_expr(rest.get("over", 1), self._sizes),
                )
                return whole if over == 1 else whole / over
            case {"name": text}:
                return (
                    getattr(torch, text.removeprefix("torch."))
                    if text.startswith("torch.")
                    else torch.device(text)
                )
            case {"float": text}:
                return float(text)
            case dict():
                return {k: self._evaluate_argument(v) for k, v in value.items()}
            case list() | tuple():
                return [self._evaluate_argument(v) for v in value]
            case _:
                return value

    def _is_kept_as_planned(self, node: fx.Node) -> bool:
        """Whether forward returns a numbered node next to the loss under the planned names. A recording that
        ended early does not say."""
        number = self._planned_number.get(node, -1)
        planned = self._nodes[number].get("log", ()) if number >= 0 else ()
        return self._found.ends_early or list(node.meta.get("log", ())) == list(planned)

    def _node_matches(self, node: fx.Node, expected: Mapping[str, Any]) -> bool:
        if not self._kind_matches(node_kind(node), list(expected["kind"])):
            return False
        if not self._shape_matches(node, expected.get("shape", ())):
            return False
        if not self._is_kept_as_planned(node):
            return False
        if node.target is recorded_glue:
            return True  # its sources are those it was given
        args = node.args[:1] if node.target is take_at_path else node.args
        free = node.target is aten.reshape.default
        if free:  # a batch of one sample may pass -1 where others pass the number, as copies are left out
            args = (args[0], list(node.meta["shape"]))
        return self._argument_matches(list(args), expected["args"], free) and self._argument_matches(
            node.kwargs, expected["kwargs"], False
        )

    def _kind_matches(self, found: list[Any], planned: list[Any]) -> bool:
        if self._any_float and planned[0] in ("recorded", "result") and len(found) == len(planned):
            both = (found[2], planned[2])
            if all(str(dtype).startswith(("torch.float", "torch.bfloat")) for dtype in both):
                found = [*found[:2], planned[2], *found[3:]]
        return found == planned

    def _shape_matches(self, node: fx.Node, dims: Sequence[str | None]) -> bool:
        """Whether a tensor has the planned sizes; None stands for a size that values decide."""
        return all(
            d is None or size == evaluate_expr(d, self._sizes)
            for d, size in zip(dims, node.meta.get("shape", ()), strict=False)
        )

    def _skip_planned_copies(self, number: int) -> int:
        """Return the planned node behind copies into other layouts."""
        while list(self._nodes[number]["kind"][:2]) == ["op", str(_CLONE)]:
            number = self._nodes[number]["args"][0]["node"]
        return number

    def _argument_matches(self, value: Any, expected: Any, free: bool) -> bool:
        """Whether an argument is the planned one. With `free`, one size may be -1, as torch infers one
        size of a reshape."""
        match expected:
            case {"node": number}:
                return isinstance(value, fx.Node) and self._planned_number.get(
                    _skip_copies(value)
                ) == self._skip_planned_copies(number)
            case {"size": text, **rest}:
                return isinstance(value, (int, float)) and _equals_quotient(
                    value, evaluate_expr(text, self._sizes), evaluate_expr(rest.get("over", 1), self._sizes)
                )
            case {"name": text}:
                return str(value) == text
            case {"float": text}:
                return isinstance(value, float) and str(value) == text
            case {"slice": parts}:
                return isinstance(value, slice) and self._argument_matches(
                    [value.start, value.stop, value.step], parts, free
                )
            case dict():
                return isinstance(value, dict) and value.keys() == expected.keys() and all(
                    self._argument_matches(v, expected[k], free) for k, v in value.items()
                )  # fmt: skip
            case list() | tuple():
                same = isinstance(value, (list, tuple)) and len(value) == len(expected)
                return same and all(
                    self._argument_matches(v, e, free) for v, e in zip(value, expected, strict=True)
                )
        if free and expected == -1 and isinstance(value, int):
            return True
        return type(value) is type(expected) and value == expected


def _skip_copies(node: fx.Node) -> fx.Node:
    """Return the node behind copies into other layouts."""
    while node.target is _CLONE:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _equals_quotient(value: float, whole: int, over: int) -> bool:
    """Whether a number is `whole / over`. The quotient in a recording may have been rounded."""
    return value * over == whole or (over != 1 and abs(value * over - whole) <= 1e-9 * abs(whole))


def _mismatch_error(node: fx.Node) -> UserError:
    what = "the call of" if node.op == "call_module" else "the op"
    shown = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)
    if node.target is recorded_glue:
        what, shown = "the argument", node.args[0]
    message = f"forward takes a path that the plan does not have: {what} {shown} differs from every capture"
    remedy = (
        "let one of the samples that are drawn when the plan is made take this path (more of them with"
        " --stats-samples), or decide by tensors (torch.where, a mask), or put a loop with as many rounds as"
        " values of the batch say into an nn.Module of its own, which is called as it is"
    )
    return UserError(message, node.meta.get("where", ""), remedy)
