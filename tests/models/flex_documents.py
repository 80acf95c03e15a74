"""A decoder with flex attention: documents side by side under a window, and ALiBi."""

import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

WIDTH, HEADS, VOCABULARY = 32, 4, 48


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1), persistent=False)

    def forward(self, h, mask):
        x = self.norm(h)
        q, k, v = (m(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))

        def alibi(score, batch, head, query, key):
            return score - self.slopes[head] * (query - key)

        y = flex_attention(q, k, v, score_mod=alibi, block_mask=mask)
        h = h + self.o(y.transpose(1, 2).flatten(2))
        return h + self.down(F.gelu(self.up(self.mlp_norm(h))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids, labels):
        documents = (input_ids == 1).cumsum(1)
        length = input_ids.shape[1]

        def attends(batch, head, query, key):
            same = documents[batch, query] == documents[batch, key]
            return same & (query >= key) & (query - key < 9)

        mask = create_block_mask(attends, len(input_ids), None, length, length, device=input_ids.device)
        h = self.embed(input_ids)
        for layer in self.layers:
            h = layer(h, mask)
        logits = self.head(self.norm(h))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss}


def model():
    return Decoder()


def dataset():
    draw = random.Random(0)
    samples = []
    for _ in range(16):
        length = draw.choice((14, 17, 22, 27))
        ids = torch.tensor(
            [draw.randrange(1, VOCABULARY) if draw.random() < 0.8 else 1 for _ in range(length)]
        )
        samples.append({"input_ids": ids, "labels": ids})
    return samples


def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-3)
