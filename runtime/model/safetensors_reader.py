"""Reading safetensors files tensor by tensor, straight into the memory that they are for.

A rank needs nothing but torch for it: a file is a header of names, dtypes and places, and then the values. A
tensor is read in pieces, so that a rank never holds more than a piece beside its own parameters, whatever
dtype the file has.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from secc.runtime.errors import UserError

READ_CHUNK_BYTES = 1 << 22  # bytes
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_CONVERTIBLE_FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
)  # floats that may be turned into each other


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: in `file`, its values from byte `begin` on."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    data_offset: int

    @property
    def stored_names(self) -> tuple[str, ...]:
        """The stored tensors that it takes: itself."""
        return (self.name,)

    def read_into(self, target: torch.Tensor) -> None:
        """Copy the tensor into `target`, of the same shape and any device. Raises UserError for a dtype that
        means something else there."""
        if self.dtype != target.dtype and not (
            self.dtype in _CONVERTIBLE_FLOATS and target.dtype in _CONVERTIBLE_FLOATS
        ):
            stored, wanted = (str(d).removeprefix("torch.") for d in (self.dtype, target.dtype))
            remedy = "give weights in the model's own dtype; quantised ones have to be expanded first"
            raise UserError(
                f"--init: {self.name} is stored as {stored}, but the model has {wanted}",
                str(self.file),
                remedy,
            )
        flat = (
            target.detach().view(-1)
            if target.is_contiguous()
            else torch.empty(target.numel(), dtype=target.dtype)
        )
        step = READ_CHUNK_BYTES // self.dtype.itemsize
        with self.file.open("rb") as f:
            f.seek(self.data_offset)
            for start in range(0, flat.numel(), step):
                piece = flat[start : start + step]
                read = f.read(len(piece) * self.dtype.itemsize)
                if len(read) < len(piece) * self.dtype.itemsize:
                    raise UserError(
                        f"--init: the file ends within {self.name}", str(self.file), "write it anew"
                    )
                piece.copy_(torch.frombuffer(bytearray(read), dtype=self.dtype))
        if not target.is_contiguous():
            target.detach().copy_(flat.view(target.shape))


def list_stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of the safetensors files in `directory`, by name; of those that an index names, where there
    is one.

    Raises UserError for a directory without such files, for shards that are missing, and for files that
    cannot be read.
    """
    files = sorted(directory.glob("*.safetensors"))
    indices = sorted(directory.glob("*.safetensors.index.json"))
    if indices:
        files = _indexed_shards(indices[0])
    return {entry.name: entry for file in files for entry in _read_header(file)}


def _indexed_shards(index: Path) -> list[Path]:
    """The shards that an index names."""
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"--init: not an index of safetensors files ({error})", str(index), "write it anew, or delete it"
        ) from None
    missing = [s for s in shards if not (index.parent / s).exists()]
    if missing:
        raise UserError(
            f"--init: {len(missing)} of {len(shards)} shards are missing: {missing[0]} …",
            str(index),
            "copy all shards there",
        )
    return [index.parent / s for s in shards]


def _read_header(file: Path) -> list[StoredTensor]:
    """The tensors of a file: a 64-bit header length, the header as JSON, the values."""
    try:
        with file.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            if length > file.stat().st_size:
                raise ValueError("its header does not end")
            header = json.loads(f.read(length))
        header.pop("__metadata__", None)
        return [
            StoredTensor(
                name, file, _DTYPES[e["dtype"]], tuple(e["shape"]), 8 + length + e["data_offsets"][0]
            )
            for name, e in header.items()
        ]
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise UserError(
            f"--init: not a safetensors file that can be read ({error})", str(file), "write it anew"
        ) from None
