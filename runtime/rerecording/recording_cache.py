"""Caches recordings of micro-batches by the inputs that decided them.

A recording depends on the shapes of the inputs that glue or Python touched. It also depends on the values of
inputs that decided something: a value that Python read, the shape of an op's result, what a block does, or a
value that is stored in a program. Which inputs these are is learned from recordings, separately for each
kind, and only grows. An input that was only passed to blocks, with results that nothing reads, decides
nothing.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from secc.runtime.host.tensor_bytes import view_bytes
from secc.runtime.recorder import nested_values
from secc.runtime.recorder.recording import Recording, is_read_node
from secc.runtime.recorder.shape_dependencies import inputs_behind

MAX_CACHED_RECORDINGS = 1024  # of one kind
MAX_CACHED_BYTES = 256 << 20  # of the tensors in the programs of one kind
_DYNAMIC_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
CachedT = TypeVar("CachedT")


@dataclass(frozen=True)
class RecordingDependencies:
    """The inputs that decided a recording by their shapes, and the subset that did by their values."""

    shape_inputs: frozenset[str] = frozenset()
    value_inputs: frozenset[str] = frozenset()

    @classmethod
    def of_recording(cls, recording: Recording, travelled: frozenset[str]) -> RecordingDependencies:
        """Find the inputs that decided a recording; `travelled` are those with values that were stored in
        programs."""
        values = travelled | _inputs_deciding_by_value(recording)
        return cls(recording.shape_deciding_inputs | values, values)

    def __or__(self, other: RecordingDependencies) -> RecordingDependencies:
        return RecordingDependencies(
            self.shape_inputs | other.shape_inputs, self.value_inputs | other.value_inputs
        )


@dataclass
class _KindCache(Generic[CachedT]):
    """The recordings of one kind by cache key, with their bytes, least recently used first."""

    dependencies: RecordingDependencies = field(default_factory=RecordingDependencies)
    entries: OrderedDict[bytes, tuple[CachedT, int]] = field(default_factory=OrderedDict)


class RecordingCache(Generic[CachedT]):
    """The recordings that were used last."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _KindCache[CachedT]] = {}

    def get(self, kind: Hashable, batch: Mapping[str, Any]) -> CachedT | None:
        """Return the recording of this kind for a batch, None if there is none."""
        bucket = self._kinds.get(kind)
        if bucket is None or (key := _cache_key(batch, bucket.dependencies)) not in bucket.entries:
            return None
        bucket.entries.move_to_end(key)
        return bucket.entries[key][0]

    def put(
        self,
        kind: Hashable,
        batch: Mapping[str, Any],
        recording: CachedT,
        decides: RecordingDependencies,
        nbytes: int,
    ) -> None:
        """Store a batch's recording, which `decides` says depends on these inputs and which holds `nbytes`
        bytes."""
        bucket = self._kinds.setdefault(kind, _KindCache[CachedT]())
        # The keys so far left out an input that turns out to decide: they could match wrong batches.
        if bucket.dependencies | decides != bucket.dependencies:
            bucket.dependencies |= decides
            bucket.entries.clear()
        bucket.entries[_cache_key(batch, bucket.dependencies)] = recording, nbytes
        while len(bucket.entries) > MAX_CACHED_RECORDINGS or (
            len(bucket.entries) > 1 and sum(n for _, n in bucket.entries.values()) > MAX_CACHED_BYTES
        ):
            bucket.entries.popitem(last=False)


def _cache_key(batch: Mapping[str, Any], decides: RecordingDependencies) -> bytes:
    """Hash the parts of a batch that may decide: all values that are not tensors, and dtypes, shapes and
    values of tensors where they count."""
    digest = hashlib.sha256()
    for key, value in sorted(batch.items()):
        digest.update(f"{key} {_describe_value(value, key in decides.shape_inputs)!r};".encode())
        for _, tensor in nested_values.iter_tensors(value) if key in decides.value_inputs else ():
            digest.update(view_bytes(tensor.cpu()).numpy().data)
    return digest.digest()


def _describe_value(value: Any, sizes: bool) -> Any:
    """Describe a value without the numbers in its tensors. For a value that is itself a tensor, `sizes`
    says whether its shape counts."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape) if sizes else value.ndim} {value.requires_grad}"
    # Python may look into a container without an op, so the shapes of tensors inside always count.
    return nested_values.map_leaves(value, lambda _, leaf: _describe_leaf(leaf))


def _describe_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _describe_value(leaf, True)
    try:
        return nested_values.to_literal(leaf)
    except nested_values.NotLiteral:
        return pickle.dumps(leaf)


def _inputs_deciding_by_value(recording: Recording) -> frozenset[str]:
    """Return the inputs with values that were read by Python, or decided the shape of an op's result or
    what a block does."""

    def is_deciding_node(node: Any) -> bool:
        dynamic = any(tag in _DYNAMIC_TAGS for tag in getattr(node.target, "tags", ()))
        return is_read_node(node) or dynamic or bool(node.meta.get("reads"))

    return inputs_behind(filter(is_deciding_node, recording.graph.nodes))
