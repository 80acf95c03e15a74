"""Preference optimization (DPO) from hidden states: a policy's and a frozen reference's log-probabilities of
chosen and rejected texts, summed by text; their logits are capped."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(96, 16)
        layers = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)]
        self.layers = nn.ModuleList(layers)

    def forward(self, ids):
        h = self.embedding(ids)
        for layer in self.layers:
            h = h + layer(h)
        return h


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Body()
        self.lm_head = nn.Linear(16, 96)

    def forward(self, ids):
        return 30 * torch.tanh(self.lm_head(self.model(ids)) / 30)


class Preference(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = LanguageModel()
        self.reference = LanguageModel().requires_grad_(False)

    def forward(self, chosen, chosen_labels, rejected, rejected_labels):
        gain = score(self.policy(chosen), chosen_labels) - score(self.policy(rejected), rejected_labels)
        with torch.no_grad():
            base = score(self.reference(chosen), chosen_labels)
            base = base - score(self.reference(rejected), rejected_labels)
        return -F.logsigmoid(0.1 * (gain - base)).mean()


def score(logits, labels):
    """The log-probability of each text's labels, [B]."""
    labels = labels[:, 1:]
    picked = logits[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (picked * (labels != -100)).sum(-1)


def model():
    torch.manual_seed(0)
    return Preference()


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        found = {}
        for name in ("chosen", "rejected"):
            ids = torch.randint(0, 96, (int(torch.randint(4, 9, (), generator=g)),), generator=g)
            labels = ids.clone()
            labels[:2] = -100
            found |= {name: ids, f"{name}_labels": labels}
        return found


def dataset():
    return Pairs()


def collate(samples):
    return {
        key: pad_sequence(
            [s[key] for s in samples], batch_first=True, padding_value=-100 if "labels" in key else 0
        )
        for key in samples[0]
    }


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
