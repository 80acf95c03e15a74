"""Finds what forward keeps from one call to the next: a counter that warms a weight up, an average of what
came before, a queue.

Plain PyTorch calls forward once in a step; a plan calls parts of it once for each micro-batch, on several
ranks, and records statements between modules once. So a loss that depends on earlier calls is not the plan's,
and may be so only after some steps, or only beyond a step that no comparison reaches. Forward is called again
with the same batch and weights; and what such calls change is set to other values, to see whether it is read.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from secc.driver.cached_functions import CachedFunction
from secc.driver.changed_weights import WeightChanges, watch_weights
from secc.driver.kept_iterators import find_advanced_iterators, is_iterator_read
from secc.driver.kept_lengths import iter_lengths
from secc.driver.start_state import StartState, are_equal, is_in_any, undivided_modules
from secc.driver.user_backwards import user_backwards
from secc.driver.watched_numbers import Listener, Origin, watched_number
from secc.errors import NotEnoughMemory, UserError
from secc.runtime.model.item_seeds import seeded_rngs
from secc.runtime.model.kept_values import NUMBERS, KeptValue, iter_contents, iter_values
from secc.runtime.model.nested_batch import unflatten_batch
from secc.runtime.model.source_lines import current_source_line, format_source_line, forward_source_line
from secc.runtime.model.user_file import UserModel, extract_loss
from secc.runtime.plan.schema import Plan
from secc.runtime.randomness.micro_batch_draws import forward_context
from secc.runtime.recorder.setting_tracker import watch_attributes
from secc.runtime.sections.gradient_hooks import iter_gradient_hooks
from secc.runtime.training.eager_reference import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    REFERENCE_SEED,
    PlanRandomness,
)
from secc.runtime.training.eager_watch import EagerWatch, memory_errors

_Outcome = tuple[float, ...]  # a loss, and the sum and the norm of each parameter's gradient
_ROUNDING = 1e-6  # of the largest of these: a sum may be small where its summands are not
_SINGLE = 3  # samples that are tried as a first batch: the largest value of a batch may be in both its halves
_MOST_ASKED = 8  # numbers that comparisons of a value ask for
_FAR = 1000  # added to what may be counted, so that thresholds of some hundred steps show


@dataclass(frozen=True)
class KeptState:
    """What a loss depends on that an earlier call has left: names, empty if they are not known, the paths of
    the modules that keep it, and a line that changes it."""

    names: tuple[str, ...]
    owners: tuple[str, ...]
    where: str
    keeper: str = "forward"  # the function that does so


@dataclass(frozen=True)
class ChangedWeight:
    """A parameter that forward changes: its name, the path of the innermost module that runs then ("" for the
    whole model), and the line, "" if it is not known."""

    name: str
    path: str
    line: str


def refuse_kept_state(
    plan: Plan,
    user: UserModel,
    model: nn.Module,
    samples: Sequence[Mapping[str, Any]],
    start: StartState | None = None,
    unloaded: StartState | None = None,
) -> None:
    """Raises UserError if the loss of these samples depends on earlier calls of forward or of collate.
    `start` has the values that the first call finds, `unloaded` what files kept before any sample was loaded.
    Blocks that take all samples of a step at once may keep any."""
    changed, found = find_kept_state(plan, user, model, samples, start, unloaded)
    if changed is not None:
        raise _changed_weight_error(plan, user, changed)
    if found is None:
        return
    what = "keeps " + " and ".join(found.names) if found.names else "keeps something"
    line = user.function_source_line("collate") if found.keeper != "forward" else user.forward_source_line
    every = [block for section in plan.sections for block in section.blocks]
    blocks = sorted({block for owner in found.owners for block in every if is_in_any(owner, [block])})
    remedy = (
        "let the loss of a call follow from its batch and the weights: a factor that changes with the steps"
        " can come with each sample (dataset() knows its number), or be left to scheduler(); what a first"
        " batch decides can be computed in model(), of some samples"
    )
    if blocks and len(blocks) == len(set(found.owners)):
        remedy += "; or " + " ".join(f"--whole-batch {b}" for b in blocks) + ", called once in a step"
    raise UserError(
        f"{found.keeper} {what} from one call to the next, and the loss depends on it; plain PyTorch calls it"
        " once in a step, a plan once for each micro-batch, on several ranks",
        found.where or line or str(user.path),
        remedy,
    )


def _changed_weight_error(plan: Plan, user: UserModel, changed: ChangedWeight) -> UserError:
    """Returns the error for a parameter that forward changes."""
    every = (block for section in plan.sections for block in section.blocks)
    block = next((b for b in every if is_in_any(changed.path, [b])), "") if changed.path else ""
    if block:
        where = f"in {changed.path}, by the batch or by how often it is called"
        remedy = f"change it after the step, or name --whole-batch {block}, called once in a step"
    else:
        where = "between modules"
        remedy = (
            "leave weights as they are while the model trains: bound trained ones where they are used, or"
            " after the step (optimizer() may register a step_post_hook); a teacher that follows the"
            " student's weights can do so in a module that calls both, named with --whole-batch"
        )
    return UserError(
        f"forward changes the parameter {changed.name} {where}: plain PyTorch does so once in a step, a plan"
        " calls parts of forward once for each micro-batch, on several ranks",
        changed.line or user.forward_source_line or str(user.path),
        remedy,
    )


def find_kept_state(
    plan: Plan,
    user: UserModel,
    model: nn.Module,
    samples: Sequence[Mapping[str, Any]],
    start: StartState | None = None,
    unloaded: StartState | None = None,
) -> tuple[ChangedWeight | None, KeptState | None]:
    """Returns a parameter that forward changes as a plan would not, and what the loss of `samples` depends on
    that earlier calls have left, both outside of blocks that take all samples of a step at once; None for
    what is not there, or if forward fails. Without `start`, what only a first call sets is not seen; without
    `unloaded`, what only a first call of collate sets is not. Values are given back."""
    undivided = undivided_modules(plan, model)
    randomness = PlanRandomness(model, plan.draws, plan.symbols)
    lines = dict[tuple[int, str], str]()

    def note_line(module: nn.Module, name: str, _value: Any) -> None:
        lines[id(module), name] = current_source_line()

    initial = [(v, _copy(v.read())) for v in _iter_state(model, user)]
    kept_once = [(v, content) for v, content in initial if is_in_any(v.owner, undivided)]

    needs_watch = True  # of memory and indices, until a forward has shown that there is nothing to see

    def run_forward(
        some: Sequence[Mapping[str, Any]],
        moved: bool = False,
        gradients: bool = False,
        keeps_weights: bool = False,
        watches: bool = False,
    ) -> tuple[_Outcome, WeightChanges]:
        nonlocal needs_watch
        _restore(kept_once)
        draws = randomness.draws_for(user, some)
        batch = unflatten_batch(user.collate(list(some)))
        watch = EagerWatch() if needs_watch or watches else None
        with (
            nullcontext(WeightChanges(model)) if keeps_weights else watch_weights(model, moved) as changes,
            seeded_rngs(REFERENCE_SEED),
            forward_context(draws),
            watch_attributes(note_line),
            memory_errors(),
            watch or nullcontext(),
        ):
            loss = extract_loss(model(**batch))
            changes.note_results()
            if moved:
                model(**batch)
                changes.note_repeated()
            outcome = (float(loss.detach().double()), *(_run_backward(model, loss) if gradients else ()))
        needs_watch = needs_watch and not (watch is not None and watch.would_see_nothing)
        return outcome, changes

    def compute_all(gradients: bool = True, watches: bool = False) -> _Outcome:
        return run_forward(samples, gradients=gradients, watches=watches)[0]

    def find_weight(changes: WeightChanges, begin: Callable[[], None] = lambda: None) -> ChangedWeight | None:
        if not changes.places:
            return None
        blocks = [b for section in plan.sections for b in section.blocks if b not in undivided]
        for moved in (False, True):  # some are set only where they are zero
            fewer = None
            with suppress(Exception):
                begin()
                fewer = run_forward(half, moved)[1]
            if moved:
                begin()
                changes = run_forward(samples, moved)[1]
            if (weight := _find_changed_weight(changes, fewer, blocks, undivided)) is not None:
                return weight
        return None

    def find_between_calls() -> tuple[ChangedWeight | None, KeptState | None]:
        with suppress(Exception):  # fewer samples may lack what forward takes for granted
            run_forward(half)
        first = _read_values(model, user)
        loss, changes = run_forward(samples)
        if not math.isfinite(loss[0]):  # it equals nothing, itself included; the comparison reports it
            return None, None
        if (weight := find_weight(changes)) is not None:
            return weight, None
        second = _read_values(model, user)
        for value, _ in kept_once:
            second.pop(value.name, None)
        again = run_forward(samples, keeps_weights=not changes.places)[0]
        values = [v for v in _iter_state(model, user) if v.name in second]
        changed = [v for v in values if not are_equal(v.read(), second[v.name])]
        if _differ(loss, again):
            other = [v for v in values if not are_equal(v.read(), first.get(v.name))]
            return None, _describe(model, changed or other, lines)
        outcome = compute_all() if changed or _runs_code_in_backward(model, user) else again
        changed += [v for v in values if v not in changed and not are_equal(v.read(), second[v.name])]
        compute = partial(compute_all, watches=True)  # other values may be sizes
        read = [v for v in changed if _is_read(v, compute, outcome)]
        read = read or list(itertools.islice(find_read_iterators(compute), 1))
        return None, _describe(model, read, lines) if read else None

    def find_read_iterators(compute: Callable[[], _Outcome]) -> Iterator[KeptValue]:
        iterators = find_advanced_iterators(iter_contents(model, user), compute)
        outcome = compute() if iterators else ()

        def results_differ() -> bool:
            return _differ(compute(), outcome)

        def list_asked_numbers(put_watched: Callable[[Listener], None]) -> Iterator[int]:
            return _numbers_asked_for(put_watched, compute)

        for value in iterators:
            if not is_in_any(value.owner, undivided) and is_iterator_read(
                value, results_differ, other_values, list_asked_numbers
            ):
                yield value

    def find_of_first_call(begin: Callable[[], None]) -> tuple[ChangedWeight | None, KeptState | None]:
        begin()
        lines.clear()
        outcome, changes = run_forward(samples, gradients=True)
        if not math.isfinite(outcome[0]):
            return None, None
        whole, filled = _read_values(model, user), start.filled_caches if start else []
        if (weight := find_weight(changes, begin)) is not None:
            return weight, None
        for some in (half, samples[len(samples) // 2 :], *([s] for s in samples[:_SINGLE])):
            begin()
            with suppress(Exception):
                run_forward(some)
            kept = [v for v in _iter_state(model, user) if not are_equal(v.read(), whole.get(v.name))]
            again = partial(compute_all, gradients=bool(kept))
            if (kept or len(some) > 1) and _differ(_outcome_or_nan(again), outcome):
                found = _describe(model, kept, lines)
                return None, found if found.names else _describe_caches(filled)
            if kept and all(are_equal(v.read(), whole.get(v.name)) for v in kept):
                break  # each call writes them again, whatever was there
        return None, None

    def begin_again() -> None:
        assert start is not None
        start.restore_values(undivided)

    def begin_unloaded() -> None:
        begin_again()
        assert unloaded is not None
        unloaded.restore_values()

    half, found, failed = samples[: (len(samples) + 1) // 2], (None, None), False
    try:
        found = find_between_calls()
    except Exception:  # whatever the user's code raises; comparisons with the plan say it
        failed = True
    is_changed = start is not None and (failed or unloaded is not None or start.is_changed())
    if start is None or found != (None, None) or not is_changed:
        _restore(initial)
        return found
    before = StartState(model, user)
    try:
        start.restore_parameters()
        found = find_of_first_call(begin_again)
        if unloaded is not None and found == (None, None):
            weight, kept = find_of_first_call(begin_unloaded)
            found = weight, kept and dataclasses.replace(kept, keeper="collate()")
    except Exception:
        return None, None
    else:
        return found
    finally:
        before.restore_values()
        _restore(initial)


def _runs_code_in_backward(model: nn.Module, user: UserModel) -> bool:
    """Whether a backward may run code of the user's."""
    found = user_backwards(model, user)
    return bool(found.functions or found.hooked) or any(True for _ in iter_gradient_hooks(model))


