"""What users do to gradients and precision between modules: autocast regions, cut gradients, checkpoints,
writes into views."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.errors import UserError
from tests.e2e.harness import compile_and_write
from tests.runtime.recorder.test_recorder import assert_replays, recorded, targets

CPU16 = {"device_type": "cpu", "dtype": torch.bfloat16}


def _regions(m: Any, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    with torch.autocast(**CPU16):
        a = m.body(x) @ torch.ones(3, 3)
        with torch.autocast("cpu", enabled=False):
            b = a.float() @ torch.ones(3, 3)
    return a.float() + b + h


def _disabled(m: Any, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    with torch.autocast(**CPU16), torch.autocast("cpu", enabled=False):
        return m.body(x) + h


@torch.autocast(**CPU16)
def _decorated(m: Any, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return (m.body(x) @ m.scale.diag()).float() + h


def _straight_through(m: Any, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    hard = torch.nn.functional.one_hot(h.argmax(-1), 3) - h.softmax(-1).detach() + h.softmax(-1)
    return h + (h.round() - h).detach() + hard * m.scale


def _stopped(m: Any, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        largest = h.abs().amax(-1, keepdim=True)
        with torch.enable_grad():
            again = m.body(x)
    with torch.inference_mode():
        target = m.body(x).exp()
    return h / largest * target.clone() + again - h.data


def _checkpointed(m: Any, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(a) * b + m.body(x)

    return checkpoint(step, h, m.scale, use_reentrant=False) + checkpoint(
        step, h, m.scale, use_reentrant=True
    )


def _without_gradient(m: Any, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """The old checkpoint gives no gradient to weights where no argument has one."""
    return h + checkpoint(m.body, x, use_reentrant=True)


def _views(m: Any, h: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    h = h * 1
    halves, turned = h.view(2, 2, 3), h.t()
    halves[0] *= 2
    turned.add_(m.scale[:, None])
    h.view(-1)[3:5] = 0
    return h + halves.reshape(4, 3)


GLUE: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "a region inside of a region": (_regions, ["", "cpu bfloat16", ""]),
    "a disabled region": (_disabled, ["", "", ""]),
    "a decorated function": (_decorated, ["", "cpu bfloat16", ""]),
    "straight through": (_straight_through, ["", ""]),
    "stopped gradients": (_stopped, ["", "", "", ""]),
    "checkpoints": (_checkpointed, [""] * 4),
    "a checkpoint without a gradient": (_without_gradient, [""] * 3),
    "writes into views": (_views, [""] * 2),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", GLUE)
def test_glue_replays_with_its_modes(name: str) -> None:
    glue, regions = GLUE[name]
    found, model = recorded(glue)
    assert [n.meta["autocast"] for n in found.block_calls] == regions
    assert not any(t.rpartition(".")[0].endswith("_") for t in targets(found))  # nothing writes
    assert_replays(found, model)


MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layers = lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        self.encoder, self.decoder = layers(), layers()
        self.head = nn.Linear(8, 3)

    def forward(self, x, label):
        {region}
            seen = self.encoder(x)
        left, right = seen.float()[:, :4], seen.float()[:, 4:]
        scale = right.detach().abs().mean(-1, keepdim=True)
        out = self.decoder(seen.float()) * 1
        out[:, :4] += left
        half = out[:, 2:6]
        half *= scale
        left = left - half
        return nn.functional.cross_entropy(self.head(out), label) + left.pow(2).mean()


def model():
    return Model()


def dataset():
    g = torch.Generator().manual_seed(0)
    return [dict(x=torch.randn(8, generator=g), label=torch.tensor(i % 3)) for i in range(16)]
"""
SECTIONS = ("encoder=encoder", "decoder=decoder+head")


def test_views_and_writes_cross_sections(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL.format(region="if True:"))
    compiled = compile_and_write(
        tmp_path / "model.py", tmp_path / "plan", sections=SECTIONS
    )  # raises where the plan is not exact
    assert [s.name for s in compiled.plan.sections] == ["encoder", "decoder"] and compiled.plan.edges


def test_a_backward_that_fails_in_plain_pytorch_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        MODEL.format(region="if True:").replace("decoder(seen.float()) * 1", "decoder(seen.float())")
    )
    with pytest.raises(
        UserError, match="plain PyTorch cannot train the model: one of the variables needed for gradient"
    ) as error:
        compile_and_write(tmp_path / "model.py", tmp_path / "plan")
    assert "model.py:" in error.value.where


@pytest.mark.skipif(torch.cuda.is_available(), reason="the region has an effect")
@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_an_autocast_region_of_a_missing_device_is_noted_by_place(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        MODEL.format(region='with torch.autocast("cuda", dtype=torch.bfloat16):')
    )
    plan = compile_model(tmp_path / "model.py", CompileOptions(sections=SECTIONS)).plan
    assert [
        n
        for n in plan.checks["notes"]
        if n.startswith("autocast for CUDA does nothing on this machine") and n.endswith("(model.py:14)")
    ]
