"""Reads the user's pinned choices: `NAME.dp=2`, `NAME.micro_batch=4`, `NAME.with=OTHER`. Impossible ones
raise UserError with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from secc.errors import UserError
from secc.runtime.plan.schema import OVERLAPS, PLACEMENTS

PIN_NUMBERS = ("dp", "micro_batch", "tp", "pp", "chunks", "cp", "ep", "micro_batch_tokens", "most_samples")
# Values of each key, in the order of preference among equals.
PIN_WORDS = {
    "sharding": ("none", "zero1", "zero2", "zero3"),
    "recompute": ("none", "selective", "full"),
    "backward": ("whole", "split"),
    "norms": ("whole", "sequence"),
    "attention": ("gather", "ulysses", "frames"),
    "cp_per": ("section", "micro_batch"),
    "cp_degrees": ("any", "one_or_all"),
    "offload": ("none", "optimizer", "weights", "activations"),
    "placement": PLACEMENTS,
    "overlap": OVERLAPS,
}
EXPERT_LOAD = "expert_load"
PIN_KEYS = (*PIN_NUMBERS, "with", *PIN_WORDS, EXPERT_LOAD)
MAX_EXPERT_LOAD = 4.0


@dataclass(frozen=True)
class Pins:
    """Pinned choices by section (numbers and words), pairs of sections that must share devices, and the
    exponents of Zipf's law for the loads of experts.

    `refused` holds choices that a later pass could not carry out: NAME.KEY=VALUE, or NAME.KEY for all values
    above 1.
    """

    numbers: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    together: tuple[tuple[str, str], ...] = ()
    refused: frozenset[str] = frozenset()
    expert_loads: Mapping[str, float] = field(default_factory=dict[str, float])

    def dp_choices(self, section: str, most: int, free: Iterable[int]) -> list[int]:
        """Replica counts to consider. Raises UserError for a pinned one above `most`."""
        pinned = self.pinned_number(section, "dp")
        if pinned is not None and pinned > most:
            own = self.numbers.get(section, {})
            others = [
                f"{section}.{key}={own[key]}" for key in ("tp", "pp", "cp", "ep") if own.get(key, 1) > 1
            ]
            given = f" with {' and '.join(others)}" if others else ""
            raise UserError(
                f"{section}.dp={pinned}{given} is impossible: there are ranks and samples for at most {most}",
                remedy=f"set {section}.dp to at most {most}, or give more ranks and a larger global batch",
            )
        return self.number_choices(section, "dp", free)

    def micro_batch_choices(self, section: str, most: int) -> list[int]:
        """Micro-batch sizes to consider for `most` samples on a replica: powers of two, and all samples at
        once."""
        pinned = self.pinned_number(section, "micro_batch")
        if pinned is not None:
            return [pinned]
        sizes = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
        return sorted({*sizes, most})

    def pinned_number(self, section: str, key: str) -> int | None:
        """The pinned number of a section for `key`, None if it is not pinned."""
        return self.numbers.get(section, {}).get(key)

    def number_choices(self, section: str, key: str, free: Iterable[int]) -> list[int]:
        """The pinned number alone, else those of `free` that were not refused."""
        pinned = self.pinned_number(section, key)
        if pinned is not None:
            return [pinned]
        key = f"{section}.{key}"
        return [n for n in free if f"{key}={n}" not in self.refused and (n == 1 or key not in self.refused)]

    def splits_backward(self, section: str) -> bool:
        """Whether a section's stages run backward in two parts: input gradients, then weight gradients
        (zero-bubble schedules).

        Raises UserError for a section that is not pinned to several stages.
        """
        asked = self.words.get(section, {}).get("backward") == "split"
        if asked and (self.pinned_number(section, "pp") or 1) == 1:
            raise UserError(
                f"{section}.backward=split is impossible: it needs several pipeline stages",
                remedy=f"set {section}.pp above 1, or leave it out",
            )
        return asked

    def interleaving(self, section: str) -> tuple[int, str] | None:
        """The pinned number of chunks of layers on a rank and their placement, None if neither is pinned. A
        pinned placement without a number means two chunks.

        Raises UserError for a section that is pinned to one stage or split by cp, and for the placement of
        one chunk.
        """
        chunks = self.pinned_number(section, "chunks")
        placement = self.words.get(section, {}).get("placement")
        if chunks is None and placement is None:
            return None
        wanted = f"{section}.chunks={chunks}" if chunks else f"{section}.placement={placement}"
        if chunks == 1 and placement == "v":
            raise UserError(
                f"{section}.placement=v is impossible with chunks=1: a V has two pieces of layers on a rank",
                remedy=f"set {section}.chunks=2, or leave {section}.chunks out",
            )
        if chunks != 1 and self.pinned_number(section, "pp") == 1:
            raise UserError(
                f"{wanted} is impossible: it needs several pipeline stages",
                remedy=f"set {section}.pp above 1, or leave it out",
            )
        return chunks or 2, placement or "loop"

    def deals_micro_batches(self, section: str) -> bool:
        """Whether a section's ranks of cp may each compute other samples of a micro-batch (dynamic cp)."""
        return self.words.get(section, {}).get("cp_per") == "micro_batch"

    def splits_sequence(self, section: str) -> bool:
        """Whether norms of a section work on slices of the sequence (sequence parallelism).

        Raises UserError for a section that is not pinned to a tp above 1.
        """
        asked = self.words.get(section, {}).get("norms") == "sequence"
        if asked and (self.pinned_number(section, "tp") or 1) == 1:
            message = (
                f"{section}.norms=sequence is impossible: "
                "only ranks of a tensor-parallel replica share a sequence"
            )
            raise UserError(message, remedy=f"set {section}.tp above 1 too, or leave it out")
        return asked

    def pinned_overlap(self, section: str) -> str:
        """Which sums over tp shall travel behind products, "" if it is not pinned.

        Raises UserError for a section that is pinned to one rank of tp.
        """
        asked = self.words.get(section, {}).get("overlap", "")
        if asked not in ("", "none") and self.pinned_number(section, "tp") == 1:
            message = f"{section}.overlap={asked} is impossible: with tp=1 there are no sums over ranks"
            raise UserError(message, remedy=f"set {section}.tp above 1, or leave it out")
        return asked

    def word_choices(self, section: str, key: str) -> tuple[str, ...]:
        """The values of `sharding` or `recompute` to consider."""
        pinned = self.words.get(section, {}).get(key)
        return PIN_WORDS[key] if pinned is None else (pinned,)

    @property
    def pinned_choices(self) -> list[tuple[str, str, int | str]]:
        """The pinned numbers and words as (section, key, value)."""
        return [
            (s, k, v)
            for table in (self.numbers, self.words)
            for s, found in table.items()
            for k, v in found.items()
        ]

    def without_pin(self, section: str, key: str) -> Pins:
        """Copy of the pins without one of them."""
        values = {
            s: {k: v for k, v in found.items() if (s, k) != (section, key)}
            for s, found in self.numbers.items()
        }
        words = {
            s: {k: v for k, v in found.items() if (s, k) != (section, key)} for s, found in self.words.items()
        }
        return Pins(values, words, self.together, self.refused, self.expert_loads)

    @property
    def as_text(self) -> str:
        """The pins as the user writes them, "" for none."""
        pins = [f"{s}.{k}={v}" for s, k, v in self.pinned_choices]
        pins += [f"{a}.with={b}" for a, b in self.together]
        return ", ".join(pins + [f"{s}.{EXPERT_LOAD}={n:g}" for s, n in self.expert_loads.items()])


