"""`secc export DIR -o FILE.safetensors`: the user's own state dict out of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from secc.cli.compile import JSON_OPTION
from secc.cli.console import out, print_json


def command(
    checkpoint: Annotated[
        Path, typer.Argument(help="a directory that `secc run --save` wrote", metavar="DIR")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="the file to write", metavar="FILE.safetensors")
    ],
    json: JSON_OPTION = False,
) -> None:
    """Write a checkpoint's weights under the names of the user's model; load them with `load_state_dict`."""
    from safetensors.torch import save_file

    from secc.errors import UserError
    from secc.runtime.parameters.checkpoint import load_full_state_dict

    state = load_full_state_dict(checkpoint)
    # safetensors refuses tensors that share memory, so a tied parameter is written once for each of its
    # names.
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
    out.print(f"[bold]{output}[/]: {len(tensors)} tensors, {output.stat().st_size / 2**20:.1f} MiB")
