"""Call sites of blocks as texts: the user's lines that lead to a call, innermost first. They tell the random
ops of a block from those of another call of it.

In plain PyTorch a function or a range of statements that is a block belongs to the module around it, so the
path of this module stands in front of the lines.
"""

from __future__ import annotations

from collections.abc import Sequence


def format_call_site(lines: Sequence[str], owner: str | None = None) -> str:
    """Return the text of a call site: `file:line<file:line`, for a function `owner@file:line<file:line`."""
    return ("" if owner is None else f"{owner}@") + "<".join(lines)


def parse_call_site(site: str) -> tuple[str | None, tuple[str, ...]]:
    """Return the module around a function, None for another block, and the lines of a call site."""
    owner, is_owned, lines = site.rpartition("@")
    return owner if is_owned else None, tuple(filter(None, lines.split("<")))
