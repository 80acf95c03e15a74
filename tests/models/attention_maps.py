"""A captioner in which layers keep attention maps as attributes: the model adds their entropy to the
loss. The losses have trained weights, and a part of each layer is checkpointed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint


class Look(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.norm = nn.LayerNorm(d)
        self.map = None

    def forward(self, x, seen):
        k, v = self.kv(seen).chunk(2, -1)
        w = (self.q(self.norm(x)) @ k.transpose(1, 2) / 4).softmax(-1)
        self.map = w
        return x + self.o(w @ v)


class Captioner(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(12, d), nn.GELU(), nn.Linear(d, d))
        self.embed = nn.Embedding(30, d)
        self.looks = nn.ModuleList(Look(d) for _ in range(2))
        self.mix = nn.ModuleList(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.GELU()) for _ in range(2))
        self.heads = nn.ModuleDict({"words": nn.Linear(d, 30), "topic": nn.Linear(d, 4)})
        self.log_var = nn.ParameterDict({k: nn.Parameter(torch.zeros(())) for k in self.heads})

    def forward(self, patches, words, mask, topic):
        seen = self.tower(patches)
        x = self.embed(words)
        for look, mix in zip(self.looks, self.mix, strict=True):
            x = look(x, seen)
            x = x + checkpoint(mix, x, use_reentrant=False)
        losses = {}
        logits = self.heads["words"](x[:, :-1])
        each = F.cross_entropy(logits.transpose(1, 2), words[:, 1:], reduction="none")
        losses["words"] = (each * mask[:, 1:]).sum() / mask[:, 1:].sum()
        pooled = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        losses["topic"] = F.cross_entropy(self.heads["topic"](pooled), topic)
        total = sum(torch.exp(-self.log_var[k]) * v + 0.5 * self.log_var[k] for k, v in losses.items())
        entropy = 0.0
        for look in self.looks:
            w = look.map
            e = -(w * (w + 1e-9).log()).sum(-1)
            entropy = entropy + (e * mask).sum() / mask.sum()
        return {"loss": total + 0.01 * entropy, **{k: v.detach() for k, v in losses.items()}}


def model():
    return Captioner()


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        n = int(torch.randint(3, 9, (), generator=g))
        words, topic = torch.randint(1, 30, (n,), generator=g), torch.randint(0, 4, (), generator=g)
        return dict(patches=torch.randn(5, 12, generator=g), words=words, mask=torch.ones(n), topic=topic)


def dataset():
    return Data()


def collate(samples):
    columns = {key: [s[key] for s in samples] for key in samples[0]}
    padded = {key: pad_sequence(columns[key], batch_first=True) for key in ("words", "mask")}
    return {**padded, **{key: torch.stack(columns[key]) for key in ("patches", "topic")}}
