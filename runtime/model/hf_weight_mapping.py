"""Maps files of Hugging Face's hub to the tensors of current modules: renamed, and joined or split where a
module was rearranged.

A mixture of experts has one tensor for all experts where older files have one per expert. Hugging Face's own
tables and operations describe these changes, so this module knows no architecture. It is used for modules
that are Hugging Face's.
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
        """The stored tensors that are read for it."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        ...

    @property
    def file(self) -> Path:
        """One of the files that it is read from."""
        ...

    def read_into(self, target: torch.Tensor) -> None:
        """Copy the tensor into `target`, which has the same shape and may be on any device."""
        ...


@dataclass(frozen=True)
class ConvertedTensor:
    """The tensor `name` of a module, computed from stored ones by one of Hugging Face's weight converters.

    `stored_parts` are (name pattern of the converter, stored tensor); `layer` is the converter's name for the
    group.
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
        """Read all parts one after another, convert them, and copy the result into `target`, a tensor in the
        shape of the parameter. Needs the memory of the tensor and of its parts in addition to `target`."""

        def read(entry: StoredTensor) -> torch.Tensor:
            part = torch.empty(entry.shape, dtype=target.dtype)
            entry.read_into(part)
            return part

        converted = _run_hf_converter(
            self.converter,
            self.module,
            self.layer,
            [(pattern, read(entry)) for pattern, entry in self.stored_parts],
        )
        target.detach().copy_(converted[self.name])


def map_hf_weights(module: nn.Module, stored: Mapping[str, StoredTensor]) -> dict[str, WeightSource]:
    """Return the sources of a Hugging Face module's tensors according to its own tables, by tensor name. {}
    for any other module."""
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
    sources, state = dict[str, WeightSource](), module.state_dict()
    layers: dict[str, list[tuple[str, StoredTensor]]] = {}
    for name in sorted(stored, key=loading.dot_natural_key):  # experts by number
        target_name, pattern = loading.rename_source_key(
            name, renamings, converters, module.base_model_prefix, state
        )
        if pattern is None:
            sources[target_name] = stored[name]
        else:
            layers.setdefault(target_name, []).append((pattern, stored[name]))
    for layer, parts in layers.items():
        sources |= _converted_tensors(by_pattern[parts[0][0]], module, layer, parts)
    return sources


def _converted_tensors(
    converter: Any, module: nn.Module, layer: str, parts: Sequence[tuple[str, StoredTensor]]
) -> dict[str, WeightSource]:
    """Return the tensors that the converter computes from these parts; {} if it does not accept them."""
    shapes = [(pattern, torch.empty(entry.shape, device="meta")) for pattern, entry in parts]
    try:
        converted = _run_hf_converter(converter, module, layer, shapes)
    except Exception:
        return {}  # some experts of a layer are missing, or already joined
    return {
        name: ConvertedTensor(name, layer, tuple(parts), tuple(t.shape), converter, module)
        for name, t in converted.items()
    }


def _run_hf_converter(
    converter: Any, module: Any, layer: str, parts: Sequence[tuple[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Run one of Hugging Face's converters on (name pattern, tensor) pairs."""
    converter = copy.deepcopy(converter)
    for number, (pattern, tensor) in enumerate(parts):
        converter.add_tensor(layer, str(number), pattern, tensor)
    converted = converter.convert(layer, model=module, config=module.config)
    return {name: t[0] if isinstance(t, list) else t for name, t in converted.items()}
