"""Reads plan.json and checks all of it, once and here: types, ranges, references between its parts, and that
it is what the compiler wrote. Whoever loads a plan may then rely on it.

A plan may come from a stranger: its expressions are parsed and never evaluated as Python, its paths stay
inside the plan directory, and its sizes are limited.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from secc.runtime.errors import UserError
from secc.runtime.plan import json_shapes as shapes
from secc.runtime.plan import schema
from secc.runtime.plan.expr_eval import expression_symbols
from secc.runtime.plan.json_shapes import MalformedValue, Shape
from secc.runtime.plan.sample_predicates import inputs_of
from secc.runtime.plan.schema import Plan, Section

MAX_PLAN_BYTES = 1 << 28
MAX_RANKS = 1 << 16
MAX_STATISTIC_ENTRIES = 1 << 20
MAX_SAMPLES = 1 << 20  # of a global batch
_MAX_DIM = 63
_MAX_FIRST_PASSES = 64
_MAX_EXPRESSION = 1 << 16  # characters

_REMEDY = "compile the model again"
_STAGE_FIELDS = ("pipeline", "stage", "weight_permille")  # that the joined section of a pipeline lacks


def load_plan(directory: str | Path) -> Plan:
    """Reads `directory/plan.json`. Raises UserError, with the place inside the file, if it is missing, not a
    plan, of another version, or not what the compiler wrote."""
    path = Path(directory) / "plan.json"
    try:
        return parse_plan(shapes.read_json(path, MAX_PLAN_BYTES))
    except OSError as error:
        raise UserError(
            f"cannot read the plan: {error.strerror}",
            str(path),
            "make it with `secc compile MODEL.py -o PLAN/`",
        ) from None
    except MalformedValue as error:
        raise UserError(f"not a plan: {error}", str(path), _REMEDY) from None
    except UserError as error:
        raise UserError(error.message, str(path), error.remedy) from None


def parse_plan(data: Any) -> Plan:
    """Returns the plan of the data in plan.json. Raises MalformedValue, or UserError for another version and
    for a plan that was changed after its compilation."""
    if type(data) is not dict or "version" not in data:
        raise MalformedValue("it has no version")
    if type(data["version"]) is not int or data["version"] != schema.PLAN_VERSION:
        got = shapes.show_value(data["version"])
        message = f"expected a plan of version {schema.PLAN_VERSION}, got version {got}"
        raise UserError(message, "", _REMEDY)
    values = _PLAN(data)
    digest = values.pop("digest")
    values["sections"] = tuple(s for stages in values["sections"].values() for s in stages)
    plan = Plan(**values)
    _check_references(plan)
    if digest != schema.plan_digest({key: value for key, value in data.items() if key != "digest"}):
        raise UserError("plan.json was changed after the plan was compiled", "", _REMEDY)
    return plan


# Shapes of values, without references to other parts of the plan


def _expression(value: Any) -> str:
    """An expression over symbols; the names are checked where the symbols are known."""
    if type(value) is not str or len(value) > _MAX_EXPRESSION:
        raise shapes.expected(f"an expression of at most {_MAX_EXPRESSION} characters", value)
    try:
        expression_symbols(value)
    except ValueError:
        raise shapes.expected("an expression over the inputs' sizes", value) from None
    return value


def _optional_expression(value: Any) -> str:
    return "" if value == "" else _expression(value)


def _any_number(value: Any) -> float:
    """A number; what collate pads with may be infinite."""
    if type(value) not in (int, float):
        raise shapes.expected("a number", value)
    return float(value)


_pad_row = shapes.items_of(_any_number, schema.MAX_PAD_ROW, 1)


def _pad_fill(value: Any) -> schema.PadFill:
    """A number, the numbers of a padded row, or what padding goes on with."""
    if value in schema.TEXT_FILLS:
        return value
    return _pad_row(value) if type(value) is list else _any_number(value)


_TEXT, _FLAG, _COUNT = shapes.text, shapes.flag, shapes.integer(0)
_TEXTS, _TEXT_LISTS = shapes.items_of(_TEXT), shapes.mapping_of(shapes.items_of(_TEXT))
_DIM, _POSITIVE, _SECONDS = shapes.integer(0, _MAX_DIM), shapes.integer(1), shapes.number(0)
_NAME = shapes.pattern(r"(?s).+", "a name")
_DTYPE = shapes.pattern(r"[a-z][a-z0-9_]*", "the name of a dtype")
_RANK = shapes.integer(0, MAX_RANKS - 1)
_DEGREE = shapes.integer(1, MAX_RANKS)
_EXPRESSIONS = shapes.items_of(_expression, _MAX_DIM + 1)

_MESH = shapes.dataclass_of(
    schema.Mesh,
    {
        "ranks": shapes.items_of(_RANK, MAX_RANKS, 1),
        "dp": _DEGREE,
        "pp": _DEGREE,
        "tp": _DEGREE,
        "cp": _DEGREE,
        "ep": _DEGREE,
    },
    optional=("cp", "ep"),
)
_COST_EXPRESSIONS = (
    "forward_ns",
    "backward_ns",
    "flops",
    "backward_flops",
    "saved",
    "streamed",
    "kept_between",
)
_COST = shapes.dataclass_of(
    schema.Cost,
    {
        "forward_ns": _expression,
        "backward_ns": _expression,
        "label": _TEXT,
        "flops": _optional_expression,
        "backward_flops": _optional_expression,
        "saved": _optional_expression,
        "streamed": _optional_expression,
        "kept_between": _optional_expression,
        "dtype": _TEXT,
    },
    optional=("streamed", "kept_between"),
)
_STYLE_KINDS = ("colwise", "rowwise", "shapes", "vocab", "norm", "inner", "sequence")
_SECTION_FIELDS: dict[str, Shape] = {
    "name": shapes.pattern(r"[^\W\d]\w*", "an identifier"),
    "module": shapes.pattern(r"sections/[^\W\d]\w*\.py", "sections/NAME.py"),
    "mode": shapes.choice("forward", "dgrad", "train"),
    "when": _TEXTS,
    "blocks": _TEXTS,
    "params": _TEXTS,
    "mesh": _MESH,
    "micro_batch": shapes.integer(1, MAX_SAMPLES),
    "recompute": shapes.choice("none", "selective", "full"),
    "sharding": shapes.choice("none", "zero1", "zero2", "zero3"),
    "memory_gib": shapes.number(0),
    "label": _TEXT,
    "cost": _COST,
    "pipeline": _TEXT,
    "stage": shapes.integer(0, MAX_RANKS - 1),
    "in_flight": _COUNT,
    "room_bytes": _COUNT,
    "working_bytes": _COUNT,
    "weight_permille": shapes.integer(0, 1000),
    "chunks": shapes.integer(1, MAX_RANKS),
    "placement": shapes.choice(*schema.PLACEMENTS),
    "mean_samples": _COUNT,
    "micro_batch_tokens": _COUNT,
    "token_count": _optional_expression,
    "shards": shapes.items_of(
        shapes.dataclass_of(
            schema.Shard,
            {
                "name": _TEXT,
                "dim": _DIM,
                "parts": shapes.items_of(_POSITIVE, least=1),
                "ep": _DEGREE,
                "replicas": _DEGREE,
                "holder": shapes.integer(-1, MAX_RANKS),
            },
            optional=("ep", "replicas", "holder"),
        )
    ),
    "styles": shapes.items_of(
        shapes.dataclass_of(
            schema.ModuleStyle, {"module": _TEXT, "kind": _TEXT, "arguments": _TEXTS}, optional=("arguments",)
        )
    ),
    "overlap": shapes.choice(*schema.OVERLAPS),
    "row_attention": shapes.choice("gather", "ulysses", "frames"),
    "row_layers": _TEXTS,
    "row_modules": _TEXTS,
    "cp_per": shapes.choice("section", "micro_batch"),
    "subgroups": shapes.items_of(
        shapes.dataclass_of(schema.SubgroupCost, {"ranks": _DEGREE, "cost": _COST}), MAX_RANKS
    ),
    "subgroup_bytes": _COUNT,
    "whole_batch": _FLAG,
    "offload": shapes.choice("none", "optimizer", "weights", "activations"),
    "host_gib": shapes.number(0),
    "partial": _TEXTS,
    "units": _TEXTS,
}
_LATER_FIELDS = (
    "working_bytes",
    "chunks",
    "placement",
    "overlap",
    "row_attention",
    "row_layers",
    "row_modules",
    "cp_per",
    "subgroups",
    "subgroup_bytes",
    "whole_batch",
    "offload",
    "host_gib",
    "mean_samples",
    "micro_batch_tokens",
    "token_count",
)
_STAGE = shapes.dataclass_of(schema.Section, _SECTION_FIELDS, optional=_LATER_FIELDS)
_WHOLE_SECTION = shapes.dataclass_of(
    schema.Section,
    {**_SECTION_FIELDS, "module": shapes.pattern(r"(sections/[^\W\d]\w*\.py)?", "sections/NAME.py")},
    _STAGE_FIELDS,
    _LATER_FIELDS,
)


def _section(value: Any) -> tuple[Section, ...]:
    """The stages of a section; the section itself if it is no pipeline."""
    if type(value) is not dict or "stages" not in value:
        section = _WHOLE_SECTION(value)
        if not section.module:
            raise shapes.expected("sections/NAME.py", section.module).inside("module")
        return (section,)
    whole = _WHOLE_SECTION({key: item for key, item in value.items() if key != "stages"})
    try:
        stages = shapes.items_of(_STAGE, MAX_RANKS, 1)(value["stages"])
        if len(stages) % stages[0].chunks:
            raise shapes.expected(f"a multiple of {stages[0].chunks} chunks", len(stages))
        for number, stage in enumerate(stages):
            problem = _stage_problem(stage, stages, number)
            if problem is not None:
                raise problem.inside(number)
    except MalformedValue as error:
        raise error.inside("stages") from None
    if dataclasses.replace(schema.join_stages(stages), weight_permille=0) != whole:
        raise MalformedValue("differs from its stages joined")
    return stages


def _degrees(mesh: schema.Mesh) -> tuple[int, ...]:
    return mesh.dp, mesh.tp, mesh.cp, mesh.ep


def _stage_problem(stage: Section, stages: tuple[Section, ...], number: int) -> MalformedValue | None:
    """Returns what is wrong with a pipeline's stage at position `number`."""
    first = stages[0]
    if stage.stage != number:
        return shapes.expected(f"stage {number}", stage.stage).inside("stage")
    if not stage.pipeline or stage.pipeline != first.pipeline:
        return shapes.expected("the pipeline's name", stage.pipeline).inside("pipeline")
    own, expected = (
        (*_degrees(s.mesh), s.micro_batch, s.micro_batch_tokens, s.token_count) for s in (stage, first)
    )
    if own != expected or stage.mesh.pp != 1:
        return MalformedValue("expected the mesh and micro-batch of the first stage, and pp 1").inside("mesh")
    if (stage.chunks, stage.placement) != (first.chunks, first.placement):
        return shapes.expected(f"{first.chunks} chunks in a {first.placement}", stage.chunks).inside("chunks")
    pp = len(stages) // first.chunks
    place = schema.rank_position(number, pp, first.placement)
    if first.chunks > 1 and stage.mesh.ranks != stages[place].mesh.ranks:
        return shapes.expected(f"the ranks of stage {place}", list(stage.mesh.ranks)).inside("mesh")
    return None


