"""`UserError`, the exception for errors in the user's input, with everything that a helpful message needs.

Every other exception is a defect of secc. The command line and the ranks turn a `UserError` into one message
and exit code 2. It lives here because ranks raise it, too; the compiler imports it as `secc.errors`.
"""

from __future__ import annotations


def printable_text(text: str, newlines: bool = False) -> str:
    """Returns a text with escapes in place of characters that a terminal would obey or that cannot be read:
    control and formatting characters, lone surrogates. `newlines` keeps line breaks."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (newlines and c == "\n") else repr(c)[1:-1] for c in text)


class UserError(Exception):
    """Bad input, with its place and a remedy.

    `message` is the cause in one sentence; `where` a `file:line` or another place ("" if there is none);
    `remedy` what the user can do ("" if the cause says it).
    """

    def __init__(self, message: str, where: str = "", remedy: str = "") -> None:
        super().__init__(message, where, remedy)
        self.message, self.where, self.remedy = message, where, remedy

    def __str__(self) -> str:
        place = f"{printable_text(self.where)}: " if self.where else ""
        remedy = f"\n  what to do: {printable_text(self.remedy, newlines=True)}" if self.remedy else ""
        return f"{place}{printable_text(self.message, newlines=True)}{remedy}"


class LostProcess(UserError):
    """A helper process was ended from outside, for lack of memory for example: a new attempt may succeed."""
