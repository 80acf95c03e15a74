"""Fused operators for training: losses on linear heads that never hold the logits, norms, gated activations, rotary embeddings, rows.

Each file holds one operator: Triton kernels, the PyTorch reference beside them, a `torch.library` operator (namespace `secc`) with
fake and autograd registrations, and a public function. All are deterministic (no atomics) and accumulate in float32; `backend` says
when kernels run.
"""

from __future__ import annotations

from secc.runtime.kernels.cross_entropy import linear_cross_entropy
from secc.runtime.kernels.gated import geglu, swiglu
from secc.runtime.kernels.kl import linear_kl
from secc.runtime.kernels.kl_cross_entropy import linear_kl_ce
from secc.runtime.kernels.norms import layer_norm, rms_norm

__all__ = ["geglu", "layer_norm", "linear_cross_entropy", "linear_kl", "linear_kl_ce", "rms_norm", "swiglu"]
