"""`plan.json`: the lowered IR as the dataclasses of `secc.runtime.plan.schema`, and the hash that ties a plan
to its model.

The hash covers the lowered IR (graph, shapes, configuration), the model's source and parameters, and the
versions of secc's plan format and of torch. Wall-clock times and paths are left out, so equal inputs give
equal plans, byte for byte.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from math import prod
from typing import Any

from xdsl.dialects.builtin import ArrayAttr, FloatAttr, IntAttr, IntegerAttr, ModuleOp, StringAttr
from xdsl.ir import Attribute, Operation

from secc.codegen.body_printer import BodyPrinter
from secc.codegen.fused_module import plan_rewrites
from secc.codegen.python_names import section_module_name
from secc.codegen.section_modules import TERMS_SECTION, bodies_of, ops_for_values
from secc.errors import UserError
from secc.ir.analysis import fusion_report, random_ops, recorded_glue
from secc.ir.analysis.dataflow import get_values
from secc.ir.analysis.whole_batch import whole_batch_of_section
from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import (
    BodyOp,
    CallOp,
    EdgeOp,
    GraphOp,
    KeyOp,
    OutputOp,
    ParamOp,
    SectionOp,
    TermOp,
    TieOp,
    graph_of,
    section_of,
    strings_of,
)
from secc.ir.dialect.readable_names import (
    ACCEPTED_ATTRIBUTE,
    FIRST_PASS_ATTRIBUTE,
    LOGGED_ATTRIBUTE,
    OUT_OF_TURN_ATTRIBUTE,
)
from secc.ir.dialect.tensor_type import tensor_type
from secc.ir.dialect.typed_attributes import ShardAttr, StyleAttr, UnsplitAttr
from secc.ir.text_io.module_text import print_module
from secc.runtime.plan import schema
from secc.runtime.plan.schema import Plan, is_gathered


def attribute_value(op: Operation, name: str, default: Any) -> Any:
    """The Python value of an entry of an op's attribute dictionary, `default` where there is none."""
    found = op.attributes.get(name)
    return default if found is None else _python_value(found)


def _python_value(value: Attribute) -> Any:
    match value:
        case StringAttr(data=text):
            return text
        case IntegerAttr() | FloatAttr():
            return value.value.data
        case IntAttr(data=number):
            return number
        case ArrayAttr():
            return tuple(_python_value(v) for v in value)
        case _:
            raise ValueError(f"no Python value for {value}")


def build_plan(module: ModuleOp, model: schema.ModelRef, versions: Mapping[str, str]) -> Plan:
    """The plan of a lowered module. `versions` has what else the hash depends on, such as torch's version."""
    graph = graph_of(module)
    sections = tuple(_plan_section(graph, s, model) for s in graph.sections)
    made = Plan(
        version=schema.PLAN_VERSION,
        hash="",
        model=model,
        world_size=attribute_value(graph, "world_size", 1),
        global_batch=attribute_value(graph, "global_batch", 1),
        widths=graph.widths.data if graph.widths else "global",
        symbols=tuple(
            schema.Symbol(s.sym.data, s.kind.data, s.key.data, s.dim.data) for s in graph.symbols.values()
        ),
        inputs=tuple(_plan_input(op) for op in graph.body.block.ops if isinstance(op, KeyOp)),
        sections=sections,
        edges=tuple(_plan_edge(graph, op) for op in graph.edges),
        terms=_plan_terms(graph),
        ties=_plan_ties(graph, sections),
        cluster=json.loads(attribute_value(graph, "cluster", "{}")),
        solver=json.loads(attribute_value(graph, "solver", "{}")),
        prediction=json.loads(attribute_value(graph, "prediction", "{}")),
        checks=_plan_checks(graph),
        reasons=_plan_reasons(graph),
        dtype=attribute_value(graph, "dtype", ""),
        labels_key=graph.labels.data if graph.labels else "",
        run_ahead_gib=attribute_value(graph, "run_ahead_gib", 0.0),
        recorded=_recorded_cases(graph),
        draws=random_ops.read_random_ops(graph.attributes.get(random_ops.RANDOM_OPS_ATTRIBUTE)),
        fusions=fusion_report.read_fusions(graph),
        rewrites=plan_rewrites(graph),
        fused=tuple(
            path for path, block in graph.blocks.items() if fusion_report.FUSED_ATTRIBUTE in block.attributes
        ),
        outputs=_plan_outputs(graph),
    )
    return dataclasses.replace(made, hash=_plan_hash(module, model, versions))


