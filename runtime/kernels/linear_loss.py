"""What the losses on a linear head share: logits by chunks of rows, and the head's gradients from their gradients.

The tiling. Rows are taken in chunks; a chunk's logits [rows of the chunk, vocabulary] are one matrix product into a buffer that all
chunks reuse, small kernels read it (statistics, then loss and gradient), and the gradient replaces the logits in place. From it come the
chunk's rows of the hidden gradient (final) and a partial sum of the weight's gradient. So memory is O(chunk x vocabulary) whatever the
number of rows, and no FLOP is spent twice: gradients are computed with the loss, for an upstream gradient of one, and backward scales
them in place. Where no gradient is wanted, only logits are computed.

The chunk. Adding to the weight's gradient reads and writes all of it once a chunk, so more rows are faster and hold more. An operator
chooses by `Tiling`: as many rows as the hidden states have bytes, or a fixed share of memory.

Rounding. Logits have the hidden states' dtype, as PyTorch's linear gives them; all else is float32. Products accumulate in float32. Their
sum over chunks is kept in float32 for a float32 weight, under autocast too; for a 16-bit weight in its own dtype over at most
`Tiling.own_dtype_chunks` chunks, and beyond in float32, which takes 4 bytes an entry until backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from secc.runtime.errors import UserError
from secc.runtime.kernels import tuning
from secc.runtime.kernels.backend import accumulator, ceil_div, next_power_of_2, require, require_alike
from secc.runtime.kernels.shards import Shards
from secc.runtime.kernels.tuning import Launch

LEAST_ROWS = 256  # of a chunk: with fewer, a product is bound by reading the weight
_CPU_BYTES = 16 << 20  # of a chunk's logits on a CPU


@dataclass(frozen=True)
class Tiling:
    """How an operator chooses its chunk on a GPU, and when it sums a 16-bit weight's gradient in float32.

    `logits_bytes`: of one chunk's logits; 0 means as many as the hidden states have. `own_dtype_chunks`: None means any number.
    """

    name: str
    logits_bytes: int
    own_dtype_chunks: int | None

    def chunk(self, hidden: torch.Tensor, vocabulary: int) -> int:
        """Rows whose logits exist at a time, for a vocabulary of so many tokens on each rank; alike on all ranks that share one."""
        rows = tuning.launch(self.name, vocabulary or 1, hidden).rows
        if rows:
            return rows
        count, width = hidden.shape
        if not hidden.is_cuda:
            return max(_CPU_BYTES // (4 * max(vocabulary, 1)), 1)
        if self.logits_bytes:
            return max(self.logits_bytes // (hidden.element_size() * vocabulary) // 128 * 128, LEAST_ROWS)
        return max(next_power_of_2(ceil_div(count, ceil_div(vocabulary, width))), LEAST_ROWS)

    def sum_dtype(self, hidden: torch.Tensor, weight: torch.Tensor, chunk: int) -> torch.dtype:
        """The dtype that the weight's gradient is summed in."""
        chunks = ceil_div(hidden.shape[0], chunk)
        few = self.own_dtype_chunks is None or chunks <= self.own_dtype_chunks
        return weight.dtype if weight.is_cuda and few else accumulator(weight.dtype)


def default_launch(vocabulary: int, _: torch.device) -> Launch:
    """Blocks that keep loads of a row wide; the rows of a chunk are the tiling's choice."""
    return Launch(block=min(next_power_of_2(vocabulary), 4096), rows=0, warps=8)


def candidates(vocabulary: int, _: torch.device) -> list[Launch]:
    """Other blocks and warps: the chunk is a choice of memory, not of speed alone."""
    blocks = [b for b in (1024, 2048, 4096, 8192) if b <= next_power_of_2(vocabulary)]
    return [Launch(block, 0, warps) for block in blocks for warps in (4, 8, 16)]


def row_chunks(rows: int, chunk: int) -> Iterator[slice]:
    """Slices of at most `chunk` rows."""
    for start in range(0, rows, chunk):
        yield slice(start, min(start + chunk, rows))


