"""Rows that join model types: each causal language model as teacher and as student of a distillation, each
tower of images or sounds before a language model, diffusers' denoisers and autoencoders, peft's adapters."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import transformers as T
from torch import nn
from transformers.models.auto import modeling_auto

from tools.census.batches import LENGTHS, Batching, noise, sometimes, words
from tools.census.catalog import (
    ModelRow,
    Row,
    RowEntry,
    TaskRow,
    first_of_sizes,
    first_states,
    model_rows,
    to_training,
)
from tools.census.recipes.recipe import FIXED, Recipe, RecipeError
from tools.census.recipes.search import recipes, try_recipe
from tools.census.small_configs import HIDDEN, VOCABULARY
from tools.zoo_models.entry import Sample, Samples
from tools.zoo_models.parts import llama
from tools.zoo_models.samples import IGNORED

_FEATURE = VOCABULARY - 1  # the token where a tower's features go
_TOWERS_OWN = "tower_"  # before the name of a tower's input that the text has, too
_TEXT = dict(vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN)
ADAPTED = ("llama", "qwen2", "mistral", "gemma2", "gpt2", "opt", "gpt_neox", "bloom", "phi", "falcon")
_OF_CODES = ("musicgen", "musicgen_melody")  # several codes for each step: no vocabulary of a Llama's
# peft makes a prefix for each of the queries' heads: of keys with one head it makes too many.
_ADAPTED_VALUES: dict[str, tuple[tuple[str, Any], ...]] = {"prefix/falcon": (("multi_query", False),)}
ADAPTERS = ("lora", "dora", "ia3", "prompt", "prefix")


class Distillation(nn.Module):
    """A frozen teacher and a student of one vocabulary: divergence at labelled positions, and the student's
    own loss."""

    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher.requires_grad_(False), student

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        with torch.no_grad():
            wanted = _logits(self.teacher, input_ids, attention_mask)
        logits = _logits(self.student, input_ids, attention_mask)
        labelled = (labels[:, 1:] != IGNORED).float()
        divergence = F.kl_div(
            logits[:, :-1].log_softmax(-1), wanted[:, :-1].softmax(-1), reduction="none"
        ).sum(-1)
        own = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (divergence * labelled).sum() / labelled.sum() + 0.5 * own


def _logits(model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """A language model's logits, cut to the shared vocabulary."""
    masked = "attention_mask" in inspect.signature(model.forward).parameters
    given = {"attention_mask": attention_mask} if masked else {}
    return model(input_ids=input_ids, **given).logits[..., :VOCABULARY]


@dataclass(frozen=True)
class DistillationRow(Row):
    """A causal model as teacher or student; the other one is a Llama."""

    own: ModelRow
    is_teacher: bool

    def entry(self) -> RowEntry:
        """Ragged texts, or texts of one length."""
        try:
            return first_of_sizes(self.own, self._entry)
        except Exception as error:  # whatever the model's code raises
            try:
                return first_of_sizes(self.own, lambda own: self._entry(own, FIXED))
            except Exception:
                raise error from None

    def _entry(self, own: ModelRow, lengths: tuple[int, int] = LENGTHS) -> RowEntry:
        def build() -> nn.Module:
            parts = (own.build(), T.LlamaForCausalLM(llama(**_TEXT)))
            return Distillation(*(parts if self.is_teacher else parts[::-1]))

        padded = {"input_ids": 0, "labels": IGNORED}
        batching = Batching(padded, masks={"input_ids": "attention_mask"})

        def draw(g: torch.Generator) -> Sample:
            text = words(g, lengths)
            return {"input_ids": text, "labels": text}

        return _tried(build, Recipe("text" if lengths == LENGTHS else "fixed text", draw, batching))


class Joined(nn.Module):
    """A tower, a projector and a language model: where a text has feature tokens, it sees what the tower
    makes of the sample's image or sound."""

    def __init__(self, tower: nn.Module, example: Sample) -> None:
        super().__init__()
        self.tower = tower
        with torch.no_grad():
            features = _features(tower, example)
        self.tokens = features.shape[1]
        self.projector = nn.Linear(features.shape[2], HIDDEN)
        self.language_model = T.LlamaForCausalLM(llama(**_TEXT, max_position_embeddings=2048))

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor,
        **seen: torch.Tensor,
    ) -> torch.Tensor:
        embedded = self.language_model.get_input_embeddings()(input_ids)
        if seen:
            seen = {k.removeprefix(_TOWERS_OWN): v for k, v in seen.items()}
            features = self.projector(_features(self.tower, seen)).flatten(0, 1)
            places = (input_ids == _FEATURE)[..., None].expand_as(embedded)
            embedded = embedded.masked_scatter(places, features.to(embedded.dtype))
        return self.language_model(inputs_embeds=embedded, attention_mask=attention_mask, labels=labels).loss


