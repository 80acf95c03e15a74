"""Choices that the user pins: `NAME.dp=2`, `NAME.micro_batch=4`, `NAME.with=OTHER`. What cannot be done is
refused with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from secc.errors import UserError

PIN_KEYS = (
    "dp",
    "micro_batch",
    "with",
    "tp",
    "pp",
    "sharding",
    "recompute",
    "backward",
    "norms",
    "micro_tokens",
)
PIN_WORDS = {
    "sharding": ("none", "zero1", "zero2", "zero3"),
    "recompute": ("none", "selective", "full"),
    "backward": ("whole", "split"),
    "norms": ("whole", "sequence"),
}  # in the order of preference among equals


@dataclass(frozen=True)
class Pins:
    """Pinned choices by section, numbers and words, and the pairs of sections that share devices.

    `refused` holds choices that a later pass could not carry out, NAME.KEY=VALUE, or NAME.KEY for all above
    1.
    """

    numbers: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    together: tuple[tuple[str, str], ...] = ()
    refused: frozenset[str] = frozenset()

    def dp_choices(self, section: str, most: int, free: Iterable[int]) -> list[int]:
        """The replica counts to consider. Raises UserError for a pin above `most`."""
        pinned = self.pinned_number(section, "dp")
        if pinned is not None and pinned > most:
            raise UserError(
                f"{section}.dp={pinned} is impossible: there are ranks and samples for at most {most}",
                remedy=f"set {section}.dp to at most {most}, or give more ranks and a larger global batch",
            )
        return self.number_choices(section, "dp", free)

    def micro_batch_choices(self, section: str, most: int) -> list[int]:
        """The micro-batch sizes to consider for `most` samples on a replica: powers of two, and all of them
        at once."""
        pinned = self.pinned_number(section, "micro_batch")
        if pinned is not None:
            return [pinned]
        sizes = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
        return sorted({*sizes, most})

    def pinned_number(self, section: str, key: str) -> int | None:
        """The number that is pinned, None if none is."""
        return self.numbers.get(section, {}).get(key)

    def number_choices(self, section: str, key: str, free: Iterable[int]) -> list[int]:
        """The pinned number, or those of `free` that were not refused."""
        pinned = self.pinned_number(section, key)
        if pinned is not None:
            return [pinned]
        key = f"{section}.{key}"
        return [n for n in free if f"{key}={n}" not in self.refused and (n == 1 or key not in self.refused)]

    def splits_backward(self, section: str) -> bool:
        """Whether a section's stages run their backward in two parts. Raises UserError for a section without
        stages, or cut by tp."""
        asked = self.words.get(section, {}).get("backward") == "split"
        tp, pp = self.pinned_number(section, "tp") or 1, self.pinned_number(section, "pp") or 1
        if asked and (pp == 1 or tp > 1):
            reason = "only stages wait for the first part" if pp == 1 else "its ranks cannot split it alike"
            raise UserError(
                f"{section}.backward=split is impossible: {reason}",
                remedy=f"set {section}.pp above 1 without tp, or leave it out",
            )
        return asked

    def splits_sequence(self, section: str) -> bool:
        """Whether norms of a section work on parts of the sequence. Raises UserError for a section that no tp
        cuts."""
        asked = self.words.get(section, {}).get("norms") == "sequence"
        if asked and (self.pinned_number(section, "tp") or 1) == 1:
            message = f"{section}.norms=sequence is impossible: only ranks of a tensor-parallel replica share a sequence"
            raise UserError(message, remedy=f"set {section}.tp above 1 too, or leave it out")
        return asked

    def word_choices(self, section: str, key: str) -> tuple[str, ...]:
        """The choices of `sharding` or `recompute` to consider."""
        pinned = self.words.get(section, {}).get(key)
        return PIN_WORDS[key] if pinned is None else (pinned,)

    @property
    def list_pins(self) -> list[tuple[str, str, int | str]]:
        """The pinned numbers and words: (section, key, value)."""
        return [
            (s, k, v)
            for table in (self.numbers, self.words)
            for s, found in table.items()
            for k, v in found.items()
        ]

    def without_pin(self, section: str, key: str) -> Pins:
        """The pins but one."""
        values = {
            s: {k: v for k, v in found.items() if (s, k) != (section, key)}
            for s, found in self.numbers.items()
        }
        words = {
            s: {k: v for k, v in found.items() if (s, k) != (section, key)} for s, found in self.words.items()
        }
        return Pins(values, words, self.together, self.refused)

    @property
    def as_text(self) -> str:
        """The pins as they are written, "" for none."""
        pins = [f"{s}.{k}={v}" for s, k, v in self.list_pins]
        return ", ".join(pins + [f"{a}.with={b}" for a, b in self.together])


def parse_pins(texts: Iterable[str], sections: Iterable[str], refused: Iterable[str] = ()) -> Pins:
    """Read pins. Raises UserError for a form, section, key or value that is not known or not possible."""
    names = list(sections)
    values: dict[str, dict[str, int]] = {}
    words: dict[str, dict[str, str]] = {}
    together: list[tuple[str, str]] = []
    for text in texts:
        section, key, value = _split_pin(text, names)
        if key == "with":
            if value not in names or value == section:
                raise UserError(
                    f"{text}: there is no other section {value!r}", remedy=f"sections are {', '.join(names)}"
                )
            together.append((section, value))
        elif key in PIN_WORDS:
            if value not in PIN_WORDS[key]:
                raise UserError(
                    f"{text}: there is no {key} {value!r}",
                    remedy=f"choose one of {', '.join(PIN_WORDS[key])}",
                )
            words.setdefault(section, {})[key] = value
        elif key == "micro_tokens":
            raise UserError(
                f"{text} is impossible: micro-batches are cut by samples", remedy=f"set {section}.micro_batch"
            )
        else:
            values.setdefault(section, {})[key] = _parse_count(text, value)
    return Pins(values, words, tuple(together), frozenset(refused))


def _split_pin(text: str, names: list[str]) -> tuple[str, str, str]:
    """NAME.KEY=VALUE; the name may have dots."""
    left, equals, value = text.partition("=")
    section, dot, key = left.rpartition(".")
    if not (equals and dot and value):
        raise UserError(
            f"cannot read the choice {text!r}", remedy="write NAME.KEY=VALUE, such as language_model.dp=2"
        )
    if section not in names:
        raise UserError(f"{text}: there is no section {section!r}", remedy=f"sections are {', '.join(names)}")
    if key not in PIN_KEYS:
        raise UserError(f"{text}: there is no choice {key!r}", remedy=f"choices are {', '.join(PIN_KEYS)}")
    return section, key, value


def _parse_count(text: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise UserError(f"{text}: {value!r} is not a whole number of at least 1", remedy="correct the number")
    return int(value)
