"""What a recording is: the glue of one forward as a graph, and what was noticed on the way.

A recording's graph is a `torch.fx.Graph` of
- placeholders, named by batch key, and `get_attr` nodes for parameters, buffers and recorded constants;
- `call_module` nodes for blocks, with `take_at_path` nodes for the tensors that the glue uses of their
  results;
- `call_function` nodes for ATen ops that mutate nothing;
- reads: nodes with `meta["read"]` that stand where Python read a value of a tensor.

Every node's meta has `where` ("file:line"), `module` (path of the module outside of blocks that ran), `grad`
(grad mode), `autocast` ("" or "cpu bfloat16"), and for tensors `shape`, `dtype` and `requires_grad`. Random
ops also have `draw`, their name, and `draw_number`, the seed that they were drawn from. Calls of blocks have
`site`, the lines that lead to them, `mixed_dims` (`RecordedModules.mixed_dims`), and `reads` if the block
reads values of its arguments. Scalars that forward returns with the loss have `log`, and what a block writes
to has `written`.
"""

from __future__ import annotations

import hashlib
import operator
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from secc.runtime.errors import UserError
from secc.runtime.model.source_lines import SourceLines, random_call_name

# Ops that take rows of their first argument: the other arguments decide how many.
_PICKING_OPS = (torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default)
_GRADIENT_ERRORS = ("differentiated Tensor", "does not require grad")  # of torch.autograd
_MAX_COMPARED_ENTRIES = 1024  # larger values that Python reads are compared by their hash


def is_gradient_error(error: Exception) -> bool:
    """Whether code failed because it takes a gradient of what has no graph."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _GRADIENT_ERRORS)


class BlockError(UserError):
    """Something that cannot be recorded with these blocks.

    path: the block, or the module outside of blocks, in which it happened. coarser: a module that would hide
    it if it were a block; None if only the whole model would. parts: modules inside the block that would show
    it if they were blocks in its place. functions: functions of the user's code that would hide it, outermost
    first (`secc.runtime.model.function_blocks`). is_wish: the block is better opened, but is raised for once
    only: it can stay a block if its parts cannot be blocks. reads_scalar: Python reads one number that a
    block computes, which may be one of the whole batch.
    """

    def __init__(
        self,
        path: str,
        coarser: str | None,
        message: str,
        where: str = "",
        remedy: str = "",
        parts: Collection[str] = (),
        functions: Collection[str] = (),
        is_wish: bool = False,
    ) -> None:
        super().__init__(message, where, remedy)
        self.path, self.coarser, self.parts = path, coarser, tuple(parts)
        self.functions, self.is_wish = tuple(functions), is_wish
        self.reads_scalar = False

    def suggest_blocks(self, blocks: Collection[str]) -> list[str] | None:
        """Return other blocks that may let a recording succeed: finer ones if these show more, else a coarser
        one; None if there are none."""
        if self.parts or self.is_wish:
            opened = {self.path} if self.is_wish else {b for b in blocks if self._has_parts_of(b)}
            return sorted(set(blocks) - opened | set(self.parts))
        if self.coarser is None or self.coarser in blocks:
            return None
        return sorted({b for b in blocks if not b.startswith(f"{self.coarser}.")} | {self.coarser})

    def _has_parts_of(self, block: str) -> bool:
        return any(p.startswith(f"{block}.") for p in self.parts)


class NeedsValues(BlockError):
    """A block reads values that are not known while a plan is made."""


@dataclass(frozen=True)
class Read:
    """A value that Python read from a tensor that depends on inputs alone. `kind` is `item`, `tolist`,
    `numpy`, `tensor`, `size` or the op's name."""

    kind: str
    value: Any
    where: str
    node: fx.Node


@dataclass(frozen=True)
class RandomOpCall:
    """A call of a random op.

    path: module that runs it. lines: the user's source lines that led there, innermost first. where: source
    line. is_supported: whether a rank can draw it sample by sample. number: index among the calls with the
    same path and lines. runs: for each of the lines, which run of its function this is; the lines of two runs
    of one function are equal.
    """

    path: str
    lines: SourceLines
    op: str
    where: str
    shape: tuple[int, ...]
    is_supported: bool
    number: int = 0
    runs: tuple[Hashable, ...] = ()

    @property
    def call_site_name(self) -> str:
        """Name that the random ops of these lines share."""
        return random_call_name(self.path, self.lines)

    @property
    def draw_name(self) -> str:
        """Name of this call."""
        return f"{self.call_site_name}#{self.number}"

    def relative_to_block(self, path: str) -> RandomOpCall:
        """Return the same with `.` in place of the block's path, so that it fits any equal block."""
        rest = self.path.removeprefix(path)
        return (
            replace(self, path=f".{rest}") if path and rest[:1] in ("", ".") and rest != self.path else self
        )

    def placed_in_block(
        self, path: str, lines: SourceLines, runs: Sequence[Hashable], call: int
    ) -> RandomOpCall:
        """Return the same in the block at `path`, which is called at `lines` in these runs of functions.
        call: a number of this call of the block."""
        return replace(
            self,
            path=path + self.path[1:] if self.path.startswith(".") else self.path,
            lines=self.lines + lines,
            runs=(*((run, call) for run in self.runs), *runs),
        )


