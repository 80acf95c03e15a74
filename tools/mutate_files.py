"""Mutates files that secc reads and looks at what its readers do with them.

    python -m tools.mutate_files --count 10000

A reader may take a mutated file, or refuse it with a `UserError` that names the file. Anything else is a
fault: another exception, more than `LONGEST_S` seconds, memory beyond `MOST_BYTES`, a message of more than
`LONGEST_MESSAGE` characters. Mutations are drawn
from a seed: bits, truncation, repeated and swapped parts, other values in JSON and YAML, deep nesting, huge
numbers, control characters. Ends with exit code 1 if there were faults.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from secc.cluster.cluster_file import read_cluster_file
from secc.cost.model.measured_costs import read_measured_costs
from secc.errors import UserError
from secc.frontend.dataset.input_symbols import describe_inputs
from secc.frontend.dataset.sampling import survey_dataset
from secc.frontend.dataset.statistics import pattern_means, read_statistics
from secc.ir.text_io.module_text import read_module
from secc.report.run_log import read_run_log
from secc.runtime.model.safetensors_reader import list_stored_tensors
from secc.runtime.model.user_file import load_model_file
from secc.runtime.monitoring.metrics import METRICS_FILE
from secc.runtime.monitoring.section_times import SECTION_TIMES_FILE
from secc.runtime.parameters import sliced_tensor_store
from secc.runtime.parameters.checkpoint import load_full_state_dict
from secc.runtime.parameters.checkpoint_folder import read_manifest
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.schema import Plan, plan_digest
from secc.runtime.training.best_checkpoint import BEST_FILE, BEST_FOLDER, BestCheckpoint, BestMetric

LONGEST_S, MOST_BYTES, LONGEST_MESSAGE = 20.0, 1 << 30, 12_000
LONGEST_LIST = 1000  # that a mutation repeats
ROOT = Path(__file__).resolve().parent.parent
_TEXTS = ("", "x", "\0", "\x1b[31m", "[/bold]", "../../etc/passwd", "__import__('os')", "é" * 300, "9" * 5000)
_VALUES = (*_TEXTS, None, True, -1, 0, 1e201, float("nan"), float("inf"), 2**70, [], {}, [[]], {"a": 1})

CLUSTER = """
name: fuzzed
groups:
  - {nodes: 2, devices: 8, kind: H100, memory_gib: 80, inside: {gb_s: 450, latency_us: 3}}
  - {nodes: 1, devices: 8, kind: other, like: A100, efficiency_percent: 40, bf16_tflops: 300}
