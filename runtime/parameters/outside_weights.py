"""Watches code of the user's that runs between steps (hooks of the optimizer, `on_step`) for weights that it
takes from the model, not from what optimizer() was given: a teacher that follows its student's weights.

In one process these are the same tensors. A rank may have none of them, a part, a copy in 16 bits, or one
that other ranks have, too, which run no such code: what is written there would be lost, or would differ from
rank to rank. Such a use ends the run. Where all ranks train and hold the whole weights, nothing is watched.
`on_step` runs on all ranks, after the weights have been exchanged, so it may use what a rank holds whole, and
write to it, unless the optimizer keeps its own float32 copy or forwards of the next step have read it. What
it writes has to be the same on all ranks that hold the weight (`secc.runtime.parameters.equal_writes`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import nn, optim
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from secc.runtime.errors import UserError
from secc.runtime.host.tensor_bytes import tensor_digest
from secc.runtime.model.source_lines import current_source_line
from secc.runtime.parameters.gradient_reduction import build_reduction_groups
from secc.runtime.parameters.rank_weights import canonical_names, parameter_names_of_rank
from secc.runtime.plan.schema import Plan

# Attributes and methods of a tensor that read none of its entries.
_DESCRIPTIONS = {
    *(
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "requires_grad",
        "is_meta",
        "is_leaf",
        "names",
        "__class__",
    ),
    *("size", "numel", "nelement", "dim", "stride", "element_size", "is_floating_point", "is_complex"),
}
# Methods of a tensor that hand its memory to code that torch does not see.
_MEMORY_VIEWS = {"numpy", "__array__", "__dlpack__", "storage", "untyped_storage", "data_ptr"}
_SET_DATA = torch.Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
Hook = Callable[..., Any]
STEP_CALLBACK = "on_step"
HOOK_REMEDY = (
    "use the weight in a hook of the optimizer, `made.register_step_post_hook(...)` in optimizer(), and"
    " compile again without --strategy, --dtype and pinned pp, tp and sharding: the plan then keeps the"
    " weights that hooks use whole on every rank that trains; for a moving average of the trained weights,"
    " give --ema to secc run"
)


class WatchedTensors(TorchFunctionMode):
    """Calls `note` with each tensor before an operation reads its entries."""

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, after its tensors have been noted."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        name = func.__self__.__name__ if name == "__get__" else name  # an attribute
        if name not in _DESCRIPTIONS:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor):
                    self._note(value)
        return func(*args, **kwargs)


class _AssignedData(TorchFunctionMode):
    """Lets `tensor.data = other` write into the memory of `tensors`, which an optimizer may share."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._ids = {id(t) for t in tensors}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func != _SET_DATA or id(args[0]) not in self._ids or args[0].shape != args[1].shape:
            return func(*args, **(kwargs or {}))
        return args[0].data.copy_(args[1])


class _ViewedMemory(TorchFunctionMode):
    """Calls `note` with each tensor before code gets its memory as that of another library (`.numpy()`)."""

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _MEMORY_VIEWS and isinstance(args[0], torch.Tensor):
            with torch._C.DisableTorchFunction():
                self._note(args[0])
        return func(*args, **(kwargs or {}))


