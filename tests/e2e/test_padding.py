"""Packed batches, padding on either side, and edges between widths are exact, with own widths where
padding does not reach the loss."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from secc.driver import compile as compiler
from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.driver.step_preview import preview_step
from secc.errors import UserError
from secc.frontend.dataset.padding_policy import WidthsReason
from secc.frontend.excerpt.limits import ExcerptLimits
from secc.report.plan_warnings import plan_warnings

DATA = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        n, t = (int(torch.randint(low, high, (), generator=g)) for low, high in ((5, 14), (6, 20)))
        ids = torch.randint(1, 64, (n,), generator=g)
        labels = torch.cat([ids.new_full((1,), -100), ids[1:]])
        return dict(input_ids=ids, labels=labels, sound=torch.randn(t, 8, generator=g))


def dataset():
    return Samples()


def packed(samples, key):
    return torch.cat([s[key] for s in samples])[None]
"""
LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM


def model():
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, **heads)
    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False, max_position_embeddings=64))
"""
# Hugging Face's packing: positions that restart.
RESETS = """

def collate(samples):
    positions = torch.cat([torch.arange(len(s["input_ids"])) for s in samples])[None]
    ids, labels = packed(samples, "input_ids"), packed(samples, "labels")
    return dict(input_ids=ids, labels=labels, position_ids=positions)
"""
# Padding before the tokens. The first label counts only where it is asked for: padding predicts it.
LEFT = """

def collate(samples):
    width = max(len(s["input_ids"]) for s in samples)
    pad = lambda x, value: torch.cat([x.new_full((width - len(x),), value), x])
    mask = torch.stack([pad(torch.ones_like(s["input_ids"]), 0) for s in samples])
    ids = torch.stack([pad(s["input_ids"], 0) for s in samples])
    labels = torch.stack([pad(s[LABELS], -100) for s in samples])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return dict(input_ids=ids, labels=labels, attention_mask=mask, position_ids=positions)
"""
# Attention within each sample of a packed batch, by the offsets of its samples, which a block reads.
OFFSETS = """

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x, offsets):
        q, k, v = self.qkv(x).chunk(3, -1)
        spans = [slice(a, b) for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist())]
        attend = F.scaled_dot_product_attention
        found = [attend(q[:, None, s], k[:, None, s], v[:, None, s], is_causal=True)[:, 0] for s in spans]
        return x + self.out(torch.cat(found, 1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, input_ids, labels, cu_seqlens):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, cu_seqlens)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def model():
    return Model()


def collate(samples):
    lengths = torch.tensor([0] + [len(s["input_ids"]) for s in samples])
    ids, labels = packed(samples, "input_ids"), packed(samples, "labels")
    return dict(input_ids=ids, labels=labels, cu_seqlens=lengths.cumsum(0).int())
