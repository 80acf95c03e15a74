"""Imports a capture as a module of the dialect `sec`: declarations, then one case for each captured path."""

from __future__ import annotations

import json
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from xdsl.dialects.builtin import IntAttr, ModuleOp, StringAttr, UnitAttr
from xdsl.ir import Attribute, Operation, SSAValue

from secc.errors import UserError
from secc.frontend.capture.capture import Capture, CapturedBlock, CapturedCase
from secc.frontend.capture.rerecorded_cases import outline_nodes
from secc.frontend.dataset.statistics import pattern_means
from secc.ir.analysis import random_ops, recorded_glue, sample_sizes
from secc.ir.dialect import argument_template, size_expr
from secc.ir.dialect.ops import (
    LARGEST_PART_ATTRIBUTE,
    OUTSIDE_STACK_ATTRIBUTE,
    PART_OF_LAYER_ATTRIBUTE,
    BlockOp,
    CallOp,
    CaseOp,
    ConstOp,
    GlueOp,
    GraphOp,
    GuardOp,
    InputOp,
    KeyOp,
    ParamOp,
    PatternOp,
    ReturnOp,
    SymbolOp,
    TieOp,
    make_region,
    strings_attr,
)
from secc.ir.dialect.python_attributes import float_attr
from secc.ir.dialect.readable_names import (
    BATCH_INDEPENDENT_ATTRIBUTE,
    KNOWN_BUFFER_ATTRIBUTE,
    SETTINGS_ATTRIBUTE,
    SUMMED_ATTRIBUTE,
    WRITTEN_ATTRIBUTE,
)
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import TensorType
from secc.ir.dialect.typed_attributes import CouplingAttr
from secc.runtime.plan import schema
from secc.runtime.recorder import Hazard, is_read_node, outline, read_value, take_at_path
from secc.runtime.sections.autograd_functions import UserFunctionCall

# Hazards that make samples depend on each other; a block that has several names the first of these.
_COUPLING_KINDS = ("state", "frequency", "mixed_rows", "batch_statistics", "batch_norm")


def capture_to_ir(capture: Capture) -> ModuleOp:
    """Returns the IR of a capture. Raises UserError for glue that the IR cannot express."""
    inputs = capture.inputs
    ops: list[Operation] = [_symbol_op(s) for s in inputs.symbols]
    ops += _data_symbol_ops(capture.cases)
    ops += [_key_op(i) for i in inputs.inputs]
    ops += _pattern_ops(capture)
    largest = _largest_parts(capture.blocks.values())
    ops += [
        _block_op(b, [h for h in capture.hazards if h.path == b.path], b.path in largest)
        for b in capture.blocks.values()
    ]
    ops += [TieOp.create(properties={"names": strings_attr(names)}) for names in capture.ties]
    call_sites = _blocks_with_call_sites(capture)
    calls = _most_calls_by_site(capture)
    ops += [_CaseImporter(case, capture, call_sites, calls).build_case_op() for case in capture.cases]
    properties: dict[str, Attribute] = {"sym": StringAttr("model")}
    if capture.optional_keys:
        properties["optional"] = strings_attr(sorted(capture.optional_keys))
    if inputs.labels_key:
        properties["labels"] = StringAttr(inputs.labels_key)
    graph = GraphOp.create(properties=properties, regions=[make_region(ops)])
    if rerecorded := [_rerecording_data(case) for case in capture.cases if case.rerecord_reason is not None]:
        graph.attributes[recorded_glue.RECORDED_ATTRIBUTE] = StringAttr(json.dumps(rerecorded))
    if capture.draws:
        graph.attributes[random_ops.RANDOM_OPS_ATTRIBUTE] = strings_attr(
            random_ops.format_random_op(d) for d in capture.draws
        )
    if not inputs.given_statistics:
        graph.attributes.update(_sample_attributes(capture))
    return ModuleOp([graph])


