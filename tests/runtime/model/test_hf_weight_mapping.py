"""Hugging Face checkpoints: `from_pretrained` inside `model()`, and their files as `--init`, under the
hub's names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as T
from safetensors.torch import load_file, save_file

from secc.runtime.errors import UserError
from secc.runtime.model.user_file import UserModel, load_model_file
from secc.runtime.parameters import rank_weights
from secc.runtime.parameters.rank_weights import build_rank_model, describe_parameters
from secc.runtime.plan.schema import PLAN_VERSION, Mesh, ModelRef, Plan, Section
from tests.runtime.gloo_ranks import free_port, run_ranks

CPU = torch.device("cpu")
TEXT: dict[str, Any] = dict(
    vocab_size=200,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
VISION: dict[str, Any] = dict(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=16,
    patch_size=8,
)
MODEL = """
import torch
from torch import nn
import transformers as T

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = {seen}
        self.teacher = {teacher}
        self.project = nn.Linear(4, 4)

    def forward(self, x):
        return x.sum()

def model():
    return Model()

def dataset():
    return [0]
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA and a language model, as `save_pretrained` writes them: with the hub's names."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(5)
    config = T.LlavaConfig(
        vision_config=T.CLIPVisionConfig(**VISION), text_config=T.LlamaConfig(**TEXT), image_token_id=3
    )
    T.LlavaForConditionalGeneration(config).save_pretrained(folder / "llava")
    T.LlamaForCausalLM(T.LlamaConfig(**TEXT)).save_pretrained(folder / "llama")
    return folder


def user_of(folder: Path, seen: str, teacher: str) -> UserModel:
    (folder / "model.py").write_text(MODEL.format(seen=seen, teacher=teacher))
    return load_model_file(folder / "model.py")


def plan_of(model: torch.nn.Module) -> Plan:
    names = {
        part: tuple(n for n, _ in model.named_parameters() if n.startswith(part))
        for part in ("seen", "teacher")
    }
    sections = tuple(
        Section(part, "", "train", (), (part,), names[part], Mesh((r,)), 1) for r, part in enumerate(names)
    )
    return Plan(
        PLAN_VERSION,
        "",
        ModelRef("", "", describe_parameters(model)),
        2,
        2,
        "own",
        (),
        (),
        sections,
        (),
        (),
        (),
        {},
        {},
        {},
    )


@pytest.mark.gloo
def test_from_pretrained_runs_in_one_process_of_a_node(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(checkpoints / name) for name in ("llava", "llama")]
    user = user_of(
        tmp_path,
        f"T.LlavaForConditionalGeneration.from_pretrained({paths[0]!r})",
        f"T.AutoModelForCausalLM.from_pretrained({paths[1]!r})",
    )
    expected, port = user.build_model(), free_port()
    plan, state = plan_of(expected), expected.state_dict()
    monkeypatch.setattr(rank_weights, "BUILD_EVERYWHERE_BYTES", 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def target(rank: int) -> dict[str, torch.Tensor]:
        os.environ["LOCAL_RANK"] = str(rank)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        model = build_rank_model(plan, user, rank, CPU, seed=0).model
        dist.barrier()
        rotary = model.teacher.model.rotary_emb.inv_freq
        assert torch.equal(rotary, expected.teacher.model.rotary_emb.inv_freq)
        return {
            n: t
            for n, t in model.state_dict().items()
            if n.split(".")[0] in ("seen", "teacher") and not t.is_meta
        }

    for rank, found in enumerate(run_ranks(2, target)):
        names = {n for n in state if n.startswith(("seen", "teacher")[rank])}
        assert names <= found.keys() and all(torch.equal(t, state[n]) for n, t in found.items())


@pytest.mark.parametrize("teacher", ["LlamaForCausalLM", "LlamaModel"])
def test_hub_names_are_mapped_and_prefixes_found(checkpoints: Path, tmp_path: Path, teacher: str) -> None:
    """LLaVA's files say `language_model.model.layers`, the module `model.language_model.layers`; a base model
    lacks its `model.`."""
    text, vision = f"T.LlamaConfig(**{TEXT!r})", f"T.CLIPVisionConfig(**{VISION!r})"
    config = f"T.LlavaConfig(vision_config={vision}, text_config={text}, image_token_id=3)"
    llava = f"T.LlavaForConditionalGeneration({config})"
    user = user_of(tmp_path, llava, f"T.{teacher}({text})")
    model = user.build_model()
    plan = plan_of(model)
    (tmp_path / "rest").mkdir()
    save_file(dict(model.project.state_dict()), tmp_path / "rest" / "model.safetensors")
    init = (
        ("seen", checkpoints / "llava"),
        ("teacher", checkpoints / "llama"),
        ("project", tmp_path / "rest"),
    )
    expected = T.LlavaForConditionalGeneration.from_pretrained(checkpoints / "llava").state_dict()
    taught = getattr(T, teacher).from_pretrained(checkpoints / "llama").state_dict()
    found = build_rank_model(plan, user, 0, CPU, seed=0, init=init).model.seen.state_dict()
    assert all(torch.equal(found[n], t) for n, t in expected.items())
    found = build_rank_model(plan, user, 1, CPU, seed=0, init=init).model.teacher.state_dict()
    assert all(torch.equal(found[n], t) for n, t in taught.items())


MIXTURES = {
    "Mixtral": dict(TEXT, num_local_experts=3, num_experts_per_tok=2),
    "Qwen3Moe": dict(TEXT, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=16),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_stored_one_by_one_are_joined(name: str, tmp_path: Path) -> None:
    """The hub has one tensor per expert, the module one for all; `save_pretrained` writes as the hub does."""
    torch.manual_seed(5)
    config = getattr(T, f"{name}Config")(**MIXTURES[name])
    teacher = getattr(T, f"{name}ForCausalLM")(config)
    teacher.save_pretrained(tmp_path / "teacher")
    files = [*(tmp_path / "teacher").glob("*.safetensors")]
    assert any(".experts.2." in n for file in files for n in load_file(file))
    user = user_of(tmp_path, "nn.Linear(2, 2)", f"T.{name}ForCausalLM(T.{name}Config(**{MIXTURES[name]!r}))")
    model = user.build_model()
    for part in ("seen", "project"):
        (tmp_path / part).mkdir()
        save_file(dict(model.get_submodule(part).state_dict()), tmp_path / part / "model.safetensors")
    init = tuple((part, tmp_path / part) for part in ("seen", "teacher", "project"))
    found = build_rank_model(plan_of(model), user, 1, CPU, seed=0, init=init).model.teacher.state_dict()
    expected = teacher.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[n], t) for n, t in expected.items())


def test_a_missing_expert_is_reported_by_name(tmp_path: Path) -> None:
    teacher = T.MixtralForCausalLM(T.MixtralConfig(**MIXTURES["Mixtral"]))
    teacher.save_pretrained(tmp_path / "teacher")
    (file,) = (tmp_path / "teacher").glob("*.safetensors")
    save_file({n: t for n, t in load_file(file).items() if ".experts.1.w1" not in n}, file)
    user = user_of(
        tmp_path, "nn.Linear(2, 2)", f"T.MixtralForCausalLM(T.MixtralConfig(**{MIXTURES['Mixtral']!r}))"
    )
    with pytest.raises(UserError, match=r"tensors are missing: .*experts"):
        build_rank_model(
            plan_of(user.build_model()), user, 1, CPU, seed=0, init=(("teacher", tmp_path / "teacher"),)
        )
