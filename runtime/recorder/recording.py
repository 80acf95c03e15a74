"""What a recording is: the glue of one forward as a graph, and what was noticed on the way.

A recording's graph is a `torch.fx.Graph` of
- placeholders, named by batch key, and `get_attr` nodes for parameters, buffers and recorded constants;
- `call_module` nodes for blocks, with `take` nodes for the tensors that the glue uses of their results;
- `call_function` nodes for ATen ops, none of which mutates;
- reads: nodes marked `meta["read"]` that stand where Python looked at a value of a tensor.

Every node's meta has `where` ("file:line"), `module` (the path of the open module that ran), `grad` (grad
mode), `autocast` ("" or "cpu bfloat16"), and for tensors `shape`, `dtype` and `requires_grad`; random ops
also have `draw`, their name, calls of blocks `site`, the lines that lead to them, and `reads` if the block
looks at values of its arguments, scalars that forward returns beside the loss `log`.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from secc.runtime.errors import UserError
from secc.runtime.model.source_lines import SourceLines, random_call_name

_MAX_COMPARED_ENTRIES = 1024  # entries; what is larger is compared by its hash


class BlockError(UserError):
    """Something that cannot be recorded with these blocks. `path` is the block or the open module that it
    happened in.

    `coarser` is a module that would hide it if it were a block, None if there is none but the whole model.
    `parts` are modules inside the block that would show it if they were blocks in its place.
    """

    def __init__(
        self,
        path: str,
        coarser: str | None,
        message: str,
        where: str = "",
        remedy: str = "",
        parts: Collection[str] = (),
    ) -> None:
        super().__init__(message, where, remedy)
        self.path, self.coarser, self.parts = path, coarser, tuple(parts)

    def suggest_blocks(self, blocks: Collection[str]) -> list[str] | None:
        """Other blocks with which a recording may succeed: finer ones where those show more, else a coarser
        one; None if there are none."""
        if self.parts:
            return sorted(
                {b for b in blocks if not any(p.startswith(f"{b}.") for p in self.parts)} | set(self.parts)
            )
        if self.coarser is None or self.coarser in blocks:
            return None
        return sorted({b for b in blocks if not b.startswith(f"{self.coarser}.")} | {self.coarser})


class NeedsValues(BlockError):
    """A block looks at values that nobody has while a plan is made."""


@dataclass(frozen=True)
class Read:
    """A value of an input-only tensor that Python looked at: `kind` is `item`, `tolist`, `numpy`, `tensor`,
    `size` or the op's name."""

    kind: str
    value: Any
    where: str
    node: fx.Node


@dataclass(frozen=True)
class RandomOpCall:
    """A random op: the module that runs it, the user's lines that led there, the op, its place, the shape of
    its result, whether a rank can draw it sample by sample, and the how-manieth it is of these lines.
    """

    path: str
    lines: SourceLines
    op: str
    where: str
    shape: tuple[int, ...]
    is_supported: bool
    number: int = 0

    @property
    def call_site_name(self) -> str:
        """What the random ops of these lines have in common."""
        return random_call_name(self.path, self.lines)

    @property
    def draw_name(self) -> str:
        """The name of this one."""
        return f"{self.call_site_name}#{self.number}"

    def relative_to_block(self, path: str) -> RandomOpCall:
        """The same for any block: with `.` for `path` at the head of the module's path."""
        rest = self.path.removeprefix(path)
        return (
            replace(self, path=f".{rest}") if path and rest[:1] in ("", ".") and rest != self.path else self
        )

    def placed_in_block(self, path: str, lines: SourceLines) -> RandomOpCall:
        """The same in the block at `path`, which is called at `lines`."""
        return replace(
            self,
            path=path + self.path[1:] if self.path.startswith(".") else self.path,
            lines=self.lines + lines,
        )


@dataclass(frozen=True)
class Hazard:
    """What a plan must know of forward beside its graph.

    `kind` is "batch_norm", "frequency" or "state" (`op` is the name of a parameter or buffer then) for what
    couples samples inside a block, "autocast" for a region of a device that is not here.
    """

    path: str
    kind: str
    op: str
    where: str


@dataclass
class Recording:
    """The glue of one forward; see the module's text. `inputs` maps batch keys to their placeholders.

    `ended`: it goes up to the call of a block, and has no loss. `idle`: forward calls a block whose result
    nothing needs. `matters`: the inputs whose shapes could decide something.
    """

    graph: fx.Graph
    inputs: dict[str, fx.Node]
    constants: dict[str, torch.Tensor]
    hazards: list[Hazard] = field(default_factory=list)
    draws: list[RandomOpCall] = field(default_factory=list)
    ends_early: bool = False
    has_idle_calls: bool = False
    shape_deciding_inputs: frozenset[str] = frozenset()

    @property
    def reads(self) -> list[Read]:
        """The logged reads, in order."""
        nodes = [n for n in self.graph.nodes if is_read_node(n)]
        return [Read(n.meta["read"][0], n.meta["read"][1], n.meta["where"], n) for n in nodes]

    @property
    def loss(self) -> fx.Node:
        """The node of the loss."""
        return self.graph.output_node().args[0]  # type: ignore[return-value]

    @property
    def block_calls(self) -> list[fx.Node]:
        """The calls of blocks, in order."""
        return [n for n in self.graph.nodes if n.op == "call_module"]


class RecordingEnded(BaseException):
    """The recording ends here. No Exception: the user's forward is not to catch it."""


class CallObserver:
    """Is told of the calls of modules outside of blocks, and of blocks."""

    def on_enter(self, path: str, args: Any, kwargs: Any) -> None:
        """A module is about to be called."""

    def on_exit(self, path: str, result: Any) -> None:
        """The call returned."""


def read_value(kind: str, tensor: torch.Tensor) -> Any:
    """What Python looked at, in a form that can be compared. It is the target of read nodes that are no ATen
    ops."""
    if tensor.numel() <= _MAX_COMPARED_ENTRIES:
        return tensor.tolist()
    return hashlib.sha256(repr(tensor.tolist()).encode()).hexdigest()


def iter_nodes_behind(
    nodes: Iterable[fx.Node], ends: Callable[[fx.Node], bool] = lambda _: False
) -> Iterator[fx.Node]:
    """These nodes and all that they are computed from, nearest first; what lies behind a node that `ends` is
    not looked at."""
    queue = deque(dict.fromkeys(nodes))
    seen = set(queue)
    while queue:
        node = queue.popleft()
        yield node
        if not ends(node):
            new = [n for n in node.all_input_nodes if n not in seen]
            seen.update(new)
            queue += new


def is_read_node(node: fx.Node) -> bool:
    """Whether a node stands for a look at a value."""
    return "read" in node.meta
