"""Losses that are trained today besides next-token prediction: preferences with a frozen reference, policies
with advantages, draft heads, diffusion with frozen encoders, codebooks. Plain PyTorch as it is written for
them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers as T
from torch import nn
from torch.nn import functional as F

from tools.zoo_models.adapters import adapted
from tools.zoo_models.entry import Entry
from tools.zoo_models.parts import llama
from tools.zoo_models.samples import IGNORED, VOCABULARY, Sample, integer, padded, words
from tools.zoo_models.structures import WIDTH, Layer, Patches, Text

BETA = 0.1
PREFERRED = ("chosen", "rejected")


def log_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of each row's labels that count, summed."""
    labels = labels[:, 1:].clone()
    counted = labels != IGNORED
    labels[~counted] = 0
    each = torch.gather(logits[:, :-1].log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    return (each * counted).sum(-1)


def wider(x: torch.Tensor, width: int, value: int) -> torch.Tensor:
    """Padded on the right."""
    return F.pad(x, (0, width - x.shape[1]), value=value)


class Anchored(nn.Module):
    """A policy, and the frozen reference that it stays near."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = T.LlamaForCausalLM(llama())
        self.reference = T.LlamaForCausalLM(llama()).requires_grad_(False)


class Preferences(Anchored):
    """DPO: chosen and rejected answers in one batch, one half behind the other, through a policy and a frozen
    reference."""

    def forward(
        self,
        chosen_input_ids: torch.Tensor,
        chosen_attention_mask: torch.Tensor,
        chosen_labels: torch.Tensor,
        rejected_input_ids: torch.Tensor,
        rejected_attention_mask: torch.Tensor,
        rejected_labels: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        n, width = len(chosen_input_ids), max(chosen_input_ids.shape[1], rejected_input_ids.shape[1])
        ids = torch.cat([wider(chosen_input_ids, width, 0), wider(rejected_input_ids, width, 0)])
        mask = torch.cat([wider(chosen_attention_mask, width, 0), wider(rejected_attention_mask, width, 0)])
        labels = torch.cat([wider(chosen_labels, width, IGNORED), wider(rejected_labels, width, IGNORED)])
        found = log_probabilities(self.policy(input_ids=ids, attention_mask=mask).logits, labels)
        with torch.no_grad():
            known = log_probabilities(self.reference(input_ids=ids, attention_mask=mask).logits, labels)
        chosen, rejected = BETA * (found - known)[:n], BETA * (found - known)[n:]
        return {
            "loss": -F.logsigmoid(chosen - rejected).mean(),
            "accuracy": (chosen > rejected).float().mean(),
        }


class AdaptedPreferences(nn.Module):
    """DPO with adapters: the reference is the policy with its adapters switched off. A sample's answers stand
    one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = adapted(T.LlamaForCausalLM(llama()))

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        found = log_probabilities(
            self.policy(input_ids=input_ids, attention_mask=attention_mask).logits, labels
        )
        with torch.no_grad(), self.policy.disable_adapter():  # pyright: ignore[reportCallIssue]
            known = log_probabilities(
                self.policy(input_ids=input_ids, attention_mask=attention_mask).logits, labels
            )
        chosen, rejected = (BETA * (found - known)).view(-1, 2).unbind(1)
        return -F.logsigmoid(chosen - rejected).mean()


class Reward(nn.Module):
    """A reward at each answer's last token; the chosen one's is to be the higher one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = T.LlamaForSequenceClassification(llama(num_labels=1))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        rewards = self.net(input_ids=input_ids, attention_mask=attention_mask).logits.view(-1, 2)
        return -F.logsigmoid(rewards[:, 0] - rewards[:, 1]).mean() + 0.01 * rewards.square().mean()


class Policy(Anchored):
    """GRPO: advantages and earlier log probabilities of each token come with the batch; the policy stays near
    a frozen reference."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        completion_mask: torch.Tensor,
        advantages: torch.Tensor,
        before: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        def each(net: nn.Module) -> torch.Tensor:
            logits = net(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
            return torch.gather(logits.log_softmax(-1), 2, input_ids[:, 1:, None]).squeeze(-1)

        found, counted = each(self.policy), completion_mask[:, 1:]
        with torch.no_grad():
            known = each(self.reference)
        ratio, gain = torch.exp(found - before[:, 1:]), advantages[:, 1:]
        away = torch.exp(known - found) - (known - found) - 1
        loss = 0.04 * away - torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        return {
            "loss": (loss * counted).sum() / counted.sum(),
            "away": (away * counted).sum() / counted.sum(),
        }


class Draft(nn.Module):
    """Heads that draft tokens ahead from a frozen model's states, and a layer that predicts its next
    state."""

    def __init__(self) -> None:
        super().__init__()
        self.base = T.LlamaForCausalLM(llama()).requires_grad_(False)
        width = self.base.config.hidden_size
        self.joined = nn.Linear(2 * width, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.heads = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(2)])

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, loss_mask: torch.Tensor
    ) -> torch.Tensor:
        with torch.no_grad():
            out = self.base(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
            states, likely = out.hidden_states[-1], out.logits.softmax(-1)
        x = self.joined(torch.cat([self.base.get_input_embeddings()(input_ids[:, 1:]), states[:, :-1]], -1))
        x = self.layer(x, src_mask=torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1))
        counted = loss_mask[:, 1:, None].float()
        near = F.smooth_l1_loss(x, states[:, 1:], reduction="none").mean(-1, keepdim=True)
        alike = -(likely[:, 1:] * self.base.lm_head(x).log_softmax(-1)).sum(-1, keepdim=True)
        loss = ((near + 0.1 * alike) * counted).sum() / (counted.sum() + 1e-5)
        for ahead, head in enumerate(self.heads, 2):
            logits = self.base.lm_head(states + head(states))[:, :-ahead]
            labels = input_ids[:, ahead:].masked_fill(loss_mask[:, ahead:] == 0, IGNORED)
            loss = loss + 0.8**ahead * F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss


