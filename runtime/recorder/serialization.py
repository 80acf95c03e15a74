"""Serialises recordings for other processes, node by node: the nodes of a graph are a linked list, which
is too deep for pickle. Ops are stored by name."""

from __future__ import annotations

import io
import pickle
from dataclasses import fields
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from secc.runtime.recorder.recording import Recording


def dump_recording(recording: Recording) -> bytes:
    """Serialise a recording. Raises pickle's errors for contents that cannot be pickled."""
    buffer = io.BytesIO()
    nodes = list(recording.graph.nodes)
    pickler = _Pickler(buffer, {node: i for i, node in enumerate(nodes)})
    pickler.dump(len(nodes))
    for node in nodes:
        pickler.dump((node.op, node.target, node.args, node.kwargs, node.name, node.meta))
    pickler.dump({f.name: getattr(recording, f.name) for f in fields(recording) if f.name != "graph"})
    return buffer.getvalue()


def load_recording(data: bytes) -> Recording:
    """Restore the recording that `dump_recording` was given."""
    graph, nodes = fx.Graph(), list[fx.Node]()
    unpickler = _Unpickler(io.BytesIO(data), nodes)
    for _ in range(unpickler.load()):
        op, target, args, kwargs, name, meta = unpickler.load()
        nodes.append(graph.create_node(op, target, args, kwargs, name))
        nodes[-1].meta = meta
    return Recording(graph, **unpickler.load())


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, index: dict[fx.Node, int]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._index = index

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, fx.Node):
            return self._index[obj]
        return (obj.namespace, obj._opname, obj._overloadname) if isinstance(obj, OpOverload) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, nodes: list[fx.Node]) -> None:
        super().__init__(file)
        self._nodes = nodes

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, int):
            return self._nodes[pid]
        namespace, op, overload = pid
        return getattr(getattr(getattr(torch.ops, namespace), op), overload)
