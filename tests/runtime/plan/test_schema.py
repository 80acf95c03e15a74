"""plan.json is read by the version that wrote it: another one's plan is refused before anything of it is
looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from secc.runtime.errors import UserError
from secc.runtime.plan.schema import VERSION, load


@pytest.mark.parametrize("version", [1, VERSION + 1, str(VERSION)])
def test_a_plan_of_another_version_is_refused(version: object, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"version": version}))
    with pytest.raises(
        UserError, match=f"of version {version!r}, and this secc runs plans of version {VERSION}"
    ) as refusal:
        load(tmp_path)
    assert refusal.value.where == str(tmp_path / "plan.json")
    assert refusal.value.remedy == "compile the model again"


@pytest.mark.parametrize("text", ["[]", "{}", '{"sections": {}}', "version"])
def test_what_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UserError, match="not a plan"):
        load(tmp_path)
