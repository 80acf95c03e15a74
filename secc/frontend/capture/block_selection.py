"""Selects which of the user's modules are blocks: opaque calls that run as they are. Coarse modules come
first.

A component with one stack of equal layers is one block, as far up as nothing else is in it. The climb ends
below a module that adds a head (its output is much wider than its input), that computes the loss or takes
labels: the loss has to be visible, and heads are placed on their own. A module with several stacks is
opened. One without a stack is a block if it has weights, unless it returns a loss among its results (a
codebook's). A component that runs in pipeline stages is opened too, and its layers are the blocks; of
layers that stages may divide between them, the modules inside are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from secc.errors import UserError
from secc.runtime.model.function_blocks import FunctionBlock
from secc.runtime.recorder import BlockError, CallObserver, Recorder
from secc.runtime.recorder.nested_values import iter_tensors
from secc.runtime.sections.recompute import is_layer_stack
from secc.runtime.tensor_parallel.expert_lists import is_expert_list

_HEAD_WIDTH_RATIO = 1.25  # times as many features out as in: a head over a vocabulary, not a layer


@dataclass
class ModuleCalls:
    """What the calls of one module showed: the number of its last call, whether it took labels or returned
    a loss (alone, or among other results), and its number of features in and out."""

    last_call: int = 0
    took_labels: bool = False
    returned_loss: bool = False
    returned_side_loss: bool = False  # whether it returned one among other results
    feature_widths: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class CaptureNote:
    """A deviation from the planned capture, with its reason and place. remedy: what the user can do, if the
    reason does not say it."""

    path: str
    reason: str
    where: str
    remedy: str = ""


@dataclass
class BlockSelection:
    """Module paths of the selected blocks, the component of each block, what calls of modules showed, and
    notes about the selection."""

    blocks: list[str]
    component_by_block: dict[str, str]
    module_calls: Mapping[str, ModuleCalls]
    notes: list[CaptureNote] = field(default_factory=list)


def select_blocks(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    cut: Collection[str] = (),
    named: Sequence[str] = (),
    recorder: Recorder | None = None,
    seen: Mapping[str, ModuleCalls] | None = None,
) -> BlockSelection:
    """Selects blocks by how `model(**batch)` calls its modules; one batch for each pattern is enough, and
    nothing is computed.

    cut: components that are split into their layers as blocks, and layers that are split into their parts.
    named: blocks that the user chose; the rules apply to all other modules. recorder: a recorder of the
    model, left with other blocks than it had. seen: module calls of an earlier selection. Raises UserError
    for a path that the model does not have, and for a forward that cannot be recorded.
    """
    tree = ModuleTree(model)
    tree.check_paths([*cut, *named])
    seen = _trace_module_calls(recorder or Recorder(model, ()), tree, batches) if seen is None else seen
    blocks = tree.blocks_below_root(seen, frozenset(cut), frozenset(named))
    return BlockSelection(blocks, {b: tree.component_of(b) for b in blocks}, seen)


def replace_with_parent(blocks: Collection[str], path: str) -> list[str]:
    """Returns the blocks with `path` in place of the blocks inside it."""
    return sorted({b for b in blocks if not b.startswith(f"{path}.")} | {path})


class ModuleTree:
    """The module tree with its stacks of layers."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self._stacks: dict[str, tuple[str, ...]] = {}

    def check_paths(self, paths: Collection[str]) -> None:
        """Raises UserError for a path that is no module."""
        for path in paths:
            if path not in self.modules or not path:
                known = ", ".join(p for p, _ in self.child_modules("")) or "none"
                raise UserError(
                    f"the model has no module {path!r}",
                    remedy=f"name a module by its path; the outermost are {known}",
                )

    def child_modules(self, path: str) -> Iterator[tuple[str, nn.Module]]:
        """Yields path and module of each direct child, each module once."""
        for name, child in self.modules[path].named_children():
            full = f"{path}.{name}" if path else name
            if full in self.modules:  # a shared module has one path
                yield full, child

    def outermost_stacks(self, path: str) -> tuple[str, ...]:
        """Returns the outermost stacks in a module, itself included."""
        if path not in self._stacks:
            inner = (
                s
                for child, m in self.child_modules(path)
                if not is_expert_list(child.rpartition(".")[2], m)
                for s in self.outermost_stacks(child)
            )
            self._stacks[path] = (path,) if is_layer_stack(self.modules[path]) else tuple(inner)
        return self._stacks[path]

    def stack_layers(self) -> list[str]:
        """Returns the layers of all outermost stacks."""
        return [path for stack in self.outermost_stacks("") for path, _ in self.child_modules(stack)]

    def layer_around(self, path: str) -> str:
        """Returns the layer of an outermost stack that a module is a part of; "" if there is none."""
        return next((layer for layer in self.stack_layers() if path.startswith(f"{layer}.")), "")

    def parts_of_layer(self, path: str) -> list[str]:
        """Returns the largest modules with parameters inside a layer that it calls, as far as its tree shows
        them: its children, and members of lists among these. The layer itself where it has one such part."""
        inside = [p for child, m in self.child_modules(path) for p in self._called_parts(child, m)]
        return inside if len(inside) > 1 else [path]

    def _called_parts(self, path: str, module: nn.Module) -> list[str]:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return [p for child, m in self.child_modules(path) for p in self._called_parts(child, m)]
        return [path] if next(module.parameters(), None) is not None else []

    def stack_depth(self, path: str) -> int:
        """Returns the number of layers in the longest stack of a module; 0 if it has none."""
        return max((len(list(self.child_modules(s))) for s in self.outermost_stacks(path)), default=0)

    def is_part_of_stack(self, path: str, component: str) -> bool:
        """Whether a module lies in a stack of layers of a component, or holds one."""
        return any(
            f"{path}.".startswith(f"{stack}.") or f"{stack}.".startswith(f"{path}.") or not path
            for stack in self.outermost_stacks(component)
        )

    def component_of(self, path: str) -> str:
        """Returns the largest module around a block that holds no other stack of layers; "" for the model
        itself."""
        while path:
            around = path.rpartition(".")[0]
            if len(self.outermost_stacks(around)) > 1:
                return path
            path = around
        return path

    def blocks_below_root(
        self, seen: Mapping[str, ModuleCalls], cut: frozenset[str], named: frozenset[str]
    ) -> list[str]:
        """Returns the blocks below the root."""
        selected: list[str] = []
        self._collect_blocks("", seen, cut, named, selected)
        return selected

    def _collect_blocks(
        self,
        path: str,
        seen: Mapping[str, ModuleCalls],
        cut: frozenset[str],
        named: frozenset[str],
        selected: list[str],
    ) -> None:
        module = self.modules[path]
        if path in named or isinstance(module, FunctionBlock):
            selected.append(path)
            return
        around_named = any(n.startswith(f"{path}.") for n in named)
        if (
            path
            and path in seen
            and not around_named
            and path not in cut
            and not self._must_be_opened(path, seen)
        ):
            if next(module.parameters(), None) is not None:
                selected.append(path)
            return
        for child, _ in self.child_modules(path):
            layer = path in self.outermost_stacks(path) and child in seen and path not in named
            if layer and not any(n.startswith(f"{child}.") for n in named):
                selected += self.parts_of_layer(child) if child in cut else [child]
            else:
                self._collect_blocks(child, seen, _opened_below(cut, path, child, self), named, selected)

    def _must_be_opened(self, path: str, seen: Mapping[str, ModuleCalls]) -> bool:
        """Whether a called module cannot be a block, because the capture has to see inside it."""
        stacks = self.outermost_stacks(path)
        if (
            seen[path].returned_loss
            or seen[path].took_labels
            or len(stacks) > 1
            or (seen[path].returned_side_loss and not stacks)
        ):
            return True
        if not stacks or not self._has_stack_in_called_child(path, stacks[0], seen):
            return False
        # A wrapper around a module with a head has that head, too.
        inner = (
            child
            for child, _ in self.child_modules(path)
            if child in seen and child != stacks[0] and self.outermost_stacks(child)
        )
        return self._has_head(path, stacks[0], seen) or any(
            self._must_be_opened(child, seen) for child in inner
        )

    def _has_stack_in_called_child(self, path: str, stack: str, seen: Mapping[str, ModuleCalls]) -> bool:
        """Whether a called child holds the stack: without the head, that child would be the block."""
        return any(
            child in seen and stack in self.outermost_stacks(child) for child, _ in self.child_modules(path)
        )

    def _has_head(self, path: str, stack: str, seen: Mapping[str, ModuleCalls]) -> bool:
        """Whether a child that runs after the stack gives much wider results than it takes."""
        end = max(
            (seen[layer].last_call for layer, _ in self.child_modules(stack) if layer in seen), default=0
        )
        after = (
            seen[child]
            for child, _ in self.child_modules(path)
            if child in seen and not self.outermost_stacks(child)
        )
        return any(
            s.last_call > end and s.feature_widths[1] >= _HEAD_WIDTH_RATIO * s.feature_widths[0] > 0
            for s in after
        )


