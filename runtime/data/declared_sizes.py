"""Reads the user's `sizes(i)`, which gives a sample's metadata before it is loaded, for schedules and
statistics.

    def sizes(i):
        return {"input_ids": 57, "pixel_values": 2}

Each key is an input that sample i has. Each number is the one extent of it that differs between samples: its
length, or its rows. An input with several such extents gives its shape, with or without the dim of the
samples. Inputs without such an extent may be left out; an optional input is left out only if the sample lacks
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from secc.runtime.errors import UserError
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.schema import Input, Symbol
from secc.runtime.plan.step_program import SampleMeta, Schedule

_SIZES_REMEDY = (
    "let sizes(i) return {key: its length or rows} for each input that sample i has, "
    "or take sizes() out of the model file"
)


class DeclaredSizes:
    """Turns the results of `sizes(i)` into sample metadata, for a model with these symbols and inputs."""

    def __init__(self, user: UserModel, symbols: Iterable[Symbol], inputs: Iterable[Input]) -> None:
        self.user, self._symbols = user, {s.name: s for s in symbols}
        self._inputs = {i.key: i for i in inputs}
        self._sizes_line = user.function_source_line("sizes")

    def sample_metadata(self, index: int) -> SampleMeta:
        """Return the metadata of dataset sample `index`. Raises UserError if a size is missing or sizes
        contradict each other."""
        declared = self.user.declared_sizes(index) or {}
        pattern = frozenset(key for key in declared if key in self._inputs and self._inputs[key].optional)
        sizes = {"B": 1} if "B" in self._symbols else {}
        for key, value in declared.items():
            if key not in self._inputs:
                inputs = ", ".join(sorted(self._inputs))
                raise self._sizes_error(index, f"has the key {key!r}; expected inputs of the model: {inputs}")
            for name, size in self._read_symbols(index, self._inputs[key], value):
                if sizes.setdefault(name, size) != size:
                    raise self._sizes_error(
                        index, f"gives {key!r} {size} where another input has {sizes[name]}"
                    )
        for name, symbol in self._symbols.items():
            if name not in sizes:
                if symbol.key in self._inputs and (
                    symbol.key in pattern or not self._inputs[symbol.key].optional
                ):
                    raise self._sizes_error(index, f"does not say how large {symbol.key!r} is")
                sizes[name] = 0 if symbol.key else 1
        return SampleMeta(index, pattern, {name: sizes[name] for name in self._symbols})

    def check_sample(self, loaded: SampleMeta, declared: SampleMeta) -> None:
        """Raise UserError if the metadata of a loaded sample differs from what `sizes` declared."""
        if loaded == declared:
            return
        if loaded.pattern != declared.pattern:
            loaded_inputs, declared_inputs = (
                sorted(loaded.pattern) or "no optional inputs",
                sorted(declared.pattern) or "none",
            )
            raise self._sizes_error(
                loaded.id, f"says that the sample has {declared_inputs}, but it has {loaded_inputs}"
            )
        name = next(n for n, size in loaded.sizes.items() if declared.sizes[n] != size)
        key = self._symbols[name].key
        raise self._sizes_error(
            loaded.id, f"says that {key!r} is {declared.sizes[name]} large, but it is {loaded.sizes[name]}"
        )

    def _read_symbols(self, index: int, model_input: Input, value: Any) -> Iterable[tuple[str, int]]:
        """Return the (symbol, size) pairs that the entry of one input gives."""
        varying_dims = [dim for dim in model_input.dims if dim in self._symbols and dim != "B"]
        dims = ", ".join(model_input.dims)
        if isinstance(value, int):
            if len(set(varying_dims)) > 1:
                raise self._sizes_error(
                    index,
                    f"gives one number for {model_input.key!r}; expected the dims [{dims}]",
                )
            return [(varying_dims[0], value)] if varying_dims else []
        if not isinstance(value, Sequence) or not all(isinstance(n, int) for n in value):
            raise self._sizes_error(
                index, f"gives {value!r} for {model_input.key!r}; expected a number or a shape"
            )
        shape = (
            (1, *value)
            if model_input.dims[:1] == ("B",) and len(value) == len(model_input.dims) - 1
            else tuple(value)
        )
        if len(shape) != len(model_input.dims):
            raise self._sizes_error(
                index,
                f"gives the shape {list(value)} for {model_input.key!r}, which has the dims [{dims}]",
            )
        return [(dim, n) for dim, n in zip(model_input.dims, shape, strict=True) if dim in self._symbols]

    def _sizes_error(self, index: int, what: str) -> UserError:
        return UserError(f"sizes({index}) {what}", self._sizes_line, _SIZES_REMEDY)


def positions_by_rank(schedule: Schedule, count: int) -> list[tuple[int, ...]]:
    """Choose the positions of a batch of `count` samples that each rank loads first.

    A position goes to one of the ranks that train it, the one with the fewest so far, so that few samples are
    loaded twice.
    """
    trained: list[set[int]] = [set() for _ in range(count)]
    for rank, program in enumerate(schedule.programs):
        for instruction in program:
            if instruction.kind == "F":
                for position in schedule.micro_batches[instruction.section][instruction.micro].samples:
                    trained[position].add(rank)
    shares: list[list[int]] = [[] for _ in schedule.programs]
    for position, ranks in enumerate(trained):
        least_loaded = min(ranks or range(len(shares)), key=lambda r: (len(shares[r]), r))
        shares[least_loaded].append(position)
    return [tuple(share) for share in shares]
