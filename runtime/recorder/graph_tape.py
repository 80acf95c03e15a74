"""The graph while it is written: which node stands for which tensor, and what each node's meta says.

Tensors are known by identity. They are kept alive as long as the tape is, since Python uses ids of dead
objects again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from secc.runtime.model.source_lines import place
from secc.runtime.recorder.block_results import autocast, is_fake
from secc.runtime.recorder.nested_values import take
from secc.runtime.recorder.recording import read_value

Meta = dict[str, Any]


MOMENT = ("where", "module", "grad", "autocast")


def here(module: str) -> Meta:
    """What the meta of a node says about the moment it is recorded, while `module` (a path) runs."""
    return dict(zip(MOMENT, (place(), module, torch.is_grad_enabled(), autocast()), strict=True))


class Tape:
    """Nodes of a graph by the tensors they stand for.

    `state` maps ids of the model's parameters and buffers to their names. `now` gives the meta of the next
    node. `stray(tensor)` is called for a tensor without values that no node stands for, and raises.
    """

    def __init__(
        self,
        state: Mapping[int, str],
        now: Callable[[], Meta],
        constants: dict[str, torch.Tensor],
        stray: Callable[[torch.Tensor], NoReturn],
    ) -> None:
        self.graph = fx.Graph()
        self.now, self.constants = now, constants
        self._state, self._stray = state, stray
        self._node: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []
        self._heads: dict[str, fx.Node] = {}

    def successor(self, now: Callable[[], Meta]) -> Tape:
        """An empty tape for the same model that shares the constants."""
        return Tape(self._state, now, self.constants, self._stray)

    def bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """From now on `node` stands for `tensor`."""
        self._node[id(tensor)] = node
        self._alive.append(tensor)

    def known(self, tensor: torch.Tensor) -> fx.Node | None:
        """The node that stands for a tensor, None if there is none yet."""
        return self._node.get(id(tensor))

    def state_name(self, tensor: torch.Tensor) -> str | None:
        """The name of the parameter or buffer that a tensor is, None if it is none."""
        return self._state.get(id(tensor))

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an input or was computed, and no parameter, buffer or constant."""
        node = self._node.get(id(tensor))
        return node is not None and node.op != "get_attr"

    def node(self, tensor: torch.Tensor) -> fx.Node:
        """The node of a tensor: recorded, a parameter or buffer, or else a new constant with its present
        values."""
        found = self._node.get(id(tensor))
        if found is not None:
            return found
        name = self._state.get(id(tensor))
        if name is None:
            if is_fake(tensor):
                self._stray(tensor)
            name = f"_constant{len(self.constants)}"
            self.constants[name] = tensor.detach().clone()
        node = self.head("get_attr", name, tensor)
        self.bind(tensor, node)
        return node

    def head(self, op: str, name: str, tensor: torch.Tensor) -> fx.Node:
        """A placeholder or `get_attr` node. Placeholders come first, as fx wants them."""
        if name in self._heads:
            return self._heads[name]
        node = self.graph.create_node(op, name) if op == "get_attr" else self.graph.placeholder(name)
        node.meta = dict(zip(MOMENT, ("", "", True, ""), strict=True)) | described(tensor)
        node.meta["requires_grad"] = op == "get_attr" and tensor.requires_grad
        self._heads[name] = node
        return node

    def nodes(self, value: Any) -> Any:
        """Arguments with tensors exchanged by their nodes."""
        return fx.node.map_aggregate(value, lambda a: self.node(a) if isinstance(a, torch.Tensor) else a)  # type: ignore[arg-type]

    def emit(self, func: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> fx.Node:
        """A node for `func(*args, **kwargs)` (given as nodes) whose result is `out`: tensors, or a list or
        tuple of them."""
        node = self.graph.call_function(func, args, kwargs)
        node.meta = self.now()
        if isinstance(out, torch.Tensor):
            self.describe(node, out)
            return node
        node.meta["results"] = (
            [described(o) for o in out if isinstance(o, torch.Tensor)]
            if isinstance(out, (list, tuple))
            else []
        )
        for i, o in enumerate(out if isinstance(out, (list, tuple)) else ()):
            if isinstance(o, torch.Tensor):
                item = self.graph.call_function(operator.getitem, (node, i))
                item.meta = dict(node.meta)
                self.describe(item, o)
        return node

    def describe(self, node: fx.Node, tensor: torch.Tensor) -> None:
        """Put shape and dtype of `tensor` into the node's meta; the node stands for it from now on."""
        node.meta |= described(tensor)
        self.bind(tensor, node)

    def apply(
        self, func: Callable[..., Any], args: Any, results: Sequence[torch.Tensor], grads: Sequence[bool]
    ) -> None:
        """A node for an autograd function whose results are these tensors; `grads` says which of them carry a
        gradient."""
        node = self.emit(func, args, {}, results[0] if len(results) == 1 else tuple(results))
        for i, (tensor, grad) in enumerate(zip(results, grads, strict=True)):
            self.node(tensor).meta |= {"carries": grad, "stride": tensor.stride()}
            if "results" in node.meta:
                node.meta["results"][i] |= {"carries": grad, "stride": tensor.stride()}

    def read(
        self, kind: str, value: Any, tensors: list[fx.Node], target: Any = read_value, kwargs: Any = None
    ) -> None:
        """A node that says: Python looked at these tensors and saw `value`."""
        args: Any = (kind, *tensors) if target is read_value else tuple(tensors)
        node = self.graph.call_function(target, args, kwargs or {})
        node.meta = self.now() | {"read": (kind, value)}

    def call(self, path: str, args: Any, kwargs: Any) -> fx.Node:
        """A node for the call of a block; arguments hold nodes and literals."""
        node = self.graph.call_module(path, args, kwargs)
        node.meta = self.now()
        return node

    def take(self, call: fx.Node, path: str, tensor: torch.Tensor, requires_grad: bool) -> fx.Node:
        """A node for the tensor at an access path of a block's result."""
        node = self.graph.call_function(take, (call, path))
        node.meta = {k: call.meta[k] for k in MOMENT}
        node.meta |= {"requires_grad": requires_grad, "stride": tensor.stride()}
        self.describe(node, tensor)
        return node


def described(tensor: torch.Tensor) -> Meta:
    """Shape and dtype for a node's meta."""
    return {"shape": tuple(tensor.shape), "dtype": tensor.dtype}
