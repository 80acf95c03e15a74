"""A transducer (RNN-T): encoder, prediction network, joiner; the forward variables are loops over frames and
labels, written in forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

VOCAB = 9


class Transducer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.GRU(6, 16, batch_first=True)
        self.embed, self.predictor = nn.Embedding(VOCAB, 12), nn.GRU(12, 16, batch_first=True)
        self.joint = nn.Linear(16, VOCAB)

    def forward(self, frames, frame_lengths, labels, label_lengths):
        enc = self.encoder(frames)[0]
        pred = self.predictor(self.embed(F.pad(labels, (1, 0))))[0]
        logp = self.joint(torch.tanh(enc.unsqueeze(2) + pred.unsqueeze(1))).log_softmax(-1)
        b, t, u1, _ = logp.shape
        blank = logp[..., 0]
        emit = logp[:, :, :-1].gather(-1, labels[:, None, :, None].expand(-1, t, -1, 1)).squeeze(-1)
        rows = []
        for i in range(t):
            row = []
            for j in range(u1):
                if i == 0 and j == 0:
                    row.append(blank.new_zeros(b))
                    continue
                options = []
                if i:
                    options.append(rows[i - 1][j] + blank[:, i - 1, j])
                if j:
                    options.append(row[j - 1] + emit[:, i, j - 1])
                row.append(torch.logsumexp(torch.stack(options), 0))
            rows.append(row)
        alpha = torch.stack([torch.stack(r, 1) for r in rows], 1)
        n = torch.arange(b, device=frames.device)
        last, end = frame_lengths - 1, label_lengths
        total = alpha[n, last, end] + blank[n, last, end]
        return {"loss": -total.mean()}


def model():
    return Transducer()


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        n, m = int(torch.randint(3, 7, (), generator=g)), int(torch.randint(1, 4, (), generator=g))
        labels = torch.randint(1, VOCAB, (m,), generator=g)
        lengths = {"frame_lengths": torch.tensor(n), "label_lengths": torch.tensor(m)}
        return {"frames": torch.randn(n, 6, generator=g), "labels": labels, **lengths}


def dataset():
    return Data()


def collate(samples):
    columns = {key: [s[key] for s in samples] for key in samples[0]}
    return {
        key: torch.stack(column) if "lengths" in key else pad_sequence(column, batch_first=True)
        for key, column in columns.items()
    }
