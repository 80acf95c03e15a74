"""Counts what makes the code hard to read for a stranger. It prints numbers and forbids nothing.

    python tools/count_style.py                  counts of this checkout
    python tools/count_style.py FOLDER           counts of another checkout
    python tools/count_style.py --list KEY       the findings behind one count, e.g. --list one_word_functions
    python tools/count_style.py --json           everything for machines

Three groups of files are counted separately: `product` (secc, passes, runtime), `tools` (tools, examples) and
`tests`. The links secc/passes, secc/runtime and secc/templates are not followed: every file counts once.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

GROUPS = {"product": ("secc", "passes", "runtime"), "tools": ("tools", "examples"), "tests": ("tests",)}
LINKED = ("passes", "runtime")  # top-level folders that are imported as secc.NAME
COLUMNS = 110

# One-word names that every Python programmer reads without help.
CONVENTIONAL = frozenset(
    re.findall(
        r"\w+",
        """
        add append apply backward check clear clone close compile copy dump end enter evaluate exit
        extend flush forward get items join keys load loads main name next open parse pop print read
        register remove reset result run save set setup shape simulate size start step stop submit
        text update validate values verify visit wait warn write
        """,
    )
)

# Words that make a sentence a riddle where a plain word of the field exists.
RIDDLES = (
    *("whose", "of which", "with which", "beside", "anew", "alike", "so much", "so many", "nobody"),
    *("those that", "in the mean", "for ever", "looked at", "is told", "are told"),
)

SHAPE = re.compile(
    r"\bshapes?\b|\bshaped\b|\bdims?\b|\bdimension|\b[0-4]-?d\b|\bscalars?\b"
    r"|\[[A-Za-z_*. 0-9]+(?:, ?[A-Za-z_*. 0-9]+)+\]|\[[NBTSHVKCRM]\]",
    re.I,
)


@dataclass(frozen=True)
class SourceFile:
    """A parsed Python file. `module` is its dotted name; `path` is relative to the checkout."""

    path: str
    module: str
    is_package: bool
    text: str
    tree: ast.Module


Findings = dict[str, list[str]]


def read_sources(root: Path, folders: Iterable[str]) -> list[SourceFile]:
    """Parses every Python file below `folders`, without following links.

    Raises:
        SyntaxError: a file does not parse.
    """
    sources = []
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            relative = path.relative_to(root)
            if any((root / parent).is_symlink() for parent in relative.parents):
                continue
            parts = list(relative.with_suffix("").parts)
            if parts[0] in LINKED:
                parts.insert(0, "secc")
            is_package = parts[-1] == "__init__"
            module = ".".join(parts[:-1] if is_package else parts)
            text = path.read_text()
            sources.append(SourceFile(str(relative), module, is_package, text, ast.parse(text)))
    return sources


def public_functions(source: SourceFile) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yields (qualified name, node) of public functions, and of public methods of public classes."""
    for node in source.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node.name, node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for method in node.body:
                if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                if not method.name.startswith("_"):
                    yield f"{node.name}.{method.name}", method


def repeated_classes(sources: list[SourceFile]) -> list[str]:
    """Names of classes that several modules define, private ones included without their underscore."""
    modules: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                modules[node.name.lstrip("_")].add(source.path)
    return [
        f"{name}: {', '.join(sorted(paths))}" for name, paths in sorted(modules.items()) if len(paths) > 1
    ]


def repeated_modules(sources: list[SourceFile]) -> list[str]:
    """Base names that several files have, `__init__` and conftest left out."""
    paths: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        if not source.is_package and Path(source.path).stem != "conftest":
            paths[Path(source.path).stem].append(source.path)
    return [f"{name}: {', '.join(found)}" for name, found in sorted(paths.items()) if len(found) > 1]


def function_names(sources: list[SourceFile]) -> Counter[str]:
    """How often each function or method name is defined, without leading underscores and dunders."""
    names: Counter[str] = Counter()
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__"):
                names[node.name.lstrip("_")] += 1
    return names


def one_word_functions(sources: list[SourceFile]) -> list[str]:
    """Distinct function names of one lower-case word, most frequent first, without conventional words."""
    names = function_names(sources)
    return [
        f"{name} ({n})"
        for name, n in names.most_common()
        if name.isalpha() and name.islower() and name not in CONVENTIONAL
    ]