"""
# An encoder of sounds as long as they are, a decoder of texts as long as they are.
EDGE = """

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, 16)
        options = dict(dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, **options) for _ in range(2))

    def forward(self, sound, mask):
        x = self.inp(sound) * mask[..., None]
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=mask == 0)
        return x


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        options = dict(dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList(nn.TransformerDecoderLayer(16, 2, 32, **options) for _ in range(2))

    def forward(self, ids, memory, mask):
        x = self.embed(ids)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, memory, tgt_mask=causal, memory_key_padding_mask=mask == 0)
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.head = Encoder(), Decoder(), nn.Linear(16, 64)

    def forward(self, sound, sound_mask, input_ids, labels):
        x = self.head(self.decoder(input_ids, self.encoder(sound, sound_mask), sound_mask))
        return F.cross_entropy(x[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def model():
    return Model()


def collate(samples):
    pad = lambda key, value=0: pad_sequence([s[key] for s in samples], True, value)
    mask = pad_sequence([torch.ones(len(s["sound"])) for s in samples], True)
    return dict(sound=pad("sound"), sound_mask=mask, input_ids=pad("input_ids"), labels=pad("labels", -100))
"""
# Two convolutions with a stride: behind the first, padding is its bias, which reaches samples of some lengths
# only. What the front end says of lengths has no known values while it is captured.
STRIDED = """

class FrontEnd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv1d(n, 16, 3, 2, 1) for n in (8, 16))

    def forward(self, sound, lengths):
        inside = torch.arange(sound.shape[1])[None] < lengths[:, None]
        x = self.first((sound * inside[..., None]).transpose(1, 2)).relu()
        return self.second(x).relu().transpose(1, 2), (lengths + 3) // 4


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(16, 16, batch_first=True)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, False)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], True, total_length=x.shape[1])[0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.front, self.encoder, self.head = FrontEnd(), Encoder(), nn.Linear(16, 64)

    def forward(self, sound, lengths, labels):
        x, lengths = self.front(sound, lengths)
        return F.cross_entropy(self.head(self.encoder(x, lengths).sum(1)), labels[:, 1])


def model():
    return Model()


def collate(samples):
    rare = lambda n: n if n == 9 else n // 4 * 4
    sounds = [s["sound"][: rare(len(s["sound"]))] for s in samples]
    sound, lengths = pad_sequence(sounds, True), torch.tensor([len(s) for s in sounds])
    return dict(sound=sound, lengths=lengths, labels=pad_sequence([s["labels"] for s in samples], True, -100))
"""

CASES = {
    "packed, positions that restart": (LLAMA + RESETS, "own", 1),
    "packed, offsets that blocks read": (OFFSETS, "own", 1),
    "left": (LLAMA + LEFT.replace("LABELS", '"labels"'), "own", 1),
    "left, and padding predicts a label": (LLAMA + LEFT.replace("LABELS", '"input_ids"'), "global", 1),
    "strided convolutions before what reads lengths": (STRIDED, "global", 1),
    "an edge of another width than its consumer's": (EDGE, "own", 2),
}


@pytest.mark.parametrize("name", CASES)
def test_padding_and_packing_are_exact(name: str, tmp_path: Path) -> None:
    text, widths, sections = CASES[name]
    path = tmp_path / "model.py"
    path.write_text(DATA + text)
    compiled = check_exactness(compile_model(path, CompileOptions()))  # raises where the plan is not exact
    plan, blocks = compiled.plan, compiled.captured_model.capture.blocks.values()
    assert all(block.where and "function_blocks.py" not in block.where for block in blocks)
    assert (plan.widths, len(plan.sections)) == (widths, sections)
    if plan.edges:
        assert all(edge.extents for edge in plan.edges)  # samples travel as long as they are


@pytest.mark.parametrize("is_wide", [True, False])
def test_a_module_that_packs_lengths_of_another_is_a_block_of_its_own(is_wide: bool, tmp_path: Path) -> None:
    """Unless lengths decide how large its result is: then statements around it are one."""
    path = tmp_path / "model.py"
    path.write_text(DATA + (STRIDED if is_wide else STRIDED.replace(", total_length=x.shape[1]", "")))
    pins = ("front=front", "encoder=encoder") if is_wide else ()
    plan = check_exactness(compile_model(path, CompileOptions(sections=pins))).plan
    blocks = {block for section in plan.sections for block in section.blocks}
    assert (blocks == {"front", "encoder", "head"}) == is_wide
    assert len(plan.sections) == (3 if is_wide else 1)


SMALL = """

def small_model():
    return model()
"""


@pytest.mark.parametrize(
    ("small", "chosen", "memory", "widths", "says"),
    [
        ("", "auto", 0, "global", "too large to be run here"),
        ("", "auto", 1 << 30, "own", "with one layer of each kind at its real size (2 of 4 layers)"),
        (SMALL, "auto", 0, "own", "of small_model()"),
        (SMALL.replace("model()\n", "nn.Identity()\n"), "auto", 0, "global", "small_model() fails here: "),
        ("", "own", 0, "own", "nothing was tested"),
    ],
)
def test_widths_of_models_that_are_too_large_to_run(
    small: str,
    chosen: str,
    memory: int,
    widths: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are shown on small_model() or on layers of each kind; where neither runs, the report says what
    padding costs, and what to do."""
    monkeypatch.setattr(compiler, "MAX_LOCAL_MODEL_BYTES", 0)
    monkeypatch.setattr(ExcerptLimits, "of_this_machine", lambda: ExcerptLimits(memory))
    path = tmp_path / "model.py"
    path.write_text(DATA + EDGE + small)
    compiled = compile_model(path, CompileOptions(widths=chosen))
    plan = preview_step(compiled).plan
    assert plan.widths == widths
    assert says in plan.checks["widths"]
    priced = [w.text for w in plan_warnings(plan) if "widths" in w.text]
    assert len(priced) == (widths == "global")
    assert all("times" in text and "define small_model()" in text for text in priced)
    steps = [
        re.findall(r"a step of ([\d.]+) ms in place of ([\d.]+) ms with own widths", text) for text in priced
    ]
    assert all(float(padded) > float(own) for ((padded, own),) in steps)


# Sounds as long as durations say, and a convolution that sees how they are padded.
REGULATED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mel = nn.Embedding(64, 8), nn.Linear(8, 8)
        self.ears = nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.GELU(), nn.Conv1d(8, 8, 3, padding=1))

    def forward(self, input_ids, times, sound):
        rows = [x.repeat_interleave(t, 0) for x, t in zip(self.embed(input_ids), times)]
        made = self.mel(pad_sequence(rows, True))
        heard = self.ears(made.mT) - self.ears(sound.mT)
        return (heard.abs().sum() + (made - sound).square().sum()) / times.sum()


