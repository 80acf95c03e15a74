"""Writes into sections with a cp above 1 which of their layers work on rows of sequences."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils._pytree import tree_map
from xdsl.dialects.builtin import ArrayAttr, ModuleOp

from secc.errors import ImpossibleChoice, UserError
from secc.frontend.cp_search.find_row_layer import RowLayer, find_row_layer
from secc.frontend.tp_search.annotate_layouts import (
    LARGE_MODULE_ENTRIES,
    MAX_RUN_ENTRIES,
    MEDIUM_MODULE_ENTRIES,
    FusedOperators,
    SearchSubject,
    blocks_with_settings,
    install_fused_in,
    layer_key,
    layers_to_split,
)
from secc.frontend.tp_search.call_collector import CallCollector, materialize_argument, materialize_module
from secc.frontend.tp_search.expert_cuts import mixture_sizes
from secc.frontend.tp_search.small_model_layers import SmallModelLayers
from secc.ir.analysis.dataflow import get_number, get_string
from secc.ir.dialect.ops import SectionOp, graph_of, strings_attr, strings_of
from secc.ir.dialect.typed_attributes import UnsplitAttr
from secc.runtime.plan.unsplit_reason import UnsplitKind, UnsplitReason

MOST_THREAD_RANKS = 4  # a larger cp deals rows in the same way


def annotate_rows(module: ModuleOp, subject: SearchSubject, fused: FusedOperators) -> bool:
    """Writes `row_layers` and `row_modules` into sections with a cp above 1, and why other layers stay whole;
    returns whether there are such sections.

    fused: the fused operators that ranks will install in the model, and their code. Raises ImpossibleChoice
    for a section without a layer that works on rows, or with whole frames that a layer mixes.
    """
    graph = graph_of(module)
    wanted = [(s, cp) for s in graph.sections if (cp := int(get_number(s, "cp") or 1)) > 1]
    if not wanted:
        return False
    source = subject.meta if subject.model is None else subject.model
    changed = blocks_with_settings(graph)
    layers = {
        path: layer
        for section, _ in wanted
        for block in strings_of(section.blocks)
        if block not in changed
        for path, layer in layers_to_split(source, block)
    }
    firsts = {layer_key(layer): path for path, layer in reversed(layers.items())}
    observer = CallCollector({path: layers[path] for path in firsts.values()})
    if subject.model is not None:
        observer.run_model(subject.model, subject.user, subject.survey)
    observer.run_blocks_on_meta(graph, subject.meta, subject.samples)
    search = _RowSearch(observer, SmallModelLayers(subject.user, subject.survey), fused)
    known: dict[object, RowLayer] = {}
    for section, cp in wanted:
        inside = {
            path: layer
            for block in strings_of(section.blocks)
            for path, layer in layers.items()
            if f"{path}.".startswith(f"{block}.")
        }
        attention = get_string(section, "row_attention") or "gather"
        found: dict[str, RowLayer] = {}
        for path, layer in inside.items():
            divided = int(get_number(section, "ep") or 1) > 1
            key = layer_key(layer), cp, divided, attention
            if key not in known:
                known[key] = search.find(firsts[key[0]], layers[firsts[key[0]]], cp, divided, attention)
            found[path] = known[key]
        _write_section(section, cp, found)
    return True


class _RowSearch:
    def __init__(self, observer: CallCollector, small: SmallModelLayers, fused: FusedOperators) -> None:
        self.observer, self.small, self.fused = observer, small, fused

    def find(self, path: str, layer: nn.Module, cp: int, divided: bool, attention: str) -> RowLayer:
        """Returns whether a layer works on rows, shown on it or, if it is large, on a small one like it.
        divided: whether ranks have different experts. attention: how they attend to each other's rows."""
        size, called = sum(p.numel() for p in layer.parameters()), path in self.observer.calls
        like = self.small.find_like(layer) if called and size > MEDIUM_MODULE_ENTRIES else None
        if not called or (like is None and size > MAX_RUN_ENTRIES):
            return RowLayer(
                UnsplitReason(UnsplitKind.TOO_LARGE if size > MAX_RUN_ENTRIES else UnsplitKind.NOT_CALLED)
            )
        count = min(cp, MOST_THREAD_RANKS)
        mixtures = [name for name, m in layer.named_modules() if divided and mixture_sizes(m)]
        if like is not None:
            found = find_row_layer(*like, count, by_themselves=mixtures, attention=attention)
            if found.reason is None or size > LARGE_MODULE_ENTRIES:
                return found
        call = tree_map(materialize_argument, self.observer.calls[path])
        fuse = partial(install_fused_in, self.fused, path)
        return find_row_layer(materialize_module(layer), call, count, fuse, mixtures, attention)


def _write_section(section: SectionOp, cp: int, found: dict[str, RowLayer]) -> None:
    """Writes what was found into a section. Raises ImpossibleChoice if no layer works on rows, or if a layer
    does not compute whole frames by themselves."""
    rows = {path: layer for path, layer in found.items() if layer.reason is None}
    reasons = {path: layer.reason for path, layer in found.items() if layer.reason is not None}
    name = get_string(section, "pipeline") or section.sym.data
    if reasons and get_string(section, "row_attention") == "frames":
        path, reason = next(iter(reasons.items()))
        cause = f"{path} does not compute each entry of its batch by itself ({reason})"
        choice = f"{name}.attention=frames"
        error = UserError(f"{choice} is impossible: {cause}", remedy=f"leave {name}.attention out")
        raise ImpossibleChoice(error, [choice])
    if not rows:
        cause = "it has no layers"
        if reasons:
            cause = f"no layer of it works on rows of its sequence ({next(iter(reasons.values()))})"
        error = UserError(f"{name}.cp={cp} is impossible: {cause}", remedy=f"leave {name}.cp out")
        raise ImpossibleChoice(error, [f"{name}.cp"])
    known = section.attributes.get("whole")
    unsplit = [UnsplitAttr.of(path, reason) for path, reason in reasons.items()]
    section.attributes |= {
        "row_layers": strings_attr(rows),
        "row_modules": strings_attr(
            f"{path}.{m}".removesuffix(".") for path, layer in rows.items() for m in layer.row_modules
        ),
        "whole": ArrayAttr([*(known if isinstance(known, ArrayAttr) else ()), *unsplit]),
    }
