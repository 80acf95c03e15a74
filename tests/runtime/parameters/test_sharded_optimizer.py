"""Sharded optimizers: training equals plain PyTorch, checkpoints fit any plan, non-elementwise optimizers are
rejected."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secc.runtime.errors import UserError
from secc.runtime.parameters import checkpoint, gradient_reduction
from secc.runtime.parameters.elementwise_check import CannotProbe, why_coupled, why_not_elementwise
from secc.runtime.parameters.rank_weights import canonical_names
from secc.runtime.parameters.sharded_optimizer import FlatParameters, shard_optimizer
from secc.runtime.parameters.sliced_tensor_store import TensorSlice, row_major_boxes
from secc.runtime.plan.schema import plan_to_json
from tests.runtime.captioner_plans import (
    CLASSES,
    FIXTURE,
    TOGETHER,
    UNEVEN,
    Layout,
    Reference,
    reference,
    write_plan,
)
from tests.runtime.gloo_ranks import enter_plan, run_ranks
from tests.runtime.parameters.test_checkpoint import assert_same_contents
from tests.runtime.train_captioner import metrics

STEPS = 5
WIDE: Layout = {"encoder": (0, 1, 2), "teacher": (0,), "decoder": (1, 2)}


def write_sharded(
    directory: Path,
    layout: Layout,
    sharding: Mapping[str, str],
    micro_batch: int = 2,
    source: str | None = None,
) -> None:
    plan = write_plan(directory, layout, micro_batch=micro_batch, source=source)
    sections = tuple(replace(s, sharding=sharding.get(s.name, "none"), units=s.blocks) for s in plan.sections)
    (directory / "plan.json").write_text(plan_to_json(replace(plan, sections=sections)))


def train(
    directory: Path, layout: Layout, steps: int, *arguments: str, bucket: int = 600
) -> list[dict[str, Any]]:
    """Trains with small buckets. Returns for each rank its slices' gradients per step, state dict and
    optimizer entries."""
    world_size = 1 + max(r for ranks in layout.values() for r in ranks)

    def target(rank: int) -> dict[str, Any]:
        enter_plan(directory)
        gradient_reduction.BUCKET_BYTES = bucket
        terms: Any = importlib.import_module("sections.terms")
        from secc.runtime.training.options import parse_options
        from secc.runtime.training.rank_context import RankContext
        from secc.runtime.training.trainer import Trainer

        held = [
            getattr(importlib.import_module(f"sections.{n}"), CLASSES[n])
            for n, ranks in layout.items()
            if rank in ranks
        ]
        with RankContext(
            directory, parse_options(["--steps", str(steps), "--workers", "0", *arguments]), terms
        ) as run:
            model = run.load_model()
            trainer = Trainer(run, model, [section(model) for section in held])
            found = []
            for batch in trainer.plan_steps():
                trainer.train_step(batch)
                pieces = [(q, p.grad) for p, q in trainer.reducer.optimized_slices.items()]
                found.append([(q, None if g is None else g.clone()) for q, g in pieces])
            states = (
                0
                if trainer.optimizer is None
                else sum(s["exp_avg"].numel() for s in trainer.optimizer.state.values())
            )
            canonical = canonical_names(model)
            parts = [(piece, part.detach().clone()) for part, piece in run.zero3.parameter_slices.items()]
            state = {
                k: v.clone()
                for k, v in model.state_dict().items()
                if not v.is_meta and canonical.get(k) not in run.zero3.parameter_names
            }
            return {"gradients": found, "state": state, "parts": parts, "states": states}

    return run_ranks(world_size, target)


@pytest.fixture(scope="module")
def plain() -> Reference:
    return reference(STEPS)


def assert_equals_plain(ranks: list[dict[str, Any]], plain: Reference) -> None:
    """Asserts that slices of gradients (or None) and weights equal plain PyTorch and cover all parameters."""
    for step, expected in enumerate(plain.gradients):
        whole = math.sqrt(sum(float(g.double().square().sum()) for g in expected.values() if g is not None))
        covered: dict[str, set[int]] = {}
        for rank in ranks:
            for piece, gradient in rank["gradients"][step]:
                wanted = expected[piece.name]
                assert (gradient is None) == (wanted is None), piece.name
                covered.setdefault(piece.name, set()).update(range(piece.start, piece.stop))
                if gradient is not None and wanted is not None:
                    part = wanted.flatten()[piece.start : piece.stop]
                    assert (
                        float((gradient.flatten() - part).norm())
                        <= 1e-5 * float(wanted.norm()) + 1e-8 * whole
                    ), piece.name
        assert all(entries == set(range(plain.state[name].numel())) for name, entries in covered.items())
    for rank in ranks:
        for name, value in rank["state"].items():
            torch.testing.assert_close(value, plain.state[name], rtol=1e-4, atol=1e-5)
        for piece, value in rank["parts"]:
            expected = plain.state[piece.name].flatten()[piece.start : piece.stop]
            torch.testing.assert_close(value.flatten(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("layout", "sharding", "micro_batch"),
    [
        (TOGETHER, {"encoder": "zero1", "decoder": "zero2"}, 2),
        (
            WIDE,
            {"encoder": "zero2", "decoder": "zero1"},
            4,
        ),  # the encoder's samples of a batch are too few for all its replicas
        (UNEVEN, {"decoder": "zero2"}, 8),
        (TOGETHER, {"encoder": "zero3", "decoder": "zero3", "teacher": "zero3"}, 2),
        (WIDE, {"encoder": "zero3", "decoder": "zero2"}, 4),
        (UNEVEN, {"decoder": "zero3", "teacher": "zero3"}, 3),
    ],
    ids=["together", "wide", "uneven", "parameters_together", "parameters_wide", "parameters_uneven"],
)
def test_steps_equal_plain_pytorch(
    tmp_path: Path, plain: Reference, layout: Layout, sharding: dict[str, str], micro_batch: int
) -> None:
    write_sharded(tmp_path / "plan", layout, sharding, micro_batch)
    ranks = train(tmp_path / "plan", layout, STEPS)
    rows = metrics(tmp_path / "plan")
    assert [row["loss"] for row in rows] == pytest.approx(plain.losses, rel=1e-6)
    assert [row["grad_norm"] for row in rows] == pytest.approx(plain.norms, rel=1e-5)
    assert_equals_plain(ranks, plain)


@pytest.mark.gloo
def test_clipping_counts_entries_once_and_states_are_split(tmp_path: Path) -> None:
    plain = reference(3, clip=0.1)
    write_sharded(tmp_path / "plan", TOGETHER, {"decoder": "zero1"})
    ranks = train(tmp_path / "plan", TOGETHER, 3, "--clip", "0.1", bucket=10_000)
    assert [row["grad_norm"] for row in metrics(tmp_path / "plan")] == pytest.approx(plain.norms, rel=1e-5)
    for name, value in ranks[0]["state"].items():
        torch.testing.assert_close(value, plain.state[name], rtol=1e-4, atol=1e-5)
    model = {
        n: v.numel()
        for n, v in plain.state.items()
        if n.startswith(("embed", "decoder")) and n != "decoder.gate"
    }
    replicated = sum(
        v.numel() for n, v in plain.state.items() if n.startswith("encoder") and n != "encoder.scale"
    )
    assert sum(r["states"] for r in ranks) == sum(model.values()) + 2 * replicated
    assert abs(ranks[0]["states"] - ranks[1]["states"]) <= 8


@pytest.mark.gloo
def test_checkpoints_do_not_depend_on_sharding(tmp_path: Path) -> None:
    """Five steps sharded on three ranks and five on two ranks with other shards, and the reverse, equal ten
    steps of either."""
    write_sharded(tmp_path / "sharded", WIDE, {"encoder": "zero2", "decoder": "zero1"})
    write_sharded(tmp_path / "plain", TOGETHER, {"decoder": "zero3", "teacher": "zero3"})
    for name, layout in (("sharded", WIDE), ("plain", TOGETHER)):
        train(
            tmp_path / name,
            layout,
            5,
            "--save",
            str(tmp_path / f"{name}-5"),
            "--log-dir",
            str(tmp_path / "logs"),
        )
    for first, second, layout in (("sharded", "plain", TOGETHER), ("plain", "sharded", WIDE)):
        arguments = ["--resume", str(tmp_path / f"{first}-5"), "--save", str(tmp_path / f"{second}-10")]
        train(tmp_path / second, layout, 10, *arguments, "--log-dir", str(tmp_path / "logs"))
    for name in ("sharded-5", "sharded-10"):
        other = checkpoint.load_full_state_dict(tmp_path / name.replace("sharded", "plain"))
        for key, value in checkpoint.load_full_state_dict(tmp_path / name).items():
            torch.testing.assert_close(value, other[key], rtol=1e-4, atol=1e-5)


@pytest.mark.gloo
def test_resuming_sharded_is_bit_equal(tmp_path: Path) -> None:
    write_sharded(tmp_path / "plan", TOGETHER, {"encoder": "zero3", "decoder": "zero2", "teacher": "zero3"})
    saved, again = str(tmp_path / "saved"), str(tmp_path / "again")
    train(tmp_path / "plan", TOGETHER, 4, "--save", saved, "--save-every", "2")
    train(
        tmp_path / "plan", TOGETHER, 4, "--save", again, "--resume", str(tmp_path / "saved" / "step_00000002")
    )
    assert_same_contents(tmp_path / "saved" / "step_00000004", tmp_path / "again" / "step_00000004")


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_row_major_boxes_cover_a_slice_in_order(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start, stop = sorted((data.draw(st.integers(0, numel)), data.draw(st.integers(0, numel))))
    values = torch.arange(numel).view(shape)
    found: list[int] = []
    for offsets, sizes in row_major_boxes(tuple(shape), start, stop):
        box = values[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        found += box.flatten().tolist()
    assert found == list(range(start, stop))
    assert len(list(row_major_boxes(tuple(shape), start, stop))) <= max(1, 2 * len(shape) - 1)


def test_box_memory_is_the_slices_memory() -> None:
    part = TensorSlice(torch.arange(7), torch.Size((3, 4)), 3)
    item = part.__create_write_items__("x", part)[1]
    part.box_memory(item.index).fill_(0)
    assert part.values.tolist() == [0, 0, 0, 0, 0, 5, 6]


def test_shards_share_the_memory_of_parameters() -> None:
    named = [
        ("a", nn.Parameter(torch.randn(3, 3))),
        ("b", nn.Parameter(torch.randn(2))),
        ("c", nn.Parameter(torch.randn(()))),
    ]
    before = [p.detach().clone() for _, p in named]
    flats = [
        FlatParameters([(n, nn.Parameter(p.detach().clone())) for n, p in named], rank, 3)
        for rank in range(3)
    ]
    pieces = [(piece.name, piece.start, piece.stop) for f in flats for _, piece in f.slices.values()]
    assert pieces == [("a", 0, 4), ("a", 4, 8), ("a", 8, 9), ("b", 0, 2), ("c", 0, 1)]
    assert all(f.buffer.numel() == 12 and f.shard.numel() == 4 for f in flats)
    last = flats[2]
    full, (part, piece) = next((p, s) for p, s in last.slices.items() if s[1].name == "c")
    assert piece.is_whole and part.shape == ()
    with torch.no_grad():
        part += 1
    torch.testing.assert_close(full.detach(), before[2] + 1)


def test_parameter_groups_are_the_users() -> None:
    """Groups made by shape keep their members; a group without a slice on this rank stays, empty."""
    matrix, bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    optimizer = torch.optim.Adagrad([{"params": [("w", matrix)]}, {"params": [("b", bias)], "lr": 0.5}])
    flat = FlatParameters([("w", matrix), ("b", bias)], 0, 2)
    shard_optimizer(optimizer, {p: flat.slices.get(p) for p in (matrix, bias)})
    assert [[p.numel() for p in g["params"]] for g in optimizer.param_groups] == [[10], []]
    assert [g["param_names"] for g in optimizer.param_groups] == [["w"], []]
    (part,) = optimizer.param_groups[0]["params"]
    assert optimizer.state[part]["sum"].shape == (10,) and len(optimizer.state) == 1


class Lamb(torch.optim.Optimizer):
    """Scales each tensor's step by its norm."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.norm() * p.grad.sign()


