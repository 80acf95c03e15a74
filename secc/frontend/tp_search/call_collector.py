"""Collects the arguments that modules of a model are called with, which layouts are searched and verified
with.

A model that fits on this machine is run on a small batch, and its arguments are used as they are. Of a
larger model each block runs on the meta device, or, if it reads integers (where samples begin), on fake
tensors with the integers of a real sample. Then its arguments get random values: any floats will do, but
integers and booleans only if the code does not depend on them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from secc.cost.counting.annotate_calls import meta_arguments
from secc.cost.counting.example_arguments import NO_SAMPLES, CallExample, CallExamples, CollatedSamples
from secc.cost.counting.meta_run import ValuelessTensors, run_on_meta
from secc.errors import NotEnoughMemory
from secc.frontend.dataset.survey import DatasetSurvey
from secc.frontend.tp_search.find_mapping import ModuleCall
from secc.ir.dialect.ops import CallOp, GraphOp
from secc.runtime.model.dataclass_args import cache_layer, is_empty_cache
from secc.runtime.model.module_copies import copy_module
from secc.runtime.model.user_file import UserModel
from secc.runtime.training.eager_watch import run_forward
from secc.runtime.training.widened_floats import widen_batch, widened_floats

EXAMPLE_ROWS, EXAMPLE_WIDTH = 2, 8  # sizes of what is made up


class CallCollector:
    """Collects the first call of each of some modules."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules, self.calls = modules, dict[str, ModuleCall]()

    def run_model(self, model: nn.Module, user: UserModel, survey: DatasetSurvey) -> None:
        """Runs the model on a small batch of each pattern until every module was called. Arguments are in
        float32 where the model has 16 bits, since mappings are verified in wide floats."""
        run_on_small_batches(
            model,
            user,
            survey,
            lambda stack: self._watch_modules(stack, model, self.modules),
            lambda: self.calls.keys() >= self.modules.keys(),
        )

    def run_blocks_on_meta(
        self, graph: GraphOp, model: nn.Module, samples: CollatedSamples = NO_SAMPLES
    ) -> None:
        """Runs each block without values, if its code allows that, until the modules inside it were
        called."""
        sizes = example_sizes(graph)
        shortest = sorted(samples.batches, key=_batch_entries)
        examples = CallExamples(graph, CollatedSamples(shortest, samples.constants))
        for case in graph.cases:
            for op in (op for op in case.ops if isinstance(op, CallOp)):
                for example in chain([None], islice(examples.examples_of_call(case, op), 1)):
                    inside = {
                        p: m
                        for p, m in self.modules.items()
                        if p not in self.calls and f"{p}.".startswith(f"{op.target.data}.")
                    }
                    if not inside:
                        break
                    self._run_block(op, model, sizes, inside, example)

    def share_calls(self, equals: Mapping[str, str]) -> None:
        """Gives modules the calls of equal ones. `equals` has the path of the equal module for each path."""
        self.calls |= {path: self.calls[other] for path, other in equals.items() if other in self.calls}

    def _run_block(
        self,
        op: CallOp,
        model: nn.Module,
        sizes: Mapping[str, int],
        inside: Mapping[str, nn.Module],
        example: CallExample | None,
    ) -> None:
        """Runs one block; its calls count if the last of the modules was called."""
        seen = CallCollector(inside)
        if run_call_on_meta(
            op, model, sizes, example, lambda stack: seen._watch_modules(stack, model, inside, _AllCalled)
        ):
            self.calls |= seen.calls

    def _watch_modules(
        self,
        stack: ExitStack,
        model: nn.Module,
        wanted: Mapping[str, nn.Module],
        done: type[BaseException] | None = None,
    ) -> None:
        """Records calls. `done` is raised after the last module's call, which shows that its code ran
        through."""
        for path in wanted:
            module = model.get_submodule(path)
            hook = module.register_forward_pre_hook(
                lambda module, args, kwargs, path=path: self._record_call(path, module, (args, kwargs)),
                with_kwargs=True,
            )
            stack.callback(hook.remove)
            if done is not None:
                stack.callback(module.register_forward_hook(lambda *_: self._stop_if_complete(done)).remove)

    def _stop_if_complete(self, done: type[BaseException]) -> None:
        if self.calls.keys() >= self.modules.keys():
            raise done

    def _record_call(self, path: str, module: nn.Module, call: ModuleCall) -> None:
        if path in self.calls:
            return
        fake = any(isinstance(t, FakeTensor) for t in tree_leaves(call))
        layer = cache_layer(module)

        def is_unread(value: Any) -> bool:
            """Whether a value is a cache of keys that a layer writes into, which a second run would read."""
            return is_empty_cache(value, layer)

        self.calls[path] = tree_map(
            lambda value: None if is_unread(value) else _copy_argument(value, bare=fake),
            call,
            is_leaf=is_unread,
        )


