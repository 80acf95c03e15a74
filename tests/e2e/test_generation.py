"""Samples of text: after checkpoints of a run and by `secc eval`, the same as plain code on the exported
weights; with transformers' generate, and with code of the user's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from secc.cli import main
from secc.runtime.model.user_file import load_model_file
from secc.runtime.parameters.checkpoint import load_full_state_dict
from secc.runtime.training.generation import generate_samples
from tests.runtime.captioner_plans import ALONE, APART, FIXTURE, write_plan
from tests.runtime.run_processes import start_run

OWN_LOOP = """

def generate_samples(model):
    assert not model.training and not torch.is_grad_enabled()
    number = sum(float(p.double().sum()) for p in model.parameters())
    return {"weights": repr(number), "random": repr(float(torch.rand(())))}
"""
HUGGING_FACE = """
import torch
import transformers as T


def model():
    torch.manual_seed(1)
    config = T.LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                           num_attention_heads=2, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    return T.LlamaForCausalLM(config)


def dataset():
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 40, (12,), generator=g) for _ in range(24)]
    return [{"input_ids": r, "labels": r} for r in rows]


def optimizer(params):
    return torch.optim.AdamW(params, lr=0.01)


def generate_samples(model):
    prompts = torch.tensor([[5, 6], [7, 8]])
    mask = torch.ones_like(prompts)
    found = model.generate(prompts, attention_mask=mask, max_new_tokens=6, do_sample=False)
    return [" ".join(map(str, row.tolist())) for row in found]
"""


def samples_in(logs: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (logs / "samples.jsonl").read_text().splitlines()]


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_generates_after_its_checkpoints(tmp_path: Path) -> None:
    source = (FIXTURE / "model.py").read_text() + OWN_LOOP
    write_plan(tmp_path / "plan", APART, source=source)
    arguments = ["--steps", "4", "--save", str(tmp_path / "saved"), "--save-every", "2", "--workers", "0"]
    process = start_run(tmp_path / "plan", "--no-first-check", "--no-save-async", "--ema", "0.5", *arguments)
    _, said = process.communicate(timeout=500)
    assert process.returncode == 0, said
    found = samples_in(tmp_path / "plan" / "logs")
    last = {s["name"]: s["text"] for s in found if s["step"] == 4}
    steps = {s["step"] for s in found}
    # The checkpoint of step 4 is left out, and that is said, if the process of step 2 was slow.
    assert steps in ({2, 4}, {2}) and (4 in steps or "still being generated" in said)
    assert "sample weights after step 2:" in said
    user = load_model_file(tmp_path / "plan" / "model.py")
    model = user.build_model()
    model.load_state_dict(load_full_state_dict(tmp_path / "saved", averaged=True))
    expected = repr(sum(float(p.double().sum()) for p in model.parameters()))
    step, texts = generate_samples(tmp_path / "plan", tmp_path / "saved", True, torch.device("cpu"))
    assert (step, texts["weights"]) == (4, expected)
    assert last in ({}, texts)
    torch.manual_seed(0)
    assert texts["random"] == repr(float(torch.rand(())))


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eval_generates_with_transformers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(HUGGING_FACE + "\n\ndef eval_dataset():\n    return dataset()\n")
    plan, saved = str(tmp_path / "plan"), str(tmp_path / "saved")
    for command in (
        ["compile", str(tmp_path / "model.py"), "-o", plan, "--cluster", "local:2", "--global-batch", "8"],
        ["run", plan, "--steps", "5", "--save", saved, "--workers", "0"],
        ["eval", plan, "--resume", saved, "--log-dir", str(tmp_path / "eval"), "--workers", "0"],
    ):
        with pytest.raises(SystemExit) as end:
            main(command)
        assert end.value.code in (0, None), capfd.readouterr().err
    found = [s["text"] for s in samples_in(tmp_path / "eval")]
    user = load_model_file(tmp_path / "model.py")
    model = user.build_model().eval()
    model.load_state_dict(load_full_state_dict(saved))
    assert found == user.module.generate_samples(model) and len(found) == 2
    assert samples_in(tmp_path / "plan" / "logs")[-2:] == samples_in(tmp_path / "eval")
    assert "sample 0 after step 5:" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.gloo
def test_what_is_no_text_is_said_and_ends_no_run(tmp_path: Path) -> None:
    source = (FIXTURE / "model.py").read_text() + "\n\ndef generate_samples(model):\n    return 7\n"
    write_plan(tmp_path / "plan", ALONE, source=source)
    arguments = ["--steps", "1", "--save", str(tmp_path / "saved"), "--workers", "0", "--no-first-check"]
    process = start_run(tmp_path / "plan", *arguments)
    _, said = process.communicate(timeout=500)
    assert process.returncode == 0, said
    assert "warning: no samples were generated" in said
    assert "generate_samples() returns an object of type int" in said and "model.py:" in said
    assert "Traceback" not in said
