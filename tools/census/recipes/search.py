"""Which recipe a model gets: the first of its task that plain PyTorch trains."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tools.census.batches import Batching, words
from tools.census.documented import documented_inputs
from tools.census.recipes.inputs import plain_inputs, rare_inputs
from tools.census.recipes.labels import Label, label_of, with_labels
from tools.census.recipes.language import language
from tools.census.recipes.modalities import MODAL
from tools.census.recipes.rare_language import rare_language
from tools.census.recipes.recipe import Recipe, RecipeError
from tools.census.recipes.texts import labelled_codes
from tools.zoo_models.entry import Sample
from tools.zoo_models.samples import IGNORED

TRIED_BATCH = 12


def find_recipe(task: str, model: nn.Module) -> Recipe:
    """The first recipe of `task` that plain PyTorch trains on `model`. Raises RecipeError, with the error
    of the first, if none does; of one that ran without giving a loss, if there is one."""
    error: Exception | None = None
    for recipe in recipes(task, model):
        try:
            try_recipe(model, recipe)
            return recipe
        except Exception as failed:  # whatever the model's code raises
            error = failed if error is None or "no loss that trains" in str(failed) else error
    error = error or RecipeError(f"no recipe for {task}")
    raise RecipeError(f"{type(error).__name__}: {error}") from error


def try_recipe(model: nn.Module, recipe: Recipe) -> None:
    """Trains a batch, and a sample alone, in plain PyTorch. Raises whatever fails. A group norm over a
    feature map of one pixel, for example, takes batches only, so larger images are drawn then."""
    samples = [recipe.draw(torch.Generator().manual_seed(i)) for i in range(TRIED_BATCH)]
    for batch in (samples, samples[:1]):
        loss = loss_of(model(**recipe.batching.collate(batch)))
        if not torch.isfinite(loss):
            raise RecipeError(f"the loss is {float(loss)}")
    loss.backward()
    model.zero_grad(set_to_none=True)


def loss_of(output: Any) -> torch.Tensor:
    """The loss in forward's output. Raises RecipeError if there is none that trains."""
    loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        raise RecipeError("forward returns no loss that trains")
    return loss.mean() if loss.dim() else loss


def parameters_of(model: nn.Module) -> set[str]:
    """The names of forward's parameters; for a wrapper those of the model inside."""
    return set(inspect.signature(getattr(model, "wrapped", model).forward).parameters)


def recipes(task: str, model: nn.Module) -> Iterator[Recipe]:
    """The recipes of a task."""
    names, bare = parameters_of(model), getattr(model, "wrapped", model)
    if type(bare).forward is nn.Module.forward:
        raise NotImplementedError("the class has no forward")
    if "inference_session" in names:
        raise NotImplementedError("forward takes a session of inference")
    label = label_of(task, names)
    if task == "hidden":
        yield from plain_inputs(names, bare.config)
        yield from rare_inputs(names, bare.config)
        for name, draw in documented_inputs(bare, bare.config):
            yield Recipe(name, draw, Batching())
    elif task == "speech":
        yield from _transcribed(names, bare.config)
        yield from language("multimodal", names, bare.config, model)
        yield from rare_language(names, bare.config, model)
    elif label is not None:
        yield from _labelled(label, names, bare.config, model, choices=2 if task == "choice" else 0)
    else:
        yield from _language_of(task, names, bare.config, model)


def _language_of(task: str, names: set[str], config: Any, model: nn.Module) -> Iterator[Recipe]:
    """Texts with labels of their own: causal, masked, multimodal, or one sequence to another."""
    if task == "causal" and "num_codebooks" in vars(config):
        yield Recipe("codes", labelled_codes(config), Batching(joined=frozenset({"input_ids"})))
    if task == "seq2seq" and "decoder_input_ids" not in names:
        task = "multimodal"
    yield from language(task, names, config, model)
    yield from rare_language(names, config, model)
    if task != "seq2seq" and "decoder_input_ids" in names:
        yield from language("seq2seq", names, config, model)
    if "labels" in names and "input_ids" not in names:
        yield from _transcribed(names, config)


def _labelled(label: Label, names: set[str], config: Any, model: nn.Module, choices: int) -> Iterator[Recipe]:
    """What a model is given, with labels of the task."""
    if "input_ids" in names and names & MODAL:
        for base in language("multimodal", names, config, model):
            yield with_labels(base, label, config)
    given = names - {"decoder_input_ids"}
    for base in plain_inputs(given, config, choices):
        yield with_labels(base, label, config)
    for base in rare_inputs(given, config):
        yield with_labels(base, label, config)
    for name, draw in documented_inputs(model, config):
        yield with_labels(Recipe(name, draw, Batching()), label, config)


def _transcribed(names: set[str], config: Any) -> Iterator[Recipe]:
    """A sound and its transcript; the decoder shifts the labels."""
    for base in plain_inputs(names - {"input_ids"}, config):

        def draw(g: torch.Generator, base: Recipe = base) -> Sample:
            return base.draw(g) | {"labels": words(g, (4, 9))}

        batching = Batching({**base.batching.padded, "labels": IGNORED}, masks=base.batching.masks)
        yield Recipe(base.name, draw, batching)