between: {gb_s: 50, latency_us: 8, collectives: [{collective: all_reduce, ranks: 2, gb_s: 2, latency_us: 9}]}
"""
_PRICES = {"values": [1.0, 2.0, 3.0, 4.0], "error": 0.1}
COSTS = {
    "version": 2,
    "hardware": {"backend": "cpu", "name": "some CPU", "threads": 2},
    "gauge_ns": 100,
    "blocks": {"0123456789abcdef": {"block": "Linear", "forward": _PRICES, "backward": _PRICES}},
    "overheads": {"job": 1, "message": 2, "tensor": 3, "sample": 4, "step": 5, "label": "measured"},
}
MANIFEST = {
    "step": 5,
    "seed": 0,
    "shuffle": False,
    "global_batch": 8,
    "names": ["a", "b"],
    "tied": {"b": "a"},
}


@dataclass(frozen=True)
class FileFormat:
    """A kind of file: its name in a folder, its contents, and the reader, which gets the folder. `others`:
    files next to it, by name."""

    name: str
    content: bytes
    read: Callable[[Path], object]
    others: Mapping[str, bytes] = field(default_factory=dict[str, bytes])


@dataclass(frozen=True)
class Fault:
    """A mutated file that a reader neither took nor refused as it should. A `seed` of -1: not mutated."""

    format: str
    seed: int
    what: str


class TooLong(BaseException):
    """Raised in a reader that takes longer than `LONGEST_S`."""


def file_formats(plan_json: bytes, ir: bytes) -> list[FileFormat]:
    """Returns the formats, each with a valid file."""
    with tempfile.TemporaryDirectory() as folder:
        save_file({"a": torch.zeros(3, 4), "b": torch.ones(5)}, Path(folder) / "w.safetensors")
        weights = (Path(folder) / "w.safetensors").read_bytes()
    plan = _plan_of(plan_json)
    index = {"metadata": {"total_size": 68}, "weight_map": {"a": "w.safetensors", "b": "w.safetensors"}}
    return [
        FileFormat("plan.json", plan_json, load_plan),
        FileFormat("cluster.yaml", CLUSTER.encode(), lambda at: read_cluster_file(at / "cluster.yaml")),
        FileFormat(
            "flow.yaml",  # in JSON, so that its values are mutated, too
            json.dumps(yaml.safe_load(CLUSTER)).encode(),
            lambda at: read_cluster_file(at / "flow.yaml"),
        ),
        FileFormat(
            "costs.json", json.dumps(COSTS).encode(), lambda at: read_measured_costs(at / "costs.json")
        ),
        FileFormat("ir.mlir", ir, lambda at: read_module(at / "ir.mlir")),
        FileFormat("checkpoint.json", json.dumps(MANIFEST).encode(), read_manifest),
        FileFormat("w.safetensors", weights, list_stored_tensors),
        FileFormat(
            "m.safetensors.index.json",
            json.dumps(index).encode(),
            list_stored_tensors,
            {"w.safetensors": b"\2\0\0\0\0\0\0\0{}"},
        ),
        _statistics_format(),
        *_checkpoint_formats(),
        *_log_formats(plan),
        FileFormat(BEST_FILE, json.dumps({"metric": "eval/a", "value": 0.5, "step": 3}).encode(), _read_best),
    ]


def _plan_of(plan_json: bytes) -> Plan:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "plan.json").write_bytes(plan_json)
        return load_plan(Path(folder))


def _log_formats(plan: Plan) -> list[FileFormat]:
    """Returns the logs of a run of a plan, as the report reads them."""
    steps = [
        {"step": i, "loss": 4.0 / i, "grad_norm": 1.0, "samples": 8, "tokens": 8, "step_time_s": 2.0}
        for i in range(1, 6)
    ]
    metrics = [*steps, {"step": 5, "eval": "eval", "loss": 1.5, "step_time_s": 1.0, "run": "a"}]
    seconds = {"forward_s": 1.0, "backward_s": 2.0, "predicted_forward_s": 0.5, "predicted_backward_s": 1.0}
    sections = {s.name: seconds | {"wait_s": 1.0, "exposed_s": 0.5} for s in plan.user_sections}
    mix = [{"when": ["pixel_values"], "count": 3, "sizes": {"S": 81}}, {"when": [], "count": 1, "sizes": {}}]
    times = [{"step": i, "sections": sections, "mix": mix} for i in range(1, 6)]
    files = {
        name: "".join(json.dumps(line) + "\n" for line in lines).encode()
        for name, lines in ((METRICS_FILE, metrics), (SECTION_TIMES_FILE, times))
    }
    return [
        FileFormat(
            name,
            files[name],
            lambda at: read_run_log(plan, at),
            {other: text for other, text in files.items() if other != name},
        )
        for name in files
    ]


def _read_best(folder: Path) -> None:
    (folder / BEST_FOLDER).mkdir()
    (folder / BEST_FILE).rename(folder / BEST_FOLDER / BEST_FILE)
    BestCheckpoint(BestMetric("eval/a"), folder, None, None, 9)


def _statistics_format() -> FileFormat:
    """Returns the statistics of an example's dataset."""
    user = load_model_file(ROOT / "examples" / "captions.py")
    survey = survey_dataset(user, 4)
    inputs = describe_inputs(user, survey)
    patterns = [{"when": sorted(m.when), "share": m.share, "sizes": m.sizes} for m in pattern_means(inputs)]
    return FileFormat(
        "statistics.json",
        json.dumps({"patterns": patterns}).encode(),
        lambda at: read_statistics(at / "statistics.json", inputs, survey),
    )


