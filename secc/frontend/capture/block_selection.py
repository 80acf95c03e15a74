"""Which of the user's modules are blocks: opaque calls that run whole. Coarse first.

A component with one stack of alike layers is one block, as far up as nothing else is in it: the climb ends
below a module that adds a head (its output is much wider than its input), that computes the loss or takes
labels, because the loss has to be seen, and heads want to be placed on their own. A module with several
stacks is opened; one without a stack is a block if it has weights, unless it gives a loss beside its results
(a codebook's). A component that is to be cut into stages is opened too, and its layers are the blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from secc.errors import UserError
from secc.runtime.recorder import BlockError, Observer, Recorder
from secc.runtime.recorder.nested_values import tensors
from secc.runtime.sections.recompute import is_stack

_WIDER = 1.25  # times as many features out as in: a head over a vocabulary, not a layer


@dataclass
class Seen:
    """What the calls of one module showed: when it was last called, whether it took labels or returned a
    loss, its features in and out."""

    last: int = 0
    labels: bool = False
    loss: bool = False
    losses: bool = False  # whether it returned one beside other results
    widths: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Note:
    """A choice that was made differently than planned, and why."""

    path: str
    reason: str
    where: str


@dataclass
class Frontier:
    """The chosen blocks (module paths), what the calls of modules showed, and notes about the choice.
    `component` maps a block to the module that it belongs to."""

    blocks: list[str]
    component: dict[str, str]
    seen: Mapping[str, Seen]
    notes: list[Note] = field(default_factory=list)


def choose(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    cut: Collection[str] = (),
    named: Sequence[str] = (),
    recorder: Recorder | None = None,
    seen: Mapping[str, Seen] | None = None,
) -> Frontier:
    """Choose blocks, looking at how `model(**batch)` calls its modules (one batch for each pattern is enough;
    nothing is computed).

    `cut`: components whose layers are to be blocks. `named`: blocks that the user chose, beside which the
    rules hold. `recorder` is one of the model that may be used; it is left with other blocks than it had.
    `seen` is what an earlier choice saw. Raises UserError for a path that the model does not have, and for a
    forward that cannot be looked at.
    """
    tree = Tree(model)
    tree.check([*cut, *named])
    seen = _trace(recorder or Recorder(model, ()), tree, batches) if seen is None else seen
    blocks = tree.blocks(seen, frozenset(cut), frozenset(named))
    return Frontier(blocks, {b: tree.component(b) for b in blocks}, seen)


def coarsen(blocks: Collection[str], path: str) -> list[str]:
    """The blocks with `path` in place of those inside it."""
    return sorted({b for b in blocks if not b.startswith(f"{path}.")} | {path})


class Tree:
    """The module tree with its stacks."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self._stacks: dict[str, tuple[str, ...]] = {}

    def check(self, paths: Collection[str]) -> None:
        """Raise UserError for a path that is no module."""
        for path in paths:
            if path not in self.modules or not path:
                known = ", ".join(p for p, _ in self.children("")) or "none"
                raise UserError(
                    f"the model has no module {path!r}",
                    remedy=f"name a module by its path; the outermost are {known}",
                )

    def children(self, path: str) -> Iterator[tuple[str, nn.Module]]:
        """The paths and modules directly below, each module once."""
        for name, child in self.modules[path].named_children():
            full = f"{path}.{name}" if path else name
            if full in self.modules:  # a shared module has one path
                yield full, child

    def stacks(self, path: str) -> tuple[str, ...]:
        """The outermost stacks in a module, itself included."""
        if path not in self._stacks:
            inner = (s for child, _ in self.children(path) for s in self.stacks(child))
            self._stacks[path] = (path,) if is_stack(self.modules[path]) else tuple(inner)
        return self._stacks[path]

    def layers(self) -> list[str]:
        """The layers of all outermost stacks."""
        return [path for stack in self.stacks("") for path, _ in self.children(stack)]

    def depth(self, path: str) -> int:
        """The number of layers in the longest stack of a module, 0 if it has none."""
        return max((len(list(self.children(s))) for s in self.stacks(path)), default=0)

    def component(self, path: str) -> str:
        """The largest module around a block that holds no other stack of layers, "" for the model itself."""
        while path:
            around = path.rpartition(".")[0]
            if len(self.stacks(around)) > 1:
                return path
            path = around
        return path

    def blocks(self, seen: Mapping[str, Seen], cut: frozenset[str], named: frozenset[str]) -> list[str]:
        """The frontier below the root."""
        found: list[str] = []
        self._visit("", seen, cut, named, found)
        return found

    def _visit(
        self,
        path: str,
        seen: Mapping[str, Seen],
        cut: frozenset[str],
        named: frozenset[str],
        found: list[str],
    ) -> None:
        if path in named:
            found.append(path)
            return
        module = self.modules[path]
        around_named = any(n.startswith(f"{path}.") for n in named)
        if path and path in seen and not around_named and path not in cut and not self._opened(path, seen):
            if next(module.parameters(), None) is not None:
                found.append(path)
            return
        for child, _ in self.children(path):
            layer = path in self.stacks(path) and child in seen and path not in named
            if layer and not any(n.startswith(f"{child}.") for n in named):
                found.append(child)
            else:
                self._visit(child, seen, _below(cut, path, child, self), named, found)

    def _opened(self, path: str, seen: Mapping[str, Seen]) -> bool:
        """Whether a called module has to be seen into."""
        stacks = self.stacks(path)
        if seen[path].loss or seen[path].labels or len(stacks) > 1 or (seen[path].losses and not stacks):
            return True
        if not stacks or not self._whole(path, stacks[0], seen):
            return False
        # A wrapper around a module with a head has that head, too.
        inner = (
            child
            for child, _ in self.children(path)
            if child in seen and child != stacks[0] and self.stacks(child)
        )
        return self._head(path, stacks[0], seen) or any(self._opened(child, seen) for child in inner)

    def _whole(self, path: str, stack: str, seen: Mapping[str, Seen]) -> bool:
        """Whether the stack is inside a child that is called: without the head, that child would be the
        block."""
        return any(child in seen and stack in self.stacks(child) for child, _ in self.children(path))

    def _head(self, path: str, stack: str, seen: Mapping[str, Seen]) -> bool:
        """Whether a child that runs after the stack gives much wider results than it takes."""
        end = max((seen[layer].last for layer, _ in self.children(stack) if layer in seen), default=0)
        after = (seen[child] for child, _ in self.children(path) if child in seen and not self.stacks(child))
        return any(s.last > end and s.widths[1] >= _WIDER * s.widths[0] > 0 for s in after)


