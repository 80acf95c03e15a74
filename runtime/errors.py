"""`UserError`, the exception for errors in the user's input, with everything that a helpful message needs.

Every other exception is a defect of secc. The command line and the ranks turn a `UserError` into one message
and exit code 2. It lives here because ranks raise it, too; the compiler imports it as `secc.errors`.
"""

from __future__ import annotations

_MAX_LINE = 2000  # characters of a line of a message


def printable_text(text: str, newlines: bool = False) -> str:
    """Returns a text with escapes in place of characters that a terminal would obey or that cannot be read:
    control and formatting characters, lone surrogates. `newlines` keeps line breaks."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (newlines and c == "\n") else repr(c)[1:-1] for c in text)


def _shorten_lines(text: str) -> str:
    """Returns a printable text without the ends of very long lines, which come from other people's files."""
    lines = printable_text(text, newlines=True).split("\n")
    return "\n".join(f"{line[:_MAX_LINE]}…" if len(line) > _MAX_LINE else line for line in lines)


class UserError(Exception):
    """Bad input, with its place and a remedy.

    `message` is the cause in one sentence; `where` a `file:line` or another place ("" if there is none);
    `remedy` what the user can do ("" if the cause says it).
    """

    def __init__(self, message: str, where: str = "", remedy: str = "") -> None:
        super().__init__(message, where, remedy)
        self.message, self.where, self.remedy = message, where, remedy
        self.reported_elsewhere = False  # by another rank, which knows more

    def __str__(self) -> str:
        place = f"{printable_text(self.where)}: " if self.where else ""
        remedy = f"\n  what to do: {_shorten_lines(self.remedy)}" if self.remedy else ""
        return f"{place}{_shorten_lines(self.message)}{remedy}"


class RunComplete(SystemExit):
    """Ends a process with 0 because its run has no further step. Any other SystemExit comes from the user's
    code."""


class LostProcess(UserError):
    """A helper process was ended from outside, for lack of memory for example: a new attempt may succeed."""


class NotEnoughMemory(UserError):
    """This machine has too little memory for what is to be computed: smaller samples may fit."""
