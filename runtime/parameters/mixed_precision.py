"""Mixed precision: modules compute in 16 bits, gradients are summed and the optimizer steps in float32.

A plan with a `dtype` trains the user's float32 model as people do by hand:

    masters = [p.detach().clone() for p in trainable]                 # float32, what the optimizer updates
    and checkpoints hold compute_in(model, "bf16")                                         # parameters, and
    buffers that the state dict has for each micro-batch: loss(model(**floats of the batch in
    bf16)).backward()      # gradients add up in float32 master.grad = gradient; optimizer.step();
    p.copy_(master)

Buffers that the state dict lacks (rotary frequencies, tables) keep their float32, as
`from_pretrained(dtype=...)` leaves them. The compiler casts the model before it captures, so that plans spell
out every cast that the user's forward then makes; a rank builds and loads in float32 and casts what it holds
after it has made masters (`gradients.py`, `sharding.py`).
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
    """The dtype that a plan computes in, None for the model's own (""). Raises UserError for a name that
    there is not."""
    if not name:
        return None
    if name not in COMPUTE_DTYPES:
        raise UserError(
            f"--dtype: cannot compute in {name!r}",
            remedy=f"give {' or '.join(COMPUTE_DTYPES)}, or leave --dtype out for the model's own",
        )
    return COMPUTE_DTYPES[name]


def check_trainable_dtype(model: nn.Module, name: str) -> None:
    """Refuse a model without a trainable parameter in float32: there is nothing to keep masters of."""
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    if compute_dtype(name) is None or not trained or torch.float32 in trained:
        return
    found = ", ".join(sorted(str(d).removeprefix("torch.") for d in trained))
    remedy = (
        "leave --dtype out and it trains as it is, or let model() return it in float32 for float32 masters"
    )
    raise UserError(
        f"--dtype {name}: the model's trainable parameters are {found} already, not float32", remedy=remedy
    )


def cast_model(model: nn.Module, name: str, but: Collection[str] = ()) -> nn.Module:
    """Cast the model's float32 parameters and saved buffers in place, and its float inputs on their way in;
    returns it.

    Parameters stay the same objects; those named in `but`, and all where `name` is "", stay as they are.
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


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Containers with their float32 tensors in `dtype`."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.dtype == torch.float32 else t, tree)


def make_master(param: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """The parameter's float32 values, for the optimizer; the parameter itself becomes `dtype`, its gradients
    add up in float32."""
    master = nn.Parameter(param.data)
    param.data = param.data.to(dtype)
    accumulate_in_float32(param)
    return master


def accumulate_in_float32(param: nn.Parameter) -> None:
    """Let the parameter's `.grad` be float32, whatever it computes in: every backward adds to it without
    rounding to 16 bits."""
    param.grad_dtype = torch.float32
