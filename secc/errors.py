"""The compiler's name for the one exception that reports bad input; ranks raise the same class."""

from secc.runtime.errors import UserError

__all__ = ["UserError"]
