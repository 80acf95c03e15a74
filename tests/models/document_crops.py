"""Documents with uneven lists of crops: lines are read by an aligned loss, formulas by a loss of each place.
Both are loops over lists, with the same names of variables, and a module stands between them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

WORDS, SIGNS = 12, 9


class Reader(nn.Module):
    def __init__(self, width: int, signs: int) -> None:
        super().__init__()
        self.columns, self.out = nn.Conv1d(4, width, 3, padding=1), nn.Linear(2 * width, signs)

    def forward(self, crop: torch.Tensor, page: torch.Tensor) -> torch.Tensor:
        columns = torch.relu(self.columns(crop[None]))[0].T
        return self.out(torch.cat([columns, page.expand(len(columns), -1)], -1)).log_softmax(-1)


class Documents(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.page, self.topic = nn.Linear(10, width), nn.Linear(width, 3)
        self.lines, self.formulas = Reader(width, WORDS), Reader(width, SIGNS)

    def forward(
        self,
        page: torch.Tensor,
        topic: torch.Tensor,
        lines: Any,
        line_words: Any,
        formulas: Any,
        formula_signs: Any,
    ) -> dict[str, Any]:
        context = torch.tanh(self.page(page))
        text, count = torch.zeros(()), 0
        for i, (crops, labels) in enumerate(zip(lines, line_words, strict=True)):
            for crop, label in zip(crops, labels, strict=True):
                scores = self.lines(crop, context[i])
                lengths = [len(scores)], [len(label)]
                one = F.ctc_loss(scores[:, None], label[None], *lengths, reduction="sum")  # pyright: ignore[reportArgumentType]
                text = text + one
                count += 1
        topics = F.cross_entropy(self.topic(context), topic)
        signs, places = torch.zeros(()), 0
        for i, (crops, labels) in enumerate(zip(formulas, formula_signs, strict=True)):
            for crop, label in zip(crops, labels, strict=True):
                scores = self.formulas(crop, context[i])
                signs = signs + F.nll_loss(scores[: len(label)], label, reduction="sum")
                places += len(label)
        return {"loss": text / count + topics + signs / places, "topics": topics.detach()}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Documents()


def collate(samples: list[Any]) -> dict[str, Any]:
    stacked = {k: torch.stack([s[k] for s in samples]) for k in ("page", "topic")}
    return stacked | {
        k: [s[k] for s in samples] for k in ("lines", "line_words", "formulas", "formula_signs")
    }


class Scans(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        lines, formulas = 1 + i % 3, 1 + i % 2

        def draw_crop(width: int) -> torch.Tensor:
            return torch.randn(4, width, generator=g)

        def draw_signs(count: int, of: int) -> torch.Tensor:
            return torch.randint(1, of, (count,), generator=g)

        return {
            "page": torch.randn(10, generator=g),
            "topic": torch.tensor(i % 3),
            "lines": [draw_crop(6 + (i + j) % 4) for j in range(lines)],
            "line_words": [draw_signs(2 + j % 2, WORDS) for j in range(lines)],
            "formulas": [draw_crop(5 + i % 3) for _ in range(formulas)],
            "formula_signs": [draw_signs(2 + (i + j) % 3, SIGNS) for j in range(formulas)],
        }


def dataset() -> Scans:
    return Scans()
