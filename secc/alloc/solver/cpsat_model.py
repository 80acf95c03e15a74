"""The allocation problem as an integer program, solved by CP-SAT.

  Sets
      S        sections, in topological order
      C[s]     candidates of section s: ranks r, work w, memory m (m' with consumers on other ranks)
      G = S    device groups; a group bears the name of its first section
      E        edges (u, s): u feeds s

  Variables
      x[s,c]   0/1: section s runs as candidate c
      y[s,g]   0/1: section s is in group g (g not after s)
      a[u,s]   0/1: u and s are in different groups, for each edge
      R[g]     ranks of group g
      W[g]     work of group g in a step
      F[g]     0/1: all sections of group g run ahead of the step
      I[s]     idle time of section s that running ahead avoids
      D[s]     time that section s waits at the start and the end of a step for sections elsewhere
      T        step time
      K        bytes on the fullest rank

  Constraints, each family with the method that adds it
      sum_c x[s,c] = 1,  sum_g y[s,g] = 1,  y[s,g] <= y[g,g]                                _add_choice
      y[s,g] => R[g] = r[s],  not y[g,g] => R[g] = 0,  sum_g R[g] <= N, whole nodes         _add_ranks
      the same for the ranks of each kind of device, and each kind's memory                 _add_pools
      W[g] = sum of w[s] - I[s] over s in g,  sum of (w[s] - i[s]) r[s] over S <= N T       _add_work
      I[s] <= i[s],  F[g] = 0 and y[s,g] => I[s] = 0,  y[s,g] and not f[s] => F[g] = 0  _add_running_ahead
      sum of m[s] over s in g <= K; m'[s] for m[s] where a[s,t] for some t; messages where a  _add_memory
      sum of host memory h[s] over s in g <= H                                            _add_host_memory
      a[u,s] = 1 iff no group holds both                                                    _add_separation
      D[s] >= D[u] + a[u,s] (latency[u] - independent[s] + message[s]),  D[s] >= 0          _add_delays
      T >= W[g] + D[s] for s in g,  T >= W[g] + D[u] + round_trip[s] - slack[u] if u in g, a[u,s]
                                                                                            _add_step_time
      T >= D[u] + k (latency[u] + 3/2 round_trip[s]) if a[u,s] and u runs as a c of k > 1 rounds
                                                                                            _add_rounds
      strategy and `together`                                                               _add_strategy

  where r, w, m, i (idle time), f (0/1: it can run ahead), latency, ... of a section stand for their sums over
  c weighted with x[s,c].

Objective: the least T under K <= capacity, among equals the fewest ranks, then the plainest candidates. With
a deadline: the fewest ranks under T <= deadline, among equals the least T. `solve_least_memory` minimises K,
`solve_least_time` T on any number of ranks.

For a large problem a greedy assignment is found first (`secc.alloc.solver.greedy_start`); its step time rules
most candidates out (`secc.alloc.solver.group_bounds`). A fixed seed, one worker and a deterministic time
limit make the answer the same on every machine; the bound that CP-SAT proves gives the gap. A second solve
finds, under T <= (1 + margin) T* and on no more ranks than a deadline needs, the assignment with the
narrowest replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.types import Assignment, Problem, Solution
from secc.alloc.solver import subproblem as parts
from secc.alloc.solver.coarse_problem import coarsen_problem, round_up_to_mebibytes, time_unit
from secc.alloc.solver.deferred_pandas import deferred_pandas
from secc.alloc.solver.greedy_start import greedy_assignment

with deferred_pandas("ortools.sat.python.cp_model"):
    from ortools.sat.python import cp_model

DETERMINISTIC_LIMIT = 20.0  # CP-SAT's unit, about a second on a fast machine
SOLVER_SEED = 7
# From this number of candidates of all sections on, the search starts from a greedy assignment.
WARM_START_CANDIDATES = 1000
EXTRAS_RANGE = 1 << 12  # more than `extras` summed over all sections


def solve_allocation(
    problem: Problem,
    limit: float = DETERMINISTIC_LIMIT,
    margin: float = 0.0,
    most: int | None = None,
    start: Assignment | None = None,
) -> Solution | None:
    """Returns the fastest assignment, None if there is none or none takes at most `most` ns.

      limit: CP-SAT's deterministic time, about seconds.
      margin: replicas of several ranks are used only where they are faster by more than this share: of the
          assignments within this share of the fastest, the one with the fewest doublings of a replica's
          ranks.
      start: a good assignment of this problem. By default a large problem starts from a greedy one.

    Raises RuntimeError if no assignment was found or refuted within the limit.
    """
    coarse = coarsen_problem(problem)
    longest = _time_horizon(coarse) if coarse.deadline is None else coarse.deadline
    most = longest if most is None else min(longest, -(-most // time_unit(problem)))
    if (
        start is None
        and coarse.deadline is None
        and sum(map(len, coarse.sections.values())) >= WARM_START_CANDIDATES
    ):
        start = greedy_assignment(coarse, most)
    # The start's own step time bounds the optimum, so candidates that exceed it alone can be left out.
    if start is not None and coarse.deadline is None:
        most = min(most, evaluate_assignment(coarse, start).time_ns)
    if (subproblem := parts.prune_by_step_time(coarse, most)) is None:
        return None
    model = AllocationModel(subproblem.problem, most)
    if start is not None:
        model.add_hint(subproblem.indices_of(start), start.group)
    model.cp.minimize(model.lexicographic_objective())
    solver, status = _run_solver(model, limit)
    if status == cp_model.INFEASIBLE:
        return None
    assignment, first = subproblem.to_whole(model.read_assignment(solver)), model.read_first_objective(solver)
    bound = first if status == cp_model.OPTIMAL else int(solver.best_objective_bound) // model.first_weight
    if margin and any(problem.sections[s][i].width for s, i in assignment.choice.items()):
        assignment, first = _prefer_narrow_replicas(
            coarse, assignment, solver.value(model.step_time), first, margin, limit
        )
    value, gap = evaluate_assignment(problem, assignment), max(0.0, (first - bound) / max(first, 1))
    return Solution(assignment, value.time_ns, solver.status_name(status), round(gap, 6), value.ranks)


def _prefer_narrow_replicas(
    problem: Problem, best: Assignment, time: int, first: int, margin: float, limit: float
) -> tuple[Assignment, int]:
    """Returns the assignment with the fewest doublings of replicas that is slower by at most `margin`, and
    the first part of its objective."""
    # One doubling must weigh more than any difference of the objective among allowed step times (`spread`).
    most, spread = int(time * (1 + margin)), int(time * margin)
    subproblem = parts.prune_by_step_time(problem, most)
    assert subproblem is not None, "the best assignment is among these"
    model = AllocationModel(subproblem.problem, most)
    model.add_hint(subproblem.indices_of(best), best.group)
    model.cp.add(
        model.sum_over_sections("width") <= sum(problem.sections[s][i].width for s, i in best.choice.items())
    )
    if problem.deadline is not None:
        model.cp.add(model.used_ranks == first)
        spread = most
    model.cp.minimize(
        model.lexicographic_objective()
        + model.sum_over_sections("width") * (EXTRAS_RANGE * (problem.ranks + 1) * (spread + 2))
    )
    solver, _ = _run_solver(model, limit)
    return subproblem.to_whole(model.read_assignment(solver)), model.read_first_objective(solver)


def solve_least_memory(problem: Problem, limit: float = DETERMINISTIC_LIMIT) -> int | None:
    """Returns the bytes that a rank needs at least, whatever the step time; None if the other constraints
    cannot be met."""
    total = _total_memory(problem)
    pools = tuple(replace(pool, capacity=total) for pool in problem.pools)
    asked = coarsen_problem(replace(problem, capacity=total, pools=pools))
    model = AllocationModel(asked, _time_horizon(asked) if asked.deadline is None else asked.deadline)
    model.cp.minimize(model.capacity_mib)
    solver, status = _run_solver(model, limit)
    return None if status == cp_model.INFEASIBLE else solver.value(model.capacity_mib) << 20


def solve_least_time(problem: Problem, limit: float = DETERMINISTIC_LIMIT) -> int | None:
    """Returns the shortest step time in ns on any number of the ranks; None if nothing fits."""
    free = replace(problem, deadline=_time_horizon(problem))
    coarse = coarsen_problem(free)
    model = AllocationModel(coarse, _time_horizon(coarse))
    model.cp.minimize(model.step_time)
    solver, status = _run_solver(model, limit)
    return (
        None
        if status == cp_model.INFEASIBLE
        else evaluate_assignment(free, model.read_assignment(solver)).time_ns
    )


def _run_solver(model: AllocationModel, limit: float) -> tuple[cp_model.CpSolver, Any]:
    """Runs CP-SAT with fixed seed and one worker. Raises RuntimeError if the limit is reached without an
    answer."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = SOLVER_SEED
    solver.parameters.max_deterministic_time = limit
    # Probing fixes each of thousands of candidates in turn, which takes longer than the search itself.
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.linearization_level = 2
    # The inclusion presolve of OR-Tools 9.15 cuts off valid optima and reports the rest as optimal.
    solver.parameters.presolve_inclusion_work_limit = 0
    status = solver.solve(model.cp)
    if status not in {cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.INFEASIBLE}:
        raise RuntimeError(
            f"CP-SAT found no assignment and no proof within {limit:g} units of deterministic time: "
            f"{solver.status_name(status)}"
        )
    return solver, status


