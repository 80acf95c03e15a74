"""Datasets of Hugging Face, WebDataset and MosaicML, read from local files: the samples of a list, in their
order, and resumed at their place."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from secc.runtime.errors import UserError
from secc.runtime.model.stream_reader import StreamPosition, StreamReader
from secc.runtime.model.user_file import UserModel, load_model_file

COUNT = 23
HEAD = """
import os
from pathlib import Path

HERE = Path(__file__).parent

def model():
    raise NotImplementedError
"""
JSON = """
import datasets

def dataset():
    return datasets.load_dataset(
        "json", data_files=[str(p) for p in sorted(HERE.glob("*.jsonl"))], split="train", streaming=True,
        cache_dir=str(HERE / "cache"),
    ){}
"""
SPLIT = (
    JSON.replace("    return", "    stream =")
    + """
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(stream, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
"""
)


def sample(i: int) -> dict[str, Any]:
    return {"input_ids": [i] * (1 + i % 4), "text": f"sample {i}"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three files of samples, on rank 1 of 3."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for part in range(3):
        lines = [json.dumps(sample(i)) for i in range(COUNT) if i * 3 // COUNT == part]
        (tmp_path / f"part{part}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def load(folder: Path, text: str) -> UserModel:
    path = folder / "model.py"
    path.write_text(HEAD + text)
    return load_model_file(path)


def take(reader: StreamReader, numbers: range, key: str = "text") -> list[Any]:
    return [reader.read(n).item[key] for n in numbers]


def check_resumption(
    user: Callable[[], UserModel], taken: int, by_state: bool | None, key: str = "text"
) -> list[Any]:
    """Stops after `taken` samples and goes on with a new stream; returns the samples before and after."""
    first = StreamReader(user().sources()[0])
    before = take(first, range(taken), key)
    position = StreamPosition.from_json(json.loads(json.dumps(first.find_position(taken).as_json())))
    assert position is not None
    second = StreamReader(user().sources()[0])
    how = second.resume(position)
    assert by_state is None or ("state_dict" in how) == by_state
    following = range(taken, taken + COUNT)
    after = take(second, following, key)
    assert after == take(first, following, key)
    return before + after


TEXTS = [f"sample {i}" for i in range(COUNT)]


@pytest.mark.parametrize("taken", [5, COUNT, COUNT + 9])
@pytest.mark.parametrize("text", [JSON.format(""), SPLIT.format("")], ids=["whole", "split by node"])
def test_a_stream_of_json_lines(folder: Path, text: str, taken: int) -> None:
    pytest.importorskip("datasets")
    read = check_resumption(lambda: load(folder, text), taken, by_state=True)
    # From its third epoch on, the library reads these files in another order.
    assert read[: 2 * COUNT] == (TEXTS * 2)[: len(read)] and len(read) == taken + COUNT


@pytest.mark.parametrize("taken", [5, COUNT + 9])
def test_a_shuffled_stream_is_read_again_to_its_place(folder: Path, taken: int) -> None:
    """Its state does not hold the shuffle buffer, so loading it gives other samples, unless the buffer was
    not filled again since the state's block of the file began. Epochs differ."""
    pytest.importorskip("datasets")
    text = JSON.format(".shuffle(seed=1, buffer_size=8)")
    read = check_resumption(lambda: load(folder, text), taken, by_state=True if taken == 5 else None)
    epochs = read[:COUNT], StreamReader(load(folder, text).sources()[0])
    assert sorted(epochs[0]) == sorted(TEXTS) and epochs[0] != TEXTS
    second = take(epochs[1], range(COUNT, 2 * COUNT))
    assert sorted(second) == sorted(TEXTS) and second != epochs[0]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_streams_and_tables_of_columns(folder: Path, kind: str) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([sample(i) for i in range(COUNT)])
    if kind == "parquet":
        table.to_parquet(str(folder / "all.parquet"))
        streamed = JSON.replace('"json"', '"parquet"').replace("*.jsonl", "*.parquet").format("")
        numbered = streamed.replace("streaming=True", "streaming=False")
    else:
        table.save_to_disk(str(folder / "all"))
        numbered = "import datasets\ndef dataset():\n    return datasets.load_from_disk(str(HERE / 'all'))\n"
        streamed = numbered.replace("'all'))", "'all')).to_iterable_dataset(num_shards=2)")
    user = load(folder, numbered)
    assert user.sample_count == COUNT
    assert [user.load_sample(i) for i in range(COUNT)] == [sample(i) for i in range(COUNT)]
    assert check_resumption(lambda: load(folder, streamed), 9, by_state=True)[:COUNT] == TEXTS


def test_a_dict_of_splits_names_one_of_them(folder: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(UserError, match="of type IterableDatasetDict, not a map-style dataset") as caught:
        load(folder, JSON.format("").replace('split="train", ', "")).sources()
    assert "return one split, such as ds['train']" in caught.value.remedy


def write_tars(folder: Path) -> None:
    """Three shards of a WebDataset."""
    for part in range(3):
        with tarfile.open(folder / f"part{part}.tar", "w") as tar:
            for i in range(COUNT):
                if i * 3 // COUNT == part:
                    data = json.dumps(sample(i)).encode()
                    entry = tarfile.TarInfo(f"{i:04d}.json")
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))


