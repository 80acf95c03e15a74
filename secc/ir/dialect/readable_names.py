"""Names that people read: sections and edges are named after the shortest tail of a module path that is
unambiguous."""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections.abc import Collection, Iterable

_WRAPPER_NAMES = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_RESERVED_NAMES = {"terms", "fused"}  # modules of a plan that are not sections

KNOWN_BUFFER_ATTRIBUTE = (
    "buffer"  # the attribute of a `sec.param` that is a buffer with values known when the plan is made
)
ACCEPTED_ATTRIBUTE = (
    "accepted"  # the attribute of a graph that says which approximations of the loss were taken, and where
)
FIRST_PASS_ATTRIBUTE = "first_pass"  # of a term that later forwards of a step find: the number of the forward
LOGGED_ATTRIBUTE = "logged"  # the attribute of a graph that says of what is logged what is no exact sum
# the attribute of a call with layers that ran twice, or not in the order of their definition, or with
# parameters that code outside of the layers took
OUT_OF_TURN_ATTRIBUTE = "out_of_turn"
# the attribute of a call that lists, of `outs`, what holds the same whatever the block is called with
BATCH_INDEPENDENT_ATTRIBUTE = "alone"
# the attribute of a `sec.input` without dims that adds up over samples, a number that collate counts; of a
# call it lists, of `outs`, what adds up
SUMMED_ATTRIBUTE = "summed"
WRITTEN_ATTRIBUTE = "written"  # the attribute of an op with a result that a block writes to
# the attribute of a block of torch's own classes with the places of samples in its input, "rank dim"
SAMPLE_PLACES_ATTRIBUTE = "samples_at"
# the attribute of a call with what forward had set on its modules: arguments of
# `secc.runtime.sections.module_settings.applied`
SETTINGS_ATTRIBUTE = "settings"
BUFFER_CONSTANT_PREFIX = "buffer:"  # and its name: a constant of a plan that holds the values of a buffer
DATA_SYMBOL_PREFIX = "rows_"  # and a number: a size that inputs' values decide, counted within a case


def identifier_characters(text: str) -> str:
    """A text in the normal form of Python's identifiers, with one underscore for each run of characters that
    these cannot have. It may be empty, begin with a digit or be a keyword."""
    normal = unicodedata.normalize("NFKC", text)
    return re.sub(r"\W+", "_", "".join(c if f"_{c}".isidentifier() else " " for c in normal))


def to_identifier(text: str) -> str:
    """The Python identifier closest to a text, never a keyword or reserved name."""
    name = identifier_characters(text).strip("_") or "model"
    if name[0].isdigit():
        name = f"n{name}"
    return f"{name}_" if keyword.iskeyword(name) or name in _RESERVED_NAMES else name


def strip_wrappers(path: str) -> str:
    """A module path without the steps of wrappers (torch.compile, FSDP, checkpointing), unless it consists of
    nothing else."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPER_NAMES) or path


def shortest_tail(path: str, others: Collection[str]) -> str:
    """The shortest tail of a module path, starting at a name and not at a number, that no other path ends
    with."""
    path, others = strip_wrappers(path), {strip_wrappers(o) for o in others}
    parts = path.split(".")
    for start in reversed(range(len(parts))):
        short = ".".join(parts[start:])
        if not parts[start].isdecimal() and not any(
            o != path and (o == short or o.endswith(f".{short}")) for o in others
        ):
            return short
    return path


def make_unique(wish: str, taken: Iterable[str]) -> str:
    """`wish`, with a number appended where it is taken."""
    used, name, number = set(taken), wish, 1
    while name in used:
        number += 1
        name = f"{wish}_{number}"
    return name
