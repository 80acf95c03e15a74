"""Writes into a graph how the modules of its blocks can be cut over the ranks of a replica: a `sec.cut` for
each module and tp.

The modules are the layers of a block's stacks, or the block itself where it has none; alike layers are sought
and shown once. Beside them stand embeddings, cut by vocabulary, and heads, whose logits are gathered.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from xdsl.dialects.builtin import ModuleOp

from secc.cost.counting.example_arguments import Samples
from secc.frontend.dataset.survey import Survey
from secc.frontend.tp_search.call_collector import Observer, made_up, with_values
from secc.frontend.tp_search.expert_cuts import ALIGNED, divides, find_experts, sizes_of
from secc.frontend.tp_search.find_mapping import Call, Found, Way, find, shards
from secc.frontend.tp_search.hf_tp_plan import columns
from secc.frontend.tp_search.small_model_layers import SmallModel
from secc.frontend.tp_search.verify_mapping import Verdict, Whole
from secc.ir.analysis.dataflow import number_of, text_of
from secc.ir.analysis.tp_layouts import cut_op
from secc.ir.analysis.vocab_sharding import wide
from secc.ir.dialect.ops import CallOp, GraphOp, TieOp, graph_of, strings, texts
from secc.ir.dialect.readable_names import SETTINGS
from secc.runtime.fusion.install import install
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.schema import Rewrite, Shard, Style
from secc.runtime.sections.recompute import units
from secc.runtime.tensor_parallel.linear_modules import Linear, embedding, linear

LARGEST = 1 << 29  # entries of a module that is run here
LARGE = 1 << 26  # entries of one in whose place one of the user's small model is run, if there is one
MEDIUM = 1 << 22  # and of one that takes seconds, which is run itself where the small one does not show it
SHARE = 8  # a wide linear map is a head if it has at least one in so many of its block's parameters


Fused = tuple[Sequence[Rewrite], str]
OnPositions = tuple[list[Style], tuple[str, ...]]
LayerKey = tuple[type[nn.Module], tuple[tuple[str, tuple[int, ...]], ...]]
ANY = ["*"]  # linear map may be cut by outputs


@dataclass
class Cutting:
    """How a module is cut, its paths counted from it."""

    styles: list[Style] = field(default_factory=list[Style])
    shards: list[Shard] = field(default_factory=list[Shard])
    partial: tuple[str, ...] = ()
    whole: dict[str, str] = field(default_factory=dict[str, str])
    positions: OnPositions = ([], ())  # styles with the sequence in parts, and what is partial then


@dataclass(frozen=True)
class Sought:
    """Mappings of layers by path and count, and what they were shown with: fused operators, and whether norms
    work on positions."""

    fused: Fused = ((), "")
    sequence: bool = False
    found: Mapping[tuple[str, int], Cutting] = field(default_factory=dict[tuple[str, int], Cutting])


NOTHING = Sought()


@dataclass(frozen=True)
class Subject:
    """What mappings are sought for: the user's model without weights (`meta`), and with them (`model`) if it
    fits here."""

    meta: nn.Module
    model: nn.Module | None
    user: UserModel
    survey: Survey
    samples: Samples


def annotate(module: ModuleOp, subject: Subject, fused: Fused, sought: Sought = NOTHING) -> bool:
    """Add the cuts of sections with a tp above 1; whether there are any such.

    `fused` has the fused operators that ranks will put into the model, and their code; `sought` what `seek`
    found for another graph of it.
    """
    graph = graph_of(module)
    found = seek(module, subject, fused, sought).found
    ties = [strings(op.names) for op in graph.body.block.ops if isinstance(op, TieOp)]
    wanted = _wanted(graph)
    for block, count in wanted:
        for path, _ in layers_of(subject.meta, block):
            _add(graph, block, path, count, found[path, count])
        for path, cutting in _alone(subject.meta, block, ties, count):
            _add(graph, block, path, count, cutting)
    return bool(wanted)


def seek(module: ModuleOp, subject: Subject, fused: Fused, known: Sought = NOTHING) -> Sought:
    """Mappings of all layers in sections with a tp above 1. Those in `known` are taken if they were shown
    with the same operators."""
    graph, meta = graph_of(module), subject.meta
    sequence = any(text_of(s, "norms") == "sequence" for s in graph.sections)
    wanted = [(path, m, count) for block, count in _wanted(graph) for path, m in layers_of(meta, block)]
    same = (known.fused, known.sequence) == (fused, sequence)
    found = {(path, n): known.found[path, n] for path, _, n in wanted if same and (path, n) in known.found}
    layers = {path: m for path, m, count in wanted if (path, count) not in found}
    if layers:
        observer = Observer(
            {p: layers[p] for p in {layer_key(m): p for p, m in reversed(layers.items())}.values()}
        )
        if subject.model is not None:
            observer.real(subject.model, subject.user, subject.survey)
        observer.meta(graph, meta, subject.samples)
        seeker = _Seeker(
            meta, subject.model, observer, SmallModel(subject.user, subject.survey), fused, sequence
        )
        found |= {(path, count): seeker.layer(path, count) for path, _, count in wanted if path in layers}
    return Sought(fused, sequence, found)


def _wanted(graph: GraphOp) -> list[tuple[str, int]]:
    """The blocks of sections with a tp above 1, and that."""
    whole = changed(graph)
    return [
        (block, tp)
        for s in graph.sections
        if (tp := int(number_of(s, "tp") or 1)) > 1
        for block in strings(s.blocks)
        if block not in whole
    ]


def changed(graph: GraphOp) -> set[str]:
    """The blocks that forward sets otherwise for some call (an adapter switched off), for which nothing is
    shown."""
    calls = (op for case in graph.cases for op in case.ops if isinstance(op, CallOp))
    return {call.target.data for call in calls if SETTINGS in call.attributes}


def layers_of(model: nn.Module, block: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a block that are cut each by itself."""
    root = model.get_submodule(block)
    names = {m: n for n, m in root.named_modules(prefix=block, remove_duplicate=False)}
    for unit in units(root):
        yield names[unit], unit