def _run_backward(model: nn.Module, loss: torch.Tensor) -> list[float]:
    """Returns what says whether gradients are the same: the sum and the norm of each."""
    found = list[float]()
    if loss.requires_grad:
        loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.double()
            found += [float(gradient.sum()), float(gradient.norm())]
        parameter.grad = None
    return found


def _outcome_or_nan(compute: Callable[[], _Outcome]) -> _Outcome:
    """Returns a loss and its gradients; not-a-number if the user's code fails, as where a kept tensor has
    another shape."""
    try:
        return compute()
    except NotEnoughMemory:
        raise
    except Exception:
        return (math.nan,)


def _find_changed_weight(
    changes: WeightChanges, fewer: WeightChanges | None, blocks: Sequence[str], undivided: Sequence[str]
) -> ChangedWeight | None:
    """Returns a parameter that forward changes between modules, or in a block by more than its weights: to
    other values for `fewer` samples, or to other values if it does so twice. Blocks in `undivided` may."""
    for name, (path, line) in changes.places.items():
        if is_in_any(path, undivided):
            continue
        is_inside = is_in_any(path, blocks)
        result = changes.results[name]
        others = (changes.repeated.get(name), None if fewer is None else fewer.results.get(name))
        if not is_inside or any(o is not None and not _are_close(o, result) for o in others):
            return ChangedWeight(name, path, line)
    return None


