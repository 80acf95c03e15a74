"""Layers of small Hugging Face models, with the arguments of their calls."""

from __future__ import annotations

from typing import Any

import torch
import transformers as T
from torch import nn

from secc.runtime.sections.recompute import recompute_units


def first_layer(config: Any, length: int = 6) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Returns (the first layer of a model, arguments and keyword arguments of its call on `length`
    positions)."""
    torch.manual_seed(0)
    model = T.AutoModelForCausalLM.from_config(config).train()
    first, calls = recompute_units(model)[0], list[tuple[Any, Any]]()
    first.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    model(input_ids=torch.randint(0, 60, (2, length)), use_cache=False)
    first._forward_pre_hooks.clear()
    return first, *calls[0]
