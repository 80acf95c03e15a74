"""Fused operators for training: losses on linear heads without whole logits, norms, gated activations, rotary
embeddings, gathering and scattering of rows.

Each module holds one operator: Triton kernels, a PyTorch reference, a `torch.library` operator (namespace
`secc`) with fake and autograd registrations, and a public function. All are deterministic (no atomics) and
accumulate in float32; `backend` says when kernels run.
"""

from __future__ import annotations

from secc.runtime.kernels.cross_entropy import linear_cross_entropy, linear_cross_entropy_rows
from secc.runtime.kernels.gated import geglu, swiglu
from secc.runtime.kernels.gather_scatter_rows import gather_rows, ragged_index, scatter_rows
from secc.runtime.kernels.kl import linear_kl
from secc.runtime.kernels.kl_cross_entropy import linear_kl_ce
from secc.runtime.kernels.launch_tuning import tune
from secc.runtime.kernels.norms import layer_norm, rms_norm
from secc.runtime.kernels.rotary import rope, rotate_one
from secc.runtime.kernels.vocab_parallel import (
    vocab_parallel_linear_cross_entropy,
    vocab_parallel_linear_cross_entropy_rows,
    vocab_parallel_linear_kl,
    vocab_parallel_linear_kl_ce,
)

__all__ = [
    "gather_rows",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "linear_cross_entropy_rows",
    "linear_kl",
    "linear_kl_ce",
    "ragged_index",
    "rms_norm",
    "rope",
    "rotate_one",
    "scatter_rows",
    "swiglu",
    "tune",
    "vocab_parallel_linear_cross_entropy",
    "vocab_parallel_linear_cross_entropy_rows",
    "vocab_parallel_linear_kl",
    "vocab_parallel_linear_kl_ce",
]
