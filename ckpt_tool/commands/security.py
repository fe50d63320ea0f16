"""`ckpt inspect --security`: every pickle that lies in the source and every name in it, also where nothing else can be read.

What the format's reader found unsafe comes first in `unsafe` where the survey of the files does not show it by itself: a tensor
that hangs on an object of an unknown class. Cost: the headers and pickles of every file.
"""

from __future__ import annotations

from typing import Any

from ckpt_tool.commands.reading import Reading
from ckpt_tool.errors import CkptError
from ckpt_tool.storage.source import Tree


def add_survey(security: dict[str, Any], tree: Tree) -> None:
    """Add what the files hold to `unsafe` and `globals`, and `files`: [{file, member, globals, unsafe, unseen}]."""
    from ckpt_tool.storage.survey import survey, unsafe_lines

    files, unsafe, names = [], dict[str, None](), dict.fromkeys(security["globals"])
    for found in survey(tree):
        lines = unsafe_lines(tree, found)
        unsafe.update(dict.fromkeys(lines))
        mentioned = [str(use) for use in found.uses]
        names.update(dict.fromkeys(mentioned))
        files.append({
            "file": found.path, "member": found.member, "globals": mentioned, "unsafe": lines, "unseen": found.unseen,
        })  # fmt: skip
    security["unsafe"] = list({**dict.fromkeys(security["unsafe"]), **unsafe})
    security["globals"] = list(names)
    security["files"] = files


def unread(src: str, reading: Reading, fault: CkptError) -> dict[str, Any]:
    """The document of `inspect --json` for a source that its reader refuses: no tensors, and what its pickles name."""
    from ckpt_tool.storage.opening import open_tree

    tree = open_tree(src, follow_symlinks=reading.follow_symlinks)
    security: dict[str, Any] = {"unsafe": [], "globals": []}
    add_survey(security, tree)
    where = f" ({fault.where()})" if fault.where() else ""
    return {
        "schema_version": 1, "format": "unread", "path": src, "resolved": "", "mesh": {},
        "total": {"tensors": 0, "bytes": 0, "parameters": 0}, "states": {}, "tensors": [], "extras": {},
        "notes": [f"not read: error[{fault.code}]: {fault.message}{where}"], "security": security,
    }  # fmt: skip
