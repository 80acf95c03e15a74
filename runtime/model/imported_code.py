"""What the model file's code consists of besides the file itself: the user's own files that it imports, with
their contents' digests, and the installed packages that define the model's modules, with their versions.

A plan holds code of all of them, frozen when it was made: the ops between blocks. So a rank compares them
before it trains. Files are known by their module names, since folders differ between machines.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from torch import nn

from secc.runtime.model.source_lines import is_internal_file

_PACKAGE_FOLDERS = {"site-packages", "dist-packages"}
# By module name: the module, and the digest that its file had when it was found.
_known_digests: dict[str, tuple[ModuleType, str]] = {}
_STANDARD_LIBRARY = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


def find_imported_files(module: ModuleType, model: nn.Module) -> dict[str, Path]:
    """Finds the user's files that the model file imports, directly or not, and the files that define modules
    of `model`, by module name in order. Imports that have not been executed do not count."""
    waiting = [*_imported_modules(module), *_defining_modules(model)]
    found: dict[str, Path] = {}
    while waiting:
        name = waiting.pop()
        path = find_user_file(sys.modules[name])
        if path is None or name in found or sys.modules[name] is module:
            continue
        found[name] = path
        if name not in _known_digests or _known_digests[name][0] is not sys.modules[name]:
            _known_digests[name] = sys.modules[name], digest_file(path)
        waiting += _imported_modules(sys.modules[name])
    return dict(sorted(found.items()))


def forget_changed_modules() -> None:
    """Lets modules of the user's be imported again if the file of one of them has changed in the life of this
    process, so that a model file that is loaded again computes what its files say.

    All modules that were found are forgotten, since they may hold objects of the changed one. Files that
    cannot be read now count as changed.
    """
    known = dict(_known_digests)
    changed = [name for name, (module, digest) in known.items() if _digest_now(module) != digest]
    if not changed:
        return
    for name, (module, _) in known.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
            package, _, attribute = name.rpartition(".")
            if vars(sys.modules.get(package, module)).get(attribute) is module:
                delattr(sys.modules[package], attribute)  # where `from package import` would find it
    for name in changed:
        # Compiled code is compared with its source by seconds and size, which an edit may leave as they were.
        cached = getattr(known[name][0], "__cached__", None)
        if cached:
            with suppress(OSError):
                Path(cached).unlink()
    _known_digests.clear()
    importlib.invalidate_caches()


def _digest_now(module: ModuleType) -> str:
    """Returns the digest of the module's file as it is; "" if it cannot be read."""
    try:
        return digest_file(Path(module.__file__ or ""))
    except OSError:
        return ""


def find_package_versions(model: nn.Module) -> dict[str, str]:
    """Finds the versions of the installed packages, other than torch, that define modules of `model`."""
    names = {name.partition(".")[0] for name in _installed_modules(model)}
    return {name: version for name in sorted(names) if (version := package_version(name))}


def find_package_modules(model: nn.Module) -> tuple[str, ...]:
    """Finds the Python modules of those packages that define classes of the modules of `model`, in order."""
    packages = find_package_versions(model)
    return tuple(sorted(n for n in _installed_modules(model) if n.partition(".")[0] in packages))


def import_package_modules(names: Iterable[str]) -> None:
    """Imports modules of installed packages, so that processes that are forked later need not. What cannot be
    imported is left out: the model's own code says so where it is needed."""
    for name in names:
        with suppress(Exception):
            importlib.import_module(name)


def package_version(name: str) -> str:
    """Returns the version of the distribution that has the package `name`, "" if none is installed."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    for distribution in importlib.metadata.packages_distributions().get(name, ()):
        return importlib.metadata.version(distribution)
    return ""


def find_module_file(name: str) -> Path | None:
    """Returns the file of a module, imported or not; None if there is no such module."""
    module = sys.modules.get(name)
    with suppress(ImportError, ValueError):
        spec = getattr(module, "__spec__", None) or importlib.util.find_spec(name)
        return Path(spec.origin) if spec is not None and spec.origin else None
    return None


def digest_file(path: Path) -> str:
    """Returns the SHA-256 of a file's contents. Raises OSError if it cannot be read."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def find_user_file(module: ModuleType) -> Path | None:
    """Returns the module's Python file if it is the user's: neither installed, nor of the standard library,
    torch or secc."""
    file = getattr(module, "__file__", None)
    if not file or not file.endswith(".py") or is_internal_file(file):
        return None
    path = Path(file)
    if _PACKAGE_FOLDERS.intersection(path.parts) or any(map(path.is_relative_to, _STANDARD_LIBRARY)):
        return None
    return path


def _defining_modules(model: nn.Module) -> set[str]:
    """Returns the names of the imported Python modules that define classes of the model's modules."""
    classes = {base for part in model.modules() for base in type(part).__mro__}
    return {c.__module__ for c in classes} & sys.modules.keys()


def _installed_modules(model: nn.Module) -> set[str]:
    """Returns those of `_defining_modules` that are installed, other than torch's."""
    return {
        name
        for name in _defining_modules(model)
        if not is_internal_file(getattr(sys.modules[name], "__file__", None) or "<>")
        and find_user_file(sys.modules[name]) is None
    }


def _imported_modules(module: ModuleType) -> Iterator[str]:
    """Yields the names of the imported modules that import statements anywhere in a module's file name."""
    try:
        tree = ast.parse(Path(module.__file__ or "").read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = _absolute_name(node, module)
            names = [source, *(f"{source}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")  # importing a.b executes the file of a, too
            prefixes = (".".join(parts[:i]) for i in range(1, len(parts) + 1))
            yield from (prefix for prefix in prefixes if sys.modules.get(prefix) is not None)


def _absolute_name(node: ast.ImportFrom, module: ModuleType) -> str:
    """Returns the full name of the module that a `from` statement names; "" beyond the top package."""
    if not node.level:
        return node.module or ""
    with suppress(ImportError):
        return importlib.util.resolve_name("." * node.level + (node.module or ""), module.__package__ or "")
    return ""