def _features(tower: nn.Module, seen: Sample) -> torch.Tensor:
    """A tower's first hidden states as [inputs, positions, channels]."""
    states = first_states(tower(**seen))
    if states.dim() == 4:
        return states.flatten(2).transpose(1, 2)
    return states[:, None] if states.dim() == 2 else states


@dataclass(frozen=True)
class TowerRow(Row):
    """A model type of images, clips or sounds before a language model."""

    own: ModelRow

    def entry(self) -> RowEntry:
        """Texts, every second of them with an image or a sound."""
        return first_of_sizes(self.own, self._entry_of_sizes)

    def _entry_of_sizes(self, own: ModelRow) -> RowEntry:
        bare = own.build()
        error: Exception = RecipeError("no recipe for a tower")
        for seen in recipes("hidden", HiddenTower(bare)):
            if seen.batching.padded and not seen.name.startswith("fixed"):
                continue  # of one size, so that each gives equally many features
            try:
                return self._entry(own, seen)
            except Exception as failed:  # whatever the model's code raises
                error = failed
        raise RecipeError(f"{type(error).__name__}: {error}") from error

    def _entry(self, own: ModelRow, seen: Recipe) -> RowEntry:
        example = {k: v[None] for k, v in seen.draw(torch.Generator().manual_seed(0)).items()}

        def build() -> nn.Module:
            device = torch.get_default_device()
            return Joined(own.build(), {k: v.to(device) for k, v in example.items()})

        named = {k: f"{_TOWERS_OWN}{k}" if k == "input_ids" else k for k in example}
        tokens = build().tokens
        assert isinstance(tokens, int)

        def draw(g: torch.Generator) -> Sample:
            text = words(g)
            has = sometimes(g)
            before = torch.full((tokens if has else 0,), _FEATURE)
            sample = {
                "input_ids": torch.cat([before, text]),
                "labels": torch.cat([torch.full_like(before, IGNORED), text]),
            }
            return sample | ({named[k]: v[None] for k, v in seen.draw(g).items()} if has else {})

        padded = {"input_ids": 0, "labels": IGNORED}
        batching = Batching(padded, frozenset(named.values()), masks={"input_ids": "attention_mask"})
        return _tried(build, Recipe(f"text and {seen.name}", draw, batching))


class HiddenTower(nn.Module):
    """A tower as recipes expect a model without a loss."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped


def _tried(build: Any, recipe: Recipe) -> RowEntry:
    """The row of a recipe that plain PyTorch trains. Raises what it raises otherwise."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try_recipe(build(), recipe)
    return RowEntry(build, lambda: Samples(recipe.draw), recipe.batching.collate, recipe.name)


class Denoiser(nn.Module):
    """A latent diffusion step: noise is added to a sample, the denoiser says which."""

    def __init__(self, denoiser: nn.Module, text: bool) -> None:
        super().__init__()
        self.denoiser = denoiser
        self.words = nn.Embedding(VOCABULARY, HIDDEN) if text else None

    def forward(
        self,
        latents: torch.Tensor,
        noise: torch.Tensor,
        timestep: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        **conditions: torch.Tensor,
    ) -> torch.Tensor:
        share = timestep.float().view(-1, *[1] * (latents.dim() - 1)) / 1000
        noisy = (1 - share) * latents + share * noise
        if self.words is not None and input_ids is not None:
            conditions["encoder_hidden_states"] = self.words(input_ids)
        return F.mse_loss(self.denoiser(noisy, timestep=timestep, **conditions, return_dict=False)[0], noise)


class Autoencoder(nn.Module):
    """An autoencoder that reconstructs its images from the mean of its latents."""

    def __init__(self, autoencoder: nn.Module) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.autoencoder(pixel_values, return_dict=False)[0], pixel_values)


_BLOCKS: dict[str, Any] = dict(block_out_channels=(16, 32), norm_num_groups=4, layers_per_block=1)
_UNET = dict(sample_size=8, in_channels=4, out_channels=4, **_BLOCKS)
_DIT = dict(num_attention_heads=2, attention_head_dim=16, num_layers=2, sample_size=8, patch_size=2)
DIFFUSERS: dict[str, tuple[dict[str, Any], bool]] = {  # class: (options, takes texts)
    "UNet2DModel": (
        _UNET
        | dict(
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")
        ),
        False,
    ),
    "UNet2DConditionModel": (
        _UNET
        | dict(
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=HIDDEN,
            attention_head_dim=4,
        ),
        True,
    ),
    "SanaTransformer2DModel": (
        dict(_DIT, in_channels=4, out_channels=4, num_cross_attention_heads=2, cross_attention_head_dim=16)
        | dict(cross_attention_dim=HIDDEN, caption_channels=HIDDEN),
        True,
    ),
    "PixArtTransformer2DModel": (
        dict(_DIT, in_channels=4, out_channels=4, cross_attention_dim=HIDDEN, caption_channels=HIDDEN),
        True,
    ),
    "AutoencoderKL": (
        _BLOCKS
        | dict(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
        ),
        False,
    ),
    "VQModel": (
        _BLOCKS
        | dict(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            num_vq_embeddings=16,
        ),
        False,
    ),
    "AutoencoderTiny": (
        dict(encoder_block_out_channels=(16, 16), decoder_block_out_channels=(16, 16))
        | dict(num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1)),
        False,
    ),
}


