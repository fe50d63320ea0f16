"""Opens the source that the user gave: a path, or the URL of a store.

`s3://`, `gs://` and `az://` open as a `RemoteTree` over obstore, `hf://`, `memory://` and every other scheme that
fsspec knows over fsspec. Both are imported only when a URL was given, so no other command ever loads code that opens
sockets. `file://` is a path.

    open_tree("out/iter_5")            Tree
    open_tree("s3://bucket/iter_5")    RemoteTree
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from ckpt_tool.errors import UsageError
from ckpt_tool.storage.source import Tree

if TYPE_CHECKING:
    from ckpt_tool.storage.stores.store import Store

_SHORT = re.compile(r"(s3a?|gcs|gs|az|azure|abfss?|hf|memory|https?):/(?!/)", re.IGNORECASE)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(?:://|::)")


def scheme_of(path: str) -> str | None:
    """The scheme of a URL in lower case, None for a path.

    >>> scheme_of("S3://bucket/run"), scheme_of("runs/7")
    ('s3', None)
    """
    found = _SCHEME.match(path)
    return found[1].lower() if found else None


def short_url(path: str) -> str | None:
    """The URL that `path` was before it lost a slash: pathlib makes `s3:/b/x` of `s3://b/x`. None for any other path.

    >>> short_url("s3:/bucket/run"), short_url("s3://bucket/run"), short_url("./s3:/bucket")
    ('s3://bucket/run', None, None)
    """
    found = _SHORT.match(path)
    return f"{found[1]}://{path[found.end() :]}" if found else None


def open_tree(src: str | os.PathLike[str], *, follow_symlinks: bool = False) -> Tree:
    """The tree at `src`: a file, a folder or a URL.

    Raises StorageError (nothing there, no permission), UnsafeInput (neither file nor folder), UsageError E0247, E2502
    (a URL whose store needs a package that is not installed, or an unknown scheme).
    """
    text = os.fspath(src)
    scheme = _SCHEME.match(text)
    url = short_url(text) if scheme is None else None
    if url is not None and not os.path.lexists(text):
        raise UsageError(
            f"{text} is a URL in which a slash is missing",
            code="E2502",
            path=text,
            hint=f"write {url}, as text and not as a Path",
        )
    if scheme is None:
        return _looked_into(Tree(text, follow_symlinks=follow_symlinks))
    if scheme[1].lower() in ("file", "local") and scheme[0].endswith("//"):
        return _looked_into(Tree(text[scheme.end() :], follow_symlinks=follow_symlinks))
    from ckpt_tool.core.urls import hide_in_argument
    from ckpt_tool.storage.stores.remote import RemoteTree

    url = hide_in_argument(text)
    return _looked_into(RemoteTree(url, open_store(url)))


def _looked_into(tree: Tree) -> Tree:
    """The tree of an archive's members (`storage.archive`) if the tree is an archive; any other tree unchanged."""
    # The magic of a tar header, at its byte 257; the smallest archive is a header and an end mark.
    if tree.single is None or tree.size(tree.single) < 1024 or tree.read(tree.single, 257, 5) != b"ustar":
        return tree
    from ckpt_tool.storage.archive import unpacked

    return unpacked(tree)


def open_store(url: str) -> Store:
    """The store of a URL and the place in it. url: with or without its secrets (`core.urls`). Raises UsageError E0247,
    E2502, E2508, E2873."""
    from ckpt_tool.core.urls import full_url, hide_in_argument
    from ckpt_tool.storage.stores.fsspec_store import FsspecStore
    from ckpt_tool.storage.stores.malloc_arenas import few_arenas
    from ckpt_tool.storage.stores.object_store import CLOUDS, ObjectStore

    few_arenas()
    if scheme_of(url) in CLOUDS and "://" in url:
        try:
            return ObjectStore.at(full_url(url), hide_in_argument(url))
        except ImportError:
            pass  # not installed: fsspec's own packages serve these schemes too, more slowly
    return FsspecStore.at(full_url(url), hide_in_argument(url))
