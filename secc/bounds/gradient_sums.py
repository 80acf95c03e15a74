"""How long a section or stage takes at least with the sums of its gradients, which nothing hides but its last
backwards, and the gathers of its parameters, which nothing hides but its first forwards.

A sum is over all D replicas, so it begins when each of them has begun its last backward. Take one replica. Up
to the start t of its last job (a backward, or the second part of a split one) it does all of its work but
that job; from t on there are the sums, S, one after the other, and what the next step's first forward does
not hide of the gathers (`runtime/parameters/reduction_times.py`). Let W be the weight of the replica's work
(`secc/bounds/additive.py`), w that of the last job, f that of its first forward, g the gathers, and o the
part of g that no forward hides. Then the step time T is at least t + S + max(o, g - f).

Large micro-batches hide more, but a micro-batch is in one stage after the other. Before its last job here it
has passed all stages forward, and the later ones backward; after a whole backward it passes the earlier ones
backward; before its first forward it has passed the earlier ones. With the least ratios a, b and c over
samples of what they take then to w, w and f, and c at most 1,

    t >= c f + W - w,    t >= a w,    T >= t + S + max(o, g - f),    T >= t + (1 + b) w.

For any m and n in [0, 1] the m-th part of the first and the (1 - m)-th of the second, with the n-th part of
the third and the (1 - n)-th of the fourth give

    T >= m W + n S + min(n g, m c (g - o) + n o),    if m <= (1 - m) a + (1 - n) (1 + b),

whatever w and f are. (A first forward that takes x more than f adds x to the first line and hides x at most;
as c <= 1, f + x in the place of f takes no more.) Two such pairs are used: n = 1 with m = a / (1 + a), and
m = 1 with n = b / (1 + b). Some replica has a D-th of the weight of all work.

Where micro-batches have at most k samples, the last jobs of q replicas have the weight of q k samples at
most. So the same holds with m = n = 1, for the mean of the q replicas that have samples, if the q k largest
last jobs are taken off their work; the bound is the least one over q.

A backward is split if what its micro-batch keeps meanwhile fits the plan's room. So a second part has at
most the weight d of the bytes that fit, and T >= W - d + S + min(g, c (g - o) + o). Others are whole. Where
there may be some, the bound is the lesser one of both kinds of last jobs. Such a micro-batch has more bytes
than the room, so its backward has at least the weight v of these bytes, and

    T >= W + b v,    T >= a v + max(S + o, (1 + b) v).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from secc.bounds.traffic import ClosingTimes
from secc.bounds.work import BatchWork, SampleVisit
from secc.runtime.plan.schema import Section

RATIO_UNIT = 1 << 40  # ratios of times are multiples of its inverse


@dataclass(frozen=True)
class _LastJob:
    """A kind of last job: a and b of the module, None if no sample has any, the weights of the largest jobs,
    that of the first n of them at n, the least weight of such a job, and the most, None if not known."""

    before: Fraction | None
    after: Fraction
    largest: tuple[int, ...]
    least: Fraction = Fraction(0)
    most: int | None = None


@dataclass(frozen=True)
class StageWork:
    """The work of a stage: W of all samples, c, and the kinds of last jobs that replicas may have. `most`:
    samples of a micro-batch, 0 for any number."""

    work: int
    wait: Fraction
    last_jobs: tuple[_LastJob, ...]
    most: int

    def bound_time(self, replicas: int, closing: Sequence[ClosingTimes]) -> int:
        """The least time, in ns, from the start of a step with `replicas` replicas to the end of sums and
        gathers, by the rank with the longest ones."""
        return max((self._bound_rank(replicas, times) for times in closing if times.sums), default=0)

    def _bound_rank(self, replicas: int, times: ClosingTimes) -> int:
        return min((self._bound_kind(replicas, times, job) for job in self.last_jobs), default=0)

    def _bound_kind(self, replicas: int, times: ClosingTimes, job: _LastJob) -> int:
        one, mean = Fraction(1), Fraction(self.work, replicas)
        part = one if job.before is None else job.before / (1 + job.before)
        hidden = one if job.before is None else job.after / (1 + job.after)
        found = [
            part * mean + _shown_ns(times, part * self.wait, one),
            mean + _shown_ns(times, self.wait, hidden),
        ]
        if job.most is not None:
            found.append(mean - job.most + _shown_ns(times, self.wait, one))
        if job.least:
            found.append(mean + job.after * job.least)
            behind = max(Fraction(times.sums + times.open_gathers), (1 + job.after) * job.least)
            found.append((job.before or 0) * job.least + behind)
        if self.most:
            taken_off = (
                (self.work - job.largest[min(q * self.most, len(job.largest) - 1)]) // q
                for q in range(1, replicas + 1)
            )
            found.append(min(taken_off) + _shown_ns(times, self.wait, one))
        return int(max(found))


def stage_works(
    work: BatchWork, visits: Mapping[str, Sequence[SampleVisit]], stages: Sequence[Section], own_sizes: bool
) -> list[tuple[Section, StageWork]]:
    """The work of those stages of a section that sum gradients, with the samples' visits at all of them.
    `own_sizes`: micro-batches have at most as many samples as in the plan; else any number."""
    by_sample = [{u.sample: u for u in visits[s.name]} for s in stages]
    if not by_sample[0] or any(by.keys() != by_sample[0].keys() for by in by_sample):
        return []
    if any(u.backward_head is None for by in by_sample for u in by.values()):
        return []
    return [
        (
            s,
            _stage_work(
                by_sample,
                i,
                min(s.most_samples, len(by_sample[i])) if own_sizes else 0,
                own_sizes and work.always_splits(s),
                work,
                s,
            ),
        )
        for i, s in enumerate(stages)
        if any(times.sums for times in work.traffic.closing_times(s, 2))
    ]


def _stage_work(
    visits: Sequence[Mapping[int, SampleVisit]],
    stage: int,
    together: int,
    always_split: bool,
    work: BatchWork,
    section: Section,
) -> StageWork:
    own = visits[stage]
    forward = {p: sum(by[p].forward_weight for by in visits) for p in own}
    later = {p: sum(by[p].backward_weight for by in visits[stage + 1 :]) for p in own}
    earlier = {p: sum(by[p].backward_weight for by in visits[:stage]) for p in own}
    arrival = {p: sum(by[p].forward_weight for by in visits[:stage]) for p in own}
    jobs: list[_LastJob] = []
    if is_split := any(u.second_part for u in own.values()):
        second = {p: u.second_part_weight for p, u in own.items()}
        before = {p: forward[p] + later[p] + u.backward_weight for p, u in own.items()}
        most = _most_weight(second, work.least_split_bytes(section), section.room_bytes)
        jobs.append(_LastJob(_least_ratio(before, second), Fraction(0), _largest_sums(second), most=most))
    if not is_split or not always_split:
        whole = {p: u.backward_weight + u.second_part_weight for p, u in own.items()}
        before = {p: forward[p] + later[p] for p in own}
        after = _least_ratio(earlier, whole) or Fraction(0)
        unsplit_bytes = work.unsplit_bytes(section) if is_split else None
        ratio = _least_ratio(whole, unsplit_bytes) if unsplit_bytes else None
        least = Fraction(0) if ratio is None else ratio * section.room_bytes
        jobs.append(_LastJob(_least_ratio(before, whole), after, _largest_sums(whole), least))
    # A forward of more than its weight hides more: no more than c = 1 makes up for.
    wait = min(
        _least_ratio(arrival, {p: u.forward_weight for p, u in own.items()}) or Fraction(0), Fraction(1)
    )
    total = sum(u.forward_weight + u.backward_weight + u.second_part_weight for u in own.values())
    return StageWork(total, wait, tuple(jobs), together)


def _shown_ns(times: ClosingTimes, wait: Fraction, part: Fraction) -> Fraction:
    """n S and what gathers add; `wait` is m c, `part` is n."""
    hidden = wait * (times.gathers - times.open_gathers) + part * times.open_gathers
    return part * times.sums + min(part * times.gathers, hidden)


def _least_ratio(times: Mapping[int, int], jobs: Mapping[int, int]) -> Fraction | None:
    """The least ratio of a time of a sample to its job, rounded down; None if no sample has such a job."""
    ratios = [times[p] * RATIO_UNIT // ns for p, ns in jobs.items() if ns]
    return Fraction(min(ratios), RATIO_UNIT) if ratios else None


def _most_weight(jobs: Mapping[int, int], sizes: Mapping[int, int], room: int) -> int | None:
    """Returns an upper bound of the summed weight of jobs that fit into `room` bytes together; None where
    sizes are not known."""
    if not room or not all(sizes.values()):
        return None
    return max((-(-ns * room // sizes[p]) for p, ns in jobs.items()), default=None)


def _largest_sums(jobs: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(accumulate(sorted(jobs.values(), reverse=True), initial=0))
