"""What a dataset's samples look like, and small micro-batches that show how a model's forward depends on
sizes.

A survey draws some samples, tells the keys that all have from those that some lack (the optional ones make a
sample's *pattern*), and composes micro-batches for each pattern in which the number of samples, their lengths
and their rows move independently, because what never moves cannot be told from a constant. Long token
sequences are cropped, so that a capture is quick.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch

from secc.runtime.model.default_collate import TEXT_KEY

Sample = dict[str, Any]
InputPattern = frozenset[str]
KeyShapes = Mapping[str, tuple[int, ...]]

# samples of one pattern that are held in memory, and those of MORE_KEPT other sets of full masks; of the
# others only shapes
KEPT_PER_PATTERN = 12
KEPT_MASK_SETS = 4
BATCH_SAMPLE_COUNTS = (2, 3, 4, 5, 7)  # samples in the micro-batches of a pattern ...
LACKING_SAMPLE_COUNTS = (
    0,
    1,
    1,
    2,
    2,
)  # ... of which so many lack some of the pattern's keys, where there are such samples
FEW_LENGTHS = 3  # lengths of a pattern's samples: with fewer they are cropped to others
LONG_SEQUENCE = 96  # tokens: longer sequences are cropped
CROPPED_LENGTHS = (29, 43, 23, 37, 31)  # tokens of the longest sample of each micro-batch, after cropping
BATCH_PLACES = (
    0,
    3,
    1,
    4,
    2,
)  # of each micro-batch among long and short samples: lengths must not fall as counts rise
MAX_UNION_PATTERNS = 16
MAX_UNITED_KEYS = 8  # of that many keys all unions are considered
HEAVY_SAMPLE_ENTRIES = (
    1 << 20
    # entries of a sample's pictures, clips and sounds: one that has more, and far more than others, is in no
    # micro-batch
)
HEAVY_MEDIAN_RATIO = 2  # times the median of its pattern


@dataclass(frozen=True)
class DrawnSample:
    """A sample of the survey: its number, the shapes of `collate([sample])`, its pattern, and the sample
    itself if it was kept."""

    index: int
    shapes: KeyShapes
    pattern: InputPattern
    sample: Sample | None


@dataclass(frozen=True)
class DatasetSurvey:
    """What was found. `crop` says whether micro-batches may hold samples whose token sequences were cropped
    or repeated.

    `skipped` says of samples that do not load why they were left out.
    """

    drawn_samples: tuple[DrawnSample, ...]
    required_keys: frozenset[str]
    optional_keys: frozenset[str]
    may_crop: bool = True
    skipped_samples: tuple[str, ...] = ()

    @property
    def pattern_counts(self) -> Counter[InputPattern]:
        """How many of the drawn samples have each pattern."""
        return Counter(d.pattern for d in self.drawn_samples)

    @property
    def has_crops(self) -> bool:
        """Whether some micro-batch holds a sample that the dataset does not."""
        return self.may_crop and any(
            self._must_crop(pattern, self._covering_groups(pattern)) for pattern in self.pattern_counts
        )

    def without_crops(self) -> DatasetSurvey:
        """The same survey with the dataset's own samples only, for models that refuse cropped ones."""
        return replace(self, may_crop=False)

    def samples_of(self, pattern: InputPattern) -> list[Sample]:
        """The kept samples of exactly this pattern, in the dataset's order."""
        return [d.sample for d in self.drawn_samples if d.pattern == pattern and d.sample is not None]

    def micro_batch_patterns(self) -> list[InputPattern]:
        """The patterns that a micro-batch can have, which are unions of samples' patterns: the observed ones
        first, most frequent first, then small ones before large ones, at most 16 beside the observed."""
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
        self, pattern: InputPattern, even: bool = False, turn: int = 0, of: Sample | None = None
    ) -> list[list[Sample]]:
        """Micro-batches of a pattern with 2, 3, 4, 5 and 7 samples, of lengths and rows as different as the
        samples allow.

        With `even`, all samples of a micro-batch have one length, so that nothing is padded. Another `turn`
        gives other samples to each. `of`: this sample stands for all with its pattern. Raises ValueError for
        a pattern that no samples of the survey unite to.
        """
        cover, tellers = self._covering_groups(pattern), self._lacking_patterns(pattern)
        cover = [[of] if of is not None and any(s is of for s in group) else group for group in cover]
        cut = self._must_crop(pattern, cover)
        batches: list[list[Sample]] = []
        for k, count in enumerate(BATCH_SAMPLE_COUNTS):
            lacking = _sort_by_length(self.samples_of(tellers[k])) if tellers else []
            few = max(0, min(LACKING_SAMPLE_COUNTS[k], count - len(cover))) if lacking else 0
            place = BATCH_PLACES[(k + turn) % len(BATCH_PLACES)]
            small = place == max(BATCH_PLACES)
            groups = [sort_by_volume(g) if small else g for g in cover]
            samples = _pick_samples(
                groups, max(count - few, len(cover)), 0 if small else place
            ) + _pick_samples([lacking], few, place)
            if cut:
                samples = [_crop_sample(s, place, n) for n, s in enumerate(samples)]
            batches.append(_equalize_lengths(samples, self.may_crop) if even else samples)
        return batches

    def kept_samples(self, pattern: InputPattern) -> list[Sample]:
        """The kept samples that micro-batches of a pattern are made of."""
        return [sample for group in self._covering_groups(pattern) for sample in group]

    def _covering_groups(self, pattern: InputPattern) -> list[list[Sample]]:
        """Groups of samples, longest first; one of each group together have the pattern."""
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
        """For each micro-batch the pattern of those samples in it that lack something.

        Each tells apart most of those keys that as many samples had in the micro-batches before: what always
        has one row for each sample would look like the number of samples, and like each other. None if no
        sample lacks anything.
        """
        smaller = [
            p
            for p, _ in sorted(self.pattern_counts.items(), key=lambda item: (-item[1], sorted(item[0])))
            if p < pattern
        ]
        pairs = list(combinations([*sorted(pattern), ""], 2))  # "" stands for what every sample has
        alike, found = set(pairs), list[InputPattern]()
        while smaller and len(found) < len(BATCH_SAMPLE_COUNTS):
            if not LACKING_SAMPLE_COUNTS[len(found)]:
                found.append(smaller[0])
                continue
            found.append(max(smaller, key=lambda p: sum(_tells_apart(p, pair) for pair in alike)))
            alike = {pair for pair in alike if not _tells_apart(found[-1], pair)} or set(pairs)
        return found

    def _must_crop(self, pattern: InputPattern, cover: Sequence[Sequence[Sample]]) -> bool:
        """Crop where sequences are long, or of so few lengths that what depends on them, or on what they
        hold, would look constant."""
        kept = [s for p in self.pattern_counts if p <= pattern for s in self.samples_of(p)]
        lengths = {sequence_length(s) for group in cover for s in group} - {0}
        plain_long = any(sequence_length(s) > LONG_SEQUENCE and _has_only_sequences(s) for s in kept)
        return self.may_crop and bool(lengths) and (len(lengths) < FEW_LENGTHS or plain_long)


