"""Layers of the user's small model, on which mappings are verified for layers that are too large to run
here.

A small layer stands for a large one if it is of the same class and its linear layers have the same names;
only sizes differ.
"""

from __future__ import annotations

from torch import nn

from secc.frontend.dataset.small_samples import survey_small_samples
from secc.frontend.dataset.survey import DatasetSurvey
from secc.frontend.tp_search.call_collector import CallCollector
from secc.frontend.tp_search.find_mapping import ModuleCall
from secc.runtime.model.user_file import UserModel
from secc.runtime.tensor_parallel.linear_modules import as_linear


class SmallModelLayers:
    """Layers of the user's `small_model()`, which is built and run when it is first needed. A small model
    that does not take the samples has none."""

    def __init__(self, user: UserModel, survey: DatasetSurvey) -> None:
        self._user, self._survey = user, survey
        self._layers_by_kind: dict[object, tuple[nn.Module, ModuleCall]] | None = None

    def find_like(self, layer: nn.Module) -> tuple[nn.Module, ModuleCall] | None:
        """Returns a small layer like `layer` with the arguments of its call; None if there is none."""
        if self._layers_by_kind is None:
            self._layers_by_kind = self._collect_layers()
        return self._layers_by_kind.get(_layer_kind(layer))

    def _collect_layers(self) -> dict[object, tuple[nn.Module, ModuleCall]]:
        model = self._user.build_small_model()
        if model is None:
            return {}
        firsts = {
            _layer_kind(m): (path, m)
            for path, m in reversed(list(model.named_modules()))
            if path and _layer_kind(m)[1]
        }
        observer = CallCollector(dict(firsts.values()))
        try:
            observer.run_model(model, self._user, survey_small_samples(self._user, self._survey))
        except Exception:  # whatever the user's code raises on samples that are not made for it
            return {}
        return {
            kind: (m, observer.calls[path]) for kind, (path, m) in firsts.items() if path in observer.calls
        }


def _layer_kind(layer: nn.Module) -> tuple[type[nn.Module], tuple[str, ...]]:
    return type(layer), tuple(n for n, m in layer.named_modules() if n and as_linear(m) is not None)
