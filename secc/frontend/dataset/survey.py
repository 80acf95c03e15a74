"""Samples of a dataset, and small micro-batches composed of them that show how a model's forward depends
on sizes.

A survey tells the keys that all samples have from optional ones; the optional keys of a sample are its
*pattern*. For each pattern it composes micro-batches in which the number of samples, their lengths and
their rows vary independently, because a size that never varies cannot be told from a constant. Long token
sequences are cropped, so that a capture is quick.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch

from secc.runtime.model.default_collate import TEXT_KEY

Sample = dict[str, Any]
InputPattern = frozenset[str]
KeyShapes = Mapping[str, tuple[int, ...]]
Flag = tuple[str, int]  # a key and its value

# Samples that are kept in memory; of all others only shapes are.
KEPT_PER_PATTERN = 12
KEPT_MASK_SETS = 4  # further samples of a pattern, each with another set of full masks
KEPT_FLAG_SAMPLES = 4  # and further ones, each with a flag that the others lack
MAX_FLAG_VALUES = 4  # numbers of a sample with more values (labels, lengths) are no flags
BATCH_SAMPLE_COUNTS = (2, 3, 4, 5, 7)  # samples in the micro-batches of a pattern ...
LACKING_SAMPLE_COUNTS = (0, 1, 1, 2, 2)  # ... and how many of these lack some of the pattern's keys
FEW_LENGTHS = 3  # samples of fewer different lengths are cropped to further lengths
LONG_SEQUENCE = 96  # tokens: longer sequences are cropped
CROPPED_LENGTHS = (29, 43, 23, 37, 31)  # tokens of the longest sample of each micro-batch, after cropping
PLACEHOLDERS = 4  # equal tokens in a row that stand for patches of a picture or frames of a sound
# Place of each micro-batch between long (0) and short samples: lengths must not fall as counts rise.
BATCH_PLACES = (0, 3, 1, 4, 2)
MAX_UNION_PATTERNS = 16
MAX_UNITED_KEYS = 8  # all unions of up to this many optional keys are considered
# A sample with more entries of pictures, clips and sounds than this, and than twice its pattern's median, is
# left out of all micro-batches.
HEAVY_SAMPLE_ENTRIES = 1 << 20
HEAVY_MEDIAN_RATIO = 2


@dataclass(frozen=True)
class DrawnSample:
    """A sample of the survey: its dataset index, the shapes of `collate([sample])`, its pattern, and the
    sample itself if it was kept in memory. is_rare: it takes a path through forward that the samples kept
    first do not take. flags: its conditions and whole numbers."""

    index: int
    shapes: KeyShapes
    pattern: InputPattern
    sample: Sample | None
    is_rare: bool = False
    flags: frozenset[Flag] = frozenset()


@dataclass(frozen=True)
class DatasetSurvey:
    """The drawn samples and their keys.

    may_crop: whether micro-batches may hold samples with cropped or repeated token sequences.
    skipped_samples: a sentence for each sample that was left out because it does not load.
    """

    drawn_samples: tuple[DrawnSample, ...]
    required_keys: frozenset[str]
    optional_keys: frozenset[str]
    may_crop: bool = True
    skipped_samples: tuple[str, ...] = ()
    _composed: dict[tuple[InputPattern, bool, int], list[list[Sample]]] = field(
        default_factory=dict[tuple[InputPattern, bool, int], list[list[Sample]]],
        init=False,
        repr=False,
        compare=False,
    )  # micro-batches that callers asked for: several ask for the same

    @property
    def pattern_counts(self) -> Counter[InputPattern]:
        """How many of the drawn samples have each pattern."""
        return Counter(d.pattern for d in self.drawn_samples)

    @property
    def has_crops(self) -> bool:
        """Whether some micro-batch holds a sample that was shortened."""
        return self.may_crop and any(
            self._must_crop(pattern, self._covering_groups(pattern)) for pattern in self.pattern_counts
        )

    def without_crops(self) -> DatasetSurvey:
        """Returns the survey with the dataset's own samples only, for models that refuse cropped ones."""
        return replace(self, may_crop=False)

    def keep_samples(self, rare: Mapping[int, Sample]) -> DatasetSurvey:
        """Returns the survey with these samples, by index, kept too."""
        drawn = (
            replace(d, sample=rare[d.index], is_rare=True) if d.index in rare else d
            for d in self.drawn_samples
        )
        return replace(self, drawn_samples=tuple(drawn))

    def with_lighter_samples(self) -> DatasetSurvey:
        """Returns the survey with half of the kept samples of each pattern, those with few tokens and small
        pictures, but with two at least; the survey itself if it has no more."""
        light = {id(s) for p in self.pattern_counts for s in _lighter_half(self.samples_of(p))}
        if len(light) == sum(d.sample is not None for d in self.drawn_samples):
            return self
        drawn = (d if id(d.sample) in light else replace(d, sample=None) for d in self.drawn_samples)
        return replace(self, drawn_samples=tuple(drawn))

    def rare_samples(self, pattern: InputPattern) -> list[Sample]:
        """Returns the samples that were kept for the path that they take and that a micro-batch of this
        pattern may hold."""
        return [d.sample for d in self.drawn_samples if d.is_rare and d.pattern <= pattern and d.sample]

    def flagged_samples(self, pattern: InputPattern) -> list[Sample]:
        """Returns kept samples of a pattern, short ones, such that each flag (a condition that is dropped,
        one of few tasks) comes with a sample that the last micro-batch of the pattern and these pad."""
        kept, batch = self.kept_samples(pattern), self.compose_batches(pattern)[-1]
        must_crop = self._must_crop(pattern, self._covering_groups(pattern))
        counts = Counter(key for key, _ in frozenset[Flag]().union(*map(flags_of, kept)))
        longest = max(map(sequence_length, batch))
        met = frozenset[Flag]().union(*(flags_of(s) for s in batch if sequence_length(s) < longest))
        found = list[Sample]()
        for sample in sorted(kept, key=sequence_length):
            unmet = {flag for flag in flags_of(sample) if counts[flag[0]] <= MAX_FLAG_VALUES} - met
            if unmet and len(found) < KEPT_FLAG_SAMPLES:
                found.append(_crop_sample(sample, max(BATCH_PLACES), len(found)) if must_crop else sample)
                met |= unmet
        if not must_crop and any(sequence_length(s) >= longest for s in found):
            found += [s for s in _sort_by_length(kept)[:1] if sequence_length(s) > longest]
        return found

    def samples_of(self, pattern: InputPattern) -> list[Sample]:
        """Returns the kept samples of exactly this pattern, in the dataset's order."""
        return [d.sample for d in self.drawn_samples if d.pattern == pattern and d.sample is not None]

    def micro_batch_patterns(self) -> list[InputPattern]:
        """Returns the patterns that a micro-batch can have, which are unions of samples' patterns.

        The observed ones come first, most frequent first; then at most MAX_UNION_PATTERNS further unions,
        small ones first.
        """
        observed = [
            p for p, _ in sorted(self.pattern_counts.items(), key=lambda item: (-item[1], sorted(item[0])))
        ]
        closed = set(observed)
        for pattern in observed:
            if len(closed) < 2**MAX_UNITED_KEYS:
                closed |= {pattern | other for other in closed}
        others = sorted(closed - set(observed), key=lambda p: (len(p), sorted(p)))
        return observed + others[:MAX_UNION_PATTERNS]

    def compose_batches(
        self, pattern: InputPattern, even: bool = False, rotation: int = 0, of: Sample | None = None
    ) -> list[list[Sample]]:
        """Composes micro-batches of a pattern with 2, 3, 4, 5 and 7 samples, with lengths and rows as
        different as the samples allow.

        even: all samples of a micro-batch have one length, so that nothing is padded. rotation: another
        number gives other samples to each micro-batch. of: stands for all samples of its pattern. Raises
        ValueError if no samples unite to the pattern.
        """
        asked = (pattern, even, rotation)
        if of is None and asked in self._composed:
            return [list(batch) for batch in self._composed[asked]]
        cover, lacking_patterns = self._covering_groups(pattern), self._lacking_patterns(pattern)
        cover = [[of] if of is not None and any(s is of for s in group) else group for group in cover]
        must_crop = self._must_crop(pattern, cover)
        batches: list[list[Sample]] = []
        for k, count in enumerate(BATCH_SAMPLE_COUNTS):
            lacking = _sort_by_length(self.samples_of(lacking_patterns[k])) if lacking_patterns else []
            lacking_count = max(0, min(LACKING_SAMPLE_COUNTS[k], count - len(cover))) if lacking else 0
            place = BATCH_PLACES[(k + rotation) % len(BATCH_PLACES)]
            of_small_samples = place == max(BATCH_PLACES)
            groups = [sort_by_volume(g) if of_small_samples else g for g in cover]
            samples = _pick_samples(
                groups, max(count - lacking_count, len(cover)), 0 if of_small_samples else place
            ) + _pick_samples([lacking], lacking_count, place)
            if must_crop:
                samples = [_crop_sample(s, place, n) for n, s in enumerate(samples)]
            batches.append(_equalize_lengths(samples, self.may_crop) if even else samples)
        if of is None:
            self._composed[asked] = [list(batch) for batch in batches]
        return batches

    def lightest_samples(self, pattern: InputPattern) -> list[Sample]:
        """Returns few samples that together have the pattern, those with the smallest pictures and the
        fewest tokens. If sequences may be cropped, they lose what follows their placeholders and the first
        labels."""
        lightest = [
            min(group, key=lambda s: (sample_volume(s), sequence_length(s)))
            for group in self._covering_groups(pattern)
        ]
        return [_drop_last_tokens(s) for s in lightest] if self.may_crop else lightest

    def kept_samples(self, pattern: InputPattern) -> list[Sample]:
        """Returns the kept samples that micro-batches of a pattern are composed of."""
        return [sample for group in self._covering_groups(pattern) for sample in group]

    def _covering_groups(self, pattern: InputPattern) -> list[list[Sample]]:
        """Returns groups of samples, longest first; one sample of each group together have the pattern."""
        own = _drop_heavy(self.samples_of(pattern))
        if own:
            return [_sort_by_length(own)]
        parts, covered = [], frozenset[str]()
        for part in sorted(
            (p for p in self.pattern_counts if p <= pattern), key=lambda p: (-len(p), sorted(p))
        ):
            if not part <= covered:
                parts.append(_sort_by_length(_drop_heavy(self.samples_of(part))))
                covered |= part
        if covered != pattern:
            raise ValueError(f"no samples unite to the pattern {sorted(pattern)}")
        return parts

    def _lacking_patterns(self, pattern: InputPattern) -> list[InputPattern]:
        """Returns, for each micro-batch, the pattern of its samples that lack some keys; [] if no sample
        lacks any.

        A key that every sample has exactly one row of would look like the number of samples, and two such
        keys would look like each other. So each pattern is chosen to tell apart most of the keys that were
        equally frequent so far.
        """
        smaller = [
            p
            for p, _ in sorted(self.pattern_counts.items(), key=lambda item: (-item[1], sorted(item[0])))
            if p < pattern
        ]
        pairs = list(combinations([*sorted(pattern), ""], 2))  # "" stands for what every sample has
        equal_pairs, patterns = set(pairs), list[InputPattern]()
        while smaller and len(patterns) < len(BATCH_SAMPLE_COUNTS):
            if not LACKING_SAMPLE_COUNTS[len(patterns)]:
                patterns.append(smaller[0])
                continue
            patterns.append(max(smaller, key=lambda p: sum(_tells_apart(p, pair) for pair in equal_pairs)))
            equal_pairs = {pair for pair in equal_pairs if not _tells_apart(patterns[-1], pair)} or set(pairs)
        return patterns

    def _must_crop(self, pattern: InputPattern, cover: Sequence[Sequence[Sample]]) -> bool:
        """Whether sequences have to be cropped: they are long, or of so few lengths that whatever depends
        on a length would look constant."""
        kept = [s for p in self.pattern_counts if p <= pattern for s in self.samples_of(p)]
        lengths = {sequence_length(s) for group in cover for s in group} - {0}
        plain_long = any(sequence_length(s) > LONG_SEQUENCE and _has_only_sequences(s) for s in kept)
        return self.may_crop and bool(lengths) and (len(lengths) < FEW_LENGTHS or plain_long)


