"""A loss that depends on earlier calls of forward is refused, wherever forward keeps what it counts; what is
kept and never read does not matter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.driver.kept_state import find_kept_state
from secc.driver.start_state import StartState
from secc.errors import UserError
from secc.runtime.model.user_file import load_model_file

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

STATE = {{"step": 0}}


class Warm(nn.Module):
    least = None

    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.last = nn.Linear(8, 8), 0, None
        self.seen, self.named = [], {{}}
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        factor = 1.0
        {inside}
        return x + factor * self.linear(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.warm, self.head = nn.Embedding(20, 8), Warm(), nn.Linear(8, 20)
        self.step = 0

    def forward(self, tokens):
        x = self.warm(self.embed(tokens))
        weight = 1.0
        {outside}
        logits = self.head(x[:, :-1]).flatten(0, 1)
        return weight * F.cross_entropy(logits, tokens[:, 1:].flatten())


def model():
    return Net()


def dataset():
    g = torch.Generator().manual_seed(0)
    return [{{"tokens": torch.randint(0, 20, (5 + i % 4,), generator=g)}} for i in range(24)]


def collate(samples):
    return {{"tokens": nn.utils.rnn.pad_sequence([s["tokens"] for s in samples], batch_first=True)}}
"""
INSIDE = {
    "warm.calls": "self.calls += 1; factor = min(1.0, self.calls / 3)",
    "warm.count": "self.count += 1; factor = (self.count / 600).clamp(max=1)",
    "warm.last": "factor = 1 if self.last is None else self.last.tanh(); self.last = x.detach().mean() + 1",
}


def make_plan(folder: Path, inside: str = "", outside: str = "", **options: object) -> CompiledPlan:
    text = MODEL.format(inside=inside or "pass", outside=outside or "pass")
    (folder / "net.py").write_text(text)
    return compile_model(folder / "net.py", CompileOptions(cluster="local:2", global_batch=8, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(INSIDE))
def test_what_a_block_keeps_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"forward keeps {name} from one call to the next") as refused:
        check_exactness(make_plan(tmp_path, inside=INSIDE[name]), required=True)
    assert refused.value.where.startswith("net.py:") and "--whole-batch warm" in refused.value.remedy


@pytest.mark.parametrize(
    "line",
    [
        "self.calls += 1; factor = 2.0 if self.calls % 1000 == 999 else 1.0",
        "self.calls += 1; factor = 2.0 if self.calls == 777 else 1.0",
        "self.calls += 1; factor = 2.0 if 500 < self.calls - 50 < 510 else 1.0",
    ],
)
def test_a_counter_that_is_compared_with_a_far_number_is_refused(line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"forward keeps warm.calls from one call to the next"):
        check_exactness(make_plan(tmp_path, inside=line), required=True)


KEEPERS = """
import contextvars
import itertools

TICKS, TURN, NAMES = itertools.count(), contextvars.ContextVar("TURN", default=0), []
tick = itertools.count().__next__


def warm_up():
    for n in itertools.count():
        yield 3.0 if n > 700 else 1.0


def make_counter():
    n = 0

    def count_calls():
        nonlocal n
        n += 1
        return n

    return count_calls


count_calls, FACTORS = make_counter(), warm_up()


def append_call(kept=[]):
    kept.append(0)
    return len(kept)


class Clock:
    __slots__ = ("time",)
    def __init__(self):
        self.time = 0


class Slowed(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Slowed.calls += 1
        return gradient * (2.0 if Slowed.calls > 700 else 1.0)


CLOCK = Clock()


"""
KEPT = {
    "the global TICKS": "factor = 2.0 if next(TICKS) == 777 else 1.0",
    "the global tick": "factor = 2.0 if tick() % 1000 == 999 else 1.0",
    "the global FACTORS": "factor = next(FACTORS)",
    "the global TURN.get()": "TURN.set(TURN.get() + 1); factor = 2.0 if TURN.get() == 777 else 1.0",
    "the length of the global NAMES": "NAMES.append('a'); factor = 2.0 if len(NAMES) > 700 else 1.0",
    "the length of append_call.__defaults__[0]": "factor = 2.0 if append_call() > 700 else 1.0",
    "make_counter.count_calls.n": "factor = 2.0 if count_calls() == 777 else 1.0",
    "the global CLOCK.time": "CLOCK.time += 1; factor = 2.0 if CLOCK.time == 777 else 1.0",
    "Slowed.calls": "x = Slowed.apply(x)",
}


def make_keeper(folder: Path, line: str) -> CompiledPlan:
    """Compiles a model with a line in its block that uses what `KEEPERS` defines."""
    text = MODEL.format(inside=line, outside="pass").replace("class Warm(", f"{KEEPERS}class Warm(")
    (folder / "net.py").write_text(text)
    return compile_model(folder / "net.py", CompileOptions(cluster="local:2", global_batch=8))


