"""The weights of `--init`: which stored tensor each parameter and buffer of the user's model is read from.

    --init DIR          the whole model, by its own names; a subdirectory that has the name of a component
    holds that component --init PATH=DIR     the component at a module path; may be given several times

A component's checkpoint mostly comes from elsewhere. Its names may have a prefix more or less than the
component's own (`model.layers…` or `layers…`), and Hugging Face's hub has names and tensors from before its
models were rearranged, which its own tables translate.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from secc.runtime.errors import UserError
from secc.runtime.model.hf_weight_mapping import WeightSource, map_hf_weights
from secc.runtime.model.safetensors_reader import StoredTensor, list_stored_tensors

InitDirectories = tuple[tuple[str, Path], ...]  # (module path, "" for the whole model; directory)
_NAMES_SHOWN = 3  # names in a message


def load_init_weights(
    model: nn.Module,
    init: InitDirectories,
    aliases: Mapping[str, str],
    later: Collection[str] = (),
    report: bool = False,
) -> dict[str, WeightSource]:
    """Read what this rank holds of the model: every tensor of its state dict that is not on the meta device,
    ties once.

    Returns where those named in `later` are to be read from. `aliases` gives each parameter name the first of
    its names. All ranks look for all tensors, so that all refuse the same. With `report`, names that the
    model has no place for are written to stderr. Raises UserError for weights that are missing or do not fit.
    """
    state = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    names: dict[str, list[str]] = {}
    for name in state:
        names.setdefault(aliases.get(name, name), []).append(name)
    stored, spare = _find_sources(model, init, state)
    found = {
        first: next((stored[n] for n in several if n in stored), None) for first, several in names.items()
    }
    _check_sources(state, found, init)
    if report and spare:
        sys.stderr.write(
            f"--init: {len(spare)} stored tensors have no place in the model: {_shorten_names(spare)}\n"
        )
    for first, entry in found.items():
        if entry is not None and not state[first].is_meta and first not in later:
            with torch.no_grad():
                entry.read_into(state[first])
    return {first: entry for first, entry in found.items() if entry is not None and first in later}


def _check_sources(
    state: Mapping[str, torch.Tensor], found: Mapping[str, WeightSource | None], init: InitDirectories
) -> None:
    for name, entry in found.items():
        if entry is not None and entry.shape != tuple(state[name].shape):
            message = f"--init: {name} has shape {list(entry.shape)}, not {list(state[name].shape)}"
            raise UserError(message, str(entry.file), "give weights that were saved from this model")
    where = ", ".join(str(directory) for _, directory in init)
    missing = [name for name, entry in found.items() if entry is None]
    if missing:
        remedy = "give weights that were saved from this model, or those of each component: --init PATH=DIR"
        raise UserError(
            f"--init: {len(missing)} of {len(found)} tensors are missing: {_shorten_names(missing)}",
            where,
            remedy,
        )


def _find_sources(
    model: nn.Module, init: InitDirectories, state: Mapping[str, torch.Tensor]
) -> tuple[dict[str, WeightSource], list[str]]:
    """Each name of the state dict -> its source, and the stored names without a place. Later sources go
    before earlier ones."""
    found: dict[str, WeightSource] = {}
    spare: list[str] = []
    for path, directory in _component_directories(model, init):
        prefix = f"{path}." if path else ""
        wanted = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
        stored = list_stored_tensors(directory)
        places = _match_stored_names(model.get_submodule(path), wanted, stored)
        found |= {prefix + name: source for name, source in places.items()}
        used = {name for source in places.values() for name in source.stored_names}
        spare += [f"{directory.name}/{name}" for name in stored if name not in used]
    return found, spare


def _component_directories(model: nn.Module, init: InitDirectories) -> Iterator[tuple[str, Path]]:
    """Where the weights of which module are, whole models before their components."""
    modules = {name for name, _ in model.named_modules()}
    for path, directory in init:
        if path not in modules:
            raise UserError(
                f"--init: the model has no module {path!r}",
                str(directory),
                f"modules are {_shorten_names(sorted(modules - {''}))}",
            )
        below = (
            [d for d in sorted(directory.glob("*")) if d.is_dir() and any(d.glob("*.safetensors"))]
            if directory.is_dir()
            else []
        )
        named = [(".".join(filter(None, (path, d.name))), d) for d in below]
        parts = [(name, d) for name, d in named if name in modules]
        if any(directory.glob("*.safetensors")):
            yield path, directory
        elif not parts:
            other = next(
                (p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern)), ""
            )
            remedy = (
                f"turn {other} into safetensors"
                if other
                else "give a directory of safetensors files, or `--init seed`"
            )
            raise UserError("--init: no *.safetensors file there", str(directory), remedy)
        yield from parts


def _match_stored_names(
    module: nn.Module, wanted: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]
) -> dict[str, WeightSource]:
    """What each tensor of the module is read from, in the way of reading that finds most of the module: as
    they are, if that finds all."""
    best: dict[str, WeightSource] = {}
    for names in _name_mappings(module, wanted, stored):
        places = {name: source for name, source in names.items() if name in wanted}
        if len(places) > len(best):
            best = places
        if len(best) == len(wanted):
            break
    return best


def _name_mappings(
    module: nn.Module, wanted: Iterable[str], stored: Mapping[str, StoredTensor]
) -> Iterator[Mapping[str, WeightSource]]:
    yield stored
    for first in dict.fromkeys(name.split(".")[0] for name in stored):
        yield {name.removeprefix(f"{first}."): entry for name, entry in stored.items()}
    own = set(wanted)
    for first in dict.fromkeys(name.split(".")[0] for name in own):
        yield {
            f"{first}.{name}" if f"{first}.{name}" in own else name: entry for name, entry in stored.items()
        }
    yield map_hf_weights(module, stored)


def _shorten_names(names: Iterable[str]) -> str:
    """The first names, and how many there are beside them."""
    listed = list(names)
    more = f" and {len(listed) - _NAMES_SHOWN} more" if len(listed) > _NAMES_SHOWN else ""
    return ", ".join(listed[:_NAMES_SHOWN]) + more
