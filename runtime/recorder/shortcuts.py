"""Computes layouts of results for calls that are many ops below autograd: of linear maps by rule, of
attention learned once per layout.

Vision towers attend to their windows one by one, hundreds of equal ones in a layer with a dozen ops each.
Linear maps are most of the calls of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear, scaled_dot_product_attention

from secc.runtime.recorder.block_results import autocast_state, contiguous_strides, is_fake, new_fake_tensor
from secc.runtime.recorder.nested_values import NotLiteral, encode_arguments

SHORTCUT_FUNCTIONS = frozenset({linear, scaled_dot_product_attention})
TensorLayout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]
ShortcutCallback = Callable[[Any, Any, torch.Tensor], None]


class Shortcuts:
    """Replaces the functions in `SHORTCUT_FUNCTIONS` if their result has no values and no random numbers are
    drawn.

    `note(args, kwargs, out)` is called for a result that no op has made.
    """

    def __init__(self, mode: FakeTensorMode, note: ShortcutCallback) -> None:
        self._mode, self._note, self._known = mode, note, dict[Any, TensorLayout]()
        self.is_on = True  # off where gradients are taken, for which a shortcut leaves no graph

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return `func(*args, **kwargs)`."""
        if not self.is_on:
            return func(*args, **kwargs)
        layout = _linear_layout(*args) if func is linear and not kwargs else None
        key = _attention_key(args, kwargs) if func is scaled_dot_product_attention else None
        layout = self._known.get(key) if key is not None else layout
        if layout is not None:
            out = new_fake_tensor(self._mode, *layout)
            self._note(args, kwargs, out)
            return out
        out = func(*args, **kwargs)
        if key is not None:
            self._known[key] = tuple(out.shape), out.stride(), out.dtype, out.requires_grad
        return out


def _linear_layout(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> TensorLayout | None:
    """Return the layout of a linear map's result; None if torch itself has to decide."""
    tensors = [x, weight] if bias is None else [x, weight, bias]
    plain = (
        all(is_fake(t) and t.dtype == x.dtype for t in tensors)
        and x.ndim > 1
        and weight.ndim == 2
        and not autocast_state()
    )
    if not plain or x.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    shape = (*x.shape[:-1], weight.shape[0])
    return (
        shape,
        contiguous_strides(shape),
        x.dtype,
        torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
    )


def _attention_key(args: Any, kwargs: Any) -> Any:
    """Return what decides the layout of attention's result; None if it has values or is random."""
    try:
        description = encode_arguments((args, kwargs), _describe_layout)
    except NotLiteral:
        return None
    if not is_fake(args[0] if args else kwargs.get("query")) or (
        args[4] if len(args) > 4 else kwargs.get("dropout_p", 0)
    ):
        return None
    return repr(description), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_state()


def _describe_layout(t: torch.Tensor) -> Any:
    return tuple(t.shape), t.stride(), t.dtype, t.requires_grad, is_fake(t)
