"""Patterns and micro-batches of a dataset."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from secc.errors import UserError
from secc.frontend.dataset.sampling import survey_dataset
from secc.frontend.dataset.survey import BATCH_SAMPLE_COUNTS, KEPT_PER_PATTERN, DatasetSurvey, sequence_length
from secc.runtime.model.user_file import UserModel, load_model_file

Sample = dict[str, Any]
UserOf = Callable[..., UserModel]


def text(n: int, **more: Any) -> Sample:
    return {"input_ids": torch.arange(1, n + 1), "labels": torch.arange(1, n + 1), **more}


def image(n: int = 1) -> torch.Tensor:
    return torch.randn(n, 3, 4, 4)


MIXED = [
    text(5 + i % 7)
    | ({"x": image(1 + i % 3)} if i % 2 else {})
    | ({"y": torch.randn(1, 8)} if i % 3 == 1 else {})
    for i in range(60)
]


def pattern_of(found: DatasetSurvey, batch: list[Sample]) -> frozenset[str]:
    return frozenset(k for s in batch for k in s) & found.optional_keys


def test_keys_and_patterns_are_counted(user_of: UserOf):
    found = survey_dataset(user_of(MIXED), count=64)
    assert found.required_keys == {"input_ids", "labels"} and found.optional_keys == {"x", "y"}
    assert found.pattern_counts == {
        frozenset(): 20,
        frozenset("x"): 20,
        frozenset("xy"): 10,
        frozenset("y"): 10,
    }
    assert set(found.micro_batch_patterns()[:2]) == {frozenset(), frozenset("x")}


def test_lighter_samples_are_the_shortest_of_those_with_equal_pictures(user_of: UserOf):
    found = survey_dataset(user_of([text(n, x=image(2 if n in (5, 7) else 1)) for n in range(12, 4, -1)]))
    lengths = list[list[int]]()
    while (lighter := found.with_lighter_samples()) is not found:
        found = lighter
        lengths.append(sorted(map(sequence_length, found.samples_of(frozenset()))))
    assert lengths == [[6, 8, 9, 10], [6, 8]]


def test_patterns_that_only_micro_batches_have_follow_the_observed(user_of: UserOf):
    found = survey_dataset(user_of([text(4, x=image()), text(5, y=image()), text(6)]))
    assert found.micro_batch_patterns()[3:] == [frozenset("xy")]
    for batch in found.compose_batches(frozenset("xy")):
        assert pattern_of(found, batch) == frozenset("xy")


def test_unions_are_bounded(user_of: UserOf):
    samples = [text(4, **{f"k{i}": image()}) for i in range(12)]
    assert len(survey_dataset(user_of(samples)).micro_batch_patterns()) == 12 + 16


@pytest.mark.parametrize("pattern", [frozenset(), frozenset("x"), frozenset("y"), frozenset("xy")])
def test_micro_batches_have_their_pattern_and_vary_in_every_size(user_of: UserOf, pattern: frozenset[str]):
    found = survey_dataset(user_of(MIXED))
    batches = found.compose_batches(pattern)
    assert tuple(len(b) for b in batches) == BATCH_SAMPLE_COUNTS
    assert all(pattern_of(found, b) == pattern for b in batches)
    assert len({max(sequence_length(s) for s in b) for b in batches}) >= 3
    assert all(len({sequence_length(s) for s in b}) > 1 for b in batches)
    for key in pattern:  # how many samples lack the key is no function of how many there are
        assert len({len(b) - sum(key in s for s in b) for b in batches}) >= 3


@pytest.mark.parametrize("seed", range(20))
def test_no_two_keys_have_equal_sample_counts_in_all_micro_batches(user_of: UserOf, seed: int):
    """With one row for each sample that has them, rows of two keys, and the number of samples, would look
    alike."""
    rng = random.Random(seed)
    samples = [
        text(rng.randint(3, 12), **{k: image() for k in "xyz" if rng.random() < 0.6}) for _ in range(40)
    ]
    found = survey_dataset(user_of(samples))
    for pattern in found.micro_batch_patterns():
        counts = {
            k: [sum(k in s for s in b) for b in found.compose_batches(pattern)]
            for k in [*sorted(pattern), "input_ids"]
        }
        for a, b in combinations(counts, 2):
            told = any((a in p) != (b in p or b == "input_ids") for p in found.pattern_counts if p < pattern)
            assert counts[a] != counts[b] or not told, (pattern, counts)


def test_one_sample_of_a_pattern_is_cropped_to_several_lengths(user_of: UserOf):
    found = survey_dataset(user_of([text(12, x=image())] + [text(3 + i % 7) for i in range(20)]))
    assert len({max(sequence_length(s) for s in b) for b in found.compose_batches(frozenset("x"))}) >= 3


def test_even_micro_batches_need_no_padding(user_of: UserOf):
    found = survey_dataset(user_of(MIXED))
    for pattern in found.micro_batch_patterns():
        for batch in found.compose_batches(pattern, even=True):
            assert len({sequence_length(s) for s in batch}) == 1
            assert pattern_of(found, batch) == pattern


def test_long_texts_are_cropped_to_a_window_with_labels(user_of: UserOf):
    labels = torch.cat([torch.full((2000,), -100), torch.arange(1000)])
    found = survey_dataset(
        user_of([{"input_ids": torch.arange(3000), "labels": labels.clone(), "kind": 3} for _ in range(5)])
    )
    assert found.has_crops
    widths = set()
    for batch in found.compose_batches(frozenset()):
        widths.add(max(sequence_length(s) for s in batch))
        for sample in batch:
            assert len(sample["labels"]) == sequence_length(sample) < 50 and (sample["labels"] >= 0).any()
            assert torch.equal(sample["labels"][-5:], sample["input_ids"][-5:] - 2000)
    assert len(widths) == len(BATCH_SAMPLE_COUNTS)


def test_two_answers_are_each_cropped_to_a_window_that_counts(user_of: UserOf):
    def answers(i: int) -> Sample:
        sizes = {"good": 300 + i, "bad": 500 + 7 * i}
        masks = {f"{key}_mask": (torch.arange(n) >= 200).long() for key, n in sizes.items()}
        return {key: torch.arange(n) for key, n in sizes.items()} | masks

    batches = survey_dataset(user_of(list(map(answers, range(8))))).compose_batches(frozenset())
    samples = [sample for batch in batches for sample in batch]
    for key in ("good", "bad"):
        assert all(len(s[key]) == len(s[f"{key}_mask"]) < 50 and s[f"{key}_mask"].any() for s in samples)
        assert all(s[key][0] == 198 for s in samples)
    assert len({len(s["good"]) - len(s["bad"]) for s in samples}) > 4  # one length says nothing of the other


def test_the_lightest_sample_ends_behind_its_placeholders_and_first_label(user_of: UserOf):
    ids = torch.cat([torch.arange(20), torch.full((30,), 99), torch.arange(400)])
    labels = torch.where(torch.arange(450) < 80, -100, ids)
    large = {"input_ids": ids, "labels": labels, "x": image(2)}
    small = {"input_ids": ids, "labels": labels, "x": image(1)}
    found = survey_dataset(user_of([large, small, large]))
    [lightest] = found.lightest_samples(frozenset())
    assert lightest["x"].shape == (1, 3, 4, 4)
    assert torch.equal(lightest["input_ids"], ids[:103]) and (lightest["labels"] >= 0).any()
    assert found.without_crops().lightest_samples(frozenset())[0]["input_ids"].shape == (450,)
    classified = {"x": image(1), "label": torch.tensor([3])}
    assert survey_dataset(user_of([classified] * 3)).lightest_samples(frozenset())[0]["label"].tolist() == [3]


def test_a_text_with_an_image_loses_only_its_end(user_of: UserOf):
    found = survey_dataset(user_of([text(200, x=image()) for _ in range(5)]))
    batches = found.compose_batches(frozenset())
    assert {max(sequence_length(s) for s in b) for b in batches} == {200, 199, 198, 197, 196}
    assert all(s["input_ids"][0] == 1 and s["x"].shape == (1, 3, 4, 4) for b in batches for s in b)


def test_heavy_samples_are_in_no_micro_batch(user_of: UserOf):
    pictures = [torch.zeros(1200 if i % 6 == 0 else 300 + i, 3, 32, 32) for i in range(12)]
    found = survey_dataset(user_of([text(5 + i) | {"x": picture} for i, picture in enumerate(pictures)]))
    used = {
        s["x"].shape[0]
        for turn in range(3)
        for batch in found.compose_batches(frozenset(), rotation=turn)
        for s in batch
    }
    assert used <= set(range(301, 312)) and len(used) > 3 and len(found.samples_of(frozenset())) == 12


def test_without_crops_only_the_datasets_own_samples_remain(user_of: UserOf):
    found = survey_dataset(user_of([text(200) for _ in range(5)])).without_crops()
    assert not found.has_crops
    assert all(
        sequence_length(s) == 200
        for even in (False, True)
        for b in found.compose_batches(frozenset(), even)
        for s in b
    )


def test_lists_are_cropped_like_tensors(user_of: UserOf):
    found = survey_dataset(
        user_of([{"input_ids": list(range(300)), "labels": list(range(300))} for _ in range(3)])
    )
    sample = found.compose_batches(frozenset())[0][0]
    assert (
        isinstance(sample["input_ids"], list)
        and sample["input_ids"] == sample["labels"]
        and len(sample["labels"]) < 50
    )


def test_the_pattern_is_that_of_the_batch_and_none_is_a_missing_key(user_of: UserOf):
    def collate(samples: list[Sample]) -> Sample:
        images = [s["picture"] for s in samples if s["picture"] is not None]
        return {
            "ids": torch.stack([s["ids"] for s in samples]),
            "pixels": torch.cat(images) if images else None,
        }

    samples = [{"ids": torch.arange(3), "picture": image() if i % 2 else None} for i in range(40)]
    found = survey_dataset(user_of(samples, collate=collate))
    assert found.optional_keys == {"pixels"} and found.pattern_counts[frozenset({"pixels"})] == 20
    assert len(found.samples_of(frozenset())) == KEPT_PER_PATTERN


def test_samples_with_a_flag_come_with_longer_ones(user_of: UserOf):
    flags = [
        {"task": torch.tensor(i % 2), "rare": i == 33, "label": i % 9, "b": torch.zeros(2)} for i in range(40)
    ]
    samples = [text(2 + i * 5 % 7, **more) for i, more in enumerate(flags)]
    found = survey_dataset(user_of(samples), count=64)
    batch = found.compose_batches(frozenset())[-1]
    together = [*batch, *found.flagged_samples(frozenset())]
    assert len(together) <= len(batch) + 5
    longest = max(map(sequence_length, together))
    padded = [s for s in together if sequence_length(s) < longest]
    assert {int(s["task"]) for s in padded} == {0, 1} and {s["rare"] for s in padded} == {False, True}


def test_a_survey_holds_few_samples_in_memory(user_of: UserOf):
    found = survey_dataset(user_of(MIXED))
    assert all(1 <= len(found.samples_of(p)) <= KEPT_PER_PATTERN for p in found.pattern_counts)
    assert all(d.shapes["input_ids"][1] == sequence_length(MIXED[d.index]) for d in found.drawn_samples)


def test_a_survey_is_deterministic_and_draws_beyond_the_first_samples(user_of: UserOf):
    samples = [text(4)] * 900 + [text(5, x=image())] * 100
    first, second = (survey_dataset(user_of(samples)) for _ in range(2))
    assert [d.index for d in first.drawn_samples] == [d.index for d in second.drawn_samples]
    assert first.optional_keys == {"x"}


def test_a_pattern_without_samples_raises(user_of: UserOf):
    with pytest.raises(ValueError, match="no samples unite"):
        survey_dataset(user_of(MIXED)).compose_batches(frozenset({"nothing"}))


def test_an_unknown_key_is_refused(models: Path):
    with pytest.raises(UserError, match="forward does not take"):
        survey_dataset(load_model_file(models / "unknown_key.py"))


def test_a_sample_with_full_masks_is_kept_and_stands_for_its_pattern(user_of: UserOf):
    mask = torch.ones(8, dtype=torch.long)
    samples = [text(5 + i % 9, x=image(), seen=(torch.arange(8) < 3 + i % 5).long()) for i in range(40)]
    samples[37] = text(7, x=image(), seen=mask)
    found = survey_dataset(user_of(samples))
    (full,) = [s for s in found.kept_samples(frozenset()) if bool(s["seen"].all())]
    for batch in found.compose_batches(frozenset(), of=full):
        assert all(torch.equal(s["seen"], mask) for s in batch)
    assert (
        len({sequence_length(s) for batch in found.compose_batches(frozenset(), of=full) for s in batch}) > 2
    )


@pytest.mark.parametrize(
    ("drawn", "differs"),
    [
        ("self.rng.normal(size=3)", True),
        ("torch.rand(3, generator=self.generator)", True),
        ("str(next(self.count))", True),
        ("np.random.default_rng(i).normal(size=3)", False),
        ("np.random.rand(3) + random.random()", False),
        ("torch.tensor([float('nan'), 1.0])", False),
        ("{'parts': [torch.rand(2), 'text', None, object()]}", False),
    ],
)
def test_a_sample_that_changes_when_it_is_loaded_again_is_refused(
    drawn: str, differs: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        f"""
