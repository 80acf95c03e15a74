"""Which rows the census has: each model type of the installed transformers, once for each kind of task that
its auto mappings name it for."""

from __future__ import annotations

import abc
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers as T
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tools.census.recipes.recipe import RecipeError
from tools.census.recipes.search import find_recipe
from tools.census.small_configs import LABELS, Sizes, small_config
from tools.zoo_models import entries as zoo_entries
from tools.zoo_models import entry as zoo_entry
from tools.zoo_models.entry import Sample, Samples
from tools.zoo_models.parts import quiet


@dataclass(frozen=True)
class Family:
    """A family of rows: the auto mapping with its model types, the task that makes samples and labels, and
    whether the mapping's types have a row even if an earlier family has them."""

    name: str
    mapping: str
    task: str
    repeats: bool = False


FAMILIES = (
    Family("image-text", "IMAGE_TEXT_TO_TEXT", "multimodal"),
    Family("causal", "CAUSAL_LM", "causal"),
    Family("multimodal", "MULTIMODAL_LM", "multimodal"),
    Family("seq2seq", "SEQ_TO_SEQ_CAUSAL_LM", "seq2seq"),
    Family("speech", "SPEECH_SEQ_2_SEQ", "speech"),
    Family("masked", "MASKED_LM", "masked"),
    Family("ctc", "CTC", "ctc"),
    Family("ctc", "RNNT", "ctc"),
    Family("ctc", "TDT", "ctc"),
    Family("audio", "AUDIO_CLASSIFICATION", "classes", repeats=True),
    Family("audio", "AUDIO_XVECTOR", "classes", repeats=True),
    Family("images", "IMAGE_CLASSIFICATION", "classes", repeats=True),
    Family("video", "VIDEO_CLASSIFICATION", "classes", repeats=True),
    Family("segmentation", "SEMANTIC_SEGMENTATION", "segmentation", repeats=True),
    Family("segmentation", "UNIVERSAL_SEGMENTATION", "masks"),
    Family("detection", "OBJECT_DETECTION", "detection"),
    Family("depth", "DEPTH_ESTIMATION", "depth"),
    Family("classification", "SEQUENCE_CLASSIFICATION", "classes", repeats=True),
    Family("tokens", "TOKEN_CLASSIFICATION", "tokens", repeats=True),
    Family("questions", "QUESTION_ANSWERING", "span", repeats=True),
    Family("choices", "MULTIPLE_CHOICE", "choice", repeats=True),
    Family("sentences", "NEXT_SENTENCE_PREDICTION", "sentence", repeats=True),
    Family("hidden states", "BACKBONE", "hidden"),
    Family("hidden states", "TEXT_ENCODING", "hidden"),
    Family("hidden states", "BASE", "hidden"),
)
FROZEN_NORMS = "frozen_norms"  # a value of a row: its batch norms are not trained
# Rows with another value of their configuration: an option of the model's own with which its loss separates.
# Batch norms in training have wrong gradients for one sample in torch 2.13 on CPUs, frozen ones have none.
VARIANTS = (
    tuple((f"detection/{t}", (("num_denoising", 0),)) for t in ("rt_detr", "rt_detr_v2", "d_fine", "deimv2"))
    + tuple(
        (f"detection/{t}", (("num_denoising", 0), (FROZEN_NORMS, True))) for t in ("rt_detr", "rt_detr_v2")
    )
    + tuple(
        (f"hidden-states/{t}", (("default_scale", 1.0),))
        for t in ("autoformer", "informer", "time_series_transformer")
    )
)
_BASE = "MODEL_MAPPING_NAMES"
_PARTS = ("decoder", "text", "vision", "vision_model")
STAGES = 4  # hidden states of a backbone below a head that gives a value for each pixel
MOST_PARAMETERS = 20_000_000  # of a model with the widths that its class has by default
_JOINED_TASKS = ("multimodal", "speech", "seq2seq")  # of models whose parts fit certain inputs only


@dataclass(frozen=True)
class RowEntry:
    """The functions of a row's model file; without `collate` secc's default joins samples. `inputs` says what
    its samples are."""

    model: Callable[[], nn.Module]
    dataset: Callable[[], Dataset[Sample]]
    collate: Callable[[Sequence[Sample]], Sample] | None
    inputs: str

    def in_float64(self) -> RowEntry:
        """The same with weights and samples in float64."""
        return replace(
            self, model=lambda: self.model().double(), dataset=lambda: _DoubleSamples(self.dataset())
        )


class _DoubleSamples(Dataset[Sample]):
    """Samples with floats in float64."""

    def __init__(self, samples: Dataset[Sample]) -> None:
        self._samples: Any = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return pytree.tree_map(
            lambda v: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v,
            self._samples[index],
        )


@dataclass(frozen=True)
class Row(abc.ABC):
    """A row: a model, and samples for it."""

    name: str

    @abc.abstractmethod
    def entry(self) -> RowEntry:
        """The functions of its model file. Raises what plain PyTorch raises if it cannot train the row."""


@dataclass(frozen=True)
class ZooRow(Row):
    """A model type that the zoo has, with inputs that no rule of names finds."""

    zoo_name: str

    def entry(self) -> RowEntry:
        """The zoo's model file."""
        known = zoo_entry(self.zoo_name)
        return RowEntry(known.model, known.dataset, known.collate, "as in the zoo")