_LINK = shapes.record(
    {"latency_ns": _COUNT, "bytes_per_s": _POSITIVE},
    {
        "rings": shapes.items_of(
            shapes.record(
                {
                    "collective": _TEXT,
                    "ranks": _DEGREE,
                    "latency_ns": _COUNT,
                    "bytes_per_s": _POSITIVE,
                }
            )
        )
    },
)
_DEVICE = shapes.record(
    {
        "kind": _TEXT,
        "backend": shapes.choice("cpu", "cuda"),
        "gflops": shapes.items_of(shapes.row_of(_TEXT, _POSITIVE), least=1),
        "memory": _POSITIVE,
        "memory_bytes_per_s": shapes.integer(10**6),
        "efficiency_percent": shapes.integer(1, 100),
        "op_ns": _COUNT,
        "reserved": _COUNT,
        "label": _TEXT,
    },
    {
        "expert_lost_rows": _COUNT,
        "host_memory": _COUNT,
        "host_bytes_per_s": _COUNT,
        "memory_margin": shapes.integer(0, 90),
        "memory_percent": shapes.integer(1, 100),
        "overheads": shapes.record(
            {}, {**dict.fromkeys(("job", "message", "tensor", "sample", "step"), _COUNT), "label": _TEXT}
        ),
    },
)
_GROUP = shapes.record({"nodes": _DEGREE, "device": _DEVICE, "inside": _LINK})
_CLUSTER_FIELDS: dict[str, Shape] = {
    "name": _TEXT,
    "nodes": _DEGREE,
    "per_node": _DEGREE,
    "device": _DEVICE,
    "inside": _LINK,
    "between": _LINK,
}


