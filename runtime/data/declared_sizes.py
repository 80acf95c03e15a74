"""What the user's `sizes(i)` says of a sample before it is loaded, as the metadata that orders and statistics
are made from.

    def sizes(i):
        return {"input_ids": 57, "pixel_values": 2}

Each key is an input that sample i has, and each number the one extent of it that differs between samples: its
length, or its rows. An input with several such extents gives its shape, with or without the dim of the
samples. Inputs that need no number of their own may be left out, optional ones only where the sample lacks
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from secc.runtime.errors import UserError
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.schema import Input, Symbol
from secc.runtime.plan.step_program import SampleMeta, Schedule

_SIZES_REMEDY = "let sizes(i) return {key: its length or rows} for each input that sample i has, or take sizes() out of the model file"


class DeclaredSizes:
    """Reads `sizes(i)` of a model with these inputs."""

    def __init__(self, user: UserModel, symbols: Iterable[Symbol], inputs: Iterable[Input]) -> None:
        self.user, self._symbols = user, {s.name: s for s in symbols}
        self._inputs = {i.key: i for i in inputs}
        self._sizes_line = user.function_source_line("sizes")

    def sample_metadata(self, index: int) -> SampleMeta:
        """The metadata of dataset sample `index`. Raises UserError for what says nothing, or contradicts
        itself."""
        said = self.user.declared_sizes(index) or {}
        pattern = frozenset(key for key in said if key in self._inputs and self._inputs[key].optional)
        sizes = {"B": 1} if "B" in self._symbols else {}
        for key, value in said.items():
            if key not in self._inputs:
                raise self._sizes_error(index, f"has the key {key!r}, which is no input of the model")
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

    def check_sample(self, found: SampleMeta, said: SampleMeta) -> None:
        """Raises UserError if a sample is not as `sizes` said."""
        if found == said:
            return
        if found.pattern != said.pattern:
            has, wrong = sorted(found.pattern) or "no optional inputs", sorted(said.pattern) or "none"
            raise self._sizes_error(found.id, f"says that the sample has {wrong}, but it has {has}")
        name = next(n for n, size in found.sizes.items() if said.sizes[n] != size)
        key = self._symbols[name].key
        raise self._sizes_error(
            found.id, f"says that {key!r} is {said.sizes[name]} large, but it is {found.sizes[name]}"
        )

    def _read_symbols(self, index: int, known: Input, value: Any) -> Iterable[tuple[str, int]]:
        """The symbols that an input's entry gives."""
        moving = [dim for dim in known.dims if dim in self._symbols and dim != "B"]
        if isinstance(value, int):
            if len(set(moving)) > 1:
                raise self._sizes_error(
                    index, f"gives one number for {known.key!r}, which has the dims [{', '.join(known.dims)}]"
                )
            return [(moving[0], value)] if moving else []
        if not isinstance(value, Sequence) or not all(isinstance(n, int) for n in value):
            raise self._sizes_error(
                index, f"gives {value!r} for {known.key!r}, which is no number and no shape"
            )
        shape = (
            (1, *value) if known.dims[:1] == ("B",) and len(value) == len(known.dims) - 1 else tuple(value)
        )
        if len(shape) != len(known.dims):
            raise self._sizes_error(
                index,
                f"gives the shape {list(value)} for {known.key!r}, which has the dims [{', '.join(known.dims)}]",
            )
        return [(dim, n) for dim, n in zip(known.dims, shape, strict=True) if dim in self._symbols]

    def _sizes_error(self, index: int, what: str) -> UserError:
        return UserError(f"sizes({index}) {what}", self._sizes_line, _SIZES_REMEDY)


def positions_by_rank(schedule: Schedule, count: int) -> list[tuple[int, ...]]:
    """For each rank, the positions of a batch of `count` samples that it is to load first: each goes to one
    of the ranks that train it."""
    trained: list[set[int]] = [set() for _ in range(count)]
    for rank, program in enumerate(schedule.programs):
        for i in program:
            if i.kind == "F":
                for position in schedule.micro_batches[i.section][i.micro].samples:
                    trained[position].add(rank)
    shares: list[list[int]] = [[] for _ in schedule.programs]
    for position, ranks in enumerate(trained):
        least = min(ranks or range(len(shares)), key=lambda r: (len(shares[r]), r))
        shares[least].append(position)
    return [tuple(share) for share in shares]
