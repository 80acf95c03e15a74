"""One process of a node builds the user's model and hands out what the others on the node hold, so that a
node has one copy of it.

The others build a model without values, make room for their parameters, and receive them over gloo in flat
messages; buffers and tensors that a module keeps as plain attributes come along, since they may be random
too. All sides walk the same names in the same order, so nothing but values is sent.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

WEIGHT_MESSAGE_BYTES = 1 << 26  # bytes; a tensor larger than that is a message of its own


@dataclass(frozen=True)
class NodeRanks:
    """The ranks of this machine, the first of which builds."""

    ranks: tuple[int, ...]
    rank: int

    @staticmethod
    def from_environment(rank: int) -> NodeRanks:
        """This machine as torchrun started it: ranks in a row. Alone where there is no process group."""
        local, size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if not dist.is_initialized() or size == 1:
            return NodeRanks((rank,), rank)
        return NodeRanks(tuple(range(rank - local, rank - local + size)), rank)

    @property
    def is_builder(self) -> bool:
        """Whether this rank is the one that builds."""
        return self.rank == self.ranks[0]

    def receiver_ranks(self) -> tuple[int, ...]:
        """The ranks that the builder hands out to."""
        return self.ranks[1:]


def attribute_tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Tensors that modules keep as plain attributes: (module, attribute, tensor)."""
    for module in model.modules():
        for name, value in sorted(vars(module).items()):
            if isinstance(value, torch.Tensor):
                yield module, name, value


def broadcast_weights(node: NodeRanks, model: nn.Module, held: Mapping[int, Iterable[str]]) -> None:
    """Send every other rank of the node its parameters, `held[rank]` by first names, and all buffers and
    loose tensors."""
    with torch.no_grad():
        for rank in node.receiver_ranks():
            for tensors in _group_into_messages(_tensors_of_rank(model, held[rank])):
                dist.send(torch.cat([_as_bytes(t.detach().cpu()) for t in tensors]), rank)


def receive_weights(node: NodeRanks, model: nn.Module, held: Iterable[str]) -> None:
    """Fill what this rank holds, as `hand_out` sends it."""
    with torch.no_grad():
        for tensors in _group_into_messages(_tensors_of_rank(model, held)):
            sizes = [t.numel() * t.element_size() for t in tensors]
            message = torch.empty(sum(sizes), dtype=torch.uint8)
            dist.recv(message, node.ranks[0])
            for tensor, part in zip(tensors, message.split(sizes), strict=True):
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _tensors_of_rank(model: nn.Module, held: Iterable[str]) -> Iterator[torch.Tensor]:
    """What one rank is given, in an order that all ranks know."""
    wanted = set(held)
    yield from (p for name, p in model.named_parameters() if name in wanted)
    yield from (b for _, b in model.named_buffers())
    yield from (t for _, _, t in attribute_tensors(model))


def _group_into_messages(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors in messages of about MESSAGE bytes."""
    message, size = list[torch.Tensor](), 0
    for tensor in tensors:
        message.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= WEIGHT_MESSAGE_BYTES:
            yield message
            message, size = [], 0
    if size:
        yield message


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
