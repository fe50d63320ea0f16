"""Syntax trees of the sources that tests read: made once a process, whichever tests look at them."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


@contextmanager
def no_garbage() -> Iterator[None]:
    """Python's search for garbage is off inside. Where all that is made stays, as trees do, it takes three quarters of
    the time and finds nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@cache
def tree_of(source: str) -> ast.Module:
    with no_garbage():
        return ast.parse(source)


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """All nodes of the tree, outer ones first."""
    with no_garbage():
        return tuple(ast.walk(tree_of(source)))


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements right inside a statement, a handler or a module; expressions are not walked."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        found = getattr(tree, field, ())
        yield from found if isinstance(found, list) else ()
