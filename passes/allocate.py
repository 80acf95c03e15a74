"""`allocate`: gives each section its ranks, replicas, micro-batch size, sharding and recomputation, and notes
the predicted step.

`secc.alloc` makes the choice; this pass reads the options, solves, and writes the result into the attributes
of sections and graph. Ranks are assigned group by group: the widest tensor parallelism first, so that no tp
group straddles nodes, then the most work.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.passes import ModulePass

from secc.alloc.explain import plan_choices as known
from secc.alloc.explain.alternatives import explain_choices
from secc.alloc.explain.infeasibility import explain_infeasibility
from secc.alloc.explain.least_step import bound_every_plan
from secc.alloc.problem import pins as pins_
from secc.alloc.problem.allowed_choices import may_copy_in_place_of_recomputing
from secc.alloc.problem.build_problem import (
    PARALLEL_PRICING_RANKS,
    build_problem,
    count_usable_ranks,
    estimate_longest_time,
    price_edges,
)
from secc.alloc.problem.candidate_memory import passing_bytes
from secc.alloc.problem.closed_form import PlanValue, evaluate_assignment
from secc.alloc.problem.micro_batch_times import micro_batch_time_expressions, subgroup_costs
from secc.alloc.problem.pins import Pins
from secc.alloc.problem.section_load import SectionLoad
from secc.alloc.problem.stackable_layers import runs_layers_again
from secc.alloc.problem.types import STRATEGIES, Assignment, Candidate, Problem, Solution
from secc.alloc.problem.whole_batch import pin_whole_batches, refuse_micro_batches
from secc.alloc.problem.workload import Workload, build_workload
from secc.alloc.refine import prefetch_memory
from secc.alloc.refine.dealt_sections import DealtPlan, choose_dealing
from secc.alloc.refine.in_flight_limits import in_flight_limit, subgroup_limit
from secc.alloc.refine.interleaved_stages import (
    InterleavedPlan,
    choose_interleaving,
    interleave_close_plans,
)
from secc.alloc.refine.larger_micro_batches import EnlargedPlan, enlarge_micro_batches
from secc.alloc.refine.local_search import RefinedPlan, refine_by_simulation
from secc.alloc.refine.sample_limits import LimitedPlan, raise_sample_limits
from secc.alloc.refine.schedule_evaluation import KnownEvaluations, PlanEvaluator, SearchBatches
from secc.alloc.refine.start_plans import MAX_START_RATIO
from secc.alloc.solver.allocation_solver import solve_allocation, solve_least_memory
from secc.cluster import GIB, Cluster, parse_cluster
from secc.cost.model.memory import layer_bytes
from secc.cost.model.step_overheads import cluster_with_overheads
from secc.errors import ImpossibleChoice, TooManyRanks, UserError
from secc.ir.analysis.sample_sizes import SHOWN_BATCH
from secc.ir.analysis.token_count import token_count
from secc.ir.analysis.whole_batch import ALONE, whole_batch_of_section
from secc.ir.dialect.ops import GraphOp, graph_of
from secc.ir.dialect.python_attributes import float_attr, int_attr, int_list_attr
from secc.passes.annotate_costs import write_section_cost, write_subgroup_costs
from secc.passes.sections.merge_sections import add_section_notes
from secc.process_map import run_in_background

OBJECTIVES = ("time", "gpus")
SAMPLES_PER_RANK = 8  # of the global batch, where none is given
# Samples are priced as dealt if the longest takes more than this share of the mean sample's time. Candidates
# that take more than `MOST_DEALT_RATIO` times the best plan's work with all samples divided are not priced.
UNEVEN_PERMILLE = 2000
MOST_DEALT_RATIO = 1.5
# Limits of samples are also raised in a plan that takes at most this share longer than the best one.
TIED_SHARE = 1 / 64
MOST_SLOWER = 1 / 16  # of a plan with captured layers than without, before other plans are sought
RESERVED_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4)  # of memory, where drawn batches need more than mean ones
RUN_AGAIN_NOTE = "no stages: its layers run again in the same forward, and each run would be on other ranks"
ONE_STAGE = ".pp=1"  # ends the pin of a section without captured layers
PLAIN_BACKENDS = {"cpu"}  # on which stages are not divided further unless that is pinned
MULTI_RANK_MARGIN = (
    1 / 128
)  # replicas of several ranks must be faster by more than this share, or fit where others do not


@dataclass(frozen=True)
class SolvedAllocation:
    """An allocation problem with the solver's answer. `run_ahead`: bytes that a rank keeps for the next step,
    None if not given. `most_ns`: candidates that take longer are left out, None if all are there. `known`:
    what is known of plans by simulation, for all problems of the same work, on the batches `shared`."""

    work: Workload
    problem: Problem
    solution: Solution
    pins: Pins
    run_ahead: int | None
    most_ns: int | None = None
    known: KnownEvaluations = field(default_factory=KnownEvaluations, compare=False, repr=False)
    shared: SearchBatches = field(default_factory=SearchBatches, compare=False, repr=False)

    def make_evaluator(self) -> PlanEvaluator:
        """Returns the evaluator of this problem's plans."""
        return PlanEvaluator(self.work, self.problem, self.run_ahead, self.known, self.shared)

    def take_solution(self) -> RefinedPlan:
        """Returns the solver's plan, with an estimate of its simulated step."""
        found = self.solution.assignment
        evaluation = self.make_evaluator().estimate(found, assign_ranks(self.problem, found))
        return RefinedPlan(found, evaluation, self.solution.time_ns, 1)