def _plan_checks(graph: GraphOp) -> dict[str, Any]:
    """What the user accepted, how scalars are logged, and which modules tensor parallelism leaves whole."""
    said = {
        name: list(found)
        for name in (ACCEPTED_ATTRIBUTE, LOGGED_ATTRIBUTE)
        if (found := attribute_value(graph, name, ()))
    }
    whole = {
        section.sym.data: [str(reason) for reason in reasons]
        for section in graph.sections
        if (reasons := get_values(section, "whole", UnsplitAttr))
    }
    return said | ({"whole": whole} if whole else {})


def _plan_reasons(graph: GraphOp) -> dict[str, Any]:
    """The reasons of `allocate` for each section, and notes on how the section was formed."""
    found: dict[str, Any] = json.loads(attribute_value(graph, "reasons", "{}"))
    for s in graph.sections:
        if notes := attribute_value(s, "notes", ()):
            found.setdefault(attribute_value(s, "pipeline", s.sym.data), {})["formed"] = list(notes)
    return found


def _recorded_cases(graph: GraphOp) -> tuple[schema.RerecordedCase, ...]:
    """The cases with glue that ranks re-record for each micro-batch."""
    taken = {
        name
        for body in _all_bodies(graph)
        for name in attribute_value(body, recorded_glue.RERECORD_ATTRIBUTE, ())
    }
    found = [
        c
        for c in recorded_glue.read_recorded_cases(graph.attributes.get(recorded_glue.RECORDED_ATTRIBUTE))
        if c["name"] in taken
    ]
    return tuple(
        schema.RerecordedCase(
            c["name"], tuple(c["when"]), c["why"], c["where"], tuple(c["nodes"]), c["spare"]
        )
        for c in found
    )


