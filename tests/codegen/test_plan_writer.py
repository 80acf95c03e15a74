"""Writing plan directories: whole at every moment, with the files of others, by one process at a time."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from secc.codegen import plan_writer
from secc.codegen.plan_writer import replace_plan_file, reserve_output, write_plan_files
from secc.errors import UserError
from secc.runtime.plan.compiled_files import COMPILED_FILES, check_compiled_code, read_compiled_files


def files_of(version: int) -> dict[str, str | bytes]:
    """The files of a plan: some stay from version to version, some come and go."""
    names = ["plan.json", "run.py", "launch.sh", "sections/__init__.py", f"sections/v{version % 3}.py"]
    names += [f"ranks/rank_{i:05d}.py" for i in range(3 + version % 5)]
    return {name: f"{version} {name}\n" * 200 for name in names}


def version_of(plan: Path) -> int:
    """The version of a plan; fails if any of its files is missing, torn or of another version."""
    version = int((plan / "plan.json").read_text().split()[0])
    listed = read_compiled_files(plan) or {}
    assert listed.keys() == files_of(version).keys()
    for name, digest in listed.items():
        assert hashlib.sha256((plan / name).read_bytes()).hexdigest() == digest
    return version


def add_other_files(plan: Path) -> list[Path]:
    others = [
        Path("logs/metrics.jsonl"),
        Path("notes.txt"),
        Path("sections/mine.py"),
        Path("ckpt/step_1/data"),
    ]
    for path in others:
        (plan / path).parent.mkdir(parents=True, exist_ok=True)
        (plan / path).write_text(str(path))
    (plan / "sections/__pycache__").mkdir()
    (plan / "sections/__pycache__/v0.pyc").write_bytes(b"stale")
    return others


def leftovers(plan: Path) -> list[Path]:
    return [path for path in plan.parent.iterdir() if path != plan]


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "without a list"])
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "move aside"])
def test_files_of_others_stay(
    listed: bool, exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(plan_writer, "_exchange", lambda a, b: False)
    plan = tmp_path / "plan"
    write_plan_files(plan, files_of(1))
    others = add_other_files(plan)
    if not listed:
        (plan / COMPILED_FILES).unlink()
        others.remove(Path("sections/mine.py"))  # nothing tells it from a section of the compiler's
    write_plan_files(plan, files_of(2))
    assert version_of(plan) == 2 and leftovers(plan) == []
    assert all((plan / path).read_text() == str(path) for path in others)
    found = {path.relative_to(plan) for path in plan.rglob("*") if path.is_file()}
    assert found == {*map(Path, files_of(2)), Path(COMPILED_FILES), *others}


def test_a_file_in_the_way_is_kept(tmp_path: Path) -> None:
    write_plan_files(tmp_path / "plan", {"plan.json": "1"})
    (tmp_path / "plan/run.py").write_text("mine")
    write_plan_files(tmp_path / "plan", {"plan.json": "2", "run.py": "the plan's"})
    assert (tmp_path / "plan/run.py").read_text() == "the plan's"
    assert (tmp_path / "plan/run.py.before").read_text() == "mine"


def test_one_file_is_replaced_with_its_digest(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    write_plan_files(plan, {"plan.json": "1", "report.html": "old", "run.py": "run"})
    replace_plan_file(plan, "report.html", "new")
    assert (plan / "report.html").read_text() == "new" and leftovers(plan) == []
    write_plan_files(tmp_path / "same", {"plan.json": "1", "report.html": "new", "run.py": "run"})
    assert (plan / COMPILED_FILES).read_text() == (tmp_path / "same" / COMPILED_FILES).read_text()
    assert {path.name for path in plan.iterdir()} == {COMPILED_FILES, "plan.json", "report.html", "run.py"}


def test_a_list_cannot_name_files_outside_of_the_plan(tmp_path: Path) -> None:
    write_plan_files(tmp_path / "plan", {"plan.json": "1"})
    kept = tmp_path / "elsewhere" / "kept"
    kept.parent.mkdir()
    kept.write_text("kept")
    (tmp_path / "plan/link").symlink_to(kept.parent)
    lines = [f"0  {name}" for name in ("../elsewhere/kept", str(kept), "link/kept", "", ".")]
    (tmp_path / "plan" / COMPILED_FILES).write_text("\n".join(lines))
    write_plan_files(tmp_path / "plan", {"plan.json": "2"})
    assert kept.read_text() == "kept" and (tmp_path / "plan/link").is_symlink()


@pytest.mark.parametrize("kills", [20, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "move aside"])
def test_killed_compilations_leave_a_whole_plan(
    exchange: bool, kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(plan_writer, "_exchange", lambda a, b: False)
    plan, draw = tmp_path / "plan", random.Random(0)
    write_plan_files(plan, files_of(0))
    others = add_other_files(plan)
    in_between = 0
    for kill in range(1, kills + 1):
        run_and_kill(lambda kill=kill: write_plan_files(plan, files_of(kill)), draw.uniform(0, 0.012))
        if exchange:
            assert version_of(plan) in range(kill + 1)
        in_between += bool(leftovers(plan))
        with reserve_output(plan):  # the next compilation tidies up
            assert version_of(plan) in range(kill + 1)
            assert all((plan / path).read_text() == str(path) for path in others)
        assert leftovers(plan) == []
    assert in_between > kills // 10


def run_and_kill(write: Callable[[], None], seconds: float) -> None:
    """Run a function again and again in another process that is killed after `seconds`."""
    process = os.fork()
    if process == 0:
        try:
            while True:
                write()
        finally:
            os._exit(1)
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(process, 0)[1])


def test_a_compilation_that_is_killed_leaves_no_plan_to_run(tmp_path: Path) -> None:
    draw = random.Random(1)
    for i in range(15):
        plan = tmp_path / f"plan{i}"
        run_and_kill(lambda plan=plan: write_plan_files(plan, files_of(3)), draw.uniform(0, 0.004))
        assert not plan.exists() or version_of(plan) == 3


def test_a_second_compilation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secc.runtime.host.folder_lock._WAIT_S", 0.2)
    plan = tmp_path / "plan"
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        with reserve_output(plan):
            os.write(write, b"1")
            time.sleep(60)
        os._exit(0)
    os.read(read, 1)
    with pytest.raises(UserError, match=f"another compilation .*process {process} on "):
        write_plan_files(plan, files_of(1))
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    write_plan_files(plan, files_of(1))
    assert version_of(plan) == 1 and leftovers(plan) == []


def test_a_write_that_fails_leaves_the_old_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_plan_files(tmp_path / "plan", files_of(1))
    add_other_files(tmp_path / "plan")
    real = Path.write_bytes

    def fail(path: Path, content: bytes) -> int:
        if path.name == "plan.json":
            raise OSError(28, "No space left on device", str(path))
        return real(path, content)

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(UserError, match="cannot write the plan: No space left on device"):
        write_plan_files(tmp_path / "plan", files_of(2))
    assert version_of(tmp_path / "plan") == 1 and leftovers(tmp_path / "plan") == []


@pytest.mark.parametrize("change", ["lost", "cut"])
def test_code_that_is_not_the_compiler_s_is_named(change: str, tmp_path: Path) -> None:
    """Other files, and a section that the list of compiled files no longer names, may be edited."""
    write_plan_files(tmp_path, files_of(1))
    (tmp_path / "launch.sh").write_text("mine")
    check_compiled_code(tmp_path)
    section = tmp_path / "sections/v1.py"
    section.unlink() if change == "lost" else section.write_text("1 sections")
    with pytest.raises(
        UserError, match=r"no sections/v1\.py" if change == "lost" else "was changed"
    ) as error:
        check_compiled_code(tmp_path)
    assert "compile again" in error.value.remedy
    if change == "cut":
        assert error.value.where == str(section)
        lines = (tmp_path / COMPILED_FILES).read_text().splitlines(keepends=True)
        (tmp_path / COMPILED_FILES).write_text("".join(line for line in lines if "v1.py" not in line))
        check_compiled_code(tmp_path)
