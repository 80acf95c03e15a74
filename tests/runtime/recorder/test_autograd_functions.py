"""The user's autograd functions between modules: one call each, with the user's own backward; and
functions that a plan cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from secc.errors import UserError
from secc.runtime.recorder import BlockError, record_forward
from secc.runtime.sections.autograd_functions import UserFunction
from tests.runtime.recorder.test_recorder import assert_replays, recorded, targets


class Twice(torch.autograd.Function):
    """Its backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        ctx.factor = factor
        return factor * x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.factor * g, None


twice = Twice.apply


class Parts(torch.autograd.Function):
    @staticmethod
    def forward(
        x: torch.Tensor, sizes: tuple[int, int], note: str
    ) -> tuple[torch.Tensor, str, torch.Tensor, torch.Tensor]:
        return x[:, : sizes[0]] * 2, note, x.argmax(-1), x[:, sizes[1] :] * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.width = inputs[0].shape[1]

    @staticmethod
    def backward(
        ctx: Any, a: torch.Tensor, note: None, best: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        return torch.nn.functional.pad(a, (0, ctx.width - 1)) + b.sum(1, keepdim=True), None, None


class Into(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


class Peeks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


def _parts(m: Any, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    a, note, best, b = Parts.apply(h, (1, 1), "kept")
    assert note == "kept"
    return torch.cat([a * best[:, None], b], 1)


def _written(m: Any, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    out = twice(h * 1)
    out[keep] += m.scale
    return Twice.apply(out)


def _autocast(m: Any, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return Twice.apply(h @ torch.ones(3, 3)).float()


APPLIED: dict[str, Callable[..., Any]] = {
    "plain": lambda m, h, x, keep: Twice.apply(h),
    "kept under another name": lambda m, h, x, keep: twice(h, 3.0),
    "several results": _parts,
    "beside writes": _written,
    "under autocast": _autocast,
    "of a parameter": lambda m, h, x, keep: h * Twice.apply(m.scale),
    "checkpointed": lambda m, h, x, keep: checkpoint(lambda t: Twice.apply(t * 2), h, use_reentrant=False),
    "checkpointed the old way": lambda m, h, x, keep: checkpoint(
        lambda t: Twice.apply(t * 2), h, use_reentrant=True
    ),
}


@pytest.mark.parametrize("name", APPLIED)
def test_a_function_is_one_call_with_its_own_backward(name: str) -> None:
    found, model = recorded(APPLIED[name])
    assert any(
        t.startswith("function.tests.runtime.recorder.test_autograd_functions:") for t in targets(found)
    )
    assert_replays(found, model)


def test_without_a_gradient_a_function_is_recorded_as_its_ops() -> None:
    found, model = recorded(lambda m, h, x, keep: h * Twice.apply(x[:, :3]))
    assert "aten.mul.Tensor" in targets(found) and not any(t.startswith("function") for t in targets(found))
    assert_replays(found, model)


def _inner() -> Any:
    class Inner(Twice):
        pass

    return Inner


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "made inside of a function": (
        lambda m, h, x, keep: _inner().apply(h),
        "Inner.apply, a class that no plan can name",
    ),
    "an object as argument": (
        lambda m, h, x, keep: Twice.apply(h, object()),
        "Twice.apply is called with a value of type object",
    ),
    "writing into its argument": (
        lambda m, h, x, keep: Into.apply(h * 1),
        "Into.apply writes into its argument",
    ),
    "drawing random numbers": (lambda m, h, x, keep: Noise.apply(h), "Noise.apply draws random numbers"),
    "reading a value": (lambda m, h, x, keep: Peeks.apply(h), "needs values that depend on a block's result"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_a_plan_cannot_hold_are_rejected_with_their_place(name: str) -> None:
    glue, message = REFUSED[name]
    with pytest.raises(BlockError, match=message) as error:
        recorded(glue)
    assert error.value.where.startswith("test_autograd_functions.py:") and error.value.remedy


def test_names_print_and_parse() -> None:
    for function in (UserFunction("", "Reverse"), UserFunction("ops.round", "Outer.Round")):
        assert UserFunction.parse(str(function)) == function


def test_a_tensor_hook_is_rejected_with_its_place() -> None:
    with pytest.raises(UserError, match="a hook on a tensor between its modules") as error:
        recorded(lambda m, h, x, keep: h.register_hook(lambda g: 2 * g) and h)
    assert error.value.where.startswith("test_autograd_functions.py:") and error.value.remedy


@pytest.mark.parametrize(
    ("glue", "name"),
    [
        (lambda m, h, x, keep: h * torch.autograd.grad(h.sum(), h)[0], "torch.autograd.grad"),
        (lambda m, h, x, keep: h.sum().backward(retain_graph=True) or h, r"backward\(\)"),
    ],
    ids=["grad", "backward"],
)
def test_gradients_taken_between_modules_are_rejected_with_their_place(
    glue: Callable[..., Any], name: str
) -> None:
    with pytest.raises(
        UserError, match=f"forward uses {name} between its modules, which cannot be recorded"
    ) as error:
        recorded(glue)
    assert error.value.where.startswith("test_autograd_functions.py:") and error.value.remedy


def test_squeeze_never_drops_the_samples_dim() -> None:
    class Squeezed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.map(x).squeeze().sum()

    (node,) = (
        n
        for n in record_forward(Squeezed(), {"x": torch.ones(3, 4)}, ["map"]).graph.nodes
        if "squeeze" in str(n.target)
    )
    assert str(node.target) == "aten.squeeze.dims" and node.args[1] == [1]
