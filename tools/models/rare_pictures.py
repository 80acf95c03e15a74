"""The captioner of `examples/captions.py` on samples that seldom have a picture: every second one of the
first eight, none of the next 24. Of the global batches of eight, the first has pictures and the next three
have none, as in a corpus that mixes captions with long runs of text. `tools/show_hand_written_failures.py`
uses it.
"""

import torch
from torch import nn
from torch.utils.data import Dataset

from examples.captions import PICTURE, Captioner, Captions


def model() -> nn.Module:
    return Captioner()


class RarePictures(Dataset[dict[str, torch.Tensor]]):
    """Captions in which samples 8 to 31 are text alone."""

    def __init__(self) -> None:
        self.captions = Captions()

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        if i < 8:
            return self.captions[i]
        words = torch.arange(i, i + 5 + 3 * (i % 4)) % PICTURE
        return {"ids": words, "labels": words}


def dataset() -> RarePictures:
    return RarePictures()


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    padding = {"ids": 0, "labels": -100}
    batch = {
        key: nn.utils.rnn.pad_sequence([s[key] for s in samples], batch_first=True, padding_value=value)
        for key, value in padding.items()
    }
    pictures = [s["picture"] for s in samples if "picture" in s]
    return batch | ({"picture": torch.cat(pictures)} if pictures else {})
