"""Makes a recorded graph functional: no op writes into its arguments.

Glue that writes into tensors (`x[mask] = y`, `h += p`) is right as a whole, but a section gets a slice of it,
which loses the writes of the rest. PyTorch's functionalisation replays the graph onto a second tape: writes
become `index_put`, `select_scatter`, `add`, and views are taken again from the written tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg

from secc.runtime.randomness.random_op_values import is_random
from secc.runtime.recorder.block_results import new_fake_tensor
from secc.runtime.recorder.drawn_values import drawn_with_seed
from secc.runtime.recorder.glue_ops import FailCallback, GlueRecorder, OpExecutor
from secc.runtime.recorder.graph_tape import MOMENT_KEYS, NodeMeta, Tape
from secc.runtime.recorder.interception import OpInterceptor
from secc.runtime.recorder.nested_values import take_at_path
from secc.runtime.recorder.recording import is_read_node, read_value, writes_argument
from secc.runtime.sections.autograd_functions import UserFunctionCall

_torch: Any = torch  # the functions for functionalisation are private


def has_mutations(graph: fx.Graph) -> bool:
    """Whether an op of the graph writes into an argument."""
    return any(map(writes_argument, graph.nodes))


def functionalise_tape(
    tape: Tape,
    values: Callable[[fx.Node], torch.Tensor],
    mode: FakeTensorMode,
    fail: FailCallback,
    follows_draws: bool = False,
) -> Tape:
    """Return a tape with the same glue and no writes. `values` gives the tensor of a placeholder or
    `get_attr` node as it was before the recording, in the shape that the node has on the tape. With
    `follows_draws`, masks that forward draws may select rows."""
    return _Functionaliser(tape, values, mode, fail, follows_draws).run()


def _op_without_write(node: fx.Node) -> Any:
    """Return the out-of-place form of a write under no_grad, None for any other node.

    Such a write into a tensor that carries a gradient changes values and leaves the gradient's path as it was
    (`F.cosine_similarity` clamps its norms like that). A new tensor made under no_grad would cut the path.
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


