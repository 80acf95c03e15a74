"""Symbols, dims and pads of inputs, from batches alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from secc.errors import UserError
from secc.frontend.dataset.input_symbols import ModelInputs, describe_inputs
from secc.frontend.dataset.sampling import survey_dataset
from secc.runtime.model.user_file import UserModel, load_model_file
from secc.runtime.plan.batch_sizes import check_batch_shapes, combine_sizes, pad_batch, read_symbol_sizes
from secc.runtime.plan.schema import PadFill, Symbol

Sample = dict[str, Any]
UserOf = Callable[..., UserModel]

TEXTS = [{"input_ids": torch.arange(1, 4 + i % 7), "labels": torch.arange(1, 4 + i % 7)} for i in range(30)]
IMAGES = [t | ({"x": torch.randn(1 + i % 3, 3, 4, 4)} if i % 2 else {}) for i, t in enumerate(TEXTS)]


def described(user: UserModel) -> ModelInputs:
    return describe_inputs(user, survey_dataset(user))


def dims(found: ModelInputs) -> dict[str, tuple[str, ...]]:
    return {i.key: i.dims for i in found.inputs}


def pads(found: ModelInputs) -> dict[str, tuple[tuple[int, str, PadFill], ...]]:
    return {i.key: i.pads for i in found.inputs}


def test_text_alone(user_of: UserOf):
    found = described(user_of(TEXTS))
    assert found.symbols == (Symbol("B", "rows", "input_ids", 0), Symbol("S", "width", "input_ids", 1))
    assert dims(found) == {"input_ids": ("B", "S"), "labels": ("B", "S")}
    assert pads(found) == {"input_ids": ((1, "right", 0.0),), "labels": ((1, "right", -100.0),)}
    assert found.labels_key == "labels"
    assert found.sample_sizes[0] == {"B": 1, "S": 3}


def test_ragged_optional_images(user_of: UserOf):
    found = described(user_of(IMAGES))
    assert dims(found)["x"] == ("n_x", "3", "4", "4")
    assert [i.optional for i in found.inputs] == [False, False, True]
    assert [s["n_x"] for s in found.sample_sizes[:4]] == [0, 2, 0, 1]
    assert found.sample_patterns[1] == frozenset("x")


def test_one_image_per_sample_is_told_from_the_number_of_samples(user_of: UserOf):
    found = described(
        user_of([t | ({"x": torch.zeros(1, 3, 4, 4)} if i % 2 else {}) for i, t in enumerate(TEXTS)])
    )
    assert dims(found)["x"][0] == "n_x"


def test_rows_in_proportion_share_the_smaller_symbol(user_of: UserOf):
    def grids(i: int) -> Sample:
        n = 1 + i % 3
        return {
            "patches": torch.randn(16 * n, 5),
            "grid": torch.ones(n, 3, dtype=torch.long),
            "pair": torch.zeros(2, 3, 4, 4),
        }

    found = described(user_of([t | (grids(i) if i % 2 else {}) for i, t in enumerate(TEXTS)]))
    assert dims(found)["patches"] == ("16*n_grid", "5") and dims(found)["grid"] == ("n_grid", "3")
    assert dims(found)["pair"] == ("n_pair", "3", "4", "4")


def test_left_padding_by_the_user(user_of: UserOf):
    def collate(samples: list[Sample]) -> Sample:
        def left(key: str, value: int) -> torch.Tensor:
            return pad_sequence(
                [s[key] for s in samples], batch_first=True, padding_value=value, padding_side="left"
            )

        ids = left("input_ids", 9)
        mask = pad_sequence(
            [torch.ones_like(s["input_ids"]) for s in samples], batch_first=True, padding_side="left"
        ).bool()
        return {"input_ids": ids, "mask": mask, "square": (mask[:, None, :, None] & mask[:, None, None, :])}

    found = described(user_of(TEXTS, collate=collate))
    assert dims(found)["square"] == ("B", "1", "S", "S")
    left = {
        "input_ids": ((1, "left", 9.0),),
        "mask": ((1, "left", 0.0),),
        "square": ((2, "left", 0.0), (3, "left", 0.0)),
    }
    assert pads(found) == left


def test_a_padded_batch_equals_collate_with_a_longer_sample(user_of: UserOf):
    user = user_of(TEXTS)
    found = described(user)
    alone, together = user.collate(TEXTS[:1]), user.collate([TEXTS[0], TEXTS[6]])
    padded = pad_batch(alone, found.inputs, {"S": 9})
    assert all(torch.equal(padded[key][0], together[key][0]) for key in padded)


def test_an_ambiguous_padding_side_follows_another_key(user_of: UserOf):
    def collate(samples: list[Sample]) -> Sample:
        sides = {"constant": torch.ones_like, "input_ids": torch.Tensor.clone}
        columns = {key: [f(s["input_ids"]) for s in samples] for key, f in sides.items()}
        return {
            key: pad_sequence(column, batch_first=True, padding_value=1, padding_side="left")
            for key, column in columns.items()
        }

    assert pads(described(user_of(TEXTS, collate=collate)))["constant"] == ((1, "left", 1.0),)


def test_padding_with_one_row_is_a_pad(user_of: UserOf):
    """Rotations are padded with the one that turns nothing."""

    def collate(samples: list[Sample]) -> Sample:
        ids = pad_sequence([s["input_ids"] for s in samples], batch_first=True)
        turns = torch.zeros(*ids.shape, 3)
        turns[..., 0] = 1
        for turn, sample in zip(turns, samples, strict=True):
            turn[: len(sample["input_ids"])] = sample["input_ids"][:, None] / torch.tensor([2.0, 3.0, 7.0])
        return {"input_ids": ids, "turns": turns}

    user = user_of(TEXTS, collate=collate)
    found = described(user)
    assert pads(found)["turns"] == ((1, "right", (1.0, 0.0, 0.0)),)
    alone, together = user.collate(TEXTS[:1]), user.collate([TEXTS[0], TEXTS[6]])
    padded = pad_batch(alone, found.inputs, {"S": 9})
    assert torch.equal(padded["turns"][0], together["turns"][0])


def test_padding_that_goes_on_counting_is_a_pad(user_of: UserOf):
    def collate(samples: list[Sample]) -> Sample:
        ids = pad_sequence([s["input_ids"] for s in samples], batch_first=True)
        return {"input_ids": ids, "position_ids": torch.arange(ids.shape[1]).expand_as(ids).contiguous()}

    user = user_of(TEXTS, collate=collate)
    found = described(user)
    assert dims(found)["position_ids"] == ("B", "S")
    assert pads(found)["position_ids"] == ((1, "right", "next"),)
    padded = pad_batch(user.collate(TEXTS[:2]), found.inputs, {"S": 9})
    assert padded["position_ids"].tolist() == [list(range(9))] * 2


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_that_repeats_the_nearest_entry_is_a_pad(user_of: UserOf, side: str):
    def collate(samples: list[Sample]) -> Sample:
        rows = [s["input_ids"] for s in samples]
        most = max(map(len, rows))
        times = torch.stack([torch.cat([r, r[-1:].expand(most - len(r))]) / 3 for r in rows])
        batch = {"input_ids": pad_sequence(rows, batch_first=True), "times": times}
        return batch if side == "right" else {k: t.flip(1) for k, t in batch.items()}

    user = user_of(TEXTS, collate=collate)
    found = described(user)
    assert dims(found)["times"] == ("B", "S")
    assert pads(found)["times"] == ((1, side, "same"),)
    alone, together = user.collate(TEXTS[:1]), user.collate([TEXTS[0], TEXTS[6]])
    padded = pad_batch(alone, found.inputs, {"S": 9})
    assert torch.equal(padded["times"][0], together["times"][0])


def test_padding_with_several_values_is_no_pad(user_of: UserOf):
    def collate(samples: list[Sample]) -> Sample:
        ids = pad_sequence([s["input_ids"] for s in samples], batch_first=True)
        return {"input_ids": ids, "ages": torch.arange(ids.shape[1]).square().expand_as(ids).contiguous()}

    found = described(user_of(TEXTS, collate=collate))
    assert dims(found)["ages"] == ("B", "S") and pads(found)["ages"] == ()


def test_two_widths_and_one_that_is_longer_by_one(user_of: UserOf):
    samples = [
        {
            "audio": torch.randn(3 + i * 5 % 11),
            "input_ids": torch.arange(2 + i % 5),
            "labels": torch.arange(3 + i % 5),
        }
        for i in range(40)
    ]
    found = described(user_of(samples))
    assert dims(found) == {"audio": ("B", "S_audio"), "input_ids": ("B", "S"), "labels": ("B", "S + 1")}
    assert pads(found)["labels"] == ((1, "right", -100.0),)


def test_a_packed_batch_has_rows_along_dim_1(user_of: UserOf):
    def collate(samples: list[Sample]) -> Sample:
        ends = torch.tensor([0] + [len(s["input_ids"]) for s in samples]).cumsum(0)
        return {"input_ids": torch.cat([s["input_ids"] for s in samples])[None], "ends": ends}

    found = described(user_of(TEXTS, collate=collate))
    assert found.symbols[0] == Symbol("B", "rows", "", 0)
    assert dims(found) == {"input_ids": ("1", "n_input_ids"), "ends": ("B + 1",)}
    assert found.sample_sizes[0] == {"B": 1, "n_input_ids": 3}


def test_an_optional_key_has_its_own_width(user_of: UserOf):
    samples = [t | ({"mask": torch.ones(len(t["input_ids"]))} if i % 2 else {}) for i, t in enumerate(TEXTS)]
    assert dims(described(user_of(samples)))["mask"] == ("n_mask", "S_mask")


def test_an_optional_key_padded_like_the_text_follows_it(user_of: UserOf):
    def collate(samples: list[Sample]) -> Sample:
        batch = {"input_ids": pad_sequence([s["input_ids"] for s in samples], batch_first=True)}
        if kept := [len(s["input_ids"]) for s in samples if "x" in s]:
            width = batch["input_ids"].shape[1]
            batch["where"] = torch.stack([(torch.arange(width) < n).long() for n in kept])
        return batch

    short = [
        {"input_ids": torch.arange(1, 4 + i % 5), "x": 1}
        if i % 2
        else {"input_ids": torch.arange(1, 9 + i % 3)}
        for i in range(30)
    ]
    found = described(user_of(short, collate=collate))
    assert dims(found)["where"] == ("n_where", "S")


def test_constant_lengths_are_a_width_while_samples_may_be_cropped(user_of: UserOf):
    user = user_of([{"input_ids": torch.arange(3000), "labels": torch.arange(3000)} for _ in range(6)])
    found = survey_dataset(user)
    assert (
        dims(describe_inputs(user, found))["labels"] == ("B", "S")
        and describe_inputs(user, found).sample_sizes[0]["S"] == 3000
    )
    assert dims(describe_inputs(user, found.without_crops()))["labels"] == ("B", "3000")


@pytest.mark.parametrize(
    "name", ["llava_tiny", "internvl_tiny", "voxtral_tiny", "two_modalities", "whisper_tiny"]
)
def test_every_batch_of_a_model_has_the_described_dims(models: Path, name: str):
    user = load_model_file(models / f"{name}.py")
    found = described(user)
    samples = [user.load_sample(i) for i in range(12)]
    sizes = [read_symbol_sizes(user.collate([s]), found.symbols) for s in samples]
    for start, end in [(0, 1), (0, 3), (2, 7), (0, 12)]:
        check_batch_shapes(
            user.collate(samples[start:end]), found.inputs, combine_sizes(sizes[start:end], found.symbols)
        )


def test_labels_are_known_by_their_padding(models: Path):
    assert described(load_model_file(models / "two_modalities.py")).labels_key == "targets"


# -- what cannot be split
# -----------------------------------------------------------------------------------------------------------


def stacked(samples: list[Sample]) -> torch.Tensor:
    return pad_sequence([s["input_ids"] for s in samples], batch_first=True)


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (
            lambda samples: {"input_ids": stacked(samples[::-1])},
            "'input_ids' of other rows than of each sample alone",
        ),
        (lambda samples: {"input_ids": stacked(samples) + torch.randint(9, ())}, "'input_ids' of other rows"),
        (
            lambda samples: {"x": torch.zeros(len(samples) ** 2, 3)},
            "dim 0 of 'x' is neither constant nor additive nor a maximum",
        ),
        (
            lambda samples: {"x": torch.zeros([1] * min(len(samples), 3))},
            "'x' has . dims in one batch and . in another",
        ),
        (lambda samples: {"x": stacked(samples), "n": 1 / len(samples)}, "'n' changes and is no tensor"),
        (
            lambda samples: {"x": stacked(samples).to(torch.int if len(samples) > 3 else torch.long)},
            "'x' is int64 in one batch and int32",
        ),
        (
            lambda samples: {"x": stacked(samples)} | ({"y": stacked(samples)} if len(samples) > 1 else {}),
            "gives 'y' for a set of samples",
        ),
        (
            lambda samples: {"x": stacked(samples), "t": [{"y": [s["input_ids"]]} for s in samples]},
            "the list 't' has another number",
        ),
        (
            lambda samples: {"t": [s["input_ids"].float() for s in samples[::-1]]},
            r"'t\.\*sizes' of other rows than of each sample",
        ),
        (
            lambda samples: {"t": [torch.zeros([1] * len(s["input_ids"])) for s in samples]},
            "the list 't' have different numbers of dims",
        ),
    ],
)
def test_dims_that_follow_no_rule_are_refused(
    user_of: UserOf, collate: Callable[[list[Sample]], Sample], message: str
):
    with pytest.raises(UserError, match=message) as caught:
        described(user_of(TEXTS, collate=collate))
    assert caught.value.remedy and caught.value.where.startswith(str(Path(__file__)))


def test_offsets_of_samples_that_have_an_input_are_refused_and_their_lengths_taken(user_of: UserOf):
    def collate(samples: list[Sample], offsets: bool) -> Sample:
        images = [s["x"] for s in samples if "x" in s]
        if not images:
            return {"input_ids": stacked(samples)}
        lengths = torch.tensor([len(x) for x in images])
        cumulated = {"at": torch.nn.functional.pad(lengths.cumsum(0), (1, 0))}
        batch = {"input_ids": stacked(samples), "x": torch.cat(images)}
        return batch | (cumulated if offsets else {"lengths": lengths})

    with pytest.raises(UserError, match="dim 0 of 'at' is neither constant") as caught:
        described(user_of(IMAGES, collate=lambda samples: collate(samples, True)))
    assert "the length of each sample in place of offsets" in caught.value.remedy
    found = described(user_of(IMAGES, collate=lambda samples: collate(samples, False)))
    assert {i.key for i in found.inputs if i.optional} == {"x", "lengths"}


def test_a_list_that_some_samples_leave_empty_is_optional(user_of: UserOf):
    samples = [
        t | {"pictures": [torch.randn(3, 2 + k, 4) for k in range(i % 3)]} for i, t in enumerate(TEXTS)
    ]

    def collate(samples: list[Sample]) -> Sample:
        return {"x": stacked(samples), "pictures": [p for s in samples for p in s["pictures"]]}

    found = described(user_of(samples, collate=collate))
    assert {i.key: i.dims for i in found.inputs if i.optional} == {
        "pictures.*": ("n_pictures_0", "4"),
        "pictures.*sizes": ("n_pictures", "2"),
        "pictures.*most": ("0", "3", "S_pictures"),
    }


def test_values_that_never_change_are_no_inputs(user_of: UserOf):
    found = described(user_of(TEXTS, collate=lambda samples: {"x": stacked(samples), "use_cache": False}))
    assert dims(found) == {"x": ("B", "S")}


def test_first_rows_before_second_rows_name_the_order_that_is_exact(user_of: UserOf):
    ends = [(4 + i % 3, 9 + i % 4) for i in range(30)]
    pairs = [{"chosen": torch.arange(1, a), "rejected": torch.arange(5, b)} for a, b in ends]

    def one_behind_the_other(samples: list[Sample]) -> Sample:
        texts = [s[key] for key in ("chosen", "rejected") for s in samples]
        return {"input_ids": pad_sequence(texts, batch_first=True)}

    def in_order(samples: list[Sample]) -> Sample:
        texts = [s[key] for s in samples for key in ("chosen", "rejected")]
        return {"input_ids": pad_sequence(texts, batch_first=True)}

    assert dims(described(user_of(pairs, collate=in_order)))["input_ids"][0] == "2*B"
    with pytest.raises(UserError, match="the first rows of all samples of 'input_ids'") as caught:
        described(user_of(pairs, collate=one_behind_the_other))
    assert "let the 2 rows of a sample follow each other" in caught.value.remedy


def packed(samples: list[Sample]) -> dict[str, Any]:
    """Patches of all images one after another, and the number of the image that each is of."""
    images = [image for s in samples for image in s["images"]]
    numbers = [torch.full((len(image),), n) for n, image in enumerate(images)]
    return {"patches": torch.cat(images), "image": torch.cat(numbers)}


def test_integers_may_count_through_a_batch_where_other_keys_show_the_order(user_of: UserOf):
    images = [{"images": [torch.randn(2 + (i + k) % 4, 6) for k in range(1 + i % 2)]} for i in range(30)]
    found = described(user_of(images, collate=packed))
    assert dims(found) == {"patches": ("n_patches", "6"), "image": ("n_patches",)}
    with pytest.raises(UserError, match="'patches' of other rows than of each sample alone"):
        described(user_of(images, collate=lambda samples: {k: v.flip(0) for k, v in packed(samples).items()}))


@pytest.mark.parametrize("order", ["offsets", "lengths", ""])
def test_offsets_or_lengths_show_the_order_of_the_numbers_of_samples(user_of: UserOf, order: str):
    def collate(samples: list[Sample]) -> Sample:
        has = [i for i, s in enumerate(samples) if "x" in s]
        if not has:
            return {"input_ids": stacked(samples)}
        lengths = torch.tensor([len(samples[i]["x"]) for i in has])
        batch = {"input_ids": stacked(samples), "owner": torch.tensor(has)}
        batch["x"] = torch.cat([samples[i]["x"] for i in has])
        shown = {"offsets": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), "lengths": lengths}
        return batch | ({order: shown[order]} if order else {})

    user = user_of(IMAGES, collate=collate)
    if order:
        assert dims(described(user))["owner"] == ("n_owner",)
        return
    with pytest.raises(UserError, match="'owner' of other rows than of each sample alone") as caught:
        described(user)
    assert "return another key with as many rows, such as the length of each" in caught.value.remedy


def test_offsets_of_rows_out_of_order_show_nothing(user_of: UserOf):
    def collate(samples: list[Sample]) -> Sample:
        has = [i for i, s in enumerate(samples) if "x" in s][::-1]
        if not has:
            return {"input_ids": stacked(samples)}
        lengths = torch.tensor([len(samples[i]["x"]) for i in has])
        batch = {"input_ids": stacked(samples), "owner": torch.tensor(has)}
        return batch | {"offsets": torch.nn.functional.pad(lengths.cumsum(0), (1, 0))}

    with pytest.raises(UserError, match="'owner' of other rows than of each sample alone"):
        described(user_of(IMAGES, collate=collate))