def _checkpoint_formats() -> list[FileFormat]:
    """Returns the data and the index of a checkpoint with a manifest without digests, as its author can
    write one: with digests, no mutation is read at all."""
    weight = torch.arange(12.0).view(3, 4)
    state: dict[str, Any] = {
        "model/a": sliced_tensor_store.TensorSlice(weight.view(-1), weight.shape, 0),
        "scheduler/0": {"last_epoch": 3, "_last_lr": [0.1]},
    }
    with tempfile.TemporaryDirectory() as folder:
        sliced_tensor_store.write_index(
            Path(folder), [sliced_tensor_store.write_entries(Path(folder), 0, state)]
        )
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    files["checkpoint.json"] = json.dumps(MANIFEST | {"names": ["a"], "tied": {}}).encode()

    def read(folder: Path) -> None:
        load_full_state_dict(folder)
        sliced_tensor_store.read_entries(folder, {"scheduler/0": None}, alone=True)

    return [
        FileFormat(name, files[name], read, {k: v for k, v in files.items() if k != name})
        for name in ("__0_0.distcp", ".metadata")
    ]


def mutate(content: bytes, draw: random.Random) -> bytes:
    """Returns a mutated file; of one with a JSON object on each line, one line is mutated."""
    lines = content.splitlines(keepends=True)
    if len(lines) > 1 and all(line.startswith(b"{") for line in lines):
        at = draw.randrange(len(lines))
        return b"".join([*lines[:at], mutate(lines[at], draw), *lines[at + 1 :]])
    if content[:1] == b"{" and draw.random() < 0.5:
        data = json.loads(content)
        for _ in range(draw.choice((1, 1, 2, 5))):
            data = _mutate_json(data, draw)
        with suppress(RecursionError):  # nested more deeply than Python writes
            if isinstance(data, dict) and "digest" in data:  # as the author of a plan can
                data["digest"] = plan_digest({key: value for key, value in data.items() if key != "digest"})
            return json.dumps(data).encode(errors="surrogatepass") + b"\n"
    return draw.choice(_BYTE_MUTATIONS)(bytearray(content), draw)


def _mutate_json(data: Any, draw: random.Random) -> Any:
    """Changes one value, key or item, or wraps one many times."""
    containers = [c for c in _containers(data) if c]
    if not containers:
        return deepcopy(draw.choice(_VALUES))
    chosen = draw.choice(containers)
    key = draw.choice(list(chosen)) if isinstance(chosen, dict) else draw.randrange(len(chosen))
    match draw.randrange(6):
        case 0:
            del chosen[key]
        case 1 if isinstance(chosen, dict):
            chosen[draw.choice(_TEXTS)] = chosen.pop(key)
        case 2:
            for _ in range(draw.choice((1, 3, 40, 100))):
                chosen[key] = [chosen[key]]
        case 3 if isinstance(chosen, list) and len(chosen) <= LONGEST_LIST:
            with suppress(RecursionError):
                chosen[:] = [deepcopy(item) for _ in range(draw.choice((0, 2, 50))) for item in chosen]
        case 4:
            other = draw.choice(containers)
            with suppress(RecursionError):
                chosen[key] = json.loads(json.dumps(other))
        case _:
            chosen[key] = deepcopy(draw.choice(_VALUES))
    return data


def _containers(data: Any) -> Iterator[Any]:
    """Yields the objects and lists in `data`, which may be nested deeply."""
    left = [data]
    while left:
        found = left.pop()
        if isinstance(found, dict | list):
            yield found
            left += found.values() if isinstance(found, dict) else found  # pyright: ignore[reportUnknownArgumentType]


def _flip_bits(content: bytearray, draw: random.Random) -> bytes:
    for _ in range(draw.choice((1, 1, 3, 20))):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(content)


