"""Runs a model with the first layer of each kind of every stack; all other layers pass their input on.

The model is built without values, and only what runs gets any: parameters outside of stacks at once, those of
a layer when it is called and no layer of its stack has done the same before in this forward
(`secc.frontend.excerpt.call_kinds`). Other layers return their activations as they came, in the form in which
the layer of their kind returned its results. Large tables take no memory
(`secc.frontend.excerpt.row_tables`). Parameters of more than a few million entries get no gradients, which
would double their memory; a fault that reaches theirs reaches those of small parameters next to them.

What holds for every layer of a kind, whatever hidden states come in, holds for the whole model if it holds
for the excerpt. So a test has to look at what each layer returns: an effect that moves a few positions with
every layer may reach the loss in a deep model only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils._pytree import tree_leaves

from secc.frontend.excerpt.call_kinds import CallKind, CallKinds
from secc.frontend.excerpt.limits import ExcerptBudget, ExcerptLimits
from secc.frontend.excerpt.row_tables import RowTable, RowTables, make_table_parameter, storage_address
from secc.runtime.model.dataclass_args import cache_layer, is_empty_cache
from secc.runtime.model.meta_build import build_meta_model
from secc.runtime.model.module_copies import copy_module
from secc.runtime.model.user_file import UserModel
from secc.runtime.randomness.micro_batch_draws import MicroBatchDraws
from secc.runtime.recorder.nested_values import iter_tensors, map_leaves
from secc.runtime.sections.recompute import find_layer_stacks
from secc.runtime.training.eager_reference import LossAndGradients, run_eager
from secc.runtime.training.widened_floats import widen_batch, widened_floats

MAX_TRAINED_ENTRIES = 1 << 22  # of a parameter that gets gradients
_TABLE_ROWS = 1 << 14  # a parameter [V, H] of at least as many rows, and more entries than that, is a table
_LARGEST_SENSIBLE = 1e4  # among values that model() computed; memory that was never written has any
_FILLED_AT_ONCE = (1 << 20) - 3  # random numbers that repeat in a large parameter; prime, so that rows differ


@dataclass(frozen=True)
class LayerResults:
    """The path of a layer that ran, and the floating-point tensors that it returned."""

    path: str
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class ExcerptResult:
    """Loss and gradients of an excerpt, and what its layers returned, in the order of their calls."""

    outcome: LossAndGradients
    layers: tuple[LayerResults, ...]


class ModelExcerpt:
    """An excerpt of the user's model with random weights in float32."""

    def __init__(self, user: UserModel, tokens: Iterable[int], limits: ExcerptLimits) -> None:
        """tokens: numbers that the batches hold; tables have values in these rows. Raises CannotRunExcerpt
        where the excerpt takes more than the limits."""
        self.model = build_meta_model(user, tables=True)
        self._budget = ExcerptBudget(limits)
        self._tables: dict[nn.Parameter, RowTable] = {}
        self._tokens = sorted(set(tokens))
        self._filled: dict[nn.Parameter, nn.Parameter] = {}  # by the parameter that it replaces
        stacks = list(find_layer_stacks(self.model))
        names = {module: name for name, module in self.model.named_modules()}
        self._layers = {
            layer: _Layer(names[layer], names[stack], _copy_without_values(layer))
            for stack in stacks
            for layer in stack.children()
        }
        in_layers = {m for layer in self._layers for m in layer.modules()}
        outside = (m for m in self.model.modules() if m not in in_layers)
        self._fill([p for m in outside for p in m.parameters(recurse=False)], may_be_tables=True)
        self._ran: set[str] = set()

    @property
    def layer_counts(self) -> tuple[int, int]:
        """How many layers ran so far, and how many there are."""
        return len(self._ran), len(self._layers)

    def run(self, batch: Mapping[str, Any], draws: MicroBatchDraws | None = None) -> ExcerptResult:
        """Runs forward and backward on a batch, with the random numbers `draws`. Raises CannotRunExcerpt
        where the excerpt cannot stand for the model, and whatever the user's code raises."""
        run = _ExcerptRun(self._layers, self._fill_layer, self._budget)
        with (
            widened_floats(self.model, torch.float32),
            run.replaced_forwards(),
            RowTables(self._tables),
            run.activations,  # last, as it has to see ops on tables
        ):
            run.activations.mark_tensors(self.model.parameters())
            outcome = run_eager(self.model, widen_batch(batch, torch.float32), draws)
        self._ran |= {found.path for found in run.returned}
        return ExcerptResult(outcome, tuple(run.returned))

    def _fill_layer(self, layer: nn.Module) -> list[nn.Parameter]:
        """Gives the parameters of a layer values, and returns them."""
        with _disable_current_modes():  # of the run, which gives samples their own random numbers
            self._fill(list(layer.parameters()))
        return list(layer.parameters())

    def _fill(self, parameters: Iterable[nn.Parameter], may_be_tables: bool = False) -> None:
        known = set(self._filled.values())
        missing = [p for p in parameters if p not in known]
        for old in missing:
            if may_be_tables and _is_table(old):
                self._filled[old] = table = make_table_parameter(old.shape)
                self._tables[table] = RowTable(len(old), old.shape[1], self._tokens)
                continue
            self._budget.take_memory(4 * old.numel())
            trains = old.requires_grad and old.numel() <= MAX_TRAINED_ENTRIES
            values = _random_values(old.detach(), seed=len(self._filled))
            self._filled[old] = nn.Parameter(values, requires_grad=trains)
        for module in self.model.modules() if missing else ():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter in self._filled:
                    module.register_parameter(name, self._filled[parameter])


