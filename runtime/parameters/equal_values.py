"""Compares the plain values that `on_step` sets on different ranks: an attribute of a module, a global.

A callback runs on every rank, and may set a value on some of them only (`if result.rank == 0:`), or another
one on each. If forward reads it, ranks that should compute the same no longer do, and no loss would show it.
What forward never reads, such as a log on rank 0, may differ.
"""

from __future__ import annotations

import dis
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from secc.runtime.errors import UserError
from secc.runtime.host.tensor_bytes import bytes_digest, tensor_digest
from secc.runtime.model.kept_values import (
    LIBRARIES,
    OF_FILE,
    KeptValue,
    is_cached,
    iter_values,
    user_classes,
    user_files,
)
from secc.runtime.model.user_file import UserModel
from secc.runtime.parameters.equal_writes import Exchange

_READERS = ("forward", "collate", "__getitem__")
_NAME_BYTES = 96  # of a name that ranks exchange
_SLOTS = 64  # of the digests that ranks exchange; names may share one


@dataclass(frozen=True)
class UnequalValue:
    """A value that forward reads and that a callback has set otherwise on some ranks than on others. setters:
    the ranks that have set it."""

    name: str
    setters: tuple[int, ...]

    def as_error(self, what: str) -> UserError:
        """Returns the error for a function that set it."""
        ranks = " and ".join(map(str, self.setters))
        return UserError(
            f"{what} sets {self.name}, which forward reads, on rank {ranks}, but not to the same value on all"
            " ranks",
            remedy="set it to the same value on every rank: not under `if result.rank == 0`, and from nothing"
            " that only one rank has; what forward does not read may differ",
        )


class SetValues:
    """The plain values that a callback sets on this rank, among those that forward may read."""

    def __init__(self, model: nn.Module, user: UserModel) -> None:
        self._model, self._user = model, user
        self._read: set[str] | None = None  # names, once they are needed
        self._before = dict[str, float]()
        self.described = dict[int, str]()  # by slot: a value that was set

    def note_values(self) -> None:
        """Notes all values before a callback runs."""
        if self._read is None:
            self._read = _names_read(self._model, self._user)
        self._before = {value.name: _digest(value.read()) for value in self._iter_values()}

    def digest_changes(self) -> list[float]:
        """Returns numbers that follow from all values which have been set since `note_values`, in slots by
        their names, not-a-number in slots without any."""
        found = defaultdict[int, list[str]](list)
        self.described = {}
        for value in self._iter_values():
            digest = _digest(value.read())
            if digest != self._before.get(value.name) and self._may_be_read(value):
                slot = int(bytes_digest(value.name.encode())) % _SLOTS
                found[slot].append(f"{value.name}={digest}")
                self.described.setdefault(slot, value.name)
        texts = {slot: "\n".join(sorted(lines)).encode() for slot, lines in found.items()}
        return [bytes_digest(texts[slot]) if slot in texts else math.nan for slot in range(_SLOTS)]

    def _iter_values(self) -> Iterator[KeptValue]:
        buffers = {id(b) for b in self._model.buffers()}
        return (v for v in iter_values(self._model, self._user) if id(v.read()) not in buffers)

    def _may_be_read(self, value: KeptValue) -> bool:
        """Whether forward may read the attribute or global that a value is, or is in."""
        assert self._read is not None
        if value.owner is None:
            own = value.name.removeprefix("the global ").partition(OF_FILE)[0]
            return not self._read.isdisjoint(re.findall(r"\w+", own))
        if type(self._model.get_submodule(value.owner)).__module__.startswith(LIBRARIES):
            return True
        own = value.name.removeprefix(f"{value.owner}." if value.owner else "self.")
        return re.findall(r"\w+", own)[0] in self._read


def find_unequal_value(values: SetValues, failed: bool, exchange: Exchange) -> UnequalValue | None:
    """Returns the first value that callbacks have not set to the same on all ranks; None if there is none, or
    if a callback failed on a rank. Collective, and the same on all ranks."""
    changes = values.digest_changes()
    is_set = [not math.isnan(change) for change in changes]
    counts = exchange([float(any(is_set)), float(failed)]).sum(0)
    if not counts[0] or counts[1]:
        return None
    for slot, column in enumerate(exchange(changes).T):
        setters = (~column.isnan()).nonzero().flatten().tolist()
        if setters and (len(setters) < len(column) or bool((column != column[0]).any())):
            name = values.described.get(slot, "").encode()[:_NAME_BYTES].ljust(_NAME_BYTES)
            names = exchange(list(map(float, name)))
            return UnequalValue(_decode_name(names[setters[0]]), tuple(setters))
    return None


def _decode_name(numbers: torch.Tensor) -> str:
    """Returns the text with these bytes."""
    return bytes(map(int, numbers.tolist())).decode(errors="replace").rstrip()


def _names_read(model: nn.Module, user: UserModel) -> set[str]:
    """Returns the names that functions of the user's load which forward may reach."""
    codes = defaultdict[str, list[CodeType]](list)
    for names in (*user_files(model, user), *map(vars, user_classes(model))):
        for name, function in names.items():
            function = getattr(function, "__func__", getattr(function, "fget", function))
            function = function.__wrapped__ if is_cached(function) else function
            if isinstance(function, FunctionType):
                codes[name].append(function.__code__)
    waiting, seen, found = list(_READERS), set[str](), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        loaded = {n for code in codes[name] for n in _loaded_names(code)}
        found |= loaded
        waiting += [n for n in loaded if n in codes]
    return found


def _loaded_names(code: CodeType) -> Iterator[str]:
    """Yields the attributes and globals that a function and those in it read."""
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD_") and isinstance(instruction.argval, str):
            yield instruction.argval  # a text, too: `getattr(self, "heat")`
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _loaded_names(inner)


def _digest(content: Any) -> float:
    if isinstance(content, torch.Tensor):
        return math.inf if content.is_meta else tensor_digest(content)
    return bytes_digest(repr(content).encode())
