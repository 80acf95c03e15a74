"""The recorder: what it records of a forward, what it rejects, and that recordings replay exactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import DynamicCache

from secc.errors import UserError
from secc.runtime.model.user_file import extract_loss
from secc.runtime.recorder import BlockError, Recorder, Recording, Replay, record_forward, take_at_path
from secc.runtime.recorder.serialization import dump_recording, load_recording

BATCH = {"x": torch.arange(20.0).reshape(4, 5) / 10 - 1, "keep": torch.tensor([True, False, True, True])}


class Model(nn.Module):
    """Two linear blocks around glue that a test chooses: `glue(hidden, batch)` gives the loss, or what the
    head takes."""

    def __init__(self, glue: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(5, 3), nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("count", torch.tensor(2))
        self.glue = glue

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return self.head(self.glue(self, self.body(x), x, keep)).square().sum()


def recorded(glue: Callable[..., Any], batch: dict[str, torch.Tensor] = BATCH) -> tuple[Recording, Model]:
    model = Model(glue)
    return record_forward(model, batch, ["body", "head"]), model


def assert_replays(found: Recording, model: nn.Module, batch: dict[str, torch.Tensor] = BATCH) -> None:
    """Check that loss and gradients, and which parameters have one, equal those of the eager model."""

    def copies() -> dict[str, torch.Tensor]:
        return {k: v.clone() for k, v in batch.items()}

    parameters = list(model.parameters())
    eager, replayed = (
        extract_loss(model(**copies())),
        Replay(model, found.graph, found.constants).compute_loss(copies()),
    )
    torch.testing.assert_close(replayed, eager, rtol=1e-6, atol=0)
    wanted, given = _gradients(eager, parameters), _gradients(replayed, parameters)
    for g, w in zip(given, wanted, strict=True):
        assert (g is None) == (w is None)
        if w is not None:
            torch.testing.assert_close(g, w)


def _gradients(loss: torch.Tensor, parameters: list[nn.Parameter]) -> list[torch.Tensor | None]:
    """By `backward()`, as users train: checkpointing of the old way knows no other."""
    loss.backward()
    found = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    return found


def targets(found: Recording) -> list[str]:
    return [
        str(n.target) for n in found.graph.nodes if n.op == "call_function" and n.target is not take_at_path
    ]


def test_blocks_are_opaque_and_every_op_has_its_place() -> None:
    found, model = recorded(lambda m, h, x, keep: h * m.scale + 1)
    assert [n.target for n in found.block_calls] == ["body", "head"]
    assert targets(found)[:2] == ["aten.mul.Tensor", "aten.add.Tensor"]
    mul = next(n for n in found.graph.nodes if str(n.target) == "aten.mul.Tensor")
    assert mul.meta["where"].startswith("test_recorder.py:")
    assert (mul.meta["shape"], mul.meta["dtype"], mul.meta["requires_grad"]) == ((4, 3), torch.float32, True)
    assert [n.target for n in found.graph.nodes if n.op == "get_attr"] == ["scale"]
    assert_replays(found, model)


def test_a_model_on_the_meta_device_gives_the_same_recording() -> None:
    def glue(m: Any, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return h * m.scale[keep.sum() - 1]

    found, _ = recorded(glue)
    with torch.device("meta"):
        model = Model(glue)
    assert targets(record_forward(model, BATCH, ["body", "head"])) == targets(found)


def test_the_users_model_is_not_changed() -> None:
    model = Model(lambda m, h, x, keep: h)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    keys = set(model.body.__dict__)
    record_forward(model, BATCH, ["body", "head"])
    assert set(model.body.__dict__) == keys and type(model.body.weight) is nn.Parameter
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())


def _no_grad(m: Model, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = m.body(x).exp()
    return h * target + h.detach() * m.scale.data


def test_grad_mode_detach_and_data_cut_the_gradient() -> None:
    found, model = recorded(_no_grad)
    assert [n.meta["grad"] for n in found.block_calls] == [True, False, True]
    assert_replays(found, model)


# Each writes into a tensor: a view of a block's result, a buffer of zeros, an input, through `out=`, by a
# mask.
def _add(m: Any, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    h = h * 1
    h[1:3] += m.scale
    return h


def _scatter(m: Any, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(4, 3)
    out[keep] = h[keep] * 2
    row = out[2]
    row.mul_(3)
    return out + x[:, :3]


def _input(m: Any, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    keep[0] = False
    keep.logical_not_()
    return h * keep[:, None]


def _copy(m: Any, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    out = torch.empty(2, 4, 3, dtype=torch.float64)
    out[:] = h
    out[1].fill_(0.5)
    return out.sum(0).float()


def _out(m: Any, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    target = x.new_empty(4, 3)
    with torch.no_grad():
        torch.add(x[:, :3], 1, out=target)
    return h.masked_fill_(~keep[:, None], 0) + target


MUTATING = [_add, _scatter, _input, _copy, _out]


@pytest.mark.parametrize("glue", MUTATING)
def test_writes_become_functional_and_replay(glue: Callable[..., Any]) -> None:
    found, model = recorded(lambda m, h, *rest: glue(m, h * 1, *rest))
    for n in found.graph.nodes:
        if isinstance(n.target, torch._ops.OpOverload):
            assert not n.target._schema.is_mutable
    assert "aten.copy.default" not in targets(found)
    assert_replays(found, model)


@given(st.lists(st.sampled_from(["add", "fill", "view", "mask", "row"]), min_size=1, max_size=6))
@settings(max_examples=15, deadline=None)
def test_any_order_of_writes_and_views_replays(steps: list[str]) -> None:
    def glue(m: Any, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        h, view = h.clone(), None
        for i, step in enumerate(steps):
            if step == "add":
                h.add_(x[:, :3] * (i + 1))
            elif step == "fill":
                h[i % 4, 1:].fill_(0.1 * i)
            elif step == "view":
                view = h.t()[1]
            elif step == "mask":
                h[keep] = h[keep] * m.scale
            elif view is not None:
                view.mul_(2)
        return h

    found, model = recorded(glue)
    assert_replays(found, model)


def test_reads_of_inputs_are_logged_with_their_place() -> None:
    def glue(m: Any, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        assert f"{keep.sum()}"  # a message reads nothing that decides
        scale = 2.0 if keep.all() else 1.0
        n = int(keep.sum())
        return (
            h * scale * n
            + sum(keep.tolist())
            + float(torch.tensor([keep.sum(), 1]).max())
            + keep.numpy().sum()
        )

    found, model = recorded(glue)
    assert [(r.kind, r.value) for r in found.reads] == [
        ("item", False),
        ("item", 3),
        ("tolist", [True, False, True, True]),
        ("tensor", 3),
        ("item", 3.0),
        ("numpy", [True, False, True, True]),
    ]
    assert all(r.where.startswith("test_recorder.py:") for r in found.reads)
    assert_replays(found, model)


READING: list[Callable[..., Any]] = [
    lambda m, h, x, keep: h * h.sum().item(),
    lambda m, h, x, keep: h if h.mean() > 0 else -h,
    lambda m, h, x, keep: h + sum(h.flatten().tolist()),
    lambda m, h, x, keep: h[h[:, 0] > 0],
    lambda m, h, x, keep: h + float(torch.tensor([h.sum()])),
    lambda m, h, x, keep: h * float(m.scale[0]),
    lambda m, h, x, keep: h * h.nonzero().sum(),
    lambda m, h, x, keep: (
        h * torch.zeros(4).copy_(h[:, 0]).sum().item()
    ),  # a real tensor that a block's values flow into
]


@pytest.mark.parametrize("glue", READING)
def test_reading_a_blocks_value_is_rejected_with_its_place(glue: Callable[..., Any]) -> None:
    with pytest.raises(UserError) as error:
        recorded(glue)
    assert error.value.where.startswith("test_recorder.py:") and error.value.remedy


class Checked(Model):
    """A model that checks its loss before it returns it: `glue(loss, hidden)`."""

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        return self.glue(self.head(hidden).square().sum(), hidden)


def checked_loss(ok: Any, loss: torch.Tensor) -> torch.Tensor:
    """The loss if Python finds `ok` true."""
    if ok:
        return loss
    raise RuntimeError("the loss is not finite")


FINITE_CHECKS: list[Callable[..., Any]] = [
    lambda loss, h: checked_loss(not torch.isnan(loss), loss),
    lambda loss, h: checked_loss(torch.isfinite(loss), loss),
    lambda loss, h: checked_loss(torch.isfinite(loss.detach()).all(), loss) / 3 + h.sum(),
    lambda loss, h: checked_loss(not (torch.isnan(loss) | torch.isinf(loss)).any().item(), loss),
    lambda loss, h: checked_loss(not loss.isnan() and not loss.isinf(), loss),
    lambda loss, h: checked_loss(torch.eq(loss, loss), loss),
]


@pytest.mark.parametrize("glue", FINITE_CHECKS)
def test_checks_that_the_loss_is_finite_are_taken_as_passed(glue: Callable[..., Any]) -> None:
    model = Checked(glue)
    found = record_forward(model, BATCH, ["body", "head"])
    assert not found.reads and not {"aten.isnan.default", "aten.isinf.default"} & set(targets(found))
    assert_replays(found, model)


CHECKS_BY_TORCH: list[Callable[..., Any]] = [
    lambda loss, h: F.gaussian_nll_loss(h, h.detach() + 1, h.exp()) + loss,
    lambda loss, h: torch.distributions.Normal(h, h.exp(), validate_args=True).log_prob(h * 2).sum() + loss,
]


@pytest.mark.parametrize("glue", CHECKS_BY_TORCH)
def test_checks_of_torchs_own_functions_are_taken_as_passed(glue: Callable[..., Any]) -> None:
    model = Checked(glue)
    found = record_forward(model, BATCH, ["body", "head"])
    assert not found.reads
    assert_replays(found, model)


UNDECIDED_CHECKS: list[Callable[..., Any]] = [
    lambda loss, h: loss * 2 if torch.isnan(h.mean()) else loss,  # the loss does not depend on it
    lambda loss, h: checked_loss(torch.isfinite(h.sum()), 1 / h.sum() + loss),  # 1 / inf is finite
    lambda loss, h: loss if torch.isinf(h).any() else 2 * loss,  # a masked entry may be infinite
    lambda loss, h: checked_loss(torch.isfinite(loss), loss).zero_() + h.sum(),
    lambda loss, h: checked_loss((h > -99).all(), loss),  # the user's own check
]


@pytest.mark.parametrize("glue", UNDECIDED_CHECKS)
def test_other_checks_for_finite_values_are_refused(glue: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="Python reads a value") as error:
        record_forward(Checked(glue), BATCH, ["body", "head"])
    assert error.value.where.startswith("test_recorder.py:")


REFUSED: dict[str, Callable[..., Any]] = {
    "hook": lambda m, h, x, keep: h.register_hook(lambda g: 2 * g) and h,
    "torch.autograd.grad": lambda m, h, x, keep: (
        torch.autograd.grad(h.sum(), m.scale, allow_unused=True) and h
    ),
    "count": lambda m, h, x, keep: h * m.count.add_(1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_glue_that_cannot_be_recorded_is_rejected_with_its_place(name: str) -> None:
    with pytest.raises(UserError, match=name) as error:
        recorded(REFUSED[name])
    assert error.value.where.startswith("test_recorder.py:")


def test_rows_chosen_by_a_mask_of_inputs_are_recomputed() -> None:
    found, model = recorded(
        lambda m, h, x, keep: h[keep] + torch.masked_select(h, keep[:, None]).reshape(-1, 3)
    )
    assert "aten.index.Tensor" in targets(found)
    assert_replays(found, model, {**BATCH, "keep": torch.tensor([True, False, False, False])})


@dataclasses.dataclass
class Out:
    pair: tuple[torch.Tensor, torch.Tensor]
    named: dict[str, Any]
    nothing: None = None


class Structured(nn.Module):
    """A block with structured arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, *, extras: dict[str, Any], times: int = 1) -> Out:
        y = self.line(x) * times + extras["shift"][0]
        return Out((y, x), {"same": y, "sum": y.sum(-1), "note": "text"})


