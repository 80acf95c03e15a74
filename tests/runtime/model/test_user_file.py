"""Loading model files, and the ways in which they can be wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from secc.runtime.errors import UserError
from secc.runtime.model.user_file import UserModel, extract_loss, load_model_file

Write = Callable[[str], Path]

MODEL = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
    def forward(self, input_ids, labels=None, attention_mask=None):
        return self.embed(input_ids).sum()
def model():
    return Net()
"""
DATA = """
def dataset():
    return [{"input_ids": torch.arange(2 + i)} for i in range(3)]
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "model.py"
        path.write_text(text)
        return path

    return write


def line_of(path: Path, text: str) -> str:
    """file:line of the first line that starts with `text`."""
    number = next(
        n for n, line in enumerate(path.read_text().splitlines(), 1) if line.strip().startswith(text)
    )
    return f"{path}:{number}"


def test_a_file_loads_twice_without_sharing_state(write: Write):
    path = write(MODEL + DATA + "calls = []\n")
    first, second = load_model_file(path), load_model_file(path)
    first.module.calls.append(1)
    assert second.module.calls == []
    assert first.sha256 == second.sha256
    assert [len(s["input_ids"]) for s in first.dataset()] == [2, 3, 4]


def test_defaults_of_a_file_with_only_a_model_and_a_dataset(write: Write):
    user = load_model_file(write(MODEL + DATA))
    model = user.build_model()
    optimizer = user.build_optimizer(list(model.named_parameters()))
    assert isinstance(optimizer, torch.optim.AdamW) and optimizer.param_groups[0]["lr"] == 1e-4
    assert optimizer.param_groups[0]["param_names"] == ["embed.weight"]
    assert (
        user.build_scheduler(optimizer) is None
        and user.declared_sizes(0) is None
        and user.build_small_model() is None
    )
    assert user.forward_keys == {"input_ids", "labels", "attention_mask"}


def test_forward_with_keyword_arguments_takes_any_key(write: Write):
    user = load_model_file(
        write(MODEL.replace("attention_mask=None)", "attention_mask=None, **kwargs)") + DATA)
    )
    assert user.forward_keys is None and "attention_mask" in user.forward_names
    user.check_batch_keys(["input_ids", "anything"], ["input_ids"])


def test_errors_are_located_in_modules_next_to_the_model_file(write: Write, tmp_path: Path):
    (tmp_path / "beside_the_model.py").write_text("def broken():\n    raise ValueError('not today')\n")
    user = load_model_file(write("import beside_the_model\ndef model():\n    beside_the_model.broken()\n"))
    with pytest.raises(UserError, match="model\\(\\) raises ValueError: not today") as caught:
        user.build_model()
    assert caught.value.where == f"{tmp_path / 'beside_the_model.py'}:2"


@pytest.mark.parametrize(
    ("text", "message", "place"),
    [
        ("def model(:\n", "importing the model file raises SyntaxError", "def model(:"),
        (
            "import no_such_module_anywhere\n",
            "importing the model file raises ModuleNotFoundError",
            "import no_such",
        ),
        ("1 / 0\n", "importing the model file raises ZeroDivisionError", "1 / 0"),
        ("raise SystemExit(3)\n", "importing the model file raises SystemExit: 3", "raise"),
    ],
)
def test_a_file_that_cannot_be_imported(write: Write, text: str, message: str, place: str):
    path = write(text)
    with pytest.raises(UserError, match=message) as caught:
        load_model_file(path)
    assert caught.value.where == line_of(path, place)


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(UserError, match="cannot read the model file: No such file"):
        load_model_file(tmp_path / "missing.py")


def everything(user: UserModel) -> None:
    """What a compiler asks of a model file."""
    model = user.build_model()
    samples = [user.load_sample(i) for i in range(len(user.dataset()))]
    batch = user.collate(samples)
    user.check_batch_keys(batch, batch)
    user.build_optimizer(list(model.named_parameters()))
    user.build_scheduler(torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize(
    ("text", "message", "place"),
    [
        (DATA, "the model file has no model\\(\\)", ""),
        ("model = 3\n" + DATA, "model in the model file is an object of type int, not a function", ""),
        (
            MODEL + "def model():\n    return 3\n" + DATA,
            "model\\(\\) returns an object of type int, not an nn.Module",
            "def model():",
        ),
        (MODEL, "the model file has no dataset\\(\\)", ""),
        (MODEL + "def dataset():\n    return []\n", "dataset\\(\\) is empty", "def dataset"),
        (MODEL + "def dataset():\n    return {'a': 1}\n", "not a map-style dataset", "def dataset"),
        (
            MODEL + "def dataset():\n    return [(1, 2)]\n",
            r"dataset\(\)\[0\] is an object of type tuple, not a dict",
            "def dataset",
        ),
        (
            MODEL + "def dataset():\n    return [{'input_ids': [1], 'extra': 2}]\n",
            "has the key 'extra', which forward",
            "def data",
        ),
        (
            MODEL + "def dataset():\n    return [{'labels': [1]}]\n",
            "forward needs the argument 'input_ids'",
            "def forward",
        ),
        (
            MODEL + "def dataset():\n    return [{'input_ids': {1}}]\n",
            "'input_ids' is of type set",
            "def dataset",
        ),
        (
            MODEL + DATA + "def collate(samples):\n    return samples\n",
            "collate\\(\\) returns an object of type list",
            "def collate",
        ),
        (
            MODEL + DATA + "def collate(samples):\n    return samples[99]\n",
            "collate\\(\\) raises IndexError",
            "return samples[99]",
        ),
        (
            MODEL + DATA + "def collate(samples):\n    exit(4)\n",
            "collate\\(\\) raises SystemExit: 4",
            "exit(4)",
        ),
        (
            MODEL + DATA + "class Silent(Exception):\n    def __str__(self):\n        return self.missing\n"
            "def collate(samples):\n    raise Silent\n",
            "collate\\(\\) raises Silent",
            "raise Silent",
        ),
        (
            MODEL + DATA + "def optimizer(params):\n    return 1\n",
            "not a torch.optim.Optimizer",
            "def optimizer",
        ),
        (
            "def model():\n    return torch.nn.Sequential(torch.nn.LazyLinear(3))\n" + DATA,
            "a parameter or buffer that has no shape yet: 0.weight",
            "def model",
        ),
        (
            MODEL + DATA + "def optimizer(params):\n    return torch.optim.LBFGS([p for _, p in params])\n",
            "returns LBFGS, with a step that evaluates the model again",
            "def optimizer",
        ),
        (MODEL + DATA + "def scheduler(optimizer):\n    return 1\n", "has no step", "def scheduler"),
    ],
)
def test_errors_of_a_model_file_have_a_place(write: Write, text: str, message: str, place: str):
    path = write("import torch\n" + text)
    with pytest.raises(UserError, match=message) as caught:
        everything(load_model_file(path))
    lines = [
        n
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if place and line.strip().startswith(place)
    ]
    assert caught.value.where in ([f"{path}:{n}" for n in lines] or [str(path)])
    assert caught.value.remedy


def test_a_stream_has_no_numbered_samples(write: Write):
    text = (
        "class Stream(torch.utils.data.IterableDataset):\n    def __iter__(self): yield {}\n"
        "def dataset():\n    return Stream()\n"
    )
    user = load_model_file(write(MODEL + text))
    assert user.sources()[0].is_stream
    with pytest.raises(UserError, match="no numbered samples"):
        user.dataset()


def test_an_optimizer_error_explains_the_named_parameters(write: Write):
    path = write(
        MODEL + "def optimizer(params):\n    return torch.optim.SGD([p for p in params if p.ndim > 1])\n"
    )
    with pytest.raises(UserError, match="AttributeError") as caught:
        load_model_file(path).build_optimizer(list(torch.nn.Linear(2, 2).named_parameters()))
    assert "(name, parameter) pairs" in caught.value.remedy
    assert caught.value.where == line_of(path, "return torch.optim.SGD")


def test_samples_depend_on_seed_epoch_and_index_only(write: Write):
    user = load_model_file(
        write(
            MODEL
            + """
