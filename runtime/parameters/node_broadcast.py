"""One process per node builds the user's model and sends the others what they hold, so that a node holds one
whole copy at a time.

The other processes build the model without values, allocate their parameters, and receive the values over
gloo in flat messages. Buffers and tensors in plain attributes of modules are sent along, because they may be
random. All processes traverse the same names in the same order, so only values are sent.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from secc.runtime.host.tensor_bytes import view_bytes

WEIGHT_MESSAGE_BYTES = 1 << 26  # a larger tensor is a message of its own


@dataclass(frozen=True)
class NodeRanks:
    """The ranks on this machine; the first one builds the model. `rank` is this process."""

    ranks: tuple[int, ...]
    rank: int

    @staticmethod
    def from_environment(rank: int) -> NodeRanks:
        """Reads the ranks of this machine from torchrun's environment; only `rank` if there is no process
        group."""
        local, size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if not dist.is_initialized() or size == 1:
            return NodeRanks((rank,), rank)
        return NodeRanks(tuple(range(rank - local, rank - local + size)), rank)

    @property
    def is_builder(self) -> bool:
        """Whether this rank builds the model."""
        return self.rank == self.ranks[0]

    def receiver_ranks(self) -> tuple[int, ...]:
        """Returns the ranks that receive their weights."""
        return self.ranks[1:]


def attribute_tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yields (module, attribute, tensor) for tensors that modules keep as plain attributes."""
    for module in model.modules():
        for name, value in sorted(vars(module).items()):
            if isinstance(value, torch.Tensor):
                yield module, name, value


def broadcast_weights(node: NodeRanks, model: nn.Module, held: Mapping[int, Iterable[str]]) -> None:
    """Sends each other rank of the node the parameters that it holds (`held[rank]`, by canonical names), and
    all buffers and attribute tensors."""
    with torch.no_grad():
        for rank in node.receiver_ranks():
            for tensors in _group_into_messages(_tensors_of_rank(model, held[rank])):
                dist.send(torch.cat([view_bytes(t.detach().cpu()) for t in tensors]), rank)


def receive_weights(node: NodeRanks, model: nn.Module, held: Iterable[str]) -> None:
    """Receives what `broadcast_weights` sends this rank, in place."""
    with torch.no_grad():
        for tensors in _group_into_messages(_tensors_of_rank(model, held)):
            sizes = [t.numel() * t.element_size() for t in tensors]
            message = torch.empty(sum(sizes), dtype=torch.uint8)
            dist.recv(message, node.ranks[0])
            for tensor, values in zip(tensors, message.split(sizes), strict=True):
                tensor.copy_(values.clone().view(tensor.dtype).view(tensor.shape))


def _tensors_of_rank(model: nn.Module, held: Iterable[str]) -> Iterator[torch.Tensor]:
    """Yields what one rank receives, in an order that all ranks agree on."""
    wanted = set(held)
    yield from (p for name, p in model.named_parameters() if name in wanted)
    yield from (b for _, b in model.named_buffers())
    yield from (t for _, _, t in attribute_tensors(model))


def _group_into_messages(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Groups tensors into messages of about WEIGHT_MESSAGE_BYTES."""
    message, size = list[torch.Tensor](), 0
    for tensor in tensors:
        message.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= WEIGHT_MESSAGE_BYTES:
            yield message
            message, size = [], 0
    if size:
        yield message
