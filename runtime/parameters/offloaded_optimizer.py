"""`offload=optimizer`: optimizer states and float32 masters live in host memory, and come to the device for
the optimizer step only (ZeRO-Offload: Ren et al., 2021, but the device computes the update, so that it is the
same bit by bit).

The step runs bucket by bucket: while the optimizer updates the parameters of one bucket, the states of the
next one arrive and those of the one before leave. So at most three buckets are on the device. The first
bucket is fetched while gradients are still being summed, and the last one leaves during the next forward.

The optimizer remains the user's object. Between steps its states are host tensors, which checkpoints read as
they are. For a bucket's step its parameter groups have the parameters of that bucket only, so it must update
each parameter independently of the others (`why_not_stepwise`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import nn

from secc.runtime.parameters.bucket_limits import BUCKET_BYTES
from secc.runtime.parameters.host_copies import HostCopies, PendingCopy
from secc.runtime.parameters.sharded_optimizer import MasterGroup
from secc.runtime.plan.schema import Plan


def offloaded_parameter_names(plan: Plan, rank: int, canonical: Mapping[str, str]) -> set[str]:
    """Returns the canonical names of the parameters on `rank` with optimizer states in host memory: those of
    no section that keeps them on the device."""
    held = [s for s in plan.sections if rank in s.mesh.ranks]
    offloaded = {canonical[n] for s in held if s.offload == "optimizer" for n in s.params}
    return offloaded - {canonical[n] for s in plan.sections if s.offload != "optimizer" for n in s.params}


@dataclass(eq=False)
class _Bucket:
    """Parameters that are updated together. `masters`: groups of masters that are in host memory between
    steps, with their values there."""

    params: list[nn.Parameter]
    masters: list[tuple[MasterGroup, torch.Tensor]]
    # States on the device: (parameter, key) -> (device tensor, host tensor).
    fetched: dict[tuple[nn.Parameter, str], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict[tuple[nn.Parameter, str], tuple[torch.Tensor, torch.Tensor]]
    )
    arriving: list[PendingCopy] = field(default_factory=list[PendingCopy])
    leaving: list[tuple[PendingCopy, torch.Tensor]] = field(
        default_factory=list[tuple[PendingCopy, torch.Tensor]]
    )
    is_on_device: bool = False


class OffloadedOptimizer:
    """An optimizer that updates the parameters `offloaded` with states from host memory, and all others as
    usual.

    `masters`: the groups of float32 masters of this rank; those of offloaded parameters move to the host now.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        offloaded: Collection[nn.Parameter],
        masters: Sequence[MasterGroup],
        copies: HostCopies,
    ) -> None:
        self.optimizer, self._copies = optimizer, copies
        self._offloaded = set(offloaded)
        self._buckets = list(self._form_buckets(masters))
        self._host_masters: dict[nn.Parameter, torch.Tensor] = {}
        for bucket in self._buckets:
            for group, host in bucket.masters:
                group.is_on_host = True
                self._host_masters |= dict(zip(group.leaves, group.views_of_leaves(host), strict=True))
                _free(group.values)
        self.move_states_to_host()

    def _form_buckets(self, masters: Sequence[MasterGroup]) -> Iterator[_Bucket]:
        """Yields buckets of about `BUCKET_BYTES` of parameters. The masters of one group are never apart."""
        group_of = {leaf: group for group in masters for leaf in group.leaves}
        members: list[tuple[list[nn.Parameter], MasterGroup | None]] = []
        added = set[MasterGroup]()
        ordered = [p for g in self.optimizer.param_groups for p in g["params"] if p in self._offloaded]
        for param in ordered:
            group = group_of.get(param)
            if group is None:
                members.append(([param], None))
            elif group not in added:
                added.add(group)
                members.append(([p for p in ordered if group_of.get(p) is group], group))
        bucket, size = _Bucket([], []), 0
        for params, group in members:
            own = sum(p.nbytes for p in params)
            if bucket.params and size + own > BUCKET_BYTES:
                yield bucket
                bucket, size = _Bucket([], []), 0
            bucket.params += params
            if group is not None:
                bucket.masters.append((group, self._copies.take_to_host(group.values)))
            size += own
        if bucket.params:
            yield bucket

    @property
    def parameters(self) -> Collection[nn.Parameter]:
        """What the optimizer updates with states from host memory."""
        return self._offloaded

    def values(self, param: nn.Parameter) -> torch.Tensor:
        """Returns the values of what the optimizer updates: a master's in host memory, if it is there. Call
        `wait_until_on_host` before reading them."""
        return self._host_masters.get(param, param.data)

    def move_states_to_host(self) -> None:
        """Moves all states of offloaded parameters to host memory, at once."""
        for param in self._offloaded & self.optimizer.state.keys():
            states = self.optimizer.state[param]
            for key, value in _states_like(states, param):
                states[key] = self._copies.take_to_host(value)

    def prefetch(self) -> None:
        """Starts to fetch what the next step needs first."""
        for bucket in self._buckets:
            self._finish_leaving(bucket)
        for bucket in self._buckets[:1]:
            self._fetch(bucket)

    def step(self) -> None:
        """Steps the optimizer on all parameters, and writes offloaded masters into the weights."""
        groups = self.optimizer.param_groups
        if any(p not in self._offloaded for g in groups for p in g["params"]):
            with self._only(lambda p: p not in self._offloaded):
                self.optimizer.step()
        for i, bucket in enumerate(self._buckets):
            if i == 0:
                self.prefetch()
            if i > 1:
                self._finish_leaving(self._buckets[i - 2])
            if i + 1 < len(self._buckets):
                self._fetch(self._buckets[i + 1])
            self._update(bucket)
            self._store(bucket)
        for bucket in self._buckets[:-1]:
            self._finish_leaving(bucket)

    def wait_until_on_host(self) -> None:
        """Waits until all states and masters are in host memory."""
        for bucket in self._buckets:
            self._release(bucket)
            self._finish_leaving(bucket)

    def write_weights(self) -> None:
        """Writes all offloaded masters into the weights, after they were changed in host memory."""
        self.wait_until_on_host()
        for bucket in self._buckets:
            for group, host in bucket.masters:
                _allocate(group.values)
                group.values.copy_(host)
                group.write_weights()
                _free(group.values)

    @contextmanager
    def _only(self, selects: Callable[[nn.Parameter], bool]) -> Iterator[None]:
        """Leaves only the selected parameters, and their names, in the optimizer's groups meanwhile."""
        groups = self.optimizer.param_groups
        kept = [{key: group[key] for key in ("params", "param_names") if key in group} for group in groups]
        for group, whole in zip(groups, kept, strict=True):
            chosen = [selects(p) for p in whole["params"]]
            group |= {key: list(compress(entries, chosen)) for key, entries in whole.items()}
        try:
            yield
        finally:
            for group, whole in zip(groups, kept, strict=True):
                group |= whole

    def _fetch(self, bucket: _Bucket) -> None:
        """Starts to copy the bucket's states and masters to the device, if they are not there."""
        if bucket.is_on_device:
            return
        self._finish_leaving(bucket)
        bucket.is_on_device = True
        start = self._copies.to_device.start
        for group, host in bucket.masters:
            _allocate(group.values)
            bucket.arriving.append(start(group.values, host))
        for param in bucket.params:
            for key, host in _states_like(self.optimizer.state.get(param, {}), param):
                target = torch.empty_like(host, device=self._copies.device, pin_memory=False)
                bucket.fetched[param, key] = target, host
                bucket.arriving.append(start(target, host))

    def _update(self, bucket: _Bucket) -> None:
        """Updates the bucket's parameters, once its states have arrived."""
        _wait_for(bucket.arriving)
        for (param, key), (target, _) in bucket.fetched.items():
            self.optimizer.state[param][key] = target
        own = set(bucket.params)
        with self._only(own.__contains__):
            self.optimizer.step()
        for group, _ in bucket.masters:
            group.write_weights()

    def _store(self, bucket: _Bucket) -> None:
        """Starts to copy the bucket's states and masters to the host."""
        start = self._copies.to_host.start
        for param in bucket.params:
            states = self.optimizer.state.get(param, {})
            for key, value in _states_like(states, param):
                _, host = bucket.fetched.get((param, key), (None, None))
                host = self._copies.empty_on_host(value) if host is None else host
                bucket.leaving.append((start(host, value), value))
                states[key] = host
        for group, host in bucket.masters:
            bucket.leaving.append((start(host, group.values), group.values))
        bucket.fetched.clear()
        bucket.is_on_device = False

    def _finish_leaving(self, bucket: _Bucket) -> None:
        """Waits until what leaves the device has arrived on the host, and frees its memory there."""
        if not bucket.leaving:
            return
        for copy, _ in bucket.leaving:
            copy.synchronize()
        bucket.leaving.clear()
        if not bucket.is_on_device:
            for group, _ in bucket.masters:
                _free(group.values)

    def _release(self, bucket: _Bucket) -> None:
        """Frees what was fetched for a step that was left out: the host has the same values."""
        if bucket.is_on_device:
            _wait_for(bucket.arriving)
            bucket.fetched.clear()
            bucket.is_on_device = False
            for group, _ in bucket.masters:
                _free(group.values)


def _states_like(states: Mapping[str, Any], param: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    """Returns the states of a parameter that have its shape: step counts stay where they are."""
    return [
        (key, value)
        for key, value in states.items()
        if isinstance(value, torch.Tensor) and value.ndim and value.shape == param.shape
    ]


def _wait_for(copies: list[PendingCopy]) -> None:
    for copy in copies:
        copy.wait()
    copies.clear()


def _allocate(values: torch.Tensor) -> None:
    # Resizing the storage, instead of making a new tensor, keeps the views of it valid.
    values.untyped_storage().resize_(values.nbytes)


def _free(values: torch.Tensor) -> None:
    values.untyped_storage().resize_(0)
