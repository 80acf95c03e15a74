"""Certified bounds for pipelines: from in-flight limits, and from long samples, which delay their replica.

All stages of a pipeline have the same samples on the same replica; x and y are samples, one to a micro-batch.
F, B, W are the times of their forward, backward and, where backward is split, its second part at a stage; on
the last stage a sample has the work `w = F + B + W`. T is the step time. Nothing here assumes that stages
take samples in one order.

*Slots.* A stage with in-flight limit C holds a micro-batch from the start of its F to the end of its B or W,
which takes at least the *hold*: the time down to the last section that returns a gradient, the time back, and
W. So C slots on each of the D replicas are C D machines on which the holds must be done, and *sets* and
*packing* of `secc/bounds/bounds.py` apply to them. The scheduler exceeds the limit only where a consumer
needs several micro-batches at once, so this holds where no consumer does.

*Long samples.* Let x be on a replica, and A the samples with F on the last stage before that of x. Each y in
A delays x by at least `h(y)`, its shortest F at any stage: if y is before x at the first stage too, while y
runs there; else there is a stage where y comes after x and a next one where y comes before x, and while y
runs on the latter, x has left the former and not started on the latter. These times are disjoint, since those
at one stage are, and those of different stages lie between different F of x. With V the time of the F of x
before the last stage,

    F of x on the last stage starts at  t >= V + sum of h over A.                                    (1)

The last stage does only work of A before t, so up to t it is idle for at least V - sum of (w - h) over A. Let
L be the time that x still takes from t on. Then sum of h over A <= T - V - L by (1). So with r the largest (w
- h)/h of any sample the last stage of x's replica is idle for

    phi(x) = V - r (T - V - L).

The same holds backwards in time: let U be the time of the B of x on other stages, b(y) the shortest B of y at
any stage, and Z the samples with B on the last stage after that of x. From the end of that B to the end of
the step it takes at least U + sum of b over Z. From t to the end of that B the stage has the F and B of x and
of all samples in neither set. So x is delayed by S = T - V - U - F - B at most, and a sample in A, in Z, in
both or in neither takes at least h, b, h + b or F + B of that. Outside of that time the stage does at most w,
w, w or W of such a sample's work, and the W of x. So with R the largest of (w - h)/h, (w - b)/b and W/(F + B)
of any sample it is idle for

    phi'(x) = V + U - W - R S.

In a step of time T the last stage of a replica does at most T - phi, with the largest phi or phi' of its
samples. Sort samples by it. Some replica has the first; as soon as the first few are more work than the worst
k replicas can do, another one has one of these, which costs it at least the phi of the last of them. The
bound is the least T in which D replicas, charged like this, can do all work.

*One order* (`one_order_bound`). Published pipelines, and this scheduler's, take the samples of a replica in
one order on all stages, forwards and backwards. Let q be a stage with limited memory in flight, p a later
one, and let the backward be whole. Up to the end of the B of x at p, stage p has done all work of x and of
the samples before it. From then on x takes its B at the stages from p - 1 down to q. Only then is its slot at
q free, so of the samples behind x at most C - 1 have had their F at q before, in what memory x leaves; all
their other work at q follows. With w the lesser of a sample's work at p and at q, and K(x) the most time that
F of C - 1 other samples take at q,

    T >= head + sum of w over the replica + sum of the B of x at q, ..., p - 1 - K(x) + tail,

where head is the least time before a forward at p and tail the least one after a backward at q. So a replica
is charged phi(x) = B of x at q, ..., p - 1 - K(x), and the least T in which all can do their work is found as
above, for each q and p.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from secc.bounds.work import BatchWork, SampleVisit
from secc.runtime.plan.schema import Section
from secc.runtime.plan.step_program import owes_backward

PhiLine = tuple[int, int]  # a and b of (a - b T) / divisor


@dataclass(frozen=True, slots=True)
class _SampleCharge:
    """A sample's work on a pipeline's last stage, and the lines over T with phi as their maximum."""

    work: int
    lines: tuple[PhiLine, ...]

    def idle_ns(self, time: int, divisor: int) -> int:
        """phi: idle time of the last stage of the sample's replica in a step of `time`, rounded down."""
        return max(0, *((a - b * time) // divisor for a, b in self.lines))


# -- slots


def hold_times(work: BatchWork, section: Section, trips: Mapping[tuple[str, int], int]) -> list[int]:
    """For each visit the least time, in ns, that it occupies a slot of a stage; for a micro-batch of
    several samples at least their sum."""
    return [
        (trips[u.section, u.sample] + u.backward + u.second_part) // section.micro_batch
        for u in work.visits[section.name]
    ]


def round_trip_times(work: BatchWork) -> dict[tuple[str, int], int]:
    """Time from the start of each forward to the earliest start of its backward, in ns, by section and
    sample."""
    units = {(u.section, u.sample): u for units in work.visits.values() for u in units}
    trips: dict[tuple[str, int], int] = {}
    for s in reversed(work.sections):
        returning = [a for a in work.edges if a.src == s.name and a.returns_gradient]
        for u in work.visits[s.name]:
            returns = (
                a.message_ns[p] * 2 + trips[a.dst, p] + units[a.dst, p].backward
                for a in returning
                for p in (u.sample,)
                if p in a.message_ns
            )
            trips[s.name, u.sample] = u.forward + max(returns, default=0)
    return trips


def has_in_flight_slots(work: BatchWork, section: Section) -> bool:
    """Whether a stage never exceeds its in-flight limit: no consumer outside the pipeline forces it to."""
    if not section.pipeline or not section.in_flight or not owes_backward(section):
        return False
    stages = {s.name for s in work.sections if s.user_section_name == section.user_section_name}
    return not any(a.src in stages and a.dst not in stages for a in work.edges)


# -- long samples


def takes_single_samples(stages: Sequence[Section]) -> bool:
    """Whether `long_sample_bound` is about a pipeline: all ranks of a stage have one sample at a time. Where
    subgroups of the ranks of cp compute different samples, these do not delay each other."""
    first = stages[0]
    return len(stages) > 1 and first.micro_batch == 1 and not first.may_deal and owes_backward(first)


def long_sample_bound(work: BatchWork, stages: Sequence[Section], least: int) -> int:
    """Bound by long samples in ns, or `least` if it is not larger. Stages must take one sample at a time."""
    units = [{u.sample: u for u in work.visits[s.name]} for s in stages]
    ways, divisor = _sample_charges([[by[p] for by in units] for p in sorted(units[0])])
    if not ways:
        return least
    return _least_time(ways, divisor, stages[-1].mesh.dp, least)


def _least_time(ways: Sequence[_SampleCharge], divisor: int, replicas: int, least: int) -> int:
    """The least time, from `least` on, in which `replicas` last stages can do all work."""
    if _replicas_suffice(ways, divisor, replicas, least):
        return least
    low, high = least, max(1, 2 * least)
    while not _replicas_suffice(ways, divisor, replicas, high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _replicas_suffice(ways, divisor, replicas, middle) else (middle, high)
    return high


def keeps_one_order(work: BatchWork, stages: Sequence[Section]) -> bool:
    """Whether `one_order_bound` is about a pipeline: stages on ranks of their own, with whole backwards, that
    take one sample to a micro-batch, or to a subgroup of their ranks of cp."""
    ranks = [rank for s in stages for rank in s.mesh.ranks]
    return (
        len(stages) > 1
        and len(set(ranks)) == len(ranks)
        and bool(work.visits[stages[0].name])
        and all(owes_backward(s) and s.micro_batch == 1 and not s.weight_permille for s in stages)
    )


def one_order_bound(work: BatchWork, stages: Sequence[Section], least: int) -> int:
    """Bound in ns on steps in which each replica takes its micro-batches in one order on all stages, or
    `least` if it is not larger. For pipelines of `keeps_one_order`."""
    units = [{u.sample: u for u in work.visits[s.name]} for s in stages]
    for q, earlier in enumerate(stages[:-1]):
        if not has_in_flight_slots(work, earlier):
            continue
        behind = _most_forward_ns(work, earlier)
        way_back = dict.fromkeys(units[q], 0)
        for p in range(q + 1, len(stages)):
            way_back = {x: ns + units[p - 1][x].backward for x, ns in way_back.items()}
            charges = [
                _SampleCharge(
                    min(_visit_weight(units[s][x]) for s in (q, p)), ((way_back[x] - behind[x], 0),)
                )
                for x in way_back
            ]
            head = min(u.forward_head for u in units[p].values())
            tail = min(_last_tail_ns(u) for u in units[q].values())
            inside = _least_time(charges, 1, earlier.mesh.dp, max(0, least - head - tail))
            least = max(least, head + inside + tail)
    return least


def _most_forward_ns(work: BatchWork, section: Section) -> dict[int, int]:
    """For each sample at most how much forwards of others add that a stage holds together with it."""
    units = {u.sample: u.forward_weight for u in work.visits[section.name]}
    most = (section.in_flight - 1) * section.most_samples
    longest = sorted(units.values(), reverse=True)
    sums = [0, *accumulate(longest)]
    if not section.room_bytes:
        return {x: _sum_without(sums, most, ns) for x, ns in units.items()}
    saved = work.least_saved_bytes(section)
    densest = sorted(units, key=lambda x: (units[x] << 64) // max(1, saved[x]), reverse=True)
    sizes = [0, *accumulate(max(1, saved[x]) for x in densest)]
    times = [0, *accumulate(units[x] for x in densest)]
    found: dict[int, int] = {}
    for x, ns in units.items():
        room = max(0, section.room_bytes - saved[x])
        whole = bisect_right(sizes, room) - 1  # the densest samples fill the room, the last one in part
        part = 0
        if whole < len(densest):
            next_one = densest[whole]
            part = -(-units[next_one] * (room - sizes[whole]) // max(1, saved[next_one]))
        found[x] = min(_sum_without(sums, most, ns), times[whole] + part + 1)  # densities are rounded
    return found


def _sum_without(sums: Sequence[int], count: int, own: int) -> int:
    """The sum of the `count` longest times except for one that is `own`; `sums` has those of the longest."""
    longest = sums[min(count, len(sums) - 1)]
    return min(longest, sums[min(count + 1, len(sums) - 1)] - own)


def _visit_weight(u: SampleVisit) -> int:
    return u.forward_weight + u.backward_weight


def _last_tail_ns(u: SampleVisit) -> int:
    return u.backward_tail or 0


def _sample_charges(samples: Sequence[Sequence[SampleVisit]]) -> tuple[list[_SampleCharge], int]:
    """Charges of samples, each given by its visits from the first stage to the last, and the common
    divisor of their lines."""
    shortest = [_shortest_passes(units) for units in samples]
    if not samples or any(h == 0 or b == 0 for h, b in shortest):
        return [], 1
    rates, rates_with_backward = [], []
    for units, (h, b) in zip(samples, shortest, strict=True):
        last, w = units[-1], _visit_work(units[-1])
        rates.append(Fraction(w - h, h))
        rates_with_backward += [Fraction(w - b, b), Fraction(last.second_part, last.forward + last.backward)]
    r, r_with_backward = max(rates), max(rates + rates_with_backward)
    divisor = r.denominator * r_with_backward.denominator
    return [
        _SampleCharge(_visit_work(units[-1]), tuple(_phi_lines(units, r, r_with_backward, divisor)))
        for units in samples
    ], divisor


def _shortest_passes(units: Sequence[SampleVisit]) -> tuple[int, int]:
    """h and b of a sample: its shortest forward and backward on any stage."""
    return min(u.forward for u in units), min(u.backward for u in units)


def _visit_work(u: SampleVisit) -> int:
    return u.forward + u.backward + u.second_part


def _phi_lines(
    units: Sequence[SampleVisit], r: Fraction, r_with_backward: Fraction, divisor: int
) -> Iterator[PhiLine]:
    """Lines of phi and phi' of a sample."""
    *before, last = units
    earlier_forwards, earlier_backwards = sum(u.forward for u in before), sum(u.backward for u in before)
    rest = last.forward + last.forward_tail
    yield _phi_line(earlier_forwards, r, earlier_forwards + rest, divisor)
    yield _phi_line(
        earlier_forwards + earlier_backwards - last.second_part,
        r_with_backward,
        earlier_forwards + earlier_backwards + last.forward + last.backward,
        divisor,
    )


def _phi_line(idle: int, rate: Fraction, offset: int, divisor: int) -> PhiLine:
    """Line of idle - rate * (T - own)."""
    slope = int(rate * divisor)
    return idle * divisor + slope * offset, slope


def _replicas_suffice(ways: Iterable[_SampleCharge], divisor: int, replicas: int, time: int) -> bool:
    """Whether `replicas` last stages can do all work in `time`."""
    ordered = sorted(((w.idle_ns(time, divisor), w.work) for w in ways), reverse=True)
    charged = capacity = work = 0
    for phi, own in ordered:
        work += own
        while work > capacity:
            if charged == replicas:
                return False
            capacity, charged = capacity + max(0, time - phi), charged + 1
    return True