@pytest.mark.parametrize("name", sorted(KEPT))
def test_what_counts_calls_to_a_far_number_is_refused_wherever_it_is_kept(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"forward keeps {re.escape(name)}"):
        check_exactness(make_keeper(tmp_path, KEPT[name]), required=True)


@pytest.mark.parametrize(
    "line",
    ["self.last = next(TICKS)", "self.seen.append(float(x.detach().mean()))", "TURN.set(TURN.get() + 1)"],
)
def test_what_is_counted_or_logged_and_not_read_is_accepted(line: str, tmp_path: Path) -> None:
    check_exactness(make_keeper(tmp_path, line), required=True)


SCALED = "; x = factor * x + ((1 - factor) * x).detach()"
GRADIENTS = {
    "warm.calls": "self.calls += 1; factor = min(1.0, self.calls / 600)" + SCALED,
    "warm.top": "self.top = getattr(self, 'top', 0) or float(x.detach().max()); factor = 1 / self.top"
    + SCALED,
}


@pytest.mark.parametrize("name", sorted(GRADIENTS))
def test_what_changes_gradients_only_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"forward keeps {name} from one call to the next"):
        check_exactness(make_plan(tmp_path, inside=GRADIENTS[name] + "; factor = 1.0"), required=True)


FIRST = {
    "warm.last": "self.last = x.detach().mean((0, 1)) if self.last is None else self.last; x = x - self.last",
    "warm.top": "self.top = getattr(self, 'top', 0) or float(x.detach().max()); x = x / self.top",
    "warm.seen[0]": "self.seen += [] if self.seen else [x.detach().mean((0, 1))]; x = x - self.seen[0]",
    "warm.named['mean']": "x = x - self.named.setdefault('mean', x.detach().mean())",
    "the global STATE['mean']": "x = x - STATE.setdefault('mean', x.detach().mean())",
    "Warm.least": "Warm.least = x.detach().min() if Warm.least is None else Warm.least; x = x - Warm.least",
}


@pytest.mark.parametrize("name", sorted(FIRST))
def test_what_a_block_keeps_of_its_first_batch_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"forward keeps {re.escape(name)} from one call") as refused:
        check_exactness(make_plan(tmp_path, inside=FIRST[name]), required=True)
    assert "a first batch" in refused.value.remedy


def _refuse_changed_parameter(folder: Path, line: str, name: str, made: str) -> None:
    """Checks a model with one parameter more, that a line of its block changes."""
    text = MODEL.format(inside=line, outside="pass").replace(
        "        self.register_buffer", f"        self.{name} = {made}\n        self.register_buffer"
    )
    (folder / "net.py").write_text(text)
    compiled = compile_model(folder / "net.py", CompileOptions(cluster="local:2", global_batch=8))
    with pytest.raises(UserError, match=rf"changes the parameter warm\.{name} in warm"):
        check_exactness(compiled, required=True)


def test_a_weight_that_the_first_batch_sets_is_refused(tmp_path: Path) -> None:
    line = "_ = self.shift.any() or self.shift.data.copy_(x.detach().mean((0, 1))); x = x - self.shift"
    made = "nn.Parameter(torch.zeros(8))"
    _refuse_changed_parameter(tmp_path, line, "shift", made)


@pytest.mark.parametrize(
    "line",
    [
        "self.last = torch.arange(20.0) if self.last is None else self.last; x = x + self.last[0]",
        "self.last = self.last if self.last is not None and len(self.last) >= x.shape[1] else"
        " torch.arange(1.0 * x.shape[1]); x = x + self.last[: x.shape[1], None]",
        "x = x + self.named.setdefault(x.shape[1], torch.arange(1.0 * x.shape[1]))[:, None]",
        "self.calls = self.calls or bool(self.linear.register_forward_hook(lambda m, a, out: 2 * out))",
        "self.top = getattr(self, 'top', 0) or float(self.linear.weight.norm()); x = x / self.top",
    ],
)
def test_a_table_that_the_first_call_makes_is_accepted(line: str, tmp_path: Path) -> None:
    check_exactness(make_plan(tmp_path, inside=line), required=True)


def test_a_start_is_given_back(tmp_path: Path) -> None:
    made = make_plan(tmp_path)
    assert made.model is not None
    warm, cls = made.model.get_submodule("warm"), type(made.model.get_submodule("warm"))
    start = StartState(made.model, made.user)
    assert not start.is_changed()
    warm.seen.append(1)  # type: ignore[operator, union-attr]
    warm.extra, cls.least, warm.named = torch.ones(2), 5, {"a": 1}  # type: ignore[attr-defined]
    warm.count += 1  # type: ignore[operator]
    made.user.module.STATE["step"] = 7
    with torch.no_grad():
        warm.linear.weight.add_(1)  # type: ignore[union-attr, operator]
    assert start.is_changed()
    start.restore_values()
    assert (warm.seen, cls.least, warm.named, float(torch.as_tensor(warm.count))) == ([], None, {}, 0)  # type: ignore[attr-defined]
    assert not hasattr(warm, "extra") and made.user.module.STATE == {"step": 0}
    assert start.is_changed()
    start.restore_parameters()
    assert not start.is_changed()


