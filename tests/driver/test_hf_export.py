"""Exported folders load with `from_pretrained` and compute what the trained weights compute in the model;
they start further runs, in another dtype, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from safetensors.torch import load_file
from torch import nn

from secc.driver.hf_export import ComponentKind, ExportedFolder, export_component
from secc.errors import UserError
from secc.runtime.model.init_weights import load_init_weights
from secc.runtime.model.meta_build import build_meta_model
from secc.runtime.model.user_file import load_model_file
from secc.runtime.parameters import checkpoint
from secc.runtime.parameters.checkpoint_folder import find_checkpoint
from secc.runtime.parameters.checkpoint_writer import save_checkpoint
from secc.runtime.parameters.rank_weights import canonical_names

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TEXT: dict[str, Any] = dict(
    vocab_size=2000,
    hidden_size=160,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=80,
)
VISION: dict[str, Any] = dict(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=16,
    patch_size=8,
)
MOE: dict[str, Any] = dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24)
SPEECH: dict[str, Any] = dict(
    vocab_size=200,
    d_model=32,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
    num_mel_bins=8,
    max_source_positions=20,
    max_target_positions=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
    suppress_tokens=[],
    begin_suppress_tokens=[],
)
FILE = """
import torch
import transformers as T
from torch import nn

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = {student}
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return x.sum()

def model(): return Pair()
def dataset(): return [0]
"""
ARCHITECTURES: dict[str, str] = {
    "Llama": f"T.LlamaForCausalLM(T.LlamaConfig(**{TEXT!r}, tie_word_embeddings=True))",
    "Qwen3Moe": f"T.Qwen3MoeForCausalLM(T.Qwen3MoeConfig(**{TEXT!r}, **{MOE!r}))",
    "Mixtral": f"T.MixtralForCausalLM(T.MixtralConfig(**{TEXT!r}, num_local_experts=3))",
    "Llava": (
        "T.LlavaForConditionalGeneration(T.LlavaConfig(vision_config=T.CLIPVisionConfig(**"
        f"{VISION!r}), text_config=T.LlamaConfig(**{TEXT!r}), image_token_id=3, vision_feature_layer=-1))"
    ),
    "Whisper": f"T.WhisperForConditionalGeneration(T.WhisperConfig(**{SPEECH!r}))",
    "T5": (
        "T.T5ForConditionalGeneration(T.T5Config(vocab_size=200, d_model=32, d_kv=16, d_ff=64, num_layers=1,"
        " num_heads=2, decoder_start_token_id=0))"
    ),
    "Gemma3": f"T.Gemma3ForCausalLM(T.Gemma3TextConfig(**{TEXT!r}))",
    "Gpt2": "T.GPT2LMHeadModel(T.GPT2Config(vocab_size=200, n_embd=32, n_layer=1, n_head=2, n_positions=64))",
    "Bert": (
        "T.BertForMaskedLM(T.BertConfig(vocab_size=200, hidden_size=32, num_hidden_layers=1,"
        " num_attention_heads=2, intermediate_size=64))"
    ),
    "Vit": f"T.ViTForImageClassification(T.ViTConfig(**{VISION!r}))",
    "GptOss": f"T.GptOssForCausalLM(T.GptOssConfig(**{TEXT!r}, num_local_experts=4))",
}
FAST = ("Llama", "Qwen3Moe")


def train(folder: Path, student: str, dtype: torch.dtype | None = None) -> nn.Module:
    """Writes a model file and a checkpoint of its model with weights that no seed makes; returns the model.
    `dtype`: that of the model's weights, float32 by default."""
    text = FILE.format(student=student)
    (folder / "model.py").write_text(
        text.replace("return Pair()", f"return Pair().to({dtype})") if dtype else text
    )
    torch.manual_seed(7)
    model = load_model_file(folder / "model.py").build_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save(model, folder)
    return model.eval()


