"""Each way to join components gives the sections that a user expects, and the plan is exact."""

from __future__ import annotations

import pytest

from tools.zoo import EXACT, look
from tools.zoo_models import entry

SECTIONS = {
    "two_teachers": {"deep": "forward", "shallow": "forward", "student": "train"},
    "shared_encoder": {"encoder": "train", "teacher": "forward", "student": "train"},
    "called_twice": {"model": "train"},
    "feeds_two": {"encoder": "train", "decoder": "train"},
    "frozen_middle": {"encoder": "train", "language_model": "dgrad", "head": "train"},
    "sometimes": {"pictures": "train", "sketches": "train", "decoder": "train"},
}
HABITS = {
    "watched": {"teacher": "forward", "student": "train"},
    "routed": {"model": "train"},
    "forces": {"model": "train"},
    "fourier": {"model": "train"},
}
ADAPTED = {
    "lora_llava": {"vision_tower": "forward", "language_model": "train"},
    "lora_tower": {"vision_tower": "train", "language_model": "dgrad"},
    "lora_t5": {"encoder": "train", "decoder": "train"},
    "lora_student": {"teacher": "forward", "student": "train"},
    "dpo_lora": {"model": "train"},
}


@pytest.mark.parametrize("name", SECTIONS)
def test_structures_are_exact_in_their_sections(name: str) -> None:
    row = look(entry(name), run=False)
    assert (row.check, row.glue) == (EXACT, "generic")
    assert row.sections == SECTIONS[name]


@pytest.mark.parametrize("name", HABITS)
def test_side_effects_of_research_code_are_exact(name: str) -> None:
    row = look(entry(name), run=False)
    assert (row.check, row.glue) == (EXACT, "generic")
    assert row.sections == HABITS[name]


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_on_frozen_models_are_exact(name: str) -> None:
    pytest.importorskip("peft")
    row = look(entry(name), run=False)
    assert (row.check, row.glue) == (EXACT, "generic")
    assert row.sections == ADAPTED[name]
