"""The schema of plan.json: what a plan hands to its ranks and to other tools.

Plain dataclasses, so that a rank reads a plan with nothing but the standard library. Sizes are in bytes
unless a name says GiB, times in integer nanoseconds (`_ns`) or seconds (`_s`); expressions are texts that
`secc.runtime.plan.expr_eval` evaluates.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from dataclasses import dataclass, field
from typing import Any

CLASS_KEY = "*class"  # key that marks a dict as a flattened object; its value names the class
# Key suffixes of a list that grows with the samples: its entries joined, their sizes, their largest size, and
# of a list of lists how many entries each has (`secc.runtime.model.nested_batch`).
EACH_SUFFIX, SIZES_SUFFIX, LARGEST_SUFFIX, COUNTS_SUFFIX = "*", "*sizes", "*most", "*counts"
# With a number: the label of what a loop over samples adds to the loss (`secc.runtime.recorder.loss_loops`).
LOOP_LABEL_PREFIX = "loss:"
FUNCTION_PREFIX = "function."  # of the target of a call of a user's autograd function in the IR
OUTPUT_PREFIX = "output:"  # of outputs among the loss terms that a section returns
_LOG_PREFIX = "log:"
OVERLAPS = ("none", "backward", "both")  # which sums over tp travel behind products (`Section.overlap`)
PLACEMENTS = ("loop", "v")  # of several chunks of layers on the ranks of a pipeline (`rank_position`)
STATISTIC_PREFIX, GATHERED_PREFIX = "batch:", "rows:"
SAMPLE_COUNT_SYMBOL = "B"  # the size that counts samples
ALL_SAMPLES = "all_samples"  # the size of a global batch, in ops on rows that were gathered
# Raised whenever an older plan would be read wrongly: its plan.json or its section modules.
PLAN_VERSION = 3


@dataclass(frozen=True)
class Symbol:
    """A size of the inputs. `kind` is "rows" (adds up over samples) or "width" (maximum over samples).

    Its value is `batch[key].shape[dim]`, or 0 if the batch lacks the key; `B`, the number of samples, always
    exists. For a size that depends on values of the inputs, `key` is the label of a recorded tensor
    (`secc.runtime.recorder.outline`); a recording puts that tensor's size into the batch.
    """

    name: str
    kind: str
    key: str
    dim: int

    @property
    def is_padded(self) -> bool:
        """Whether collate pads to this width; widths of tensors that forward makes of a list never are."""
        return self.kind == "width" and not self.key.endswith(LARGEST_SUFFIX)


def is_tensor_label(key: str) -> bool:
    """Returns whether a symbol's key is the label of a recorded tensor instead of a key of the batch."""
    return ":" in key or key.startswith("result ")


COUNTING_FILL, REPEATING_FILL = "next", "same"
TEXT_FILLS = (COUNTING_FILL, REPEATING_FILL)
PadFill = float | tuple[float, ...] | str  # as a text, one of TEXT_FILLS
MAX_PAD_ROW = 256  # numbers of a padded row


@dataclass(frozen=True)
class Input:
    """A key of the collated batch. `dims` are expressions; `pads` has (dim, side, fill) for each padded dim.
    A fill is one number, or the numbers of a padded row over all constant dims, in order, or "next": padding
    goes on counting from the entry before it, as position ids do, or "same": it repeats the nearest entry.
    """

    key: str
    dtype: str
    dims: tuple[str, ...]
    optional: bool = False
    pads: tuple[tuple[int, str, PadFill], ...] = ()


