"""Comparison of captures: which expressions explain varying numbers, which reads become guards, and what
is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from secc.errors import UserError
from secc.frontend.capture.control_flow_paths import ObservedRecording, graph_signature
from secc.frontend.capture.generalize import GenericGraph, generalize_captures
from secc.frontend.capture.shared_explanations import SharedExplanations
from secc.frontend.capture.size_fit import SizeFitter
from secc.ir.dialect.size_expr import evaluate_size, format_expr, parse_expr, size_symbol
from secc.runtime.recorder import Recorder
from secc.runtime.recorder.fold_joins import fold_joins
from tests.frontend.generic_replay import GenericReplay

ROWS = [
    dict(zip("BSI", row, strict=True)) for row in ((2, 11, 3), (3, 17, 1), (4, 13, 6), (5, 24, 2), (7, 19, 9))
]

EXPRESSIONS = [
    "7",
    "S",
    "B*S",
    "B*S - B",
    "576*I",
    "S + 1",
    "(S + 3)//4",
    "B*((S + 1)//2)",
    "16*I + B",
    "S*S",
    "2*B*S + 3",
    "(S - 1)//2 + 1",
    "B*S*I",
    "(B*(B + 1))//2",
    "3*I*S - 5",
    "-((S + 1)//4)",
]


@pytest.mark.parametrize("source", EXPRESSIONS)
def test_a_size_is_explained_by_its_generating_expression(source: str) -> None:
    wanted = parse_expr(source)
    found = SizeFitter(ROWS).fit_integer([int(evaluate_size(wanted, row)) for row in ROWS])
    assert found is not None
    elsewhere = {"B": 11, "S": 38, "I": 5}
    assert evaluate_size(found, elsewhere) == evaluate_size(wanted, elsewhere)
    assert evaluate_size(parse_expr(format_expr(found)), elsewhere) == evaluate_size(wanted, elsewhere)


@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(-50, 50))
@settings(max_examples=40, deadline=None)
def test_linear_sizes_are_explained(a: int, b: int, c: int) -> None:
    wanted = a * size_symbol("B") + b * size_symbol("S") + c
    found = SizeFitter(ROWS).fit_integer([int(evaluate_size(sympy.sympify(wanted), row)) for row in ROWS])
    assert found is not None and sympy.simplify(found - wanted) == 0


@given(st.lists(st.integers(0, 10_000), min_size=5, max_size=5, unique=True))
@settings(max_examples=15, deadline=None)
def test_an_explanation_fits_every_observation(values: list[int]) -> None:
    found = SizeFitter(ROWS).fit_integer(values)
    assert found is None or [evaluate_size(found, row) for row in ROWS] == values


@pytest.mark.parametrize("source", ["max(S, T)", "max(S, T) - S", "2*B*max(S, T)", "B*max(S, T) - B"])
def test_the_maximum_of_two_widths_is_found_if_both_orders_occur(source: str) -> None:
    rows = [{**row, "T": t} for row, t in zip(ROWS, (14, 12, 19, 21, 23), strict=True)]
    wanted = parse_expr(source)
    found = SizeFitter(rows, free={"S", "T"}).fit_integer([int(evaluate_size(wanted, row)) for row in rows])
    assert found is not None and format_expr(found) == format_expr(wanted)


def test_the_maximum_of_two_widths_comes_before_a_sum_of_powers() -> None:
    """`T**2/6 - 5*T/2 + 55/3`, doubled, has these values too."""
    rows = [{"S": s, "T": t} for s, t in ((9, 7), (8, 10), (9, 7), (6, 11))]
    found = SizeFitter(rows, free={"S", "T"}).fit_integer([18, 20, 18, 22])
    assert found is not None and format_expr(found) == "2*max(S, T)"


def test_a_sum_of_three_terms_asks_for_a_longer_width() -> None:
    rows = [{"B": b, "S": s} for b, s in ((2, 5), (3, 7), (4, 6), (5, 9))]
    fitter = SizeFitter(rows, free={"S"})
    assert fitter.fit_integer([row["S"] ** 2 + 3 * row["B"] + 7 for row in rows]) is not None
    assert fitter.doubts == [("S", 18)]


def test_half_a_difference_of_two_lengths_is_doubted() -> None:
    """`(F + 1)//2` of a strided convolution is `(F - S)/2 + 3` where captions are as odd as sounds."""
    rows = [{"S": s, "F": f} for s, f in ((5, 15), (5, 17), (6, 18), (6, 20), (5, 19))]
    fitter = SizeFitter(rows, free={"S", "F"})
    assert fitter.fit_integer([(row["F"] + 1) // 2 for row in rows]) is not None
    if fitter.doubts:
        name, size = fitter.doubts[0]
        rows += [{**rows[0], name: size}]
    found = SizeFitter(rows, free={"S", "F"}).fit_integer([(row["F"] + 1) // 2 for row in rows])
    assert found is not None and evaluate_size(found, {"S": 40, "F": 101}) == 51


def test_a_width_is_not_doubled_for_ever() -> None:
    """Half of a sum that holds at every width would be tried at 12,000 entries."""
    rows = [{"S": s, "T": t} for s, t in ((4, 6), (5, 7), (6, 4), (3, 9), (7, 11))]
    for asked in (14, 28, None):
        fitter = SizeFitter(rows, free={"S", "T"})
        assert fitter.fit_integer([(row["S"] + row["T"]) // 2 for row in rows]) is not None
        assert fitter.doubts == ([] if asked is None else [("S", asked)])
        rows += [{**rows[0], name: size} for name, size in fitter.doubts]


@pytest.mark.parametrize("free", ["", "S"])
@pytest.mark.parametrize("widths", [(8, 9, 10), (9, 11)])
def test_a_size_that_is_seen_again_checks_nothing(widths: tuple[int, ...], free: str) -> None:
    """Through three points goes a parabola: `(S + 1)//2` at 8, 9 and 10."""
    rows = [{"B": b, "S": s} for b, s in itertools.product((2, 3), widths)]
    fitter = SizeFitter(rows, free=free)
    fitter.fit_integer([(row["S"] + 1) // 2 for row in rows])
    rows += [{**rows[0], name: size} for name, size in fitter.doubts]
    found = SizeFitter(rows, free=free).fit_integer([(row["S"] + 1) // 2 for row in rows])
    assert found is None or [int(evaluate_size(found, {"S": s})) for s in (20, 21)] == [10, 11]


def test_random_numbers_stay_unexplained() -> None:
    assert SizeFitter(ROWS).fit_integer([914, 13, 577, 2, 86]) is None
    assert SizeFitter(ROWS).fit_real([0.5, 0.1, 0.77, 0.3, 0.9]) is None


@pytest.mark.parametrize("source", ["1/B", "0.5/B", "0.25", "1/(B*(S - 1))", "0.1*S"])
def test_varying_floats_are_multiples_or_quotients_of_sizes(source: str) -> None:
    wanted = parse_expr(source)
    found = SizeFitter(ROWS).fit_real(
        [float(wanted.subs([(size_symbol(k), v) for k, v in row.items()])) for row in ROWS]
    )
    assert found is not None
    at = [(size_symbol("B"), 11), (size_symbol("S"), 38)]
    assert float(sympy.sympify(found).subs(at)) == pytest.approx(float(wanted.subs(at)), rel=1e-12)


class Model(nn.Module):
    def __init__(self, glue: Callable[..., Any]) -> None:
        super().__init__()
        self.body, self.head, self.glue = nn.Linear(4, 6), nn.Linear(6, 3), glue

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.glue(self, self.body(x), mask)


def batch(rows: int, width: int, seed: int = 0, full: bool = False) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=g) < (1.1 if full else 0.6)
    mask[:, 0] = True
    return {"x": torch.randn(rows, width, 4, generator=g), "mask": mask}


def observe(model: nn.Module, sizes: list[tuple[int, int]], full: bool = False) -> list[ObservedRecording]:
    recorder = Recorder(model, ["body", "head"])
    return [
        ObservedRecording(fold_joins(recorder.record(batch(b, s, i, full))), {"B": b, "S": s})
        for i, (b, s) in enumerate(sizes)
    ]


SIZES = [(2, 11), (3, 17), (4, 13), (5, 24), (7, 19)]


def assert_exact(model: nn.Module, generic: GenericGraph, at: dict[str, torch.Tensor]) -> None:
    b, s = at["mask"].shape
    eager, found = model(**at), GenericReplay(model, generic, {"B": b, "S": s}).compute_loss(at)
    torch.testing.assert_close(found, eager)
    parameters = list(model.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(found, parameters, allow_unused=True),
        torch.autograd.grad(eager, parameters, allow_unused=True),
    )


def generic(glue: Callable[..., Any]) -> tuple[GenericGraph, Model]:
    """The one case of a glue, shown to be exact at a size that was not observed."""
    model = Model(glue)
    (case,), problems = generalize_captures(observe(model, SIZES))
    assert problems == []
    assert_exact(model, case, batch(9, 31, 99))
    return case, model


def expressions(case: GenericGraph) -> set[str]:
    found: set[str] = set()

    def visit(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            for v in value:
                visit(v)
        elif isinstance(value, sympy.Expr):
            found.add(format_expr(value))

    for n in case.graph.nodes:
        visit(list(n.meta.get("args", ())))
    return found


def test_sizes_in_arguments_become_expressions() -> None:
    def glue(m: Model, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        b, s, _ = h.shape
        flat = m.head(h[:, : s // 2].reshape(b * (s // 2), 6))
        return (
            flat.sum() / b
            + (torch.arange(s, device=h.device)[None, :, None] * h).mean()
            + torch.full((b,), 1.0 / s).sum()
        )

    case, _ = generic(glue)
    assert {"B", "S", "S//2", "B*(S//2)"} <= expressions(case)


def test_kl_divergence_over_the_batch_is_divided_by_the_number_of_samples() -> None:
    def glue(m: Model, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return nn.functional.kl_div(h.log_softmax(-1), h.detach().softmax(-1), reduction="batchmean")

    case, _ = generic(glue)
    (div,) = [n for n in case.graph.nodes if str(n.target) == "aten.div.Tensor"]
    assert format_expr(div.meta["args"][1]) == "B"


def test_unbinding_and_joining_is_read_as_a_reshape() -> None:
    def glue(m: Model, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = torch.cat(list(h))
        again = torch.stack(h.unbind(1), 0)
        same = torch.cat(h.split(2), 0)
        return m.head(rows).square().mean() + again.sum() + same.square().sum()

    case, _ = generic(glue)
    assert not any(
        str(n.target).startswith(("aten.unbind", "aten.cat", "aten.stack", "aten.split"))
        for n in case.graph.nodes
    )


def test_rows_selected_by_a_mask_get_their_own_symbol() -> None:
    case, _ = generic(lambda m, h, mask: m.head(h[mask]).square().mean())
    assert list(case.data_symbols) == ["rows_0"] and {
        str(s) for s in case.data_symbols["rows_0"].free_symbols
    } == {"B", "S"}
    (index,) = [n for n in case.graph.nodes if str(n.target) == "aten.index.Tensor"]
    assert [format_expr(d) for d in index.meta["shape"]] == ["rows_0", "6"]


def observe_draws(model: nn.Module) -> list[ObservedRecording]:
    recorder = Recorder(model, ["body", "head"])
    recorder.follows_draws = True
    return [
        ObservedRecording(fold_joins(recorder.record(batch(b, s, i))), {"B": b, "S": s})
        for i, (b, s) in enumerate(SIZES)
    ]


def test_rows_selected_by_a_drawn_mask_get_their_own_symbol() -> None:
    def glue(m: Model, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(mask.shape) < 0.5
        drawn &= mask
        return m.head(h[drawn]).square().sum() / len(h)

    model, state = Model(glue), torch.get_rng_state()
    (case,), _ = generalize_captures(observe_draws(model))
    assert torch.equal(torch.get_rng_state(), state)
    (index,) = [n for n in case.graph.nodes if str(n.target) == "aten.index.Tensor"]
    assert [format_expr(d) for d in index.meta["shape"]] == ["rows_0", "6"]


def test_a_drawn_mask_that_picks_equally_many_rows_in_all_captures_is_refused() -> None:
    def glue(m: Model, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return m.head(h[torch.rand(mask.shape) < 1e-9]).sum()

    with pytest.raises(UserError, match="equally many rows in all captures") as error:
        generalize_captures(observe_draws(Model(glue)))
    assert error.value.where.startswith("test_generalize.py:")


def test_a_size_that_values_decide_is_estimated_from_other_sizes() -> None:
    rows = [
        {**row, "rows_0": row["I"] * 25 // 10, "rows_1": row["B"] * row["S"] * 3 // 4, "rows_2": 0}
        for row in ROWS
    ]
    fitter = SizeFitter(rows, free="S")
    found = [fitter.estimate_data_size(f"rows_{i}", [f"rows_{i}" for i in range(3)]) for i in range(3)]
    assert [{str(s) for s in f.free_symbols} for f in found] == [{"I"}, {"B", "S"}, set()]
    assert evaluate_size(found[1], {"B": 10, "S": 100}) == pytest.approx(750, rel=0.02) and found[2] == 0


def test_constants_made_of_sizes_are_computed_in_the_graph() -> None:
    def glue(m: Model, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows, width, _ = h.shape
        return (
            (h * torch.tensor(float(rows))).mean()
            + (h.sum(-1) * torch.tensor(range(width))).mean()
            + h.sum() * torch.tensor(2)
        )

    case, _ = generic(glue)
    assert [t.tolist() for t in case.constants.values()] == [2]


def _branch(m: Model, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return h.mean() if mask.all() else (h * mask[..., None]).sum() / mask.sum()


def test_a_branch_on_inputs_gives_a_case_for_each_outcome() -> None:
    model = Model(_branch)
    cases, _ = generalize_captures(observe(model, SIZES) + observe(model, SIZES, full=True))
    assert [[g.meta["read"] for g in c.guards] for c in cases] == [[("item", False)], [("item", True)]]
    assert_exact(model, cases[0], batch(6, 15, 3))
    assert_exact(model, cases[1], batch(6, 15, 3, full=True))


def test_reads_without_effect_are_dropped_and_constant_reads_become_guards() -> None:
    def glue(m: Model, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        assert mask.any()
        if mask.all():
            pass
        return h[:, : int(mask.new_ones(mask.shape).sum(1)[0])].mean()

    model = Model(glue)
    (case,), _ = generalize_captures(observe(model, SIZES) + observe(model, SIZES, full=True))
    assert [g.meta["read"] for g in case.guards] == [("item", True)]
    assert_exact(model, case, batch(6, 15, 3))


def test_captures_that_have_one_number_of_rows_by_chance_give_no_case() -> None:
    """Its guard would accept this number of rows only, and constants would stand where sizes belong."""

    def glue(m: Model, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = h.split([1] * int((mask[:, 0] | True).sum()))
        return torch.stack([r.square().mean() for r in rows]).sum()

    sizes = [(5, 11), (5, 17), (5, 13), (2, 24), (3, 19)]
    with pytest.raises(UserError, match="ops change with the batch"):
        generalize_captures(observe(Model(glue), sizes))


class HeldOut:
    """A probe with further micro-batches, but none of a chosen width."""

    padded_symbols = frozenset[str]()

    def __init__(self, observed: list[ObservedRecording]) -> None:
        self.observed, self.explanations = observed, SharedExplanations()

    def __call__(self, name: str, size: int) -> None:
        return None

    def record_other_widths(self, name: str, size: int) -> Iterator[ObservedRecording]:
        yield from ()

    def record_held_out(self) -> Iterator[ObservedRecording]:
        yield from self.observed

    def record_padded(self, known: ObservedRecording, name: str, size: int) -> ObservedRecording | None:
        return None

    def record_with_repeats(self, recordings: Sequence[ObservedRecording]) -> Iterator[ObservedRecording]:
        yield from ()

    def record_without_rows(self) -> Iterator[ObservedRecording]:
        yield from ()


def test_a_count_that_equals_a_floor_division_by_chance_is_recognised() -> None:
    model = Model(lambda m, h, mask: h.sum() / int(mask[:, 0].sum()))

    def counting(samples: int, counted: int, width: int) -> dict[str, torch.Tensor]:
        found = batch(samples, width, samples)
        found["mask"][:, 0] = torch.arange(samples) < counted
        return found

    def observed(*sizes: tuple[int, int, int]) -> list[ObservedRecording]:
        recorder = Recorder(model, ["body", "head"])
        return [
            ObservedRecording(fold_joins(recorder.record(counting(*s))), {"B": s[0], "S": s[2]})
            for s in sizes
        ]

    captures = [(2, 1, 11), (3, 1, 17), (4, 2, 13), (5, 2, 24), (7, 3, 19)]
    (by_chance,), _ = generalize_captures(observed(*captures))
    assert "B//2" in expressions(by_chance)
    (case,), _ = generalize_captures(observed(*captures), HeldOut(observed((4, 4, 12), (6, 2, 15))))
    assert_exact(model, case, counting(6, 5, 14))
    (case,), _ = generalize_captures(observed(*captures), Padded([]))  # B counts rows where S is a width
    assert_exact(model, case, counting(6, 5, 14))


def test_targets_of_one_sample_take_the_ops_of_several() -> None:
    def glue(m: Model, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(m.head(h)[:, :-1].transpose(1, 2), mask.long()[:, 1:])

    one, several = observe(Model(glue), [(1, 9), (2, 11)])
    assert graph_signature(one.recording.graph) == graph_signature(several.recording.graph)
    case, _ = generic(glue)
    assert [str(n.target) for n in case.graph.nodes].count("aten.clone.default") == 1


class FlatHead(nn.Linear):
    """A linear layer that calls `view`, which needs contiguous entries, as GPT-2's Conv1D does."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.view(-1, self.in_features)).view(*input.shape[:-1], -1)


