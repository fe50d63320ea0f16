"""Syntax trees of the sources that tests read: made once a process, whichever tests look at them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache


@cache
def tree_of(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """All nodes of the tree, outer ones first."""
    return tuple(ast.walk(tree_of(source)))


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements right inside a statement, a handler or a module; expressions are not walked."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        found = getattr(tree, field, ())
        yield from found if isinstance(found, list) else ()
