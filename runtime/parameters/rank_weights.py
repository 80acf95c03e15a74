"""The model on a rank: built as the user builds it, held only where a section of the rank needs it, and shown
to be the plan's.

Weights come from the seed, as `model()` makes them, or from files. Of a large model one rank of a node builds
all and hands out what the others hold; from files, every rank reads what it holds. The parameters of other
ranks' sections are on the meta device, where they cost nothing and cannot be read by mistake. Parameters that
no section uses stay on rank 0, so that a checkpoint holds the user's whole state dict. Buffers stay
everywhere: they are small, and glue may read them.
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from secc.runtime.errors import UserError
from secc.runtime.model import init_weights, user_file
from secc.runtime.model.hf_weight_mapping import WeightSource
from secc.runtime.model.init_weights import InitDirectories
from secc.runtime.model.item_seeds import seeded_rngs
from secc.runtime.model.meta_build import build_meta_model
from secc.runtime.model.user_file import UserModel
from secc.runtime.parameters.node_broadcast import (
    NodeRanks,
    attribute_tensors,
    broadcast_weights,
    receive_weights,
)
from secc.runtime.parameters.sharded_optimizer import valueless_placeholder
from secc.runtime.parameters.zero3 import zero3_parameter_names
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import gathers_parameters

MODEL_FILE_COPY = "model.py.txt"  # in the plan directory: the model file that the plan was made from
MAX_DIFF_LINES = 40
BUILD_EVERYWHERE_BYTES = (
    1 << 25
)  # bytes: a model up to this size is built by every rank, which is quicker than to receive it


def load_user_model(plan: Plan, directory: Path) -> UserModel:
    """The model file of the plan in `directory`. Raises UserError with a diff if it is not the one that the
    plan was made from."""
    path = directory / plan.model.path
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read the plan's model file: {error.strerror}", str(path), "put it back, or compile again"
        ) from None
    if hashlib.sha256(text).hexdigest() != plan.model.sha256:
        copy = directory / MODEL_FILE_COPY
        before = copy.read_text() if copy.exists() else ""
        raise _model_changed_error(
            "the model file has changed since the plan was made",
            path,
            before.splitlines(),
            text.decode().splitlines(),
        )
    return user_file.load_model_file(path)


@dataclass(frozen=True)
class RankModel:
    """A model as a rank holds it. Its parameters in `stored` have no values yet: they are read from there, a
    layer at a time."""

    model: nn.Module
    deferred_sources: Mapping[str, WeightSource]


def build_rank_model(
    plan: Plan, user: UserModel, rank: int, device: torch.device, seed: int, init: InitDirectories = ()
) -> RankModel:
    """What `model()` gives after `torch.manual_seed(seed)`, or with the weights that `init` names; held for
    `rank`.

    Collective over the ranks of a node if the model is large. Raises UserError if its parameters are not
    those of the plan, or `init` lacks some.
    """
    node = NodeRanks.from_environment(rank)
    if init:
        model = _build_without_values(plan, user, seed)
        _check_computed_buffers(model, user)
        later = all_zero3_parameter_names(plan, model)
        materialize_parameters(
            model, parameter_names_of_rank(plan, model, rank), device, False, later, room=False
        )
        return RankModel(
            model,
            init_weights.load_init_weights(model, init, canonical_names(model), later, report=rank == 0),
        )
    if node.is_builder or _total_parameter_bytes(plan) <= BUILD_EVERYWHERE_BYTES:
        model = _build_with_values(plan, user, seed)
        if node.receiver_ranks() and _total_parameter_bytes(plan) > BUILD_EVERYWHERE_BYTES:
            broadcast_weights(
                node, model, {r: parameter_names_of_rank(plan, model, r) for r in node.receiver_ranks()}
            )
        materialize_parameters(
            model,
            parameter_names_of_rank(plan, model, rank),
            device,
            host=all_zero3_parameter_names(plan, model),
        )
    else:
        model = _build_without_values(plan, user, seed)
        materialize_parameters(
            model,
            parameter_names_of_rank(plan, model, rank),
            device,
            False,
            all_zero3_parameter_names(plan, model),
        )
        receive_weights(node, model, parameter_names_of_rank(plan, model, rank))
    return RankModel(model, {})


def _build_with_values(plan: Plan, user: UserModel, seed: int) -> nn.Module:
    with seeded_rngs(seed):
        model = user.build_model()
    check_parameters(plan, model)
    return model


def _build_without_values(plan: Plan, user: UserModel, seed: int) -> nn.Module:
    """The model without weights, but with those buffers that model() computes of nothing stored or random."""
    with seeded_rngs(seed):
        model = build_meta_model(user, tables=True)
    check_parameters(plan, model)
    return model


def _check_computed_buffers(model: nn.Module, user: UserModel) -> None:
    """Refuse a model with a large buffer that no file has and whose values were not computed."""
    stored = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name not in stored and buffer.is_meta:
            message = f"--init: the buffer {name} is not saved with the model, and model() draws it at random or fills it piece by piece"
            raise UserError(
                message,
                user.function_source_line("model"),
                "register it with persistent=True, or make it with torch.zeros, arange and the like",
            )


def _total_parameter_bytes(plan: Plan) -> int:
    """The bytes of all parameters; tied ones count under each name."""
    return sum(_parameter_bytes(text) for text in plan.model.parameters.values())


def _parameter_bytes(text: str) -> int:
    """The bytes of a parameter from its text in the plan, "float32[64, 64] train"."""
    dtype, _, rest = text.partition("[")
    shape = [int(n) for n in rest.partition("]")[0].split(",") if n.strip()]
    return math.prod(shape) * getattr(torch, dtype).itemsize


def describe_parameters(model: nn.Module) -> dict[str, str]:
    """Every parameter under each of its names as "float32[64, 64] train" or "... frozen": what plan.json
    keeps as `model.parameters`."""
    return {
        name: f"{str(p.dtype).removeprefix('torch.')}{list(p.shape)} {'train' if p.requires_grad else 'frozen'}"
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def check_parameters(plan: Plan, model: nn.Module) -> None:
    """Refuse a model whose parameters are not those that the plan was made for, with a diff of the two
    tables."""
    found = describe_parameters(model)
    if found != plan.model.parameters:
        tables = [
            [f"{name}: {text}" for name, text in sorted(t.items())] for t in (plan.model.parameters, found)
        ]
        raise _model_changed_error(
            "the model's parameters have changed since the plan was made", Path(plan.model.path), *tables
        )


def _model_changed_error(message: str, path: Path, before: list[str], after: list[str]) -> UserError:
    diff = (
        list(difflib.unified_diff(before, after, "when the plan was made", "now", lineterm="", n=1))
        if before
        else []
    )
    shown = diff[:MAX_DIFF_LINES] + (
        [f"… {len(diff) - MAX_DIFF_LINES} more lines"] if len(diff) > MAX_DIFF_LINES else []
    )
    return UserError(
        "\n".join([message, *(f"    {line}" for line in shown)]),
        str(path),
        "compile the model again with `secc compile`",
    )


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Each name of each parameter -> the first of its names in the model's order (tied parameters have
    several)."""
    first: dict[nn.Parameter, str] = {}
    return {name: first.setdefault(p, name) for name, p in model.named_parameters(remove_duplicate=False)}