def model():
    return Model()


def collate(samples):
    times = [1 + s["input_ids"] % 3 for s in samples]
    sound = [torch.arange(8.0 * t.sum()).view(-1, 8).sin() for t in times]
    ids = pad_sequence([s["input_ids"] for s in samples], True)
    return dict(input_ids=ids, times=pad_sequence(times, True), sound=pad_sequence(sound, True))
"""


def test_a_width_that_forward_computes_and_padding_that_reaches_the_loss_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(DATA + REGULATED)
    with pytest.raises(UserError, match="no width of micro-batches is right: padding reaches") as refused:
        check_exactness(compile_model(path, CompileOptions()))
    assert refused.value.where.startswith("model.py:") and "F.pad" in refused.value.remedy
    lengthened = "rows = F.pad(pad_sequence(rows, True), (0, 0, 0, sound.shape[1] - max(map(len, rows))))"
    padded = REGULATED.replace("        made =", f"        {lengthened}\n        made =")
    padded = padded.replace("self.mel(pad_sequence(rows, True))", "self.mel(rows)")
    path.write_text(DATA + padded)
    assert check_exactness(compile_model(path, CompileOptions())).plan.widths == "global"


MASKING = """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8))

    def forward(self, input_ids):
        hidden = torch.zeros(input_ids.shape).masked_fill(input_ids == 0, -torch.inf)
        return self.embed(input_ids), hidden


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder().requires_grad_(False)
        self.score = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, input_ids):
        x, hidden = self.encoder(input_ids)
        weights = (self.score(x).squeeze(-1) + hidden).softmax(-1)
        return (weights[..., None] * x).sum(1).square().sum() / len(x)


def model():
    return Model()


def collate(samples):
    return dict(input_ids=pad_sequence([s["input_ids"] for s in samples], True))
"""


def test_a_mask_that_pads_with_varying_numbers_needs_the_global_batchs_widths(tmp_path: Path) -> None:
    """A section that gets it in wider micro-batches pads it with zeros, which hide nothing."""
    path = tmp_path / "model.py"
    hidden = "-1e4 * (input_ids == 0) * torch.arange(1.0, 1 + input_ids.shape[1])"
    path.write_text(DATA + re.sub("torch.zeros.*-torch.inf.", hidden, MASKING))
    options = CompileOptions(cluster="local:2", strategy="apart")
    plan = check_exactness(compile_model(path, options)).plan
    assert plan.widths == "global"
    assert plan.checks["widths"] == f"{WidthsReason.INEXACT.value} (no one number pads encoder, encoder_1)"
    with pytest.raises(UserError) as refused:
        check_exactness(compile_model(path, replace(options, widths="own")))
    assert "leave --widths own out" in refused.value.remedy
