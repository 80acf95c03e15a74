"""Named tensors and objects in a directory, written and read by all ranks through
torch.distributed.checkpoint.

A rank may hold only a slice of a tensor (`TensorSlice`). Slices are stored as boxes of the whole tensor, so
the stored data does not depend on how the writing run was sharded, and any other slices can be read from it.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult

from secc.runtime.errors import UserError
from secc.runtime.parameters.checkpoint_metadata import read_metadata
from secc.runtime.tensor_parallel.parameter_cuts import ParameterCut, TensorBounds

_COPY_AHEAD_BYTES = 10_000_000  # from a GPU, torch's default
_REMEDY = "take a checkpoint that a run with --save has written"


class TensorSlice:
    """Entries of a tensor of `shape`, row-major from `start`, as the 1-D tensor `values`; implements the
    protocol of torch.distributed.checkpoint.

    With `cut`, that tensor is itself a tensor-parallel rank's part of the whole one.
    """

    def __init__(
        self, values: torch.Tensor, shape: torch.Size, start: int, cut: ParameterCut | None = None
    ) -> None:
        self.values, self.shape, self.start, self.cut = values, shape, start, cut

    def size(self) -> torch.Size:
        """Returns the shape of the whole tensor."""
        return self.shape if self.cut is None else self.cut.shape

    def box_memory(self, index: MetadataIndex) -> torch.Tensor:
        """Returns the memory of the box at `index`, in the box's shape."""
        return next(
            memory
            for (offsets, _), memory in self._boxes_with_memory()
            if torch.Size(offsets) == index.offset
        )

    def _boxes_with_memory(self) -> Iterator[tuple[TensorBounds, torch.Tensor]]:
        """Yields the boxes of the whole tensor that the slice covers, each with its memory."""
        position = 0
        for box in row_major_boxes(self.shape, self.start, self.start + self.values.numel()):
            count = torch.Size(box[1]).numel()
            memory = self.values[position : position + count].view(box[1])
            position += count
            if self.cut is None:
                yield box, memory
            else:
                for outer, start, length in self.cut.whole_boxes(box):
                    yield outer, memory.narrow(self.cut.dim, start, length)

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.values)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for (offsets, sizes), _ in self._boxes_with_memory()
        ]


@dataclass(frozen=True)
class EncodedObject:
    """An object that is no tensor, as the bytes of torch.save."""

    content: bytes


def encode_object(value: Any) -> EncodedObject:
    """Returns an object that is no tensor as what is stored for it. Raises OSError if it cannot be stored."""
    if isinstance(value, EncodedObject):
        return value
    encoded = io.BytesIO()
    try:
        torch.save(value, encoded)
    except Exception as error:  # the user's classes may raise anything
        raise OSError(f"an object of type {type(value).__name__} cannot be stored: {error}") from None
    return EncodedObject(encoded.getvalue())


def row_major_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[TensorBounds]:
    """Splits the row-major range [start, stop) of a tensor of `shape` into boxes: yields (offsets, sizes) in
    the order of their entries. A tensor of n dims needs at most 2n - 1 boxes."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    inner = torch.Size(shape[1:]).numel()
    first, last = -(-start // inner), stop // inner  # whole rows
    if first > last:  # inside one row
        yield from _boxes_in_row(shape, last, start - last * inner, stop - last * inner)
        return
    yield from _boxes_in_row(shape, first - 1, start - (first - 1) * inner, inner)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _boxes_in_row(shape, last, 0, stop - last * inner)


def _boxes_in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[TensorBounds]:
    for offsets, sizes in row_major_boxes(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        entry = self.state_dict[index.fqn]
        return entry.box_memory(index) if isinstance(entry, TensorSlice) else super().lookup_object(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(encode_object(object).content)
        return super().transform_object(write_item, object)


class _LoadPlanner(DefaultLoadPlanner):
    on_read: Callable[[int], None]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Reports a piece of a tensor that is in its place."""
        self.on_read(tensor.nbytes)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keeps the entries as they are; torch's own method flattens them and drops objects that are not
        tensors."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        entry = self.state_dict[index.fqn]
        return entry.box_memory(index) if isinstance(entry, TensorSlice) else super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Reads an object of plain data and tensors; torch's own method unpickles anything."""
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, weights_only=True)
        except Exception as error:  # a torn pickle fails in many ways
            unknown = re.search(r"GLOBAL ([\w.]+)", str(error))
            cause = f"holds {unknown[1]}, which may run code" if unknown else "is torn or not plain data"
            raise UserError(f"the checkpoint's entry {name!a} {cause}", "", _REMEDY) from None


class _CheckedReader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads the metadata without running what it may hold; torch's own method unpickles anything."""
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


@dataclass(frozen=True)
class WrittenEntries:
    """What a rank has written: its items, where each of them lies, and the names of its files."""

    items: list[WriteItem]
    results: list[WriteResult]
    files: list[str]


def write_entries(directory: Path, rank: int, state: dict[str, Any]) -> WrittenEntries:
    """Writes the entries of one rank to a file of its own in an existing directory; no two ranks may write
    the same box. Raises OSError, or torch's RuntimeError, if they cannot be written."""
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state)
    tensors = (v.values if isinstance(v, TensorSlice) else v for v in state.values())
    on_cpu = all(not isinstance(t, torch.Tensor) or t.is_cpu for t in tensors)
    # Without copies ahead torch makes no stream, and so no GPU context in a writer process.
    writer = FileSystemWriter(directory, per_thread_copy_ahead=0 if on_cpu else _COPY_AHEAD_BYTES)
    writer.set_up_storage_writer(is_coordinator=False, rank=rank, use_collectives=False)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    results = writer.write_data(plan, planner).value()
    return WrittenEntries(plan.items, results, sorted(p.name for p in directory.glob(f"__{rank}_*.distcp")))


def write_index(directory: Path, parts: Sequence[WrittenEntries]) -> Path:
    """Writes where the entries of all ranks lie. Returns the path of the file."""
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _, metadata = planner.create_global_plan([SavePlan(part.items) for part in parts])
    FileSystemWriter(directory).finish(metadata, [part.results for part in parts])
    return directory / ".metadata"


def stored_entries(directory: Path) -> dict[str, torch.Tensor | None]:
    """Returns what is stored: a meta tensor for each tensor, None for any other object. Raises UserError if
    it cannot be read."""
    metadata = read_metadata(directory).state_dict_metadata
    return {
        key: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in metadata.items()
    }


def read_entries(
    directory: Path,
    target: dict[str, Any],
    alone: bool = False,
    on_read: Callable[[int], None] = lambda byte_count: None,
) -> None:
    """Reads the keys of `target`, tensors in place. Collective unless `alone`. `on_read` is called with the
    bytes of each piece of a tensor. Raises UserError if an entry is damaged or holds an object that may run
    code."""
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.on_read = on_read
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load(
                target,
                storage_reader=_CheckedReader(directory),
                planner=planner,
                no_dist=alone or not dist.is_initialized(),
            )
    except CheckpointException as failed:
        cause = next(iter(failed.failures.values()))[0]
        if isinstance(cause, UserError):
            raise UserError(cause.message, str(directory), cause.remedy) from None
        message = f"the checkpoint is damaged: {_first_failure(failed)}"
        raise UserError(message, str(directory), _REMEDY) from None


def _first_failure(failed: CheckpointException) -> str:
    """Returns the cause on the first rank that failed, in a line."""
    cause = next(iter(failed.failures.values()))[0]
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]
