"""Results of attention without values, learnt once for each layout.

Vision towers attend to their windows one by one, hundreds of alike ones in a layer, and each is a dozen ops below autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from secc.runtime.recorder.fakes import autocast, fresh, is_fake
from secc.runtime.recorder.structure import NotLiteral, arguments


class Attention:
    """Takes the place of `scaled_dot_product_attention` where its result has no values and no random numbers are drawn."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode, self._known = mode, dict[Any, torch.Tensor]()

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`func(*args, **kwargs)`."""
        try:
            given = arguments((args, kwargs), _layout)
        except NotLiteral:
            return func(*args, **kwargs)
        if not is_fake(args[0] if args else kwargs.get("query")) or (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0)):
            return func(*args, **kwargs)
        key = repr(given), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast()
        if key in self._known:
            with self._mode, torch.enable_grad():
                return self._known[key].clone()
        out = func(*args, **kwargs)
        self._known[key] = fresh(self._mode, out.shape, out.stride(), out.dtype).requires_grad_(out.requires_grad)
        return out


def _layout(t: torch.Tensor) -> Any:
    return tuple(t.shape), t.stride(), t.dtype, t.requires_grad, is_fake(t)