def save(model: nn.Module, folder: Path) -> None:
    about = checkpoint.make_manifest(model, 1, 0, False, 1)
    save_checkpoint(folder / "run", checkpoint.model_state(model, {}), about)


def export(folder: Path, path: str | None = None) -> ExportedFolder:
    model = build_meta_model(load_model_file(folder / "model.py"))
    return export_component(model, find_checkpoint(folder / "run"), folder / "out", path)


def outputs_of(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 190, (2, 7), generator=generator)
    pixels = torch.randn(2, 3, 16, 16, generator=generator).to(model.dtype)
    name = type(model).__name__
    with torch.no_grad():
        if name.startswith("ViT"):
            return model(pixel_values=pixels).logits
        if name.startswith("Whisper"):
            sound = torch.randn(2, 8, 40, generator=generator)
            return model(input_features=sound, decoder_input_ids=ids).logits
        if name.startswith("T5"):
            return model(input_ids=ids, decoder_input_ids=ids).logits
        if name.startswith("Llava"):
            images = torch.full((2, 4), 3)
            return model(input_ids=torch.cat([images, ids], 1), pixel_values=pixels).logits
        return model(input_ids=ids).logits


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in ARCHITECTURES]
)
def test_logits_and_files_are_those_of_save_pretrained(name: str, tmp_path: Path) -> None:
    trained: Any = train(tmp_path, ARCHITECTURES[name]).student
    done = export(tmp_path)
    assert (done.component, done.kind) == ("student", ComponentKind.PRETRAINED)
    loaded, report = type(trained).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert loaded.dtype == trained.dtype and torch.equal(outputs_of(loaded.eval()), outputs_of(trained))
    trained.save_pretrained(tmp_path / "expected")
    expected = {p.name for p in (tmp_path / "expected").iterdir()}
    assert set(done.files) == expected == {p.name for p in (tmp_path / "out").iterdir()}
    stored, wanted = (load_file(tmp_path / d / "model.safetensors") for d in ("out", "expected"))
    assert stored.keys() == wanted.keys() and all(torch.equal(t, wanted[n]) for n, t in stored.items())
    for file in expected - {"model.safetensors"}:
        assert json.loads((tmp_path / "out" / file).read_text()) == json.loads(
            (tmp_path / "expected" / file).read_text()
        )


