"""A run from a stream is the run from the same samples as a list, bit for bit, also after it was resumed on
another number of ranks, or killed; a mixture trains what plain PyTorch trains on the same samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from secc.runtime.data.mixed_order import MixedOrder, make_sample_order
from secc.runtime.model.user_file import load_model_file
from secc.runtime.parameters.checkpoint import load_full_state_dict
from secc.runtime.training.supervisor import run_plan
from tests.runtime.captioner_plans import (
    FIXTURE,
    GLOBAL_BATCH,
    TOGETHER,
    UNEVEN,
    Layout,
    reference,
    write_plan,
)
from tests.runtime.run_processes import ranks_of, start_run, steps_of, wait_for_step, wait_until
from tests.runtime.train_captioner import metrics, train

pytestmark = pytest.mark.gloo

LIST = (FIXTURE / "model.py").read_text().replace("return 40", "return 21")
STREAM = LIST.replace(
    "    return Samples()",
    """    return Stream()


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        data = Samples()
        yield from (data[i] for i in range(len(data)))
""",
)

# Samples 0 to 6 as a stream and 7 to 39 with numbers: one of the first to three of the others.
MIXED = (FIXTURE / "model.py").read_text().replace(
    "def dataset() -> Dataset:\n    return Samples()",
    """def datasets() -> Any:
    return {"few": (0.25, Few()), "many": (0.75, torch.utils.data.Subset(Samples(), range(7, 40)))}


class Few(torch.utils.data.IterableDataset):
    at = 0

    def __iter__(self) -> Any:
        start, self.at = self.at, 0
        for i in range(start, 7):
            self.at = i + 1
            yield Samples()[i]
        self.at = 0

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]""",
)  # fmt: skip

SLOWLY = """

def on_step(result: Any) -> None:
    import time

    time.sleep(0.1)
