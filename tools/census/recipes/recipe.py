"""A recipe: one way to draw samples for a model and to join them, and what recipes ask of configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.census.batches import Batching, Draw, noise

FIXED = (16, 17)  # texts of one length
END = 2  # the token behind a text


@dataclass(frozen=True)
class Recipe:
    """One way to draw samples; `name` says which for the table."""

    name: str
    draw: Draw
    batching: Batching


class RecipeError(Exception):
    """No recipe trains in plain PyTorch; the message is the first one's error."""


def config_value(config: Any, *names: str, default: Any = None) -> Any:
    """The first of `names` that the configuration or one of its parts has as a number."""
    parts = [config, *(v for v in vars(config).values() if hasattr(v, "model_type"))]
    parts += [v for p in parts[1:] for v in vars(p).values() if hasattr(v, "model_type")]
    for name in names:
        for part in parts:
            value = getattr(part, name, None) if name in vars(part) or hasattr(type(part), name) else None
            if isinstance(value, list | tuple) and value:
                value = value[0]
            if isinstance(value, int | float) and not isinstance(value, bool):
                return value
    return default


def drawn(key: str, *shape: int) -> Draw:
    """Samples of one input of normal random numbers."""
    return lambda g: {key: noise(g, *shape)}
