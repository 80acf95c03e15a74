"""Compares the predicted memory of a rank with what lives at once on a real one.

    python -m tools.check_memory [MODEL ...]     prints a table; `--json FILE` writes it

Each model is compiled without fused operators for one rank in each configuration, and trains three steps on
the CPU. Measured are the bytes of all tensors that exist at once in the second and third step: weights,
gradients, optimizer states, the batch, and what forwards and backwards hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers as T
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils.generic import ModelOutput

from secc.cost.model.live_bytes import LiveBytesTracker
from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.report.html_page import report_page
from tools.bench_runtime import join_training
from tools.benchmark_table import BenchmarkTable, add_json_option
from tools.compare_training import find_free_port

BATCH_SAMPLES, STEPS = 4, 3
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


class WideLosses(nn.Module):
    """A bf16 model distilled from a frozen one, with both losses on float32 copies of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = _language_model(T.LlamaConfig, 4, 384, 16_000, num_key_value_heads=8)
        self.teacher.requires_grad_(False)
        self.student = _language_model(T.LlamaConfig, 3, 256, 16_000, num_key_value_heads=8)
        self.to(torch.bfloat16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(input_ids=input_ids).logits
        logits = self.student(input_ids=input_ids).logits
        divergences = nn.functional.kl_div(
            logits[:, :-1].float().log_softmax(-1),
            wanted[:, :-1].float().log_softmax(-1),
            reduction="none",
            log_target=True,
        )
        entropy = nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        return entropy + divergences.sum(-1).mean()


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
    "bf16, many words": lambda: _language_model(T.Qwen3Config, 4, 256, 16_000, num_key_value_heads=8).to(
        torch.bfloat16
    ),
    "bf16, frozen teacher": lambda: WideLosses(),
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


def compile_for_rank(model: Path, plan: Path, micro_batch: int, recomputation: str) -> float:
    """Compiles a model into one section on one rank and writes its plan. Returns the predicted bytes."""
    options = CompileOptions(cluster="1x1xcpu", global_batch=BATCH_SAMPLES, max_sections=1, fuse=False)
    compiled = compile_model(model, options)
    (section,) = compiled.plan.sections
    if (section.micro_batch, section.recompute) != (micro_batch, recomputation):
        pins = (f"{section.name}.micro_batch={micro_batch}", f"{section.name}.recompute={recomputation}")
        compiled = compile_model(model, dataclasses.replace(options, set=pins))
        (section,) = compiled.plan.sections
    compiled.write_plan(plan, report_page)
    return section.memory_gib * 2**30


class _LiveTensors(TorchDispatchMode):
    """Counts the bytes of all tensors with values that operations make, while they exist."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = LiveBytesTracker(())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = (t for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        self.tracker.record_results(t for t in tensors if not t.is_meta)
        return result


def train_on_rank(plan: Path, port: int, pipe: Any) -> None:
    """Trains as the only rank of a plan, and sends the most bytes that exist at once after the first step."""
    live = _LiveTensors()
    with live, join_training(plan, 0, 1, port, STEPS) as (_, trainer, steps):
        trainer.train_step(next(steps))
        gc.collect()
        before = len(live.tracker.bytes_after_op)
        for _ in range(STEPS - 1):
            trainer.train_step(next(steps))
    pipe.send(max(live.tracker.bytes_after_op[before:]))


def compare_memory(name: str, micro_batch: int, recomputation: str) -> tuple[float, float]:
    """(predicted, measured) bytes of a model on a rank."""
    with tempfile.TemporaryDirectory() as folder:
        model, plan = Path(folder) / "model.py", Path(folder) / "plan"
        model.write_text(MODEL_FILE_TEXT.format(name=name))
        predicted = compile_for_rank(model, plan, micro_batch, recomputation)
        context = get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        rank = context.Process(target=train_on_rank, args=(plan, find_free_port(), sender))
        rank.start()
        sender.close()
        measured = receiver.recv()
        rank.join()
        return predicted, measured


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
        "Predicted / measured MiB (error) of one rank; steps of four samples, AdamW, float32 or bf16.",
        options.json,
    )
    for name in options.models:
        results = [compare_memory(name, *configuration) for configuration in CONFIGURATIONS]
        cells = (
            f"{predicted / 2**20:.0f} / {measured / 2**20:.0f} {predicted / measured - 1:+.1%}"
            for predicted, measured in results
        )
        table.add_row(name, *cells)


if __name__ == "__main__":
    main()
