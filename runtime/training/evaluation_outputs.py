"""Gathers the tensors that `metrics()` asks for: each sample's rows of what forward returned, in the order of
the evaluation set, in the host memory of one rank.

That rank is the first of the last section that has such a tensor. Every replica's first rank sends it one
message after each evaluation batch; both ends compute the message's layout from the samples' sizes, as for
edges. A sample's rows are cut to its own extents, so padding of micro-batches is not seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from secc.runtime.comm.edge_messages import EdgeLayout, TensorBox
from secc.runtime.errors import UserError
from secc.runtime.plan.batch_sizes import combine_sizes
from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.plan.replica_routes import ranks_by_replica
from secc.runtime.plan.schema import SAMPLE_COUNT_SYMBOL, Edge, Plan, SectionOutput
from secc.runtime.plan.step_program import MicroBatch, SampleMeta, Schedule

KeptTensors = Mapping[tuple[str, int], torch.Tensor]  # by output and micro-batch


@dataclass(frozen=True)
class _OutputPiece:
    """One micro-batch of an output: its samples by position in the batch, and each one's box in the tensor,
    from the rank `sender`."""

    output: SectionOutput
    micro: MicroBatch
    sender: int
    samples: tuple[int, ...]
    boxes: tuple[TensorBox, ...]
    dtype: torch.dtype

    @property
    def byte_count(self) -> int:
        return sum(box.numel for box in self.boxes) * self.dtype.itemsize


class OutputGatherer:
    """Gathers the outputs of an evaluation set. All ranks make it and call it at the same points."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan, self._rank = plan, rank
        having = {o.section for o in plan.outputs}
        last = next((s for s in reversed(plan.sections) if s.name in having), plan.sections[-1])
        self.target = last.mesh.ranks[0]
        self.is_target = rank == self.target

    def gather_batch(
        self, samples: Sequence[SampleMeta], schedule: Schedule, kept: KeptTensors
    ) -> dict[str, list[torch.Tensor]]:
        """Returns each output's rows by sample, in the order of the batch, on the target rank; other ranks
        send theirs and return nothing. `kept` are this rank's. Collective."""
        pieces = list(self._find_pieces(samples, schedule))
        if not self.is_target:
            own = [_pack_piece(p, kept) for p in pieces if p.sender == self._rank]
            if own:
                dist.send(torch.cat(own), self.target)
            return {}
        buffers = {}
        for sender in sorted({p.sender for p in pieces} - {self._rank}):
            buffer = torch.empty(sum(p.byte_count for p in pieces if p.sender == sender), dtype=torch.uint8)
            dist.recv(buffer, sender)
            buffers[sender] = buffer
        rows = {o.name: [self._empty_rows(o, s.sizes) for s in samples] for o in self._plan.outputs}
        starts = dict.fromkeys(buffers, 0)
        for piece in pieces:
            if piece.sender == self._rank:
                content = _pack_piece(piece, kept)
            else:
                start = starts[piece.sender]
                content = buffers[piece.sender][start : start + piece.byte_count]
                starts[piece.sender] += piece.byte_count
            for sample, tensor in _unpack_piece(piece, content):
                rows[piece.output.name][sample] = tensor
        return rows

    def share_values(self, values: Mapping[str, float] | None) -> dict[str, float]:
        """Returns the target rank's `values` on every rank. Collective."""
        if self._plan.world_size == 1:
            return dict(values or {})
        text = json.dumps(dict(values or {})).encode()
        length = torch.tensor([len(text)])
        dist.broadcast(length, self.target)
        content = torch.tensor(list(text), dtype=torch.uint8) if self.is_target else None
        received = torch.empty(int(length), dtype=torch.uint8) if content is None else content
        dist.broadcast(received, self.target)
        return json.loads(bytes(received.tolist()))

    def _find_pieces(self, samples: Sequence[SampleMeta], schedule: Schedule) -> Iterator[_OutputPiece]:
        """Yields the pieces of a batch, in an order that is the same on all ranks."""
        sections = {s.name: s for s in self._plan.sections}
        for output in self._plan.outputs:
            section = sections[output.section]
            # Laid out as an edge from the section to itself: each micro-batch is its own partner.
            edge = Edge(
                output.name,
                section.name,
                section.name,
                output.dtype,
                output.dims,
                output.dim,
                output.rows,
                False,
                section.when,
                output.extents,
            )
            layout = EdgeLayout(edge, self._plan, schedule, samples)
            replicas = ranks_by_replica(section)
            for micro in schedule.micro_batches[section.name]:
                pair = (micro.index, micro.index)
                if pair in layout.pairs:
                    yield _OutputPiece(
                        output,
                        micro,
                        replicas[micro.replica][0],
                        layout.pairs[pair],
                        tuple(layout.sample_boxes("src", pair)),
                        layout.dtype,
                    )

    def _empty_rows(self, output: SectionOutput, sizes: Mapping[str, int]) -> torch.Tensor:
        """Returns the tensor of a sample without rows."""
        whole = combine_sizes([sizes], self._plan.symbols)
        shape = [0 if d == output.dim else evaluate_expr(text, whole) for d, text in enumerate(output.dims)]
        return torch.empty(shape, dtype=getattr(torch, output.dtype))


def _pack_piece(piece: _OutputPiece, kept: KeptTensors) -> torch.Tensor:
    """Returns a piece of this rank as bytes on the host, sample after sample. A case without the output is of
    samples without rows, or of a branch that was not seen during capture: then UserError is raised."""
    tensor = kept.get((piece.output.name, piece.micro.index))
    if tensor is None and piece.byte_count:
        raise UserError(
            f"metrics() asks for {piece.output.name!r}, which the plan does not compute for a micro-batch of"
            " the evaluation: it takes a branch that was not seen during capture",
            remedy="let dataset() show such samples earlier, or compile again with more --stats-samples",
        )
    if tensor is None:
        return torch.empty(0, dtype=torch.uint8)
    tensor = tensor.detach().to("cpu", piece.dtype)
    rows = [box.view(tensor).reshape(-1) for box in piece.boxes]
    return torch.cat(rows).view(torch.uint8)


def _unpack_piece(piece: _OutputPiece, content: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields each sample's position and rows; one row per sample is the sample's own tensor."""
    values, start = content.clone().view(piece.dtype), 0
    for sample, box in zip(piece.samples, piece.boxes, strict=True):
        shape = [length for _, length in box.box]
        count = prod(shape)
        rows = values[start : start + count].view(shape)
        start += count
        yield sample, rows.squeeze(piece.output.dim) if piece.output.rows == SAMPLE_COUNT_SYMBOL else rows
