"""A graph network in plain PyTorch: samples are tuples, a batch holds the edges of all graphs one behind the
other, and forward gets the number of graphs as a Python integer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

Sample = tuple[torch.Tensor, torch.Tensor, float]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        received = torch.zeros_like(x).index_add(0, target, self.message(x)[source])
        return F.relu(self.update(x) + received)


class Graphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(16, 1)

    def forward(
        self,
        nodes: torch.Tensor,
        edges: torch.Tensor,
        graph: torch.Tensor,
        target: torch.Tensor,
        graphs: int,
    ) -> torch.Tensor:
        x = self.embed(nodes)
        for layer in self.layers:
            x = layer(x, edges)
        pooled = x.new_zeros(graphs, 16).index_add(0, graph, x)
        return F.mse_loss(self.head(pooled).squeeze(-1), target)


def model() -> nn.Module:
    return Graphs()


def dataset() -> list[Sample]:
    def sample(i: int) -> Sample:
        g = torch.Generator().manual_seed(i)
        nodes = torch.randint(0, 9, (3 + i % 5,), generator=g)
        return nodes, torch.randint(0, len(nodes), (2, 4 + i % 7), generator=g), float(i % 3)

    return [sample(i) for i in range(64)]


def collate(samples: list[Sample]) -> dict[str, torch.Tensor | int]:
    nodes, edges, targets = zip(*samples, strict=True)
    sizes = torch.tensor([len(n) for n in nodes])
    starts = sizes.cumsum(0) - sizes
    return {
        "nodes": torch.cat(nodes),
        "edges": torch.cat([e + start for e, start in zip(edges, starts, strict=True)], 1),
        "graph": torch.arange(len(samples)).repeat_interleave(sizes),
        "target": torch.tensor(targets),
        "graphs": len(samples),
    }