@dataclass(frozen=True)
class Allocate(ModulePass):
    """Options.

    cluster: as `secc.cluster.parse_cluster` reads it. ranks: number of ranks (0: all of the cluster).
      global_batch: samples (0: eight for each rank).
    set: pinned choices, NAME.KEY=VALUE. strategy: auto, apart, colocate or uniform. refused: choices,
      NAME.KEY=VALUE, that a later pass could not carry out.
    fit: with false, a model that fits no device is planned with the least memory instead of being refused,
      and the prediction says how much is missing.
    search: with false, the best plan by closed forms is taken, and no other is simulated.
    stages: numbers of stages, NAME.pp=N, that the model's layers were captured for. known: all choices of the
      plan they were captured for, taken again where it fits, with its solver record `proven`.
    objective: time, or gpus: the fewest ranks on which a step takes at most `step_time` seconds. run_ahead:
      GiB that a rank keeps of results for the next step where frozen sections prefetch, or auto.

    On CPUs, where ranks share a memory, replicas of several ranks are used only if nothing else fits. On GPUs
    host memory is, where it is not pinned.
    """

    name = "allocate"
    cluster: str = "local"
    ranks: int = 0
    global_batch: int = 0
    set: tuple[str, ...] = ()
    strategy: str = "auto"
    fit: bool = True
    search: bool = True
    refused: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    proven: tuple[str, ...] = ()
    objective: str = "time"
    step_time: float = 0.0
    run_ahead: str = prefetch_memory.RUN_AHEAD_AUTO

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        graph = graph_of(op)
        reused = self._reuse_known_plan(graph) if self.known else None
        if reused is not None and not self._is_slower_than_known(reused[1]):
            return _write_allocation(graph, *reused)
        asked = self if reused is None else self.without_known_plan()
        solved = asked.solve_closed_form(graph)
        if not self.search:
            return _write_allocation(graph, solved, solved.take_solution(), 0.0)
        forks = solved.problem.ranks >= PARALLEL_PRICING_RANKS
        with run_in_background(partial(asked.least_step_s, solved), forks=forks) as least_step_s:
            solved, won, facts = asked.choose_plan(solved)
            if reused is not None and not won.evaluation.is_better_than(reused[1].evaluation):
                return _write_allocation(graph, *reused)
            _write_allocation(graph, solved, won, least_step_s(), facts)

    def without_known_plan(self) -> Allocate:
        """The same options for another search: any number of stages for layers that were captured."""
        stages = tuple(pin for pin in self.stages if pin.endswith(ONE_STAGE))
        return replace(self, stages=stages, known=(), proven=())

    def _is_slower_than_known(self, reused: RefinedPlan) -> bool:
        """Whether the known plan takes clearly longer with captured layers than it did when it was chosen."""
        chosen_s = known.parse_simulated_step(self.proven)
        return 0 < chosen_s * (1 + MOST_SLOWER) < reused.evaluation.time_ns / 10**9

    def choose_plan(self, solved: SolvedAllocation) -> tuple[SolvedAllocation, RefinedPlan, dict[str, Any]]:
        """The best plan by simulation, of problems with and without activations in host memory and dealt
        samples; with its problem, and facts about how it was found."""
        won = self._refine_within_memory(solved)
        with_host = self.offer_host_memory(solved, won)
        if (
            with_host is not None
            and (offloading := self._solve_with_host_memory(solved, with_host)) is not None
        ):
            other = self._refine_within_memory(offloading)
            if other.evaluation.fits and other.evaluation.time_ns < won.evaluation.time_ns:
                solved, won = offloading, other
        dealt = self._choose_dealing(solved, won)
        facts = _dealing_facts(dealt)
        # Host memory may pay only with dealt samples, where what it saves no longer waits for other sections,
        # or lets a smaller cp fit. Where that is to be expected, they are searched once, with both.
        if with_host is None:
            with_host = self.offer_host_memory(solved, won, to_fit=True)
        divided_ns = dealt.refined.evaluation.time_ns
        best_ns, base = None, solved
        for _ in range(1 if with_host is not None else 2):
            found = self._find_dealt(base, with_host or base.work, dealt)
            if found is None:
                break
            priced, other = found
            evaluation = other.refined.evaluation
            best_ns = evaluation.time_ns if best_ns is None else min(best_ns, evaluation.time_ns)
            if evaluation.is_better_than(dealt.refined.evaluation):
                solved, dealt, facts = priced, other, _dealing_facts(other)
            with_host = self.offer_host_memory(
                replace(priced, problem=other.problem), other.refined, to_fit=True
            )
            if with_host is None:
                break
        if best_ns is not None:
            steps = divided_ns / 10**9, best_ns / 10**9
            facts |= {"step_s": {"priced as divided": steps[0], "priced as dealt": steps[1]}}
        solved, won = replace(solved, problem=dealt.problem), dealt.refined
        facts = {"dynamic_cp": facts} if facts else {}
        if solved.problem.deadline is not None or solved.work.cluster.device.backend in PLAIN_BACKENDS:
            return solved, won, facts
        ranks = assign_ranks(solved.problem, won.assignment)
        enlarged = enlarge_micro_batches(solved.make_evaluator(), won, ranks, solved.pins)
        if enlarged is not None:
            solved, own = _add_plan(solved, enlarged)
            won = replace(enlarged.refined, assignment=own)
            facts |= _step_facts("micro_batches", enlarged.step_ns)
        evaluator = solved.make_evaluator()
        own = choose_interleaving(evaluator, won, ranks, solved.pins)
        best = interleave_close_plans(evaluator, own, won.close_plans, assign_ranks, solved.pins)
        most_ns = (1 + TIED_SHARE) * best.refined.evaluation.time_ns
        limited = self._raise_sample_limits(solved, best)
        if own is not best and own.refined.evaluation.time_ns <= most_ns:
            own_limited = self._raise_sample_limits(solved, own)
            if own_limited.refined.evaluation.is_better_than(limited.refined.evaluation):
                best, limited = own, own_limited
        facts |= _interleaving_facts(best) | _step_facts("sample_limits", limited.step_ns)
        return replace(solved, problem=limited.problem), limited.refined, facts

    def _raise_sample_limits(self, solved: SolvedAllocation, plan: InterleavedPlan) -> LimitedPlan:
        """The plan with as many samples in a micro-batch as make its scheduled step shortest."""
        ranks = assign_ranks(plan.problem, plan.refined.assignment)
        evaluator = replace(solved, problem=plan.problem).make_evaluator()
        return raise_sample_limits(evaluator, plan.refined, ranks, solved.pins)

    def _find_dealt(
        self, solved: SolvedAllocation, work: Workload, known: DealtPlan
    ) -> tuple[SolvedAllocation, DealtPlan] | None:
        """The best plan with samples priced as dealt, of `work`, and its problem; `known` is one of the plans
        that it is compared with. None where samples are not dealt, or nothing fits."""
        asked = self._price_as_dealt(replace(solved, work=work))
        solution = None if asked is None else solve_allocation(asked, margin=MULTI_RANK_MARGIN)
        if asked is None or solution is None:
            return None
        priced = replace(solved, work=work, problem=asked, solution=solution)
        priced, own = _add_plan(priced, known)
        return priced, self._choose_dealing(priced, self._refine_within_memory(priced, (own,)))

    def least_step_s(self, solved: SolvedAllocation) -> float:
        """Seconds that a step takes at least under any plan on these ranks, the mean over the batches of the
        search; 0 where the number of ranks is what is sought."""
        if solved.problem.deadline is not None:
            return 0.0
        work, ranks = solved.work, solved.problem.ranks
        batches = solved.make_evaluator().batches
        if work.cluster.device.backend != "cpu":
            work = work.with_offloads((*work.offloads, "activations"))
        return bound_every_plan(work, solved.pins, ranks, batches) / 10**9

    def _choose_dealing(self, solved: SolvedAllocation, won: RefinedPlan) -> DealtPlan:
        """The plan with the shortest way to deal samples to ranks of cp."""
        ranks = assign_ranks(solved.problem, won.assignment)
        return choose_dealing(solved.make_evaluator(), won, ranks, solved.pins, MULTI_RANK_MARGIN)

    def _price_as_dealt(self, solved: SolvedAllocation) -> Problem | None:
        """The problem in which sections with cp deal their samples; None where that is not worth a second
        allocation: nothing may be dealt, or no sample is much longer than others. Where dealing is pinned, it
        is new with host memory only."""
        work, problem = solved.work, solved.problem
        dealing = [
            name
            for name, candidates in problem.sections.items()
            if ("cp_per" not in solved.pins.words.get(name, {}) or self._deals_new(solved, name))
            and any(c.cp > 1 for c in candidates)
            and next(iter(work.loads[name].spread.relative_times), 0) > UNEVEN_PERMILLE
        ]
        if not dealing or problem.deadline is not None or problem.pools:
            return None
        most = round(MOST_DEALT_RATIO * solved.solution.time_ns * solved.solution.ranks)
        free = work.cluster.device.backend != "cpu"
        return self._build_problem(work, solved.pins, solved.run_ahead, free, most, solved.most_ns)

    def _deals_new(self, solved: SolvedAllocation, section: str) -> bool:
        """Whether a section that deals by a pin may now use host memory."""
        return bool(solved.work.offloads) and solved.pins.deals_micro_batches(section)

    def solve_closed_form(self, graph: GraphOp) -> SolvedAllocation:
        """The best plan by closed forms. Raises UserError where nothing fits, and for options that are not
        possible."""
        work, pins, size = self._read_options(graph)
        free = work.cluster.device.backend != "cpu"
        asked, solution, most_ns = self._solve_without_slow_candidates(work, pins, size, free)
        if solution is None and work.cluster.device.backend == "cpu":
            asked = self._build_problem(work, pins, size, free=True)
            solution = solve_allocation(asked, margin=MULTI_RANK_MARGIN)
        if solution is None and (stages := self._stages_without_offload()):
            # Other stages may fit as well as these did before layers were captured; host memory comes last.
            raise ImpossibleChoice(explain_infeasibility(work, asked, pins), stages)
        if solution is None and work.cluster.device.backend != "cpu":
            offloading = work.with_offloads()
            with_offload = self._build_problem(offloading, pins, size, free=True)
            solution = solve_allocation(with_offload, margin=MULTI_RANK_MARGIN)
            work, asked = (offloading, with_offload) if solution is not None else (work, asked)
        if solution is None and not self.fit and (need := solve_least_memory(asked)) is not None:
            asked = replace(
                asked, capacity=need, pools=tuple(replace(pool, capacity=need) for pool in asked.pools)
            )
            solution = solve_allocation(asked, margin=MULTI_RANK_MARGIN)
        if solution is None:
            raise explain_infeasibility(work, asked, pins)
        return SolvedAllocation(work, asked, solution, pins, size, most_ns)

    def _solve_without_slow_candidates(
        self, work: Workload, pins: Pins, size: int | None, free: bool
    ) -> tuple[Problem, Solution | None, int | None]:
        """The problem, its best plan if there is one, and the time that candidates take at most, None if all
        are there. No plan that the search starts from has a candidate that takes longer."""
        most_ns = None
        if self.objective == "time":
            most_ns = estimate_longest_time(work, self._rank_count(work.cluster), pins, free)
        asked = self._build_problem(work, pins, size, free, most_ns=most_ns)
        solution = solve_allocation(asked, margin=MULTI_RANK_MARGIN)
        if most_ns is None or (solution is not None and MAX_START_RATIO * solution.time_ns <= most_ns):
            return asked, solution, most_ns
        most_ns = None if solution is None else MAX_START_RATIO * solution.time_ns
        asked = self._build_problem(work, pins, size, free, most_ns=most_ns)
        return asked, solve_allocation(asked, margin=MULTI_RANK_MARGIN), most_ns

    def _stages_without_offload(self) -> list[str]:
        """The stages of a plan that fitted on devices alone, as far as the user has not pinned them."""
        offloads = {
            text.partition("=")[2] for text in self.known if text.partition("=")[0].endswith(".offload")
        }
        return [stage for stage in self.stages if stage not in self.set] if offloads == {"none"} else []

    def offer_host_memory(
        self, solved: SolvedAllocation, won: RefinedPlan, to_fit: bool = False
    ) -> Workload | None:
        """The work with host memory where using it may save time: frozen layers fill much of a device, or
        layers run again and copies would take less, or with `to_fit` all layers run again on ranks of
        cp; None elsewhere."""
        chosen = {s: cs[won.assignment.choice[s]] for s, cs in solved.problem.sections.items()}
        work = solved.work.with_offloads((*solved.work.offloads, "activations", "weights"))
        device = work.cluster.device
        if self.objective == "gpus" or device.backend == "cpu" or solved.work.offloads:
            return None
        loads = [(work.loads[s], c) for s, c in chosen.items()]
        weights = any(
            not load.cost.trainable and 2 * layer_bytes(load.cost) > device.usable_memory for load, _ in loads
        )
        activations = any(
            may_copy_in_place_of_recomputing(work, load, c)
            or (to_fit and c.recompute == "full" and c.cp > 1 and c.offload == "none")
            for load, c in loads
        )
        offloads = [*(["weights"] if weights else []), *(["activations"] if activations else [])]
        return solved.work.with_offloads(tuple(offloads)) if offloads else None

    def _solve_with_host_memory(self, solved: SolvedAllocation, work: Workload) -> SolvedAllocation | None:
        """The best plan by closed forms of `work`, which may use host memory; None unless it is shorter."""
        asked = self._build_problem(work, solved.pins, solved.run_ahead, free=True, most_ns=solved.most_ns)
        solution = solve_allocation(asked, margin=MULTI_RANK_MARGIN)
        if solution is None or solution.time_ns >= solved.solution.time_ns:
            return None
        return SolvedAllocation(work, asked, solution, solved.pins, solved.run_ahead, solved.most_ns)

    def _refine_within_memory(
        self, solved: SolvedAllocation, others: Sequence[Assignment] = ()
    ) -> RefinedPlan:
        """The best plan by simulation, also of `others`. Where batches need more memory than closed forms say
        in all plans that were tried, the search starts again from plans that closed forms put further below
        the limit; the last plan that was found, if none of them fits."""
        won, asked = self.refine_solution(solved, others), solved.problem
        for share in () if won.evaluation.fits or asked.deadline is not None else RESERVED_SHARES:
            tight = replace(
                asked,
                capacity=round(asked.capacity * (1 - share)),
                pools=tuple(replace(p, capacity=round(p.capacity * (1 - share))) for p in asked.pools),
            )
            if (solution := solve_allocation(tight, margin=MULTI_RANK_MARGIN)) is None:
                break
            other = self.refine_solution(replace(solved, solution=solution))
            if other.evaluation.fits:
                return other
        return won

    def refine_solution(self, solved: SolvedAllocation, others: Sequence[Assignment] = ()) -> RefinedPlan:
        """The best plan by simulation with the scheduler, among the solver's plan, `others`, and their
        neighbours."""
        asked = solved.problem
        return refine_by_simulation(
            solved.make_evaluator(),
            asked,
            solved.solution.assignment,
            partial(assign_ranks, asked),
            MULTI_RANK_MARGIN,
            others,
        )

    def _reuse_known_plan(
        self, graph: GraphOp
    ) -> tuple[SolvedAllocation, RefinedPlan, float, dict[str, Any]] | None:
        """The plan that is known, with what was proven of it, the least step of any plan in seconds and the
        steps that its search compared, if it can still be had: nothing else is priced."""
        work, _, size = self._read_options(graph)
        names = [s.sym.data for s in graph.sections]
        if any(choice.partition("=")[0].rpartition(".")[0] not in names for choice in self.known):
            return None  # captured layers have other boundaries, and sections other names
        pins = pins_.parse_pins((*self._stages_of(names), *self.set, *self.known), names, self.refused)
        pins = pin_whole_batches(graph, pins)
        try:
            asked = self._build_problem(work, pins, size, free=True)
        except UserError:
            return None
        if (found := known.assignment_from_choices(asked, self.known)) is None:
            return None
        tried, value = (
            PlanEvaluator(work, asked, size).evaluate(found, assign_ranks(asked, found)),
            evaluate_assignment(asked, found),
        )
        status, gap, trials, least_step_s = known.parse_solver_status(self.proven)
        solved = SolvedAllocation(
            work, asked, Solution(found, value.time_ns, status, gap, value.ranks), pins, size
        )
        won = RefinedPlan(found, tried, value.time_ns, trials)
        compared = known.parse_compared_steps(self.proven)
        return (solved, won, least_step_s, compared) if tried.fits else None

    def _stages_of(self, names: Collection[str]) -> tuple[str, ...]:
        """The numbers of stages that layers were captured for, without those of sections in one stage that
        there are no longer."""
        return tuple(
            pin for pin in self.stages if not pin.endswith(ONE_STAGE) or pin.removesuffix(ONE_STAGE) in names
        )

    def read_cluster(self) -> Cluster:
        """The cluster that plans are priced for."""
        return parse_cluster(self.cluster)

    def _read_options(self, graph: GraphOp) -> tuple[Workload, Pins, int | None]:
        """Reads the options: the work, the pins, and the bytes for prefetched results. Raises UserError for
        invalid ones."""
        cluster = cluster_with_overheads(graph, self.read_cluster())
        ranks = self._rank_count(cluster)
        names = [s.sym.data for s in graph.sections]
        pins = pins_.parse_pins((*self._stages_of(names), *self.set), names, self.refused)
        refuse_micro_batches(graph, pins)
        pins = pin_whole_batches(graph, pins)
        for section in graph.sections:
            pins.splits_sequence(section.sym.data)  # refuses an impossible pin
            if attention := pins.words.get(section.sym.data, {}).get("attention"):
                section.attributes["pinned_attention"] = StringAttr(attention)
            elif f"{section.sym.data}.attention=frames" in pins.refused:
                section.attributes["pinned_attention"] = StringAttr("gather")
            if overlap := pins.pinned_overlap(section.sym.data):
                section.attributes["pinned_overlap"] = StringAttr(overlap)
            if (load := pins.expert_loads.get(section.sym.data)) is not None:
                section.attributes["expert_load"] = float_attr(load)
        work = build_workload(graph, cluster, self.global_batch or SAMPLES_PER_RANK * ranks)
        self._check_options(work, ranks, pins)
        run_ahead = prefetch_memory.parse_run_ahead(self.run_ahead)
        if run_ahead:
            prefetch_memory.check_can_prefetch(work)
        return work, pins, run_ahead

    def _build_problem(
        self,
        work: Workload,
        pins: Pins,
        size: int | None,
        free: bool,
        most_dealt: int | None = None,
        most_ns: int | None = None,
    ) -> Problem:
        deadline = round(self.step_time * 10**9) if self.objective == "gpus" else None
        ranks = self._rank_count(work.cluster)
        asked = build_problem(work, ranks, self.strategy, pins, free, most_dealt, most_ns)
        return prefetch_memory.with_prefetch_buffers(replace(asked, deadline=deadline), work, size)

    def _rank_count(self, cluster: Cluster) -> int:
        if self.ranks > cluster.ranks:
            raise UserError(
                f"expected at most {cluster.ranks} ranks, all of {cluster.name}, got {self.ranks}",
                remedy="ask for fewer",
            )
        if self.ranks < 0 or self.global_batch < 0:
            raise UserError(
                f"expected ranks and global batch of at least 0, got {self.ranks} and {self.global_batch}",
                remedy="correct the number",
            )
        if self.ranks > cluster.per_node and self.ranks % cluster.per_node:
            whole = self.ranks // cluster.per_node * cluster.per_node
            raise UserError(
                f"{self.ranks} ranks are not whole nodes of the cluster {cluster.name}, which have "
                f"{cluster.per_node} devices each",
                remedy=f"ask for {whole} or {whole + cluster.per_node} ranks",
            )
        return self.ranks or cluster.ranks

    def check_choices(self) -> None:
        """Raises UserError for a strategy, objective, step time or memory to run ahead with that is wrong
        whatever the model is."""
        prefetch_memory.parse_run_ahead(self.run_ahead)
        if self.strategy not in STRATEGIES:
            raise UserError(
                f"unknown strategy {self.strategy!r}", remedy=f"strategies are {', '.join(STRATEGIES)}"
            )
        if self.objective not in OBJECTIVES:
            raise UserError(
                f"unknown objective {self.objective!r}", remedy=f"objectives are {', '.join(OBJECTIVES)}"
            )
        if (self.objective == "gpus") != (self.step_time != 0) or not 0 <= self.step_time < inf:
            raise UserError(
                "expected a positive, finite step time with the objective gpus, and none with another; got "
                f"{self.objective} with {self.step_time:g} s",
                remedy="give --objective gpus --step-time SECONDS, or neither",
            )

    def _check_options(self, work: Workload, ranks: int, pins: Pins) -> None:
        self.check_choices()
        if self.objective == "gpus":
            return
        usable = count_usable_ranks(work, self.strategy, pins, ranks)
        if ranks > usable:
            graph = work.graph
            alone = [s.sym.data for s in graph.sections if whole_batch_of_section(graph, s) == ALONE]
            why = f" (all samples of a step on one rank: {', '.join(alone)})" if alone else ""
            most = "1 rank" if usable == 1 else f"{usable} ranks"
            raise TooManyRanks(
                f"expected at most {most}, for which a global batch of {work.global_batch} samples "
                f"has work{why}, got {ranks}",
                usable,
            )


