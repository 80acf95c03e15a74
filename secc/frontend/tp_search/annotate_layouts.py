"""Writes into a graph how the modules of its blocks are split over the ranks of a replica: a `sec.cut` for
each module and tp.

The modules are the layers of a block's stacks, or the block itself if it has none; equal layers are
searched and verified once. Embeddings are split by vocabulary, and heads by vocabulary with gathered
logits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from xdsl.dialects.builtin import ArrayAttr, ModuleOp

from secc.cost.counting.example_arguments import CollatedSamples
from secc.frontend.dataset.survey import DatasetSurvey
from secc.frontend.tp_search.call_collector import (
    CallCollector,
    materialize_argument,
    materialize_module,
    run_on_small_batches,
)
from secc.frontend.tp_search.direct_reads import find_direct_reads
from secc.frontend.tp_search.expert_cuts import (
    ALIGNED_ENTRIES,
    count_of_experts,
    divides_experts,
    expert_sizes,
    find_expert_cuts,
    mixture_sizes,
)
from secc.frontend.tp_search.find_mapping import (
    ExpertCut,
    ModuleCall,
    TpMapping,
    expert_shards,
    expert_style,
    find_mapping,
    mapping_shards,
)
from secc.frontend.tp_search.hf_tp_plan import hf_column_parallel
from secc.frontend.tp_search.small_model_layers import SmallModelLayers
from secc.frontend.tp_search.token_mixing import find_token_mixing
from secc.frontend.tp_search.verify_mapping import UnsplitModule
from secc.ir.analysis.dataflow import get_number, get_string
from secc.ir.analysis.tp_layouts import make_cut_op
from secc.ir.analysis.vocab_sharding import is_wide
from secc.ir.dialect.ops import CallOp, GraphOp, TieOp, graph_of, strings_attr, strings_of
from secc.ir.dialect.readable_names import SETTINGS_ATTRIBUTE
from secc.ir.dialect.typed_attributes import StyleAttr
from secc.runtime.fusion.install import install_fused
from secc.runtime.model.module_copies import copy_module
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.schema import OVERLAPS, CodeRewrite, ModuleStyle, Shard
from secc.runtime.plan.unsplit_reason import UnsplitKind, UnsplitReason
from secc.runtime.sections.gradient_hooks import iter_gradient_hooks
from secc.runtime.sections.recompute import recompute_units
from secc.runtime.tensor_parallel.linear_modules import LinearModule, as_embedding, as_linear
from secc.runtime.training.widened_floats import computes_in_sixteen_bits

# Parameter entries of a module. Above the first, it is never run on this machine. Above the second, only a
# layer of the user's small model is run instead. Above the third, that layer is tried first.
MAX_RUN_ENTRIES = 1 << 29
LARGE_MODULE_ENTRIES = 1 << 26
MEDIUM_MODULE_ENTRIES = 1 << 22
HEAD_SHARE_DIVISOR = 8  # a wide linear layer with at least 1/8 of its block's parameters is a head


FusedOperators = tuple[Sequence[CodeRewrite], str]
SequenceStyles = tuple[list[ModuleStyle], tuple[str, ...]]
LayerKey = tuple[type[nn.Module], tuple[tuple[str, tuple[int, ...]], ...]]
ANY_LINEAR = ["*"]  # linear map may be cut by outputs


@dataclass
class ModuleLayout:
    """How a module is split; paths are relative to it.

    partial_parameters: whole parameters with gradients that are partial on each rank. unsplit_reasons: why
    further modules stay whole. sequence_styles: styles with the sequence split too, and what is partial
    then.
    """

    styles: list[ModuleStyle] = field(default_factory=list[ModuleStyle])
    shards: list[Shard] = field(default_factory=list[Shard])
    partial_parameters: tuple[str, ...] = ()
    unsplit_reasons: dict[str, UnsplitReason] = field(default_factory=dict[str, UnsplitReason])
    sequence_styles: SequenceStyles = ([], ())  # styles with the sequence in parts, and what is partial then


class Degrees(NamedTuple):
    """The numbers of ranks that layers are split over, and of parts that their experts form."""

    tp: int
    ep: int = 1

    @property
    def smallest(self) -> Degrees:
        """Returns the smallest degrees of the same form inside a replica: experts whole on ranks, or shared
        by several."""
        return Degrees(4, 2) if 1 < self.ep < self.tp else Degrees(2, min(2, self.ep))

    @property
    def replicas(self) -> int:
        """Returns the number of consecutive replicas that have different experts."""
        return max(1, self.ep // self.tp)

    @property
    def inside(self) -> Degrees:
        """Returns the degrees inside a replica."""
        return Degrees(self.tp, min(self.tp, self.ep))


@dataclass(frozen=True)
class LayoutSearch:
    """Layouts of layers by path and degrees, and the conditions they were verified under: the fused
    operators, whether norms work on parts of the sequence, and which sums travel behind products."""

    fused: FusedOperators = ((), "")
    sequence_norms: bool = False
    overlap: str = "none"
    layouts: Mapping[tuple[str, Degrees], ModuleLayout] = field(
        default_factory=dict[tuple[str, Degrees], ModuleLayout]
    )


NO_LAYOUTS = LayoutSearch()


@dataclass(frozen=True)
class SearchSubject:
    """The model that layouts are searched for: without weights (`meta`), and with weights (`model`) if it
    fits on this machine."""

    meta: nn.Module
    model: nn.Module | None
    user: UserModel
    survey: DatasetSurvey
    samples: CollatedSamples


def annotate_layouts(
    module: ModuleOp, subject: SearchSubject, fused: FusedOperators, sought: LayoutSearch = NO_LAYOUTS
) -> bool:
    """Adds the layouts of sections with a tp above 1; returns whether there are any such sections.

    fused: the fused operators that ranks will install in the model, and their code. search: layouts that
    `search_layouts` found for another graph of the model.
    """
    graph = graph_of(module)
    found = search_layouts(module, subject, fused, sought).layouts
    ties = [strings_of(op.names) for op in graph.body.block.ops if isinstance(op, TieOp)]
    wanted = _blocks_with_tp(graph)
    model = subject.model
    whole = model and (model, partial(run_on_small_batches, model, subject.user, subject.survey))
    for block, degrees in wanted:
        layouts = {path: found[path, degrees] for path, _ in layers_to_split(subject.meta, block)}
        if degrees.tp > 1:
            layouts |= _embedding_and_head_layouts(subject.meta, block, ties, degrees.tp)
        cuts = {path: {s.name for s in layout.shards} for path, layout in layouts.items() if layout.shards}
        seen = find_direct_reads(graph, subject.meta, block, cuts, subject.samples, whole)
        for paths, kind in (
            (seen.taken, UnsplitKind.TAKEN_FROM_INSIDE),
            (seen.read, UnsplitKind.READ_BY_OTHER_CODE),
            (_paths_with_hooks(subject.meta, cuts), UnsplitKind.GRADIENT_HOOK),
        ):
            layouts |= {path: ModuleLayout(unsplit_reasons={"": UnsplitReason(kind)}) for path in paths}
        for path, layout in layouts.items():
            _add_layout_op(graph, block, path, degrees, layout)
    return bool(wanted)


def _paths_with_hooks(meta: nn.Module, cuts: Mapping[str, Collection[str]]) -> list[str]:
    """Returns the paths of layers with a hook on the gradient of a parameter that would be cut, or of what is
    inside: it would see a part, and may pick rows by number. cuts: the names of such parameters, by path."""
    if not (hooked := {name for name, _, _ in iter_gradient_hooks(meta)}):
        return []
    tensors = {id(p) for n, p in meta.named_parameters() if n in hooked}
    return [
        path
        for path, names in cuts.items()
        if any(id(meta.get_parameter(f"{path}.{n}")) in tensors for n in names)
        or any(f"{n}.".startswith(f"{path}.") for n in hooked)
    ]


def search_layouts(
    module: ModuleOp, subject: SearchSubject, fused: FusedOperators, known: LayoutSearch = NO_LAYOUTS
) -> LayoutSearch:
    """Finds layouts of all layers in sections with a tp above 1. Layouts in `known` are reused if they
    were verified with the same operators."""
    graph, meta = graph_of(module), subject.meta
    sequence = any(get_string(s, "norms") == "sequence" for s in graph.sections)
    overlap = max((get_string(s, "overlap") or "none" for s in graph.sections), key=OVERLAPS.index)
    wanted = [
        (path, m, degrees)
        for block, degrees in _blocks_with_tp(graph)
        for path, m in layers_to_split(meta, block)
    ]
    same = (known.fused, known.sequence_norms, known.overlap) == (fused, sequence, overlap)
    found = {
        (path, n): known.layouts[path, n] for path, _, n in wanted if same and (path, n) in known.layouts
    }
    layers = {path: m for path, m, degrees in wanted if (path, degrees) not in found}
    if layers:
        first = {layer_key(m): p for p, m in reversed(layers.items())}  # of equal layers
        observer = CallCollector({p: layers[p] for p in first.values()})
        if subject.model is not None:
            observer.run_model(subject.model, subject.user, subject.survey)
        observer.run_blocks_on_meta(graph, meta, subject.samples)
        observer.share_calls({path: first[layer_key(layer)] for path, layer in layers.items()})
        seeker = _LayoutSearcher(
            meta,
            subject.model,
            observer,
            SmallModelLayers(subject.user, subject.survey),
            fused,
            sequence,
            overlap,
        )
        found |= {(path, d): seeker.find_layout(path, d) for path, _, d in wanted if path in layers}
    return LayoutSearch(fused, sequence, overlap, found)


def _blocks_with_tp(graph: GraphOp) -> list[tuple[str, Degrees]]:
    """Returns (block, tp and ep) for the blocks of sections with one of these above 1."""
    whole = blocks_with_settings(graph)
    return [
        (block, degrees)
        for s in graph.sections
        if max(degrees := Degrees(int(get_number(s, "tp") or 1), int(get_number(s, "ep") or 1))) > 1
        for block in strings_of(s.blocks)
        if block not in whole
    ]


def blocks_with_settings(graph: GraphOp) -> set[str]:
    """Returns the blocks that forward switches to other settings for some call (an adapter switched off);
    no layout of these is verified."""
    calls = (op for case in graph.cases for op in case.ops if isinstance(op, CallOp))
    return {call.target.data for call in calls if SETTINGS_ATTRIBUTE in call.attributes}


def layers_to_split(model: nn.Module, block: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields path and module of each module of a block that is split by itself."""
    root = model.get_submodule(block)
    names = {m: n for n, m in root.named_modules(prefix=block, remove_duplicate=False)}
    for unit in recompute_units(root):
        yield names[unit], unit


