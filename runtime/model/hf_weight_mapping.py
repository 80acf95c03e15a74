"""Files of Hugging Face's hub as its modules want them now: renamed, and tensors joined or cut where a module
was rearranged.

A mixture of experts has one tensor for all experts where older files have one for each. Hugging Face's own
tables and operations say how, so that this page knows no architecture. They are used where the user's model
is one of theirs.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from secc.runtime.model.safetensors_reader import StoredTensor


class WeightSource(Protocol):
    """Where a tensor of the model is read from."""

    @property
    def stored_names(self) -> tuple[str, ...]:
        """The stored tensors that it takes."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        ...

    @property
    def file(self) -> Path:
        """A file that it is in."""
        ...

    def read_into(self, target: torch.Tensor) -> None:
        """Copy the tensor into `target`, of the same shape and any device."""
        ...


@dataclass(frozen=True)
class ConvertedTensor:
    """The tensor `name` of a module, made of stored ones by one of Hugging Face's converters; `parts` are
    (its pattern, stored tensor).

    `layer` is what the converter calls the tensors together.
    """

    name: str
    layer: str
    stored_parts: tuple[tuple[str, StoredTensor], ...]
    shape: tuple[int, ...]
    converter: Any
    module: nn.Module

    @property
    def stored_names(self) -> tuple[str, ...]:
        return tuple(entry.name for _, entry in self.stored_parts)

    @property
    def file(self) -> Path:
        return self.stored_parts[0][1].file

    def read_into(self, target: torch.Tensor) -> None:
        """Read all parts, one after another, and copy what they make: as much memory again as the tensor
        takes, and its parts."""

        def read(entry: StoredTensor) -> torch.Tensor:
            part = torch.empty(entry.shape, dtype=target.dtype)
            entry.read_into(part)
            return part

        made = _run_hf_converter(
            self.converter,
            self.module,
            self.layer,
            [(pattern, read(entry)) for pattern, entry in self.stored_parts],
        )
        target.detach().copy_(made[self.name])


def map_hf_weights(module: nn.Module, stored: Mapping[str, StoredTensor]) -> dict[str, WeightSource]:
    """The tensors of a Hugging Face module that `stored` ones make by its tables, by name; {} for any other
    module."""
    base = sys.modules.get("transformers.modeling_utils")
    if base is None or not isinstance(module, base.PreTrainedModel):
        return {}
    try:
        return _apply_hf_tables(module, stored)
    except (ImportError, AttributeError, TypeError):
        return {}  # a release that keeps its tables elsewhere


def _apply_hf_tables(module: Any, stored: Mapping[str, StoredTensor]) -> dict[str, WeightSource]:
    tables = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(module)
    loading = importlib.import_module("transformers.core_model_loading")
    renamings = [t for t in tables if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in tables if isinstance(t, loading.WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    found, state = dict[str, WeightSource](), module.state_dict()
    layers: dict[str, list[tuple[str, StoredTensor]]] = {}
    for name in sorted(stored, key=loading.dot_natural_key):  # experts by number
        new, pattern = loading.rename_source_key(name, renamings, converters, module.base_model_prefix, state)
        if pattern is None:
            found[new] = stored[name]
        else:
            layers.setdefault(new, []).append((pattern, stored[name]))
    for layer, parts in layers.items():
        found |= _converted_tensors(by_pattern[parts[0][0]], module, layer, parts)
    return found


def _converted_tensors(
    converter: Any, module: nn.Module, layer: str, parts: Sequence[tuple[str, StoredTensor]]
) -> dict[str, WeightSource]:
    """What the converter makes of some stored tensors; nothing where they are not what it takes."""
    shapes = [(pattern, torch.empty(entry.shape, device="meta")) for pattern, entry in parts]
    try:
        made = _run_hf_converter(converter, module, layer, shapes)
    except Exception:
        return {}  # some experts of a layer are missing, or already joined
    return {
        name: ConvertedTensor(name, layer, tuple(parts), tuple(t.shape), converter, module)
        for name, t in made.items()
    }


def _run_hf_converter(
    converter: Any, module: Any, layer: str, parts: Sequence[tuple[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Run a converter of Hugging Face's on tensors, given with the patterns of their names."""
    converter = copy.deepcopy(converter)
    for number, (pattern, tensor) in enumerate(parts):
        converter.add_tensor(layer, str(number), pattern, tensor)
    made = converter.convert(layer, model=module, config=module.config)
    return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}
