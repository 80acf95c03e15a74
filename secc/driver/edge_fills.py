"""Finds what sections write into the padding of tensors that they send: a mask that a module returns is True
(or -inf, or -1e4) where a sample is padded, and zeros would hide nothing.

A micro-batch may be wider than the one that a sample's tensor comes from; what it lacks is padding, which the
consumer writes. What plain PyTorch has there, the sender shows by itself: in a batch of samples of several
lengths, its results hold entries beyond each sample's own extent. If these are one number, whatever the
batch and the weights, it is the edge's fill, and the plan keeps it. Other padding (hidden states of padded
positions) is filled with zeros, as long as the comparison with plain PyTorch shows that nothing reads it.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from xdsl.dialects.builtin import ModuleOp

from secc.codegen.section_modules import bodies_of
from secc.driver.compile import CompiledPlan
from secc.errors import UserError
from secc.frontend.dataset.small_samples import survey_small_samples
from secc.ir.dialect.ops import CallOp, GraphOp, SendOp, graph_of, strings_attr, strings_of
from secc.ir.text_io.module_text import print_module
from secc.runtime.comm.edge_messages import EdgeLayout
from secc.runtime.plan.batch_sizes import read_symbol_sizes
from secc.runtime.plan.sample_predicates import is_active
from secc.runtime.plan.schema import Edge, Plan
from secc.runtime.plan.step_program import MicroBatch, SampleMeta, Schedule
from secc.runtime.recorder.nested_values import take_at_path
from secc.runtime.training.eager_reference import run_eager
from secc.runtime.training.evaluation_data import evaluation_plan
from secc.runtime.training.one_rank_plan import OneRankPlan, SentTensor

_FEWEST_SAMPLES = 3
_NOISE = 0.1
_LARGEST_WHOLE = 1 << 53  # whole numbers up to this one are floats, too

IrDumps = list[tuple[str, str]]
BlockResult = tuple[str, str]  # the path of a block, and where in its result the tensor is


@dataclass
class PaddingSeen:
    """What the padding of an edge was seen to hold: for each extent one number, None where nothing was
    padded. varying: the extents with several."""

    numbers: list[float | None]
    varying: set[int] = field(default_factory=set[int])

    def note_padding(self, index: int, padding: torch.Tensor) -> None:
        """Notes the padding of one sample by extent `index`."""
        if not padding.numel():
            return
        first = padding.flatten()[0]
        number = float(first)
        known = self.numbers[index]
        if not bool((padding == first).all()) or known not in (None, number) or not _is_exact(first):
            self.varying.add(index)
        self.numbers[index] = number

    @property
    def is_constant(self) -> bool:
        """Whether padding by each extent was seen, and is one number."""
        return not self.varying and None not in self.numbers

    @property
    def fills(self) -> tuple[float, ...]:
        """What the consumer writes into padding by each extent; () if that is zeros."""
        found = tuple(0.0 if i in self.varying else n or 0.0 for i, n in enumerate(self.numbers))
        return found if any(found) else ()


def _is_exact(number: torch.Tensor) -> bool:
    return number.is_floating_point() or abs(int(number)) <= _LARGEST_WHOLE


def find_padding(compiled: CompiledPlan) -> dict[str, PaddingSeen]:
    """Runs the plan's sections on padded batches and returns what each edge with extents holds in its
    padding; nothing for a plan with the global batch's widths."""
    edges = {e.name: e for e in compiled.plan.edges if e.extents}
    if compiled.plan.widths != "own" or not edges or compiled.model is None:
        return {}
    seen = {name: PaddingSeen([None] * len(e.extents)) for name, e in edges.items()}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "plan"
        compiled.write_sections(directory)
        rank = OneRankPlan(
            evaluation_plan(compiled.plan), directory, compiled.user, compiled.model, evaluates=True
        )
        _look_at_padding(compiled, rank, seen, -1)
        if any(s.fills for s in seen.values()):
            # What weights or a batch decide is no constant, although one batch shows one number.
            with _moved_weights(compiled.model):
                _look_at_padding(compiled, rank, seen, -2)
    return seen


