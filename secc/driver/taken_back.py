"""Keeps what the planner has taken back, and why: choices of `allocate` that a closer look found impossible.

Allocation chooses stages and tensor cuts from a coarse capture. Carrying them out takes a closer look: a
capture by layers, cuts, boundaries between stages. Whatever fails there does not refuse the model. The choice
is taken back to what the coarse capture showed, unless the user pinned it, and plan.json lists it under
`checks.taken_back`.
"""

from __future__ import annotations

from collections.abc import Iterable

from secc.driver.compile_options import TakenBack
from secc.errors import ImpossibleChoice, UserError

FALLBACK_CASES = "fallback cases"
DIVIDED_LAYERS = "layers divided between stages"


class TakenBackChoices:
    """The record of one compilation. pins: choices of the user ("NAME.KEY=VALUE"), which are never taken
    back."""

    def __init__(self, pins: Iterable[str], known: Iterable[TakenBack] = ()) -> None:
        self._pinned_keys = {pin.partition("=")[0] for pin in pins}
        self._known = {record.choice: record for record in known}
        self._by_choice = dict(self._known)

    @property
    def records(self) -> tuple[TakenBack, ...]:
        """What was taken back, in order."""
        return tuple(self._by_choice.values())

    @property
    def choices(self) -> tuple[str, ...]:
        """The choices that `allocate` must not take: NAME.KEY=VALUE, or NAME.KEY for all values above 1."""
        return tuple(choice for choice in self._by_choice if choice not in (FALLBACK_CASES, DIVIDED_LAYERS))

    @property
    def divides_layers(self) -> bool:
        """Whether layers may be captured in parts, to be divided between stages."""
        return DIVIDED_LAYERS not in self._by_choice

    def is_pinned(self, choice: str) -> bool:
        """Whether the user pinned the key of a choice."""
        return choice.partition("=")[0] in self._pinned_keys

    def take_back(self, error: ImpossibleChoice) -> bool:
        """Records those of the error's choices that the user did not pin. Returns False if none of them is
        new: planning again would end with the same error."""
        new = [c for c in sorted(error.choices) if c not in self._by_choice and not self.is_pinned(c)]
        self._by_choice |= {c: TakenBack(c, error.message, error.where) for c in new}
        if new:  # it was impossible with whole layers, too
            self._by_choice.pop(DIVIDED_LAYERS, None)
        return bool(new)

    def take_back_fallback_cases(self, error: UserError) -> bool:
        """Records that the plan does without fallback cases, and forgets choices that were taken back with
        them. Returns False if it does so already."""
        if FALLBACK_CASES in self._by_choice:
            return False
        self._by_choice = self._known | {
            FALLBACK_CASES: TakenBack(FALLBACK_CASES, error.message, error.where)
        }
        return True

    def take_back_divided_layers(self, error: UserError) -> None:
        """Records that the plan divides no layers between stages."""
        self._by_choice[DIVIDED_LAYERS] = TakenBack(DIVIDED_LAYERS, error.message, error.where)

    def explain(self, error: UserError) -> UserError:
        """Returns the error of a model that cannot be allocated, with the choices that were taken back before
        it: the model may have needed them."""
        before = "; ".join(
            f"{r.choice}, because {r.reason}" for r in self.records if r.reason != error.message
        )
        if not before:
            return error
        return UserError(f"{error.message}; taken back before: {before}", error.where, error.remedy)
