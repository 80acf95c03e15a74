"""What the losses on a linear head share: logits by chunks of rows, and the head's gradients from their gradients.

The tiling. Rows are taken in chunks; a chunk's logits [rows of the chunk, vocabulary] are one matrix product into a buffer that all
chunks reuse, two small kernels read it (statistics, then loss and gradient), and the gradient replaces the logits in place. From it
come the chunk's rows of the hidden gradient (final) and a partial sum of the weight's gradient. So memory is O(chunk x vocabulary)
whatever the number of rows, and no FLOP is spent twice: gradients are computed with the loss, for an upstream gradient of one, and
backward scales them. Where no gradient is wanted, only logits are computed.

Rounding. Logits have the inputs' dtype, as PyTorch's linear gives them; all else is float32. A 16-bit weight's gradient is summed in
its own dtype over at most `OWN_DTYPE_CHUNKS` chunks (each product accumulates in float32 inside) and in float32 beyond, where the
float32 buffer is small beside the logits that are never made.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from secc.runtime.kernels import tuning
from secc.runtime.kernels.backend import accumulator, ceil_div, next_power_of_2
from secc.runtime.kernels.shards import Shards
from secc.runtime.kernels.tuning import Launch

OWN_DTYPE_CHUNKS = 4
_LOGITS_BYTES = {"cuda": 640 << 20, "cpu": 16 << 20}  # of one chunk of 16-bit logits
_ALIGN = 128  # rows of a chunk are a multiple, for the matrix units


def default_launch(vocabulary: int, device: torch.device) -> Launch:
    """Chunks whose logits fill a fixed share of memory, and blocks that keep loads of a row wide."""
    budget = _LOGITS_BYTES.get(device.type, _LOGITS_BYTES["cuda"])
    rows = max(budget // (2 * vocabulary), 1)
    return Launch(block=min(next_power_of_2(vocabulary), 4096), rows=rows // _ALIGN * _ALIGN or min(rows, _ALIGN), warps=8)


def candidates(vocabulary: int, device: torch.device) -> list[Launch]:
    """Other blocks and warps at the default chunk: the chunk is a choice of memory, not of speed alone."""
    rows = default_launch(vocabulary, device).rows
    blocks = [b for b in (1024, 2048, 4096, 8192) if b <= next_power_of_2(vocabulary)]
    return [Launch(block, rows, warps) for block in blocks for warps in (4, 8, 16)]


def row_chunks(rows: int, chunk: int) -> Iterator[slice]:
    """Slices of at most `chunk` rows."""
    for start in range(0, rows, chunk):
        yield slice(start, min(start + chunk, rows))


def weight_gradient_dtype(name: str, hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """The dtype that the sum of a weight's gradient over chunks is kept in (see the module's note on rounding)."""
    chunks = ceil_div(hidden.shape[0], tuning.launch(name, weight.shape[0] or 1, weight).rows)
    keep = weight.is_cuda and chunks <= OWN_DTYPE_CHUNKS
    return weight.dtype if keep else accumulator(weight.dtype)


class Head:
    """The logits of a linear head, a chunk of rows at a time in one buffer."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, chunk: int) -> None:
        self.hidden, self.weight = hidden, weight
        self._buffer = hidden.new_empty(min(chunk, hidden.shape[0]), weight.shape[0])

    def logits(self, rows: slice) -> torch.Tensor:
        """[rows, vocabulary], valid until the next call; the caller may overwrite it."""
        return torch.mm(self.hidden[rows], self.weight.t(), out=self._buffer[: rows.stop - rows.start])


class HeadGradient:
    """Gradients of a head's hidden states, weight and bias (those that are wanted) from the logits' gradients by chunks."""

    def __init__(self, name: str, head: Head, bias: torch.Tensor | None, wants: tuple[bool, bool, bool]) -> None:
        self._head = head
        hidden, weight = head.hidden, head.weight
        self.wanted = any(wants)
        self.hidden = torch.empty_like(hidden) if wants[0] else None
        self.weight = torch.zeros_like(weight, dtype=weight_gradient_dtype(name, hidden, weight)) if wants[1] else None
        self.bias = torch.zeros_like(bias, dtype=accumulator(bias.dtype)) if wants[2] and bias is not None else None

    def add(self, rows: slice, logits_gradient: torch.Tensor) -> None:
        """Take in the gradient of a chunk's logits."""
        if self.hidden is not None:
            torch.mm(logits_gradient, self._head.weight, out=self.hidden[rows])
        if self.weight is not None:
            _add_product_(self.weight, logits_gradient.t(), self._head.hidden[rows])
        if self.bias is not None:
            self.bias += logits_gradient.sum(0, dtype=self.bias.dtype)

    def results(self, shards: Shards) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(hidden, weight, bias) gradients, empty where not wanted; the hidden states' is summed over vocabulary shards."""
        if self.hidden is not None:
            shards.sum_(self.hidden)
        nothing = self._head.hidden.new_empty
        return tuple(nothing(0) if g is None else g for g in (self.hidden, self.weight, self.bias))  # pyright: ignore[reportReturnType]


def _add_product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, with factors of fewer bits than the sum."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # the CPU has no product of mixed dtypes
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def fake_gradients(
    name: str, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wants: tuple[bool, bool, bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `HeadGradient.results` returns, in shape and dtype."""
    nothing = hidden.new_empty
    return (
        torch.empty_like(hidden) if wants[0] else nothing(0),
        torch.empty_like(weight, dtype=weight_gradient_dtype(name, hidden, weight)) if wants[1] else nothing(0),
        torch.empty_like(bias, dtype=accumulator(bias.dtype)) if wants[2] and bias is not None else nothing(0),
    )


def scaled(gradient: torch.Tensor, by: torch.Tensor, like: torch.dtype) -> torch.Tensor | None:
    """`gradient * by` rounded once to a dtype, without a copy between; None for a gradient that was not wanted."""
    if gradient.dim() == 1 and gradient.numel() == 0:
        return None
    # One entry, not none: a 0-dim factor would be rounded to the gradient's dtype before the product.
    return torch.mul(gradient, by.reshape(1), out=torch.empty_like(gradient, dtype=like))


def autocast(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The tensors in the autocast dtype where autocast is on, as PyTorch's linear would take them."""
    device = next(t for t in tensors if t is not None).device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]