def layer_key(layer: nn.Module) -> LayerKey:
    """What alike layers have in common: class, and names and shapes of parameters."""
    return type(layer), tuple((n, tuple(p.shape)) for n, p in layer.named_parameters(remove_duplicate=False))


def bared(layer: nn.Module, call: Call) -> nn.Module:
    """A layer without values, if what it is called with has none."""
    bare = any(isinstance(t, torch.Tensor) and t.is_meta for t in tree_leaves(call))
    return copy.deepcopy(layer).to("meta") if bare else layer


class _Seeker:
    """Seeks and shows mappings; those of alike modules once."""

    def __init__(
        self,
        meta: nn.Module,
        model: nn.Module | None,
        observer: Observer,
        small: SmallModel,
        fused: Fused,
        sequence: bool,
    ) -> None:
        self.meta, self.source, self.observer, self.small, self.fused = (
            meta,
            meta if model is None else model,
            observer,
            small,
            fused,
        )
        self._known: dict[object, Cutting] = {}
        self.sequence = sequence

    def layer(self, path: str, count: int) -> Cutting:
        module = self.source.get_submodule(path)
        key = (layer_key(module), count)
        if key not in self._known:
            self._known[key] = self._sought(path, module, count)
        return self._known[key]

    def _sought(self, path: str, module: nn.Module, count: int) -> Cutting:
        size, experts = sum(p.numel() for p in module.parameters()), any(map(sizes_of, module.modules()))
        like = (
            self.small.like(module)
            if size > (LARGE if experts else MEDIUM) and path in self.observer.calls
            else None
        )
        if path not in self.observer.calls or (size > LARGEST and like is None):
            why = (
                "it was not called here"
                if size <= LARGEST
                else "it is too large to be shown exact here: define small_model()"
            )
            return Cutting(
                whole={p: why for p, m in module.named_modules() if linear(m) is not None or sizes_of(m)}
            )
        cutting = self._tried(path, module, like, count)
        return (
            cutting
            if cutting.styles or like is None or size > LARGE
            else self._tried(path, module, None, count)
        )

    def _tried(
        self, path: str, module: nn.Module, like: tuple[nn.Module, Call] | None, count: int
    ) -> Cutting:
        """A mapping that is exact: shown on `like`, a small layer with its call, or on the layer itself."""
        call = self.observer.calls[path]
        layer, cutting = bared(module, call), Cutting()
        experts, why = self._experts(module, *(like or (module, call)), count)
        for names, cut in product(
            filter(None, (columns(self.meta, path), ANY)), (experts, {}) if experts else ({},)
        ):
            mapping = find(layer, call, count, None if names is ANY else names)
            left = {p: cutting.whole[p] for p in experts if p not in cut}  # as they were tried with
            mapping = replace(mapping, experts=cut, whole={**mapping.whole, **why, **left})
            if not mapping.columns and not cut:
                cutting = Cutting(whole=dict(mapping.whole))
            elif like is not None:
                cutting = self._shown_on(like, path, module, count, mapping)
            else:
                cutting = self._shown(path, module, call, count, mapping)
            if cutting.styles:
                break
        return cutting

    def _experts(
        self, module: nn.Module, like: nn.Module, call: Call, count: int
    ) -> tuple[dict[str, Way], dict[str, str]]:
        """How experts inside a layer are cut, and why others stay whole: found out by `like`, the layer or a
        small one like it."""
        found = [path for path, m in module.named_modules() if sizes_of(m)]
        if not found or self.sequence:
            return {}, dict.fromkeys(found, "with norms=sequence experts get all positions of some ranks")
        like, call = with_values(like), tree_map(made_up, call)
        ways = find_experts(like, call, count) or find_experts(like, call, 2)
        cut = {path: way for path, way in ways.items() if divides(module.get_submodule(path), way, count)}
        uneven = f"tp={count} does not divide the inner width of its experts into parts of {ALIGNED}"
        return cut, {
            path: uneven if path in ways else "no way to cut its experts was shown exact"
            for path in found
            if path not in cut
        }

    def _shown_on(
        self, like: tuple[nn.Module, Call], path: str, module: nn.Module, count: int, mapping: Found
    ) -> Cutting:
        """The mapping of a large layer, if a small one like it has the same one, over as many ranks or two,
        and that is exact."""
        why = "the layer of small_model() that is like it is cut otherwise"
        for ranks in dict.fromkeys((count, 2)):
            same = replace(find(like[0], like[1], ranks, mapping.columns), experts=mapping.experts)
            if same.columns.keys() != mapping.columns.keys() or same.rows.keys() != mapping.rows.keys():
                continue
            shown = self._shown(path, like[0], like[1], ranks, same)
            if shown.styles:
                shapes = any(s.kind == "shapes" for s in shown.styles)
                positions = (
                    (mapping.on_positions(shapes), shown.positions[1]) if shown.positions[0] else ([], ())
                )
                return Cutting(
                    mapping.styles(shapes),
                    shards(module, mapping),
                    shown.partial,
                    dict(mapping.whole),
                    positions,
                )
            why = next((w for p, w in shown.whole.items() if p in same.columns), why)
        return Cutting(whole=dict(mapping.whole) | dict.fromkeys(mapping.cut, why))

    def _fuse(self, path: str, module: nn.Module) -> None:
        """Put fused operators into a copy of the module at `path`."""
        rewrites, source = self.fused
        own = [
            (r, tuple(m.removeprefix(path).lstrip(".") for m in r.modules if f"{m}.".startswith(f"{path}.")))
            for r in rewrites
        ]
        install(module, [replace(r, modules=modules) for r, modules in own if modules], source)

    def _positions(
        self, path: str, module: nn.Module, whole: Whole, count: int, mapping: Found, shapes: bool
    ) -> OnPositions:
        """The mapping with the sequence in parts between scopes, if it is asked for and exact."""
        styles = mapping.on_positions(shapes) if self.sequence else []
        if not styles:
            return [], ()
        verdict = whole.compare(count, styles, shards(module, mapping), partial(self._fuse, path))
        return ([], ()) if verdict.reason else (styles, verdict.partial)

    def _shown(self, path: str, module: nn.Module, call: Call, count: int, mapping: Found) -> Cutting:
        """The mapping as the code runs it on parts, with whole sizes only if it must."""
        module, call = with_values(module), tree_map(made_up, call)
        cut, verdict, whole = shards(module, mapping), Verdict(""), Whole(module, call)
        for shapes in (True,) if mapping.draws else (False, True):
            styles = mapping.styles(shapes)
            verdict = whole.compare(count, styles, cut, partial(self._fuse, path))
            if not verdict.reason:
                positions = self._positions(path, module, whole, count, mapping, shapes)
                return Cutting(styles, cut, verdict.partial, dict(mapping.whole), positions)
        return Cutting(whole=dict(mapping.whole) | dict.fromkeys(mapping.cut, verdict.reason))


