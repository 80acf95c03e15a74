"""Reads the `.metadata` of a checkpoint of torch.distributed.checkpoint without trusting it.

The file is a pickle, and unpickling what a stranger wrote may run code. Here the names that checkpoints need
become plain records, every other name is refused, and the real metadata is built from the records only after
each value was checked: types, files inside the checkpoint, bytes that the files have, and boxes that fill
each tensor.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage]
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from secc.runtime.errors import UserError
from secc.runtime.host.regular_files import read_regular_file

MAX_METADATA_BYTES = 1 << 28
_METADATA_FILE = ".metadata"
_REMEDY = "take a checkpoint that a run with --save has written"


class _Record:
    """A value of a class that checkpoints use: the class's name, its arguments and its state."""

    kind = ""

    def __new__(cls, *arguments: Any) -> _Record:
        return object.__new__(cls)

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.fields = arguments, cast("dict[str, Any]", {})

    def __setstate__(self, state: Any) -> None:
        self.fields = dict(state) if isinstance(state, dict) else {"state": state}


_DCP = "torch.distributed.checkpoint."
_KNOWN_CLASSES = frozenset({
    (f"{_DCP}metadata", "Metadata"), (f"{_DCP}metadata", "TensorStorageMetadata"),
    (f"{_DCP}metadata", "TensorProperties"), (f"{_DCP}metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}metadata", "ChunkStorageMetadata"), (f"{_DCP}metadata", "BytesStorageMetadata"),
    (f"{_DCP}metadata", "MetadataIndex"), (f"{_DCP}metadata", "StorageMeta"),
    (f"{_DCP}filesystem", "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"), ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("builtins", "getattr"),  # a record, too: Python 3.11.0 to 3.11.3 name members of enums so
})  # fmt: skip
_RAW_UNPICKLER: Any = pickle._Unpickler  # pyright: ignore # in Python: the C one allocates whatever a file asks for


class _RecordUnpickler(_RAW_UNPICKLER):
    """Gives records in place of objects. Raises UnpicklingError for names that checkpoints do not use."""

    dispatch: Mapping[int, Any] = {
        code: load for code, load in _RAW_UNPICKLER.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._classes: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in _KNOWN_CLASSES:
            raise pickle.UnpicklingError(
                f"it names {ascii(module)[1:-1]}.{ascii(name)[1:-1]}, which may run code"
            )
        return self._classes.setdefault(name, type(name, (_Record,), {"kind": name}))


def read_metadata(checkpoint: Path) -> Metadata:
    """Returns the checked metadata of a checkpoint. Raises UserError if it cannot be read, is not what
    torch.distributed.checkpoint writes, or does not fit the files."""
    path = checkpoint / _METADATA_FILE
    try:
        content = read_regular_file(path, MAX_METADATA_BYTES)
    except OSError as error:
        raise UserError(f"not a checkpoint: {error.strerror}", str(path), _REMEDY) from None
    try:
        loaded = _RecordUnpickler(content).load()
    except Exception as error:  # a torn pickle fails in many ways
        cause = str(error) if isinstance(error, pickle.UnpicklingError) else "it is torn or not such a file"
        raise UserError(f"the checkpoint's metadata is refused: {cause}", str(path), _REMEDY) from None
    try:
        return _build_metadata(checkpoint, loaded)
    except ValueError as error:
        raise UserError(f"the checkpoint is damaged: {error}", str(path), _REMEDY) from None


def _build_metadata(checkpoint: Path, loaded: Any) -> Metadata:
    fields = _fields(loaded, "Metadata")
    stored = _mapping(fields.get("storage_data"))
    files: dict[str, int] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for key, value in stored.items():
        index = _read_index(key)
        places[index] = _read_place(checkpoint, _fields(value, "_StorageInfo"), index.fqn, files)
    entries: dict[str, Any] = {}
    for name, entry in _mapping(fields.get("state_dict_metadata")).items():
        name = _text(name)
        if isinstance(entry, _Record) and entry.kind == "BytesStorageMetadata":
            if MetadataIndex(name) not in places:
                raise ValueError(f"{name!a} is nowhere in its files")
            entries[name] = BytesStorageMetadata()
        else:
            entries[name] = _read_tensor(name, _fields(entry, "TensorStorageMetadata"), places)
    return Metadata(entries, storage_data=places)


def _read_tensor(
    name: str, fields: Mapping[str, Any], places: Mapping[MetadataIndex, _StorageInfo]
) -> TensorStorageMetadata:
    """Returns the entry of a tensor after checking that its boxes fill it and that their bytes are there."""
    state = _fields(fields.get("properties"), "TensorProperties").get("state")
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!a} has no dtype")
    size = _read_size(fields.get("size"))
    boxes = fields.get("chunks")
    chunks: list[ChunkStorageMetadata] = []
    for box in cast("list[Any]", boxes) if isinstance(boxes, list) else []:
        entry = _fields(box, "ChunkStorageMetadata")
        offsets, sizes = _read_size(entry.get("offsets")), _read_size(entry.get("sizes"))
        if len(offsets) != len(size) or len(sizes) != len(size):
            raise ValueError(f"a part of {name!a} has another number of dims")
        if any(o + s > n for o, s, n in zip(offsets, sizes, size, strict=True)):
            raise ValueError(f"a part of {name!a} lies outside of its shape {list(size)}")
        place = places.get(MetadataIndex(name, offsets))
        if place is None or place.length < math.prod(sizes) * dtype.itemsize:
            raise ValueError(f"a part of {name!a} is nowhere in its files")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    if sum(math.prod(c.sizes) for c in chunks) != math.prod(size) or len({c.offsets for c in chunks}) < len(
        chunks
    ):
        raise ValueError(f"the parts of {name!a} do not fill its shape {list(size)}")
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _read_index(value: Any) -> MetadataIndex:
    fields = _fields(value, "MetadataIndex")
    offset, hint = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _text(fields.get("fqn")),
        None if offset is None else _read_size(offset),
        hint if type(hint) is int and hint >= 0 else None,
    )


