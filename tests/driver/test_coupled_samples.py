"""A branch of forward that the batch decides, not the sample, couples samples: such a model is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import InexactPlan, UserError
from secc.frontend.tp_search.token_mixing import find_coupled_blocks

GATED = """
import torch
import torch.nn.functional as F
from torch import nn


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gate = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.see, self.head = nn.Linear(6, 8), nn.Linear(8, 20)

    def forward(self, tokens, images=None, owner=None):
        x = self.embed(tokens)
        if images is not None:
            x = x + self.gate(x)  # of samples without an image, too
            x = x.index_add(0, owner, self.see(images)[:, None].expand(-1, x.shape[1], -1))
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def model():
    return Gated()


def dataset():
    g = torch.Generator().manual_seed(0)
    texts = [{"tokens": torch.randint(0, 20, (7,), generator=g)} for _ in range(40)]
    return [t | ({"images": torch.randn(1, 6, generator=g)} if i % 2 else {}) for i, t in enumerate(texts)]


def collate(samples):
    batch = {"tokens": torch.stack([s["tokens"] for s in samples])}
    having = [i for i, s in enumerate(samples) if "images" in s]
    if having:
        batch["images"] = torch.cat([samples[i]["images"] for i in having])
        batch["owner"] = torch.tensor(having)
    return batch
"""


def test_a_branch_that_changes_samples_without_the_input_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gated.py").write_text(GATED)
    made = compile_model(tmp_path / "gated.py", CompileOptions(cluster="local:2", global_batch=8))
    with pytest.raises(InexactPlan, match="samples without 'images' are computed otherwise") as refused:
        check_exactness(made, required=True)
    assert refused.value.where == "gated.py:17" and "torch.where" in refused.value.remedy


def test_a_weight_that_only_batches_without_an_input_use_is_named(tmp_path: Path) -> None:
    text = GATED.replace(
        "super().__init__()", "super().__init__()\n        self.null = nn.Parameter(torch.ones(8))"
    )
    text = text.replace("x = x + self.gate(x)  # of samples without an image, too", "pass")
    text = text.replace(
        "        return F.cross", "        else:\n            x = x + self.null\n        return F.cross"
    )
    (tmp_path / "gated.py").write_text(text)
    made = compile_model(tmp_path / "gated.py", CompileOptions(cluster="local:2", global_batch=8))
    with pytest.raises(InexactPlan, match="uses null for all samples of a batch or for none") as refused:
        check_exactness(made, required=True)
    line = text.splitlines().index("            x = x + self.null") + 1
    assert refused.value.where == f"gated.py:{line}"


class Repeat(nn.Module):
    """Repeats each row of a sample; a batch is as wide as its longest sample."""

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        rows = [own.repeat_interleave(n, dim=0) for own, n in zip(x, times, strict=True)]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)


class Sounds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.repeat = Repeat()

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        return self.repeat(x, times).sum()


def test_a_block_with_wider_results_for_some_samples_is_not_said_to_couple_them() -> None:
    call = ((torch.randn(4, 2, 3), torch.tensor([[1, 1], [1, 2], [3, 1], [2, 4]])), {})
    assert find_coupled_blocks(Sounds(), call, ["repeat"], 4) == []


RARELY = """
import torch
import torch.nn.functional as F
from torch import nn


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Linear(8, 8)

    def forward(self, x):
        chosen = DRAWN
        return torch.where(chosen[:, None, None], self.turn(x).mean(0, keepdim=True), self.turn(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mixer, self.head = nn.Embedding(20, 8), Mixer(), nn.Linear(8, 20)

    def forward(self, ids):
        x = self.mixer(self.embed(ids))
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def model():
    return Net()


def dataset():
    g = torch.Generator().manual_seed(0)
    return [{"ids": torch.randint(0, 20, (7,), generator=g)} for _ in range(24)]
"""


@pytest.mark.parametrize(
    "drawn",
    [
        "torch.randint(0, 1000, (len(x),)) == 0",
        "torch.randn(len(x), 1)[:, 0] > 3",
        "torch.rand(len(x), 16)[:, 3] < 0.0005",
    ],
)
def test_samples_that_rare_numbers_couple_are_refused(drawn: str, tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(RARELY.replace("DRAWN", drawn))
    compiled = compile_model(path, CompileOptions(cluster="local:2", global_batch=8))
    with pytest.raises(InexactPlan, match="close to an end of their range") as error:
        check_exactness(compiled, required=True)
    assert "net.py:" in str(error.value.remedy)


OWN_MEANS = """
import torch
import torch.nn.functional as F
from torch import nn


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.gate = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        g = torch.sigmoid(self.gate(x))
        return x + g * torch.tanh(self.inner(x)), (g.mean() - 0.3) ** 2


class GatedLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.gates = nn.ModuleList(Gate() for _ in range(2))

    def forward(self, ids):
        x, penalty = self.embed(ids), 0.0
        for gate in self.gates:
            x, own = gate(x)
            penalty = penalty + own
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()) + penalty


def model():
    torch.manual_seed(0)
    return GatedLayers()


def dataset():
    g = torch.Generator().manual_seed(0)
    return [{"ids": torch.randint(0, 20, (7,), generator=g)} for _ in range(40)]
"""


def test_blocks_that_return_their_own_means_are_named_together_with_what_works(tmp_path: Path) -> None:
    (tmp_path / "own_means.py").write_text(OWN_MEANS)
    options = CompileOptions(cluster="local:2", global_batch=8)
    with pytest.raises(UserError, match=r"gates\.0 reduces its samples to a value") as refused:
        compile_model(tmp_path / "own_means.py", options)
    assert "--whole-batch gates.0 --whole-batch gates.1, exact" in refused.value.remedy
    assert "--global-sums" not in refused.value.remedy  # which takes sums between blocks only
    named = dataclasses.replace(options, whole_batch=("gates.0", "gates.1"))
    made = check_exactness(compile_model(tmp_path / "own_means.py", named), required=True)
    assert all(p["exact"] for p in made.plan.checks["patterns"])
