"""Random numbers belong to samples: no split of a batch, padding, order or recomputation changes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from secc.runtime.errors import UserError
from secc.runtime.plan.schema import RandomOp, Symbol
from secc.runtime.plan.step_program import SampleMeta
from secc.runtime.randomness import random_op_values
from secc.runtime.randomness.bits import coordinate_offsets, generate_bits, hash_key
from secc.runtime.randomness.micro_batch_draws import MicroBatchDraws, ModelRandomness, make_sample_keys

aten = torch.ops.aten
CPU = torch.device("cpu")
SYMBOLS = (Symbol("B", "rows", "x", 0), Symbol("S", "width", "x", 1), Symbol("T", "rows", "y", 1))
SEED = 5


def plain_bits(shape: Sequence[int], device: torch.device = CPU) -> torch.Tensor:
    return generate_bits(
        [coordinate_offsets(d, torch.arange(n)) for d, n in enumerate(shape)], hash_key("test"), device
    )


def drawn(op: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The result of an op from bits that are keyed by nothing but coordinates."""
    return random_op_values.draw_op_result(op, args, kwargs, plain_bits)


class Drawing:
    """Runs functions as micro-batches of one global batch. `draws` are (dims, rows) of the random ops, in
    order."""

    def __init__(
        self, *draws: tuple[tuple[int, ...], str], model: nn.Module | None = None, calls: Sequence[str] = ()
    ) -> None:
        names = calls or [f"glue#{i}" for i in range(len(draws))]
        found = [RandomOp(name, dims, rows) for name, (dims, rows) in zip(names, draws, strict=True)]
        self.randomness = ModelRandomness(model or nn.Identity(), found, SYMBOLS)

    def draws(
        self, sizes: Mapping[int, Mapping[str, int]], seed: int = SEED, total: int = 8
    ) -> MicroBatchDraws:
        """The numbers of a micro-batch of the samples `sizes` names."""
        keys = make_sample_keys(seed, [SampleMeta(i, frozenset(), {}) for i in range(total)])
        return self.randomness.make_draws(seed, [keys[i] for i in sizes], list(sizes.values()))

    def one(
        self,
        sizes: Mapping[int, Mapping[str, int]],
        function: Callable[..., Any],
        *args: Any,
        seed: int = SEED,
        **kwargs: Any,
    ) -> Any:
        """The result of one random op."""
        draws = self.draws(sizes, seed)
        with draws.forward():
            return draws.draw_named("glue#0", function, *args, **kwargs)


def of(samples: Sequence[int], S: int = 3, T: int = 0) -> dict[int, dict[str, int]]:
    return {i: {"B": 1, "S": S, "T": T} for i in samples}


# -- the numbers -----------------------------------------------------------------------------------------


def test_bits_are_balanced_and_neighbours_uncorrelated() -> None:
    z = plain_bits((200, 300))
    ones = torch.stack([(z >> b & 1).double().mean() for b in range(64)])
    assert (ones - 0.5).abs().max() < 5 * 0.5 / math.sqrt(z.numel())
    u = z.double() / 2**63
    for other in (u.roll(1, 0), u.roll(1, 1), u.roll((1, 1), (0, 1)), u.roll((2, -3), (0, 1))):
        assert abs(torch.corrcoef(torch.stack([u.flatten(), other.flatten()]))[0, 1]) < 5 / math.sqrt(
            z.numel()
        )
    assert len(z.unique()) == z.numel()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 90), max_size=4))
def test_bits_of_a_shape_are_a_slice_of_those_of_a_larger_one(shape: list[int]) -> None:
    larger = plain_bits([n + 2 for n in shape])
    assert torch.equal(plain_bits(shape), larger[tuple(slice(0, n) for n in shape)])


def test_bits_of_long_rows_are_mixed_in_chunks() -> None:
    z = plain_bits((3, 70_000))
    assert torch.equal(z[2], plain_bits((3, 80_000))[2, :70_000])
    assert torch.equal(z[:, :5], plain_bits((3, 5)))


