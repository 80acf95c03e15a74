"""Writes a component of a trained model as a folder that Hugging Face's `from_pretrained` loads.

The component is built without weights by the model file, as the plan that trained it names it. Its weights
are then read from the checkpoint into unlinked files that are mapped into memory, one per tensor, so that the
kernel can take their pages back at any time. Names, tied and converted weights, configurations and adapters
are left to Hugging Face's own `save_pretrained`, which holds one shard at a time.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from secc.driver.plan_origin import check_model_is_trusted
from secc.driver.reading_rate import READ_STAGE, WRITE_STAGE, ReadingRate
from secc.errors import UserError
from secc.runtime.model.meta_build import build_meta_model
from secc.runtime.parameters.checkpoint import load_entries_of_model
from secc.runtime.parameters.checkpoint_folder import FoundCheckpoint
from secc.runtime.parameters.rank_weights import check_parameters, load_user_model
from secc.runtime.plan.plan_file import load_plan

SHARD_SIZE = "5GB"
_MAPPED_BYTES = 1 << 20  # smaller tensors are plain memory
_GENERATION_FILE = "generation_config.json"
_COPIED_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.spm",
    "*.tiktoken", "bpe.codes", "normalizer.json", "tekken.json", "*processor_config.json",
    "chat_template*", "additional_chat_templates/*.jinja",
)  # fmt: skip


class ComponentKind(Enum):
    """What is written of a component; the values are shown to users."""

    PRETRAINED = "model"
    ADAPTER = "adapter"
    WEIGHTS = "weights alone"


@dataclass(frozen=True)
class ExportedFolder:
    """What was written: `copied` are the files of tokenizers and processors, `notes` what a user should
    know, a line each."""

    folder: Path
    component: str
    kind: ComponentKind
    files: tuple[str, ...]
    copied: tuple[str, ...]
    bytes: int
    notes: tuple[str, ...]


def build_trained_model(found: FoundCheckpoint, plan_directory: Path | None, trust_model: bool) -> nn.Module:
    """Returns the model that wrote a checkpoint, without weights: that of the plan that the checkpoint names,
    or of `plan_directory`.

    Raises UserError if there is no such plan, if its model file has changed, or if another user compiled the
    plan and `trust_model` is not set: the model file is run.
    """
    if plan_directory is None:
        if found.manifest.plan is None:
            message = "the checkpoint does not say which plan has written it"
            raise UserError(message, str(found.path), "give the plan: --plan PLAN")
        plan_directory = Path(found.manifest.plan)
        if not plan_directory.is_dir():
            message = f"the plan that has written the checkpoint is no longer at {plan_directory}"
            raise UserError(message, str(found.path), "give its place: --plan PLAN")
    plan = load_plan(plan_directory)
    if not trust_model:
        check_model_is_trusted(plan_directory)
    model = build_meta_model(load_user_model(plan, plan_directory))
    check_parameters(plan, model)
    return model


def export_component(
    model: nn.Module,
    found: FoundCheckpoint,
    folder: Path,
    path: str | None = None,
    averaged: bool = False,
    show: Callable[[str], None] = lambda step: None,
) -> ExportedFolder:
    """Writes the component at the module path `path` of `model` with the weights of a checkpoint.

    model: built without weights. path: "" for the model itself; None for its only Hugging Face model, or the
    model itself if it has none. show: called with what is done now. The folder appears whole or not at all.
    Never uses the network.

    Raises UserError if there is no such component or several, if the folder holds something or cannot be
    written, or if the checkpoint is of another model.
    """
    folder = folder.resolve()
    _check_folder_is_empty(folder)
    path = _choose_component(model) if path is None else path
    component = _find_component(model, path)
    kind = _kind_of(component)
    scratch = folder.with_name(f".{folder.name}.incomplete-{os.getpid()}")
    try:
        scratch.mkdir(parents=True)
        with _offline():
            notes = _write_component(component, kind, path, found, scratch, averaged, show)
            source = _source_folder(component)
            copied = _copy_tokenizers(source, scratch) if source is not None else ()
        if kind is ComponentKind.PRETRAINED and not copied:
            came = f"{source} has none" if source else "the configuration names no folder or cached model"
            notes.append(f"no tokenizer or processor files were copied: {came}")
        files = sorted(p for p in scratch.rglob("*") if p.is_file())
        written = tuple(str(p.relative_to(scratch)) for p in files)
        size = sum(p.stat().st_size for p in files)
        os.rename(scratch, folder)
    except OSError as error:
        cause = error.strerror or str(error)
        raise UserError(f"cannot write the folder: {cause}", str(folder), "choose another --hf") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return ExportedFolder(folder, path, kind, written, copied, size, tuple(notes))


def _check_folder_is_empty(folder: Path) -> None:
    remedy = "give a new or empty folder with --hf"
    if folder.exists() and not folder.is_dir():
        raise UserError("--hf takes a folder, and this is a file", str(folder), remedy)
    if folder.is_dir() and next(folder.iterdir(), None) is not None:
        raise UserError("the folder is not empty", str(folder), remedy)


# -- which component ----------------------------------------------------------------------------------------


def _kind_of(module: nn.Module) -> ComponentKind:
    """Says how a module is written. Its class's library has been imported if it is one of Hugging Face's."""
    adapters, transformers = sys.modules.get("peft"), sys.modules.get("transformers.modeling_utils")
    if adapters is not None and isinstance(module, adapters.PeftModel):
        return ComponentKind.ADAPTER
    if transformers is not None and isinstance(module, transformers.PreTrainedModel):
        return ComponentKind.PRETRAINED
    return ComponentKind.WEIGHTS


def _outermost_components(model: nn.Module, path: str = "") -> Generator[str]:
    """Yields the paths of Hugging Face models that are in no other."""
    if _kind_of(model) is not ComponentKind.WEIGHTS:
        yield path
        return
    for name, child in model.named_children():
        yield from _outermost_components(child, f"{path}.{name}" if path else name)


def _choose_component(model: nn.Module) -> str:
    found = list(_outermost_components(model))
    if len(found) > 1:
        listed = ", ".join(found[:20])
        raise UserError(
            f"the model has {len(found)} Hugging Face models: {listed}", "", "choose one: --component PATH"
        )
    return found[0] if found else ""


def _find_component(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        outermost = [p or "the model itself" for p in _outermost_components(model)]
        names = outermost or [name for name, _ in model.named_children()]
        raise UserError(
            f"--component: the model has no module {path!r}", "", f"it has {', '.join(names[:20]) or 'none'}"
        ) from None


# -- weights ------------------------------------------------------------------------------------------------


def _write_component(
    component: Any,
    kind: ComponentKind,
    path: str,
    found: FoundCheckpoint,
    folder: Path,
    averaged: bool,
    show: Callable[[str], None],
) -> list[str]:
    """Fills `folder` with all that is written with the weights. Returns notes for the user."""
    names = set(component.state_dict())
    notes: list[str] = []
    if kind is ComponentKind.ADAPTER:
        names, left_out = _adapter_names(component, names)
        if left_out:
            what = f"{len(left_out)} trained parameters are outside of the adapter and not written: "
            notes.append(what + ", ".join(left_out[:3]) + (", …" if len(left_out) > 3 else ""))
    show(READ_STAGE)
    _load_weights(component, path, names, found, folder, averaged, show)
    show(WRITE_STAGE)
    try:
        if kind is ComponentKind.ADAPTER:
            component.save_pretrained(str(folder))
            base = component.get_base_model()
            if not getattr(base, "name_or_path", ""):
                notes.append("the base model came from no folder or hub name: keep what builds it")
        elif kind is ComponentKind.PRETRAINED:
            _set_generation_config(component)
            component.save_pretrained(str(folder), max_shard_size=SHARD_SIZE)
        else:
            _save_weights_alone(component, folder)
            notes.append(f"{path or 'the model'} is no PreTrainedModel: weights alone, without config.json")
    except (RuntimeError, ValueError, ImportError) as error:
        cause = str(error).strip().splitlines()[0]
        raise UserError(
            f"Hugging Face's libraries do not save {path or 'the model'}: {cause}",
            str(found.path),
            "`secc export -o FILE.safetensors` writes its weights",
        ) from error
    return notes


def _load_weights(
    component: nn.Module,
    path: str,
    names: Iterable[str],
    found: FoundCheckpoint,
    scratch: Path,
    averaged: bool,
    show: Callable[[str], None],
) -> None:
    """Gives the entries `names` of the component's state dict the checkpoint's values, in the component's
    dtypes; what was tied stays one parameter."""
    prefix = f"{path}." if path else ""
    targets: Mapping[str, Any] = {
        f"{prefix}{n}": t for n, t in component.state_dict().items() if n in set(names)
    }
    tensors = [n for n, t in targets.items() if isinstance(t, torch.Tensor)]
    if missing := next((n for n in tensors if n not in found.manifest.names), None):
        raise _other_model_error(found, f"{missing!a} is missing")

    def allocate(name: str, stored: torch.Tensor) -> torch.Tensor:
        shape = targets[name].shape
        if stored.shape != shape:
            raise _other_model_error(
                found, f"{name!a} has shape {list(stored.shape)}, expected {list(shape)}"
            )
        return _map_memory(stored.shape, targets[name].dtype, scratch)

    values = load_entries_of_model(found, tensors, allocate, averaged, ReadingRate(show).show)
    parameters: dict[int, nn.Parameter] = {}  # by the id of the value
    for module_path, module in component.named_modules(remove_duplicate=False):
        inside = f"{prefix}{module_path}." if module_path else prefix
        for name, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if (value := values.get(inside + name)) is not None:
                made = parameters.setdefault(id(value), nn.Parameter(value, requires_grad=old.requires_grad))
                module.register_parameter(name, made)
        for name, _ in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if (value := values.get(inside + name)) is not None:
                setattr(module, name, value)


def _other_model_error(found: FoundCheckpoint, problem: str) -> UserError:
    message = f"the checkpoint is of another model: {problem}"
    return UserError(message, str(found.path), "give the plan that has written it: --plan PLAN")


def _map_memory(shape: torch.Size, dtype: torch.dtype, scratch: Path) -> torch.Tensor:
    """Returns a tensor without values; a large one lives in a file without a name, on the disk of `scratch`.

    Raises OSError if the disk has no room for it.
    """
    size = shape.numel() * dtype.itemsize
    if size < _MAPPED_BYTES:
        return torch.empty(shape, dtype=dtype)
    with tempfile.NamedTemporaryFile(dir=scratch) as file:
        os.posix_fallocate(
            file.fileno(), 0, size
        )  # writing to a mapped hole of a full disk kills the process
        values = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
    return values.view(dtype).view(shape)


def _adapter_names(component: Any, names: set[str]) -> tuple[set[str], list[str]]:
    """Returns the entries of a PeftModel's state dict that its adapters' files are made of, and the trained
    parameters that no file has."""
    from peft import get_peft_model_state_dict  # pyright: ignore[reportMissingImports]

    state = component.state_dict()
    name_of = {id(tensor): name for name, tensor in state.items()}
    with _offline():
        saved = [
            id(tensor)
            for adapter in component.peft_config
            for tensor in get_peft_model_state_dict(
                component, state_dict=dict(state), adapter_name=adapter
            ).values()
        ]
    trained = [n for n, p in component.named_parameters() if p.requires_grad]
    if not all(key in name_of for key in saved):  # computed from others: all are read
        return names, []
    needed = {name_of[key] for key in saved}
    return needed, [name for name in trained if name not in needed]


def _save_weights_alone(component: nn.Module, folder: Path) -> None:
    from huggingface_hub import save_torch_state_dict

    state = {n: t for n, t in component.state_dict().items() if isinstance(t, torch.Tensor)}
    save_torch_state_dict(state, folder, max_shard_size=SHARD_SIZE)


# -- what comes with the weights ----------------------------------------------------------------------------


@contextmanager
def _offline() -> Generator[None]:
    """Keeps Hugging Face's libraries from the network."""
    with mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}):
        constants = sys.modules.get("huggingface_hub.constants")
        if constants is None:
            yield
            return
        with mock.patch.object(constants, "HF_HUB_OFFLINE", True):
            yield


