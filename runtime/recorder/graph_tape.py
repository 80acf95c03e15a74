"""The graph while it is recorded: which node stands for which tensor, and what each node's meta says.

Tensors are identified by id. They are kept alive as long as the tape, since Python reuses the ids of dead
objects.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from secc.runtime.model.source_lines import current_source_line
from secc.runtime.recorder.block_results import autocast_state, is_fake
from secc.runtime.recorder.nested_values import take_at_path
from secc.runtime.recorder.recording import read_value

NodeMeta = dict[str, Any]


MOMENT_KEYS = ("where", "module", "grad", "autocast")


def describe_moment(module: str) -> NodeMeta:
    """Return the meta of a node recorded now, while the module at path `module` runs."""
    return dict(
        zip(
            MOMENT_KEYS,
            (current_source_line(), module, torch.is_grad_enabled(), autocast_state()),
            strict=True,
        )
    )


class Tape:
    """Nodes of a graph by the tensors that they stand for.

    `state` maps ids of the model's parameters and buffers to their names. `now` gives the meta of the next
    node. `stray(tensor)` is called for a tensor without values that no node stands for, and raises.
    """

    def __init__(
        self,
        state: Mapping[int, str],
        now: Callable[[], NodeMeta],
        constants: dict[str, torch.Tensor],
        stray: Callable[[torch.Tensor], NoReturn],
    ) -> None:
        self.graph = fx.Graph()
        self.make_meta, self.constants = now, constants
        self._state, self._stray = state, stray
        self._nodes_by_tensor: dict[int, fx.Node] = {}
        self._kept_tensors: list[torch.Tensor] = []
        self._heads: dict[tuple[str, str], fx.Node] = {}  # by op: an input and a parameter may share a name

    def make_successor(self, now: Callable[[], NodeMeta]) -> Tape:
        """Return an empty tape for the same model that shares the constants."""
        return Tape(self._state, now, self.constants, self._stray)

    def bind_tensor(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Let `node` stand for `tensor`, the object whatever its shape, from now on."""
        self._nodes_by_tensor[id(tensor)] = node
        self._kept_tensors.append(tensor)

    def find_node(self, tensor: torch.Tensor) -> fx.Node | None:
        """Return the node of a tensor (any shape), None if it has none yet."""
        return self._nodes_by_tensor.get(id(tensor))

    def state_name(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the parameter or buffer (any shape) that a tensor is, None if it is none."""
        return self._state.get(id(tensor))

    def is_computed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor (any shape) is an input or was computed, and is no parameter, buffer or
        constant."""
        node = self._nodes_by_tensor.get(id(tensor))
        return node is not None and node.op != "get_attr"

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Return the node of a tensor of any shape. A tensor that is unknown so far becomes a parameter's
        node or a new constant with its present values."""
        node = self._nodes_by_tensor.get(id(tensor))
        if node is not None:
            return node
        name = self._state.get(id(tensor))
        if name is None:
            if is_fake(tensor):
                self._stray(tensor)
            name = f"_constant{len(self.constants)}"
            self.constants[name] = tensor.detach().clone()
        node = self.head_node("get_attr", name, tensor)
        self.bind_tensor(tensor, node)
        return node

    def head_node(self, op: str, name: str, tensor: torch.Tensor) -> fx.Node:
        """Return the placeholder or `get_attr` node of a name, with the shape and dtype of `tensor`.
        Placeholders come first, as fx requires."""
        if (op, name) in self._heads:
            return self._heads[op, name]
        node = self.graph.create_node(op, name) if op == "get_attr" else self.graph.placeholder(name)
        node.meta = dict(zip(MOMENT_KEYS, ("", "", True, ""), strict=True)) | tensor_meta(tensor)
        node.meta["requires_grad"] = op == "get_attr" and tensor.requires_grad
        self._heads[op, name] = node
        return node

    def map_to_nodes(self, value: Any) -> Any:
        """Replace tensors in arguments by their nodes."""
        return fx.node.map_aggregate(value, lambda a: self.node_of(a) if isinstance(a, torch.Tensor) else a)  # type: ignore[arg-type]

    def emit_op(self, func: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> fx.Node:
        """Add a node for `func(*args, **kwargs)` (arguments as nodes) with the result `out`: a tensor, or
        a list or tuple of them."""
        node = self.graph.call_function(func, args, kwargs)
        node.meta = self.make_meta()
        if isinstance(out, torch.Tensor):
            self.describe_node(node, out)
            return node
        node.meta["results"] = (
            [tensor_meta(o) for o in out if isinstance(o, torch.Tensor)]
            if isinstance(out, (list, tuple))
            else []
        )
        for i, o in enumerate(out if isinstance(out, (list, tuple)) else ()):
            if isinstance(o, torch.Tensor):
                item = self.graph.call_function(operator.getitem, (node, i))
                item.meta = dict(node.meta)
                self.describe_node(item, o)
        return node

    def describe_node(self, node: fx.Node, tensor: torch.Tensor) -> None:
        """Store the tensor's shape and dtype in the node's meta, and let the node stand for it."""
        node.meta |= tensor_meta(tensor)
        self.bind_tensor(tensor, node)

    def emit_function(
        self, func: Callable[..., Any], args: Any, results: Sequence[torch.Tensor], grads: Sequence[bool]
    ) -> None:
        """Add a node for an autograd function with these results, of any shapes; `grads` says for each
        whether it carries a gradient."""
        node = self.emit_op(func, args, {}, results[0] if len(results) == 1 else tuple(results))
        for i, (tensor, grad) in enumerate(zip(results, grads, strict=True)):
            self.node_of(tensor).meta |= {"carries": grad, "stride": tensor.stride()}
            if "results" in node.meta:
                node.meta["results"][i] |= {"carries": grad, "stride": tensor.stride()}

    def emit_read(
        self, kind: str, value: Any, tensors: list[fx.Node], target: Any = read_value, kwargs: Any = None
    ) -> None:
        """Add a node which says that Python read `value` from these tensors."""
        args: Any = (kind, *tensors) if target is read_value else tuple(tensors)
        node = self.graph.call_function(target, args, kwargs or {})
        node.meta = self.make_meta() | {"read": (kind, value)}

    def emit_call(self, path: str, args: Any, kwargs: Any) -> fx.Node:
        """Add a node for the call of a block. Arguments hold nodes and literals."""
        node = self.graph.call_module(path, args, kwargs)
        node.meta = self.make_meta()
        return node

    def emit_take(self, call: fx.Node, path: str, tensor: torch.Tensor, requires_grad: bool) -> fx.Node:
        """Add a node, with the shape and strides of `tensor`, for the tensor at an access path of a block's
        result."""
        node = self.graph.call_function(take_at_path, (call, path))
        node.meta = {k: call.meta[k] for k in MOMENT_KEYS}
        node.meta |= {"requires_grad": requires_grad, "stride": tensor.stride()}
        self.describe_node(node, tensor)
        return node


def tensor_meta(tensor: torch.Tensor) -> NodeMeta:
    """Return shape and dtype for a node's meta."""
    return {"shape": tuple(tensor.shape), "dtype": tensor.dtype}
