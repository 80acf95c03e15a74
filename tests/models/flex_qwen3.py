"""Qwen3 with flex attention of transformers, which torch compiles, and padding."""

import random

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM


def model():
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        use_cache=False,
        attn_implementation="flex_attention",
    )
    return Qwen3ForCausalLM(config)


def dataset():
    draw, samples = random.Random(0), []
    for _ in range(16):
        ids = torch.tensor([draw.randrange(64) for _ in range(draw.choice((14, 17, 22, 27)))])
        samples.append({"input_ids": ids, "labels": ids})
    return samples


def collate(samples):
    ids = [s["input_ids"] for s in samples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(ids, batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence([torch.ones_like(i) for i in ids], batch_first=True),
    }


def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-3)
