"""Runs a recorded graph with the user's own modules, under the grad mode and autocast state that it was
recorded with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx, nn

from secc.runtime.recorder.recording import is_read_node
from secc.runtime.sections.autograd_functions import UserFunctionCall


class Replay(fx.Interpreter):
    """Interprets `graph` on `model`: blocks are the model's submodules, `constants` belong to the graph.

    Casts that autocast caused were recorded as ops, so glue runs without autocast and blocks run with it.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> None:
        super().__init__(model, graph=graph)
        self._placeholders = [str(n.target) for n in graph.nodes if n.op == "placeholder"]
        self._constants = constants

    def compute_loss(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Compute the loss of a batch."""
        return self.run(*(batch[name] for name in self._placeholders))

    def run_node(self, n: fx.Node) -> Any:
        if is_read_node(n):
            return None
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(n.meta.get("grad", True)))
            runs_user_code = n.op == "call_module" or isinstance(n.target, UserFunctionCall)
            if runs_user_code and n.meta["autocast"]:
                device, dtype = n.meta["autocast"].split()
                stack.enter_context(torch.autocast(device, dtype=getattr(torch, dtype)))
            return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return (
            self._constants[target] if target in self._constants else super().get_attr(target, args, kwargs)
        )
