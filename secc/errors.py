"""The exceptions that report bad input; ranks raise the same class. Everything else that is raised is a
defect of secc."""

from __future__ import annotations

from collections.abc import Iterable

from secc.runtime.errors import UserError

__all__ = ["ImpossibleChoice", "UserError"]


class ImpossibleChoice(UserError):
    """A choice that a pass behind `allocate` cannot carry out: `choices` are NAME.KEY=VALUE, or NAME.KEY for
    any value above 1.

    It has the message of another error. A choice that nobody pinned is made again without these.
    """

    def __init__(self, error: UserError, choices: Iterable[str]) -> None:
        super().__init__(error.message, error.where, error.remedy)
        self.choices = tuple(choices)
