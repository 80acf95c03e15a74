"""Generates samples of text with the weights of a checkpoint: the model file's `generate_samples(model)`, on
the whole model in one process.

Generating runs the model many times for a few tokens each and calls what the user wrote (`model.generate`, a
loop of his own), which a plan's sections cannot do. So a process of its own builds the model and reads the
checkpoint: after every checkpoint of a run next to the ranks, on the CPU and with low priority; for `secc
eval` after the ranks have ended, on a GPU if there is one. The model must fit into this machine's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from secc.runtime.errors import UserError, printable_text
from secc.runtime.host.child_processes import prepare_worker_process
from secc.runtime.model.user_file import UserModel
from secc.runtime.monitoring.json_lines import JsonLinesFile, say
from secc.runtime.parameters.checkpoint import load_full_state_dict
from secc.runtime.parameters.checkpoint_folder import find_checkpoint
from secc.runtime.parameters.rank_weights import load_user_model
from secc.runtime.plan.plan_file import load_plan

SAMPLES_FILE = "samples.jsonl"
FUNCTION = "generate_samples"
_SHOWN_SAMPLES, _SHOWN_CHARACTERS = 4, 200  # on the terminal


def generate_samples(
    directory: Path, checkpoint: Path, averaged: bool, device: torch.device
) -> tuple[int, dict[str, str]]:
    """Returns the checkpoint's step and the texts by name that the model file's `generate_samples` makes with
    its weights, or with their averages. Random numbers are seeded with the run's seed. Raises UserError."""
    user, found = load_user_model(load_plan(directory), directory), find_checkpoint(checkpoint)
    if not user.defines(FUNCTION):
        return found.manifest.step, {}
    model = user.build_model()
    model.load_state_dict(load_full_state_dict(found, averaged))
    model.to(device).eval()
    torch.manual_seed(found.manifest.seed)
    with torch.no_grad():
        returned = user.call_function(FUNCTION, model)
    return found.manifest.step, _texts_by_name(user, returned)


def _texts_by_name(user: UserModel, returned: Any) -> dict[str, str]:
    named = {"": returned} if isinstance(returned, str) else returned
    if isinstance(named, Sequence):
        named = {str(number): text for number, text in enumerate(named)}
    if not isinstance(named, Mapping) or not all(isinstance(text, str) for text in named.values()):
        raise UserError(
            f"{FUNCTION}() returns an object of type {type(returned).__name__}",
            user.function_source_line(FUNCTION),
            "return a text, a list of texts, or a dict of them by name",
        )
    return {str(name): text for name, text in named.items()}


class SampleGenerator:
    """Starts the process that generates after a checkpoint of a run; one at a time. Used by rank 0."""

    def __init__(self, directory: Path, log_dir: Path, averaged: bool) -> None:
        self._command = [sys.executable, "-m", __name__, str(directory), str(log_dir)]
        self._command += ["--averaged"] * averaged
        self._file, self._taken_bytes = log_dir / SAMPLES_FILE, 0
        self._taken_bytes += len(self._read_lines())
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, checkpoint: Path) -> None:
        """Starts to generate from a checkpoint; leaves it out, and says so, while the last one goes on."""
        if self._process is not None and self._process.poll() is None:
            say(
                f"no samples from {checkpoint.name}: those of the checkpoint before are still being generated"
            )
            return
        ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        environment = {k: v for k, v in os.environ.items() if k not in ranks} | {"CUDA_VISIBLE_DEVICES": ""}
        command = [*self._command, "--checkpoint", str(checkpoint), "--parent", str(os.getpid())]
        self._process = subprocess.Popen(command, env=environment)

    def take_samples(self) -> dict[int, dict[str, str]]:
        """Returns the texts by name, by the step of their checkpoint, that were generated since the last
        call."""
        content, found = self._read_lines(), dict[int, dict[str, str]]()
        self._taken_bytes += len(content)
        for line in content.splitlines():
            entry = json.loads(line)
            found.setdefault(entry["step"], {})[entry["name"]] = entry["text"]
        return found

    def _read_lines(self) -> bytes:
        """Returns the whole lines of the file of samples that were not taken yet."""
        if not self._file.exists():
            return b""
        with self._file.open("rb") as file:
            file.seek(self._taken_bytes)
            content = file.read()
        return content[: content.rfind(b"\n") + 1]

    def finish(self) -> None:
        """Waits for the last process; what it could not do it has said."""
        if self._process is not None:
            self._process.wait()


def main(arguments: Sequence[str]) -> int:
    """Generates, writes samples.jsonl in the log directory and shows the first samples. Returns 0, or 2 after
    a message."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("log_dir", type=Path)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--averaged", action="store_true")
    parser.add_argument("--parent", type=int, help="process id of the rank that asks; none: use a GPU")
    options = parser.parse_args(arguments)
    device = torch.device("cpu")
    if options.parent is not None:
        prepare_worker_process(options.parent, "secc-generate")
        os.nice(10)
    elif torch.cuda.is_available():
        device = torch.device("cuda")
    try:
        step, texts = generate_samples(options.directory, options.checkpoint, options.averaged, device)
    except UserError as error:
        what = "error" if options.parent is None else "warning: no samples were generated"
        say(printable_text(f"{what}: {error}", newlines=True))
        return 2
    file = JsonLinesFile(options.log_dir / SAMPLES_FILE)
    for number, (name, text) in enumerate(texts.items()):
        file.write({"step": step, "name": name, "text": text})
        if number < _SHOWN_SAMPLES:
            shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
            label = f"sample {name}" if name else "sample"
            say(printable_text(f"{label} after step {step}:  {shown!r}"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