class AllocationModel:
    """Variables and constraints of a problem with step time at most `most`; the caller sets the objective.

    `step_time` is T in time units, `capacity_mib` is K in MiB.
    """

    def __init__(self, problem: Problem, most: int | None = None) -> None:
        self.problem, self.cp = problem, cp_model.CpModel()
        self.names = list(problem.sections)
        self.horizon = _time_horizon(problem)
        self.x = {
            s: [self.cp.new_bool_var(f"x[{s},{c}]") for c in range(len(cs))]
            for s, cs in problem.sections.items()
        }
        self.y = {
            (s, g): self.cp.new_bool_var(f"y[{s},{g}]")
            for i, s in enumerate(self.names)
            for g in self.names[: i + 1]
        }
        self.a = {(e.src, e.dst): self.cp.new_bool_var(f"a[{e.src},{e.dst}]") for e in problem.edges}
        self.ranks = {g: self.cp.new_int_var(0, problem.ranks, f"R[{g}]") for g in self.names}
        self.work = {g: self.cp.new_int_var(0, self.horizon, f"W[{g}]") for g in self.names}
        self.delay = {s: self.cp.new_int_var(0, self.horizon, f"D[{s}]") for s in self.names}
        self.step_time = self.cp.new_int_var(
            0, min(n for n in (self.horizon, most, problem.deadline) if n is not None), "T"
        )
        self.used_ranks = sum(self.ranks.values())
        self.capacity_mib = self.cp.new_int_var(0, problem.capacity >> 20, "K")
        for family in (
            self._add_choice,
            self._add_ranks,
            self._add_running_ahead,
            self._add_work,
            self._add_separation,
            self._add_memory,
            self._add_host_memory,
            self._add_pools,
            self._add_delays,
            self._add_step_time,
            self._add_rounds,
            self._add_strategy,
        ):
            family()

    def add_hint(self, choice: Mapping[str, int], group: Mapping[str, str]) -> None:
        """Makes the search start from an assignment."""
        for s, chosen in choice.items():
            for i, x in enumerate(self.x[s]):
                self.cp.add_hint(x, i == chosen)
        for (s, g), y in self.y.items():
            self.cp.add_hint(y, group[s] == g)

    def read_assignment(self, solver: cp_model.CpSolver) -> Assignment:
        """The assignment that a solver found."""
        choice = {s: next(i for i, v in enumerate(xs) if solver.boolean_value(v)) for s, xs in self.x.items()}
        group = {s: g for (s, g), v in self.y.items() if solver.boolean_value(v)}
        return Assignment(choice, group)

    @property
    def first_weight(self) -> int:
        """Weight of the objective's first part."""
        return (self.problem.ranks + 1 if self.problem.deadline is None else self.horizon + 1) * EXTRAS_RANGE

    def read_first_objective(self, solver: cp_model.CpSolver) -> int:
        """First part of the objective in a solution: step time, or with a deadline the number of ranks."""
        return solver.value(self.step_time if self.problem.deadline is None else self.used_ranks)

    def lexicographic_objective(self) -> Any:
        """Step time, then ranks (with a deadline the other way round), then the candidates' `extras`."""
        first, second = (
            (self.step_time, self.used_ranks)
            if self.problem.deadline is None
            else (self.used_ranks, self.step_time)
        )
        return first * self.first_weight + second * EXTRAS_RANGE + self.sum_over_sections("extras")

    def sum_over_sections(self, name: str) -> Any:
        """Sum of a field of the chosen candidates over all sections."""
        return sum(self._chosen_field(s, name) for s in self.names)

    def _chosen_value(self, section: str, values: Sequence[int]) -> Any:
        """Value of the chosen candidate, from a column of values by candidate."""
        return cp_model.LinearExpr.weighted_sum(self.x[section], values)

    def _chosen_field(self, section: str, name: str) -> Any:
        """Field of the chosen candidate."""
        return self._chosen_value(section, [getattr(c, name) for c in self.problem.sections[section]])

    def _add_choice(self) -> None:
        # A group is named after its first section: s may only join groups of sections up to itself, and only
        # groups that their own first section is in. So each partition into groups has one encoding.
        for i, s in enumerate(self.names):
            self.cp.add_exactly_one(self.x[s])
            for x, c in zip(self.x[s], self.problem.sections[s], strict=True):
                if c.excluded:
                    self.cp.add(x == 0)
            self.cp.add_exactly_one(self.y[s, g] for g in self.names[: i + 1])
            for g in self.names[:i]:
                self.cp.add_implication(self.y[s, g], self.y[g, g])

    def _add_ranks(self) -> None:
        for (s, g), member in self.y.items():
            self.cp.add(self.ranks[g] == self._chosen_field(s, "ranks")).only_enforce_if(member)
        # A group without sections has no ranks, so that `used_ranks` can sum over all groups.
        for g in self.names:
            self.cp.add(self.ranks[g] == 0).only_enforce_if(self.y[g, g].negated())
        # A plan takes part of one node, or several whole nodes.
        used, per_node = self.used_ranks, self.problem.per_node
        self.cp.add(used <= self.problem.ranks)
        several = self.several = self.cp.new_bool_var("several nodes")
        nodes = self.cp.new_int_var(0, self.problem.ranks // per_node, "nodes")
        self.cp.add(used <= per_node).only_enforce_if(several.negated())
        self.cp.add(used == per_node * nodes).only_enforce_if(several)

    def _add_running_ahead(self) -> None:
        # I[s] is only bounded from above: a larger one never makes a step longer.
        longest = {s: max(c.idle_ns for c in cs) for s, cs in self.problem.sections.items()}
        ahead = {g: self.cp.new_bool_var(f"F[{g}]") for g in self.names} if any(longest.values()) else {}
        self.avoided_idle = {s: self.cp.new_int_var(0, ns, f"I[{s}]") for s, ns in longest.items() if ns}
        for s, avoided in self.avoided_idle.items():
            self.cp.add(avoided <= self._chosen_field(s, "idle_ns"))
        for (s, g), member in self.y.items() if ahead else ():
            self.cp.add(self._chosen_field(s, "runs_ahead") >= ahead[g]).only_enforce_if(member)
            if s in self.avoided_idle:
                self.cp.add(self.avoided_idle[s] == 0).only_enforce_if([member, ahead[g].negated()])

    def _add_work(self) -> None:
        parts: dict[str, list[Any]] = {g: [] for g in self.names}
        for (s, g), member in self.y.items():
            part = self.cp.new_int_var(0, max(c.time_ns for c in self.problem.sections[s]), f"w[{s},{g}]")
            work = self._chosen_field(s, "time_ns") - self.avoided_idle.get(s, 0)
            self.cp.add(part == work).only_enforce_if(member)
            self.cp.add(part == 0).only_enforce_if(member.negated())
            parts[g].append(part)
        for g, total in self.work.items():
            self.cp.add(total == sum(parts[g]))
        # Implied by the other constraints, but it bounds T in the linear relaxation, which they hardly do.
        self.cp.add(self.sum_over_sections("least_work") <= self.problem.ranks * self.step_time)

    def _add_memory(self) -> None:
        """Counts bytes as MiB, rounded up for each candidate."""
        parts: dict[str, list[Any]] = {g: [] for g in self.names}
        # m[s,g] is only bounded from below: where the section is not in g, it may be 0. Its own upper bound
        # keeps CP-SAT's domains small.
        for s in self.names:
            need, most = self._section_mebibytes(s)
            for g in self.names[: self.names.index(s) + 1]:
                part = self.cp.new_int_var(0, most, f"m[{s},{g}]")
                self.cp.add(part >= need).only_enforce_if(self.y[s, g])
                parts[g].append(part)
        self.held = {g: sum(parts[g]) for g in self.names}
        for held in self.held.values():
            self.cp.add(held <= self.capacity_mib)

    def _add_host_memory(self) -> None:
        offloading = [s for s in self.names if any(c.host_memory for c in self.problem.sections[s])]
        for g in self.names if offloading else ():
            parts: list[Any] = []
            for s in (s for s in offloading if (s, g) in self.y):
                sizes = [round_up_to_mebibytes(c.host_memory) for c in self.problem.sections[s]]
                part = self.cp.new_int_var(0, max(sizes), f"h[{s},{g}]")
                self.cp.add(part >= self._chosen_value(s, sizes)).only_enforce_if(self.y[s, g])
                parts.append(part)
            self.cp.add(sum(parts) <= self.problem.host_capacity >> 20)

    def _add_pools(self) -> None:
        used: list[cp_model.IntVar] = []
        for k, pool in enumerate(self.problem.pools):
            on = {g: self.cp.new_int_var(0, pool.ranks, f"R[{g},{k}]") for g in self.names}
            for (s, g), member in self.y.items():
                taken = [self.problem.ranks_in_pool(c, k) for c in self.problem.sections[s]]
                self.cp.add(on[g] == self._chosen_value(s, taken)).only_enforce_if(member)
            for g in self.names:
                self.cp.add(on[g] == 0).only_enforce_if(self.y[g, g].negated())
                # `some` is forced to 1 by a rank of kind k in g; then g must fit the memory of that kind.
                some = self.cp.new_bool_var(f"some of {k} in {g}")
                self.cp.add(on[g] <= pool.ranks * some)
                self.cp.add(self.held[g] <= pool.capacity >> 20).only_enforce_if(some)
            total, any_of = sum(on.values()), self.cp.new_bool_var(f"any of {k}")
            nodes = self.cp.new_int_var(0, pool.ranks // self.problem.per_node, f"nodes of {k}")
            self.cp.add(total <= pool.ranks * any_of)
            self.cp.add(total == self.problem.per_node * nodes).only_enforce_if(self.several)
            used.append(any_of)
        # Part of one node: only one kind of device can be used.
        if used:
            self.cp.add(sum(used) <= 1).only_enforce_if(self.several.negated())

    def _section_mebibytes(self, section: str) -> tuple[Any, int]:
        """(MiB of a section on a rank, largest possible value): its own, more with consumers on other
        ranks, and messages."""
        candidates = self.problem.sections[section]
        most = max(round_up_to_mebibytes(max(c.memory, c.memory_ahead)) for c in candidates)
        own = self.cp.new_int_var(0, most, f"m[{section}]")
        self.cp.add(own >= self._chosen_value(section, [round_up_to_mebibytes(c.memory) for c in candidates]))
        total = own
        for e in self.problem.edges:
            if section not in (e.src, e.dst):
                continue
            # Messages take memory only between ranks, at the producer and at the consumer. A producer also
            # runs ahead of a consumer elsewhere and holds more micro-batches (`memory_ahead`).
            apart = self.a[e.src, e.dst]
            held = [
                round_up_to_mebibytes(b) for b in (e.sent_bytes if section == e.src else e.returned_bytes)
            ]
            messages = self.cp.new_int_var(0, max(held), f"messages[{section},{e.src},{e.dst}]")
            self.cp.add(messages >= self._chosen_value(section, held)).only_enforce_if(apart)
            if section == e.src:
                self.cp.add(
                    own
                    >= self._chosen_value(
                        section, [round_up_to_mebibytes(c.memory_ahead) for c in candidates]
                    )
                ).only_enforce_if(apart)
            total, most = total + messages, most + max(held)
        return total, most

    def _add_separation(self) -> None:
        # both[g] = y[u,g] and y[s,g]. It is 1 for at most one g, so apart = 1 - sum of both.
        for (u, s), apart in self.a.items():
            both: list[cp_model.IntVar] = []
            for g in self.names[: min(self.names.index(u), self.names.index(s)) + 1]:
                b = self.cp.new_bool_var(f"both[{u},{s},{g}]")
                self.cp.add_min_equality(b, [self.y[u, g], self.y[s, g]])
                both.append(b)
            self.cp.add(sum(both) + apart == 1)

    def _add_delays(self) -> None:
        for e in self.problem.edges:
            apart = self.a[e.src, e.dst]
            self.cp.add(self.delay[e.dst] >= self.delay[e.src]).only_enforce_if(apart.negated())
            # Work of s that needs nothing from u hides part of the latency (`independent_ns`).
            wait = self._chosen_value(e.src, e.latency_ns) + self._chosen_value(
                e.dst, [m - f for m, f in zip(e.message_ns, e.independent_ns, strict=True)]
            )
            self.cp.add(self.delay[e.dst] >= self.delay[e.src] + wait).only_enforce_if(apart)

    def _add_step_time(self) -> None:
        for (s, g), member in self.y.items():
            self.cp.add(self.step_time >= self.work[g] + self.delay[s]).only_enforce_if(member)
        for e in self.problem.edges:
            # If its gradients come from elsewhere, u ends with the round trip of its last micro-batch through
            # s, as far as other work of u (`slack_ns`) does not hide it.
            exposed = self._chosen_value(e.dst, e.round_trip_ns) - self._chosen_value(e.src, e.slack_ns)
            for g in self.names[: self.names.index(e.src) + 1]:
                condition = [self.a[e.src, e.dst], self.y[e.src, g]]
                self.cp.add(self.step_time >= self.work[g] + self.delay[e.src] + exposed).only_enforce_if(
                    condition
                )

    def _add_rounds(self) -> None:
        """Adds a constraint for each number of rounds of a source's candidates.

        The term of other candidates, and of sections on shared devices, is pushed below zero by a large
        constant.
        """
        for e in self.problem.edges:
            sources, back = self.problem.sections[e.src], e.gradient_return_ns
            for count in sorted({c.rounds for c in sources} - {1}):
                # `most` is the large constant: `trip - away` is at most 0 if the chosen candidate has another
                # number of rounds, or if both sections share a group.
                most = count * (max(e.latency_ns) + max(back))
                trips = [
                    count * n if c.rounds == count else -most
                    for n, c in zip(e.latency_ns, sources, strict=True)
                ]
                away = most * (1 - self.a[e.src, e.dst])
                trip = self._chosen_value(e.src, trips) + self._chosen_value(e.dst, [count * n for n in back])
                self.cp.add(self.step_time >= self.delay[e.src] + trip - away)

    def _add_strategy(self) -> None:
        first = self.names[0]
        for a, b in self.problem.together:
            for g in self.names:
                self.cp.add(self._membership(a, g) == self._membership(b, g))
        if self.problem.strategy == "apart":
            for s in self.names:
                self.cp.add(self.y[s, s] == 1)
        if self.problem.strategy in {"colocate", "uniform"}:
            for s in self.names:
                self.cp.add(self.y[s, first] == 1)
            if self.problem.deadline is None:
                self.cp.add(self.ranks[first] == self.problem.ranks)
                for s in self.names:
                    others = [
                        x
                        for x, c in zip(self.x[s], self.problem.sections[s], strict=True)
                        if c.ranks != self.problem.ranks
                    ]
                    self.cp.add(sum(others) == 0)
        if self.problem.strategy == "uniform":
            for s in self.names[1:]:
                self.cp.add(self._chosen_field(s, "micro_batch") == self._chosen_field(first, "micro_batch"))

    def _membership(self, section: str, group: str) -> Any:
        return self.y.get((section, group), 0)


def _time_horizon(problem: Problem) -> int:
    """Upper bound of any step time: all work and all waits one after the other."""
    work = sum(max(c.time_ns for c in cs) for cs in problem.sections.values())
    rounds = {s: max(c.rounds for c in cs) for s, cs in problem.sections.items()}
    trips = (
        (1 + rounds[e.src]) * (max(e.latency_ns) + max(e.gradient_return_ns)) + max(e.message_ns)
        for e in problem.edges
    )
    return 2 * work + sum(trips) + 1


def _total_memory(problem: Problem) -> int:
    """Upper bound of the bytes of any assignment."""
    held = sum(max(e.sent_bytes) + max(e.returned_bytes) for e in problem.edges)
    own = sum(max(max(c.memory, c.memory_ahead) for c in cs) for cs in problem.sections.values())
    return held + own + (len(problem.sections) + 2 * len(problem.edges) + 1 << 20)