def _blocks_with_call_sites(capture: Capture) -> set[str]:
    """Returns the blocks for which a plan must know the call site: blocks that draw random numbers or are
    called at several places."""
    sites = {
        (str(n.target), n.meta["site"])
        for case in capture.cases
        for n in case.generic.graph.nodes
        if n.op == "call_module"
    }
    several = {path for path, times in Counter(path for path, _ in sites).items() if times > 1}
    return several | {path for path, site in sites if random_ops.draws_in_call(capture.draws, path, site)}


def _most_calls_by_site(capture: Capture) -> Counter[tuple[str, str]]:
    """Returns how often the same lines call a block, (path, lines), in the case that calls it most often."""
    most = Counter[tuple[str, str]]()
    for case in capture.cases:
        nodes = case.generic.graph.nodes
        most |= Counter((str(n.target), n.meta["site"]) for n in nodes if n.op == "call_module")
    return most


def _sample_attributes(capture: Capture) -> dict[str, Attribute]:
    """Returns the attributes with the known sizes of samples."""
    inputs = capture.inputs
    known = list(zip(inputs.sample_patterns, inputs.sample_sizes, strict=True))
    names, (listed, larger) = [s.name for s in inputs.symbols], sample_sizes.select_listed(known)
    attributes: dict[str, Attribute] = {
        sample_sizes.SAMPLES_ATTRIBUTE: sample_sizes.samples_attr(names, (known[k] for k in listed))
    }
    largest = [*(known[k] for k in larger), *inputs.largest_samples]
    return attributes | (
        {sample_sizes.LARGEST_ATTRIBUTE: sample_sizes.samples_attr(names, largest)} if largest else {}
    )


def _rerecording_data(case: CapturedCase) -> dict[str, Any]:
    """Returns what a plan has to know to re-record a case's glue."""
    assert case.rerecord_reason is not None
    data = {
        "name": case.name,
        "when": sorted(case.pattern),
        "why": case.rerecord_reason.message,
        "where": case.rerecord_reason.where,
        "spare": case.is_fallback,
    }
    return data | {"nodes": outline_nodes(case.generic)}


def _symbol_op(s: schema.Symbol) -> SymbolOp:
    properties = {
        "sym": StringAttr(s.name),
        "kind": StringAttr(s.kind),
        "key": StringAttr(s.key),
        "dim": IntAttr(s.dim),
    }
    return SymbolOp.create(properties=properties)


def _data_symbol_ops(cases: Sequence[CapturedCase]) -> list[Operation]:
    """Returns the symbols that values of the inputs decide. Cases number them equally, so their estimate
    is the largest over the cases."""
    abouts: dict[str, set[Expr]] = {}
    for case in cases:
        for name, about in case.generic.data_symbols.items():
            abouts.setdefault(name, set()).add(about)
    ops: list[Operation] = []
    for name, found in sorted(abouts.items()):
        ops.append(op := _symbol_op(schema.Symbol(name, "data", "", 0)))
        op.properties["about"] = StringAttr(size_expr.format_expr(sympy.Max(*found)))
    return ops


def _key_op(i: schema.Input) -> KeyOp:
    properties: dict[str, Attribute] = {"key": StringAttr(i.key)}
    if i.optional:
        properties["optional"] = UnitAttr()
    if i.pads:
        properties["pads"] = strings_attr(f"{dim} {side} {_format_fill(fill)}" for dim, side, fill in i.pads)
    return KeyOp.create(properties=properties, result_types=[TensorType.from_dims(i.dims, i.dtype)])


def _format_fill(fill: schema.PadFill) -> str:
    if isinstance(fill, tuple):
        return ",".join(map(repr, fill))
    return fill if isinstance(fill, str) else f"{fill:g}"


def _pattern_ops(capture: Capture) -> list[Operation]:
    """Returns an op for each pattern, with its share of the samples and their mean sizes."""
    pattern_ops: list[Operation] = []
    for mean in pattern_means(capture.inputs):
        op = PatternOp.create(
            properties={"when": strings_attr(sorted(mean.when)), "share": StringAttr(f"{mean.share:.4g}")}
        )
        op.attributes |= {name: float_attr(size) for name, size in mean.sizes.items()}
        pattern_ops.append(op)
    return pattern_ops


