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
from secc.runtime.recorder.recording import Recording, is_read
from secc.runtime.recorder.shape_dependencies import inputs_behind

KEPT = 1024  # recordings
KEPT_BYTES = 256 << 20  # of the values that they hold
_DYNAMIC = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
Found = TypeVar("Found")


@dataclass(frozen=True)
class Decides:
    """The inputs whose shapes decided something, and those whose values did, which are among them."""

    shapes: frozenset[str] = frozenset()
    values: frozenset[str] = frozenset()

    @classmethod
    def of(cls, recording: Recording, travelled: frozenset[str]) -> Decides:
        """What decided a recording; `travelled` are the inputs of which values went into programs."""
        values = travelled | _deciding(recording)
        return cls(recording.matters | values, values)

    def __or__(self, other: Decides) -> Decides:
        return Decides(self.shapes | other.shapes, self.values | other.values)


@dataclass
class _Kind(Generic[Found]):
    """Recordings of one kind, by what decided them."""

    decides: Decides = field(default_factory=Decides)
    found: OrderedDict[bytes, tuple[Found, int]] = field(default_factory=OrderedDict)


class Kept(Generic[Found]):
    """The recordings that were made last."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind[Found]] = {}

    def get(self, kind: Hashable, batch: Mapping[str, Any]) -> Found | None:
        """What a batch's recording of this kind would be, None if that is not known."""
        known = self._kinds.get(kind)
        if known is None or (key := _key(batch, known.decides)) not in known.found:
            return None
        known.found.move_to_end(key)
        return known.found[key][0]

    def put(
        self, kind: Hashable, batch: Mapping[str, Any], found: Found, decides: Decides, nbytes: int
    ) -> None:
        """Keep a batch's recording, which these inputs decided; it holds so many bytes."""
        known = self._kinds.setdefault(kind, _Kind[Found]())
        if known.decides | decides != known.decides:  # keys so far left out what has decided something now
            known.decides |= decides
            known.found.clear()
        known.found[_key(batch, known.decides)] = found, nbytes
        while len(known.found) > KEPT or (
            len(known.found) > 1 and sum(n for _, n in known.found.values()) > KEPT_BYTES
        ):
            known.found.popitem(last=False)


def _key(batch: Mapping[str, Any], decides: Decides) -> bytes:
    """What of a batch decides: all that is no tensor, and of tensors their dtypes, shapes and values where
    these may count."""
    digest = hashlib.sha256()
    for key, value in sorted(batch.items()):
        digest.update(f"{key} {_described(value, key in decides.shapes)!r};".encode())
        for _, tensor in nested_values.tensors(value) if key in decides.values else ():
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _described(value: Any, sizes: bool) -> Any:
    """A value but for the numbers in its tensors, and without `sizes` but for the sizes of a tensor that is
    all there is."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape) if sizes else value.ndim} {value.requires_grad}"
    return nested_values.replace(value, lambda _, leaf: _plain(leaf))  # Python sees what a container holds


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _described(leaf, True)
    try:
        return nested_values.literal(leaf)
    except nested_values.NotLiteral:
        return pickle.dumps(leaf)


def _deciding(recording: Recording) -> frozenset[str]:
    """The inputs whose values decided something: a read, the shape of an op's result, or what a block
    does."""

    def decides(node: Any) -> bool:
        dynamic = any(tag in _DYNAMIC for tag in getattr(node.target, "tags", ()))
        return is_read(node) or dynamic or bool(node.meta.get("reads"))

    return inputs_behind(filter(decides, recording.graph.nodes))
