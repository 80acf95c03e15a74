"""The two files of docs/how-to/from-trainer.md give the same losses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.gloo, pytest.mark.timeout(600)]

WORDS = ["a", "the", "red", "green", "blue", "small", "large", "round", "picture", "of", "shape", "dot"]


def write_parts(folder: Path) -> None:
    """Makes a small LLaVA with its processor, and captions; two thirds of them have a picture."""
    import torch
    import transformers as T
    from PIL import Image
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokens = ["<pad>", "<image>", *WORDS]
    made = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = T.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", additional_special_tokens=["<image>"], padding_side="right"
    )
    processor = T.LlavaProcessor(
        T.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    vision: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    text: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2}
    config = T.LlavaConfig(
        vision_config=T.CLIPVisionConfig(num_attention_heads=2, image_size=16, patch_size=8, **vision),
        text_config=T.LlamaConfig(
            vocab_size=len(tokens), num_attention_heads=2, num_key_value_heads=2, use_cache=False, **text
        ),
        image_token_id=1,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    T.LlavaForConditionalGeneration(config).save_pretrained(folder / "parts")
    processor.save_pretrained(folder / "parts")
    rows: list[dict[str, Any]] = []
    for i in range(40):
        picture = folder / f"{i}.png" if i % 3 else None
        if picture is not None:
            Image.new("RGB", (20 + i, 16), (9 * i, 255 - 9 * i, 100)).save(picture)
        caption = " ".join(WORDS[(i * k) % len(WORDS)] for k in range(1, 4 + i % 5))
        rows.append({"picture": picture and str(picture), "text": caption})
    (folder / "captions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_both_files_give_the_same_losses(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("datasets", "accelerate", "PIL", "transformers"):
        pytest.importorskip(library)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(root))
    write_parts(tmp_path)
    page = (root / "docs/how-to/from-trainer.md").read_text()
    script, model = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    quiet = script.replace("logging_steps=1", "logging_steps=1, disable_tqdm=True")
    losses_of_log = "[e['loss'] for e in trainer.state.log_history if 'loss' in e]"
    (tmp_path / "train.py").write_text(
        f"{quiet}\nimport json\njson.dump({losses_of_log}, open('losses', 'w'))\n"
    )
    (tmp_path / "model.py").write_text(model)
    run(tmp_path, "train.py")
    expected = json.loads((tmp_path / "losses").read_text())
    commands = re.findall(r"^secc (.*?)$", page, re.M)
    assert [c.split()[0] for c in commands] == ["check", "compile", "run", "export"]
    for command in commands:
        run(tmp_path, "-m", "secc", *command.split())
    lines = (tmp_path / "plan/logs/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses == pytest.approx(expected, rel=1e-3) and len(losses) == 4
    exported, parts = tmp_path / "captions", tmp_path / "parts"
    assert (exported / "model.safetensors").exists()
    files = {p.name for p in parts.iterdir()} - {"config.json", "generation_config.json", "model.safetensors"}
    assert {"tokenizer.json", "tokenizer_config.json", "processor_config.json"} <= files
    assert all((exported / name).read_bytes() == (parts / name).read_bytes() for name in files)