def _are_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a - b).double().norm()) <= LOSS_TOLERANCE * float(b.double().norm())


def _iter_state(model: nn.Module, user: UserModel) -> Iterator[KeptValue]:
    """Yields the numbers and tensors that are kept, and the lengths of lists and texts."""
    yield from iter_values(model, user)
    yield from iter_lengths(model, user)


def _read_values(model: nn.Module, user: UserModel) -> dict[str, Any]:
    """Returns copies of all values by name."""
    return {v.name: _copy(v.read()) for v in _iter_state(model, user)}


def _restore(values: Sequence[tuple[KeptValue, Any]]) -> None:
    for value, content in values:
        if not are_equal(value.read(), content):
            value.write(_copy(content))


def _describe(model: nn.Module, kept: Sequence[KeptValue], lines: Mapping[tuple[int, str], str]) -> KeptState:
    """Returns the state that these values are, with the line that sets the first one, else that of the
    forward of its module."""
    owners = tuple(v.owner for v in kept if v.owner is not None)
    where = ""
    for value in kept:
        if value.owner is None or where:
            continue
        owner = model.get_submodule(value.owner)
        attribute = value.name.removeprefix("self.").removeprefix(f"{value.owner}.")
        where = lines.get((id(owner), attribute), "") or forward_source_line(type(owner))
    return KeptState(tuple(dict.fromkeys(v.name for v in kept))[:3], owners, where)


