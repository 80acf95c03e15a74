"""A critic with a penalty on its gradient by the real pictures, which forward takes behind a first mean; some
samples have a second view."""

import torch
import torch.nn.functional as F
from torch import nn


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(12, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.first(x))).squeeze(-1)


class Training(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = Critic()

    def forward(self, real, fake, has_view, view=None):
        real = real.requires_grad_()
        of_real, of_fake = self.critic(real), self.critic(fake)
        loss = F.relu(1 - of_real).mean() + F.relu(1 + of_fake).mean()
        (slope,) = torch.autograd.grad(of_real.sum(), real, create_graph=True)
        loss = loss + 0.5 * slope.pow(2).sum(1).mean()
        if view is not None:
            loss = loss + (self.critic(view) - of_real.detach()[has_view]).pow(2).mean()
        return loss


def model():
    torch.manual_seed(0)
    return Training()


def dataset():
    g = torch.Generator().manual_seed(1)
    samples = []
    for i in range(24):
        sample = {"real": torch.randn(12, generator=g), "fake": torch.randn(12, generator=g)}
        sample["has_view"] = torch.tensor(i % 2 == 1)
        samples.append(sample | ({"view": torch.randn(12, generator=g)} if i % 2 else {}))
    return samples


def collate(samples):
    keys = dict.fromkeys(k for s in samples for k in s)
    return {k: torch.stack([s[k] for s in samples if k in s]) for k in keys}
