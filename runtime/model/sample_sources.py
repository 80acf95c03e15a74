"""Where samples come from: what `dataset()` returns, or each entry of `datasets()`.

A map-style source has numbered samples. A stream is anything that can be iterated: torch's IterableDataset,
`datasets.IterableDataset`, a WebDataset, a loader of single samples, a generator. Sources of a mixture have
parts: whole numbers, so that every machine draws the same mixture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from torch.utils.data import DataLoader, Dataset

from secc.runtime.errors import UserError
from secc.runtime.host.hidden_ranks import hidden_ranks

STREAM_IDS = 1 << 40  # ids that a stream takes up among the sources of a mixture
MAX_PARTS = 10_000  # in all, of the sources of a mixture
_EXACT_DENOMINATOR = 1000  # of shares that are kept exactly

GuardedCall = Callable[[str, Callable[[], Any]], Any]  # `UserModel.call_guarded`


@dataclass(frozen=True)
class SampleSource:
    """A source of samples. `expression` is how the user's file calls it. `parts` of its samples are in each
    block of a mixture. Its samples have the ids from `first_id` on. `reopen` calls the user's function once
    more."""

    name: str
    expression: str
    parts: int
    dataset: Any
    first_id: int
    place: str
    guard: GuardedCall
    reopen: Callable[[], Any]
    _readers: list[None] = field(default_factory=list[None], compare=False, repr=False)

    def open_stream(self) -> Any:
        """Returns a stream that nothing was read from: the one at hand, and for each further reader what
        calling the user's function once more gives."""
        self._readers.append(None)
        return self.dataset if len(self._readers) == 1 else self.reopen()

    @property
    def is_stream(self) -> bool:
        """Whether samples can only be read one after another."""
        return not is_map_style(self.dataset)

    @property
    def length(self) -> int | None:
        """The number of samples, None for a stream."""
        if self.is_stream:
            return None
        return int(self.guard(f"len({self.expression})", lambda: len(self.dataset)))

    @property
    def declared_length(self) -> int | None:
        """What a stream's `__len__` says; None if it has none."""
        if not hasattr(type(self.dataset), "__len__"):
            return None
        try:
            with hidden_ranks():
                return len(self.dataset)
        except (TypeError, NotImplementedError):
            return None

    def describe(self, total_parts: int) -> str:
        """Returns what a checkpoint records of the source."""
        what = "a stream" if self.is_stream else f"{self.length} samples"
        return f"{self.name}: {self.parts} of {total_parts} from {what}" if self.name else what


def is_map_style(dataset: Any) -> bool:
    """Whether samples can be asked for by number. Libraries for streams may offer that as well, as MosaicML's
    StreamingDataset does; torch's IterableDataset inherits a `__getitem__` that only raises."""
    getitem = getattr(type(dataset), "__getitem__", None)
    return getitem not in (None, Dataset.__getitem__) and hasattr(dataset, "__len__")


def check_source(dataset: Any, expression: str, place: str, guard: GuardedCall) -> Any:
    """Returns `dataset`, what the user's file gives as `expression`. Raises UserError if no samples can come
    from it."""
    if isinstance(dataset, Mapping):
        raise UserError(
            f"{expression} returns {describe_type(dataset)}, not a map-style dataset",
            place,
            _mapping_remedy(dataset),
        )
    if isinstance(dataset, DataLoader) and dataset.batch_size is not None:
        raise UserError(
            f"{expression} returns a {type(dataset).__name__} of batches; expected single samples",
            place,
            "return its dataset, or give it batch_size=None: secc makes the batches",
        )
    if is_map_style(dataset):
        if guard(f"len({expression})", lambda: len(dataset)) == 0:
            raise UserError(f"{expression} is empty", place, "return a dataset with at least one sample")
        return dataset
    if isinstance(dataset, str | bytes) or not (
        hasattr(type(dataset), "__iter__") or callable(getattr(dataset, "__next__", None))
    ):
        raise UserError(
            f"{expression} returns {describe_type(dataset)}, neither a map-style dataset nor a stream",
            place,
            "give it __len__ and __getitem__, or __iter__",
        )
    return dataset


