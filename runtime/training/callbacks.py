"""The user's own code during a run: what is called when, on which ranks, and with what.

A model file may define the three functions as `on_step`, `on_save` and `on_evaluate`; a script that makes a
`Trainer` may pass objects that have any of them as methods. They see results and must not communicate with
other ranks unless every rank does.

What a callback raises does not end its rank in the middle of a step, where the other ranks would wait for it:
it is kept, the ranks agree in the sums of the next step, save if there is `--save`, and end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from secc.runtime.errors import UserError
from secc.runtime.model.source_lines import error_source_line
from secc.runtime.model.user_file import UserModel
from secc.runtime.training.evaluation import EvaluationResult


@dataclass(frozen=True)
class StepResult:
    """One finished step; equal on all ranks but for `rank`.

    `step` counts from 1. `scalars`: what forward returns next to the loss. `learning_rate`: of the first
    parameter group, as this step used it. `tokens`: labels that count. `seconds`: of the whole step.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    samples: int
    tokens: int
    seconds: float
    rank: int
    world_size: int
    scalars: Mapping[str, float] = field(default_factory=dict[str, float])


class Callbacks:
    """Calls the functions of the model file and the methods of `others`, in this order.

    `on_step(result: StepResult)`: on every rank, after the optimizer step. `on_save(folder: Path)`: on rank
    0, when the checkpoint is complete. `on_evaluate(result: EvaluationResult)`: on every rank, for each set.
    """

    def __init__(self, user: UserModel, others: Sequence[object] = ()) -> None:
        self._user, self._others = user, others
        self.error: UserError | None = None  # the first that a callback has raised on this rank

    def on_step(self, result: StepResult) -> None:
        """After an optimizer step; on every rank."""
        self._call("on_step", result)

    @property
    def hears_steps(self) -> bool:
        """Whether anything is called after a step."""
        return self._user.defines("on_step") or any(hasattr(other, "on_step") for other in self._others)

    def on_save(self, folder: Path) -> None:
        """After a checkpoint is complete; on rank 0."""
        self._call("on_save", folder)

    def on_evaluate(self, result: EvaluationResult) -> None:
        """After the evaluation of a set; on every rank."""
        self._call("on_evaluate", result)

    def _call(self, name: str, argument: Any) -> None:
        """Calls all callbacks of this name, but none after one has failed."""
        try:
            if self._user.defines(name) and self.error is None:
                self._user.call_function(name, argument)
            for other in self._others:
                method = getattr(other, name, None)
                if method is not None and self.error is None:
                    _call_method(method, argument)
        except UserError as error:
            self.error = error


def _call_method(method: Callable[[Any], object], argument: Any) -> None:
    """Calls a method of a callback object. Raises UserError for what it raises."""
    try:
        method(argument)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        name = getattr(method, "__qualname__", str(method))
        raise UserError(
            f"{name}() raises {text}", error_source_line(error), "correct the callback"
        ) from error
