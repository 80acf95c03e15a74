"""The schema of plan.json: what a plan hands to its ranks and to other tools.

Plain dataclasses, so that a rank reads a plan with nothing but the standard library. Sizes are in bytes
unless a name says GiB, times in integer nanoseconds (`_ns`) or seconds (`_s`), expressions are texts that
`secc.runtime.plan.expr_eval` evaluates.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from secc.runtime.errors import UserError

CLASS_KEY = "*class"  # the key of a dict that stands for an object: what class it is of
EACH_SUFFIX, SIZES_SUFFIX, LARGEST_SUFFIX = (
    "*",
    "*sizes",
    "*most",
)  # what the keys of a list that grows with the samples end with (`secc.runtime.model.nested_batch`)
# and a number: the label of what a loop over samples adds to the loss (`secc.runtime.recorder.loss_loops`)
LOOP_LABEL_PREFIX = "loss:"
_LOG_PREFIX = "log:"
# another one wherever a plan made before would be read wrongly: in plan.json or in what section modules say
PLAN_VERSION = 3


@dataclass(frozen=True)
class Symbol:
    """A size of the inputs. `kind` is "rows" (adds up over samples) or "width" (maximum over samples).

    It is read as `batch[key].shape[dim]`, and 0 where the key is missing; `B`, the number of samples, always
    exists. Where values of the inputs decide it, `key` is the label of a tensor
    (`secc.runtime.recorder.outline`), whose size a recording puts into the batch.
    """

    name: str
    kind: str
    key: str
    dim: int

    @property
    def is_padded(self) -> bool:
        """Whether it is a width that collate pads to; what forward makes of a list has the list's own widths
        always."""
        return self.kind == "width" and not self.key.endswith(LARGEST_SUFFIX)


def is_tensor_label(key: str) -> bool:
    """Whether a symbol's key is the label of a tensor of a recording, not a key of the batch."""
    return ":" in key or key.startswith("result ")


@dataclass(frozen=True)
class Input:
    """A key of the collated batch. `dims` are expressions; `pads` holds (dim, side, value) for each dim that
    is a padded width."""

    key: str
    dtype: str
    dims: tuple[str, ...]
    optional: bool = False
    pads: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True)
class Mesh:
    """The ranks of a section, ordered (dp, pp, tp) with tp fastest; `len(ranks) == dp * pp * tp`."""

    ranks: tuple[int, ...]
    dp: int = 1
    pp: int = 1
    tp: int = 1


@dataclass(frozen=True)
class Cost:
    """Modelled time of one micro-batch: expressions in nanoseconds over the micro-batch's symbols, and where
    they come from.

    `flops` and `backward_flops` are its floating-point operations in `dtype` (a short name such as "bf16"),
    `saved` the bytes that it keeps from forward to backward; "" where they are not known.
    """

    forward_ns: str = "0"
    backward_ns: str = "0"
    label: str = "default"
    flops: str = ""
    backward_flops: str = ""
    saved: str = ""
    dtype: str = ""


@dataclass(frozen=True)
class Shard:
    """A parameter that the ranks of a tensor-parallel replica have parts of: cut along `dim`, which holds
    `parts` entries side by side."""

    name: str
    dim: int
    parts: tuple[int, ...]


@dataclass(frozen=True)
class ModuleStyle:
    """How one of the user's modules, at path `module`, works on the parts
    (`secc.runtime.tensor_parallel.styles`)."""

    module: str
    kind: str


@dataclass(frozen=True)
class Section:
    """One section, or one stage of a section that runs as a pipeline.

    `when` is the set of optional keys of which a sample needs at least one to be active ([] = always active).
    A stage is a section of its own with `pp` 1, whose `pipeline` names the section that the user knows; its
    samples pass through all stages in the same micro-batches. `in_flight` is how many micro-batches a rank
    may hold between forward and backward (0: any number), `room_bytes` what these may keep together, by
    `cost.saved` (0: not known). A section with `weight_permille` runs its backward in two parts, B for what
    it received and W for its parameters, which takes so many thousandths of it.

    Under `zero3`, `units` are the blocks whose layers gather their parameters one by one, in the order in
    which they are called. With tp, `shards` and `styles` say how its modules are cut; gradients of the whole
    parameters in `partial` are parts of a sum over tp.
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
    in_flight: int = 0
    room_bytes: int = 0
    weight_permille: int = 0
    shards: tuple[Shard, ...] = ()
    styles: tuple[ModuleStyle, ...] = ()
    partial: tuple[str, ...] = ()
    units: tuple[str, ...] = ()

    @property
    def user_section_name(self) -> str:
        """The name of the section that the user knows: of the pipeline for a stage."""
        return self.pipeline or self.name


@dataclass(frozen=True)
class Edge:
    """A tensor that one section produces and another consumes, carried by rows per sample, or whole between
    stages of a pipeline.

    `dims` are its dims over the symbols of a micro-batch. `dim` is the sample dim; `rows` the number of its
    entries that belong to a sample with given symbols. `extents` maps other dims to (expression, side) where
    samples may be narrower than the micro-batch (only when widths are "own"). `grad` says whether a gradient
    flows back. `when` is the producer's predicate. Stages of a pipeline have the same micro-batches, so
    between them a tensor travels as it is: `dim` is -1 and `rows` empty.
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


