"""Flex attention (`torch.nn.attention.flex_attention`) on CPUs with gradients, and on rows of a sequence.

torch computes flex attention on CPUs by plain ops, but refuses to differentiate them; only a check of the
device stands before it. `prepare_flex_attention` replaces three names of torch's module, so that calls with
tensors on CPUs run these ops under autograd: scores, `score_mod` and `mask_mod` by `torch.vmap`, softmax, and
the product with the values. Calls with other tensors run torch's code as it is, unless they are intercepted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

_MODULE = "torch.nn.attention.flex_attention"
_OPERATORS = "torch._higher_order_ops.flex_attention"
_FLAG = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
_REPLACED = ("_validate_device", "flex_attention_hop", _FLAG)
_PREPARED = "_secc_prepared"
_interceptors = list[Callable[[], bool]]()


def prepare_flex_attention() -> None:
    """Lets flex attention have gradients on CPUs, if torch's module is loaded. Where a version of torch names
    its parts otherwise, nothing changes, and torch refuses."""
    module: Any = sys.modules.get(_MODULE)
    if module is None or hasattr(module, _PREPARED) or not all(hasattr(module, n) for n in _REPLACED):
        return
    if not hasattr(sys.modules.get(_OPERATORS), "math_attention"):
        return
    validate, fused = module._validate_device, module.flex_attention_hop

    def validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        is_on_cpu = query.device.type == "cpu"
        # With this flag, torch calls what follows directly instead of through its compiler.
        setattr(module, _FLAG, is_on_cpu or any(intercepts() for intercepts in _interceptors))
        if not is_on_cpu:
            validate(query, key, value)

    def attend_on_device(query: torch.Tensor, *args: Any) -> Any:
        if query.device.type == "cpu" or any(intercepts() for intercepts in _interceptors):
            return attend_flexibly(query, *args)
        return fused(query, *args)

    module._validate_device, module.flex_attention_hop = validate_device, attend_on_device
    setattr(module, _PREPARED, True)


def intercept_flex_attention(is_active: Callable[[], bool]) -> None:
    """Shows function modes the calls of flex attention on all devices, as `attend_flexibly`, while
    `is_active()`."""
    _interceptors.append(is_active)


def attend_flexibly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns results of attention [samples, heads, queries, width], the logarithms of sums and the largest
    scores, both [samples, heads, queries] and to the base 2. The last entry of `block_mask` is `mask_mod`.
    Function modes see this call."""
    tensors = (query, key, value)
    if has_torch_function(tensors):
        more = (score_mod, block_mask, scale, options)
        return handle_torch_function(attend_flexibly, tensors, *tensors, *more)
    operators: Any = sys.modules[_OPERATORS]
    if query.device.type == "cpu":
        return operators.math_attention(*tensors, score_mod, block_mask, scale, options)
    from torch._higher_order_ops.utils import setup_compilation_env

    def run_operator(*args: Any) -> Any:  # torch's compiler takes functions, not operators
        return operators.flex_attention(*args)

    with setup_compilation_env() as backend:
        run = torch.compile(run_operator, backend=backend, fullgraph=True)
        return run(*tensors, score_mod, block_mask, scale, options)


def is_single_block(block_mask: tuple[Any, ...]) -> bool:
    """Whether a mask, as `BlockMask.as_tuple` gives it, is one block for all positions."""
    from torch.nn.attention.flex_attention import _LARGE_SPARSE_BLOCK_SIZE  # pyright: ignore[reportPrivateUsage]

    return _LARGE_SPARSE_BLOCK_SIZE in block_mask[-3:-1]


def make_block_mask(
    block_mask: tuple[Any, ...], mask_mod: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor
) -> tuple[Any, ...]:
    """Returns a mask with another function and as many queries and keys as given, as a tuple. On CPUs, where
    blocks do not count, they stay."""
    if query.device.type == "cpu" or is_single_block(block_mask):
        return (*block_mask[:-1], mask_mod)
    from torch.nn.attention.flex_attention import create_block_mask

    samples, heads = (1, 1, *block_mask[2].shape[:-1])[-2:]
    sizes = samples, heads, query.shape[-2], key.shape[-2]
    made = create_block_mask(mask_mod, *sizes, device=query.device, BLOCK_SIZE=tuple(block_mask[-3:-1]))
    return made.as_tuple()