class Lion(torch.optim.Optimizer):
    """An elementwise optimizer that is not in torch."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.0, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p -= group["lr"] * momentum.lerp_(p.grad, 1 - group["beta"]).sign()


class Stubborn(torch.optim.SGD):
    """Steps on the parameters of its constructor, ignoring its groups."""

    def __init__(self, params: Any) -> None:
        self.own = list(params)
        super().__init__(self.own)

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for p in self.own:
            if p.grad is not None:
                p.data -= p.grad


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (torch.optim.AdamW, None),
        (Lion, None),
        (Lamb, "Lamb is not elementwise"),
        (torch.optim.Adafactor, "Adafactor is not elementwise"),
        (torch.optim.Muon, "Muon does not step on a part"),
        (torch.optim.LBFGS, "LBFGS does not step on a part"),
        (Stubborn, "Stubborn does not step on the parameters in its param_groups"),
    ],
)
def test_elementwise_optimizers_are_recognised(made: Any, reason: str | None) -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = made([parameter])
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("the probe ran the user's hooks"))
    found = why_not_elementwise(optimizer)
    assert found is None if reason is None else found is not None and reason in found
    assert torch.equal(parameter, torch.ones(3, 2)) and not optimizer.state


class ClippedAdamW(torch.optim.AdamW):
    """Clips the norm of all gradients in its step, as some fused optimizers do."""

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        super().step()


class AdaptedDescent(torch.optim.Optimizer):
    """Descent with a rate that grows, from very small, while the gradients of all parameters point the same
    way, as in D-Adaptation."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "rate": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            agreement = scale = 0.0
            for p in group["params"]:
                past = self.state[p].setdefault("past", torch.zeros_like(p))
                agreement += float((past * p.grad).sum())
                scale += float(past.norm() * p.grad.norm())
                past += p.grad
            group["rate"] *= 1 + agreement / scale if agreement > 0 else 1
            for p in group["params"]:
                p -= group["rate"] * p.grad


