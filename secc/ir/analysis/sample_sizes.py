"""Sizes of the dataset's samples in the IR, which are what means leave out: the spread.

The graph's attribute `samples` has the symbols' names, such as `B S n`, then a text for each pattern: its
optional keys and the sizes of one sample after the other, such as `pixel_values | 1,80,2 1,64,1`. Where more
are known than are listed, `largest` has, in the same form, those that memory must have room for and the list
leaves out.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from xdsl.dialects.builtin import ArrayAttr, StringAttr

from secc.ir.dialect.ops import GraphOp, texts
from secc.runtime.plan.step_program import SampleMeta

ATTRIBUTE = "samples"  # of a graph
LARGEST = "largest"  # of a graph
MOST = 1024  # that a graph lists
KINDS = ("rows", "width")
SEED = 0

Sizes = Mapping[str, int]


def attribute(
    symbols: Sequence[str], samples: Iterable[tuple[frozenset[str], Sizes]]
) -> ArrayAttr[StringAttr]:
    """The attribute for samples given by pattern and sizes."""
    lines: dict[frozenset[str], list[str]] = {}
    for pattern, sizes in samples:
        lines.setdefault(pattern, []).append(",".join(str(sizes[name]) for name in symbols))
    by_pattern = (
        " | ".join((" ".join(sorted(pattern)), " ".join(found))) for pattern, found in lines.items()
    )
    return texts([" ".join(symbols), *by_pattern])


def taken(known: Sequence[tuple[frozenset[str], Sizes]]) -> tuple[list[int], list[int]]:
    """The places of `MOST` samples, evenly taken from those that are known, and of others with the most of a
    size in their pattern."""
    if len(known) <= MOST:
        return list(range(len(known))), []
    even = [k * len(known) // MOST for k in range(MOST)]
    most: dict[tuple[frozenset[str], str], int] = {}
    for k, (pattern, sizes) in enumerate(known):
        for name, size in sizes.items():
            if size > known[most.setdefault((pattern, name), k)][1][name]:
                most[pattern, name] = k
    return even, sorted({*most.values()} - {*even})


def drawn(graph: GraphOp, count: int, batches: int) -> list[tuple[SampleMeta, ...]]:
    """Batches of `count` samples, drawn with a fixed seed: each of the graph's once before any is there
    again, none where it lists none."""
    known = _known(graph, ATTRIBUTE)
    order: list[tuple[frozenset[str], Sizes]] = []
    rng = random.Random(SEED)
    while known and len(order) < batches * count:
        rng.shuffle(known)
        order += known
    some = (order[i * count : (i + 1) * count] for i in range(batches if order else 0))
    return [
        tuple(SampleMeta(i, pattern, sizes) for i, (pattern, sizes) in enumerate(batch)) for batch in some
    ]


def all_known(graph: GraphOp) -> list[tuple[frozenset[str], Sizes]]:
    """Patterns and sizes of the samples that memory must have room for: those that the graph lists, and
    larger ones that it does not."""
    return _known(graph, ATTRIBUTE) + _known(graph, LARGEST)


def _known(graph: GraphOp, attribute: str) -> list[tuple[frozenset[str], Sizes]]:
    found = graph.attributes.get(attribute)
    if not isinstance(found, ArrayAttr):
        return []
    names, *lines = [line.data for line in found if isinstance(line, StringAttr)]
    return [sample for line in lines for sample in _parse(line, names.split())]


def _parse(line: str, names: Sequence[str]) -> list[tuple[frozenset[str], Sizes]]:
    keys, _, samples = line.partition("|")
    pattern = frozenset(keys.split())
    return [(pattern, dict(zip(names, map(int, sizes.split(",")), strict=True))) for sizes in samples.split()]
