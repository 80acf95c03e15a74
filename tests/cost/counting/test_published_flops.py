"""Parameters and FLOPs of public models against what their authors publish.

FLOPs of the vision models are torchvision's (`ViT_B_16_Weights`… `meta["_ops"]`, in 10^9 multiplications with
addition); those of BERT are from "TinyBERT: Distilling BERT for Natural Language Understanding" (Jiao et al.,
2020), table 1, for 128 tokens. Parameters of language models are those of their model cards' checkpoints.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T

from secc.cost.counting import meta_run

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "workloads"))
from parts import configs  # pyright: ignore[reportMissingImports]


def vit(layers: int, hidden: int, heads: int, patch: int) -> Any:
    config = T.ViTConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        patch_size=patch,
        num_labels=1000,
    )
    return T.ViTForImageClassification(config).eval()


def resnet(depths: list[int]) -> Any:
    return T.ResNetForImageClassification(T.ResNetConfig(depths=depths, num_labels=1000)).eval()


def picture(makes: meta_run.ValuelessTensors) -> Any:
    return [makes((1, 3, 224, 224), (3 * 224 * 224, 224 * 224, 224, 1), torch.float32)], {}


def words(makes: meta_run.ValuelessTensors) -> Any:
    return [makes((1, 128), (128, 1), torch.int64)], {}


@pytest.mark.parametrize(("make", "arguments", "parameters", "flops"), [
    (lambda: vit(12, 768, 12, 16), picture, 86_567_656, 2 * 17.564e9),
    (lambda: vit(12, 768, 12, 32), picture, 88_224_232, 2 * 4.409e9),
    (lambda: vit(24, 1024, 16, 16), picture, 304_326_632, 2 * 61.555e9),
    (lambda: vit(24, 1024, 16, 32), picture, 306_535_400, 2 * 15.378e9),
    (lambda: resnet([3, 4, 6, 3]), picture, 25_557_032, 2 * 4.089e9),
    (lambda: resnet([3, 4, 23, 3]), picture, 44_549_160, 2 * 7.801e9),
    (lambda: resnet([3, 8, 36, 3]), picture, 60_192_808, 2 * 11.514e9),
    (lambda: T.BertModel(T.BertConfig()).eval(), words, 109_482_240, 22.5e9),
], ids=[
    "vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "resnet50", "resnet101", "resnet152", "bert_base",
])  # fmt: skip
def test_parameters_and_flops_match_published_ones(
    make: Any, arguments: Any, parameters: int, flops: float
) -> None:
    with torch.device("meta"):
        model = make()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert meta_run.run_on_meta(model, arguments, grad=False).flops == pytest.approx(flops, rel=0.01)


@pytest.mark.parametrize(("config", "parameters"), [
    ("llama3_8b", 8_030_261_248), ("llama3_70b", 70_553_706_496),
    ("qwen2_5_7b", 7_615_616_512), ("qwen2_5_72b", 72_706_203_648),
    ("qwen3_8b", 8_190_735_360), ("qwen3_32b", 32_762_123_264), ("qwen3_1_7b", 1_720_574_976),
])  # fmt: skip
def test_workloads_match_parameters_of_their_models(config: str, parameters: int) -> None:
    with torch.device("meta"):
        model = configs.language_model(getattr(configs, config)())
    assert sum(p.numel() for p in model.parameters()) == parameters
