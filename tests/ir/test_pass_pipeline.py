"""Pipelines of passes: their text form, options from dataclass fields, dumps that say how to make them again,
times, and `secc opt`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from secc import pass_pipeline
from secc.cli import main
from secc.driver.compile_options import CompileOptions
from secc.driver.default_pipeline import build_pipeline
from secc.errors import UserError
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io import module_text

SOURCE = """
sec.graph "g" {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.case "all" when [] {
    %x = sec.input "x" : !sec.tensor<[B], f32>
    %dead = sec.input "dead" : !sec.tensor<[B], f32>
    %l = sec.glue "aten.sum.default" (%x) args "$0" at "model.py:3" : !sec.tensor<[], f32>
    sec.return (%l)
  }
}
"""


@dataclass(frozen=True)
class Rename(ModulePass):
    """A pass with options of each kind."""

    name = "rename"
    to: str = "h"
    max_uses: int = 3
    keys: tuple[str, ...] = ()
    breaks: bool = False

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        graph_of(op).properties["sym"] = type(graph_of(op).sym)(self.to)
        if self.breaks:
            graph_of(op).cases[0].body.block.last_op.detach()  # type: ignore[union-attr]


@pytest.fixture
def rename(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pass_pipeline,
        "load_pass",
        lambda name, load=pass_pipeline.load_pass: Rename if name == "rename" else load(name),
    )
    monkeypatch.setitem(pass_pipeline.PASS_CLASSES, "rename", "rename.Rename")


@pytest.mark.parametrize("name", pass_pipeline.PASS_CLASSES)
def test_every_registered_pass_loads_under_its_name(name: str) -> None:
    assert pass_pipeline.load_pass(name).name == name


def test_the_registry_is_in_the_order_of_the_default_pipeline() -> None:
    runs = list(dict.fromkeys(step.name for step in build_pipeline(CompileOptions())))
    assert list(pass_pipeline.PASS_CLASSES)[: len(runs)] == runs


def test_options_are_the_fields_of_the_pass(rename: None) -> None:
    (found,) = pass_pipeline.parse_pipeline('rename{to="x y" max-uses=5 keys="a","b" breaks=true}')
    assert found == Rename("x y", 5, ("a", "b"), True)
    assert pass_pipeline.parse_pipeline("rename,dce")[0] == Rename()


@pytest.mark.parametrize(
    "spec", ["nonsense", "rename{color=1}", 'rename{max-uses="many"}', "rename{", "dce,,dce"]
)
def test_a_bad_pipeline_is_refused_by_name(rename: None, spec: str) -> None:
    with pytest.raises(UserError) as error:
        pass_pipeline.parse_pipeline(spec)
    assert repr(spec) in error.value.message
    assert "dce" in error.value.remedy


def test_a_described_pass_parses_to_itself(rename: None) -> None:
    for step in (Rename(), Rename("x", 7, ("a",), False)):
        assert pass_pipeline.parse_pipeline(pass_pipeline.format_pass(step)) == (step,)
    assert pass_pipeline.format_pass(Rename(max_uses=4)) == "rename{max-uses=4}"


def test_dumps_hold_the_pipeline_that_made_them(rename: None) -> None:
    module = module_text.parse_module(SOURCE)
    record = pass_pipeline.run_passes(
        module, pass_pipeline.parse_pipeline("dce,rename{max-uses=4}"), dump=True
    )
    assert [name for name, _ in record.dumps] == ["dce", "rename"]
    last = record.dumps[-1][1]
    assert last.startswith("// secc opt -p 'dce,rename{max-uses=4}'\n")
    assert pass_pipeline.parse_dump_header(last) == ["dce,rename{max-uses=4}"]
    again = module_text.parse_module(SOURCE)
    remade = pass_pipeline.run_passes(
        again, pass_pipeline.parse_pipeline(pass_pipeline.parse_dump_header(last)[0]), dump=True
    )
    assert remade.dumps[-1][1] == last


def test_every_dump_parses(rename: None) -> None:
    steps = pass_pipeline.parse_pipeline("canonicalize,dce,normalize-loss,dce,annotate-patterns,infer-modes")
    record = pass_pipeline.run_passes(module_text.parse_module(SOURCE), steps, dump=True)
    for _, dump in record.dumps:
        assert module_text.print_module(module_text.parse_module(dump)) in dump


def test_a_pass_that_breaks_a_rule_is_a_defect_of_secc(rename: None) -> None:
    with pytest.raises(
        RuntimeError, match=r"pass rename left IR that breaks a rule[^@]*a case ends with sec\.return"
    ):
        pass_pipeline.run_passes(module_text.parse_module(SOURCE), [Rename(breaks=True)])


def test_progress_is_called_with_each_pass_before_it_runs(rename: None) -> None:
    heard: list[str] = []
    record = pass_pipeline.run_passes(
        module_text.parse_module(SOURCE),
        pass_pipeline.parse_pipeline("dce,rename"),
        report_progress=heard.append,
    )
    assert heard == ["dce", "rename"] == [name for name, _ in record.seconds]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "g.mlir"
    path.write_text(SOURCE)
    return str(path)


def opt(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["opt", *arguments])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def test_opt_prints_the_result_and_how_it_was_made(
    file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = opt(capsys, file, "-p", "dce")
    assert (code, err) == (0, "")
    assert out.startswith("// secc opt -p 'dce'\n") and "dead" not in out
    dump = tmp_path / "dump.mlir"
    assert opt(capsys, file, "-p", "dce", "-o", str(dump)) == (0, "", "")
    assert opt(capsys, str(dump), "-p", "infer-modes")[1].startswith("// secc opt -p 'dce,infer-modes'\n")


def test_opt_prints_between_passes_and_times_them_on_stderr(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = opt(capsys, file, "-p", "canonicalize,dce", "--print-between-passes", "--time-passes")
    assert code == 0 and out.count("sec.graph") == 1
    first, second = (
        "// after canonicalize\n// secc opt -p 'canonicalize'\n",
        "// after dce\n// secc opt -p 'canonicalize,dce'\n",
    )
    assert err.index(first) < err.index(second)
    assert err.splitlines()[-1].endswith("100.0 %  total") and " s " in err.splitlines()[-3]


def test_opt_prints_json(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = opt(capsys, file, "-p", "dce", "--json")
    found = json.loads(out)
    assert found["ir"].startswith("// secc opt") and [s["pass"] for s in found["seconds"]] == ["dce"]


def test_opt_splits_a_file_and_reads_stdin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    two = tmp_path / "two.mlir"
    two.write_text(SOURCE + "// -----\n" + SOURCE)
    assert opt(capsys, str(two), "-p", "dce", "--split-input-file")[1].count("// -----\n") == 1
    monkeypatch.setattr("sys.stdin", (tmp_path / "two.mlir").open())
    assert opt(capsys, "-", "--split-input-file")[1].count("sec.graph") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.mlir"], "cannot read the file: No such file or directory"),
        (["FILE", "-p", "nonsense"], "cannot read the pipeline 'nonsense'"),
        (["FILE", "-o", "/nowhere/out.mlir"], "cannot write the file"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    arguments: list[str], message: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = opt(capsys, *[file if a == "FILE" else a for a in arguments])
    assert (code, out) == (2, "")
    assert err.startswith("secc: ") and message in err and "Traceback" not in err


def test_opt_needs_no_torch(file: str) -> None:
    passes = "canonicalize,dce,normalize-loss,annotate-patterns,infer-modes"
    code = (
        f"import sys; from secc.cli import main\ntry: main(['opt', {file!r}, '-p', "
        f"{passes!r}])\nfinally: print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout.splitlines()[-1] == "False", ran.stderr


@pytest.mark.parametrize("entry", ["drop_conversion.DropConversions", "drop_conversions.DropConversion", "x"])
def test_mistyped_registry_entry_is_named(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pass_pipeline.PASS_CLASSES, "drop-conversions", entry)
    with pytest.raises(UserError, match=f"'drop-conversions' is registered as '{entry}', which is not in"):
        pass_pipeline.load_pass("drop-conversions")
