"""Operators of `torch.library` that eager PyTorch calls at little cost.

A `torch.library` operator traces under `torch.compile`, fake tensors and dispatch modes, but one call costs
the host several times what launching its kernels does. On plain tensors outside of any tracing the same
Python functions run as an autograd function instead: the same numbers, the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def is_plain_call(x: torch.Tensor) -> bool:
    """Whether nothing watches or transforms calls on `x`, the first input of an operator."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in _PLAIN_TYPES
        and not x.is_meta
        and not _count_dispatch_modes()
        and not _count_function_modes()
        and not _are_transforms_active()
    )


class FusedOperator:
    """A function on tensors as a `torch.library` operator `name`, and as an autograd function for plain
    calls. The first argument is a tensor."""

    def __init__(self, name: str, compute: Callable[..., Any]) -> None:
        self._compute = compute
        self._definition = torch.library.custom_op(name, compute, mutates_args=())
        self._operator = self._definition._opoverload
        self._function: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if not is_plain_call(args[0]):
            return self._operator(*args)
        if not torch.is_grad_enabled():
            return self._compute(*args)
        # An operator without a gradient of its own is called by a backward; where that is to be
        # differentiated again, the library's operator raises.
        return self._operator(*args) if self._function is None else self._function(*args)

    def register_fake(self, fake: Callable[..., Any]) -> None:
        """Registers what computes empty results, as `torch.library.custom_op`'s."""
        self._definition.register_fake(fake)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[[Any, Any, Any], None]
    ) -> None:
        """Registers the gradient, as `torch.library.custom_op`'s."""
        self._definition.register_autograd(backward, setup_context=setup_context)
        compute = self._compute

        class Direct(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
                # One method, because PyTorch binds signatures at each call where context is set apart.
                output = compute(*args)
                setup_context(ctx, args, output)
                return output

        Direct.backward = staticmethod(backward)
        Direct.__name__ = Direct.__qualname__ = self._definition._name
        self._function = Direct.apply


def fused_operator(name: str) -> Callable[[Callable[..., Any]], FusedOperator]:
    """Makes a function a `FusedOperator` called `name`, with its namespace."""
    return lambda compute: FusedOperator(name, compute)