@dataclass(frozen=True)
class LossTerm:
    """A term of the loss: the section that computes its numerator, and its coefficient as text for people
    (code is in terms.py).

    A term of a scalar that forward returns beside the loss, and that a run logs, is called `log:NAME:`, with
    a number if there are several.
    """

    name: str
    section: str
    coefficient: str
    where: str = ""

    @property
    def logged_scalar(self) -> str:
        """The name of the scalar that the term is a part of, "" for the loss."""
        return logged_scalar_name(self.name)


def logged_scalar_name(term: str) -> str:
    """The name of the scalar that a term, by its id, is a part of; "" for the loss."""
    return term.removeprefix(_LOG_PREFIX).rpartition(":")[0] if term.startswith(_LOG_PREFIX) else ""


@dataclass(frozen=True)
class RandomOp:
    """A random op: `call` is its name (`module.path@file:line#n`), `dims` the dims of its result that run
    over the samples' rows, `rows` a sample's number of them.

    The first of `dims` says whose numbers they are. Without dims all samples share the numbers.
    """

    call: str
    dims: tuple[int, ...]
    rows: str
    where: str = ""


@dataclass(frozen=True)
class FusionRecord:
    """Where a fused operator took the place of the user's ops (`why` is empty), or why a rule left them as
    they are.

    `what` names the modules or ops concerned, `where` is their file:line in the user's code.
    """

    rule: str
    what: str
    where: str
    why: str = ""


@dataclass(frozen=True)
class CodeRewrite:
    """Code with fused operators: the function `name` of sections/fused.py stands in for `method` of `modules`
    (paths, of class `cls`).

    With `function` it stands in for the function that the method calls by this global name. `lines` are the
    user's lines: that of the definition, then one for each statement.
    """

    name: str
    cls: str
    method: str
    function: str
    modules: tuple[str, ...]
    lines: tuple[int, ...]


@dataclass(frozen=True)
class TiedParameter:
    """One parameter under several names or in several sections; gradients are summed over the union of their
    ranks."""

    names: tuple[str, ...]
    sections: tuple[str, ...]


@dataclass(frozen=True)
class RerecordedCase:
    """A case whose glue is recorded anew for each micro-batch: `when` is its pattern, `why` and `where` say
    what asks for it.

    A pattern may have several, which differ in the blocks that are called. A `spare` case is for what no
    compiled case holds for.

    `nodes` is its outline, which every recording must have (`secc.runtime.recorder.match_outline`).
    """

    name: str
    when: tuple[str, ...]
    why: str
    where: str
    nodes: tuple[dict[str, Any], ...]
    spare: bool = False


@dataclass(frozen=True)
class ModelRef:
    """The user's model file, and what shows that it is still the one the plan was made from."""

    path: str
    sha256: str
    parameters: dict[str, str] = field(default_factory=dict)  # name -> "float32[64, 64] train"


@dataclass(frozen=True)
class Plan:
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
    reasons: dict[str, Any] = field(
        default_factory=dict
    )  # by section: what else it could be, what its time and memory consist of
    draws: tuple[RandomOp, ...] = ()
    fusions: tuple[FusionRecord, ...] = ()
    rewrites: tuple[CodeRewrite, ...] = ()
    fused: tuple[str, ...] = ()  # blocks that no section calls, because fused operators read their parameters
    recorded: tuple[RerecordedCase, ...] = ()
    dtype: str = ""  # what modules compute in, with float32 masters ("bf16"); "" for the model's own
    labels_key: str = ""  # the input whose entries other than -100 are counted as tokens
    run_ahead_gib: float = (
        0.0  # what a rank of a section that runs ahead may keep of results for the next global batch
    )

    def find_section(self, name: str) -> Section:
        """A section or stage by its name."""
        return next(s for s in self.sections if s.name == name)

    @property
    def pipelines(self) -> dict[str, tuple[Section, ...]]:
        """The sections that the user knows, by name, each with its stages: itself alone where it is no
        pipeline."""
        found: dict[str, tuple[Section, ...]] = {}
        for s in self.sections:
            found[s.user_section_name] = (*found.get(s.user_section_name, ()), s)
        return {name: tuple(sorted(stages, key=lambda s: s.stage)) for name, stages in found.items()}

    @property
    def user_sections(self) -> tuple[Section, ...]:
        """The sections that the user knows: the stages of a pipeline as one section, its ranks ordered (dp,
        pp, tp)."""
        return tuple(
            _join_stages(stages) if stages[0].pipeline else stages[0] for stages in self.pipelines.values()
        )


