"""Models that are too large to be run are probed for padding with one layer of each kind: what holds for
these holds for the whole model, and what does not is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from secc.frontend.dataset.input_symbols import describe_inputs
from secc.frontend.dataset.padding_policy import PaddingPolicy, WidthsReason, choose_padding_policy
from secc.frontend.dataset.sampling import survey_dataset
from secc.frontend.excerpt.first_layers import ModelExcerpt
from secc.frontend.excerpt.limits import CannotRunExcerpt, ExcerptLimits
from secc.frontend.excerpt.row_tables import RowTable, RowTables, make_table_parameter
from secc.runtime.model.user_file import load_model_file
from secc.runtime.training.eager_reference import compare_results, run_eager

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

WORDS = 40


class Layer(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index, self.norm = index, nn.LayerNorm(16)
        self.qkv, self.out, self.conv = nn.Linear(16, 48), nn.Linear(16, 16), nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        # in the layer
        return x, k


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.layers = nn.ModuleList(Layer(i) for i in range(6))
        self.head = nn.Linear(16, WORDS, bias=False)

    def forward(self, input_ids, labels):
        x, steps = self.words(input_ids), torch.arange(input_ids.shape[1])
        mask = (steps[None] <= steps[:, None])[None] & (input_ids != 0)[:, None]
        for i, layer in enumerate(self.layers):
            x, _ = layer(x, mask)
        logits = self.head(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        # at the end
        return loss


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        ids = torch.randint(1, 40, (9 + i % 7,), generator=torch.Generator().manual_seed(i))
        return dict(input_ids=ids, labels=ids)


def model():
    return Model()


def dataset():
    return Samples()
"""
LIMITS = ExcerptLimits(1 << 28)


def write_model(path: Path, changes: dict[str, str]) -> Path:
    """Writes MODEL with changed lines."""
    text = MODEL
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def choose_widths(path: Path, limits: ExcerptLimits = LIMITS) -> PaddingPolicy:
    """Chooses widths for a model as if it were too large to be run."""
    user = load_model_file(path)
    survey = survey_dataset(user)
    return choose_padding_policy(user, survey, describe_inputs(user, survey), None, limits=limits)


UNMASKED = "x = x + F.scaled_dot_product_attention(x, x, x)"
CONV = "x = x + self.conv(x.mT).mT"