def _look_at_padding(
    compiled: CompiledPlan, rank: OneRankPlan, seen: Mapping[str, PaddingSeen], batch: int
) -> None:
    """Adds what one batch of each pattern shows. A batch that fails is left out: the comparison says why."""
    for pattern in compiled.survey.micro_batch_patterns():
        for survey in (compiled.survey, compiled.survey.without_crops()):
            samples = survey.compose_batches(pattern)[batch]
            samples = samples * -(-_FEWEST_SAMPLES // len(samples))
            try:
                sent = rank.find_sent_tensors(samples)
            except Exception:  # whatever the user's code raises
                continue
            for found in sent:
                if found.edge.name in seen:
                    _add_padding(seen[found.edge.name], found)
            break


def _add_padding(seen: PaddingSeen, sent: SentTensor) -> None:
    boxes = sent.layout.boxes_of_samples("src", sent.samples, sent.samples)
    for box in boxes:
        for index in range(len(sent.edge.extents)):
            seen.note_padding(index, sent.layout.padding_in_rows(sent.tensor, box, index))


def find_block_padding(compiled: CompiledPlan) -> dict[str, PaddingSeen]:
    """Returns the same for a model that is too large to be run: what blocks of small_model() return, for the
    edges that carry it. Nothing without small_model(), or where it cannot be run on these samples."""
    edges = {e.name: e for e in compiled.plan.edges if e.extents} if compiled.plan.widths == "own" else {}
    graph = graph_of(compiled.module)
    blocks = {name: block for name, e in edges.items() if (block := _find_block(graph, e)) is not None}
    seen = {name: PaddingSeen([None] * len(edges[name].extents)) for name in blocks}
    try:
        model = compiled.user.build_small_model() if blocks else None
        if model is None:
            return {}
        survey = survey_small_samples(compiled.user, compiled.survey)
        for batch, moves in ((-1, False), (-2, True)):
            with _moved_weights(model) if moves else nullcontext():
                for pattern in survey.micro_batch_patterns():
                    samples = survey.compose_batches(pattern)[batch]
                    for found in _run_blocks(compiled, model, samples, blocks):
                        _add_padding(seen[found.edge.name], found)
    except Exception:  # whatever the user's code raises
        return {}
    return seen


def _find_block(graph: GraphOp, edge: Edge) -> BlockResult | None:
    """Returns the block that an edge's tensor comes from, the same in all cases; None for glue."""
    found = set[BlockResult]()
    for send in (o for body in bodies_of(graph, edge.src) for o in body.walk() if isinstance(o, SendOp)):
        if send.edge.data != edge.name:
            continue
        (value,) = send.operands
        call = value.owner
        if not isinstance(call, CallOp):
            return None
        found.add(
            (
                call.target.data,
                strings_of(call.outs)[next(i for i, r in enumerate(call.results) if r is value)],
            )
        )
    return found.pop() if len(found) == 1 else None


def _run_blocks(
    compiled: CompiledPlan,
    model: nn.Module,
    samples: Sequence[Mapping[str, Any]],
    blocks: Mapping[str, BlockResult],
) -> list[SentTensor]:
    """Runs a model in plain PyTorch and returns what each edge would carry of these samples."""
    plan, user = compiled.plan, compiled.user
    optional = {i.key for i in plan.inputs if i.optional}
    singles = [user.collate([s]) for s in samples]
    metas = [
        SampleMeta(i, frozenset(optional & b.keys()), read_symbol_sizes(b, plan.symbols))
        for i, b in enumerate(singles)
    ]
    results: list[tuple[str, Any]] = []
    hooks = [
        model.get_submodule(path).register_forward_hook(
            lambda _, __, result, edge=edge, out=out: results.append((edge, take_at_path(result, out)))
        )
        for edge, (path, out) in blocks.items()
    ]
    try:
        run_eager(model, user.collate(samples))
    finally:
        for hook in hooks:
            hook.remove()
    sent: list[SentTensor] = []
    for name, tensor in results:
        edge = next(e for e in plan.edges if e.name == name)
        having = tuple(m.id for m in metas if is_active(edge.when, m.pattern))
        micros = {end: (MicroBatch(0, end, 0, having),) for end in (edge.src, edge.dst)}
        layout = EdgeLayout(edge, plan, Schedule(micros, ()), metas)
        sent.append(SentTensor(edge, layout, having, tensor.detach()))
    return sent


@contextmanager
def _moved_weights(model: nn.Module) -> Iterator[None]:
    """Context manager in which all weights have noise."""
    generator = torch.Generator().manual_seed(0)

    def draw_noise(like: torch.Tensor) -> torch.Tensor:
        return (torch.rand(like.shape, generator=generator) - 0.5).mul_(_NOISE).to(like.dtype)

    states: list[Any] = [t for t in model.state_dict(keep_vars=True).values() if isinstance(t, torch.Tensor)]
    floats = [t.detach() for t in states if t.is_floating_point()]
    kept = [t.clone() for t in floats]
    try:
        for tensor in states:
            if tensor.is_floating_point():
                tensor.detach().mul_(1 + draw_noise(tensor))
                if isinstance(tensor, nn.Parameter):
                    tensor.detach().add_(draw_noise(tensor))
        yield
    finally:
        for t, value in zip(floats, kept, strict=True):
            t.copy_(value)


def set_fills(
    plan: Plan, module: ModuleOp, dumps: IrDumps, fills: Mapping[str, tuple[float, ...]]
) -> tuple[Plan, ModuleOp, IrDumps]:
    """Returns a plan, its lowered IR and the dumps of it with the fills of edges by name."""
    if not any(fills.values()):
        return plan, module, dumps
    edges = (dataclasses.replace(e, fills=fills.get(e.name, ())) for e in plan.edges)
    filled = module.clone()
    for op in graph_of(filled).edges:
        if found := fills.get(op.sym.data):
            op.fills = strings_attr(f"{number:.17g}" for number in found)
    name, text = dumps[-1]
    header = text.removesuffix(print_module(module))
    return (
        dataclasses.replace(plan, edges=tuple(edges)),
        filled,
        [*dumps[:-1], (name, header + print_module(filled))],
    )


def with_fills(compiled: CompiledPlan, seen: Mapping[str, PaddingSeen]) -> CompiledPlan:
    """Returns the plan with the fills of what was seen."""
    fills = {name: found.fills for name, found in seen.items()}
    plan, module, dumps = set_fills(compiled.plan, compiled.module, compiled.dumps, fills)
    return dataclasses.replace(compiled, plan=plan, module=module, dumps=dumps)


def carry_fills(old: Plan, new: Plan) -> dict[str, tuple[float, ...]]:
    """Returns the fills of the edges of a plan that was made again from the IR of another one, with other
    stages. Raises UserError for an edge that could be several of the other plan's, with other fills."""

    def describe_ends(plan: Plan, edge: Edge) -> tuple[object, ...]:
        src, dst = (plan.find_section(name).user_section_name for name in (edge.src, edge.dst))
        return src, dst, edge.dtype, edge.dims, edge.extents

    known: dict[tuple[object, ...], dict[str, tuple[float, ...]]] = {}
    for edge in old.edges:
        known.setdefault(describe_ends(old, edge), {})[edge.name] = edge.fills
    fills: dict[str, tuple[float, ...]] = {}
    for edge in new.edges if any(e.fills for e in old.edges) else ():
        possible = known.get(describe_ends(new, edge), {})
        if edge.extents and edge.name not in possible and len(set(possible.values())) != 1:
            raise UserError(
                f"what pads {edge.name!r} between {edge.src} and {edge.dst} is not known from the plan",
                remedy="compile again for this number of ranks",
            )
        fills[edge.name] = possible.get(edge.name, next(iter(possible.values()), ()))
    return fills


def describe_varying(seen: Mapping[str, PaddingSeen], edges: Sequence[Edge]) -> str:
    """Returns which edges without a gradient, such as masks, have padding that is no constant; "" without
    one."""
    masks = [e.name for e in edges if not e.grad and e.name in seen and seen[e.name].varying]
    return f" (no one number pads {', '.join(masks)})" if masks else ""
