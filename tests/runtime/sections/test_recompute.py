"""Recomputation: which modules run again, and that it changes only memory and time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from secc.runtime.errors import UserError
from secc.runtime.plan.schema import plan_to_json
from secc.runtime.sections import recompute
from secc.runtime.sections.module_settings import apply_settings
from secc.runtime.sections.selective_layers import select_alternate_blocks
from tests.runtime.captioner_plans import TOGETHER, reference, write_plan
from tests.runtime.train_captioner import metrics, train

WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.runs = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), 0

    def forward(self, x: torch.Tensor, cache: Any = None, past_key_values: Any = None) -> torch.Tensor:
        self.runs += 1
        if past_key_values is not None:
            past_key_values.append(x)
            x = torch.stack(past_key_values).sum(0)
        return x + self.drop(self.inner(x).tanh())


class Tower(nn.Module):
    """A stack between a projection and a norm."""

    def __init__(self, depth: int, caches: bool = False) -> None:
        super().__init__()
        self.first, self.layers, self.norm = (
            nn.Linear(WIDTH, WIDTH),
            nn.ModuleList(Layer() for _ in range(depth)),
            nn.LayerNorm(WIDTH),
        )
        self.caches = caches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, past_key_values=[] if self.caches else None)
        return self.norm(x)


def model(depth: int = 3, caches: bool = False) -> nn.ModuleDict:
    torch.manual_seed(0)
    projector = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    return nn.ModuleDict({"tower": Tower(depth, caches), "projector": projector, "head": nn.Linear(WIDTH, 2)})


BLOCKS = ("tower", "projector", "head")


def step(built: nn.ModuleDict) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The result and all gradients of one forward and backward, dropout included."""
    torch.manual_seed(1)
    x = torch.randn(4, WIDTH)
    out = built["head"](built["projector"](built["tower"](x)))
    out.square().sum().backward()
    return out.detach(), [p.grad for p in built.parameters()]


@pytest.mark.parametrize(
    ("mode", "runs"), [("none", [1, 1, 1]), ("selective", [1, 2, 1]), ("full", [2, 2, 2])]
)
def test_selected_layers_run_again_with_equal_results(mode: str, runs: list[int]) -> None:
    plain, again = model(), model()
    recompute.install_recompute(again, BLOCKS, mode)
    expected, found = step(plain), step(again)
    assert [layer.runs for layer in again["tower"].layers] == runs
    assert torch.equal(expected[0], found[0])
    assert all(torch.equal(a, b) for a, b in zip(expected[1], found[1], strict=True))  # pyright: ignore[reportArgumentType]
    assert list(again.state_dict()) == list(plain.state_dict())


def test_recomputation_saves_memory() -> None:
    """Compares the bytes that autograd saves under each mode, inputs of recomputed units included."""

    def kept(mode: str) -> int:
        built, sizes = model(depth=8), dict[int, int]()
        recompute.install_recompute(built, BLOCKS, mode)

        def pack(t: torch.Tensor) -> torch.Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = built["tower"](torch.randn(64, WIDTH))
        assert out.requires_grad
        return sum(sizes.values())

    assert kept("full") < kept("selective") < kept("none")


def test_units_are_layers_or_whole_blocks() -> None:
    built = model(depth=4)
    tower, projector, head = (built[b] for b in BLOCKS)
    assert recompute.recompute_units(tower) == list(tower.layers)
    assert recompute.recompute_units(projector) == [projector] and recompute.recompute_units(head) == []
    assert recompute.select_recomputed_units(built, BLOCKS, "full") == [*tower.layers, projector]
    assert recompute.select_recomputed_units(built, BLOCKS, "selective") == [tower.layers[0], tower.layers[2]]
    assert recompute.select_recomputed_units(built, BLOCKS, "none") == []


def test_blocks_of_one_class_form_a_stack_in_their_order() -> None:
    built = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(11))})
    blocks = [f"layers.{i}" for i in (*range(2, 11), 0, 1)]
    assert select_alternate_blocks(blocks, dict.fromkeys(blocks, "Layer")) == [
        f"layers.{i}" for i in (1, 3, 5, 7, 9)
    ]
    found = recompute.select_recomputed_units(built, blocks[:4], "selective")
    assert found == [built["layers"][2], built["layers"][4]]


def test_caches_are_not_filled_twice() -> None:
    plain, again = model(caches=True), model(caches=True)
    recompute.install_recompute(again, BLOCKS, "full")
    assert all(torch.equal(a, b) for a, b in zip(step(plain)[1], step(again)[1], strict=True))  # pyright: ignore[reportArgumentType]


def test_without_gradients_nothing_runs_again_and_installing_twice_is_harmless() -> None:
    built = model()
    recompute.install_recompute(built, BLOCKS, "full")
    recompute.install_recompute(built, BLOCKS, "full")
    with torch.no_grad():
        built["tower"](torch.randn(2, WIDTH))
    assert [layer.runs for layer in built["tower"].layers] == [1, 1, 1]
    step(built)
    assert [layer.runs for layer in built["tower"].layers] == [3, 3, 3]


def test_an_unknown_mode_is_rejected() -> None:
    with pytest.raises(UserError, match="unknown recomputation mode 'some'"):
        recompute.install_recompute(model(), BLOCKS, "some")


@pytest.mark.gloo
def test_a_plan_that_recomputes_trains_as_plain_pytorch(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan", TOGETHER)
    modes = {"encoder": "full", "decoder": "full"}
    sections = tuple(replace(s, recompute=modes.get(s.name, "none"), sharding="zero2") for s in plan.sections)
    (tmp_path / "plan" / "plan.json").write_text(plan_to_json(replace(plan, sections=sections)))
    ranks = train(tmp_path / "plan", TOGETHER, 3)
    plain = reference(3)
    rows = metrics(tmp_path / "plan")
    assert [row["loss"] for row in rows] == pytest.approx(plain.losses, rel=1e-6)
    assert [row["grad_norm"] for row in rows] == pytest.approx(plain.norms, rel=1e-5)
    for rank in ranks:
        for name, value in rank["state"].items():
            torch.testing.assert_close(value, plain.state[name], rtol=1e-4, atol=1e-5)


def test_a_layer_runs_again_with_the_settings_of_its_forward() -> None:
    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.times = nn.Linear(WIDTH, WIDTH), 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.inner(x) * self.times).tanh()

    torch.manual_seed(0)
    tower = nn.Sequential(nn.Sequential(Switch(), Switch()))
    x = torch.randn(3, WIDTH)

    def gradients() -> list[torch.Tensor]:
        with apply_settings(tower[0], ("times", 2.0, "1")):
            y = tower(x)
        assert [layer.times for layer in tower[0]] == [1.0, 1.0]
        return list(torch.autograd.grad(y.sum() + tower(x).square().sum(), list(tower.parameters())))

    wanted = gradients()
    recompute.install_recompute(tower, ["0"], "full")
    torch.testing.assert_close(gradients(), wanted, rtol=0, atol=0)