class WrittenTensors(TorchDispatchMode):
    """Calls `note` with each tensor before an operation writes to it."""

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, after the tensors that it changes have been noted."""
        kwargs = kwargs or {}
        for i, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for value in tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name)):
                    if isinstance(value, torch.Tensor):
                        self._note(value)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class PartialWeights:
    """The weights and buffers of a rank's model that code between steps may not use, by name, each with the
    reason. missing: not held, or in parts only. unshared: what hooks of the optimizer write to it is lost.
    unwritable: what callbacks write to it is lost, or comes too late. slots: where modules keep each weight
    that this rank holds whole (a dict and a key). viewed: weights that callbacks have got as memory, as
    by `.numpy()`, each with the line; they may write to it at any later call."""

    rank: int
    missing: Mapping[str, str]
    unshared: Mapping[str, str]
    tensors: Mapping[str, torch.Tensor]
    unwritable: Mapping[str, str] = field(default_factory=dict[str, str])
    slots: Sequence[tuple[str, dict[str, Any], str]] = ()
    viewed: dict[str, str] = field(default_factory=dict[str, str])

    def watch_hooks(self, optimizer: optim.Optimizer) -> None:
        """Lets the hooks of an optimizer's steps raise UserError where they use such a weight, unless it is
        one that the optimizer itself updates (a part that tp makes)."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        reasons = {**self.unshared, **self.missing}
        others = {n: why for n, why in reasons.items() if id(self.tensors.get(n)) not in own}
        for table in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
            for key, hook in table.items():
                table[key] = self._watch("a hook of the optimizer", hook, others)

    def watch_callback(self, name: str, function: Hook, written: set[str]) -> Hook:
        """Returns a function that raises UserError where it uses a weight that this rank does not hold
        whole, or writes to one for which that changes nothing. Adds the names of those that it writes to to
        `written`. What it puts in the place of a frozen weight or a buffer is written to it; in the place of
        a trained one, which the optimizer would not follow, it is refused."""
        watched, places = self._watch(name, function, self.missing), _by_storage(self.tensors)

        def note_write(weight: str, where: str) -> None:
            if weight in self.unwritable:
                raise UserError(
                    f"{name} writes to {weight}: rank {self.rank} {self.unwritable[weight]}",
                    where,
                    HOOK_REMEDY,
                )
            written.add(weight)

        def note_written_tensor(tensor: torch.Tensor) -> None:
            for weight in _find_overlapping(tensor, places):
                note_write(weight, current_source_line())

        @wraps(function)
        def call_watched(*args: Any, **kwargs: Any) -> Any:
            slots = [(weight, table, key, table[key]) for weight, table, key in self.slots]
            before = {weight: tensor_digest(self.tensors[weight]) for weight in self.viewed}

            def note_view(tensor: torch.Tensor) -> None:
                for weight in _find_overlapping(tensor, places):
                    if weight not in before:
                        before[weight] = tensor_digest(self.tensors[weight])
                        self.viewed[weight] = current_source_line()

            modes = _AssignedData(self.tensors.values()), WrittenTensors(note_written_tensor)
            with modes[0], modes[1], _ViewedMemory(note_view):
                result = watched(*args, **kwargs)
                for weight, table, key, present in slots:
                    if (now := table.get(key)) is not present:
                        table[key] = present
                        _write_through(name, weight, present, now)
            for weight, digest in before.items():
                if weight not in written and tensor_digest(self.tensors[weight]) != digest:
                    note_write(weight, self.viewed[weight])
            return result

        return call_watched

    def use_error(self, what: str, name: str, reason: str, where: str) -> UserError:
        """Returns the error for a use of a weight in a line."""
        remedy = (
            "use the parameters that optimizer() gets; or compile with --strategy colocate and without"
            " --dtype, tp, pp and sharding: then every rank trains and holds all weights"
        )
        return UserError(
            f"{what} uses {name}, which it takes from the model: rank {self.rank} {reason}",
            where,
            HOOK_REMEDY if what == STEP_CALLBACK else remedy,
        )

    def _watch(self, what: str, function: Hook, reasons: Mapping[str, str]) -> Hook:
        if not reasons:
            return function
        found = {id(t): n for n, t in self.tensors.items() if n in reasons}

        def refuse_partial(tensor: torch.Tensor) -> None:
            if name := found.get(id(tensor), ""):
                raise self.use_error(what, name, reasons[name], current_source_line())

        @wraps(function)
        def call_watched(*args: Any, **kwargs: Any) -> Any:
            with WatchedTensors(refuse_partial):
                return function(*args, **kwargs)

        return call_watched


def _by_storage(tensors: Mapping[str, torch.Tensor]) -> dict[int, list[tuple[str, int, int]]]:
    """Returns the names of tensors with the first byte of each and the one behind its last, by storage."""
    found = dict[int, list[tuple[str, int, int]]]()
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.is_meta:
            found.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, *_extent(tensor)))
    return found


def _find_overlapping(
    tensor: torch.Tensor, places: Mapping[int, Sequence[tuple[str, int, int]]]
) -> Iterator[str]:
    """Yields the names of the tensors with memory in common with this one."""
    if tensor.is_meta or type(tensor) not in (torch.Tensor, nn.Parameter) or not tensor.numel():
        return
    for name, first, end in places.get(tensor.untyped_storage().data_ptr(), ()):
        start, stop = _extent(tensor)
        if start < end and first < stop:
            yield name


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size()


