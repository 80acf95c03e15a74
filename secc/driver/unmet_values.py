"""Makes samples with values that no sample of a comparison has.

Code inside of a block is not recorded. If it asks for a value (`(task == 7).any()`) that no compared sample
has, nothing shows what it does then, and a run that meets the value may be inexact. Two things are done:

- The numbers that such code compares tensors with, or numbers that it reads of them into Python, are noted
  while plain PyTorch runs, and put into the inputs of some samples until a comparison gives the answer that
  was missing. Where code computes with an input before it compares, other values follow from what it compared
  (regula falsi).
- Inputs that are one whole number for a sample (a task, a language) and reach a block take other small
  numbers, whatever the block does with them (a table, a remainder, a weight).
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from secc.driver.block_frames import BlockFrames
from secc.driver.watched_arrays import watched_array, watched_array_functions
from secc.driver.watched_numbers import Origin, is_watched, watched_conversions, watched_number
from secc.frontend.capture.capture import CapturedCase
from secc.frontend.dataset.survey import DatasetSurvey
from secc.runtime.host.tensor_bytes import view_bytes
from secc.runtime.model.kept_values import LIBRARIES
from secc.runtime.model.source_lines import current_user_frame, format_source_line

MOST_TRIES = 32  # forwards of samples with other values
SMALL_NUMBERS = 64  # 0 to 63 are tried for inputs that are one whole number for a sample
_MOST_CODE_NUMBERS = 64  # in one container that a function names
_MOST_KEYS = 8  # of a container in which a number is looked up
_MOST_FOLLOWED = 4096  # numbers of a tensor
_MOST_NOTES = 1 << 15  # of numbers that are followed
_MOST_SEARCHED = 16  # comparisons with what code computes by remainders, quotients or bits
_MOST_ASKED = 4096  # comparisons
_MOST_VALUES = 256  # that one of them meets
_READS = (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
_BUILTIN_NAMES = frozenset(dir(object))
_aten = torch.ops.aten
_COMPARISONS = {
    _aten.eq: operator.eq,
    _aten.ne: operator.ne,
    _aten.lt: operator.lt,
    _aten.le: operator.le,
    _aten.gt: operator.gt,
    _aten.ge: operator.ge,
}
_COMPARISONS_BY_NAME = {compare.__name__: compare for compare in _COMPARISONS.values()}
Sample = dict[str, Any]


@dataclass(frozen=True)
class AskedNumber:
    """A number that a line of a block compares a tensor with. With the comparison `eq`, it may also stand in
    code which reads numbers of a tensor into Python (`is_guess`) or be a key of a container in which that
    code looks; with `is`, such code reads a truth value."""

    where: str
    comparison: str
    number: float
    is_whole: bool
    is_guess: bool = False

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

    def differs_from(self, samples: Sequence[Mapping[str, Any]]) -> bool:
        """Whether one of the samples has something else than this."""
        pairs = (
            (a[self.key], b[self.key]) for a, b in zip(self.samples, samples, strict=True) if self.key in a
        )
        return any(not torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


class ComparisonWatch(TorchDispatchMode):
    """Notes which answers comparisons of tensors with numbers have inside of blocks, which may be functions
    or statements of the user's code.

    answers: those of each comparison. compared: the values that it met, if they are few. digests: of all that
    it met, in turn. reads_numbers: whether code reads numbers into Python. follows_numbers: notes what such
    numbers are compared with, too; code that asks for the very class of a number may fail then.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[str], follows_numbers: bool = False) -> None:
        super().__init__()
        self.answers = dict[AskedNumber, set[bool]]()
        self.compared = dict[AskedNumber, set[float]]()
        self.digests = dict[AskedNumber, int]()
        self._searched = dict[tuple[str, str, float], list[int]]()
        self.reads_numbers, self.follows_numbers = False, follows_numbers
        self._followed, self._is_noting = 0, False
        self._frames = BlockFrames(model, blocks)
        self._inner = ExitStack()

    def __enter__(self) -> Self:
        self._inner.enter_context(_ReadingWatch(self))
        if self.follows_numbers:
            self._inner.enter_context(watched_conversions(self._frames.globals_of_files))
            self._inner.enter_context(watched_array_functions())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._inner.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _aten._local_scalar_dense.default:
            self.note_read(args[0], [result])
            self.reads_numbers |= type(result) is int
        elif (compare := _COMPARISONS.get(func.overloadpacket)) is not None:
            self._note_comparison(compare.__name__, args[0], args[1], result)
        elif func is _aten.isin.Tensor_Tensor and 0 < args[1].numel() <= _MOST_CODE_NUMBERS:
            for number in args[1].flatten().tolist():
                self._note_comparison("eq", args[0], number, args[0] == number)
        return result

    def _note_comparison(self, name: str, tensor: Any, other: Any, result: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.requires_grad or not result.numel():
            return
        if isinstance(other, torch.Tensor):
            if not other.requires_grad and 0 < other.numel() <= min(_MOST_KEYS, tensor.numel()):
                for number in other.flatten().tolist():
                    self._note_comparison(name, tensor, number, _COMPARISONS_BY_NAME[name](tensor, number))
            return
        if (
            isinstance(other, bool)
            or not isinstance(other, (int, float))
            or (frame := self._frames.innermost_frame()) is None
        ):
            return
        where = format_source_line(frame.f_code, frame.f_lineno)
        asked = AskedNumber(where, name, other, not tensor.is_floating_point())
        numbers = tensor.detach().flatten().contiguous()
        values = numbers[:_MOST_VALUES].tolist()
        self._note(asked, (bool(result.any()), bool(result.all())), values, hash_contents(numbers))

    def note_numbers(self, comparison: str, number: float, values: Sequence[float], origin: Origin) -> float:
        """Notes that code compares numbers of a tensor, or what it computed from them, with another."""
        compare = getattr(operator, comparison)

        def note_frame(frame: FrameType) -> None:
            where = format_source_line(frame.f_code, frame.f_lineno)
            answers = [bool(compare(value, number)) for value in values]
            asked = AskedNumber(where, comparison, number, isinstance(values[0], int))
            self._note(asked, (any(answers), all(answers)), values)
            wanted = {"eq": True, "ne": False}.get(comparison, not any(answers))
            search = (where, comparison, number)
            self._note_numbers_read(search, origin, lambda result: bool(compare(result, number)) is wanted)

        self._follow(note_frame)
        return 0.0

    def note_step(self, value: float, step: float) -> float:
        """Code that rounds is not followed."""
        return 0.0

    def note_key(self, value: float, origin: Origin) -> None:
        """Notes the numbers of containers in which code may look for a number of a tensor."""

        def note_frame(frame: FrameType) -> None:
            where = format_source_line(frame.f_code, frame.f_lineno)
            for number in _numbers_of_code(frame, _MOST_KEYS, with_texts=True):
                self._note(
                    AskedNumber(where, "eq", number, isinstance(value, int)), [value == number], [value]
                )
                self._note_numbers_read((where, "eq", number), origin, partial(operator.eq, number))

        self._follow(note_frame)

    def _follow(self, note: Callable[[FrameType], None]) -> None:
        """Calls `note` with the frame of code that does something with a followed number, unless enough is
        known, or the code is that of `note`, which looks into containers that may hold such numbers."""
        self._followed += 1
        if self._is_noting or self._followed >= _MOST_NOTES or (frame := current_user_frame()) is None:
            return
        self._is_noting = True
        try:
            note(frame)
        finally:
            self._is_noting = False

    def _note_numbers_read(
        self, asked: tuple[str, str, float], origin: Origin, is_met: Callable[[Any], bool]
    ) -> None:
        """Notes numbers for which a comparison with a number that code computes by remainders, quotients or
        bits has the rarer answer, as if it compared the number that it reads with them."""
        if not origin.jumps or not isinstance(origin.number, int):
            return
        if asked not in self._searched and len(self._searched) < _MOST_SEARCHED:
            self._searched[asked] = origin.find_nearest_numbers(is_met)
        for number in self._searched.get(asked, ()):
            self._note(AskedNumber(asked[0], "eq", number, True), [number == origin.number], [origin.number])

    def note_read(self, tensor: torch.Tensor, values: Sequence[float]) -> None:
        """Notes numbers of a tensor that Python reads."""
        if (
            tensor.requires_grad
            or tensor.is_complex()
            or not values
            or (frame := self._frames.innermost_frame()) is None
        ):
            return
        where = format_source_line(frame.f_code, frame.f_lineno)
        if tensor.dtype is torch.bool:
            self._note(AskedNumber(where, "is", 1, True), tuple(map(bool, values)), ())
            return
        if str(frame.f_globals.get("__name__")).startswith(LIBRARIES):
            return  # what it compares is noted, if numbers are followed
        for number in _numbers_of_code(frame, _MOST_CODE_NUMBERS):
            asked = AskedNumber(where, "eq", number, not tensor.is_floating_point(), is_guess=True)
            self._note(asked, (number in values, all(v == number for v in values)), values)

    def watch_numbers(self, tensor: torch.Tensor, value: Any) -> Any:
        """Returns numbers that a block reads of a tensor as watched ones, which note what they are compared
        with, if numbers are followed; else as they are."""
        if (
            tensor.requires_grad
            or tensor.is_complex()
            or tensor.dtype is torch.bool
            or self._frames.innermost_frame() is None
        ):
            return value
        self.reads_numbers |= not tensor.is_floating_point()
        if not self.follows_numbers or tensor.numel() > _MOST_FOLLOWED:
            return value
        return watched_array(value, self) if isinstance(value, np.ndarray) else watched_number(value, self)

    def _note(
        self, asked: AskedNumber, answers: Collection[bool], values: Collection[float], digest: int = 0
    ) -> None:
        """Notes answers of a comparison, and values that it met."""
        if asked in self.answers or len(self.answers) < _MOST_ASKED:
            self.answers.setdefault(asked, set()).update(answers)
            content = digest or hash((*answers, *values))
            self.digests[asked] = hash((self.digests.get(asked), content))
            met = self.compared.setdefault(asked, set())
            met.update(itertools.islice(values, max(0, _MOST_VALUES - len(met))))

    def is_unmoved(self, asked: AskedNumber, trials: Iterable[ComparisonWatch]) -> bool:
        """Whether there were trials with other values, and a comparison met the same in all of them."""
        return {trial.digests.get(asked) for trial in trials} == {self.digests[asked]}


class _ReadingWatch(TorchFunctionMode):
    """Notes tensors that become lists or arrays, which no dispatch shows, and hands out watched numbers."""

    def __init__(self, watch: ComparisonWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__):
            self._watch.note_read(args[0], args[0].flatten().numpy(force=True).tolist())
        return self._watch.watch_numbers(args[0], result) if func in _READS else result


def hash_contents(numbers: torch.Tensor) -> int:
    """Returns what tells the contents of tensors apart."""
    return hash(view_bytes(numbers).numpy(force=True).tobytes())


def _numbers_of_code(frame: FrameType, most: int, with_texts: bool = False) -> set[float]:
    """Returns the numbers in the code of a function: constants, globals, variables of outer functions, and
    attributes of its `self` and of other objects that it names; alone or in a container, of a dict its keys,
    at most `most` of each. with_texts: also those in keys that are texts, and in variables."""
    code, found = frame.f_code, set[float]()
    names = {name: frame.f_locals[name] for name in code.co_freevars if name in frame.f_locals}
    if with_texts:
        names |= frame.f_locals
    owners = [frame.f_globals, getattr(frame.f_locals.get("self"), "__dict__", {})]
    named = [owner[name] for owner in owners for name in code.co_names if name in owner]
    inner = [vars(v) for v in (*named, *names.values()) if hasattr(v, "__dict__")]
    named += [o[name] for o in inner for name in code.co_names if name in o and name not in _BUILTIN_NAMES]
    for value in (*code.co_consts, *named, *names.values()):
        is_container = isinstance(value, (tuple, list, set, frozenset, dict))
        for entry in _entries(value, most) if is_container else () if with_texts else (value,):
            if with_texts and isinstance(entry, str):
                found.update(map(float, re.findall(r"\d{1,9}", entry)[:1]))
            elif isinstance(entry, (int, float)) and not isinstance(entry, bool) and not is_watched(entry):
                found.add(entry)
    return found


def _entries(container: Any, most: int) -> Iterable[Any]:
    """Returns at most `most` entries of a container, of all of its places; of a dict keys, first those of
    different values."""
    if isinstance(container, dict):
        by_value = {id(value): key for key, value in reversed(container.items())}
        if 1 < len(by_value) <= most:
            return itertools.islice(dict.fromkeys((*reversed(by_value.values()), *container)), most)
    return itertools.islice(container, 0, None, -(-len(container) // most) or 1)


def iter_unmet_values(
    answers: Mapping[AskedNumber, set[bool]], samples: Sequence[Mapping[str, Any]], keys: Collection[str]
) -> Iterator[tuple[AskedNumber, UnmetValue]]:
    """Yields samples with values in one of `keys` that may give the answers that are missing, first in inputs
    that are one number for a sample, what code compares before what it may compare, the lines in turn."""
    missing = [asked for asked, found in answers.items() if len(found) == 1]
    turns = Counter[tuple[str, bool]]()
    places = dict[AskedNumber, tuple[bool, int]]()
    for asked in missing:
        places[asked] = asked.is_guess, turns[asked.where, asked.is_guess]
        turns[asked.where, asked.is_guess] += 1
    missing.sort(key=lambda asked: places[asked])
    ordered = sorted(keys, key=lambda key: (not is_single(samples, key), key))
    for key, asked in itertools.product(ordered, missing):
        if asked.comparison != "is" or is_single(samples, key):
            for value in asked.values:
                if (unmet := unmet_value(asked, samples, key, value)) is not None:
                    yield asked, unmet


def unmet_value(
    asked: AskedNumber, samples: Sequence[Mapping[str, Any]], key: str, value: float
) -> UnmetValue | None:
    """Returns the samples with a value; None if the key cannot have it."""
    changed = _replace_values(samples, key, value)
    return None if changed is None else UnmetValue(asked.where, key, value, changed)


def next_value(asked: AskedNumber, points: Sequence[tuple[float, float]]) -> float | None:
    """Returns a value of an input that may let a comparison meet its number, from `points`, which are values
    of the input and what was compared then; None if they do not tell, or if they have it already."""
    if not math.isfinite(asked.number):
        return None
    a, b = sorted(points, key=lambda point: abs(point[1] - asked.number))[:2]
    if a[1] == b[1] or a[0] == b[0]:
        return None
    value = a[0] + (asked.number - a[1]) * (b[0] - a[0]) / (b[1] - a[1])
    value = float(round(value)) if asked.is_whole else value
    return None if value in [v for v, _ in points] or not math.isfinite(value) else value


def least_value(samples: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Returns the smallest number in an input of the samples."""
    numbers = [torch.as_tensor(s[key]).flatten() for s in samples if key in s and _count(s[key])]
    return min((float(n.min()) for n in numbers), default=None)


def whole_numbers(
    survey: DatasetSurvey, samples: Sequence[Mapping[str, Any]], asked: Iterable[AskedNumber]
) -> dict[str, list[int]]:
    """Returns for each input that is one whole number for every sample numbers that none of `samples` has:
    those of other drawn samples, those that code asks for, then small ones. Left out are inputs that say how
    long others are."""
    found = dict[str, list[int]]()
    in_code = sorted({int(a.number) for a in asked if a.is_whole and float(a.number).is_integer()})
    for key in sorted({key for s in samples for key in s}):
        values = [s[key] for s in samples if key in s]
        if not all(_is_whole_number(value) for value in values) or _is_length(survey, key):
            continue
        drawn = sorted({number for d in survey.drawn_samples for k, number in d.flags if k == key})
        outside = (min(drawn, default=0) - 1, max(drawn, default=0) + 1)
        numbers = dict.fromkeys((*drawn, *in_code, *range(SMALL_NUMBERS), *outside))
        found[key] = [n for n in numbers if n not in {int(value) for value in values}]
    return found


def _is_whole_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not (value.is_floating_point() or value.is_complex())
    return isinstance(value, int)


def _is_length(survey: DatasetSurvey, key: str) -> bool:
    """Whether the numbers of a key are sizes of other inputs of their samples."""
    numbers = [(dict(d.flags)[key], d.shapes) for d in survey.drawn_samples if key in dict(d.flags)]
    sizes = ({1}.union(*shapes.values()) for _, shapes in numbers)
    return len({n for n, _ in numbers}) > 1 and all(n in s for (n, _), s in zip(numbers, sizes, strict=True))


def inputs_of_own_blocks(cases: Iterable[CapturedCase], model: nn.Module, keys: Collection[str]) -> list[str]:
    """Returns those of the samples' keys from which a block takes values that has modules other than torch's
    own, and those that are no inputs of forward, from which `collate` makes these."""
    modules = dict(model.named_modules())

    def is_own(path: str) -> bool:
        block = modules.get(path)
        return block is None or not all(type(m).__module__.startswith("torch.") for m in block.modules())

    return _keys_that_reach(cases, keys, is_own)


def inputs_of_blocks(cases: Sequence[CapturedCase], keys: Collection[str]) -> list[str]:
    """Returns those of the samples' keys from which blocks take values, and those that are no inputs of
    forward; all of them where glue is recorded again, which takes numbers from them, too."""
    if any(case.rerecord_reason is not None for case in cases):
        return sorted(keys)
    return _keys_that_reach(cases, keys, lambda _: True)


def _keys_that_reach(
    cases: Iterable[CapturedCase], keys: Collection[str], is_meant: Callable[[str], bool]
) -> list[str]:
    """Returns the samples' keys with values that come, through glue, to a call of a block with a path that is
    meant, and keys that are no inputs of forward."""
    sources = [n for c in cases for n in c.generic.graph.nodes if n.op == "placeholder" and n.target in keys]
    found = set(keys) - {str(source.target) for source in sources}
    for source in sources:
        waiting, seen = [source], {source}
        while waiting:
            users = [node for node in waiting.pop().users if node not in seen]
            seen.update(users)
            waiting += (node for node in users if node.op != "call_module")
            if any(node.op == "call_module" and is_meant(str(node.target)) for node in users):
                found.add(str(source.target))
    return sorted(found)


def put_numbers(samples: Sequence[Mapping[str, Any]], key: str, numbers: Sequence[int]) -> list[Sample]:
    """Returns the samples with the numbers at a key, in turn. A sample that cannot have its number, as a
    boolean or a short integer, keeps its own."""
    changed, turn = list[Sample](), itertools.cycle(numbers)
    for sample in samples:
        new = _replace_one(sample[key], next(turn)) if key in sample else None
        changed.append(dict(sample) if new is None else {**sample, key: new})
    return changed


def is_single(samples: Sequence[Mapping[str, Any]], key: str) -> bool:
    """Whether an input is one number for each sample."""
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
        if not is_float and (
            not float(value).is_integer() or (old.dtype is torch.bool and value not in (0, 1))
        ):
            return None
        if not is_float and old.dtype is not torch.bool and abs(value) > torch.iinfo(old.dtype).max:
            return None
        new = old.clone(memory_format=torch.contiguous_format)
        new.view(-1)[old.numel() // 2] = value
        return new
    if isinstance(old, bool):
        return bool(value) if value in (0, 1) else None
    if isinstance(old, int):
        return int(value) if float(value).is_integer() else None
    return type(old)(value) if isinstance(old, float) else None
