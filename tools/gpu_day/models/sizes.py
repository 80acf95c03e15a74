"""The size that the model files of this folder have: `GPU_DAY_SIZE` in the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import transformers as T
from torch import nn
from transformers.initialization import no_init_weights

Choice = TypeVar("Choice")
SIZE = os.environ.get("GPU_DAY_SIZE", "small")


def choose(choices: Mapping[str, Choice]) -> Choice:
    """Returns the choice for the size asked for."""
    return choices[SIZE]


DTYPE = choose({"small": torch.float32, "train": torch.float32, "layers": torch.bfloat16})
TOKENS = choose({"small": 24, "train": 128, "layers": 2048})
VOCABULARY = choose({"small": 200, "train": 32_000, "layers": 151_936})


def build_model(make: Callable[[], nn.Module]) -> nn.Module:
    """Builds a model in this size's dtype. Large ones are made without values and then filled with slices of
    one piece of noise, since drawing billions of numbers takes minutes on one core."""
    if SIZE == "small":
        return make()
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(DTYPE)
        with no_init_weights():
            made = make()
    finally:
        torch.set_default_dtype(default)
    noise = 0.02 * torch.randn(1 << 24, generator=torch.Generator().manual_seed(0), device="cpu").to(DTYPE)
    place = 0
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            for part in parameter.view(-1).split(len(noise) // 2):
                part.copy_(noise[place : place + len(part)])
                place = (place + 7919 * 101) % (len(noise) // 2)
    return made


def decoder(config: type, layers: int, hidden: int, heads: int, ffn: int, **more: Any) -> nn.Module:
    """A causal language model from its configuration class, with random weights."""
    made = config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        intermediate_size=ffn,
        vocab_size=VOCABULARY,
        max_position_embeddings=2 * TOKENS,
        use_cache=False,
        **more,
    )
    return T.AutoModelForCausalLM.from_config(made)


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random samples by index, of uneven lengths: `make(generator, length)`."""

    def __init__(self, make: Callable[[torch.Generator, int], dict[str, torch.Tensor]]) -> None:
        self._make = make

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        length = TOKENS - (i * 37) % (TOKENS // 4)
        return self._make(torch.Generator().manual_seed(i), length)


def learnable_tokens(generator: torch.Generator, length: int, below: int = VOCABULARY) -> torch.Tensor:
    """Tokens [length] that a model can learn to predict: an arithmetic progression from a random start."""
    start, step = (int(torch.randint(1, 50, (), generator=generator)) for _ in range(2))
    return (start + step * torch.arange(length)) % below
