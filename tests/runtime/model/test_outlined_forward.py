"""A forward in two parts computes what it computes in one, wherever it is split."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

from secc.runtime.model.function_blocks import StatementBlock, add_function_block, intercepted_functions
from secc.runtime.model.outlined_forward import (
    ForwardSource,
    NotOutlinable,
    OutlinedStatements,
    StatementRange,
    call_in_place_of_ranges,
    compile_forward_with_calls,
    outline_statements,
)


class Caption(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(9, 4), nn.GRUCell(4, 4), nn.Linear(4, 9)
        self.scale = nn.Parameter(torch.ones(4))

    def start(self, image: torch.Tensor) -> torch.Tensor:
        return torch.tanh(image * self.scale)

    def forward(self, image: torch.Tensor, ids: torch.Tensor, weight: float = 0.5) -> dict[str, Any]:
        """Two losses."""
        state = self.start(image)
        scores: list[torch.Tensor] = []
        norms = 0.0
        if weight > 1:
            factor = weight
        penalty = lambda x: x.square().mean()  # noqa: E731
        for step in range(ids.shape[1] - 1):
            state = self.cell(self.embed(ids[:, step]), state)
            scores.append(self.out(state))
            norms += penalty(state)
        stacked = torch.stack(scores, 1)
        if weight > 1:
            norms = norms * factor
        loss = nn.functional.cross_entropy(stacked.flatten(0, 1), ids[:, 1:].flatten())
        return dict(loss=loss + weight * norms, last=self.out(state).detach())


class TwoLoops(nn.Module):
    def forward(self, lists: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for i, part in enumerate(lists):
            size = part.sum()
            total = total + i * size
        total = total * 2
        rest = 0 * part.sum()
        for i, part in enumerate(lists):
            size = part.sum()
            rest = rest + (i + 1) * size
        return total + rest


class ReadLater(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(())
        scaled = lambda: x.sum() * scale  # noqa: E731
        scale = scale + 2
        return scaled()


class Unsplittable(nn.Module):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch.pop("x")
        if "y" not in batch:
            return torch.zeros(())
        self.seen = batch
        return count_children(self)


def count_children(module: nn.Module) -> torch.Tensor:
    return torch.ones(()) * len(list(module.children()))


FORWARD = Caption.forward
assert isinstance(FORWARD, FunctionType)
RANGES = [(i, j) for i in range(len(ForwardSource(FORWARD, Caption()).statements)) for j in range(i, 12)]


def run_split(first: int, last: int, weight: float) -> Any:
    """Runs the model with its forward split, and returns the result and the names that crossed the split."""
    torch.manual_seed(0)
    model, crossed = Caption(), list[set[str]]()
    image, ids = torch.randn(3, 4), torch.randint(9, (3, 5))
    expected = model(image, ids, weight)
    outlined = outline_statements(FORWARD, Caption(), first, last)

    def run_statements(owner: Any, given: dict[str, Any]) -> Any:
        found = outlined.run(owner, given)
        crossed.append({*given, *(() if outlined.returns else found)})
        return found

    forward = compile_forward_with_calls(FORWARD, Caption(), [outlined])
    code = call_in_place_of_ranges(forward, {(first, last): run_statements})
    found = FunctionType(code, FORWARD.__globals__, "forward", FORWARD.__defaults__)(
        model, image, ids, weight
    )
    return expected, found, crossed


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_every_split_computes_the_same(weight: float) -> None:
    splits = 0
    for first, last in RANGES:
        try:
            outline_statements(FORWARD, Caption(), first, last)
        except (NotOutlinable, IndexError):
            continue
        expected, found, crossed = run_split(first, last, weight)
        assert torch.equal(expected["loss"], found["loss"]) and torch.equal(expected["last"], found["last"])
        assert len(crossed) == 1
        splits += 1
    assert splits > 20


def noting(part: OutlinedStatements, called: list[tuple[int, int]]) -> Callable[[Any, dict[str, Any]], Any]:
    def run(owner: Any, given: dict[str, Any]) -> Any:
        called.append(part.span)
        return part.run(owner, given)

    return run


def test_two_ranges_are_two_calls() -> None:
    source, pairs = ForwardSource(FORWARD, Caption()), 0
    free = {source.widen_range(i, j) for i, j in RANGES if (i, j) == source.widen_range(i, j)}
    for a, b in itertools.product(sorted(free), repeat=2):
        if a[1] >= b[0]:
            continue
        try:
            parts = [outline_statements(FORWARD, Caption(), *span) for span in (b, a)]
        except NotOutlinable:
            continue
        torch.manual_seed(0)
        model, called = Caption(), list[tuple[int, int]]()
        image, ids = torch.randn(3, 4), torch.randint(9, (3, 5))
        handlers = {part.span: noting(part, called) for part in parts}
        code = call_in_place_of_ranges(compile_forward_with_calls(FORWARD, Caption(), parts), handlers)
        split = FunctionType(code, FORWARD.__globals__, "forward", FORWARD.__defaults__)
        assert torch.equal(split(model, image, ids)["loss"], model(image, ids)["loss"])
        assert called == [a, b]
        pairs += 1
    assert pairs > 100


def test_names_that_two_loops_set_for_themselves_do_not_cross() -> None:
    forward = TwoLoops.forward
    assert isinstance(forward, FunctionType)
    crossed = list[set[str]]()
    second = outline_statements(forward, TwoLoops(), 3, 4)
    handler = lambda owner, given: crossed.append(set(given)) or second.run(owner, given)  # noqa: E731
    code = call_in_place_of_ranges(
        compile_forward_with_calls(forward, TwoLoops(), [second]), {(3, 4): handler}
    )
    lists = [torch.ones(2), torch.ones(3)]
    assert FunctionType(code, forward.__globals__)(TwoLoops(), lists) == TwoLoops()(lists) == 14
    assert crossed == [{"lists", "part"}]


def test_a_function_from_before_a_range_sees_what_it_sets() -> None:
    forward = ReadLater.forward
    assert isinstance(forward, FunctionType)
    middle = outline_statements(forward, ReadLater(), 2, 2)
    code = call_in_place_of_ranges(
        compile_forward_with_calls(forward, ReadLater(), [middle]), {(2, 2): middle.run}
    )
    split = FunctionType(code, forward.__globals__, "forward", None, forward.__closure__)
    assert split(ReadLater(), torch.ones(2)) == ReadLater()(torch.ones(2)) == 6


def test_blocks_of_two_modules_of_one_class_have_names_of_their_own() -> None:
    model = nn.Sequential(TwoLoops(), TwoLoops())
    names = [f"{__name__}:TwoLoops.forward#0-2@{path}" for path in ("0", "1")]
    paths = [add_function_block(model, name, __name__) for name in names]
    assert len(set(paths)) == 2
    assert [add_function_block(model, name, __name__) for name in names] == paths
    called = list[Any]()

    def handle(block: Any, args: Any, kwargs: Any) -> Any:
        called.append(block.name)
        return block.call_directly(args, kwargs)

    lists = [torch.ones(2), torch.ones(3)]
    with intercepted_functions(model, handle):
        found = model[0](lists) + model[1](lists) + TwoLoops()(lists)
    assert found == 3 * 14 and called == names


def test_a_list_that_a_loop_fills_begins_inside_the_range() -> None:
    source = ForwardSource(FORWARD, Caption())
    loop = source.statement_that_calls("cell")
    assert loop == 5 and source.widen_range(loop, loop) == (1, 5)
    assert source.lists_read_after(1, 5) == 1 and source.lists_read_after(1, 6) == 0
    _, _, (crossed,) = run_split(1, 6, 0.5)
    assert "scores" not in crossed and {"state", "ids", "stacked", "norms"} <= crossed


def test_methods_count_for_the_attributes_that_a_range_uses() -> None:
    assert outline_statements(FORWARD, Caption(), 0, 0).children == {"start", "scale"}
    assert outline_statements(FORWARD, Caption(), 1, 6).children == {"embed", "cell", "out"}


def test_arguments_of_a_call_are_statements_of_their_own() -> None:
    statements = ForwardSource(FORWARD, Caption()).statements
    last = outline_statements(FORWARD, Caption(), len(statements) - 1, len(statements) - 1)
    assert last.returns and last.children == frozenset()  # `self.out(state)` is computed before


@pytest.mark.parametrize(
    "number, why",
    [(0, "argument batch in place"), (1, "returns before"), (2, "sets"), (3, "module.children")],
)
def test_what_cannot_be_split_says_why(number: int, why: str) -> None:
    forward = Unsplittable.forward
    assert isinstance(forward, FunctionType)
    with pytest.raises(NotOutlinable, match=why):
        outline_statements(forward, Unsplittable(), number, number)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def advance(self, state: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.cell(state))


class Stepper:
    def __init__(self, gain: float) -> None:
        self.gain = gain

    def step(self, state: torch.Tensor, *, net: Recurrent) -> torch.Tensor:
        return self.gain * net.cell(state) + weigh(net, state)


def weigh(net: Recurrent, state: torch.Tensor) -> torch.Tensor:
    return state * net.scale if hasattr(net, "scale") else state


class Outsourced(Recurrent):
    """Hands itself to others."""

    def __init__(self) -> None:
        super().__init__()
        self.stepper, self.unused = Stepper(0.5), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.unused.weight.sum() + x
        for _ in range(2):
            state = self.stepper.step(state, net=self)
        return state.sum()


class Doubled(Recurrent):
    """Overrides methods of its base class and calls the base class's with `super()`."""

    def advance(self, state: torch.Tensor) -> torch.Tensor:
        return 2 * super().advance(state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x * self.scale
        for _ in range(2):
            state = super().advance(state) + self.advance(state)
        return state.sum()


class Stateful(Recurrent):
    """Keeps the state of one call as an attribute, which code outside may read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = x * self.scale
        for _ in range(2):
            self.state = self.cell(self.state)
        return self.state.sum()


class Counting(Recurrent):
    """Keeps a number from call to call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = getattr(self, "count", 0) + 1
        return x.sum() / self.count


class Storing(Recurrent):
    """Keeps itself where no split can follow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        owners = [self]
        return owners[0].cell(x).sum()


@pytest.mark.parametrize(
    "kind, children",
    [
        (Outsourced, {"stepper", "cell", "scale"}),
        (Doubled, {"advance", "cell"}),
        (Stateful, {"cell"}),
    ],
)
def test_self_is_followed_where_it_is_passed_on_set_or_is_super(
    kind: type[Recurrent], children: set[str]
) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(3, 4)
    expected = model(x)
    state = vars(model).pop("state", None)
    path = add_function_block(model, f":{kind.__name__}.forward#1-1@", __name__)
    calls = list[StatementBlock]()

    def handle(block: Any, args: Any, kwargs: Any) -> Any:
        calls.append(block)
        return block(*args, **kwargs)

    with intercepted_functions(model, handle):
        found = model(x)
    assert torch.equal(found, expected) and calls == [model.get_submodule(path)]
    assert outline_statements(kind.forward, model, 1, 1).children == children  # pyright: ignore
    assert state is None or torch.equal(vars(model)["state"], state)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(
    "kind, why", [(Counting, "passes self on|sets self.count"), (Storing, "passes self on, or keeps it")]
)
def test_self_that_cannot_be_followed_says_why(kind: type[Recurrent], why: str) -> None:
    with pytest.raises(NotOutlinable, match=why):
        outline_statements(kind.forward, kind(), 0, 0)  # pyright: ignore[reportArgumentType]


class Helped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.bias, self.power = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), 2

    @staticmethod
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @property
    def exponent(self) -> int:
        return self.power

    def shift(self, x: torch.Tensor) -> torch.Tensor:
        return self.double(x) + self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.shift(self.first(x)) ** self.exponent
        return (y * self.double(x)).sum()


def test_self_in_a_block_has_the_methods_of_its_owner() -> None:
    model, x = Helped(), torch.randn(3, 4)
    expected = model(x)
    path = add_function_block(model, ":Helped.forward#0-1@", __name__)
    block = model.get_submodule(path)
    assert isinstance(block, StatementBlock) and torch.equal(block({"x": x}), expected)
    assert {n for n, _ in block.named_parameters()} == {"first.weight", "first.bias", "bias"}
    assert path.startswith("lines_") and not any(n.startswith(path) for n in model.state_dict())
    assert not model.load_state_dict(Helped().state_dict()).missing_keys


def test_a_range_has_a_name() -> None:
    found = StatementRange("net:Model.forward", 2, 4, "student.head")
    assert StatementRange.parse(str(found)) == found
    assert StatementRange.parse(":choose") is None
