"""What a loop counts by values becomes a loop of tensors before it."""

from __future__ import annotations

import ast

import pytest

from secc.runtime.model.counting_loops import is_counting_loop, take_counts_out

LOSS = "total = total + F.cross_entropy(self.head(x), y, ignore_index=0, reduction='sum')"


def rewrite(*lines: str, over: str = "zip(xs, ys)") -> list[str]:
    """Returns the loops that a loop with these lines is made of."""
    loop = "\n".join([f"for x, y in {over}:", *(f"    {line}" for line in lines)])
    return [ast.unparse(s) for s in take_counts_out(ast.parse(loop).body, "self")]


@pytest.mark.parametrize(
    "line, counted",
    [
        ("n += int((y != 0).sum())", "n += (y != 0).sum()"),
        ("n += (y != 0).sum().item()", "n += (y != 0).sum()"),
        ("n = n + (y != 0).sum()", "n = n + (y != 0).sum()"),
        ("n += len(y[y != 0])", "n += (y != 0).sum()"),
        ("n += y[y != 0].numel()", "n += (y != 0).sum()"),
        ("n += y[y != 0].shape[0]", "n += (y != 0).sum()"),
        ("n += (y != 0).nonzero(as_tuple=True)[0].numel()", "n += (y != 0).sum()"),
        ("n += int(torch.count_nonzero(y))", "n += torch.count_nonzero(y)"),
        ("counts.append(int((y != 0).sum()))", "counts.append((y != 0).sum())"),
    ],
)
def test_a_count_becomes_a_loop_of_tensors(line: str, counted: str) -> None:
    assert rewrite(LOSS, line) == [f"for x, y in zip(xs, ys):\n    {counted}", *rewrite(LOSS)]


def test_what_a_count_needs_goes_with_it() -> None:
    found = rewrite("mask = y != 0", LOSS, "n += int(mask.sum())")
    assert found[0] == "for x, y in zip(xs, ys):\n    mask = y != 0\n    n += mask.sum()"
    assert found[1:] == rewrite("mask = y != 0", LOSS)


@pytest.mark.parametrize(
    "lines",
    [
        ["n += len(x)"],
        ["n += int(lengths[y])"],
        ["n += int((self.head(x) > 0).sum())"],
        ["scores = self.head(x)", "n += int((scores > 0).sum())"],
        ["if y.any():", "    y = y[1:]", "n += int((y != 0).sum())"],
        ["total = total / n", "n += int((y != 0).sum())"],
        ["n += int((y != 0).sum())", "if n > 9:", "    break"],
        ["n += int((y != last).sum())", "last = y"],
        ["y[0] = 0", "n += int((y != 0).sum())"],
        ["y = y.clamp_(min=1)", "n += int((y != 0).sum())"],
    ],
)
def test_other_counts_stay(lines: list[str]) -> None:
    loop = "\n".join(["for x, y in zip(xs, ys):", *(f"    {line}" for line in [LOSS, *lines])])
    assert rewrite(LOSS, *lines) == [loop]


@pytest.mark.parametrize(
    "line", ["picked[y] = 1", "rows = rows + x.abs()", "last = x", "net.scale = x", "first, *others = x"]
)
def test_other_statements_of_the_loop_of_a_count_stay(line: str) -> None:
    assert rewrite(line, "n += int((y != 0).sum())") == [
        "for x, y in zip(xs, ys):\n    n += (y != 0).sum()",
        f"for x, y in zip(xs, ys):\n    {line}",
    ]


def test_a_loop_that_only_counts_becomes_one_loop() -> None:
    (counting,) = rewrite("mask = y != 0", "n += int(mask.sum())")
    assert counting == "for x, y in zip(xs, ys):\n    mask = y != 0\n    n += mask.sum()"


def test_a_sum_over_a_generator_is_one_of_tensors() -> None:
    (statement,) = take_counts_out(ast.parse("n = sum(int((y != 0).sum()) for y in ys)").body, "self")
    assert ast.unparse(statement) == "n = sum(((y != 0).sum() for y in ys))"


def test_the_loop_of_a_count_has_the_line_of_the_count() -> None:
    loop = f"for x, y in zip(xs, ys):\n    {LOSS}\n    n += int((y != 0).sum())"
    counting, rest = take_counts_out(ast.parse(loop).body, "self")
    assert is_counting_loop(counting) and not is_counting_loop(rest)
    assert (counting.lineno, counting.end_lineno, rest.lineno) == (3, 3, 1)
