"""plan.json is read only by the version that wrote it; other plans are rejected before anything else is
read.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from secc.runtime.errors import UserError
from secc.runtime.plan.schema import PLAN_VERSION, load_plan


@pytest.mark.parametrize("version", [1, PLAN_VERSION + 1, str(PLAN_VERSION)])
def test_a_plan_of_another_version_is_rejected(version: object, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"version": version}))
    with pytest.raises(
        UserError, match=f"expected a plan of version {PLAN_VERSION}, got version {version!r}"
    ) as refusal:
        load_plan(tmp_path)
    assert refusal.value.where == str(tmp_path / "plan.json")
    assert refusal.value.remedy == "compile the model again"


@pytest.mark.parametrize("text", ["[]", "{}", '{"sections": {}}', "version"])
def test_other_json_is_rejected(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UserError, match="not a plan"):
        load_plan(tmp_path)
