"""Weights of a checkpoint, written as a state dict of the user's model or as a folder for Hugging Face."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secc.api.results import Result
from secc.driver.reading_rate import READ_STAGE, WRITE_STAGE
from secc.errors import UserError

if TYPE_CHECKING:
    from secc.runtime.parameters.checkpoint_folder import FoundCheckpoint

CHECK_STAGE, BUILD_STAGE = "check the checkpoint's files", "build the model"


@dataclass(frozen=True, repr=False)
class Export(Result):
    """Written weights. `path`: the file or folder. `details`: what `secc export --json` prints. `notes`: what
    was not written, or not from where it was asked for."""

    path: Path
    details: dict[str, Any]
    notes: tuple[str, ...]


def export(
    checkpoint: str | Path,
    *,
    output: str | Path | None = None,
    hf: str | Path | None = None,
    component: str | None = None,
    plan: str | Path | None = None,
    trust_model: bool = False,
    ema: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Export:
    """Writes the weights of a checkpoint that a run has saved: to the safetensors file `output`, under the
    names of the user's model, or to the folder `hf`, which Hugging Face's `from_pretrained` loads.

    With `hf`, `component` is the module path of what is written (the only Hugging Face model by default),
    `plan` the plan of the run if it has moved, and `trust_model` runs the model file of another user's plan.
    `ema`: the averaged weights. `progress` is called with what is done now. Raises UserError for bad input.
    """
    from secc.runtime.parameters.checkpoint_folder import find_checkpoint

    if (output is None) == (hf is None):
        given = "neither" if output is None else "both"
        raise UserError(
            f"one of -o and --hf is needed, got {given}", "", "-o FILE.safetensors or --hf FOLDER"
        )
    if hf is None and (component is not None or plan is not None or trust_model):
        raise UserError("--component, --plan and --trust-model need --hf", "", "give --hf FOLDER")
    show = progress or (lambda step: None)
    show(CHECK_STAGE)
    found = find_checkpoint(Path(checkpoint))
    if hf is None:
        assert output is not None
        return _write_file(found, Path(output), ema, show)
    moved = Path(plan) if plan is not None else None
    return _write_folder(found, Path(hf), component, moved, trust_model, ema, show)


def _write_file(found: FoundCheckpoint, output: Path, ema: bool, show: Callable[[str], None]) -> Export:
    from safetensors.torch import save_file

    from secc.driver.reading_rate import ReadingRate
    from secc.runtime.parameters.checkpoint import load_full_state_dict

    show(READ_STAGE)
    state = load_full_state_dict(found, averaged=ema, on_read=ReadingRate(show).show)
    show(WRITE_STAGE)
    # safetensors rejects tensors that share memory, so a tied parameter is written once for each name.
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, output)
    except OSError as error:
        raise UserError(
            f"cannot write the file: {error.strerror or error}", str(output), "choose another -o"
        ) from None
    size = output.stat().st_size
    facts = (("written", str(output)), ("holds", f"{len(tensors)} tensors, {size / 2**20:.1f} MiB"))
    details = {"file": str(output), "tensors": len(tensors), "bytes": size}
    return Export(facts, (), output, details, tuple(found.notes()))


def _write_folder(
    found: FoundCheckpoint,
    folder: Path,
    component: str | None,
    plan: Path | None,
    trust_model: bool,
    ema: bool,
    show: Callable[[str], None],
) -> Export:
    from secc.driver.hf_export import build_trained_model, export_component

    show(BUILD_STAGE)
    model = build_trained_model(found, plan, trust_model)
    done = export_component(model, found, folder, component, averaged=ema, show=show)
    notes = (*found.notes(), *(f"note: {note}" for note in done.notes))
    what = f"{done.component or 'the model'} ({done.kind.value})"
    facts = (
        ("written", str(done.folder)),
        ("holds", f"{what}, {len(done.files)} files, {done.bytes / 2**20:.1f} MiB"),
        *(("note", note) for note in done.notes),
    )
    details = {
        "folder": str(done.folder),
        "component": done.component,
        "kind": done.kind.value,
        "files": list(done.files),
        "copied": list(done.copied),
        "bytes": done.bytes,
        "notes": list(done.notes),
    }
    return Export(facts, (), done.folder, details, notes)
