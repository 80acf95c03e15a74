"""Writes checkpoints, within the step or in the background.

A save has two stages on which all ranks agree. First each rank writes its entries to a file of its own; then
rank 0 writes the index of all files and publishes the checkpoint (`checkpoint_folder`). In the background, a
rank only copies its entries into memory that it shares with its writer process, which does the rest while
the rank trains. One checkpoint at a time is written: the next one waits for it.

The ranks learn at the ends of steps whether a stage is over everywhere, in sums that they exchange anyway.
"""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from secc.runtime.errors import LostProcess, printable_text
from secc.runtime.host.activity import Activity, Waiting
from secc.runtime.host.fork_pool import WorkerPool
from secc.runtime.host.memory import available_memory
from secc.runtime.parameters.checkpoint_copies import CopyName, complete_copies, put_copy
from secc.runtime.parameters.checkpoint_folder import (
    CheckpointManifest,
    FileDigest,
    digest_file,
    publish_checkpoint,
    remove_old_checkpoints,
    scratch_path,
    start_checkpoint,
    write_manifest,
)

if TYPE_CHECKING:  # a rank without checkpoints starts almost a second sooner without it
    from secc.runtime.parameters.sliced_tensor_store import TensorSlice, WrittenEntries

WRITER_NAME = "secc-writer"  # of the process
_ALIGNMENT = 64  # bytes
_NICENESS = 10  # of the writer process: training goes first
_COPIES_SHARE = 0.5  # of the host's available memory that copies of checkpoints may take
_OTHER_REMEDY = "make the directory writable and make room in it"
_REMEDIES = {  # of errors of files
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room"),
    errno.EISDIR: "remove that folder",
    errno.EIO: "mend the storage",
}


class SaveFailed(Exception):
    """A checkpoint could not be written; those before it are whole. The message has cause and path."""


@dataclass(frozen=True)
class FinishedSave:
    """How a save ended: the path of the checkpoint, or in `failure` why there is none, with its `remedy`."""

    directory: Path
    step: int
    failure: str
    remedy: str

    @property
    def path(self) -> Path:
        """The folder of the checkpoint."""
        return self.directory / f"step_{self.step:08d}"


@dataclass(frozen=True)
class _SaveRequest:
    directory: Path
    manifest: CheckpointManifest
    keep: int | None
    copy_name: CopyName | None
    keep_every: int | None

    @property
    def scratch(self) -> Path:
        return scratch_path(self.directory, self.manifest.step)


@dataclass(frozen=True)
class _WrittenPart:
    """What a rank wrote: its entries and the digests of its files, and whether its launcher has copies. It
    travels pickled: ranks only pass it on, from their writers to the one that publishes, and reading the
    entries costs more than all else that a step does for a checkpoint."""

    entries: WrittenEntries
    files: dict[str, FileDigest]
    is_copied: bool


@dataclass(frozen=True)
class _Failure:
    """The cause for which something could not be written, and what to do about it, each in a line."""

    cause: str
    remedy: str


