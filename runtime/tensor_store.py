"""Named tensors and objects in a directory, by torch.distributed.checkpoint: every rank writes its own, any rank reads what it needs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from secc.runtime.errors import UserError


def write(directory: Path, state: dict[str, Any]) -> None:
    """Write this rank's entries. Collective; no two ranks may have the same key."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    save(state, storage_writer=FileSystemWriter(directory), planner=planner)


def entries(directory: Path) -> dict[str, torch.Tensor | None]:
    """What is stored: a meta tensor for each tensor, None for any other object. Raises UserError if that cannot be read."""
    try:
        found = FileSystemReader(directory).read_metadata().state_dict_metadata
    except OSError as error:
        remedy = "give a directory that a run with --save has written"
        raise UserError(f"not a checkpoint: {error.strerror}", str(directory), remedy) from None
    return {
        key: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta") if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in found.items()
    }


def read(directory: Path, target: dict[str, Any], alone: bool = False) -> None:
    """Read the keys of `target`, tensors into their memory. Collective unless `alone`."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        load(target, storage_reader=FileSystemReader(directory), planner=planner, no_dist=alone or not dist.is_initialized())
