"""Keeping recordings: which micro-batches are recorded alike, by what decided how they were.

A recording depends on the shapes of the inputs that glue or Python touched, and on the values of those that
something was decided by: a read, the shape of an op's result, what a block does, or a value that travels.
Which inputs these are is learnt from recordings, for each kind of recording apart, and only grows. An input
that was handed to blocks alone, of whose results nothing was seen, decides nothing.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from secc.runtime.recorder import nested_values
from secc.runtime.recorder.recording import Recording, is_read_node
from secc.runtime.recorder.shape_dependencies import inputs_behind

MAX_CACHED_RECORDINGS = 1024  # recordings
MAX_CACHED_BYTES = 256 << 20  # of the values that they hold
_DYNAMIC_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
CachedT = TypeVar("CachedT")


@dataclass(frozen=True)
class RecordingDependencies:
    """The inputs whose shapes decided something, and those whose values did, which are among them."""

    shape_inputs: frozenset[str] = frozenset()
    value_inputs: frozenset[str] = frozenset()

    @classmethod
    def of_recording(cls, recording: Recording, travelled: frozenset[str]) -> RecordingDependencies:
        """What decided a recording; `travelled` are the inputs of which values went into programs."""
        values = travelled | _inputs_deciding_by_value(recording)
        return cls(recording.shape_deciding_inputs | values, values)

    def __or__(self, other: RecordingDependencies) -> RecordingDependencies:
        return RecordingDependencies(
            self.shape_inputs | other.shape_inputs, self.value_inputs | other.value_inputs
        )


@dataclass
class _KindCache(Generic[CachedT]):
    """Recordings of one kind, by what decided them."""

    dependencies: RecordingDependencies = field(default_factory=RecordingDependencies)
    entries: OrderedDict[bytes, tuple[CachedT, int]] = field(default_factory=OrderedDict)


class RecordingCache(Generic[CachedT]):
    """The recordings that were made last."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _KindCache[CachedT]] = {}

    def get(self, kind: Hashable, batch: Mapping[str, Any]) -> CachedT | None:
        """What a batch's recording of this kind would be, None if that is not known."""
        known = self._kinds.get(kind)
        if known is None or (key := _cache_key(batch, known.dependencies)) not in known.entries:
            return None
        known.entries.move_to_end(key)
        return known.entries[key][0]

    def put(
        self,
        kind: Hashable,
        batch: Mapping[str, Any],
        found: CachedT,
        decides: RecordingDependencies,
        nbytes: int,
    ) -> None:
        """Keep a batch's recording, which these inputs decided; it holds so many bytes."""
        known = self._kinds.setdefault(kind, _KindCache[CachedT]())
        if (
            known.dependencies | decides != known.dependencies
        ):  # keys so far left out what has decided something now
            known.dependencies |= decides
            known.entries.clear()
        known.entries[_cache_key(batch, known.dependencies)] = found, nbytes
        while len(known.entries) > MAX_CACHED_RECORDINGS or (
            len(known.entries) > 1 and sum(n for _, n in known.entries.values()) > MAX_CACHED_BYTES
        ):
            known.entries.popitem(last=False)


def _cache_key(batch: Mapping[str, Any], decides: RecordingDependencies) -> bytes:
    """What of a batch decides: all that is no tensor, and of tensors their dtypes, shapes and values where
    these may count."""
    digest = hashlib.sha256()
    for key, value in sorted(batch.items()):
        digest.update(f"{key} {_describe_value(value, key in decides.shape_inputs)!r};".encode())
        for _, tensor in nested_values.iter_tensors(value) if key in decides.value_inputs else ():
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _describe_value(value: Any, sizes: bool) -> Any:
    """A value but for the numbers in its tensors, and without `sizes` but for the sizes of a tensor that is
    all there is."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape) if sizes else value.ndim} {value.requires_grad}"
    return nested_values.map_leaves(
        value, lambda _, leaf: _describe_leaf(leaf)
    )  # Python sees what a container holds


def _describe_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _describe_value(leaf, True)
    try:
        return nested_values.to_literal(leaf)
    except nested_values.NotLiteral:
        return pickle.dumps(leaf)


def _inputs_deciding_by_value(recording: Recording) -> frozenset[str]:
    """The inputs whose values decided something: a read, the shape of an op's result, or what a block
    does."""

    def decides(node: Any) -> bool:
        dynamic = any(tag in _DYNAMIC_TAGS for tag in getattr(node.target, "tags", ()))
        return is_read_node(node) or dynamic or bool(node.meta.get("reads"))

    return inputs_behind(filter(decides, recording.graph.nodes))
