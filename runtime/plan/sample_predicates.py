"""Which samples a section is active for: predicates over the optional inputs of a sample.

A predicate is a sequence of terms. A sample needs one of them; no terms mean every sample. A term names the
optional inputs that a sample must have, joined by "&", with "!" before each that it must lack:
`pixel_values`, `pixel_values&mel`, `!pixel_values&!mel`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from secc.runtime.plan.schema import EACH_SUFFIX


def is_active(when: Sequence[str], pattern: Collection[str]) -> bool:
    """Returns whether a section with predicate `when` processes a sample with the optional inputs
    `pattern`."""
    return not when or any(term_holds(term, pattern) for term in when)


def term_holds(term: str, pattern: Collection[str]) -> bool:
    """Returns whether a sample with the optional inputs `pattern` fulfils a term."""
    having, lacking = split_term(term)
    return all(key in pattern for key in having) and not any(key in pattern for key in lacking)


def format_term(having: Iterable[str], lacking: Iterable[str]) -> str:
    """Returns the term of the samples that have some optional inputs and lack others."""
    return "&".join([*having, *(f"!{key}" for key in lacking)])


def split_term(term: str) -> tuple[list[str], list[str]]:
    """Returns the optional inputs that a sample must have, and those that it must lack."""
    literals = term.split("&")
    having = [literal for literal in literals if not literal.startswith("!")]
    return having, [literal.removeprefix("!") for literal in literals if literal.startswith("!")]


def inputs_of(when: Iterable[str]) -> list[str]:
    """Returns the optional inputs that a predicate asks about, each once."""
    return list(dict.fromkeys(key for term in when for keys in split_term(term) for key in keys))


def describe_pattern(keys: Iterable[str]) -> str:
    """Returns what messages call samples with these optional inputs: "pixel_values, mel". A list goes by its
    own name (`secc.runtime.model.nested_batch`)."""
    return ", ".join(_input_names(sorted(keys))) or "no optional inputs"


def describe_predicate(when: Sequence[str]) -> str:
    """Returns a predicate in words: "every sample", "samples with pixel_values or mel", "samples without
    pixel_values and mel"."""
    if not when:
        return "every sample"
    plain, others = list[str](), list[str]()
    for term in when:
        having, lacking = map(_input_names, split_term(term))
        if len(having) == 1 and not lacking:
            plain += [name for name in having if name not in plain]
        else:
            both = [("with", having), ("without", lacking)]
            others.append(" and ".join(f"{how} {' and '.join(keys)}" for how, keys in both if keys))
    return "samples " + " or ".join([f"with {' or '.join(plain)}"] * bool(plain) + others)


def _input_names(keys: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(key.partition(f".{EACH_SUFFIX}")[0] for key in keys))
