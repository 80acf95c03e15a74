"""How the tensor of an edge is cut into messages: one flat buffer for each producer and consumer micro-batch
that share samples.

Both ends know every shape from the samples' sizes alone, so nothing but values is sent. A message holds, for
the shared samples in ascending order, the rows of each sample, cut to the sample's own extents where a
micro-batch is padded wider than the sample. The gradient of an edge travels through the same cuts in the
other direction.

Between stages of a pipeline, which have the same micro-batches, a tensor travels whole, whatever its dims.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from secc.runtime.plan.batch_sizes import combine, padded
from secc.runtime.plan.expr_eval import evaluate
from secc.runtime.plan.schema import Edge, Plan
from secc.runtime.plan.step_program import MicroBatch, SampleMeta, Schedule, pairs

Pair = tuple[int, int]  # the producer's micro-batch and the consumer's


@dataclass(frozen=True)
class Cut:
    """A box of a micro-batch's tensor: (start, length) along each dim."""

    box: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        return prod(length for _, length in self.box)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The box of `tensor`, sharing its memory."""
        for dim, (start, length) in enumerate(self.box):
            if length != tensor.shape[dim]:
                tensor = tensor.narrow(dim, start, length)
        return tensor


class EdgeLayout:
    """The messages of one edge in one step."""

    def __init__(self, edge: Edge, plan: Plan, schedule: Schedule, samples: Sequence[SampleMeta]) -> None:
        self.edge, self._plan = edge, plan
        self.dtype: torch.dtype = getattr(torch, edge.dtype)
        self._sizes = padded(plan, samples, schedule.own)
        self._micros = {"src": schedule.micro_batches[edge.src], "dst": schedule.micro_batches[edge.dst]}
        self.pairs: dict[Pair, tuple[int, ...]] = pairs(edge, schedule)
        self._carried = {s for shared in self.pairs.values() for s in shared}
        self._extents = () if plan.widths == "global" else edge.extents
        self._cuts: dict[tuple[str, Pair], tuple[Cut, ...]] = {}
        self._shapes: dict[tuple[str, int], tuple[int, ...]] = {}
        self._of: defaultdict[tuple[str, int], list[Pair]] = defaultdict(list)
        for pair in sorted(self.pairs):
            self._of["src", pair[0]].append(pair)
            self._of["dst", pair[1]].append(pair)

    def of(self, side: str, micro: int) -> Sequence[Pair]:
        """The pairs of a micro-batch on `side` ("src" or "dst"), in ascending order."""
        return self._of.get((side, micro), ())

    def shape(self, side: str, micro: int) -> tuple[int, ...]:
        """The shape of the edge's tensor in a micro-batch, as its producer makes it or as its consumer takes
        it."""
        key = (side, micro)
        if key not in self._shapes:
            self._shapes[key] = self._make_shape(side, micro)
        return self._shapes[key]

    def _make_shape(self, side: str, micro: int) -> tuple[int, ...]:
        batch = self._micros[side][micro]
        sizes = combine([self._sizes[s] for s in batch.samples], self._plan.symbols)
        dims = [0 if d == self.edge.dim else evaluate(text, sizes) for d, text in enumerate(self.edge.dims)]
        if not self.whole:
            dims[self.edge.dim] = sum(self._rows(s) for s in self._members(side, batch))
        return tuple(dims)

    @property
    def whole(self) -> bool:
        """Whether a micro-batch's tensor is one message."""
        return self.edge.dim < 0

    def numel(self, pair: Pair) -> int:
        """The number of entries in the message of `pair`."""
        return sum(cut.numel for cut in self.cuts("src", pair))

    def tag(self, pair: Pair) -> int:
        """A number below 2^30 that no other pair of this edge has in this step."""
        return pair[0] * len(self._micros["dst"]) + pair[1]

    def pack(self, tensor: torch.Tensor, side: str, pair: Pair, *more: torch.Tensor) -> torch.Tensor:
        """A new flat buffer with the message of `pair`, cut out of the micro-batch's tensor on `side`, and
        `more` behind it."""
        return torch.cat([*(cut.view(tensor).reshape(-1) for cut in self.cuts(side, pair)), *more])

    def unpack(self, message: torch.Tensor, tensor: torch.Tensor, side: str, pair: Pair) -> None:
        """Write a message into its places in the micro-batch's tensor on `side`."""
        start = 0
        for cut in self.cuts(side, pair):
            view = cut.view(tensor)
            view.copy_(message[start : start + cut.numel].view(view.shape))
            start += cut.numel

    def cuts(self, side: str, pair: Pair) -> tuple[Cut, ...]:
        """The boxes of the message of `pair` in the tensor on `side`, in the order of the message."""
        key = (side, pair)
        if key not in self._cuts:
            self._cuts[key] = self._make_cuts(side, pair)
        return self._cuts[key]

    def _make_cuts(self, side: str, pair: Pair) -> tuple[Cut, ...]:
        micro = pair[side == "dst"]
        shape = self.shape(side, micro)
        if self.whole:
            return (Cut(tuple((0, n) for n in shape)),)
        starts, at = {}, 0
        for s in self._members(side, self._micros[side][micro]):
            starts[s] = at
            at += self._rows(s)
        cuts: list[Cut] = []
        for s in self.pairs[pair]:
            box = [(0, n) for n in shape]
            box[self.edge.dim] = (starts[s], self._rows(s))
            for dim, text, pad_side in self._extents:
                own = evaluate(text, self._sizes[s])
                box[dim] = (shape[dim] - own if pad_side == "left" else 0, own)
            cuts.append(Cut(tuple(box)))
        return tuple(
            cuts if self._extents or prod(shape[: self.edge.dim]) != 1 else _joined(cuts, self.edge.dim)
        )

    def _members(self, side: str, batch: MicroBatch) -> list[int]:
        """The samples whose rows the micro-batch's tensor holds, in its order: a consumer may hold others
        that the producer skips."""
        return list(batch.samples) if side == "src" else [s for s in batch.samples if s in self._carried]

    def _rows(self, sample: int) -> int:
        return evaluate(self.edge.rows, self._sizes[sample])


def _joined(cuts: Sequence[Cut], dim: int) -> list[Cut]:
    """The cuts with those in one that follow each other along `dim`, before which there is no other: the same
    entries in the same order."""
    found: list[Cut] = []
    for cut in cuts:
        start, length = cut.box[dim]
        if found and sum(found[-1].box[dim]) == start:
            first = found[-1].box[dim][0]
            found[-1] = Cut((*cut.box[:dim], (first, start + length - first), *cut.box[dim + 1 :]))
        else:
            found.append(cut)
    return found
