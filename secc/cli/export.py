"""`secc export DIR`: writes the weights of a checkpoint as a state dict of the user's model (`-o`), or a
component as a folder for Hugging Face's `from_pretrained` (`--hf`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from secc.cli.compile import JSON_OPTION
from secc.cli.console import out, print_json, show_progress, styled


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
    from secc.api.export import BUILD_STAGE, CHECK_STAGE, READ_STAGE, WRITE_STAGE, export
    from secc.errors import printable_text

    stages = (CHECK_STAGE, *([BUILD_STAGE] if hf is not None else []), READ_STAGE, WRITE_STAGE)
    with show_progress(json, stages) as show:
        done = export(
            checkpoint,
            output=output,
            hf=hf,
            component=component,
            plan=plan,
            trust_model=trust_model,
            ema=ema,
            progress=show,
        )
    for note in done.notes:
        sys.stderr.write(printable_text(note, newlines=True) + "\n")
    if json:
        print_json(done.details)
    else:
        out.print(styled(done.path, "bold"), printable_text(f": {dict(done.facts)['holds']}"), sep="")