class User(nn.Module):
    def __init__(self, extras: Callable[[torch.Tensor], dict[str, Any]]) -> None:
        super().__init__()
        self.block, self.extras = Structured(), extras

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.block(x, extras=self.extras(x), times=3)
        assert out.pair[1] is x and out.named["note"] == "text"
        return {"loss": (out.pair[0] * out.named["sum"][:, None]).mean()}


def test_arguments_and_results_of_blocks_may_be_nested() -> None:
    model = User(lambda x: {"shift": [x[:, :1], None], "mode": "plain", "at": 1.5, "dtype": torch.float32})
    found = record_forward(model, BATCH, ["block"])
    (call,) = found.block_calls
    assert call.kwargs["times"] == 3 and call.kwargs["extras"]["mode"] == "plain"
    assert sorted(n.args[1] for n in found.graph.nodes if n.target is take_at_path) == [
        ".named['sum']",
        ".pair[0]",
    ]
    assert_replays(found, model)


def test_the_error_for_an_argument_without_source_text_names_the_block() -> None:
    with pytest.raises(BlockError) as error:
        record_forward(User(lambda x: {"shift": [x[:, :1]], "thing": object()}), BATCH, ["block"])
    assert error.value.path == "block" and "object" in error.value.message


def test_a_part_called_outside_its_block_becomes_a_block() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            return (self.inner(x) + self.inner[2](self.inner[1](x))).mean()

    model = Outer()
    found = record_forward(model, BATCH, ["inner"])
    assert [n.target for n in found.block_calls] == ["inner", "inner.2"]
    assert_replays(found, model)


