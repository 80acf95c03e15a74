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


def test_a_few_batches_have_samples_of_all_sizes_in_equal_parts() -> None:
    found = graph([])
    texts = [(TEXT, {"B": 1, "S": 7 * k % 100, "n": 0}) for k in range(100)]
    found.attributes[sample_sizes.SAMPLES_ATTRIBUTE] = sample_sizes.samples_attr(["B", "S", "n"], texts)

    def parts(count: int, batches: int) -> list[int]:
        drawn = sample_sizes.draw_batches(found, count, batches)
        assert [len(batch) for batch in drawn] == [count] * batches
        return sorted(s.sizes["S"] // 5 for batch in drawn for s in batch)

    assert parts(10, 2) == list(range(20))  # one of each five, the largest included
    assert parts(60, 2) == sorted(
        [k // 5 for k in range(100)] + list(range(20))
    )  # all, then one of each five


def test_plans_are_compared_on_few_large_batches_or_several_small_ones() -> None:
    batches = {count: sample_sizes.draw_search_batches(graph([]), count) for count in (32, 512, 1024, 4096)}
    assert {count: len(drawn) for count, drawn in batches.items()} == {32: 4, 512: 4, 1024: 2, 4096: 1}
