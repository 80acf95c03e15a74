"""Watches the ops of a model that runs as plain PyTorch.

Targets of CTC losses are checked before torch computes them. torch takes targets as indices without a
check: one outside of the classes reads and, in the backward, writes memory elsewhere. Batches that the
compiler makes up, of cropped samples for example, may have such targets.

Memory is checked where an op makes a large tensor: a system without memory ends the process without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from secc.runtime.errors import NotEnoughMemory
from secc.runtime.host.memory import available_memory
from secc.runtime.model.nested_batch import unflatten_batch
from secc.runtime.training.widened_floats import SIXTEEN_BITS

_aten = torch.ops.aten
_CTC_OPS = (_aten._ctc_loss.default, _aten._ctc_loss.Tensor)
# Products, with the place of the first of their two matrices among the arguments: they make large tensors of
# small ones, such as scores for every word.
_PRODUCTS = {_aten.mm.default: 0, _aten.bmm.default: 0, _aten.addmm.default: 1, _aten.baddbmm.default: 1}
_LARGE = 64 << 20  # bytes of a tensor
_MOST_GROWTH = 64  # of a tensor with two dims that padding widens
_COPIES = 3  # tensors of the same size that later ops make of one: a softmax of scores, and gradients
_GIB = 1 << 30


class EagerWatch(TorchDispatchMode):
    """Raises IndexError for a CTC loss with targets outside of its classes, or fewer than its lengths say,
    and NotEnoughMemory.

    found: the 16-bit floats that ops gave results in; a further mode would cost every op as much again.
    largest: bytes of the largest tensor that an op made. has_indices: whether there was a CTC loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found, self.largest, self.has_indices = set[torch.dtype](), 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CTC_OPS:
            self.has_indices = True
            scores, targets, _, lengths = args[:4]
            _check_targets(targets, torch.as_tensor(lengths), scores.shape[-1])
        elif (place := _PRODUCTS.get(func)) is not None:
            x, y = args[place : place + 2]
            _check_memory(x, prod(x.shape[:-1]) * y.shape[-1] * x.element_size(), 1 + _COPIES)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._note_result(result)
            if result.layout is torch.strided and result.nbytes >= _LARGE:  # others have no storage
                _check_memory(result, result.untyped_storage().nbytes(), _COPIES)
        elif isinstance(result, (tuple, list)):
            for value in result:
                if isinstance(value, torch.Tensor):
                    self._note_result(value)
        return result

    def _note_result(self, tensor: torch.Tensor) -> None:
        if tensor.dtype in SIXTEEN_BITS:
            self.found.add(tensor.dtype)
        if tensor.layout is torch.strided:
            self.largest = max(self.largest, tensor.nbytes)

    @property
    def would_see_nothing(self) -> bool:
        """Whether the same samples, padded to up to eight times their width, need no watch."""
        return not self.found and not self.has_indices and self.largest < _LARGE // _MOST_GROWTH


def run_forward(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Returns what forward returns for a batch. Raises IndexError and NotEnoughMemory as `EagerWatch`."""
    with memory_errors(), EagerWatch():
        return model(**unflatten_batch(batch))


def _check_memory(x: torch.Tensor, size: int, copies: int) -> None:
    """Raises NotEnoughMemory unless the host has memory for `copies` tensors of `size` bytes, if these are
    large and on the host, as `x` is."""
    if size >= _LARGE and x.device.type == "cpu" and copies * size > (left := available_memory()):
        raise _memory_error(f"a tensor of {size / _GIB:.1f} GiB, with {left / _GIB:.1f} GiB left")


def _memory_error(what: str) -> NotEnoughMemory:
    return NotEnoughMemory(
        f"plain PyTorch needs more memory than this machine has: {what}",
        remedy="define small_dataset() with short samples and small_model() with few words, or use a machine"
        " with more memory",
    )


@contextmanager
def memory_errors() -> Iterator[None]:
    """Context in which a tensor that torch gets no memory for raises NotEnoughMemory."""
    try:
        yield
    except RuntimeError as error:
        if "you tried to allocate" not in str(error):
            raise
        raise _memory_error(str(error)) from None


def _check_targets(targets: torch.Tensor, lengths: torch.Tensor, classes: int) -> None:
    """Raises IndexError unless `targets` has as many indices below `classes` as `lengths` says, in a row of
    each sample [samples, longest], or one sample behind the other in one dim."""
    if targets.dim() == 1:
        counted = targets[: int(lengths.sum())]
        complete = len(counted) == int(lengths.sum())
    else:
        counted = targets[torch.arange(targets.shape[1]) < lengths[:, None]]
        complete = bool((lengths <= targets.shape[1]).all())
    if not complete or bool(((counted < 0) | (counted >= classes)).any()):
        raise IndexError(
            f"ctc_loss expects targets from 0 to {classes - 1}, {lengths.tolist()} of them for the samples, "
            f"but got {targets.tolist()}"
        )
