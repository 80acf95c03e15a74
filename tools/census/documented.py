"""Draws inputs from the shapes that a model's documentation gives, for inputs that the census does not know
by name.

Transformers documents every parameter of forward with its type and shape, such as "`torch.LongTensor` of
shape `(batch_size, sequence_length, hidden_size)`": the first dim is the batch, others are numbers, names of
the configuration, or lengths.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tools.census.batches import Draw, noise, words
from tools.census.small_configs import IMAGE
from tools.zoo_models.entry import Sample

LENGTH = 16  # of every dim that is a length
CLASSES = 2  # of integers that are no tokens
_ENTRY = re.compile(
    r"^\s*(\w+) \(`torch\.(\w*Tensor)`\s*of shape `?(?:\[([^\]]*)\]|\(((?:[^()]|\([^()]*\))*)\))",
    re.MULTILINE,
)
_USUAL = {"num_channels": 3, "image_size": IMAGE}
# Alternatives to other inputs, labels, and what only generation takes.
_LEFT_OUT = re.compile(
    r"position_ids$|^labels$|head_mask|^cache|_embeddings$|^output_|^use_|^return_|_outputs$"
)


@dataclass(frozen=True)
class _Input:
    """A tensor that forward takes: `kind` is the class that its documentation names."""

    name: str
    kind: str
    dims: tuple[str, ...]
    required: bool


def documented_inputs(model: nn.Module, config: Any) -> Iterator[tuple[str, Draw]]:
    """Ways to draw samples for `model`: the inputs that forward must be given, then all that it documents."""
    inputs = _inputs(model)
    if any(i.name == "input_ids" for i in inputs):
        inputs = [i for i in inputs if i.name != "inputs_embeds"]
    required = [i for i in inputs if i.required]
    for name, chosen in (("required inputs", required), ("documented inputs", inputs)):
        if chosen:
            yield name, _drawn(chosen, config)


def _inputs(model: nn.Module) -> list[_Input]:
    forward = type(model).forward
    parameters = inspect.signature(forward).parameters
    return [
        _Input(name, kind, tuple(d.strip() for d in (dims or others).split(",") if d.strip()), required)
        for name, kind, dims, others in _ENTRY.findall(forward.__doc__ or "")
        if name in parameters
        for required in (parameters[name].default is inspect.Parameter.empty,)
        if required or not _LEFT_OUT.search(name)
    ]


def _drawn(inputs: list[_Input], config: Any) -> Draw:
    def draw(g: torch.Generator) -> Sample:
        return {i.name: _value(g, i, config) for i in inputs}

    return draw


def _value(g: torch.Generator, wanted: _Input, config: Any) -> torch.Tensor:
    shape = [_size(d, config) for d in wanted.dims[1:]]
    if "padding" in wanted.name and "mask" not in wanted.name:
        return torch.zeros(shape, dtype=torch.long)
    if "mask" in wanted.name and "mask_labels" not in wanted.name and len(shape) < 3:
        return torch.ones(shape, dtype=torch.bool if wanted.kind == "BoolTensor" else torch.long)
    if wanted.name.endswith("input_ids") or wanted.name.endswith("_inputs"):
        return words(g, (shape[0], shape[0] + 1))
    if wanted.kind in ("LongTensor", "IntTensor"):
        return torch.randint(0, CLASSES, shape, generator=g)
    return noise(g, *shape)


def _size(dim: str, config: Any) -> int:
    """A dim such as `16`, `hidden_size`, `sequence_length + 1` or `dim * len(config.layer_ids)`."""
    total = 0
    for term in dim.split(" + "):
        product = 1
        for factor in term.split(" * "):
            product *= _factor(factor.strip().replace("config.", ""), config)
        total += product
    return total


def _factor(name: str, config: Any) -> int:
    if name.isdigit():
        return int(name)
    if listed := re.fullmatch(r"len\((\w+)\)", name):
        return len(getattr(config, listed[1]))
    names = {"dim": "hidden_size", "height": "image_size", "width": "image_size", "mel_bins": "num_mel_bins"}
    name = names.get(name, name)
    parts = [config, *(v for v in vars(config).values() if hasattr(v, "model_type"))]
    value = next((v for p in parts if (v := getattr(p, name, None)) is not None), _USUAL.get(name))
    if isinstance(value, list | tuple):
        value = min(value)
    return value if isinstance(value, int) else max(LENGTH, 2 * getattr(config, "patch_length", 0))
