"""Runs of plans as users start them: overlap in the trace, saving and resuming, exported weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from safetensors.torch import load_file

from secc.cli import main
from secc.runtime.model.user_file import load_model_file
from secc.runtime.parameters.checkpoint import load_full_state_dict
from tests.e2e.harness import compile_and_write, read_metrics, run_plan_ranks

MODELS = Path(__file__).parent.parent / "models"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vision tower on one rank and a language model on two."""
    path = tmp_path_factory.mktemp("plan") / "plan"
    pins = (
        "vision_tower.dp=1",
        "language_model.dp=2",
        "vision_tower.micro_batch=2",
        "language_model.micro_batch=2",
    )
    compile_and_write(
        MODELS / "llava_tiny.py",
        path,
        check=False,
        cluster="local:3",
        global_batch=24,
        strategy="apart",
        set=pins,
    )
    return path


@pytest.mark.gloo
def test_encoder_forward_overlaps_language_model_work(plan: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    run_plan_ranks(
        plan, 3, ["--steps", "3", "--log-dir", str(tmp_path), "--workers", "0", "--trace", str(trace)]
    )
    computed = [e for e in _events(trace) if e["args"].get("kind") in {"F", "B"}]
    encoder = [e for e in computed if e["args"]["section"] == "vision_tower" and e["args"]["kind"] == "F"]
    language = [e for e in computed if e["args"]["section"] == "language_model"]
    assert any(
        _overlap(e, m) and not set(e["args"]["samples"]) & set(m["args"]["samples"])
        for e in encoder
        for m in language
    )


@pytest.mark.gloo
def test_resuming_is_bit_equal_to_an_unbroken_run(plan: Path, tmp_path: Path) -> None:
    common = ["--workers", "0", "--save-every", "5"]
    run_plan_ranks(
        plan,
        3,
        [
            "--steps",
            "10",
            "--log-dir",
            str(tmp_path / "whole"),
            "--save",
            str(tmp_path / "whole_saved"),
            *common,
        ],
    )
    run_plan_ranks(
        plan,
        3,
        ["--steps", "5", "--log-dir", str(tmp_path / "first"), "--save", str(tmp_path / "saved"), *common],
    )
    rest = [
        "--resume",
        str(tmp_path / "saved"),
        "--log-dir",
        str(tmp_path / "rest"),
        "--save",
        str(tmp_path / "saved"),
    ]
    run_plan_ranks(plan, 3, ["--steps", "10", *rest, *common])
    whole, found = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "rest")
    assert [(m["step"], m["loss"], m["grad_norm"]) for m in found] == [
        (m["step"], m["loss"], m["grad_norm"]) for m in whole[5:]
    ]
    expected, weights = (
        load_full_state_dict(tmp_path / "whole_saved"),
        load_full_state_dict(tmp_path / "saved"),
    )
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.gloo
def test_exported_weights_load_into_the_users_model(plan: Path, tmp_path: Path) -> None:
    run_plan_ranks(
        plan,
        3,
        ["--steps", "1", "--log-dir", str(tmp_path), "--save", str(tmp_path / "saved"), "--workers", "0"],
    )
    with pytest.raises(SystemExit, match="0"):
        main(["export", str(tmp_path / "saved"), "-o", str(tmp_path / "weights.safetensors"), "--json"])
    model = load_model_file(MODELS / "llava_tiny.py").build_model()
    weights = load_file(tmp_path / "weights.safetensors")
    model.load_state_dict(weights)
    assert weights.keys() == model.state_dict().keys()
    with pytest.raises(SystemExit, match="0"):
        main(["export", str(tmp_path / "saved"), "--hf", str(tmp_path / "hf"), "--json"])
    loaded: Any = T.LlavaForConditionalGeneration.from_pretrained(tmp_path / "hf")
    assert all(torch.equal(t, weights[n]) for n, t in loaded.state_dict().items())
    sent = tmp_path / "sent"
    shutil.copytree(plan, sent)
    (sent / "origin.mac").unlink()
    arguments = ["export", str(tmp_path / "saved"), "--hf", str(tmp_path / "other"), "--plan", str(sent)]
    for more, code in (([], "2"), (["--trust-model"], "0")):
        with pytest.raises(SystemExit, match=code):
            main([*arguments, *more])
        assert (tmp_path / "other").exists() is bool(more)


def _events(trace: Path) -> list[dict[str, Any]]:
    data = json.loads(trace.read_text())
    return data["traceEvents"] if isinstance(data, dict) else data


def _overlap(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["ts"] < b["ts"] + b["dur"] and b["ts"] < a["ts"] + a["dur"]
