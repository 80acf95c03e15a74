"""Predicted memory of a rank against what PyTorch's memory tracker sees of plain PyTorch on CPU.

    python -m tools.check_memory

Each model is compiled for one rank with one micro-batch, and the plan's prediction is compared with the peak of
`torch.distributed._tools.mem_tracker.MemTracker` over two steps of plain PyTorch with the user's optimizer on the same batch.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import transformers as T
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from secc.compiler import Options, compile_model
from secc.runtime.user_model import UserModel, load

SAMPLES = 4
FILE = """
import torch
from tools.check_memory import CASES

def model():
    return CASES[{name!r}]()

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        if {name!r}.startswith("vit"):
            return {{"pixel_values": torch.randn(3, 224, 224, generator=g), "labels": torch.tensor(i % 10)}}
        words = torch.randint(10, 1000, (384,), generator=g)
        return {{"input_ids": words, "labels": words.clone()}}

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


CASES: Mapping[str, Callable[[], nn.Module]] = {
    "qwen3": lambda: _language_model(T.Qwen3Config, 8, 512, 4000, num_key_value_heads=4, head_dim=64),
    "llama, wide": lambda: _language_model(T.LlamaConfig, 3, 1024, 2000, num_key_value_heads=8),
    "llama, deep": lambda: _language_model(T.LlamaConfig, 16, 256, 1000, num_key_value_heads=8),
    "llama, many words": lambda: _language_model(T.LlamaConfig, 4, 256, 16_000, num_key_value_heads=8),
    "opt": lambda: T.OPTForCausalLM(
        T.OPTConfig(
            hidden_size=512, num_hidden_layers=6, ffn_dim=2048, num_attention_heads=8, vocab_size=4000, word_embed_proj_dim=512,
            max_position_embeddings=512, dropout=0.0, use_cache=False,
        )
    ),
    "vit": lambda: T.ViTForImageClassification(
        T.ViTConfig(hidden_size=384, num_hidden_layers=8, num_attention_heads=6, intermediate_size=1536, num_labels=10)  # pyright: ignore[reportCallIssue]
    ),
}  # fmt: skip


def predicted(path: Path) -> float:
    """Bytes that the plan expects on its one rank, all samples in one micro-batch and nothing recomputed."""
    options = Options(cluster="1x1xcpu", global_batch=SAMPLES, max_sections=1, fuse=False)
    (section,) = compile_model(path, options).plan.sections
    if (section.micro_batch, section.recompute) != (SAMPLES, "none"):
        pins = tuple(f"{section.name}.{pin}" for pin in ("recompute=none", f"micro_batch={SAMPLES}"))
        (section,) = compile_model(path, dataclasses.replace(options, set=pins)).plan.sections
    return section.memory_gib * 2**30


def tracked(user: UserModel) -> float:
    """Bytes at the tracker's peak in plain PyTorch."""
    torch.manual_seed(0)
    model = user.model()
    optimizer = user.optimizer([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    batch = user.collate([user.module.dataset()[i] for i in range(SAMPLES)])
    tracker = MemTracker()
    tracker.track_external(model, optimizer, *batch.values())
    with tracker:
        for _ in range(2):
            tracker.reset_mod_stats()
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    snapshot = tracker.get_tracker_snapshot("peak")
    return float(sum(state["Total"] for state in snapshot.values()))


def compare(name: str) -> tuple[float, float]:
    """(predicted, tracked) bytes of a case."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.py"
        path.write_text(FILE.format(name=name))
        return predicted(path), tracked(load(path))


def main() -> None:
    print("| model | predicted, MiB | tracked, MiB | error |\n| --- | --- | --- | --- |")
    for name in sys.argv[1:] or CASES:
        expected, seen = compare(name)
        print(f"| {name} | {expected / 2**20:.0f} | {seen / 2**20:.0f} | {expected / seen - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