def _read_place(
    checkpoint: Path, fields: Mapping[str, Any], name: str, files: dict[str, int]
) -> _StorageInfo:
    """Returns where an entry is stored. `files` holds the sizes of files that were read from disk."""
    file, offset, length = _text(fields.get("relative_path")), fields.get("offset"), fields.get("length")
    if Path(file).name != file or "\0" in file:
        raise ValueError(f"{name!a} is in {file!a}, outside of the checkpoint")
    if fields.get("transform_descriptors"):
        raise ValueError(f"{name!a} is stored in a transformed way")
    if file not in files:
        try:
            files[file] = (checkpoint / file).stat().st_size
        except OSError:
            raise ValueError(f"its file {file!a} is missing") from None
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise ValueError(f"{name!a} has no place in {file!a}")
    if offset + length > files[file]:
        raise ValueError(f"its file {file!a} is too short: {files[file]} bytes")
    return _StorageInfo(file, offset, length)


def _fields(value: Any, kind: str) -> dict[str, Any]:
    if not isinstance(value, _Record) or value.kind != kind:
        raise ValueError(f"expected {kind}, got {_kind_of(value)}")
    return value.fields


def _kind_of(value: Any) -> str:
    return value.kind if isinstance(value, _Record) else type(value).__name__


def _mapping(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a dict, got {_kind_of(value)}")
    return cast("dict[Any, Any]", value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a name, got {_kind_of(value)}")
    return value


def _read_size(value: Any) -> torch.Size:
    sizes = (
        value.arguments[0] if isinstance(value, _Record) and value.kind == "Size" and value.arguments else ()
    )
    if not isinstance(value, _Record) or not isinstance(sizes, tuple | list):
        raise ValueError(f"expected sizes, got {_kind_of(value)}")
    found = list(cast("list[Any]", sizes))
    if len(found) > 64 or any(type(n) is not int or not 0 <= n < 2**48 for n in found):
        raise ValueError("expected sizes of a tensor")
    return torch.Size(found)