def run_on_small_batches(
    model: nn.Module,
    user: UserModel,
    survey: DatasetSurvey,
    watch: Callable[[ExitStack], None],
    is_done: Callable[[], bool] = lambda: False,
) -> None:
    """Runs the model on a small batch of each pattern until `is_done`, in float32 where it has 16 bits.
    watch: enters what observes a run."""
    for pattern in survey.micro_batch_patterns():
        if is_done():
            return
        with ExitStack() as stack:
            watch(stack)
            stack.enter_context(widened_floats(model, torch.float32))
            batch = min(map(user.collate, survey.compose_batches(pattern)), key=_batch_entries)
            with suppress(NotEnoughMemory):  # of scores for words, often: layers have been called then
                run_forward(model, widen_batch(batch, torch.float32))


def example_sizes(graph: GraphOp) -> dict[str, int]:
    """Returns a made-up value for each size of a graph."""
    return {
        name: EXAMPLE_WIDTH if s.kind.data == "width" else EXAMPLE_ROWS for name, s in graph.symbols.items()
    }


def run_call_on_meta(
    op: CallOp,
    model: nn.Module,
    sizes: Mapping[str, int],
    example: CallExample | None,
    watch: Callable[[ExitStack], None],
) -> bool:
    """Runs a call's block without values, at `sizes` or on an example's integers; returns whether its code
    allowed that. watch: enters what observes the run."""
    known = partial(meta_arguments, op, sizes)
    if example is not None:
        known = partial(meta_arguments, op, example.sizes, values=example.values)
    block, tensors = model.get_submodule(op.target.data), ValuelessTensors(fake=example is not None)
    with ExitStack() as stack:
        watch(stack)
        try:
            run_on_meta(block, known, op.no_grad is None, tensors=tensors)
        except _AllCalled:
            pass
        except Exception:  # whatever the user's code does on tensors without values
            return False
    return True


def _batch_entries(batch: Mapping[str, Any]) -> int:
    """Returns the number of entries of a collated batch."""
    return sum(t.numel() for t in batch.values() if isinstance(t, torch.Tensor))


class _AllCalled(BaseException):
    """Raised when every module was called."""


def _copy_argument(value: Any, bare: bool) -> Any:
    """Copies an argument. Floats keep whether gradients flow to them, and no values if `bare`."""
    if not isinstance(value, torch.Tensor):
        return copy_object(value)
    if isinstance(value, FakeTensor) or (bare and value.is_floating_point()):
        empty = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        return empty.requires_grad_(value.requires_grad)
    return value.detach().clone().requires_grad_(value.requires_grad)


def copy_object(value: Any) -> Any:
    """Copies an object that the call may change (a cache of keys), where it can be copied."""
    try:
        return copy.deepcopy(value)
    except Exception:  # whatever the user passes
        return value


def materialize_argument(value: Any) -> Any:
    """Returns an argument with random values, if it has none."""
    if not isinstance(value, torch.Tensor) or not value.is_meta:
        return value
    generator = torch.Generator().manual_seed(value.numel())
    if value.is_floating_point():
        return (
            torch.randn(value.shape, generator=generator).to(value.dtype).requires_grad_(value.requires_grad)
        )
    return (
        torch.ones(value.shape, dtype=value.dtype)
        if value.dtype == torch.bool
        else torch.zeros(value.shape, dtype=value.dtype)
    )


def materialize_module(module: nn.Module) -> nn.Module:
    """Returns a copy of a module on the CPU, with random values for parameters and buffers that have none."""
    materialized = copy_module(module)
    generator = torch.Generator().manual_seed(0)
    for owner in materialized.modules():
        for key, p in list(owner.named_parameters(recurse=False)):
            if p.is_meta:
                values = torch.randn(p.shape, generator=generator) * (p.shape[-1] if p.ndim else 1) ** -0.5
                setattr(owner, key, nn.Parameter(values, requires_grad=p.requires_grad))
        for key, b in list(owner.named_buffers(recurse=False)):
            if b.is_meta:
                setattr(owner, key, materialize_argument(b))
    return materialized
