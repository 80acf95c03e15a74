"""What the losses on linear heads share: logits in chunks of rows, and the head's gradients from the logits'
gradients.

Tiling. Rows are processed in chunks. A chunk's logits [rows of the chunk, vocabulary] are one matrix product
into a buffer that all chunks reuse; small kernels read it (statistics, then loss and gradient), and the
gradient replaces the logits in place. It yields the chunk's rows of the hidden gradient and a summand of the
weight's gradient. Logits of a teacher get no gradient and need no large products, so they are computed for
fewer rows at a time (`split_for_teacher`). So memory is O(chunk x vocabulary) for any number of rows, and no
FLOP is spent twice: gradients are computed together with the loss, for an upstream gradient of one, and
backward scales them in place. If no gradient is required, only logits are computed.

Rounding. Logits have the dtype of the hidden states, as from PyTorch's linear; everything else is float32.
Products accumulate in float32. Their sum over chunks is float32 for a float32 weight, also under autocast.
For a 16-bit weight it has the weight's dtype over at most `MAX_OWN_DTYPE_CHUNKS` chunks. So on a GPU a chunk
is that part of the rows; only where its logits would take more memory than a sum in float32, which takes 4
bytes per entry until backward, chunks are small and the sum is float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from secc.runtime.errors import UserError
from secc.runtime.kernels import launch_tuning
from secc.runtime.kernels.backend import (
    accumulator_dtype,
    ceil_div,
    check_argument,
    check_same_kind,
    next_power_of_2,
)
from secc.runtime.kernels.launch_tuning import LaunchParameters
from secc.runtime.kernels.vocab_group import VocabGroup

MAX_OWN_DTYPE_CHUNKS = 6
MIN_CHUNK_ROWS = 1024  # on a GPU: with fewer rows, products are bound by reading and writing weights
TEACHER_LOGITS_BYTES = 112 << 20  # on a GPU: 384 rows of 152k tokens in 16 bits
MIN_TEACHER_ROWS = 256
CHUNK_LOGITS_BYTES = {
    "cuda": 640 << 20,
    "cpu": 16 << 20,
}  # for one model, where chunks do not follow from the sum's dtype


def choose_chunk_rows(name: str, hidden: torch.Tensor, weight: torch.Tensor, vocabulary: int) -> int:
    """Returns the number of rows of `hidden` [N, H] in a chunk, for `vocabulary` tokens of `weight` [v, H] on
    each rank. It is the same on all ranks that share a vocabulary."""
    forced = launch_tuning.choose_launch(name, vocabulary, hidden).rows
    if forced:
        return forced
    row_bytes = hidden.element_size() * vocabulary
    budget = CHUNK_LOGITS_BYTES.get(hidden.device.type, CHUNK_LOGITS_BYTES["cuda"])
    if not hidden.is_cuda:
        return max(budget // row_bytes, 1)
    part = ceil_div(ceil_div(hidden.shape[0], MAX_OWN_DTYPE_CHUNKS), 32) * 32
    part = max(part, MIN_CHUNK_ROWS)
    if weight.element_size() < 4:
        budget += 4 * vocabulary * hidden.shape[1]
        if part * row_bytes <= budget:
            return part
        budget = CHUNK_LOGITS_BYTES["cuda"]
    return min(part, max(budget // row_bytes // 128 * 128, MIN_CHUNK_ROWS))


def split_for_teacher(rows: slice, hidden: torch.Tensor, vocabulary: int) -> Iterator[tuple[slice, slice]]:
    """Splits a chunk's `rows` of `hidden` [N, H] into those with a teacher's logits at the same time: yields
    (which rows, the same within the chunk). The same on all ranks that share a vocabulary, each with
    `vocabulary` tokens."""
    step = rows.stop - rows.start
    if hidden.is_cuda:
        row_bytes = hidden.element_size() * max(vocabulary, 1)
        step = max(TEACHER_LOGITS_BYTES // row_bytes // 128 * 128, MIN_TEACHER_ROWS)
    for part in split_rows(rows.stop - rows.start, max(step, 1)):
        yield slice(rows.start + part.start, rows.start + part.stop), part


def weight_sum_dtype(hidden: torch.Tensor, weight: torch.Tensor, chunk: int) -> torch.dtype:
    """Returns the dtype in which the gradient of `weight` [V, H] is summed over chunks of `chunk` rows of
    `hidden` [N, H] (see Rounding above)."""
    own = weight.is_cuda and ceil_div(hidden.shape[0], chunk) <= MAX_OWN_DTYPE_CHUNKS
    return weight.dtype if own else accumulator_dtype(weight.dtype)


def default_loss_launch(vocabulary: int, _: torch.device) -> LaunchParameters:
    """Returns blocks that keep loads of a row wide; the operator chooses its rows and tokens itself."""
    return LaunchParameters(block=min(next_power_of_2(vocabulary), 4096), rows=0, warps=8)


def loss_launch_candidates(vocabulary: int, _: torch.device) -> list[LaunchParameters]:
    """Returns other blocks and warps to measure. The chunk is not among them, because it is a choice of
    memory, too."""
    blocks = [b for b in (1024, 2048, 4096, 8192) if b <= next_power_of_2(vocabulary)]
    return [LaunchParameters(block, 0, warps) for block in blocks for warps in (4, 8, 16)]


def split_rows(rows: int, chunk: int) -> Iterator[slice]:
    """Yields slices of at most `chunk` rows."""
    for start in range(0, rows, chunk):
        yield slice(start, min(start + chunk, rows))


class ChunkedHead:
    """A linear head (hidden [N, H], weight [V, H], bias [V]) that computes logits one chunk of rows at a time
    in one buffer. Weight and bias are cast to the dtype of the hidden states."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chunk: int
    ) -> None:
        self.hidden, self.weight, self.chunk = hidden, weight.to(hidden.dtype), chunk
        self.bias = None if bias is None else bias.to(hidden.dtype)
        self._buffer = hidden.new_empty(0, weight.shape[0])

    def compute_logits(self, rows: slice) -> torch.Tensor:
        """Returns the logits [rows, V], valid until the next call; the caller may overwrite them."""
        count = rows.stop - rows.start
        if count > self._buffer.shape[0]:
            self._buffer = self.hidden.new_empty(count, self.weight.shape[0])
        hidden, out = self.hidden[rows], self._buffer[:count]
        if self.bias is None:
            return torch.mm(hidden, self.weight.t(), out=out)
        return torch.addmm(self.bias, hidden, self.weight.t(), out=out)


