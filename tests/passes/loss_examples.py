"""Losses as users write them, as the end of one small model's forward: what `normalize-loss` must keep exact,
and what it must refuse.

`y` are the student's scores and `t` the teacher's, [B, S, 6]; `rows` and `targets` are scores and labels
without the split into samples; `known` masks labels that are not -100; `mask` is 0 at padding; `share` is one
weight for each sample.
"""

from __future__ import annotations

CLASSES, TWO_FOR_NONE = "targets.clamp(min=0)", "targets.masked_fill(targets < 0, 2)"
CLASS_COUNTS = "F.one_hot(labels.clamp(min=0), 6).mul(known[..., None]).sum((0, 1))"
MODEL = """
import torch, torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Linear(8, 6)
        self.teacher = nn.Linear(8, 6).requires_grad_(False)
        self.register_buffer("weight", torch.arange(1.0, 7.0))
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x, labels, mask, share):
        y = self.student(x)
        with torch.no_grad():
            t = self.teacher(x)
        rows, targets, known = y.flatten(0, 1), labels.flatten(), labels != -100
{body}


def model():
    return Model()


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        n = int(torch.randint(3, 9, (), generator=g))
        labels = torch.randint(0, 6, (n,), generator=g)
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

# One captured forward for each group: the weighted sum of its losses.
GROUPS = {
    "memory with any entries": [
        "(torch.empty_like(y).fill_(2.0) * y.square()).mean()",
        "torch.where(mask[..., None] < 0, torch.empty_like(y), y).square().mean()",
    ],
    "weights by how often labels are in the batch": [
        f"(F.cross_entropy(rows, targets, reduction='none') / {CLASS_COUNTS}[{CLASSES}].clamp(min=1)).sum()",
        f"(F.cross_entropy(rows, targets, reduction='none') * {CLASS_COUNTS}.reciprocal()[{CLASSES}]).mean()",
        f"((1 - 0.9 ** {CLASS_COUNTS}).index_select(0, {CLASSES})[:, None] * rows.square()).mean()",
        f"F.cross_entropy(rows, targets, weight=known.sum() / {CLASS_COUNTS}.clamp(min=1))",
        f"F.cross_entropy(rows, targets, weight=1 / ({CLASS_COUNTS} + 1), reduction='sum') / len(x)",
        f"F.cross_entropy(rows, targets, weight=1 / ({CLASS_COUNTS} + 1), reduction='none').mean()",
        f"F.cross_entropy(rows, {TWO_FOR_NONE}, weight=1 / ({CLASS_COUNTS} + 1), ignore_index=2)",
        f"F.cross_entropy(rows, targets, weight={CLASS_COUNTS}.max() / {CLASS_COUNTS}.clamp(min=1))",
        f"(F.cross_entropy(rows, targets, reduction='none') * ({CLASS_COUNTS}.amax(0) / "
        f"{CLASS_COUNTS}.clamp(min=1)).sqrt()[{CLASSES}]).mean()",
        f"F.cross_entropy(rows, targets, weight=1 / ({CLASS_COUNTS} - {CLASS_COUNTS}.min() + 1))",
    ],
    "functions of all counts of labels": [
        f"F.cross_entropy(rows, targets, weight={CLASS_COUNTS}.median() / {CLASS_COUNTS}.clamp(min=1))",
        f"F.cross_entropy(rows, targets, weight={CLASS_COUNTS}.max(dim=0).values / ({CLASS_COUNTS} + 1))",
        f"F.cross_entropy(rows, targets, weight=F.softmax(-{CLASS_COUNTS} / 9, dim=0))",
        f"F.cross_entropy(rows, targets, weight={CLASS_COUNTS} / {CLASS_COUNTS}.float().norm())",
        f"F.cross_entropy(rows, targets, weight={CLASS_COUNTS}.float().std() / ({CLASS_COUNTS} + 1))",
        f"F.cross_entropy(rows, targets, weight=1 / ({CLASS_COUNTS}.sort(descending=True)[0] + 1))",
        f"F.mse_loss(y, t) * ({CLASS_COUNTS} / {CLASS_COUNTS}.sum()).clamp(min=1e-3).log().square().prod()",
    ],
    "rows put where a mask is": [
        "torch.zeros_like(y[:, 0]).masked_scatter((share > -1)[:, None].expand(-1, 6), y[:, 0]).exp().mean()",
    ],
    "cross entropy": [
        "F.cross_entropy(rows, targets)",
        "F.cross_entropy(y.transpose(1, 2), labels)",
        "F.cross_entropy(rows, targets, reduction='sum') / known.sum()",
        "F.cross_entropy(rows, targets, reduction='sum') / len(x)",
        "F.cross_entropy(rows, targets, weight=torch.arange(1.0, 7.0))",
        "F.cross_entropy(rows, targets, label_smoothing=0.1)",
        "F.cross_entropy(rows, targets, reduction='sum') / torch.where(known.sum() > 0, known.sum(), 1)",
    ],
    "weights of classes in a buffer": [
        "F.cross_entropy(rows, targets, weight=self.weight, label_smoothing=0.1)",
        "F.cross_entropy(y.transpose(1, 2), labels, weight=self.weight / self.weight.sum())",
        "F.cross_entropy(rows, targets, weight=self.weight, reduction='sum') / "
        "(self.weight[targets.clamp(min=0)] * known.flatten()).sum()",
        "F.mse_loss(y, t) * self.weight.sum() / self.weight.mean()",
        "F.binary_cross_entropy_with_logits(y, t.sigmoid(), pos_weight=self.weight)",
    ],
    "soft targets": [
        "F.cross_entropy(rows, t.softmax(-1).flatten(0, 1), label_smoothing=0.1)",
        "F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction='batchmean')",
        "F.kl_div(y.log_softmax(-1), t.log_softmax(-1), reduction='batchmean', log_target=True)",
        "4.0 * F.kl_div((y / 2).log_softmax(-1), (t / 2).softmax(-1), "
        "reduction='none').sum(-1).mul(mask).sum() / mask.sum()",
        "F.cross_entropy(rows, t.argmax(-1).flatten())",
        "F.cross_entropy(y[known], torch.slice_scatter(t.argmax(-1).new_full(known.shape, 2), t.argmin(-1)"
        "[:, 1:], 1, 1)[known])",
        "F.cross_entropy(rows, t.argmax(-1).masked_fill(~known, -100).view(-1))",
        "F.cross_entropy(y.transpose(1, 2), torch.where(known, t.argmax(-1), -100))",
    ],
    "regression": [
        "F.mse_loss(y, t)",
        "F.mse_loss(y, t, reduction='sum') / y.numel()",
        "F.mse_loss(y, t, reduction='none').mean(-1).mean(-1).mean()",
        "F.l1_loss(y, t)",
        "F.smooth_l1_loss(y, t, beta=0.5)",
        "(1 - F.cosine_similarity(y, t, dim=-1)).mean()",
        "F.huber_loss(y, t, delta=0.7)",
        "F.poisson_nll_loss(y, t.exp())",
        "(y - t).cosh().log().mean()",
        "torch.norm(y - t, p=1) / y.numel()",
        "torch.linalg.vector_norm(y - t, 1) / len(y)",
        "torch.norm(y - t) ** 2 / y.numel()",
        "torch.dist(y, t) ** 2 / y.numel()",
        "torch.dist(y, t, p=1) / y.numel()",
        "torch.linalg.norm(y, dim=0, keepdim=True).square().mean() / len(y)",
    ],
    "sums under other names": [
        "torch.where(mask[..., None] > 0, y.pow(2), torch.nan).nansum() / mask.sum()",
        "(y.pow(2).sum(-1) * mask).sum() / torch.count_nonzero(known)",
        "y[known].pow(2).sum() / labels.add(100).count_nonzero().clamp(min=1)",
    ],
    "a mean for each class": [  # or codebook, or expert: short vectors of sums
        f"(y.square().sum((0, 1)) / {CLASS_COUNTS}.clamp(min=1)).mean()",
        f"(y.square().sum((0, 1)) / ({CLASS_COUNTS} + 1e-3) * self.weight).sum() / 21",
        f"(y.square().sum((0, 1)) * (1 / {CLASS_COUNTS}.clamp(min=1))).sum() / ({CLASS_COUNTS} > 2).sum()",
        f"torch.where({CLASS_COUNTS} > 3, y.square().sum((0, 1)) / {CLASS_COUNTS}, 0.0).sum()",
        f"torch.where({CLASS_COUNTS} > 3, self.weight, y.sum((0, 1)) / len(y)).mean()",
        "torch.where(known.sum() > 2, y.square().sum() / known.sum(), y.sum())",
        "y.square().sum() / ((known.sum() > 3) + (mask.sum() > 2))",
        "y.square().sum() / ((known.sum() > 3).float() + (mask.sum() > 2))",
        f"-(y.sum((0, 1)) / {CLASS_COUNTS}.clamp(min=1).sqrt())[1:4].sum()",
    ],
    "classification": [
        "F.binary_cross_entropy(y.sigmoid(), t.sigmoid())",
        "F.binary_cross_entropy_with_logits(y, t.sigmoid(), pos_weight=torch.tensor(2.0))",
        "F.soft_margin_loss(y, t.sign())",
        "F.multi_margin_loss(rows, targets.clamp(min=0))",
        "F.multilabel_margin_loss(rows, targets.clamp(min=0)[:, None].expand(-1, 6))",
        "F.triplet_margin_loss(rows, t.flatten(0, 1), t.flatten(0, 1).flip(-1))",
        "F.relu(1 - y * t).mean()",
        "torch.clamp(F.cross_entropy(rows, targets, reduction='none'), max=2.0).mean()",
    ],
    "selected rows": [
        "F.cross_entropy(y[known], labels[known])",
        "y[known].logsumexp(-1).mean()",
        "rows[known.flatten().nonzero().squeeze(-1)].pow(2).mean()",
        "y[torch.arange(len(y)), mask.sum(1).long() - 1].pow(2).mean()",
        "-y.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., "
        "None]).squeeze(-1).mul(known).sum() / known.sum()",
        "torch.where(targets != -100, F.cross_entropy(rows, targets, reduction='none'), 0.0).sum() "
        "/ known.sum()",
    ],
    "numbers that values decide": [
        "y[known].sum() / y[known].shape[0]",
        "y[known].pow(2).sum() / max(len(y[known]), 1)",
        "y[known].pow(2).sum() / (known.nonzero().shape[0] * 6)",
        "(y.pow(2).sum(-1) * mask).sum() / (2 * mask.sum().item() + 1)",
        "(y.pow(2).sum(-1) * mask).sum() * (1 / int(mask.sum()))",
        "(y.pow(2).sum((1, 2)) * share).sum() / share.sum().item()",
        "y[known].pow(2).sum() / len(x) / known.sum().item() * mask.sum().item()",
        "F.kl_div((y[known] / 2).log_softmax(-1), (t[known] / 2).softmax(-1), reduction='batchmean') * 4",
    ],
    "weights": [
        "(y @ torch.cat([self.scale.abs()[None] * i for i in range(5)] + [torch.zeros(1)])).square().mean()",
        "(F.mse_loss(y, t, reduction='none').mean((1, 2)) * share).mean()",
        "(F.mse_loss(y, t, reduction='none').mean((1, 2)) * (share / share.sum())).sum()",
        "((y.pow(2).sum(-1) * mask) / mask.sum()).sum()",
        "(F.mse_loss(y, t, reduction='none').mean(2) * (mask / mask.sum(1, keepdim=True))).sum(1).mean()",
        "torch.dot(F.mse_loss(y, t, reduction='none').mean((1, 2)), share) / share.sum()",
        "(y.pow(2) * mask[..., None] * self.weight).sum() / (mask.sum() * self.weight.sum())",
        "(y.pow(2).sum(-1) * mask).sum() / (self.scale.exp() * mask.sum())",
        "torch.einsum('bsv,bsv->', y, t) / mask.sum() + torch.dot(y[:, 0, 0], y[:, 0, 0])",
        "(y.pow(2).mean((1, 2)) * (share - share.mean())).sum()",
        "(y.pow(2).sum(-1) * mask).sum() / torch.maximum(mask.sum(), torch.tensor(1.0)).sqrt()",
        "(y.pow(2).sum(-1) * mask).sum(1).mean() / x.shape[1]",
        "(y.pow(2).sum(-1) * mask).mean(1).mean()",
        "y.pow(2).mean((1, 2)).sqrt().mean()",
    ],
    "put together": [
        "torch.stack([F.mse_loss(y, t), F.cross_entropy(rows, targets)]).mean()",
        "(torch.stack([F.mse_loss(y, t), F.cross_entropy(rows, targets)]) * (-self.student.bias[:2]).exp()"
        " + self.student.bias[:2] - 0.5 * torch.stack([y.abs().mean(), self.scale])).sum()",
        "(torch.stack([F.mse_loss(y, t), F.cross_entropy(rows, targets)]) * torch.tensor([0.3, 0.7])).sum()",
        "self.scale.exp() * F.mse_loss(y, t) - self.scale",
        "F.ctc_loss(y.log_softmax(-1).transpose(0, 1), labels[:, :1].clamp(min=1), (mask != 0).sum(1), "
        "torch.ones(len(y), dtype=torch.long), reduction='none').mean()",
        "0.01 * self.scale.pow(2) + 1.5",
        "sum([F.mse_loss(y, t), F.l1_loss(y, t)]) + 0.1 * F.mse_loss(y, t).detach()",
        "F.mse_loss(y.double(), t.double()).float() + torch.tensor(0.0) + x.new_zeros(())",
        "F.mse_loss(y, t) * 0 + mask.sum() / 10",
    ],
    "Hugging Face": [
        "__import__('transformers.loss.loss_utils').loss.loss_utils.ForCausalLMLoss(y, labels, 6)",
        "__import__('transformers.loss.loss_utils').loss.loss_utils.ForCausalLMLoss(y, labels, 6, "
        "num_items_in_batch=known.sum())",
        "__import__('transformers.loss.loss_utils').loss.loss_utils.ForSequenceClassificationLoss("
        "labels[:, -1].clamp(min=0), y[:, -1], "
        "__import__('transformers').PretrainedConfig(num_labels=6, "
        "problem_type='single_label_classification'))",
    ],
}

# A loss, and what the message says of it.
REFUSED = {
    "(y @ torch.stack([y.mean() * i + 1 for i in range(6)])).mean()": (
        "aten.mv.default is applied to a sum over samples"
    ),
    "(torch.stack([y.mean(), t.mean()]).masked_fill(torch.tensor([True, False]), 0.0)).sum()": (
        "aten.masked_fill.Scalar is applied to a sum over samples"
    ),
    "torch.linalg.vector_norm(y - t)": "aten.linalg_vector_norm.default is taken over samples",
    "torch.dist(y, t)": "aten.linalg_vector_norm.default is taken over samples",
    "F.mse_loss(y, t).sqrt()": "aten.sqrt.default is applied to a sum over samples",
    "(1 - (-F.cross_entropy(rows, targets)).exp()) * 2": "aten.exp.default is applied to a sum over samples",
    "y.sum() / t.abs().sum()": "divides by a sum over samples that depends on a block's result",
    "y.mean() * t.mean()": "multiplies two sums over samples",
    "y[0].mean()": "aten.select.int makes one value of all samples",
    "(y - y.mean(0, keepdim=True)).pow(2).mean()": (
        "aten.sub.Tensor combines each sample with a sum over all samples"
    ),
    "(y.mean((1, 2)).softmax(0) * share).sum()": (
        "aten._softmax.default works along a dim that carries samples"
    ),
    "F.pad(y, (0, 0, 0, 0, 1, -1), value=2.0).square().mean()": (
        "aten.constant_pad_nd.default pads or cuts a dim that carries samples"
    ),
    "torch.view_copy(y.mean(1).T, (-1, 6)).softmax(-1).mul(share[:, None]).sum()": (
        "aten.view_copy.default gives each sample entries of the others"
    ),
    "(y - y.roll(1, 0)).pow(2).mean()": "aten.roll.default works along a dim that carries samples",
    "F.batch_norm(rows, None, None, training=True).pow(2).mean()": (
        "takes its mean and variance over the samples of the batch"
    ),
    "F.layer_norm(y.mean((1, 2)), (len(y),)).pow(2).mean()": "normalises over samples",
    "F.cross_entropy(y.mean(1) @ t.mean(1).T, torch.arange(len(y)))": (
        "aten.mm.default pairs every sample with every other"
    ),
    "(y.mean((1, 2))[:, None] - y.mean((1, 2))[None]).abs().mean()": (
        "aten.sub.Tensor pairs every sample with every other"
    ),
    "(y.mean(1).T @ y.mean(1) / len(y) - torch.eye(6)).pow(2).sum()": (
        "aten.pow.Tensor_Scalar is applied to a sum over samples"
    ),
    "(share.argsort() * y.mean((1, 2))).sum()": (
        "aten.mul.Tensor reckons with the samples' places in the batch"
    ),
    "(torch.linspace(0, 1, len(y)) * y.mean((1, 2))).sum()": (
        "aten.mul.Tensor reckons with the samples' places in the batch"
    ),
    "(torch.arange(len(y))[:, None, None] / len(y) + y).pow(2).mean()": (
        "aten.add.Tensor reckons with the samples' places in the batch"
    ),
    "F.mse_loss(y, t[torch.arange(len(y)).flip(0)])": "aten.index.Tensor puts the samples in another order",
    "(y[1:] - y[:-1]).pow(2).mean()": "aten.slice.Tensor picks some of the samples",
    "y.chunk(2)[0].square().mean()": "aten.split.Tensor picks some of the samples",
    "y.unsafe_chunk(2)[0].square().mean()": "aten.unsafe_split.Tensor picks some of the samples",
    "y.mean(1)[:, :2].diagonal().square().mean()": "picks entries by the samples' places in the batch",
    "F.conv1d(y.mean(1).T, torch.ones(6, 6, 3), padding=1).square().mean()": (
        "aten.convolution.default works along a dim that carries samples"
    ),
    "F.avg_pool1d(y.mean(1).T[None], 3, 1, 1).square().mean()": "works along a dim that carries samples",
    "F.scaled_dot_product_attention(y.mean(1)[None], t.mean(1)[None], t.mean(1)[None]).mean()": (
        "aten.bmm.default pairs every sample with every other"
    ),
    "y.mean(1).tril().square().mean()": "works along a dim that carries samples",
    "F.scaled_dot_product_attention(y.mean(1)[None], *[torch.eye(4, 6)[None]] * 2, is_causal=True).mean()": (
        "masks entries by the samples' places in the batch"
    ),
    "torch.renorm(y.mean(1), 2, 1, 0.1).square().mean()": "another result when other samples come with it",
    "torch.fft.rfft(y.mean((1, 2))).abs().square().mean()": "makes a number of rows",
    "F.group_norm(y.mean(1)[None].expand(2, -1, -1), 1).square().mean()": "another result",
    "y[::2].mean()": "aten.slice.Tensor picks some of the samples",
    "y.transpose(0, 1).reshape(len(x), -1).log_softmax(-1).mean()": (
        "gives each sample entries of the others"
    ),
    "y.std()": "aten.std.correction is taken over samples",
    "y.mean((1, 2)).topk(2).values.mean()": "aten.topk.default works along a dim that carries samples",
    "F.cross_entropy(rows, targets, weight=self.teacher.bias)": "weights, which are a parameter of the model",
}
# Their statements are a block that takes the whole batch, since Python reads a number of it.
OF_THE_WHOLE_BATCH = (
    "F.mse_loss(y, t) if known.sum().item() > 3 else F.l1_loss(y, t)",
    "y[known][: known.sum().item() // 2].sum()",
)
