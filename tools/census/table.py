"""Writes the results as `docs/benchmarks/census.json` and `docs/census.md`."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.census.results import StoredResult
from tools.census.row_check import EXACT_IN_FLOAT64, Outcome, RowResult, is_exact_run
from tools.census.rows import rows as known_rows
from tools.census.verdicts import KNOWN_FAILURES, RIGHT_REFUSALS, ROUNDING_DECIDES, UNBUILT
from tools.rounding import FACTOR, NUDGES, WITHIN_ROUNDING

DOCS = Path("docs")
MOST_COMMITS = 6  # that the page counts rows of
MESSAGE = 240  # letters of a message on the page
_TRAINED = (Outcome.EXACT, Outcome.REFUSED, Outcome.FAILED)
_MEANINGS = {
    Outcome.EXACT: "loss within 1e-6, every gradient within 1e-5 of plain PyTorch, for each input pattern",
    Outcome.REFUSED: "secc ends with a message that says what to change",
    Outcome.FAILED: "a plan that is not exact, a traceback, or no end within the time limit",
    Outcome.NO_MODEL: "a library is missing here, or the class has no loss that trains",
    Outcome.NOT_BUILT: "the census knows no small configuration or batch that plain PyTorch trains",
}
_HEAD = """# The census

Every model type of the installed transformers, small and with random weights: built from its own
configuration class, fed ragged batches with and without its optional inputs, compiled for three ranks, and
compared with plain PyTorch. Where the [zoo](zoo.md) has models that somebody chose, this is what there is.

```
python -m tools.census                            # all rows, going on where the last call stopped
python -m tools.census --only image-text/llava$   # repeat a row
python -m tools.census --only gpt2 --ranks 3      # train rows on three ranks, too
python -m tools.census --sample 20                # some rows
python -m tools.census --write                    # write this page
```

