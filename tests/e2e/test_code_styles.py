"""Styles of research code: nested batches, packed images, conditioned layers, loops over the batch,
lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError
from secc.report.html_page import report_page
from tools.compare_training import (
    find_differences,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)

MODELS = Path(__file__).parent.parent / "models"


def compiled(name: str, *choices: str) -> CompiledPlan:
    """The plan of a model for two ranks, shown to be exact for every pattern."""
    options = CompileOptions(cluster="local:2", global_batch=12, set=choices)
    return check_exactness(compile_model(MODELS / f"{name}.py", options), required=True)


def test_packed_images_in_a_nested_batch_are_exact() -> None:
    plan = compiled("packed_images").plan
    assert {s.name: s.mode for s in plan.sections} == {"vision": "train", "text": "train"}
    assert {i.key for i in plan.inputs if i.optional} == {"images.patches", "images.image", "images.places"}


def test_models_with_nested_batches_take_tp() -> None:
    degrees = {s.name: s.mesh.tp for s in compiled("packed_images", "text.tp=2").plan.sections}
    assert degrees == {"vision": 1, "text": 2}


def test_documents_of_a_row_are_told_apart_by_one_hot_codes() -> None:
    assert [s.mode for s in compiled("packed_rows").plan.sections] == ["train"]


def test_layers_conditioned_on_pictures_are_captured_by_their_parts() -> None:
    plan = compiled("conditioned").plan
    assert {"layers.0.seen", "layers.0.mlp"} <= {b for s in plan.sections for b in s.blocks}
    assert any(
        "layers.0: its parts are blocks, because block layers.0 uses a tensor" in note
        for note in plan.checks["notes"]
    )


def test_a_module_called_in_a_loop_over_the_batch_becomes_part_of_a_larger_block() -> None:
    plan = compiled("one_by_one").plan
    assert {b for s in plan.sections for b in s.blocks} == {"captioner", "head"}
    (note,) = (note for note in plan.checks["notes"] if "one block" in note)
    assert note.startswith("captioner: one block, because ") and "one_by_one.py:" in note


def test_lists_that_grow_with_the_samples_are_exact() -> None:
    plan = compiled("listed").plan
    assert {"vision", "sound"} <= {b for s in plan.sections for b in s.blocks}
    dims = {i.key: i.dims for i in plan.inputs}
    assert dims["pictures.*"] == ("n_pictures",) and dims["sounds.*"] == ("n_sounds", "4")
    assert dims["small.thumbs.*"] == ("B", "3", "2", "2") and dims["pictures.*most"] == (
        "0",
        "3",
        "S_pictures",
        "S_pictures_3",
    )


@pytest.mark.slow
def test_lists_of_dicts_that_grow_with_the_samples_are_exact() -> None:
    plan = compiled("boxes").plan
    assert "asked" in {b for s in plan.sections for b in s.blocks}
    assert [n["kind"][1] for n in plan.recorded[0].nodes if n["kind"][:2] == ["recorded", "loss:0"]]


@pytest.mark.slow
def test_losses_summed_in_a_loop_over_samples_are_exact() -> None:
    plan = compiled("per_sample").plan
    (case,) = plan.recorded
    assert [
        n["kind"][1] for n in case.nodes if n["kind"][0] == "recorded" and n["kind"][1].startswith("loss:")
    ] == ["loss:0", "loss:1"]
    assert {"layers", "teacher"} <= {b.split(".")[1] for s in plan.sections for b in s.blocks}


def test_a_loop_over_samples_around_modules_is_refused_with_a_remedy() -> None:
    with pytest.raises(UserError, match=r"per_sample_modules\.py:\d+: .* the glue's ops change") as error:
        compiled("per_sample_modules")
    assert "--whole-batch lines_16_to_20" in error.value.remedy


def test_a_tower_that_stores_a_tensor_for_another_is_captured_by_its_parts() -> None:
    plan = compiled("kept").plan
    assert {"vision.layers.0", "text.seen", "text.layers.2"} <= {b for s in plan.sections for b in s.blocks}
    assert plan.checks["notes"][0].startswith(
        "vision: its parts are blocks, because block vision keeps a tensor on a module, which text uses"
    )


def test_layers_that_keep_tensors_for_the_loss_are_captured_by_their_parts() -> None:
    plan = compiled("attention_maps").plan
    assert {"looks.0.q", "looks.1.o", "tower"} <= {b for s in plan.sections for b in s.blocks}
    assert "block looks.0 keeps a tensor on a module, which forward uses" in plan.checks["notes"][0]


def test_layers_that_add_to_a_list_of_their_callers_are_captured_by_their_parts() -> None:
    plan = compiled("passed_lists").plan
    assert {"layers.0.router", "layers.2.norm", "teacher"} <= {b for s in plan.sections for b in s.blocks}
    assert "it adds to a list or dict of its caller's" in plan.checks["notes"][0]


def test_a_block_that_takes_lengths_gets_its_shapes_from_their_values() -> None:
    plan = compiled("heard").plan
    assert {"encoder", "head"} == {b for s in plan.sections for b in s.blocks}


def test_a_loss_over_chunks_of_a_flat_batch_is_one_pass() -> None:
    (section,) = compiled("chunked_loss").plan.sections
    assert "head" in section.blocks


@pytest.mark.slow  # records every combination of conditions
def test_heads_that_are_called_if_the_batch_has_their_task_are_exact() -> None:
    compiled("task_heads")


@pytest.mark.slow  # four patterns
def test_a_weight_counts_once_if_any_sample_has_the_labels_of_its_task() -> None:
    terms = compiled("weighted_tasks").plan.terms
    assert len({t.name for t in terms if t.name.startswith("constant")}) == 2


def test_a_weight_counts_once_if_samples_without_its_task_have_rows_of_zeros() -> None:
    assert [t.name for t in compiled("flagged_task").plan.terms].count("constant") == 1


def test_samples_may_be_tuples_and_a_number_of_them_an_integer() -> None:
    compiled("graphs")


@pytest.mark.slow  # every micro-batch is recorded
def test_a_loss_may_take_what_a_loop_joined_of_parts_of_the_samples(tmp_path: Path) -> None:
    (case,) = compiled("ragged_reader").plan.recorded
    recorded = {n["kind"][1] for n in case.nodes if n["kind"][0] == "recorded"}
    assert {"loss:0", "loss:1"} <= recorded
    mean = (MODELS / "ragged_reader.py").read_text().replace("F.cross_entropy(pad", "torch.mean(pad")
    (tmp_path / "mean.py").write_text(mean.replace("padding_value=-1e9), best)", "padding_value=0))"))
    with pytest.raises(UserError, match="divides by a padded length that other samples decide"):
        compile_model(tmp_path / "mean.py", CompileOptions())


def test_blocks_may_write_to_their_argument_and_return_it() -> None:
    assert {"first", "second"} <= {b for s in compiled("writes_argument").plan.sections for b in s.blocks}


def test_a_loop_over_time_steps_may_draw() -> None:
    (draw,) = compiled("drawn_states").plan.draws
    assert draw.call.endswith("#*")
    assert draw.dims == (0,)


def test_the_wider_of_two_answers_is_found_although_no_drawn_sample_shows_it() -> None:
    _, lowered = compiled("answer_pairs").dumps[-1]
    assert "-S_rejected_ids + max(S, S_rejected_ids)" in lowered


def test_targets_may_be_filled_for_the_rows_that_a_mask_selects() -> None:
    _, captured = compiled("masked_frames").dumps[0]
    assert "aten.full_like.default" in captured and "aten.zeros.default" not in captured


@pytest.mark.slow
def test_rows_cut_to_their_lengths_and_joined_are_rows_of_a_mask() -> None:
    _, captured = compiled("trimmed_rows").dumps[0]
    assert captured.count("aten.lt.Tensor") == 2 and "aten.slice.Tensor" not in captured


def test_a_list_of_one_entry_is_that_entry() -> None:
    _, captured = compiled("one_codebook").dumps[0]
    assert "aten.select.int" in captured and "aten.unbind.int" not in captured


@pytest.mark.slow
def test_python_may_pad_the_narrower_of_two_inputs() -> None:
    """Three cases: one is narrower, the other is, or both are of one width, which no drawn batch has."""
    made = compiled("padded_pairs")
    assert made.dumps[0][1].count("sec.case") == 3 and "notes" not in made.plan.checks


def test_a_width_that_forward_computes_from_durations_is_each_micro_batch_s_own() -> None:
    plan = compiled("repeated_phonemes").plan
    assert plan.widths == "own" and str(plan.checks["widths"]).startswith(
        "a plan at the global batch's widths fails"
    )


def test_slices_of_positions_and_padding_to_whole_patches_are_explained_by_lengths() -> None:
    plan = compiled("patched_bytes").plan
    blocks = {b for s in plan.sections for b in s.blocks}
    assert {"student.head", "teacher.head"} <= blocks and "notes" not in plan.checks


def test_layers_that_send_tokens_to_the_weights_of_their_modality_stay_whole() -> None:
    plan = compiled("routed_modalities", "model.pp=2").plan
    assert "layers.0" in {b for s in plan.sections for b in s.blocks}
    assert [s.pipeline for s in plan.sections if s.pipeline] == ["model", "model"]


def test_a_reference_sends_scores_of_all_positions_but_the_last() -> None:
    options = CompileOptions(cluster="local:2", global_batch=12, strategy="apart")
    made = check_exactness(compile_model(MODELS / "shifted_reference.py", options), required=True)
    assert {s.name: s.mode for s in made.plan.sections} == {"reference": "forward", "policy": "train"}
    assert [e.extents for e in made.plan.edges] == [((1, "max(S - 1, 0)", "right"),)]


def test_samples_are_counted_by_the_bounds_between_them() -> None:
    check_exactness(compiled("document_bounds"), required=True)


NAMES = ["listed", "boxes", "per_sample", "kept", "chunked_loss", "task_heads"]
MORE_NAMES = [
    "weighted_tasks",
    "flagged_task",
    "graphs",
    "ragged_reader",
    "writes_argument",
    "answer_pairs",
    "masked_frames",
    "trimmed_rows",
    "padded_pairs",
    "one_codebook",
    "repeated_phonemes",
    "patched_bytes",
    "routed_modalities",
    "shifted_reference",
    "passed_lists",
    "document_bounds",
]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("name", [*NAMES, *MORE_NAMES])
def test_ranks_train_like_plain_pytorch(name: str, tmp_path: Path) -> None:
    model = write_recording_model(name, tmp_path, MODELS)
    made = check_exactness(
        compile_model(model, CompileOptions(cluster="local:3", global_batch=12, strategy="apart")),
        required=True,
    )
    made.write_plan(tmp_path / "plan", report_page)
    reference = train_in_one_process(model, 12, 3, tmp_path / "plain")
    found = train_distributed(tmp_path / "plan", made.plan.world_size, 3, tmp_path / "run")
    assert not list(find_differences(found, reference))