N = 40_000
MOMENTS = [
    (aten.rand.default, ([N],), {}, 1 / 2, 1 / 12),
    (aten.uniform_.default, (torch.empty(N), -1.0, 3.0), {}, 1.0, 16 / 12),
    (aten.randn.default, ([N],), {}, 0.0, 1.0),
    (aten.randn_like.default, (torch.empty(N, dtype=torch.float64),), {}, 0.0, 1.0),
    (aten.normal_.default, (torch.empty(N), 2.0, 3.0), {}, 2.0, 9.0),
    (aten.normal.Tensor_float, (torch.full((N,), 4.0), 0.5), {}, 4.0, 0.25),
    (aten.bernoulli.p, (torch.empty(N), 0.2), {}, 0.2, 0.16),
    (aten.bernoulli.default, (torch.full((N,), 0.7),), {}, 0.7, 0.21),
    (aten.exponential_.default, (torch.empty(N), 2.0), {}, 0.5, 0.25),
    (aten.geometric_.default, (torch.empty(N), 0.25), {}, 4.0, 12.0),
    (
        aten.log_normal_.default,
        (torch.empty(N), 0.0, 0.5),
        {},
        math.exp(0.125),
        (math.exp(0.25) - 1) * math.exp(0.25),
    ),
    (aten.randint.low, (3, 7, [N]), {}, 4.5, 1.25),
    (aten.randint_like.default, (torch.empty(N), 10), {}, 4.5, 8.25),
    (aten.multinomial.default, (torch.tensor([0.1, 0.2, 0.7]).expand(N, 3), 1), {}, 1.6, 0.44),
    (aten.multinomial.default, (torch.tensor([1.0, 2.0, 7.0]), N, True), {}, 1.6, 0.44),
]


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "mean", "variance"), MOMENTS, ids=[f"{i}-{m[0]}" for i, m in enumerate(MOMENTS)]
)
def test_moments(op: Any, args: Any, kwargs: Any, mean: float, variance: float) -> None:
    found = drawn(op, *args, **kwargs)
    assert found.numel() == N and found.dtype == op(*args, **kwargs).dtype
    values = found.double()
    assert float(values.mean()) == pytest.approx(mean, abs=5 * math.sqrt(variance / N))
    assert float(values.var()) == pytest.approx(variance, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_numbers_stay_below_one(dtype: torch.dtype) -> None:
    found = drawn(aten.rand.default, [N], dtype=dtype)
    assert found.dtype == dtype and found.min() >= 0 and found.max() < 1


def test_exponential_noise_is_never_infinite_or_zero() -> None:
    found = drawn(aten.exponential_.default, torch.empty(200_000))
    assert found.min() > 0 and found.isfinite().all()


def test_a_permutation_has_every_number_once() -> None:
    assert sorted(drawn(aten.randperm.default, 50).tolist()) == list(range(50))


def test_multinomial_without_replacement_draws_distinct_indices() -> None:
    found = drawn(aten.multinomial.default, torch.tensor([[1.0, 1.0, 5.0, 0.0]]).expand(100, 4), 3)
    assert all(sorted(row) == [0, 1, 2] for row in found.tolist())


def test_dropout_keeps_and_scales() -> None:
    out, kept = drawn(aten.native_dropout.default, torch.ones(N), 0.1, True)
    assert float(kept.double().mean()) == pytest.approx(0.9, abs=0.01)
    assert torch.equal(out, kept / 0.9)
    assert drawn(aten.native_dropout.default, torch.ones(4), 1.0, True)[0].tolist() == [0] * 4


# -- whose numbers ---------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    st.permutations(range(6)),
    st.integers(1, 6),
    st.sampled_from([((0,), "B"), ((0,), "2*B"), ((1,), "B"), ((0,), "B*S")]),
)
def test_splits_and_order_do_not_change_a_samples_numbers(
    order: list[int], size: int, rule: tuple[tuple[int, ...], str]
) -> None:
    drawing, dim = Drawing(rule), rule[0][0]
    rows = {"B": 1, "2*B": 2, "B*S": 3}[rule[1]]

    def draw(samples: Sequence[int]) -> torch.Tensor:
        shape = [4, 4, 5]
        shape[dim] = rows * len(samples)
        return drawing.one(of(samples), torch.randn, shape)

    whole = draw(range(6)).unflatten(dim, (6, rows))
    for first in range(0, 6, size):
        micro = order[first : first + size]
        assert torch.equal(
            draw(micro).unflatten(dim, (len(micro), rows)), whole.index_select(dim, torch.tensor(micro))
        )


def test_wider_padding_does_not_change_numbers() -> None:
    drawing = Drawing(((0,), "B"))
    narrow = drawing.one(of(range(3), S=5), torch.rand, 3, 2, 5, 5)
    assert torch.equal(drawing.one(of(range(3), S=9), torch.rand, 3, 2, 9, 9)[:, :, :5, :5], narrow)


