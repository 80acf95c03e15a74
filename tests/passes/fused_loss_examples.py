"""Losses on heads as users write them, as the end of one small model's forward: what `fuse-linear-loss` makes
of each.

`y` are the student's logits and `t` the teacher's, [B, S, 24]; `rows` and `targets` are logits and labels
without the split into samples; `known` masks labels that are not -100; `h` are the student's hidden states.
"""

from __future__ import annotations

MODEL = """
import math, torch, torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 24, bias=False)
        self.biased = nn.Linear(8, 24)
        self.wide = nn.Linear(8, 30, bias=False)
        self.small = nn.Linear(8, 6)
        self.embedding = nn.Parameter(torch.randn(24, 8))
        self.teacher = nn.Linear(8, 24, bias=False).requires_grad_(False)
        self.wide_teacher = nn.Linear(8, 30, bias=False).requires_grad_(False)
        self.biased_teacher = nn.Linear(8, 24).requires_grad_(False)

    def forward(self, x, labels, mask, share):
        h = self.body(x)
        known = labels != -100
{body}


def model():
    return Model()


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        n = int(torch.randint(3, 9, (), generator=g))
        labels = torch.randint(0, 24, (n,), generator=g)
        labels[torch.rand(n, generator=g) < 0.3] = -100
        labels[-1] = 2
        return dict(x=torch.randn(n, 8, generator=g), labels=labels, mask=torch.ones(n),
                    share=torch.rand((), generator=g))


def dataset():
    return Samples()


def collate(samples):
    pad = lambda key, value: pad_sequence([s[key] for s in samples], batch_first=True, padding_value=value)
    share = torch.stack([s["share"] for s in samples])
    return dict(x=pad("x", 0), labels=pad("labels", -100), mask=pad("mask", 0), share=share)
"""

HEAD = "y = self.head(h)"
TEACHER = "t = self.teacher(x)"
CE, KL, BOTH = "linear-cross-entropy", "linear-kl", "linear-kl-ce"
HF = "__import__('transformers.loss.loss_utils').loss.loss_utils."