class Denoiser(nn.Module):
    """Noisy latents [n, 4, 4, 4] at times [n] to their noise, looking at a text."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.when, self.said = (
            nn.Linear(4, WIDTH),
            nn.Linear(16, WIDTH),
            nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        )
        self.layers = nn.ModuleList([Layer(causal=False) for _ in range(3)])
        self.out = nn.Linear(WIDTH, 4)

    def forward(
        self, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        angles = t[:, None] * torch.exp(-torch.arange(8) / 2)
        h = (
            self.patch(x.flatten(2).transpose(1, 2))
            + self.when(torch.cat([angles.sin(), angles.cos()], -1))[:, None]
        )
        h = h + self.said(h, text, text, key_padding_mask=~mask, need_weights=False)[0]
        for layer in self.layers:
            h = layer(h)
        return self.out(h).transpose(1, 2).reshape(x.shape)


class Diffusion(nn.Module):
    """Latents of a frozen encoder, drawn; noise and time, drawn; now and then a text is left out. Steps count
    by their noise."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 8, 1)
        ).requires_grad_(False)
        text = T.T5Config(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
        self.text = T.T5EncoderModel(text).requires_grad_(False).eval()
        self.nothing = nn.Parameter(0.02 * torch.randn(WIDTH))
        self.denoiser = Denoiser()
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-3, 2e-2, 1000), 0))

    def forward(
        self, pixel_values: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        with torch.no_grad():
            mean, spread = self.encoder(pixel_values).chunk(2, 1)
            latents = mean + torch.exp(0.5 * spread) * torch.randn_like(mean)
            text = self.text(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        n = len(latents)
        text = torch.where((torch.rand(n) < 0.3)[:, None, None], self.nothing, text)
        noise, t = torch.randn_like(latents), torch.randint(0, 1000, (n,))
        kept = self.kept[t].view(-1, 1, 1, 1)
        found = self.denoiser(
            kept.sqrt() * latents + (1 - kept).sqrt() * noise, t.float(), text, attention_mask.bool()
        )
        ratio = self.kept[t] / (1 - self.kept[t])
        return ((found - noise).square().mean([1, 2, 3]) * ratio.clamp(max=5.0) / ratio).mean()


class Codebook(nn.Module):
    """The nearest code of each state, straight through, with the loss that ties the two."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(24, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.reshape(-1, WIDTH)
        far = (
            rows.square().sum(1, keepdim=True)
            - 2 * rows @ self.codes.weight.t()
            + self.codes.weight.square().sum(1)
        )
        found = self.codes(far.argmin(1)).view(x.shape)
        loss = F.mse_loss(found, x.detach()) + 0.25 * F.mse_loss(x, found.detach())
        return x + (found - x).detach(), loss


class Coded(nn.Module):
    """Pictures through a codebook and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codebook = Patches(), Codebook()
        self.decoder = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 48))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        coded, loss = self.codebook(self.encoder(pixel_values))
        wanted = pixel_values.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(-1, 4, 48)
        return F.l1_loss(self.decoder(coded), wanted) + loss


