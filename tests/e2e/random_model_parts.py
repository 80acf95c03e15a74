"""Building blocks of random models, as text: classes of components, spellings of losses, and datasets."""

from __future__ import annotations

FEATURES, PATCHES = 6, 3  # entries of a patch, patches of one picture, echo or scan

CLASSES = '''
import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 29


class Layer(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm1, self.norm2, self.drop = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(dropout)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, keep=None, causal=False):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        a = F.scaled_dot_product_attention(q, k, v, keep, is_causal=causal).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(a))
        return x + self.drop(self.mlp(self.norm2(x)))


class Encoder(nn.Module):
    def __init__(self, features, width, depth, dropout=0.0):
        super().__init__()
        self.patch = nn.Linear(features, width)
        self.layers = nn.ModuleList([Layer(width, dropout) for _ in range(depth)])

    def forward(self, x):
        x = self.patch(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Text(nn.Module):
    """`attention` is causal, masked (padding is not looked at) or open (it is)."""

    def __init__(self, width, depth, attention, dropout=0.0):
        super().__init__()
        self.attention = attention
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([Layer(width, dropout) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def states(self, x, mask):
        keep = mask[:, None, None, :] if self.attention == "masked" else None
        for layer in self.layers:
            x = layer(x, keep, self.attention == "causal")
        return self.norm(x)


'''

MIXTURES = '''
class Experts(nn.Module):
    """Experts side by side in parameters; each computes the tokens that chose it."""

    def __init__(self, width, count, biased):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(count, 4 * width, width) / width)
        self.down = nn.Parameter(torch.randn(count, width, 2 * width) / width)
        self.down_bias = nn.Parameter(torch.randn(count, width) / 8) if biased else None

    def forward(self, hidden, index, weights):
        out = torch.zeros_like(hidden)
        for expert in range(self.gate_up.shape[0]):
            rows, places = torch.where(index == expert)
            gate, up = F.linear(hidden[rows], self.gate_up[expert]).chunk(2, dim=-1)
            result = F.linear(F.silu(gate) * up, self.down[expert])
            if self.down_bias is not None:
                result = result + self.down_bias[expert]
            out = out.index_add(0, rows, result * weights[rows, places, None])
        return out


class Stacked(nn.Module):
    def __init__(self, width, count, choices, scores, shared, biased):
        super().__init__()
        self.router, self.experts = nn.Linear(width, count), Experts(width, count, biased)
        self.shared = nn.Linear(width, width) if shared else None
        self.choices, self.scores = choices, scores

    def forward(self, x):
        tokens = x.flatten(0, 1)
        scores = getattr(self.router(tokens), self.scores)(*[-1] * (self.scores == "softmax"))
        weights, index = scores.topk(self.choices)
        out = self.experts(tokens, index, weights / weights.sum(-1, keepdim=True)).view_as(x)
        return out if self.shared is None else out + self.shared(x).sigmoid()


class Listed(nn.Module):
    def __init__(self, width, count, choices, scores, shared, biased):
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width, bias=biased))
            for _ in range(count)
        )
        self.shared = nn.Linear(width, width) if shared else None
        self.choices, self.scores = choices, scores

    def forward(self, x):
        tokens = x.flatten(0, 1)
        scores = getattr(self.router(tokens), self.scores)(*[-1] * (self.scores == "softmax"))
        weights, index = scores.topk(self.choices)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(index == number)
            if len(rows):
                out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, places, None])
        out = out.view_as(x)
        return out if self.shared is None else out + self.shared(x).sigmoid()


class MixedText(Text):
    """Some layers have a mixture of experts in place of their feed-forward network."""

    def __init__(self, width, depth, attention, dropout, mixture, every, *chosen):
        super().__init__(width, depth, attention, dropout)
        for layer in list(self.layers)[every - 1 :: every] or self.layers:
            layer.mlp = mixture(width, *chosen)


'''