class _Functionaliser:
    """Interprets the graph on functional wrappers; the ops below them go to the new tape."""

    paused = False

    def __init__(
        self,
        old: Tape,
        values: Callable[[fx.Node], torch.Tensor],
        mode: FakeTensorMode,
        fail: FailCallback,
        follows_draws: bool,
    ) -> None:
        self._graph, self._values, self._mode = old.graph, values, mode
        self._meta: NodeMeta = {}
        self._detaching = False
        self._values_by_node: dict[fx.Node, Any] = {}
        self._gradient_carriers: set[Any] = set()  # nodes that have a value with a gradient
        self.tape = old.make_successor(lambda: dict(self._meta))
        self._executor = OpExecutor(mode, fail, follows_draws)
        self._glue = GlueRecorder(self.tape, self._executor, fail, sizes=False)

    def on_glue_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record an op that functionalisation asks for. Its own bookkeeping makes shallow copies, which
        appear as `detach`."""
        if func is torch.ops.aten.detach.default and not self._detaching:
            out = func(*args)
            self.tape.bind_tensor(out, self.tape.node_of(args[0]))
            self._executor.adopt_draw(out, args[0])
            return out
        if not is_random(func, args, kwargs) or "draw_number" not in self._meta:
            return self._glue.run_op(func, args, kwargs)
        with drawn_with_seed(self._meta["draw_number"]):
            out = self._glue.run_op(func, args, kwargs)
        self._executor.mark_drawn(out if isinstance(out, torch.Tensor) else out[0])
        return out

    def on_block_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that makes the tensor of a placeholder or parameter."""
        return func(*args, **kwargs)

    def run(self) -> Tape:
        _torch._enable_functionalization(reapply_views=True)
        try:
            with torch.no_grad(), OpInterceptor(self):  # type: ignore[arg-type]
                for node in self._graph.nodes:
                    self._meta = {
                        k: node.meta.get(k)
                        for k in (*MOMENT_KEYS, "draw", "draw_number", "reads", "written", "settings", "site")
                        if k in MOMENT_KEYS or k in node.meta
                    }
                    self._values_by_node[node] = self._replay_node(node)
                    if self._carries_gradient(node):
                        self._gradient_carriers.add(node)
        finally:
            _torch._disable_functionalization()
        return self.tape

    @contextmanager
    def _unwrapped(self) -> Iterator[None]:
        """New tensors made inside are neither wrapped nor recorded."""
        self.paused = True
        _torch._disable_functionalization()
        try:
            yield
        finally:
            _torch._enable_functionalization(reapply_views=True)
            self.paused = False

    def _replay_node(self, node: fx.Node) -> Any:
        if node.op in ("placeholder", "get_attr"):
            return self._replay_head(node)
        if node.op == "output":
            for returned in [n for n in self._graph.nodes if "log" in n.meta]:
                self._new_node(returned).meta["log"] = returned.meta["log"]
            return self.tape.graph.output(self._map_nodes(node.args[0]))
        args, kwargs = self._map_nodes(node.args), self._map_nodes(node.kwargs)
        if node.op == "call_module":
            return self.tape.emit_call(str(node.target), args, kwargs)
        if node.target is take_at_path:
            return self._replay_take(node)
        if isinstance(node.target, UserFunctionCall):
            return self._replay_apply(node, args)
        if is_read_node(node):
            first = 1 if node.target is read_value else 0
            kind, value = node.meta["read"]
            return self.tape.emit_read(kind, value, list(args[first:]), node.target, kwargs)
        self._map_nodes((node.args, node.kwargs))  # brings the arguments up to date
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: self._values_by_node[n])
        if (
            node.args
            and node.args[0] in self._gradient_carriers
            and (aside := _op_without_write(node)) is not None
        ):
            return self._write_without_gradient(aside, args, kwargs)
        self._detaching = node.target is torch.ops.aten.detach.default
        target: Any = node.target
        out = target(*args, **kwargs)
        self._detaching = False
        return out

    def _carries_gradient(self, node: fx.Node) -> bool:
        if node.op == "get_attr" or node.target is take_at_path:
            return bool(node.meta.get("requires_grad"))
        if node.op != "call_function" or node.target is torch.ops.aten.detach.default:
            return False
        if not node.meta.get("grad", True):
            return _op_without_write(node) is not None and node.args[0] in self._gradient_carriers
        return any(n in self._gradient_carriers for n in node.all_input_nodes)

    def _write_without_gradient(self, op: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Write `op(x)` into x as x + (op(x) - x), with a difference that carries no gradient, so that x
        keeps its own."""
        change = torch.ops.aten.sub.Tensor(op(*args, **kwargs), args[0])
        self._meta["grad"] = True
        return torch.ops.aten.add_.Tensor(args[0], change)

    def _replay_head(self, node: fx.Node) -> torch.Tensor:
        with self._unwrapped():
            tensor = self._values(node)
        if node.op == "placeholder" or str(node.target).startswith("_constant"):
            self.tape.bind_tensor(tensor, self.tape.head_node(node.op, str(node.target), tensor))
        return _torch._to_functional_tensor(tensor)

    def _replay_take(self, node: fx.Node) -> torch.Tensor:
        call: Any = node.args[0]
        with self._unwrapped():
            tensor = new_fake_tensor(self._mode, node.meta["shape"], node.meta["stride"], node.meta["dtype"])
        taken = self.tape.emit_take(
            self._values_by_node[call], str(node.args[1]), tensor, node.meta["requires_grad"]
        )
        taken.meta |= {key: node.meta[key] for key in ("alone", "guessed")}
        return _torch._to_functional_tensor(tensor)

    def _replay_apply(self, node: fx.Node, args: Any) -> Any:
        """Replay the user's own autograd function as one call."""
        result_metas = node.meta.get("results") or [node.meta]
        with self._unwrapped():
            results = [new_fake_tensor(self._mode, r["shape"], r["stride"], r["dtype"]) for r in result_metas]
        self.tape.emit_function(node.target, args, results, [r["carries"] for r in result_metas])  # type: ignore[arg-type]
        wrapped = tuple(_torch._to_functional_tensor(r) for r in results)
        return wrapped if "results" in node.meta else wrapped[0]

    def _map_nodes(self, value: Any) -> Any:
        """Map nodes of the old graph to nodes of the new one."""
        return map_arg(value, self._new_node)

    def _new_node(self, node: fx.Node) -> fx.Node:
        value = self._values_by_node[node]
        if not isinstance(value, torch.Tensor):
            return value
        _torch._sync(value)
        return self.tape.node_of(_torch._from_functional_tensor(value))