def _largest_parts(blocks: Iterable[CapturedBlock]) -> set[str]:
    """Returns the block with most parameters of each layer that was captured in several blocks."""
    parts: dict[str, list[CapturedBlock]] = {}
    for block in blocks:
        if block.layer:
            parts.setdefault(block.layer, []).append(block)
    return {max(of_layer, key=lambda b: b.parameter_count).path for of_layer in parts.values()}


def _block_op(block: CapturedBlock, hazards: list[Hazard], is_largest_part: bool) -> BlockOp:
    properties: dict[str, Attribute] = {
        "path": StringAttr(block.path),
        "cls": StringAttr(block.class_name),
        "params": IntAttr(block.parameter_count),
        "trainable": IntAttr(block.trainable_count),
        "component": StringAttr(block.component),
        "layers": IntAttr(block.layer_count),
    }
    if block.where:
        properties["where"] = StringAttr(block.where)
    coupling = [h for h in hazards if h.kind in _COUPLING_KINDS]
    if coupling:
        worst = min(coupling, key=lambda h: _COUPLING_KINDS.index(h.kind))
        properties["couples"] = CouplingAttr.of(worst.kind, worst.op, worst.where)
    if remembered := next((h for h in hazards if h.kind == "remembered"), None):
        properties["remembers"] = StringAttr(remembered.where)
    attributes: dict[str, Attribute] = {OUTSIDE_STACK_ATTRIBUTE: UnitAttr()} if block.outside_stack else {}
    if block.layer:
        attributes[PART_OF_LAYER_ATTRIBUTE] = StringAttr(block.layer)
    if is_largest_part:
        attributes[LARGEST_PART_ATTRIBUTE] = UnitAttr()
    return BlockOp.create(properties=properties, attributes=attributes)


