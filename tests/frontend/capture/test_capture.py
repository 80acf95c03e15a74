"""The generic graphs of a capture compute what the eager model computes, at sizes that no capture had."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError
from secc.frontend.capture import probe_batches
from secc.frontend.capture.capture import Capture
from secc.frontend.capture.to_ir import capture_to_ir
from secc.ir.text_io.module_text import print_module
from secc.runtime.model.user_file import UserModel, load_model_file
from secc.runtime.plan.schema import RandomOp
from secc.runtime.recorder import Recorder, Recording
from secc.runtime.recorder.match_outline import constant_digest
from tests.frontend.generic_replay import assert_equals_eager, build_real_model, capture_user_model


@cache
def _capture(models: Path, name: str) -> tuple[UserModel, Capture]:
    user = load_model_file(models / f"{name}.py")
    return user, capture_user_model(user)


MODELS = ["llava_tiny", "qwen_distil", "two_modalities", "whisper_tiny", "voxtral_tiny", "internvl_tiny"]


@pytest.mark.parametrize("name", MODELS)
def test_a_generic_graph_is_exact_at_an_unseen_size(models: Path, name: str) -> None:
    user, found = _capture(models, name)
    model = build_real_model(user)
    samples = [user.load_sample(i) for i in range(20, 52)]
    patterns = {c.pattern for c in found.cases}
    for pattern in patterns:
        fitting = [s for s in samples if found.optional_keys & user.collate([s]).keys() <= pattern]
        union = frozenset[str]().union(*(found.optional_keys & user.collate([s]).keys() for s in fitting))
        if union == pattern:
            assert_equals_eager(user, found, fitting[:13] if len(fitting) > 13 else fitting, model)


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("llava_tiny", "model.language_model"),
        ("llava_tiny", "model.vision_tower"),
        ("qwen_distil", "student"),
    ],
)
def test_a_component_opened_to_its_layers_is_exact(models: Path, name: str, cut: str) -> None:
    user = load_model_file(models / f"{name}.py")
    found = capture_user_model(user, cut={cut})
    layers = [p for p in found.blocks if p.startswith(cut) and ".layers." in p]
    assert len(layers) == 2
    assert_equals_eager(user, found, [user.load_sample(i) for i in range(9)], build_real_model(user))


def test_llava_has_a_case_for_each_pattern_and_its_blocks(models: Path) -> None:
    found = _capture(models, "llava_tiny")[1]
    assert [sorted(c.pattern) for c in found.cases if not c.is_fallback] == [[], ["pixel_values"]]
    # The language model's embedding is called from outside of it, and is a block of its own.
    assert sorted(found.blocks) == [
        "lm_head",
        "model.language_model",
        "model.language_model.embed_tokens",
        "model.multi_modal_projector",
        "model.vision_tower",
    ]
    tower = found.blocks["model.vision_tower"]
    assert (tower.class_name, tower.layer_count, tower.component) == (
        "CLIPVisionModel",
        2,
        "model.vision_tower",
    )
    assert tower.trainable_count == tower.parameter_count > 0 and tower.where.startswith("modeling_clip.py:")


def test_frozen_parts_and_tied_parameters_are_recorded(models: Path) -> None:
    found = _capture(models, "internvl_tiny")[1]
    assert found.blocks["model.vision_tower"].trainable_count == 0
    assert ("model.language_model.embed_tokens.weight", "lm_head.weight") in [tuple(t) for t in found.ties]
    assert not any(p.trainable for n, p in found.parameters.items() if n.startswith("model.vision_tower."))


LOOPING = """
import torch
from torch import nn

class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        stack = lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2)))
        self.first, self.second = stack(), stack()
    def forward(self, x):
        return self.second(torch.stack([self.first(row) * i for i, row in enumerate(x)]))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.joined, self.head = Joined(), nn.Linear(4, 3)
    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.head(self.joined(x)), labels)