def test_packed_samples_are_keyed_in_every_dim() -> None:
    drawing = Drawing(((2, 3), "T"))
    packed = drawing.one(of([0], T=4) | of([1], T=3), torch.rand, 1, 2, 7, 7)
    assert torch.equal(packed[:, :, 4:, 4:], drawing.one(of([1], T=3), torch.rand, 1, 2, 3, 3))


def test_steps_samples_and_calls_draw_different_numbers() -> None:
    drawing = Drawing(((0,), "B"), ((0,), "B"))
    draws = drawing.draws(of([0, 1]))
    with draws.forward():
        first, second = (draws.draw_named(f"glue#{i}", torch.rand, 2, 50) for i in range(2))
    other = drawing.one(of([0, 1]), torch.rand, 2, 50, seed=6)
    rows = [first[0], first[1], second[0], second[1], other[0], other[1]]
    assert all(not torch.isclose(a, b).any() for i, a in enumerate(rows) for b in rows[:i])


def test_a_sample_that_comes_twice_draws_twice() -> None:
    keys = make_sample_keys(1, [SampleMeta(i, frozenset(), {}) for i in (4, 7, 4)])
    assert len(set(keys)) == 3
    assert keys[:2] == make_sample_keys(1, [SampleMeta(i, frozenset(), {}) for i in (4, 7)])


def test_shared_numbers_are_equal_in_every_micro_batch() -> None:
    drawing = Drawing(((), "0"))
    assert torch.equal(drawing.one(of([0, 1, 2]), torch.rand, 4), drawing.one(of([5]), torch.rand, 4))
    assert drawing.one(of([0]), torch.rand, ()) == drawing.one(of([3]), torch.rand, ())
    assert drawing.one(of([0]), torch.rand, ()) != drawing.one(of([0]), torch.rand, (), seed=9)


# -- modules ---------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Dropout as a module that is called twice at one place, as a function, and in fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.drop(self.linear(x)))
        q = h.unflatten(-1, (2, 4)).transpose(1, 2)
        attend = F.scaled_dot_product_attention
        return F.dropout(attend(q, q, q, dropout_p=0.2).transpose(1, 2).flatten(2) + h, 0.1)


def names(model: nn.Module, x: torch.Tensor) -> list[str]:
    """The names of a model's draws, told by what is refused, one after another."""
    found: list[str] = []
    while True:
        draws = Drawing(*[((0,), "B")] * len(found), model=model, calls=found).draws(of(range(len(x))))
        try:
            with draws.forward():
                model(x)
            return found
        except UserError as error:
            found.append(error.message.rpartition("(")[2].rstrip(")"))


def test_draw_names_have_module_and_line() -> None:
    found = names(Net(), torch.randn(2, 3, 8))
    line = int(found[2].rpartition(":")[2].removesuffix("#0"))
    assert found[:2] == [f"drop@test_randomness.py:{line - 3}#{n}" for n in (0, 1)]
    assert found[2:] == [f"@test_randomness.py:{line}#{n}" for n in (0, 1)]


class TwoLines(nn.Module):
    """One module called at two lines, the first of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def again(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        if both:
            x = self.again(x)
        return self.again(x)


def test_draw_names_have_the_lines_that_call_a_module() -> None:
    found = names(TwoLines(), torch.randn(2, 3, 8))
    first, second = (sorted(c.partition("<")[2] for c in some) for some in (found[:4], found[4:]))
    lines = [int(name.rpartition(":")[2].partition("#")[0]) for name in (first[0], second[0])]
    assert len(found) == 8 and lines[1] == lines[0] + 1


def test_a_section_gives_a_block_the_users_call_site() -> None:
    model, x = TwoLines(), torch.randn(2, 3, 8)
    calls = names(model, x)
    draws = Drawing(*[((0,), "B")] * 8, model=model, calls=calls).draws(of([0, 1]))
    with draws.forward():
        expected = model(x, both=False)
    draws = Drawing(*[((0,), "B")] * 8, model=model, calls=calls).draws(of([0, 1]))
    site = calls[4].partition("#")[0].partition("<")[2]
    with draws.forward(), draws.at_call_site(site):
        assert torch.equal(model.net(x), expected)


class OneLine(nn.Module):
    """One module that one line calls twice."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.net(x)
        return x


def test_a_section_may_do_a_later_call_of_a_line_alone() -> None:
    model, x = OneLine(), torch.randn(2, 3, 8)
    calls = names(model, x)
    site = calls[0].partition("#")[0].partition("<")[2]

    def start() -> MicroBatchDraws:
        return Drawing(*[((0,), "B")] * len(calls), model=model, calls=calls).draws(of([0, 1]))

    with (whole := start()).forward():
        expected = model(x)
    with (first := start()).forward(), first.at_call_site(site, call=0, calls=2):
        between = model.net(x)
    with (second := start()).forward(), second.at_call_site(site, call=1, calls=2):
        assert torch.equal(model.net(between), expected)
    assert sum(whole.calls_by_site.values()) == 2 * sum(second.calls_by_site.values())