def _alone(
    model: nn.Module, block: str, ties: list[tuple[str, ...]], count: int
) -> Iterator[tuple[str, Cutting]]:
    """Embeddings and linear maps of a block that are in none of its layers."""
    inside = tuple(f"{path}." for path, _ in layers_of(model, block))
    root = model.get_submodule(block)
    size = sum(p.numel() for p in root.parameters())
    for name, module in root.named_modules():
        path = ".".join(n for n in (block, name) if n)
        if f"{path}.".startswith(inside) or any(True for _ in module.children()):
            continue
        tied = any(f"{path}.weight" in names for names in ties)
        table, head = embedding(module), linear(module)
        tokens, width = _sizes(table, head)
        large = tokens >= count and (tied or wide(tokens, width))
        if table is not None and type(module).forward is nn.Embedding.forward and large:
            yield path, Cutting([Style("", "vocab")], [Shard("weight", 0, (table.num_embeddings,))])
        elif head is not None and large and (tied or SHARE * head.weight.numel() >= size):
            cut = [Shard("weight", head.out_dim, (head.outputs,))] + (
                [Shard("bias", 0, (head.outputs,))] if head.bias is not None else []
            )
            yield path, Cutting([Style("", "gather")], cut)
        elif table is not None or head is not None:
            yield path, Cutting(whole={"": "it is small"})


def _sizes(table: nn.Embedding | None, head: Linear | None) -> tuple[int, int]:
    """Tokens, and numbers for each."""
    if table is not None:
        return table.num_embeddings, table.embedding_dim
    return (0, 0) if head is None else (head.outputs, head.inputs)


def _add(graph: GraphOp, block: str, path: str, count: int, cutting: Cutting) -> None:
    def at(name: str) -> str:
        return ".".join(n for n in (path, name) if n)

    op = cut_op(
        path,
        block,
        count,
        [replace(s, name=at(s.name)) for s in cutting.shards],
        [f"{at(s.module)} {s.kind}" for s in cutting.styles],
        [at(n) for n in cutting.partial],
        [f"{at(p)}: {why}" for p, why in cutting.whole.items()],
    )
    styles, partial = cutting.positions
    if styles:
        op.attributes["positions"] = texts(f"{at(s.module)} {s.kind}" for s in styles)
        op.attributes["positions_partial"] = texts(at(n) for n in partial)
    graph.body.block.insert_op_before(op, graph.cases[0])