def _cluster(value: Any) -> dict[str, Any]:
    if value == {}:
        return {}
    return shapes.record(_CLUSTER_FIELDS, {"groups": shapes.items_of(_GROUP), "ranks": _DEGREE})(value)


_SOLVER = shapes.record(
    {},
    {
        "status": _TEXT,
        "gap": shapes.nullable(shapes.number()),
        "closed_form_s": _SECONDS,
        "simulated_s": shapes.nullable(_SECONDS),
        "tried": _COUNT,
    },
    shapes.plain_data,
)
_PLACEMENT_FIELDS: dict[str, Shape] = dict.fromkeys(
    ("bytes_between_nodes", "bytes_inside_nodes", "gradient_sums_s", "communication_s"), _SECONDS
)
_PREDICTION = shapes.record(
    {},
    {
        "step_time_s": _SECONDS,
        "label": _TEXT,
        "sections": shapes.mapping_of(
            shapes.record({}, {"busy": shapes.number(), "gpus": _COUNT}, shapes.plain_data)
        ),
        "simulated": shapes.record(
            {
                "step_time_s": _SECONDS,
                "schedule_bound_s": _SECONDS,
                "plan_bound_s": _SECONDS,
                "bound_reason": _TEXT,
            },
            others=shapes.plain_data,
        ),
        "placement": shapes.record(
            {**_PLACEMENT_FIELDS, "in_a_row": shapes.record(_PLACEMENT_FIELDS, others=shapes.plain_data)},
            others=shapes.plain_data,
        ),
        "sample_s": shapes.mapping_of(_SECONDS),
    },
    shapes.plain_data,
)
_CHECKS = shapes.record(
    {},
    {
        "patterns": shapes.items_of(
            shapes.record(
                {
                    "pattern": _TEXTS,
                    "samples": _COUNT,
                    "exact": _FLAG,
                    "loss_error": _any_number,
                    "gradient_error": _any_number,
                    "worst_gradient": _TEXT,
                },
                {"tolerances": _TEXT},
            )
        ),
        "accepted": _TEXTS,
        "logged": _TEXTS,
        "notes": _TEXTS,
        "taken_back": shapes.items_of(shapes.record({"choice": _TEXT, "reason": _TEXT, "where": _TEXT})),
        "padding_seen": _TEXTS,
        "whole": _TEXT_LISTS,
        "reason": _TEXT,
        "widths": _TEXT,
        "widths_price": _TEXT,
    },
    shapes.plain_data,
)
_ALTERNATIVE = shapes.record(
    {
        "choice": _TEXT,
        "fits": _FLAG,
        "memory": _COUNT,
        "step_time_s": _SECONDS,
        "layout": shapes.record(
            {
                "dp": _DEGREE,
                "pp": _DEGREE,
                "tp": _DEGREE,
                "micro_batch": _POSITIVE,
                "sharding": _TEXT,
                "recompute": _TEXT,
            },
            {"ep": _DEGREE},
            others=shapes.plain_data,
        ),
    },
    others=shapes.plain_data,
)
_ALLOCATION_REASONS: dict[str, Shape] = {
    "alternatives": shapes.items_of(_ALTERNATIVE),
    "time_s": shapes.mapping_of(_SECONDS),
    "memory": shapes.record(
        {
            "used": _COUNT,
            "usable": _POSITIVE,
            "margin": _COUNT,
            "parts": shapes.mapping_of(_COUNT),
            "largest_tensor": shapes.record({"bytes": _COUNT, "tensor": _TEXT}),
        },
        others=shapes.plain_data,
    ),
    "costs": shapes.mapping_of(_COUNT),
}