import random, numpy
class Noise:
    def __len__(self): return 3
    def __getitem__(self, i):
        return {"x": torch.tensor([random.random(), float(numpy.random.rand()), float(torch.rand(()))])}
def dataset(): return Noise()
"""
        )
    )

    def draw(*key: int) -> list[float]:
        return user.load_sample(*key)["x"].tolist()

    before = torch.get_rng_state()
    assert draw(0, 1, 0) == draw(0, 1, 0)
    assert len({tuple(draw(*key)) for key in [(0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1)]}) == 4
    assert torch.equal(before, torch.get_rng_state())


class Output:
    loss = torch.tensor(2.0)


LOSS = torch.tensor(2.0, requires_grad=True)
TUPLES = [
    (LOSS, {"kl": torch.tensor(1.0)}),
    (torch.zeros(3), LOSS),
    (LOSS, LOSS * 3),
    (torch.tensor(0.5), LOSS),
    (torch.tensor(2.0), None),
]


@pytest.mark.parametrize(
    "output", [torch.tensor(2.0), torch.tensor([2.0]), {"loss": torch.tensor(2.0)}, Output(), *TUPLES]
)
def test_the_loss_is_found(output: object):
    assert extract_loss(output).shape == () and extract_loss(output).item() == 2.0


@pytest.mark.parametrize(
    "output",
    [None, torch.zeros(3), torch.tensor(1), {"logits": torch.zeros(1)}, 2.0, (torch.zeros(3), LOSS, LOSS)],
)
def test_outputs_without_a_loss_are_rejected(output: object):
    with pytest.raises(UserError, match="forward returns no loss") as caught:
        extract_loss(output, "model.py:3")
    assert caught.value.where == "model.py:3" and "labels" in caught.value.remedy


def test_a_list_of_lists_is_named_as_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL + DATA + "def collate(samples):\n    return samples[0]\n")
    user = load_model_file(path)
    user.check_batch_keys(["input_ids.0.0"], ["input_ids"])
    with pytest.raises(
        UserError, match="has a list of lists in 'input_ids', which differ in length"
    ) as refused:
        user.check_batch_keys(["input_ids.0.0", "input_ids.1.0"], [])
    assert "return one list of all samples' tensors" in (refused.value.remedy or "")


@pytest.mark.parametrize("bias_first", [False, True])
def test_groups_of_named_parameters_may_be_empty_on_a_rank(bias_first: bool, write: Write) -> None:
    groups = ["[(n, p) for n, p in params if p.ndim > 1]", "[(n, p) for n, p in params if p.ndim < 2]"]
    first, second = reversed(groups) if bias_first else groups
    text = (
        f"{MODEL}{DATA}\ndef optimizer(params):\n    params = list(params)\n"
        f'    return torch.optim.AdamW([{{"params": {first}, "lr": 0.1}}, {{"params": {second}}}])\n'
    )
    user = load_model_file(write(text))
    optimizer = user.build_optimizer(list(user.build_model().named_parameters()))  # a rank without biases
    assert sorted(group["param_names"] for group in optimizer.param_groups) == [[], ["embed.weight"]]
    assert torch.optim.Optimizer.add_param_group.__name__ == "add_param_group"


def test_a_compiled_model_is_taken_without_its_wrapper(write: Write) -> None:
    text = MODEL.replace("return Net()", 'return torch.compile(Net(), backend="eager")')
    user = load_model_file(write(text + DATA))
    model = user.build_model()
    assert type(model).__name__ == "Net" and [n for n, _ in model.named_parameters()] == ["embed.weight"]
    assert user.forward_names == {"input_ids", "labels", "attention_mask"}


@pytest.mark.parametrize("imported", ["from project.parts.layers import Layer", "from .layers import Layer"])
def test_a_model_file_of_a_package_imports_from_it(imported: str, tmp_path: Path) -> None:
    package = tmp_path / "project" / "parts"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "layers.py").write_text("import torch\nclass Layer(torch.nn.Linear): pass\n")
    (package / "model.py").write_text(f"{imported}\ndef model(): return Layer(2, 2)\n{DATA}")
    path_before = list(sys.path)
    try:
        assert type(load_model_file(package / "model.py").build_model()).__name__ == "Layer"
    finally:
        sys.path[:] = path_before
        for name in [n for n in sys.modules if n.partition(".")[0] == "project"]:
            del sys.modules[name]
