"""Weights from files, and from the one process of a node that builds the model: the same on all ranks, and
without holding what a rank does not need."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from secc.runtime.errors import UserError
from secc.runtime.model.init_weights import InitDirectories
from secc.runtime.model.meta_build import build_meta_model
from secc.runtime.model.user_file import load_model_file
from secc.runtime.parameters import rank_weights
from secc.runtime.parameters.rank_weights import build_rank_model, canonical_names, describe_parameters
from secc.runtime.plan.schema import PLAN_VERSION, Mesh, ModelRef, Plan, Section
from secc.runtime.training.options import parse_options
from tests.runtime.gloo_ranks import free_port, run_ranks

CPU = torch.device("cpu")
MODEL = """
import torch
from torch import nn

class Part(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(500, width)
        self.layers = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("angles", torch.zeros(400, 400), persistent=False)
        self.angles[:, 0::2] = torch.arange(400.0)[:, None]
        self.register_buffer("noise", NOISE, persistent=False)
        self.shift = torch.randn(2)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.text = Part(300), Part(WIDTH)
        self.head = nn.Linear(WIDTH, 500, bias=False)
        self.head.weight = self.text.embed.weight

    def forward(self, x):
        return x.sum()

def model():
    return Model().to(torch.DTYPE)

def dataset():
    return [0]
"""


def model_file(folder: Path, noise: str = "torch.randn(2)", dtype: str = "float32", width: int = 300) -> Path:
    path = folder / "model.py"
    path.write_text(MODEL.replace("NOISE", noise).replace("DTYPE", dtype).replace("WIDTH", str(width)))
    return path


def plan_of(path: Path, ranks: tuple[int, int]) -> Plan:
    """The tower on one rank, the text on the other."""
    model = load_model_file(path).build_model()
    names = {
        part: tuple(n for n, _ in model.named_parameters() if n.startswith(part))
        for part in ("tower", "text")
    }
    sections = [
        Section(part, "", "train", (), (part,), names[part], Mesh((rank,)), 1)
        for part, rank in zip(("tower", "text"), ranks, strict=True)
    ]
    return Plan(
        PLAN_VERSION,
        "",
        ModelRef("", "", describe_parameters(model)),
        2,
        2,
        "own",
        (),
        (),
        tuple(sections),
        (),
        (),
        (),
        {},
        {},
        {},
    )


def plain(path: Path, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return load_model_file(path).build_model()


def saved(model: nn.Module, directory: Path, prefix: str = "", **changed: torch.Tensor | None) -> None:
    """The state of a model, tied tensors once, in one file of `directory`."""
    first = canonical_names(model)
    state = {n: t for n, t in model.state_dict().items() if first.get(n, n) == n} | changed
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {prefix + n: t.contiguous() for n, t in state.items() if t is not None},
        directory / "model.safetensors",
    )


def here(path: Path, init: InitDirectories, rank: int = 1) -> nn.Module:
    return build_rank_model(plan_of(path, (0, 1)), load_model_file(path), rank, CPU, seed=3, init=init).model


def same(found: nn.Module, expected: dict[str, torch.Tensor], name: str = "text") -> bool:
    held = {n: t for n, t in found.state_dict().items() if n.startswith(name)}
    return bool(held) and all(torch.equal(t, expected[n]) for n, t in held.items())


@pytest.mark.gloo
def test_one_process_of_a_node_builds_and_broadcasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, ties, buffers of all kinds and plain attributes, random or computed, are those that one
    process makes."""
    path = model_file(tmp_path, noise="torch.randn(400, 400)")
    plan, port = plan_of(path, (0, 2)), free_port()
    monkeypatch.setattr(rank_weights, "BUILD_EVERYWHERE_BYTES", 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")

    def target(rank: int) -> dict[str, Any]:
        import os

        os.environ["LOCAL_RANK"] = str(rank)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
        model = build_rank_model(plan, load_model_file(path), rank, CPU, seed=3).model
        assert model.head.weight is model.text.embed.weight
        dist.barrier()
        held = {n: t for n, t in (*model.named_parameters(), *model.named_buffers()) if not t.is_meta}
        return {"held": {n: t.detach() for n, t in held.items()}, "shift": model.tower.shift}

    expected = plain(path, 3)
    known = dict(expected.named_parameters()) | dict(expected.named_buffers())
    buffers = {n for n, _ in expected.named_buffers()}
    for rank, found in enumerate(run_ranks(3, target)):
        part = {0: "tower", 2: "text"}.get(rank, "nothing")
        assert {n for n in found["held"] if n not in buffers} == {
            n for n in known if n.startswith(part) and n not in buffers
        }
        assert all(torch.equal(t, known[n]) for n, t in found["held"].items())
        assert torch.equal(found["shift"], expected.tower.shift)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_files_are_read_into_the_meta_model(tmp_path: Path, dtype: str) -> None:
    """In the model's dtype. A table that no file has is computed, whatever its size."""
    expected = plain(model_file(tmp_path), 9)
    saved(expected, tmp_path / "weights")
    model = here(model_file(tmp_path, dtype=dtype), (("", tmp_path / "weights"),))
    assert same(model, {n: t.to(getattr(torch, dtype)) for n, t in expected.state_dict().items()})
    assert model.tower.embed.weight.is_meta and torch.equal(
        model.tower.angles, expected.tower.angles.to(getattr(torch, dtype))
    )
    assert model.head.weight is model.text.embed.weight


def test_components_come_from_their_own_directories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the names of subdirectories or as options, with a prefix more or less than the component has."""
    path = model_file(tmp_path)
    expected = plain(path, 9)
    state = expected.state_dict()
    saved(expected.tower, tmp_path / "all" / "tower")
    saved(expected.text, tmp_path / "all" / "text", prefix="model.", extra=torch.zeros(1))
    apart = (("tower", tmp_path / "all" / "tower"), ("text", tmp_path / "all" / "text"))
    for init in ((("", tmp_path / "all"),), apart):
        assert same(here(path, init), state) and same(here(path, init, rank=0), state, "tower")
    assert "1 stored tensors have no place in the model: text/model.extra" in capsys.readouterr().err


def test_an_index_selects_the_shards(tmp_path: Path) -> None:
    path = model_file(tmp_path)
    expected = plain(path, 9)
    saved(expected, tmp_path / "weights")
    (tmp_path / "weights" / "model.safetensors").rename(tmp_path / "weights" / "a.safetensors")
    saved(plain(path, 1), tmp_path / "weights")  # which the index does not name
    index = tmp_path / "weights" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(expected.state_dict(), "a.safetensors")}))
    assert same(here(path, (("", tmp_path / "weights"),)), expected.state_dict())
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    with pytest.raises(UserError, match="1 of 2 shards are missing: b"):
        here(path, (("", tmp_path / "weights"),))


REFUSED = [
    (
        {"text.scale": torch.zeros(3, dtype=torch.int8)},
        "text.scale is stored as int8, but the model has float32",
    ),
    ({"tower.scale": torch.zeros(4)}, r"tower.scale has shape \[4\], not \[3\]"),
    ({"text.scale": None}, "1 of 12 tensors are missing: text.scale"),
    ({"tower.scale": None}, "1 of 12 tensors are missing: tower.scale"),  # which another rank holds
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_weights_that_do_not_fit_are_rejected(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    path = model_file(tmp_path)
    saved(plain(path, 9), tmp_path / "weights", **changed)
    with pytest.raises(UserError, match=message):
        here(path, (("", tmp_path / "weights"),))


def test_a_large_random_buffer_without_a_file_is_rejected(tmp_path: Path) -> None:
    path = model_file(tmp_path, noise="torch.randn(400, 400)")
    saved(plain(path, 9), tmp_path / "weights")
    with pytest.raises(UserError, match=r"the buffer tower\.noise is not saved with the model"):
        here(path, (("", tmp_path / "weights"),))


def test_directories_without_safetensors_and_unknown_modules_are_rejected(tmp_path: Path) -> None:
    path = model_file(tmp_path)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match="turn pytorch_model"):
        here(path, (("", tmp_path / "weights"),))
    with pytest.raises(UserError, match="the model has no module 'txt'"):
        here(path, (("txt", tmp_path / "weights"),))


def test_init_options_name_directories_and_components(tmp_path: Path) -> None:
    assert parse_options([]).init == parse_options(["--init", "seed"]).init == ()
    found = parse_options(["--init", "a/b=c", "--init", "text.layers.0=/w"]).init
    assert found == (("", Path("a/b=c")), ("text.layers.0", Path("/w")))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_a_rank_leaves_out_what_it_does_not_hold(tmp_path: Path) -> None:
    """The text part has 78 MB in the model, and the file has another dtype; the rank of the tower needs a
    small part of that."""
    path = model_file(tmp_path, width=3000)
    saved(plain(path, 9).to(torch.float16), tmp_path / "weights")
    plan = plan_of(path, (0, 1))
    build_meta_model(load_model_file(path))  # imports what it needs, once for all ranks
    _return_freed_memory()

    def target(rank: int) -> int:
        before = _peak()
        build_rank_model(plan, load_model_file(path), rank, CPU, seed=3, init=(("", tmp_path / "weights"),))
        return _peak() - before

    tower, text = run_ranks(2, target, limit_s=150)
    assert text > 75e6 > 40e6 > tower


def _return_freed_memory() -> None:
    """Give the C library's free memory back to the system: forked processes would fill it without growing."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _peak() -> int:
    """Bytes that this process has had in memory at most."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return 1024 * int(line.split()[1])
