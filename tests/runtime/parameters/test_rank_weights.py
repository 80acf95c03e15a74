"""The model on a rank: what it holds, weights from safetensors files, and rejection of a changed model."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from secc.runtime.errors import UserError
from secc.runtime.model.imported_code import package_version
from secc.runtime.parameters.rank_weights import build_rank_model, load_user_model, state_dict_owners
from tests.runtime.captioner_plans import APART, FIXTURE, UNEVEN, make_plan, write_plan

CPU = torch.device("cpu")


def build(rank: int, init: Path | None = None) -> torch.nn.Module:
    plan = dataclasses.replace(make_plan(APART), labels_key="")
    return build_rank_model(
        plan, load_user_model(plan, FIXTURE), rank, CPU, seed=3, init=(("", init),) if init else ()
    ).model


def plain_state(seed: int) -> dict[str, torch.Tensor]:
    user = load_user_model(make_plan(APART), FIXTURE)
    torch.manual_seed(seed)
    return user.build_model().state_dict()


def test_rank_holds_its_sections_and_rank_0_unused_parameters() -> None:
    held = [{n for n, p in build(rank).named_parameters() if not p.is_meta} for rank in (0, 1)]
    assert "spare" in held[0] and "spare" not in held[1]
    assert {n.split(".")[0] for n in held[0]} == {"encoder", "teacher", "spare"}
    assert held[1] == {"embed.weight", "encoder.gate"} | {n for n in held[1] if n.startswith("decoder.")}


def test_ties_and_buffers_are_kept() -> None:
    for rank in (0, 1):
        model = build(rank)
        assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
        assert model.get_parameter("encoder.gate") is model.get_parameter("decoder.gate")
        assert not model.get_buffer("encoder.scale").is_meta


def test_weights_equal_those_of_one_process() -> None:
    plain = plain_state(seed=3)
    for rank in (0, 1):
        for name, value in build(rank).state_dict().items():
            assert value.is_meta or torch.equal(value, plain[name])


def test_owners_are_the_first_ranks_that_hold_an_entry() -> None:
    owners = state_dict_owners(make_plan(UNEVEN), build(0))
    assert owners["decoder.out.weight"] == 1 and owners["teacher.mix.weight"] == 0
    assert {owners[n] for n in ("encoder.gate", "decoder.gate", "encoder.scale", "spare")} == {0}


def test_init_reads_safetensors(tmp_path: Path) -> None:
    plain = plain_state(seed=9)
    tensors = {n: v.contiguous() for n, v in plain.items() if n not in ("head.weight", "decoder.gate")}
    save_file({n: v for n, v in tensors.items() if n < "encoder"}, tmp_path / "model-1.safetensors")
    save_file({n: v for n, v in tensors.items() if n >= "encoder"}, tmp_path / "model-2.safetensors")
    for rank in (0, 1):
        for name, value in build(rank, tmp_path).state_dict().items():
            assert value.is_meta or torch.equal(value, plain[name]), name


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (None, "no \\*.safetensors file"),
        ({}, "16 of 16 tensors are missing: spare, embed.weight, encoder.gate and 13 more"),
        ({"spare": torch.zeros(7)}, "spare has shape \\[7\\], not \\[3\\]"),
    ],
)
def test_init_rejects_other_weights(
    tmp_path: Path, tensors: dict[str, torch.Tensor] | None, message: str
) -> None:
    if tensors is not None:
        save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        build(0, tmp_path)


def test_init_rejects_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not a header")
    with pytest.raises(UserError, match="not a safetensors file"):
        build(0, tmp_path)


def test_changed_import_of_the_model_file_is_detected() -> None:
    """The model file is unchanged, but a module that it imports makes other parameters."""
    plan = make_plan(APART)
    table = {**plan.model.parameters, "spare": "float32[4] train"}
    changed = dataclasses.replace(plan, model=dataclasses.replace(plan.model, parameters=table))
    with pytest.raises(UserError) as error:
        build_rank_model(changed, load_user_model(changed, FIXTURE), 0, CPU, seed=0)
    assert "-spare: float32[4] train" in str(error.value) and "+spare: float32[3] train" in str(error.value)


def test_code_that_has_changed_is_refused_before_it_runs(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    mark = tmp_path / "ran"
    for name in ("helpers.py", "package/__init__.py", "package/inner.py"):
        (tmp_path / name).write_text(f"open({str(mark)!r}, 'w')\n")
    model_file = tmp_path / "model.py"
    model_file.write_text("import helpers\nimport package.inner\n")
    digest = hashlib.sha256(model_file.read_bytes()).hexdigest()
    plan = make_plan(APART)
    for changed in ("helpers", "package", "package.inner"):
        imports = {changed: "0" * 64, "package": "0" * 64}
        model = dataclasses.replace(plan.model, path=str(model_file), sha256=digest, imports=imports)
        with pytest.raises(UserError, match="has changed since the plan was made"):
            load_user_model(dataclasses.replace(plan, model=model), tmp_path)
    assert not mark.exists()


def test_missing_model_file_is_rejected(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan", APART)
    (tmp_path / "plan" / "model.py").unlink()
    with pytest.raises(UserError, match="cannot read the plan's model file: No such file"):
        load_user_model(plan, tmp_path / "plan")


def test_other_version_of_a_package_is_rejected() -> None:
    plan = make_plan(APART)
    same = dataclasses.replace(plan.model, packages={"safetensors": package_version("safetensors")})
    load_user_model(dataclasses.replace(plan, model=same), FIXTURE)
    other = dataclasses.replace(plan.model, packages={"safetensors": "0.0.1"})
    with pytest.raises(UserError, match=r"made with safetensors 0\.0\.1, but .* is installed") as error:
        load_user_model(dataclasses.replace(plan, model=other), FIXTURE)
    assert "install safetensors 0.0.1, or compile again" in str(error.value)
