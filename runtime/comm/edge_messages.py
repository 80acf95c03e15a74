"""Cuts the tensor of an edge into messages: one flat buffer for each producer and consumer micro-batch that
share samples.

Both ends compute every shape from the samples' sizes, so only values are sent. For each shared sample, in the
producer's order, a message holds the sample's rows, cut to its own extents where a micro-batch is padded
wider. The consumer writes them into a tensor that holds what the producer pads with. The gradient of an edge
travels in the same messages in the other direction.

Between stages of a pipeline, which have the same micro-batches, a tensor is sent whole. Of a micro-batch
that is dealt to the ranks of a replica, each subgroup sends the tensor of its own samples to the same
subgroup of the next stage.

Between sections, messages of such a micro-batch are those of all its samples. Each rank takes its part of a
tensor that has arrived, and the ranks join the parts that they have computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from secc.runtime.plan.batch_sizes import combine_sizes, pad_sample_sizes
from secc.runtime.plan.dealt_samples import DealtMicroBatches
from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.plan.replica_routes import slice_bounds
from secc.runtime.plan.schema import Edge, Plan
from secc.runtime.plan.step_program import SampleMeta, Schedule, micro_batch_pairs

MicroBatchPair = tuple[int, int]  # the producer's micro-batch and the consumer's


@dataclass(frozen=True)
class TensorBox:
    """A box of a micro-batch's tensor: (start, length) along each dim."""

    box: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        return prod(length for _, length in self.box)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the box of `tensor` as a view. The box has one (start, length) for each dim of `tensor`."""
        for dim, (start, length) in enumerate(self.box):
            if length != tensor.shape[dim]:
                tensor = tensor.narrow(dim, start, length)
        return tensor


class EdgeLayout:
    """The messages of one edge in one step. A pair is (producer's micro-batch, consumer's micro-batch); a
    side is "src" or "dst". Between stages, the messages that `rank` takes part in: those of its part of
    micro-batches that are `dealt`."""

    def __init__(
        self,
        edge: Edge,
        plan: Plan,
        schedule: Schedule,
        samples: Sequence[SampleMeta],
        dealt: DealtMicroBatches | None = None,
        rank: int = 0,
    ) -> None:
        self.edge, self._plan = edge, plan
        self._dealt, self._rank = dealt if edge.dim < 0 else None, rank
        self.dtype: torch.dtype = getattr(torch, edge.dtype)
        self._sizes = pad_sample_sizes(plan, samples, schedule.own_samples)
        self._micro_batches = {
            "src": schedule.micro_batches[edge.src],
            "dst": schedule.micro_batches[edge.dst],
        }
        self.pairs: dict[MicroBatchPair, tuple[int, ...]] = micro_batch_pairs(edge, schedule)
        self._carried = {s for shared in self.pairs.values() for s in shared}
        self._extents = () if plan.widths == "global" else edge.extents
        self._fills: tuple[float, ...] = edge.fills if self._extents else ()
        self._boxes: dict[tuple[str, MicroBatchPair], tuple[TensorBox, ...]] = {}
        self._shapes: dict[tuple[str, int], tuple[int, ...]] = {}
        self._pairs_by_micro_batch: defaultdict[tuple[str, int], list[MicroBatchPair]] = defaultdict(list)
        for pair in sorted(self.pairs):
            self._pairs_by_micro_batch["src", pair[0]].append(pair)
            self._pairs_by_micro_batch["dst", pair[1]].append(pair)

    def pairs_of_micro_batch(self, side: str, micro: int) -> Sequence[MicroBatchPair]:
        """Return the pairs of a micro-batch on `side`, ascending."""
        return self._pairs_by_micro_batch.get((side, micro), ())

    def tensor_shape(self, side: str, micro: int) -> tuple[int, ...]:
        """Return the shape of the edge's tensor in a micro-batch on `side`."""
        key = (side, micro)
        if key not in self._shapes:
            self._shapes[key] = self._compute_shape(side, micro)
        return self._shapes[key]

    def _compute_shape(self, side: str, micro: int) -> tuple[int, ...]:
        found = self._micro_batches[side][micro]
        if self._dealt is not None:
            found = self._dealt.own_part(found, self._rank)
        return self.shape_of_samples(side, found.samples)

    def shape_of_samples(self, side: str, samples: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the edge's tensor for samples that are computed together on `side`."""
        sizes = combine_sizes([self._sizes[s] for s in samples], self._plan.symbols)
        dims = [
            0 if d == self.edge.dim else evaluate_expr(text, sizes) for d, text in enumerate(self.edge.dims)
        ]
        if not self.is_whole:
            dims[self.edge.dim] = sum(self._sample_rows(s) for s in self.carried_samples(side, samples))
        return tuple(dims)

    def make_padding(self, samples: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return a tensor for the consumer's `samples` in which all is padding, for their rows to be written
        into."""
        shape = self.shape_of_samples("dst", samples)
        if not any(self._fills):
            return torch.zeros(shape, dtype=self.dtype, device=device)
        if len(set(self._fills)) == 1:
            return torch.full(shape, self._fills[0], dtype=self.dtype, device=device)
        tensor = torch.zeros(shape, dtype=self.dtype, device=device)
        for box in self.boxes_of_samples("dst", samples, self.carried_samples("dst", samples)):
            for index, fill in enumerate(self._fills):
                self.padding_in_rows(tensor, box, index).fill_(fill)
        return tensor

    def padding_in_rows(self, tensor: torch.Tensor, box: TensorBox, index: int) -> torch.Tensor:
        """Return the view of a tensor that is padding of one sample by extent `index`, and by none of the
        later ones. `box`: what belongs to the sample itself."""
        start, length = box.box[self.edge.dim]
        view = tensor.narrow(self.edge.dim, start, length)
        for number, (dim, _, side) in enumerate(self._extents[index:]):
            start, length = box.box[dim]
            if number == 0:
                start, length = (0 if side == "left" else length), tensor.shape[dim] - length
            view = view.narrow(dim, start, length)
        return view

    @property
    def is_whole(self) -> bool:
        """Whether a micro-batch's tensor is one message."""
        return self.edge.dim < 0

    def message_numel(self, pair: MicroBatchPair) -> int:
        """Number of entries in the message of `pair`."""
        return sum(cut.numel for cut in self.message_boxes("src", pair))

    def subgroup_count(self, pair: MicroBatchPair) -> int:
        """Number of subgroups of a stage that send their own message of `pair`."""
        if self._dealt is None:
            return 1
        return max(1, len(self._dealt.parts(self._micro_batches["src"][pair[0]])))

    def slice_bounds(self, pair: MicroBatchPair, index: int, count: int) -> tuple[int, int]:
        """[start, stop) of slice `index` of `count` in the message of `pair`, or in that of a subgroup."""
        of_subgroup = count // self.subgroup_count(pair)
        return slice_bounds(self.message_numel(pair), index % of_subgroup, of_subgroup)

    def pair_tag(self, pair: MicroBatchPair) -> int:
        """Return a number below 2^30 that is unique among this edge's pairs in this step."""
        return pair[0] * len(self._micro_batches["dst"]) + pair[1]

    def pack_message(
        self, tensor: torch.Tensor, side: str, pair: MicroBatchPair, *more: torch.Tensor
    ) -> torch.Tensor:
        """Copy the message of `pair` from the micro-batch's tensor on `side`, in the edge's shape, into a new
        1-D buffer, followed by `more` (1-D, of the same dtype)."""
        return torch.cat([*(cut.view(tensor).reshape(-1) for cut in self.message_boxes(side, pair)), *more])

    def unpack_message(
        self, message: torch.Tensor, tensor: torch.Tensor, side: str, pair: MicroBatchPair
    ) -> None:
        """Copy a message, a 1-D buffer as from `pack_message`, into its boxes of the micro-batch's tensor on
        `side`."""
        start = 0
        for cut in self.message_boxes(side, pair):
            view = cut.view(tensor)
            view.copy_(message[start : start + cut.numel].view(view.shape))
            start += cut.numel

    def message_boxes(self, side: str, pair: MicroBatchPair) -> tuple[TensorBox, ...]:
        """Return the boxes of the message of `pair` in the tensor on `side`, in the order of the message."""
        key = (side, pair)
        if key not in self._boxes:
            self._boxes[key] = self._compute_boxes(side, pair)
        return self._boxes[key]

    def _compute_boxes(self, side: str, pair: MicroBatchPair) -> tuple[TensorBox, ...]:
        shape = self.tensor_shape(side, pair[side == "dst"])
        if self.is_whole:
            return (TensorBox(tuple((0, n) for n in shape)),)
        boxes = self.sample_boxes(side, pair)
        if self._extents or prod(shape[: self.edge.dim]) != 1:
            return tuple(boxes)
        return tuple(_merge_adjacent_boxes(boxes, self.edge.dim))

    def sample_boxes(self, side: str, pair: MicroBatchPair) -> list[TensorBox]:
        """Return the box of each sample of `pair` in the tensor on `side`."""
        return self.boxes_of_samples(
            side, self._micro_batches[side][pair[side == "dst"]].samples, self.pairs[pair]
        )

    def boxes_of_samples(self, side: str, samples: Sequence[int], wanted: Sequence[int]) -> list[TensorBox]:
        """Return the box of each of the `wanted` in the tensor of `samples` that are computed together."""
        shape = self.shape_of_samples(side, samples)
        starts, start = {}, 0
        for s in self.carried_samples(side, samples):
            starts[s] = start
            start += self._sample_rows(s)
        cuts: list[TensorBox] = []
        for s in wanted:
            box = [(0, n) for n in shape]
            box[self.edge.dim] = (starts[s], self._sample_rows(s))
            for dim, text, pad_side in self._extents:
                extent = evaluate_expr(text, self._sizes[s])
                box[dim] = (shape[dim] - extent if pad_side == "left" else 0, extent)
            cuts.append(TensorBox(tuple(box)))
        return cuts

    def carried_samples(self, side: str, samples: Sequence[int]) -> list[int]:
        """Return those of `samples` that have rows in a tensor on `side`, in its order. A consumer may have
        more samples, which the producer skips."""
        return list(samples) if side == "src" else [s for s in samples if s in self._carried]

    # Parts of a dealt micro-batch.

    def take_part(
        self, whole: torch.Tensor, side: str, samples: Sequence[int], part: Sequence[int]
    ) -> torch.Tensor:
        """Return the tensor of `part`, given that of `samples`, which include them."""
        if side == "dst":
            own = self.make_padding(part, whole.device)
        else:
            own = torch.zeros(self.shape_of_samples(side, part), dtype=whole.dtype, device=whole.device)
        self.unpack_part(
            self._pack(whole, side, samples, self.carried_samples(side, part)), own, side, part, part
        )
        return own

    def pack_part(self, tensor: torch.Tensor, side: str, part: Sequence[int]) -> torch.Tensor:
        """Return the rows of `part` in the tensor of these samples, as a flat buffer."""
        return self._pack(tensor, side, part, self.carried_samples(side, part))

    def part_numel(self, side: str, part: Sequence[int]) -> int:
        """Return the number of entries of `pack_part`."""
        return sum(box.numel for box in self.boxes_of_samples(side, part, self.carried_samples(side, part)))

    def unpack_part(
        self, flat: torch.Tensor, tensor: torch.Tensor, side: str, samples: Sequence[int], part: Sequence[int]
    ) -> None:
        """Copy rows of `part`, as `pack_part` gives them, into the tensor of `samples`, which include
        them."""
        start = 0
        for box in self.boxes_of_samples(side, samples, self.carried_samples(side, part)):
            view = box.view(tensor)
            view.copy_(flat[start : start + box.numel].view(view.shape))
            start += box.numel

    def _pack(
        self, tensor: torch.Tensor, side: str, samples: Sequence[int], wanted: Sequence[int]
    ) -> torch.Tensor:
        boxes = self.boxes_of_samples(side, samples, wanted)
        return torch.cat([tensor.new_empty(0), *(box.view(tensor).reshape(-1) for box in boxes)])

    def _sample_rows(self, sample: int) -> int:
        return evaluate_expr(self.edge.rows, self._sizes[sample])


def _merge_adjacent_boxes(cuts: Sequence[TensorBox], dim: int) -> list[TensorBox]:
    """Merge boxes that are adjacent along `dim`, if all dims before it have size 1, so that entries keep
    their order."""
    merged: list[TensorBox] = []
    for cut in cuts:
        start, length = cut.box[dim]
        if merged and sum(merged[-1].box[dim]) == start:
            first = merged[-1].box[dim][0]
            merged[-1] = TensorBox((*cut.box[:dim], (first, start + length - first), *cut.box[dim + 1 :]))
        else:
            merged.append(cut)
    return merged