Samples follow the names of forward's inputs (`tools/census/recipes/`), or, where these say nothing, the
shapes that its documentation gives (`tools/census/documented.py`). Dropout is off, batch norms use their
running statistics, and what a class without a loss computes is trained by a squared error of its pooled
hidden states. Where widths of a tower do not fit when all sizes are small, it keeps those of its class
(`tools/census/small_configs.py`). If a message names an option with which a plan is exact (`--global-sums`,
`--whole-batch BLOCK`), or fewer ranks, the row is compiled again with it. A row with a colon has another
value of its configuration (`rt_detr:num_denoising=0`). Adapters need `peft`, denoisers and autoencoders
`diffusers`, some towers `timm`, one codec `torchaudio`. Every row is a model file (`tools/census/rows.py`).
Each refusal has been looked into (`tools/census/verdicts.py`).
"""


def print_summary(rows: Sequence[RowResult]) -> None:
    """Prints how many rows have each outcome."""
    counts = Counter(r.outcome for r in rows)
    print(", ".join(f"{o.value}: {counts[o]}" for o in Outcome if counts[o]))


def write_table(results: Mapping[str, StoredResult], docs: Path = DOCS) -> None:
    """Writes the page and its JSON, with the rows that the census has."""
    results = {n: r for n, r in results.items() if n in known_rows()}
    (docs / "benchmarks" / "census.json").write_text(_json_text(results))
    (docs / "census.md").write_text(_page(results))


def read_table(docs: Path = DOCS) -> dict[str, StoredResult]:
    """The results that `write_table` wrote; they lack seconds and remedies."""
    path = docs / "benchmarks" / "census.json"
    if not path.exists():
        return {}
    table = json.loads(path.read_text())
    results = dict[str, StoredResult]()
    for cells in table["rows"]:
        cell = dict(zip(table["columns"], cells, strict=True))
        row = RowResult(
            name=cell["row"],
            family=cell["row"].partition("/")[0],
            outcome=Outcome(cell["outcome"]),
            message=cell["message"],
            where=cell["where"],
            inputs=cell["inputs"],
            sections=dict(_section_and_mode(s) for s in cell["sections"].split(", ") if s),
            glue=cell["glue"],
            loss_error=cell["loss error"],
            gradient_error=cell["gradient error"],
            run=cell["run"] or "",
            option=cell.get("option", ""),
        )
        versions = dict(v.split(" ") for v in table["versions"][cell["commit"]].split(", "))
        results[row.name] = StoredResult(row, versions | {"commit": cell["commit"]})
    return results


def _section_and_mode(text: str) -> tuple[str, str]:
    name, _, mode = text.partition(" ")
    return name, mode.strip("()") or "train"


def _json_text(results: Mapping[str, StoredResult]) -> str:
    """One line for each row, so that differences of versions are readable."""
    columns = [
        "row",
        "outcome",
        "inputs",
        "sections",
        "glue",
        "loss error",
        "gradient error",
        "run",
        "message",
    ]
    columns += ["where", "option", "commit"]
    head = {
        "command": "python -m tools.census",
        "about": "errors are in units of the tolerances of docs/guide/exactness.md; run: three gloo ranks "
        "against plain PyTorch, null if not run; in float64 where float32 leaves rounding noise alone of a "
        "gradient that is zero; within rounding where plain PyTorch differs as much from itself",
        "versions": {r.versions["commit"]: _versions(r) for r in results.values()},
        "columns": columns,
    }
    rows = list[str]()
    for name in sorted(results):
        r = results[name].row
        cells = [
            name,
            r.outcome.value,
            r.inputs,
            ", ".join(_sections(r)),
            r.glue,
            r.loss_error,
            r.gradient_error,
        ]
        cells += [r.run or None, r.message, _place(r), r.option, results[name].versions["commit"]]
        rows.append("  " + json.dumps(cells, ensure_ascii=False))
    lines = [f" {json.dumps(k)}: {json.dumps(v)}," for k, v in head.items()]
    return "\n".join(["{", *lines, ' "rows": [', ",\n".join(rows), " ]", "}", ""])


def _versions(result: StoredResult) -> str:
    return ", ".join(f"{k} {v}" for k, v in result.versions.items() if k != "commit")


def _sections(row: RowResult) -> list[str]:
    return [n if mode == "train" else f"{n} ({mode})" for n, mode in row.sections.items()]


def _place(row: RowResult) -> str:
    """File and line of a refusal; the last line of what a failed row printed."""
    lines = row.where.strip().splitlines()
    return lines[-1][:160] if lines else ""


def _page(results: Mapping[str, StoredResult]) -> str:
    rows = [r.row for r in results.values()]
    trained = [r for r in rows if r.outcome in _TRAINED]
    exact = sum(r.outcome is Outcome.EXACT for r in rows)
    ran = [r for r in rows if r.run]
    told = sum(bool(r.option) for r in rows if r.outcome is Outcome.EXACT)
    versions = " · ".join(sorted({_versions(r) for r in results.values()}))
    parts = [
        _HEAD,
        f"**Result** ({versions}, float32 on CPU): of {len(rows)} rows plain PyTorch trains "
        f"{len(trained)} here; {exact} of these are exact ({100 * exact / max(len(trained), 1):.1f}%"
        + (f"; {told} with an option that the message without it names" if told else "")
        + "). "
        + (
            f"{sum(is_exact_run(r.run) for r in ran)} of {len(ran)} rows were exact on three ranks, too"
            f"{_senses(ran)}. "
            if ran
            else ""
        )
        + f"{len(known_rows()) - len(rows)} rows have not been run yet. {_commits(results)}"
        + " All rows: [benchmarks/census.json](benchmarks/census.json).\n",
        _family_table(rows),
        "| outcome | means |\n| --- | --- |\n"
        + "\n".join(f"| {o.value} | {meaning} |" for o, meaning in _MEANINGS.items())
        + "\n",
    ]
    parts += [
        _cause_table("Failed", rows, Outcome.FAILED, KNOWN_FAILURES, "what is known"),
        _rounding_table(rows),
        _cause_table("Refused", rows, Outcome.REFUSED, RIGHT_REFUSALS, "why that is right"),
        _cause_table("Not built", rows, Outcome.NOT_BUILT, UNBUILT, "why"),
        _cause_table("No model in plain PyTorch", rows, Outcome.NO_MODEL),
    ]
    return "\n".join(parts)


def _senses(ran: Sequence[RowResult]) -> str:
    """How many of the runs are exact in another sense than float32's tolerances."""
    double = sum(r.run == EXACT_IN_FLOAT64 for r in ran)
    rounded = sum(r.run.startswith(WITHIN_ROUNDING) for r in ran)
    senses = [f"{double} in float64 only"] if double else []
    senses += [f"{rounded} within what rounding makes of it"] if rounded else []
    return f" ({', '.join(senses)})" if senses else ""


