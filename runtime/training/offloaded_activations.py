"""`offload=activations`: what autograd keeps of a section's layers goes to host memory after the layer's
forward, and comes back before its backward (vDNN: Rhu et al., 2016, at the granularity of layers).

Hooks of autograd see each tensor that an operation saves. Memory is copied by storage, so that views of one
tensor leave once; parameters and buffers stay, as do small tensors and all that follows the last layer, where
the backward starts. A *group* is what one layer saves, together with the glue before it. A group leaves while
the next layer computes, and its memory on the device is free when that layer has ended. In the backward, a
group arrives while the layer after it computes; the order of a step's instructions says which micro-batch's
last group is needed next. So at most three groups are on the device: one in use, and one each way.

Autograd does not check the versions of tensors that pass through hooks, so they are checked here: when a
tensor leaves, or when the backward takes one that has stayed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from secc.runtime.parameters.host_copies import HostCopies, PendingCopy

LEAST_BYTES = 4096  # of a storage that leaves: to start a copy takes longer than a smaller one does


class _Storage:
    """Memory that autograd keeps: on the device (`values`, flat bytes), in host memory, or in both.

    `versions`: the saved tensors on it with their versions, while it has not left the device.
    """

    def __init__(self, values: torch.Tensor, group: _Group) -> None:
        self.values: torch.Tensor | None = values
        self.host: torch.Tensor | None = None
        self.group = group
        self.versions: list[tuple[torch.Tensor, int]] = []
        self.last_version = 0


class _LeftTensor(NamedTuple):
    """A saved tensor on memory that leaves the device."""

    storage: _Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _KeptTensor(NamedTuple):
    """A saved tensor that stays on the device, with its version."""

    tensor: torch.Tensor
    version: int


class _Group:
    """What one layer of one micro-batch saves. Autograd's graph holds the storages, so they end with it.
    `before`: the group that the backward needs next."""

    def __init__(self, before: _Group | None) -> None:
        self.before = before
        self.is_wanted = self.is_entered = False
        self._storages: list[ReferenceType[_Storage]] = []
        self._copies: list[tuple[PendingCopy, _Storage]] = []  # on their way

    def add_storage(self, storage: _Storage) -> None:
        """Adds a storage, which leaves and arrives with this group from now on."""
        storage.group = self
        self._storages.append(ref(storage))

    def _own_storages(self) -> list[_Storage]:
        found = (reference() for reference in self._storages)
        return [storage for storage in found if storage is not None and storage.group is self]

    def start_leaving(self, copies: HostCopies) -> None:
        """Starts to copy to host memory what is not there yet."""
        for storage in self._own_storages():
            if storage.host is None and storage.values is not None:
                storage.host = copies.empty_on_host(storage.values)
                self._copies.append((copies.to_host.start(storage.host, storage.values), storage))

    def finish_leaving(self) -> None:
        """Waits for the copies, and frees the memory on the device unless the backward is about to need it.
        Raises RuntimeError for a saved tensor that was written to."""
        self.finish_copies()
        for storage in self._own_storages():
            _check_versions(storage)
            storage.versions.clear()
            if not self.is_wanted:
                storage.values = None

    def start_arriving(self, copies: HostCopies) -> None:
        """Starts to copy to the device what is not there. From now on it stays there."""
        self.is_wanted = True
        for storage in self._own_storages():
            if storage.values is None:
                assert storage.host is not None
                storage.values = torch.empty_like(storage.host, device=copies.device, pin_memory=False)
                self._copies.append((copies.to_device.start(storage.values, storage.host), storage))

    def finish_copies(self) -> None:
        """Lets the computation wait for what is on its way."""
        for copy, _ in self._copies:
            copy.wait()
        self._copies.clear()


class SavedActivations:
    """What a section's forward of one micro-batch has saved."""

    def __init__(self, owner: ActivationOffload, layers: int, staying: set[int]) -> None:
        self._owner, self._layers_left, self._staying = owner, layers, staying
        self._group = _Group(None)
        self._known: dict[int, tuple[StorageWeakRef, ReferenceType[_Storage]]] = {}

    def begin_layer(self, layer: nn.Module) -> None:
        """Notes the parameters of a layer that runs: gathered ones have memory only now."""
        self._staying |= _keys_of_state(layer)

    def end_layer(self) -> None:
        """Lets leave what was saved up to now."""
        self._layers_left -= 1
        self._owner.let_leave(self._group)
        if self._layers_left > 0:
            self._group = _Group(self._group)

    def pack_tensor(self, tensor: torch.Tensor) -> _LeftTensor | _KeptTensor:
        """Pack hook of `torch.autograd.graph.saved_tensors_hooks`."""
        with torch._C.DisableTorchFunction(), torch.no_grad():  # a rank's rows of a sequence are all there is
            key, version = _storage_key(tensor), _version_of(tensor)
            if self._layers_left <= 0 or key in self._staying or not self._owner.may_leave(tensor):
                return _KeptTensor(tensor if tensor.is_leaf else tensor.detach(), version)
            storage = self._find_storage(key, tensor)
            storage.versions.append((tensor.detach(), version))
            storage.last_version = version
            offset = int(tensor.storage_offset())
            return _LeftTensor(storage, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def _find_storage(self, key: int, tensor: torch.Tensor) -> _Storage:
        """Returns the storage of a tensor, in the group of the layer that runs: the backward of this layer
        comes first."""
        _, reference = self._known.get(key, (None, None))
        storage = reference() if reference is not None else None
        if storage is not None and (
            storage.values is not None or storage.last_version == _version_of(tensor)
        ):
            if storage.group is not self._group:
                self._group.add_storage(storage)
            if storage.values is None:  # on its host it has the same values
                storage.values = _flat_bytes(tensor)
            return storage
        storage = _Storage(_flat_bytes(tensor), self._group)
        self._group.add_storage(storage)
        # The weak reference keeps the key from being that of another storage.
        self._known[key] = StorageWeakRef(tensor.untyped_storage()), ref(storage)
        return storage

    def unpack_tensor(self, packed: _LeftTensor | _KeptTensor) -> torch.Tensor:
        """Unpack hook: the backward of a layer needs a tensor that its forward has saved."""
        if isinstance(packed, _KeptTensor):
            if _version_of(packed.tensor) != packed.version:
                raise _written_to(packed.tensor, packed.version)
            return packed.tensor
        with torch._C.DisableTorchFunction(), torch.no_grad():
            storage, dtype, size, stride, offset = packed
            self._enter_group(storage.group)
            _check_versions(storage)
            assert storage.values is not None
            memory = storage.values.untyped_storage()
            return storage.values.new_empty(0, dtype=dtype).set_(memory, offset, size, stride)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def _enter_group(self, group: _Group) -> None:
        if group.is_entered:
            return
        group.is_entered = True
        group.start_arriving(self._owner.copies)
        if group.before is not None:
            group.before.start_arriving(self._owner.copies)
        group.finish_copies()

    def fetch_last(self) -> None:
        """Starts to fetch what the backward needs first."""
        self._group.start_arriving(self._owner.copies)

    def end_backward(self) -> None:
        """Waits for copies of what the backward did not need."""
        group: _Group | None = self._group
        while group is not None:
            group.finish_copies()
            self._owner.forget_leaving(group)
            group = group.before


class ActivationOffload:
    """Moves what the layers of this rank's sections save for their backwards.

    `layers`: those of each section with `offload=activations`, in the user's `model`.
    """

    def __init__(
        self, layers: Mapping[str, Sequence[nn.Module]], model: nn.Module, copies: HostCopies
    ) -> None:
        self.copies = copies
        self._layers, self._model = layers, model
        self._active: SavedActivations | None = None
        self._leaving: _Group | None = None
        for layer in dict.fromkeys(layer for found in layers.values() for layer in found):
            self._wrap_layer(layer)

    def _wrap_layer(self, layer: nn.Module) -> None:
        inner = layer.forward

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            saved = self._active  # none when a layer runs again in the backward
            if saved is None:
                return inner(*args, **kwargs)
            saved.begin_layer(layer)
            out = inner(*args, **kwargs)
            saved.end_layer()
            return out

        layer.forward = forward

    @contextmanager
    def record_forward(self, section: str) -> Iterator[SavedActivations | None]:
        """Moves what is saved within the context; nothing for a section that keeps it on the device."""
        if section not in self._layers:
            yield None
            return
        saved = SavedActivations(self, len(self._layers[section]), _keys_of_state(self._model))
        self._active = saved
        try:
            with saved_tensors_hooks(saved.pack_tensor, saved.unpack_tensor):
                yield saved
        finally:
            self._active = None

    def may_leave(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor can be rebuilt from the bytes of its storage, and is worth a copy."""
        return (
            tensor.device == self.copies.device
            and type(tensor) is torch.Tensor
            and tensor.layout == torch.strided
            and tensor.untyped_storage().nbytes() >= LEAST_BYTES
            and not (tensor.is_conj() or tensor.is_neg())
        )

    def let_leave(self, group: _Group) -> None:
        """Starts to copy a group to the host; waits for the one before, and frees its memory."""
        self.finish_leaving()
        group.start_leaving(self.copies)
        self._leaving = group

    def finish_leaving(self) -> None:
        """Waits for the group on its way to the host."""
        if self._leaving is not None:
            self._leaving.finish_leaving()
            self._leaving = None

    def forget_leaving(self, group: _Group) -> None:
        """Does not wait for a group any longer, because its backward has ended."""
        if self._leaving is group:
            self._leaving = None

    def begin_backward(self, saved: SavedActivations) -> None:
        """Fetches what a backward needs first; what other forwards have saved leaves before."""
        saved.fetch_last()
        if self._leaving is not None and not self._leaving.is_wanted:
            self.finish_leaving()


def _check_versions(storage: _Storage) -> None:
    for tensor, version in storage.versions:
        if _version_of(tensor) != version:
            raise _written_to(tensor, version)


def _written_to(tensor: torch.Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation:"
        f" [{tensor.dtype} {list(tensor.shape)}] is at version {_version_of(tensor)}, expected {version}"
    )


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all bytes of a tensor's storage, without a copy."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())  # pyright: ignore[reportCallIssue, reportArgumentType]


def _keys_of_state(module: nn.Module) -> set[int]:
    return {_storage_key(t) for t in (*module.parameters(), *module.buffers())}


def _storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _version_of(tensor: torch.Tensor) -> int:
    return tensor._version  # pyright: ignore[reportPrivateUsage]