def _plan_hash(module: ModuleOp, model: schema.ModelRef, versions: Mapping[str, str]) -> str:
    parts = [
        print_module(module),
        model.sha256,
        json.dumps(model.parameters, sort_keys=True),
        json.dumps(dict(versions), sort_keys=True),
        *(f"{name} {digest}" for name, digest in sorted(model.imports.items())),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _plan_section(graph: GraphOp, op: SectionOp, model: schema.ModelRef) -> schema.Section:
    name = op.sym.data
    return schema.Section(
        name=name,
        module=f"sections/{section_module_name(name)}.py",
        mode=op.mode.data if op.mode else "train",
        when=strings_of(op.when),
        blocks=strings_of(op.blocks),
        params=_section_params(graph, op, model),
        mesh=schema.Mesh(
            attribute_value(op, "ranks", (0,)),
            attribute_value(op, "dp", 1),
            attribute_value(op, "pp", 1),
            attribute_value(op, "tp", 1),
            attribute_value(op, "cp", 1),
            attribute_value(op, "ep", 1),
        ),
        micro_batch=attribute_value(op, "most_samples", attribute_value(op, "micro_batch", 1)),
        recompute=attribute_value(op, "recompute", "none"),
        sharding=attribute_value(op, "sharding", "none"),
        memory_gib=attribute_value(op, "memory_gib", 0.0),
        label=attribute_value(op, "label", "default"),
        cost=_section_cost(op),
        pipeline=attribute_value(op, "pipeline", ""),
        stage=attribute_value(op, "stage", 0),
        chunks=attribute_value(op, "chunks", 1),
        placement=attribute_value(op, "placement", "loop"),
        in_flight=attribute_value(op, "in_flight", 0),
        room_bytes=attribute_value(op, "room_bytes", 0),
        working_bytes=attribute_value(op, "working_bytes", 0),
        weight_permille=attribute_value(op, "weight_permille", 0),
        mean_samples=_mean_samples(op),
        micro_batch_tokens=attribute_value(op, "micro_batch_tokens", 0),
        token_count=attribute_value(op, "token_count", ""),
        shards=tuple(shard.value for shard in get_values(op, "shards", ShardAttr)),
        styles=tuple(style.value for style in get_values(op, "styles", StyleAttr)),
        partial=attribute_value(op, "partial", ()),
        overlap=attribute_value(op, "overlap", "none"),
        row_attention=attribute_value(op, "row_attention", "gather"),
        row_layers=_paths_inside(op, "row_layers"),
        row_modules=_paths_inside(op, "row_modules"),
        cp_per=attribute_value(op, "cp_per", "section"),
        subgroups=_subgroup_costs(op),
        subgroup_bytes=attribute_value(op, "subgroup_bytes", 0),
        whole_batch=bool(whole_batch_of_section(graph, op)),
        offload=attribute_value(op, "offload", "none"),
        host_gib=attribute_value(op, "host_gib", 0.0),
        units=_fsdp_units(graph, op) if _comes_by_layers(op) else (),
    )


def _comes_by_layers(op: SectionOp) -> bool:
    """Whether parameters come to the device layer by layer: in every pass, or in the first forward of a step
    after sharded optimizers."""
    return (
        attribute_value(op, "sharding", "none") != "none"
        or attribute_value(op, "offload", "none") == "weights"
    )


def _paths_inside(op: SectionOp, name: str) -> tuple[str, ...]:
    """The paths of an attribute that lie inside the section's blocks: stages share what their section has."""
    blocks = tuple(f"{block}." for block in strings_of(op.blocks))
    paths: tuple[str, ...] = attribute_value(op, name, ())
    return tuple(path for path in paths if f"{path}.".startswith(blocks))


def _fsdp_units(graph: GraphOp, op: SectionOp) -> tuple[str, ...]:
    """The FSDP units of a section: blocks that its cases call once each, all cases in one order, with layers
    that run in order, and with no parameter that glue reads."""
    found = bodies_of(graph, op.sym.data)
    read = {p.path.data for body in found for p in body.walk() if isinstance(p, ParamOp)}
    calls = [[c for c in body.walk() if isinstance(c, CallOp)] for body in found]
    rows = sorted(([c.target.data for c in row] for row in calls), key=len, reverse=True)
    order: list[str] = []
    out = {b for row in rows for b in row if row.count(b) > 1 or any(n.startswith(f"{b}.") for n in read)}
    out |= {c.target.data for row in calls for c in row if OUT_OF_TURN_ATTRIBUTE in c.attributes}
    for row in rows:
        at = 0
        for block in (b for b in row if b not in out):
            if block not in order:
                order.insert(at, block)
            elif order.index(block) < at:
                out.add(block)
                continue
            at = order.index(block) + 1
    return tuple(b for b in order if b not in out)


def _mean_samples(op: SectionOp) -> int:
    """The mean samples of a micro-batch that memory was counted for, 0 where that is the most it may have."""
    if "most_samples" not in op.attributes or "micro_batch_tokens" in op.attributes:
        return 0
    return attribute_value(op, "micro_batch", 1)


def _section_cost(op: SectionOp) -> schema.Cost:
    known = {
        "forward_ns": "0",
        "backward_ns": "0",
        "label": "default",
        "flops": "",
        "backward_flops": "",
        "saved": "",
        "streamed": "",
        "kept_between": "",
        "dtype": "",
    }
    return schema.Cost(**{key: attribute_value(op, key, default) for key, default in known.items()})


def _subgroup_costs(op: SectionOp) -> tuple[schema.SubgroupCost, ...]:
    names = ("ranks", "forward_ns", "backward_ns", "saved")
    columns = [attribute_value(op, f"subgroup_{name}", ()) for name in names]
    between = attribute_value(op, "subgroup_kept_between", ("",) * len(columns[0]))
    return tuple(
        schema.SubgroupCost(ranks, schema.Cost(forward_ns, backward_ns, saved=saved, kept_between=kept))
        for ranks, forward_ns, backward_ns, saved, kept in zip(*columns, between, strict=True)
    )


def _section_params(graph: GraphOp, op: SectionOp, model: schema.ModelRef) -> tuple[str, ...]:
    """The parameters that a section holds: the parameters of the blocks its bodies call, and any that its
    glue reads."""
    found = bodies_of(graph, op.sym.data)
    read = {p.path.data for body in found for p in body.walk() if isinstance(p, ParamOp)}
    blocks = strings_of(op.blocks)
    return tuple(n for n in model.parameters if n in read or any(n.startswith(f"{b}.") for b in blocks))


def _plan_input(op: KeyOp) -> schema.Input:
    pads = tuple(
        (int(dim), side, _parse_fill(fill)) for dim, side, fill in (p.split(" ") for p in strings_of(op.pads))
    )
    dims = tuple(size_expr.format_expr(d) for d in tensor_type(op.result).shape)
    return schema.Input(op.key.data, tensor_type(op.result).torch_dtype, dims, op.optional is not None, pads)


def _parse_fill(text: str) -> schema.PadFill:
    """What a padded dim is filled with: a number, a row as numbers between commas, or a text fill."""
    if text in schema.TEXT_FILLS:
        return text
    return tuple(float(n) for n in text.split(",")) if "," in text else float(text)


def _plan_edge(graph: GraphOp, op: EdgeOp) -> schema.Edge:
    """The plan's edge of an edge; `bytes_per_sample` is a mean over the dataset's patterns."""
    kind = tensor_type(op.result)
    src = next(s for s in graph.sections if s.sym.data == op.src.root_reference.data)
    extents = tuple(extent.value for extent in op.extents or ())
    return schema.Edge(
        name=op.sym.data,
        src=src.sym.data,
        dst=op.dst.root_reference.data,
        dtype=kind.torch_dtype,
        dims=tuple(size_expr.format_expr(d) for d in kind.shape),
        dim=op.dim.data if op.dim is not None else -1,
        rows=op.rows.data if op.rows is not None else "",
        grad=kind.requires_grad,
        when=strings_of(src.when),
        extents=extents,
        bytes_per_sample=_bytes_per_sample(graph, op),
        fills=tuple(map(float, strings_of(op.fills))),
    )


def _bytes_per_sample(graph: GraphOp, op: EdgeOp) -> float:
    kind = tensor_type(op.result)
    total = 0.0
    for pattern in graph.patterns:
        sizes = {name: attribute_value(pattern, name, 0) for name in graph.symbols}
        entries = 1.0
        for dim in kind.shape:
            entries *= size_expr.evaluate_size(dim, sizes)
        total += float(pattern.share.data) * entries * kind.itemsize
    return round(total, 3)


def _plan_terms(graph: GraphOp) -> tuple[schema.LossTerm, ...]:
    owners = {
        op.sym.data: op
        for body in _all_bodies(graph)
        if section_of(body) != TERMS_SECTION
        for op in body.walk()
        if isinstance(op, TermOp)
    }
    texts = {
        name: text
        for body in bodies_of(graph, TERMS_SECTION)
        for name, text in _coefficient_texts(graph, body).items()
    }
    return tuple(
        schema.LossTerm(
            name,
            section_of(op.parent_op() or op) or "",
            texts.get(name, "1"),
            op.where.data if op.where else "",
            prod(int(d) for d in tensor_type(op.numerator).shape[is_gathered(name) :]),
            attribute_value(op, FIRST_PASS_ATTRIBUTE, 1),
        )
        for name, op in owners.items()
    )


def _plan_outputs(graph: GraphOp) -> tuple[schema.SectionOutput, ...]:
    """What `metrics()` asks for. Raises UserError for a tensor that several sections compute."""
    outputs: dict[str, schema.SectionOutput] = {}
    for body in _all_bodies(graph):
        for op in (o for o in body.walk() if isinstance(o, OutputOp)):
            assert op.dim is not None and op.rows is not None  # `insert-transfers` has added them
            kind = tensor_type(op.value)
            output = schema.SectionOutput(
                op.sym.data,
                section_of(body) or "",
                kind.torch_dtype,
                tuple(size_expr.format_expr(d) for d in kind.shape),
                op.dim.data,
                op.rows.data,
                tuple(extent.value for extent in op.extents or ()),
            )
            if outputs.setdefault(output.name, output) != output:
                other = outputs[output.name].section
                raise UserError(
                    f"metrics() asks for {output.name!r}, which section {other!r} computes for some samples"
                    f" and {output.section!r} for others",
                    op.where.data if op.where else "",
                    "compute it from one module's results for all samples, or give --max-sections 1",
                )
    return tuple(outputs.values())


def _coefficient_texts(graph: GraphOp, body: BodyOp) -> dict[str, str]:
    """Each term's coefficient as the lines of code that compute it."""
    ops = list(body.body.block.ops)
    found: dict[str, str] = {}
    for op in ops:
        if isinstance(op, TermOp):
            printer = BodyPrinter(graph, {}, terms=True, whole_batch=True)
            found[op.sym.data] = "; ".join(printer.print_lines(ops_for_values(ops, [op.operands[0]])))
    return found


def _all_bodies(graph: GraphOp) -> list[BodyOp]:
    return [op for op in graph.body.block.ops if isinstance(op, BodyOp)]


def _plan_ties(graph: GraphOp, sections: tuple[schema.Section, ...]) -> tuple[schema.TiedParameter, ...]:
    """Parameters under several names, and parameters under one name in several sections."""
    tied = [strings_of(op.names) for op in graph.body.block.ops if isinstance(op, TieOp)]
    named = {n for names in tied for n in names}
    shared = {
        n for s in sections for n in s.params if n not in named and sum(n in o.params for o in sections) > 1
    }
    groups = tied + [(n,) for n in sorted(shared)]
    return tuple(
        schema.TiedParameter(names, tuple(s.name for s in sections if set(names) & set(s.params)))
        for names in groups
    )
