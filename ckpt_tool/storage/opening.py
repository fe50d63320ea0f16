"""Opening what the user typed: a path, or a URL of a store.

`s3://`, `gs://`, `hf://`, `memory://` and every other scheme that fsspec knows open as a `RemoteTree`; fsspec and the
store's own package are imported here and nowhere else, only when a URL was given, so no other command ever loads code
that opens sockets. `file://` is a path.

    open_tree("out/iter_5")            Tree
    open_tree("s3://bucket/iter_5")    RemoteTree
"""

from __future__ import annotations

import os
import re

from ckpt_tool.storage.source import Tree

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(?:://|::)")


def scheme_of(path: str) -> str | None:
    """The scheme of a URL in lower case, None for a path.

    >>> scheme_of("S3://bucket/run"), scheme_of("runs/7")
    ('s3', None)
    """
    found = _SCHEME.match(path)
    return found[1].lower() if found else None


def open_tree(src: str | os.PathLike[str], *, follow_symlinks: bool = False) -> Tree:
    """The tree at `src`: a file, a folder or a URL.

    Raises StorageError (nothing there, no permission), UnsafeInput (neither file nor folder), UsageError E0247, E2502
    (a URL whose store needs a package that is not installed, or an unknown scheme).
    """
    text = os.fspath(src)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return Tree(text, follow_symlinks=follow_symlinks)
    if scheme[1].lower() in ("file", "local") and scheme[0].endswith("//"):
        return Tree(text[scheme.end() :], follow_symlinks=follow_symlinks)
    from ckpt_tool.storage.remote import RemoteTree

    return RemoteTree(text)
