"""Annotates which blocks are plain linear layers, so that `fuse-linear-loss` may replace their calls by an
operator.

A subclass, a hook or a parametrisation may do more than a matrix product, so only `nn.Linear` itself
counts.
"""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize
from xdsl.dialects.builtin import ModuleOp

from secc.ir.dialect.ops import graph_of
from secc.ir.dialect.tensor_type import TensorType

_HOOK_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def annotate_linear_blocks(module: ModuleOp, model: nn.Module) -> None:
    """Puts the types of `weight` and `bias` on each block that is a plain `nn.Linear`. `model` may be on
    any device."""
    for path, block in graph_of(module).blocks.items():
        layer = model.get_submodule(path)
        if _is_plain_linear(layer):
            for name, parameter in layer.named_parameters():
                kind = TensorType.from_dims(
                    list(parameter.shape),
                    str(parameter.dtype).removeprefix("torch."),
                    parameter.requires_grad,
                )
                block.attributes[name] = kind


def _is_plain_linear(layer: nn.Module) -> bool:
    own = vars(layer)
    changed = (
        any(own.get(name) for name in _HOOK_ATTRIBUTES)
        or "forward" in own
        or parametrize.is_parametrized(layer)
    )
    return type(layer) is nn.Linear and not changed
