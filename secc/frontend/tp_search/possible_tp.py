"""Notes on each block for which tensor parallelism there is something to cut in it, and what its ranks would
share, before anything is chosen.

The search for a mapping (`secc.frontend.tp_search.find_mapping`) runs without values for each kind of layer; that a
mapping is exact is shown later, for the one that is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from xdsl.dialects.builtin import ModuleOp

from secc.cluster import Cluster
from secc.cost.counting.example_arguments import Samples
from secc.frontend.dataset.survey import Survey
from secc.frontend.tp_search.annotate_layouts import LayerKey, bared, changed, layer_key, layers_of
from secc.frontend.tp_search.call_collector import Observer
from secc.frontend.tp_search.find_mapping import Found, find
from secc.frontend.tp_search.hf_tp_plan import columns
from secc.ir.analysis.tp_layouts import undivided
from secc.ir.dialect.ops import graph_of, texts
from secc.ir.dialect.python_attributes import integers
from secc.runtime.model.user_file import UserModel

DIVIDES = "does not divide"  # in the reasons of sizes that a tp does not divide
HEADS = "heads"  # ends the reason of a tp that does not divide them

Limits = dict[LayerKey, list[Found]]  # mappings of a kind of layer, for each tp


def note_limits(
    module: ModuleOp, meta: nn.Module, model: nn.Module | None, user: UserModel, survey: Survey, samples: Samples, cluster: Cluster,
    known: Limits,
) -> None:  # fmt: skip
    """Write `tp` on each block of `module` with anything to cut: the powers of two, up to the devices of a
    node, that cut it. `shared` are the numbers of heads and outputs that a tp has to divide, as far as those
    runs show them.

    `meta` is the user's model without weights, `model` one with weights if it fits here. `known` has the
    mappings that were found for another capture of it, and keeps what is found now. CPUs share a memory:
    nothing is sought for them.
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
            if op.layers is not None and op.layers.data and b not in changed(graph)
        ],
    )
    wanted = {block: dict(layers_of(source, block)) for block in stacks}
    layers = {path: m for block in wanted.values() for path, m in block.items()}
    firsts = {layer_key(m): path for path, m in reversed(layers.items())}
    if not counts or not firsts:
        return
    found: dict[LayerKey, Sequence[Found | None]] = {key: known[key] for key in firsts if key in known}
    if left := {key: path for key, path in firsts.items() if key not in known}:
        observer = Observer({path: layers[path] for path in left.values()})
        if model is not None:
            observer.real(model, user, survey)
        observer.meta(graph, meta, samples)
        found |= {
            key: [_mapping(meta, layers[path], observer, path, tp) for tp in counts]
            for key, path in left.items()
        }
        known |= {
            key: ran for key in left if len(ran := [m for m in found[key] if m is not None]) == len(counts)
        }
    for block, inside in wanted.items():
        kinds = [found[key] for key in dict.fromkeys(map(layer_key, inside.values()))]
        verdicts = [[_cuts(mapping) for mapping in kind] for kind in kinds]
        taken = [
            tp
            for i, tp in enumerate(counts)
            if any(v[i] for v in verdicts) and not any(v[i] is None for v in verdicts)
        ]
        if taken or any(v is None for verdict in verdicts for v in verdict):
            graph.blocks[block].attributes["tp"] = integers(taken)
        if shared := list(dict.fromkeys(size for kind in kinds for size in _shared(kind))):
            graph.blocks[block].attributes["shared"] = texts(shared)


def _mapping(meta: nn.Module, layer: nn.Module, observer: Observer, path: str, tp: int) -> Found | None:
    """How `tp` cuts a layer; None for one that did not run here."""
    if path not in observer.calls:
        return None
    call, names = observer.calls[path], columns(meta, path)
    mapping = find(bared(layer, call), call, tp, names or None)
    if not mapping.columns and names:
        mapping = find(bared(layer, call), call, tp)
    return mapping


def _cuts(mapping: Found | None) -> bool | None:
    """Whether it cuts anything; None if sizes forbid it."""
    if mapping is None:
        return False
    if any(reason.endswith(HEADS) for reason in mapping.whole.values()):
        return None
    uneven = not mapping.columns and any(DIVIDES in reason for reason in mapping.whole.values())
    return None if uneven else bool(mapping.columns)


def _shared(mappings: Sequence[Found | None]) -> list[str]:
    """What ranks share under the first tp that the layer takes; where it takes none, what those do not
    divide."""
    known = [mapping for mapping in mappings if mapping is not None]
    taken = next((mapping for mapping in known if _cuts(mapping)), None)
    if taken is not None:
        return taken.shared
    return undivided(reason for mapping in known for reason in mapping.whole.values())
