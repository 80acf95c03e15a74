"""Finds modules with parameters that other code reads: a head written as `linear(x, self.embedding.weight)`,
position embeddings taken as `self.positions.weight[:length]`.

Under tensor parallelism a rank has rows of an embedding. The module's own forward is changed to work on them;
code that reads the parameter itself would compute from a part. So blocks run without values, and every
operation is looked at that takes such a parameter while its module's forward is not running.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from secc.cost.counting.example_arguments import NO_SAMPLES, CallExamples, CollatedSamples
from secc.frontend.tp_search.call_collector import example_sizes, run_call_on_meta
from secc.ir.dialect.ops import CallOp, GraphOp

# What is the same of a part and of the whole.
_PROPERTIES = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("dtype", "device", "requires_grad", "is_meta", "is_cuda", "is_leaf", "layout", "grad_fn")
)


RunModel = Callable[[Callable[[ExitStack], None]], None]  # runs a whole model with weights, being watched


def find_direct_reads(
    graph: GraphOp,
    meta: nn.Module,
    block: str,
    paths: list[str],
    samples: CollatedSamples = NO_SAMPLES,
    whole: tuple[nn.Module, RunModel] | None = None,
) -> set[str]:
    """Returns those of the modules at `paths`, inside of `block`, that other code of the block reads
    parameters of; all of them if the block runs in no way.

    meta: the user's model without weights. samples: integers for blocks that read some. whole: the model with
    weights, if it fits on this machine, for blocks that do not run without.
    """
    paths = [path for path in paths if path != block]
    if not paths:
        return set()
    reads = _ReadObserver({path: meta.get_submodule(path) for path in paths})
    sizes, examples = example_sizes(graph), CallExamples(graph, samples)
    watch = partial(reads.watch_block, meta.get_submodule(block))
    calls = [
        (c, op) for c in graph.cases for op in c.ops if isinstance(op, CallOp) and op.target.data == block
    ]
    if all(
        any(
            run_call_on_meta(op, meta, sizes, example, watch)
            for example in chain([None], islice(examples.examples_of_call(case, op), 1))
        )
        for case, op in calls
    ):
        return reads.found
    if whole is None:
        return set(paths)
    model, run = whole
    reads = _ReadObserver({path: model.get_submodule(path) for path in paths})
    run(partial(reads.watch_block, model.get_submodule(block)))
    return reads.found


class _ReadObserver(TorchFunctionMode):
    """Notes the modules with parameters that operations take outside of the modules' forwards; a parameter
    that modules share may be read in the forward of any of them."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._modules = modules
        self._running: list[str] = []
        self._owners: dict[int, set[str]] = {}  # paths by the parameter's id, while the block runs

    def watch_block(self, block: nn.Module, stack: ExitStack) -> None:
        """Watches calls of a block until the stack is closed."""
        self._running.clear()
        hooks = [(block, self._enter_block, self._leave_block)] + [
            (m, partial(self._enter, path), partial(self._leave, path)) for path, m in self._modules.items()
        ]
        for module, enter, leave in hooks:
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        stack.callback(self._owners.clear)
        stack.enter_context(self)

    def _enter_block(self, *_: Any) -> None:
        for path, module in self._modules.items():
            for parameter in module.parameters():
                self._owners.setdefault(id(parameter), set()).add(path)

    def _leave_block(self, *_: Any) -> None:
        self._owners.clear()

    def _enter(self, path: str, *_: Any) -> None:
        self._running.append(path)

    def _leave(self, path: str, *_: Any) -> None:
        self._running.remove(path)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._owners and func not in _PROPERTIES:
            for value in tree_leaves((args, kwargs)):
                owners = self._owners.get(id(value), set[str]()) if isinstance(value, torch.Tensor) else ()
                if owners and owners.isdisjoint(self._running):
                    self.found |= owners
        return func(*args, **kwargs)
