"""Reports a run to experiment trackers (`--report-to`), through their own libraries, which are optional.

Names of metrics are those of Hugging Face's Trainer (`train/loss`, `eval/loss`, by step) and of torchtitan
(`throughput(tps)`, `mfu(%)`, `memory/max_reserved(GiB)`). A tracker sends nothing unless a key says so: wandb
runs offline without `WANDB_API_KEY`, mlflow writes below the log directory without `MLFLOW_TRACKING_URI`,
trackio is local without `TRACKIO_SPACE_ID`. Used by rank 0.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from secc.runtime.errors import UserError

PACKAGES = {
    "tensorboard": "torch.utils.tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
}


class Tracker(Protocol):
    """One experiment tracker of a run."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Reports values of a global step."""
        ...

    def log_texts(self, texts: Mapping[str, str], step: int) -> None:
        """Reports texts by name, which were generated with the weights of a global step: the present one or
        an earlier one."""
        ...

    def add_files(self, files: Sequence[Path]) -> None:
        """Keeps files with the run, if the tracker has artifacts."""
        ...

    def close(self) -> None:
        """Finishes the run."""
        ...


def parse_tracker_names(text: str) -> tuple[str, ...]:
    """Parses `tensorboard,wandb`. Raises UserError for an unknown name."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in PACKAGES:
            raise UserError(
                f"--report-to: unknown tracker {name!r}", remedy=f"trackers are {', '.join(PACKAGES)}"
            )
    return names


def check_installed(names: Sequence[str]) -> None:
    """Raises UserError if the library of a tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise _missing_error(name, "it is not installed")


def open_trackers(names: Sequence[str], log_dir: Path, run: str, config: Mapping[str, Any]) -> list[Tracker]:
    """Starts a run in each tracker. `run`: its name; `config`: plan and options as plain values. Raises
    UserError if a library does not import."""
    made = {"tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _MLflow, "trackio": _Trackio}
    if "trackio" in names:  # which reads it when it is imported
        os.environ.setdefault("TRACKIO_DIR", str(log_dir.resolve() / "trackio"))
    trackers: list[Tracker] = []
    for name in names:
        try:
            module = importlib.import_module(PACKAGES[name])
        except ImportError as error:
            raise _missing_error(name, str(error)) from None
        try:
            trackers.append(made[name](module, log_dir, run, config))
        except Exception as error:  # whatever the library raises: no key, no server, no disk
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"--report-to {name}: {reason}", remedy="leave the tracker out") from error
    return trackers


def _missing_error(name: str, reason: str) -> UserError:
    remedy = f"pip install 'secc[{name}]', or leave the tracker out"
    return UserError(f"--report-to {name}: {reason}", remedy=remedy)


class _TensorBoard:
    def __init__(self, module: Any, log_dir: Path, run: str, config: Mapping[str, Any]) -> None:
        self._writer = module.SummaryWriter(str(log_dir / "tensorboard" / run))
        rows = "\n".join(f"| {key} | {value} |" for key, value in config.items())
        self._writer.add_text("config", f"| key | value |\n| --- | --- |\n{rows}")

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_texts(self, texts: Mapping[str, str], step: int) -> None:
        for name, text in texts.items():
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))  # shown as it is
            self._writer.add_text(name, f"{fence}\n{text}\n{fence}", step)
        self._writer.flush()

    def add_files(self, files: Sequence[Path]) -> None:
        """TensorBoard has no artifacts."""

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, module: Any, log_dir: Path, run: str, config: Mapping[str, Any]) -> None:
        self._module = module
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self._run = module.init(
            project=os.environ.get("WANDB_PROJECT", "secc"),
            name=run,
            dir=str(log_dir),
            mode=mode,
            config=dict(config),
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def log_texts(self, texts: Mapping[str, str], step: int) -> None:
        rows = [[step, name, text] for name, text in texts.items()]
        table = self._module.Table(columns=["step", "name", "text"], data=rows)
        # wandb drops what belongs to a step before the present one, so the table joins that one.
        self._run.log({"samples": table}, commit=False)

    def add_files(self, files: Sequence[Path]) -> None:
        artifact = self._module.Artifact("plan", type="plan")
        for file in files:
            artifact.add_file(str(file))
        self._run.log_artifact(artifact)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, module: Any, log_dir: Path, run: str, config: Mapping[str, Any]) -> None:
        self._module = module
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            module.set_tracking_uri(f"sqlite:///{log_dir.resolve() / 'mlflow.db'}")
            if module.get_experiment_by_name("secc") is None:
                module.create_experiment("secc", artifact_location=(log_dir.resolve() / "mlruns").as_uri())
        module.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "secc"))
        module.start_run(run_name=run)
        module.log_params({key: str(value)[:500] for key, value in config.items()})

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._module.log_metrics({_mlflow_name(name): v for name, v in values.items()}, step=step)

    def log_texts(self, texts: Mapping[str, str], step: int) -> None:
        for name, text in texts.items():
            path = "/".join(_mlflow_name(part) for part in name.split("/"))
            self._module.log_text(text, f"{path}/step_{step:08d}.txt")

    def add_files(self, files: Sequence[Path]) -> None:
        for file in files:
            self._module.log_artifact(str(file), artifact_path="plan")

    def close(self) -> None:
        self._module.end_run()


def _mlflow_name(name: str) -> str:
    """Returns a name of the characters that mlflow allows: letters, digits, _-./ and blanks."""
    return "".join(c if c.isalnum() or c in "_-./ " else "_" for c in name)


class _Trackio:
    def __init__(self, module: Any, log_dir: Path, run: str, config: Mapping[str, Any]) -> None:
        self._module = module
        module.init(
            project=os.environ.get("TRACKIO_PROJECT", "secc"),
            name=run,
            config={key: str(value) for key, value in config.items()},
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._module.log(dict(values), step=step)

    def log_texts(self, texts: Mapping[str, str], step: int) -> None:
        rows = [{"step": step, "name": name, "text": text} for name, text in texts.items()]
        frame = importlib.import_module("pandas").DataFrame(rows)  # which trackio brings
        self._module.log({"samples": self._module.Table(dataframe=frame)}, step=step)

    def add_files(self, files: Sequence[Path]) -> None:
        """Trackio keeps no files."""

    def close(self) -> None:
        self._module.finish()


class TrackedRun:
    """Reports to several trackers; one that fails is named once and left out, so that training goes on."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Reports values of a global step to all trackers."""
        self._call("log", values, step)

    def log_texts(self, texts: Mapping[str, str], step: int) -> None:
        """Reports texts by name to all trackers."""
        self._call("log_texts", texts, step)

    def close(self, files: Sequence[Path] = ()) -> None:
        """Keeps `files` with the run, and finishes it."""
        self._call("add_files", [file for file in files if file.is_file()])
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        for name in list(self._trackers):
            try:
                getattr(self._trackers[name], method)(*arguments)
            except Exception as error:  # whatever the tracker's library raises: training must not end
                del self._trackers[name]
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                sys.stderr.write(f"{name} fails and gets no further reports: {reason}\n")
