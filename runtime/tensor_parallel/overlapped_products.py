"""Matrix products of tensor-parallel layers that hide all-reduces: ranks send partial sums while they compute
other products.

*Sums of input gradients.* Column-parallel products that read one tensor (queries, keys and values; gate and
up) owe one sum of its gradient over ranks. The sum starts when the input gradients of all of them are known,
and the gradients of their weights are computed while it travels, as in Megatron-LM's asynchronous all-reduce.
Autograd arranges it: of the nodes that are ready it runs the one that was made last. So the forward makes, in
this order, a node that awaits the sum, one for each weight's gradient, one that starts the sum, and the
products; the products' own nodes give the gradient of the input alone. The result of a weight's node is a
placeholder without memory, which joins the product so that the product's gradient reaches the node. Were the
order another one, results would be the same.

*Sums of products.* A row-parallel product is computed in chunks of rows; the sum of a chunk travels while the
next one is multiplied (Wang et al., "Overlap Communication with Dependent Computation via Decomposition in
Large Deep Learning Models", 2023).

With norms on parts of the sequence, a gradient's sum leaves each rank its positions, and so does that of a
chunk, which has some positions of every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from secc.runtime.plan.replica_routes import slice_bounds
from secc.runtime.tensor_parallel.linear_modules import LinearModule
from secc.runtime.tensor_parallel.replica_group import ReplicaGroup, Wait
from secc.runtime.tensor_parallel.sequence_parallel import (
    POSITION_DIM,
    chunks_of_positions,
    gather_all_positions,
)

StartSum = Callable[[torch.Tensor], tuple[torch.Tensor, Wait]]

PRODUCT_CHUNKS = 4  # of the rows of a row-parallel product


class _WeightGradient(torch.autograd.Function):
    """The gradient of a weight from that of the product [..., outputs]. The forward returns a placeholder in
    the shape of the product, for the weight and the input `x` [..., inputs]."""

    works_on_rows = True  # of a sequence (`secc.runtime.context_parallel`)

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor, out_dim: int) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        ctx.out_dim = out_dim
        return x.new_empty(()).expand(*x.shape[:-1], weight.shape[out_dim])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        of_product, of_input = gradient.flatten(0, -2), x.flatten(0, -2)
        left, right = (of_product, of_input) if ctx.out_dim == 0 else (of_input, of_product)
        return left.t() @ right, None, None


class _JoinWeightGradient(torch.autograd.Function):
    """Returns a product, and gives its gradient to the product's node and to the placeholder's."""

    works_on_rows = True

    @staticmethod
    def forward(ctx: Any, product: torch.Tensor, placeholder: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return product.detach()  # not a view, so that the user's code may write to it in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, gradient


class _StartGradientSum(torch.autograd.Function):
    """Returns the whole tensor that enters for `x`, and starts the sum of its gradient."""

    works_on_rows = True

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: torch.Tensor, whole: torch.Tensor, start: StartSum, waits: list[Wait]
    ) -> torch.Tensor:
        ctx.start, ctx.waits = start, waits
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total, wait = ctx.start(gradient)
        ctx.waits.append(wait)
        return total, None, None, None


class _AwaitGradientSum(torch.autograd.Function):
    works_on_rows = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, waits: list[Wait]) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.waits = waits
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.waits.pop()()
        return gradient, None


class _SumProductInChunks(torch.autograd.Function):
    """The product of `x` [..., inputs] with a detached weight, summed over ranks."""

    works_on_rows = True

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, out_dim: int, group: ReplicaGroup
    ) -> torch.Tensor:
        # Not as a saved tensor: recomputation stops when all of these are there, and may leave out the sum.
        ctx.weight, ctx.out_dim = weight, out_dim
        rows, by_outputs = x.flatten(0, -2), weight.t() if out_dim == 0 else weight
        out, waits = rows.new_empty(rows.shape[0], by_outputs.shape[1]), list[Wait]()
        for i in range(PRODUCT_CHUNKS):
            start, stop = slice_bounds(rows.shape[0], i, PRODUCT_CHUNKS)
            if start < stop:
                torch.mm(rows[start:stop], by_outputs, out=out[start:stop])
                waits.append(group.start_all_reduce(out[start:stop]))
        for wait in waits:
            wait()
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight: torch.Tensor = ctx.weight
        return gradient @ (weight if ctx.out_dim == 0 else weight.t()), None, None, None


class _DelayedProduct(torch.autograd.Function):
    """A placeholder in the shape of the product of `x` [..., inputs] with a detached weight; the backward is
    the product's."""

    works_on_rows = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, out_dim: int) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.weight, ctx.out_dim = weight, out_dim
        return x.new_empty(()).expand(*x.shape[:-1], weight.shape[out_dim])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight: torch.Tensor = ctx.weight
        return gradient @ (weight if ctx.out_dim == 0 else weight.t()), None, None