"""


def train_plan(
    folder: Path, layout: Layout, source: str, steps: int, *arguments: str, saved: str = "saved"
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains, saves, and returns the losses and the parameters."""
    write_plan(folder, layout, source=source)
    train(folder, layout, steps, "--save", str(folder / saved), "--no-first-check", *arguments)
    return [m["loss"] for m in metrics(folder)], load_full_state_dict(folder / saved)


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_stream_trains_as_a_list_and_resumes_on_other_ranks(tmp_path: Path) -> None:
    """Three global batches of 8 of 21 samples, then three more on two ranks instead of three."""
    lists = train_plan(tmp_path / "list", UNEVEN, LIST, 3)
    streams = train_plan(tmp_path / "stream", UNEVEN, STREAM, 3, "--workers", "1")
    assert streams[0] == lists[0]
    assert_equal(streams[1], lists[1])
    data = read_data(tmp_path / "stream" / "saved")
    assert data["samples"] == 24 and data["sources"][""]["epoch"] == 1

    def resume(name: str, source: str, *arguments: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        where = ["--resume", str(tmp_path / name / "saved"), *arguments]
        return train_plan(tmp_path / f"{name} again", TOGETHER, source, 6, *where)

    lists, streams = resume("list", LIST), resume("stream", STREAM)
    assert len(streams[0]) == 3 and streams[0] == lists[0]
    assert_equal(streams[1], lists[1])


def drawn_samples(path: Path, steps: int) -> list[list[int]]:
    """Returns the numbers of the samples of each step of MIXED. A stream's are counted here, so that a sample
    which a run repeats or leaves out would differ."""
    order = make_sample_order(load_model_file(path), GLOBAL_BATCH, shuffle=True)
    assert isinstance(order, MixedOrder)
    drawn: list[list[int]] = []
    few = 0
    for step in range(steps):
        drawn.append([])
        for position in range(GLOBAL_BATCH):
            if order.source_sample(step, position)[0] == 0:
                drawn[-1].append(few % 7)
                few += 1
            else:
                drawn[-1].append(order.locate_sample(step, position)[1] - (1 << 40) + 7)
    return drawn


def test_a_mixture_trains_what_plain_pytorch_trains(tmp_path: Path) -> None:
    """Eight batches of 8: the stream of 7 samples is read more than twice."""
    write_plan(tmp_path / "plan", UNEVEN, source=MIXED)
    drawn = drawn_samples(tmp_path / "plan" / "model.py", 8)
    few = [i for batch in drawn for i in batch if i < 7]
    assert few == [i % 7 for i in range(16)] and len({i for batch in drawn for i in batch}) > 35
    plain = reference(8, drawn=drawn)
    ranks = train(tmp_path / "plan", UNEVEN, 8, "--no-first-check", "--shuffle")
    lines = metrics(tmp_path / "plan")
    assert [m["loss"] for m in lines] == pytest.approx(plain.losses, rel=1e-5)
    assert [m["grad_norm"] for m in lines] == pytest.approx(plain.norms, rel=1e-5)
    for rank in ranks:
        for found, expected in zip(rank["gradients"], plain.gradients, strict=True):
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
        for name, value in rank["state"].items():
            torch.testing.assert_close(value, plain.state[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("source", [STREAM, MIXED], ids=["stream", "mixture"])
def test_a_killed_run_goes_on_with_the_next_sample_on_other_ranks(source: str, tmp_path: Path) -> None:
    """Killed, not asked to end: on three ranks after step 5 or later, by SIGKILL to the launcher; resumed on
    two. Every step has the loss of plain PyTorch on the samples in their order: none is repeated, none is
    lost."""
    shuffle, source = ["--shuffle"] if source is MIXED else [], source + SLOWLY
    arguments = ["--save", str(tmp_path / "saved"), "--save-every", "2", "--no-first-check", *shuffle]
    write_plan(tmp_path / "first", UNEVEN, source=source)
    write_plan(tmp_path / "second", TOGETHER, source=source)
    process = start_run(tmp_path / "first", "--steps", "100000", "--workers", "1", *arguments)
    wait_until(lambda: (tmp_path / "saved" / "latest").exists(), process)
    wait_for_step(tmp_path / "first", 5, process)
    process.kill()
    process.wait()
    wait_until(lambda: not [*ranks_of(tmp_path / "first")])
    killed = steps_of(tmp_path / "first" / "logs")
    saved = int((tmp_path / "saved" / "latest").read_text().removeprefix("step_"))
    assert saved >= 2 and read_data(tmp_path / "saved")["samples"] == saved * 8
    steps = saved + 8
    drawn = [[(step * 8 + i) % 21 for i in range(8)] for step in range(steps)]
    plain = reference(
        steps, drawn=drawn_samples(tmp_path / "first" / "model.py", steps) if shuffle else drawn
    )

    again = start_run(
        tmp_path / "second", "--steps", str(steps), "--workers", "1", "--resume", "auto", *arguments
    )
    said = again.communicate(timeout=300)[1]
    assert again.returncode == 0, said
    assert "goes on after" in said
    resumed = metrics(tmp_path / "second")
    assert [m["step"] for m in resumed] == [*range(saved + 1, steps + 1)]
    for line in [*killed, *resumed]:
        if line["step"] <= steps:
            assert line["loss"] == pytest.approx(plain.losses[line["step"] - 1], rel=1e-5), line
    assert read_data(tmp_path / "saved")["samples"] == steps * 8
    for name, value in load_full_state_dict(tmp_path / "saved").items():
        torch.testing.assert_close(value, plain.state[name], rtol=1e-3, atol=1e-4)


def read_data(folder: Path) -> Any:
    """What the latest checkpoint recorded of the data."""
    latest = (folder / "latest").read_text().strip()
    return json.loads((folder / latest / "checkpoint.json").read_text())["data"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1", "2"])
def test_an_evaluation_on_streams_is_that_on_lists(tmp_path: Path, workers: str) -> None:
    """Two sets of 5 and 21 samples, evaluated twice in batches of 6."""
    sets = "\n\ndef eval_dataset() -> Any:\n    return {'few': %s, 'all': %s}\n"
    numbered = sets % ("[Samples()[i] for i in range(5)]", "Samples()")
    streamed = sets % ("(Samples()[i] for i in range(5))", "Stream()")
    lines: list[Any] = []
    for name, source in {"list": STREAM + numbered, "stream": STREAM + streamed}.items():
        write_plan(tmp_path / name, UNEVEN, source=source)
        options = ["--eval-every", "1", "--eval-batch", "6", "--no-first-check", "--workers", workers]
        train(tmp_path / name, UNEVEN, 2, *options)
        lines.append([m for m in metrics(tmp_path / name) if "eval" in m])
    losses = [[(m["step"], m["eval"], m["samples"], m["loss"]) for m in run] for run in lines]
    assert losses[0] == losses[1] and [m[:3] for m in losses[0]] == [
        (1, "few", 5), (1, "all", 21), (2, "few", 5), (2, "all", 21)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_evaluation_alone_does_not_open_the_training_data(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = STREAM.replace("    return Stream()", "    raise OSError('the bucket is gone')")
    source += "\n\ndef eval_dataset() -> Any:\n    return (Samples()[i] for i in range(5))\n"
    write_plan(tmp_path / "plan", TOGETHER, source=source)
    assert run_plan(tmp_path / "plan", ["--eval-only", "trained"]) == 0
    (line,) = metrics(tmp_path / "plan")
    assert (line["step"], line["samples"]) == (0, 5)
    assert run_plan(tmp_path / "plan", ["--steps", "1"]) == 2
    assert "the bucket is gone" in capfd.readouterr().err


@pytest.mark.slow
def test_a_broken_stream_ends_the_run_after_a_save(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    yielded = "        yield from (data[i] for i in range(len(data)))\n"
    broken = f"{yielded}        raise OSError('the disk is gone')\n"
    write_plan(tmp_path / "plan", UNEVEN, source=STREAM.replace(yielded, broken))
    assert run_plan(tmp_path / "plan", ["--steps", "9", "--save", str(tmp_path / "saved")]) == 2
    errors = capfd.readouterr().err
    assert errors.count("error:") == 1 and "Traceback" not in errors
    assert "dataset(), sample 21 of epoch 1, raises OSError: the disk is gone" in errors
    assert (tmp_path / "saved" / "latest").read_text() == "step_00000002\n"


@pytest.mark.slow
def test_a_stream_that_differs_by_rank_ends_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The rank is read when the model file is imported, where it is not hidden."""
    split = "import os\nRANK = int(os.environ.get('RANK', '0'))\n"
    source = STREAM.replace("import torch\n", f"import torch\n{split}", 1)
    write_plan(tmp_path / "plan", UNEVEN, source=source.replace("range(len(data))", "range(RANK, len(data))"))
    assert run_plan(tmp_path / "plan", ["--steps", "9"]) == 2
    errors = capfd.readouterr().err
    assert errors.count("error:") == 1 and "Traceback" not in errors
    assert "ranks 0 and 1 have read different samples for step 1" in errors


@pytest.mark.slow
def test_a_run_from_another_stream_is_not_continued(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_plan(tmp_path / "plan", TOGETHER, source=STREAM)
    saved = ["--save", str(tmp_path / "saved"), "--resume", "auto"]
    assert run_plan(tmp_path / "plan", ["--steps", "2", *saved]) == 0
    other = STREAM.replace("data[i] for", "data[i + (i == 3)] for")
    write_plan(tmp_path / "other", TOGETHER, source=other)
    assert run_plan(tmp_path / "other", ["--steps", "4", *saved]) == 2
    assert "dataset() is another stream than the checkpoint's run read" in capfd.readouterr().err
    assert run_plan(tmp_path / "other", ["--steps", "4", *saved, "--allow-change", "dataset"]) == 0
    assert read_data(tmp_path / "saved")["samples"] == 32
