"""Nested batches and their flat form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from secc.runtime.errors import UserError
from secc.runtime.model.nested_batch import (
    argument_of_key,
    find_growing_lists,
    flatten_batch,
    growing_lists_from_dims,
    unflatten_batch,
)

ONE, TWO = torch.ones(1), torch.ones(2)


def test_flatten_and_unflatten_are_inverses() -> None:
    batch = {
        "text": {"ids": ONE, "more": {"mask": TWO}},
        "levels": [ONE, TWO],
        "labels": TWO,
        "names": ["a", "b"],
        "n": 3,
    }
    found = flatten_batch(batch)
    assert list(found) == ["text.ids", "text.more.mask", "levels.0", "levels.1", "labels", "names", "n"]
    assert unflatten_batch(found) == batch and {argument_of_key(key) for key in found} == batch.keys()


def test_none_is_left_out() -> None:
    assert flatten_batch({"text": {"ids": ONE, "mask": None}, "images": None}) == {"text.ids": ONE}


@pytest.mark.parametrize("batch", [{"a.b": ONE}, {"a": {"b.c": ONE}}, {"a": {3: ONE}}, {"a": {"3": ONE}}])
def test_keys_that_look_like_nested_ones_are_rejected(batch: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="a batch has the key") as error:
        flatten_batch(batch, "model.py:7")
    assert error.value.where == "model.py:7"


# -- lists that grow with the samples --------------------------------------------------------------------


def picture(height: int, width: int) -> torch.Tensor:
    return torch.arange(3.0 * height * width).view(3, height, width)


def grown(*batches: dict[str, Any]) -> dict[str, int]:
    """The lists that grow, of batches of two samples with what the two give alone."""
    return find_growing_lists(
        [(batch, [{k: _half(v, i) for k, v in batch.items()} for i in (0, 1)]) for batch in batches],
        "model.py:7",
    )


def _half(value: Any, i: int) -> Any:
    if isinstance(value, dict):
        return {k: _half(v, i) for k, v in value.items()}
    return value[i : i + 1]


def test_a_growing_list_of_lists_is_one_list_and_how_many_each_has() -> None:
    batch = {"text": {"docs": [[ONE, TWO], [TWO], []]}, "pictures": [(picture(2, 4),), (picture(3, 4),), ()]}
    singles = [{"text": {"docs": batch["text"]["docs"][i : i + 1]}} for i in range(3)]
    lists = find_growing_lists(
        [(batch, [s | {"pictures": batch["pictures"][i : i + 1]} for i, s in enumerate(singles)])], ""
    )
    assert lists == {"text.docs.*": 1, "pictures.*": 2}
    found = flatten_batch(batch, lists=lists)
    assert {k: tuple(v.shape) for k, v in found.items()} == {
        "text.docs.*counts": (3,),
        "text.docs.*.*": (5,),
        "text.docs.*.*sizes": (3, 1),
        "text.docs.*.*most": (0, 2),
        "pictures.*counts": (3,),
        "pictures.*.*": (15, 4),
        "pictures.*.*sizes": (2, 2),
        "pictures.*.*most": (0, 3, 3),
    }
    restored = unflatten_batch(found)
    assert [list(map(len, docs)) for docs in restored["text"]["docs"]] == [[1, 2], [2], []]
    assert [[p.shape[1] for p in of_one] for of_one in restored["pictures"]] == [[2], [3], []]
    assert torch.equal(restored["pictures"][1][0], picture(3, 4))
    assert (
        growing_lists_from_dims({key: list(map(str, value.shape)) for key, value in found.items()}).keys()
        == lists.keys()
    )
    none = flatten_batch({"text": {"docs": [[], []]}}, lists=lists)
    assert none.keys() == {"text.docs.*counts"} and unflatten_batch(none) == {"text": {"docs": [[], []]}}
    assert flatten_batch({"text": {"docs": []}}, lists=lists) == {}


def test_lists_of_lists_that_grow_inside_are_none_that_grow() -> None:
    def columns(count: int) -> dict[str, Any]:
        return {"columns": [[ONE] * count, [TWO] * count]}

    assert find_growing_lists([(columns(2), [columns(1), columns(1)])], "model.py:7") == {}


def test_growing_lists_become_entries_sizes_and_widths() -> None:
    batch = {"pictures": [picture(2, 4), picture(3, 4)], "text": {"words": [ONE, TWO]}, "thumbs": [TWO, TWO]}
    lists = grown(batch)
    assert lists == {"pictures": 2, "text.words": 1, "thumbs": 0}
    found = flatten_batch(batch, lists=lists)
    assert {k: tuple(v.shape) for k, v in found.items()} == {
        "pictures.*": (15, 4),
        "pictures.*sizes": (2, 2),
        "pictures.*most": (0, 3, 3),
        "text.words.*": (3,),
        "text.words.*sizes": (2, 1),
        "text.words.*most": (0, 2),
        "thumbs.*": (2, 2),
    }
    back = unflatten_batch(found)
    assert (
        torch.equal(back["pictures"][1], picture(3, 4))
        and torch.equal(back["text"]["words"][0], ONE)
        and len(back["thumbs"]) == 2
    )
    assert growing_lists_from_dims({k: [str(d) for d in v.shape] for k, v in found.items()}) == lists


def test_a_list_of_dicts_becomes_a_list_per_key() -> None:
    batch = {
        "targets": [{"boxes": torch.zeros(2, 4), "kinds": ONE}, {"boxes": torch.ones(3, 4), "kinds": TWO}]
    }
    lists = grown(batch)
    assert lists == {"targets.*.boxes": 1, "targets.*.kinds": 1}
    found = flatten_batch(batch, lists=lists)
    assert [k for k in found if not k.endswith("most")] == [
        "targets.*.boxes.*", "targets.*.boxes.*sizes", "targets.*.kinds.*", "targets.*.kinds.*sizes"
    ]  # fmt: skip
    first, second = unflatten_batch(found)["targets"]
    assert torch.equal(second["boxes"], torch.ones(3, 4)) and torch.equal(first["kinds"], ONE)
    assert (
        growing_lists_from_dims({k: [str(d) for d in v.shape] for k, v in found.items()}) == lists
        and flatten_batch({"targets": []}, lists=lists) == {}
    )


def test_a_list_of_constant_length_is_no_growing_list() -> None:
    levels = [torch.zeros(2, 5), torch.zeros(2, 3)]
    assert (
        find_growing_lists(
            [
                (
                    {"levels": levels},
                    [{"levels": [x[:1] for x in levels]}, {"levels": [x[1:] for x in levels]}],
                )
            ],
            "",
        )
        == {}
    )


def test_an_empty_growing_list_is_left_out() -> None:
    assert flatten_batch({"pictures": [], "ids": ONE}, lists={"pictures": 2}) == {"ids": ONE}


def test_tensors_that_differ_in_an_unexpected_dim_are_rejected() -> None:
    with pytest.raises(
        UserError, match=r"the list 'pictures' has tensors of the shapes \[3, 2, 4\], \[3, 2, 5\]"
    ):
        flatten_batch({"pictures": [picture(2, 4), picture(2, 5)]}, "model.py:7", {"pictures": 2})
