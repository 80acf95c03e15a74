"""The wheel, the sdist and the editable install hold all of secc, although three of its packages are links to
folders next to it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

NOT_SOURCE = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__")
OUTPUTS = shutil.ignore_patterns("runs", "build", "dist", "plan_*")  # of the checkout's own folder


def build(kind: str, source: Path, target: Path) -> Path:
    """The file that the build backend makes of `source`: `kind` is wheel, sdist or editable."""
    target.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(target)!r}))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    return target / result.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def checkout(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, links kept, so that building leaves nothing behind in the real one."""
    copy = tmp_path_factory.mktemp("checkout") / "secc"
    shutil.copytree(
        root,
        copy,
        symlinks=True,
        ignore=lambda folder, names: (
            NOT_SOURCE(folder, names) | (OUTPUTS(folder, names) if Path(folder) == root else set())
        ),
    )
    return copy


def expected(root: Path) -> set[str]:
    """The path inside the package of every module, template, and file of the report's page."""
    found = {p.relative_to(root) for p in (root / "secc").rglob("*.py")}
    found |= {p.relative_to(root) for p in (root / "secc/report/page").iterdir()}
    for folder in ("passes", "runtime", "templates"):
        found |= {
            Path("secc") / p.relative_to(root)
            for pattern in ("*.py", "*.j2")
            for p in (root / folder).rglob(pattern)
        }
    return {p.as_posix() for p in found}


def packaged(names: list[str]) -> set[str]:
    return {n for n in names if n.startswith("secc/") and n.endswith((".py", ".j2", ".js", ".css"))}


def test_the_wheel_holds_every_module_and_template_and_no_other_package(checkout: Path, tmp_path: Path):
    names = zipfile.ZipFile(build("wheel", checkout, tmp_path)).namelist()
    assert packaged(names) >= expected(checkout)
    assert {n.split("/")[0].split("-")[0] for n in names} == {"secc"}


def test_the_sdist_builds_the_same_wheel(checkout: Path, tmp_path: Path):
    direct = zipfile.ZipFile(build("wheel", checkout, tmp_path / "direct")).namelist()
    shutil.unpack_archive(build("sdist", checkout, tmp_path), tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = zipfile.ZipFile(build("wheel", unpacked, tmp_path / "again")).namelist()
    assert packaged(again) == packaged(direct)


def test_an_editable_install_finds_the_linked_packages_under_secc_only(checkout: Path, tmp_path: Path):
    with zipfile.ZipFile(build("editable", checkout, tmp_path)) as wheel:
        wheel.extractall(tmp_path / "site")
    code = "\n".join(
        [
            "import site, sys, importlib.util as u",
            f"site.addsitedir({str(tmp_path / 'site')!r})",
            "import secc.passes, secc.runtime.plan.schema",
            "print(secc.passes.__file__, u.find_spec('passes'), u.find_spec('runtime'))",
        ]
    )
    # -S: without this environment's own site-packages, where secc may be installed, too
    result = subprocess.run(
        [sys.executable, "-S", "-P", "-c", code],
        cwd=tmp_path,
        env={},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout.split() == [str(checkout / "secc" / "passes" / "__init__.py"), "None", "None"], (
        result.stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_is_built_can_be_installed_and_used(kind: str, checkout: Path, tmp_path: Path):
    """Without the network: dependencies are those of this environment."""
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run(
        [*pip, "--no-build-isolation", "--target", str(site), str(build(kind, checkout, tmp_path / "dist"))],
        check=True,
        timeout=170,
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(site)}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=170
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    code = """
import importlib.metadata as m, secc
from secc.codegen.render import render_template
found = m.distribution("secc")
print(secc.__file__, found.version == secc.__version__, bool(render_template("run.py.j2")))
print(*found.metadata.get_all("Provides-Extra"))
"""
    where, version, renders, *extras = run(sys.executable, "-P", "-c", code).split()
    assert (Path(where).parent, version, renders) == (site / "secc", "True", "True")
    assert {"hf", "tensorboard", "wandb", "mlflow", "trackio", "examples"} <= set(extras)
    assert run(str(site / "bin" / "secc"), "--version").startswith("secc ")
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.a = nn.Linear(4, 1)\n"
        "    def forward(self, x):\n        return self.a(x).square().mean()\n"
        "def model(): return Net()\n"
        "def dataset(): return [{'x': torch.randn(4)} for _ in range(8)]\n"
    )
    plan = ["compile", "model.py", "-o", "plan", "--cluster", "local:1", "--global-batch", "4"]
    run(str(site / "bin" / "secc"), *plan)
    run(str(site / "bin" / "secc"), "run", "plan", "--steps", "1", "--workers", "0")
    assert (tmp_path / "plan" / "logs" / "metrics.jsonl").exists()
