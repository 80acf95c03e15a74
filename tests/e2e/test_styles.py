"""Ways in which research code is written: nested batches, packed images, layers that are told of something before they are called."""

from __future__ import annotations

from pathlib import Path

from secc.check import checked
from secc.compiler import Compiled, Options, compile_model

MODELS = Path(__file__).parent.parent / "models"


def compiled(name: str) -> Compiled:
    """The plan of a model for two ranks, shown to be exact for every pattern."""
    return checked(compile_model(MODELS / f"{name}.py", Options(cluster="local:2", global_batch=12)), required=True)


def test_packed_images_in_a_nested_batch_are_exact() -> None:
    plan = compiled("packed_images").plan
    assert {s.name: s.mode for s in plan.sections} == {"vision": "train", "text": "train"}
    assert {i.key for i in plan.inputs if i.optional} == {"images.patches", "images.image", "images.places"}


def test_layers_that_are_told_of_pictures_are_cut_into_their_parts() -> None:
    plan = compiled("conditioned").plan
    assert {"layers.0.seen", "layers.0.mlp"} <= {b for s in plan.sections for b in s.blocks}
    assert any("layers.0: its parts are blocks, because block layers.0 uses a tensor" in note for note in plan.checks["notes"])
