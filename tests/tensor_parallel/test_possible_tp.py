"""What a plan's tp would leave whole is known before one is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.cost.model.section_cost import TP_WHOLE_ATTRIBUTE, integer_attribute
from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.ir.dialect.ops import graph_of

MODEL = '''
import torch
import torch.nn.functional as F
from torch import nn

WHOLE = {whole}


class Layer(nn.Module):
    """Attention with a norm over all heads at once, which needs them whole, or over each of them."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))
        self.norm, self.out = nn.RMSNorm(32 if WHOLE else 8), nn.Linear(32, 32, bias=False)
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x):
        q, k, v = (line(x) for line in self.qkv)
        q, k = (self.norm(t) if WHOLE else self.norm(t.unflatten(-1, (-1, 8))).flatten(2) for t in (q, k))
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (q, k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 32), nn.Linear(32, 40, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x)[:, :-1].transpose(1, 2), ids[:, 1:])


def model():
    return Model()


def dataset():
    return [{{"ids": torch.arange(9 + i % 3) % 40}} for i in range(24)]
'''


@pytest.mark.parametrize("whole", [False, True])
def test_products_that_stay_whole_are_counted(tmp_path: Path, whole: bool) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL.format(whole=whole))
    made = compile_model(path, CompileOptions(cluster="1x2xH100", global_batch=4))
    blocks = graph_of(made.module).blocks.values()
    found = {integer_attribute(block, TP_WHOLE_ATTRIBUTE, 0) for block in blocks}
    layer = 4 * 32 * 32 + 2 * 32 * 64
    attention = 1000 * 4 * 32 * 32 // (layer + 32)
    assert found - {0} == ({attention} if whole else set())
