"""Trains a model file in plain PyTorch: one process, the whole global batch at once. Its losses are the
reference for those of plans.

    python tools/train_plain.py examples/vlm_digits.py --steps 400 --global-batch 32 -o plain.safetensors
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_model
from torch.utils import _pytree as pytree

from secc.runtime.model.nested_batch import unflatten_batch
from secc.runtime.model.user_file import UserModel, extract_loss, load_model_file


def train_model(
    user: UserModel,
    steps: int,
    global_batch: int,
    seed: int = 0,
    clip: float = 0.0,
    device: torch.device | str = "cpu",
    nudge: int = 0,
) -> tuple[torch.nn.Module, list[float]]:
    """Returns the trained model and the loss of each step. Batch k consists of samples kN … (k+1)N-1 of the
    dataset, wrapping around at epochs. The weights are drawn on the CPU whatever the device. `nudge`: if not
    0, a seed with which each weight is first moved to the next number of its dtype, up or down."""
    torch.manual_seed(seed)
    model = user.build_model()
    if nudge:
        nudge_weights(model, nudge)
    model = model.to(device)
    params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = user.build_optimizer(params)
    scheduler = user.build_scheduler(optimizer, steps)
    length, losses, start = len(user.dataset()), list[float](), time.time()
    for step in range(steps):
        numbers = range(step * global_batch, (step + 1) * global_batch)
        samples = [user.load_sample(i % length, seed, epoch=i // length) for i in numbers]
        batch = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), user.collate(samples))
        loss = extract_loss(model(**unflatten_batch(batch)))
        optimizer.zero_grad()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_([p for _, p in params], clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}/{steps}  loss {losses[-1]:.4f}  {time.time() - start:.0f} s", flush=True)
    return model, losses


def nudge_weights(model: torch.nn.Module, seed: int) -> None:
    """Moves each weight to the next number of its dtype, up or down as `seed` draws: by as much as rounding
    does. The global random number generator is left alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            up = torch.rand(weight.shape, generator=generator) < 0.5
            weight.copy_(torch.nextafter(weight, torch.where(up, torch.inf, -torch.inf).to(weight.dtype)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clip", type=float, default=0.0, help="clip gradients to this global norm (0: not)")
    parser.add_argument("--losses", type=Path, help="write every step's loss to this JSON file")
    parser.add_argument("-o", "--output", type=Path, help="write the weights to this safetensors file")
    arguments = parser.parse_args()
    model, losses = train_model(
        load_model_file(arguments.model),
        arguments.steps,
        arguments.global_batch,
        arguments.seed,
        arguments.clip,
    )
    if arguments.losses:
        arguments.losses.write_text(json.dumps(losses))
    if arguments.output:
        save_model(model, str(arguments.output))


if __name__ == "__main__":
    main()
