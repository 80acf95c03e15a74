"""Checkpoints by torch.distributed.checkpoint, keyed by the user's names and independent of the plan that
wrote them.

    DIR/step_00000005/   model/NAME, optimizer/NAME/KEY, groups/RANK, scheduler/RANK
    (torch.distributed.checkpoint)
                         checkpoint.json: step, seed, shuffle, global batch, the state dict's names and which
                         of them are tied
    DIR/latest           the name of the newest complete one

Every tensor is written once, by the first rank that holds it; of states that are sharded every rank writes
its part. A checkpoint is written under another name and renamed when it is complete. Random numbers need no
state here: data and micro-batches are seeded by seed, step and sample. `tensor_store` is imported where it is
used, because a rank that needs no checkpoint starts almost a second sooner without.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from secc.runtime.errors import UserError
from secc.runtime.parameters.rank_weights import canonical_names
from secc.runtime.parameters.sharded_optimizer import ParameterSlice
from secc.runtime.parameters.zero3 import Zero3State
from secc.runtime.tensor_parallel.parameter_cuts import ParameterCut

OptimizedSlices = Mapping[
    nn.Parameter, ParameterSlice
]  # what each entry of the rank's optimizer is of the user's parameters
LATEST_FILE = "latest"
_NO_CHECKPOINT_REMEDY = "give a directory that a run with --save has written"
MANIFEST_FILE = "checkpoint.json"


@dataclass(frozen=True)
class CheckpointManifest:
    """What a checkpoint knows beside its tensors.

    `names` are the state dict's, in its order; `tied` maps some of them to the one that is stored.
    """

    step: int
    seed: int
    shuffle: bool
    global_batch: int
    names: tuple[str, ...]
    tied: dict[str, str]


def make_manifest(
    model: nn.Module, step: int, seed: int, shuffle: bool, global_batch: int
) -> CheckpointManifest:
    """The manifest of `model` after `step` steps."""
    canonical = canonical_names(model)
    names = tuple(model.state_dict())
    stored = {n: next(m for m in names if canonical.get(m, m) == canonical.get(n, n)) for n in names}
    return CheckpointManifest(
        step, seed, shuffle, global_batch, names, {n: s for n, s in stored.items() if n != s}
    )


def save_checkpoint(directory: Path, state: Mapping[str, Any], about: CheckpointManifest) -> Path:
    """Write this rank's part of `state` as `directory/step_XXXXXXXX`. Collective. Returns the finished
    checkpoint's path."""
    from secc.runtime.parameters import sliced_tensor_store

    final = directory / f"step_{about.step:08d}"
    scratch = directory / f".{final.name}.tmp"
    if _current_rank() == 0:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    _wait_for_ranks()
    sliced_tensor_store.write_entries(scratch, dict(state))
    if _current_rank() == 0:
        (scratch / MANIFEST_FILE).write_text(json.dumps(asdict(about)))
        shutil.rmtree(final, ignore_errors=True)
        os.rename(scratch, final)
        pointer = directory / f".{LATEST_FILE}.tmp"
        pointer.write_text(final.name + "\n")
        os.replace(pointer, directory / LATEST_FILE)
    _wait_for_ranks()
    return final


def find_checkpoint(directory: Path) -> Path:
    """The checkpoint that `directory` is, or the latest one in it. Raises UserError if there is none."""
    if (directory / MANIFEST_FILE).exists():
        return directory
    try:
        found = directory / (directory / LATEST_FILE).read_text().strip()
        if (found / MANIFEST_FILE).exists():
            return found
    except OSError:
        pass
    raise UserError("there is no checkpoint", str(directory), _NO_CHECKPOINT_REMEDY)


