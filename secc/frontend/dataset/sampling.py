"""Draws the samples of a survey: the first of the dataset, random ones, and, if the model file has
`sizes(i)`, samples of rare patterns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch

from secc.errors import UserError
from secc.frontend.dataset.survey import (
    KEPT_FLAG_SAMPLES,
    KEPT_MASK_SETS,
    KEPT_PER_PATTERN,
    MAX_FLAG_VALUES,
    DatasetSurvey,
    DrawnSample,
    Flag,
    KeyShapes,
    Sample,
    flags_of,
)
from secc.runtime.model.user_file import UserModel

MAX_SCANNED_SAMPLES = 4096  # calls of sizes(i) to find rare patterns
_REPEATED_SAMPLES = 3  # are loaded again at the end
RARE_PATTERN_SAMPLES = 4  # samples to draw of each pattern that sizes(i) knows


def survey_dataset(user: UserModel, count: int = 64, seed: int = 0, skip_bad: bool = False) -> DatasetSurvey:
    """Draws `count` samples, the first of the dataset and as many random ones, and collates each alone.

    If the model file has `sizes(i)`, samples of rare patterns are among them. Raises UserError for errors
    in dataset(), its items, collate() or the keys of a batch, and for items that differ when they are loaded
    again; with `skip_bad`, samples that do not load or
    cannot be collated alone are left out.
    """
    has_collate = user.defines("collate")
    shapes: dict[int, KeyShapes] = {}
    samples: dict[int, Sample] = {}
    flags: dict[int, frozenset[Flag]] = {}
    pattern_counts: Counter[frozenset[str]] = Counter()
    full_masks_seen: dict[frozenset[str], set[frozenset[str]]] = {}
    flags_seen: dict[frozenset[str], set[Flag]] = {}
    kept_for_flags: Counter[frozenset[str]] = Counter()
    kept: set[int] = set()
    skipped: list[str] = []
    for i in _choose_indices(user, count, seed):
        try:
            sample = user.load_sample(i, seed)
            if has_collate:
                shapes[i] = _batch_shapes(user.collate([sample]))
        except UserError as error:
            if not skip_bad:
                raise
            skipped.append(
                f"a sample was left out: {error.message}" + (f" ({error.where})" if error.where else "")
            )
            continue
        keys = frozenset(shapes[i] if has_collate else sample)
        pattern_counts[keys] += 1
        known = full_masks_seen.setdefault(keys, set())
        if pattern_counts[keys] <= KEPT_PER_PATTERN or (
            len(known) <= KEPT_MASK_SETS and _full_masks(sample) not in known
        ):
            kept.add(i)
            known.add(_full_masks(sample))
        met = flags_seen.setdefault(keys, set())
        if i not in kept and _has_new_flag(sample, met) and kept_for_flags[keys] < KEPT_FLAG_SAMPLES:
            kept.add(i)
            kept_for_flags[keys] += 1
        flags[i] = flags_of(sample)
        met |= flags[i]
        samples[i] = sample if i in kept else _drop_data(sample)
    if not samples:
        raise UserError(
            f"none of the {len(skipped)} samples that were drawn loads",
            user.sources()[0].place,
            skipped[0],
        )
    if not has_collate:
        user.fit_default_collate(list(samples.values()))
        shapes = {i: _batch_shapes(user.collate_shapes([s])) for i, s in samples.items()}
    for i in sorted(kept)[:_REPEATED_SAMPLES]:
        user.require_same_sample(i, samples[i], seed)
    all_keys = frozenset[str]().union(*shapes.values())
    required = all_keys.intersection(*shapes.values())
    user.check_batch_keys(all_keys, required)
    drawn = (
        DrawnSample(
            i,
            shapes[i],
            frozenset(shapes[i]) - required,
            samples[i] if i in kept else None,
            flags=flags[i],
        )
        for i in samples
    )
    return DatasetSurvey(tuple(drawn), required, all_keys - required, skipped_samples=tuple(skipped))


def _choose_indices(user: UserModel, count: int, seed: int) -> list[int]:
    """Returns the indices to draw. `sizes(i)` finds patterns that random draws would miss."""
    chosen = user.survey_ids(count, seed)
    if not user.defines("sizes"):
        return chosen
    length = len(user.dataset())
    asked = min(length, MAX_SCANNED_SAMPLES)
    by_keys: dict[frozenset[str], list[int]] = {}
    for i in sorted({k * length // asked for k in range(asked)} | set(chosen)):
        by_keys.setdefault(frozenset(user.declared_sizes(i) or ()), []).append(i)
    rare = [
        i
        for indices in by_keys.values()
        if len(set(indices) & set(chosen)) < RARE_PATTERN_SAMPLES
        for i in indices[:RARE_PATTERN_SAMPLES]
    ][:count]
    return sorted(rare + [i for i in chosen if i not in rare][: count - len(rare)])


def _full_masks(sample: Sample) -> frozenset[str]:
    """Returns the keys of integer tensors that are all ones: models often take another path if all masks
    of a batch are full."""
    tensors = {
        k: v
        for k, v in sample.items()
        if isinstance(v, torch.Tensor) and v.numel() and not v.is_floating_point()
    }
    return frozenset(k for k, v in tensors.items() if not v.is_complex() and bool((v == 1).all()))


def _has_new_flag(sample: Sample, met: Collection[Flag]) -> bool:
    """Whether a sample has a flag that others lack, of a key with few values."""
    counts = Counter(key for key, _ in met)
    return any(flag not in met and counts[flag[0]] < MAX_FLAG_VALUES for flag in flags_of(sample))


def _drop_data(sample: Sample) -> Sample:
    """Returns the sample without its data: shapes of many samples are needed, but their images would fill
    the memory."""
    return {
        key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in sample.items()
    }


def _batch_shapes(batch: Mapping[str, Any]) -> KeyShapes:
    return {
        key: tuple(value.shape) if isinstance(value, torch.Tensor) else () for key, value in batch.items()
    }
