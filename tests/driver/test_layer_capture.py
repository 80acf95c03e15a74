"""Blocks that stay whole rule out the stages that they were opened for, and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from secc.driver.layer_capture import LayerCapturePlan, check_opened_blocks
from secc.errors import ImpossibleChoice

CUT = {"model.vision": "vision.pp", "model.lm": "lm.pp", "model.lm.more": "lm.pp"}


def staging() -> LayerCapturePlan:
    return LayerCapturePlan(tuple(CUT), (), (), CUT, (), (), {})


def captured(*blocks: str) -> Any:
    notes = [SimpleNamespace(path=b, reason="one block", where="model.py:7") for b in blocks]
    return SimpleNamespace(blocks=dict.fromkeys(blocks), notes=notes)


def test_stages_of_opened_blocks_are_not_refused() -> None:
    check_opened_blocks(staging(), captured("model.vision.layers.0", "model.lm.layers.0"))


@pytest.mark.parametrize(
    ("blocks", "choices"),
    [
        (("model.vision", "model.lm.layers.0"), ("vision.pp",)),
        (("model.lm",), ("lm.pp",)),
        (("model",), ("lm.pp", "vision.pp")),
    ],
)
def test_stages_of_a_block_that_stays_whole_are_refused(
    blocks: tuple[str, ...], choices: tuple[str, ...]
) -> None:
    with pytest.raises(ImpossibleChoice, match="cannot be cut into stages") as error:
        check_opened_blocks(staging(), captured(*blocks))
    assert error.value.choices == choices and error.value.where == "model.py:7"
