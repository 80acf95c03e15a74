"""Tells layers of a kind by what they do: a layer's call is run once without values, and every op that it
issues is noted with its constants, the parameters that it uses by name and layout, and the values of tensors
that no weight decides (masks, positions, tables). Two calls with the same notes run the same code on other
weights and hidden states.

Numbers that count the layers and are not used, such as the place in a cache, make no difference here, as they
would if attributes were compared; a layer that masks otherwise because of its number does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)

from secc.frontend.excerpt.row_tables import storage_address
from secc.runtime.recorder.block_results import TensorDigests
from secc.runtime.recorder.nested_values import NotLiteral, encode_arguments, map_leaves
from secc.runtime.training.widened_floats import widened_floats

CallKind = object  # hashable; equal for calls that do the same


class CallKinds:
    """Describes calls of layers in one forward."""

    def __init__(self, is_activation: Callable[[torch.Tensor], bool]) -> None:
        """is_activation: whether the values of a tensor depend on weights."""
        self.is_activation, self.digests = is_activation, TensorDigests()
        self.layouts: dict[object, list[_Layout]] = {}  # of the results of ops, by their operands' layouts

    def describe_call(
        self, twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallKind | None:
        """Runs a layer without values. Returns what it does, None where it reads values that weights decide.

        twin: a copy of the layer with all parameters on the meta device.
        """
        log = _OpLog(self, twin)
        try:
            args, kwargs = map_leaves((args, kwargs), lambda _, leaf: log.remove_values(leaf))
            given = encode_arguments((args, kwargs), log.describe_tensor)
            with _disable_current_modes(), widened_floats(twin, torch.float32), log:
                out = twin.forward(*args, **kwargs)
            taken = encode_arguments(out, log.describe_tensor)
        except (Exception, NotLiteral):  # whatever the user's code does on tensors without values
            return None
        modes = torch.is_grad_enabled(), tuple(m.training for m in twin.modules())
        return type(twin), modes, repr(given), repr(taken), tuple(log.ops)


_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


class _OpLog(TorchDispatchMode):
    """Notes ops. Those with an operand on the meta device run there; results of ops that ran with operands of
    the same layout are made without running them."""

    def __init__(self, kinds: CallKinds, twin: nn.Module) -> None:
        super().__init__()
        self.ops: list[object] = []
        self._kinds = kinds
        self._names = {storage_address(p): name for name, p in twin.named_parameters()}
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # so that no two tensors have one address

    def remove_values(self, leaf: Any) -> Any:
        """Returns an activation without its values; anything else as it is."""
        if not isinstance(leaf, torch.Tensor) or leaf.is_meta or not self._kinds.is_activation(leaf):
            return leaf
        return _make_tensor(_layout_of(leaf)).requires_grad_(leaf.requires_grad)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        literals = _take_tensors((args, kwargs), tensors)
        origins = [self.describe_tensor(t) for t in tensors]
        self.ops.append((func, literals, *origins))
        if not any(t.is_meta or self._kinds.is_activation(t) for t in tensors):
            return func(*args, **kwargs)
        key = func, literals, *map(_layout_of, tensors)
        known = self._kinds.layouts.get(key)
        if known is not None:
            results = [_make_tensor(layout) for layout in known]
            return results[0] if len(results) == 1 else tuple(results)
        args, kwargs = map_leaves((args, kwargs), _move_to_meta)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        out = func(*args, **kwargs)
        if not func.is_view and not func._schema.is_mutable:
            results = out if isinstance(out, tuple) else (out,)
            operands = {storage_address(t) for t in tensors}
            if all(isinstance(t, torch.Tensor) and storage_address(t) not in operands for t in results):
                self._kinds.layouts[key] = [_layout_of(t) for t in results]
        return out

    def describe_tensor(self, tensor: torch.Tensor) -> object:
        """Describes layout and origin: a parameter's name, the values of what no weight decides, the number
        of any other tensor in the order in which they appear."""
        key = storage_address(tensor)
        if (name := self._names.get(key)) is not None:
            origin: object = name
        elif not tensor.is_meta and not self._kinds.is_activation(tensor):
            origin = self._kinds.digests.digest_of(tensor)
        else:
            self._kept.append(tensor)
            origin = self._numbers.setdefault(key, len(self._numbers))
        return origin, _layout_of(tensor), tensor.storage_offset(), tensor.requires_grad


def _take_tensors(value: Any, tensors: list[torch.Tensor]) -> str:
    """Appends the tensors among an op's arguments to a list, and describes all else."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return "tensor"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_take_tensors(v, tensors) for v in value)}]"
    if isinstance(value, dict):
        return f"[{', '.join(f'{k}: {_take_tensors(v, tensors)}' for k, v in value.items())}]"
    return repr(value)


def _layout_of(tensor: torch.Tensor) -> _Layout:
    return tensor.size(), tensor.stride(), tensor.dtype


def _make_tensor(layout: _Layout) -> torch.Tensor:
    return torch.empty_strided(layout[0], layout[1], dtype=layout[2], device="meta")


def _move_to_meta(_: str, value: Any) -> Any:
    is_real = isinstance(value, torch.Tensor) and not value.is_meta
    return _make_tensor(_layout_of(value)) if is_real else value