def _opened_below(cut: frozenset[str], path: str, child: str, tree: ModuleTree) -> frozenset[str]:
    """Returns the opened components with `child`, if it leads from an opened component down to its stack."""
    return cut | {child} if path in cut and tree.outermost_stacks(child) else cut


def _trace_module_calls(
    recorder: Recorder, tree: ModuleTree, batches: Sequence[Mapping[str, Any]]
) -> dict[str, ModuleCalls]:
    """Runs forward for every pattern with the layers opaque, and notes what each module outside of layers
    was called with."""
    blocks = [*tree.stack_layers(), *(p for p, m in tree.modules.items() if isinstance(m, FunctionBlock))]
    tried = set[frozenset[str]]()
    while True:
        tried.add(frozenset(blocks))
        seen: dict[str, ModuleCalls] = {}
        recorder.use_blocks(blocks)
        try:
            with recorder.observed_by(_ModuleCallCounter(seen)):
                for batch in batches:
                    recorder.record(batch)
            return seen
        except BlockError as error:
            other = error.suggest_blocks(blocks)
            if error.is_wish:  # raised once
                tried.discard(frozenset(blocks))
                other = blocks if frozenset(other or ()) in tried else other
            around = seen.get(error.coarser or "")
            hides_loss = error.functions and around is not None and around.took_labels
            if other is None or hides_loss or frozenset(other) in tried:
                raise  # a block wants its parts, and one of these wants a larger block
            blocks = other


class _ModuleCallCounter(CallObserver):
    """Fills in `ModuleCalls` from a recorder's calls."""

    def __init__(self, seen: dict[str, ModuleCalls]) -> None:
        self._seen, self._clock = seen, 0
        self._widths: list[int] = []

    def on_enter(self, path: str, args: Any, kwargs: Any) -> None:
        found = self._seen.setdefault(path, ModuleCalls())
        found.took_labels |= kwargs.get("labels") is not None
        self._widths.append(_feature_width((args, kwargs)))

    def on_exit(self, path: str, result: Any) -> None:
        self._clock += 1
        found = self._seen[path]
        found.last_call = self._clock
        found.feature_widths = (self._widths.pop(), _feature_width(result))
        loss = result if isinstance(result, torch.Tensor) else getattr(result, "loss", None)
        found.returned_loss |= isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.is_floating_point()
        found.returned_side_loss |= any(t.ndim == 0 and t.requires_grad for _, t in iter_tensors(result))


def _feature_width(value: Any) -> int:
    """Returns the last extent of the first floating-point tensor; 0 without one."""
    return next((t.shape[-1] for _, t in iter_tensors(value) if t.is_floating_point() and t.ndim), 0)
