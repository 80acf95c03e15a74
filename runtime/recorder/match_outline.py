"""Whether a new recording goes the way a plan was made for: its blocks, what they are called with, and its
loss, number by number.

A plan keeps the outline of a case as plain data, with sizes as expressions. Glue that is recorded anew may be
anything; whatever lies outside of it is compiled, and must be just what the plan has.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from secc.runtime.errors import UserError
from secc.runtime.plan.expr_eval import evaluate
from secc.runtime.recorder.nested_values import take
from secc.runtime.recorder.outline import recorded
from secc.runtime.recorder.recording import Recording

Nodes = Sequence[Mapping[str, Any]]

aten = torch.ops.aten
_COPY: Any = (
    aten.clone.default
)  # left out of a recording where a batch of one sample has the wanted layout already


def kind(node: fx.Node) -> list[Any]:
    """What a node of an outline does, without its arguments."""
    match node.op:
        case "placeholder":
            return ["input", str(node.target)]
        case "get_attr":
            return ["state", str(node.target)]
        case "call_module":
            return ["call", str(node.target), bool(node.meta["grad"]), node.meta["autocast"]]
        case "output":
            return ["loss"]
    if node.target is recorded:
        return ["recorded", str(node.args[0]), str(node.meta["dtype"]), len(node.meta["shape"])]
    if node.target is take:
        return ["result", str(node.args[1]), str(node.meta["dtype"]), len(node.meta["shape"])]
    name = "getitem" if node.target is operator.getitem else str(node.target)
    return ["op", name, bool(node.meta["grad"])]


def digest(tensor: torch.Tensor) -> str:
    """The name of a constant, from what it holds."""
    text = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.flatten().tolist()}"
    return f"constant_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def mismatch(found: Recording, nodes: Nodes, sizes: Mapping[str, int]) -> UserError | None:
    """What in the outline of a micro-batch differs from the plan's `nodes`, None if nothing does. `sizes` are
    the micro-batch's symbols.

    Of a recording that ended early, what it has is compared.
    """
    return _Match(found, nodes, sizes).run()


class _Match:
    """Compares node by node."""

    def __init__(self, found: Recording, nodes: Nodes, sizes: Mapping[str, int]) -> None:
        self._found, self._nodes, self._sizes = found, nodes, sizes
        self._number: dict[fx.Node, int] = {}

    def run(self) -> UserError | None:
        heads = [n for n in self._found.graph.nodes if n.op in ("placeholder", "get_attr")]
        left_out = ("placeholder", "get_attr", "output") if self._found.ended else ("placeholder", "get_attr")
        present = [n for n in self._found.graph.nodes if n.op not in left_out and n.target is not _COPY]
        planned = [
            (i, n)
            for i, n in enumerate(self._nodes)
            if n["kind"][0] not in ("input", "state") and not n.get("made")
        ]
        planned = [(i, n) for i, n in planned if list(n["kind"][:2]) != ["op", str(_COPY)]]
        self._heads(heads)
        for node, (number, expected) in zip(present, planned, strict=False):
            self._number[node] = number
            if not self._same(node, expected):
                return _differs(node)
        if len(present) != len(planned) and not (self._found.ended and len(present) < len(planned)):
            longer = present[len(planned) :] or present[-1:]
            return _differs(longer[0])
        return None

    def _heads(self, heads: Sequence[fx.Node]) -> None:
        """Number inputs and state as the plan does; a constant may be the plan's, or one that the plan makes
        from sizes."""
        known = {tuple(n["kind"]): i for i, n in enumerate(self._nodes) if n["kind"][0] in ("input", "state")}
        for node in heads:
            constant = self._found.constants.get(str(node.target)) if node.op == "get_attr" else None
            name = tuple(kind(node)) if constant is None else ("state", digest(constant))
            if name in known:
                self._number[node] = known[name]
            elif constant is not None:
                self._number[node] = self._made(constant)

    def _made(self, constant: torch.Tensor) -> int:
        """The node with which the plan makes a constant from sizes, -1 if there is none."""
        for number, node in enumerate(self._nodes):
            if (
                node.get("made")
                and torch.equal(self._value(node), constant)
                and self._value(node).dtype == constant.dtype
            ):
                return number
        return -1

    def _value(self, node: Mapping[str, Any]) -> torch.Tensor:
        """What an op of numbers alone gives at these sizes."""
        function: Any = operator.attrgetter(node["kind"][1])(torch.ops)
        args, kwargs = (self._plain(node[part]) for part in ("args", "kwargs"))
        return function(*args, **kwargs)

    def _plain(self, value: Any) -> Any:
        match value:
            case {"size": text, **rest}:
                whole, over = evaluate(text, self._sizes), evaluate(rest.get("over", 1), self._sizes)
                return whole if over == 1 else whole / over
            case {"name": text}:
                return (
                    getattr(torch, text.removeprefix("torch."))
                    if text.startswith("torch.")
                    else torch.device(text)
                )
            case dict():
                return {k: self._plain(v) for k, v in value.items()}
            case list() | tuple():
                return [self._plain(v) for v in value]
            case _:
                return value

    def _same(self, node: fx.Node, expected: Mapping[str, Any]) -> bool:
        if kind(node) != list(expected["kind"]) or not self._shaped(node, expected.get("shape", ())):
            return False
        if node.target is recorded:
            return True  # its sources are those it was given
        args = node.args[:1] if node.target is take else node.args
        free = node.target is aten.reshape.default
        return self._equal(list(args), expected["args"], free) and self._equal(
            node.kwargs, expected["kwargs"], False
        )

    def _shaped(self, node: fx.Node, dims: Sequence[str | None]) -> bool:
        """Whether a tensor has the plan's sizes; None stands for a size that values decide."""
        return all(
            d is None or size == evaluate(d, self._sizes)
            for d, size in zip(dims, node.meta.get("shape", ()), strict=False)
        )

    def _copied(self, number: int) -> int:
        """The planned node behind copies into other layouts."""
        while list(self._nodes[number]["kind"][:2]) == ["op", str(_COPY)]:
            number = self._nodes[number]["args"][0]["node"]
        return number

    def _equal(self, value: Any, expected: Any, free: bool) -> bool:
        """Whether an argument is the plan's; `free` lets torch find one size of a reshape."""
        match expected:
            case {"node": number}:
                return isinstance(value, fx.Node) and self._number.get(_original(value)) == self._copied(
                    number
                )
            case {"size": text, **rest}:
                return isinstance(value, (int, float)) and _near(
                    value, evaluate(text, self._sizes), evaluate(rest.get("over", 1), self._sizes)
                )
            case {"name": text}:
                return str(value) == text
            case {"slice": parts}:
                return isinstance(value, slice) and self._equal(
                    [value.start, value.stop, value.step], parts, free
                )
            case dict():
                return isinstance(value, dict) and value.keys() == expected.keys() and all(
                    self._equal(v, expected[k], free) for k, v in value.items()
                )  # fmt: skip
            case list() | tuple():
                same = isinstance(value, (list, tuple)) and len(value) == len(expected)
                return same and all(self._equal(v, e, free) for v, e in zip(value, expected, strict=True))
        if free and expected == -1 and isinstance(value, int):
            return True
        return type(value) is type(expected) and value == expected


def _original(node: fx.Node) -> fx.Node:
    """The node behind copies into other layouts."""
    while node.target is _COPY:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _near(value: float, whole: int, over: int) -> bool:
    """Whether a number is `whole / over`; the quotient of a recording may have been rounded on its way."""
    return value * over == whole or (over != 1 and abs(value * over - whole) <= 1e-9 * abs(whole))


def _differs(node: fx.Node) -> UserError:
    what = "the call of" if node.op == "call_module" else "the op"
    shown = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)
    if node.target is recorded:
        what, shown = "the argument", node.args[0]
    message = f"forward goes a way that the plan does not have: {what} {shown} differs from every capture"
    remedy = "let dataset() show such samples earlier, or compile again with more --stats-samples"
    return UserError(message, node.meta.get("where", ""), remedy)
