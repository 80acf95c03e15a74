"""`secc opt FILE.mlir -p PIPELINE`: runs any passes on IR text, for tests, debugging, and to reproduce a
dump of a plan."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from secc.pass_pipeline import PipelineRun

SPLIT_SEPARATOR = "// -----\n"


def command(
    file: Annotated[Path, typer.Argument(help="IR text, - for stdin", metavar="FILE.mlir", allow_dash=True)],
    pipeline: Annotated[
        str,
        typer.Option("-p", "--pipeline", help="passes with options: canonicalize,coarsen{max-sections=4}"),
    ] = "",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="write the result here instead of to stdout")
    ] = None,
    print_between_passes: Annotated[
        bool, typer.Option("--print-between-passes", help="print the IR after each pass to stderr")
    ] = False,
    time_passes: Annotated[
        bool, typer.Option("--time-passes", help="print each pass's seconds to stderr")
    ] = False,
    split_input_file: Annotated[
        bool,
        typer.Option("--split-input-file", help="process parts separated by `// -----` lines independently"),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result and the seconds as JSON")] = False,
) -> None:
    """Run passes on IR text."""
    from secc.ir.text_io import module_text

    source = sys.stdin.read() if str(file) == "-" else module_text.read_text(file)
    parts = source.split(SPLIT_SEPARATOR) if split_input_file else [source]
    results: list[str] = []
    seconds: list[tuple[str, float]] = []
    for part in parts:
        result, record = _run_passes(part, str(file), pipeline, print_between_passes)
        results.append(result)
        seconds += record.seconds
    if time_passes:
        print(_times_text(seconds), file=sys.stderr)
    joined = SPLIT_SEPARATOR.join(results)
    if as_json:
        joined = (
            json.dumps({"ir": joined, "seconds": [{"pass": n, "seconds": s} for n, s in seconds]}, indent=2)
            + "\n"
        )
    _write_result(joined, output)


def _run_passes(source: str, name: str, pipeline: str, dump: bool) -> tuple[str, PipelineRun]:
    """The IR text after the passes, and the record of the run."""
    from secc import pass_pipeline as passes
    from secc.ir.text_io import module_text

    steps = passes.parse_pipeline(pipeline)
    module = module_text.parse_module(source, name)
    earlier_passes = passes.parse_dump_header(source)
    record = passes.run_passes(module, steps, dump=dump, done=earlier_passes)
    for step, after in record.dumps:
        print(f"// after {step}\n{after}", file=sys.stderr)
    header = passes.format_dump_header([*earlier_passes, *map(passes.format_pass, steps)])
    return header + module_text.print_module(module), record


def _times_text(seconds: list[tuple[str, float]]) -> str:
    total = sum(s for _, s in seconds)
    rows = [f"{s:9.3f} s  {100 * s / total if total else 0:5.1f} %  {name}" for name, s in seconds]
    return "\n".join([*rows, f"{total:9.3f} s  100.0 %  total"])


def _write_result(result: str, output: Path | None) -> None:
    from secc.errors import UserError

    if output is None:
        sys.stdout.write(result)
        return
    try:
        output.write_text(result, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write the file: {error.strerror}", str(output)) from None
