"""Makes a recorded graph functional: no op of the result writes into its arguments.

Glue that writes into tensors (`x[mask] = y`, `h += p`) is right as a whole, but a section gets only a slice
of it, and a slice loses the writes of the rest. PyTorch's functionalisation replays the graph above a second
tape: writes become `index_put`, `select_scatter`, `add`, and views are taken anew from what was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg

from secc.runtime.recorder.block_results import fresh
from secc.runtime.recorder.glue_ops import Executor, Fail, Glue
from secc.runtime.recorder.graph_tape import MOMENT, Meta, Tape
from secc.runtime.recorder.interception import Ops
from secc.runtime.recorder.nested_values import take
from secc.runtime.recorder.recording import is_read, read_value
from secc.runtime.sections.autograd_functions import Applied

_torch: Any = torch  # functionalisation's functions are public in name only


def mutates(graph: fx.Graph) -> bool:
    """Whether an op of the graph writes into an argument."""
    return any(
        n.op == "call_function"
        and isinstance(n.target, torch._ops.OpOverload)
        and n.target._schema.is_mutable
        for n in graph.nodes
    )


def functionalise(
    tape: Tape, values: Callable[[fx.Node], torch.Tensor], mode: FakeTensorMode, fail: Fail
) -> Tape:
    """A tape with the same glue and no writes. `values` gives a placeholder's or `get_attr` node's tensor,
    unchanged by the first run."""
    return _Functional(tape, values, mode, fail).run()


def _written_aside(node: fx.Node) -> Any:
    """For a write under no_grad, the op without its write; None for every other node.

    Such a write into a tensor that carries a gradient changes values and leaves the gradient's way as it was
    (`F.cosine_similarity` clamps its norms like that), which a new tensor made under no_grad would cut.
    """
    target: Any = node.target
    if (
        node.meta.get("grad", True)
        or not isinstance(target, torch._ops.OpOverload)
        or not target._schema.is_mutable
    ):
        return None
    namespace, name = target._schema.name.split("::")
    written = node.args[0] if node.args else None
    if not name.endswith("_") or not isinstance(written, fx.Node):
        return None
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    return getattr(packet, target._overloadname, None)


class _Functional:
    """Interprets the graph on functional wrappers; the ops below them go to the new tape."""

    paused = False

    def __init__(
        self, old: Tape, values: Callable[[fx.Node], torch.Tensor], mode: FakeTensorMode, fail: Fail
    ) -> None:
        self._graph, self._values, self._mode = old.graph, values, mode
        self._meta: Meta = {}
        self._detaching = False
        self._env: dict[fx.Node, Any] = {}
        self._carrying: set[Any] = set()  # nodes whose value has a gradient
        self.tape = old.successor(lambda: dict(self._meta))
        self._glue = Glue(self.tape, Executor(mode, fail), fail, sizes=False)

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op that functionalisation asks for. Its own bookkeeping makes shallow copies, which show as
        `detach`."""
        if func is torch.ops.aten.detach.default and not self._detaching:
            out = func(*args)
            self.tape.bind(out, self.tape.node(args[0]))
            return out
        return self._glue.run(func, args, kwargs)

    def watch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op that makes a head's tensor."""
        return func(*args, **kwargs)

    def run(self) -> Tape:
        _torch._enable_functionalization(reapply_views=True)
        try:
            with torch.no_grad(), Ops(self):  # type: ignore[arg-type]
                for node in self._graph.nodes:
                    self._meta = {
                        k: node.meta.get(k)
                        for k in (*MOMENT, "draw", "reads", "settings", "site")
                        if k in MOMENT or k in node.meta
                    }
                    self._env[node] = self._node(node)
                    if self._carries(node):
                        self._carrying.add(node)
                for node in self._graph.nodes:
                    if "log" in node.meta:
                        self._new_node(node).meta["log"] = node.meta["log"]
        finally:
            _torch._disable_functionalization()
        return self.tape

    @contextmanager
    def _plain(self) -> Iterator[None]:
        """New tensors made inside are neither wrapped nor recorded."""
        self.paused = True
        _torch._disable_functionalization()
        try:
            yield
        finally:
            _torch._enable_functionalization(reapply_views=True)
            self.paused = False

    def _node(self, node: fx.Node) -> Any:
        if node.op in ("placeholder", "get_attr"):
            return self._head(node)
        if node.op == "output":
            return self.tape.graph.output(self._inner(node.args[0]))
        args, kwargs = self._inner(node.args), self._inner(node.kwargs)
        if node.op == "call_module":
            return self.tape.call(str(node.target), args, kwargs)
        if node.target is take:
            return self._take(node)
        if isinstance(node.target, Applied):
            return self._apply(node, args)
        if is_read(node):
            first = 1 if node.target is read_value else 0
            kind, value = node.meta["read"]
            return self.tape.read(kind, value, list(args[first:]), node.target, kwargs)
        self._inner((node.args, node.kwargs))  # brings the arguments up to date
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: self._env[n])
        if node.args and node.args[0] in self._carrying and (aside := _written_aside(node)) is not None:
            return self._write_aside(aside, args, kwargs)
        self._detaching = node.target is torch.ops.aten.detach.default
        target: Any = node.target
        out = target(*args, **kwargs)
        self._detaching = False
        return out

    def _carries(self, node: fx.Node) -> bool:
        if node.op == "get_attr" or node.target is take:
            return bool(node.meta.get("requires_grad"))
        if node.op != "call_function" or node.target is torch.ops.aten.detach.default:
            return False
        if not node.meta.get("grad", True):
            return _written_aside(node) is not None and node.args[0] in self._carrying
        return any(n in self._carrying for n in node.all_input_nodes)

    def _write_aside(self, op: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Write `op(x)` into x as x + (op(x) - x), the difference without gradient, so that x keeps its
        own."""
        change = torch.ops.aten.sub.Tensor(op(*args, **kwargs), args[0])
        self._meta["grad"] = True
        return torch.ops.aten.add_.Tensor(args[0], change)

    def _head(self, node: fx.Node) -> torch.Tensor:
        with self._plain():
            tensor = self._values(node)
        if node.op == "placeholder" or str(node.target).startswith("_constant"):
            self.tape.bind(tensor, self.tape.head(node.op, str(node.target), tensor))
        return _torch._to_functional_tensor(tensor)

    def _take(self, node: fx.Node) -> torch.Tensor:
        call: Any = node.args[0]
        with self._plain():
            tensor = fresh(self._mode, node.meta["shape"], node.meta["stride"], node.meta["dtype"])
        taken = self.tape.take(self._env[call], str(node.args[1]), tensor, node.meta["requires_grad"])
        taken.meta |= {key: node.meta[key] for key in ("alone", "guessed")}
        return _torch._to_functional_tensor(tensor)

    def _apply(self, node: fx.Node, args: Any) -> Any:
        """The user's own autograd function: a call as it is."""
        known = node.meta.get("results") or [node.meta]
        with self._plain():
            results = [fresh(self._mode, r["shape"], r["stride"], r["dtype"]) for r in known]
        self.tape.apply(node.target, args, results, [r["carries"] for r in known])  # type: ignore[arg-type]
        wrapped = tuple(_torch._to_functional_tensor(r) for r in results)
        return wrapped if "results" in node.meta else wrapped[0]

    def _inner(self, value: Any) -> Any:
        """Nodes of the old graph as nodes of the new one."""
        return map_arg(value, self._new_node)

    def _new_node(self, node: fx.Node) -> fx.Node:
        value = self._env[node]
        if not isinstance(value, torch.Tensor):
            return value
        _torch._sync(value)
        return self.tape.node(_torch._from_functional_tensor(value))
