"""A capture as a module of the dialect `sec`: declarations, then one case for each captured way."""

from __future__ import annotations

import json
import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from xdsl.dialects.builtin import IntAttr, ModuleOp, StringAttr, UnitAttr
from xdsl.ir import Attribute, Operation, SSAValue

from secc.errors import UserError
from secc.frontend.capture.capture import Block, Capture, Case
from secc.frontend.capture.rerecorded_cases import outline_nodes
from secc.frontend.dataset.statistics import means
from secc.ir.analysis import random_ops, recorded_glue, sample_sizes
from secc.ir.dialect import argument_template, size_expr
from secc.ir.dialect.ops import (
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
    new_block,
    texts,
)
from secc.ir.dialect.python_attributes import number
from secc.ir.dialect.readable_names import ALONE, KNOWN_BUFFER, SETTINGS
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import TensorType
from secc.runtime.plan import schema
from secc.runtime.recorder import Hazard, is_read, outline, read_value, take
from secc.runtime.sections.autograd_functions import Applied

_COUPLES = {
    "batch_norm": "batch norm in training mode",
    "frequency": "gradients by how often a row is looked up in the batch, scale_grad_by_freq",
    "state": "a tensor of the model that forward changes by what it is given",
}


def to_ir(capture: Capture) -> ModuleOp:
    """The IR of a capture. Raises UserError for glue that the IR cannot say."""
    inputs = capture.inputs
    ops: list[Operation] = [_symbol(s) for s in inputs.symbols]
    ops += _data(capture.cases)
    ops += [_key(i) for i in inputs.inputs]
    ops += _patterns(capture)
    ops += [_block(b, [h for h in capture.hazards if h.path == b.path]) for b in capture.blocks.values()]
    ops += [TieOp.create(properties={"names": texts(names)}) for names in capture.ties]
    sited = _sited(capture)
    ops += [_Case(case, capture, sited).op() for case in capture.cases]
    properties: dict[str, Attribute] = {"sym": StringAttr("model")}
    if capture.optional:
        properties["optional"] = texts(sorted(capture.optional))
    if inputs.labels_key:
        properties["labels"] = StringAttr(inputs.labels_key)
    graph = GraphOp.create(properties=properties, regions=[new_block(ops)])
    if anew := [_anew(case) for case in capture.cases if case.anew is not None]:
        graph.attributes[recorded_glue.ATTRIBUTE] = StringAttr(json.dumps(anew))
    if capture.draws:
        graph.attributes[random_ops.ATTRIBUTE] = texts(random_ops.text(d) for d in capture.draws)
    if not inputs.given:
        graph.attributes.update(_samples(capture))
    return ModuleOp([graph])


def _sited(capture: Capture) -> set[str]:
    """The blocks of which a plan has to know from where they are called: those that draw random numbers or
    have several places."""
    sites = {
        (str(n.target), n.meta["site"])
        for case in capture.cases
        for n in case.generic.graph.nodes
        if n.op == "call_module"
    }
    several = {path for path, times in Counter(path for path, _ in sites).items() if times > 1}
    return several | {path for path, _ in sites if random_ops.in_block(capture.draws, path)}


def _samples(capture: Capture) -> dict[str, Attribute]:
    """The sizes of samples that are known."""
    inputs = capture.inputs
    known = list(zip(inputs.patterns, inputs.sizes, strict=True))
    names, (listed, larger) = [s.name for s in inputs.symbols], sample_sizes.taken(known)
    found: dict[str, Attribute] = {
        sample_sizes.ATTRIBUTE: sample_sizes.attribute(names, (known[k] for k in listed))
    }
    return found | (
        {sample_sizes.LARGEST: sample_sizes.attribute(names, (known[k] for k in larger))} if larger else {}
    )


def _anew(case: Case) -> dict[str, Any]:
    """What a plan has to know to record a case's glue anew."""
    assert case.anew is not None
    said = {
        "name": case.name,
        "when": sorted(case.pattern),
        "why": case.anew.message,
        "where": case.anew.where,
        "spare": case.spare,
    }
    return said | {"nodes": outline_nodes(case.generic)}


def _symbol(s: schema.Symbol) -> SymbolOp:
    properties = {
        "sym": StringAttr(s.name),
        "kind": StringAttr(s.kind),
        "key": StringAttr(s.key),
        "dim": IntAttr(s.dim),
    }
    return SymbolOp.create(properties=properties)


def _data(cases: Sequence[Case]) -> list[Operation]:
    """The symbols that inputs' values decide. Cases count them alike, so what one is about is the most of
    any."""
    abouts: dict[str, set[Expr]] = {}
    for case in cases:
        for name, about in case.generic.data.items():
            abouts.setdefault(name, set()).add(about)
    ops: list[Operation] = []
    for name, found in sorted(abouts.items()):
        ops.append(op := _symbol(schema.Symbol(name, "data", "", 0)))
        op.properties["about"] = StringAttr(size_expr.text(sympy.Max(*found)))
    return ops