def test_hooks_by_which_transformers_collects_results_are_no_state() -> None:
    path = Path(__file__).parents[2] / "examples" / "vlm_digits.py"
    user = load_model_file(path)
    model = user.build_model()
    start = StartState(model, user)
    ids = torch.tensor([[1, 2, 3]])
    model(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
    assert any(vars(m)["_forward_hooks"] for m in model.modules())
    assert not start.is_changed()


def test_what_each_call_writes_anew_needs_one_other_first_batch(tmp_path: Path) -> None:
    made = make_plan(tmp_path, inside="self.last = x.detach().mean()")
    assert made.model is not None
    calls, forward = list[int](), made.model.forward

    def count_call(**batch: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return forward(**batch)

    made.model.forward = count_call
    samples = made.survey.compose_batches(frozenset())[-1]
    assert find_kept_state(made.plan, made.user, made.model, samples, made.start) == (None, None)
    assert len(calls) == 6  # half, all, all; at the start: all, half and all


def test_a_global_that_counts_calls_is_refused(tmp_path: Path) -> None:
    line = 'STATE["step"] += 1; weight = 1 / STATE["step"]'
    with pytest.raises(UserError, match="keeps the global STATE\\['step'\\] from one call to the next"):
        check_exactness(make_plan(tmp_path, outside=line), required=True)


def test_a_step_counter_between_modules_is_refused(tmp_path: Path) -> None:
    line = "self.step += 1; weight = min(1.0, self.step / 10_000)"
    with pytest.raises(UserError, match=r"keeps self\.step from one call to the next"):
        check_exactness(make_plan(tmp_path, outside=line), required=True)


def test_what_is_kept_and_not_read_is_accepted_and_given_back(tmp_path: Path) -> None:
    made = make_plan(tmp_path, inside="self.calls += 1; self.count += 1; self.last = x.detach()")
    assert made.model is not None
    warm = made.model.get_submodule("warm")
    before = warm.calls, float(torch.as_tensor(warm.count))
    samples = made.survey.compose_batches(frozenset())[-1]
    assert find_kept_state(made.plan, made.user, made.model, samples) == (None, None)
    assert (warm.calls, float(torch.as_tensor(warm.count))) == before
    check_exactness(made, required=True)


def test_a_block_that_takes_the_whole_batch_may_count_its_calls(tmp_path: Path) -> None:
    made = make_plan(tmp_path, inside=INSIDE["warm.calls"], whole_batch=("warm",))
    assert check_exactness(made, required=True).plan.checks["patterns"]


@pytest.mark.parametrize(
    "line",
    [
        "self.warm.linear.weight.data = 0.9 * self.warm.linear.weight.data + 0.1 * self.head.weight.data[:8]",
        "with torch.no_grad(): self.warm.linear.weight.lerp_(self.head.weight[:8], 0.1)",
        "self.head.bias.data.clamp_(-10, 10)",
    ],
)
def test_a_weight_that_forward_changes_between_modules_is_refused(line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"forward changes the parameter \S+ between modules"):
        check_exactness(make_plan(tmp_path, outside=line), required=True)


def test_a_weight_that_a_block_moves_in_each_call_is_refused(tmp_path: Path) -> None:
    line = "self.linear.weight.data.mul_(0.9)"
    with pytest.raises(UserError, match=r"changes the parameter warm\.linear\.weight in warm") as refused:
        check_exactness(make_plan(tmp_path, inside=line), required=True)
    assert "--whole-batch warm" in refused.value.remedy
    made = make_plan(tmp_path, inside=line, whole_batch=("warm",))
    assert check_exactness(made, required=True).plan.checks["patterns"]


def test_a_block_may_bound_its_weights(tmp_path: Path) -> None:
    made = make_plan(tmp_path, inside="self.linear.weight.data.clamp_(-0.1, 0.1)")
    assert made.model is not None
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    samples = made.survey.compose_batches(frozenset())[-1]
    assert find_kept_state(made.plan, made.user, made.model, samples) == (None, None)
    assert all(torch.equal(p, before[name]) for name, p in made.model.named_parameters())


def test_a_teacher_that_starts_as_its_students_copy_is_seen_to_follow_it(tmp_path: Path) -> None:
    line = "self.twin.data.lerp_(self.linear.weight.data, 0.1); factor = self.twin.mean()"
    made = "nn.Parameter(self.linear.weight.detach().clone(), requires_grad=False)"
    _refuse_changed_parameter(tmp_path, line, "twin", made)