class TwoViews(nn.Module):
    """A student learns a teacher's states of two texts, which go through both in one batch, one half behind
    the other."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = Text(3).requires_grad_(False), Text(2)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        both = torch.cat([first, second])
        with torch.no_grad():
            taught = self.teacher(both)
        return (self.student(both) - taught).square().sum(-1).mean()


def _answers(g: torch.Generator) -> Sample:
    question, sample = words(g, 4, 10), Sample()
    for kind in PREFERRED:
        answer = words(g, 3, 12)
        sample[f"{kind}_input_ids"] = torch.cat([question, answer])
        sample[f"{kind}_labels"] = torch.cat([torch.full_like(question, IGNORED), answer])
    return sample


def _apart(samples: Sequence[Sample]) -> Sample:
    batch = Sample()
    for kind in PREFERRED:
        batch |= padded(
            samples, {f"{kind}_input_ids": 0, f"{kind}_labels": IGNORED}, f"{kind}_attention_mask"
        )
    return batch


def _in_turn(samples: Sequence[Sample]) -> Sample:
    rows = [
        {key: s[f"{kind}_{key}"] for key in ("input_ids", "labels")} for s in samples for kind in PREFERRED
    ]
    return padded(rows, {"input_ids": 0, "labels": IGNORED}, "attention_mask")


def _without_labels(samples: Sequence[Sample]) -> Sample:
    return {key: value for key, value in _in_turn(samples).items() if key != "labels"}


def _completion(g: torch.Generator) -> Sample:
    ids, start = words(g, 9, 20), integer(g, 2, 6)
    gain = torch.randn((), generator=g).expand(len(ids)).clone()
    counted = (torch.arange(len(ids)) >= start).float()
    return {
        "input_ids": ids,
        "completion_mask": counted,
        "advantages": gain,
        "before": torch.randn(len(ids), generator=g) / 10 - 4.7,
    }


def _drafted(g: torch.Generator) -> Sample:
    ids = words(g, 9, 20)
    return {"input_ids": ids, "loss_mask": (torch.arange(len(ids)) >= 4).long()}


def _said(g: torch.Generator) -> Sample:
    return {"pixel_values": torch.randn(3, 8, 8, generator=g), "input_ids": words(g, 4, 12)}


def _picture(g: torch.Generator) -> Sample:
    return {"pixel_values": torch.randn(3, 8, 8, generator=g)}


def _said_together(samples: Sequence[Sample]) -> Sample:
    return padded(samples, {"input_ids": 0}, "attention_mask") | {
        "pixel_values": torch.stack([s["pixel_values"] for s in samples])
    }


def _views(g: torch.Generator) -> Sample:
    return {
        "first": torch.randint(3, 99, (8,), generator=g),
        "second": torch.randint(3, 99, (8,), generator=g),
    }


ENTRIES = [
    Entry("dpo", "objectives", Preferences, _answers, _apart),
    Entry("dpo_lora", "objectives", AdaptedPreferences, _answers, _in_turn),
    Entry("reward", "objectives", Reward, _answers, _without_labels),
    Entry("grpo", "objectives", Policy, _completion),
    Entry("draft_heads", "objectives", Draft, _drafted),
    Entry("diffusion", "objectives", Diffusion, _said, _said_together),
    Entry("codebook", "objectives", Coded, _picture),
    Entry("two_views", "objectives", TwoViews, _views),
]