def _join_stages(stages: tuple[Section, ...]) -> Section:
    """The stages of a pipeline as one section; memory is that of its fullest rank."""
    first, costs = stages[0], [s.cost for s in stages]
    dp, tp = first.mesh.dp, first.mesh.tp
    ranks = tuple(r for d in range(dp) for s in stages for r in s.mesh.ranks[d * tp : (d + 1) * tp])

    def total(field: str) -> str:
        return " + ".join(text for c in costs if (text := getattr(c, field)))

    return dataclasses.replace(
        first,
        name=first.pipeline,
        module="",
        mode=max((s.mode for s in stages), key=("forward", "dgrad", "train").index),
        blocks=tuple(dict.fromkeys(b for s in stages for b in s.blocks)),
        params=tuple(dict.fromkeys(p for s in stages for p in s.params)),
        mesh=Mesh(ranks, dp, len(stages), tp),
        memory_gib=max(s.memory_gib for s in stages),
        cost=dataclasses.replace(
            costs[0],
            **{f: total(f) for f in ("forward_ns", "backward_ns", "flops", "backward_flops", "saved")},
        ),
        pipeline="",
        in_flight=0,
        room_bytes=0,
        weight_permille=0,
    )


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """What plan.json holds: the sections that the user knows, by name, pipelines with their stages beneath;
    the rest as it is."""
    sections = {s.name: dataclasses.asdict(s) for s in plan.user_sections}
    for s in sections.values():
        del s["pipeline"], s["stage"], s["weight_permille"]
    for name, stages in plan.pipelines.items():
        if stages[0].pipeline:
            sections[name]["stages"] = [dataclasses.asdict(s) for s in stages]
    return dataclasses.asdict(plan) | {"sections": sections}


def plan_to_json(plan: Plan) -> str:
    """The text of plan.json."""
    return json.dumps(plan_to_dict(plan), indent=2) + "\n"


def load_plan(directory: str | Path) -> Plan:
    """Read `directory/plan.json`. Raises UserError if it is missing, not a plan, or of another version."""
    path = Path(directory) / "plan.json"
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise UserError(
            f"cannot read the plan: {error.strerror}",
            str(path),
            "make it with `secc compile MODEL.py -o PLAN/`",
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(f"not a plan: {error}", str(path), "compile the model again") from None
    if not isinstance(data, dict) or "version" not in data:
        raise UserError("not a plan: it has no version", str(path), "compile the model again")
    if data["version"] != PLAN_VERSION:
        message = (
            f"the plan is of version {data['version']!r}, and this secc runs plans of version {PLAN_VERSION}"
        )
        raise UserError(message, str(path), "compile the model again")
    data["sections"] = [
        part for section in data["sections"].values() for part in section.get("stages") or [section]
    ]
    return _build_dataclass(Plan, data)


def _build_dataclass(cls: Any, data: Any) -> Any:
    """Dataclasses from JSON data, by the type of each field."""
    nested: dict[str, Any] = {
        "model": ModelRef,
        "symbols": Symbol,
        "inputs": Input,
        "sections": Section,
        "edges": Edge,
        "terms": LossTerm,
        "ties": TiedParameter,
        "draws": RandomOp,
        "fusions": FusionRecord,
        "rewrites": CodeRewrite,
        "recorded": RerecordedCase,
        "mesh": Mesh,
        "cost": Cost,
        "shards": Shard,
        "styles": ModuleStyle,
    }
    values: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        if f.name not in data:
            continue
        value = data[f.name]
        if (cls, f.name) in _UNNESTED_FIELDS or f.name not in nested:
            values[f.name] = _lists_to_tuples(value) if isinstance(value, list) else value
        elif isinstance(value, list):
            values[f.name] = tuple(_build_dataclass(nested[f.name], v) for v in value)
        else:
            values[f.name] = _build_dataclass(nested[f.name], value)
    return cls(**values)


def _lists_to_tuples(value: Any) -> Any:
    return tuple(_lists_to_tuples(v) for v in value) if isinstance(value, list) else value


_UNNESTED_FIELDS = {(TiedParameter, "sections")}  # a list of names, not of Section objects