@dataclass(frozen=True)
class _CopiedTensor:
    """Where a tensor lies in the shared memory: `offset` in bytes. `place` holds the arguments that make it a
    TensorSlice, None for a whole tensor."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype
    place: tuple[Any, ...] | None


def save_checkpoint(
    directory: Path, state: Mapping[str, Any], about: CheckpointManifest, keep: int | None = None
) -> Path:
    """Writes this rank's entries `state` to `directory/step_XXXXXXXX`, then deletes all but the newest `keep`
    checkpoints there (None: deletes none). Collective. Returns the path of the finished checkpoint.

    Raises SaveFailed, on all ranks, if a file cannot be written on one of them: a full disk, a lost folder.
    """
    saver = CheckpointSaver()
    saver.start_save(directory, state, about, keep)
    saved = saver.finish_save()
    assert saved is not None
    if saved.failure:
        raise SaveFailed(saved.failure)
    return saved.path


class BackgroundWriter:
    """The process of this rank that writes checkpoints, and the memory that the rank copies them into. It
    forks: make it before process groups, threads and GPU contexts. It ends with its rank."""

    def __init__(self) -> None:
        self._memory = os.memfd_create("secc-checkpoint")  # without a size yet, and inherited by the process
        self._size, self._is_closed = 0, False
        self._mapping: mmap.mmap | None = None
        self._places, self._needed = dict[str, _CopiedTensor](), 0  # of the state that is copied next
        self._copies = dict[_CopiedTensor, torch.Tensor]()  # in the mapping, for the saves to come
        self._pool = WorkerPool(_run_in_background, 1, WRITER_NAME, 1)

    def close(self) -> None:
        """Ends the process and frees the memory; closing again does nothing."""
        if not self._is_closed:
            self._is_closed, self._mapping = True, None
            self._copies.clear()
            self._pool.close()
            os.close(self._memory)

    def has_room(self, state: Mapping[str, Any]) -> bool:
        """Tells whether the host has memory for copies of `state` on each of its ranks. Call it before
        `write_entries`."""
        self._places, self._needed = _find_places(state)
        growth = max(0, self._needed - self._size)
        copies = growth * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return copies <= available_memory() * _COPIES_SHARE

    def write_entries(self, request: _SaveRequest, rank: int, state: Mapping[str, Any]) -> None:
        """Copies `state` and starts to write it. `take_result` has the pickled _WrittenPart."""
        from secc.runtime.parameters.sliced_tensor_store import encode_object

        if self._needed > self._size:
            os.ftruncate(self._memory, self._needed)
            self._size, self._mapping = self._needed, mmap.mmap(self._memory, self._needed)
            self._copies.clear()
        entries = dict[str, Any]()
        on_gpu = False
        for key, value in state.items():
            place = self._places.get(key)
            if place is None:
                entries[key] = encode_object(value)
            else:
                assert self._mapping is not None
                values = _tensor_of(value)
                on_gpu |= values.is_cuda
                copy = self._copies.get(place)
                if copy is None:
                    copy = self._copies[place] = _memory_of(self._mapping, place)
                copy.copy_(values, non_blocking=True)
                entries[key] = place
        if on_gpu:
            torch.cuda.synchronize()
        self._pool.submit_work(None, _write_copies, request, rank, self._memory, self._size, entries)

    def publish(self, request: _SaveRequest, parts: list[bytes]) -> None:
        """Starts to publish what all ranks have written. `take_result` has None."""
        self._pool.submit_work(None, _publish_parts, request, parts)

    def take_result(self, timeout: float | None) -> tuple[bool, Any]:
        """Waits for a result, at most for `timeout` seconds. Returns whether there is one, and the result.
        Raises LostProcess if the process has ended."""
        for _, result in self._pool.collect_results(timeout):
            if isinstance(result, Exception):
                raise result
            return True, result
        return False, None


class CheckpointSaver:
    """The saves of a rank, one at a time; without a `writer` all are written within the step. All methods
    are collective. `activity` learns what the rank waits for."""

    def __init__(self, writer: BackgroundWriter | None = None, activity: Activity | None = None) -> None:
        self._writer, self._activity = writer, activity or Activity()
        self._request: _SaveRequest | None = None
        self._publishes = False  # the second stage: rank 0 publishes
        self._is_in_background, self._is_in_writer, self._result = False, False, None
        self._rank = dist.get_rank() if dist.is_initialized() else 0

    def start_save(
        self,
        directory: Path,
        state: Mapping[str, Any],
        manifest: CheckpointManifest,
        keep: int | None,
        in_background: bool = False,
        copy_name: CopyName | None = None,
        keep_every: int | None = None,
    ) -> None:
        """Starts to write this rank's entries `state` as a checkpoint in `directory`, which keeps the newest
        `keep` and those of every `keep_every`-th step. Call `finish_save` before. In the background, `state`
        has been copied when this returns. `copy_name`: launchers keep copies of it in memory."""
        assert self._request is None
        self._request = request = _SaveRequest(directory, manifest, keep, copy_name, keep_every)
        self._publishes, self._is_in_background, self._result = False, in_background, None
        started = _first_failure_of_ranks(
            _attempt(lambda: start_checkpoint(directory, manifest.step)) if self._rank == 0 else None
        )
        if started is not None:
            self._result = started
        elif in_background and self._can_copy(state):
            self._run_in_writer(lambda writer: writer.write_entries(request, self._rank, state))
        else:
            self._result = _attempt(lambda: _write_part(request, self._rank, state))

    def is_stage_done(self) -> bool:
        """Tells whether this rank has done its part of the stage that goes on; False if there is none. Not
        collective."""
        if self._request is not None and self._is_in_writer:
            self._take_result(timeout=0)
        return self._request is not None and not self._is_in_writer

    def end_stage(self) -> FinishedSave | None:
        """Ends a stage that `is_stage_done` on all ranks. Returns how the save ended if it was the last."""
        request = self._request
        assert request is not None and not self._is_in_writer
        if not self._publishes:
            self._publishes = True
            parts = _gather_on_first(self._result)
            self._result = next((part for part in parts if isinstance(part, _Failure)), None)
            if self._rank == 0 and self._result is None:
                if self._writer is not None and self._is_in_background:
                    self._run_in_writer(lambda writer: writer.publish(request, parts))
                else:
                    self._result = _attempt(lambda: _publish_parts(request, parts))
            return None
        failure = _first_failure_of_ranks(self._result)
        if failure is not None and self._rank == 0:
            shutil.rmtree(request.scratch, ignore_errors=True)  # makes room on a full disk
        self._request = None
        cause, remedy = (failure.cause, failure.remedy) if failure is not None else ("", "")
        return FinishedSave(request.directory, request.manifest.step, cause, remedy)

    def finish_save(self) -> FinishedSave | None:
        """Waits for the save that goes on. Returns how it ended; None if there is none."""
        finished = None
        while self._request is not None:
            if self._is_in_writer:
                with self._activity.during("SAVE", Waiting.WRITER, may_take_long=True):
                    self._take_result(timeout=None)
            finished = self.end_stage()
        return finished

    def _can_copy(self, state: Mapping[str, Any]) -> bool:
        if self._writer is None or self._writer.has_room(state):
            return self._writer is not None
        sys.stderr.write(
            f"rank {self._rank}: the host has too little memory for a copy of the checkpoint, so it is"
            " written within the step\n"
        )
        self._writer.close()
        self._writer = None
        return False

    def _run_in_writer(self, submit: Callable[[BackgroundWriter], None]) -> None:
        writer = self._writer
        assert writer is not None
        try:
            self._result = _attempt(lambda: submit(writer))
            self._is_in_writer = self._result is None
        except LostProcess as error:
            self._note_lost_writer(error)

    def _take_result(self, timeout: float | None) -> None:
        assert self._writer is not None
        try:
            is_there, result = self._writer.take_result(timeout)
        except LostProcess as error:
            self._note_lost_writer(error)
            return
        if is_there:
            self._is_in_writer, self._result = False, result

    def _note_lost_writer(self, error: LostProcess) -> None:
        """Goes on without the writer process: it cannot be forked again next to threads and GPU contexts."""
        assert self._writer is not None
        self._writer.close()
        self._writer, self._is_in_writer = None, False
        lost = f"rank {self._rank}: {error.message}; later ones are written within the step"
        self._result = _Failure(lost, "find out what ended the process")


def _write_part(request: _SaveRequest, rank: int, state: Mapping[str, Any]) -> bytes:
    """Returns the pickled _WrittenPart."""
    from secc.runtime.parameters import sliced_tensor_store

    scratch = request.scratch
    entries = sliced_tensor_store.write_entries(scratch, rank, dict(state))
    digests = {name: digest_file(scratch / name, sync=True) for name in entries.files}
    is_copied = _copy_to_launchers(request, [scratch / name for name in entries.files])
    return pickle.dumps(_WrittenPart(entries, digests, is_copied))


def _copy_to_launchers(request: _SaveRequest, files: Iterable[Path]) -> bool:
    """Lets launchers keep copies of written files, if the run asks for it. Returns whether this node's has
    them; ranks that find none read storage."""
    if request.copy_name is None:
        return False
    for file in files:
        try:
            problem, is_copied = put_copy(request.copy_name, file), True
        except OSError as error:
            problem, is_copied = error.strerror or str(error), False
        if problem:
            sys.stderr.write(printable_text(f"note: a copy of {file} in memory is missing: {problem}") + "\n")
        if not is_copied:
            return False
    return True


def _publish_parts(request: _SaveRequest, pickled: list[bytes]) -> None:
    from secc.runtime.parameters import sliced_tensor_store

    parts: list[_WrittenPart] = [pickle.loads(part) for part in pickled]
    index = sliced_tensor_store.write_index(request.scratch, [part.entries for part in parts])
    files = {name: digest for part in parts for name, digest in part.files.items()}
    files[index.name] = digest_file(index, sync=True)
    manifest = write_manifest(request.directory, replace(request.manifest, files=files))
    are_copied = all(part.is_copied for part in parts) and _copy_to_launchers(request, [index, manifest])
    publish_checkpoint(request.directory, request.manifest.step)
    if are_copied and request.copy_name is not None:
        with suppress(OSError):
            complete_copies(request.copy_name)
    if request.keep is not None:
        remove_old_checkpoints(request.directory, request.keep, request.keep_every)


def _write_copies(
    request: _SaveRequest, rank: int, memory: int, size: int, entries: Mapping[str, Any]
) -> Any:
    """Writes what a rank has copied into `memory`."""
    from secc.runtime.parameters.sliced_tensor_store import TensorSlice

    mapping = mmap.mmap(memory, size) if size else None
    state = dict[str, Any]()
    for key, entry in entries.items():
        if isinstance(entry, _CopiedTensor):
            assert mapping is not None
            values = _memory_of(mapping, entry)
            state[key] = values if entry.place is None else TensorSlice(values, *entry.place)
        else:
            state[key] = entry
    return _write_part(request, rank, state)


def _run_in_background(action: Callable[..., Any], *arguments: Any) -> Any:
    """What the writer process does with each request."""
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    return _attempt(lambda: action(*arguments))


def _attempt(action: Callable[[], Any]) -> Any:
    """Returns the action's result, or a _Failure for errors of files, and of torch as it writes them."""
    try:
        return action()
    except (OSError, RuntimeError) as error:
        # torch closes its archive after an error of the file, and raises that the archive is incomplete.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        if not isinstance(cause, OSError):
            text = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            return _Failure(printable_text(text), _OTHER_REMEDY)
        place = cause.filename2 or cause.filename  # of a rename, what it should have become
        where = f": {place}" if place else ""
        remedy = _REMEDIES.get(cause.errno or 0, _OTHER_REMEDY)
        return _Failure(printable_text(f"{cause.strerror or cause}{where}"), remedy)


