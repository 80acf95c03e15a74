"""What a model file imports: the user's files and packages that plans keep track of."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from secc.runtime.model.imported_code import (
    find_imported_files,
    find_package_modules,
    find_package_versions,
    import_package_modules,
    package_version,
)
from secc.runtime.model.user_file import load_model_file

NET = """
from torch import nn
from . import constants
from .layers.scale import Scaled as _Scaled
class Net(nn.Linear):
    pass
"""
MODEL = """
import json, torch, numpy
import imported_net_pkg.extra as extra
from imported_net_pkg.net import Net
def model(): return Net(2, 2)
def dataset():
    from imported_net_pkg import data
    return data.samples
"""


@pytest.fixture
def model_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    package = tmp_path / "imported_net_pkg"
    (package / "layers").mkdir(parents=True)
    texts = {
        "__init__.py": "",
        "net.py": NET,
        "constants.py": "SCALE = 1.0",
        "extra.py": "",
        "data.py": "samples = [{}]",
        "unused.py": "",
        "layers/__init__.py": "",
        "layers/scale.py": "class Scaled: pass",
    }
    for name, text in texts.items():
        (package / name).write_text(text)
    (tmp_path / "model.py").write_text(MODEL)
    yield tmp_path / "model.py"
    for name in [n for n in sys.modules if n.partition(".")[0] == "imported_net_pkg"]:
        del sys.modules[name]
    sys.path.remove(str(tmp_path))


def test_files_are_found_through_all_imports_of_the_user(model_file: Path) -> None:
    user = load_model_file(model_file)
    model = user.build_model()
    before = find_imported_files(user.module, model)
    names = ["", ".constants", ".extra", ".layers", ".layers.scale", ".net"]
    assert list(before) == [f"imported_net_pkg{name}" for name in names]
    assert before["imported_net_pkg.net"] == model_file.parent / "imported_net_pkg" / "net.py"
    user.dataset()  # imports a module when it is called
    assert "imported_net_pkg.data" in find_imported_files(user.module, model)


@pytest.mark.parametrize("package", [True, False], ids=["package", "namespace"])
def test_a_file_that_changed_is_imported_again(model_file: Path, package: bool) -> None:
    folder = model_file.parent / "imported_net_pkg"
    if not package:
        (folder / "__init__.py").unlink()
    (folder / "net.py").write_text("from . import constants\ndef scale(): return constants.SCALE")
    model_file.write_text("from imported_net_pkg import net\ndef model(): return net.scale()")
    user = load_model_file(model_file)
    find_imported_files(user.module, nn.Linear(1, 1))
    assert user.module.model() == 1.0
    same = load_model_file(model_file)
    assert same.module.net is user.module.net
    (folder / "constants.py").write_text("SCALE = 3.0")  # in the same second, of the same size
    assert load_model_file(model_file).module.model() == 3.0


def test_packages_of_modules_have_their_versions() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    model = nn.Sequential(LlamaRMSNorm(4), nn.Linear(4, 4))
    assert find_package_versions(model) == {"transformers": transformers.__version__}
    assert find_package_versions(nn.Linear(4, 4)) == {}
    assert find_package_modules(model) == ("transformers.models.llama.modeling_llama",)


def test_modules_of_packages_are_imported_if_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    name = "transformers.models.llama.modeling_llama"
    monkeypatch.delitem(sys.modules, name, raising=False)
    import_package_modules(("no_such_package.net", name))
    assert name in sys.modules


def test_version_of_a_package_with_another_name_than_its_distribution() -> None:
    assert package_version("yaml") == package_version("PyYAML") != ""
    assert package_version("no_such_package") == ""


def test_an_edit_within_a_second_that_keeps_the_length_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    scales: list[int] = []
    for scale in (1, 2):
        path.write_text(f"SCALE = {scale}\ndef model(): ...\ndef dataset(): ...\n")
        os.utime(path, (1_000_000, 1_000_000))
        scales.append(load_model_file(path).module.SCALE)
    assert scales == [1, 2]
