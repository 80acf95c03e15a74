"""Code of sections: what a forward without backward keeps while it runs."""

from __future__ import annotations

import runpy
import sys
import types
import weakref
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from secc.codegen.section_modules import render_section_module
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io.module_text import parse_module

LAYERS = """
sec.graph "teacher" {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.block "first" class "L" params 4 trainable 0
  sec.block "second" class "L" params 4 trainable 0
  sec.block "third" class "L" params 4 trainable 0
  sec.section "teacher" mode "MODE" when [] blocks ["first", "second", "third"]
  sec.body "always" in @teacher when [] {
    %x = sec.input "x" : !sec.tensor<[B, 2], f32>
    %a = sec.call "first" (%x) args "$0" outs ["[0]"] at "m.py:1" : !sec.tensor<[B, 2], f32>
    %b = sec.call "second" (%a) args "$0" outs ["[0]"] at "m.py:2" : !sec.tensor<[B, 2], f32>
    %t = sec.glue "aten.tanh.default" (%a) args "$0" at "m.py:3" : !sec.tensor<[B, 2], f32>
    %c = sec.call "third" (%b) args "$0" outs ["[0]"] at "m.py:4" : !sec.tensor<[B, 2], f32>
    sec.send "tanh" (%t)
    sec.send "third" (%c)
  }
}
"""


class WatchedLayer(nn.Module):
    """Adds 1 and counts how many results of layers before it exist."""

    made: ClassVar = list[weakref.ref[torch.Tensor]]()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        self.alive = sum(result() is not None for result in self.made)
        self.made.append(weakref.ref(y := x + 1))
        return (y,)


@pytest.mark.parametrize("mode", ["forward", "train"])
def test_a_section_deletes_what_nothing_needs(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of(parse_module(LAYERS.replace("MODE", mode)))
    (section,) = graph.sections
    module: Any = types.ModuleType("teacher_section")
    module.__file__ = str(tmp_path / "teacher.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    Path(module.__file__).write_text(render_section_module(graph, section))
    vars(module).update(runpy.run_path(module.__file__, run_name=module.__name__))
    WatchedLayer.made.clear()
    model = nn.ModuleDict({name: WatchedLayer() for name in ("first", "second", "third")})
    x = torch.zeros(3, 2)
    sends, _ = module.Teacher(model).always({"x": x}, {})
    assert [layer.alive for layer in model.values()] == [0, 1, 1]
    torch.testing.assert_close(sends, {"tanh": torch.tanh(x + 1), "third": x + 3})
