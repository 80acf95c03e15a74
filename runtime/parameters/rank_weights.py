"""The model on a rank: built by the user's code, checked against the plan, and materialised only where this
rank's sections need it.

Weights come from the seed, as `model()` makes them, or from files. A large model is built by one rank per
node, which sends the others what they hold; from files, each rank reads its own part. Parameters of other
ranks' sections are on the meta device, where they cost no memory and cannot be read by mistake. Parameters
that no section uses stay on rank 0, so that a checkpoint contains the user's whole state dict. Buffers are
present everywhere: they are small, and glue may read them.
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
from secc.runtime.host.hidden_ranks import make_groups_hideable
from secc.runtime.model import imported_code, init_weights, user_file
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

MODEL_FILE_COPY = "model.py.txt"  # in the plan directory: a copy of the model file at compile time
MAX_DIFF_LINES = 40
BUILD_EVERYWHERE_BYTES = 1 << 25  # up to this size every rank builds the model: faster than receiving it


def imported_file_copy(name: str) -> str:
    """Returns the path in the plan directory of the copy of a user's module at compile time."""
    return f"imports/{name}.py.txt"


def load_user_model(plan: Plan, directory: Path) -> UserModel:
    """Loads the model file of the plan in `directory`. Raises UserError, with a diff, if the file or what it
    imports has changed since the plan was made."""
    path = directory / plan.model.path
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read the plan's model file: {error.strerror}", str(path), "put it back, or compile again"
        ) from None
    if hashlib.sha256(text).hexdigest() != plan.model.sha256:
        copy = directory / MODEL_FILE_COPY
        before = copy.read_text(encoding="utf-8") if copy.exists() else ""
        raise _model_changed_error(
            "the model file has changed since the plan was made",
            path,
            before.splitlines(),
            text.decode().splitlines(),
        )
    make_groups_hideable()
    user_file.add_import_folder(path)
    _check_imported_code(plan, directory, path, is_loaded=False)
    user = user_file.load_model_file(path)
    user.function_blocks = plan.model.functions
    _check_imported_code(plan, directory, path, is_loaded=True)
    return user


def _check_imported_code(plan: Plan, directory: Path, model_file: Path, is_loaded: bool) -> None:
    """Raises UserError if a file of the user's that the model file imports, or the version of a package that
    defines its modules, differs from when the plan was made.

    Before the model file `is_loaded`, no code of the user's runs here: a package comes before its modules,
    so its own file has been compared when they are looked for. A module that is found only later, since the
    model file says where, is compared then.
    """
    for name, digest in sorted(plan.model.imports.items()):
        path = imported_code.find_module_file(name)
        if path is None and not is_loaded:
            continue
        if path is None:
            message = f"the plan was made with the module {name}, which this machine does not find"
            remedy = "put its file next to the model file or on PYTHONPATH, or compile again"
            raise UserError(message, str(model_file), remedy)
        text = path.read_bytes()
        if hashlib.sha256(text).hexdigest() != digest:
            copy = directory / imported_file_copy(name)
            before = copy.read_text(encoding="utf-8") if copy.exists() else ""
            raise _model_changed_error(
                f"the module {name}, which the model file imports, has changed since the plan was made",
                path,
                before.splitlines(),
                text.decode(errors="replace").splitlines(),
            )
    for name, version in plan.model.packages.items():
        installed = imported_code.package_version(name)
        if installed != version:
            raise UserError(
                f"the plan was made with {name} {version}, but {installed or 'no version'} is installed: its"
                " modules may compute something else",
                str(model_file),
                f"install {name} {version}, or compile again",
            )


@dataclass(frozen=True)
class RankModel:
    """The model on this rank. Parameters named in `deferred_sources` have no values yet; they are read from
    these sources one unit at a time (zero3)."""

    model: nn.Module
    deferred_sources: Mapping[str, WeightSource]


def build_rank_model(
    plan: Plan, user: UserModel, rank: int, device: torch.device, seed: int, init: InitDirectories = ()
) -> RankModel:
    """Builds the model with the weights that `model()` makes after `torch.manual_seed(seed)`, or with the
    weights that `init` names, and materialises what `rank` holds on `device`.

    Collective over the ranks of a node if the model is large. Raises UserError if the parameters differ from
    the plan's, or if `init` lacks some of them.
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
    if node.is_builder or is_built_everywhere(plan):
        model = _build_with_values(plan, user, seed)
        if node.receiver_ranks() and not is_built_everywhere(plan):
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
    """Builds the model on the meta device; buffers that `model()` computes from neither stored nor random
    values have their values."""
    with seeded_rngs(seed):
        model = build_meta_model(user, tables=True)
    check_parameters(plan, model)
    return model


def _check_computed_buffers(model: nn.Module, user: UserModel) -> None:
    """Raises UserError for a large buffer that no file has and that could not be computed."""
    stored = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name not in stored and buffer.is_meta:
            message = (
                f"--init: the buffer {name} is not saved with the model, and model() draws it at random or"
                " fills it piece by piece"
            )
            raise UserError(
                message,
                user.function_source_line("model"),
                "register it with persistent=True, or make it with torch.zeros, arange and the like",
            )


def is_built_everywhere(plan: Plan) -> bool:
    """Whether the plan's model is so small that every rank builds the whole of it."""
    return _total_parameter_bytes(plan) <= BUILD_EVERYWHERE_BYTES


