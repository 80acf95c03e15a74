"""What a check is given and what it returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

Figure = float | int | str | None


@dataclass(frozen=True)
class Bench:
    """Where a check runs: its device, a folder of its own, and whether it only tries the code on the CPU at
    small sizes."""

    folder: Path
    dry: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")


@dataclass
class Outcome:
    """The result of a check: figures by name, and one line for each thing that is wrong."""

    figures: dict[str, Figure] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Check:
    """A check by name: what it shows, the seconds after which it is ended, and the function that runs it.
    `alone`: it measures time, so nothing else runs meanwhile. `needs`: the check that prepares this one."""

    name: str
    shows: str
    limit_s: int
    run: Callable[[Bench], Outcome]
    alone: bool = False
    needs: str = ""


def set_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a process with these variables added."""
    return {**os.environ, **variables}
