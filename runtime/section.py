"""The base class of generated section modules, and how a section finds the case that fits a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from secc.runtime.errors import UserError

Batch = Mapping[str, Any]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One captured way through a section: `method(batch, edges)` computes it when `when` and `guards` hold.

    `when` is the set of optional keys of the micro-batch that this section tells apart; `guards` maps a method of the section
    (input-only) to the value the captures saw. `receives`, `sends` and `terms` name the edges and loss terms of this case.
    """

    method: str
    when: frozenset[str] = frozenset()
    guards: Mapping[str, object] = field(default_factory=dict)
    receives: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()


class Section(nn.Module):
    """A part of the user's model that runs on one rank: the user's own modules, called in the order the user calls them."""

    name: str = ""
    cases: tuple[Case, ...] = ()
    optional: frozenset[str] = frozenset()  # the keys that tell this section's cases apart

    def case(self, batch: Batch) -> Case:
        """The case of a micro-batch. Raises UserError if no capture took this way (naming pattern and guards)."""
        pattern = self.optional & batch.keys()
        seen: list[str] = []
        for case in self.cases:
            if case.when != pattern:
                continue
            failed = [g for g, value in case.guards.items() if getattr(self, g)(batch) != value]
            if not failed:
                return case
            seen += failed
        reason = f"guards {', '.join(sorted(set(seen)))} have values no capture saw" if seen else "the pattern was not captured"
        raise UserError(
            f"section {self.name} was not compiled for a micro-batch with {sorted(pattern) or 'no optional inputs'}: {reason}",
            remedy="let dataset() show such samples earlier, or compile again with more --stats-samples",
        )

    def forward(self, case: Case, batch: Batch, edges: Tensors) -> tuple[Tensors, Tensors]:
        """Edges out and numerators of loss terms (0-dim) of one micro-batch."""
        return getattr(self, case.method)(batch, edges)