@dataclass(frozen=True)
class TaskRow(Row):
    """A row for which the task's recipes make samples."""

    task: str

    @abc.abstractmethod
    def build(self) -> nn.Module:
        """The small random model in training mode, its batch norms in eval mode."""

    def entry(self) -> RowEntry:
        """The model with the first recipe that plain PyTorch trains. Raises RecipeError if there is none."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            recipe = find_recipe(self.task, self.build())
        return RowEntry(self.build, lambda: Samples(recipe.draw), recipe.batching.collate, recipe.name)


@dataclass(frozen=True)
class ModelRow(TaskRow):
    """A row for one class of one model type."""

    model_type: str
    class_name: str
    sizes: Sizes = Sizes.ALL
    part: str = ""  # of the model, if not all of it
    values: tuple[tuple[str, Any], ...] = ()  # of its configuration

    def entry(self) -> RowEntry:
        """The model at the first sizes that plain PyTorch trains."""
        return first_of_sizes(self, TaskRow.entry)

    def build(self) -> nn.Module:
        options = dict[str, Any](self.values)
        frozen_norms = options.pop(FROZEN_NORMS, False)
        if self.task in ("classes", "tokens", "segmentation", "detection", "masks"):
            options["num_labels"] = LABELS
        if self.task in ("segmentation", "depth"):
            options["stages"] = STAGES
        kind = CONFIG_MAPPING[self.model_type]
        own = getattr(getattr(T, self.class_name), "config_class", None)
        if own is not None and own.model_type in {f"{self.model_type}_{part}" for part in _PARTS}:
            kind = own  # of a part of the model type, such as the decoder alone
        config = quiet(small_config(kind, self.sizes, **options))
        if self.sizes is Sizes.DEPTHS:
            with torch.device("meta"):
                count = sum(p.numel() for p in getattr(T, self.class_name)(config).parameters())
            if count > MOST_PARAMETERS:
                raise ValueError(f"the model has {count:,} parameters")
        model = getattr(T, self.class_name)(config)
        model = to_training(getattr(model, self.part) if self.part else model)
        if frozen_norms:
            for module in model.modules():
                if "BatchNorm" in type(module).__name__:
                    module.requires_grad_(False)
        return HiddenStates(model) if self.task == "hidden" else model


def first_of_sizes(row: ModelRow, make: Callable[[ModelRow], RowEntry]) -> RowEntry:
    """What `make` makes of the row at the first sizes at which it succeeds. Raises its first error if there
    are none."""
    first: Exception | None = None
    for sizes in Sizes:
        try:
            made = make(replace(row, sizes=sizes))
        except Exception as error:  # whatever the model's code raises
            first = first or error
        else:
            return (
                made if sizes is Sizes.ALL else replace(made, inputs=f"{made.inputs}; small: {sizes.value}")
            )
    assert first is not None
    if row.task not in ("hidden", "base") and "loss" not in inspect.getsource(
        getattr(T, row.class_name).forward
    ):
        raise RecipeError(f"{row.class_name}: forward returns no loss that trains") from first
    raise first


def to_training(model: nn.Module) -> nn.Module:
    """Puts a model into training mode, its batch norms into eval mode: statistics of the batch would couple
    its samples."""
    model.train()
    for module in model.modules():
        if "BatchNorm" in type(module).__name__:
            module.eval()
    return model


class HiddenStates(nn.Module):
    """Trains a model without a loss: the hidden states of each sample, averaged over its positions, are drawn
    to values from 0 to 1, one for each channel. To one value would not train states that a norm has made:
    their mean square is given."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        output = self.wrapped(**batch)
        states = first_states(output)
        mask = batch.get("attention_mask")
        if mask is not None and states.dim() == 3 and states.shape[1] == mask.shape[1]:
            weights = mask.to(states.dtype)[..., None]
            pooled = (states * weights).sum(1) / weights.sum(1)
        else:
            pooled = states
        channels = states.shape[1 if states.dim() == 4 else -1]
        wanted = torch.linspace(0, 1, channels, dtype=states.dtype, device=states.device)
        return ((pooled - (wanted[:, None, None] if pooled.dim() == 4 else wanted)) ** 2).mean()


def first_states(output: Any) -> torch.Tensor:
    """The first floating-point tensor of a model's output that has positions or channels. Raises RecipeError
    if there is none."""
    for value in _tensors(output):
        if value.is_floating_point() and value.dim() > 1:
            return value
    raise RecipeError("forward gives integers only, and no loss that trains")


def _tensors(output: Any) -> list[torch.Tensor]:
    """The tensors of a model's output in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):  # without a contrastive model's scores, which pair all samples
        output = [v for k, v in output.items() if not k.startswith("logits_")]
    values = output if isinstance(output, list | tuple) else []
    return [t for v in values for t in _tensors(v)]


@functools.cache
def _zoo_names() -> dict[str, str]:
    """The zoo's names by what they have in common with model types."""
    return {e.name.replace("_", ""): e.name for e in zoo_entries()}


@functools.cache
def model_rows() -> dict[str, Row]:
    """The rows of transformers' model types by name, family by family."""
    rows, seen = dict[str, Row](), set[str]()
    for family in FAMILIES:
        name = _BASE if family.mapping == "BASE" else f"MODEL_FOR_{family.mapping}_MAPPING_NAMES"
        for model_type, classes in getattr(modeling_auto, name).items():
            class_name = classes if isinstance(classes, str) else classes[0]
            row = f"{family.name.replace(' ', '-')}/{model_type}"
            if row in rows or (model_type in seen and not family.repeats):
                continue
            seen.add(model_type)
            zoo_name = _zoo_names().get(re.sub(r"\W|_", "", model_type))
            if zoo_name and family.task in _JOINED_TASKS:
                rows[row] = ZooRow(row, zoo_name)
            else:
                rows[row] = ModelRow(row, family.task, model_type, class_name)
    for name, values in VARIANTS:
        base = rows[name]
        assert isinstance(base, ModelRow)
        variant = f"{name}:{','.join(f'{k}={v}' for k, v in values)}"
        rows[variant] = replace(base, name=variant, values=values)
    return rows