def read_manifest(checkpoint: Path) -> CheckpointManifest:
    """The manifest of a checkpoint. Raises UserError if it cannot be read."""
    try:
        data = json.loads((checkpoint / MANIFEST_FILE).read_text())
        return CheckpointManifest(**data | {"names": tuple(data["names"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"not a checkpoint: {error}", str(checkpoint), _NO_CHECKPOINT_REMEDY) from None


def model_state(
    model: nn.Module, cuts: Mapping[str, ParameterCut], but: Iterable[str] = ()
) -> dict[str, Any]:
    """What this rank holds of the model's state dict, without the names in `but`, under `model/NAME`; it
    shares the model's memory."""
    from secc.runtime.parameters.sliced_tensor_store import TensorSlice

    tied = make_manifest(model, 0, 0, False, 0).tied
    gone = {*tied, *but}
    held = {
        n: v
        for n, v in model.state_dict().items()
        if n not in gone and not (isinstance(v, torch.Tensor) and v.is_meta)
    }
    return {
        f"model/{n}": TensorSlice(v.view(-1), v.shape, 0, cuts[n]) if n in cuts else v
        for n, v in held.items()
    }


def slice_state(pieces: OptimizedSlices) -> dict[str, Any]:
    """What a rank's optimizer updates, under `model/NAME`; the tensors share its memory."""
    from secc.runtime.parameters.sliced_tensor_store import TensorSlice

    return {
        f"model/{piece.name}": TensorSlice(p.data.view(-1), piece.shape, piece.start, piece.cut)
        for p, piece in pieces.items()
    }


def optimizer_state(
    optimizer: torch.optim.Optimizer,
    pieces: OptimizedSlices,
    owned: Iterable[str],
    options_owned: Iterable[str],
    rank: int,
) -> dict[str, Any]:
    """The optimizer's state by the user's names: of the parameters `owned` what this rank has.

    Options of groups, and states that are not like their parameter, are stored for the parameters
    `options_owned`.
    """
    from secc.runtime.parameters.sliced_tensor_store import TensorSlice

    written, wanted, packed = set(owned), set(options_owned), optimizer.state_dict()
    state: dict[str, Any] = {}
    options: list[tuple[list[str], dict[str, Any]]] = []
    for group, indices in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        members = [pieces[p] for p in group["params"]]
        kept = {k: v for k, v in indices.items() if k not in ("params", "param_names")}
        options.append(([m.name for m in members if m.name in wanted], kept))
        for param, piece, index in zip(group["params"], members, indices["params"], strict=True):
            for key, value in packed["state"].get(index, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == param.shape and value.ndim:
                    if piece.name in written:
                        state[f"optimizer/{piece.name}/{key}"] = TensorSlice(
                            value.reshape(-1), piece.shape, piece.start, piece.cut
                        )
                elif piece.name in wanted:
                    state[f"optimizer/{piece.name}/{key}"] = value
    return state | {f"groups/{rank}": options}


def load_model_state(
    checkpoint: Path, model: nn.Module, cuts: Mapping[str, ParameterCut], parts: Zero3State | None = None
) -> None:
    """Read into `model` and `parts` what this rank holds. Collective. Raises UserError if the checkpoint is
    of another model."""
    from secc.runtime.parameters import sliced_tensor_store

    target, stored = (
        model_state(model, cuts, parts.parameter_names if parts else ()),
        sliced_tensor_store.stored_entries(checkpoint),
    )
    target |= slice_state(parts.parameter_slices) if parts else {}
    for key, value in target.items():
        entry = stored.get(key)
        shape = value.size() if isinstance(value, torch.Tensor | sliced_tensor_store.TensorSlice) else None
        if key not in stored or (shape is not None and (entry is None or entry.shape != shape)):
            found = (
                "lacks it"
                if entry is None
                else f"has it with shape {list(entry.shape)}, not {list(shape or ())}"
            )
            remedy = "resume with the model that wrote the checkpoint"
            raise UserError(
                f"the checkpoint does not fit the model: {key.removeprefix('model/')}: it {found}",
                str(checkpoint),
                remedy,
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
    pieces: OptimizedSlices,
    rank: int,
) -> None:
    """Read the state of this rank's parameters, their groups' options and the scheduler's state.
    Collective."""
    from secc.runtime.parameters import sliced_tensor_store

    stored = sliced_tensor_store.stored_entries(checkpoint)
    mine = {p.name: p for p in pieces.values()} if optimizer is not None else {}
    target: dict[str, Any] = {}
    for key, entry in stored.items():
        kind, _, rest = key.partition("/")
        if kind == "optimizer" and rest.rpartition("/")[0] in mine:
            target[key] = _load_target(entry, mine[rest.rpartition("/")[0]])
        elif kind == "groups":
            target[key] = None
    own = _scheduler_key(stored, rank) if scheduler is not None else None
    target |= {own: None} if own else {}
    sliced_tensor_store.read_entries(checkpoint, target)
    if optimizer is not None:
        optimizer.load_state_dict(_pack_optimizer_state(optimizer, target, pieces))
    if scheduler is not None and own:
        scheduler.load_state_dict(target[own])


def load_full_state_dict(directory: str | Path) -> dict[str, torch.Tensor]:
    """The user's whole state dict from a checkpoint (or the latest one in `directory`), in one process, on
    the CPU.

    Frozen parameters and buffers are in it; tied parameters are one tensor under each of their names. Raises
    UserError if there is none.
    """
    from secc.runtime.parameters import sliced_tensor_store

    checkpoint = find_checkpoint(Path(directory))
    about = read_manifest(checkpoint)
    target: dict[str, Any] = {
        k: _empty_on_cpu(v)
        for k, v in sliced_tensor_store.stored_entries(checkpoint).items()
        if k.startswith("model/")
    }
    sliced_tensor_store.read_entries(checkpoint, target, alone=True)
    return {name: target[f"model/{about.tied.get(name, name)}"] for name in about.names}


def _scheduler_key(stored: Iterable[str], rank: int) -> str | None:
    """Every rank's scheduler took the same steps: the rank's own, since its groups are the same under the
    same plan, or any."""
    keys = sorted(k for k in stored if k.startswith("scheduler/"))
    return f"scheduler/{rank}" if f"scheduler/{rank}" in keys else next(iter(keys), None)


def _pack_optimizer_state(
    optimizer: torch.optim.Optimizer, stored: Mapping[str, Any], pieces: OptimizedSlices
) -> dict[str, Any]:
    """An optimizer's state dict, with its indices, from what is stored under names."""
    from secc.runtime.parameters.sliced_tensor_store import TensorSlice

    packed = optimizer.state_dict()
    options = {
        n: o
        for key, parts in stored.items()
        if key.startswith("groups/")
        for members, o in parts
        for n in members
    }
    values: dict[str, dict[str, Any]] = {}
    for key, value in stored.items():
        if key.startswith("optimizer/"):
            name, _, entry = key.removeprefix("optimizer/").rpartition("/")
            values.setdefault(name, {})[entry] = value
    state: dict[int, Any] = {}
    for group, indices in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        members = [pieces[p].name for p in group["params"]]
        known = next((options[n] for n in members if n in options), {})
        indices.update(known)
        for param, name, index in zip(group["params"], members, indices["params"], strict=True):
            if name in values:
                state[index] = {
                    k: v.values.view(param.shape) if isinstance(v, TensorSlice) else v
                    for k, v in values[name].items()
                }
    return {"state": state, "param_groups": packed["param_groups"]}


def _load_target(entry: torch.Tensor | None, piece: ParameterSlice) -> Any:
    """What an entry of a parameter's state is loaded into: room for the rank's piece of it, where the entry
    is like the parameter."""
    from secc.runtime.parameters.sliced_tensor_store import TensorSlice

    if entry is None or entry.shape != (piece.cut.shape if piece.cut else piece.shape) or not entry.ndim:
        return _empty_on_cpu(entry)
    return TensorSlice(
        torch.empty(piece.stop - piece.start, dtype=entry.dtype), piece.shape, piece.start, piece.cut
    )


def _empty_on_cpu(entry: torch.Tensor | None) -> torch.Tensor | None:
    """What a stored entry is loaded into: memory on the CPU for a tensor."""
    return None if entry is None else torch.empty_like(entry, device="cpu")


def _current_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _wait_for_ranks() -> None:
    if dist.is_initialized():
        dist.barrier()