def _add_plan(
    solved: SolvedAllocation, found: DealtPlan | EnlargedPlan
) -> tuple[SolvedAllocation, Assignment]:
    """Returns an allocation with the candidates of the plan of another problem as well, and that plan."""
    sections, choice = dict(solved.problem.sections), dict[str, int]()
    for name, index in found.refined.assignment.choice.items():
        chosen = found.problem.sections[name][index]
        if chosen not in sections[name]:
            sections[name] += (chosen,)
        choice[name] = sections[name].index(chosen)
    problem = replace(solved.problem, sections=sections, edges=price_edges(solved.work, sections))
    problem = prefetch_memory.with_prefetch_buffers(problem, solved.work, solved.run_ahead)
    return replace(solved, problem=problem), replace(found.refined.assignment, choice=choice)


def _dealing_facts(dealt: DealtPlan) -> dict[str, Any]:
    """The scheduled step in seconds under each way to deal samples to ranks of cp, by section, and how many
    times as long those take that were dropped on the first batch."""
    by_section = {
        section: {way: ns / 10**9 for way, ns in by_way.items()} for section, by_way in dealt.step_ns.items()
    }
    return ({"sections": by_section} if by_section else {}) | (
        {known.DROPPED_WAYS: dealt.dropped} if dealt.dropped else {}
    )


