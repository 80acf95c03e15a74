"""Python names for SSA values, modules and classes: readable, unique in their scope, never a keyword or a
name the templates use."""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Iterable

from secc.ir.dialect.readable_names import identifier_characters, make_unique, strip_wrappers

# What the templates' modules and methods use.
_RESERVED_NAMES = (
    *("self", "batch", "edges", "torch", "aten", "device", "leaves", "size", "pattern", "sends", "terms"),
    *("kernels", "listed", "built", "scalar", "constants", "coefficients", "draw"),
)
_RESERVED_CLASSES = ("Batch", "SectionCase", "SectionModule", "Tensors")


class NameScope:
    """Assigns unique identifiers close to given texts."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = {*_RESERVED_NAMES, *dir(builtins), *taken}

    def take_name(self, name: str) -> None:
        """Reserve a name as it is."""
        self._taken.add(name)

    def claim_name(self, wish: str) -> str:
        """`wish` as an identifier, with a number appended if it is taken."""
        base = to_python_name(wish)
        found, number = base, 1
        while found in self._taken:
            number += 1
            found = f"{base}_{number}"
        self._taken.add(found)
        return found


def to_python_name(text: str) -> str:
    """The Python identifier closest to a text."""
    name = identifier_characters(text).strip("_") or "value"
    if name[0].isdigit() or keyword.iskeyword(name):
        name = f"_{name}" if not name[0].isdigit() else f"v{name}"
    return name


def section_class_name(section: str) -> str:
    """`vision_tower` -> `VisionTower`."""
    name = "".join(part[:1].upper() + part[1:] for part in to_python_name(section).split("_") if part)
    return f"{name}Section" if keyword.iskeyword(name) or name in _RESERVED_CLASSES else name


def section_module_name(section: str) -> str:
    """The module of a section under sections/; sections' names are identifiers unless a file was changed."""
    return section if section.isidentifier() else to_python_name(section)


def block_attribute_names(paths: list[str], taken: frozenset[str] = frozenset()) -> dict[str, str]:
    """Attribute names for module paths, all different: the shortest unambiguous tails that are not `taken`.

    Tails are compared as identifiers, because `a b` and `a-b` become the same one.
    """
    names: dict[str, str] = {}
    split = {path: strip_wrappers(path).split(".") for path in paths}
    for path, parts in split.items():
        used = {*taken, *names.values()}
        unique = (
            name
            for n in range(1, len(parts) + 1)
            if not parts[-n][:1].isdigit()
            and (name := _tail_name(parts, n)) not in used
            and not any(_tail_name(other, n) == name for p, other in split.items() if p != path)
        )
        wish = to_python_name("_".join(["block", *parts]))
        names[path] = next(unique, None) or make_unique(wish, used)
    return names


def _tail_name(parts: list[str], count: int) -> str:
    return to_python_name("_".join(parts[-count:]))
