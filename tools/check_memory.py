"""Compares the predicted memory of a rank with PyTorch's memory tracker on plain PyTorch.

    python -m tools.check_memory [MODEL ...]     prints a table; `--json FILE` writes it

Each model is compiled for one rank in each configuration. The prediction of its plan is compared with the
peak of `torch.distributed._tools.mem_tracker.MemTracker` over two steps of plain PyTorch on CPU, with the
user's optimizer, the same samples and micro-batches, and the same layers recomputed
(`torch.utils.checkpoint`).
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import transformers as T
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from transformers.utils.generic import ModelOutput

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.runtime.model.user_file import UserModel, load_model_file
from secc.runtime.plan.schema import Section
from secc.runtime.sections import recompute
from tools.benchmark_table import BenchmarkTable, add_json_option

BATCH_SAMPLES = 4
CONFIGURATIONS = (  # micro-batch, recomputation
    (2, "none"),
    (2, "selective"),
    (2, "full"),
    (1, "none"),
    (1, "full"),
)
MODEL_FILE_TEXT = """
import torch
from tools.check_memory import MODELS, random_sample

def model():
    return MODELS[{name!r}]()

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return random_sample({name!r}, torch.Generator().manual_seed(i))

def dataset():
    return Samples()
"""


def _language_model(config: type, layers: int, hidden: int, vocabulary: int, **more: object) -> nn.Module:
    sizes: dict[str, object] = dict(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=8,
        intermediate_size=3 * hidden,
        vocab_size=vocabulary,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return T.AutoModelForCausalLM.from_config(config(**sizes, **more))


class DistilledModel(nn.Module):
    """A small language model distilled from a larger frozen one, which needs much transient memory in its
    forward."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = _language_model(T.LlamaConfig, 6, 768, 2000, num_key_value_heads=8).requires_grad_(
            False
        )
        self.student = _language_model(T.LlamaConfig, 2, 128, 2000, num_key_value_heads=8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> ModelOutput:
        with torch.no_grad():
            teacher = self.teacher(input_ids=input_ids).logits
        student = self.student(input_ids=input_ids, labels=labels)
        divergence = nn.functional.kl_div(
            student.logits.log_softmax(-1), teacher.softmax(-1), reduction="sum"
        )
        return ModelOutput(loss=student.loss + divergence / teacher.shape[:-1].numel())


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "qwen3": lambda: _language_model(T.Qwen3Config, 8, 512, 4000, num_key_value_heads=4, head_dim=64),
    "llama, wide": lambda: _language_model(T.LlamaConfig, 3, 1024, 2000, num_key_value_heads=8),
    "llama, deep": lambda: _language_model(T.LlamaConfig, 16, 256, 1000, num_key_value_heads=8),
    "llama, many words": lambda: _language_model(T.LlamaConfig, 4, 256, 16_000, num_key_value_heads=8),
    "opt": lambda: T.OPTForCausalLM(
        T.OPTConfig(
            hidden_size=512,
            num_hidden_layers=6,
            ffn_dim=2048,
            num_attention_heads=8,
            vocab_size=4000,
            word_embed_proj_dim=512,
            max_position_embeddings=512,
            dropout=0.0,
            use_cache=False,
        )
    ),
    "bert": lambda: T.BertForMaskedLM(
        T.BertConfig(
            hidden_size=512,
            num_hidden_layers=8,
            num_attention_heads=8,
            intermediate_size=2048,
            vocab_size=8000,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ),
    "moe": lambda: _language_model(
        T.Qwen3MoeConfig,
        6,
        512,
        4000,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=512,
    ),
    "whisper": lambda: T.WhisperForConditionalGeneration(
        T.WhisperConfig(
            d_model=384,
            encoder_layers=6,
            decoder_layers=6,
            encoder_attention_heads=6,
            decoder_attention_heads=6,
            encoder_ffn_dim=1536,
            decoder_ffn_dim=1536,
            vocab_size=4000,
            max_source_positions=300,
            max_target_positions=128,
            use_cache=False,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
        )
    ),
    "vlm": lambda: T.LlavaForConditionalGeneration(
        T.LlavaConfig(
            vision_config=T.CLIPVisionConfig(
                hidden_size=384,
                num_hidden_layers=6,
                num_attention_heads=6,
                intermediate_size=1536,
                image_size=224,
                patch_size=14,
            ),
            text_config=T.LlamaConfig(
                hidden_size=512,
                num_hidden_layers=6,
                num_attention_heads=8,
                intermediate_size=1536,
                vocab_size=4000,
                use_cache=False,
            ),
            image_token_index=IMAGE_TOKEN,
        )
    ),
    "frozen teacher": lambda: DistilledModel(),
    "vit": lambda: T.ViTForImageClassification(
        T.ViTConfig(
            hidden_size=384,
            num_hidden_layers=8,
            num_attention_heads=6,
            intermediate_size=1536,
            num_labels=10,  # pyright: ignore[reportCallIssue]
        )
    ),
}


IMAGE_TOKEN, PATCHES_PER_IMAGE = 5, 256  # of the vlm: the token of an image patch, and patches per image


def random_sample(name: str, g: torch.Generator) -> dict[str, torch.Tensor]:
    """A random sample for the model of this name."""
    words = torch.randint(10, 1000, (384,), generator=g)
    if name == "vit":
        return {
            "pixel_values": torch.randn(3, 224, 224, generator=g),
            "labels": torch.randint(10, (), generator=g),
        }
    if name == "whisper":
        return {"input_features": torch.randn(80, 600, generator=g), "labels": words[:128]}
    if name == "vlm":
        words[:PATCHES_PER_IMAGE] = IMAGE_TOKEN
        return {
            "input_ids": words,
            "pixel_values": torch.randn(3, 224, 224, generator=g),
            "labels": words.clone(),
        }
    return {"input_ids": words, "labels": words.clone()}


def plan_section(path: Path, micro_batch: int, recomputation: str) -> Section:
    """The only section of a plan for one rank."""
    options = CompileOptions(cluster="1x1xcpu", global_batch=BATCH_SAMPLES, max_sections=1, fuse=False)
    (section,) = compile_model(path, options).plan.sections
    if (section.micro_batch, section.recompute) != (micro_batch, recomputation):
        pins = (f"{section.name}.micro_batch={micro_batch}", f"{section.name}.recompute={recomputation}")
        (section,) = compile_model(path, dataclasses.replace(options, set=pins)).plan.sections
    return section


def tracked_peak(user: UserModel, section: Section) -> float:
    """Peak bytes of the tracker in plain PyTorch."""
    torch.manual_seed(0)
    model = user.build_model()
    _turn_frozen_into_buffers(model)
    recompute.install_recompute(model, section.blocks, section.recompute)
    optimizer = user.build_optimizer([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    samples, size = user.module.dataset(), section.micro_batch
    batches = [
        user.collate([samples[i] for i in range(start, start + size)])
        for start in range(0, BATCH_SAMPLES, size)
    ]
    tracker = MemTracker()
    tracker.track_external(model, optimizer, *(value for batch in batches for value in batch.values()))
    with tracker:
        for _ in range(2):
            for batch in batches:
                tracker.reset_mod_stats()
                (model(**batch).loss / len(batches)).backward()
            optimizer.step()
            optimizer.zero_grad()
    snapshot = tracker.get_tracker_snapshot("peak")
    return float(sum(state["Total"] for state in snapshot.values()))


def _turn_frozen_into_buffers(model: nn.Module) -> None:
    """Make frozen parameters buffers: the tracker expects a gradient of every parameter."""
    for module in model.modules():
        for key, param in list(module.named_parameters(recurse=False)):
            if not param.requires_grad:
                delattr(module, key)
                module.register_buffer(key, param.data)


def compare_memory(name: str, micro_batch: int, recomputation: str) -> tuple[float, float]:
    """(predicted, tracked) bytes of a model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.py"
        path.write_text(MODEL_FILE_TEXT.format(name=name))
        section = plan_section(path, micro_batch, recomputation)
        return section.memory_gib * 2**30, tracked_peak(load_model_file(path), section)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(MODELS))
    add_json_option(parser)
    options = parser.parse_args()
    titles = [
        f"{n} in a micro-batch{', recompute ' + recomputation if recomputation != 'none' else ''}"
        for n, recomputation in CONFIGURATIONS
    ]
    table = BenchmarkTable(
        ("model", *titles),
        "Predicted / tracked MiB (error) of one rank; two steps of four samples, float32, AdamW.",
        options.json,
    )
    for name in options.models:
        results = [compare_memory(name, *configuration) for configuration in CONFIGURATIONS]
        cells = (
            f"{expected / 2**20:.0f} / {tracked / 2**20:.0f} {expected / tracked - 1:+.1%}"
            for expected, tracked in results
        )
        table.add_row(name, *cells)


if __name__ == "__main__":
    main()
