"""Builds the user's model without its weights: runs `model()` so that no large tensor is ever allocated.

A 72B model compiles on a laptop. Large tensors are made on the meta device. Small ones are made for real,
since code between modules may read them (position tables, frequencies, masks). `from_pretrained` builds from
the configuration alone.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from secc.runtime.model.user_file import UserModel

_HUB_LOCATION_OPTIONS = (
    "cache_dir",
    "local_files_only",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)

MAX_REAL_ENTRIES = 1 << 16  # entries: what is larger has no values

_VALUELESS_FACTORIES = ("aten::empty", "aten::rand", "aten::normal")

aten = torch.ops.aten


def build_meta_model(user: UserModel, tables: bool = False) -> nn.Module:
    """Run `model()` with large tensors on the meta device; shared parameters stay shared.

    With `tables`, only empty and random tensors lose their values: computed tables (positions, masks) are
    real at any size. Raises UserError as `model()` does.
    """
    with ExitStack() as stack:
        stack.enter_context(_without_pretrained_weights(user))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(_LargeTensorsOnMeta(tables))
        stack.enter_context(warnings.catch_warnings())
        # Weights that model() loads are not wanted.
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
        return user.build_model()


class _LargeTensorsOnMeta(TorchDispatchMode):
    """Makes large tensors on the meta device. An op on a meta tensor moves its small arguments there as
    well."""

    def __init__(self, tables: bool) -> None:
        super().__init__()
        self.keeps_tables = tables

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(t.is_meta for t in leaves):
            return self._run_on_meta(func, args, kwargs)
        if not leaves and self._creates_large_tensor(func, args, kwargs):
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)

    def _creates_large_tensor(self, func: Any, args: Any, kwargs: Any) -> bool:
        makes = "device" in (a.name for a in func._schema.arguments) and (
            not self.keeps_tables or func._schema.name.startswith(_VALUELESS_FACTORIES)
        )
        return makes and _count_factory_entries(func, args, kwargs) > MAX_REAL_ENTRIES

    def _run_on_meta(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on meta tensors. A copy from a meta tensor into a real one is skipped, as there are no
        values."""
        if func is aten.copy_.default and not args[0].is_meta:
            return args[0]
        args, kwargs = pytree.tree_map(
            lambda a: a.to("meta") if isinstance(a, torch.Tensor) and not a.is_meta else a, (args, kwargs)
        )
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


def _count_factory_entries(func: Any, args: Any, kwargs: Any) -> int:
    """Number of entries of the tensor that a factory op makes."""
    name = func._schema.name
    if name in ("aten::arange", "aten::linspace", "aten::logspace"):
        return 0 if name == "aten::arange" else int(args[2] if len(args) > 2 else kwargs.get("steps", 0))
    if name in ("aten::eye",):
        return int(args[0]) * int(args[1] if len(args) > 1 else args[0])
    position = next((i for i, a in enumerate(func._schema.arguments) if a.name == "size"), len(args))
    size = args[position] if position < len(args) else kwargs.get("size", ())
    total = 1
    for n in size if isinstance(size, (list, tuple)) else (size,):
        total *= int(n)
    return total


@contextmanager
def _without_pretrained_weights(user: UserModel) -> Generator[None]:
    """Build Hugging Face models from their configuration: no checkpoint is read and no initialisation
    computed."""
    with ExitStack() as stack:
        if "transformers" in sys.modules or "transformers" in user.path.read_text(encoding="utf-8"):
            base = importlib.import_module("transformers.modeling_utils").PreTrainedModel
            stack.enter_context(mock.patch.object(base, "from_pretrained", classmethod(_build_from_config)))
            stack.enter_context(
                mock.patch.object(base, "initialize_weights", lambda self, *args, **kwargs: None)
            )
        yield


def _build_from_config(cls: Any, name: Any, *args: Any, config: Any = None, **kwargs: Any) -> nn.Module:
    """Replace `from_pretrained`: build from the configuration (given, or read from `name`), with its dtype,
    in evaluation mode. The configuration says where it came from, as after `from_pretrained`."""
    if config is None:
        config = cls.config_class.from_pretrained(
            name, **{k: kwargs[k] for k in _HUB_LOCATION_OPTIONS if k in kwargs}
        )
    overrides = {
        k: kwargs[k]
        for k in ("attn_implementation", "dtype", "torch_dtype")
        if k in kwargs and kwargs[k] != "auto"
    }
    model = cls._from_config(config, **overrides).eval()
    if isinstance(name, str | os.PathLike):
        model.config.name_or_path = str(name)
    return model
