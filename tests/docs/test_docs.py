"""The documents speak of what exists: links lead somewhere, quoted messages are in the code, the README's
model trains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import typer

from secc import cli
from secc.runtime.model.user_file import extract_loss, load_model_file
from secc.runtime.training import options as run_options

PAGES = (
    "README.md",
    "CHANGELOG.md",
    "docs/guide.md",
    "docs/tutorial.md",
    "docs/troubleshooting.md",
    "docs/architecture.md",
    "docs/baselines.md",
    "docs/costs.md",
    "docs/fusion.md",
    "docs/kernels.md",
    "docs/zoo.md",
)
FOLDERS = ("secc", "passes", "runtime")


@pytest.fixture(scope="module")
def code(root: Path) -> str:
    """All source of secc in one text."""
    return "\n".join(p.read_text() for folder in FOLDERS for p in sorted((root / folder).rglob("*.py")))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(root: Path, page: str):
    links = re.findall(r"\]\(([^)#:]+)\)", (root / page).read_text())
    assert [link for link in links if not (root / page).parent.joinpath(link).exists()] == []


def test_quoted_messages_are_in_the_code(root: Path, code: str):
    quoted = re.findall(r"^### `(.+)`$", (root / "docs/troubleshooting.md").read_text(), re.M)
    assert len(quoted) > 10
    assert [q for q in quoted if q not in code] == []


@pytest.fixture(scope="module")
def options(root: Path) -> set[str]:
    """The options of every command of secc, of runs, of the tests, and of the scripts beside it."""
    commands = typer.main.get_command(cli.app)
    assert isinstance(commands, cli.LazyCommands)
    context = commands.make_context("secc", [], resilient_parsing=True)
    found = [commands.get_command(context, name) for name in cli.COMMAND_NAMES]
    known = {
        option
        for command in found
        if command
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    known |= set(run_options.make_parser()._option_string_actions)
    known |= {"--hypothesis-seed"}  # a plugin's
    scripts = [
        root / "tests/conftest.py",
        *root.glob("examples/*.py"),
        *root.glob("tools/*.py"),
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
    named = re.findall(r"\b((?:examples|tools|tests|docs)/[\w/.]+\.\w+)", (root / page).read_text())
    assert [n for n in named if not (root / n).exists()] == []


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