class _ScatterProductInChunks(torch.autograd.Function):
    """This rank's positions of the sum over ranks of a delayed product, of `given` (input and weight)."""

    works_on_rows, divided_dim = True, POSITION_DIM

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        delayed: torch.Tensor,
        given: tuple[torch.Tensor, torch.Tensor],
        out_dim: int,
        group: ReplicaGroup,
    ) -> torch.Tensor:
        (x, weight), length = given, delayed.shape[POSITION_DIM]
        ctx.group, ctx.length = group, length
        by_outputs, count = weight.t() if out_dim == 0 else weight, x.shape[0]
        parts, waits = list[torch.Tensor](), list[Wait]()
        for chunk in chunks_of_positions(length, group, PRODUCT_CHUNKS) if count else ():
            rows = torch.cat([x[:, start:stop].flatten(0, -2) for start, stop in chunk])
            product = rows @ by_outputs
            lengths = [count * (stop - start) * product.shape[1] for start, stop in chunk]
            own, wait = group.start_reduce_scatter(product.view(-1), lengths)
            start, stop = chunk[group.index]
            parts.append(own.view(count, stop - start, -1) if start < stop else x.new_empty(count, 0, 0))
            waits.append(wait)
        for wait in waits:
            wait()
        filled = [part for part in parts if part.shape[POSITION_DIM]]
        if filled:
            return torch.cat(filled, POSITION_DIM)
        start, stop = slice_bounds(length, group.index, group.size)
        return x.new_empty(count, stop - start, by_outputs.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gather_all_positions(gradient, ctx.group, ctx.length), None, None, None


class EnteredInput:
    """A tensor that enters a region of parts and the placeholders of the weights of products that may read
    it. `entered`: the tensor, for these products. whole: what they read. start: begins to sum
    the gradient of `whole` over ranks; each rank gets the gradient of its own `x`."""

    def __init__(
        self, x: torch.Tensor, products: Iterable[LinearModule], whole: torch.Tensor, start: StartSum
    ) -> None:
        waits: list[Wait] = []
        awaited: torch.Tensor = _AwaitGradientSum.apply(x, waits)  # pyright: ignore
        found = [p for p in products if _defers_weight_gradient(p, whole)]
        self._placeholders = {id(p.weight): make_placeholder(p, whole) for p in found}
        self.entered: torch.Tensor = _StartGradientSum.apply(awaited, whole.detach(), start, waits)  # pyright: ignore

    def multiply(self, product: LinearModule) -> torch.Tensor | None:
        """Returns the product's result with its bias, None if there is no placeholder for its weight."""
        placeholder = self._placeholders.get(id(product.weight))
        if placeholder is None:
            return None
        return join_weight_gradient(product.multiply(self.entered, product.weight.detach()), placeholder)


def sum_product_in_chunks(product: LinearModule, x: torch.Tensor, group: ReplicaGroup) -> torch.Tensor:
    """Returns the sum over ranks of a row-parallel product [..., outputs] of `x` [..., inputs], without the
    bias."""
    weight = product.weight
    with torch._C.DisableTorchFunction():  # sizes are those of the parts
        placeholder = make_placeholder(product, x) if _defers_weight_gradient(product, x) else None
        out: torch.Tensor = _SumProductInChunks.apply(x, weight.detach(), product.out_dim, group)  # pyright: ignore
        return out if placeholder is None else join_weight_gradient(out, placeholder)


def scatter_product_in_chunks(product: LinearModule, x: torch.Tensor, group: ReplicaGroup) -> torch.Tensor:
    """Returns this rank's positions of the sum over ranks of a row-parallel product of `x` [rows, positions,
    inputs], without the bias."""
    weight = product.weight.detach()
    with torch._C.DisableTorchFunction():  # sizes are those of the parts
        placeholder = make_placeholder(product, x) if _defers_weight_gradient(product, x) else None
        delayed: torch.Tensor = _DelayedProduct.apply(x, weight, product.out_dim)  # pyright: ignore
        if placeholder is not None:
            delayed = join_weight_gradient(delayed, placeholder)
        return _ScatterProductInChunks.apply(delayed, (x.detach(), weight), product.out_dim, group)  # pyright: ignore


def can_chunk(product: LinearModule, x: torch.Tensor) -> bool:
    """Whether a product of `x` may be computed in chunks of rows: autocast would change its dtype."""
    same_dtype = x.dtype == product.weight.dtype and not torch.is_autocast_enabled(x.device.type)
    return x.ndim > 1 and same_dtype


def make_placeholder(product: LinearModule, x: torch.Tensor) -> torch.Tensor:
    """Returns the placeholder [..., outputs] of a product of `x`, from which its weight gets its gradient."""
    return _WeightGradient.apply(product.weight, x.detach(), product.out_dim)  # pyright: ignore


def join_weight_gradient(result: torch.Tensor, placeholder: torch.Tensor) -> torch.Tensor:
    """Returns the result of a product, so that its gradient reaches the placeholder, too."""
    return _JoinWeightGradient.apply(result, placeholder)  # pyright: ignore


def _defers_weight_gradient(product: LinearModule, x: torch.Tensor) -> bool:
    """Whether the gradient of a product's weight can have a node of its own."""
    weight: nn.Parameter = product.weight
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and x.shape[-1] == product.in_features
        and can_chunk(product, x)
    )