def _describe_caches(functions: Sequence[CachedFunction]) -> KeptState:
    """Returns the state that the results of functions with a cache are."""
    names = dict.fromkeys(f"the results of {f.name}(), which has a cache," for f in functions)
    code = next((f.without_cache.__code__ for f in functions), None)
    return KeptState(tuple(names)[:3], (), format_source_line(code, code.co_firstlineno) if code else "")


def _is_read(value: KeptValue, compute: Callable[[], _Outcome], outcome: _Outcome) -> bool:
    """Whether the loss or its gradients are others, or forward fails, where this value is another one."""
    content = _copy(value.read())

    def put_watched(listener: Listener) -> None:
        value.write(watched_number(content, listener))

    try:
        asked = _numbers_asked_for(put_watched, compute) if type(content) is int else ()
        for other in itertools.chain(other_values(content), asked):
            value.write(other)
            if _differ(compute(), outcome):
                return True
    except Exception:  # as an index beyond a table
        return True
    finally:
        value.write(content)
    return False


class _AskedNumbers:
    """Notes the numbers with which comparisons of a watched number would have another answer."""

    def __init__(self) -> None:
        self.found = dict[int, None]()

    def note_numbers(self, comparison: str, number: float, values: Sequence[float], origin: Origin) -> float:
        """Code compares a number."""
        compare = getattr(operator, comparison)
        answer = compare(values[0], number)
        others = origin.find_nearest_numbers(lambda value: compare(value, number) != answer)
        self.found |= dict.fromkeys(others)
        return 0.0

    def note_step(self, value: float, step: float) -> float:
        """Code makes a whole number of a value."""
        return 0.0

    def note_key(self, value: float, origin: Origin) -> None:
        """Code looks for a number in a set or a dict."""


def _numbers_asked_for(
    put_watched: Callable[[Listener], None], compute: Callable[[], _Outcome]
) -> Iterator[int]:
    """Yields whole numbers that would let code take another way where it compares numbers, also after
    arithmetic (`if self.calls % 1000 == 999`); `put_watched` lets a listener watch them."""
    asked = _AskedNumbers()
    put_watched(asked)
    with suppress(Exception):
        compute()
    yield from itertools.islice(asked.found, _MOST_ASKED)


def other_values(content: Any) -> Iterator[Any]:
    """Yields values of the same kind that a number or a tensor might have at another time."""
    if isinstance(content, torch.Tensor):
        if content.dtype is torch.bool:
            yield ~content
        else:
            yield from (torch.zeros_like(content), content + 1, content + _FAR)
    elif isinstance(content, bool):
        yield not content
    elif isinstance(content, NUMBERS):
        yield from (type(content)(0), content + 1, content + _FAR)


def _differ(a: _Outcome, b: _Outcome) -> bool:
    """Whether two losses differ by more than rounding, or, where both are given, their gradients do."""
    if not abs(a[0] - b[0]) <= LOSS_TOLERANCE * max(abs(a[0]), abs(b[0])):
        return True
    if len(a) != len(b):
        return min(len(a), len(b)) > 1
    scale = max(map(abs, (*a[1:], *b[1:])), default=0.0)
    pairs = zip(a[1:], b[1:], strict=True)
    return any(
        not abs(x - y) <= GRADIENT_TOLERANCE * max(abs(x), abs(y)) + _ROUNDING * scale for x, y in pairs
    )


def _copy(content: Any) -> Any:
    return content.detach().clone() if isinstance(content, torch.Tensor) else content