def _reasons(value: Any) -> dict[str, Any]:
    """Reasons for a section: those of the allocation, all or none, and how it was formed."""
    allocated = type(value) is dict and any(key in value for key in _ALLOCATION_REASONS)
    return shapes.record(_ALLOCATION_REASONS if allocated else {}, {"formed": _TEXTS})(value)


# What nodes of an outline are, each with the shapes of what follows its name (`recorder.match_outline`).
_NODE_KINDS: dict[str, tuple[Shape, ...]] = {
    "input": (_TEXT,),
    "state": (_TEXT,),
    "call": (_TEXT, _FLAG, shapes.plain_data),
    "loss": (),
    "recorded": (_TEXT, _TEXT, _DIM),
    "result": (_TEXT, _TEXT, _DIM),
    "op": (_TEXT, _FLAG),
}


def _node_kind(value: Any) -> tuple[Any, ...]:
    if type(value) is not list or not value or type(value[0]) is not str or value[0] not in _NODE_KINDS:
        raise shapes.expected(f"a list that begins with one of {', '.join(_NODE_KINDS)}", value)
    return shapes.row_of(_TEXT, *_NODE_KINDS[value[0]])(value)


_NODE_FIELDS = shapes.record(
    {"kind": _node_kind},
    {
        "shape": shapes.items_of(shapes.nullable(_expression), _MAX_DIM + 1),
        "args": shapes.plain_data,
        "kwargs": shapes.mapping_of(shapes.plain_data),
        "sources": shapes.items_of(_COUNT),
        "where": _TEXT,
        "made": _FLAG,
        "log": _TEXTS,
    },
)
_FIELDS_OF_NODES = {
    "recorded": ("shape", "sources"),
    "result": ("args",),
    "op": ("args", "kwargs"),
    "call": ("args", "kwargs"),
}
_COMPUTED_OP = re.compile(r"(aten|prims)(\.\w+)+")