@dataclass(frozen=True)
class Mesh:
    """The ranks of a section, ordered (dp, pp, cp, tp) with tp fastest; `len(ranks) == dp * pp * tp * cp`.

    `ep` parts of the experts lie on the ranks that hold copies of the section; it adds no ranks.
    """

    ranks: tuple[int, ...]
    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def expert_replicas(self) -> int:
        """Consecutive replicas with different experts, which exchange tokens; 1 where each has all."""
        return max(1, self.ep // self.tp)

    @property
    def replica_size(self) -> int:
        """The number of ranks of a replica of one stage, which run the same program."""
        return self.tp * self.cp

    @property
    def copies(self) -> int:
        """The number of ranks that hold the same part of a parameter, and sum its gradients."""
        return self.dp * self.cp


@dataclass(frozen=True)
class Cost:
    """Predicted time of one micro-batch: expressions in nanoseconds over its symbols; `label` names their
    source.

    `flops` and `backward_flops` are floating-point operations in `dtype` (a short name such as "bf16"),
    `saved` the bytes kept from forward to backward, `streamed` those of layers on their way to or from host
    memory, `kept_between` what is kept in addition from the start of a split backward's first part to the end
    of the second; "" where unknown or nothing.
    """

    forward_ns: str = "0"
    backward_ns: str = "0"
    label: str = "default"
    flops: str = ""
    backward_flops: str = ""
    saved: str = ""
    dtype: str = ""
    streamed: str = ""
    kept_between: str = ""


@dataclass(frozen=True)
class SubgroupCost:
    """Predicted time of samples that `ranks` ranks of cp compute, sharing their rows; `cost.saved` are the
    bytes that each of them keeps and needs temporarily."""

    ranks: int
    cost: Cost


@dataclass(frozen=True)
class Shard:
    """A parameter cut along `dim` over the ranks of a tensor-parallel replica; `parts` are the sizes of
    blocks stored one after another in that dim, each cut by itself.

    With `ep` above 1, dim 0 (experts) is cut into `ep` blocks first, and the ranks of one block, which are
    consecutive, share it along `dim`. With `replicas` above 1, that many consecutive replicas have different
    parts of what each rank of a replica would have.

    holder: the one rank that has all of it, of those of `replicas` replicas, while others have nothing
    (experts that are modules of their own); -1 if it is divided.
    """

    name: str
    dim: int
    parts: tuple[int, ...]
    ep: int = 1
    replicas: int = 1
    holder: int = -1


@dataclass(frozen=True)
class ModuleStyle:
    """How the user's module at path `module` computes on its shards (`runtime.tensor_parallel.styles`).

    `arguments`: of a module of experts, the names of hidden states, indices of experts, and weights, then of
    biases of results that ranks have some entries of; of one with experts in a list, the name of the list.
    """

    module: str
    kind: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """One section, or one stage of a section that runs as a pipeline.

    A sample activates the section if it has at least one of the optional keys `when` ([] = always). A stage
    is a section of its own with `pp` 1; `pipeline` names the user's section, and its samples pass through all
    stages in the same micro-batches. A rank may hold several `chunks` of layers, each a stage, that lie on
    the ranks as `placement` says (`rank_position`). `in_flight` is how many micro-batches a rank may hold
    between forward and backward (0: any number), `room_bytes` how many bytes these may keep together, by
    `cost.saved` and `cost.kept_between` (0: unknown); `working_bytes` are set aside for what a pass needs for
    a time. With `weight_permille`, the backward is split: B computes the gradients of the inputs and W those
    of the parameters (zero-bubble pipelines), and W takes this many thousandths of the backward.
    A micro-batch has at most `micro_batch` samples. The memory of a rank is planned for micro-batches of
    `mean_samples` samples of mean size (0: of `micro_batch`). With `micro_batch_tokens` (0: any number), a
    micro-batch of several samples has at most this number of tokens, padding included; `token_count` is the
    expression that counts them.

    `units` are the blocks with layers that all-gather their parameters one by one, in calling order: in every
    pass under `zero3`, in the first forward after an update under `zero1` and `zero2`.

    With tp, `shards` and `styles` say how its modules are sharded; the gradients of the unsharded parameters
    in `partial` are partial sums on each tp rank, and `overlap` says which sums over tp travel behind
    products: "none", those of input gradients ("backward"), or those of forwards, too ("both").

    With cp, the layers `row_layers` (module paths) work on a rank's rows of the sequence
    (`runtime.context_parallel`); `row_modules` inside of them do so row by row, without rules for their code,
    and `row_attention` is how their attention reaches the rows of other ranks ("gather" or "ulysses";
    "frames": ranks have whole entries of the batch instead of rows). With
    `cp_per` "micro_batch", a micro-batch of several samples may be dealt: subgroups of the ranks of cp, all
    of one size, compute different samples (`runtime.plan.dealt_samples`). `subgroups` are the possible sizes,
    ascending, with their costs; what a rank keeps and needs temporarily is at most `subgroup_bytes`.
    With `whole_batch`, a replica has one micro-batch in a step, with all its samples, and replicas sum the
    statistics of their batch norms (`runtime.sections.synchronized_norms`).

    `offload` says what lives in host memory, `host_gib` on each rank, and is on the device only while it is
    needed: "optimizer" states with float32 masters, the "weights" of a frozen section, one of its `units`
    after the other, or the "activations" that layers save for their backward.
    """

    name: str
    module: str
    mode: str
    when: tuple[str, ...]
    blocks: tuple[str, ...]
    params: tuple[str, ...]
    mesh: Mesh
    micro_batch: int
    recompute: str = "none"
    sharding: str = "none"
    memory_gib: float = 0.0
    label: str = "default"
    cost: Cost = Cost()
    pipeline: str = ""
    stage: int = 0
    chunks: int = 1
    placement: str = "loop"
    in_flight: int = 0
    room_bytes: int = 0
    working_bytes: int = 0
    weight_permille: int = 0
    mean_samples: int = 0
    micro_batch_tokens: int = 0
    token_count: str = ""
    shards: tuple[Shard, ...] = ()
    styles: tuple[ModuleStyle, ...] = ()
    partial: tuple[str, ...] = ()
    overlap: str = "none"
    units: tuple[str, ...] = ()
    row_attention: str = "gather"
    row_layers: tuple[str, ...] = ()
    row_modules: tuple[str, ...] = ()
    cp_per: str = "section"
    subgroups: tuple[SubgroupCost, ...] = ()
    subgroup_bytes: int = 0
    whole_batch: bool = False
    offload: str = "none"
    host_gib: float = 0.0

    @property
    def norms(self) -> str:
        """Whether norms work on "whole" sequences, or in some layers on the positions of a rank of tp
        ("sequence")."""
        return "sequence" if any(style.kind == "sequence" for style in self.styles) else "whole"

    @property
    def may_deal(self) -> bool:
        """Whether a micro-batch's samples may be dealt to the ranks of cp."""
        return self.cp_per == "micro_batch" and self.mesh.cp > 1

    @property
    def cp_degrees(self) -> str:
        """Whether such samples go to subgroups of "any" size, or to single ranks only ("one_or_all")."""
        sizes = [s.ranks for s in self.subgroups]
        return (
            "one_or_all"
            if sizes == [1] and any(self.mesh.cp % n == 0 for n in range(2, self.mesh.cp))
            else "any"
        )

    @property
    def most_samples(self) -> int:
        """The most samples of a micro-batch: `micro_batch`, or that many for each rank they are dealt to; any
        number for a section that takes all at once."""
        if self.whole_batch:
            return sys.maxsize
        return self.micro_batch * (self.mesh.cp if self.may_deal else 1)

    @property
    def user_section_name(self) -> str:
        """The name of the section that the user knows: a stage's pipeline, else its own name."""
        return self.pipeline or self.name


@dataclass(frozen=True)
class Edge:
    """A tensor that one section produces and another consumes.

    `dims` are its dims over the symbols of a micro-batch, `dim` is the sample dim, and `rows` the number of
    entries in it that belong to one sample. `extents` lists other dims as (dim, expression, side) in which
    samples may be narrower than the micro-batch (only if widths are "own"). `grad` says whether a gradient
    flows back, `when` is the producer's predicate. Stages of a pipeline have the same micro-batches, so a
    tensor passes between them as a whole: `dim` is -1 and `rows` empty.

    `fills` are what the producer writes where it pads the dims of `extents`, in their order (() for zeros);
    the consumer pads with it, too. Where an entry is padding by several dims, the last of them counts.
    """

    name: str
    src: str
    dst: str
    dtype: str
    dims: tuple[str, ...]
    dim: int
    rows: str
    grad: bool
    when: tuple[str, ...] = ()
    extents: tuple[tuple[int, str, str], ...] = ()
    bytes_per_sample: float = 0.0
    fills: tuple[float, ...] = ()


@dataclass(frozen=True)
class SectionOutput:
    """A tensor of forward, or of the batch, that `metrics()` asks for: `section` has it. The other fields are
    those of an edge; each sample's rows are found in the same way."""

    name: str
    section: str
    dtype: str
    dims: tuple[str, ...]
    dim: int
    rows: str
    extents: tuple[tuple[int, str, str], ...] = ()


@dataclass(frozen=True)
class LossTerm:
    """A term of the loss: the section that computes its numerator, and its coefficient as readable text (the
    code is in terms.py).

    Terms of a logged scalar that forward returns in addition to the loss are named `log:NAME:`, with a number
    if there are several. Two kinds belong to no loss and are found in a first pass: statistics of the global
    batch, named `batch:NAME`, with `entries` numbers, and rows of all its samples, named `rows:NAME`, with
    `entries` numbers for each. What is computed from such values is found in the next forward, `first_pass`.
    """

    name: str
    section: str
    coefficient: str
    where: str = ""
    entries: int = 1
    first_pass: int = 1

    @property
    def logged_scalar(self) -> str:
        """The name of the logged scalar that the term belongs to, "" for the loss."""
        return logged_scalar_name(self.name)


def is_statistic(term: str) -> bool:
    """Returns whether a term is a statistic of the global batch or has rows of its samples: it belongs to no
    loss."""
    return term.startswith((STATISTIC_PREFIX, GATHERED_PREFIX))


def is_gathered(term: str) -> bool:
    """Returns whether a term has one row for each sample."""
    return term.startswith(GATHERED_PREFIX)


def logged_scalar_name(term: str) -> str:
    """Returns the name of the logged scalar that the term named `term` belongs to, "" for the loss."""
    return term.removeprefix(_LOG_PREFIX).rpartition(":")[0] if term.startswith(_LOG_PREFIX) else ""


@dataclass(frozen=True)
class RandomOp:
    """A random op. `call` identifies it (`module.path@file:line#n`; `#*` stands for all of a loop), `dims`
    are the dims of its result that run over the samples' rows, and `rows` is a sample's number of rows.

    The first of `dims` decides which sample a number belongs to. Without dims, all samples share the numbers
    if `rows` is "0"; else a loop over the rows draws once for each, in order, and may run several times.
    """

    call: str
    dims: tuple[int, ...]
    rows: str
    where: str = ""

    @property
    def has_call_per_row(self) -> bool:
        """Whether each call draws for one row."""
        return not self.dims and self.rows != "0"


@dataclass(frozen=True)
class FusionRecord:
    """A place where a fused operator replaced the user's ops (`why` is empty), or the reason why a rule did
    not apply.

    `what` names the modules or ops, `where` is their file:line in the user's code.
    """

    rule: str
    what: str
    where: str
    why: str = ""


@dataclass(frozen=True)
class CodeRewrite:
    """Code with fused operators: the function `name` of sections/fused.py replaces `method` of `modules`
    (paths, of class `cls`).

    With `function`, it replaces the global function of this name that the method calls. `lines` are the
    user's lines: the definition's, then one for each statement.
    """

    name: str
    cls: str
    method: str
    function: str
    modules: tuple[str, ...]
    lines: tuple[int, ...]


@dataclass(frozen=True)
class TiedParameter:
    """One parameter with several names or in several sections; gradients are summed over all their ranks."""

    names: tuple[str, ...]
    sections: tuple[str, ...]


@dataclass(frozen=True)
class RerecordedCase:
    """A capture case that needs its glue code recorded again for each micro-batch. `when` is its input
    pattern, `why` and `where` the cause.

    A pattern may have several cases, which differ in the blocks that they call. A `spare` case covers
    micro-batches that no compiled case fits. `nodes` is the outline that every recording must match
    (`secc.runtime.recorder.match_outline`).
    """

    name: str
    when: tuple[str, ...]
    why: str
    where: str
    nodes: tuple[dict[str, Any], ...]
    spare: bool = False


@dataclass(frozen=True)
class ModelRef:
    """The user's model file, with what shows whether it has changed since compilation: hashes of it and of
    the user's files that it imports, its parameters, and versions of packages that define its modules. Ranks
    import the Python modules of these before they fork loaders.
    """

    path: str
    sha256: str
    parameters: dict[str, str] = field(default_factory=dict)  # name -> "float32[64, 64] train"
    imports: dict[str, str] = field(default_factory=dict)  # module name -> SHA-256 of its file
    packages: dict[str, str] = field(default_factory=dict)  # name -> version
    functions: tuple[str, ...] = ()  # functions of the user's code that are blocks, "MODULE:NAME"
    modules: tuple[str, ...] = ()  # of the packages: those with classes in the model


@dataclass(frozen=True)
class Plan:
    """The contents of plan.json: the sections of a model, their meshes and edges, and what compilation
    found.
    """

    version: int
    hash: str
    model: ModelRef
    world_size: int
    global_batch: int
    widths: str  # "own" or "global"
    symbols: tuple[Symbol, ...]
    inputs: tuple[Input, ...]
    sections: tuple[Section, ...]
    edges: tuple[Edge, ...]
    terms: tuple[LossTerm, ...]
    ties: tuple[TiedParameter, ...]
    cluster: dict[str, Any]
    solver: dict[str, Any]
    prediction: dict[str, Any]
    checks: dict[str, Any] = field(default_factory=dict)
    # By section: its alternatives, and what its time and memory consist of.
    reasons: dict[str, Any] = field(default_factory=dict)
    draws: tuple[RandomOp, ...] = ()
    fusions: tuple[FusionRecord, ...] = ()
    rewrites: tuple[CodeRewrite, ...] = ()
    fused: tuple[str, ...] = ()  # blocks that fused operators replace; they only provide parameters
    recorded: tuple[RerecordedCase, ...] = ()
    dtype: str = ""  # what modules compute in, with float32 masters ("bf16"); "" for the model's own
    labels_key: str = ""  # the input with labels; entries other than -100 are counted as tokens
    # Memory on each rank of a prefetching section for results of the next global batch.
    run_ahead_gib: float = 0.0
    outputs: tuple[SectionOutput, ...] = ()  # what `metrics()` asks for besides scalars

    @property
    def predicted_step_s(self) -> float | None:
        """The predicted seconds of a step, the one figure that messages and reports show: the simulated step
        if one was simulated, else what the solver's search or its closed form gives; None if unknown."""
        seconds = self.prediction.get("simulated", {}).get("step_time_s")
        seconds = seconds if seconds is not None else self.solver.get("simulated_s")
        seconds = seconds if seconds is not None else self.prediction.get("step_time_s")
        return float(seconds) if seconds is not None else None

    def find_section(self, name: str) -> Section:
        """Returns the section or stage named `name`."""
        return next(s for s in self.sections if s.name == name)

    @property
    def pipelines(self) -> dict[str, tuple[Section, ...]]:
        """The stages of each of the user's sections, by its name; the section alone if it is no pipeline."""
        stages_by_name: dict[str, tuple[Section, ...]] = {}
        for s in self.sections:
            stages_by_name[s.user_section_name] = (*stages_by_name.get(s.user_section_name, ()), s)
        return {name: tuple(sorted(stages, key=lambda s: s.stage)) for name, stages in stages_by_name.items()}

    @property
    def user_sections(self) -> tuple[Section, ...]:
        """The user's sections: the stages of a pipeline joined into one section, with ranks ordered (dp, pp,
        cp, tp).
        """
        return tuple(
            join_stages(stages) if stages[0].pipeline else stages[0] for stages in self.pipelines.values()
        )


def join_stages(stages: tuple[Section, ...]) -> Section:
    """Joins the stages of a pipeline into one section; its memory is that of the fullest rank. Its
    `weight_permille`, the largest, is not written."""
    first, costs = stages[0], [s.cost for s in stages]
    mesh, size = first.mesh, first.mesh.replica_size
    first_chunks = stages[: len(stages) // first.chunks]  # one on each rank, in the order of the ranks
    ranks = tuple(
        r for d in range(mesh.dp) for s in first_chunks for r in s.mesh.ranks[d * size : (d + 1) * size]
    )

    def total(field: str) -> str:
        return " + ".join(text for c in costs if (text := getattr(c, field)))

    return dataclasses.replace(
        first,
        name=first.pipeline,
        module="",
        mode=max((s.mode for s in stages), key=("forward", "dgrad", "train").index),
        blocks=tuple(dict.fromkeys(b for s in stages for b in s.blocks)),
        params=tuple(dict.fromkeys(p for s in stages for p in s.params)),
        mesh=dataclasses.replace(mesh, ranks=ranks, pp=len(first_chunks)),
        memory_gib=max(s.memory_gib for s in stages),
        cost=dataclasses.replace(
            costs[0],
            **{f: total(f) for f in ("forward_ns", "backward_ns", "flops", "backward_flops", "saved")},
            kept_between=total("kept_between"),
        ),
        pipeline="",
        in_flight=0,
        room_bytes=0,
        working_bytes=0,
        weight_permille=max(s.weight_permille for s in stages),
    )


def rank_position(stage: int, pp: int, placement: str) -> int:
    """The place of the ranks of a stage among the `pp` places of a pipeline with several chunks of layers on
    a rank. In a "loop" (Narayanan et al. 2021) the second chunks start on the first rank again; in a "v" (Qi
    et al. 2024) they run back from the last rank, so the first rank holds both ends of the section."""
    chunk, place = divmod(stage, pp)
    return pp - 1 - place if placement == "v" and chunk % 2 else place


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Returns what plan.json holds: the user's sections by name, pipelines with their `stages`, other fields
    as they are.
    """
    sections = {s.name: _section_to_dict(s) for s in plan.user_sections}
    for s in sections.values():
        del s["pipeline"], s["stage"], s["weight_permille"]
    for name, stages in plan.pipelines.items():
        if stages[0].pipeline:
            sections[name]["stages"] = [_section_to_dict(s) for s in stages]
    data: dict[str, Any] = dataclasses.asdict(plan) | {"sections": sections}
    if not plan.outputs:
        del data["outputs"]
    for edge in data["edges"]:
        if not edge["fills"]:
            del edge["fills"]
    return data


def _section_to_dict(section: Section) -> dict[str, Any]:
    found = dataclasses.asdict(section)
    if section.cp_per == "section":
        del found["cp_per"], found["subgroups"], found["subgroup_bytes"]
    if not section.whole_batch:
        del found["whole_batch"]
    if section.chunks == 1:
        del found["chunks"], found["placement"]
    if section.overlap == "none":
        del found["overlap"]
    if not section.working_bytes:
        del found["working_bytes"]
    for cost in (found["cost"], *(s["cost"] for s in found.get("subgroups", ()))):
        if not cost["kept_between"]:
            del cost["kept_between"]
    return found


def plan_to_json(plan: Plan) -> str:
    """Returns the text of plan.json, with a digest of its contents."""
    data = json.loads(json.dumps(plan_to_dict(plan)))
    return json.dumps(data | {"digest": plan_digest(data)}, indent=2) + "\n"


def plan_digest(data: dict[str, Any]) -> str:
    """Returns the digest of the contents of plan.json, with the order of their keys: that of the sections has
    a meaning."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()