class ChunkedHeadGradient:
    """Accumulates the required gradients of a head's hidden states, weight and bias from the logits'
    gradients of its chunks."""

    def __init__(
        self, head: ChunkedHead, weight: torch.Tensor, want_hidden: bool, want_weight: bool, want_bias: bool
    ) -> None:
        self._head = head
        self.is_wanted = want_hidden or want_weight or want_bias
        self.hidden = torch.empty_like(head.hidden) if want_hidden else None
        self.weight = _make_weight_sum(head, weight) if want_weight else None
        self.bias = (
            head.hidden.new_zeros(weight.shape[0], dtype=accumulator_dtype(head.hidden.dtype))
            if want_bias
            else None
        )

    def add_chunk(self, rows: slice, logits_gradient: torch.Tensor) -> None:
        """Adds the gradient of a chunk's logits [rows, V]."""
        if self.hidden is not None:
            torch.mm(logits_gradient, self._head.weight, out=self.hidden[rows])
        if self.weight is not None:
            hidden = self._head.hidden[rows]
            if rows.start == 0 and self.weight.dtype == hidden.dtype:
                torch.mm(logits_gradient.t(), hidden, out=self.weight)
            else:
                add_product_(self.weight, logits_gradient.t(), hidden)
        if self.bias is not None:
            self.bias += logits_gradient.sum(0, dtype=self.bias.dtype)

    def results(self, shards: VocabGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the (hidden, weight, bias) gradients, empty if not required. The hidden states' gradient is
        summed over the vocabulary shards."""
        if self.hidden is not None:
            shards.all_reduce_(self.hidden)
        nothing = self._head.hidden.new_empty
        hidden, weight, bias = (nothing(0) if g is None else g for g in (self.hidden, self.weight, self.bias))
        return hidden, weight, bias


def _make_weight_sum(head: ChunkedHead, weight: torch.Tensor) -> torch.Tensor:
    """Allocates the weight's gradient; where the first chunk's product will overwrite it, without zeros."""
    dtype = weight_sum_dtype(head.hidden, weight, head.chunk)
    is_overwritten = dtype == head.hidden.dtype and len(head.hidden) > 0
    return (torch.empty_like if is_overwritten else torch.zeros_like)(weight, dtype=dtype)


def add_product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Computes total += a @ b, with `total` [M, N], `a` [M, K] and `b` [K, N], for factors of at most as many
    bits as the sum."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # the CPU has no product of mixed dtypes
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def make_fake_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    chunk: int,
    want_hidden: bool,
    want_weight: bool,
    want_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns tensors of the shapes and dtypes of `ChunkedHeadGradient.results`."""
    nothing = hidden.new_empty
    dtype = weight_sum_dtype(hidden, weight, chunk)
    return (
        torch.empty_like(hidden) if want_hidden else nothing(0),
        torch.empty_like(weight, dtype=dtype) if want_weight else nothing(0),
        nothing(weight.shape[0], dtype=accumulator_dtype(hidden.dtype)) if want_bias else nothing(0),
    )


def save_gradients(
    ctx, gradients: Sequence[torch.Tensor], given: Sequence[torch.Tensor], wants: Sequence[bool]
) -> None:
    """Keeps the gradients of `given` for `scale_saved_gradients`, which rounds them to the dtypes of these.
    `wants`: whether they are required."""
    ctx.dtypes = tuple(t.dtype if want else None for t, want in zip(given, wants, strict=True))
    ctx.save_for_backward(*gradients)
    # Hooks of saved tensors may give copies back; the references tell whether memory is the one saved here.
    is_plain = all(type(g) is torch.Tensor for g in gradients)
    ctx.memory = [StorageWeakRef(g.untyped_storage()) for g in gradients] if is_plain else None


def scale_saved_gradients(ctx, upstream: torch.Tensor) -> list[torch.Tensor | None]:
    """Returns the saved gradients times the upstream one (0-dim), each in its own shape and rounded once to
    its dtype; None for gradients that are not required, those without a dtype.

    They are scaled in place if the dtype allows, because a second copy of the weight's gradient could be the
    peak of memory. So backward can run once only, or again with the very same upstream gradient (the parts of
    a split backward do so); with another one it raises UserError.
    """
    before = getattr(ctx, "upstream", None)
    if before is not None and before.data_ptr() != upstream.data_ptr():  # kept, so nothing else is there
        raise UserError(
            "backward ran a second time through one fused loss",
            remedy="compute the loss again for each backward",
        )
    ctx.upstream = upstream
    # One entry in one dim: a 0-dim factor would be rounded to the gradient's dtype before the product.
    factor = upstream.reshape(1)
    results: list[torch.Tensor | None] = []
    for i, (saved, dtype) in enumerate(zip(ctx.saved_tensors, ctx.dtypes, strict=True)):
        gradient = saved.detach()
        if dtype is None:
            results.append(None)
        elif type(gradient) is not torch.Tensor or ctx.memory is None:
            # Traced: only values matter, tracing decides itself what may be overwritten.
            results.append((gradient * factor).to(dtype))
        elif gradient.dtype != dtype or ctx.memory[i] != StorageWeakRef(gradient.untyped_storage()):
            results.append(torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype)))
        else:
            if before is None:
                # By `data`, which has a version of its own: a second part reads the saved tensor again.
                torch.mul(gradient.data, factor, out=gradient.data)
            results.append(gradient)
    return results


def _is_autocast_on(hidden: torch.Tensor) -> bool:
    return hidden.dtype != torch.float64 and torch.is_autocast_enabled(hidden.device.type)


def cast_as_autocast(hidden: torch.Tensor) -> torch.Tensor:
    """Returns hidden states [..., H] in the autocast dtype if autocast is on, as PyTorch's linear would.

    The weight is cast in `ChunkedHead`, below autograd, so that a float32 weight's gradient is summed in
    float32 and never exists in 16 bits.
    """
    return hidden.to(torch.get_autocast_dtype(hidden.device.type)) if _is_autocast_on(hidden) else hidden


def check_head_fits(
    name: str, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Raises UserError unless a head [V, H] fits hidden states [..., H]: floating numbers on one device and,
    without autocast, of one dtype."""
    fits = weight.dim() == 2 and hidden.shape[-1:] == weight.shape[1:]
    check_argument(fits, f"{name}: hidden {list(hidden.shape)} and weight {list(weight.shape)} do not fit")
    if _is_autocast_on(hidden):
        check_argument(
            hidden.device == weight.device and weight.is_floating_point(),
            f"{name}: hidden states and weight are on different devices",
        )
    else:
        check_same_kind(name, hidden, weight, bias)
