"""Compound models in plain PyTorch, one for each way in which components can be joined: what architectures of
tomorrow are made of."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tools.zoo_models.entry import Entry
from tools.zoo_models.samples import IGNORED, VOCABULARY, Sample, chance, integer, words

WIDTH = 32


class Layer(nn.Module):
    """Attention and a two-layer network with residuals. Keys that `mask` [samples, positions] leaves out are
    not looked at."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        keep = None if mask is None else mask[:, None, None, :].bool()
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, keep, is_causal=self.causal).transpose(1, 2).flatten(2)
        )
        return x + self.mlp(self.norm2(x))


class Text(nn.Module):
    """Tokens to states of WIDTH, causally."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(causal=True) for _ in range(depth)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.states(self.embed(ids))

    def states(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Patches(nn.Module):
    """[n, 3, 8, 8] pictures to [n, 4, WIDTH]."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, kernel_size=4, stride=4)
        self.layers = nn.ModuleList([Layer(causal=False) for _ in range(depth)])

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        x = self.patch(pictures).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return x


class Decoder(nn.Module):
    """States that go before the tokens, then the tokens; logits of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.text = Text()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
        x = self.text.embed(ids)
        if before is None:
            return self.head(self.text.states(x))
        return self.head(self.text.states(torch.cat([before, x], dim=1))[:, before.shape[1] :])


def next_token(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss of the labels that count, each predicted from the tokens before it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def divergence(found: torch.Tensor, taught: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean Kullback-Leibler divergence over the positions whose labels count."""
    counted = (labels != IGNORED).float()
    each = F.kl_div(found.log_softmax(-1), taught.softmax(-1), reduction="none").sum(-1)
    return (each * counted).sum() / counted.sum()


class TwoTeachers(nn.Module):
    """A student learns from a deep and a shallow teacher, in proportions of 2 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.deep, self.shallow = (
            nn.Sequential(Text(3), nn.Linear(WIDTH, VOCABULARY)),
            nn.Sequential(Text(1), nn.Linear(WIDTH, VOCABULARY)),
        )
        self.student = Decoder()
        self.deep.requires_grad_(False)
        self.shallow.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.student(input_ids)
        with torch.no_grad():
            deep, shallow = self.deep(input_ids), self.shallow(input_ids)
        return (
            next_token(logits, labels)
            + 2 / 3 * divergence(logits, deep, labels)
            + 1 / 3 * divergence(logits, shallow, labels)
        )


class SharedEncoder(nn.Module):
    """Teacher and student look at a picture through one encoder that is trained through the student alone."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.teacher, self.student = Patches(), Decoder().requires_grad_(False), Decoder()

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, pixel_values: torch.Tensor
    ) -> torch.Tensor:
        seen = self.encoder(pixel_values)
        with torch.no_grad():
            taught = self.teacher(input_ids, seen)
        found = self.student(input_ids, seen)
        return next_token(found, labels) + divergence(found, taught, labels)


class CalledTwice(nn.Module):
    """One encoder reads the question and the answer of a pair; they are to agree where the label says so."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.judge = (
            Text(),
            nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 2)),
        )

    def pooled(self, ids: torch.Tensor) -> torch.Tensor:
        mask = (ids > 0).float()[..., None]
        return (self.encoder(ids) * mask).sum(1) / mask.sum(1)

    def forward(self, question: torch.Tensor, answer: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.pooled(question), self.pooled(answer)], dim=-1)
        return F.cross_entropy(self.judge(both), labels.flatten())


class FeedsTwo(nn.Module):
    """What one encoder sees is described by a decoder and named by a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Patches(), Decoder()
        self.classifier = nn.Sequential(Layer(causal=False), Layer(causal=False), nn.Linear(WIDTH, 5))

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, pixel_values: torch.Tensor, kind: torch.Tensor
    ) -> torch.Tensor:
        seen = self.encoder(pixel_values)
        named = F.cross_entropy(self.classifier(seen).mean(1), kind.flatten())
        return next_token(self.decoder(input_ids, seen), labels) + 0.5 * named


class FrozenMiddle(nn.Module):
    """A trained encoder speaks to a trained head through a frozen language model, which owes gradients to its
    input only."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.language_model, self.head = Patches(), Text(), nn.Linear(WIDTH, VOCABULARY)
        self.language_model.requires_grad_(False)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, pixel_values: torch.Tensor
    ) -> torch.Tensor:
        seen = self.encoder(pixel_values)
        x = self.language_model.states(torch.cat([seen, self.language_model.embed(input_ids)], dim=1))
        return next_token(self.head(x[:, seen.shape[1] :]), labels)


class Sometimes(nn.Module):
    """Pictures and sketches have encoders of their own; a sample may have either, both or none, and sketches
    are judged as well."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures, self.sketches, self.decoder = Patches(), Patches(1), Decoder()
        self.judge = nn.Linear(WIDTH, 3)

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        picture: torch.Tensor | None = None,
        sketch: torch.Tensor | None = None,
        quality: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.decoder.text.embed(input_ids)
        if picture is not None:
            x = self.put(x, input_ids == 1, self.pictures(picture))
        loss = x.new_zeros(())
        if sketch is not None:
            seen = self.sketches(sketch)
            x = self.put(x, input_ids == 2, seen)
            if quality is not None:
                loss = F.cross_entropy(self.judge(seen.mean(1)), quality.flatten())
        return loss + next_token(self.decoder.head(self.decoder.text.states(x)), labels)

    def put(self, x: torch.Tensor, places: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return x.masked_scatter(places[..., None], features.flatten(0, 1))


def _text(g: torch.Generator) -> Sample:
    ids = words(g)
    return {"input_ids": ids, "labels": ids.clone()}


def _described(g: torch.Generator) -> Sample:
    return _text(g) | {"pixel_values": torch.randn(3, 8, 8, generator=g)}


def _named(g: torch.Generator) -> Sample:
    return _described(g) | {"kind": torch.tensor(integer(g, 0, 5))}


def _pair(g: torch.Generator) -> Sample:
    return {"question": words(g), "answer": words(g), "labels": torch.tensor(integer(g, 0, 2))}


def _sometimes(g: torch.Generator) -> Sample:
    has_picture, has_sketch = chance(g), chance(g)
    text = words(g)
    places = torch.tensor([1] * 4 * has_picture + [2] * 4 * has_sketch, dtype=torch.long)
    sample = {
        "input_ids": torch.cat([places, text]),
        "labels": torch.cat([torch.full_like(places, IGNORED), text]),
    }
    if has_picture:
        sample["picture"] = torch.randn(1, 3, 8, 8, generator=g)
    if has_sketch:
        sample |= {
            "sketch": torch.randn(1, 3, 8, 8, generator=g),
            "quality": torch.tensor([[integer(g, 0, 3)]]),
        }
    return sample


ENTRIES = [
    Entry("two_teachers", "structures", TwoTeachers, _text),
    Entry("shared_encoder", "structures", SharedEncoder, _described),
    Entry("called_twice", "structures", CalledTwice, _pair),
    Entry("feeds_two", "structures", FeedsTwo, _named),
    Entry("frozen_middle", "structures", FrozenMiddle, _described),
    Entry("sometimes", "structures", Sometimes, _sometimes),
]
