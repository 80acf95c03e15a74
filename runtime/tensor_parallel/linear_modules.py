"""The modules that tensor parallelism can cut: linear maps and embeddings, whatever they are called.

A linear map is `torch.nn.Linear` or a `Conv1D` like GPT-2's, with a weight [in, out]. A subclass with its own
forward is not one, because it may compute anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class LinearModule:
    """A linear map. `out_dim`: the dim of its outputs in the weight; `out_attribute`, `in_attribute`: the
    attributes of the module that hold its sizes."""

    module: nn.Module
    out_dim: int
    out_attribute: str
    in_attribute: str

    @property
    def weight(self) -> nn.Parameter:
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    @property
    def bias(self) -> nn.Parameter | None:
        bias = self.module.bias
        return bias if isinstance(bias, nn.Parameter) else None

    @property
    def out_features(self) -> int:
        return self.weight.shape[self.out_dim]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1 - self.out_dim]

    def multiply_weight(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the linear map [..., out] of `x` [..., in], without the bias."""
        return F.linear(x, self.weight if self.out_dim == 0 else self.weight.t())

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns the linear map [..., out] of `x` [..., in] with `weight` in place of the module's own, and
        with the bias."""
        return F.linear(x, weight if self.out_dim == 0 else weight.t(), self.bias)

    def set_sizes(self, outputs: int, inputs: int) -> None:
        """Sets the module's size attributes to those of this rank's weight."""
        setattr(self.module, self.out_attribute, outputs)
        setattr(self.module, self.in_attribute, inputs)


def as_linear(module: nn.Module) -> LinearModule | None:
    """Returns `module` as a linear map, or None if it is not one; one that computes its weight or bias from
    others (weight norm) is not."""
    if not _holds_tensors(module):
        return None
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return LinearModule(module, 0, "out_features", "in_features")
    kind = type(module)
    if (
        kind.__name__ == "Conv1D"
        and {"nf", "nx"} <= vars(module).keys()
        and set(dict(module.named_parameters())) == {"weight", "bias"}
    ):
        return LinearModule(module, 1, "nf", "nx")
    return None


def _holds_tensors(module: nn.Module) -> bool:
    """Whether a module's weight is a parameter, and its bias, if any, too."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    return isinstance(weight, nn.Parameter) and (bias is None or isinstance(bias, nn.Parameter))


def as_embedding(module: nn.Module) -> nn.Embedding | None:
    """Returns `module` as an embedding with rows that can be cut, or None."""
    if (
        not isinstance(module, nn.Embedding)
        or not _holds_tensors(module)
        or module.max_norm is not None
        or module.scale_grad_by_freq
        or module.sparse
    ):
        return None
    return module
