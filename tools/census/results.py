"""Results of rows: those of the published table, and a file to which new ones are appended as rows are done,
one JSON object a line, so that a census that was stopped goes on. The latest result of a row counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.census.row_check import RowResult
from tools.census.row_processes import result_from_dict


@dataclass(frozen=True)
class StoredResult:
    """A result with the versions of torch, transformers and this repository that it was made with."""

    row: RowResult
    versions: Mapping[str, str]


class ResultFile:
    """Results in `path`, and `published` ones of rows that it lacks; new ones get `versions`."""

    def __init__(
        self, path: Path, versions: Mapping[str, str], published: Mapping[str, StoredResult] | None = None
    ) -> None:
        self.path, self.versions, self.published = path, dict(versions), dict(published or {})

    def append(self, row: RowResult) -> None:
        """Adds a result."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row.as_dict() | {"versions": self.versions}) + "\n")

    def latest(self) -> dict[str, StoredResult]:
        """The latest result of each row by name."""
        latest = dict(self.published)
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            row = json.loads(line)
            latest[row["name"]] = StoredResult(result_from_dict(row), row["versions"])
        return latest

    def known(self, any_commit: bool) -> set[str]:
        """Rows with a result of these versions; with `any_commit`, of any commit of this repository."""

        def key(versions: Mapping[str, str]) -> dict[str, str]:
            return {k: v for k, v in versions.items() if k != "commit" or not any_commit}

        return {n for n, r in self.latest().items() if key(r.versions) == key(self.versions)}