class CountedMomentum(torch.optim.Optimizer):
    """Momentum with a count of steps that all parameters share."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                p -= group["lr"] * mean / (1 - 0.9 ** group["steps"])


@pytest.mark.parametrize(
    ("made", "is_coupled"),
    [
        *((kind, False) for kind in (torch.optim.AdamW, torch.optim.Muon, torch.optim.Adafactor)),
        *((kind, False) for kind in (Lion, Lamb, CountedMomentum)),
        *((kind, True) for kind in (ClippedAdamW, AdaptedDescent, Stubborn)),
    ],
)
def test_optimizers_that_look_at_all_parameters_are_recognised(made: Any, is_coupled: bool) -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = made([parameter])
    assert bool(why_coupled(optimizer)) == is_coupled
    assert torch.equal(parameter, torch.ones(3, 2)) and not optimizer.state
    if is_coupled:
        assert why_not_elementwise(optimizer)


def test_an_optimizer_that_needs_a_closure_cannot_be_tried() -> None:
    with pytest.raises(CannotProbe, match="LBFGS does not step on other parameters"):
        why_coupled(torch.optim.LBFGS([nn.Parameter(torch.ones(3, 2))]))


@pytest.mark.gloo
def test_sharding_a_non_elementwise_optimizer_is_rejected(tmp_path: Path) -> None:
    source = (FIXTURE / "model.py").read_text()
    other = source.replace(
        "torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)",
        "torch.optim.Adafactor([p for _, p in params])",
    )
    assert other != source
    write_sharded(tmp_path / "plan", TOGETHER, {"decoder": "zero1"}, source=other)

    def target(rank: int) -> str:
        enter_plan(tmp_path / "plan")
        terms: Any = importlib.import_module("sections.terms")
        from secc.runtime.training.options import parse_options
        from secc.runtime.training.rank_context import RankContext
        from secc.runtime.training.trainer import Trainer

        with (
            RankContext(tmp_path / "plan", parse_options(["--workers", "0"]), terms) as run,
            pytest.raises(UserError) as error,
        ):
            Trainer(run, run.load_model(), [])
        return str(error.value)

    for message in run_ranks(2, target):
        assert "Adafactor is not elementwise" in message and "--set decoder.sharding=none" in message
