"""The base class of generated section modules, and how a section finds the case that fits a micro-batch."""

from __future__ import annotations

import importlib.util
import inspect
import operator
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from secc.runtime.errors import UserError
from secc.runtime.plan import schema
from secc.runtime.randomness.micro_batch_draws import MicroBatchDraws
from secc.runtime.sections import forward_hooks
from secc.runtime.sections.autograd_functions import UserFunction, UserFunctionCall
from secc.runtime.sections.module_settings import ModuleSetting, apply_settings
from secc.runtime.tensor_parallel.replica_group import ReplicaProcessGroup

if TYPE_CHECKING:
    from secc.runtime.tensor_parallel.vocab_parallel_ops import VocabShards

Batch = Mapping[str, Any]
RECORDING_KEY = "secc.recorded"  # the key under which a batch has its recording
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class SectionCase:
    """One captured way through a section: `method(batch, edges)` computes it when `when` and `guards` hold.

    `when` is the set of optional keys of the micro-batch that this section tells apart; `guards` maps a
    method of the section (input-only) to the value the captures saw. `receives`, `sends` and `terms` name the
    edges and loss terms of this case. `anew`: the plan's cases one of which the micro-batch's own recording
    has to have (`secc.runtime.rerecording.rerecorder`); `takes`: the labels of the recorded tensors; `whole`:
    it computes parts of the forward beside them and its blocks, so that the whole recording has to fit.
    """

    method: str
    when: frozenset[str] = frozenset()
    guards: Mapping[str, object] = field(default_factory=dict)
    receives: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()
    recorded_cases: tuple[str, ...] = ()
    recorded_labels: tuple[str, ...] = ()
    needs_whole_recording: bool = False


class Constants:
    """Tensors that the user's forward makes from Python data, from `constants.pt` beside the section
    modules."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "constants.pt"
        self._loaded: dict[tuple[str, torch.device], torch.Tensor] = {}

    def __call__(self, name: str, device: torch.device) -> torch.Tensor:
        """The constant of that name on a device, read once."""
        if (name, device) not in self._loaded:
            self._loaded[name, device] = torch.load(self._path, weights_only=True)[name].to(device)
        return self._loaded[name, device]


class SectionModule(nn.Module):
    """A part of the user's model that runs on one rank: the user's own modules, called in the order the user
    calls them."""

    name: str = ""
    cases: tuple[SectionCase, ...] = ()
    optional: frozenset[str] = frozenset()  # the keys that tell this section's cases apart

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # In a list, so that the model's other modules do not become modules of this section.
        self._model = [model]
        self.constants = Constants(Path(inspect.getfile(type(self))).parent)
        self.draws: MicroBatchDraws | None = None  # of the micro-batch that runs
        self.group: ReplicaProcessGroup | None = None  # the ranks of this replica, where it has several

    @property
    def whole_model(self) -> nn.Module:
        """The user's whole model; what other ranks hold is on the meta device."""
        return self._model[0]

    @property
    def device(self) -> torch.device:
        """Where this section computes: the device of the model's first parameter that is here."""
        return next((p.device for p in self._model[0].parameters() if not p.is_meta), torch.device("cpu"))

    def value(self, path: str) -> torch.Tensor:
        """The parameter or buffer of the user's model by its name; read at each use, since weights may be
        replaced."""
        return operator.attrgetter(path)(self._model[0])

    def vocab_shards(self, size: int) -> VocabShards:
        """The parts that the replica's ranks have of a vocabulary of `size` tokens."""
        from secc.runtime.tensor_parallel.vocab_parallel_ops import (
            VocabShards,  # brings the kernels, which few sections need
        )

        return VocabShards(size, self.group)

    def function(self, name: str) -> UserFunctionCall:
        """A `torch.autograd.Function` of the user's that the glue applies."""
        return UserFunction.parse(name).bind_to_model(self._model[0])

    def draw(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of a random op of the glue, under the name it has in the user's forward."""
        if self.draws is None:
            return function(*args, **kwargs)
        return self.draws.draw_named(name, function, *args, **kwargs)

    def at_call_site(self, site: str) -> AbstractContextManager[None]:
        """Blocks called inside draw random numbers as called at these lines of the user's."""
        return nullcontext() if self.draws is None else self.draws.at_call_site(site)

    def with_settings(self, module: nn.Module, *settings: ModuleSetting) -> AbstractContextManager[None]:
        """The block's modules are set inside as the user's forward had set them for this call."""
        return apply_settings(module, *settings)

    def rerecorded_tensor(self, batch: Batch, label: str, *sources: torch.Tensor) -> torch.Tensor:
        """A tensor that glue makes for a block, by the ops that were recorded for this micro-batch; `sources`
        are the plan's."""
        return batch[RECORDING_KEY].run(self, batch, label, sources)

    def select_case(self, batch: Batch) -> SectionCase:
        """The case of a micro-batch. Raises UserError if no capture took this way (naming pattern and
        guards)."""
        found, seen = self._find_compiled_case(batch)
        if found is None and RECORDING_KEY in batch:
            found = next(
                (c for c in self._cases_of_pattern(batch) if batch[RECORDING_KEY].case in c.recorded_cases),
                None,
            )
        if found is not None:
            return found
        pattern = self.optional & batch.keys()
        reason = (
            f"guards {', '.join(sorted(set(seen)))} have values no capture saw"
            if seen
            else "the pattern was not captured"
        )
        raise UserError(
            f"section {self.name} was not compiled for a micro-batch with {sorted(pattern) or 'no optional inputs'}: {reason}",
            remedy="let dataset() show such samples earlier, or compile again with more --stats-samples",
        )

    def cases_to_rerecord(self, batch: Batch) -> list[SectionCase]:
        """The cases that take glue recorded for a micro-batch; none where a case is compiled for it."""
        return (
            [c for c in self._cases_of_pattern(batch) if c.recorded_cases]
            if self._find_compiled_case(batch)[0] is None
            else []
        )

    def _cases_of_pattern(self, batch: Batch) -> list[SectionCase]:
        pattern = self.optional & batch.keys()
        return [c for c in self.cases if c.when == pattern]

    def _find_compiled_case(self, batch: Batch) -> tuple[SectionCase | None, list[str]]:
        """The case that is compiled for a micro-batch, and the guards that say no to others."""
        seen: list[str] = []
        for case in self._cases_of_pattern(batch):
            failed = [g for g, value in case.guards.items() if getattr(self, g)(batch) != value]
            if not failed and not case.recorded_cases:
                return case, []
            seen += failed
        return None, seen

    def forward(self, case: SectionCase, batch: Batch, edges: Tensors) -> tuple[Tensors, Tensors]:
        """Edges out and numerators of loss terms (0-dim) of one micro-batch."""
        with forward_hooks.without_user_hooks(self.children()):
            return getattr(self, case.method)(batch, edges)


def load_section_module(directory: Path, planned: schema.Section, model: nn.Module) -> SectionModule:
    """A section of the plan in `directory`, on a model; its module is loaded anew."""
    module = load_plan_module(directory / planned.module)
    found = next(
        c
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, SectionModule) and c.name == planned.name
    )
    return found(model)


def load_plan_module(path: Path) -> ModuleType:
    """A module of a plan directory."""
    name = f"secc_plan_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
