"""Annotates each block with the tensor-parallel degrees that split something in it, with what its ranks would
share, and with the part of its parameters that stays whole, before anything is chosen.

The search for a mapping (`find_mapping`) runs without values for each kind of layer; that a mapping is
exact is verified later, for the chosen one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import nn
from xdsl.dialects.builtin import ArrayAttr, ModuleOp

from secc.cluster import Cluster
from secc.cost.counting.example_arguments import CollatedSamples
from secc.cost.model.section_cost import TP_WHOLE_ATTRIBUTE
from secc.frontend.dataset.survey import DatasetSurvey
from secc.frontend.tp_search.annotate_layouts import (
    LayerKey,
    blocks_with_settings,
    layer_key,
    layers_to_split,
    strip_values,
)
from secc.frontend.tp_search.call_collector import CallCollector
from secc.frontend.tp_search.expert_cuts import mixture_sizes
from secc.frontend.tp_search.find_mapping import TpMapping, find_mapping
from secc.frontend.tp_search.hf_tp_plan import hf_column_parallel
from secc.ir.analysis.tp_layouts import undivided_sizes
from secc.ir.dialect.ops import graph_of
from secc.ir.dialect.python_attributes import int_attr, int_list_attr
from secc.ir.dialect.typed_attributes import SharedSizeAttr
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.unsplit_reason import SharedSize, UnsplitKind

MappingsByLayer = dict[LayerKey, list[TpMapping]]  # mappings of a kind of layer, for each tp


def annotate_possible_tp(
    module: ModuleOp,
    meta: nn.Module,
    model: nn.Module | None,
    user: UserModel,
    survey: DatasetSurvey,
    samples: CollatedSamples,
    cluster: Cluster,
    known: MappingsByLayer,
) -> None:
    """Writes `tp` on each block with anything to split: the powers of two, up to the devices of a node,
    that split it. Writes `shared`: the numbers of heads and outputs that a tp has to divide; and
    `tp_whole`: the permille of the block's parameters in its layers that stay whole.

    meta: the user's model without weights. model: one with weights, if it fits on this machine. known:
    mappings found for another capture of the model; new ones are added. CPU ranks share a memory, so
    nothing is searched for them.
    """
    if cluster.device.backend == "cpu":
        return
    graph, counts = (
        graph_of(module),
        [1 << i for i in range(1, cluster.per_node.bit_length()) if 1 << i <= cluster.per_node],
    )
    source, stacks = (
        meta if model is None else model,
        [
            b
            for b, op in graph.blocks.items()
            if op.layers is not None and op.layers.data and b not in blocks_with_settings(graph)
        ],
    )
    wanted = {block: dict(layers_to_split(source, block)) for block in stacks}
    layers = {path: m for block in wanted.values() for path, m in block.items()}
    firsts = {layer_key(m): path for path, m in reversed(layers.items())}
    if not counts or not firsts:
        return
    found: dict[LayerKey, Sequence[TpMapping | None]] = {key: known[key] for key in firsts if key in known}
    if left := {key: path for key, path in firsts.items() if key not in known}:
        observer = CallCollector({path: layers[path] for path in left.values()})
        if model is not None:
            observer.run_model(model, user, survey)
        observer.run_blocks_on_meta(graph, meta, samples)
        found |= {
            key: [_find_mapping_for_tp(meta, layers[path], observer, path, tp) for tp in counts]
            for key, path in left.items()
        }
        known |= {
            key: ran for key in left if len(ran := [m for m in found[key] if m is not None]) == len(counts)
        }
    for block, inside in wanted.items():
        kinds = [found[key] for key in dict.fromkeys(map(layer_key, inside.values()))]
        verdicts = [[_mapping_verdict(mapping) for mapping in kind] for kind in kinds]
        taken = [
            tp
            for i, tp in enumerate(counts)
            if any(v[i] for v in verdicts) and not any(v[i] is None for v in verdicts)
        ]
        if taken or any(v is None for verdict in verdicts for v in verdict):
            graph.blocks[block].attributes["tp"] = int_list_attr(taken)
        if shared := list(dict.fromkeys(size for kind in kinds for size in _shared_sizes(kind))):
            graph.blocks[block].attributes["shared"] = ArrayAttr([SharedSizeAttr.of(size) for size in shared])
        if whole := _permille_left_whole(inside.values(), found):
            graph.blocks[block].attributes[TP_WHOLE_ATTRIBUTE] = int_attr(whole)


def _permille_left_whole(
    layers: Collection[nn.Module], found: Mapping[LayerKey, Sequence[TpMapping | None]]
) -> int:
    """Returns the permille of the layers' parameters in products that stay whole on every rank under the
    first tp that splits anything. Layers with experts, which `ep` divides as well, count as split."""
    whole, entries = 0, 0
    for layer in layers:
        mappings = found[layer_key(layer)]
        taken = next((m for m in mappings if m is not None and _mapping_verdict(m)), None)
        entries += sum(p.numel() for p in layer.parameters())
        if taken is not None and not any(map(mixture_sizes, layer.modules())):
            products = (layer.get_submodule(path) for path in taken.unsplit_reasons)
            whole += sum(p.numel() for product in products for p in product.parameters())
    return 1000 * whole // max(1, entries)


def _find_mapping_for_tp(
    meta: nn.Module, layer: nn.Module, observer: CallCollector, path: str, tp: int
) -> TpMapping | None:
    """Returns how `tp` splits a layer; None for a layer that did not run here."""
    if path not in observer.calls:
        return None
    call, names = observer.calls[path], hf_column_parallel(meta, path)
    mapping = find_mapping(strip_values(layer, call), call, tp, names or None)
    if not mapping.column_parallel and names:
        mapping = find_mapping(strip_values(layer, call), call, tp)
    return mapping


def _mapping_verdict(mapping: TpMapping | None) -> bool | None:
    """Whether the mapping splits anything; None if sizes forbid this tp."""
    if mapping is None:
        return False
    reasons = list(mapping.unsplit_reasons.values())
    if any(reason.kind is UnsplitKind.UNEVEN_HEADS for reason in reasons):
        return None
    uneven = not mapping.column_parallel and any(reason.is_uneven for reason in reasons)
    return None if uneven else bool(mapping.column_parallel)


def _shared_sizes(mappings: Sequence[TpMapping | None]) -> list[SharedSize]:
    """Returns what ranks share under the first tp that the layer takes; if it takes none, the sizes that
    no tp divides."""
    known = [mapping for mapping in mappings if mapping is not None]
    taken = next((mapping for mapping in known if _mapping_verdict(mapping)), None)
    if taken is not None:
        return taken.shared_sizes
    return undivided_sizes(reason for mapping in known for reason in mapping.unsplit_reasons.values())