def flags_of(sample: Sample) -> frozenset[Flag]:
    """Returns the conditions and whole numbers of a sample, and which of its integer tensors are all zeros,
    with their keys: code may choose by them (`torch.where(drop[:, None], null, x)`)."""
    found = set[Flag]()
    for key, value in sample.items():
        if isinstance(value, (bool, int)):
            found.add((key, int(value)))
        elif isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
            if value.numel() == 1:
                found.add((key, int(value)))
            elif value.numel() and not value.any():
                found.add((key, 0))
    return frozenset(found)


def _tells_apart(pattern: InputPattern, pair: tuple[str, str]) -> bool:
    """Whether samples of a pattern have one key of a pair but not the other."""
    return (pair[0] in pattern) != (pair[1] in pattern or not pair[1])


def sequence_length(sample: Mapping[str, Any]) -> int:
    """Returns the length of a sample's token sequence: `input_ids`, else its first 1-D key of integers; 0
    without one."""
    return next(iter(_token_sequences(sample).values()), 0)


def _token_sequences(sample: Mapping[str, Any]) -> dict[str, int]:
    """Returns the lengths of the token sequence, first, and of the keys that run along with it (labels,
    masks)."""
    return next(iter(_sequences_by_length(sample)), {})


def _sequences_by_length(sample: Mapping[str, Any]) -> list[dict[str, int]]:
    """Returns the keys of 1-D values, those of one length together, with that length: first those that run
    along with the token sequence. Lengths that only floats have are left out."""
    vectors = {key: (n, integral) for key, value in sample.items() for n, integral in _vector_length(value)}
    integers = [key for key, (_, integral) in vectors.items() if integral]
    found = dict[int, dict[str, int]]()
    for key in sorted(integers, key=lambda key: key != TEXT_KEY):
        size = vectors[key][0]
        if size not in found:
            found[size] = {key: size} | {other: n for other, (n, _) in vectors.items() if n == size}
    return list(found.values())


