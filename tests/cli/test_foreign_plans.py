"""Plans that others send: no command but `run` executes what lies in them, and their texts reach neither the
terminal nor a browser as anything but texts."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from secc.cli import main
from secc.driver.plan_origin import ORIGIN_FILE
from secc.report import html_page
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.schema import plan_digest
from tests.cli.test_drift import write_run_log
from tests.e2e.harness import compile_and_write

ESCAPE = "\x1b[31mred\x1b[0m"
MARKUP = '[/bold][link=file:///x]</td><script>alert(1)</script><img src="x">'


def run_command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


def change_plan(plan: Path, **values: object) -> None:
    """Change fields of plan.json as its author can, who knows how the digest is made."""
    data = json.loads((plan / "plan.json").read_text())
    data |= values
    del data["digest"]
    (plan / "plan.json").write_text(json.dumps(data | {"digest": plan_digest(data)}))


@pytest.fixture(scope="module")
def compiled(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("[red]plans")
    shutil.copy(root / "tests/models/hostile_names.py", folder / "model.py")
    compile_and_write(folder / "model.py", folder / "plan", check=False, global_batch=8)
    return folder


@pytest.fixture
def folder(compiled: Path, tmp_path: Path) -> Path:
    """A folder with markup in its path that holds a plan and its model file."""
    return shutil.copytree(compiled, tmp_path / "[red]copy")


def test_commands_run_no_code_of_a_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, ran = folder / "plan", folder / "ran"
    (folder / "model.py").write_text(f"open({str(ran)!r}, 'a').close()")
    for path in plan.rglob("*.py"):
        path.write_text(f"open({str(ran)!r}, 'a').close()")
    for name in ("conftest.py", "sitecustomize.py", "json.py"):
        (plan / name).write_text(f"open({str(ran)!r}, 'a').close()")
    digest = hashlib.sha256((folder / "model.py").read_bytes()).hexdigest()
    change_plan(plan, model=json.loads((plan / "plan.json").read_text())["model"] | {"sha256": digest})
    logs = str(write_run_log(folder / "logs", load_plan(plan), {}))
    assert run_command("explain", str(plan)) == 0
    assert run_command("explain", str(plan), "--what-if", "cluster=local:2") == 0
    assert run_command("diff", str(plan), str(plan)) == 0
    assert run_command("drift", str(plan), logs) in (0, 2)
    capsys.readouterr()
    assert run_command("simulate", str(plan)) == 2
    assert "--trust-model" in capsys.readouterr().err
    (plan / ORIGIN_FILE).write_text("0" * 64)
    assert run_command("simulate", str(plan)) == 2
    for arguments in (["report", str(plan)], ["launch-files", str(plan), "--for", "skypilot"]):
        run_command(*arguments)
    run_command("export", str(plan), "-o", str(folder / "weights"))
    run_command("opt", str(next(plan.rglob("*.mlir"))), "--passes", "canonicalize")
    assert not ran.exists()


def test_a_plan_of_this_user_is_simulated(folder: Path) -> None:
    assert run_command("simulate", str(folder / "plan"), "--json") == 0
    (folder / "plan" / ORIGIN_FILE).unlink()
    assert run_command("simulate", str(folder / "plan"), "--json") == 2
    assert run_command("simulate", str(folder / "plan"), "--json", "--trust-model") == 0


def test_texts_of_a_plan_are_not_obeyed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = folder / "plan"
    text = ESCAPE + MARKUP
    change_plan(plan, checks={"notes": [text], "whole": {text: [text]}, "reason": text})
    other = shutil.copytree(plan, folder / f"other{ESCAPE}[/x]")
    change_plan(other, checks={"notes": ["none"]}, hash=text)
    logs = str(write_run_log(folder / "logs", load_plan(plan), {}))
    for arguments in (
        ["explain", str(plan)],
        ["explain", str(other), "--json"],
        ["diff", str(plan), str(other)],
        ["drift", str(plan), logs],
        ["simulate", str(other), "--trust-model"],
        ["explain", str(folder / f"missing{text}".replace("/", ""))],
    ):
        run_command(*arguments)
        found = capsys.readouterr()
        assert "\x1b[31m" not in found.out + found.err and "Traceback" not in found.err, arguments
    run_command("explain", str(plan))
    shown = "".join(line.strip("│ ") for line in capsys.readouterr().out.splitlines())
    assert MARKUP.replace(" ", "") in shown.replace(" ", "") and "\\x1b[31mred" in shown


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def source_digest(text: str) -> str:
    """The source of a content security policy that allows this style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_pages_hold_names_as_texts_only(folder: Path) -> None:
    change_plan(folder / "plan", checks={"notes": [MARKUP + ESCAPE], "accepted": [MARKUP + ESCAPE]})
    assert (
        run_command("simulate", str(folder / "plan"), "--trust-model", "--draw", str(folder / "step.html"))
        == 0
    )
    assert run_command("report", str(folder / "plan"), "-o", str(folder / "report.html")) == 0
    report = (folder / "report.html").read_text()
    scripts = re.findall(r"<script>(.*?)</script>", report, re.S)
    own = [path.read_text() for path in Path(html_page.__file__).parent.joinpath("page").glob("*.js")]
    assert sorted(scripts) == sorted(own) and report.count("<script") == len(own) + 1
    assert json.loads(re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', report, re.S)[0])
    for page, allowed in ((report, scripts), ((folder / "step.html").read_text(), [])):
        tags = _Tags()
        tags.feed(page)
        assert not {"img", "link", "iframe", "object", "form"} & {tag for tag, _ in tags.found}
        assert [tag for tag, _ in tags.found].count("script") == (len(allowed) + 1 if allowed else 0)
        assert not any(name == "style" or name.startswith("on") for _, given in tags.found for name in given)
        assert not any(
            name in ("src", "href") and (value or "")[:1] != "#"
            for _, a in tags.found
            for name, value in a.items()
        )
        policy = next(given["content"] for tag, given in tags.found if tag == "meta" and "content" in given)
        style = page[page.index("<style>") + len("<style>") : page.index("</style>")]
        assert policy and policy.startswith(f"default-src 'none'; style-src {source_digest(style)}; ")
        rule = f"script-src {' '.join(map(source_digest, allowed))}; require-trusted-types-for 'script'"
        assert (rule in policy) if allowed else ("script-src" not in policy)
        assert "unsafe" not in policy and "\x1b" not in page
