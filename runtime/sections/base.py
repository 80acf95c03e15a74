"""The base class of generated section modules, and how a section selects the case that fits a micro-batch."""

from __future__ import annotations

import importlib.util
import inspect
import operator
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from secc.runtime.context_parallel.row_mode import RowMode
from secc.runtime.errors import UserError
from secc.runtime.model.source_lines import error_source_line
from secc.runtime.plan import schema
from secc.runtime.randomness.micro_batch_draws import MicroBatchDraws
from secc.runtime.sections import forward_hooks
from secc.runtime.sections.autograd_functions import UserFunction, UserFunctionCall
from secc.runtime.sections.batch_statistic import BatchPlaces, BatchRows, BatchStatistic, BatchValues
from secc.runtime.sections.module_settings import ModuleSetting, apply_settings
from secc.runtime.tensor_parallel.replica_group import ReplicaProcessGroup

if TYPE_CHECKING:
    from secc.runtime.tensor_parallel.vocab_parallel_ops import VocabShards

Batch = Mapping[str, Any]
RECORDING_KEY = "secc.recorded"  # the key under which a batch has its recording
Tensors = dict[str, torch.Tensor]
DrawFunction = Callable[..., Any]  # (name, random op, its arguments) -> its result


@dataclass(frozen=True)
class SectionCase:
    """One captured path through a section: `method(batch, edges)` computes it if `when` and `guards` hold.

    `when` is the subset of `SectionModule.optional` that the micro-batch has. `guards` maps names of methods,
    which read inputs only, to the values that the captures saw. `receives`, `sends` and `terms` name the
    edges and loss terms of this case.

    Cases with recorded glue have three more fields. `recorded_cases` are the plan's cases that the
    micro-batch's own recording may match (`secc.runtime.rerecording.rerecorder`), `recorded_labels` the
    tensors that are computed by recorded programs. With `needs_whole_recording` the case also computes glue
    that was compiled from captures, so the recording is compared up to its end.
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
    """Tensors that the user's forward makes from Python data, stored in `constants.pt` next to the section
    modules."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "constants.pt"
        self._loaded: dict[tuple[str, torch.device], torch.Tensor] = {}

    def __call__(self, name: str, device: torch.device) -> torch.Tensor:
        """Return the constant `name` on `device`; the file is read once per constant and device."""
        if (name, device) not in self._loaded:
            self._loaded[name, device] = torch.load(self._path, weights_only=True)[name].to(device)
        return self._loaded[name, device]