def check_pins(texts: Iterable[str]) -> None:
    """Raises UserError for pins that are wrong whatever the sections are: an unknown form, key or value, or
    two values of one key of a section."""
    given: dict[str, str] = {}
    for text in texts:
        section, key, value = _split_pin(text)
        _parse_value(text, key, value)
        if key != "with" and (earlier := given.setdefault(f"{section}.{key}", text)) != text:
            raise UserError(f"{earlier} and {text} contradict each other", remedy="leave one of them out")


def named_sections(texts: Iterable[str]) -> dict[str, str]:
    """Returns the sections that pins name, each with the first pin that does."""
    found: dict[str, str] = {}
    for text in texts:
        section, key, value = _split_pin(text)
        found.setdefault(section, text)
        if key == "with":
            found.setdefault(value, text)
    return found


def parse_pins(texts: Iterable[str], sections: Iterable[str], refused: Iterable[str] = ()) -> Pins:
    """Parses pins of the form NAME.KEY=VALUE; the last value of a key counts. Raises UserError for an unknown
    form, section, key or value."""
    names = list(sections)
    values: dict[str, dict[str, int]] = {}
    words: dict[str, dict[str, str]] = {}
    together: list[tuple[str, str]] = []
    expert_loads: dict[str, float] = {}
    for text in texts:
        section, key, value = _split_pin(text)
        if section not in names:
            raise UserError(f"{text}: unknown section {section!r}", remedy=f"sections are {', '.join(names)}")
        parsed = _parse_value(text, key, value)
        if key == "with":
            if value not in names or value == section:
                others = ", ".join(name for name in names if name != section)
                raise UserError(
                    f"{text}: expected another section, got {value!r}",
                    remedy=f"choose one of {others}" if others else "leave it out: there is one section only",
                )
            together.append((section, value))
        elif isinstance(parsed, str):
            words.setdefault(section, {})[key] = parsed
        elif isinstance(parsed, int):
            values.setdefault(section, {})[key] = parsed
        else:
            expert_loads[section] = parsed
    return Pins(values, words, tuple(together), frozenset(refused), expert_loads)