@pytest.mark.parametrize(
    ("glue", "copies"),
    [
        (lambda m, h, mask: m.head(h.transpose(0, 1).contiguous()).mean(), 1),
        (lambda m, h, mask: m.head(h.transpose(0, 1).contiguous()[None]).mean(), 1),
        (lambda m, h, mask: m.head(h.transpose(0, 1).contiguous().view(-1, 2, 6)).mean(), 1),
        (lambda m, h, mask: m.head(h.transpose(0, 1).contiguous().chunk(2)[0]).mean(), 1),
        (lambda m, h, mask: m.head(h.transpose(0, 1).clone(memory_format=torch.contiguous_format)).mean(), 1),
        (lambda m, h, mask: m.head(h[:1].expand(len(h), -1, -1).contiguous()).mean(), 1),
        (lambda m, h, mask: m.head(h.contiguous()).mean(), 0),
        (lambda m, h, mask: m.head(h.transpose(0, 1).flatten(0, 1)).mean(), 0),
        (lambda m, h, mask: m.head(h).transpose(0, 1).contiguous().view(-1).square().mean(), 0),
    ],
)
def test_blocks_get_contiguous_entries_where_forward_asks_for_them(
    glue: Callable[..., Any], copies: int
) -> None:
    model = Model(glue)
    model.head = FlatHead(6, 3)
    one, several = observe(model, [(1, 10), (2, 12)])
    assert graph_signature(one.recording.graph) == graph_signature(several.recording.graph)
    (case,), problems = generalize_captures(observe(model, [(1, 10), (2, 12), (3, 18), (4, 14), (7, 20)]))
    assert problems == []
    assert [str(n.target) for n in case.graph.nodes].count("aten.clone.default") == copies
    assert_exact(model, case, batch(9, 32, 99))


