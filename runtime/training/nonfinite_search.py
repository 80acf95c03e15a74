"""Finds the first module that makes a NaN or an infinity, by running the step's program again with hooks.

All ranks run it together, because micro-batches need each other's edges. Parameters have not changed since,
and random numbers are keyed by step and sample, so the same values come up. Each rank notes its first event:
a module with finite inputs and an output that is not, else the first gradient that is not finite. The event
that is earliest in the order of the sections is the cause.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from secc.runtime.data.data_plane import DataPlane
from secc.runtime.host.activity import Activity
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import COMPUTE_KINDS, Instruction, Schedule

_MESSAGE_LENGTH = 4096  # entries that carry a rank's event as JSON
_FORWARD, _LOSS, _BACKWARD = range(3)


@dataclass(frozen=True)
class NonFiniteEvent:
    """Where a value that is not finite came up. `phase`: forward, loss or backward, in the order of search.
    `samples`: dataset indices of the micro-batch."""

    phase: int
    section: str
    module: str
    samples: tuple[int, ...]

    def __str__(self) -> str:
        of = f" of section {self.section}, samples {list(self.samples)}" if self.section else ""
        match self.phase:
            case 0:
                return f"the output of {self.module or 'the model'}{of}"
            case 1:
                return "the loss, outside of modules"
            case _:
                return f"the gradient of {self.module}{of}"


class NonFiniteSearch:
    """Notes the first event on this rank while it runs a step again.

    `schedule` and `samples` (dataset indices by position) are those of the step; `activity` says which
    instruction runs."""

    def __init__(self, plan: Plan, schedule: Schedule, samples: Sequence[int], activity: Activity) -> None:
        self._plan, self._schedule, self._samples, self._activity = plan, schedule, samples, activity
        self._events: dict[int, NonFiniteEvent] = {}

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Hooks all modules and parameters of `model` for the body."""
        handles: list[Any] = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_hook(self._check_forward(name), with_kwargs=True))
        for name, param in model.named_parameters():
            if param.requires_grad and not param.is_meta:
                handles.append(param.register_hook(self._check_gradient(f"parameter {name}")))
        yield
        for handle in handles:
            handle.remove()

    def note_loss(self, share: torch.Tensor) -> None:
        """Notes a share of the loss that is not finite."""
        if not bool(torch.isfinite(share)):
            self._note(_LOSS, "")

    def find_first(self, data: DataPlane) -> NonFiniteEvent | None:
        """Returns the earliest event of all ranks; None if none had one. Collective."""
        own = min(self._events.items(), default=(0, None))[1]
        text = json.dumps(own and asdict(own)).encode()
        message = torch.zeros(_MESSAGE_LENGTH, dtype=torch.float64, device=data.device)
        if len(text) < _MESSAGE_LENGTH:
            message[: len(text)] = torch.tensor(list(text), dtype=torch.float64)
        events: list[NonFiniteEvent] = []
        for row in data.exchange_values(message, 0).tolist():
            entry = json.loads(bytes(int(v) for v in row if v) or b"null")
            if entry:
                events.append(NonFiniteEvent(**entry | {"samples": tuple(entry["samples"])}))
        order = {s.name: i for i, s in enumerate(self._plan.sections)}
        return min(
            events,
            key=lambda e: (e.phase, order.get(e.section, 0) * (-1 if e.phase == _BACKWARD else 1)),
            default=None,
        )

    def _check_forward(self, name: str) -> Any:
        def check(module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
            tensors = _floating_tensors(output)
            if _FORWARD not in self._events and not _all_finite(tensors):
                if _all_finite(_floating_tensors((args, kwargs))):
                    self._note(_FORWARD, f"module {name}")
                else:
                    self._note(_FORWARD, f"what comes before module {name}")
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(self._check_gradient(f"the output of module {name}"))

        return check

    def _check_gradient(self, name: str) -> Any:
        def check(gradient: torch.Tensor) -> None:
            if _BACKWARD not in self._events and not _all_finite([gradient]):
                self._note(_BACKWARD, name)

        return check

    def _note(self, phase: int, module: str) -> None:
        i = self._activity.what
        if phase in self._events:
            return
        if not isinstance(i, Instruction) or i.kind not in COMPUTE_KINDS:
            self._events[phase] = NonFiniteEvent(phase, "", module, ())
            return
        micro = self._schedule.micro_batches[i.section][i.micro]
        samples = tuple(self._samples[p] for p in micro.samples)
        self._events[phase] = NonFiniteEvent(phase, i.section, module, samples)


def _floating_tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def _all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    # Masks hold -inf on purpose, so an infinity counts only where it is positive or comes with a NaN.
    return all(t.is_meta or not bool((t.isnan() | t.isposinf()).any()) for t in tensors)