def takes_tensors(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the annotation of an argument mentions a tensor type."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return any(
        a.annotation is not None and re.search(r"\bTensors?\b", ast.unparse(a.annotation)) for a in arguments
    )


def tensors_without_shapes(sources: list[SourceFile]) -> tuple[list[str], int]:
    """Public functions of tensors without a shape or dim in the docstring, and how many take tensors."""
    without, total = [], 0
    for source in sources:
        for name, node in public_functions(source):
            if takes_tensors(node):
                total += 1
                if not SHAPE.search(ast.get_docstring(node) or ""):
                    without.append(f"{source.path}:{node.lineno} {name}")
    return without, total


def one_line_docstrings(sources: list[SourceFile]) -> tuple[list[str], int]:
    """Public functions with a docstring of one line, and how many have any docstring."""
    short, total = [], 0
    for source in sources:
        for name, node in public_functions(source):
            doc = ast.get_docstring(node)
            if doc is not None:
                total += 1
                if "\n" not in doc.strip():
                    short.append(f"{source.path}:{node.lineno} {name}")
    return short, total


def long_lines(sources: list[SourceFile]) -> list[str]:
    """Places of lines that are longer than 110 columns."""
    return [
        f"{s.path}:{i}"
        for s in sources
        for i, line in enumerate(s.text.splitlines(), 1)
        if len(line) > COLUMNS
    ]


