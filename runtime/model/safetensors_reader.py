"""Lists the tensors of safetensors files and reads them into memory that exists already.

Files are opened by the `safetensors` package, which maps them: opening one reads its header only. A tensor is
copied in slices along its first dim and the mapping is closed again, so that a rank never holds more than a
slice besides its own parameters, whatever dtype the file has.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from secc.runtime.errors import UserError
from secc.runtime.plan import json_shapes as shapes
from secc.runtime.plan.json_shapes import MalformedValue

READ_CHUNK_BYTES = 1 << 22
_MAX_INDEX_BYTES = 1 << 27
_FILE_NAME = shapes.pattern(r"[^/\0]*[^./\0][^/\0]*", "the name of a file in the same directory")
_INDEX = shapes.record({"weight_map": shapes.mapping_of(_FILE_NAME)}, others=shapes.plain_data)
_CONVERTIBLE_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class StoredTensor:
    """The tensor `name` of the safetensors file `file`."""

    name: str
    file: Path
    shape: tuple[int, ...]

    @property
    def stored_names(self) -> tuple[str, ...]:
        """The stored tensors that are read for it: itself."""
        return (self.name,)

    def read_into(self, target: torch.Tensor) -> None:
        """Copy the tensor into `target`, which has the same shape and may be on any device.

        Floats of 16 bits and more are converted to the target's dtype. Raises UserError for other dtypes that
        differ: the numbers of quantised weights mean something else without their scales.
        """
        with torch.no_grad(), safe_open(self.file, framework="pt") as opened:
            if not self.shape:
                values = opened.get_tensor(self.name)
                self._check_dtype(values.dtype, target.dtype)
                target.copy_(values)
                return
            rows = opened.get_slice(self.name)
            self._check_dtype(rows[:0].dtype, target.dtype)
            row_bytes = max(1, target[:1].numel() * target.element_size())
            step = max(1, READ_CHUNK_BYTES // row_bytes)
            for start in range(0, self.shape[0], step):
                target[start : start + step].copy_(rows[start : start + step])

    def _check_dtype(self, stored: torch.dtype, wanted: torch.dtype) -> None:
        if stored == wanted or {stored, wanted} <= set(_CONVERTIBLE_FLOATS):
            return
        stored_name, wanted_name = (str(d).removeprefix("torch.") for d in (stored, wanted))
        raise UserError(
            f"--init: {self.name} is stored as {stored_name}, but the model has {wanted_name}",
            str(self.file),
            "give weights in the model's own dtype; quantised ones have to be expanded first",
        )


def list_stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """List the tensors of the safetensors files in `directory` by name. If the directory has an index, only
    the files that it names count.

    Raises UserError for shards that are missing and for files that cannot be read.
    """
    indices = sorted(directory.glob("*.safetensors.index.json"))
    files = _indexed_shards(indices[0]) if indices else sorted(directory.glob("*.safetensors"))
    return {tensor.name: tensor for file in files for tensor in _tensors_of_file(file)}


def _indexed_shards(index: Path) -> list[Path]:
    """The files that an index names."""
    try:
        shards = sorted(set(_INDEX(shapes.read_json(index, _MAX_INDEX_BYTES))["weight_map"].values()))
        missing = [s for s in shards if not (index.parent / s).exists()]
    except (OSError, MalformedValue) as error:
        raise UserError(
            f"--init: not an index of safetensors files ({error})",
            str(index),
            "write it again, or delete it to read all *.safetensors files of the directory",
        ) from None
    if missing:
        raise UserError(
            f"--init: {len(missing)} of {len(shards)} shards are missing: {missing[0]} …",
            str(index),
            "copy all shards there",
        )
    return [index.parent / s for s in shards]


def _tensors_of_file(file: Path) -> list[StoredTensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return [
                StoredTensor(name, file, tuple(opened.get_slice(name).get_shape()))
                for name in opened.keys()  # noqa: SIM118
            ]
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"--init: not a safetensors file that can be read ({error})", str(file), "copy or save it again"
        ) from None
