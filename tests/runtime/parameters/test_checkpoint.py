"""Checkpoints: resuming is bit-equal, works under another plan, and one process can read the whole state
dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from secc.runtime.errors import UserError
from secc.runtime.parameters import checkpoint, sliced_tensor_store
from secc.runtime.parameters.checkpoint_folder import find_checkpoint, read_manifest
from secc.runtime.training.options import parse_options
from secc.runtime.training.rank_context import RankContext
from tests.runtime.captioner_plans import ALONE, APART, FIXTURE, UNEVEN, reference, write_plan
from tests.runtime.fixtures.captioner.sections import terms
from tests.runtime.train_captioner import metrics, train

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ten steps with checkpoints after five and ten: plan/, saved/."""
    directory = tmp_path_factory.mktemp("unbroken")
    write_plan(directory / "plan", UNEVEN)
    train(
        directory / "plan",
        UNEVEN,
        10,
        "--save",
        str(directory / "saved"),
        "--save-every",
        "5",
        "--clip",
        "1",
        "--shuffle",
    )
    return directory


def without_times(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if k != "step_time_s"} for row in rows]


def test_resuming_is_bit_equal(unbroken: Path, tmp_path: Path) -> None:
    first = str(unbroken / "saved" / "step_00000005")
    arguments = [
        "--resume",
        first,
        "--save",
        str(tmp_path / "again"),
        "--log-dir",
        str(tmp_path / "logs"),
        "--clip",
        "1",
    ]
    train(unbroken / "plan", UNEVEN, 10, *arguments)
    resumed = metrics(tmp_path)
    assert [row["step"] for row in resumed] == [6, 7, 8, 9, 10]
    assert without_times(resumed) == without_times(metrics(unbroken / "plan")[5:])
    assert_same_contents(unbroken / "saved" / "step_00000010", tmp_path / "again" / "step_00000010")


def test_resuming_under_another_plan(unbroken: Path, tmp_path: Path) -> None:
    write_plan(tmp_path / "plan", APART)
    train(tmp_path / "plan", APART, 10, "--resume", str(unbroken / "saved" / "step_00000005"), "--clip", "1")
    expected = [row["loss"] for row in metrics(unbroken / "plan")[5:]]
    assert [row["loss"] for row in metrics(tmp_path / "plan")] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("names", "before", "now", "rate", "steps_of_state"),
    [
        (["optimizer"], "lr=1e-2", "lr=1e-3, betas=(0.8, 0.9)", 1e-3 * 0.9**5, {6.0}),
        (
            ["scheduler"],
            "ExponentialLR(optimizer, 0.9)",
            "ExponentialLR(optimizer, 0.5)",
            1e-2 * 0.5**5,
            {6.0},
        ),
        (["scheduler"], "return torch.optim.lr_scheduler", "return None and torch", 1e-2, {6.0}),
        (["optimizer"], "lr=1e-2", "amsgrad=True, lr=1e-2", 1e-2 * 0.9**5, {1.0}),
        (["optimizer"], "AdamW(params, lr=1e-2", "SGD(params, lr=1e-3", 1e-3 * 0.9**5, set[float]()),
    ],
    ids=["another rate", "another schedule", "no schedule", "other states", "another class"],
)
def test_what_may_change_is_as_in_the_model_file(
    unbroken: Path,
    tmp_path: Path,
    names: list[str],
    before: str,
    now: str,
    rate: float,
    steps_of_state: set[float],
) -> None:
    """The optimizer's states stay, also on other ranks, unless it is another optimizer or keeps others."""
    source = (FIXTURE / "model.py").read_text()
    assert source.count(before) == 1
    write_plan(tmp_path / "plan", APART, source=source.replace(before, now))
    allowed = [word for name in names for word in ("--allow-change", name)]
    resume = ["--resume", str(unbroken / "saved" / "step_00000005"), "--clip", "1"]
    train(tmp_path / "plan", APART, 6, *resume, *allowed, "--save", str(tmp_path / "saved"))
    assert metrics(tmp_path / "plan")[-1]["learning_rate"] == pytest.approx(rate)
    saved = find_checkpoint(tmp_path / "saved").files
    keys = sliced_tensor_store.stored_entries(saved)
    counts = {key: torch.empty(()) for key in keys if key.endswith("/step")}
    groups: dict[str, Any] = {key: None for key in keys if key.startswith("groups/")}
    sliced_tensor_store.read_entries(saved, counts | groups, alone=True)
    assert {float(count) for count in counts.values()} == steps_of_state
    if "betas" in now:
        sliced_tensor_store.read_entries(saved, groups, alone=True)
        assert all(options["betas"] == (0.8, 0.9) for ranks in groups.values() for _, options in ranks)