class Head:
    """The logits of a linear head, a chunk of rows at a time in one buffer; the weight is taken in the hidden states' dtype."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, chunk: int) -> None:
        self.hidden, self.weight, self.chunk = hidden, weight.to(hidden.dtype), chunk
        self._buffer = hidden.new_empty(min(chunk, hidden.shape[0]), weight.shape[0])

    def logits(self, rows: slice) -> torch.Tensor:
        """[rows, vocabulary], valid until the next call; the caller may overwrite it."""
        return torch.mm(self.hidden[rows], self.weight.t(), out=self._buffer[: rows.stop - rows.start])


class HeadGradient:
    """Gradients of a head's hidden states, weight and bias (those that are wanted) from the logits' gradients by chunks."""

    def __init__(self, tiling: Tiling, head: Head, weight: torch.Tensor, bias: torch.Tensor | None, wants: tuple[bool, bool, bool]) -> None:
        self._head = head
        self.wanted = any(wants)
        self.hidden = torch.empty_like(head.hidden) if wants[0] else None
        self.weight = torch.zeros_like(weight, dtype=tiling.sum_dtype(head.hidden, weight, head.chunk)) if wants[1] else None
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
    tiling: Tiling, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, vocabulary: int, wants: tuple[bool, bool, bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `HeadGradient.results` returns, in shape and dtype; `vocabulary` as the chunk was chosen for."""
    nothing = hidden.new_empty
    dtype = tiling.sum_dtype(hidden, weight, tiling.chunk(hidden, vocabulary))
    return (
        torch.empty_like(hidden) if wants[0] else nothing(0),
        torch.empty_like(weight, dtype=dtype) if wants[1] else nothing(0),
        torch.empty_like(bias, dtype=accumulator(bias.dtype)) if wants[2] and bias is not None else nothing(0),
    )


def scaled(ctx, upstream: torch.Tensor, dtypes: tuple[torch.dtype | None, ...]) -> list[torch.Tensor | None]:
    """The saved gradients times the upstream one, each rounded once to its dtype; None for those that were not wanted.

    Where the dtype allows they are scaled in place, since a second copy of the weight's gradient could be the peak of memory; so backward
    runs once, and a second one raises UserError.
    """
    if getattr(ctx, "spent", False):
        raise UserError("backward ran a second time through one fused loss", remedy="compute the loss again for each backward")
    ctx.spent = True
    # One entry, not none: a 0-dim factor would be rounded to the gradient's dtype before the product.
    factor = upstream.reshape(1)
    return [_times(g.detach(), factor, dtype) for g, dtype in zip(ctx.saved_tensors, dtypes, strict=True)]


def _times(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor | None:
    if dtype is None or (gradient.dim() == 1 and gradient.numel() == 0):
        return None
    if type(gradient) is not torch.Tensor:  # a trace: it wants values, and finds out itself what may be overwritten
        return (gradient * factor).to(dtype)
    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, factor, out=out)


def _under_autocast(hidden: torch.Tensor) -> bool:
    return hidden.dtype != torch.float64 and torch.is_autocast_enabled(hidden.device.type)


def autocast(hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states in the autocast dtype where autocast is on, as PyTorch's linear would take them.

    The weight follows in `Head`, below autograd: so a float32 weight's gradient is summed in float32 and never exists in 16 bits.
    """
    return hidden.to(torch.get_autocast_dtype(hidden.device.type)) if _under_autocast(hidden) else hidden


def require_fits(name: str, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Raise UserError unless a head [V, H] takes hidden states [..., H]: floating numbers of one device and, without autocast, dtype."""
    fits = weight.dim() == 2 and hidden.shape[-1:] == weight.shape[1:]
    require(fits, f"{name}: hidden {list(hidden.shape)} and weight {list(weight.shape)} do not fit")
    if _under_autocast(hidden):
        require(hidden.device == weight.device and weight.is_floating_point(), f"{name}: hidden states and weight are on different devices")
    else:
        require_alike(name, hidden, weight, bias)