@torch.no_grad()
def _write_through(what: str, name: str, tensor: torch.Tensor, other: Any) -> None:
    """Writes what took the place of a tensor of the model to it. Raises UserError where that is not the
    same."""
    if isinstance(other, torch.Tensor) and other.shape == tensor.shape and not tensor.requires_grad:
        tensor.copy_(other)
        return
    why = (
        "the optimizer goes on with the one that model() made"
        if tensor.requires_grad
        else f"expected a tensor of shape {list(tensor.shape)}"
    )
    raise UserError(
        f"{what} puts something else in the place of {name}: {why}",
        remedy="write to it: with torch.no_grad(), `module.weight.copy_(values)`",
    )


def find_hook_conflict(plan: Plan, model: nn.Module, used: Mapping[str, str]) -> UserError | None:
    """Returns the error with which a run of the plan would end if hooks of the optimizer use these parameters
    that they take from the model (by name, each with the line), None if there is none."""
    canonical = canonical_names(model)
    own = [n for n, p in model.named_parameters() if p.requires_grad]
    trained = {n: g.ranks for g in build_reduction_groups(plan, own, canonical) for n in g.names}
    for rank in sorted({r for ranks in trained.values() for r in ranks}):
        sections = [s for s in plan.sections if rank in s.mesh.ranks]
        sharded = {canonical[n] for s in sections if s.sharding != "none" for n in s.params}
        cut = {canonical[shard.name] for s in sections for shard in s.shards}
        weights = find_partial_weights(
            plan,
            rank,
            model,
            canonical,
            trained,
            held=parameter_names_of_rank(plan, model, rank),
            in_parts=cut,
            copied={n for n, ranks in trained.items() if plan.dtype or (n in sharded and len(ranks) > 1)},
        )
        for name, where in used.items():
            if reason := weights.missing.get(name) or weights.unshared.get(name):
                return weights.use_error("a hook of the optimizer", name, reason, where)
    return None


def find_partial_weights(
    plan: Plan,
    rank: int,
    model: nn.Module,
    canonical: Mapping[str, str],
    trained: Mapping[str, Collection[int]],
    held: Collection[str],
    in_parts: Collection[str],
    copied: Collection[str],
    early: Collection[str] = (),
) -> PartialWeights:
    """Returns what code between steps may not use on a rank. canonical: one name for each parameter. trained:
    the ranks that train each trained parameter. held: parameters that this rank holds. in_parts: those that
    it holds a part of. copied: those that its optimizer updates in a part or a copy. early: sections that
    have computed for the next step when code between steps runs."""
    optimizing = {r for ranks in trained.values() for r in ranks}
    holders: dict[str, set[int]] = {}
    for section in plan.sections:
        for name in {canonical.get(n, n) for n in section.params}:
            holders.setdefault(name, set()).update(section.mesh.ranks)
    buffers = dict(model.named_buffers())
    tensors = {**dict(model.named_parameters()), **buffers}
    missing, unshared, unwritable = dict[str, str](), dict[str, str](), dict[str, str]()
    read_early = {
        n: s
        for s in (plan.find_section(name) for name in early)
        for n in tensors
        if any(f"{n}.".startswith(f"{block}.") for block in s.blocks) or n in s.params
    }
    for name, tensor in tensors.items():
        others = sorted(holders.get(name, {rank}) - optimizing)
        is_held = not tensor.is_meta if name in buffers else name in held
        if not is_held or name in in_parts:
            missing[name] = "has a part of it" if is_held else "does not hold it"
        elif name in copied:
            unshared[name] = "updates a part or a copy of it, and writes it back after the hooks"
        elif name not in trained and others:
            unshared[name] = f"is not alone: rank {others[0]} holds it, too, and has no optimizer"
        if name in missing:
            continue
        if name in copied and plan.dtype and plan.model.parameters[name].startswith("float32"):
            unwritable[name] = f"updates a float32 copy of it, from which it gets its {plan.dtype} again"
        elif name in read_early:
            section = read_early[name].name
            unwritable[name] = (
                f"has computed with it for the next step ({section}; --run-ahead 0 prevents it)"
            )
    slots = [
        (name, table, key)
        for path, module in model.named_modules()
        for table in (module._parameters, module._buffers)
        for key, tensor in table.items()
        if tensor is not None and (name := f"{path}.{key}".lstrip(".")) not in missing
    ]
    return PartialWeights(rank, missing, unshared, tensors, unwritable, slots)