# What changes in the model, widths, and the layers that ran of six. The second layer always runs in addition
# to the first: its hidden states need gradients, those of a first layer after a table do not.
CASES: dict[str, tuple[dict[str, str], str, int | None]] = {
    "one kind": ({}, "own", 1),
    "a count of the layers in a number that changes nothing": (
        {"# in the layer": "x = x * 1 if self.index >= 0 else x"},
        "own",
        1,
    ),
    "a cache of keys and values that the layers fill": (
        {
            "from torch import nn": "from torch import nn\nfrom transformers import DynamicCache",
            "def forward(self, x, mask):": "def forward(self, x, mask, cache=None):",
            "# in the layer": "if cache is not None: cache.update(k[:, None], v[:, None], self.index)",
            "for i, layer in": "cache = DynamicCache()\n        for i, layer in",
            "layer(x, mask)": "layer(x, mask, cache=cache)",
        },
        "own",
        1,
    ),
    "long samples, which forward refuses if they are shortened": (
        {"(9 + i % 7,)": "(140 + i % 7,)", "# at the end": "assert labels.shape[1] >= 140"},
        "own",
        1,
    ),
    "two kinds by number": ({"# in the layer": "x = x * 2 if self.index % 3 == 2 else x"}, "own", 2),
    "two kinds by mask": (
        {"layer(x, mask)": "layer(x, mask & (steps[None] > steps[:, None] - 4) if i % 2 else mask)"},
        "own",
        2,
    ),
    "every layer scales in its own way": ({"# in the layer": "x = x * (1 + self.index / 8)"}, "own", 6),
    "16 bits, and a large table as embedding and head": (
        {
            "WORDS = 40": "WORDS = 1 << 19",
            "bias=False)\n": "bias=False)\n        self.head.weight = self.words.weight\n",
            "return Model()": "return Model().bfloat16()",
        },
        "own",
        2,
    ),
    "padded positions in the loss": ({"# at the end": "loss = loss + x.mean()"}, "global", 1),
    "all layers attend to padding": ({"# in the layer": UNMASKED}, "global", 1),
    "a late layer attends to padding": ({"# in the layer": f"if self.index == 4: {UNMASKED}"}, "global", 2),
    "a convolution, and a loss at the first position": (
        {"# in the layer": CONV, "# at the end": "loss = F.cross_entropy(logits[:, 0], labels[:, 0])"},
        "global",
        None,
    ),
    "a loss that nothing trains": ({"# at the end": "loss = loss * 0"}, "global", None),
    "wider samples are refused": (
        {"# at the end": "assert labels.shape[1] < 16\n        x.view(-1, 16 * 15)"},
        "global",
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_padding_is_probed_with_one_layer_of_each_kind(name: str, tmp_path: Path) -> None:
    changes, widths, ran = CASES[name]
    found = choose_widths(write_model(tmp_path / "model.py", changes))
    assert found.widths == widths, found
    if ran is not None:
        assert f"({ran} of 6 layers)" in found.detail
        assert found.reason is (WidthsReason.SHOWN if widths == "own" else WidthsReason.AFFECTED)


@pytest.mark.parametrize(
    ("limits", "says"),
    [(ExcerptLimits(1 << 10), "of memory"), (ExcerptLimits(1 << 28, 0), "of processor time")],
)
def test_excerpts_that_take_too_much_are_not_run(limits: ExcerptLimits, says: str, tmp_path: Path) -> None:
    found = choose_widths(write_model(tmp_path / "model.py", {}), limits)
    assert (found.widths, found.reason) == ("global", WidthsReason.TOO_LARGE)
    assert says in found.detail


def test_passed_on_layers_leave_forward_and_weights_of_the_rest(tmp_path: Path) -> None:
    """An excerpt computes what the model computes in which the other layers change nothing."""
    user = load_model_file(write_model(tmp_path / "model.py", {}))
    batch = user.collate([user.load_sample(i) for i in range(3)])
    excerpt = ModelExcerpt(user, range(40), LIMITS)
    result = excerpt.run(batch)
    assert excerpt.layer_counts == (1, 6)
    whole = excerpt.model
    whole.layers = nn.ModuleList([whole.get_submodule("layers.0")])
    found = compare_results(result.outcome, run_eager(whole, batch))
    assert found.is_exact, found


def test_row_tables_compute_as_dense_tables_with_the_same_rows() -> None:
    parameter = make_table_parameter(torch.Size((1000, 8)))
    table = RowTable(1000, 8, [3, 5, 999])
    dense = torch.zeros(1000, 8)
    dense[table.columns] = table.head
    x, ids = torch.randn(2, 5, 8, requires_grad=True), torch.tensor([[3, 64], [7, 999]])
    with RowTables({parameter: table}):
        looked_up = nn.functional.embedding(ids, parameter)
        logits = nn.functional.linear(x, parameter)
        logits.square().sum().backward()
        assert torch.equal(parameter[ids], looked_up)
        assert torch.equal(parameter.index_select(0, ids[0]), looked_up[0])
        with pytest.raises(CannotRunExcerpt, match="mul"):
            torch.mul(parameter, 2)
    known = ids != 7  # a head has no such row
    assert torch.allclose(looked_up[known], dense[ids][known] * 8**0.5)
    assert bool(looked_up[~known].any())
    assert torch.allclose(logits, x @ dense.T)
    assert x.grad is not None
    assert torch.allclose(x.grad, 2 * logits @ dense, atol=1e-5)
    with pytest.raises(IndexError):
        table.look_up(torch.tensor([1000]))