def test_a_schedule_is_compared_where_rank_0_trains_nothing(
    unbroken: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    layout = {"encoder": (1,), "teacher": (0,), "decoder": (1,)}
    source = (
        (FIXTURE / "model.py").read_text().replace("ExponentialLR(optimizer, 0.9)", "StepLR(optimizer, 2)")
    )
    write_plan(tmp_path / "plan", layout, source=source)
    with pytest.raises(AssertionError, match="failed"):
        train(tmp_path / "plan", layout, 6, "--resume", str(unbroken / "saved/step_00000005"), "--clip", "1")
    assert "another scheduler than the checkpoint: ExponentialLR(" in capfd.readouterr().err


def test_full_state_dict_equals_plain_pytorch(tmp_path: Path) -> None:
    plain = reference(2)
    write_plan(tmp_path / "plan", UNEVEN)
    train(tmp_path / "plan", UNEVEN, 2, "--save", str(tmp_path / "saved"))
    full = checkpoint.load_full_state_dict(tmp_path / "saved")
    assert list(full) == list(plain.state)
    for name, value in full.items():
        torch.testing.assert_close(value, plain.state[name], rtol=1e-4, atol=1e-5)
    assert full["head.weight"] is full["embed.weight"]


def test_tied_tensors_are_stored_once(unbroken: Path) -> None:
    keys = sliced_tensor_store.stored_entries(unbroken / "saved" / "step_00000010")
    assert "model/embed.weight" in keys and "model/head.weight" not in keys
    state = {
        k.removeprefix("optimizer/encoder.gate/") for k in keys if k.startswith("optimizer/encoder.gate/")
    }
    assert state == {"step", "exp_avg", "exp_avg_sq"}
    assert not [k for k in keys if k.startswith(("optimizer/teacher", "optimizer/spare"))]


def test_an_unfinished_checkpoint_is_not_found(unbroken: Path, tmp_path: Path) -> None:
    assert find_checkpoint(unbroken / "saved").path.name == "step_00000010"
    assert sorted(p.name for p in (unbroken / "saved").iterdir()) == [
        "latest",
        "step_00000005",
        "step_00000010",
    ]
    (tmp_path / "step_00000001.incomplete").mkdir()
    with pytest.raises(UserError, match="no checkpoint found"):
        find_checkpoint(tmp_path)


def test_checkpoint_of_another_model_is_rejected(unbroken: Path, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"does not fit the model: 0\.weight is missing"):
        checkpoint.load_model_state(unbroken / "saved" / "step_00000005", model, {})


def test_resuming_a_finished_run_is_rejected(
    unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    write_plan(tmp_path / "plan", ALONE)
    with pytest.raises(UserError, match="step 10, so --steps 5 leaves nothing to do"):
        options = parse_options(["--steps", "5", "--resume", str(unbroken / "saved")])
        RankContext(tmp_path / "plan", options, terms)  # pyright: ignore[reportArgumentType]


def test_one_command_serves_first_start_and_restart(
    unbroken: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved"
    arguments = ["--save", str(saved), "--save-every", "1", "--keep", "2", "--resume", "auto"]
    arguments += ["--log-dir", str(tmp_path / "logs"), "--clip", "1", "--shuffle"]
    train(unbroken / "plan", UNEVEN, 3, *arguments)
    assert f"no checkpoint in {saved}: starting" in capfd.readouterr().err
    assert sorted(p.name for p in saved.iterdir()) == ["latest", "step_00000002", "step_00000003"]
    data = saved / "step_00000003" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-7])
    train(unbroken / "plan", UNEVEN, 5, *arguments)
    said = capfd.readouterr().err
    assert (
        f"note: {data}: damaged checkpoint" in said and f"continuing from {saved / 'step_00000002'}" in said
    )
    assert_same_contents(unbroken / "saved" / "step_00000005", saved / "step_00000005")
    assert len({read_manifest(saved / f"step_{step:08d}").run for step in (4, 5)}) == 1


def test_the_folder_of_another_run_is_not_written(
    unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    write_plan(tmp_path / "plan", ALONE)
    with pytest.raises(UserError, match="holds checkpoints of another run"):
        options = parse_options(["--save", str(unbroken / "saved")])
        RankContext(tmp_path / "plan", options, terms)  # pyright: ignore[reportArgumentType]


def assert_same_contents(a: Path, b: Path) -> None:
    """Asserts that two checkpoints have equal tensors and objects."""
    contents = [contents_of(a), contents_of(b)]
    assert contents[0].keys() == contents[1].keys()
    for key, value in contents[0].items():
        other = contents[1][key]
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, key


def contents_of(directory: Path) -> dict[str, Any]:
    stored = sliced_tensor_store.stored_entries(directory).items()
    contents: dict[str, Any] = {
        k: None if e is None else torch.empty_like(e, device="cpu") for k, e in stored
    }
    sliced_tensor_store.read_entries(directory, contents, alone=True)
    return contents
