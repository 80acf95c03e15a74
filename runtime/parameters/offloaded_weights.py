"""`offload=weights`: the weights of a frozen section's layers live in host memory, and come to the device one
layer at a time (as in ZeRO-Infinity: Rajbhandari et al., 2021).

A pass fetches a layer while the one before computes, by the hooks of `zero3`. All that is outside of layers
(embeddings, heads, what glue reads) stays on the device: its copies would be hidden by nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from secc.runtime.parameters.host_copies import HostCopies, PendingCopy
from secc.runtime.parameters.sharded_optimizer import (
    ParameterSlice,
    valueless_placeholder,
    whole_parameter_slice,
)
from secc.runtime.tensor_parallel.parameter_cuts import ParameterCut


class HostUnit:
    """Frozen parameters of one layer and dtype, with their values in one buffer of host memory.

    `named_params` have values, in any memory. Between `start_gather` and `release_values` they have them on
    the device. `slices` are views of the host's buffer, for checkpoints.
    """

    is_trained = False

    def __init__(
        self,
        named_params: Sequence[tuple[str, nn.Parameter]],
        copies: HostCopies,
        cuts: Mapping[str, ParameterCut],
        dtype: torch.dtype | None,
    ) -> None:
        self.parameter_names, self.params = [n for n, _ in named_params], [p for _, p in named_params]
        own = self.params[0].dtype
        kept = dtype if dtype is not None and own == torch.float32 else own
        count = sum(p.numel() for p in self.params)
        self._copies, self._host = copies, copies.empty_on_host(torch.empty(count, dtype=kept, device="meta"))
        self._buffer = torch.empty(count, dtype=kept, device=copies.device)
        self.slices: dict[nn.Parameter, tuple[nn.Parameter, ParameterSlice]] = {}
        self._views: list[torch.Tensor] = []
        for (name, param), host, view in zip(
            named_params,
            self._host.split([p.numel() for p in self.params]),
            self._buffer.split([p.numel() for p in self.params]),
            strict=True,
        ):
            leaf = nn.Parameter(host.view(param.shape).copy_(param.data), requires_grad=False)
            self.slices[param] = leaf, whole_parameter_slice(name, leaf, cuts.get(name))
            self._views.append(view.view(param.shape))
        self._placeholders = [valueless_placeholder(v, v.device) for v in self._views]
        self._arriving: PendingCopy | None = None
        self.release_values()

    @property
    def is_arriving(self) -> bool:
        """Whether the values are on their way to the device."""
        return self._arriving is not None

    def start_gather(self) -> None:
        """Allocates the buffer on the device and starts to copy the values."""
        self._buffer.untyped_storage().resize_(self._buffer.nbytes)
        self._arriving = self._copies.to_device.start(self._buffer, self._host)

    def finish_gather(self) -> None:
        """Waits for the values and points the parameters to them."""
        assert self._arriving is not None
        self._arriving.wait()
        self._arriving = None
        for param, view in zip(self.params, self._views, strict=True):
            param.data = view

    def release_values(self) -> None:
        """Frees the buffer; the parameters read as NaN."""
        for param, placeholder in zip(self.params, self._placeholders, strict=True):
            param.data = placeholder
        self._buffer.untyped_storage().resize_(0)

    def copy_masters_to_shard(self) -> None:
        """Does nothing: frozen weights have no masters."""