WEB = """
import webdataset

def dataset():
    shards = [str(p) for p in sorted(HERE.glob("*.tar"))]
    stream = webdataset.WebDataset(shards, shardshuffle=False, empty_check=False{}).decode()
    return stream.map(lambda entry: entry["json"] | {{"key": entry["__key__"]}}){}
"""


@pytest.mark.parametrize("splitter", ["", ", nodesplitter=webdataset.split_by_node"])
def test_a_web_dataset_is_read_whole_on_every_rank(folder: Path, splitter: str) -> None:
    """Without a nodesplitter it refuses several ranks, and with one it gives a rank its shards only."""
    pytest.importorskip("webdataset")
    write_tars(folder)
    read = check_resumption(lambda: load(folder, WEB.format(splitter, "")), COUNT + 4, by_state=False)
    assert read == [TEXTS[n % COUNT] for n in range(2 * COUNT + 4)]


def test_a_shuffled_web_dataset_needs_a_seed(folder: Path) -> None:
    pytest.importorskip("webdataset")
    write_tars(folder)
    text = WEB.format("", ".shuffle(8, seed=1)")
    read = check_resumption(lambda: load(folder, text), 9, by_state=False)
    assert read[:COUNT] != TEXTS and sorted(read[:COUNT]) == sorted(TEXTS)


def test_a_mosaic_dataset_has_numbered_samples(folder: Path) -> None:
    """It is an IterableDataset that divides itself by rank, but its samples can be asked for by number."""
    streaming = pytest.importorskip("streaming")
    import numpy as np

    columns = {"input_ids": "ndarray:int64", "text": "str"}
    with streaming.MDSWriter(out=str(folder / "mds"), columns=columns, size_limit=1 << 9) as writer:
        for i in range(COUNT):
            writer.write(sample(i) | {"input_ids": np.array(sample(i)["input_ids"])})
    user = load(
        folder,
        "import streaming\ndef dataset():\n"
        "    return streaming.StreamingDataset(local=str(HERE / 'mds'), shuffle=True, batch_size=1)\n",
    )
    assert user.sample_count == COUNT and not user.sources()[0].is_stream
    assert [user.load_sample(i)["text"] for i in (*range(COUNT), 3)] == [*TEXTS, TEXTS[3]]


def test_a_stateful_loader_with_workers_goes_on_by_its_state(folder: Path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    text = """
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

class Numbers(torch.utils.data.IterableDataset):
    def __init__(self): self.at = 0
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        while self.at < 10:
            self.at += 1
            yield {"x": 10 * info.id + self.at - 1}
        self.at = 0
    def state_dict(self): return {"at": self.at}
    def load_state_dict(self, state): self.at = state["at"]

def dataset():
    return StatefulDataLoader(Numbers(), batch_size=None, num_workers=2)
"""
    read = check_resumption(lambda: load(folder, text), 7, by_state=True, key="x")
    assert read[:20] == [n // 2 + 10 * (n % 2) for n in range(20)]


def test_batches_of_a_loader_are_refused(folder: Path) -> None:
    text = "import torch\ndef dataset():\n    return torch.utils.data.DataLoader([{}], batch_size=2)\n"
    with pytest.raises(UserError, match="a DataLoader of batches"):
        load(folder, text).sources()