def _below(cut: frozenset[str], path: str, child: str, tree: Tree) -> frozenset[str]:
    """A cut component is opened down to its stack."""
    return cut | {child} if path in cut and tree.stacks(child) else cut


def _trace(recorder: Recorder, tree: Tree, batches: Sequence[Mapping[str, Any]]) -> dict[str, Seen]:
    """Call every pattern's forward with the layers opaque, and write down what each module outside of layers
    was called with."""
    blocks = tree.layers()
    while True:
        seen: dict[str, Seen] = {}
        recorder.use(blocks)
        try:
            with recorder.observed(_Observer(seen)):
                for batch in batches:
                    recorder.record(batch)
            return seen
        except BlockError as error:
            other = error.blocks(blocks)
            if other is None:
                raise
            blocks = other


class _Observer(Observer):
    """Fills in `Seen` from a recorder's calls."""

    def __init__(self, seen: dict[str, Seen]) -> None:
        self._seen, self._clock = seen, 0
        self._widths: list[int] = []

    def entered(self, path: str, args: Any, kwargs: Any) -> None:
        found = self._seen.setdefault(path, Seen())
        found.labels |= kwargs.get("labels") is not None
        self._widths.append(_features((args, kwargs)))

    def left(self, path: str, result: Any) -> None:
        self._clock += 1
        found = self._seen[path]
        found.last = self._clock
        found.widths = (self._widths.pop(), _features(result))
        loss = result if isinstance(result, torch.Tensor) else getattr(result, "loss", None)
        found.loss |= isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.is_floating_point()
        found.losses |= any(t.ndim == 0 and t.requires_grad for _, t in tensors(result))


def _features(value: Any) -> int:
    """The last extent of the first floating-point tensor."""
    return next((t.shape[-1] for _, t in tensors(value) if t.is_floating_point() and t.ndim), 0)
