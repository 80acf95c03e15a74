"""A tp that leaves the layers of a section whole is taken back: the plan was priced with parts of them."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from secc.driver import compile as compiler
from secc.driver.activation_room import subtract_whole_parameters
from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.errors import UserError

MODEL = """
import torch, transformers as T


def make(width, heads, shared):
    return T.LlamaForCausalLM(T.LlamaConfig(
        vocab_size=32768, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=shared, use_cache=False,
    ))


def model():
    return make(4096, 32, 8)


def small_model():
    return make(32, SMALL)


def dataset():
    rows = [torch.arange(1, 9 + i % 5) for i in range(16)]
    return [{"input_ids": row, "labels": row} for row in rows]
"""


def compile_on_two_ranks(folder: Path, small_heads: str, *pins: str) -> CompiledPlan:
    """Compiles for one replica of at most two ranks."""
    (folder / "model.py").write_text(MODEL.replace("SMALL", small_heads))
    (folder / "cluster.yaml").write_text("nodes: 1\ndevices: 2\nkind: small\nlike: H100\nmemory_gib: 7\n")
    kept = ("model.dp=1", "model.cp=1", "model.pp=1", "model.sharding=none", "model.offload=none", *pins)
    options = CompileOptions(cluster=str(folder / "cluster.yaml"), global_batch=8, set=kept, fuse=False)
    return compile_model(folder / "model.py", options)


@pytest.fixture(autouse=True)
def build_no_model_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_LOCAL_MODEL_BYTES", 0)


def test_layers_like_those_of_the_small_model_are_split(tmp_path: Path) -> None:
    plan = compile_on_two_ranks(tmp_path, "4, 2").plan
    assert plan.user_sections[0].mesh.tp == 2
    assert {s.name.split(".")[2] for s in plan.sections[0].shards if ".layers." in s.name} == {"0", "1"}


REASON = "model.tp=2 is impossible: most of its parameters would stay whole on every rank"


def test_tp_is_taken_back_where_the_small_model_cannot_show_it(tmp_path: Path) -> None:
    """Although the embedding and the head can be split. Without tp, this model needs more memory."""
    with pytest.raises(UserError, match="does not fit") as error:
        compile_on_two_ranks(tmp_path, "2, 1")
    assert f"taken back before: model.tp, because {REASON}" in error.value.message
    assert "the same layer of small_model() is split otherwise" in error.value.message


def test_a_pinned_tp_is_refused_where_the_small_model_cannot_show_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=REASON):
        compile_on_two_ranks(tmp_path, "2, 1", "model.tp=2")


def test_parameters_that_stay_whole_take_from_the_room_for_activations(tmp_path: Path) -> None:
    plan = compile_on_two_ranks(tmp_path, "4, 2", "model.tp=2").plan
    (section,) = plan.sections
    room = 1 << 36
    entries = {
        n: prod(map(int, re.findall(r"\d+", what.split("[")[1]))) for n, what in plan.model.parameters.items()
    }
    for split in (section.shards, section.shards[:3], ()):
        changed = replace(plan, sections=(replace(section, shards=split, room_bytes=room),))
        whole = sum(n for name, n in entries.items() if name not in {shard.name for shard in split})
        # A parameter takes 16 bytes: weight, gradient, two states. With tp 2, allocation counts half.
        assert subtract_whole_parameters(changed).sections[0].room_bytes == room - whole * 16 // 2
