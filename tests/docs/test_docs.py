"""Documents name what exists: links, files, options, messages, passes, packages; the README's model
trains."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.run
import typer

from secc import check, cli
from secc.pass_pipeline import PASS_CLASSES
from secc.runtime.model.user_file import extract_loss, load_model_file
from secc.runtime.training import options as run_options

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(str(p.relative_to(ROOT)) for p in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
FOLDERS = ("secc", "passes", "runtime")
INTERNALS_BYTES = 8192  # an internals page that needs more should be two


def prose_of(path: Path) -> str:
    """A page without its blocks of code, which show other files' contents."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)


def anchors_of(path: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose_of(path), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(root: Path, page: str):
    broken: list[str] = []
    for link in re.findall(r"\]\(([^):\s]+)\)", prose_of(root / page)):
        file, _, anchor = link.partition("#")
        target = (root / page).parent / file if file else root / page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_the_reading_order(root: Path):
    index = root / "docs/README.md"
    links = re.findall(r"\]\(([^):#\s]+)", index.read_text())
    reached = {(index.parent / link).resolve() for link in links}
    pages = {p.resolve() for p in (root / "docs").rglob("*.md")} - {index.resolve()}
    assert sorted(str(p.relative_to(root)) for p in pages - reached) == []


def test_internals_pages_are_short(root: Path):
    sizes = {p.name: p.stat().st_size for p in (root / "docs/internals").glob("*.md")}
    assert len(sizes) >= 8 and {name: n for name, n in sizes.items() if n > INTERNALS_BYTES} == {}


def test_every_pass_is_documented(root: Path):
    table = (root / "docs/internals/ir.md").read_text()
    missing = [name for name in PASS_CLASSES if f"`{name}`" not in table]
    assert missing == [], f"the tables of passes in docs/internals/ir.md lack {', '.join(missing)}"


def test_every_package_is_in_the_layout(root: Path):
    text = (root / "docs/layout.md").read_text()
    packages = [f"`{p.name}`" for p in (root / "runtime").iterdir() if (p / "__init__.py").exists()]
    for path in (root / "secc").iterdir():
        if (path / "__init__.py").exists() and not path.is_symlink():
            inner = [p for p in path.iterdir() if (p / "__init__.py").exists()]
            packages += [f"`{path.name}.{p.name}`" for p in inner] or [f"`{path.name}`"]
    for package in packages:
        short = package.strip("`").rpartition(".")[2]
        assert package in text or f"`.{short}`" in text, f"docs/layout.md lacks {package}"


@pytest.mark.parametrize("path", sorted((ROOT / "docs/benchmarks").glob("*.json")), ids=lambda p: p.stem)
def test_benchmark_tables_are_complete(root: Path, path: Path):
    table = json.loads(path.read_text())
    assert {"command", "about", "columns", "rows"} <= table.keys()
    assert table["rows"] and {len(row) for row in table["rows"]} == {len(table["columns"])}
    assert f"({path.parent.name}/{path.name})" in (root / "docs/benchmarks.md").read_text()


@pytest.fixture(scope="module")
def messages(root: Path) -> str:
    """All string literals of secc in one text, also those that stand on several lines."""
    literals: list[str] = []
    for path in (p for folder in FOLDERS for p in sorted((root / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                literals.append(node.value)
    return "\n".join(literals)


def test_quoted_messages_are_in_the_code(root: Path, messages: str):
    quoted = re.findall(r"^### `(.+)`$", (root / "docs/troubleshooting.md").read_text(), re.M)
    assert len(quoted) > 10
    assert [q for q in quoted if q not in messages] == []


@pytest.fixture(scope="module")
def options(root: Path) -> set[str]:
    """The options of every command of secc, of runs, of the tests, and of the scripts in this repository."""
    commands = typer.main.get_command(cli.app)
    assert isinstance(commands, cli.LazyCommands)
    context = commands.make_context("secc", [], resilient_parsing=True)
    found = [commands.get_command(context, name) for name in cli.COMMAND_NAMES]  # pyright: ignore[reportArgumentType]
    known = {
        option
        for command in found
        if command
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    known |= {option for parameter in commands.params for option in parameter.opts}
    known |= set(run_options.make_parser()._option_string_actions)
    known |= {"--hypothesis-seed"}  # a plugin's
    known |= set(vars(torch.distributed.run.get_args_parser())["_option_string_actions"])
    scripts = [
        root / "tests/conftest.py",
        *root.glob("examples/*.py"),
        *root.glob("tools/*.py"),
        *root.glob("tools/*/*.py"),
        *root.glob("tools/*.sh"),
    ]
    return known | {
        option for script in scripts for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", script.read_text())
    }


@pytest.mark.parametrize("page", PAGES)
def test_options_are_taken(root: Path, options: set[str], page: str):
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (root / page).read_text()))
    assert sorted(named - options) == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(root: Path, page: str):
    text = re.sub(r"https?://\S+", "", prose_of(root / page))  # files of others
    named = re.findall(r"\b((?:examples|tools|tests|docs)/[\w/.]+\.\w+)", text)
    named += re.findall(r"`((?:secc|passes|runtime|templates)/[\w/.]+)`", text)
    assert [n for n in named if not (root / n).exists() and "drop_clones" not in n] == []  # a how-to makes it


def test_the_model_of_the_readme_trains(root: Path, tmp_path: Path):
    source = re.search(r"## A model.py.*?```python\n(.*?)```", (root / "README.md").read_text(), re.S)
    assert source is not None and source[1].count("\n") <= 42
    (tmp_path / "model.py").write_text(source[1])
    user = load_model_file(tmp_path / "model.py")
    model = user.build_model()
    loss = extract_loss(model(**user.collate([user.load_sample(i) for i in range(4)])))
    loss.backward()
    assert torch.isfinite(loss)
    user.build_optimizer(list(model.named_parameters())).step()


ACCELERATE_USERS_MODULE = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax
from torch.utils.data import Dataset


class Tower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.up = nn.Linear(width, 2 * width)
        self.head = nn.Linear(2 * width, 50)

    def forward(self, ids):
        return self.head(torch.relu(self.up(self.embed(ids))))


class Distill(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher = Tower(64).requires_grad_(False)
        self.student = Tower(32)

    def forward(self, input_ids, labels):
        with torch.no_grad():
            target = softmax(self.teacher(input_ids), -1)
        logits = self.student(input_ids)
        kept = labels != -100
        distance = kl_div(log_softmax(logits, -1), target, reduction="none").sum(-1)[kept].mean()
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()) + distance}


class Texts(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        ids = torch.randint(1, 50, (5 + i % 7,))
        return {"input_ids": ids, "labels": ids}


def collate(samples):
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([s["input_ids"] for s in samples], True, 0),
        "labels": pad([s["labels"] for s in samples], True, -100),
    }
"""


@pytest.mark.slow
def test_the_nine_lines_for_accelerate_are_exact(root: Path, tmp_path: Path):
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs/compare.md").read_text(), re.S)
    assert blocks[-1].count("\n") == 9
    (tmp_path / "model.py").write_text("import torch, transformers\n" + blocks[-1])
    (tmp_path / "mine.py").write_text(ACCELERATE_USERS_MODULE)
    assert check(tmp_path / "model.py").is_exact


def commands_of_the_tutorial(root: Path) -> tuple[list[str], list[str]]:
    """The commands of the tutorial, a text for each block: up to its second example, and of that one."""
    walk, found, distillation = (root / "docs/tutorial.md").read_text().partition("## Distillation")
    assert found
    first, second = (re.findall(r"```sh\n(.*?)```", part, re.S) for part in (walk, distillation))
    return first, second


def run_in_a_copy(root: Path, folder: Path, commands: Sequence[str], timeout_s: int) -> str:
    """Runs commands in a copy of the checkout, as bash does with `set -e`. Returns what they print."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in filter(None, names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, folder / name, follow_symlinks=False)
    (folder / "bin").mkdir()
    (folder / "bin" / "secc").write_text(f'#!/bin/sh\nexec {sys.executable} -m secc "$@"\n')
    (folder / "bin" / "secc").chmod(0o755)
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(commands)],
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_tutorial_runs_word_for_word(root: Path, tmp_path: Path):
    """In a copy of the checkout. Installing takes the network, and the longest: it is left out unless
    SECC_TUTORIAL_INSTALL is set; then the commands find this environment's packages."""
    (install, *others), _ = commands_of_the_tutorial(root)
    assert "pip install -e" in install and "export OMP_NUM_THREADS" in install
    if not os.environ.get("SECC_TUTORIAL_INSTALL"):
        install = "\n".join(line for line in install.splitlines() if line.startswith("export"))
    said = run_in_a_copy(root, tmp_path, [install, *others], 2900)
    assert re.search(r"LlavaForConditionalGeneration with \d{6} parameters", said)
    folder = {p.name for p in (tmp_path / "runs/digits/llava").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors"} <= folder
    report = (tmp_path / "runs/digits/plan/report.html").read_text()
    assert report.startswith("<!DOCTYPE html>") or report.startswith("<!doctype html>")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_distillation_of_the_tutorial_runs_word_for_word(root: Path, tmp_path: Path):
    (install, *_), commands = commands_of_the_tutorial(root)
    threads = [line for line in install.splitlines() if line.startswith("export")]
    said = run_in_a_copy(root, tmp_path, [*threads, *commands], 2900)
    loss = re.search(r"held-out loss ([\d.]+) nats per byte", said)
    assert loss is not None and 1.0 < float(loss[1]) < 2.0, said[-300:]  # 5.5 before training
