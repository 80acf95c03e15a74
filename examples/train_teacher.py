"""Trains the teacher that `distill_text.py` learns from, in plain PyTorch, and saves it where that example
looks for it.

python examples/train_teacher.py [--steps 600]
"""

from __future__ import annotations

import argparse
import time

import torch
from distill_text import TEACHER, Text, teacher
from safetensors.torch import save_file

BATCH = 16


def train(steps: int, seed: int = 0) -> torch.nn.Module:
    """A teacher after `steps` steps of AdamW on the same text that the student will see."""
    torch.manual_seed(seed)
    net, text = teacher(), Text()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.05)
    start = time.time()
    for step in range(steps):
        ids = torch.stack([text[step * BATCH + j]["input_ids"] for j in range(BATCH)])
        loss = net(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}/{steps}  loss {loss.item():.3f}  {time.time() - start:.0f} s", flush=True)
    return net


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    net = train(arguments.steps, arguments.seed)
    TEACHER.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: p.detach().contiguous() for name, p in net.named_parameters()}, TEACHER)
    print(f"saved {TEACHER}")


if __name__ == "__main__":
    main()
