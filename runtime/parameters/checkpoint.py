"""Checkpoints written by torch.distributed.checkpoint, keyed by the user's names and independent of the plan.

    model/NAME, ema/NAME, optimizer/NAME/KEY, groups/RANK, scheduler/RANK

Every tensor is written once, by the first rank that holds it; of a sharded state each rank writes its part.
`checkpoint_writer` writes them, and `checkpoint_folder` says where they lie and how they are kept whole.
Random numbers need no state: data and micro-batches are seeded by seed, step and sample.

`sliced_tensor_store` is imported inside functions, because a rank without checkpoints starts almost a second
sooner without it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secc.runtime.errors import UserError
from secc.runtime.parameters.checkpoint_folder import (
    CheckpointManifest,
    FoundCheckpoint,
    find_checkpoint,
)
from secc.runtime.parameters.rank_weights import canonical_names
from secc.runtime.parameters.sharded_optimizer import ParameterSlice
from secc.runtime.parameters.zero3 import Zero3State
from secc.runtime.tensor_parallel.parameter_cuts import ParameterCut

AVERAGE_PREFIX = "ema/"  # of the keys of averaged weights (`weight_average`)


# What the rank's optimizer updates -> the part of a user's parameter that it is.
OptimizedSlices = Mapping[nn.Parameter, ParameterSlice]
_NAMES = ("params", "param_names")  # of a group of an optimizer: which parameters it has
_CLASS = "optimizer"  # next to the options of a parameter: the class of its optimizer
# Options that learning-rate schedulers set.
_SCHEDULED = (
    *("lr", "initial_lr", "max_lr", "min_lr"),
    *("momentum", "base_momentum", "max_momentum", "betas"),
)


def make_manifest(
    model: nn.Module,
    step: int,
    seed: int,
    shuffle: bool,
    global_batch: int,
    run: str | None = None,
    plan: str | None = None,
    settings: Mapping[str, str] | None = None,
    data: Mapping[str, Any] | None = None,
) -> CheckpointManifest:
    """Returns the manifest of `model` after `step` steps of the run with the id `run` of the plan directory
    `plan`; `data` is where the run is in its streams."""
    canonical = canonical_names(model)
    names = tuple(model.state_dict())
    stored = {n: next(m for m in names if canonical.get(m, m) == canonical.get(n, n)) for n in names}
    return CheckpointManifest(
        step,
        seed,
        shuffle,
        global_batch,
        names,
        {n: s for n, s in stored.items() if n != s},
        run=run,
        plan=plan,
        settings=None if settings is None else dict(settings),
        data=None if data is None else dict(data),
    )


def model_state(
    model: nn.Module, cuts: Mapping[str, ParameterCut], but: Iterable[str] = ()
) -> dict[str, Any]:
    """Returns this rank's part of the model's state dict under keys `model/NAME`, without the names in `but`.
    The tensors share the model's memory."""
    from secc.runtime.parameters.sliced_tensor_store import TensorSlice

    tied = make_manifest(model, 0, 0, False, 0).tied
    left_out = {*tied, *but}
    held = {
        n: v
        for n, v in model.state_dict().items()
        if n not in left_out and not (isinstance(v, torch.Tensor) and v.is_meta)
    }
    return {
        f"model/{n}": TensorSlice(v.view(-1), v.shape, 0, cuts[n]) if n in cuts else v
        for n, v in held.items()
    }


def slice_state(
    slices: OptimizedSlices, values: Callable[[nn.Parameter], torch.Tensor] = lambda p: p.data
) -> dict[str, Any]:
    """Returns what this rank's optimizer updates under keys `model/NAME`; the tensors share the memory of its
    `values`."""
    from secc.runtime.parameters.sliced_tensor_store import TensorSlice

    return {
        f"model/{part.name}": TensorSlice(values(p).view(-1), part.shape, part.start, part.cut)
        for p, part in slices.items()
    }