def _find_places(state: Mapping[str, Any]) -> tuple[dict[str, _CopiedTensor], int]:
    """Returns where each tensor of `state` is copied to, and the bytes of all of them."""
    from secc.runtime.parameters.sliced_tensor_store import TensorSlice

    places, size = dict[str, _CopiedTensor](), 0
    for key, value in state.items():
        if isinstance(value, (torch.Tensor, TensorSlice)):  # a union of both would be made for each entry
            values = _tensor_of(value)
            slice_of = (value.shape, value.start, value.cut) if isinstance(value, TensorSlice) else None
            places[key] = _CopiedTensor(size, values.shape, values.dtype, slice_of)
            size += -(-values.numel() * values.element_size() // _ALIGNMENT) * _ALIGNMENT
    return places, size


def _memory_of(mapping: mmap.mmap, place: _CopiedTensor) -> torch.Tensor:
    count = prod(place.shape)
    if not count:
        return torch.empty(place.shape, dtype=place.dtype)
    return torch.frombuffer(mapping, dtype=place.dtype, count=count, offset=place.offset).view(place.shape)


def _tensor_of(value: torch.Tensor | TensorSlice) -> torch.Tensor:
    return (value if isinstance(value, torch.Tensor) else value.values).detach()


def _first_failure_of_ranks(result: Any) -> _Failure | None:
    """Returns the first _Failure among the ranks' results. Collective."""
    own = result if isinstance(result, _Failure) else None
    results: list[Any] = [own]
    if dist.is_initialized():
        failures = torch.tensor(int(own is not None))
        dist.all_reduce(failures)
        if not failures.item():  # what nearly always happens should cost a step little
            return None
        results = [None] * dist.get_world_size()
        dist.all_gather_object(results, own)
    return next((failure for failure in results if failure is not None), None)


def _gather_on_first(part: Any) -> list[Any]:
    """Returns the parts of all ranks on rank 0, an empty list on the others. Collective."""
    if not dist.is_initialized():
        return [part]
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(part, parts)
    return parts or []
