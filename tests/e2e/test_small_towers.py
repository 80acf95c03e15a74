"""Whether a small tower becomes a section: the plan with the shorter step decides, both step times are
reported, and training is exact."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.e2e.harness import (
    compile_and_write,
    find_differences,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)

MODELS = Path(__file__).parent.parent / "models"
STEPS = re.compile(r"a step of ([\d.e-]+) s .*, ([\d.e-]+) s (.*)")
GLOBAL_BATCH = 12


@pytest.mark.gloo
def test_a_small_tower_stays_a_section_if_that_shortens_the_step(tmp_path: Path) -> None:
    model = write_recording_model("looked_up", tmp_path, MODELS)
    plan = compile_and_write(model, tmp_path / "plan", cluster="1x3xcpu", global_batch=GLOBAL_BATCH).plan
    told = [n for reasons in plan.reasons.values() for n in reasons.get("formed", ())]
    steps = next(found for n in told if (found := STEPS.search(n)))
    assert float(steps[1]) < float(steps[2]) and steps[3] == "in another section"
    assert [s.name for s in plan.user_sections] == ["body", "tower"]
    found = train_distributed(tmp_path / "plan", plan.world_size, 2, tmp_path / "run")
    assert not list(find_differences(found, train_in_one_process(model, GLOBAL_BATCH, 2, tmp_path / "plain")))


@pytest.mark.gloo
@pytest.mark.parametrize("order", ["wavefront", "dataset"])
@pytest.mark.parametrize(
    ("name", "sections", "when"),
    [
        ("padded_pictures", ("tower=tower", "decoder=keys+query+embed+decoder+head"), "pictures"),
        ("fused_senses", ("tower=joint+out", "decoder=embed+decoder+head"), "picture&sound"),
    ],
)
def test_a_tower_works_for_the_samples_that_reach_it(
    name: str, sections: tuple[str, ...], when: str, order: str, tmp_path: Path
) -> None:
    """Micro-batches hold samples of one pattern, in any order, so other samples need no rows of the tower,
    although `collate` gives them rows of zeros in a mixed batch."""
    model = write_recording_model(name, tmp_path, MODELS)
    compiled = compile_and_write(
        model,
        tmp_path / "plan",
        cluster="local:2",
        global_batch=GLOBAL_BATCH,
        strategy="apart",
        sections=sections,
    )
    assert [(s.name, s.when) for s in compiled.plan.sections] == [("tower", (when,)), ("decoder", ())]
    found = train_distributed(tmp_path / "plan", 2, 2, tmp_path / "run", "--order", order)
    assert not list(find_differences(found, train_in_one_process(model, GLOBAL_BATCH, 2, tmp_path / "plain")))


@pytest.mark.gloo
def test_a_term_that_mixed_batches_lack_is_left_out_of_them(tmp_path: Path) -> None:
    """Two batches have a picture and no distillation, the third one is of texts alone. Weights that only this
    term trains get no gradient in the others, so that the optimizer leaves them alone, as in one process."""
    model = write_recording_model("taught_texts", tmp_path, MODELS)
    plan = compile_and_write(model, tmp_path / "plan", cluster="local:3", global_batch=GLOBAL_BATCH).plan
    [text] = plan.checks["left_out_terms"]
    assert re.match(r"term \w+ of the loss .* in batches of samples without picture only", text)
    found = train_distributed(tmp_path / "plan", plan.world_size, 3, tmp_path / "run")
    expected = train_in_one_process(model, GLOBAL_BATCH, 3, tmp_path / "plain")
    two_steps = train_in_one_process(model, GLOBAL_BATCH, 2, tmp_path / "plain_2")
    assert expected.gradients["scale.weight"] is None
    assert not torch.equal(expected.parameters["scale.weight"], two_steps.parameters["scale.weight"])
    assert not list(find_differences(found, expected))
