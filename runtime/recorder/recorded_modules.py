"""Answers questions about the modules of a recorded model by their paths: what encloses a block, its
parts, its parameters, its hooks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from secc.runtime.sections import forward_hooks

# Classes of torch's that compute each position by itself; classes made of them may do otherwise.
_POSITIONWISE = (
    *(nn.Linear, nn.LayerNorm, nn.RMSNorm),
    *(nn.Identity, nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh, nn.Sigmoid),
)


class RecordedModules:
    """`modules` are all modules by path, as `named_modules` gives them."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules, self._owned_ids = modules, dict[str, frozenset[int]]()

    def enclosing_module(self, path: str) -> str | None:
        """Path of the module that contains a block and is itself called (no list of modules); None for the
        whole model."""
        path = path.rpartition(".")[0]
        while isinstance(self._modules[path], (nn.ModuleList, nn.ModuleDict)):
            path = path.rpartition(".")[0]
        return path or None

    def parts_with_weights(self, path: str) -> list[str]:
        """Paths of the modules with parameters directly inside a block; lists of modules are opened. A
        block of statements has none: it calls modules of the forward that it was taken from."""
        parts: list[str] = []
        for name, child in self._modules[path].named_children():
            inner = f"{path}.{name}"
            if inner not in self._modules:  # it is also elsewhere, under the name by which it is known
                continue
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                parts += self.parts_with_weights(inner)
            elif next(child.parameters(), None) is not None:
                parts.append(inner)
        return parts

    def owned_tensor_ids(self, path: str) -> frozenset[int]:
        """Ids of a block's parameters and buffers."""
        if path not in self._owned_ids:
            module = self._modules[path]
            self._owned_ids[path] = frozenset(id(t) for t in (*module.parameters(), *module.buffers()))
        return self._owned_ids[path]

    def mixed_dims(self, path: str) -> int | None:
        """How many of the last dims of its argument a block mixes, if it is one of torch's modules that work
        on each position by itself, or a sequence of them; None for other blocks."""
        return _mixed_dims(self._modules[path])

    def hooked_submodule(self, path: str) -> str | None:
        """Path of a module inside a block that has a user's forward hook; None if there is none."""
        return next(
            (
                f"{path}.{name}"
                for name, m in self._modules[path].named_modules()
                if name and forward_hooks.user_forward_hooks(m)
            ),
            None,
        )

    def collects_outputs(self, path: str) -> bool:
        """Whether a caller collects results of modules inside a block. It gets none of them while the
        block is opaque."""
        inside = (m for m in self._modules[path].modules() if m is not self._modules[path])
        return any(forward_hooks.is_output_collector(h) for m in inside for h in m._forward_hooks.values())

    def parts_that_show_outputs(self, path: str) -> list[str]:
        """Paths of the largest modules with parameters inside a block inside which a caller collects nothing;
        of their own results it may."""
        parts: list[str] = []
        for part in self.parts_with_weights(path):
            parts += self.parts_that_show_outputs(part) if self.collects_outputs(part) else [part]
        return parts

    def stacked_layers(self) -> frozenset[str]:
        """Paths of modules with parameters that are in a list with others of their class."""
        lists = (
            (path, m)
            for path, m in self._modules.items()
            if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1
        )
        same_class = (
            (f"{path}.{name}", child)
            for path, m in lists
            for name, child in m.named_children()
            if type(child) is type(m[0])
        )
        return frozenset(path for path, child in same_class if next(child.parameters(), None) is not None)


def _mixed_dims(module: nn.Module) -> int | None:
    if type(module) is nn.Sequential:
        mixed = [_mixed_dims(m) for m in module]
        known = [m for m in mixed if m is not None]
        return max(known, default=0) if len(known) == len(mixed) else None
    if type(module) not in _POSITIONWISE:
        return None
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return len(module.normalized_shape)
    return int(isinstance(module, nn.Linear))
