"""A branch of forward that the batch decides, not the sample, couples samples: such a model is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import InexactPlan

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
