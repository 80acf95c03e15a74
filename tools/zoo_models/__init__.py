"""The zoo's models: small random models of public architectures from their configuration classes, with
samples that fit them."""

from __future__ import annotations

from tools.zoo_models import (
    adapters,
    audio,
    documents,
    encoder_decoder,
    experts,
    grids,
    habits,
    hybrids,
    objectives,
    structures,
    tiles,
    unified,
    video,
    vision,
)
from tools.zoo_models.entry import Entry

_FAMILIES = (
    vision,
    tiles,
    grids,
    video,
    audio,
    documents,
    encoder_decoder,
    experts,
    hybrids,
    unified,
    structures,
    adapters,
    objectives,
    habits,
)


def entries() -> list[Entry]:
    """All architectures, family by family."""
    return [e for family in _FAMILIES for e in family.ENTRIES]


def entry(name: str) -> Entry:
    """The architecture of that name. Raises KeyError for an unknown one."""
    return {e.name: e for e in entries()}[name]
