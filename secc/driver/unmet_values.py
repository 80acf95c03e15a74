"""Makes samples with values that modules compare their inputs with and that no sample of a comparison has.

Code inside of a block is not recorded. If it asks for a value (`(task == 7).any()`) that no compared sample
has, nothing shows what it does then, and a run that meets the value may be inexact. So the numbers that such
code compares tensors with are noted while plain PyTorch runs, and put into the inputs of some samples until a
comparison gives the answer that was missing.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from secc.runtime.model.source_lines import (
    format_source_line,
    module_paths_by_id,
    running_module_and_frames,
)

MOST_TRIES = 32  # forwards of samples with other values
_aten = torch.ops.aten
_COMPARISONS = {
    _aten.eq: operator.eq,
    _aten.ne: operator.ne,
    _aten.lt: operator.lt,
    _aten.le: operator.le,
    _aten.gt: operator.gt,
    _aten.ge: operator.ge,
}
Sample = dict[str, Any]


@dataclass(frozen=True)
class AskedNumber:
    """A number that a line of a block compares a tensor with. With the comparison `eq`, it may also stand in
    code which reads numbers of a tensor into Python; with `is`, such code reads a truth value."""

    where: str
    comparison: str
    number: float
    is_whole: bool

    @property
    def values(self) -> tuple[float, ...]:
        """Numbers that give both answers."""
        if self.comparison == "is":
            return (0, 1)
        if self.comparison in ("eq", "ne"):
            return (self.number,)
        step = 1 if self.is_whole else max(1e-3, abs(self.number) / 8)
        return (self.number + step, self.number - step, self.number)


@dataclass(frozen=True)
class UnmetValue:
    """Samples for a trial: every second one has `value` at `key`, with which the line `where` compares."""

    where: str
    key: str
    value: float
    samples: list[Sample]


class ComparisonWatch(TorchDispatchMode):
    """Notes which answers comparisons of tensors with numbers have inside of blocks."""

    def __init__(self, model: nn.Module, blocks: Iterable[str]) -> None:
        super().__init__()
        self.answers = dict[AskedNumber, set[bool]]()
        self._paths, self._blocks = module_paths_by_id(model), tuple(f"{block}." for block in blocks)
        self._lists = _ListWatch(self)

    def __enter__(self) -> Self:
        self._lists.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._lists.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _aten._local_scalar_dense.default:
            self.note_read(args[0], [result])
        elif (compare := _COMPARISONS.get(func.overloadpacket)) is not None:
            self._note_comparison(compare.__name__, args[0], args[1], result)
        return result

    def _note_comparison(self, name: str, tensor: Any, other: Any, result: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.requires_grad or not result.numel():
            return
        if isinstance(other, torch.Tensor):
            if other.numel() != 1 or other.requires_grad or tensor.numel() == 1:
                return
            other = other.item()
        if isinstance(other, bool) or not isinstance(other, (int, float)) or (frame := self._frame()) is None:
            return
        where = format_source_line(frame.f_code, frame.f_lineno)
        asked = AskedNumber(where, name, other, not tensor.is_floating_point())
        self.answers.setdefault(asked, set()).update((bool(result.any()), bool(result.all())))

    def note_read(self, tensor: torch.Tensor, values: Sequence[float]) -> None:
        """Notes numbers of a tensor that Python reads."""
        if tensor.requires_grad or tensor.is_complex() or not values or (frame := self._frame()) is None:
            return
        where = format_source_line(frame.f_code, frame.f_lineno)
        if tensor.dtype is torch.bool:
            self.answers.setdefault(AskedNumber(where, "is", 1, True), set()).update(map(bool, values))
            return
        for number in _numbers_of_code(frame):
            asked = AskedNumber(where, "eq", number, not tensor.is_floating_point())
            self.answers.setdefault(asked, set()).update((number in values, all(v == number for v in values)))

    def _frame(self) -> FrameType | None:
        """Returns the innermost frame of the user's code if it runs in a block."""
        path, frames = running_module_and_frames(self._paths)
        return frames[0] if frames and f"{path}.".startswith(self._blocks) else None


class _ListWatch(TorchFunctionMode):
    """Notes tensors that become lists, which no dispatch shows."""

    def __init__(self, watch: ComparisonWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.tolist:
            self._watch.note_read(args[0], args[0].flatten().numpy(force=True).tolist())
        return result


def _numbers_of_code(frame: FrameType) -> set[float]:
    """Returns the numbers in the code of a function: constants, globals, and attributes of its `self`."""
    code, found = frame.f_code, set[float]()
    owner = vars(frame.f_locals.get("self", object)) if "self" in frame.f_locals else {}
    named = (frame.f_globals.get(name, owner.get(name)) for name in code.co_names)
    for value in (*code.co_consts, *named):
        inner = value if isinstance(value, (tuple, frozenset)) else (value,)
        found.update(v for v in inner if isinstance(v, (int, float)) and not isinstance(v, bool))
    return found


def iter_unmet_values(
    answers: Mapping[AskedNumber, set[bool]], samples: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[AskedNumber, UnmetValue]]:
    """Yields samples with values that may give the answers that are missing, first in inputs that are one
    number for a sample, at most `MOST_TRIES`."""
    missing = [asked for asked, found in answers.items() if len(found) == 1]
    keys = sorted({key for s in samples for key in s}, key=lambda key: (not _is_single(samples, key), key))
    tries = (
        (asked, UnmetValue(asked.where, key, value, changed))
        for key, asked in itertools.product(keys, missing)
        if asked.comparison != "is" or _is_single(samples, key)
        for value in asked.values
        if (changed := _replace_values(samples, key, value)) is not None
    )
    yield from itertools.islice(tries, MOST_TRIES)


def _is_single(samples: Sequence[Mapping[str, Any]], key: str) -> bool:
    return all(_count(s[key]) == 1 for s in samples if key in s)


def _count(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else isinstance(value, (int, float))


def _replace_values(samples: Sequence[Mapping[str, Any]], key: str, value: float) -> list[Sample] | None:
    """Returns the samples with a value in every second one of those with a key: in place of a number, or of
    one whole number of many. None if the key cannot have this value, or has it in no sample changed."""
    changed, places = list[Sample](), itertools.count()
    replaced = False
    for sample in samples:
        old = sample.get(key)
        is_next = old is not None and next(places) % 2 == 0
        new = _replace_one(old, value) if is_next else None
        replaced |= new is not None
        changed.append({**sample, key: new} if new is not None else dict(sample))
    return changed if replaced and len(samples) > 1 else None


def _replace_one(old: Any, value: float) -> Any:
    if isinstance(old, torch.Tensor):
        is_float = old.is_floating_point()
        if not old.numel() or old.is_complex() or (is_float and old.numel() > 1):
            return None
        if not is_float and (value != int(value) or (old.dtype is torch.bool and value not in (0, 1))):
            return None
        new = old.clone()
        new.view(-1)[old.numel() // 2] = value
        return new
    if isinstance(old, bool):
        return bool(value) if value in (0, 1) else None
    if isinstance(old, int):
        return int(value) if value == int(value) else None
    return type(old)(value) if isinstance(old, float) else None
