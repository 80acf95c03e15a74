"""Moves values that code in blocks compares, rounds or bounds, so that samples lie on both sides.

`if h.abs().max() > 10`, `h * (c / h.norm()).clamp(max=1)` or `torch.where(h.mean() > t, a, b)` decide by a
value that depends on all samples of a batch. If all compared samples lie on one side, comparing a plan
with plain PyTorch shows nothing, and a run with others trains something else. So the *kinks* of such code are
noted while plain PyTorch runs: ops that are linear on both sides of a number, or jump there. A kink is moved
to where the values of samples alone and of all together lie on both sides of it, in plain PyTorch and in the
plan alike. A plan of code that decides for each sample or row stays exact.

Two kinds of kinks are moved:

- where a value has one shape for any number of samples, but depends on them;
- comparisons of floats that all have one answer, `(h > 50).any()`: one entry gets the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from types import FrameType
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from secc.driver.block_frames import BlockFrames
from secc.driver.watched_arrays import watched_array, watched_array_functions
from secc.driver.watched_numbers import Origin, watched_conversions, watched_number
from secc.errors import NotEnoughMemory
from secc.frontend.dataset.survey import sequence_length
from secc.runtime.model.source_lines import current_user_frame, format_source_line

_MOST_VALUES = 4096  # of a call that are kept in full
_MOST_NEAREST = 64  # of others: those that are nearest to the kink
_MOST_CALLS = 1 << 14
_ROUNDS = 3  # of moves: what one of them lets code do may have kinks of its own
_MOST_TRIED = 12  # kinks in a round that are moved one by one
_MOST_ALONE = 3  # samples
_CLOSE = 1e-4  # relative: round-off is far less
_GAP = 1e-5  # of the largest number of a call: a kink between two entries is safe from round-off
_aten = torch.ops.aten
_COMPARISONS = (_aten.lt, _aten.le, _aten.gt, _aten.ge)
_CLAMPS = (_aten.clamp, _aten.clamp_, _aten.clamp_min, _aten.clamp_min_, _aten.clamp_max, _aten.clamp_max_)
_LEAST_OR_MOST = (_aten.minimum, _aten.maximum, _aten.fmin, _aten.fmax)
_AT_ZERO = (_aten.relu, _aten.relu_, _aten.sign, _aten.sgn)
_STEPS = {_aten.floor: 0.0, _aten.ceil: 0.0, _aten.trunc: 1.0, _aten.round: 0.5, _aten._to_copy: 1.0}
_READS = (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
_OF_WHOLE_NUMBERS = " of whole numbers"
_ORDERS = ("lt", "le", "gt", "ge")


@dataclass(frozen=True)
class Kink:
    """An op of a line that does something else on one side of a number than on the other. may_split: whether
    it compares many values, and one of them may get another answer. dims: of these values. is_between:
    whether code between blocks runs it."""

    where: str
    name: str
    dims: int = 0
    may_split: bool = False
    is_between: bool = False


@dataclass(frozen=True)
class _Call:
    """How far the values of one call are from the kink. distances: all, if they are few. nearest: the
    smallest in absolute value, ascending."""

    count: int
    distances: torch.Tensor | None
    nearest: list[float]
    scale: float


class KinkWatch(TorchDispatchMode):
    """Notes kinks of code in blocks, and moves some: `moves` is taken off the values that such a kink
    meets. follows_numbers: notes what becomes of numbers that Python reads, too; code that asks for the very
    class of a number may fail then. Of code between blocks, comparisons of one value are noted where Python
    reads the answer. undivided: blocks that take all samples of a step at once, and are left out."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Collection[str],
        moves: Mapping[Kink, float] | None = None,
        follows_numbers: bool = True,
        undivided: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.calls = dict[Kink, list[_Call]]()
        self._moves, self._follows_numbers = moves or {}, follows_numbers
        self._frames, self._undivided = BlockFrames(model, blocks), frozenset(undivided)
        self._answers = dict[int, tuple[torch.Tensor, Kink, torch.Tensor]]()  # that Python may read, by id
        self.blocks = dict[str, set[str]]()  # that run each line
        self._count = 0
        self._inner = ExitStack()

    def __enter__(self) -> Self:
        if self._follows_numbers:
            self._inner.enter_context(_ReadingWatch(self))
            self._inner.enter_context(watched_conversions(self._frames.globals_of_files))
            self._inner.enter_context(watched_array_functions())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._inner.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        if packet is _aten._local_scalar_dense and (answer := self._answers.get(id(args[0]))) is not None:
            self._note(*answer[1:])
        if packet not in _DISTANCES or (found := self._find_kink(packet, args, kwargs)) is None:
            return func(*args, **kwargs)
        kink, distances = found
        if move := self._moves.get(kink, 0.0):
            place = _place_of_value(packet)
            args = (*args[:place], _take_off(func, args[place], move), *args[place + 1 :])
        result = func(*args, **kwargs)
        if kink.is_between:
            self._answers[id(result)] = result, kink, distances
        else:
            self._note(kink, distances)
        return result

    def _find_kink(
        self, packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Kink, torch.Tensor] | None:
        """Returns the kink of an op and the distances of its values to it; None if it needs no watching."""
        value = args[_place_of_value(packet)]
        if not isinstance(value, torch.Tensor) or value.dtype is torch.bool or value.is_complex():
            return None
        compares, is_float = packet in _COMPARISONS, value.is_floating_point()
        most = _MOST_VALUES if is_float else int(compares)
        if not 0 < value.numel() <= (math.inf if compares and is_float else most):
            return None
        frame, is_between = self._running_frame()
        if frame is None or (is_between and (value.numel() > 1 or not compares)):
            return None
        if (distances := _DISTANCES[packet](packet, args, kwargs)) is None:
            return None
        name = packet.__name__ if is_float else f"{packet.__name__}{_OF_WHOLE_NUMBERS}"
        where = format_source_line(frame.f_code, frame.f_lineno)
        may_split = compares and is_float and not is_between
        return Kink(where, name, value.dim(), may_split, is_between), distances

    def _running_frame(self) -> tuple[FrameType | None, bool]:
        """Returns the innermost frame of the user's code, and whether it runs between blocks."""
        if (frame := self._frames.innermost_frame()) is None:
            return current_user_frame(), True
        is_undivided = self._undivided and self._frames.running_block() in self._undivided
        return None if is_undivided else frame, False

    def note_numbers(self, comparison: str, number: float, values: Sequence[float], origin: Origin) -> float:
        """Notes that code compares numbers of a tensor with another; returns how far that one is moved."""
        (frame, is_between), is_whole = self._running_frame(), isinstance(values[0], int)
        if comparison not in _ORDERS or frame is None or (is_whole and number in (0, 1)):
            return 0.0
        name = f"number {comparison}{_OF_WHOLE_NUMBERS if is_whole else ''}"
        kink = Kink(format_source_line(frame.f_code, frame.f_lineno), name, is_between=is_between)
        self._note(kink, torch.tensor(values, dtype=torch.float64) - number)
        return self._moves.get(kink, 0.0)

    def note_step(self, value: float, step: float) -> float:
        """Notes that code makes a whole number of a number of a tensor; returns how far it is moved."""
        frame, is_between = self._running_frame()
        if frame is None or is_between:
            return 0.0
        kink = Kink(format_source_line(frame.f_code, frame.f_lineno), "number step")
        self._note(kink, torch.tensor([value - step], dtype=torch.float64))
        return self._moves.get(kink, 0.0)

    def note_key(self, value: float, origin: Origin) -> None:
        """Numbers that are looked up have no sides."""

    def _note(self, kink: Kink, distances: torch.Tensor) -> None:
        self.blocks.setdefault(kink.where, set()).add(self._frames.running_block())
        self._count += 1
        if self._count > _MOST_CALLS:
            return
        distances = distances.detach().flatten()
        finite = distances[distances.isfinite()]
        if not finite.numel():
            return
        few = distances.double() if distances.numel() <= _MOST_VALUES else None
        nearest, absolute = list[float](), finite.abs()
        if kink.may_split and not ((finite < 0).any() and (finite > 0).any()):
            places = absolute.topk(min(_MOST_NEAREST, finite.numel()), largest=False).indices
            nearest = finite[places].tolist()
        self.calls.setdefault(kink, []).append(_Call(distances.numel(), few, nearest, float(absolute.max())))