def _vector_length(value: Any) -> Iterator[tuple[int, bool]]:
    """Yields (length, whether of integers) of a 1-D tensor, array or list of numbers; nothing for other
    values."""
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(v, (int, float)) for v in value):
            yield len(value), all(isinstance(v, int) for v in value)
    elif getattr(value, "ndim", None) == 1:
        dtype = str(value.dtype)
        yield len(value), "int" in dtype


def _has_only_sequences(sample: Mapping[str, Any]) -> bool:
    """Whether a sample has only sequences and numbers, so that any window of its tokens will do. Tokens may
    belong to the entries of a list of tensors (a ranking of answers)."""
    return not any(getattr(v, "ndim", 0) > 1 or _is_nested(v) for v in sample.values())


def _is_nested(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(hasattr(v, "ndim") or isinstance(v, (list, tuple, Mapping)) for v in value)
    return isinstance(value, Mapping)


def _crop_sample(sample: Sample, k: int, n: int) -> Sample:
    """Shortens sample n of the micro-batch at place k: to a few tokens if it has sequences only, each of its
    long sequences (two answers, a document and its summary) by itself; else by a few tokens at its end.

    Placeholders of images and sounds mostly come first and must stay. The window of a sample with
    sequences only holds a position that counts.
    """
    size = sequence_length(sample)
    if size < 2:
        return sample
    if not _has_only_sequences(sample):
        return _take_window(sample, _token_sequences(sample), 0, max(size - k - n % 3, 1 + size // 2))
    sequences, *others = _sequences_by_length(sample)
    places = [(sequences, k, n % 5)]
    long_ones = (keys for keys in others if max(keys.values()) > LONG_SEQUENCE)
    places += [(keys, k + 2 * i, (i + 2 * n) % 5) for i, keys in enumerate(long_ones, 1)]
    for keys, place, less in places:
        sample = _take_short_window(sample, keys, place % len(CROPPED_LENGTHS), less)
    return sample


def _drop_last_tokens(sample: Sample) -> Sample:
    """Shortens a sample to a few tokens if it has sequences only; else to those up to its last placeholders
    and the first position that counts, and a few more."""
    keys = _token_sequences(sample)
    if _has_only_sequences(sample) or not keys:
        return _crop_sample(sample, 0, 0)
    tokens = torch.as_tensor(sample[next(iter(keys))])
    if len(tokens) <= PLACEHOLDERS:
        return sample
    repeated = (tokens[1:] == tokens[:-1]).unfold(0, PLACEHOLDERS - 1, 1).all(-1).nonzero()
    end = int(repeated[-1]) + PLACEHOLDERS if len(repeated) else 0
    kept = max(end, _first_counted(sample, keys)) + min(CROPPED_LENGTHS)
    return _take_window(sample, keys, 0, min(kept, len(tokens)))


def _take_short_window(sample: Sample, keys: Mapping[str, int], k: int, less: int) -> Sample:
    """Crops the sequences `keys` of one length to the length at place k, `less` positions shorter."""
    size = max(keys.values())
    is_long = size > max(CROPPED_LENGTHS) + len(CROPPED_LENGTHS)
    wanted = max((CROPPED_LENGTHS[k] if is_long else size - k) - less, 2)
    return _take_window(sample, keys, max(min(_first_counted(sample, keys) - 2, size - wanted), 0), wanted)


def _first_counted(sample: Sample, keys: Iterable[str]) -> int:
    """Returns the first position at which all labels and masks among the sequences `keys` count: labels other
    than -100, masks of zeros and ones that are not zero."""
    first = 0
    for key in keys:
        values = torch.as_tensor(sample[key])
        is_mask = bool(((values == 0) | (values == 1)).all())
        counted = (values != 0 if is_mask else values != -100).nonzero()
        first = max(first, int(counted[0]) if len(counted) else 0)
    return first


def _take_window(sample: Sample, keys: Mapping[str, int], start: int, size: int) -> Sample:
    """Takes `size` entries of the sequences `keys` of one length, from `start` on, wrapping around."""
    length = max(keys.values())
    index = [(start + i) % length for i in range(size)]
    windows = {
        key: [sample[key][i] for i in index] if isinstance(sample[key], (list, tuple)) else sample[key][index]
        for key in keys
    }
    return {key: windows.get(key, value) for key, value in sample.items()}


def _equalize_lengths(samples: list[Sample], resize: bool) -> list[Sample]:
    """Gives all samples the first one's length: samples with sequences only are resized if `resize`,
    others are replaced by the first."""
    size = sequence_length(samples[0])

    def fit_length(sample: Sample) -> Sample:
        if sequence_length(sample) == size:
            return sample
        return (
            _take_window(sample, _token_sequences(sample), 0, size)
            if resize and size and sequence_length(sample) and _has_only_sequences(sample)
            else samples[0]
        )

    return [fit_length(s) for s in samples]


def _pick_samples(groups: list[list[Sample]], count: int, k: int) -> list[Sample]:
    """Picks `count` samples, from each group in turn; `k` shifts the start in each group, so that
    micro-batches differ."""
    picked: list[Sample] = []
    for i in range(count):
        group = groups[i % len(groups)]
        tail = _order_unlike_first(group[k * len(group) // len(BATCH_SAMPLE_COUNTS) :])
        picked.append(tail[(i // len(groups)) % len(tail)])
    return picked


def _order_unlike_first(samples: list[Sample]) -> list[Sample]:
    """Orders samples such that each length comes once before any comes twice: equal lengths would leave
    nothing to pad."""
    seen: Counter[int] = Counter()
    ranked: list[tuple[int, int]] = []
    for n, sample in enumerate(samples):
        ranked.append((seen[sequence_length(sample)], n))
        seen[sequence_length(sample)] += 1
    return [samples[n] for _, n in sorted(ranked)]


def _sort_by_length(samples: Sequence[Sample]) -> list[Sample]:
    return sorted(samples, key=sequence_length, reverse=True)


def sort_by_volume(samples: Sequence[Sample]) -> list[Sample]:
    """Sorts samples by `sample_volume`, smallest first, so that one micro-batch has small clips and images
    only."""
    return sorted(samples, key=sample_volume)


def sample_volume(sample: Sample) -> int:
    """Returns the number of entries of a sample's tensors other than its sequences of tokens: pictures,
    clips, sounds."""
    tensors = [v for v in sample.values() if isinstance(v, torch.Tensor)]
    return sum(v.numel() for v in tensors if v.ndim > 1 or (v.ndim and v.is_floating_point()))


def _lighter_half(samples: list[Sample]) -> list[Sample]:
    """Returns the half of the samples, or two, that come first by length and volume together."""
    lengths, volumes = sorted(map(sequence_length, samples)), sorted(map(sample_volume, samples))

    def find_place(sample: Sample) -> int:
        return lengths.index(sequence_length(sample)) + volumes.index(sample_volume(sample))

    return sorted(samples, key=find_place)[: max(2, len(samples) // 2)]


def _drop_heavy(samples: list[Sample]) -> list[Sample]:
    """Drops samples with far more entries than others: image encoders loop over windows of a large
    picture, thousands of times in a capture."""
    most = (
        max(
            HEAVY_SAMPLE_ENTRIES,
            HEAVY_MEDIAN_RATIO * sample_volume(sort_by_volume(samples)[len(samples) // 2]),
        )
        if samples
        else 0
    )
    return [s for s in samples if sample_volume(s) <= most]