@pytest.mark.parametrize(
    "name", [FAST[1], *(pytest.param(n, marks=pytest.mark.slow) for n in ("Llama", "Llava"))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("folder_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_folder_starts_a_run_whose_export_is_the_folder(
    name: str, folder_dtype: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    """`--init student=DIR`, also onto a model of another dtype than the folder's. What is exported then are
    the folder's weights in the model's dtype."""
    trained = train(tmp_path, ARCHITECTURES[name], folder_dtype)
    export(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.py").write_text(
        FILE.format(student=ARCHITECTURES[name]).replace("return Pair()", f"return Pair().to({dtype})")
    )
    torch.manual_seed(11)
    model = load_model_file(tmp_path / "other" / "model.py").build_model()
    head = export_component(
        build_meta_model(load_model_file(tmp_path / "model.py")),
        find_checkpoint(tmp_path / "run"),
        tmp_path / "head",
        "head",
    )
    assert head.kind is ComponentKind.WEIGHTS and head.files == ("model.safetensors",)
    assert any("weights alone" in note for note in head.notes)
    init = (("student", tmp_path / "out"), ("head", tmp_path / "head"))
    load_init_weights(model, init, canonical_names(model), frozenset(), report=False)
    wanted = trained.state_dict()
    assert all(torch.equal(t, wanted[n].to(dtype)) for n, t in model.state_dict().items())
    save(model, tmp_path / "other")
    export(tmp_path / "other")
    first, second = (load_file(d / "out" / "model.safetensors") for d in (tmp_path, tmp_path / "other"))
    assert first.keys() == second.keys()
    assert all(t.dtype == folder_dtype and torch.equal(t.to(dtype), second[n]) for n, t in first.items())


@pytest.mark.parametrize("loader", ["AutoModelForCausalLM", "LlamaForCausalLM"])
def test_tokenizers_and_generation_settings_come_from_the_source(loader: str, tmp_path: Path) -> None:
    source, shards = tmp_path / "source", tmp_path / "sharded"
    base = eval(ARCHITECTURES["Llama"], {"T": T}).to(torch.bfloat16)
    base.generation_config.do_sample, base.generation_config.top_k = True, 7
    base.save_pretrained(source)
    (source / "tokenizer_config.json").write_text("{}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    trained: Any = train(tmp_path, f"T.{loader}.from_pretrained({str(source)!r})")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secc.driver.hf_export.SHARD_SIZE", "200KB")
        done = export(tmp_path)
    assert set(done.copied) == {
        "tokenizer_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
    }
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["top_k"] == 7
    loaded = T.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(outputs_of(loaded.eval()), outputs_of(trained.student))
    trained.student.save_pretrained(shards, max_shard_size="200KB")
    index, expected = (
        json.loads((d / "model.safetensors.index.json").read_text()) for d in (tmp_path / "out", shards)
    )
    assert index["metadata"] == expected["metadata"]
    assert index["weight_map"].keys() == expected["weight_map"].keys()
    assert len(set(index["weight_map"].values())) > 2


def test_adapters_are_written_as_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    source = tmp_path / "source"
    eval(ARCHITECTURES["Llama"], {"T": T}).save_pretrained(source)
    student = (
        "__import__('peft').get_peft_model("
        f"T.AutoModelForCausalLM.from_pretrained({str(source)!r}),"
        " __import__('peft').LoraConfig(r=4, target_modules=['q_proj', 'v_proj']))"
    )
    trained: Any = train(tmp_path, student)
    with torch.no_grad():  # what an adapter leaves alone is as it was loaded
        base = T.AutoModelForCausalLM.from_pretrained(source).state_dict()
        for name, value in trained.student.get_base_model().state_dict().items():
            if "lora_" not in name:
                value.copy_(base[name.replace(".base_layer", "")])
    done = export(tmp_path)
    assert (done.component, done.kind) == ("student", ComponentKind.ADAPTER)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(done.files)
    assert not {"config.json", "model.safetensors"} & set(done.files)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["r"] == 4
    loaded = peft.PeftModel.from_pretrained(
        T.AutoModelForCausalLM.from_pretrained(source), tmp_path / "out"
    ).eval()
    assert torch.equal(outputs_of(loaded), outputs_of(trained.student))


def _fill(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "notes.txt").write_text("mine")


def _two_models(folder: Path) -> None:
    text = (folder / "model.py").read_text().replace("nn.Linear(4, 3)", "T.BertModel(T.BertConfig())")
    (folder / "model.py").write_text(text)


def _other_shape(folder: Path) -> None:
    path = folder / "model.py"
    path.write_text(path.read_text().replace("'vocab_size': 2000", "'vocab_size': 2001"))


@pytest.mark.parametrize(
    ("change", "path", "parts"),
    [
        (None, "studnet", ["no module 'studnet'", "student"]),
        (_fill, None, ["not empty", "--hf"]),
        (_two_models, None, ["2 Hugging Face models: student, head", "--component"]),
        (_other_shape, None, ["another model", "[2000, 160]", "[2001, 160]", "--plan"]),
    ],
)
def test_bad_input(
    change: Callable[[Path], None] | None, path: str | None, parts: list[str], tmp_path: Path
) -> None:
    train(tmp_path, ARCHITECTURES["Llama"])
    if change is not None:
        change(tmp_path)
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(UserError) as error:
        export(tmp_path, path)
    assert all(part in str(error.value) for part in parts), error.value
    assert sorted(p.name for p in tmp_path.iterdir()) == before
