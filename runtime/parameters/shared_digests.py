"""Hashing the files of a checkpoint together: each rank reads a part of them, and all learn the digests.

Ranks look for the checkpoint that they continue from before they can form a process group, so they exchange
digests through the key-value store in which they meet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from secc.runtime.parameters.checkpoint_folder import CheckpointRefused, FileDigest, hash_files


class SharedDigests:
    """Hashes the files of checkpoints together with the other ranks. `store` is the one in which the ranks
    meet."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._count = 0  # of the checkpoints so far; two may have one name

    def hash_files(self, checkpoint: Path, files: Mapping[str, FileDigest]) -> dict[str, str]:
        """Returns the SHA-256 of each file as the rank that read it found it. Waits for all ranks. Raises
        CheckpointRefused if one of them looks at another checkpoint: a run saves or removes some now."""
        self._count += 1
        shares = _divide_files(files, self._world_size)
        own = hash_files(checkpoint, {name: files[name] for name in shares[self._rank]})
        self._store.set(self._key(self._rank), json.dumps([checkpoint.name, own]))
        found: dict[str, str] = {}
        for rank in range(self._world_size):
            name, theirs = json.loads(self._store.get(self._key(rank)))
            if name != checkpoint.name:
                message = f"its checkpoints change: rank {rank} found {name}, rank {self._rank} another one"
                remedy = "start again; if a run writes into the directory, wait for it or name a checkpoint"
                raise CheckpointRefused(message, str(checkpoint.parent), remedy)
            found |= theirs
        return found

    def _key(self, rank: int) -> str:
        return f"secc/digests/{self._count}/{rank}"


def _divide_files(files: Mapping[str, FileDigest], count: int) -> list[list[str]]:
    """Returns the names for each of `count` ranks, so that they read equally many bytes: the largest file
    goes to the rank with the fewest so far."""
    shares: list[list[str]] = [[] for _ in range(count)]
    sizes = [0] * count
    for name in sorted(files, key=lambda n: (-files[n].size, n)):
        rank = sizes.index(min(sizes))
        shares[rank].append(name)
        sizes[rank] += files[name].size
    return shares