def _total_parameter_bytes(plan: Plan) -> int:
    """Returns the bytes of all parameters; tied parameters count once per name."""
    return sum(_parameter_bytes(text) for text in plan.model.parameters.values())


def _parameter_bytes(text: str) -> int:
    """Returns the bytes of a parameter described as "float32[64, 64] train"."""
    dtype, _, shape_text = text.partition("[")
    shape = [int(n) for n in shape_text.partition("]")[0].split(",") if n.strip()]
    return math.prod(shape) * getattr(torch, dtype).itemsize


def describe_parameters(model: nn.Module) -> dict[str, str]:
    """Describes every parameter, under each of its names, as "float32[64, 64] train" or "... frozen": the
    value of `model.parameters` in plan.json."""

    def describe(param: nn.Parameter) -> str:
        dtype = str(param.dtype).removeprefix("torch.")
        return f"{dtype}{list(param.shape)} {'train' if param.requires_grad else 'frozen'}"

    return {name: describe(p) for name, p in model.named_parameters(remove_duplicate=False)}


def check_parameters(plan: Plan, model: nn.Module) -> None:
    """Raises UserError, with a diff, if the model's parameters differ from those of the plan."""
    described = describe_parameters(model)
    if described != plan.model.parameters:
        tables = [
            [f"{name}: {text}" for name, text in sorted(table.items())]
            for table in (plan.model.parameters, described)
        ]
        raise _model_changed_error(
            "the model's parameters have changed since the plan was made", Path(plan.model.path), *tables
        )


def _model_changed_error(message: str, path: Path, before: list[str], after: list[str]) -> UserError:
    diff = list[str]()
    if before:
        diff += difflib.unified_diff(before, after, "when the plan was made", "now", lineterm="", n=1)
    hidden = len(diff) - MAX_DIFF_LINES
    shown = diff[:MAX_DIFF_LINES] + ([f"… {hidden} more lines"] if hidden > 0 else [])
    return UserError(
        "\n".join([message, *(f"    {line}" for line in shown)]),
        str(path),
        "compile the model again with `secc compile`",
    )


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Maps each name of each parameter to its first name in the model's order (tied parameters have several
    names)."""
    first: dict[nn.Parameter, str] = {}
    return {name: first.setdefault(p, name) for name, p in model.named_parameters(remove_duplicate=False)}


def parameter_names_of_rank(plan: Plan, model: nn.Module, rank: int) -> set[str]:
    """Returns the canonical names of the parameters that `rank` holds: those of its sections, and on rank 0
    also those of no section."""
    canonical = canonical_names(model)
    used = {canonical[name] for s in plan.sections for name in s.params}
    mine = {canonical[name] for s in plan.sections if rank in s.mesh.ranks for name in s.params}
    return mine | (set(canonical.values()) - used if rank == 0 else set())


def state_dict_owners(plan: Plan, model: nn.Module) -> dict[str, int]:
    """Maps each entry of the state dict to the first rank that holds it: a parameter by its sections, a
    buffer by the section that contains its module, anything else to rank 0."""
    canonical = canonical_names(model)
    ranks: dict[str, int] = {}
    for section in plan.sections:
        for name in section.params:
            first = canonical[name]
            ranks[first] = min(section.mesh.ranks + ((ranks[first],) if first in ranks else ()))

    holders: dict[int, int] = {}  # by module, as lines of forward that are a block have those that they call
    for section in plan.sections:
        for block in section.blocks:
            for module in model.get_submodule(block).modules():
                holders.setdefault(id(module), min(section.mesh.ranks))

    def first_rank_of_block(name: str) -> int:
        by_path = (min(s.mesh.ranks) for s in plan.sections for b in s.blocks if name.startswith(f"{b}."))
        return next(by_path, holders.get(id(model.get_submodule(name.rpartition(".")[0])), 0))

    return {
        name: ranks.get(canonical[name], 0) if name in canonical else first_rank_of_block(name)
        for name in model.state_dict()
    }


def all_zero3_parameter_names(plan: Plan, model: nn.Module) -> set[str]:
    """Returns the canonical names of all parameters that come to a device layer by layer, from replicas or
    from host memory; a device may be too small for all of them at once."""
    canonical = canonical_names(model)
    return {
        name
        for s in plan.sections
        if gathers_parameters(s) or s.offload == "weights"
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
    """Puts the parameters `names` and all buffers onto `device`, and all other parameters onto the meta
    device. Tied parameters stay tied.

    Parameters in `host` go to CPU memory, until zero3 shards them. Without `values`, parameters, and buffers
    and attribute tensors on the meta device, get uninitialised memory; without `room`, parameters in `host`
    get a placeholder instead.
    """
    wanted = set(names)
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for name, param in model.named_parameters():
        target = torch.device("cpu") if name in host else device
        if name in wanted and values:
            param.data = param.data.to(target)
        else:
            placeholder_only = name in wanted and name in host and not room
            tensor_now = (
                valueless_placeholder(param, target)
                if placeholder_only
                else torch.empty_like(param, device=target if name in wanted else "meta")
            )
            moved[param] = nn.Parameter(tensor_now, requires_grad=param.requires_grad)
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
    """Returns the tensor on `device`; uninitialised memory if it was on the meta device."""
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
