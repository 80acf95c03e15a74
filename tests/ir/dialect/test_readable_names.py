"""Names that people read."""

from __future__ import annotations

from secc.codegen.python_names import block_attribute_names
from secc.ir.dialect.readable_names import shortest_tail


def test_names_ignore_wrapper_modules() -> None:
    compiled = [
        "_orig_mod.vision._orig_mod",
        "_orig_mod.text.layers.0._orig_mod",
        "_orig_mod.text.layers.1._orig_mod",
    ]
    assert [shortest_tail(path, compiled) for path in compiled] == ["vision", "layers.0", "layers.1"]
    assert list(block_attribute_names(compiled).values()) == ["vision", "layers_0", "layers_1"]
    assert shortest_tail("_orig_mod", ["_orig_mod"]) == "_orig_mod"