def test_attributes_that_forward_sets_are_noted_with_the_calls_they_affect() -> None:
    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.off, self.names = nn.Dropout(0.5), False, ["a"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(5, 5), Switched(), Switched())

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            first = self.inner(x)
            self.inner[1].off, self.inner[1].known = True, 3
            self.inner.eval()
            second = self.inner(x)
            self.inner[1].off, self.inner[2].names = False, ["b"]
            return (first + second + self.inner.train()(x)).mean()

    recorder = Recorder(Outer(), ["inner"])
    for _ in range(2):  # the second recording starts from the model as it was made
        settings = [call.meta["settings"] for call in recorder.record(BATCH).block_calls]
        assert settings == [(), (("off", True, "1"), ("training", False)), (("names", ["b"], "2"),)]


def test_autocast_is_noted_and_replayed() -> None:
    def glue(m: Model, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (m.body(x) @ torch.ones(3, 3)).float() + h

    found, model = recorded(glue)
    assert [n.meta["autocast"] for n in found.block_calls] == ["", "cpu bfloat16", ""]
    assert_replays(found, model)


def test_equal_layers_run_once() -> None:
    runs = []

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return super().forward(x)

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Sequential(*(Layer(5, 5) for _ in range(8)))

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            return self.tower(x).mean()

    recorder = Recorder(Deep(), ["tower"])
    recorder.record(BATCH)
    recorder.record(BATCH)
    assert len(runs) == 2  # the first layer's argument carries no gradient, the others' do


class _CachingLayer(nn.Linear):
    """Takes rows [n, 5], adds them to its cache, and returns as many rows as that holds."""

    runs: ClassVar[list[int]] = []  # numbers of the layers

    def __init__(self, layer_idx: int) -> None:
        super().__init__(5, 5)
        self.layer_idx = layer_idx

    def forward(self, x: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        self.runs.append(self.layer_idx)
        keys, _ = cache.update(x[None, None], x[None, None], self.layer_idx)
        return super().forward(keys[0, 0])


class _CachingTower(nn.Module):
    def __init__(self, passes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(_CachingLayer, range(8)))
        self.passes = passes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = DynamicCache()
        for _ in range(self.passes):
            rows = x
            for layer in self.layers:
                rows = layer(rows, cache)
        return rows


@pytest.mark.parametrize(("passes", "ran"), [(1, [0, 1]), (2, [0, 1, 0, 1, *range(8), *range(8)])])
def test_equal_layers_that_fill_a_cache_run_once_unless_it_is_read(passes: int, ran: list[int]) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = _CachingTower(passes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tower(x).mean()

    recorder = Recorder(Deep(), ["tower"])
    _CachingLayer.runs.clear()
    (result,) = [n for n in recorder.record({"x": BATCH["x"]}).graph.nodes if n.target is take_at_path]
    assert _CachingLayer.runs == ran
    assert result.meta["shape"] == _CachingTower(passes)(BATCH["x"]).shape


class Windowed(nn.Module):
    """A block that attends to pairs of rows one by one; `glue` is asked with the input first."""

    def __init__(self, glue: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.tower = _Windows()
        self.glue = glue

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.glue(x)
        return self.tower(x).mean()


class _Windows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = self.project(x).split(2)
        return torch.cat(
            [F.scaled_dot_product_attention(w[None], w[None], w[None])[0].mul_(2) for w in windows]
        )


def test_attention_inside_blocks_runs_once_per_layout() -> None:
    recorder, ops = Recorder(Windowed(lambda x: None), ["tower"]), list[str]()
    see = recorder.on_block_op
    recorder.on_block_op = lambda func, args, kwargs: (ops.append(str(func)), see(func, args, kwargs))[1]  # type: ignore[method-assign]
    recorder.record({"x": torch.ones(2, 4)})
    attends = [op for op in ops if "softmax" in op or "attention" in op]
    ops.clear()
    (result,) = [n for n in recorder.record({"x": torch.ones(8, 4)}).graph.nodes if n.target is take_at_path]
    assert attends and not set(attends) & set(ops)
    assert result.meta["requires_grad"] and result.meta["shape"] == (8, 4)


def test_large_inputs_have_values_only_if_forward_reads_them() -> None:
    seen = list[str]()

    class Wide(nn.Module):
        def __init__(self, look: Callable[[torch.Tensor], object]) -> None:
            super().__init__()
            self.tower, self.look = nn.Linear(4, 4), look

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(f"{type(x).__name__} {self.look(x)}")
            return self.tower(x).mean()

    x = torch.ones(1 << 19, 4)
    assert record_forward(Wide(lambda x: ""), {"x": x}, ["tower"]).reads == []
    assert [r.value for r in record_forward(Wide(lambda x: x.sum().item()), {"x": x}, ["tower"]).reads] == [
        x.numel()
    ]
    record_forward(Wide(lambda x: ""), {"x": x[:2]}, ["tower"])
    assert seen == ["FakeTensor ", f"Tensor {float(x.numel())}", "Tensor "]


def test_a_mask_that_chooses_rows_inside_a_block_decides_its_shape() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            return self.linear(x)[keep]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = Chooses()

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            return self.tower(x, keep).mean()

    recorder = Recorder(Outer(), ["tower"])
    shapes = [
        next(
            n.meta["shape"]
            for n in recorder.record(BATCH | {"keep": keep}).graph.nodes
            if n.target is take_at_path
        )
        for keep in (BATCH["keep"], ~BATCH["keep"])
    ]
    assert shapes == [(3, 5), (1, 5)]


def test_grouped_products_have_a_shape_in_float32() -> None:
    """torch's own shape rule takes bfloat16 only, and mixtures of experts use the op in any dtype."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 5, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(x, self.weight, torch.tensor([1, 4], dtype=torch.int32))

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Experts()

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            return self.experts(x).mean()

    (result,) = [
        n for n in record_forward(Mixture(), BATCH, ["experts"]).graph.nodes if n.target is take_at_path
    ]
    assert (result.meta["shape"], result.meta["dtype"], result.meta["requires_grad"]) == (
        (4, 3),
        torch.float32,
        True,
    )


def test_a_forward_without_a_loss_is_rejected() -> None:
    class Bare(nn.Linear):
        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight)

    with pytest.raises(UserError, match="no loss"):
        record_forward(Bare(5, 2), BATCH, [])


def test_a_branch_on_a_random_number_is_rejected_with_its_place() -> None:
    class Chance(nn.Linear):
        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            y = F.linear(x, self.weight)
            return (y if torch.rand(()) < 0.5 else 2 * y).mean()

    with pytest.raises(BlockError, match="random numbers") as error:
        record_forward(Chance(5, 5), BATCH, [])
    assert error.value.where.startswith("test_recorder.py:")


def test_a_recording_survives_serialisation() -> None:
    def glue(model: Model, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        kept = h[keep] if keep.any() else h
        return (kept * torch.tensor([1.0, 2.0, 3.0])).split(2)[0] + model.scale

    found, model = recorded(glue)
    there = load_recording(dump_recording(found))
    assert_replays(there, model)
    assert str(there.graph) == str(found.graph) and list(there.inputs) == list(found.inputs)
    assert [n.meta for n in there.graph.nodes] == [n.meta for n in found.graph.nodes]
    assert all(torch.equal(there.constants[k], v) for k, v in found.constants.items()) and found.constants
    assert (
        [(r.kind, r.value, r.where) for r in there.reads]
        == [(r.kind, r.value, r.where) for r in found.reads]
        != []
    )