DATASET = '''

def place(sample, key, token, most, share, g):
    """Give `share` of the samples up to `most` rows under `key`, and a placeholder for each patch."""
    if torch.rand((), generator=g) < share:
        rows = int(torch.randint(1, most + 1, (), generator=g))
        sample[key] = torch.randn(rows, PATCHES, FEATURES, generator=g)
        places = torch.full((rows * PATCHES,), token)
        sample["input_ids"] = torch.cat([places, sample["input_ids"]])
        sample["labels"] = torch.cat([torch.full_like(places, -100), sample["labels"]])


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(5, VOCABULARY, (int(torch.randint(4, 15, (), generator=g)),), generator=g)
        labels = torch.where(torch.rand(ids.shape, generator=g) < 0.2, -100, ids)
        sample = {"input_ids": ids, "labels": labels}
        sample["labels"][-1] = ids[-1]
        # inputs
        return sample


def model():
    return Model()


def dataset():
    return Samples()
'''.replace("PATCHES", str(PATCHES)).replace("FEATURES", str(FEATURES))

_SHIFTED = "logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()"
_EACH = "F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction='none')"

LANGUAGE = (
    f"F.cross_entropy({_SHIFTED})",
    f"F.cross_entropy({_SHIFTED}, label_smoothing=0.1)",
    f"F.cross_entropy({_SHIFTED}, reduction='sum') / keep.sum()",
    f"F.cross_entropy({_SHIFTED}, reduction='sum') / len(input_ids)",
    "F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])",
    f"({_EACH} * keep).sum() / keep.sum().clamp(min=1)",
    f"(({_EACH} * keep).sum(1) / keep.sum(1)).mean()",
    f"(weight.flatten() * ({_EACH} * keep).sum(1)).sum() / weight.sum()",
    "F.nll_loss(logits[:, :-1].log_softmax(-1).transpose(1, 2), labels[:, 1:])",
    "F.cross_entropy(logits[:, :-1][labels[:, 1:] != -100], labels[:, 1:][labels[:, 1:] != -100])",
    "-(logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0)).squeeze(-1) * keep).sum()"
    " / keep.sum()",
    f"F.cross_entropy({_SHIFTED}) + 1e-2 * (logits[:, :-1].logsumexp(-1).square() * keep).sum() / keep.sum()",
)

DISTILLING = (
    "(F.kl_div(logits.log_softmax(-1), {name}_logits.softmax(-1), reduction='none').sum(-1)[:, 1:] * keep)"
    ".sum() / keep.sum()",
    "4 * F.kl_div((logits / 2).log_softmax(-1)[labels > 0], ({name}_logits / 2).softmax(-1)[labels > 0],"
    " reduction='batchmean')",
    "-(({name}_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)[:, :-1] * keep).sum() / keep.sum()",
    "((logits.softmax(-1) * (logits.log_softmax(-1) - {name}_logits.log_softmax(-1))).sum(-1)[:, :-1] * keep)"
    ".sum() / keep.sum()",
    "((self.{name}_project(h) - {name}_h).square().mean(-1)[:, 1:] * keep).sum() / keep.sum()",
    "F.mse_loss(self.{name}_project(h)[labels != -100], {name}_h[labels != -100])",
    "((1 - F.cosine_similarity(self.{name}_project(h), {name}_h, dim=-1))[:, 1:] * keep).sum() / keep.sum()",
    "-(logits.log_softmax(-1).gather(-1, {name}_logits.topk(4).indices).sum(-1)[:, 1:] * keep).sum()"
    " / keep.sum()",
)

JUDGING = (
    "F.cross_entropy(judged, kind.flatten())",
    "F.cross_entropy(judged, kind.flatten(), reduction='none').mean()",
    "F.mse_loss(judged, target)",
    "F.smooth_l1_loss(judged, target)",
    "F.binary_cross_entropy_with_logits(judged, target)",
    "(judged.sigmoid() - target).abs().sum() / len(target)",
)

STEERING = (  # losses that only samples with an input have
    "F.mse_loss(self.{name}_back({name}_seen), {name})",
    "(self.{name}_back({name}_seen) - {name}).square().sum() / len({name})",
    "0.1 * F.l1_loss(self.{name}_back({name}_seen.mean(1)), {name}.mean(1))",
    "F.mse_loss(self.{name}_back({name}_seen), {name}, reduction='sum') / len(input_ids)",
)