def optimizer_state(
    optimizer: torch.optim.Optimizer,
    slices: OptimizedSlices,
    owned: Iterable[str],
    options_owned: Iterable[str],
    rank: int,
) -> dict[str, Any]:
    """Returns the optimizer's state under the user's parameter names.

    This rank writes its part of the states of the parameters `owned`. For the parameters `options_owned` it
    also writes group options and states that do not have their parameter's shape (step counts).
    """
    from secc.runtime.parameters.sliced_tensor_store import TensorSlice

    written, wanted, packed = set(owned), set(options_owned), optimizer.state_dict()
    state: dict[str, Any] = {}
    options: list[tuple[list[str], dict[str, Any]]] = []
    for group, indices in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        members = [slices[p] for p in group["params"]]
        group_options = {k: v for k, v in indices.items() if k not in _NAMES}
        options.append(([m.name for m in members if m.name in wanted], group_options))
        for param, part, index in zip(group["params"], members, indices["params"], strict=True):
            for key, value in packed["state"].get(index, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == param.shape and value.ndim:
                    if part.name in written:
                        state[f"optimizer/{part.name}/{key}"] = TensorSlice(
                            value.reshape(-1), part.shape, part.start, part.cut
                        )
                elif part.name in wanted:
                    state[f"optimizer/{part.name}/{key}"] = value
    return state | {f"groups/{rank}": options}


def describe_options(
    optimizer: torch.optim.Optimizer, slices: OptimizedSlices
) -> dict[str, dict[str, object]]:
    """Returns the options of each parameter's group by the parameter's name, as far as they are plain values,
    and the optimizer's class. Call it before a scheduler changes them."""
    return {
        slices[param].name: {
            **{k: v for k, v in group.items() if k not in _NAMES and _is_plain(v)},
            _CLASS: type(optimizer).__name__,
        }
        for group in optimizer.param_groups
        for param in group["params"]
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))  # pyright: ignore[reportUnknownArgumentType]
    return isinstance(value, bool | int | float | str | None)


@dataclass(frozen=True)
class ChangedOption:
    """An option of a parameter's optimizer that is not that of the run which wrote a checkpoint."""

    name: str
    option: str
    before: object
    now: object

    def __str__(self) -> str:
        return f"{self.option} of {self.name} was {self.before}, and is {self.now}"


def find_changed_options(
    checkpoint: Path, options: Mapping[str, Mapping[str, object]]
) -> list[ChangedOption]:
    """Returns which of `describe_options` are other ones than in the run that wrote a checkpoint, as far as
    the checkpoint says. Reads on its own."""
    from secc.runtime.parameters import sliced_tensor_store

    keys = [key for key in sliced_tensor_store.stored_entries(checkpoint) if key.startswith("options/")]
    recorded: dict[str, Any] = dict.fromkeys(keys)
    sliced_tensor_store.read_entries(checkpoint, recorded, alone=True)
    before = {n: found for key in keys for n, found in _dict_of(recorded[key]).items() if _dict_of(found)}
    found: list[ChangedOption] = []
    for name in sorted(options.keys() & before.keys()):
        for option in sorted(options[name].keys() & before[name].keys()):
            old, new = before[name][option], options[name][option]
            if old != new and list(_flatten(old)) != list(_flatten(new)):
                found.append(ChangedOption(name, option, old, new))
    return found


