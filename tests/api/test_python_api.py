"""The Python interface: results and their forms, functions of scripts and notebooks as model files, and the
example notebook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import secc
from secc.api.plan import choice_texts, make_run_result, option_arguments
from secc.api.results import Result
from secc.report.text_table import TextTable

NOTEBOOK = "examples/distillation.ipynb"
IPYTHON_RUNNER = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for source in json.load(open(sys.argv[1])):
    shell.run_cell(source, store_history=True).raise_error()
"""
SCRIPT = """
import torch
from torch import nn
import secc

WIDTH = 4
values = [1.0, 2.0]
values.append(3.0)
for _ in range(1):
    looped = 2

def net():
    return nn.Linear(WIDTH, WIDTH)

def data():
    return [{"x": torch.zeros(WIDTH)}]

def outer():
    def inner():
        return net()
    return inner

def uses_loop():
    return [looped]
"""


def code_cells(root: Path) -> list[str]:
    cells = json.loads((root / NOTEBOOK).read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run_python(arguments: list[str], folder: Path, root: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(root), "TMPDIR": str(folder), "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=850
    )


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_runs_as_a_script(root: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "\n".join([*code_cells(root), "print('RESULT', run.evaluations[-1]['accuracy'], run.losses)"])
    )
    done = run_python([str(script)], tmp_path, root)
    assert done.returncode == 0, done.stderr[-3000:]
    *_, accuracy, losses = done.stdout.rpartition("RESULT")[2].split(maxsplit=1)
    assert float(accuracy) > 0.4 and len(json.loads(losses)) == 30
    assert json.loads(losses)[-1] < json.loads(losses)[0]
    assert (tmp_path / "notebook_checkpoints" / "step_00000030").is_dir()


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_runs_in_ipython(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    (tmp_path / "cells.json").write_text(json.dumps(code_cells(root)))
    done = run_python(["-c", IPYTHON_RUNNER, "cells.json"], tmp_path, root)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


REFUSED = {
    "secc.Model(model=lambda: net(), dataset=data)": "not defined at the top level",
    "secc.Model(model=outer(), dataset=data)": "not defined at the top level",
    "secc.Model(model=net, dataset=uses_loop)": "'looped', which the model uses, cannot be made again",
    "secc.Model(model=net)": "a model needs the function dataset=",
    "secc.Model(model=net, dataset=data, trainer=net)": "unknown function 'trainer'",
    "secc.load('missing.py')": "there is no such model file",
    "secc.compile('script.py', globalbatch=4)": "what to do: write global_batch=; options are accept,",
    "secc.compile('script.py', compared_only=True)": "unknown option 'compared_only'",
    "secc.compile('missing.py', section='a=b', gather='a', stats='s.json')": "there is no such model file",
}


def test_a_model_file_has_what_the_functions_need_and_the_rest_is_refused_by_name(
    root: Path, tmp_path: Path
) -> None:
    text = f"{SCRIPT}\nsecc.Model(file='made.py', model=net, dataset=data)\n"
    for call in REFUSED:
        text += f"try:\n    {call}\nexcept secc.UserError as error:\n    print(repr(str(error)))\n"
    (tmp_path / "script.py").write_text(text)
    done = run_python(["script.py"], tmp_path, root)
    assert done.returncode == 0, done.stderr[-1000:]
    for line, expected in zip(done.stdout.splitlines(), REFUSED.values(), strict=True):
        assert expected in line
    made = (tmp_path / "made.py").read_text()
    assert "WIDTH = 4" in made and "model = net" in made and "dataset = data" in made
    assert all(word not in made for word in ("values", "looped", "outer", "import secc"))


STREAMS = """
import torch
from torch import nn
import secc

def net():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
        def forward(self, x):
            return self.inner(x).square().mean()
    return Net()

def numbers():
    return ({"x": torch.full((4,), float(i))} for i in range(10))

def mixed():
    return {"a": (2, numbers()), "b": (1, [{"x": torch.ones(4)}])}

if __name__ == "__main__":
    for number, functions in enumerate(({"dataset": numbers}, {"datasets": mixed})):
        model = secc.Model(model=net, **functions)
        plan = secc.compile(model, cluster="local:2", global_batch=6, out=f"plan{number}")
        plan.run(steps=4)
"""


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_streams_and_mixtures_from_functions(root: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(STREAMS)
    done = run_python(["script.py"], tmp_path, root)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "dataset() has ended after 10 samples and begins again" in done.stderr
    assert "datasets()['a'][1] has ended after 10 samples" in done.stderr
    for number in range(2):
        lines = (tmp_path / f"plan{number}/logs/metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["samples"] for line in lines] == [6, 6, 6, 6]


DISTILLED = """
import torch, transformers
from torch.nn import functional as F

import secc


class Distilled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
        self.student = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))
        self.teacher = torch.nn.Embedding(64, 64).requires_grad_(False)

    def forward(self, input_ids, labels):
        logits = self.student(input_ids).logits
        ce = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": ce + F.mse_loss(logits, self.teacher(input_ids)), "ce": ce}


def texts():
    ids = torch.randint(64, (40, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def held_out():
    return texts()[:7]


def perplexity(outputs):
    return {"perplexity": float(torch.tensor(outputs["ce"]).exp())}


if __name__ == "__main__":
    model = secc.Model(model=Distilled, dataset=texts, eval_dataset=held_out, metrics=perplexity)
    plan = secc.compile(model, cluster="local:2", global_batch=8)
    run = plan.run(steps=3, save="saved", eval_every=3, workers=0)
    (found,) = plan.evaluate(resume="saved", workers=0).evaluations
    assert found["perplexity"] == run.evaluations[-1]["perplexity"]
    student, whole = secc.export("saved", hf="student", component="student"), Distilled()
    assert student.details["kind"] == "model" and student.path.name == "student"
    weights = secc.export("saved", output="weights.safetensors")
    from safetensors.torch import load_file

    whole.load_state_dict(load_file(weights.path))
    ids = torch.arange(9)[None]  # a name that functions above use for values of their own
    loaded = transformers.AutoModelForCausalLM.from_pretrained(student.path)
    assert torch.equal(loaded(ids).logits, whole.student(ids).logits)
    losses = [float(whole(**{k: v[None] for k, v in s.items()})["loss"].detach()) for s in held_out()]
    print("RESULT", sum(losses) / 7, found["loss"])
"""


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_script_trains_evaluates_and_exports(root: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(DISTILLED)
    done = run_python(["script.py"], tmp_path, root)
    assert done.returncode == 0, done.stderr[-3000:]
    expected, evaluated = map(float, done.stdout.rpartition("RESULT")[2].split())
    assert evaluated == pytest.approx(expected, rel=1e-6)


def test_results_are_text_html_and_data_frames() -> None:
    rows = (("a" * 70, "0.5"), ("<b>", "2"))
    facts = (("fact", "x & y"), ("long", "word " * 30))
    result = Result(facts, (TextTable("T", ("name", "value"), rows, "note"),))
    lines = str(result).splitlines()
    assert max(map(len, lines)) <= 100 and lines[0] == "fact  x & y" and lines[2].startswith("      word")
    page = result._repr_html_()  # pyright: ignore[reportPrivateUsage]
    assert "x &amp; y" in page and "&lt;b&gt;" in page and "<b>T</b>" in page
    with pytest.raises(KeyError, match="there are T"):
        result.table("U")
    pandas = pytest.importorskip("pandas")
    frame = result.to_pandas("T")
    assert isinstance(frame, pandas.DataFrame) and frame["value"].sum() == 2.5


def test_arguments_are_those_of_the_command_line(tmp_path: Path) -> None:
    assert choice_texts({"student.tp": 2}) == ("student.tp=2",)
    options = {"save_every": 5, "shuffle": True, "debug_comm": False, "init": ["a=b", "c"], "clip": None}
    assert option_arguments(options) == ["--save-every", "5", "--shuffle", "--init", "a=b", "--init", "c"]
    assert option_arguments({"first_check": False, "save_async": False}) == [
        *("--no-first-check", "--no-save-async")
    ]


def test_a_runs_table_has_the_metrics_that_people_read(tmp_path: Path) -> None:
    common = {"run": "f" * 32, "recorded": 0.0, "waiting_s": 0.1}
    lines = [
        common | {"ce": 0.5, "step": 1, "loss": 2.0, "learning_rate": 1e-4},
        common | {"step": 1, "eval": "eval", "loss": 1.0, "grad_norm": None},
    ]
    result = make_run_result(tmp_path, lines)
    assert result.losses == [2.0] and result.metrics[0]["run"] == "f" * 32
    tables = [(t.title, t.columns) for t in result.tables]
    assert tables == [
        ("Steps", ("step", "loss", "ce", "learning_rate")),
        ("Evaluations", ("step", "eval", "loss")),
    ]


def test_importing_secc_is_light_and_lists_its_names() -> None:
    assert secc.__version__ and {"load", "Model", "compile", "check", "Plan", "Trainer"} <= set(secc.__all__)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = secc.missing  # pyright: ignore[reportAttributeAccessIssue]


ONE_RANK = """
import torch
from torch import nn
from torch.nn import functional as F


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.codes, self.head = nn.Parameter(torch.randn(8, 4)), nn.Linear(4, 3)

    def forward(self, x, y):
        nearest = torch.cdist(x, self.codes).argmin(1).tolist()
        return F.cross_entropy(self.head(x + self.codes[nearest]), y) * len(set(nearest))


def model():
    return Codebook()


def dataset():
    made = (torch.Generator().manual_seed(i) for i in range(40))
    return [{"x": torch.randn(4, generator=g), "y": torch.tensor(i % 3)} for i, g in enumerate(made)]
"""


def test_a_check_takes_one_rank_where_there_is_work_for_no_more(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(ONE_RANK)
    blocks = ("lines_13_to_14",)
    assert secc.check(path, whole_batch=blocks).plan.world_size == 1
    with pytest.raises(secc.UserError, match="expected at most 1 rank") as refused:
        secc.check(path, whole_batch=blocks, ranks=2)
    assert "use at most 1 rank," in refused.value.remedy
