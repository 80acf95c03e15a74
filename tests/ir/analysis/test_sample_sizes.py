"""Sizes of samples in the IR: an even selection to draw batches from, and the largest ones for memory."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from secc.alloc.problem.candidate_memory import sample_activation_bytes
from secc.alloc.problem.workload import build_workload
from secc.cluster import parse_cluster
from secc.ir.analysis import sample_sizes
from secc.ir.dialect.ops import GraphOp, graph_of
from secc.ir.text_io import module_text

VLM = Path(__file__).parents[2] / "passes" / "allocate_vlm.mlir"
IMAGE, TEXT = frozenset({"pixel_values"}), frozenset[str]()


@given(
    st.lists(
        st.tuples(st.sampled_from([IMAGE, TEXT]), st.integers(1, 50), st.integers(0, 50)),
        min_size=1,
        max_size=60,
    ),
    st.integers(1, 20),
)
def test_the_listed_samples_include_the_largest_of_each_pattern(
    drawn: list[tuple[frozenset[str], int, int]], most: int
) -> None:
    known = [(pattern, {"S": s, "n": n}) for pattern, s, n in drawn]
    before, sample_sizes.MAX_LISTED_SAMPLES = sample_sizes.MAX_LISTED_SAMPLES, most
    try:
        listed, larger = sample_sizes.select_listed(known)
    finally:
        sample_sizes.MAX_LISTED_SAMPLES = before
    assert len(listed) == min(most, len(known)) and not {*listed} & {*larger} and len(larger) <= 4
    for pattern, sizes in known:
        for name, size in sizes.items():
            assert any(known[k][0] == pattern and known[k][1][name] >= size for k in [*listed, *larger])


def graph(larger: list[tuple[frozenset[str], dict[str, int]]]) -> GraphOp:
    """The example, of whose samples some are known but not listed."""
    module = module_text.parse_module(
        VLM.read_text().replace('optional ["pixel_values"]', 'optional ["pixel_values"] widths "own"')
    )
    found = graph_of(module)
    listed = [(IMAGE, {"B": 1, "S": 40, "n": 1}), (TEXT, {"B": 1, "S": 20, "n": 0})]
    found.attributes[sample_sizes.SAMPLES_ATTRIBUTE] = sample_sizes.samples_attr(["B", "S", "n"], listed)
    found.attributes[sample_sizes.LARGEST_ATTRIBUTE] = sample_sizes.samples_attr(["B", "S", "n"], larger)
    return graph_of(module_text.parse_module(module_text.print_module(module)))


def test_memory_has_room_for_samples_that_are_not_drawn() -> None:
    def most(larger: list[tuple[frozenset[str], dict[str, int]]]) -> int:
        work = build_workload(graph(larger), parse_cluster("1x4xcpu"), 8)
        return max(max(kept) for _, kept in sample_activation_bytes(work, work.loads["lm"], "none"))

    assert most([(TEXT, {"B": 1, "S": 400, "n": 0})]) > 9 * most([])
    drawn = [
        s
        for batch in sample_sizes.draw_batches(graph([(TEXT, {"B": 1, "S": 400, "n": 0})]), 8, 4)
        for s in batch
    ]
    assert {s.sizes["S"] for s in drawn} == {20, 40}
