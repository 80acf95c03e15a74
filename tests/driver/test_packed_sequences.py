"""Modules that pass a `PackedSequence` to each other become one block with the module around them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.runtime.recorder.nested_values import map_leaves

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(40, 12), nn.LSTM(12, 16, batch_first=True)

    def forward(self, ids, lengths):
        rows = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        return self.rnn(rows)[0]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.upper = Encoder(), nn.GRU(16, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 7)

    def score(self, ids, lengths):
        rows, _ = self.upper(self.encoder(ids, lengths))
        return self.head(pad_packed_sequence(rows, batch_first=True, total_length=ids.shape[1])[0])
"""
LOSS = "F.cross_entropy({scores}.flatten(0, 1), tags.flatten(), ignore_index=-100)"
DATA = """

def dataset():
    texts = [torch.arange(1, 5 + i * 5 % 9) for i in range(16)]
    return [{"ids": ids, "tags": ids % 7} for ids in texts]


def collate(samples):
    lengths = torch.tensor([len(s["ids"]) for s in samples])
    ids = pad_sequence([s["ids"] for s in samples], True)
    return {"ids": ids, "lengths": lengths, "tags": pad_sequence([s["tags"] for s in samples], True, -100)}
"""


def test_the_module_around_them_is_one_block(tmp_path: Path) -> None:
    outer = f"""
    def forward(self, ids, lengths):
        return self.score(ids, lengths)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tagger, self.scale = Tagger(), nn.Linear(7, 7)

    def forward(self, ids, lengths, tags):
        return {LOSS.format(scores="self.scale(self.tagger(ids, lengths))")}


def model():
    return Net()
"""
    (tmp_path / "model.py").write_text(MODEL + outer + DATA)
    compiled = compile_model(tmp_path / "model.py", CompileOptions(cluster="local:2", global_batch=8))
    plan = check_exactness(compiled, required=True).plan
    assert {b for s in plan.sections for b in s.blocks} == {"tagger", "scale"}


def test_between_modules_of_the_whole_model_their_statements_are_a_block(tmp_path: Path) -> None:
    outer = f"""
    def forward(self, ids, lengths, tags):
        return {LOSS.format(scores="self.score(ids, lengths)")}


def model():
    return Tagger()
"""
    (tmp_path / "model.py").write_text(MODEL + outer + DATA)
    options = CompileOptions(cluster="local:2", global_batch=8)
    plan = check_exactness(compile_model(tmp_path / "model.py", options), required=True).plan
    assert ":Tagger.forward#" in plan.model.functions[0] and "PackedSequence" in plan.checks["notes"][0]


def test_copies_of_arguments_keep_packed_sequences() -> None:
    packed = pack_padded_sequence(torch.arange(6.0).view(2, 3, 1), torch.tensor([2, 3]), True, False)
    copy = map_leaves((packed,), lambda _, leaf: leaf + 1 if isinstance(leaf, torch.Tensor) else leaf)[0]
    assert type(copy) is PackedSequence
    assert copy.data.equal(packed.data + 1) and copy.batch_sizes.equal(packed.batch_sizes + 1)