def _key(i: schema.Input) -> KeyOp:
    properties: dict[str, Attribute] = {"key": StringAttr(i.key)}
    if i.optional:
        properties["optional"] = UnitAttr()
    if i.pads:
        properties["pads"] = texts(f"{dim} {side} {value:g}" for dim, side, value in i.pads)
    return KeyOp.create(properties=properties, result_types=[TensorType.of(i.dims, i.dtype)])


def _patterns(capture: Capture) -> list[Operation]:
    """The share of samples with each pattern, and the mean sizes of one."""
    found: list[Operation] = []
    for mean in means(capture.inputs):
        op = PatternOp.create(
            properties={"when": texts(sorted(mean.when)), "share": StringAttr(f"{mean.share:.4g}")}
        )
        op.attributes |= {name: number(size) for name, size in mean.sizes.items()}
        found.append(op)
    return found


def _block(block: Block, hazards: list[Hazard]) -> BlockOp:
    properties: dict[str, Attribute] = {
        "path": StringAttr(block.path),
        "cls": StringAttr(block.cls),
        "params": IntAttr(block.params),
        "trainable": IntAttr(block.trainable),
        "component": StringAttr(block.component),
        "layers": IntAttr(block.layers),
    }
    if block.where:
        properties["where"] = StringAttr(block.where)
    couples = next((f"{_COUPLES[h.kind]} ({h.op}) at {h.where}" for h in hazards if h.kind in _COUPLES), None)
    if couples is not None:
        properties["couples"] = StringAttr(couples)
    return BlockOp.create(properties=properties)