def _source_folder(component: Any) -> Path | None:
    """Returns the local folder, or the one in the hub's cache, that the component's configuration came from;
    None if there is none."""
    if _kind_of(component) is ComponentKind.ADAPTER:
        component = component.get_base_model()
    config = getattr(component, "config", None)
    name = getattr(config, "_name_or_path", "") if _kind_of(component) is ComponentKind.PRETRAINED else ""
    if not name or not isinstance(name, str):
        return None
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # not a name that the hub has
        cached = try_to_load_from_cache(name, "config.json", revision=getattr(config, "_commit_hash", None))
        if isinstance(cached, str):
            return Path(cached).parent
    return None


def _set_generation_config(component: Any) -> None:
    """Gives a component the source's generation settings, as `from_pretrained` does, unless the model file
    has set its own."""
    source = _source_folder(component)
    if source is None or not (source / _GENERATION_FILE).is_file() or not component.can_generate():
        return
    from transformers import GenerationConfig

    default = GenerationConfig.from_model_config(component.config)
    if component.generation_config.to_dict() == default.to_dict():
        component.generation_config = GenerationConfig.from_pretrained(str(source))


def _copy_tokenizers(source: Path, folder: Path) -> tuple[str, ...]:
    """Copies the files of tokenizers, processors and chat templates that `folder` lacks."""
    names = sorted(
        str(p.relative_to(source))
        for pattern in ("*", "additional_chat_templates/*")
        for p in source.glob(pattern)
        if p.is_file()
    )
    copied = [
        name
        for name in names
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _COPIED_FILES)
        and not (folder / name).exists()
    ]
    for name in copied:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, folder / name)
    return tuple(copied)
