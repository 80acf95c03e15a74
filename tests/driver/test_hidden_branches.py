"""What blocks do for many samples only, for large gradients only, or with values that loading samples sets,
is compared with plain PyTorch, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import InexactPlan, UserError

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


def center(x):
    return x - x.mean(0, keepdim=True)


class Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return BOUNDED


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, x):
        x = x + torch.tanh(self.mix(x))
        INSIDE
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = Layer(), Layer(), nn.Linear(16, 5)

    def forward(self, x, y):
        return F.cross_entropy(self.head(self.second(self.first(x))), y)


def model():
    torch.manual_seed(0)
    return Net()


def dataset():
    g = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(16, generator=g), "y": torch.randint(0, 5, (), generator=g)} for _ in range(96)]
"""

TRIPLES = "x[:, :12].unflatten(1, (4, 3)), x[:, 4:].unflatten(1, (4, 3))"


def check(folder: Path, inside: str = "pass", bounded: str = "g", more: str = "") -> CompiledPlan:
    path = folder / "net.py"
    path.write_text(MODEL.replace("INSIDE", inside).replace("BOUNDED", bounded) + more)
    compiled = compile_model(path, CompileOptions(cluster="local:2", global_batch=64))
    return check_exactness(compiled, required=True)


def assert_refused_with_line(folder: Path, inside: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        check(folder, inside)
    assert "net.py:" in refused.value.where


@pytest.mark.parametrize(
    "line",
    [
        "x = center(x) if len(x) >= 32 else x",
        "x = x - x[:32].mean(0) if x.shape[0] * x.shape[1] > 512 else x",
        "x = torch.cat([x[:32], center(x[32:])])",
    ],
)
def test_what_blocks_do_for_many_samples_is_compared(line: str, tmp_path: Path) -> None:
    assert_refused_with_line(tmp_path, line, r"when other samples come|take another way than few")


@pytest.mark.parametrize(
    "line",
    [
        f"x = x + torch.cross({TRIPLES}).mean((1, 2))[:, None]",
        "x = 2 * x if len(x) == 3 else x",
        "x = 2 * x if x.shape[0] in (6, 11) else x",
        "x = x * (1 + x.size(0) % 5)",
        "x = x @ x.T @ x if x.shape[0] == 9 else x",
    ],
)
def test_what_blocks_do_for_certain_numbers_of_samples_is_compared(line: str, tmp_path: Path) -> None:
    assert_refused_with_line(tmp_path, line, r"first and second .*|another way than few")


def test_a_cross_product_without_a_dim_between_modules_is_compared_for_three_samples(tmp_path: Path) -> None:
    folder = tmp_path / "between"
    folder.mkdir()
    turned = f"self.first(x + F.pad(torch.cross({TRIPLES}).flatten(1), (0, 4)))"
    code = MODEL.replace("self.first(x)", turned)
    (folder / "net.py").write_text(code.replace("INSIDE", "pass").replace("BOUNDED", "g"))
    options = CompileOptions(cluster="local:2", global_batch=64)
    with pytest.raises(UserError, match=r"by the size of a batch: 3 samples") as refused:
        check_exactness(compile_model(folder / "net.py", options), required=True)
    assert "net.py:" in refused.value.where


@pytest.mark.parametrize(
    "line",
    [
        f"x = x + torch.cross({TRIPLES}, -1).mean((1, 2))[:, None]",
        "x = x if x.dim() == 2 and x.shape[1] == 16 else 2 * x",
    ],
)
def test_sizes_of_a_sample_that_blocks_compare_are_accepted(line: str, tmp_path: Path) -> None:
    check(tmp_path, line)


def test_branches_by_sizes_that_keep_samples_apart_are_accepted(tmp_path: Path) -> None:
    line = "x = torch.cat([F.relu(part) for part in x.split(8)]) if x.size(0) > 8 else F.relu(x)"
    assert check(tmp_path, line).plan.checks["patterns"]


BOUND = "g * (1.0 / {}).clamp(max=1.0)"


@pytest.mark.parametrize(
    ("inside", "bounded"),
    [
        ("x = Bounded.apply(x)", BOUND.format("g.norm()")),
        (f"x.register_hook(lambda g: {BOUND.format('g.norm()')})", "g"),
    ],
)
def test_gradients_that_are_bounded_over_the_samples_are_refused(
    inside: str, bounded: str, tmp_path: Path
) -> None:
    with pytest.raises(InexactPlan, match="1024 times as large, a backward of your own or a hook") as refused:
        check(tmp_path, inside, bounded)
    assert "net.py:" in refused.value.where


def test_gradients_that_are_bounded_for_each_sample_are_accepted(tmp_path: Path) -> None:
    inside = "x = Bounded.apply(x); x.register_hook(lambda g: g.clamp(-0.1, 0.1))"
    made = check(tmp_path, inside, BOUND.format("g.norm(dim=-1, keepdim=True)"))
    assert made.plan.checks["patterns"]


STATE = """
STATE = {}


def stack(samples):
    return {key: torch.stack([s[key] for s in samples]) for key in samples[0]}


def collate(samples):
    SET
    return stack(samples)
"""


@pytest.mark.parametrize("read", ["STATE.get('scale', 1.0)", "STATE['scale']"])
def test_values_that_collate_sets_for_forward_are_refused(read: str, tmp_path: Path) -> None:
    more = STATE.replace("SET", "STATE['scale'] = 2.0")
    with pytest.raises(UserError, match=r"loading samples sets the global STATE\['scale'\], which forward"):
        check(tmp_path, f"x = x * {read}", more=more)


def test_values_of_loading_that_forward_does_not_read_are_accepted(tmp_path: Path) -> None:
    more = STATE.replace("SET", "STATE['batches'] = STATE.get('batches', 0) + 1")
    assert check(tmp_path, more=more).plan.checks["patterns"]
    read = "\n_dataset = dataset\n\n\ndef dataset():\n    STATE['scale'] = 2.0\n    return _dataset()\n"
    made = check(tmp_path, "x = x * STATE['scale']", more=STATE.replace("SET", "pass") + read)
    assert made.plan.checks["patterns"]