class SectionModule(nn.Module):
    """A part of the user's model that runs on one rank: the user's own modules, called in the order in which
    the user calls them."""

    name: str = ""
    cases: tuple[SectionCase, ...] = ()
    optional: frozenset[str] = frozenset()  # the keys that tell this section's cases apart

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # In a list, so that the model's other modules do not become modules of this section.
        self._model = [model]
        self.constants = Constants(Path(inspect.getfile(type(self))).parent)
        self.draws: MicroBatchDraws | None = None  # random numbers of the running micro-batch
        self.statistics: BatchValues = {}  # of the global batch; none in a first pass
        self.places: BatchPlaces | None = None  # of the running micro-batch's samples
        self.group: ReplicaProcessGroup | None = None  # ranks that share parameters, if there are several
        # Ranks that share the rows of sequences, by their number: all of them, or some for a part of a
        # micro-batch.
        self.row_groups: dict[int, ReplicaProcessGroup] = {}
        self.row_attention = "gather"  # or "ulysses", "frames": how these attend to each other's rows

    @property
    def whole_model(self) -> nn.Module:
        """The user's whole model; parameters of other ranks are on the meta device."""
        return self._model[0]

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter on this rank."""
        return next((p.device for p in self._model[0].parameters() if not p.is_meta), torch.device("cpu"))

    def value(self, path: str) -> torch.Tensor:
        """Return the parameter or buffer of the user's model with this name. Looked up at each use, since
        weights may be replaced."""
        return operator.attrgetter(path)(self._model[0])

    def vocab_shards(self, size: int) -> VocabShards:
        """Return the shards of a vocabulary of `size` tokens on the replica's ranks."""
        from secc.runtime.tensor_parallel.vocab_parallel_ops import (
            VocabShards,  # brings the kernels, which few sections need
        )

        return VocabShards(size, self.group)

    def function(self, name: str) -> UserFunctionCall:
        """Return the user's `torch.autograd.Function` of this name as a callable."""
        return UserFunction.parse(name).bind_to_model(self._model[0])

    def draw(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a random op of the glue under the name that it has in the user's forward."""
        if self.draws is None:
            return function(*args, **kwargs)
        return self.draws.draw_named(name, function, *args, **kwargs)

    def statistic(self, own: torch.Tensor, name: str, samples: int) -> torch.Tensor:
        """Return the statistic `name` of the global batch, `own` being the sum of a micro-batch of
        `samples`; `own` where none is known yet."""
        known = self.statistics.get(name)
        return known.read(own, samples) if isinstance(known, BatchStatistic) else own

    def gathered(self, own: torch.Tensor, name: str) -> torch.Tensor:
        """Return the rows `name` of all samples of the global batch, `own` being those of the micro-batch;
        zeros for the others where none are known yet."""
        assert self.places is not None
        known = self.statistics.get(name)
        if isinstance(known, BatchRows):
            return known.read(own, self.places.places.to(own.device))
        return self.places.place_rows(own)

    def sample_count(self) -> int:
        """Return the number of samples of the running micro-batch."""
        assert self.places is not None
        return len(self.places.places)

    def batch_samples(self) -> int:
        """Return the number of samples of the global batch."""
        assert self.places is not None
        return self.places.samples

    def at_call_site(self, site: str, call: int = 0, calls: int = 1) -> AbstractContextManager[None]:
        """Give random ops of blocks that are called inside the source lines `site` of the user's forward, in
        the call with this number of `calls` by the same lines; other sections may do the others."""
        return nullcontext() if self.draws is None else self.draws.at_call_site(site, call, calls)

    def with_settings(self, module: nn.Module, *settings: ModuleSetting) -> AbstractContextManager[None]:
        """Set attributes of the block's modules, as the user's forward had set them for this call, and
        restore them at the end."""
        return apply_settings(module, *settings)

    def rerecorded_tensor(self, batch: Batch, label: str, *sources: torch.Tensor) -> torch.Tensor:
        """Compute a tensor that glue makes for a block, with the ops that were recorded for this micro-batch.
        `sources` are the tensors that the plan passes for it."""
        return batch[RECORDING_KEY].run(self, batch, label, sources)

    def select_case(self, batch: Batch) -> SectionCase:
        """Return the case for a micro-batch.

        Raises UserError, with the pattern and guards, if no capture took this path and no recording of the
        micro-batch matches a case.
        """
        case, failed_guards = self._find_compiled_case(batch)
        if case is None and RECORDING_KEY in batch:
            planned = batch[RECORDING_KEY].case
            case = next((c for c in self._cases_of_pattern(batch) if planned in c.recorded_cases), None)
        if case is not None:
            return case
        pattern = sorted(self.optional & batch.keys()) or "no optional inputs"
        reason = "the pattern was not captured"
        if failed_guards:
            reason = f"guards {', '.join(sorted(set(failed_guards)))} have values no capture saw"
        raise UserError(
            f"section {self.name} was not compiled for a micro-batch with {pattern}: {reason}",
            remedy="let dataset() show such samples earlier, or compile again with more --stats-samples",
        )

    def cases_to_rerecord(self, batch: Batch) -> list[SectionCase]:
        """Return the cases with glue to record for this micro-batch; none if a compiled case fits."""
        if self._find_compiled_case(batch)[0] is not None:
            return []
        return [c for c in self._cases_of_pattern(batch) if c.recorded_cases]

    def _cases_of_pattern(self, batch: Batch) -> list[SectionCase]:
        pattern = self.optional & batch.keys()
        return [c for c in self.cases if c.when == pattern]

    def _find_compiled_case(self, batch: Batch) -> tuple[SectionCase | None, list[str]]:
        """Return the case without recorded glue for a micro-batch, and the guards that exclude the other
        cases."""
        failed_guards: list[str] = []
        for case in self._cases_of_pattern(batch):
            failed = [g for g, value in case.guards.items() if getattr(self, g)(batch) != value]
            if not failed and not case.recorded_cases:
                return case, []
            failed_guards += failed
        return None, failed_guards

    def forward(
        self, case: SectionCase, batch: Batch, edges: Tensors, evaluates: bool, row_ranks: int = 1
    ) -> tuple[Tensors, Tensors]:
        """Run one micro-batch, on this rank's rows of its sequences where `row_ranks` ranks share them.
        Returns the tensors of outgoing edges by name, and the numerators of loss terms (0-dim) by name; if it
        `evaluates`, also the tensors that `metrics()` asks for, their names prefixed."""
        method = getattr(self, case.method)

        def compute(batch: Batch, edges: Tensors) -> tuple[Tensors, Tensors]:
            sends, terms = method(batch, edges)
            return sends, {
                n: t for n, t in terms.items() if evaluates or not n.startswith(schema.OUTPUT_PREFIX)
            }

        try:
            with forward_hooks.without_user_hooks(self.children()):
                if row_ranks == 1:
                    return compute(batch, edges)
                mode = RowMode(self.row_groups[row_ranks], self.row_attention)
                return mode.run_section(compute, batch, edges)
        except RuntimeError as error:
            if not re.search(r"\bmeta\b", str(error)):
                raise
            # Parameters of other ranks are on the meta device.
            message = f"section {self.name} asks for a parameter that is on another rank ({error})"
            remedy = (
                "take device, dtype and values from inputs or from the module's own parameters, or name a "
                "section with both (--section NAME=a+b)"
            )
            raise UserError(message, error_source_line(error), remedy) from error


def load_section_module(directory: Path, planned: schema.Section, model: nn.Module) -> SectionModule:
    """Import the generated module of a section in the plan `directory` and make the section on `model`. The
    module is executed at each call, so that plans with sections of one name can be loaded one after another.
    """
    module = load_plan_module(directory / planned.module)
    cls = next(
        c
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, SectionModule) and c.name == planned.name
    )
    section = cls(model)
    section.row_attention = planned.row_attention
    return section


def load_plan_module(path: Path) -> ModuleType:
    """Execute a Python file of a plan directory as a module and return it."""
    name = f"secc_plan_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
