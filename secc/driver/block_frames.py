"""Says whether the user's code that runs is that of a block, which no graph records."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import nn

from secc.runtime.model.function_blocks import FunctionBlock
from secc.runtime.model.source_lines import module_paths_by_id, running_module_and_frames


class BlockFrames:
    """The running code of blocks, which may be modules, or functions or statements of the user's code."""

    def __init__(self, model: nn.Module, blocks: Iterable[str]) -> None:
        self._model, self._names = model, tuple(blocks)
        self._paths, self._blocks = module_paths_by_id(model), tuple(f"{block}." for block in self._names)
        functions = (
            (path, function)
            for path, module in model.named_modules()
            if path in self._names and isinstance(module, FunctionBlock)
            for function in module.intercepted
        )
        self._functions = dict(functions)
        self._codes = {path: function.__code__ for path, function in self._functions.items()}

    @property
    def globals_of_files(self) -> list[dict[str, Any]]:
        """The globals of the files that hold the blocks' code, without torch's."""
        found = {id(f.__globals__): f.__globals__ for f in self._functions.values()}
        for path in self._names:
            for cls in {c for m in self._model.get_submodule(path).modules() for c in type(m).__mro__}:
                if not cls.__module__.startswith("torch.") and cls.__module__ in sys.modules:
                    names = vars(sys.modules[cls.__module__])
                    found[id(names)] = names
        return list(found.values())

    def running_block(self) -> str:
        """Returns the path of the block that runs; "" if there is none."""
        path, frames = running_module_and_frames(self._paths)
        found = (block for block in self._names if f"{path}.".startswith(f"{block}."))
        running = max(found, key=len, default="")
        codes = {frame.f_code for frame in frames}
        return running or next((name for name, code in self._codes.items() if code in codes), "")

    def innermost_frame(self) -> FrameType | None:
        """Returns the innermost frame of the user's code if it runs in a block."""
        path, frames = running_module_and_frames(self._paths)
        is_inside = f"{path}.".startswith(self._blocks) or any(
            f.f_code in self._codes.values() for f in frames
        )
        return frames[0] if frames and is_inside else None