# Lines before the loss, the loss, and the rules that match.
FUSED: list[tuple[str, str, list[str]]] = [
    (HEAD, "F.cross_entropy(y.flatten(0, 1), labels.flatten())", [CE]),
    (HEAD, "F.cross_entropy(y.transpose(1, 2), labels)", [CE]),
    (HEAD, "F.cross_entropy(y.permute(0, 2, 1), labels, reduction='sum') / known.sum()", [CE]),
    (HEAD, "F.cross_entropy(y[:, :-1].reshape(-1, 24), labels[:, 1:].reshape(-1))", [CE]),
    (HEAD, "F.cross_entropy(y[:, :-1].transpose(1, 2), labels[:, 1:])", [CE]),
    (HEAD, "F.cross_entropy(y.view(-1, 24), labels.view(-1), label_smoothing=0.1)", [CE]),
    (
        HEAD,
        "F.cross_entropy(y.view(-1, 24), labels.view(-1), label_smoothing=0.1, reduction='sum') / len(x)",
        [CE],
    ),
    (HEAD, "F.cross_entropy(y.view(-1, 24), torch.where(known, labels, 2).view(-1), ignore_index=2)", [CE]),
    (HEAD, "F.cross_entropy(y[known], labels[known])", [CE]),
    (HEAD, "F.nll_loss(y.float().log_softmax(-1).flatten(0, 1), labels.flatten())", [CE]),
    (
        HEAD,
        "(F.cross_entropy(y.flatten(0, 1), labels.flatten(), reduction='none').view_as(labels) * "
        "known).sum() / known.sum()",
        [CE],
    ),
    (
        HEAD,
        "torch.where(known, F.cross_entropy(y.transpose(1, 2), labels, reduction='none'), "
        "0.0).sum() / known.sum()",
        [CE],
    ),
    (
        HEAD,
        "-y.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., "
        "None]).squeeze(-1).mul(known).sum() / known.sum()",
        [CE],
    ),
    (
        HEAD,
        "((y.logsumexp(-1) - y.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)) * "
        "known.float()).sum() / known.sum()",
        [CE],
    ),
    (HEAD, "F.cross_entropy((y / 0.7).flatten(0, 1), labels.flatten())", [CE]),
    (HEAD, "F.cross_entropy((30 * torch.tanh(y / 30)).flatten(0, 1), labels.flatten())", [CE]),
    (HEAD, "F.cross_entropy((30 * torch.tanh(y * 0.5 / 30)).flatten(0, 1), labels.flatten())", [CE]),
    (HEAD, "F.cross_entropy(y[:, -1], labels[:, -1].clamp(min=0))", [CE]),
    ("y = self.biased(h)", "F.cross_entropy(y.flatten(0, 1), labels.flatten())", [CE]),
    ("y = self.biased(h)", "F.cross_entropy((y / 0.7).flatten(0, 1), labels.flatten())", [CE]),
    (
        "y = self.biased(h); y = y / 5; y = torch.tanh(y); y = y * 5",
        "F.cross_entropy((y / 0.7).flatten(0, 1), labels.flatten())",
        [CE],
    ),
    (
        HEAD,
        "(F.cross_entropy(y.transpose(1, 2), labels, reduction='none') * mask).sum() / mask.sum()",
        [CE],
    ),
    (
        f"{HEAD}; w = mask * share[:, None]",
        "(F.cross_entropy(y.flatten(0, 1), labels.flatten(), reduction='none', label_smoothing=0.1) * "
        "w.flatten()).sum() / w.sum()",
        [CE],
    ),
    (
        HEAD,
        "-(y.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1) * known * "
        "share[:, None]).sum() / len(x)",
        [CE],
    ),
    (
        HEAD,
        "((F.cross_entropy(y.transpose(1, 2), labels, reduction='none') * known).sum(1) / "
        "known.sum(1)).mean()",
        [CE],
    ),
    (
        "chosen, rejected = self.head(h), self.head(self.body(-x)); "
        "picked = [z.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1) for z in "
        "(chosen, rejected)]; a, b = [(p * known).sum(-1) for p in picked]",
        "-F.logsigmoid(0.3 * (a - b)).mean()",
        [CE],
    ),
    (
        f"{HEAD}; {TEACHER}; "
        "a, b = [-F.cross_entropy(z.transpose(1, 2), labels, reduction='none').sum(1) for z in (y, t)]",
        "-F.logsigmoid(0.3 * (a - b) * (share - 0.5)).mean()",
        [CE, CE],
    ),
    (
        f"{HEAD}; {TEACHER}; i = labels.clamp(min=0)[..., None]; "
        "a, b = [torch.log_softmax(z, -1).gather(2, i)[..., 0] for z in (y, t)]",
        "-(torch.exp(a - b) * share[:, None] * known).sum() / known.sum()",
        [CE],
    ),
    (
        f"{HEAD}; {TEACHER}; i = labels.clamp(min=0)[..., None]; "
        "a, b = [(z.gather(2, i)[..., 0] - z.logsumexp(-1)) for z in (y, t)]",
        "F.softplus(((b - a) * known).sum(1) * 0.1).mean()",
        [CE],
    ),
    (
        "y = 5 * torch.tanh(self.biased(h) / 5); i = labels.clamp(min=0)[..., None]; "
        "a = (torch.log_softmax(y, -1).gather(2, i)[..., 0] * mask.long()).sum(-1) / mask.long().sum(-1)",
        "-F.logsigmoid(2 * a * (share - 0.5)).mean()",
        [CE],
    ),
    (
        f"{HEAD}; {TEACHER}; i = labels.clamp(min=0)[..., None]; "
        "a, b = [torch.log_softmax(z, -1).gather(2, i)[..., 0] for z in (y, t)]",
        "F.softplus(((b * known - a * share[:, None]) * mask).sum(1) * 0.1).mean()",
        [CE],
    ),
    (
        f"{HEAD}; a = -(F.cross_entropy(y.transpose(1, 2), labels, reduction='none') * mask * mask).sum(-1)",
        "-F.logsigmoid(a * (share - 0.5)).mean()",
        [CE],
    ),
    (
        f"{HEAD}; a = -(F.cross_entropy(y.transpose(1, 2), labels, reduction='none') * mask).sum(-1)",
        "-F.logsigmoid(a * (share - 0.5)).mean() + F.cross_entropy(y.flatten(0, 1), labels.flatten())",
        [CE, CE],
    ),
    ("y = F.linear(h, self.embedding)", "F.cross_entropy(y.flatten(0, 1), labels.flatten())", [CE]),
    ("y = h @ self.embedding.T", "F.cross_entropy(y.flatten(0, 1), labels.flatten())", [CE]),
    ("y = h.flatten(0, 1) @ self.head.weight.T", "F.cross_entropy(y, labels.flatten())", [CE]),
    (
        "y = F.linear(h, self.biased.weight, self.biased.bias)",
        "F.cross_entropy(y.flatten(0, 1), labels.flatten())",
        [CE],
    ),
    ("y = self.wide(h)[..., :24]", "F.cross_entropy(y.flatten(0, 1), labels.flatten())", [CE]),
    (HEAD, HF + "ForCausalLMLoss(y, labels, 24)", [CE]),
    (HEAD, HF + "ForCausalLMLoss(y, labels, 24, num_items_in_batch=known.sum())", [CE]),
    (f"{HEAD}; {TEACHER}", "F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction='batchmean')", [KL]),
    (
        f"{HEAD}; {TEACHER}",
        "F.kl_div(y.log_softmax(-1), t.log_softmax(-1), reduction='batchmean', log_target=True)",
        [KL],
    ),
    (f"{HEAD}; {TEACHER}", "F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction='sum') / known.sum()", [KL]),
    (f"{HEAD}; {TEACHER}", "F.kl_div(y.log_softmax(-1), t.softmax(-1)) * 24", [KL]),
    (
        f"{HEAD}; {TEACHER}",
        "4 * (F.kl_div((y / 2).log_softmax(-1), (t / 2).softmax(-1), reduction='none').sum(-1) * "
        "known).sum() / known.sum()",
        [KL],
    ),
    (
        f"{HEAD}; {TEACHER}",
        "(F.kl_div((y / 2).log_softmax(-1), (t / 2).softmax(-1), reduction='none') * known[..., "
        "None]).sum() / known.sum()",
        [KL],
    ),
    (
        f"{HEAD}; {TEACHER}",
        "F.kl_div((y / 3).log_softmax(-1)[known], (t / 2).softmax(-1)[known], reduction='sum') / known.sum()",
        [KL],
    ),
    (
        f"{HEAD}; {TEACHER}",
        "F.kl_div(y.log_softmax(-1)[:, :-1], t.softmax(-1)[:, :-1], reduction='batchmean')",
        [KL],
    ),
    (
        f"{HEAD}; {TEACHER}",
        "(t.softmax(-1) * (t.log_softmax(-1) - y.log_softmax(-1))).sum(-1).masked_fill(~known, "
        "0).sum() / known.sum()",
        [KL],
    ),
    (
        f"{HEAD}; {TEACHER}; p = t.softmax(-1)",
        "((p * p.log()).sum(-1) - (p * y.log_softmax(-1)).sum(-1)).sum() / len(x)",
        [KL],
    ),
    (f"{HEAD}; {TEACHER}; q = y.log_softmax(-1)", "(q.exp() * (q - t.log_softmax(-1))).sum() / len(x)", [KL]),
    (
        f"{HEAD}; {TEACHER}",
        "F.kl_div(t.log_softmax(-1), y.log_softmax(-1), reduction='batchmean', log_target=True)",
        [KL],
    ),
    (
        f"{HEAD}; {TEACHER}; p, q = t.softmax(-1), y.softmax(-1); m = (p + q) / 2",
        "(F.kl_div(m.log(), p, reduction='batchmean') + F.kl_div(m.log(), q, reduction='batchmean')) / 2",
        [KL],
    ),
    (
        f"{HEAD}; {TEACHER}; p, q = t.softmax(-1), y.softmax(-1); m = 0.3 * p + 0.7 * q",
        "(0.3 * p * (p.log() - m.log()) + 0.7 * q * (q.log() - m.log())).sum() / len(x)",
        [KL],
    ),
    (
        f"{HEAD}; t = self.biased_teacher(x)",
        "F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction='batchmean')",
        [KL],
    ),
    (
        "y = self.biased(h); t = self.biased_teacher(x)",
        "4 * F.kl_div((y / 2).log_softmax(-1), (t / 3).softmax(-1), reduction='batchmean')",
        [KL],
    ),
    (
        f"y = 5 * torch.tanh(self.head(h) / 5); {TEACHER}; t = 3 * torch.tanh(t / 3)",
        "F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction='batchmean')",
        [KL],
    ),
    (
        f"y = self.biased(h); y = y / 5; y = torch.tanh(y); y = y * 5; {TEACHER}",
        "(y.div(2).softmax(-1) * (y.div(2).log_softmax(-1) - t.div(2).log_softmax(-1))).sum() / len(x)",
        [KL],
    ),
    (
        f"{HEAD}; {TEACHER}",
        "(F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction='none').sum(-1) * mask).sum() / mask.sum()",
        [KL],
    ),
    (
        f"{HEAD}; {TEACHER}; w = share[:, None] * known",
        "(F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction='none') * w[..., None]).sum() / w.sum()",
        [KL],
    ),
    (
        f"y = 5 * torch.tanh(self.biased(h) / 5); {TEACHER}",
        "F.cross_entropy(y.flatten(0, 1), labels.flatten()) + (F.kl_div((y / 2).log_softmax(-1), "
        "(t / 2).softmax(-1), reduction='none').sum(-1) * mask).sum() / mask.sum()",
        [BOTH],
    ),
    (
        f"{HEAD}; t = self.wide_teacher(x)[..., :24]",
        "F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction='batchmean')",
        [KL],
    ),
    (
        f"{HEAD}; t = F.linear(h.detach(), self.embedding).detach()",
        "F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction='batchmean')",
        [KL],
    ),
    (
        f"{HEAD}; {TEACHER}",
        f"0.3 * {HF}ForCausalLMLoss(y, labels, 24) "
        "+ 0.7 * 4 * F.kl_div((y / 2).log_softmax(-1), (t / 2).softmax(-1), reduction='batchmean')",
        [BOTH],
    ),
    (
        f"{HEAD}; {TEACHER}; y, t, labels = y[:, :-1], t[:, :-1], labels[:, 1:]; known = labels != -100",
        "F.cross_entropy(y.transpose(1, 2), labels, label_smoothing=0.2) "
        "+ (F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction='none').sum(-1) * known).sum() / "
        "known.sum()",
        [BOTH],
    ),
    (
        f"{HEAD}; {TEACHER}",
        "F.cross_entropy(y[:, :-1].transpose(1, 2), labels[:, 1:]) + F.kl_div(y.log_softmax(-1), "
        "t.softmax(-1), reduction='batchmean')",
        [CE, KL],
    ),
    (
        f"{HEAD}; {TEACHER}",
        "0.5 * F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction='batchmean') "
        "+ 0.5 * F.kl_div(t.log_softmax(-1), y.softmax(-1), reduction='batchmean')",
        [KL, KL],
    ),
]