def layer_key(layer: nn.Module) -> LayerKey:
    """Returns what equal layers have in common: class, and names and shapes of parameters."""
    return type(layer), tuple((n, tuple(p.shape)) for n, p in layer.named_parameters(remove_duplicate=False))


def strip_values(layer: nn.Module, call: ModuleCall) -> nn.Module:
    """Returns the layer on the meta device, if the arguments it is called with have no values. Then they are
    in float32 where the layer has 16 bits, and so are its parameters."""
    if not any(isinstance(t, torch.Tensor) and t.is_meta for t in tree_leaves(call)):
        return layer
    stripped = copy_module(layer).to("meta")
    return stripped.float() if computes_in_sixteen_bits(stripped) else stripped


def install_fused_in(fused: FusedOperators, path: str, module: nn.Module) -> None:
    """Installs fused operators in a copy of the module at `path`."""
    rewrites, source = fused
    own = [
        (r, tuple(m.removeprefix(path).lstrip(".") for m in r.modules if f"{m}.".startswith(f"{path}.")))
        for r in rewrites
    ]
    install_fused(module, [replace(r, modules=modules) for r, modules in own if modules], source)


class _LayoutSearcher:
    """Finds and verifies layouts of layers, those of equal layers once."""

    def __init__(
        self,
        meta: nn.Module,
        model: nn.Module | None,
        observer: CallCollector,
        small: SmallModelLayers,
        fused: FusedOperators,
        sequence: bool,
        overlap: str,
    ) -> None:
        self.meta, self.source, self.observer, self.small, self.fused = (
            meta,
            meta if model is None else model,
            observer,
            small,
            fused,
        )
        self._layouts_by_kind: dict[object, ModuleLayout] = {}
        self.sequence, self.overlap = sequence, overlap

    def find_layout(self, path: str, degrees: Degrees) -> ModuleLayout:
        module = self.source.get_submodule(path)
        key = (layer_key(module), degrees)
        if key not in self._layouts_by_kind:
            layout = self._search_layout(path, module, degrees.inside) if degrees.tp > 1 else ModuleLayout()
            if degrees.replicas > 1:
                layout = self._divide_over_replicas(path, module, layout, degrees)
            self._layouts_by_kind[key] = layout
        return self._layouts_by_kind[key]

    def _divide_over_replicas(
        self, path: str, module: nn.Module, layout: ModuleLayout, degrees: Degrees
    ) -> ModuleLayout:
        """Returns the layout with experts divided further over replicas, where that is exact."""
        if not any(map(mixture_sizes, module.modules())):
            return layout
        if path not in self.observer.calls:
            return replace(layout, unsplit_reasons={"": UnsplitReason(UnsplitKind.NOT_CALLED)})
        size = sum(p.numel() for p in module.parameters())
        small = self.small.find_like(module) if size > LARGE_MODULE_ENTRIES else None
        if size > MAX_RUN_ENTRIES and small is None:
            return replace(layout, unsplit_reasons={"": UnsplitReason(UnsplitKind.TOO_LARGE)})
        cuts, why = self._find_expert_cuts(module, *(small or (module, self.observer.calls[path])), degrees)
        shards = [s for p, way in cuts.items() for s in expert_shards(module.get_submodule(p), way, p)]
        divided = {s.name for s in shards}
        styles = layout.styles if degrees.tp > 1 else [expert_style(way, p) for p, way in cuts.items()]
        return replace(
            layout,
            styles=styles,
            shards=[s for s in layout.shards if s.name not in divided] + shards,
            unsplit_reasons=layout.unsplit_reasons | why,
        )

    def _search_layout(self, path: str, module: nn.Module, degrees: Degrees) -> ModuleLayout:
        size, experts = sum(p.numel() for p in module.parameters()), any(map(expert_sizes, module.modules()))
        like = (
            self.small.find_like(module)
            if size > (LARGE_MODULE_ENTRIES if experts else MEDIUM_MODULE_ENTRIES)
            and path in self.observer.calls
            else None
        )
        if path not in self.observer.calls or (size > MAX_RUN_ENTRIES and like is None):
            why = UnsplitReason(UnsplitKind.NOT_CALLED if size <= MAX_RUN_ENTRIES else UnsplitKind.TOO_LARGE)
            return ModuleLayout(
                unsplit_reasons={
                    p: why for p, m in module.named_modules() if as_linear(m) is not None or expert_sizes(m)
                }
            )
        cutting = self._find_exact_layout(path, module, like, degrees)
        return (
            cutting
            if cutting.styles or like is None or size > LARGE_MODULE_ENTRIES
            else self._find_exact_layout(path, module, None, degrees)
        )

    def _find_exact_layout(
        self, path: str, module: nn.Module, like: tuple[nn.Module, ModuleCall] | None, degrees: Degrees
    ) -> ModuleLayout:
        """Returns a layout that was verified on `like`, a small layer with its call, or on the layer
        itself."""
        call, count = self.observer.calls[path], degrees.tp
        layer, cutting = strip_values(module, call), ModuleLayout()
        experts, why = self._find_expert_cuts(module, *(like or (module, call)), degrees)
        for names, cut in product(
            filter(None, (hf_column_parallel(self.meta, path), ANY_LINEAR)),
            (experts, {}) if experts else ({},),
        ):
            mapping = find_mapping(layer, call, count, None if names is ANY_LINEAR else names, cut)
            left = {p: cutting.unsplit_reasons[p] for p in experts if p not in cut}  # as they were tried with
            mapping = replace(mapping, unsplit_reasons={**mapping.unsplit_reasons, **why, **left})
            if not mapping.column_parallel and not cut:
                cutting = ModuleLayout(unsplit_reasons=dict(mapping.unsplit_reasons))
            elif like is not None:
                cutting = self._verify_on_small_layer(like, path, module, degrees, mapping)
            else:
                cutting = self._verify_mapping(path, module, call, count, mapping)
            if cutting.styles:
                break
        return cutting

    def _find_expert_cuts(
        self, module: nn.Module, like: nn.Module, call: ModuleCall, degrees: Degrees
    ) -> tuple[dict[str, ExpertCut], dict[str, UnsplitReason]]:
        """Returns how experts inside a layer are cut, and why others stay whole, tested on `like`: the
        layer or a small one like it."""
        count, ep = degrees
        sizes_of = mixture_sizes if max(ep, degrees.replicas) > 1 else expert_sizes
        found = {path: sizes for path, m in module.named_modules() if (sizes := sizes_of(m))}
        if not found or self.sequence:
            return {}, dict.fromkeys(found, UnsplitReason(UnsplitKind.EXPERTS_BY_SEQUENCE))
        like, call = materialize_module(like), tree_map(materialize_argument, call)
        why = {
            path: UnsplitReason(UnsplitKind.UNEVEN_EXPERT_COUNT, size=count_of_experts(sizes), tp=ep)
            for path, sizes in found.items()
            if count_of_experts(sizes) % ep
        }
        if ep < count:
            shared = UnsplitReason(UnsplitKind.LISTED_EXPERTS_SHARED, size=count, tp=ep)
            why |= {p: shared for p in found if p not in why and not expert_sizes(module.get_submodule(p))}
        inside, replicas = degrees.inside, degrees.replicas
        ways = find_expert_cuts(like, call, *inside, replicas) or find_expert_cuts(
            like, call, *(inside.smallest if count > 1 else inside), min(2, replicas)
        )
        whole = {"ep": inside.ep, "replicas": replicas}
        ways = {path: replace(way, **whole) for path, way in ways.items() if path not in why}
        cut = {
            path: way for path, way in ways.items() if divides_experts(module.get_submodule(path), way, count)
        }
        inexact = UnsplitReason(UnsplitKind.EXPERTS_INEXACT)
        uneven = UnsplitReason(UnsplitKind.UNEVEN_EXPERTS, size=ALIGNED_ENTRIES, tp=max(1, count // ep))
        left = {path: uneven if path in ways else inexact for path in found if path not in cut}
        if replicas > 1 and inexact in left.values():
            mixing = find_token_mixing(like, call)
            left |= {p: UnsplitReason(UnsplitKind.EXPERTS_MIX_TOKENS, mixing[p]) for p in left if p in mixing}
        return cut, left | why

    def _verify_on_small_layer(
        self,
        like: tuple[nn.Module, ModuleCall],
        path: str,
        module: nn.Module,
        degrees: Degrees,
        mapping: TpMapping,
    ) -> ModuleLayout:
        """Returns the mapping of a large layer if a small one like it has the same mapping, over as many
        ranks or the fewest of this form, and that is exact."""
        why = UnsplitReason(UnsplitKind.SMALL_MODEL_DIFFERS)
        for ranks, ep in dict.fromkeys((degrees, degrees.smallest)):
            cuts = {path: replace(way, ep=ep) for path, way in mapping.expert_cuts.items()}
            same = find_mapping(like[0], like[1], ranks, mapping.column_parallel, cuts)
            if (
                same.column_parallel.keys() != mapping.column_parallel.keys()
                or same.row_parallel.keys() != mapping.row_parallel.keys()
            ):
                continue
            shown = self._verify_mapping(path, like[0], like[1], ranks, same)
            if shown.styles:
                shapes = any(s.kind == "shapes" for s in shown.styles)
                positions = (
                    (mapping.sequence_styles(shapes), shown.sequence_styles[1])
                    if shown.sequence_styles[0]
                    else ([], ())
                )
                return ModuleLayout(
                    mapping.layer_styles(shapes),
                    mapping_shards(module, mapping),
                    shown.partial_parameters,
                    dict(mapping.unsplit_reasons),
                    positions,
                )
            why = next((w for p, w in shown.unsplit_reasons.items() if p in same.column_parallel), why)
        return ModuleLayout(
            unsplit_reasons=dict(mapping.unsplit_reasons) | dict.fromkeys(mapping.split_modules, why)
        )

    def _verify_sequence_styles(
        self, path: str, module: nn.Module, whole: UnsplitModule, count: int, mapping: TpMapping, shapes: bool
    ) -> SequenceStyles:
        """Returns the mapping with the sequence split between scopes, if it is asked for and exact."""
        styles = mapping.sequence_styles(shapes) if self.sequence else []
        if not styles:
            return [], ()
        verdict = whole.compare_mapping(
            count,
            styles,
            mapping_shards(module, mapping),
            partial(install_fused_in, self.fused, path),
            self.overlap,
        )
        return ([], ()) if verdict.reason is not None else (styles, verdict.partial_parameters)

    def _verify_mapping(
        self, path: str, module: nn.Module, call: ModuleCall, count: int, mapping: TpMapping
    ) -> ModuleLayout:
        """Returns the layout of a mapping that is exact. The code sees sizes of parts, or whole sizes if
        only these work."""
        module, call = materialize_module(module), tree_map(materialize_argument, call)
        cut, whole, why = mapping_shards(module, mapping), UnsplitModule(module, call), None
        for shapes in (True,) if mapping.draws_random else (False, True):
            styles = mapping.layer_styles(shapes)
            verdict = whole.compare_mapping(
                count, styles, cut, partial(install_fused_in, self.fused, path), self.overlap
            )
            why = verdict.reason
            if why is None:
                positions = self._verify_sequence_styles(path, module, whole, count, mapping, shapes)
                return ModuleLayout(
                    styles, cut, verdict.partial_parameters, dict(mapping.unsplit_reasons), positions
                )
        assert why is not None
        return ModuleLayout(
            unsplit_reasons=dict(mapping.unsplit_reasons) | dict.fromkeys(mapping.split_modules, why)
        )


def _embedding_and_head_layouts(
    model: nn.Module, block: str, ties: list[tuple[str, ...]], count: int
) -> Iterator[tuple[str, ModuleLayout]]:
    """Yields layouts of a block's embeddings and linear layers that are in none of its layers."""
    inside = tuple(f"{path}." for path, _ in layers_to_split(model, block))
    root = model.get_submodule(block)
    size = sum(p.numel() for p in root.parameters())
    for name, module in root.named_modules():
        path = ".".join(n for n in (block, name) if n)
        if f"{path}.".startswith(inside) or any(True for _ in module.children()):
            continue
        tied = any(f"{path}.weight" in names for names in ties)
        table, head = as_embedding(module), as_linear(module)
        tokens, width = _vocabulary_and_width(table, head)
        large = tokens >= count and (tied or is_wide(tokens, width))
        if table is not None and type(module).forward is nn.Embedding.forward and large:
            yield (
                path,
                ModuleLayout([ModuleStyle("", "vocab")], [Shard("weight", 0, (table.num_embeddings,))]),
            )
        elif head is not None and large and (tied or HEAD_SHARE_DIVISOR * head.weight.numel() >= size):
            cut = [Shard("weight", head.out_dim, (head.out_features,))] + (
                [Shard("bias", 0, (head.out_features,))] if head.bias is not None else []
            )
            yield path, ModuleLayout([ModuleStyle("", "gather")], cut)
        elif table is not None or head is not None:
            yield path, ModuleLayout(unsplit_reasons={"": UnsplitReason(UnsplitKind.SMALL)})


def _vocabulary_and_width(table: nn.Embedding | None, head: LinearModule | None) -> tuple[int, int]:
    """Returns the number of tokens, and of features for each."""
    if table is not None:
        return table.num_embeddings, table.embedding_dim
    return (0, 0) if head is None else (head.out_features, head.in_features)


def _add_layout_op(graph: GraphOp, block: str, path: str, degrees: Degrees, cutting: ModuleLayout) -> None:
    def path_of(name: str) -> str:
        return ".".join(n for n in (path, name) if n)

    op = make_cut_op(
        path,
        block,
        degrees.tp,
        [replace(s, name=path_of(s.name)) for s in cutting.shards],
        [replace(s, module=path_of(s.module)) for s in cutting.styles],
        [path_of(n) for n in cutting.partial_parameters],
        {path_of(p): why for p, why in cutting.unsplit_reasons.items()},
        degrees.ep,
    )
    styles, partial = cutting.sequence_styles
    if styles:
        op.attributes["positions"] = ArrayAttr(
            [StyleAttr.of(replace(s, module=path_of(s.module))) for s in styles]
        )
        op.attributes["positions_partial"] = strings_attr(path_of(n) for n in partial)
    graph.body.block.insert_op_before(op, graph.cases[0])