def _tells_apart(pattern: InputPattern, pair: tuple[str, str]) -> bool:
    """Whether samples of a pattern have one key of a pair but not the other."""
    return (pair[0] in pattern) != (pair[1] in pattern or not pair[1])


def sequence_length(sample: Mapping[str, Any]) -> int:
    """The number of entries of a sample's token sequence: `input_ids`, else its first 1-D key of integers; 0
    without one."""
    return next(iter(_token_sequences(sample).values()), 0)


def _token_sequences(sample: Mapping[str, Any]) -> dict[str, int]:
    """The keys of the token sequence, the leading one first, and of what runs beside it (labels, masks), each
    with its length."""
    vectors = {key: (n, integral) for key, value in sample.items() for n, integral in _vector_length(value)}
    tokens = (
        [TEXT_KEY]
        if vectors.get(TEXT_KEY, (0, False))[1]
        else [key for key, (_, integral) in vectors.items() if integral]
    )
    if not tokens:
        return {}
    size = vectors[tokens[0]][0]
    return {tokens[0]: size} | {key: n for key, (n, _) in vectors.items() if n == size}


def _vector_length(value: Any) -> Iterator[tuple[int, bool]]:
    """(length, whether of integers) of a 1-D tensor, array or list of numbers; nothing for anything else."""
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(v, (int, float)) for v in value):
            yield len(value), all(isinstance(v, int) for v in value)
    elif getattr(value, "ndim", None) == 1:
        dtype = str(value.dtype)
        yield len(value), "int" in dtype