def imported_modules(source: SourceFile, known: set[str]) -> set[str]:
    """Modules of `known` that a file imports, in functions too, but not below `if TYPE_CHECKING`."""
    found: set[str] = set()

    def resolve(base: str, names: list[ast.alias]) -> None:
        for alias in names:
            inner = f"{base}.{alias.name}"
            if inner in known:
                found.add(inner)
            elif base in known:
                found.add(base)

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            package = source.module.split(".") if source.is_package else source.module.split(".")[:-1]
            above = package[: len(package) - (node.level - 1)] if node.level else []
            resolve(".".join([*above, *([node.module] if node.module else [])]), node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(source.tree)
    return found - {source.module}


def package_of(source: SourceFile) -> str:
    """The package of a module. Files directly in secc/ stand for themselves: that folder holds all others."""
    if source.is_package:
        return source.module
    package = source.module.rpartition(".")[0]
    return source.module if package == "secc" else package


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = []
            while True:
                component.append(stack.pop())
                if component[-1] == node:
                    break
            if len(component) > 1:
                components.append(sorted(component))

    sys.setrecursionlimit(10_000)
    for node in sorted(graph):
        if node not in index:
            visit(node)
    return components


def import_cycles(sources: list[SourceFile]) -> tuple[list[str], list[str]]:
    """Cycles among modules, and among packages."""
    known = {s.module for s in sources}
    packages = {s.module: package_of(s) for s in sources}
    modules: dict[str, set[str]] = {}
    between: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        modules[source.module] = imported_modules(source, known)
        own = packages[source.module]
        between[own] |= {packages[m] for m in modules[source.module]} - {own}
    return [" <-> ".join(c) for c in cycles(modules)], [" <-> ".join(c) for c in cycles(dict(between))]


def comment_lines(sources: list[SourceFile]) -> tuple[int, int]:
    """Lines that hold only a comment, and all lines."""
    own = sum(line.lstrip().startswith("#") for s in sources for line in s.text.splitlines())
    return own, sum(len(s.text.splitlines()) for s in sources)


def sentences(source: SourceFile) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of docstrings, of comments, and of string literals of at least three words."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) >= 3:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def riddle_words(sources: list[SourceFile]) -> list[str]:
    """Places of riddle words in docstrings, comments and messages."""
    pattern = re.compile(r"\b(" + "|".join(w.replace(" ", r"\s+") for w in RIDDLES) + r")\b", re.I)
    found = []
    for source in sources:
        for line, text in sentences(source):
            found += [
                f"{source.path}:{line} {' '.join(m[1].lower().split())}" for m in pattern.finditer(text)
            ]
    return found


def ambiguous_constants(sources: list[SourceFile]) -> list[str]:
    """Upper-case names that modules give different values at their top level."""
    values: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for source in sources:
        for node in source.tree.body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                for target in targets:
                    if isinstance(target, ast.Name) and re.fullmatch(r"_?[A-Z][A-Z0-9_]*", target.id):
                        values[target.id.lstrip("_")][ast.unparse(node.value)].append(source.path)
    return [
        f"{name}: " + ", ".join(f"{value[:30]} in {' '.join(paths)}" for value, paths in by_value.items())
        for name, by_value in sorted(values.items())
        if len(by_value) > 1
    ]


def count_group(sources: list[SourceFile]) -> tuple[dict[str, tuple[int, int]], Findings]:
    """Counts as (findings, total) by key, total 0 where there is none, and the findings behind each key."""
    shapes, tensor_functions = tensors_without_shapes(sources)
    one_line, with_docstring = one_line_docstrings(sources)
    module_cycles, package_cycles = import_cycles(sources)
    comments, lines = comment_lines(sources)
    findings: Findings = {
        "repeated_class_names": repeated_classes(sources),
        "repeated_module_names": repeated_modules(sources),
        "one_word_functions": one_word_functions(sources),
        "tensors_without_shapes": shapes,
        "one_line_docstrings": one_line,
        "long_lines": long_lines(sources),
        "module_cycles": module_cycles,
        "package_cycles": package_cycles,
        "riddle_words": riddle_words(sources),
        "ambiguous_constants": ambiguous_constants(sources),
    }
    totals = {
        "one_word_functions": len(function_names(sources)),
        "tensors_without_shapes": tensor_functions,
        "one_line_docstrings": with_docstring,
        "long_lines": lines,
    }
    counts = {key: (len(found), totals.get(key, 0)) for key, found in findings.items()}
    counts["comment_lines"] = (comments, lines)
    counts["files"] = (len(sources), 0)
    return counts, findings


def largest_pages(root: Path) -> list[tuple[int, str]]:
    """(bytes, path) of the pages of README, CHANGELOG, CONTRIBUTING and docs/, largest first."""
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    return sorted(((p.stat().st_size, str(p.relative_to(root))) for p in pages), reverse=True)


LABELS = {
    "files": "Python files",
    "repeated_class_names": "class names used by several modules",
    "repeated_module_names": "module base names used by several files",
    "one_word_functions": "function names of one word, of distinct names",
    "tensors_without_shapes": "public functions of tensors without shapes, of all of these",
    "one_line_docstrings": "docstrings of one line, of those of public functions",
    "long_lines": "lines over 110 columns, of all lines",
    "module_cycles": "import cycles of modules",
    "package_cycles": "import cycles of packages",
    "comment_lines": "comment lines, of all lines",
    "riddle_words": "riddle words in docstrings, comments, messages",
    "ambiguous_constants": "constants of one name with several values",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Counts what makes the code hard to read for a stranger; forbids nothing."
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path(__file__).resolve().parent.parent,
        help="a checkout of secc",
    )
    parser.add_argument("--json", action="store_true", help="counts and findings for machines")
    parser.add_argument(
        "--list", metavar="KEY", choices=sorted(LABELS), help="print the findings of one count"
    )
    options = parser.parse_args()

    counts: dict[str, dict[str, tuple[int, int]]] = {}
    findings: dict[str, Findings] = {}
    for group, folders in GROUPS.items():
        counts[group], findings[group] = count_group(read_sources(options.folder, folders))
    pages = largest_pages(options.folder)

    if options.json:
        print(json.dumps({"counts": counts, "largest_pages": pages[:5], "findings": findings}, indent=1))
    elif options.list:
        for group in GROUPS:
            print("\n".join([f"# {group}", *findings[group].get(options.list, [])]))
    else:
        print(f"{'':62}" + "".join(f"{group:>16}" for group in GROUPS))
        for key, label in LABELS.items():
            cells = []
            for group in GROUPS:
                n, total = counts[group][key]
                share = f" {n / total:.1%}" if total else ""
                cells.append(f"{n}{share}")
            print(f"{label:62}" + "".join(f"{cell:>16}" for cell in cells))
        print(f"{'largest page of docs':62}" + (f"{pages[0][0]:>16} bytes, {pages[0][1]}" if pages else ""))
        words = Counter(found.split(" ", 1)[1] for found in findings["product"]["riddle_words"])
        print("riddle words of the product: " + ", ".join(f"{word} {n}" for word, n in words.most_common()))


if __name__ == "__main__":
    main()
