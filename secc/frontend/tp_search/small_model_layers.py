"""Layers of the user's small model, on which the mappings of layers that are too large to run here are shown
exact.

A small layer is like a large one if it is of the same class and its linear maps have the same names; only
sizes differ.
"""

from __future__ import annotations

from torch import nn

from secc.frontend.dataset.survey import Survey
from secc.frontend.tp_search.call_collector import Observer
from secc.frontend.tp_search.find_mapping import Call
from secc.runtime.model.user_file import UserModel
from secc.runtime.tensor_parallel.linear_modules import linear


class SmallModel:
    """The user's `small_model()`, built and run when it is first asked for."""

    def __init__(self, user: UserModel, survey: Survey) -> None:
        self._user, self._survey = user, survey
        self._found: dict[object, tuple[nn.Module, Call]] | None = None

    def like(self, layer: nn.Module) -> tuple[nn.Module, Call] | None:
        """A layer like `layer` with what it was called with, None if there is none."""
        if self._found is None:
            self._found = self._observed()
        return self._found.get(_kind(layer))

    def _observed(self) -> dict[object, tuple[nn.Module, Call]]:
        model = self._user.small_model()
        if model is None:
            return {}
        firsts = {
            _kind(m): (path, m) for path, m in reversed(list(model.named_modules())) if path and _kind(m)[1]
        }
        observer = Observer(dict(firsts.values()))
        observer.real(model.float(), self._user, self._survey)
        return {
            kind: (m, observer.calls[path]) for kind, (path, m) in firsts.items() if path in observer.calls
        }


def _kind(layer: nn.Module) -> tuple[type[nn.Module], tuple[str, ...]]:
    return type(layer), tuple(n for n, m in layer.named_modules() if n and linear(m) is not None)