def _has_only_sequences(sample: Mapping[str, Any]) -> bool:
    """Whether a sample has nothing but sequences and numbers, so that any window of its tokens is as good as
    another."""
    return all(getattr(v, "ndim", 0) <= 1 for v in sample.values())


def _crop_sample(sample: Sample, k: int, n: int) -> Sample:
    """Sample n of the micro-batch at place k, shorter: to a few tokens if it is plain, else by a few tokens
    at its end.

    Placeholders of images and sounds mostly come first, and must stay. The window of a plain sample holds a
    label that counts.
    """
    size = sequence_length(sample)
    if size < 2:
        return sample
    if not _has_only_sequences(sample):
        return _take_window(sample, 0, max(size - k - n % 3, 1 + size // 2))
    wanted = max(
        (CROPPED_LENGTHS[k] if size > max(CROPPED_LENGTHS) + len(CROPPED_LENGTHS) else size - k) - n % 5, 2
    )
    return _take_window(sample, max(min(_first_label(sample) - 2, size - wanted), 0), wanted)


def _first_label(sample: Sample) -> int:
    labels = sample.get("labels")
    if labels is None or "labels" not in _token_sequences(sample):
        return 0
    counted = (torch.as_tensor(labels) != -100).nonzero()
    return int(counted[0]) if len(counted) else 0


def _take_window(sample: Sample, start: int, size: int) -> Sample:
    """`size` entries of the token sequence and of what runs beside it, from `start` on, over again where it
    ends."""
    keys, whole = _token_sequences(sample), sequence_length(sample)
    index = [(start + i) % whole for i in range(size)]
    cut = {
        key: [sample[key][i] for i in index] if isinstance(sample[key], (list, tuple)) else sample[key][index]
        for key in keys
    }
    return {key: cut.get(key, value) for key, value in sample.items()}


def _equalize_lengths(samples: list[Sample], resize: bool) -> list[Sample]:
    """Samples of the first one's length: plain ones resized if that is allowed, in place of others of another
    length the first again."""
    size = sequence_length(samples[0])

    def fit(sample: Sample) -> Sample:
        if sequence_length(sample) == size:
            return sample
        return (
            _take_window(sample, 0, size)
            if resize and size and sequence_length(sample) and _has_only_sequences(sample)
            else samples[0]
        )

    return [fit(s) for s in samples]


def _pick_samples(groups: list[list[Sample]], count: int, k: int) -> list[Sample]:
    """`count` samples, from each group in turn; group lists start at another place for each k, so that
    micro-batches differ."""
    picked: list[Sample] = []
    for i in range(count):
        group = groups[i % len(groups)]
        tail = _order_unlike_first(group[k * len(group) // len(BATCH_SAMPLE_COUNTS) :])
        picked.append(tail[(i // len(groups)) % len(tail)])
    return picked


def _order_unlike_first(samples: list[Sample]) -> list[Sample]:
    """The same samples, one of each length before the second of any: two samples of one length would leave
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
    """Those with the fewest entries beside the token sequence first: in one micro-batch every clip and image
    is a small one."""
    return sorted(samples, key=sample_volume)


def sample_volume(sample: Sample) -> int:
    """The entries of a sample's tensors beside its sequences: pictures, clips, sounds."""
    return sum(v.numel() for v in sample.values() if isinstance(v, torch.Tensor) and v.ndim > 1)


def _drop_heavy(samples: list[Sample]) -> list[Sample]:
    """The samples without heavy ones: towers loop over windows of pictures, which a capture of twenty large
    ones has by the thousand."""
    most = (
        max(
            HEAVY_SAMPLE_ENTRIES,
            HEAVY_MEDIAN_RATIO * sample_volume(sort_by_volume(samples)[len(samples) // 2]),
        )
        if samples
        else 0
    )
    return [s for s in samples if sample_volume(s) <= most]
