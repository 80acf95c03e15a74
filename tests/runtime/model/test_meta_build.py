"""Models without weights: large tensors have no storage, small ones have values, checkpoints are not read,
shared parameters stay shared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as T

from secc.errors import UserError
from secc.runtime.model.meta_build import MAX_REAL_ENTRIES, build_meta_model
from secc.runtime.model.user_file import UserModel, load_model_file

PLAIN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.big = nn.Linear(100_000, 100_000)
        self.small = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(10).float() * 0.5)
        self.register_buffer("mask", torch.where(self.table > 2, self.table, float("-inf")))
        self.big.weight.data[:4, :4] = self.small.weight.data
        self.small.weight.data.copy_(self.big.weight.data[:4, :4])
        self.tied = self.big
    def forward(self, x): return x.sum()

def model():
    torch.manual_seed(3)
    return Model()
def dataset(): return [{"x": torch.ones(4)}]
"""

CHECKPOINT = """
import transformers as T
def model(): return T.AutoModelForCausalLM.from_pretrained({path!r}, dtype="bfloat16")
def dataset(): return [0]
"""


def _user(folder: Path, text: str) -> UserModel:
    (folder / "model.py").write_text(text)
    return load_model_file(folder / "model.py")


def test_large_tensors_have_no_storage_and_small_ones_have_values(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    model = build_meta_model(_user(tmp_path, PLAIN))
    assert model.big.weight.is_meta and model.big.weight.numel() > MAX_REAL_ENTRIES
    assert model.table.tolist() == [0.5 * i for i in range(10)]
    assert not model.small.bias.is_meta and model.tied is model.big
    assert torch.equal(torch.get_rng_state(), before)


def test_from_pretrained_reads_only_the_configuration(tmp_path: Path) -> None:
    config = T.Qwen3Config(
        vocab_size=8192,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(tmp_path / "checkpoint")  # and no weights
    model = build_meta_model(_user(tmp_path, CHECKPOINT.format(path=str(tmp_path / "checkpoint"))))
    assert isinstance(model, T.Qwen3ForCausalLM) and not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.is_meta
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert torch.isfinite(model.model.rotary_emb.inv_freq).all()


def test_a_missing_small_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="small_model"):
        _user(tmp_path, PLAIN).as_small()
