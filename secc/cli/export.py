"""`secc export DIR -o FILE.safetensors`: writes the weights of a checkpoint as a state dict of the user's
model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from secc.cli.compile import JSON_OPTION
from secc.cli.console import out, print_json, styled


def command(
    checkpoint: Annotated[
        Path, typer.Argument(help="checkpoint directory written by secc run --save", metavar="DIR")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="file to write", metavar="FILE.safetensors")],
    ema: Annotated[
        bool, typer.Option("--ema", help="write the averaged weights of a run with --ema")
    ] = False,
    json: JSON_OPTION = False,
) -> None:
    """Write the weights of a checkpoint under the names of the user's model, for `load_state_dict`."""
    from safetensors.torch import save_file

    from secc.errors import UserError, printable_text
    from secc.runtime.parameters.checkpoint import load_full_state_dict
    from secc.runtime.parameters.checkpoint_folder import find_checkpoint

    found = find_checkpoint(checkpoint)
    for note in found.notes():
        sys.stderr.write(printable_text(note, newlines=True) + "\n")
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