@dataclass(frozen=True)
class _Layer:
    """A layer of a stack: their paths, and a copy of the layer with all parameters on the meta device."""

    path: str
    stack: str
    twin: nn.Module


@dataclass(frozen=True)
class _KnownCall:
    """A call that ran: what it returned, and the arguments (access paths) that other calls of its kind return
    in place of tensors of that."""

    out: Any
    passed_on: Mapping[str, str]


class _ExcerptRun:
    """One forward and backward of an excerpt."""

    def __init__(
        self,
        layers: Mapping[nn.Module, _Layer],
        fill: Callable[[nn.Module], list[nn.Parameter]],
        budget: ExcerptBudget,
    ) -> None:
        self._layers, self._fill, self._budget = layers, fill, budget
        self._known: dict[tuple[str, CallKind], _KnownCall] = {}
        self.activations = ActivationMarks()
        self._kinds = CallKinds(self.activations.is_marked)
        self.returned: list[LayerResults] = []

    @contextmanager
    def replaced_forwards(self) -> Iterator[None]:
        """Context in which layers run, or pass their input on."""
        own = {layer: vars(layer)["forward"] for layer in self._layers if "forward" in vars(layer)}
        try:
            for layer, described in self._layers.items():
                layer.forward = self._make_forward(layer, described, layer.forward)
            yield
        finally:
            for layer in self._layers:
                del layer.forward
                if layer in own:
                    layer.forward = own[layer]

    def _make_forward(
        self, layer: nn.Module, described: _Layer, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        number = cache_layer(layer)

        def forward(*args: Any, **kwargs: Any) -> Any:
            # A cache to be filled makes no difference in training, and a call that fills it is of no kind.
            args, kwargs = map_leaves(
                (args, kwargs), lambda _, leaf: None if is_empty_cache(leaf, number) else leaf
            )
            arguments = (args, kwargs)
            kind = self._kinds.describe_call(described.twin, args, kwargs)
            known = self._known.get((described.stack, kind)) if kind is not None else None
            if known is not None:
                given = dict(iter_tensors(arguments))
                return map_leaves(
                    known.out,
                    lambda path, leaf: given[known.passed_on[path]] if path in known.passed_on else leaf,
                )
            taken = [(path, t) for path, t in iter_tensors(arguments) if self._is_activation(t)]
            rows = max((t.numel() // t.shape[-1] for _, t in taken if t.ndim), default=1)
            self._budget.expect_flops(2.0 * rows * sum(p.numel() for p in layer.parameters()))
            self.activations.mark_tensors(self._fill(layer))
            out = original(*args, **kwargs)
            passed_on = _pair_activations(taken, out)
            if kind is not None and passed_on:
                self._known[described.stack, kind] = _KnownCall(out, passed_on)
            tensors = [t.detach().clone() for _, t in iter_tensors(out) if t.is_floating_point()]
            self.returned.append(LayerResults(described.path, tuple(tensors)))
            return out

        return forward

    def _is_activation(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point() and self.activations.is_marked(tensor)


def _pair_activations(taken: list[tuple[str, torch.Tensor]], out: Any) -> dict[str, str]:
    """Returns for access paths of results those of the arguments of the same shape and dtype that stand for
    them, each once and in their order."""
    left, pairs = list(taken), dict[str, str]()
    for path, result in iter_tensors(out):
        for i, (argument, tensor) in enumerate(left):
            if tensor.shape == result.shape and tensor.dtype == result.dtype:
                pairs[path] = argument
                del left[i]
                break
    return pairs


class ActivationMarks(TorchDispatchMode):
    """Marks the tensors of a run that depend on parameters, by their storages."""

    def __init__(self) -> None:
        super().__init__()
        # A weak reference keeps the address of a storage from being used again, not its memory.
        self._storages: dict[int, StorageWeakRef] = {}

    def is_marked(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor depend on parameters."""
        return storage_address(tensor) in self._storages

    def mark_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Marks tensors, and what will be computed from them."""
        for tensor in tensors:
            key = storage_address(tensor)
            if key not in self._storages:
                self._storages[key] = StorageWeakRef(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(isinstance(t, torch.Tensor) and self.is_marked(t) for t in tree_leaves((args, kwargs))):
            self.mark_tensors(t for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        return out


def _is_table(parameter: torch.Tensor) -> bool:
    is_large = parameter.numel() > MAX_TRAINED_ENTRIES
    return parameter.ndim == 2 and len(parameter) >= _TABLE_ROWS and is_large


def _copy_without_values(layer: nn.Module) -> nn.Module:
    """Returns a copy of a layer with all parameters on the meta device, in float32 if in 16 bits. Buffers and
    configurations are shared with the layer."""
    memo: dict[int, Any] = {id(b): b for b in layer.buffers()}
    for p in layer.parameters():
        dtype = torch.float32 if p.is_floating_point() and p.element_size() < 4 else p.dtype
        empty = torch.empty_strided(p.shape, p.stride(), dtype=dtype, device="meta")
        memo[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    for module in layer.modules():
        if (config := getattr(module, "config", None)) is not None:
            memo[id(config)] = config
    return copy_module(layer, memo)


def _random_values(old: torch.Tensor, seed: int) -> torch.Tensor:
    """Returns random values for a parameter. Vectors keep values that model() computed: constants with some
    noise, others as they are, unless they are no sensible numbers."""
    generator = torch.Generator().manual_seed(seed)
    if old.ndim < 2 and not old.is_meta:
        values = old.float()
        is_constant = values.numel() == 0 or bool((values == values.flatten()[0]).all())
        if bool(values.isfinite().all()) and (is_constant or float(values.abs().max()) < _LARGEST_SENSIBLE):
            noise = torch.rand(old.shape, generator=generator) / 4
            return values + noise if is_constant else values
    scale = (old.shape[-1] if old.ndim > 1 else 1) ** -0.5
    count = min(old.numel(), _FILLED_AT_ONCE)
    numbers = torch.randn(count, generator=generator) * scale
    if count == old.numel():
        return numbers.view(old.shape)
    values = torch.empty(old.numel())
    whole = old.numel() // count * count
    values[:whole].view(-1, count).copy_(numbers)
    values[whole:] = numbers[: old.numel() - whole]
    return values.view(old.shape)