def _step_facts(table: str, step_ns: Mapping[str, Mapping[int, int]]) -> dict[str, Any]:
    """Seconds of the scheduled step with each limit of samples in a micro-batch that was taken, by section;
    no table where none was."""
    by_section = {
        section: {str(size): ns / 10**9 for size, ns in by_size.items()}
        for section, by_size in step_ns.items()
    }
    return {table: by_section} if by_section else {}


def _interleaving_facts(plan: InterleavedPlan) -> dict[str, Any]:
    """The scheduled step in seconds with one piece of layers on a rank and with two, by section, and how many
    times as long the ways take that were dropped on the first batch."""
    by_section = {
        section: {way: ns / 10**9 for way, ns in by_way.items()} for section, by_way in plan.step_ns.items()
    }
    return ({"interleaved": by_section} if by_section else {}) | (
        {known.DROPPED_WAYS: plan.dropped} if plan.dropped else {}
    )


def _write_allocation(
    graph: GraphOp,
    solved: SolvedAllocation,
    won: RefinedPlan,
    least_step_s: float,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """`least_step_s`: what a step takes at least under any plan, 0 if unknown. `facts`: steps of ways to deal
    samples to ranks of cp, of larger micro-batches, and of ways to divide layers into pieces on a rank. Both
    are for the solver's record."""
    work, asked, pins, size = solved.work, solved.problem, solved.pins, solved.run_ahead
    solution = replace(solved.solution, assignment=won.assignment, time_ns=won.closed_form_ns)
    value = evaluate_assignment(asked, solution.assignment)
    kept, running = prefetch_memory.choose_prefetch_memory(work, asked, solution.assignment, value, size)
    groups = (
        {solution.assignment.group[s] for s in running} if size is None else set[str]()
    )  # what was asked for is in the value
    results = dict.fromkeys(groups, kept)
    chosen = {s: cs[solution.assignment.choice[s]] for s, cs in asked.sections.items()}
    ranks = assign_ranks(asked, solution.assignment)
    for name in work.loads:
        own = work.for_kind(chosen[name].kind)
        load = own.loads[name]
        group = solution.assignment.group[name]
        _write_section(
            own,
            load,
            chosen[name],
            ranks[group],
            round((value.memory[group] + results.get(group, 0)) / GIB, 4),
        )
        if chosen[name].pp == 1 and runs_layers_again(graph, load.section):
            add_section_notes(load.section, RUN_AGAIN_NOTE)
        held = in_flight_limit(work, asked, solution.assignment, value, name)
        bounded = chosen[name].pp == 1 or _feeds_others(
            asked, solution, name
        )  # `split-stages` bounds what stages hold for each other
        load.section.attributes |= {
            "in_flight": int_attr(held.in_flight if bounded else 0),
            "room_bytes": int_attr(held.size_bytes),
            "working_bytes": int_attr(passing_bytes(own, load, chosen[name])),
        }
        if chosen[name].cp_per == "micro_batch":
            limit = subgroup_limit(work, asked, solution.assignment, value, name, results.get(group, 0))
            load.section.attributes |= {
                "cp_per": StringAttr(chosen[name].cp_per),
                "cp_degrees": StringAttr(chosen[name].cp_degrees),
            }
            write_subgroup_costs(load.section, subgroup_costs(own, load, chosen[name]), limit)
    if kept:
        graph.attributes["run_ahead_gib"] = float_attr(kept / GIB)
    label = "default" if any(load.label == "default" for load in work.loads.values()) else "roofline"
    solver_record = {
        "status": solution.status,
        "gap": solution.gap,
        **_search_facts(won, solved.make_evaluator()),
        **_objective_facts(asked, solution.ranks),
        **({"least_step_s": least_step_s} if least_step_s else {}),
        **(facts or {}),
    }
    graph.attributes |= {
        "world_size": int_attr(value.ranks),
        "global_batch": int_attr(work.global_batch),
        "cluster": StringAttr(_used_cluster(work, asked, solution, chosen).to_json()),
        "reasons": StringAttr(
            json.dumps(explain_choices(work, asked, solution, pins.refused, results, size))
        ),
        "solver": StringAttr(json.dumps(solver_record)),
        "prediction": StringAttr(
            json.dumps(
                {
                    "step_time_s": solution.time_ns / 10**9,
                    "label": label,
                    **_missing_memory(work, value, solution, chosen),
                }
            )
        ),
    }


def _objective_facts(asked: Problem, ranks: int) -> dict[str, Any]:
    """The objective if it is not time, and the ranks left over if the plan's cluster is reduced to the nodes
    in use."""
    found: dict[str, Any] = (
        {} if asked.deadline is None else {"objective": "gpus", "deadline_s": asked.deadline / 10**9}
    )
    return found | ({"free_ranks": asked.ranks - ranks} if asked.pools else {})


def _search_facts(won: RefinedPlan, evaluator: PlanEvaluator) -> dict[str, Any]:
    """Returns two predictions of the step: by the closed forms that the solver minimises, and simulated in
    the order that ranks run, the latter also for each drawn batch, with the number of plans that were
    simulated and the batch that reports show."""
    steps = [ns / 10**9 for ns in evaluator.steps_as_drawn(won.evaluation)]
    return {
        "closed_form_s": won.closed_form_ns / 10**9,
        "simulated_s": won.evaluation.time_ns / 10**9,
        "tried": won.evaluated_plans,
        **({"batch_steps_s": steps} if steps else {}),
        SHOWN_BATCH: evaluator.number_of_mean_batch(won.evaluation),
    }


def _used_cluster(
    work: Workload, asked: Problem, solution: Solution, chosen: dict[str, Candidate]
) -> Cluster:
    """Returns the cluster without nodes of a kind that is not needed, if it has several kinds: ranks are
    numbered over the nodes that are used."""
    groups = [chosen[g] for g in dict.fromkeys(solution.assignment.group.values())]
    return (
        work.cluster.trim_to_ranks(
            [sum(asked.ranks_in_pool(c, k) for c in groups) for k in range(len(asked.pools))]
        )
        if asked.pools
        else work.cluster
    )


def _missing_memory(
    work: Workload, value: PlanValue, solution: Solution, chosen: dict[str, Candidate]
) -> dict[str, float]:
    """GiB that a rank needs beyond its usable memory, if any."""
    group = solution.assignment.group
    missing = max(
        value.memory[group[s]] - work.for_kind(c.kind).cluster.device.usable_memory for s, c in chosen.items()
    )
    return {"missing_gib": round(missing / GIB, 4)} if missing > 0 else {}


def _feeds_others(asked: Problem, solution: Solution, section: str) -> bool:
    """Whether a section has consumers on other ranks, for which it holds micro-batches between forward and
    backward."""
    group = solution.assignment.group
    return any(e.src == section and group[e.dst] != group[section] for e in asked.edges)


def assign_ranks(asked: Problem, assignment: Assignment) -> dict[str, list[int]]:
    """Consecutive ranks for each group, one kind of device after the other. Groups are sorted by decreasing
    tp * cp, which are powers of two, so each group starts at a multiple of its own."""
    chosen = {s: cs[assignment.choice[s]] for s, cs in asked.sections.items()}
    work: dict[str, int] = {}
    widest: dict[str, int] = {}
    for s, group in assignment.group.items():
        work[group] = work.get(group, 0) + chosen[s].time_ns * chosen[s].ranks
        widest[group] = max(widest.get(group, 1), chosen[s].stage_ranks)
    start, ranks = 0, dict[str, list[int]]()
    for group in sorted(work, key=lambda g: (chosen[g].kind, -widest[g], -work[g], g)):
        ranks[group] = list(range(start, start + chosen[group].ranks))
        start += chosen[group].ranks
    return ranks


def _write_section(
    work: Workload, load: SectionLoad, chosen: Candidate, ranks: list[int], memory_gib: float
) -> None:
    """FLOPs and parameters are those of the whole section; what is saved, and times, those of one rank of a
    replica."""
    rank = work.rank_load(load, chosen.shape)
    forward_ns, backward_ns = micro_batch_time_expressions(
        work, rank, chosen.dp, chosen.sharding, chosen.recompute
    )
    held = rank.cost_under_recompute(chosen.recompute)
    between = held.kept_between
    cost = replace(load.cost, saved=held.saved, streamed=held.streamed, kept_between=between)
    write_section_cost(load.section, cost)
    load.section.attributes |= {
        "dp": int_attr(chosen.dp),
        "tp": int_attr(chosen.tp),
        "pp": int_attr(chosen.pp),
        "micro_batch": int_attr(chosen.micro_batch),
        "ranks": int_list_attr(ranks),
        "recompute": StringAttr(chosen.recompute),
        "sharding": StringAttr(chosen.sharding),
        "backward": StringAttr(chosen.backward),
        "offload": StringAttr(chosen.offload),
        "host_gib": float_attr(round(chosen.host_memory / GIB, 4)),
        "memory_gib": float_attr(memory_gib),
        "label": StringAttr(rank.label),
        "forward_ns": StringAttr(forward_ns),
        "backward_ns": StringAttr(backward_ns),
    } | {key: int_attr(n) for key, n in (("cp", chosen.cp), ("ep", chosen.ep)) if n > 1}
    if chosen.chunks > 1:
        load.section.attributes |= {
            "chunks": int_attr(chosen.chunks),
            "placement": StringAttr(chosen.placement),
        }
    if chosen.pp > 1 and (divided := load.layers_at_even_cuts(chosen.shape.stages)):
        load.section.attributes["layers_at_cuts"] = int_list_attr(divided)
    if rank.row_attention != "gather":
        load.section.attributes["row_attention"] = StringAttr(rank.row_attention)
    if chosen.norms != "whole":
        load.section.attributes["norms"] = StringAttr(chosen.norms)
    if rank.overlap != "none":
        load.section.attributes["overlap"] = StringAttr(rank.overlap)
    if chosen.micro_batch_tokens:
        load.section.attributes |= {
            "most_samples": int_attr(chosen.most_samples),
            "micro_batch_tokens": int_attr(chosen.micro_batch_tokens),
            "token_count": StringAttr(token_count(work.graph)),
        }
    elif chosen.sample_limit:
        load.section.attributes["most_samples"] = int_attr(chosen.most_samples)