def _rounding_table(rows: Sequence[RowResult]) -> str:
    """A section of the rows with runs that were judged by their references' own differences; "" if none."""
    judged = [r for r in rows if r.run.startswith(WITHIN_ROUNDING)]
    if not judged:
        return ""
    lines = [
        "## Within rounding",
        "",
        f"Exact in the check; on ranks beyond a tolerance of float32, in something in which the reference "
        f"(plain PyTorch; where random numbers are drawn, the plan for one rank) is beyond it from itself "
        f"when weights differ in their last bit ({NUDGES} trainings). Allowed is "
        f"{FACTOR:g} times that; all else keeps its tolerance (`tools/rounding.py`).",
        "",
        "| row | on three ranks | what rounding decides |",
        "| --- | --- | --- |",
    ]
    for row in judged:
        why = ROUNDING_DECIDES.get(row.name, "not looked into yet")
        lines.append(f"| {row.name} | {_cell(row.run.removeprefix(f'{WITHIN_ROUNDING}: '))} | {_cell(why)} |")
    return "\n".join(lines) + "\n"


def _commits(results: Mapping[str, StoredResult]) -> str:
    """A sentence on the commits that rows were run on."""
    commits = Counter(r.versions["commit"] for r in results.values())
    if len(commits) < 2:
        return "All rows were run on one commit."
    commit, count = commits.most_common(1)[0]
    others = len(results) - sum(n for _, n in commits.most_common(MOST_COMMITS))
    outcomes = [r.row.outcome for r in results.values() if r.versions["commit"] == commit]
    trained = [o for o in outcomes if o in _TRAINED]
    exact = sum(o is Outcome.EXACT for o in trained)
    return (
        f"{count} rows were run on commit {commit} ({exact} of {len(trained)} that plain PyTorch trains are "
        f"exact), {', '.join(f'{n} on {c}' for c, n in commits.most_common(MOST_COMMITS)[1:])}"
        + (f", {others} on {len(commits) - MOST_COMMITS} others" if others else "")
        + "; the JSON names the commit of each row."
    )


def _family_table(rows: Sequence[RowResult]) -> str:
    counts = defaultdict[str, Counter[Outcome]](Counter)
    for row in rows:
        counts[row.family][row.outcome] += 1
    lines = [f"| family | rows | {' | '.join(o.value for o in _MEANINGS)} |", "| --- |" + " --- |" * 6]
    for family, found in counts.items():
        cells = [str(found[o] or "") for o in _MEANINGS]
        lines.append(f"| {family} | {sum(found.values())} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cause_table(
    title: str,
    rows: Sequence[RowResult],
    outcome: Outcome,
    reasons: Mapping[str, str] | None = None,
    reason_title: str = "",
) -> str:
    """A section of the rows with one outcome; those with one cause share a line. `reasons` of rows have a
    column of their own."""
    causes = defaultdict[tuple[str, str, str], list[str]](list)
    for row in rows:
        if row.outcome is outcome:
            reason = (reasons or {}).get(row.name, "not looked into yet")
            causes[_first_words(row.message), _place(row), reason].append(row.name)
    if not causes:
        return f"## {title}\n\nNone.\n"
    columns = ["rows", "message"]
    columns += ["place"] if any(place for _, place, _ in causes) else []
    columns += [reason_title] if reasons else []
    lines = [f"## {title}", "", f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for (message, place, reason), names in sorted(causes.items(), key=lambda c: -len(c[1])):
        cells = [", ".join(names), message]
        cells += [place] if "place" in columns else []
        cells += [reason] if reasons else []
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) + "\n"


def _first_words(message: str) -> str:
    """The start of a message, up to the end of a word."""
    whole = message.removeprefix("RecipeError: ").removeprefix("RecipeError: ")
    return whole if len(whole) <= MESSAGE else whole[:MESSAGE].rpartition(" ")[0] + " …"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")