import itertools, random
import numpy as np
import torch
class Net(torch.nn.Module):
    def forward(self, x, noise=None): return x.sum()
class Samples(torch.utils.data.Dataset):
    def __init__(self):
        self.rng, self.generator = np.random.default_rng(0), torch.Generator()
        self.count = itertools.count()
    def __len__(self): return 8
    def __getitem__(self, i):
        return {{"x": torch.ones(2), "noise": {drawn}}}
def model(): return Net()
def dataset(): return Samples()
def collate(samples): return {{"x": torch.stack([s["x"] for s in samples])}}
"""
    )
    user = load_model_file(path)
    if not differs:
        assert survey_dataset(user).pattern_counts
        return
    with pytest.raises(UserError, match=r"is another sample .*: 'noise' differs") as error:
        survey_dataset(user)
    assert error.value.where == f"{path}:12" and error.value.remedy


@pytest.mark.parametrize("nested", [False, True])
def test_sequences_keep_the_length_of_a_list_of_tensors_that_they_belong_to(user_of: UserOf, nested: bool):
    """A survey may shorten a text to a window of it, but not the ranking of a sample's answers."""
    answers = [[torch.arange(1, 4 + k) for k in range(2 + i % 4)] for i in range(30)]
    samples = [
        {"rank": torch.randperm(len(a)), "answers": {"given": a} if nested else a, "n": i}
        for i, a in enumerate(answers)
    ]
    found = survey_dataset(user_of(samples, collate=lambda samples: {"n": torch.zeros(len(samples))}))
    for sample in (s for batch in found.compose_batches(frozenset(), even=True) for s in batch):
        given = sample["answers"]["given"] if nested else sample["answers"]
        assert len(sample["rank"]) == len(given)