def _split_pin(text: str) -> tuple[str, str, str]:
    """Splits NAME.KEY=VALUE into its three parts; the name may contain dots."""
    left, equals, value = text.partition("=")
    section, dot, key = left.rpartition(".")
    if not (equals and dot and section and value):
        raise UserError(
            f"expected a choice of the form SECTION.KEY=VALUE, got {text!r}",
            remedy="write for example language_model.dp=2",
        )
    if key not in PIN_KEYS:
        meant = _likely_choice(key, value)
        raise UserError(
            f"{text}: unknown key {key!r}",
            remedy=f"{f'write {section}.{meant}; ' if meant else ''}keys are {', '.join(PIN_KEYS)}",
        )
    return section, key, value


def _likely_choice(key: str, value: str) -> str:
    """Returns KEY=VALUE that the user may have meant by an unknown key, "" if there is none: zero=3 means
    sharding=zero3, checkpointing=full means recompute=full."""
    found = [(k, w) for k, words in PIN_WORDS.items() for w in words if w in (value, f"{key}{value}")]
    if len(found) == 1:
        return f"{found[0][0]}={found[0][1]}"
    return "".join(f"{k}={value}" for k in get_close_matches(key, PIN_KEYS, n=1))


def _parse_value(text: str, key: str, value: str) -> str | int | float:
    """Returns the value of a pin: a word, a count, or a float for the exponent of expert loads."""
    if key == EXPERT_LOAD:
        return _parse_exponent(text, value)
    if key == "with":
        return value
    if key not in PIN_WORDS:
        return _parse_count(text, value)
    if value not in PIN_WORDS[key]:
        raise UserError(
            f"{text}: unknown {key} {value!r}", remedy=f"choose one of {', '.join(PIN_WORDS[key])}"
        )
    return value


def _parse_exponent(text: str, value: str) -> float:
    try:
        exponent = float(value)
    except ValueError:
        exponent = -1.0
    if not 0 <= exponent <= MAX_EXPERT_LOAD:
        raise UserError(
            f"{text}: expected the exponent of Zipf's law, from 0 to {MAX_EXPERT_LOAD:g}, got {value!r}",
            remedy="give 0 for experts with equal loads, 0.3 for a router that was trained to balance them",
        )
    return exponent


def _parse_count(text: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise UserError(
            f"{text}: expected an integer of at least 1, got {value!r}",
            remedy=f"write for example {text.partition('=')[0]}=2",
        )
    return int(value)
