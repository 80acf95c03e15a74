"""Average statistics of a dataset's samples: the share of each input pattern and the mean sizes of its
samples.

The allocation works with these numbers. They come from the drawn samples; from `sizes(i)` of many more
samples if the model file has it; or from a file, for a dataset that is not on this machine or that few
samples do not represent:

    {"patterns": [{"when": ["pixel_values"], "share": 0.4, "sizes": {"S": 812.5, "n_pixel_values": 2.0}}, …]}

`when` is a pattern, `share` its share of the samples, `sizes` the mean of each symbol. `secc stats` writes
such a file, with the meaning of the symbols.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from secc.errors import UserError
from secc.frontend.dataset.input_symbols import ModelInputs
from secc.frontend.dataset.survey import DatasetSurvey
from secc.runtime.data.declared_sizes import DeclaredSizes
from secc.runtime.host.hidden_ranks import hidden_ranks
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan import json_shapes as shapes
from secc.runtime.plan.schema import is_tensor_label
from secc.runtime.plan.step_program import SampleMeta

MAX_DECLARED_SAMPLES = 4096  # calls of sizes(i) for statistics
# Calls to find the largest samples, the time of a call from which on these are not worth it, and how many of
# them are timed.
MAX_COMPARED_SAMPLES = 1 << 17
SLOW_CALL_S = 0.0003
TIMED_CALLS = 64
_STATISTICS_REMEDY = "write the file with `secc stats MODEL.py -o FILE` and change the numbers in it"
_MAX_BYTES, _MAX_SIZE = 1 << 26, 1e15
_STATISTICS = shapes.record(
    {
        "patterns": shapes.items_of(
            shapes.record(
                {
                    "when": shapes.items_of(shapes.text),
                    "share": shapes.number(0, _MAX_SIZE),
                    "sizes": shapes.mapping_of(shapes.number(0, _MAX_SIZE)),
                }
            )
        )
    },
    others=shapes.plain_data,
)


@dataclass(frozen=True)
class PatternMean:
    """Share and mean symbol values of the samples of one pattern."""

    when: frozenset[str]
    share: float
    sizes: Mapping[str, float]


def pattern_means(inputs: ModelInputs) -> list[PatternMean]:
    """Returns the patterns, most frequent first: those of a statistics file if one was given, else those
    of the known samples."""
    if inputs.given_statistics:
        return [PatternMean(when, share, dict(sizes)) for when, share, sizes in inputs.given_statistics]
    means: list[PatternMean] = []
    for pattern, count in Counter(inputs.sample_patterns).most_common():
        sizes = [s for s, p in zip(inputs.sample_sizes, inputs.sample_patterns, strict=True) if p == pattern]
        mean = {s.name: sum(one[s.name] for one in sizes) / len(sizes) for s in inputs.symbols}
        means.append(PatternMean(pattern, count / len(inputs.sample_patterns), mean))
    return means


def apply_declared_sizes(
    user: UserModel,
    survey: DatasetSurvey,
    inputs: ModelInputs,
    find_largest: Callable[[], list[int]] | None = None,
) -> ModelInputs:
    """Replaces sizes and patterns by those of up to MAX_DECLARED_SAMPLES samples that the model file's
    `sizes(i)` declares.

    find_largest: returns `find_largest_samples(user)`, where that has been started before. Raises UserError
    if `sizes(i)` is wrong about a drawn sample.
    """
    if not user.defines("sizes") or any(
        is_tensor_label(s.key) for s in inputs.symbols
    ):  # what only a recording counts cannot be declared
        return inputs
    declared = DeclaredSizes(user, inputs.symbols, inputs.inputs)
    with hidden_ranks():  # once: it takes longer than most calls of sizes(i)
        for d, sizes in zip(survey.drawn_samples, inputs.sample_sizes, strict=True):
            declared.check_sample(SampleMeta(d.index, d.pattern, sizes), declared.sample_metadata(d.index))
        length = len(user.dataset())
        count = min(length, MAX_DECLARED_SAMPLES)
        metas = [declared.sample_metadata(k * length // count) for k in range(count)]
        indices = find_largest_samples(user) if find_largest is None else find_largest()
        largest = list(map(declared.sample_metadata, indices))
    known = {s.id for s in metas}
    return dataclasses.replace(
        inputs,
        sample_sizes=tuple(s.sizes for s in metas),
        sample_patterns=tuple(s.pattern for s in metas),
        largest_samples=tuple((s.pattern, s.sizes) for s in largest if s.id not in known),
    )


def declares_many_samples(user: UserModel) -> bool:
    """Whether `sizes(i)` declares more samples than the statistics are made of."""
    return user.defines("sizes") and (user.sample_count or 0) > MAX_DECLARED_SAMPLES


def find_largest_samples(user: UserModel) -> list[int]:
    """Returns the indices of the samples with the largest declared size of each key, among those with the
    same keys, in up to MAX_COMPARED_SAMPLES samples of the dataset; [] if calls of `sizes(i)` are slow, or if
    the statistics are made of all samples."""
    if not declares_many_samples(user):
        return []
    length = len(user.dataset())
    count = min(length, MAX_COMPARED_SAMPLES)
    indices = [k * length // count for k in range(count)]
    most: dict[tuple[frozenset[str], str], tuple[int, int]] = {}  # of keys and key: size and index
    with hidden_ranks():
        if _median_call_s(user, indices[:TIMED_CALLS]) >= SLOW_CALL_S:
            return []
        for index in indices:
            declared = user.declared_sizes(index) or {}
            keys = frozenset(declared)
            for key, value in declared.items():
                size = prod(value) if isinstance(value, tuple | list) else value
                if isinstance(size, int) and size > most.get((keys, key), (-1, 0))[0]:
                    most[keys, key] = size, index
    return sorted({index for _, index in most.values()})


def _median_call_s(user: UserModel, indices: Iterable[int]) -> float:
    """Returns the seconds that a call of `sizes(i)` takes. Of a busy machine, which stops some calls for
    long, nothing is seen in the median."""
    seconds = list[float]()
    for index in indices:
        start = time.perf_counter()
        user.declared_sizes(index)
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def load_statistics(path: Path) -> list[dict[str, Any]]:
    """Returns the patterns of a file of statistics. Raises UserError if it cannot be read."""
    try:
        return _STATISTICS(shapes.read_json(path, _MAX_BYTES))["patterns"]
    except OSError as error:
        raise UserError(
            f"cannot read the statistics: {error.strerror}", str(path), _STATISTICS_REMEDY
        ) from None
    except shapes.MalformedValue as error:
        raise UserError(f"not statistics of a dataset: {error}", str(path), _STATISTICS_REMEDY) from None


def read_statistics(path: Path, inputs: ModelInputs, survey: DatasetSurvey) -> ModelInputs:
    """Returns the inputs with the statistics of a file. Raises UserError if it cannot be read or does not
    fit the model."""
    given = tuple(_parse_pattern(p, inputs, str(path)) for p in load_statistics(path))
    total = sum(share for _, share, _ in given)
    if not total > 0 or len({when for when, _, _ in given}) < len(given):
        raise UserError(
            "each pattern must be there once, and the shares must not add up to 0",
            str(path),
            _STATISTICS_REMEDY,
        )
    unknown = next((when for when, _, _ in given if when not in survey.micro_batch_patterns()), None)
    if unknown is not None:
        keys = sorted(unknown) or "no optional inputs"
        message = f"the statistics have samples with {keys}, but no drawn sample has these inputs"
        raise UserError(
            message,
            str(path),
            "draw more samples (--stats-samples), or let dataset() show such samples earlier",
        )
    return dataclasses.replace(
        inputs, given_statistics=tuple((when, share / total, sizes) for when, share, sizes in given)
    )


def _parse_pattern(
    entry: dict[str, Any], inputs: ModelInputs, where: str
) -> tuple[frozenset[str], float, tuple[tuple[str, float], ...]]:
    """Parses one entry of the file."""
    when, share, sizes = (
        frozenset(entry["when"]),
        float(entry["share"]),
        {"B": 1.0} | {k: float(v) for k, v in entry["sizes"].items()},
    )
    names = [s.name for s in inputs.symbols]
    optional = {i.key for i in inputs.inputs if i.optional}
    unknown = sorted(when - optional) + sorted(sizes.keys() - set(names) - {"B"})
    if unknown:
        known = f"optional inputs are {', '.join(sorted(optional)) or 'none'}; symbols are {', '.join(names)}"
        raise UserError(f"the statistics name {unknown[0]!r}, which the model does not have", where, known)
    missing = [n for n in names if n not in sizes]
    if missing:
        keys = sorted(when) or "no optional inputs"
        message = f"the statistics of samples with {keys} lack the size {missing[0]!r}"
        raise UserError(message, where, _STATISTICS_REMEDY)
    if share < 0 or min(sizes.values()) < 0:
        raise UserError("shares and sizes cannot be negative", where, _STATISTICS_REMEDY)
    return when, share, tuple((n, sizes[n]) for n in names)


def statistics_to_json(inputs: ModelInputs) -> str:
    """Returns the text of a statistics file, with the meaning of each symbol for readers."""
    meaning = {s.name: f"{s.kind} of {s.key}, dim {s.dim}" if s.key else "samples" for s in inputs.symbols}
    patterns = [
        {
            "when": sorted(m.when),
            "share": round(m.share, 6),
            "sizes": {n: round(v, 3) for n, v in m.sizes.items()},
        }
        for m in pattern_means(inputs)
    ]
    return (
        json.dumps(
            {"symbols": meaning, "samples": len(inputs.sample_patterns), "patterns": patterns}, indent=2
        )
        + "\n"
    )
