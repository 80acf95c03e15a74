"""The exceptions that report bad input; ranks raise the same class. Any other exception is a defect of
secc."""

from __future__ import annotations

from collections.abc import Iterable

from secc.runtime.errors import NotEnoughMemory, UserError, printable_text

__all__ = [
    "ImpossibleChoice",
    "InexactPlan",
    "NotEnoughMemory",
    "TooManyRanks",
    "UserError",
    "printable_text",
]


class ImpossibleChoice(UserError):
    """A choice of `allocate` that a later pass cannot carry out.

    choices: NAME.KEY=VALUE, or NAME.KEY for any value above 1. It carries the message of `error`. If no
    choice was pinned by the user, allocation runs again without these.
    """

    def __init__(self, error: UserError, choices: Iterable[str]) -> None:
        super().__init__(error.message, error.where, error.remedy)
        self.choices = tuple(choices)


class InexactPlan(UserError):
    """A plan that the exactness check found to differ from plain PyTorch: a defect, unlike a refusal."""


class TooManyRanks(UserError):
    """More ranks were asked for than a global batch has work for, which is `usable`."""

    def __init__(self, message: str, usable: int) -> None:
        ranks = "1 rank" if usable == 1 else f"{usable} ranks"
        super().__init__(message, remedy=f"use at most {ranks}, or a larger global batch")
        self.usable = usable
