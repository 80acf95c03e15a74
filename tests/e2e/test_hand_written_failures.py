"""What goes wrong by hand and not in a plan (`tools/show_hand_written_failures.py`)."""

from __future__ import annotations

import re

import pytest

from tools.show_hand_written_failures import main

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


def read_encoder_error(output: str, way: str) -> float:
    """Reads how far the encoder is from plain PyTorch's in the line of `way`."""
    found = re.search(rf"^{way}.*encoder is off by (\S+),", output, re.M)
    assert found is not None, output
    return float(found[1])


def test_a_dummy_image_moves_the_encoder_and_a_plan_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    main(["dummy"])
    output = capsys.readouterr().out
    assert read_encoder_error(output, "DDP") > 1e-4
    assert read_encoder_error(output, "secc") < 1e-5


def test_fsdp_hangs_where_a_rank_has_no_image(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fsdp", "--wait", "30"])
    output = capsys.readouterr().out
    assert output.count("hangs: no end after 30 s") == 2 or "finished" not in output
    assert read_encoder_error(output, "secc") < 1e-5
