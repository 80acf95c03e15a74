"""Finds the stored tensor that each parameter and buffer of the user's model is read from with `--init`.

    --init DIR          the whole model, by its own names; a subdirectory named like a component holds it
    --init PATH=DIR     the component at a module path; may be given several times

The checkpoint of a component often comes from elsewhere. Its names may have a prefix more or less than the
component's own (`model.layers…` or `layers…`), and files of Hugging Face's hub may have names and tensors
from before its models were rearranged; `hf_weight_mapping` translates these.
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
    """Read the weights of the tensors that this rank holds, which are those of the state dict that are not on
    the meta device. Shared parameters are read once.

    `aliases` maps each parameter name to the first of its names. Tensors named in `later` are not read; their
    sources are returned. All ranks look for all tensors, so that all raise the same errors. With `report`,
    stored names without a place in the model are written to stderr. Raises UserError for weights that are
    missing or have another shape.
    """
    state = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    names: dict[str, list[str]] = {}
    for name in state:
        names.setdefault(aliases.get(name, name), []).append(name)
    stored, unused = _find_sources(model, init, state)
    sources = {
        first: next((stored[n] for n in aliases_of_first if n in stored), None)
        for first, aliases_of_first in names.items()
    }
    _check_sources(state, sources, init)
    if report and unused:
        sys.stderr.write(
            f"--init: {len(unused)} stored tensors have no place in the model: {_shorten_names(unused)}\n"
        )
    for first, source in sources.items():
        if source is not None and not state[first].is_meta and first not in later:
            with torch.no_grad():
                source.read_into(state[first])
    return {first: source for first, source in sources.items() if source is not None and first in later}


def _check_sources(
    state: Mapping[str, torch.Tensor], sources: Mapping[str, WeightSource | None], init: InitDirectories
) -> None:
    for name, source in sources.items():
        if source is not None and source.shape != tuple(state[name].shape):
            message = f"--init: {name} has shape {list(source.shape)}, not {list(state[name].shape)}"
            raise UserError(message, str(source.file), "give weights that were saved from this model")
    where = ", ".join(str(directory) for _, directory in init)
    missing = [name for name, source in sources.items() if source is None]
    if missing:
        remedy = (
            "give those of each component (--init PATH=DIR),"
            " or load what you have in model() and leave --init out"
        )
        raise UserError(
            f"--init: {len(missing)} of {len(sources)} tensors are missing: {_shorten_names(missing)}",
            where,
            remedy,
        )


def _find_sources(
    model: nn.Module, init: InitDirectories, state: Mapping[str, torch.Tensor]
) -> tuple[dict[str, WeightSource], list[str]]:
    """Return the source of each name of the state dict, and the stored names that are not used. Later entries
    of `init` override earlier ones."""
    sources: dict[str, WeightSource] = {}
    unused: list[str] = []
    for path, directory in _component_directories(model, init):
        prefix = f"{path}." if path else ""
        wanted = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
        stored = list_stored_tensors(directory)
        matched = _match_stored_names(model.get_submodule(path), wanted, stored)
        sources |= {prefix + name: source for name, source in matched.items()}
        used = {name for source in matched.values() for name in source.stored_names}
        unused += [f"{directory.name}/{name}" for name in stored if name not in used]
    return sources, unused


def _component_directories(model: nn.Module, init: InitDirectories) -> Iterator[tuple[str, Path]]:
    """Iterate over (module path, directory with safetensors files): each directory of `init`, then its
    subdirectories that are named like components."""
    modules = {name for name, _ in model.named_modules()}
    for path, directory in init:
        if path not in modules:
            raise UserError(
                f"--init: the model has no module {path!r}",
                str(directory),
                f"modules are {_shorten_names(sorted(modules - {''}))}",
            )
        subdirectories = (
            [d for d in sorted(directory.glob("*")) if d.is_dir() and any(d.glob("*.safetensors"))]
            if directory.is_dir()
            else []
        )
        named = [(".".join(filter(None, (path, d.name))), d) for d in subdirectories]
        components = [(name, d) for name, d in named if name in modules]
        if any(directory.glob("*.safetensors")):
            yield path, directory
        elif not components:
            other_format = next(
                (p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern)), ""
            )
            remedy = (
                f"turn {other_format} into safetensors"
                if other_format
                else "give a directory of safetensors files, or `--init seed`"
            )
            raise UserError("--init: no *.safetensors file there", str(directory), remedy)
        yield from components


def _match_stored_names(
    module: nn.Module, wanted: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]
) -> dict[str, WeightSource]:
    """Return the source of each tensor of the module, with the name mapping that finds most of them. The
    stored names as they are come first."""
    best: dict[str, WeightSource] = {}
    for names in _name_mappings(module, wanted, stored):
        matched = {name: source for name, source in names.items() if name in wanted}
        if len(matched) > len(best):
            best = matched
        if len(best) == len(wanted):
            break
    return best


def _name_mappings(
    module: nn.Module, wanted: Iterable[str], stored: Mapping[str, StoredTensor]
) -> Iterator[Mapping[str, WeightSource]]:
    """Iterate over ways to read stored names: as they are, without a leading component, with one, and by
    Hugging Face's tables."""
    yield stored
    for first in dict.fromkeys(name.split(".")[0] for name in stored):
        yield {name.removeprefix(f"{first}."): entry for name, entry in stored.items()}
    wanted_names = set(wanted)
    for first in dict.fromkeys(name.split(".")[0] for name in wanted_names):
        yield {
            f"{first}.{name}" if f"{first}.{name}" in wanted_names else name: entry
            for name, entry in stored.items()
        }
    yield map_hf_weights(module, stored)


def _shorten_names(names: Iterable[str]) -> str:
    """Join the first names, and say how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - _NAMES_SHOWN} more" if len(listed) > _NAMES_SHOWN else ""
    return ", ".join(listed[:_NAMES_SHOWN]) + more
