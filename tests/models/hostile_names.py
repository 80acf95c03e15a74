"""A model with hostile names of modules, parameters, classes and dataset keys, one after another; half of
these become the same Python identifier."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

NAMES = (
    *("it's", 'say "hi"', '"""', "'''", "back\\slash", "\\", "two\nlines", "tab\t", "nul\0", "br[ack]et"),
    *("[0]", "[/bold]", "{brace}", "%s", "$HOME", "<script>", "a b", "a-b", "a+b", "a_b", "class", "None"),
    *("\x1b[31m", "\u202eright", "\u2028", "ﬁne", "fine", "²", "é", "12", "group", "sends", "terms"),
)
KEYS = (
    *("it's", '"quoted"', '"""', "back\\slash", "{brace}", "%s", "$HOME", "<script>", "a-b", "a+b", "class"),
    *("None", "ﬁne", "fine", "²", "12", "sends", "terms", "kernels", "n_é", "é", "listed", "scalar", "size"),
)
WIDTH, CLASSES = 8, 5


class Scaled(nn.Module):
    """A linear layer and a scale, both registered under `name`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = nn.ModuleDict()
        self.inner.add_module(name, nn.Linear(WIDTH, WIDTH))
        self.scale = nn.ParameterDict()
        self.scale.register_parameter(name, nn.Parameter(torch.full((WIDTH,), 0.5)))

    def forward(self, **given: torch.Tensor) -> dict[str, torch.Tensor]:
        ((name, x),) = given.items()
        (layer,), (scale,) = self.inner.children(), self.scale.parameters()
        return {name: torch.tanh(layer(x)) * scale, "second": x}


class Hostile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for name in NAMES:
            named = type(name.replace("\0", "nul"), (Scaled,), {})
            self.layers.add_module(name, named(name))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, labels: torch.Tensor, **batch: torch.Tensor) -> torch.Tensor:
        x = sum(value * (i + 1) for i, value in enumerate(batch.values()))
        x = x / len(KEYS)
        for name, layer in self.layers.named_children():
            x = x + layer(**{name: x})[name]
        return F.cross_entropy(self.head(x), labels)


def model() -> nn.Module:
    return Hostile()


class Samples(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        values = {key: torch.randn(WIDTH, generator=g) for key in KEYS}
        return values | {"labels": torch.randint(CLASSES, (), generator=g)}


def dataset() -> Dataset[dict[str, Any]]:
    return Samples()