def _truncate(content: bytearray, draw: random.Random) -> bytes:
    return bytes(content[: draw.randrange(len(content))])


def _repeat_part(content: bytearray, draw: random.Random) -> bytes:
    start = draw.randrange(len(content))
    part = content[start : start + draw.choice((1, 10, 200))]
    at = draw.randrange(len(content))
    return bytes(content[:at] + part * draw.choice((1, 2, 1000)) + content[at:])


def _insert_token(content: bytearray, draw: random.Random) -> bytes:
    tokens = [
        '"',
        "{",
        "[",
        "(",
        "<",
        "&a [*a, *a]",
        "!!python/object/apply:os.system ['false']",
        "\\",
        "%",
        "-",
    ]
    token = draw.choice([*tokens, *_TEXTS, '"' + "a" * 50_000, "[" * 3000, "1" * 5000, "- - " * 900])
    at = draw.randrange(len(content))
    return bytes(content[:at] + token.encode() + content[at + draw.choice((0, len(token))) :])


def _zero_part(content: bytearray, draw: random.Random) -> bytes:
    start = draw.randrange(len(content))
    content[start : start + 16] = bytes(len(content[start : start + 16]))
    return bytes(content)


_BYTE_MUTATIONS = (_flip_bits, _truncate, _repeat_part, _insert_token, _zero_part)


def try_file(form: FileFormat, content: bytes, folder: Path, most_bytes: int) -> str:
    """Reads a file. Returns "taken", "refused", or what is at fault; `most_bytes` limits the memory that this
    process has had at any time."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, other in {**form.others, form.name: content}.items():
        (folder / name).write_bytes(other)
    started = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    try:
        form.read(folder)
        outcome = "taken"
    except UserError as error:
        text = str(error)
        outcome = "refused" if str(folder) in text else f"a message without its file: {text}"
        outcome = outcome if len(text) < LONGEST_MESSAGE else f"a message of {len(text)} characters"
    except (Exception, TooLong) as error:
        outcome = f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if _peak_bytes() > most_bytes:
        return "too much memory"
    return outcome if time.monotonic() - started < LONGEST_S else "too slow"


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_mutations(
    formats: list[FileFormat], count: int, first_seed: int = 0
) -> tuple[Mapping[str, Counter[str]], list[Fault]]:
    """Tries `count` mutated files in turns of all formats. Returns the numbers of outcomes by format, and the
    faults."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before, most_bytes = signal.signal(signal.SIGALRM, interrupt), _peak_bytes() + MOST_BYTES
    outcomes = {form.name: Counter[str]() for form in formats}
    faults: list[Fault] = []
    with tempfile.TemporaryDirectory() as folder:
        for form in formats:
            if (outcome := try_file(form, form.content, Path(folder), most_bytes)) != "taken":
                faults.append(Fault(form.name, -1, f"the file is not taken without a mutation: {outcome}"))
        for seed in range(first_seed, first_seed + count):
            form = formats[seed % len(formats)]
            outcome = try_file(form, mutate(form.content, random.Random(seed)), Path(folder), most_bytes)
            if outcome not in ("taken", "refused"):
                faults.append(Fault(form.name, seed, outcome))
                outcome = "fault"
            outcomes[form.name][outcome] += 1
    signal.signal(signal.SIGALRM, before)
    return outcomes, faults


def main() -> int:
    """Runs the mutations of the command line and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", metavar="NAME", help="a format (may be repeated)")
    given = parser.parse_args()
    plan_json = (ROOT / "tests/codegen/golden/plan.json.golden").read_bytes()
    ir = (ROOT / "tests/codegen/llava.mlir").read_bytes()
    formats = [f for f in file_formats(plan_json, ir) if not given.only or f.name in given.only]
    outcomes, faults = run_mutations(formats, given.count, given.seed)
    for name, counted in outcomes.items():
        print(f"{name:26} {dict(counted)}")
    for fault in faults[:50]:
        print(f"fault: {fault.format}, seed {fault.seed}: {fault.what}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