def model(): return Model()
def dataset(): return [{"x": torch.full((4,), float(i)), "labels": torch.tensor(i % 3)} for i in range(20)]
"""


def test_glue_that_no_size_explains_becomes_part_of_a_block_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(LOOPING)
    user = load_model_file(path)
    found = capture_user_model(user)
    assert sorted(found.blocks) == ["head", "joined"]
    (note,) = found.notes
    assert note.path == "joined" and note.where == "model.py:11"
    assert_equals_eager(user, found, [user.load_sample(i) for i in range(11)], build_real_model(user))


def test_ops_that_couple_samples_inside_a_block_are_listed_with_their_line(models: Path) -> None:
    found = capture_user_model(load_model_file(models / "batchnorm.py"))
    assert [(h.path, h.kind, h.where) for h in found.hazards] == [("norm", "batch_norm", "batchnorm.py:19")]


def test_random_ops_are_found_with_the_dim_of_their_samples(models: Path) -> None:
    assert capture_user_model(load_model_file(models / "dropout.py")).draws == [
        RandomOp("@dropout.py:18#0", (0,), "B", "dropout.py:18")
    ]


def test_random_mixing_of_samples_is_refused_with_its_line(models: Path) -> None:
    with pytest.raises(UserError, match="mixes the samples") as error:
        capture_user_model(load_model_file(models / "mixup.py"))
    assert error.value.where == "mixup.py:19" and error.value.remedy


def test_a_branch_on_a_blocks_result_is_part_of_the_loss(models: Path) -> None:
    found = capture_user_model(load_model_file(models / "reads_block_value.py"))
    assert set(found.blocks) == {"encoder", "lines_19_to_21"}  # with the decoder: they return the loss
    (note,) = (n for n in found.notes if n.path == "lines_19_to_21")
    assert note.where == "reads_block_value.py:19" and "Python reads a value" in note.reason


def test_a_path_taken_only_without_padding_is_captured(models: Path) -> None:
    user = load_model_file(models / "rare_full_mask.py")
    found = capture_user_model(user)
    assert [c.rerecord_reason for c in found.cases] == [None, None]
    assert_equals_eager(user, found, [user.load_sample(i) for i in range(5)], build_real_model(user))
    assert_equals_eager(user, found, [user.load_sample(50)] * 3, build_real_model(user))


def test_a_count_clamped_to_1_stays_clamped_in_the_graph(models: Path) -> None:
    user = load_model_file(models / "counts_rows.py")
    found = capture_user_model(user)
    assert_equals_eager(user, found, [user.load_sample(i) for i in range(5)], build_real_model(user))
    ignored = [{**(s := user.load_sample(i)), "labels": torch.full_like(s["labels"], -100)} for i in range(3)]
    assert_equals_eager(user, found, ignored, build_real_model(user))


def test_a_count_that_may_be_0_stays_so_in_the_graph(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "plain_count.py"
    file.write_text((models / "counts_rows.py").read_text().replace("max(len(y), 1)", "len(y)"))
    (case,) = capture_user_model(load_model_file(file)).cases
    assert "aten.clamp_min.default" not in [str(n.target) for n in case.generic.graph.nodes]


ONE_WIDTH = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, ids, side, mask):
        h = self.layer(self.embed(ids)).mean((1, 2))
        if not mask.bool().all():
            h = h * (torch.arange(2 + side.shape[1]) + 1.0).log().sum()
        return (h * (side * mask).sum(1)).sum()

def model():
    return Model()

def dataset():
    def sample(i):
        length = (7, 4)[i % 2] if i < 12 else (11, 3)[i % 2]
        side = torch.arange(length) % 5
        return {"ids": torch.arange(5 + i % 6) % 9, "side": side, "mask": torch.ones_like(side)}
    return [sample(i) for i in range(24)]

def collate(samples):
    return {k: nn.utils.rnn.pad_sequence([s[k] for s in samples], batch_first=True) for k in samples[0]}
"""


def test_a_width_shared_by_all_captures_of_a_path_is_no_constant(tmp_path: Path) -> None:
    """Whatever is padded at all is padded to 7 in the captures, and the model's own table has as many entries
    and two."""
    (tmp_path / "model.py").write_text(ONE_WIDTH)
    user = load_model_file(tmp_path / "model.py")
    found = capture_user_model(user)
    assert_equals_eager(user, found, [user.load_sample(i) for i in range(12, 17)], build_real_model(user))


def test_a_width_shared_by_all_captures_of_an_unpadded_path_is_no_constant(tmp_path: Path) -> None:
    """Ragged micro-batches have padding in both inputs, even ones in neither. With padding in one of them,
    only one sample is captured, several times and cropped."""
    text = ONE_WIDTH
    for old, new in (
        ("        if not mask", "        if (ids == 0).any():\n            h = h * 2\n        if mask"),
        ("(7, 4)[i % 2] if i < 12 else (11, 3)[i % 2]", "3 + i % 11"),
        ("torch.arange(5 + i % 6) % 9", "1 + torch.arange(5 + i % 6) % 8"),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "model.py").write_text(text)
    user = load_model_file(tmp_path / "model.py")
    cases = capture_user_model(user).cases
    sizes = [
        str(n.meta["args"][0])
        for case in cases
        for n in case.generic.graph.nodes
        if n.target is torch.ops.aten.arange.default
    ]
    assert (len(cases), sizes) == (4, ["S_side + 2"] * 2)


JOINED = """
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 8, padding_idx=0), nn.Linear(8, 8)

    def forward(self, a, b):
        width = max(a.shape[1], b.shape[1])
        both = torch.cat([F.pad(a, (0, width - a.shape[1])), F.pad(b, (0, width - b.shape[1]))])
        return (self.head(self.embed(both)).square().sum(-1) * (both != 0)).sum() / (both != 0).sum()


def model():
    return Model()


def dataset():
    made = []
    for i in range(64):
        g = torch.Generator().manual_seed(i)
        a = torch.randint(1, 30, (30 - i % 12,), generator=g)
        made.append({"a": a, "b": torch.randint(1, 30, (4 + 7 * i % 20,), generator=g)})
    return made
"""


