"""When the reductions of a step's gradients begin and end in modelled time, as ranks run them.

The sums of a section's gradients begin within its last backwards, bucket by bucket as these become final
(`runtime/parameters/gradient_reduction.py`), and overlap with what follows; those of one rank run one after
the other. Gathers of updated parameters pass behind the first forward of the next step
(`runtime/parameters/parameter_gathers.py`), which is assumed to take as long as that of this step; what it
does not hide is added at the end. The simulator and emulated runs share these rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class TimedReduction:
    """The reduction of the gradients that `sections` hold on `ranks`, in ns: the sum of gradients, and the
    all-gather of parameters after it. `bucket_share`: the part of the gradients that one bucket sums.
    `open_share`: the part of the gather that the next forward cannot hide."""

    sections: tuple[str, ...]
    ranks: tuple[int, ...]
    sum_ns: int
    gather_ns: int
    bucket_share: Fraction
    open_share: Fraction = Fraction(1)


def exposed_gather_ns(gather_ns: int, open_share: Fraction, forward_ns: int) -> int:
    """Ns that a gather of parameters delays the next step's first forward, which computes for `forward_ns`.

    The forward needs `open_share` of the gathered values when it starts: those outside of layers and of the
    first layer. It needs those of the last layer when it has computed all other layers, which takes at least
    1 - `open_share` of its time.
    """
    part, whole = open_share.numerator, open_share.denominator  # integers: fractions take ten times as long
    return max(part * gather_ns // whole, gather_ns - (whole - part) * forward_ns // whole)


def run_reductions(
    reductions: Iterable[TimedReduction],
    last_backwards: Mapping[str, Mapping[int, tuple[int, int]]],
    program_ends: Sequence[int],
    first_forwards: Mapping[str, Mapping[int, int]],
) -> Iterator[tuple[TimedReduction, int, int]]:
    """Yields each reduction with its start and end in ns, in the order in which ranks run them.

    last_backwards: by section and rank, start and end of the rank's last backward; of a rank without one,
    twice the time of its REDUCE instruction. program_ends: by rank. first_forwards: ns of the rank's first
    forward, by section and rank, for those that have one. Parameters of several sections are reduced at the
    end of the programs.
    """
    by_sections: dict[tuple[str, ...], list[TimedReduction]] = {}
    for reduction in reductions:
        by_sections.setdefault(reduction.sections, []).append(reduction)
    at_the_end = {rank: (end, end) for rank, end in enumerate(program_ends)}
    through = {
        sections: last_backwards[sections[0]] if len(sections) == 1 else at_the_end
        for sections in by_sections
    }
    busy_until = [0] * len(program_ends)
    for sections in sorted(
        by_sections, key=lambda s: (len(s) > 1, max(end for _, end in through[s].values()))
    ):
        forwards = first_forwards.get(sections[0], {})
        yield from _run_together(by_sections[sections], through[sections], busy_until, forwards)


def _run_together(
    reductions: Sequence[TimedReduction],
    through: Mapping[int, tuple[int, int]],
    busy_until: list[int],
    first_forwards: Mapping[int, int],
) -> Iterator[tuple[TimedReduction, int, int]]:
    """Runs the reductions of the same sections: the first bucket is ready within the last backward, the last
    one when it ends. busy_until: by rank, when its earlier reductions end; updated. Of a gather on ranks
    without a forward, only what no forward hides counts."""
    sums: list[tuple[int, int]] = []
    for r in reductions:
        share = r.bucket_share
        first_ready = max(start + int(share * (end - start)) for start, end in (through[k] for k in r.ranks))
        start = max([first_ready, *(busy_until[k] for k in r.ranks)])
        last_bucket = max(through[k][1] for k in r.ranks) + int(share * r.sum_ns)
        sums.append((start, max(start + r.sum_ns, last_bucket)))
        for k in r.ranks:
            busy_until[k] = start + r.sum_ns
    for r, (_, end) in zip(reductions, sums, strict=True):
        for k in r.ranks:
            busy_until[k] = max(busy_until[k], end)
    hidden = dict(first_forwards)  # what is left of each rank's forward to hide gathers
    for r, (start, end) in zip(reductions, sums, strict=True):
        if r.gather_ns:
            ranks = [k for k in r.ranks if k in hidden]
            forward = min((hidden[k] for k in ranks), default=r.gather_ns)
            exposed = exposed_gather_ns(r.gather_ns, r.open_share, forward)
            end = max(end, *(busy_until[k] + exposed for k in r.ranks))
            for k in r.ranks:
                busy_until[k] = end
            for k in ranks:
                hidden[k] = max(0, hidden[k] - (r.gather_ns - exposed))
        yield r, start, end
