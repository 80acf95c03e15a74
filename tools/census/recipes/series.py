"""Series of numbers over time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tools.census.batches import Batching, Draw, noise
from tools.census.recipes.recipe import Recipe, config_value, drawn
from tools.zoo_models.entry import Sample


def series(names: set[str], config: Any) -> Iterator[Recipe]:
    """A past of one length, with what else the names ask for."""
    if "past_values" not in names:
        return
    length = int(config_value(config, "context_length", default=32))
    inputs = int(config_value(config, "num_input_channels", default=1))
    if "past_time_features" in names:
        yield Recipe("series with features of time", _forecast(config), Batching())
    yield Recipe("series", drawn("past_values", length, inputs), Batching())
    if {"past_values_padding", "freq"} <= names:
        steps = 2 * int(config_value(config, "patch_length", default=32))

        def padded_series(g: torch.Generator) -> Sample:
            padding = torch.zeros(steps, dtype=torch.long)
            kind = torch.randint(0, 3, (1,), generator=g)
            return {"past_values": noise(g, steps), "past_values_padding": padding, "freq": kind}

        yield Recipe("series of three frequencies", padded_series, Batching())


def _forecast(config: Any) -> Draw:
    """A series and what follows it, with features of each time."""
    length = config.context_length + max(config.lags_sequence)

    def series(g: torch.Generator) -> Sample:
        sample: Sample = {}
        for name, count in (("past", length), ("future", config.prediction_length)):
            sample[f"{name}_values"] = noise(g, count)
            sample[f"{name}_time_features"] = noise(g, count, config.num_time_features)
        return sample | {"past_observed_mask": torch.ones(length)}

    return series
