"""plan.json is checked when it is read: whatever stands in it, it is refused in one line with the place, or
everything that reads plans can work with it."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from secc.report.plan_differences import plan_differences
from secc.report.plan_tables import plan_summary, plan_tables
from secc.runtime.errors import UserError
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.schema import PLAN_VERSION, plan_digest, plan_to_json
from secc.runtime.plan.section_graph import SectionGraph
from tests.runtime.captioner_plans import UNEVEN, make_plan

GOLDEN = Path(__file__).parents[2] / "codegen" / "golden" / "plan.json.golden"
MUTATIONS = 400
Place = tuple[str | int, ...]

OUTLINE = [
    {"kind": ["input", "input_ids"]},
    {"kind": ["call", "encoder", True, None], "args": [{"node": 0}], "kwargs": {}},
    {"kind": ["result", "", "torch.float32", 2], "shape": ["n_images", None], "args": [{"node": 1}],
     "kwargs": {}},
    {"kind": ["recorded", "glue 1", "torch.int64", 1], "shape": ["3*B"], "sources": [0],
     "where": "model.py:3"},
    {"kind": ["op", "aten.add.Tensor", True], "args": [{"node": 2}, {"size": "B", "over": 2}], "kwargs": {}},
    {"kind": ["loss"], "args": [{"node": 4}]},
]  # fmt: skip


def golden_plan() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())


def captioner_plan() -> dict[str, Any]:
    """A plan with edges, ties, an outline and what the allocation says."""
    data = json.loads(plan_to_json(make_plan(UNEVEN)))
    data["recorded"] = [
        {"name": "case", "when": ["images"], "why": "w", "where": "", "nodes": OUTLINE, "spare": False}
    ]
    data["draws"] = [{"call": "drop@model.py:3#0", "dims": [0], "rows": "1", "where": ""}]
    return data


PLANS = {"golden": golden_plan, "captioner": captioner_plan}


def write_plan_json(directory: Path, data: Any, signed: bool = True) -> None:
    """Writes plan.json; `signed` ones have the digest of what they hold, as a forged plan may have."""
    if signed and isinstance(data, dict):
        data = {k: v for k, v in data.items() if k != "digest"}
        data["digest"] = plan_digest(data)
    directory.mkdir(exist_ok=True)
    (directory / "plan.json").write_text(json.dumps(data))


def places(data: Any, place: Place = ()) -> Iterator[Place]:
    if place:
        yield place
    items: Any = ()
    if isinstance(data, dict):
        items = data.items()
    elif isinstance(data, list):
        items = enumerate(data)
    for step, value in items:
        yield from places(value, (*place, step))


def mutate(data: dict[str, Any], draw: random.Random) -> str:
    """Changes one random place of `data`. Returns a description of the change."""
    place = draw.choice(list(places(data)))
    holder: Any = data
    for step in place[:-1]:
        holder = holder[step]
    step, value = place[-1], holder[place[-1]]
    kind = draw.choice(("replace", "replace", "delete", "add", "repeat", "near"))
    if kind == "delete":
        del holder[step]
    elif kind == "add" and isinstance(holder, dict):
        holder[f"{step}x"] = copy.deepcopy(value)
    elif kind == "repeat" and isinstance(holder, list):
        holder.append(copy.deepcopy(value))
    elif kind == "near" and isinstance(value, str):
        at = draw.randrange(len(value) + 1)
        holder[step] = (
            value[:at] + draw.choice(("\x1b[31m", "\n", "'", "(", "\ud800", "-", "9", "")) + value[at + 1 :]
        )
    elif kind == "near" and isinstance(value, (int, float)):
        holder[step] = not value if isinstance(value, bool) else value + draw.choice((-1, 1))
    else:
        odd = (None, -1, 0, 3, 2**70, 1e201, float("nan"), float("inf"), True, "", "x", "../x.py", "9" * 5000,
               "(" * 5000, "-" * 5000, "B" * 90000, "B//0", [], [[]], {}, {"x": 1}, ["x"])  # fmt: skip
        holder[step] = draw.choice(odd)
    return f"{kind} {place} -> {str(holder)[:200]}"


@pytest.mark.parametrize("name", PLANS)
def test_a_changed_plan_is_refused_in_one_line_or_everything_can_read_it(name: str, tmp_path: Path) -> None:
    original = PLANS[name]()
    write_plan_json(tmp_path / "original", original)
    first = load_plan(tmp_path / "original")
    draw, refused = random.Random(24), 0
    for _ in range(MUTATIONS):
        data = copy.deepcopy(original)
        change = mutate(data, draw)
        write_plan_json(tmp_path / "changed", data)
        try:
            plan = load_plan(tmp_path / "changed")
        except UserError as error:
            refused += 1
            assert "\n" not in error.message and "\x1b" not in error.message, change
            assert len(error.message) < 500 and error.where.endswith("plan.json"), change
            continue
        assert plan_summary(plan) and plan_tables(plan), change
        plan_differences(first, plan)
        SectionGraph(plan)
    assert refused > MUTATIONS // 3


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_changed_after_compilation_is_refused_unless_it_says_the_same(
    name: str, tmp_path: Path
) -> None:
    original = PLANS[name]()
    write_plan_json(tmp_path, original)
    first, digest = load_plan(tmp_path), json.loads((tmp_path / "plan.json").read_text())["digest"]
    draw = random.Random(7)
    for _ in range(MUTATIONS // 4):
        data = copy.deepcopy(original) | {"digest": digest}
        change = mutate(data, draw)
        write_plan_json(tmp_path, data, signed=False)
        try:
            assert load_plan(tmp_path) == first, change
        except UserError:
            continue


def test_a_reformatted_plan_is_the_same_plan(tmp_path: Path) -> None:
    write_plan_json(tmp_path, golden_plan())
    first, text = load_plan(tmp_path), (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(json.dumps(json.loads(text), indent=7))
    assert load_plan(tmp_path) == first


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("edges", 0, "src"), "nothing", "edges[0].src: the plan has no section 'nothing'"),
        (("terms", 1, "section"), 3, "terms[1].section: expected text, got 3"),
        (("sections", "decoder", "mesh", "ranks"), [1, 9], "expected different ranks below the plan's 3"),
        (("sections", "decoder", "mesh", "dp"), 5, "expected dp * pp * tp * cp = 5 ranks, got 2"),
        (("sections", "decoder", "module"), "sections/../../x.py",
         "sections.decoder.module: expected sections/NAME.py"),
        (("sections", "encoder", "cost", "saved"), "B*Q", "the plan has no symbol 'Q'"),
        (("sections", "encoder", "cost", "saved"), "__import__('os')",
         "expected an expression over the inputs' sizes"),
        (("edges", 0, "fills"), [1.0, 2.0, 3.0], "edges[0].fills: expected one for each of"),
        (("edges", 0, "dim"), 4, "edges[0].dim: expected a dim with rows"),
        (("edges", 0, "when"), [], "edges[0].when: expected what its source is active for"),
        (("world_size",), 10**9, "world_size: expected an integer from 1 to 65536, got 1000000000"),
        (("cluster",), {"name": "x"}, "cluster: lacks the key 'nodes'"),
        (("recorded", 0, "nodes", 3, "sources"), [77],
         "recorded[0].nodes[3]: refers to a node outside 0 to 5"),
        (("recorded", 0, "nodes", 0),
         {"kind": ["op", "load_library", True], "args": ["/x.so"], "kwargs": {}, "made": True},
         "expected an op of aten that is computed from sizes"),
    ],
)  # fmt: skip
def test_a_message_names_the_place_and_what_was_expected(
    place: Place, value: Any, said: str, tmp_path: Path
) -> None:
    data = captioner_plan()
    holder: Any = data
    for step in place[:-1]:
        holder = holder[step]
    holder[place[-1]] = value
    write_plan_json(tmp_path, data)
    with pytest.raises(UserError) as refusal:
        load_plan(tmp_path)
    assert said in refusal.value.message


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"[" * 200_000, b'{"version": ' + b"9" * 6000 + b"}", b'{"version": 1e999}', b"\0",
     b"{}"],
    ids=["empty", "no-utf8", "deep", "long-number", "infinite", "nul", "no-keys"],
)  # fmt: skip
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(UserError) as refusal:
        load_plan(tmp_path)
    assert "\n" not in refusal.value.message and len(refusal.value.message) < 300


def test_a_directory_in_place_of_plan_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(UserError, match="expected a file"):
        load_plan(tmp_path)


def test_a_plan_of_a_thousand_ranks_loads_fast(tmp_path: Path) -> None:
    ranks = tuple(range(1024))
    plan = make_plan({"encoder": ranks, "teacher": ranks, "decoder": ranks})
    tmp_path.joinpath("plan.json").write_text(plan_to_json(plan))
    start = time.perf_counter()
    assert load_plan(tmp_path) == plan
    assert time.perf_counter() - start < 0.5


@pytest.mark.parametrize("version", [1, PLAN_VERSION + 1, str(PLAN_VERSION)])
def test_a_plan_of_another_version_is_refused(version: object, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"version": version}))
    with pytest.raises(
        UserError, match=f"expected a plan of version {PLAN_VERSION}, got version {version!r}"
    ) as refusal:
        load_plan(tmp_path)
    assert refusal.value.where == str(tmp_path / "plan.json")
    assert refusal.value.remedy == "compile the model again"


@pytest.mark.parametrize("text", ["[]", "{}", '{"sections": {}}', "version"])
def test_other_json_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UserError, match="not a plan"):
        load_plan(tmp_path)
