"""Numbers that Python reads only to compare them with constants select a path of forward by the outcome."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError
from secc.runtime.recorder.compared_numbers import find_comparisons

EARLY_RETURN = """
import torch
import torch.nn.functional as F
from torch import nn


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layers, self.tags = nn.Embedding(30, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, ids, tags):
        known = tags != -100
        {read}
            return self.words(ids).sum() * 0.0
        rows = self.layers(self.words(ids)).tanh()[known]
        return F.cross_entropy(self.tags(rows), tags[known])


def model():
    return Tagger()


def dataset():
    made = list()
    for i in range(36):
        g = torch.Generator().manual_seed(i)
        tags = torch.randint(0, 5, (4 + i % 3,), generator=g)
        tags[torch.rand(len(tags), generator=g) < (2 if i % 7 == 3 else 0.4)] = -100
        made.append(dict(ids=torch.randint(0, 30, tags.shape, generator=g), tags=tags))
    return made


def collate(samples):
    pad = torch.nn.utils.rnn.pad_sequence
    return dict(
        ids=pad([s["ids"] for s in samples], batch_first=True),
        tags=pad([s["tags"] for s in samples], batch_first=True, padding_value=-100),
    )
"""


def compile_with(read: str, folder: Path) -> None:
    path = folder / "early_return.py"
    path.write_text(EARLY_RETURN.format(read=read))
    options = CompileOptions(cluster="local:2", global_batch=9, set=("model.micro_batch=2",))
    check_exactness(compile_model(path, options), required=True)


@pytest.mark.parametrize(
    "read",
    ["if int(known.sum()) == 0:", "n = known.sum().item()\n        if not n:", "if 1 > int(known.sum()):"],
)
def test_a_return_before_the_blocks_is_taken_by_a_count(read: str, tmp_path: Path) -> None:
    compile_with(read, tmp_path)


def test_a_count_that_decides_otherwise_in_a_whole_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"early_return\.py:14: .* Python reads a value"):
        compile_with("if int(known.sum()) > 20:", tmp_path)


def read_number(statements: str, tensor: torch.Tensor, folder: Path) -> tuple[tuple[str, int], ...]:
    """Returns the comparisons that are found when these statements of a function read the number of `t`."""
    found = []

    class Watched:
        def __int__(self) -> int:
            frame = inspect.currentframe()
            assert frame is not None
            found.append(find_comparisons(tensor, frame.f_back))
            return 3

    file = folder / f"{abs(hash(statements))}.py"
    body = "\n".join(f"    {line}" for line in statements.splitlines())
    file.write_text(f"def run(t, y=0):\n{body}\n")
    names: dict[str, object] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    names["run"](Watched())  # pyright: ignore
    return found[0]


COUNT = torch.tensor(3)
USES = {
    "if int(t) == 0:\n    y = 1": (("eq", 0),),
    "n = int(t)\nif 0 < n:\n    y = 1\ny = 5 if n else 6": (("gt", 0), ("ne", 0)),
    "if (n := int(t)) < 1 or not n:\n    y = 1": (("lt", 1), ("ne", 0)),
    "y = int(t) > 2": (),
    "n = int(t)\ny = n == 0 or n > 2": (),
    "n = int(t)\ny = n + (n == 0)": (),
    "n = int(t)\nn = 4\nif n == 0:\n    y = 1": (),
    "y = max(int(t), 1) == 3": (),
    "y = int(t) == t": (),
}


@pytest.mark.parametrize("statements", USES)
def test_comparisons_are_found_where_a_number_is_used_for_nothing_else(
    statements: str, tmp_path: Path
) -> None:
    assert read_number(statements, COUNT, tmp_path) == USES[statements]


def test_a_float_is_not_compared(tmp_path: Path) -> None:
    mean = torch.tensor(3.0)
    assert read_number("y = int(t) == 0", mean, tmp_path) == ()
    assert read_number("y = int(t) == 0", COUNT, tmp_path) == (("eq", 0),)