# Lines before the loss, the loss, and the reason why it stays as it is.
REFUSED: list[tuple[str, str, str]] = [
    (
        HEAD,
        "F.cross_entropy(y.flatten(0, 1), labels.flatten()) + 1e-4 * y.logsumexp(-1).pow(2).mean()",
        "aten.pow.Tensor_Scalar is not part",
    ),
    (
        HEAD,
        "F.cross_entropy(y.flatten(0, 1), labels.flatten()) + y.pow(2).mean()",
        "its logits are also used elsewhere: aten.pow.Tensor_Scalar is not part",
    ),
    (
        HEAD,
        "F.cross_entropy(y.flatten(0, 1), labels.flatten(), weight=torch.arange(24.0))",
        "the classes are weighted",
    ),
    (
        HEAD,
        "F.cross_entropy(y.flatten(0, 1), y.detach().argmax(-1).flatten())",
        "its logits are also used elsewhere: aten.argmax.default is not part",
    ),
    (
        "y = self.small(h)",
        "F.cross_entropy(y.flatten(0, 1), labels.clamp(0, 5).flatten())",
        "take no more memory than the 8 hidden states",
    ),
    (
        f"{HEAD}; {TEACHER}",
        "F.cross_entropy(y.flatten(0, 1), t.softmax(-1).flatten(0, 1))",
        "no fused operator computes its loss",
    ),
    (
        f"{HEAD}; t = self.biased(h)",
        "F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction='batchmean')",
        "no fused operator computes its loss",
    ),
    (
        f"{HEAD}; {TEACHER}",
        "F.mse_loss(y.log_softmax(-1), t.log_softmax(-1))",
        "aten.mse_loss.default is not part",
    ),
]
