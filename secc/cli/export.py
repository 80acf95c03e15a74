"""`secc export DIR`: writes the weights of a checkpoint as a state dict of the user's model (`-o`), or a
component as a folder for Hugging Face's `from_pretrained` (`--hf`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from secc.cli.compile import JSON_OPTION
from secc.cli.console import out, print_json, styled

if TYPE_CHECKING:
    from secc.runtime.parameters.checkpoint_folder import FoundCheckpoint


def command(
    checkpoint: Annotated[
        Path, typer.Argument(help="checkpoint directory written by secc run --save", metavar="DIR")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="file to write", metavar="FILE.safetensors")
    ] = None,
    hf: Annotated[
        Path | None,
        typer.Option("--hf", help="folder to write, for Hugging Face's from_pretrained", metavar="FOLDER"),
    ] = None,
    component: Annotated[
        str | None,
        typer.Option(
            help="with --hf: module path of what is written (default: the only Hugging Face model)",
            metavar="PATH",
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="with --hf: the plan of the run, if it has moved", metavar="PLAN"),
    ] = None,
    trust_model: Annotated[
        bool,
        typer.Option("--trust-model", help="with --hf: run the model file of a plan of another user"),
    ] = False,
    ema: Annotated[
        bool, typer.Option("--ema", help="write the averaged weights of a run with --ema")
    ] = False,
    json: JSON_OPTION = False,
) -> None:
    """Write the weights of a checkpoint: under the names of the user's model for `load_state_dict` (-o), or a
    folder that Hugging Face's `from_pretrained` loads (--hf)."""
    from secc.errors import UserError, printable_text
    from secc.runtime.parameters.checkpoint_folder import find_checkpoint

    if (output is None) == (hf is None):
        given = "neither" if output is None else "both"
        raise UserError(
            f"one of -o and --hf is needed, got {given}", "", "-o FILE.safetensors or --hf FOLDER"
        )
    if hf is None and (component is not None or plan is not None or trust_model):
        raise UserError("--component, --plan and --trust-model need --hf", "", "give --hf FOLDER")
    found = find_checkpoint(checkpoint)
    for note in found.notes():
        sys.stderr.write(printable_text(note, newlines=True) + "\n")
    if output is not None:
        _write_file(found, output, ema, json)
    elif hf is not None:
        _write_folder(found, hf, component, plan, trust_model, ema, json)


def _write_file(found: FoundCheckpoint, output: Path, ema: bool, json: bool) -> None:
    from safetensors.torch import save_file

    from secc.errors import UserError
    from secc.runtime.parameters.checkpoint import load_full_state_dict

    state = load_full_state_dict(found, averaged=ema)
    # safetensors rejects tensors that share memory, so a tied parameter is written once for each name.
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, output)
    except OSError as error:
        raise UserError(
            f"cannot write the file: {error.strerror or error}", str(output), "choose another -o"
        ) from None
    if json:
        print_json({"file": str(output), "tensors": len(tensors), "bytes": output.stat().st_size})
        return
    written = f": {len(tensors)} tensors, {output.stat().st_size / 2**20:.1f} MiB"
    out.print(styled(output, "bold"), written, sep="")


def _write_folder(
    found: FoundCheckpoint,
    folder: Path,
    component: str | None,
    plan: Path | None,
    trust_model: bool,
    ema: bool,
    json: bool,
) -> None:
    from secc.driver.hf_export import build_trained_model, export_component
    from secc.errors import printable_text

    model = build_trained_model(found, plan, trust_model)
    done = export_component(model, found, folder, component, averaged=ema)
    if json:
        print_json(
            {
                "folder": str(done.folder),
                "component": done.component,
                "kind": done.kind.value,
                "files": list(done.files),
                "copied": list(done.copied),
                "bytes": done.bytes,
                "notes": list(done.notes),
            }
        )
        return
    what = f"{done.component or 'the model'} ({done.kind.value})"
    written = f": {what}, {len(done.files)} files, {done.bytes / 2**20:.1f} MiB"
    out.print(styled(done.folder, "bold"), printable_text(written), sep="")
    for note in done.notes:
        sys.stderr.write(printable_text(f"note: {note}") + "\n")
