"""Compound models with what research code does besides computing: hooks that gather features, experts chosen
in Python, gradients inside of forward, frozen teachers in 16 bits, rows taken apart by lengths, complex
weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from tools.zoo_models.entry import Entry
from tools.zoo_models.samples import VOCABULARY, Sample, integer, text_only
from tools.zoo_models.structures import WIDTH, Decoder, Layer, Patches, Text, next_token


class Watched(nn.Module):
    """A student's layers learn those of a teacher, which hooks gather."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student, self.fit = (
            Patches(4).requires_grad_(False),
            Patches(2),
            nn.Linear(WIDTH, WIDTH),
        )
        self.seen: dict[str, list[torch.Tensor]] = {"teacher": [], "student": []}
        for name, layers in (("teacher", self.teacher.layers[1::2]), ("student", self.student.layers)):
            for layer in layers:
                layer.register_forward_hook(lambda module, given, out, name=name: self.seen[name].append(out))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        for found in self.seen.values():
            found.clear()
        with torch.no_grad():
            self.teacher(pixel_values)
        self.student(pixel_values)
        pairs = zip(self.seen["student"], self.seen["teacher"], strict=True)
        return torch.stack([F.mse_loss(self.fit(found), wanted) for found, wanted in pairs]).sum()


class Routed(nn.Module):
    """Two experts a token and a shared one; a loop in Python hands each expert its rows."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList([_network() for _ in range(experts)])
        self.shared = _network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).topk(2, -1)
        out = self.shared(rows)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if len(row) > 0:
                out.index_add_(0, row, expert(rows[row]) * weights[row, place, None])
        return out.view_as(x)


class RoutedText(nn.Module):
    """A decoder with such experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.attention = nn.ModuleList([Layer(causal=True) for _ in range(2)])
        self.experts = nn.ModuleList([Routed() for _ in range(2)])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for attention, experts in zip(self.attention, self.experts, strict=True):
            x = attention(x)
            x = x + experts(x)
        return next_token(self.head(x), labels)


class Field(nn.Module):
    """Energies of molecules, and the forces on their atoms, which are its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(3, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1)
        )

    def forward(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            places = places.detach().requires_grad_()
            energies = self.network(places - places.mean(1, keepdim=True)).sum((1, 2))
            return energies, -torch.autograd.grad(energies.sum(), places, create_graph=True)[0]


class Forces(nn.Module):
    """Learns energies and forces."""

    def __init__(self) -> None:
        super().__init__()
        self.field, self.scale = Field(), nn.Linear(1, 1)

    def forward(self, places: torch.Tensor, energy: torch.Tensor, force: torch.Tensor) -> torch.Tensor:
        energies, forces = self.field(places)
        return F.mse_loss(self.scale(energies[:, None])[:, 0], energy) + F.mse_loss(forces, force)


class Sentences(nn.Module):
    """Documents of several sentences, each read alone, then together."""

    def __init__(self) -> None:
        super().__init__()
        self.reader, self.document = Text(), nn.ModuleList([Layer(causal=False) for _ in range(2)])
        self.judge = nn.Linear(WIDTH, 3)

    def forward(self, sentences: torch.Tensor, counts: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        x = pad_sequence(self.reader(sentences).mean(1).split(counts.tolist()), batch_first=True)
        mask = torch.arange(x.shape[1])[None] < counts[:, None]
        for layer in self.document:
            x = layer(x, mask)
        return F.cross_entropy(self.judge((x * mask[..., None]).sum(1) / counts[:, None]), kind)


class Modes(nn.Module):
    """A layer of a Fourier neural operator: the lowest frequencies are mixed by complex weights."""

    def __init__(self, kept: int = 5) -> None:
        super().__init__()
        self.kept, self.weight = (
            kept,
            nn.Parameter(torch.randn(WIDTH, WIDTH, kept, dtype=torch.cfloat) / WIDTH),
        )
        self.local = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves = torch.fft.rfft(x)
        mixed = torch.zeros_like(waves)
        mixed[..., : self.kept] = torch.einsum("bim,iom->bom", waves[..., : self.kept], self.weight)
        return F.gelu(torch.fft.irfft(mixed, n=x.shape[-1]) + self.local(x))


class Operator(nn.Module):
    """A function on a line to another one."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.modes, self.project = (
            nn.Linear(1, WIDTH),
            nn.ModuleList([Modes() for _ in range(2)]),
            nn.Linear(WIDTH, 1),
        )

    def forward(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        x = self.lift(before[..., None]).transpose(1, 2)
        for layer in self.modes:
            x = layer(x)
        found = self.project(x.transpose(1, 2))[..., 0]
        return ((found - after).norm(dim=1) / after.norm(dim=1)).mean()


class Belief(nn.Module):
    """A text from a picture by way of a Gaussian, as `torch.distributions` has them, which look whether their
    arguments are valid."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.belief = Patches(), Decoder(), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, pixel_values: torch.Tensor
    ) -> torch.Tensor:
        mean, spread = self.belief(self.encoder(pixel_values)).chunk(2, -1)
        belief = torch.distributions.Normal(mean, F.softplus(spread) + 1e-3)
        prior = torch.distributions.Normal(torch.zeros_like(mean), 1.0)
        apart = torch.distributions.kl_divergence(belief, prior).sum((1, 2)).mean()
        return next_token(self.decoder(input_ids, belief.rsample()), labels) + 1e-3 * apart


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def _picture(g: torch.Generator) -> Sample:
    return {"pixel_values": torch.randn(3, 8, 8, generator=g)}


def _molecule(g: torch.Generator) -> Sample:
    places = torch.randn(5, 3, generator=g)
    return {"places": places, "energy": places.square().sum(), "force": -2 * places}


def _document(g: torch.Generator) -> Sample:
    count = integer(g, 1, 5)
    return {
        "sentences": torch.randint(3, 99, (count, 6), generator=g),
        "kind": torch.randint(0, 3, (), generator=g),
    }


def _documents(samples: Sequence[Sample]) -> Sample:
    counts = torch.tensor([len(s["sentences"]) for s in samples])
    kinds = torch.stack([s["kind"] for s in samples])
    return {"sentences": torch.cat([s["sentences"] for s in samples]), "counts": counts, "kind": kinds}


def _function(g: torch.Generator) -> Sample:
    before = torch.randn(16, generator=g)
    return {"before": before, "after": before.cumsum(0)}


def _captioned(g: torch.Generator) -> dict[str, Any]:
    return text_only(g) | _picture(g)


ENTRIES = [
    Entry("watched", "habits", Watched, _picture),
    Entry("routed", "habits", RoutedText, text_only),
    Entry("forces", "habits", Forces, _molecule),
    Entry("sentences", "habits", Sentences, _document, _documents),
    Entry("fourier", "habits", Operator, _function),
    Entry("belief", "habits", Belief, _captioned),
]
