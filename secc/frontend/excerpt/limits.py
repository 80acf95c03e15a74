"""What an excerpt may take of this machine, and the exception that ends it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from secc.runtime.host.memory import available_memory

_GIB = 1 << 30
_MAX_MEMORY = 8 * _GIB
_MEMORY_SHARE = 3  # of the memory that is free
_MAX_CPU_SECONDS = 60.0
_FLOPS_PER_SECOND = 4e10  # of one core, for a hundred tokens


class CannotRunExcerpt(BaseException):
    """Raised where an excerpt cannot stand for the model, or takes too much memory or time. It is no
    Exception, so that the user's forward does not catch it."""


@dataclass(frozen=True)
class ExcerptLimits:
    """memory: bytes of the weights that are made. seconds: of processor time."""

    memory: int
    seconds: float = _MAX_CPU_SECONDS

    @classmethod
    def of_this_machine(cls) -> ExcerptLimits:
        """Returns the limits for the memory that is free now."""
        free = int(min(available_memory(), _MEMORY_SHARE * _MAX_MEMORY))
        return cls(free // _MEMORY_SHARE)


class ExcerptBudget:
    """Counts what an excerpt takes. Raises CannotRunExcerpt beyond the limits."""

    def __init__(self, limits: ExcerptLimits) -> None:
        self._limits, self._start, self._bytes = limits, time.process_time(), 0

    def take_memory(self, size: int) -> None:
        """Counts `size` bytes of weights."""
        self._bytes += size
        if self._bytes > self._limits.memory:
            limit = self._limits.memory / _GIB
            raise CannotRunExcerpt(f"one layer of each kind takes more than {limit:.1f} GiB of memory")

    def expect_flops(self, flops: float = 0.0) -> None:
        """Ends the excerpt if its time is over, or would be after `flops` more FLOPs."""
        spent = time.process_time() - self._start
        if spent + flops / _FLOPS_PER_SECOND > self._limits.seconds:
            raise CannotRunExcerpt(
                f"one layer of each kind takes more than {self._limits.seconds:.0f} s of processor time"
            )
