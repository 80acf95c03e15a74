"""Scalar functions that several kernels share, written so that Triton's interpreter, which has no libdevice,
runs them."""

from __future__ import annotations

from secc.runtime.kernels.backend import jit, tl


@jit
def stable_tanh(x):
    """Returns tanh(x) without cancellation near zero: a series for small |x|, exponentials of negative
    numbers elsewhere."""
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    squared = x * x
    small = x * (1.0 - squared * (1.0 / 3.0) * (1.0 - squared * 0.4))
    return tl.where(tl.abs(x) < 0.04, small, tl.where(x < 0, -large, large))


@jit
def apply_softcap(x, cap, CAPPED: tl.constexpr):
    """Returns cap * tanh(x / cap), or x without a cap."""
    if CAPPED:
        x = cap * stable_tanh(x / cap)
    return x
