"""Preference optimization by odds ratios (ORPO): chosen and rejected answers in one batch, the logarithm of
their odds from mean log-probabilities, and the cross entropy of the chosen half."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

VOCAB, DIM = 60, 16


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell = nn.Embedding(VOCAB, DIM), nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, ids, attention_mask):
        return self.cell(self.embed(ids) * attention_mask[..., None])[0]


class OddsRatio(nn.Module):
    def __init__(self, beta=0.1):
        super().__init__()
        self.policy, self.head, self.beta = Decoder(), nn.Linear(DIM, VOCAB, bias=False), beta

    def sequence_logps(self, logits, labels):
        """Mean log-probability of the labels of each sequence."""
        logits, labels = logits[:, :-1], labels[:, 1:].clone()
        mask = labels != -100
        labels[labels == -100] = 0
        logps = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
        return (logps * mask).sum(-1) / mask.sum(-1)

    def forward(
        self,
        chosen_input_ids,
        chosen_attention_mask,
        chosen_labels,
        rejected_input_ids,
        rejected_attention_mask,
        rejected_labels,
    ):
        n = chosen_input_ids.shape[0]
        width = max(chosen_input_ids.shape[1], rejected_input_ids.shape[1])

        def pad(rows, value):
            return F.pad(rows, (0, width - rows.shape[1]), value=value)

        ids = torch.cat([pad(chosen_input_ids, 0), pad(rejected_input_ids, 0)])
        mask = torch.cat([pad(chosen_attention_mask, 0), pad(rejected_attention_mask, 0)])
        labels = torch.cat([pad(chosen_labels, -100), pad(rejected_labels, -100)])
        hidden = self.policy(ids, mask)
        logits = self.head(hidden)
        logps = self.sequence_logps(logits, labels)
        chosen, rejected = logps[:n], logps[n:]
        nll = F.cross_entropy(
            logits[:n, :-1].reshape(-1, VOCAB), labels[:n, 1:].reshape(-1), ignore_index=-100
        )
        log_odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
        ratio = F.logsigmoid(log_odds)
        loss = nll - self.beta * ratio.mean()
        return {"loss": loss, "log_odds": log_odds.mean().detach()}


def model():
    return OddsRatio()


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)

        def words(low, high):
            return torch.randint(1, VOCAB, (int(torch.randint(low, high, (), generator=g)),), generator=g)

        prompt, sample = words(2, 6), {}
        for kind in ("chosen", "rejected"):
            ids = torch.cat([prompt, words(3, 9)])
            labels = ids.clone()
            labels[: len(prompt)] = -100
            sample |= {
                f"{kind}_input_ids": ids,
                f"{kind}_attention_mask": torch.ones_like(ids),
                f"{kind}_labels": labels,
            }
        return sample


def dataset():
    return Data()


def collate(samples):
    fills = {key: -100 if "labels" in key else 0 for key in samples[0]}
    return {
        key: pad_sequence([s[key] for s in samples], batch_first=True, padding_value=value)
        for key, value in fills.items()
    }