@dataclass(frozen=True)
class DiffusersRow(Row):
    """One of diffusers' classes."""

    class_name: str

    def build(self) -> nn.Module:
        """The denoiser or autoencoder with its loss."""
        import diffusers  # pyright: ignore[reportMissingImports]

        options, text = DIFFUSERS[self.class_name]
        made = getattr(diffusers, self.class_name)(**options)
        is_denoiser = "Transformer" in self.class_name or "UNet" in self.class_name
        return Denoiser(made, text) if is_denoiser else Autoencoder(made)

    def entry(self) -> RowEntry:
        """Latents with noise and a time, with a text where the model takes one; or images."""
        text = DIFFUSERS[self.class_name][1]
        is_denoiser = "Transformer" in self.class_name or "UNet" in self.class_name

        def draw(g: torch.Generator) -> Sample:
            if not is_denoiser:
                return {"pixel_values": noise(g, 3, 16, 16)}
            sample: Sample = {"latents": noise(g, 4, 8, 8), "noise": noise(g, 4, 8, 8)}
            sample["timestep"] = torch.randint(0, 1000, (), generator=g)
            return sample | ({"input_ids": words(g)} if text else {})

        masks = {"input_ids": "encoder_attention_mask"} if text else {}
        return _tried(
            self.build,
            Recipe("latents" if is_denoiser else "images", draw, Batching({"input_ids": 0}, masks=masks)),
        )


@dataclass(frozen=True)
class AdapterRow(TaskRow):
    """A frozen causal model with one of peft's adapters."""

    own: ModelRow
    adapter: str

    def build(self) -> nn.Module:
        import peft  # pyright: ignore[reportMissingImports]

        task = peft.TaskType.CAUSAL_LM
        configs: dict[str, Any] = {
            "lora": lambda: peft.LoraConfig(r=4, target_modules="all-linear", task_type=task),
            "dora": lambda: peft.LoraConfig(r=4, target_modules="all-linear", use_dora=True, task_type=task),
            "ia3": lambda: peft.IA3Config(task_type=task),
            "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type=task),
            "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type=task),
        }
        return to_training(peft.get_peft_model(self.own.build(), configs[self.adapter]()))  # type: ignore[arg-type]


def compound_rows() -> dict[str, Row]:
    """The rows by name."""
    known = model_rows()
    causal = {
        n.partition("/")[2]: r
        for n, r in known.items()
        if n.startswith("causal/") and isinstance(r, ModelRow) and r.model_type not in _OF_CODES
    }
    rows = dict[str, Row]()
    for role in ("teacher", "student"):
        for model_type, row in causal.items():
            rows[f"{role}/{model_type}"] = DistillationRow(f"{role}/{model_type}", row, role == "teacher")
    bases: dict[str, str] = modeling_auto.MODEL_MAPPING_NAMES
    for name, row in known.items():
        model_type = name.partition("/")[2]
        if not name.startswith(("images/", "audio/", "video/", "ctc/")) or model_type not in bases:
            continue
        if isinstance(row, ModelRow):
            inside = f"{model_type}_vision_model"  # of a model of images and texts
            kind = inside if inside in bases else model_type
            base = bases[kind] if isinstance(bases[kind], str) else bases[kind][0]
            part = base.removesuffix("Model") + "VisionModel"
            taken = part if hasattr(T, part) else base
            decodes = "decoder_input_ids" in inspect.signature(getattr(T, taken).forward).parameters
            own = ModelRow(name, "base", kind, taken, part="encoder" if decodes else "")
            rows[f"tower/{model_type}"] = TowerRow(f"tower/{model_type}", own)
    for class_name in DIFFUSERS:
        rows[f"diffusers/{class_name}"] = DiffusersRow(f"diffusers/{class_name}", class_name)
    for adapter in ADAPTERS:
        for model_type in ADAPTED:
            name = f"{adapter}/{model_type}"
            values = _ADAPTED_VALUES.get(name, ())
            rows[name] = AdapterRow(name, "causal", replace(causal[model_type], values=values), adapter)
    return rows
