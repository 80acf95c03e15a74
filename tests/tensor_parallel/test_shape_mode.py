"""Code for whole tensors on parts: which sizes it reads, how its own sizes are reduced, and what is
rejected."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from secc.runtime.tensor_parallel.rules.mark import ShardMark, UnshardableCode, mark_of, set_mark
from secc.runtime.tensor_parallel.shape_mode import WholeShapeMode

RANKS = 2


def take_part(whole: torch.Tensor, dim: int, parts: tuple[int, ...], rank: int) -> torch.Tensor:
    return set_mark(
        WholeShapeMode(rank, RANKS).take_shard(whole, dim, parts).clone(),
        ShardMark(dim, parts, frozenset({"m"})),
    )


def agrees_with_whole(code, whole: torch.Tensor, dim: int, parts: tuple[int, ...]) -> bool:
    """Whether `code` gives on each rank the rank's part of its result for the whole tensor."""
    expected = code(whole)
    for rank in range(RANKS):
        with WholeShapeMode(rank, RANKS) as mode:
            found = code(take_part(whole, dim, parts, rank))
        m = mark_of(found)
        assert m is not None
        if not torch.equal(found, mode.take_shard(expected, m.dim, m.parts)):
            return False
    return True


RESHAPINGS = {
    "heads": lambda t: t.view(t.shape[0], t.shape[1], 4, t.shape[2] // 4).transpose(1, 2),
    "heads by -1": lambda t: t.reshape(*t.shape[:-1], -1, 4).permute(0, 2, 1, 3).contiguous(),
    "there and back": lambda t: t.view(*t.shape[:2], 4, 4).transpose(1, 2).transpose(1, 2).flatten(2) * 2,
    "unflatten": lambda t: t.unflatten(-1, (4, -1)).softmax(-1),
    "repeated heads": lambda t: t.view(2, 3, 4, 4)[:, :, :, None].expand(2, 3, 4, 2, 4).reshape(2, 3, 8, 4),
    "interleaved": lambda t: t.view(2, 3, 4, 4).repeat_interleave(2, dim=2) + 1,
    "first tokens": lambda t: t[:, :2] + torch.arange(16.0),
    "joined": lambda t: torch.cat([t[:, 1:], t[:, :1]], dim=1).unsqueeze(1),
    "scores": lambda t: t.view(2, 3, 4, 4).transpose(1, 2) @ t.view(2, 3, 4, 4).permute(0, 2, 3, 1),
    "stacked": lambda t: torch.stack([t, -t], dim=0).sum(0),
    "einsum": lambda t: torch.einsum("bshd,bthd->bhst", t.view(2, 3, 4, 4), t.view(2, 3, 4, 4)),
}


@pytest.mark.parametrize("way", RESHAPINGS)
def test_code_on_parts_gives_parts_of_the_result(way: str) -> None:
    assert agrees_with_whole(RESHAPINGS[way], torch.randn(2, 3, 16), 2, (16,))


PIECES = {
    "split": lambda t: t.split(8, dim=-1)[1],
    "slice": lambda t: t[..., 8:16],
    "chunk": lambda t: t.chunk(3, -1)[2],
    "view": lambda t: t.view(2, 3, 3, 8)[:, :, 1],
}


@pytest.mark.parametrize("way", PIECES)
def test_several_parts_along_one_dim(way: str) -> None:
    assert agrees_with_whole(PIECES[way], torch.randn(2, 3, 24), 2, (8, 8, 8))


@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 3))
def test_views_to_heads_and_back(before: list[int], inner: int, rows: int) -> None:
    """[..., 4 * inner] to [..., 4, inner] with any leading dims and whole sizes."""
    whole = torch.randn(*before, rows, 4 * inner)
    assert agrees_with_whole(lambda t: t.view(*before, rows, 4, inner), whole, whole.ndim - 1, (4 * inner,))
    assert agrees_with_whole(
        lambda t: t.view(*before, rows, 4, inner).reshape(t.shape), whole, whole.ndim - 1, (4 * inner,)
    )


REFUSED = {
    "softmax": (lambda t: t.softmax(-1), "mixes"),
    "mean": (lambda t: t.mean(dim=-1), "mixes"),
    "norm": (lambda t: torch.nn.functional.layer_norm(t, (16,)), "mixes"),
    "merged": (lambda t: t.reshape(2, 48), "merged"),
    "product": (lambda t: t @ torch.randn(16, 4), "sums over"),
    "a piece": (lambda t: t[..., :5], "a piece"),
    "one entry": (lambda t: t[..., 3], "one entry"),
    "a value": (lambda t: bool((t > 0).all()), "mixes|reads values"),
    "other size": (lambda t: t + torch.randn(8), "another size"),
}


@pytest.mark.parametrize("way", REFUSED)
def test_code_that_mixes_parts_is_rejected(way: str) -> None:
    code, reason = REFUSED[way]
    with pytest.raises(UnshardableCode, match=reason) as error, WholeShapeMode(0, RANKS):
        code(take_part(torch.randn(2, 3, 16), 2, (16,), 0))
    assert error.value.sources == {"m"}


def test_split_points_of_rejected_code() -> None:
    with pytest.raises(UnshardableCode) as error, WholeShapeMode(0, RANKS):
        take_part(torch.randn(2, 3, 24), 2, (24,), 0).split([8, 16], dim=-1)
    assert error.value.split_points == ((8, 24),)