class AddingHead(nn.Linear):
    """Adds one to what it is given, in place."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.add_(1))


def test_a_block_writes_into_a_tensor_that_is_contiguous_already() -> None:
    def glue(m: Model, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        doubled = 2 * h
        return m.head(doubled.contiguous()).mean() + doubled.square().mean()

    model = Model(glue)
    model.head = AddingHead(6, 3)
    (case,), problems = generalize_captures(observe(model, SIZES))
    assert problems == []
    assert_exact(model, case, batch(9, 32, 99))


def test_blocks_get_contiguous_entries_of_what_forward_changes_in_place() -> None:
    def glue(m: Model, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        turned = (2 * h).transpose(0, 1)
        turned[0] = 1
        return m.head(turned.contiguous()).mean()

    model = Model(glue)
    model.head = FlatHead(6, 3)
    one, several = observe(model, [(1, 10), (2, 12)])
    assert graph_signature(one.recording.graph) == graph_signature(several.recording.graph)
    (case,), problems = generalize_captures(observe(model, SIZES))
    assert problems == []
    assert_exact(model, case, batch(9, 32, 99))


class Padded(HeldOut):
    """A probe of batches that are padded to `S`."""

    padded_symbols = frozenset({"S"})


def test_rows_that_a_mask_picks_are_no_square_of_the_number_of_samples() -> None:
    """Where each sample is one shorter than the last, sizes give their sum."""
    model = Model(lambda m, h, mask: m.head(h[mask]).square().mean())

    def stairs(samples: int, width: int) -> dict[str, torch.Tensor]:
        found = batch(samples, width)
        lengths = width - torch.arange(samples)
        return found | {"mask": torch.arange(width)[None] < lengths[:, None]}

    recorder = Recorder(model, ["body", "head"])
    observed = [ObservedRecording(recorder.record(stairs(b, s)), {"B": b, "S": s}) for b, s in SIZES]
    (case,), _ = generalize_captures(observed, Padded([]))
    assert list(case.data_symbols) == ["rows_0"]
    assert_exact(model, case, batch(9, 31, 99))


class OtherSamples(HeldOut):
    """A probe where padding leads to another path, and with other samples."""

    padded_symbols = frozenset({"T"})

    def record_other_widths(self, name: str, size: int) -> Iterator[ObservedRecording]:
        yield from self.observed


def test_a_pad_that_another_width_explains_by_chance_is_refuted_by_other_samples() -> None:
    """Up to a multiple of 8, which is also `18 - T` in the first batches."""
    model = Model(lambda m, h, mask: F.pad(h, (0, 0, 0, -h.shape[1] % 8)).square().sum() / mask.numel())

    def observed(*sizes: tuple[int, int, int]) -> list[ObservedRecording]:
        widths = [{"T": t} for *_, t in sizes]
        found = observe(model, [(b, s) for b, s, _ in sizes])
        return [replace(o, sizes={**o.sizes, **w}) for o, w in zip(found, widths, strict=True)]

    captures = [(2, 38, 16), (3, 18, 12), (4, 29, 15), (5, 38, 16), (7, 27, 13)]
    (by_chance,), _ = generalize_captures(observed(*captures), HeldOut([]))
    assert "18 - T" in expressions(by_chance)
    with pytest.raises(UserError, match="no expression over their sizes explains it"):
        generalize_captures(observed(*captures), OtherSamples(observed((2, 20, 12), (3, 20, 12))))


def test_numbers_that_values_decide_are_refused_with_place_and_value() -> None:
    def glue(m: Model, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return h[:, : int(mask.sum(1).max())].mean()

    with pytest.raises(UserError) as error:
        generalize_captures(observe(Model(glue), SIZES))
    assert error.value.where.startswith("test_generalize.py:") and "(it was " in error.value.message


def test_paths_that_only_sizes_tell_apart_are_refused() -> None:
    """No guard could choose between them at run time."""
    with pytest.raises(UserError):
        generalize_captures(
            observe(
                Model(lambda m, h, mask: h.mean() if h.shape[1] > 15 else h.sum() / h.numel() * 2),
                [*SIZES, (6, 12)],
            )
        )


def test_reading_a_constant_guards_nothing() -> None:
    case, _ = generic(lambda m, h, mask: h.mean() * torch.tensor([2, 3]).tolist()[1])
    assert case.guards == []


def test_ops_that_change_with_the_batch_are_refused_with_their_line() -> None:
    def glue(m: Model, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.stack([m.head(row).mean() for row in h]).sum()

    with pytest.raises(UserError) as error:
        generalize_captures(observe(Model(glue), SIZES))
    assert error.value.where.startswith("test_generalize.py:")


def test_ops_with_more_results_in_larger_batches_are_refused_with_their_line() -> None:
    with pytest.raises(UserError, match="the number of results of") as error:
        generalize_captures(observe(Model(lambda m, h, mask: h.split(2)[0].mean()), SIZES[1:]))
    assert error.value.where.startswith("test_generalize.py:")


def test_counts_that_values_decide_are_inferred_by_torch_or_refused() -> None:
    case, model = generic(lambda m, h, mask: m.head(h[mask].reshape(-1, 2, 3)[:, 0].repeat(1, 2)).mean())
    assert_exact(model, case, batch(6, 15, 3))
    case, model = generic(lambda m, h, mask: h[mask].sum() / (h[mask].shape[0] * h.shape[1] + 1))
    assert_exact(model, case, batch(6, 15, 3))
    case, model = generic(lambda m, h, mask: h[mask].mean() * torch.ones(h[mask].shape[0]).sum())
    assert_exact(model, case, batch(6, 15, 3))
    with pytest.raises(UserError, match="rows that values of the inputs decide"):
        generalize_captures(
            observe(Model(lambda m, h, mask: h[mask].mean() * torch.arange(h[mask].shape[0]).sum()), SIZES)
        )


def test_integer_multiples_are_preferred() -> None:
    rows = [{"B": b, "I": 3 * b} for b in (2, 3, 4, 5, 7)]
    assert [SizeFitter(rows).fit_integer([k * b for b in (2, 3, 4, 5, 7)]) for k in (1, 3)] == [
        size_symbol("B"),
        size_symbol("I"),
    ]


def test_other_patterns_decide_between_several_explanations() -> None:
    """Samples of the second pattern have one image each, so that images and samples are as many."""
    model = Model(lambda m, h, mask: (h.sum(1) * torch.ones(len(h), 1)).mean())

    def observed(images: Sequence[int]) -> list[ObservedRecording]:
        recorder = Recorder(model, ["body", "head"])
        sizes = zip((2, 3, 4, 5, 7), images, strict=True)
        return [
            ObservedRecording(fold_joins(recorder.record(batch(n, 9, n))), {"B": b, "I": n}) for b, n in sizes
        ]

    probe = HeldOut([])
    for images in ((3, 1, 6, 2, 9), (2, 3, 4, 5, 7)):
        (case,), _ = generalize_captures(observed(images), probe)
        assert "I" in expressions(case) and "B" not in expressions(case)
