"""Tensors that modules keep as attributes in one call and read in another, as the mean and deviation by which
a series was scaled.

A part of the model that runs again in the backward has to find what its first run found, although other
micro-batches may have run since.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Attributes = list[dict[str, Any]]  # for each module, those that are tensors or None


class KeptAttributes:
    """The attributes of the modules in `unit` that may hold such tensors: all but those that hold something
    else when this object is made."""

    def __init__(self, unit: nn.Module) -> None:
        own = vars(nn.Module()).keys()
        self._modules = [
            (vars(m), {name for name, value in vars(m).items() if name in own or not _may_be_kept(value)})
            for m in unit.modules()
            if not type(m).__module__.startswith("torch.nn")
        ]

    def bind_first_values(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` so that its first run is as it is, and each later one finds the attributes as they
        are now, and leaves them as they were before it."""
        found, has_run = self._read(), False

        def run(*args: Any) -> Any:
            nonlocal has_run
            if not has_run:
                has_run = True
                return call(*args)
            present = self._read()
            self._write(found)
            try:
                return call(*args)
            finally:
                self._write(present)

        return run

    def _read(self) -> Attributes:
        return [
            {name: values[name] for name in values.keys() - others if _may_be_kept(values[name])}
            for values, others in self._modules
        ]

    def _write(self, wanted: Attributes) -> None:
        for (values, _), present, kept in zip(self._modules, self._read(), wanted, strict=True):
            for name in present.keys() - kept.keys():
                del values[name]
            values.update(kept)


def _may_be_kept(value: Any) -> bool:
    return value is None or isinstance(value, torch.Tensor)