def _nodes(value: Any) -> tuple[dict[str, Any], ...]:
    """The outline of a case; its references to nodes lead to nodes."""
    nodes = shapes.items_of(_NODE_FIELDS)(value)
    for number, node in enumerate(nodes):
        try:
            _check_node(node, nodes)
        except MalformedValue as error:
            raise error.inside(number) from None
    return nodes


def _check_node(node: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> None:
    kind = node["kind"][0]
    for name in _FIELDS_OF_NODES.get(kind, ()):
        if name not in node:
            raise MalformedValue(f"lacks the key {name!r}")
    if node.get("made") and not (kind == "op" and _COMPUTED_OP.fullmatch(node["kind"][1])):
        raise MalformedValue("expected an op of aten that is computed from sizes").inside("kind")
    referenced = [*node.get("sources", ()), *_references(node.get("args", ()))]
    referenced += _references(node.get("kwargs", {}))
    if any(type(n) is not int or not 0 <= n < len(nodes) for n in referenced):
        raise MalformedValue(f"refers to a node outside 0 to {len(nodes) - 1}")
    if kind == "result":
        source = node["args"][0] if type(node["args"]) is tuple and node["args"] else None
        if type(source) is not dict or "node" not in source:
            raise shapes.expected("the node of a call", source).inside("args")
        if nodes[source["node"]]["kind"][0] != "call":
            raise MalformedValue("expected the node of a call").inside("args")


def _references(value: Any) -> Iterable[Any]:
    """Yields the numbers of the nodes that an argument refers to, and checks its expressions."""
    if type(value) is dict:
        if "node" in value:
            yield value["node"]
            return
        if "size" in value:
            _expression(value["size"])
            if "over" in value and type(value["over"]) is not int:
                _expression(value["over"])
            return
        if "name" in value and type(value["name"]) is not str:
            raise shapes.expected("a name", value["name"])
        for item in value.values():
            yield from _references(item)
    elif type(value) is tuple:
        for item in value:
            yield from _references(item)


def _records(cls: Any, /, **fields: Shape) -> Shape:
    return shapes.items_of(shapes.dataclass_of(cls, fields))


_SIDE = shapes.choice("left", "right")
_PARAMETER = shapes.pattern(
    r"[a-z][a-z0-9_]*\[(\d{1,18}(, ?\d{1,18})*)?\] (train|frozen)", "DTYPE[SIZES] train, or frozen"
)
_FUNCTION = shapes.pattern(
    r"([^\W\d][\w.]*)?:[^\W\d][\w.]*(#\d+-\d+@[\w.]*)?",
    "MODULE:NAME of a function, or MODULE:NAME#FIRST-LAST@PATH of statements",
)
_PLAN = shapes.record(
    {
        "version": _COUNT,
        "hash": _TEXT,
        "model": shapes.dataclass_of(
            schema.ModelRef,
            {
                "path": _TEXT,
                "sha256": _TEXT,
                "parameters": shapes.mapping_of(_PARAMETER),
                "imports": shapes.mapping_of(_TEXT),
                "packages": shapes.mapping_of(_TEXT),
                "functions": shapes.items_of(_FUNCTION),
                "modules": _TEXTS,
            },
            optional=("functions", "modules"),
        ),
        "world_size": shapes.integer(1, MAX_RANKS),
        "global_batch": shapes.integer(1, MAX_SAMPLES),
        "widths": shapes.choice("own", "global"),
        "symbols": _records(
            schema.Symbol,
            name=shapes.pattern(r"(?!(?:min|max)\Z)[^\W\d]\w*", "the name of a symbol"),
            kind=shapes.choice("rows", "width", "data"),
            key=_TEXT,
            dim=_DIM,
        ),
        "inputs": _records(
            schema.Input,
            key=_TEXT,
            dtype=_DTYPE,
            dims=_EXPRESSIONS,
            optional=_FLAG,
            pads=shapes.items_of(shapes.row_of(_DIM, _SIDE, _pad_fill)),
        ),
        "sections": shapes.mapping_of(_section, _NAME),
        "edges": shapes.items_of(
            shapes.dataclass_of(
                schema.Edge,
                {
                    "name": _NAME,
                    "src": _TEXT,
                    "dst": _TEXT,
                    "dtype": _DTYPE,
                    "dims": _EXPRESSIONS,
                    "dim": shapes.integer(-1, _MAX_DIM),
                    "rows": _optional_expression,
                    "grad": _FLAG,
                    "when": _TEXTS,
                    "extents": shapes.items_of(shapes.row_of(_DIM, _expression, _SIDE)),
                    "bytes_per_sample": shapes.number(0),
                    "fills": shapes.items_of(_any_number, _MAX_DIM + 1),
                },
                optional=("fills",),
            )
        ),
        "terms": shapes.items_of(
            shapes.dataclass_of(
                schema.LossTerm,
                {
                    "name": _NAME,
                    "section": _TEXT,
                    "coefficient": _TEXT,
                    "where": _TEXT,
                    "entries": shapes.integer(1, MAX_STATISTIC_ENTRIES),
                    "first_pass": shapes.integer(1, _MAX_FIRST_PASSES),
                },
                optional=("entries", "first_pass"),
            )
        ),
        "ties": _records(
            schema.TiedParameter,
            names=shapes.items_of(_TEXT, least=1),
            sections=_TEXTS,
        ),
        "cluster": _cluster,
        "solver": _SOLVER,
        "prediction": _PREDICTION,
        "checks": _CHECKS,
        "reasons": shapes.mapping_of(_reasons),
        "draws": _records(
            schema.RandomOp, call=_TEXT, dims=shapes.items_of(_DIM), rows=_optional_expression, where=_TEXT
        ),
        "fusions": _records(schema.FusionRecord, rule=_TEXT, what=_TEXT, where=_TEXT, why=_TEXT),
        "rewrites": _records(
            schema.CodeRewrite,
            name=_TEXT,
            cls=_TEXT,
            method=_TEXT,
            function=_TEXT,
            modules=_TEXTS,
            lines=shapes.items_of(shapes.integer()),
        ),
        "fused": _TEXTS,
        "recorded": _records(
            schema.RerecordedCase,
            name=_TEXT,
            when=_TEXTS,
            why=_TEXT,
            where=_TEXT,
            nodes=_nodes,
            spare=_FLAG,
        ),
        "dtype": shapes.choice("", "bf16", "f16", "f32"),
        "labels_key": _TEXT,
        "run_ahead_gib": shapes.number(0),
        "digest": _TEXT,
    },
    optional={
        "outputs": _records(
            schema.SectionOutput,
            name=_NAME,
            section=_TEXT,
            dtype=_DTYPE,
            dims=_EXPRESSIONS,
            dim=_DIM,
            rows=_expression,
            extents=shapes.items_of(shapes.row_of(_DIM, _expression, _SIDE)),
        ),
    },
)


# References between the parts of a plan


def _check_references(plan: Plan) -> None:
    """Raises MalformedValue for the first part that names something that the plan does not have."""
    names = [s.name for s in plan.sections]
    _check_unique("sections", names)
    _check_unique("symbols", [s.name for s in plan.symbols])
    _check_unique("inputs", [i.key for i in plan.inputs])
    _check_unique("edges", [e.name for e in plan.edges])
    _check_unique("terms", [t.name for t in plan.terms])
    _check_unique("recorded", [c.name for c in plan.recorded])
    if not names:
        raise MalformedValue("expected at least one section", ".sections")
    symbols = {"B", *(s.name for s in plan.symbols)}
    keys = {i.key for i in plan.inputs if i.optional}
    for number, found in enumerate(plan.inputs):
        place = f".inputs[{number}]"
        _check_symbols(found.dims, symbols, f"{place}.dims")
        _check_dims([dim for dim, _, _ in found.pads], len(found.dims), f"{place}.pads")
    for section in plan.sections:
        _check_section(plan, section, symbols, keys)
    _check_edges(plan, symbols)
    for number, term in enumerate(plan.terms):
        _check_known([term.section], names, "section", f".terms[{number}].section")
    _check_unique("outputs", [o.name for o in plan.outputs])
    for number, output in enumerate(plan.outputs):
        place = f".outputs[{number}]"
        _check_known([output.section], names, "section", f"{place}.section")
        texts = [*output.dims, output.rows, *(text for _, text, _ in output.extents)]
        _check_symbols(texts, symbols, place)
        _check_dims([output.dim, *(dim for dim, _, _ in output.extents)], len(output.dims), place)
    for number, tie in enumerate(plan.ties):
        _check_known(tie.sections, names, "section", f".ties[{number}].sections")
        _check_known(tie.names, plan.model.parameters, "parameter", f".ties[{number}].names")
    for number, draw in enumerate(plan.draws):
        _check_symbols([draw.rows] if draw.rows else [], symbols, f".draws[{number}].rows")
    for number, case in enumerate(plan.recorded):
        _check_known(case.when, keys, "optional input", f".recorded[{number}].when")
    if plan.labels_key:
        _check_known([plan.labels_key], [i.key for i in plan.inputs], "input", ".labels_key")
    _check_known(plan.reasons, plan.pipelines, "section", ".reasons")
    if plan.cluster and plan.world_size > plan.cluster["nodes"] * plan.cluster["per_node"]:
        room = plan.cluster["nodes"] * plan.cluster["per_node"]
        raise MalformedValue(f"expected at least {plan.world_size} ranks, got {room}", ".cluster")


def _check_section(plan: Plan, section: Section, symbols: set[str], optional_keys: set[str]) -> None:
    place = f".sections.{section.name}"
    mesh = section.mesh
    expected = mesh.dp * mesh.pp * mesh.tp * mesh.cp
    if len(mesh.ranks) != expected:
        message = f"expected dp * pp * tp * cp = {expected} ranks, got {len(mesh.ranks)}"
        raise MalformedValue(message, f"{place}.mesh.ranks")
    if mesh.tp % mesh.ep and (mesh.ep % mesh.tp or mesh.dp % mesh.expert_replicas):
        message = (
            f"expected parts for ranks of a replica ({mesh.tp}) or of several of {mesh.dp}, got {mesh.ep}"
        )
        raise MalformedValue(message, f"{place}.mesh.ep")
    if max(mesh.ranks) >= plan.world_size or len(set(mesh.ranks)) < len(mesh.ranks):
        message = f"expected different ranks below the plan's {plan.world_size}"
        raise MalformedValue(message, f"{place}.mesh.ranks")
    if mesh.pp != 1:
        raise shapes.expected("1 for a section without stages", mesh.pp).inside("pp").inside("mesh")
    _check_known(inputs_of(section.when), optional_keys, "optional input", f"{place}.when")
    _check_known(section.params, plan.model.parameters, "parameter", f"{place}.params")
    _check_known(section.partial, section.params, "parameter of the section", f"{place}.partial")
    _check_known(section.units, section.blocks, "block of the section", f"{place}.units")
    parts = [(f"subgroups[{i}].cost", s.cost) for i, s in enumerate(section.subgroups)]
    for key, cost in (("cost", section.cost), *parts):
        for name in _COST_EXPRESSIONS:
            text = getattr(cost, name)
            _check_symbols([text] if text else [], symbols, f"{place}.{key}.{name}")
    degrees = [s.ranks for s in section.subgroups]
    if degrees != sorted(set(degrees)) or any(mesh.cp % n or n == mesh.cp for n in degrees):
        message = f"expected ascending divisors of cp {mesh.cp} below it, got {degrees}"
        raise MalformedValue(message, f"{place}.subgroups")
    is_trained = any(plan.model.parameters[name].endswith(" train") for name in section.params)
    if section.offload == ("weights" if is_trained else "optimizer"):
        problem = "nothing of a section that trains" if is_trained else "no states of a frozen section"
        raise MalformedValue(f"expected {problem}, got {section.offload}", f"{place}.offload")
    if section.offload == "weights" and section.sharding == "zero3":
        raise MalformedValue("expected no zero3 with weights in host memory", f"{place}.offload")
    if section.offload == "activations" and (section.mode == "forward" or section.weight_permille):
        message = "expected a backward in one part with activations in host memory"
        raise MalformedValue(message, f"{place}.offload")
    _check_symbols([section.token_count] if section.token_count else [], symbols, f"{place}.token_count")
    if section.micro_batch_tokens and not section.token_count:
        raise MalformedValue("expected what counts the tokens of a micro-batch", f"{place}.token_count")
    for number, shard in enumerate(section.shards):
        where = f"{place}.shards[{number}]"
        _check_known([shard.name], section.params, "parameter of the section", f"{where}.name")
        sizes = _parameter_sizes(plan.model.parameters[shard.name])
        if shard.dim >= len(sizes) or sum(shard.parts) != sizes[shard.dim]:
            raise MalformedValue(f"expected parts of one dim of {sizes}", where)
        if shard.replicas not in (1, mesh.expert_replicas) or (shard.replicas > 1 and shard.dim):
            raise MalformedValue(
                f"expected 1 or {mesh.expert_replicas}, got {shard.replicas}", f"{where}.replicas"
            )
        if not -1 <= shard.holder < mesh.tp * shard.replicas:
            message = f"expected one of {mesh.tp * shard.replicas} ranks or -1, got {shard.holder}"
            raise MalformedValue(message, f"{where}.holder")
        if mesh.tp % shard.ep or sizes[0] % shard.ep or (shard.ep > 1 and shard.dim == 0):
            message = f"expected a divisor of {mesh.tp} ranks and of {sizes[0]} experts, got {shard.ep}"
            raise MalformedValue(message, f"{where}.ep")


def _check_edges(plan: Plan, symbols: set[str]) -> None:
    sections = {s.name: s for s in plan.sections}
    sources: dict[str, set[str]] = {name: set() for name in sections}
    for number, edge in enumerate(plan.edges):
        place = f".edges[{number}]"
        _check_known([edge.src], sections, "section", f"{place}.src")
        _check_known([edge.dst], sections, "section", f"{place}.dst")
        _check_symbols(edge.dims, symbols, f"{place}.dims")
        _check_symbols([edge.rows] if edge.rows else [], symbols, f"{place}.rows")
        _check_symbols([text for _, text, _ in edge.extents], symbols, f"{place}.extents")
        _check_dims([dim for dim, _, _ in edge.extents], len(edge.dims), f"{place}.extents")
        if edge.fills and len(edge.fills) != len(edge.extents):
            message = f"expected one for each of {len(edge.extents)} extents, got {len(edge.fills)}"
            raise MalformedValue(message, f"{place}.fills")
        if edge.dim >= len(edge.dims) or (edge.dim >= 0) != bool(edge.rows):
            raise MalformedValue("expected a dim with rows, or -1 and no rows", f"{place}.dim")
        if edge.when != sections[edge.src].when:
            raise MalformedValue("expected what its source is active for", f"{place}.when")
        sources[edge.dst].add(edge.src)
    left = dict(sources)
    while left:
        ready = [name for name, needed in left.items() if not needed & left.keys()]
        if not ready:
            raise MalformedValue(f"the edges between {', '.join(sorted(left))} form a cycle", ".edges")
        for name in ready:
            del left[name]


def _parameter_sizes(description: str) -> list[int]:
    """Returns the sizes in a parameter's description, such as "float32[64, 64] train"."""
    inner = description.partition("[")[2].partition("]")[0]
    return [int(n) for n in inner.split(",") if n.strip()]


def _check_unique(what: str, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(n for i, n in enumerate(names) if n in names[:i])
        raise MalformedValue(f"{shapes.show_value(twice)} is there twice", f".{what}")


def _check_known(names: Iterable[str], known: Iterable[str], what: str, place: str) -> None:
    known = known if isinstance(known, dict | set) else frozenset(known)
    found = next((name for name in names if name not in known), None)
    if found is not None:
        raise MalformedValue(f"the plan has no {what} {shapes.show_value(found)}", place)


def _check_symbols(expressions: Iterable[str], symbols: set[str], place: str) -> None:
    for text in expressions:
        unknown = expression_symbols(text) - symbols
        if unknown:
            raise MalformedValue(f"the plan has no symbol {sorted(unknown)[0]!r}", place)


def _check_dims(dims: Iterable[int], count: int, place: str) -> None:
    if any(dim >= count for dim in dims):
        raise MalformedValue(f"expected dims below {count}", place)
