"""Sizes of the dataset's samples in the IR. They show the spread, which means leave out.

The graph's attribute `samples` has the symbols' names, such as `B S n`, then a text for each pattern: its
optional keys and the sizes of one sample after the other, such as `pixel_values | 1,80,2 1,64,1`. Where more
samples are known than are listed, `largest` has, in the same form, the largest samples that the list leaves
out; memory must have room for them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from xdsl.dialects.builtin import ArrayAttr, StringAttr

from secc.ir.dialect.ops import GraphOp, strings_attr
from secc.runtime.plan.step_program import SampleMeta

SAMPLES_ATTRIBUTE = "samples"  # of a graph
LARGEST_ATTRIBUTE = "largest"  # of a graph
MAX_LISTED_SAMPLES = 4096  # that a graph lists
SPREAD_SAMPLES = (
    1024  # that show how the samples' times differ; few suffice, as each stands for others like it
)
MAX_SEARCH_BATCHES, MAX_SEARCH_SAMPLES = 4, 2048  # for an evaluation; large batches differ less
SHOWN_BATCH = "shown_batch"  # in a plan's solver record: which of the batches that plans are compared on
SIZE_KINDS = ("rows", "width")
BATCH_SEED = 0

SampleSizes = Mapping[str, int]


def samples_attr(
    symbols: Sequence[str], samples: Iterable[tuple[frozenset[str], SampleSizes]]
) -> ArrayAttr[StringAttr]:
    """The attribute for samples given by pattern and sizes."""
    lines: dict[frozenset[str], list[str]] = {}
    for pattern, sizes in samples:
        lines.setdefault(pattern, []).append(",".join(str(sizes[name]) for name in symbols))
    by_pattern = (
        " | ".join((" ".join(sorted(pattern)), " ".join(found))) for pattern, found in lines.items()
    )
    return strings_attr([" ".join(symbols), *by_pattern])


def select_listed(known: Sequence[tuple[frozenset[str], SampleSizes]]) -> tuple[list[int], list[int]]:
    """Chooses which samples a graph lists: indices of `MAX_LISTED_SAMPLES` evenly spaced samples, and of
    further ones with the largest value of some size in their pattern, which memory must have room for."""
    if len(known) <= MAX_LISTED_SAMPLES:
        return list(range(len(known))), []
    even = [k * len(known) // MAX_LISTED_SAMPLES for k in range(MAX_LISTED_SAMPLES)]
    most: dict[tuple[frozenset[str], str], int] = {}
    for k, (pattern, sizes) in enumerate(known):
        for name, size in sizes.items():
            if size > known[most.setdefault((pattern, name), k)][1][name]:
                most[pattern, name] = k
    return even, sorted({*most.values()} - {*even})


def draw_search_batches(graph: GraphOp, count: int) -> list[tuple[SampleMeta, ...]]:
    """Draws the batches of `count` samples that plans are compared on; [] where the graph lists none."""
    return draw_batches(graph, count, max(1, min(MAX_SEARCH_BATCHES, MAX_SEARCH_SAMPLES // count)))


def draw_batches(graph: GraphOp, count: int, batches: int) -> list[tuple[SampleMeta, ...]]:
    """Draws `batches` batches of `count` samples with a fixed seed; [] where the graph lists none.

    Each listed sample occurs once before any occurs again. The last ones, fewer than all that are listed, are
    one out of each of as many parts of the samples sorted by size. So a few batches together have the share
    of large samples that the dataset has, which decides how long their steps are: chance would leave the
    largest ones out of most small draws, and have too many of them in others.
    """
    known = _read_samples(graph, SAMPLES_ATTRIBUTE)
    order: list[tuple[frozenset[str], SampleSizes]] = []
    rng, total = random.Random(BATCH_SEED), batches * count
    while known and len(order) < total:
        if total - len(order) >= len(known):
            rng.shuffle(known)
            order += known
        else:
            some = _pick_from_each_part(known, total - len(order), rng)
            rng.shuffle(some)
            order += some
    in_batches = (order[i * count : (i + 1) * count] for i in range(batches if order else 0))
    return [
        tuple(SampleMeta(i, pattern, sizes) for i, (pattern, sizes) in enumerate(batch))
        for batch in in_batches
    ]


def _pick_from_each_part(
    known: Sequence[tuple[frozenset[str], SampleSizes]], count: int, rng: random.Random
) -> list[tuple[frozenset[str], SampleSizes]]:
    """One sample at random out of each of `count` consecutive parts of the samples sorted by pattern and
    size."""
    by_size = sorted(known, key=lambda sample: (sorted(sample[0]), sum(sample[1].values())))
    ends = [k * len(by_size) // count for k in range(count + 1)]
    return [by_size[rng.randrange(a, b)] for a, b in pairwise(ends)]


def read_all_samples(graph: GraphOp) -> list[tuple[frozenset[str], SampleSizes]]:
    """Patterns and sizes of all samples that memory must have room for: the listed ones, and larger ones that
    are kept apart."""
    return _read_samples(graph, SAMPLES_ATTRIBUTE) + _read_samples(graph, LARGEST_ATTRIBUTE)


def _read_samples(graph: GraphOp, attribute: str) -> list[tuple[frozenset[str], SampleSizes]]:
    found = graph.attributes.get(attribute)
    if not isinstance(found, ArrayAttr):
        return []
    names, *lines = [line.data for line in found if isinstance(line, StringAttr)]
    return [sample for line in lines for sample in _parse_samples(line, names.split())]


def _parse_samples(line: str, names: Sequence[str]) -> list[tuple[frozenset[str], SampleSizes]]:
    keys, _, samples = line.partition("|")
    pattern = frozenset(keys.split())
    return [(pattern, dict(zip(names, map(int, sizes.split(",")), strict=True))) for sizes in samples.split()]
