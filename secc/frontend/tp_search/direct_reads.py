"""Finds modules that work on parts of what other code sees: parameters that it reads, and results of modules
inside of them that it takes. Parameters: a head written as `linear(x, self.embedding.weight)`,
position embeddings taken as `self.positions.weight[:length]`.

Under tensor parallelism a rank has rows of an embedding. The module's own forward is changed to work on them;
code that reads the parameter itself would compute from a part. So blocks run without values, and every
operation is looked at that takes such a parameter while its module's forward is not running.

Results: attention weights that transformers collects from within layers (`output_attentions`). A layer is
shown to be exact by what it returns; what leaves the block past it has the heads of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
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
from secc.runtime.recorder.nested_values import iter_tensors

# What is the same of a part and of the whole.
_PROPERTIES = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("dtype", "device", "requires_grad", "is_meta", "is_cuda", "is_leaf", "layout", "grad_fn")
)


@dataclass(frozen=True)
class SeenByOthers:
    """The modules, by path, with parameters that other code reads (`read`), and with results from inside that
    leave the block past them (`taken`)."""

    read: set[str] = field(default_factory=set[str])
    taken: set[str] = field(default_factory=set[str])


RunModel = Callable[[Callable[[ExitStack], None]], None]  # runs a whole model with weights, being watched


def find_direct_reads(
    graph: GraphOp,
    meta: nn.Module,
    block: str,
    cuts: Mapping[str, Collection[str]],
    samples: CollatedSamples = NO_SAMPLES,
    whole: tuple[nn.Module, RunModel] | None = None,
) -> SeenByOthers:
    """Returns those of the modules with `cuts`, inside of `block`, that other code of the block reads
    parameters of, or takes results from inside of; if the block runs in no way, all of them as read.

    cuts: the names of the parameters that ranks have parts of, within the module, by the module's path.
    meta: the user's model without weights. samples: integers for blocks that read some. whole: the model with
    weights, if it fits on this machine, for blocks that do not run without.
    """
    cuts = {path: names for path, names in cuts.items() if path != block}
    if not cuts:
        return SeenByOthers()
    reads = _ReadObserver({path: meta.get_submodule(path) for path in cuts}, cuts)
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
        return SeenByOthers(read=set(cuts))
    model, run = whole
    reads = _ReadObserver({path: model.get_submodule(path) for path in cuts}, cuts)
    run(partial(reads.watch_block, model.get_submodule(block)))
    return reads.found


class _ReadObserver(TorchFunctionMode):
    """Notes the modules with parameters that operations take outside of the modules' forwards; a parameter
    that modules share may be read in the forward of any of them. Notes also those with a result of a part
    with cut parameters that the block returns and they do not."""

    def __init__(self, modules: Mapping[str, nn.Module], cuts: Mapping[str, Collection[str]]) -> None:
        super().__init__()
        self.found = SeenByOthers()
        self._modules, self._cuts = modules, cuts
        # Tensors that submodules of `modules` returned, by id: the tensor, and the path of the module that
        # tp divides it with, "" if every rank has all of it.
        self._inner: dict[int, tuple[torch.Tensor, str]] = {}
        self._running: list[str] = []
        self._owners: dict[int, set[str]] = {}  # paths by the parameter's id, while the block runs

    def watch_block(self, block: nn.Module, stack: ExitStack) -> None:
        """Watches calls of a block until the stack is closed."""
        self._running.clear()
        hooks = [(block, self._enter_block, self._leave_block)] + [
            (m, partial(self._enter, path), partial(self._leave, path)) for path, m in self._modules.items()
        ]
        for path, module in self._modules.items():
            for name, part in module.named_modules():
                if name:
                    in_parts = any(cut.startswith(f"{name}.") for cut in self._cuts[path])
                    note = partial(self._note_results, path if in_parts else "")
                    stack.callback(part.register_forward_hook(note).remove)
        for module, enter, leave in hooks:
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        stack.callback(self._inner.clear)
        stack.callback(self._owners.clear)
        stack.enter_context(self)

    def _enter_block(self, *_: Any) -> None:
        for path, module in self._modules.items():
            for parameter in module.parameters():
                self._owners.setdefault(id(parameter), set()).add(path)

    def _leave_block(self, _module: nn.Module, _args: Any, out: Any) -> None:
        for _, tensor in iter_tensors(out):
            _, path = self._inner.get(id(tensor), (None, ""))
            self.found.taken.update({path} if path else ())
        self._owners.clear()
        self._inner.clear()

    def _note_results(self, path: str, _module: nn.Module, _args: Any, out: Any) -> None:
        for _, tensor in iter_tensors(out):
            self._inner.setdefault(id(tensor), (tensor, path))

    def _enter(self, path: str, *_: Any) -> None:
        self._running.append(path)

    def _leave(self, path: str, _module: nn.Module, _args: Any, out: Any) -> None:
        for _, tensor in iter_tensors(out):
            self._inner[id(tensor)] = tensor, ""  # shown to be exact, with the module
        self._running.remove(path)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._owners and func not in _PROPERTIES:
            for value in tree_leaves((args, kwargs)):
                owners = self._owners.get(id(value), set[str]()) if isinstance(value, torch.Tensor) else ()
                if owners and owners.isdisjoint(self._running):
                    self.found.read.update(owners)
        return func(*args, **kwargs)
