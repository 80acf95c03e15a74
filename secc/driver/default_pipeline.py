"""The passes of a compilation, in order, with the options that the user's choices give them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from xdsl.passes import ModulePass

from secc.driver.compile_options import BALANCE_CHOICES, CompileOptions
from secc.errors import UserError
from secc.ir.analysis.fusion_report import check_rule_names, rules_of_pass
from secc.pass_pipeline import load_pass
from secc.passes.loss.approximations import BALANCE_LOSS

STEP_TIME_DIGITS = 9  # dumps name the pipeline in a text form that has no exponents


def build_pipeline(options: CompileOptions, pinned: Iterable[str] | None = None) -> tuple[ModulePass, ...]:
    """Returns the passes from a captured model to the lowered IR.

    pinned: the sections that the user named, as `options.sections`, which a second plan replaces by all
    sections of the first. Raises UserError if `options.without` names an unknown fusion rule.
    """
    check_rule_names(options.without)
    cluster = {"cluster": options.cluster}
    kept = tuple(text.partition("=")[0] for text in (options.sections if pinned is None else pinned))
    steps: list[tuple[str, Mapping[str, Any]]] = [
        ("canonicalize", {}),  # one spelling for each op
        ("dce", {}),
        ("normalize-loss", _loss_options(options)),  # the loss as a sum of terms over samples
        ("dce", {}),
        *_fusion_passes("fuse-linear-loss", options),  # heads and losses without materialised logits
        ("annotate-patterns", {}),  # the optional inputs that each block needs
        ("infer-modes", {}),  # what trains, what passes gradients on, what only runs forward
        *_fusion_passes("fuse-blocks", options),  # kernels inside the user's modules
        ("coarsen", cluster | {"max_sections": options.max_sections, "sections": options.sections}),
        ("annotate-costs", {}),  # time, memory and messages of each section
        # boundaries of sections to where the fewest bytes cross
        ("sink-boundaries", cluster | {"pinned": kept}),
        ("allocate", _allocate_options(options)),  # ranks, replicas, stages, sharding, recomputation
        ("place", {}),  # ranks onto nodes
        ("split-stages", {}),  # sections with stages become one section per stage
        ("shard-tensors", {}),  # tensor-parallel shards of parameters
        ("shard-logits", {}),  # losses on vocabulary shards
        ("insert-transfers", {}),  # what sections send each other
        ("lower", {}),  # bodies and predicates that code is generated from
    ]
    return tuple(_make_pass(name, chosen) for name, chosen in steps)


def _loss_options(options: CompileOptions) -> dict[str, Any]:
    """The options of `normalize-loss`. Raises UserError for an unknown way of computing balance losses."""
    if options.balance_loss not in ("", *BALANCE_CHOICES):
        raise UserError(
            f"unknown way of computing balance losses {options.balance_loss!r}",
            remedy=f"give --balance-loss {' or '.join(BALANCE_CHOICES)}",
        )
    by_micro_batch = options.balance_loss == "micro-batch"
    accept = dict.fromkeys((*options.accept, *((BALANCE_LOSS,) if by_micro_batch else ())))
    exact = {"balance_loss": "global"} if options.balance_loss == "global" else {}
    gathered = {"gather": options.gather, "global_batch": options.global_batch} if options.gather else {}
    sums = {"global_sums": True} if options.global_sums else {}
    whole = {"whole_batch": options.whole_batch} if options.whole_batch else {}
    return {"accept": tuple(accept), **exact, **sums, **gathered, **whole}


def fusion_mode(options: CompileOptions) -> str:
    """The option `when` of the fusing passes: "auto" (where the cluster has GPUs), "always" or "never"."""
    return {None: "auto", True: "always", False: "never"}[options.fuse]


def _fusion_passes(name: str, options: CompileOptions) -> list[tuple[str, Mapping[str, Any]]]:
    """The fusing pass `name`; none if the user wants no fusion."""
    if options.fuse is False:
        return []
    without = rules_of_pass(options.without, name)
    return [(name, {"without": without, "when": fusion_mode(options), "cluster": options.cluster})]


def _allocate_options(options: CompileOptions) -> dict[str, Any]:
    return {
        "cluster": options.cluster,
        "global_batch": options.global_batch,
        "strategy": options.strategy,
        "set": options.set,
        "objective": options.objective,
        "step_time": round(options.step_time, STEP_TIME_DIGITS),
        "run_ahead": options.run_ahead,
        "refused": options.refused,
        "stages": options.stages,
        "known": options.known,
        "proven": options.proven,
        "fit": not options.compared_only,
        "search": not options.compared_only,
    }


def _make_pass(name: str, options: Mapping[str, Any]) -> ModulePass:
    return load_pass(name)(**options)
