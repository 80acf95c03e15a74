"""`secc stats MODEL.py -o FILE`: writes statistics of a dataset's samples, for `secc compile --stats
FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from secc.cli.compile import JSON_OPTION, MODEL_ARGUMENT
from secc.cli.console import out, print_json, print_table, show_progress, styled


def command(
    model: MODEL_ARGUMENT,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="file to write", metavar="FILE")
    ] = None,
    stats_samples: Annotated[
        int,
        typer.Option(help="samples of dataset() to draw; sizes(i) in the model file tells many more"),
    ] = 64,
    skip_bad_samples: Annotated[bool, typer.Option(help="skip samples that fail to load")] = False,
    json: JSON_OPTION = False,
) -> None:
    """Draw samples of a dataset: the share of each combination of optional inputs, and the mean sizes of
    its samples."""
    import json as json_

    from secc.errors import UserError
    from secc.frontend.dataset import statistics
    from secc.frontend.dataset.input_symbols import describe_inputs
    from secc.frontend.dataset.sampling import survey_dataset
    from secc.report.text_table import TextTable
    from secc.runtime.model.user_file import load_model_file
    from secc.runtime.plan.sample_predicates import describe_pattern

    user = load_model_file(model)
    with show_progress(quiet=json) as show:
        show("draw samples")
        survey = survey_dataset(user, stats_samples, skip_bad=skip_bad_samples)
        inputs = statistics.apply_declared_sizes(user, survey, describe_inputs(user, survey))
    text = statistics.statistics_to_json(inputs)
    if output is not None:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"cannot write the file: {error.strerror}", str(output), "name a file in a folder that exists"
            ) from None
    if json:
        print_json(json_.loads(text))
        return
    names = [s.name for s in inputs.symbols]
    rows = tuple(
        (
            describe_pattern(m.when),
            f"{m.share:.1%}",
            *(f"{m.sizes[n]:.4g}" for n in names),
        )
        for m in statistics.pattern_means(inputs)
    )
    print_table(
        TextTable(
            "Samples", ("with", "share", *names), rows, f"Means over {len(inputs.sample_patterns)} samples."
        )
    )
    if output is not None:
        remedy = f": correct it where needed, then use it with secc compile --stats {output}"
        out.print(styled(output, "bold"), remedy, sep="", soft_wrap=True)