def _dict_of(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def _flatten(value: Any) -> Iterator[object]:
    if isinstance(value, tuple | list):
        for part in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _flatten(part)
    else:
        yield value


def load_model_state(
    checkpoint: Path, model: nn.Module, cuts: Mapping[str, ParameterCut], parts: Zero3State | None = None
) -> None:
    """Reads what this rank holds into `model` and `parts`. Collective. Raises UserError if the checkpoint was
    written for another model."""
    from secc.runtime.parameters import sliced_tensor_store

    target = model_state(model, cuts, parts.parameter_names if parts else ())
    stored = sliced_tensor_store.stored_entries(checkpoint)
    target |= slice_state(parts.parameter_slices) if parts else {}
    for key, value in target.items():
        entry = stored.get(key)
        shape = value.size() if isinstance(value, torch.Tensor | sliced_tensor_store.TensorSlice) else None
        if key not in stored or (shape is not None and (entry is None or entry.shape != shape)):
            problem = "is missing"
            if entry is not None:
                problem = f"has shape {list(entry.shape)}, expected {list(shape or ())}"
            raise UserError(
                f"the checkpoint does not fit the model: {key.removeprefix('model/')} {problem}",
                str(checkpoint),
                "resume with the model that wrote the checkpoint",
            )
    sliced_tensor_store.read_entries(checkpoint, target)
    objects = {
        k.removeprefix("model/"): v
        for k, v in target.items()
        if not isinstance(v, torch.Tensor | sliced_tensor_store.TensorSlice)
    }
    if objects:
        model.load_state_dict(objects, strict=False)
    if parts:
        parts.copy_masters_to_shards()


def load_optimizer_state(
    checkpoint: Path,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    slices: OptimizedSlices,
    rank: int,
    changed: Iterable[ChangedOption] = (),
    keeps_schedule: bool = True,
    offloaded: Collection[nn.Parameter] = (),
) -> None:
    """Reads the optimizer states of this rank's parameters, the options of their groups and the scheduler's
    state. Collective.

    Options that have `changed`, and without `keeps_schedule` those that schedulers set and the scheduler
    itself, stay as they are. The states of parameters start from nothing if their optimizer is of another
    class, or if what it keeps for them has other names (amsgrad was switched on). The states of parameters
    that are `offloaded` stay in host memory.
    """
    from secc.runtime.parameters import sliced_tensor_store

    stored = sliced_tensor_store.stored_entries(checkpoint)
    slice_by_name = {p.name: p for p in slices.values()} if optimizer is not None else {}
    target: dict[str, Any] = {}
    for key, entry in stored.items():
        kind, _, name_and_key = key.partition("/")
        if kind == "optimizer" and name_and_key.rpartition("/")[0] in slice_by_name:
            target[key] = _load_target(entry, slice_by_name[name_and_key.rpartition("/")[0]])
        elif kind == "groups":
            target[key] = None
    scheduler_key = _scheduler_key(stored, rank) if scheduler is not None else None
    target |= {scheduler_key: None} if scheduler_key else {}
    sliced_tensor_store.read_entries(checkpoint, target)
    if optimizer is not None:
        kept = {name: {*_SCHEDULED} if not keeps_schedule else set[str]() for name in slice_by_name}
        for change in changed:
            kept[change.name].add(change.option)
        packed = _pack_optimizer_state(optimizer, target, slices, kept)
        on_host = _take_states(optimizer, packed, offloaded)
        optimizer.load_state_dict(packed)
        for param, states in on_host.items():
            optimizer.state[param].update(states)
    if scheduler is not None and scheduler_key and keeps_schedule:
        scheduler.load_state_dict(target[scheduler_key])


def load_full_state_dict(
    source: str | Path | FoundCheckpoint,
    averaged: bool = False,
    on_read: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, torch.Tensor]:
    """Reads the user's whole state dict from a checkpoint (or the latest whole one in a directory) onto the
    CPU, in one process.

    It includes frozen parameters and buffers; tied parameters are one tensor under each of their names. With
    `averaged`, trained parameters have the values of `--ema`. `on_read` is called with the bytes that were
    read so far, and all. Raises UserError if there is no checkpoint, if a file of it is damaged, or if it has
    no averages.
    """
    found = source if isinstance(source, FoundCheckpoint) else find_checkpoint(Path(source))
    return load_entries_of_model(
        found,
        found.manifest.names,
        lambda _, stored: torch.empty_like(stored, device="cpu"),
        averaged,
        on_read,
    )


def load_entries_of_model(
    found: FoundCheckpoint,
    names: Iterable[str],
    allocate: Callable[[str, torch.Tensor], torch.Tensor],
    averaged: bool = False,
    on_read: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Reads these entries of the user's state dict, tensors into the memory that `allocate` returns for a
    name and a meta tensor of what is stored. In other respects as `load_full_state_dict`."""
    from secc.runtime.parameters import sliced_tensor_store

    stored = sliced_tensor_store.stored_entries(found.files)
    averages = {f"model/{k.removeprefix(AVERAGE_PREFIX)}": k for k in stored if k.startswith(AVERAGE_PREFIX)}
    if averaged and not averages:
        raise UserError(
            "the checkpoint has no average of the weights", str(found.path), "take one of a run with --ema"
        )
    keys: dict[str, str] = {}
    read: dict[str, Any] = {}
    for name in names:
        stored_name = f"model/{found.manifest.tied.get(name, name)}"
        key = keys[name] = averages.get(stored_name, stored_name) if averaged else stored_name
        if key not in stored:
            message = f"the checkpoint is damaged: {name!a} is missing"
            raise UserError(message, str(found.path), "take a checkpoint that a run with --save has written")
        if key not in read:
            entry = stored[key]
            read[key] = None if entry is None else allocate(name, entry)
    done, total = 0, sum(t.nbytes for t in read.values() if t is not None)

    def count(byte_count: int) -> None:
        nonlocal done
        done += byte_count
        on_read(done, total)

    sliced_tensor_store.read_entries(found.files, read, alone=True, on_read=count)
    return {name: read[key] for name, key in keys.items()}


def _scheduler_key(stored: Iterable[str], rank: int) -> str | None:
    """Returns the key of this rank's scheduler state, or of any other rank's: all schedulers took the same
    steps, but only under the same plan does this rank's own have the same groups."""
    keys = sorted(k for k in stored if k.startswith("scheduler/"))
    return f"scheduler/{rank}" if f"scheduler/{rank}" in keys else next(iter(keys), None)


def _pack_optimizer_state(
    optimizer: torch.optim.Optimizer,
    stored: Mapping[str, Any],
    slices: OptimizedSlices,
    kept: Mapping[str, Collection[str]],
) -> dict[str, Any]:
    """Builds an optimizer's state dict, keyed by index, from entries stored under names. `kept`: the options
    of each parameter that the optimizer has already."""
    from secc.runtime.parameters.sliced_tensor_store import TensorSlice

    packed = optimizer.state_dict()
    options = {
        n: o
        for key, groups in stored.items()
        if key.startswith("groups/")
        for members, o in groups
        for n in members
    }
    values: dict[str, dict[str, Any]] = {}
    for key, value in stored.items():
        if key.startswith("optimizer/"):
            name, _, entry = key.removeprefix("optimizer/").rpartition("/")
            values.setdefault(name, {})[entry] = value
    state: dict[int, Any] = {}
    for group, indices in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        members = [slices[p].name for p in group["params"]]
        group_options = next((options[n] for n in members if n in options), {})
        own = {option for n in members for option in kept[n]}
        is_other = _CLASS in own
        indices.update({} if is_other else {k: v for k, v in group_options.items() if k not in own})
        wanted = _find_state_entries(optimizer, group) if own else None
        for param, name, index in zip(group["params"], members, indices["params"], strict=True):
            if name in values and not is_other and wanted in (None, values[name].keys()):
                state[index] = {
                    k: v.values.view(param.shape) if isinstance(v, TensorSlice) else v
                    for k, v in values[name].items()
                }
    return {"state": state, "param_groups": packed["param_groups"]}


def _take_states(
    optimizer: torch.optim.Optimizer, packed: dict[str, Any], params: Collection[nn.Parameter]
) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
    """Takes the states of `params` that have a parameter's shape out of a state dict, in the dtype that
    loading would give them."""
    taken: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
    for group, indices in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        for param, index in zip(group["params"], indices["params"], strict=True):
            states = packed["state"].get(index, {}) if param in params else {}
            for key in [k for k, v in states.items() if isinstance(v, torch.Tensor) and v.ndim]:
                if states[key].shape == param.shape:
                    value = states.pop(key)
                    value = value.to(param.dtype) if param.is_floating_point() else value
                    taken.setdefault(param, {})[key] = value
    return taken


def _find_state_entries(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> set[str] | None:
    """Returns the names of what the optimizer keeps for each parameter of `group` (`exp_avg`, with amsgrad
    `max_exp_avg_sq`, too): those that a copy has after a step on one entry. None if it takes no such step."""
    like = group["params"][0]
    param = nn.Parameter(like.detach().new_ones((1,) * like.ndim))
    param.grad = torch.zeros_like(param)
    probe = copy.copy(optimizer)
    probe.state, probe.param_groups = defaultdict(dict), [{**group, "params": [param]}]
    try:
        probe.step()
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return None  # an optimizer of the user's with attributes or groups of its own
    return set(probe.state[param])


def _load_target(entry: torch.Tensor | None, part: ParameterSlice) -> Any:
    """Returns where a stored optimizer state is read into: memory for this rank's slice if the state has the
    parameter's shape, else memory for all of it."""
    from secc.runtime.parameters.sliced_tensor_store import TensorSlice

    if entry is None or entry.shape != (part.cut.shape if part.cut else part.shape) or not entry.ndim:
        return _empty_on_cpu(entry)
    return TensorSlice(
        torch.empty(part.stop - part.start, dtype=entry.dtype), part.shape, part.start, part.cut
    )


def _empty_on_cpu(entry: torch.Tensor | None) -> torch.Tensor | None:
    """Returns CPU memory for a stored tensor; None for other objects."""
    return None if entry is None else torch.empty_like(entry, device="cpu")