def _mapping_remedy(dataset: Mapping[Any, Any]) -> str:
    """Says what to return in place of a dict of datasets, such as Hugging Face's DatasetDict."""
    splits = [name for name in dataset if isinstance(name, str)]
    if not splits:
        return "return a dataset"
    chosen = "train" if "train" in splits else splits[0]
    return (
        f"return one split, such as ds[{chosen!r}], or define datasets() that returns"
        " {name: (weight, dataset)} to mix several"
    )


def mixture_sources(
    given: Any, place: str, guard: GuardedCall, reopen: Callable[[], Any]
) -> tuple[SampleSource, ...]:
    """Returns the sources of what `datasets()` gives: {name: (weight, dataset)}. Raises UserError if it is
    anything else."""
    if not isinstance(given, Mapping) or not given:
        what = "an empty dict" if isinstance(given, Mapping) else describe_type(given)
        raise UserError(f"datasets() returns {what}", place, "return {name: (weight, dataset)}")
    weights: list[Fraction] = []
    for name, entry in given.items():
        if not isinstance(name, str) or not name:
            raise UserError(f"datasets() has the key {name!r}", place, "name each source by a text")
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise UserError(
                f"datasets()[{name!r}] is {describe_type(entry)}", place, "give (weight, dataset)"
            )
        weights.append(_read_weight(entry[0], name, place))
    sources: list[SampleSource] = []
    first_id = 0
    for (name, (_, dataset)), parts in zip(given.items(), split_parts(weights), strict=True):
        expression = f"datasets()[{name!r}][1]"
        if not parts:
            raise UserError(
                f"the weight of {name!r} is less than 1/{MAX_PARTS} of all weights",
                place,
                "give it a larger weight, or leave it out",
            )
        check_source(dataset, expression, place, guard)

        def reopen_one(name: str = name) -> Any:
            return reopen()[name][1]

        source = SampleSource(name, expression, parts, dataset, first_id, place, guard, reopen_one)
        sources.append(source)
        first_id += source.length or STREAM_IDS
    return tuple(sources)


def _read_weight(weight: Any, name: str, place: str) -> Fraction:
    if isinstance(weight, bool) or not isinstance(weight, int | float | Fraction):
        raise UserError(f"the weight of {name!r} is {describe_type(weight)}", place, "give a positive number")
    if not math.isfinite(weight) or weight <= 0:
        raise UserError(f"the weight of {name!r} is {weight}", place, "give a positive number")
    return Fraction(weight)


def split_parts(weights: Sequence[Fraction]) -> list[int]:
    """Returns whole numbers in the ratio of `weights`, at most MAX_PARTS in all, with 1 as their largest
    common divisor.

    Shares that are fractions of small numbers are exact; others are rounded by largest remainders, so that
    each is off by less than 1 / MAX_PARTS.
    """
    shares = [w / sum(weights) for w in weights]
    near = [s.limit_denominator(_EXACT_DENOMINATOR) for s in shares]
    total = math.lcm(*(s.denominator for s in near))
    is_near = all(abs(a - b) < Fraction(1, 10**6) for a, b in zip(near, shares, strict=True))
    if is_near and sum(near) == 1 and total <= MAX_PARTS:
        parts = [int(s * total) for s in near]
    else:
        exact = [s * MAX_PARTS for s in shares]
        parts = [int(e) for e in exact]
        by_remainder = sorted(range(len(parts)), key=lambda k: (parts[k] - exact[k], k))
        for k in by_remainder[: MAX_PARTS - sum(parts)]:
            parts[k] += 1
    divisor = math.gcd(*parts)
    return [p // divisor for p in parts]


def find_source(sources: Sequence[SampleSource], sample_id: int) -> SampleSource:
    """Returns the source of the sample with this id."""
    return next(s for s in reversed(sources) if s.first_id <= sample_id)


def describe_type(value: Any) -> str:
    """Returns what kind of object a value is, in words."""
    return "None" if value is None else f"an object of type {type(value).__name__}"
