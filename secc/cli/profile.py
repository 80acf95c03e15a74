"""`secc profile`: times a model's blocks and steps, or links and rates of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from secc.cli.compile import JSON_OPTION
from secc.cli.console import out, print_json, print_table, show_progress, styled
from secc.errors import UserError


def command(
    model: Annotated[Path | None, typer.Argument(help="model file", metavar="[MODEL.py]")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="file to write", metavar="FILE")
    ] = None,
    links: Annotated[
        bool, typer.Option("--links", help="measure this machine's links and rates into a cluster file")
    ] = False,
    small: Annotated[bool, typer.Option("--small", help="profile small_model()")] = False,
    sizes: Annotated[int, typer.Option(help="micro-batches of different sizes to time", min=6)] = 18,
    repeat: Annotated[int, typer.Option(help="minimum number of runs of each; the median counts", min=1)] = 5,
    ranks: Annotated[
        int,
        typer.Option(
            help="ranks of this machine that compute at the same time (default: those of --cluster local)",
            min=0,
        ),
    ] = 0,
    json: JSON_OPTION = False,
) -> None:
    """Time blocks and steps of a model, for `secc compile --costs FILE`; with --links, this machine, for
    `--cluster FILE`."""
    if links == (model is not None):
        raise UserError(
            "expected either a model file or --links",
            remedy="secc profile MODEL.py -o costs.json, or secc profile --links -o here.yaml",
        )
    with show_progress(quiet=json) as show:
        if links:
            from secc.profile.machine_probe import probe_machine, to_cluster_yaml

            probed = probe_machine(show)
            shown, tables, text = probed.as_dict(), probed.to_tables(), to_cluster_yaml(probed)
        else:
            from secc.profile.model_profile import profile_model

            assert model is not None
            profile = profile_model(model, small, sizes, repeat, show, ranks)
            shown, tables, text = profile.as_dict(), profile.to_tables(), profile.costs.to_json()
    if output is not None:
        output.write_text(text, encoding="utf-8")
    if json:
        print_json(shown)
        return
    for table in tables:
        print_table(table)
    if output is not None:
        out.print("written to", styled(output, "bold"), soft_wrap=True)