class _CaseImporter:
    """Imports one case."""

    def __init__(
        self,
        case: CapturedCase,
        capture: Capture,
        sited: Collection[str],
        calls_by_site: Mapping[tuple[str, str], int],
    ) -> None:
        self._blocks_with_sites, self._calls_by_site = sited, calls_by_site
        self._calls_so_far = Counter[tuple[str, str]]()
        self._case, self._parameters, self._buffers = case, capture.parameters, capture.buffers
        self._dims = {i.key: i.dims for i in capture.inputs.inputs}
        self._summed = capture.inputs.summed
        self._values: dict[fx.Node, SSAValue] = {}
        self._ops: list[Operation] = []

    def build_case_op(self) -> CaseOp:
        for node in self._case.generic.graph.nodes:
            self._import_node(node)
        properties = {"sym": StringAttr(self._case.name), "when": strings_attr(sorted(self._case.pattern))}
        case_op = CaseOp.create(properties=properties, regions=[make_region(self._ops)])
        if self._case.rerecord_reason is not None:
            case_op.attributes[recorded_glue.RERECORD_ATTRIBUTE] = UnitAttr()
        if self._case.is_fallback:
            case_op.attributes[recorded_glue.FALLBACK_ATTRIBUTE] = UnitAttr()
        return case_op

    def _import_node(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            self._import_source(node)
        elif node.op == "output":
            logged = [(name, self._values[n]) for n in node.graph.nodes for name in n.meta.get("log", ())]
            values: list[SSAValue] = [self._values[node.args[0]], *(value for _, value in logged)]  # type: ignore[index]
            names: dict[str, Attribute] = {"logs": strings_attr(name for name, _ in logged)} if logged else {}
            self._append_op(ReturnOp.create(operands=values, properties=names))
        elif node.op == "call_module":
            self._import_call(node)
        elif is_read_node(node):
            self._import_guard(node)
        elif node.target is not take_at_path and node.target is not operator.getitem:
            self._import_glue(node)

    def _append_op(self, op: Operation, *nodes: fx.Node | None) -> None:
        """Appends an op with results that stand for `nodes`; None for an unused result."""
        self._ops.append(op)
        for node, result in zip(nodes, op.results, strict=True):
            if node is not None:
                self._values[node] = result

    def _import_source(self, node: fx.Node) -> None:
        name = str(node.target)
        if node.op == "placeholder":
            if node.users or "log" in node.meta:
                dims = self._dims.get(name)
                type = _node_type(node) if dims is None else TensorType.from_dims(dims, _dtype_name(node))
                op = InputOp.create_source(name, type)
                if name in self._summed:
                    op.attributes[SUMMED_ATTRIBUTE] = UnitAttr()
                self._append_op(op, node)
        elif name in self._case.generic.constants:
            self._import_constant(node, self._case.generic.constants[name])
        else:
            op = ParamOp.create_source(name, _node_type(node))
            if name in self._buffers:
                op.attributes[KNOWN_BUFFER_ATTRIBUTE] = UnitAttr()
            self._append_op(op, node)

    def _import_constant(self, node: fx.Node, tensor: torch.Tensor) -> None:
        """Imports a constant; the value of a single real number is written down, so that passes can
        compute with it."""
        op = ConstOp.create_source(str(node.target), _node_type(node))
        if tensor.numel() == 1 and not tensor.is_complex() and tensor.dtype is not torch.bool:
            op.attributes["value"] = StringAttr(repr(tensor.item()))
        self._append_op(op, node)

    def _import_call(self, node: fx.Node) -> None:
        outs = [u for u in node.users if u.target is take_at_path]
        operands, args = self._format_arguments(node)
        properties = {
            **_mode_properties(node),
            **_autocast_property(node),
            "outs": strings_attr(str(o.args[1]) for o in outs),
        }
        op = CallOp.create_call(str(node.target), operands, args, [_node_type(o) for o in outs], **properties)
        if node.target in self._blocks_with_sites:
            op.attributes[random_ops.CALL_SITE_ATTRIBUTE] = StringAttr(node.meta["site"])
            called = (str(node.target), node.meta["site"])
            if (calls := self._calls_by_site[called]) > 1:
                number = StringAttr(f"{self._calls_so_far[called]}/{calls}")
                op.attributes[random_ops.SITE_CALL_ATTRIBUTE] = number
                self._calls_so_far[called] += 1
        if any(o.meta["alone"] for o in outs):
            op.attributes[BATCH_INDEPENDENT_ATTRIBUTE] = strings_attr(
                str(o.args[1]) for o in outs if o.meta["alone"]
            )
        if summed := [str(o.args[1]) for o in outs if o.meta.get("summed")]:
            op.attributes[SUMMED_ATTRIBUTE] = strings_attr(summed)
        if settings := node.meta.get("settings"):
            op.attributes[SETTINGS_ATTRIBUTE] = StringAttr(
                argument_template.format_arguments(argument_template.CallArguments(list(settings), {}))
            )
        self._append_op(op, *outs)

    def _import_glue(self, node: fx.Node) -> None:
        target, operands, args = str(node.target), *self._format_arguments(node)
        if node.target is outline.recorded_glue:
            target, args = (
                f"{recorded_glue.RECORDED_PREFIX}{node.args[0]}",
                ", ".join(f"${i}" for i in range(len(operands))),
            )
        results: list[fx.Node | None] = [node]
        types = [_node_type(node)] if "shape" in node.meta else []
        if "results" in node.meta:
            items = {u.args[1]: u for u in node.users if u.target is operator.getitem}
            types = [_result_type(node, r) for r in node.meta["results"]]
            results = [items.get(i) for i in range(len(types))]
        if len(types) == 1 and node.target is torch.ops.aten.unbind.int:  # of one entry: the op gives no list
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
            target, args = str(torch.ops.aten.select.int), f"$0, {dim}, 0"
        elif len(types) != len(results) or ("results" in node.meta and len(types) < 2):
            raise UserError(
                f"the glue's op {node.target} has results that a plan cannot name",
                node.meta["where"],
                "move it into a module",
            )
        properties = _mode_properties(node) | (
            _autocast_property(node) if isinstance(node.target, UserFunctionCall) else {}
        )
        op = GlueOp.create_call(target, operands, args, types, **properties)
        summed = [str(i) for i, r in enumerate(results) if r is not None and r.meta.get("summed")]
        if summed and isinstance(node.target, UserFunctionCall):
            op.attributes[SUMMED_ATTRIBUTE] = strings_attr(summed)
        if node.meta.get("written"):
            op.attributes[WRITTEN_ATTRIBUTE] = UnitAttr()
        if node.meta.get("draw"):
            op.attributes[random_ops.RANDOM_OP_ATTRIBUTE] = StringAttr(node.meta["draw"])
        self._append_op(op, *results)

    def _import_guard(self, node: fx.Node) -> None:
        tensor = next(a for a in node.args if isinstance(a, fx.Node))
        properties: dict[str, Attribute] = {"equals": StringAttr(_format_guard_value(node, tensor))}
        if node.meta["where"]:
            properties["where"] = StringAttr(node.meta["where"])
        self._append_op(GuardOp.create(operands=[self._values[tensor]], properties=properties))

    def _format_arguments(self, node: fx.Node) -> tuple[list[SSAValue], str]:
        """Returns the operands and the text template of the arguments."""
        operands: dict[SSAValue, int] = {}

        def leaf(value: Any) -> Any:
            match value:
                case fx.Node():
                    return argument_template.OperandRef(
                        operands.setdefault(self._values[value], len(operands))
                    )
                case torch.device():
                    return argument_template.DottedName("device")
                case torch.dtype() | torch.memory_format() | torch.layout():
                    return argument_template.DottedName(str(value))
                case _:
                    return value

        args, kwargs = _map_leaves((node.meta["args"], node.meta["kwargs"]), leaf)
        text = argument_template.format_arguments(argument_template.CallArguments(list(args), dict(kwargs)))
        return list(operands), text


def _map_leaves(value: Any, leaf: Any) -> Any:
    match value:
        case list():
            return [_map_leaves(v, leaf) for v in value]
        case tuple():
            return tuple(_map_leaves(v, leaf) for v in value)
        case dict():
            return {k: _map_leaves(v, leaf) for k, v in value.items()}
        case slice():
            return slice(*(_map_leaves(v, leaf) for v in (value.start, value.stop, value.step)))
        case _:
            return leaf(value)


def _mode_properties(node: fx.Node) -> dict[str, Attribute | None]:
    where = node.meta["where"]
    return {
        "no_grad": None if node.meta["grad"] else UnitAttr(),
        "where": StringAttr(where) if where else None,
    }


def _autocast_property(node: fx.Node) -> dict[str, Attribute | None]:
    """Returns the autocast region that a module or function runs in; casts of single ops are recorded as
    ops."""
    if not node.meta["autocast"]:
        return {}
    device, dtype = node.meta["autocast"].split()
    return {"autocast": StringAttr(f'"{device}", dtype=torch.{dtype}')}


def _dtype_name(node: fx.Node) -> str:
    return str(node.meta["dtype"]).removeprefix("torch.")


def _node_type(node: fx.Node) -> TensorType:
    return TensorType.from_dims(node.meta["shape"], _dtype_name(node), bool(node.meta.get("requires_grad")))


def _result_type(node: fx.Node, result: Mapping[str, Any]) -> TensorType:
    """Returns the type of one of several results of an op."""
    dtype: torch.dtype = result["dtype"]
    grad = bool(result.get("carries", node.meta.get("requires_grad"))) and dtype.is_floating_point
    return TensorType.from_dims(result["shape"], str(dtype).removeprefix("torch."), grad)


def _format_guard_value(node: fx.Node, tensor: fx.Node) -> str:
    """Returns the guard's value as `tensor.tolist()` will give it."""
    value = node.meta["read"][1]
    if node.target is not read_value:
        for _ in tensor.meta["shape"]:
            value = [value]
    return repr(value)
