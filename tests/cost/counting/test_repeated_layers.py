"""Equal layers of a stack are counted once, and only equal ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secc.cost.counting.meta_run import BlockCounts, run_on_meta
from secc.runtime.sections.recompute import recompute_units
from tests.fusion.fuse_model import fuse_model

WIDTH, DEPTH = 8, 6


class GatedLayer(nn.Module):
    """A gated feed-forward layer that knows its place in the stack."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class WindowedLayer(GatedLayer):
    """The same, which every second time takes the first `window` positions only."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.window = (5, 2)[index % 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super().forward(x[:, : self.window]), x[:, self.window :]], 1)


class Stack(nn.Module):
    def __init__(self, layer: type[GatedLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(index) for index in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def count_runs(block: nn.Module, skip: bool) -> tuple[BlockCounts, int]:
    """Returns the counts of a block, and how many of its linear layers ran. skip: equal layers run twice."""
    ran: list[nn.Module] = []
    hooks = [m.register_forward_hook(lambda m, *_: ran.append(m)) for m in block.modules()]
    units = recompute_units(block)
    assert len(units) == DEPTH
    counts = run_on_meta(
        block,
        lambda make: ([make((3, 5, WIDTH), (5 * WIDTH, WIDTH, 1), torch.float32, True)], {}),
        True,
        units if skip else (),
    )
    for hook in hooks:
        hook.remove()
    return counts, sum(type(m) is nn.Linear for m in ran)


@pytest.mark.parametrize(("layer", "running"), [(GatedLayer, 2), (WindowedLayer, 4)])
@pytest.mark.parametrize("fused", [False, True])
def test_two_of_all_equal_layers_run(layer: type[GatedLayer], running: int, fused: bool) -> None:
    block = nn.ModuleDict({"f": Stack(layer)})
    if fused:
        with fuse_model(block) as found:
            assert found.forms
            whole, short = count_runs(block["f"], False), count_runs(block["f"], True)
            assert all("forward" in vars(layer) for layer in block["f"].layers)
    else:
        whole, short = count_runs(block["f"], False), count_runs(block["f"], True)
    assert whole[1] == 3 * DEPTH and short[1] == 3 * running
    for key in ("flops", "work", "moved", "saved", "ops"):
        assert getattr(whole[0], key) == getattr(short[0], key), key
    assert not any("forward" in vars(m) for m in block.modules())


def test_layers_with_code_of_their_own_all_run() -> None:
    block = Stack(GatedLayer)
    for layer in block.layers:
        layer.up.forward = layer.gate.forward
    assert count_runs(block, True)[1] == 3 * DEPTH
