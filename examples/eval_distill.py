"""Prints a student's loss, in nats per byte, on the parts of Python's manual that neither it nor its teacher
was trained on.

    python examples/eval_distill.py WEIGHTS.safetensors [MORE.safetensors ...]

The weights are those of the whole model of `distill_text.py`; only the student's are used.
"""

from __future__ import annotations

import argparse

import torch
from distill_text import LENGTH, WIDTH, manual, qwen
from safetensors.torch import load_file
from torch import nn

BATCH = 32


@torch.no_grad()
def held_out_loss(net: nn.Module) -> float:
    """Mean cross entropy (nats per byte) over the held-out text, cut into pieces of LENGTH."""
    _, text = manual()
    pieces = torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)
    net.eval()
    total = sum(net(input_ids=ids, labels=ids).loss.item() * len(ids) for ids in pieces.split(BATCH))
    return total / len(pieces)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", nargs="+")
    for path in parser.parse_args().weights:
        student = {
            n.removeprefix("student."): t for n, t in load_file(path).items() if n.startswith("student.")
        }
        net = qwen(WIDTH)
        net.load_state_dict(student)
        print(f"{path}: held-out loss {held_out_loss(net):.4f} nats per byte")


if __name__ == "__main__":
    main()
