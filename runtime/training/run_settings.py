"""What a checkpoint records of the run that wrote it, besides tensors, and what a resumed run has changed.

A changed learning rate, optimizer, schedule, dropout, frozen part, dataset, seed or clipping would otherwise
go unnoticed. A change is refused unless `--allow-change` names it. Settings that one of both does not know
are not compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from secc.runtime.errors import UserError

CHANGEABLE = ("seed", "shuffle", "clip", "dataset", "optimizer", "scheduler", "modules", "trainable")
_PROBED_STEPS = (0, 1, 3, 10, 100, 1000, 10_000, 100_000)  # of functions of the step
_OF_OPTIMIZER = ("optimizer", "scheduler")
_STORE_KEY = "secc/settings"
_SCHEDULED_STEPS = "scheduler.steps"
_LABELS = {  # of settings that are no nouns
    "shuffle": "order of samples (--shuffle)",
    "clip": "limit of gradients (--clip)",
    "modules": "set of modules",
    "trainable": "set of trained parameters",
}
_SCALARS = (bool, int, float, str, type(None))


def describe_settings(
    seed: int,
    shuffle: bool,
    clip: float | None,
    samples: str,
    of_model: Mapping[str, str],
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    steps: int | None = None,
) -> dict[str, str]:
    """Returns the settings of a run by name; `samples` says what the data are, `of_model` are from
    `describe_model`, `steps` is the run's last step, which a schedule may depend on. Call it before the
    optimizer and the scheduler have stepped."""
    settings = {
        "seed": str(seed),
        "shuffle": str(shuffle),
        "clip": str(clip),
        "dataset": samples,
        **of_model,
    }
    if optimizer is not None:
        settings["optimizer"] = f"{type(optimizer).__name__}({_scalars(optimizer.defaults)})"
        settings["scheduler"] = "none"
    if scheduler is not None:
        settings["scheduler"] = f"{type(scheduler).__name__}({_scalars(vars(scheduler))})"
        settings["scheduler.parts"] = _describe_parts(scheduler)
        settings[_SCHEDULED_STEPS] = str(steps)
    return settings


def share_settings(store: Any, settings: Mapping[str, str], has_optimizer: bool) -> dict[str, str]:
    """Returns the settings that only a rank with an optimizer knows: on that rank after writing them into the
    run's store, on rank 0 after waiting for them."""
    if has_optimizer:
        shared = {name: text for name, text in settings.items() if name.partition(".")[0] in _OF_OPTIMIZER}
        store.set(_STORE_KEY, json.dumps(shared))
        return shared
    return json.loads(store.get(_STORE_KEY))


def describe_model(model: nn.Module) -> dict[str, str]:
    """Returns the settings of the user's model, before anything is wrapped or cut."""
    modules = "\n".join(f"{name} {_describe_module(m)}" for name, m in model.named_modules())
    trainable = "\n".join(sorted(n for n, p in model.named_parameters() if p.requires_grad))
    return {"modules": _digest(modules), "trainable": _digest(trainable)}


def check_settings(
    recorded: Mapping[str, str], present: Mapping[str, str], allowed: tuple[str, ...], where: str
) -> list[str]:
    """Returns a line for each allowed change since the checkpoint at `where`. Raises UserError for the first
    that is not allowed."""
    notes: list[str] = []
    for key in (*CHANGEABLE, "scheduler.parts"):
        before, now = recorded.get(key), present.get(key)
        if before is None or now is None or before == now:
            continue
        name = key.partition(".")[0]
        then, steps = recorded.get(_SCHEDULED_STEPS), present.get(_SCHEDULED_STEPS)
        as_before = ""
        same_class = len({s.get("scheduler", "").partition("(")[0] for s in (recorded, present)}) == 1
        if name == "scheduler" and same_class and None not in (then, steps) and then != steps:
            as_before = f"train up to --steps {then}, as before"
            before, now = f"that of {then} steps", f"that of {steps} steps"
        elif key == "scheduler.parts" and "(" not in before + now:
            at = ", ".join(map(str, _PROBED_STEPS))
            before, now = f"factors {before} at steps {at}", now
        notes.append(check_change(name, f"{before} became {now}", allowed, where, as_before))
    return notes


def check_change(name: str, change: str, allowed: tuple[str, ...], where: str, as_before: str = "") -> str:
    """Returns a line about a change of a setting, "" for none. Raises UserError if it is not allowed;
    `as_before` says how to undo it."""
    if not change:
        return ""
    change = f"this run has another {_LABELS.get(name, name)} than the checkpoint: {change}"
    if name not in allowed:
        remedy = f"{as_before or 'continue as before'}, or accept the change with --allow-change {name}"
        raise UserError(change, where, remedy)
    return change


def _describe_module(module: nn.Module) -> str:
    settings = {k: v for k, v in vars(module).items() if k in ("p", "eps", "momentum", "inplace", "dropout")}
    return f"{type(module).__name__}({_scalars(settings)})"


def _describe_parts(scheduler: Any) -> str:
    """Returns the schedulers inside of a scheduler, and what functions of the step give at some steps."""
    inner = [
        f"{type(s).__name__}({_scalars(vars(s))}) {_describe_parts(s)}"
        for s in _list_of(scheduler, "_schedulers")
    ]
    ends = [f"from {end}" for end in _list_of(scheduler, "_milestones")]
    rates: list[str] = []
    for rate in _list_of(scheduler, "lr_lambdas"):
        if isinstance(rate, FunctionType | partial):  # other callables may count their calls
            try:
                rates += [f"{rate(step):.6g}" for step in _PROBED_STEPS]
            except Exception:  # the user's function, at steps that the run may never have
                rates.append("?")
    return " ".join([*inner, *ends, *rates])


def _list_of(owner: Any, name: str) -> list[Any]:
    found = vars(owner).get(name)
    return list(found) if isinstance(found, list | tuple) else []


def _scalars(values: Mapping[str, Any]) -> str:
    shown = {k: v for k, v in values.items() if isinstance(v, _SCALARS) and not k.startswith("_")}
    return ", ".join(f"{k}={v}" for k, v in sorted(shown.items()))


def _digest(text: str) -> str:
    return f"{1 + text.count(chr(10))} with digest {hashlib.sha256(text.encode()).hexdigest()[:12]}"