class _Case:
    """Imports one case."""

    def __init__(self, case: Case, capture: Capture, sited: Collection[str]) -> None:
        self._sited = sited
        self._case, self._parameters, self._buffers = case, capture.parameters, capture.buffers
        self._dims = {i.key: i.dims for i in capture.inputs.inputs}
        self._values: dict[fx.Node, SSAValue] = {}
        self._ops: list[Operation] = []

    def op(self) -> CaseOp:
        for node in self._case.generic.graph.nodes:
            self._node(node)
        properties = {"sym": StringAttr(self._case.name), "when": texts(sorted(self._case.pattern))}
        found = CaseOp.create(properties=properties, regions=[new_block(self._ops)])
        if self._case.anew is not None:
            found.attributes[recorded_glue.ANEW] = UnitAttr()
        if self._case.spare:
            found.attributes[recorded_glue.SPARE] = UnitAttr()
        return found

    def _node(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            self._head(node)
        elif node.op == "output":
            logged = [(name, self._values[n]) for n in node.graph.nodes for name in n.meta.get("log", ())]
            values: list[SSAValue] = [self._values[node.args[0]], *(value for _, value in logged)]  # type: ignore[index]
            names: dict[str, Attribute] = {"logs": texts(name for name, _ in logged)} if logged else {}
            self._add(ReturnOp.create(operands=values, properties=names))
        elif node.op == "call_module":
            self._call(node)
        elif is_read(node):
            self._guard(node)
        elif node.target is not take and node.target is not operator.getitem:
            self._glue(node)

    def _add(self, op: Operation, *nodes: fx.Node | None) -> None:
        """Append an op whose results are what `nodes` stand for; None for a result that nothing uses."""
        self._ops.append(op)
        for node, result in zip(nodes, op.results, strict=True):
            if node is not None:
                self._values[node] = result

    def _head(self, node: fx.Node) -> None:
        name = str(node.target)
        if node.op == "placeholder":
            if node.users:
                dims = self._dims.get(name)
                type = _type(node) if dims is None else TensorType.of(dims, _dtype(node))
                self._add(InputOp.of(name, type), node)
        elif name in self._case.generic.constants:
            self._constant(node, self._case.generic.constants[name])
        else:
            op = ParamOp.of(name, _type(node))
            if name in self._buffers:
                op.attributes[KNOWN_BUFFER] = UnitAttr()
            self._add(op, node)

    def _constant(self, node: fx.Node, tensor: torch.Tensor) -> None:
        """A constant; a real number is written down, so that passes can reckon with it."""
        op = ConstOp.of(str(node.target), _type(node))
        if tensor.numel() == 1 and not tensor.is_complex() and tensor.dtype is not torch.bool:
            op.attributes["value"] = StringAttr(repr(tensor.item()))
        self._add(op, node)

    def _call(self, node: fx.Node) -> None:
        outs = [u for u in node.users if u.target is take]
        operands, args = self._arguments(node)
        properties = {**_modes(node), **_autocast(node), "outs": texts(str(o.args[1]) for o in outs)}
        op = CallOp.of(str(node.target), operands, args, [_type(o) for o in outs], **properties)
        if node.target in self._sited:
            op.attributes[random_ops.SITE] = StringAttr(node.meta["site"])
        if any(o.meta["alone"] for o in outs):
            op.attributes[ALONE] = texts(str(o.args[1]) for o in outs if o.meta["alone"])
        if settings := node.meta.get("settings"):
            op.attributes[SETTINGS] = StringAttr(
                argument_template.format(argument_template.Arguments(list(settings), {}))
            )
        self._add(op, *outs)

    def _glue(self, node: fx.Node) -> None:
        target, operands, args = str(node.target), *self._arguments(node)
        if node.target is outline.recorded:
            target, args = (
                f"{recorded_glue.PREFIX}{node.args[0]}",
                ", ".join(f"${i}" for i in range(len(operands))),
            )
        results: list[fx.Node | None] = [node]
        types = [_type(node)] if "shape" in node.meta else []
        if "results" in node.meta:
            items = {u.args[1]: u for u in node.users if u.target is operator.getitem}
            types = [_result(node, r) for r in node.meta["results"]]
            results = [items.get(i) for i in range(len(types))]
        if len(types) != len(results) or ("results" in node.meta and len(types) < 2):
            raise UserError(
                f"the glue's op {node.target} has results that a plan cannot name",
                node.meta["where"],
                "move it into a module",
            )
        properties = _modes(node) | (_autocast(node) if isinstance(node.target, Applied) else {})
        op = GlueOp.of(target, operands, args, types, **properties)
        if node.meta.get("draw"):
            op.attributes[random_ops.NAME] = StringAttr(node.meta["draw"])
        self._add(op, *results)

    def _guard(self, node: fx.Node) -> None:
        tensor = next(a for a in node.args if isinstance(a, fx.Node))
        properties: dict[str, Attribute] = {"equals": StringAttr(_equals(node, tensor))}
        if node.meta["where"]:
            properties["where"] = StringAttr(node.meta["where"])
        self._add(GuardOp.create(operands=[self._values[tensor]], properties=properties))

    def _arguments(self, node: fx.Node) -> tuple[list[SSAValue], str]:
        """Operands and the argument template."""
        operands: dict[SSAValue, int] = {}

        def leaf(value: Any) -> Any:
            match value:
                case fx.Node():
                    return argument_template.Ref(operands.setdefault(self._values[value], len(operands)))
                case torch.device():
                    return argument_template.Name("device")
                case torch.dtype() | torch.memory_format() | torch.layout():
                    return argument_template.Name(str(value))
                case _:
                    return value

        args, kwargs = _mapped((node.meta["args"], node.meta["kwargs"]), leaf)
        text = argument_template.format(argument_template.Arguments(list(args), dict(kwargs)))
        return list(operands), text


def _mapped(value: Any, leaf: Any) -> Any:
    match value:
        case list():
            return [_mapped(v, leaf) for v in value]
        case tuple():
            return tuple(_mapped(v, leaf) for v in value)
        case dict():
            return {k: _mapped(v, leaf) for k, v in value.items()}
        case slice():
            return slice(*(_mapped(v, leaf) for v in (value.start, value.stop, value.step)))
        case _:
            return leaf(value)


def _modes(node: fx.Node) -> dict[str, Attribute | None]:
    where = node.meta["where"]
    return {
        "no_grad": None if node.meta["grad"] else UnitAttr(),
        "where": StringAttr(where) if where else None,
    }


def _autocast(node: fx.Node) -> dict[str, Attribute | None]:
    """The autocast region that a module or function runs in; casts of ops were recorded."""
    if not node.meta["autocast"]:
        return {}
    device, dtype = node.meta["autocast"].split()
    return {"autocast": StringAttr(f'"{device}", dtype=torch.{dtype}')}


def _dtype(node: fx.Node) -> str:
    return str(node.meta["dtype"]).removeprefix("torch.")


def _type(node: fx.Node) -> TensorType:
    return TensorType.of(node.meta["shape"], _dtype(node), bool(node.meta.get("requires_grad")))


def _result(node: fx.Node, result: Mapping[str, Any]) -> TensorType:
    """One of several results of an op."""
    dtype: torch.dtype = result["dtype"]
    grad = bool(result.get("carries", node.meta.get("requires_grad"))) and dtype.is_floating_point
    return TensorType.of(result["shape"], str(dtype).removeprefix("torch."), grad)


def _equals(node: fx.Node, tensor: fx.Node) -> str:
    """The guard's value as `tensor.tolist()` will give it."""
    value = node.meta["read"][1]
    if node.target is not read_value:
        for _ in tensor.meta["shape"]:
            value = [value]
    return repr(value)
