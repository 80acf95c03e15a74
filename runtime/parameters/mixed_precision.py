"""Mixed precision: modules compute in 16 bits, gradients are accumulated and the optimizer steps in float32.

A plan with a `dtype` trains the user's float32 model in the usual way (Micikevicius et al., "Mixed Precision
Training", 2018):

    masters = [p.detach().clone() for p in trainable]  # float32: updated by the optimizer, in checkpoints
    cast_model(model, "bf16")                          # parameters, and buffers that are in the state dict
    for each micro-batch:
        loss(model(**batch_in_bf16)).backward()        # gradients accumulate in float32
    master.grad = gradient; optimizer.step(); p.copy_(master)

Buffers outside of the state dict (rotary frequencies, tables) stay float32, as with
`from_pretrained(dtype=...)`. The compiler casts the model before it captures, so that a plan contains every
cast of the user's forward. A rank builds and loads in float32, makes masters (`gradient_reduction`,
`sharded_optimizer`), and casts what it holds afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from secc.runtime.errors import UserError

COMPUTE_DTYPES = {"bf16": torch.bfloat16}


def compute_dtype(name: str) -> torch.dtype | None:
    """Returns the dtype that a plan computes in, None for the model's own (""). Raises UserError for an
    unknown name."""
    if not name:
        return None
    if name not in COMPUTE_DTYPES:
        raise UserError(
            f"--dtype: expected one of {', '.join(COMPUTE_DTYPES)}, got {name!r}",
            remedy=f"give {' or '.join(COMPUTE_DTYPES)}, or leave --dtype out for the model's own",
        )
    return COMPUTE_DTYPES[name]


def check_trainable_dtype(model: nn.Module, name: str) -> None:
    """Raises UserError if all trainable parameters of the model are in 16 bits already: there is nothing to
    keep masters of."""
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    if compute_dtype(name) is None or not trained or torch.float32 in trained:
        return
    dtypes = ", ".join(sorted(str(d).removeprefix("torch.") for d in trained))
    remedy = (
        "leave --dtype out and it trains as it is, or let model() return it in float32 for float32 masters"
    )
    raise UserError(
        f"--dtype {name}: the model's trainable parameters are {dtypes} already, not float32", remedy=remedy
    )


def cast_model(model: nn.Module, name: str, but: Collection[str] = ()) -> nn.Module:
    """Casts float32 parameters and saved buffers in place, and float inputs of the model when it is called;
    returns the model.

    Parameters stay the same objects. Those named in `but` keep their dtype, and all do if `name` is "".
    """
    dtype = compute_dtype(name)
    if dtype is None:
        return model
    saved = model.state_dict(keep_vars=True)
    tensors: dict[str, Any] = dict(model.named_parameters()) | {
        n: b for n, b in model.named_buffers() if n in saved
    }
    for path, tensor in tensors.items():
        if tensor.dtype == torch.float32 and path not in but:
            tensor.data = tensor.data.to(dtype)
            if tensor.requires_grad:
                accumulate_in_float32(tensor)

    def cast(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        return cast_floats((args, dict(kwargs)), dtype)

    model.register_forward_pre_hook(cast, with_kwargs=True)
    return model


def find_uncast_buffers(model: nn.Module) -> list[str]:
    """Returns the names of the buffers that stay float32: those outside of the state dict."""
    saved = model.state_dict(keep_vars=True)
    return [n for n, b in model.named_buffers() if b.dtype == torch.float32 and n not in saved]


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Casts the float32 tensors in nested containers to `dtype`."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.dtype == torch.float32 else t, tree)


def make_master(param: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Returns a float32 copy of a parameter for the optimizer; the parameter itself becomes `dtype` and
    accumulates its gradients in float32."""
    master = nn.Parameter(param.data)
    param.data = param.data.to(dtype)
    accumulate_in_float32(param)
    return master


def accumulate_in_float32(param: nn.Parameter) -> None:
    """Makes the parameter's `.grad` float32, so that backwards add to it without rounding to 16 bits."""
    param.grad_dtype = torch.float32
