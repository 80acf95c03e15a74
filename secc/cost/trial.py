"""One run of a user's block on the meta device: FLOPs, bytes saved for backward and operations, without values or weights.

Beside what a plain run keeps, a trial tells what one keeps whose units (`secc.runtime.recompute`) run again in the backward: their inputs
and what is saved outside of them. Attention counts as a fused kernel does: it keeps queries, keys, values, output and a log-sum, never
the square of scores. A truth value that the block reads off an input counts as true, which for masks means no padding; any other value
that is read makes the run fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class Trial:
    """What one forward took: FLOPs, bytes saved for backward, operations; with units that run again, the bytes `kept` until the backward,
    the bytes that one unit's second run adds (`working`), and the FLOPs of all second runs (`again`)."""

    flops: int
    saved: int
    ops: int
    kept: int
    working: int
    again: int


def run(module: nn.Module, arguments: Callable[[], tuple[list[Any], dict[str, Any]]], grad: bool, units: Sequence[nn.Module] = ()) -> Trial:
    """Run `module` on meta copies of its parameters and buffers. Raises whatever the block raises on the meta device.

    `units` are the modules inside it, or itself, that may run again.
    """
    state: dict[str, torch.Tensor] = _meta_state(module)
    args, kwargs = arguments()
    saved = _Saved(state)
    counter, fused = _Counter(saved), _FusedAttention(saved)
    with torch.set_grad_enabled(grad), saved_tensors_hooks(saved.pack, lambda t: t), saved.watching(units), fused, counter:
        functional_call(module, state, tuple(args), kwargs)
    flops = counter.flops + fused.flops
    if not grad:
        return Trial(flops, 0, counter.ops, 0, 0, 0)
    return Trial(flops, saved.bytes, counter.ops, saved.kept(), saved.working(), counter.again + fused.again)


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
    """Counts each storage once that autograd keeps, except those of parameters and buffers, and knows in which unit's run that was."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._alive = list(state.values())  # keeps addresses from being used again
        self._state = {_storage(t) for t in self._alive}
        self._sizes: dict[int, int] = {}  # of each storage that is saved
        self._outside: dict[int, int] = {}  # of each that is saved outside of units or goes into one
        self._inside: list[dict[int, int]] = []  # of each that a run of a unit saves
        self._depth = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._note(tensor, self._sizes, self._inside[-1] if self.inside else self._outside)
        return tensor

    @property
    def inside(self) -> bool:
        """Whether a unit is running."""
        return self._depth > 0

    @property
    def bytes(self) -> int:
        return sum(self._sizes.values())

    def kept(self) -> int:
        """Bytes kept where every unit runs again."""
        return sum(self._outside.values())

    def working(self) -> int:
        """The most bytes that the second run of a unit adds to them."""
        return max((sum(n for s, n in sizes.items() if s not in self._outside) for sizes in self._inside), default=0)

    @contextmanager
    def watching(self, units: Sequence[nn.Module]) -> Iterator[None]:
        """Notice when the units run."""
        hooks: list[RemovableHandle] = []
        for unit in units:
            hooks.append(unit.register_forward_pre_hook(self._enter, with_kwargs=True))
            hooks.append(unit.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.inside:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    self._note(tensor, self._outside)
            self._inside.append({})
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._depth -= 1

    def _note(self, tensor: torch.Tensor, *sizes: dict[int, int]) -> None:
        storage = _storage(tensor)
        if storage not in self._state:
            self._alive.append(tensor)
            for table in sizes:
                table[storage] = tensor.untyped_storage().nbytes()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it


class _Counter(TorchDispatchMode):
    """Counts operations and, by torch's own formulas, their FLOPs.

    The layers of a stack repeat the same operations, and torch computes shapes slowly, so the shapes of results are remembered.
    """

    def __init__(self, saved: _Saved) -> None:
        super().__init__()
        self.flops = self.ops = self.again = 0
        self._saved = saved
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
        self.again += flops if self._saved.inside else 0
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

    def __init__(self, saved: _Saved) -> None:
        super().__init__()
        self.flops = self.again = 0
        self._saved = saved

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            query, key, value = (args[i] if i < len(args) else kwargs[n] for i, n in enumerate(("query", "key", "value")))
            flops = 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
            self.flops += flops
            self.again += flops if self._saved.inside else 0
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
