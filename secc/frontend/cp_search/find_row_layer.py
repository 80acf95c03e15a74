"""Shows whether a layer works on rows of its sequence.

Ranks are threads of one process. The rules of `secc.runtime.context_parallel` give right results for all
code that they see, but a function without a rule makes every rank do all the work. Where such a function lies
in a submodule, the submodule is run on rows by itself, which is right if it treats every row alike (experts,
a user's own autograd function). Results and gradients of inputs and parameters decide. A layer that needs
whole sequences otherwise (convolutions over time, state spaces) stays whole, with the function's name as
reason. Of frames that are entries of a batch, a layer with code that has no rules may compute a rank's by
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from secc.frontend.tp_search.find_mapping import ModuleCall, failure_reason
from secc.frontend.tp_search.thread_ranks import ThreadGroup, run_thread_ranks
from secc.frontend.tp_search.verify_mapping import (
    ModuleRun,
    UnsplitModule,
    compare_summed_gradients,
    cotangents,
    prepare_argument,
    reproducible_draws,
)
from secc.runtime.context_parallel import row_exchange
from secc.runtime.context_parallel.row_marks import mark_of
from secc.runtime.context_parallel.row_mode import RowMode, find_batched_state, split_first_input
from secc.runtime.context_parallel.row_rules import RowsNotWritable
from secc.runtime.model.module_copies import copy_module
from secc.runtime.plan.unsplit_reason import UnsplitKind, UnsplitReason
from secc.runtime.sections.recompute import without_cache
from secc.runtime.sections.row_layers import wrap_row_modules

MOST_ROUNDS = 3  # of running submodules by themselves


@dataclass(frozen=True)
class RowLayer:
    """Whether a layer works on rows. reason: None if it does. row_modules: the submodules that run on rows by
    themselves; "" is the layer."""

    reason: UnsplitReason | None
    row_modules: tuple[str, ...] = ()


@dataclass
class _RowRun:
    """A layer on one rank's rows: its results, the functions that got gathered tensors as (module path,
    name), and whether anything was in rows."""

    run: ModuleRun
    gathered: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    split: bool = False


def find_row_layer(
    layer: nn.Module,
    call: ModuleCall,
    count: int,
    fuse: Callable[[nn.Module], None] = lambda module: None,
    by_themselves: Sequence[str] = (),
    attention: str = "gather",
) -> RowLayer:
    """Runs a layer on the rows of `count` ranks and compares with one rank.

    fuse: installs fused operators in a rank's module. by_themselves: submodules that have to run on rows by
    themselves, since ranks replace their code (experts that are divided). attention: how ranks attend to each
    other's rows.
    """
    call = call[0], without_cache(layer, call[1])
    whole_frames = attention == "frames"
    if whole_frames and not _has_several_entries(call):
        return RowLayer(UnsplitReason(UnsplitKind.NO_ROWS))
    whole, row_modules, mixing = UnsplitModule(layer, call), tuple(by_themselves), ""
    state = torch.random.get_rng_state()
    try:
        for _ in range(MOST_ROUNDS):
            reference, expected = whole.reference()
            ranks = run_thread_ranks(count, partial(_run_rank, reference, call, row_modules, fuse, attention))
            if not ranks[0].split:
                return RowLayer(UnsplitReason(UnsplitKind.NO_ROWS))
            gathered = ranks[0].gathered
            if not gathered:
                reason = compare_summed_gradients(expected, [r.run for r in ranks])
                return RowLayer(_mixing_reason(mixing) if reason and mixing else reason, row_modules)
            mixing = mixing or gathered[0][1]
            inside = {path for path, _ in gathered}
            if whole_frames and not row_modules:
                row_modules = ("",)
            elif "" not in inside and not inside & {*row_modules}:
                row_modules = (*row_modules, *sorted(inside))
            else:
                break
        return RowLayer(_mixing_reason(mixing))
    except RowsNotWritable as error:
        return RowLayer(UnsplitReason(UnsplitKind.WRITES_INTO_ROWS, str(error)))
    except Exception as error:  # whatever the user's code does on rows
        return RowLayer(_mixing_reason(mixing) if mixing else failure_reason(error))
    finally:
        torch.random.set_rng_state(state)


def _has_several_entries(call: ModuleCall) -> bool:
    """Whether a layer is called with hidden states of more than one entry: only then can it mix them."""
    hidden = find_batched_state(*call)[1]
    return hidden is not None and hidden.shape[0] > 1


def _mixing_reason(function: str) -> UnsplitReason:
    return UnsplitReason(UnsplitKind.MIXES_ROWS, function)


def _run_rank(
    whole: nn.Module,
    call: ModuleCall,
    row_modules: Sequence[str],
    fuse: Callable[[nn.Module], None],
    attention: str,
    group: ThreadGroup,
) -> _RowRun:
    # Parameters of a layer may take gigabytes: ranks have gradients of their own, but share the values.
    shared = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in whole.parameters()}
    module, found = copy_module(whole, shared), _RowRun(ModuleRun([], [], {}))
    fuse(module)
    wrap_row_modules(module, row_modules)
    running = [""]
    for path, inner in module.named_modules():
        if path:
            inner.register_forward_pre_hook(lambda *_, path=path: running.append(path))
            inner.register_forward_hook(lambda *_: _leave_module(running))
    mode = _WatchedRowMode(group, attention, lambda name: found.gathered.append((running[-1], name)))
    module.forward = _watch_split(split_first_input(module.forward), found)
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float64)
    args, kwargs = tree_map(partial(prepare_argument, dtype), call)
    enter = partial(
        tree_map, lambda t: row_exchange.enter_section(t, group) if isinstance(t, torch.Tensor) else t
    )
    with torch.enable_grad(), reproducible_draws():
        entered_args, entered_kwargs = enter(args), enter(kwargs)
        with mode:
            given = module(*entered_args, **entered_kwargs)
        outs = [
            row_exchange.leave_section(t, group) for t in tree_leaves(given) if isinstance(t, torch.Tensor)
        ]
        ends = [t for t in outs if t.requires_grad]
        torch.autograd.backward(ends, cotangents(ends))
    inputs = [t.grad for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    found.run = ModuleRun(
        [t.detach() for t in outs], inputs, {n: p.grad for n, p in module.named_parameters()}
    )
    return found


def _leave_module(running: list[str]) -> None:
    running.pop()


def _watch_split(forward: Callable[..., Any], found: _RowRun) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        found.split = any(mark_of(t) is not None for t in tree_leaves(out))
        return out

    return run


class _WatchedRowMode(RowMode):
    """Reports the functions that get gathered tensors."""

    def __init__(self, group: ThreadGroup, attention: str, report: Callable[[str], None]) -> None:
        super().__init__(group, attention)
        self._report = report

    def count_gathered(self, name: str) -> None:
        """Reports a function that got gathered tensors."""
        super().count_gathered(name)
        self._report(name)