@dataclass(frozen=True)
class Hazard:
    """Something a plan must know about forward that its graph does not show.

    kind: "batch_norm" (in a module of torch's), "batch_statistics" (a batch norm in other code), "frequency"
    "mixed_rows" (rows that numbers show to depend on other samples) or "state" (`op` is then the name of a
    parameter or buffer) for what couples samples inside a block;
    "placed_rows" for rows that a block puts in the places of a mask; "autocast" for a region of a device that
    this machine does not have.
    """

    path: str
    kind: str
    op: str
    where: str


@dataclass
class Recording:
    """The glue of one forward; see the module's docstring.

    inputs: placeholders by batch key. ends_early: it ends with the call of a block and has no loss.
    has_idle_calls: forward calls a block with an unused result. shape_deciding_inputs: inputs with shapes
    that may have decided something. folded_loops: lines ("file:line") that cut tensors into parts, in loops
    that are one pass in the graph.
    """

    graph: fx.Graph
    inputs: dict[str, fx.Node]
    constants: dict[str, torch.Tensor]
    hazards: list[Hazard] = field(default_factory=list)
    draws: list[RandomOpCall] = field(default_factory=list)
    ends_early: bool = False
    has_idle_calls: bool = False
    shape_deciding_inputs: frozenset[str] = frozenset()
    folded_loops: frozenset[str] = frozenset()

    @property
    def reads(self) -> list[Read]:
        """The reads of values, in order."""
        nodes = [n for n in self.graph.nodes if is_read_node(n)]
        return [Read(n.meta["read"][0], n.meta["read"][1], n.meta["where"], n) for n in nodes]

    def copy(self) -> Recording:
        """Return the recording with a graph of its own."""
        graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
        graph.output(graph.graph_copy(self.graph, nodes))  # type: ignore[arg-type]
        graph.output_node().meta = dict(self.graph.output_node().meta)
        for old, new in nodes.items():
            new.meta = dict(old.meta)
        return replace(
            self,
            graph=graph,
            inputs={str(n.target): n for n in graph.nodes if n.op == "placeholder"},
            constants=dict(self.constants),
            hazards=list(self.hazards),
            draws=list(self.draws),
        )

    @property
    def loss(self) -> fx.Node:
        """The node of the loss."""
        return self.graph.output_node().args[0]  # type: ignore[return-value]

    @property
    def block_calls(self) -> list[fx.Node]:
        """The calls of blocks, in order."""
        return [n for n in self.graph.nodes if n.op == "call_module"]


class RecordingEnded(BaseException):
    """Ends a recording early. No Exception, so that the user's forward does not catch it."""


class CallObserver:
    """Observes the calls of blocks and of modules outside of blocks."""

    def on_enter(self, path: str, args: Any, kwargs: Any) -> None:
        """A module is about to be called."""

    def on_exit(self, path: str, result: Any) -> None:
        """The call returned."""


def read_value(kind: str, tensor: torch.Tensor) -> Any:
    """Return the values that Python read in a form that can be compared: nested lists in the tensor's shape,
    or a hash of many. It is the target of read nodes that are no ATen ops."""
    if tensor.numel() <= _MAX_COMPARED_ENTRIES:
        return tensor.tolist()
    return hashlib.sha256(repr(tensor.tolist()).encode()).hexdigest()


def iter_nodes_behind(
    nodes: Iterable[fx.Node], ends: Callable[[fx.Node], bool] = lambda _: False
) -> Iterator[fx.Node]:
    """Iterate over these nodes and all that they are computed from, nearest first. Nodes behind one that
    `ends` are not visited."""
    queue = deque(dict.fromkeys(nodes))
    seen = set(queue)
    while queue:
        node = queue.popleft()
        yield node
        if not ends(node):
            new = [n for n in node.all_input_nodes if n not in seen]
            seen.update(new)
            queue += new


def writes_argument(node: fx.Node) -> bool:
    """Whether a node is an op that writes into an argument."""
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
    )


def is_view(node: fx.Node) -> bool:
    """Whether a node's value shares memory with an argument, or is an item of one."""
    return node.target is operator.getitem or (
        isinstance(node.target, torch._ops.OpOverload)
        and any(r.alias_info is not None for r in node.target._schema.returns)
    )


def mark_written(node: fx.Node) -> None:
    """Mark a node with a tensor that a block writes to, and those with the same memory."""
    while not node.meta.get("written"):
        node.meta["written"] = True
        source = node.args[0] if node.args and is_view(node) else None
        if not isinstance(source, fx.Node):
            return
        node = source


def picks_drawn_rows(node: fx.Node) -> bool:
    """Whether random numbers decide how many rows an op's result has, which differ on a rank."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.dynamic_output_shape not in target.tags:
        return False
    picked: Any = node.args[1:] if target in _PICKING_OPS else node.args
    nodes = [a for a in pytree.tree_leaves(picked) if isinstance(a, fx.Node)]
    return any("draw" in n.meta for n in iter_nodes_behind(nodes, lambda n: n.op == "call_module"))


def has_drawn_rows(graph: fx.Graph) -> bool:
    """Whether an op of a graph picks rows by random numbers."""
    return any("draw" in n.meta for n in graph.nodes) and any(map(picks_drawn_rows, graph.nodes))


def is_read_node(node: fx.Node) -> bool:
    """Whether a node stands for a read of values."""
    return "read" in node.meta
