"""Gathers updated parameters behind the next step's first forward (`zero1` and `zero2`).

With a sharded optimizer each rank updates a part of the parameters, and an all-gather sends them to the other
replicas. All gathers start after the update; each layer waits for its own parameters when it first runs. What
lies outside of layers (embeddings, heads, what the glue reads) comes first, and a section waits for it before
it computes. So the gather of a layer passes behind the computation of the layers before it.

Until its gather has ended, a parameter reads as NaN: code that uses a layer's parameters outside of the
layer's forward shows at once, and never computes with values of the step before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from secc.runtime.parameters.sharded_optimizer import FlatParameters, valueless_placeholder
from secc.runtime.parameters.zero3 import units_of_parameters


@dataclass(frozen=True)
class ShardedBucket:
    """Parameters of a section that lie in one flat buffer. Each rank of `group` updates its shard of `flat`;
    an all-gather over the group then sends the shards to all of its ranks."""

    section: str
    params: Sequence[nn.Parameter]
    flat: FlatParameters
    group: Any


class _BucketGather:
    """The gather of one bucket. `values` are the parameters' views of the flat buffer. `place`: the first
    unit of its section with one of its parameters, 0 if some are outside of all units."""

    def __init__(self, bucket: ShardedBucket, place: int) -> None:
        self.bucket, self.place = bucket, place
        self.values = [param.data for param in bucket.params]
        self.placeholders = [valueless_placeholder(param, param.device) for param in bucket.params]
        self._work: dist.Work | None = None

    def start_gather(self) -> None:
        self._work = self.bucket.flat.gather_values(self.bucket.group)
        self._point_parameters_to(self.placeholders)

    def finish_gather(self, timed: Callable[[str], AbstractContextManager[None]]) -> None:
        """Waits for the values, if the gather has not ended before."""
        if self._work is None:
            return
        with timed(self.bucket.section):
            self._work.wait()
        self._work = None
        self._point_parameters_to(self.values)

    def _point_parameters_to(self, tensors: Sequence[torch.Tensor]) -> None:
        for param, tensor in zip(self.bucket.params, tensors, strict=True):
            param.data = tensor


class ParameterGathers:
    """The gathers of all sharded parameters of this rank.

    `buckets`: in the order in which a backward completes them, the same on all ranks that share a group.
    `units`: by section, the modules that wait for their own parameters; they are the units of `blocks`.
    Construct it once the parameters have the memory that they keep.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[ShardedBucket],
        units: Mapping[str, Sequence[nn.Module]],
        blocks: Mapping[str, Sequence[str]],
    ) -> None:
        self.timed: Callable[[str], AbstractContextManager[None]] = lambda section: nullcontext()
        self._pending = False
        self._outside: dict[str, list[_BucketGather]] = {}
        self._inside: dict[str, list[_BucketGather]] = {}
        ordered: list[_BucketGather] = []
        for section in dict.fromkeys(bucket.section for bucket in buckets):
            modules = units.get(section, ())
            unit_of = units_of_parameters(model, modules, blocks.get(section, ()))
            found = [
                _BucketGather(bucket, min(unit_of.get(p, 0) for p in bucket.params))
                for bucket in reversed(buckets)
                if bucket.section == section
            ]
            found.sort(key=lambda gather: gather.place)  # stable: forwards among buckets of one place
            ordered += found
            self._outside[section] = [gather for gather in found if gather.place == 0]
            self._inside[section] = [gather for gather in found if gather.place]
            for k, module in enumerate(modules, 1):
                of_module = [g for g in found if g.place and any(unit_of[p] == k for p in g.bucket.params)]
                if of_module:
                    self._wrap_unit(module, of_module)
        self._ordered: Sequence[_BucketGather] = ordered

    def _wrap_unit(self, module: nn.Module, gathers: Sequence[_BucketGather]) -> None:
        """Wraps the module's forward so that it waits for its parameters."""
        inner = module.forward

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._pending:
                self._finish(gathers)
            return inner(*args, **kwargs)

        module.forward = forward

    def start_all(self) -> None:
        """Starts all gathers. Collective; call it after the optimizer step."""
        self.finish_all()
        for gather in self._ordered:
            gather.start_gather()
        self._pending = bool(self._ordered)

    def before_compute(self, section: str, whole: bool) -> None:
        """Waits for what a section reads outside of its layers, with `whole` also for all layers."""
        if self._pending:
            self._finish(self._outside.get(section, ()))
            if whole:
                self._finish(self._inside.get(section, ()))

    def finish_all(self) -> None:
        """Waits for all gathers: the parameters have the values of the last update. Call it before anything
        but a section's forward reads or changes them."""
        if self._pending:
            self._finish(self._ordered)
            self._pending = False

    def _finish(self, gathers: Iterable[_BucketGather]) -> None:
        for gather in gathers:
            gather.finish_gather(self.timed)