def parameter_names_of_rank(plan: Plan, model: nn.Module, rank: int) -> set[str]:
    """The parameters, by their first names, that `rank` holds: those of its sections, and on rank 0 those of
    none."""
    canonical = canonical_names(model)
    used = {canonical[name] for s in plan.sections for name in s.params}
    mine = {canonical[name] for s in plan.sections if rank in s.mesh.ranks for name in s.params}
    return mine | (set(canonical.values()) - used if rank == 0 else set())


def state_dict_owners(plan: Plan, model: nn.Module) -> dict[str, int]:
    """Each entry of the state dict -> the first rank that holds it: by its sections, for buffers by the block
    that they are in, else 0."""
    canonical = canonical_names(model)
    ranks: dict[str, int] = {}
    for section in plan.sections:
        for name in section.params:
            first = canonical[name]
            ranks[first] = min(section.mesh.ranks + ((ranks[first],) if first in ranks else ()))

    def of_block(name: str) -> int:
        return next(
            (min(s.mesh.ranks) for s in plan.sections for b in s.blocks if name.startswith(f"{b}.")), 0
        )

    return {n: ranks.get(canonical[n], 0) if n in canonical else of_block(n) for n in model.state_dict()}


def all_zero3_parameter_names(plan: Plan, model: nn.Module) -> set[str]:
    """The parameters, by their first names, that replicas gather layer by layer: a device never has room for
    all of them."""
    canonical = canonical_names(model)
    return {
        name
        for s in plan.sections
        if gathers_parameters(s)
        for name in zero3_parameter_names(plan, s, canonical)
    }


def materialize_parameters(
    model: nn.Module,
    names: Iterable[str],
    device: torch.device,
    values: bool = True,
    host: Collection[str] = (),
    room: bool = True,
) -> None:
    """Put the parameters `names` and all buffers onto `device`, and every other parameter onto meta. Ties
    stay tied.

    Those in `host` go to the CPU's memory, until they are shared out. Without `values` the parameters get
    room for some, and so do buffers and tensors in attributes that have none; without `room` those in `host`
    get none.
    """
    wanted = set(names)
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for name, param in model.named_parameters():
        where = torch.device("cpu") if name in host else device
        if name in wanted and values:
            param.data = param.data.to(where)
        else:
            bare = name in wanted and name in host and not room
            held = (
                valueless_placeholder(param, where)
                if bare
                else torch.empty_like(param, device=where if name in wanted else "meta")
            )
            moved[param] = nn.Parameter(held, requires_grad=param.requires_grad)
    for module in model.modules():
        for key, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if param in moved:
                module.register_parameter(key, moved[param])
        for key, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, key, _allocate_or_move(buffer, device))
    if not values:
        for module, key, tensor in list(attribute_tensors(model)):
            setattr(module, key, _allocate_or_move(tensor, device))


def _allocate_or_move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor, or room for one without values, on `device`."""
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
