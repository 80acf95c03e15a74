"""Names that statements read before they set them, and names that they set on every way."""

from __future__ import annotations

import ast

import pytest

from secc.runtime.model.variable_flow import names_always_set, names_read_first


@pytest.mark.parametrize(
    "code, read, always",
    [
        ("a = b; c = a", "b", "a c"),
        ("a += 1", "a", ""),
        ("a[0] = b", "a b", ""),
        ("a.x = b", "a b", ""),
        ("a, (b, *c) = d", "d", "a b c"),
        ("a: int = b", "b", "a"),
        ("a: int", "int", ""),
        ("for i, (a, b) in c:\n d = a\n e = d\nf = d", "c d", "f"),
        ("for i in c:\n a = b\n b = i", "b c", ""),
        ("for i in c:\n pass\nelse:\n d = i", "c i", ""),
        ("while a:\n a = b\n c = a", "a b", ""),
        ("if a:\n b = 1\n c = 1\nelse:\n b = 2\nd = b + c", "a c", "b d"),
        ("if a:\n b = 1", "a", ""),
        ("with a as b:\n c = b\nd = c", "a c", "b d"),
        ("try:\n a = b\n c = a\nexcept E:\n a = c", "E a b c", ""),
        ("a = [b for b in c if b > d]", "c d", "a"),
        ("a = [b for b in b]", "b", "a"),
        ("def f(x):\n return x + y\nz = f", "f x y", "z"),
        ("f = lambda x: x + y", "x y", "f"),
        ("if (a := b):\n c = a", "a b", ""),
        ("return a", "a", ""),
    ],
)
def test_names_of_statements(code: str, read: str, always: str) -> None:
    statements = ast.parse(code).body
    assert names_read_first(statements) >= set(read.split())
    assert names_always_set(statements) == set(always.split())
    assert names_read_first(statements) == set(read.split())
