"""Captions digits that were held out from training, and prints how many captions are right, letter for
letter.

python examples/eval_digits.py WEIGHTS.safetensors [--show 8]
"""

from __future__ import annotations

import argparse

import torch
from safetensors.torch import load_file
from torch import nn
from vlm_digits import END, HELD_OUT, caption, model, pictures, prompt

LONGEST = 8  # bytes of a caption and its end


@torch.no_grad()
def captions(net: nn.Module, images: torch.Tensor) -> list[bytes]:
    """The greedy caption of each image [n, 1, side, side]; without END if the model never says it."""
    ids = prompt().expand(len(images), -1)
    start = ids.shape[1]
    for _ in range(LONGEST):
        logits = net(input_ids=ids, pixel_values=images, attention_mask=torch.ones_like(ids)).logits
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return [_text(row) for row in ids[:, start:].tolist()]


def _text(tokens: list[int]) -> bytes:
    end = tokens.index(END) if END in tokens else len(tokens)
    return bytes(t if t < 256 else ord("?") for t in tokens[:end])


def accuracy(net: nn.Module, show: int = 0) -> float:
    """The share of held-out digits whose caption is exactly right."""
    images, values = pictures()
    held_out = torch.arange(0, len(values), HELD_OUT)
    wanted = [_text(caption(int(v)).tolist()) for v in values[held_out]]
    said = captions(net.eval(), images[held_out])
    for got, want in list(zip(said, wanted, strict=True))[:show]:
        print(
            f"{'right' if got == want else 'wrong'}: a handwritten {got.decode(errors='replace')!r} "
            f"for {want.decode()!r}"
        )
    return sum(got == want for got, want in zip(said, wanted, strict=True)) / len(wanted)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights")
    parser.add_argument("--show", type=int, default=0, help="print the first N captions")
    arguments = parser.parse_args()
    net = model()
    net.load_state_dict(load_file(arguments.weights))
    print(f"caption accuracy on held-out digits: {100 * accuracy(net, arguments.show):.1f}%")


if __name__ == "__main__":
    main()