def test_widths_are_captured_in_both_orders_that_samples_have(tmp_path: Path) -> None:
    """Every micro-batch of several samples has the one wider; there are samples that have the other."""
    (tmp_path / "model.py").write_text(JOINED)
    user = load_model_file(tmp_path / "model.py")
    found, samples = capture_user_model(user), [user.load_sample(i) for i in range(64)]
    other = [s for s in samples if len(s["a"]) <= len(s["b"])]
    for some in (samples[:5], other[:1], other[1:3]):
        assert_equals_eager(user, found, some, build_real_model(user))


LATE = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 1)
    def forward(self, x):
        if x.shape[0] == {refused}:
            raise ValueError("too many")
        return self.line(x).mean()
def model():
    return Model()
def dataset():
    return [{{"x": torch.ones(3)}} for _ in range(8)]
"""


def _split(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Have a copy of this process make recordings from the first on; the list grows with each that came from
    it."""
    taken, original = list[object](), Recorder.adopt_recording

    def noted(self: Recorder, recording: Recording) -> Recording:
        taken.append(recording)
        return original(self, recording)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(probe_batches, "SLOW_RECORDING_SECONDS", 0.0)
    monkeypatch.setattr(Recorder, "adopt_recording", noted)
    return taken


@pytest.mark.parametrize(("name", "cut"), [("llava_tiny", "model.vision_tower"), ("two_modalities", "")])
def test_recordings_of_a_forked_process_give_the_same_capture(
    models: Path, monkeypatch: pytest.MonkeyPatch, name: str, cut: str
) -> None:
    def text() -> str:
        user = load_model_file(models / f"{name}.py")
        return print_module(capture_to_ir(capture_user_model(user, cut={cut} - {""})))

    monkeypatch.setattr(probe_batches, "SLOW_RECORDING_SECONDS", float("inf"))
    alone = text()
    taken = _split(monkeypatch)
    assert text() == alone and taken


@pytest.mark.parametrize("refused", [3, 4])
def test_a_refused_micro_batch_gives_the_same_error_in_a_forked_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    path = tmp_path / "late.py"
    path.write_text(LATE.format(refused=refused))
    _split(monkeypatch)
    with pytest.raises(UserError, match="ValueError: too many"):
        capture_user_model(load_model_file(path))


TWO_MASKS = """
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = (nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9)) for _ in range(2))
        self.teacher.requires_grad_(False)

    def forward(self, prompt, labels, answer, mask):
        own, target = self.student(prompt)[labels != -100], self.teacher(answer)[mask == 1]
        return F.kl_div(own.log_softmax(-1), target.softmax(-1), reduction="batchmean")

def model():
    return Model()

def dataset():
    def sample(i):
        answer = torch.arange(2 + i % 5) % 9
        return {
            "prompt": torch.cat([torch.ones(3, dtype=torch.long), answer]),
            "labels": torch.cat([torch.full((3,), -100), answer]),
            "answer": answer,
            "mask": torch.ones_like(answer),
        }
    return [sample(i) for i in range(20)]
"""


def test_masks_that_must_pick_equally_many_rows_are_emptied_together(tmp_path: Path) -> None:
    path = tmp_path / "two_masks.py"
    path.write_text(TWO_MASKS)
    _, capture = _capture(tmp_path, "two_masks")
    assert [case.rerecord_reason for case in capture.cases] == [None]


def test_rows_that_a_mask_picks_are_counted_on_a_path_without_padding_too(tmp_path: Path) -> None:
    path = tmp_path / "full_masks.py"
    branch = "        prompt = prompt if mask.all() else prompt * (prompt > 0)\n        own, target"
    path.write_text(TWO_MASKS.replace("        own, target", branch))
    compiled = compile_model(path, CompileOptions(cluster="local:2", global_batch=4))
    assert [p["exact"] for p in check_exactness(compiled).plan.checks["patterns"]] == [True]


def test_each_micro_batch_is_recorded_once_for_a_choice_of_blocks(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, record = list[tuple[object, ...]](), Recorder.record

    def observed(recorder: Recorder, batch: Mapping[str, Any], *rest: Any) -> Recording:
        if len(batch["input_ids"]) > 1:  # samples alone are recorded for their shapes, too
            values = tuple((key, constant_digest(t)) for key, t in sorted(batch.items()))
            recorded.append((recorder.configuration, values, rest))
        return record(recorder, batch, *rest)

    monkeypatch.setattr(Recorder, "record", observed)
    capture_user_model(load_model_file(models / "idefics3_rows.py"))
    assert recorded and len(recorded) == len(set(recorded))
