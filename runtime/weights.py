"""The model on a rank: built as the user builds it, held only where a section of the rank needs it, and shown to be the plan's.

Every rank builds the whole model from the same seed, keeps the parameters of its own sections and puts the others on the meta
device, where they cost nothing and cannot be read by mistake. Parameters that no section uses stay on rank 0, so that a checkpoint
holds the user's whole state dict. Buffers stay everywhere: they are small, and glue may read them.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from secc.runtime import user_model
from secc.runtime.errors import UserError
from secc.runtime.plan import Plan
from secc.runtime.seeding import seeded
from secc.runtime.user_model import UserModel

SOURCE_COPY = "model.py.txt"  # in the plan directory: the model file that the plan was made from
_DIFF_LINES = 40
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def load_user_model(plan: Plan, directory: Path) -> UserModel:
    """The model file of the plan in `directory`. Raises UserError with a diff if it is not the one that the plan was made from."""
    path = directory / plan.model.path
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the plan's model file: {error.strerror}", str(path), "put it back, or compile again") from None
    if hashlib.sha256(text).hexdigest() != plan.model.sha256:
        copy = directory / SOURCE_COPY
        before = copy.read_text() if copy.exists() else ""
        raise _changed("the model file has changed since the plan was made", path, before.splitlines(), text.decode().splitlines())
    return user_model.load(path)


def build_model(plan: Plan, user: UserModel, rank: int, device: torch.device, seed: int, init: Path | None = None) -> nn.Module:
    """What `model()` gives after `torch.manual_seed(seed)`, or with the weights of the safetensors files in `init`; held for `rank`.

    Raises UserError if the model's parameters are not those of the plan, or `init` lacks some that this rank holds.
    """
    with seeded(seed):
        model = user.model()
    check_parameters(plan, model)
    hold(model, names_of_rank(plan, model, rank), device)
    if init is not None:
        load_safetensors(model, init)
    return model


def parameter_table(model: nn.Module) -> dict[str, str]:
    """Every parameter under each of its names as "float32[64, 64] train" or "... frozen": what plan.json keeps as `model.parameters`."""
    return {
        name: f"{str(p.dtype).removeprefix('torch.')}{list(p.shape)} {'train' if p.requires_grad else 'frozen'}"
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def check_parameters(plan: Plan, model: nn.Module) -> None:
    """Refuse a model whose parameters are not those that the plan was made for, with a diff of the two tables."""
    found = parameter_table(model)
    if found != plan.model.parameters:
        tables = [[f"{name}: {text}" for name, text in sorted(t.items())] for t in (plan.model.parameters, found)]
        raise _changed("the model's parameters have changed since the plan was made", Path(plan.model.path), *tables)


def _changed(message: str, path: Path, before: list[str], after: list[str]) -> UserError:
    diff = list(difflib.unified_diff(before, after, "when the plan was made", "now", lineterm="", n=1)) if before else []
    shown = diff[:_DIFF_LINES] + ([f"… {len(diff) - _DIFF_LINES} more lines"] if len(diff) > _DIFF_LINES else [])
    return UserError("\n".join([message, *(f"    {line}" for line in shown)]), str(path), "compile the model again with `secc compile`")


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Each name of each parameter -> the first of its names in the model's order (tied parameters have several)."""
    first: dict[nn.Parameter, str] = {}
    return {name: first.setdefault(p, name) for name, p in model.named_parameters(remove_duplicate=False)}


def names_of_rank(plan: Plan, model: nn.Module, rank: int) -> set[str]:
    """The parameters, by their first names, that `rank` holds: those of its sections, and on rank 0 those of none."""
    canonical = canonical_names(model)
    used = {canonical[name] for s in plan.sections for name in s.params}
    mine = {canonical[name] for s in plan.sections if rank in s.mesh.ranks for name in s.params}
    return mine | (set(canonical.values()) - used if rank == 0 else set())


def owners(plan: Plan, model: nn.Module) -> dict[str, int]:
    """Each entry of the state dict -> the first rank that holds it: by its sections, for buffers by the block that they are in, else 0."""
    canonical = canonical_names(model)
    ranks: dict[str, int] = {}
    for section in plan.sections:
        for name in section.params:
            first = canonical[name]
            ranks[first] = min(section.mesh.ranks + ((ranks[first],) if first in ranks else ()))

    def of_block(name: str) -> int:
        return next((min(s.mesh.ranks) for s in plan.sections for b in s.blocks if name.startswith(f"{b}.")), 0)

    return {n: ranks.get(canonical[n], 0) if n in canonical else of_block(n) for n in model.state_dict()}


def hold(model: nn.Module, names: Iterable[str], device: torch.device) -> None:
    """Move the parameters `names` and all buffers to `device`, and every other parameter to meta. Ties stay tied."""
    wanted = set(names)
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for name, param in model.named_parameters():
        if name in wanted:
            param.data = param.data.to(device)
        else:
            moved[param] = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
    for module in model.modules():
        for key, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if param in moved:
                module.register_parameter(key, moved[param])
        for key, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, key, buffer.to(device))


def load_safetensors(model: nn.Module, directory: Path) -> None:
    """Read what this rank holds from the safetensors files in `directory`, by the user's names; a tied parameter under any of them."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError("--init: no *.safetensors file there", str(directory), "give a directory of safetensors files, or `--init seed`")
    stored = {name: (file, entry) for file in files for name, entry in _index(file)}
    canonical = canonical_names(model)
    names: dict[str, list[str]] = {}
    for name in model.state_dict(keep_vars=True):
        names.setdefault(canonical.get(name, name), []).append(name)
    state = model.state_dict()
    for first, aliases in names.items():
        found = next((stored[a] for a in aliases if a in stored), None)
        target = state[first]
        if not isinstance(target, torch.Tensor) or target.is_meta:
            continue
        if found is None or found[1].shape != tuple(target.shape):
            reason = "is missing" if found is None else f"has shape {list(found[1].shape)}, not {list(target.shape)}"
            raise UserError(f"--init: {first} {reason}", str(directory), "give weights that were saved from this model")
        target.copy_(found[1].read(found[0]))


class _Entry:
    """Where a tensor lies in a safetensors file."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], begin: int, end: int) -> None:
        self.dtype, self.shape, self.begin, self.end = dtype, shape, begin, end

    def read(self, file: Path) -> torch.Tensor:
        if self.begin == self.end:
            return torch.empty(self.shape, dtype=self.dtype)
        with file.open("rb") as f:
            f.seek(self.begin)
            return torch.frombuffer(bytearray(f.read(self.end - self.begin)), dtype=self.dtype).view(self.shape)


def _index(file: Path) -> Iterator[tuple[str, _Entry]]:
    """The tensors of a safetensors file: a 64-bit header length, the header as JSON, the values."""
    try:
        with file.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            if length > file.stat().st_size:
                raise ValueError("its header does not end")
            header = json.loads(f.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                yield name, _Entry(_DTYPES[entry["dtype"]], tuple(entry["shape"]), begin, end)
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise UserError(f"--init: not a safetensors file that can be read ({error})", str(file), "write it anew") from None
