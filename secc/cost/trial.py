"""One run of a user's block on the meta device: FLOPs, bytes saved for backward and operations, without values or weights.

Attention counts as a fused kernel does: it keeps queries, keys, values, output and a log-sum, never the square of scores. A truth value
that the block reads off an input counts as true, which for masks means no padding; any other value that is read makes the run fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True)
class Trial:
    """What one forward took."""

    flops: int
    saved: int
    ops: int


def run(module: nn.Module, arguments: Callable[[], tuple[list[Any], dict[str, Any]]], grad: bool) -> Trial:
    """Run `module` on meta copies of its parameters and buffers. Raises whatever the block raises on the meta device."""
    state: dict[str, torch.Tensor] = _meta_state(module)
    args, kwargs = arguments()
    counter, fused, saved = _Counter(), _FusedAttention(), _Saved(state)
    with torch.set_grad_enabled(grad), saved_tensors_hooks(saved.pack, lambda t: t), fused, counter:
        functional_call(module, state, tuple(args), kwargs)
    return Trial(counter.flops + fused.flops, saved.bytes, counter.ops)


def _meta_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """A meta tensor for each parameter and buffer, one for each name; tied names share one."""
    state: dict[str, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}
    for name, tensor in [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]:
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        state[name] = made[id(tensor)]
    return state


class _Saved:
    """Counts each storage once that autograd keeps, except those of parameters and buffers."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self.bytes = 0
        self._alive = list(state.values())  # keeps addresses from being used again
        self._seen = {_storage(t) for t in self._alive}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in self._seen:
            self._seen.add(_storage(tensor))
            self._alive.append(tensor)
            self.bytes += tensor.untyped_storage().nbytes()
        return tensor


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Counter(TorchDispatchMode):
    """Counts operations and, by torch's own formulas, their FLOPs.

    The layers of a stack repeat the same operations, and torch computes shapes slowly, so the shapes of results are remembered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.ops = 0
        self._known: dict[object, tuple[int, list[_Layout]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        self.ops += 1
        key = _key((func, args, kwargs))
        if key in self._known:
            flops, layouts = self._known[key]
            made = [torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in layouts]
            out = made[0] if len(made) == 1 else tuple(made)
        else:
            out = func(*args, **kwargs)
            formula = flop_registry.get(func._overloadpacket)
            flops = int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
            if key is not None and _is_fresh(func, out, args):
                made = out if isinstance(out, tuple) else (out,)
                self._known[key] = flops, [(t.size(), t.stride(), t.dtype) for t in made]
        self.flops += flops
        return out


_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


def _key(value: Any) -> Any:
    """What decides the shapes that an operation returns, or None where that is not plain data."""
    match value:
        case torch.Tensor():
            return (value.size(), value.stride(), value.dtype) if value.is_meta else None
        case list() | tuple():
            parts = tuple(_key(v) for v in value)
            return None if any(p is None for p in parts) else parts
        case dict():
            return _key(tuple(value.items()))
        case None:
            return "None"
        case _:
            return (type(value), value) if value.__hash__ is not None else None


def _is_fresh(func: Any, out: Any, args: Any) -> bool:
    """Whether an operation's results are new tensors on the meta device: it neither writes to nor returns its arguments."""
    made = out if isinstance(out, tuple) else (out,)
    if func._schema.is_mutable or not all(isinstance(t, torch.Tensor) and t.is_meta for t in made) or len(made) == 0:
        return False
    given = {_storage(a) for a in args if isinstance(a, torch.Tensor)}
    return not any(_storage(t) in given for t in made) and (len(made) > 1 or out is made[0])


class _FusedAttention(TorchFunctionMode):
    """Takes `scaled_dot_product_attention` as one kernel, and truth values of meta tensors as true."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            query, key, value = (args[i] if i < len(args) else kwargs[n] for i, n in enumerate(("query", "key", "value")))
            self.flops += 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
            return _Attention.apply(query, key, value)
        if func is torch.Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **kwargs)


class _Attention(torch.autograd.Function):
    """The shapes of a fused attention, and what it saves."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError("a trial runs forward only")