def test_lines_of_torch_are_left_out() -> None:
    layers = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    )
    found = names(layers, torch.randn(2, 3, 8))
    assert (
        found[:4] == [f"layers.0.{n}#0" for n in ("self_attn", "dropout1", "dropout", "dropout2")]
        and len(found) == 8
    )


def run(
    model: nn.Module, calls: Sequence[str], x: torch.Tensor, samples: Sequence[int]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Result and gradients of a micro-batch."""
    draws = Drawing(*[((0,), "B")] * len(calls), model=model, calls=calls).draws(of(samples))
    model.zero_grad()
    with draws.forward():
        out = model(x[list(samples)])
    with draws.backward():
        out.square().sum().backward()
    return out.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


class Twice(nn.Module):
    """The same layers two times, which a `call` such as `checkpoint` may recompute in the backward."""

    def __init__(self, net: nn.Module, call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.net, self.call = net, call or net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.call(x))


def test_a_models_micro_batches_add_up_to_the_batch() -> None:
    torch.manual_seed(0)
    model, x = (
        Net().double(),
        torch.randn(5, 3, 8, dtype=torch.float64),
    )  # where the order of sums rounds next to nothing
    calls = names(model, x)
    out, gradients = run(model, calls, x, range(5))
    parts = [run(model, calls, x, s) for s in ([4, 2], [0], [1, 3])]
    torch.testing.assert_close(torch.cat([p[0] for p in parts]), out[[4, 2, 0, 1, 3]])
    for name, gradient in gradients.items():
        torch.testing.assert_close(sum(p[1][name] for p in parts), gradient)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_draws_the_same_numbers(reentrant: bool) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(3, 3, 8, requires_grad=True)
    plain, recomputed = Twice(net), Twice(net, partial(checkpoint, net, use_reentrant=reentrant))
    calls = names(plain, x)
    assert len(calls) == 8 and names(recomputed, x) == calls
    out, gradients = run(plain, calls, x, range(3))
    again, regradients = run(recomputed, calls, x, range(3))
    assert torch.equal(out, again)
    for name, gradient in gradients.items():
        torch.testing.assert_close(regradients[name], gradient)


def test_global_generators_do_not_matter() -> None:
    model, x = Net(), torch.randn(2, 3, 8)
    calls = names(model, x)
    torch.manual_seed(1)
    first = run(model, calls, x, range(2))[0]
    torch.manual_seed(2)
    assert torch.equal(run(model, calls, x, range(2))[0], first)


# -- refusals --------------------------------------------------------------------------------------------


def test_a_draw_at_an_unknown_place_is_rejected() -> None:
    draws = Drawing().draws(of([0]))
    with pytest.raises(UserError, match="where no capture saw it") as error, draws.forward():
        torch.rand(3)
    assert error.value.where.startswith("test_randomness.py:")


def test_an_unsupported_random_op_is_rejected() -> None:
    draws = Drawing(((0,), "B")).draws(of([0]))
    with pytest.raises(UserError, match="draws random numbers that cannot be tied"), draws.forward():
        torch.poisson(torch.ones(3))


def test_rows_that_do_not_match_the_samples_are_rejected() -> None:
    with pytest.raises(UserError, match=r"shape \[3, 2\], but the samples' rows are 2"):
        Drawing(((0,), "B")).one(of([0, 1]), torch.rand, 3, 2)


class NoisyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.rand_like(gradient)


def test_draws_only_in_the_backward_are_rejected() -> None:
    draws = Drawing(((0,), "B")).draws(of([0]))
    with draws.forward():
        out = NoisyBackward.apply(torch.ones(1, 3, requires_grad=True))
    with pytest.raises(UserError, match="in the backward that the forward did not draw"), draws.backward():
        out.sum().backward()


def test_deterministic_ops_are_not_intercepted() -> None:
    draws = Drawing().draws(of([0]))
    with draws.forward():
        x = F.dropout(torch.ones(3), 0.0) + F.dropout(torch.ones(3), 0.5, training=False)
        x = F.scaled_dot_product_attention(*[x.view(1, 1, 3)] * 3, dropout_p=0.0)
    assert x.isfinite().all()
