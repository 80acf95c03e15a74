"""An embedding that other code reads than its own forward stays whole under tensor parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.errors import UserError

MODEL = Path(__file__).parent.parent / "models" / "picture_tokens.py"
HEAD, POSITIONS = "F.linear(x, self.tokens.weight)", "self.positions.weight[: ids.shape[1]]"
CALLED = "self.positions(torch.arange(ids.shape[1]))"


@pytest.mark.parametrize(
    ("head", "positions", "split"),
    [
        (HEAD, POSITIONS, set[str]()),
        (HEAD, CALLED, {"positions"}),
        ("self.head(x)", POSITIONS, {"tokens", "head"}),
        ("self.head(x.to(self.tokens.weight.dtype))", CALLED, {"tokens", "positions", "head"}),
    ],
)
def test_embeddings_that_other_code_reads_stay_whole(
    head: str, positions: str, split: set[str], tmp_path: Path
) -> None:
    source = MODEL.read_text().replace(HEAD, head).replace(POSITIONS, positions)
    if "self.head" in head:  # tied to the embedding
        made = "self.layers = nn.ModuleList(Layer() for _ in range(3))"
        added = (
            "self.head = nn.Linear(WIDTH, WORDS + CODES, bias=False)",
            "self.head.weight = self.tokens.weight",
        )
        source = source.replace(made, "\n        ".join([made, *added]))
    (tmp_path / "model.py").write_text(source)
    options = CompileOptions(
        cluster="local:3",
        global_batch=12,
        sections=("language_model=language_model", "tokenizer=tokenizer"),
        set=("language_model.tp=2",),
    )
    plan = compile_model(tmp_path / "model.py", options).plan
    section = next(s for s in plan.sections if s.name == "language_model")
    kinds = {style.module.removeprefix("language_model."): style.kind for style in section.styles}
    assert {module for module in kinds if module in ("tokens", "positions", "head")} == split
    assert any(kind == "rowwise" for kind in kinds.values())  # layers are split all the same


COLLECTING = """
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertModel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            attn_implementation="eager",
        )
        self.body, self.head = BertModel(config, add_pooling_layer=False), nn.Linear(32, 20)

    def forward(self, tokens):
        out = self.body(tokens, output_attentions=RETURNED)
        loss = F.cross_entropy(self.head(out.last_hidden_state).flatten(0, 1), tokens.flatten())
        return loss + sum(w.mean(1).square().sum((1, 2)).mean() for w in out.attentions or ())


def model():
    return Net()


def dataset():
    g = torch.Generator().manual_seed(0)
    return [{"tokens": torch.randint(0, 20, (4 + i % 5,), generator=g)} for i in range(24)]


def collate(samples):
    return {"tokens": nn.utils.rnn.pad_sequence([s["tokens"] for s in samples], batch_first=True)}
"""


@pytest.mark.parametrize(("returned", "split"), [("False", True), ("True", False)])
def test_layers_whose_attention_weights_leave_the_block_stay_whole(
    returned: str, split: bool, tmp_path: Path
) -> None:
    """A mean over heads has one shape for all heads and for those of a rank: no error would show it."""
    (tmp_path / "model.py").write_text(COLLECTING.replace("RETURNED", returned))
    options = CompileOptions(
        cluster="local:3", global_batch=12, sections=("net=body+head",), set=("net.tp=2",)
    )
    try:
        section = compile_model(tmp_path / "model.py", options).plan.find_section("net")
    except UserError as error:
        assert not split and "attention weights" in error.message
        return
    cut = {style.module for style in section.styles if "layer." in style.module}
    assert bool(cut) == split
