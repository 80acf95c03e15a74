"""The choices that a user may make about a plan. They are the options of `secc compile`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from secc.errors import UserError

_SPELLINGS = {"sections": "section", "without": "no_fuse_rule"}  # by field: what a user writes
BALANCE_CHOICES = ("micro-batch", "global")


@dataclass(frozen=True)
class TakenBack:
    """A choice that a plan does without, NAME.KEY=VALUE or NAME.KEY for all values above 1, with the reason
    and its place (file:line, "" if there is none)."""

    choice: str
    reason: str
    where: str = ""


@dataclass(frozen=True)
class CompileOptions:
    """Options of a compilation; each field of the first part is an option of `secc compile`.

    The fields of the second part are not the user's. compared_only: the plan is compared with plain PyTorch
    and never run, so a model that fits no device is planned, too, and no faster plan is searched. The others
    are set when a model is planned a second time. taken_back: choices that an earlier plan showed to be
    impossible. The planner sets the others: `refused` are choices that a pass after
    `allocate` could not carry out, `stages` the pipeline stages ("NAME.pp=N") that layers
    were captured for, `known` all choices of the first plan, and `proven` the solver status of that plan.
    """

    cluster: str = "local"
    global_batch: int = 32  # samples
    strategy: str = "auto"
    objective: str = "time"  # or "gpus": as few ranks as a step of `step_time` seconds takes
    step_time: float = 0.0  # seconds
    set: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    max_sections: int | None = None
    stats_samples: int = 64
    widths: str = "auto"
    pack: str = "never"  # or "always", "auto"
    small: bool | None = False  # plan small_model(); None: if model() is too large to be built here
    fuse: bool | None = None  # None: where the cluster has GPUs
    without: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()
    balance_loss: str = ""  # "micro-batch" or "global"; "": refuse a balance loss
    global_sums: bool = False  # functions of sums over the batch: from those of the global batch
    gather: tuple[str, ...] = ()  # blocks with rows that the loss compares over the global batch
    whole_batch: tuple[str, ...] = ()  # blocks that take all samples of a step at once
    stats: Path | None = None
    skip_bad_samples: bool = False
    costs: str = ""  # path of a file of measured costs
    dtype: str = ""  # "bf16": compute in bfloat16, with float32 master weights
    run_ahead: str = "auto"  # GiB on a rank

    compared_only: bool = False
    taken_back: tuple[TakenBack, ...] = ()
    refused: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    proven: tuple[str, ...] = ()

    @staticmethod
    def from_user(given: Mapping[str, Any]) -> CompileOptions:
        """Returns the options that a user gives by name; one text stands for a list of one. Raises UserError
        for a name that is no option of `secc compile`."""
        every = [f.name for f in fields(CompileOptions)]
        field_of = {_SPELLINGS.get(name, name): name for name in every[: every.index("compared_only")]}
        if unknown := sorted(given.keys() - field_of.keys()):
            near = get_close_matches(unknown[0], field_of, n=1)
            remedy = f"write {near[0]}=; " if near else ""
            raise UserError(
                f"unknown option {unknown[0]!r}", remedy=f"{remedy}options are {', '.join(sorted(field_of))}"
            )
        lists = {f.name for f in fields(CompileOptions) if f.type == "tuple[str, ...]"}
        values = {field_of[name]: value for name, value in given.items()}
        read: dict[str, Any] = {n: as_texts(v) if n in lists else v for n, v in values.items()}
        if read.get("stats") is not None:
            read["stats"] = Path(read["stats"])
        return CompileOptions(**read)


def as_texts(value: str | Iterable[str]) -> tuple[str, ...]:
    """Returns the texts of an option that may be repeated; one text stands for a list of one."""
    return (value,) if isinstance(value, str) else tuple(value)
