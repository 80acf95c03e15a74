"""Sizes of the dataset's samples in the IR. They show the spread, which means leave out.

The graph's attribute `samples` has the symbols' names, such as `B S n`, then a text for each pattern: its
optional keys and the sizes of one sample after the other, such as `pixel_values | 1,80,2 1,64,1`. Where more
samples are known than are listed, `largest` has, in the same form, the largest samples that the list leaves
out; memory must have room for them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from xdsl.dialects.builtin import ArrayAttr, StringAttr

from secc.ir.dialect.ops import GraphOp, strings_attr
from secc.runtime.plan.step_program import SampleMeta

SAMPLES_ATTRIBUTE = "samples"  # of a graph
LARGEST_ATTRIBUTE = "largest"  # of a graph
MAX_LISTED_SAMPLES = 1024  # that a graph lists
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


def draw_batches(graph: GraphOp, count: int, batches: int) -> list[tuple[SampleMeta, ...]]:
    """Draws `batches` batches of `count` samples with a fixed seed. Each listed sample occurs once before any
    occurs again; [] where the graph lists none."""
    known = _read_samples(graph, SAMPLES_ATTRIBUTE)
    order: list[tuple[frozenset[str], SampleSizes]] = []
    rng = random.Random(BATCH_SEED)
    while known and len(order) < batches * count:
        rng.shuffle(known)
        order += known
    some = (order[i * count : (i + 1) * count] for i in range(batches if order else 0))
    return [
        tuple(SampleMeta(i, pattern, sizes) for i, (pattern, sizes) in enumerate(batch)) for batch in some
    ]


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