def _place_of_value(packet: Any) -> int:
    return 1 if packet is _aten.searchsorted else 0


class _ReadingWatch(TorchFunctionMode):
    """Hands out watched numbers where watched code reads those of a tensor."""

    def __init__(self, watch: KinkWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _READS or args[0].dtype is torch.bool or args[0].numel() > _MOST_VALUES:
            return result
        if isinstance(result, np.ndarray):
            return watched_array(result, self._watch)
        return watched_number(result, self._watch)


def _distances_to_other(_packet: Any, args: tuple[Any, ...], _kwargs: Any) -> torch.Tensor | None:
    """Returns the distances of values to what they are compared with; None if that asks whether there is
    any (a number of rows is above 0)."""
    value, other = args[:2]
    if not value.is_floating_point() and not isinstance(other, torch.Tensor) and other in (0, 1):
        return None
    return (value.double() if value.numel() <= _MOST_VALUES else value.float()) - other


def _distances_to_bounds(
    packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """Returns the distances to the nearer one of two bounds, or to the one that there is."""
    bounds = [*args[1:3], *(kwargs.get(name) for name in ("min", "max"))]
    if packet is _aten.hardtanh and not args[1:]:
        bounds = [-1.0, 1.0]
    if packet is _aten.threshold:
        bounds = bounds[:1]
    found = [args[0].double() - bound for bound in bounds if bound is not None]
    if not found:
        return None
    return found[0] if len(found) == 1 else torch.where(found[0].abs() < found[1].abs(), *found)


def _distances_to_zero(_packet: Any, args: tuple[Any, ...], _kwargs: Any) -> torch.Tensor:
    return args[0]


def _distances_to_step(packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns the distances to one of the numbers at which a value that is rounded jumps."""
    if packet is _aten._to_copy and (kwargs.get("dtype") or args[0].dtype).is_floating_point:
        return None
    return args[0].double() - _STEPS[packet]


def _distances_to_buckets(packet: Any, args: tuple[Any, ...], _kwargs: Any) -> torch.Tensor | None:
    value, bounds = args[:2] if packet is _aten.bucketize else reversed(args[:2])
    if bounds.dim() != 1 or not bounds.numel() or value.numel() > _MOST_VALUES:
        return None
    found = value.double().flatten()[:, None] - bounds
    return found.gather(1, found.abs().argmin(1, keepdim=True))


_DISTANCES: dict[Any, Callable[..., torch.Tensor | None]] = (
    dict.fromkeys((*_COMPARISONS, *_LEAST_OR_MOST), _distances_to_other)
    | dict.fromkeys((*_CLAMPS, _aten.hardtanh, _aten.hardtanh_, _aten.threshold), _distances_to_bounds)
    | dict.fromkeys(_AT_ZERO, _distances_to_zero)
    | dict.fromkeys(_STEPS, _distances_to_step)
    | dict.fromkeys((_aten.bucketize, _aten.searchsorted), _distances_to_buckets)
)


def _take_off(func: Any, value: torch.Tensor, move: float) -> torch.Tensor:
    if func._schema.is_mutable:
        return value.sub_(move)
    return value - move if value.is_floating_point() else value.double() - move


@dataclass(frozen=True)
class CouplingKink:
    """A line at which a plan is not exact where samples lie on both sides, the blocks that run it, and moves
    that show it."""

    where: str
    blocks: list[str]
    moves: dict[Kink, float]


class KinkSearch:
    """Finds a kink at which a plan of code in `blocks`, which is exact for `samples`, is not exact where
    samples lie on both sides. run_eager: plain PyTorch on some samples. is_exact: whether the plan is so for
    `samples`, in micro-batches of a number of samples; None if that cannot be told. of_one_width: whether it
    pads them all to the width of the longest. undivided: blocks that take all samples of a step at once."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Collection[str],
        samples: Sequence[Mapping[str, Any]],
        run_eager: Callable[[Sequence[Mapping[str, Any]]], object],
        is_exact: Callable[[int], bool | None],
        of_one_width: bool = False,
        undivided: Collection[str] = (),
    ) -> None:
        self._model, self._blocks, self._samples, self._undivided = model, blocks, samples, undivided
        self._run_eager, self._is_exact = run_eager, is_exact
        self._follows_numbers = True
        self._alone = sorted(samples, key=sequence_length, reverse=True)[:_MOST_ALONE]
        if of_one_width:
            longest = sequence_length(self._alone[0])
            self._alone = [sample for sample in self._alone if sequence_length(sample) == longest]
        self._blocks_of = dict[str, set[str]]()

    def watch_kinks(self, moves: Mapping[Kink, float] | None = None) -> KinkWatch:
        """Returns what moves kinks while it is entered."""
        return KinkWatch(self._model, self._blocks, moves, self._follows_numbers, self._undivided)

    def find_kinks_of_sums(self, most_samples: float) -> Iterator[tuple[str, KinkWatch]]:
        """Yields lines between blocks where Python compares what is nearer to a number for all samples than
        for any of them alone, so that no micro-batch may ever be on the other side, while `most_samples` are
        if each adds as much; with what puts all samples there while it is entered."""
        between = ((kink, calls) for kink, calls in self._first_together.items() if kink.is_between)
        candidates = {kink: calls[0] for kink, calls in between if len(calls) == 1}
        nearest = dict.fromkeys(candidates, math.inf)
        for sample in self._samples:
            if not candidates:
                return
            alone = self._calls_with({}, [sample]) or {}
            for kink, call in list(candidates.items()):
                whole, own = (_only_distance(c) for c in (call, *alone.get(kink, (None,))[:1]))
                if whole is None or own is None or whole * own <= 0 or abs(whole) >= abs(own) * (1 - _CLOSE):
                    del candidates[kink]
                else:
                    nearest[kink] = min(nearest[kink], own, key=abs)
        for kink, call in candidates.items():
            whole = _only_distance(call)
            assert whole is not None
            per_sample = (whole - nearest[kink]) / (len(self._samples) - 1)
            if whole * (whole + per_sample * (most_samples - len(self._samples))) > 0:
                continue
            yield kink.where, self.watch_kinks({kink: (whole + nearest[kink]) / 2})

    def find_coupling_kink(self) -> CouplingKink | None:
        """Returns a kink at which the plan is not exact; None if there is none."""
        kept = dict[Kink, float]()
        for _ in range(_ROUNDS):
            found = self._find_moves(kept)
            if not (new := {kink: move for kink, move in found.items() if kink not in kept}):
                return None
            if self._is_exact_with(kept | new):
                kept |= new
                continue
            for kink, move in itertools.islice(new.items(), _MOST_TRIED):
                moves = kept | {kink: move}
                if (is_exact := self._is_exact_with(moves)) is False and self._is_exact_with(moves, True):
                    return CouplingKink(kink.where, sorted(self._blocks_of.get(kink.where, ())), moves)
                kept |= {kink: move} if is_exact else {}
        return None

    def _is_exact_with(self, moves: Mapping[Kink, float], undivided: bool = False) -> bool | None:
        with self.watch_kinks(moves):
            return self._is_exact(len(self._samples) if undivided else 1)

    def _find_moves(self, moves: Mapping[Kink, float]) -> dict[Kink, float]:
        """Returns moves of kinks that plain PyTorch shows with these moves."""
        together = self._calls_with(moves, self._samples) if moves else self._first_together
        if not together:
            return {}
        if all(kink.is_between for kink in together):
            return {}
        alone = list[dict[Kink, list[_Call]]]()
        for sample in self._alone:
            if (calls := self._calls_with(moves, [sample])) is not None:
                alone.append(calls)
                if not any(_has_one_count(found, calls.get(kink, ())) for kink, found in together.items()):
                    break  # values have other shapes for other numbers of samples
        return find_moves(together, alone)

    @cached_property
    def _first_together(self) -> dict[Kink, list[_Call]]:
        """What all samples meet where nothing is moved."""
        found = self._calls_with({}, self._samples)
        if found is None:
            self._follows_numbers = False
            found = self._calls_with({}, self._samples)
        return found or {}

    def _calls_with(
        self, moves: Mapping[Kink, float], samples: Sequence[Mapping[str, Any]]
    ) -> dict[Kink, list[_Call]] | None:
        """Returns calls of kinks; None if plain PyTorch fails."""
        with self.watch_kinks(moves) as watch:
            try:
                self._run_eager(samples)
            except NotEnoughMemory:
                raise
            except Exception:  # whatever the user's code raises
                return None
        self._blocks_of |= watch.blocks
        return watch.calls


def find_moves(
    together: Mapping[Kink, list[_Call]], alone: Iterable[Mapping[Kink, list[_Call]]]
) -> dict[Kink, float]:
    """Returns where to move kinks, from what they meet where all samples of a batch come together and where
    some of them come alone, the longest one first."""
    alone, moves = list(alone), dict[Kink, float]()
    for kink, calls in together.items():
        if kink.is_between:
            continue
        pairs = list[tuple[float, float]]()
        # How long the longest sample is, no other decides.
        for own in (
            found[kink]
            for found in (alone[:1] if kink.name.endswith(_OF_WHOLE_NUMBERS) else alone)
            if kink in found
        ):
            pairs += _pairs_of_batch(calls, own)
        if pairs:
            if all((a < 0) == (b < 0) for a, b in pairs):
                a, b = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
                moves[kink] = (a + b) / 2
        elif kink.may_split and (move := _find_gap(calls)) is not None:
            moves[kink] = move
    return moves


def _has_one_count(together: Iterable[_Call], alone: Iterable[_Call]) -> bool:
    return not {call.count for call in together}.isdisjoint(call.count for call in alone)


def _only_distance(call: _Call | None) -> float | None:
    return float(call.distances[0]) if call and call.count == 1 and call.distances is not None else None


def _pairs_of_batch(together: list[_Call], alone: list[_Call]) -> list[tuple[float, float]]:
    """Returns pairs of distances in calls with all samples and with one, where a value has one shape for any
    number of samples and is another one; none where the value of one sample is among those of all."""
    found = list[tuple[float, float]]()
    for place, own in enumerate(alone):
        same = [c for c in together if c.count == own.count and c.distances is not None]
        if own.distances is None or not same or any(_are_close(c, own) for c in same):
            continue
        is_paired = len(together) == len(alone) and together[place].count == own.count
        whole = (together[place] if is_paired else same[0]).distances
        assert whole is not None
        apart = (whole - own.distances).abs()
        i = int(torch.where(apart.isfinite(), apart, -1.0).argmax())
        pair = float(whole[i]), float(own.distances[i])
        if all(map(math.isfinite, pair)):
            found.append(pair)
    return found


def _are_close(a: _Call, b: _Call) -> bool:
    assert a.distances is not None and b.distances is not None
    return torch.allclose(a.distances, b.distances, rtol=_CLOSE, atol=_CLOSE * _CLOSE, equal_nan=True)


def _find_gap(calls: list[_Call]) -> float | None:
    """Returns a distance between that of the entry that is nearest to the kink and that of the next one; None
    if entries lie on both sides already."""
    if not all(call.nearest for call in calls) or len({call.nearest[0] > 0 for call in calls}) > 1:
        return None
    near = sorted((d for call in calls for d in call.nearest), key=abs)
    least = _GAP * max(call.scale for call in calls)
    return next(((a + b) / 2 for a, b in itertools.pairwise(near) if abs(a - b) > least), None)
