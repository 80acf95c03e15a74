"""Python names for SSA values, modules and classes: readable, unique in their scope, never a keyword or a
name the templates use."""

from __future__ import annotations

import builtins
import keyword
import re

from secc.ir.dialect.readable_names import strip_wrappers

_RESERVED_NAMES = {"self", "batch", "edges", "torch", "aten", "device", "leaves", "size", "pattern"}


class NameScope:
    """Assigns unique identifiers close to given texts."""

    def __init__(self, taken: set[str] | None = None) -> None:
        self._taken = _RESERVED_NAMES | set(dir(builtins)) | (taken or set())

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
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    if name[0].isdigit() or keyword.iskeyword(name):
        name = f"_{name}" if not name[0].isdigit() else f"v{name}"
    return name


def section_class_name(section: str) -> str:
    """`vision_tower` -> `VisionTower`."""
    return "".join(part[:1].upper() + part[1:] for part in to_python_name(section).split("_") if part)


def block_attribute_names(paths: list[str], taken: frozenset[str] = frozenset()) -> dict[str, str]:
    """Attribute names for module paths: the shortest unambiguous tails that are not `taken`."""
    names: dict[str, str] = {}
    for path in paths:
        parts = strip_wrappers(path).split(".")
        tails = ["_".join(parts[-n:]) for n in range(1, len(parts) + 1)]
        others = [strip_wrappers(p).split(".") for p in paths if p != path]
        unique = (
            t
            for n, t in enumerate(tails, 1)
            if not any("_".join(o[-n:]) == t for o in others) and not t[0].isdigit()
        )
        free = (t for t in unique if to_python_name(t) not in taken)
        names[path] = to_python_name(next(free, "_".join(["block", *parts])))
    return names
