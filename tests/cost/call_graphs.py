"""IR for tests of costs: a graph that calls blocks of a plain PyTorch model one after the other."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from xdsl.dialects.builtin import ModuleOp, StringAttr

from secc.ir.dialect.ops import CallOp, graph_of
from secc.ir.text_io import module_text

HEAD = """sec.graph "g" optional ["px"] {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.symbol "S" kind "width" key "x" dim 1
  sec.symbol "n" kind "rows" key "px" dim 0
"""


def call_graph(model: nn.Module, calls: str, declared: str = "") -> ModuleOp:
    """A graph with a block for each child of `model`, and one case with `calls`, with operands %x [B, S,
    8] and %m [B, S]."""
    blocks = "".join(_block(name, module) for name, module in model.named_children())
    inputs = (
        '    %x = sec.input "x" : !sec.tensor<[B, S, 8], f32>\n    %m = sec.input "m" : '
        "!sec.tensor<[B, S], i64>\n"
    )
    return module_text.parse_module(
        f'{HEAD}{blocks}{declared}  sec.case "c" when [] {{\n{inputs}{calls}    sec.return (%y)\n  }}\n}}\n'
    )


def _block(name: str, module: nn.Module) -> str:
    params = sum(p.numel() for p in module.parameters())
    trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return f'  sec.block "{name}" class "{type(module).__name__}" params {params} trainable {trainable}\n'


def call_attributes(module: ModuleOp) -> list[Mapping[str, str]]:
    """The string attributes of each call, in order."""
    calls = [op for case in graph_of(module).cases for op in case.ops if isinstance(op, CallOp)]
    return [{k: v.data for k, v in call.attributes.items() if isinstance(v, StringAttr)} for call in calls]
