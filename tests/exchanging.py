"""What tests of replaced outputs expect where names can't be exchanged (CKPT_TEST_WITHOUT=renameat2).

A kill between the renames of a folder leaves its name absent for a moment; the old output lies under a hidden name
then, whole. A file has its name at every moment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from ckpt_tool.core.inner_path import FILES
from ckpt_tool.storage.platform_calls import VARIABLE

HAS_RENAMEAT2 = "renameat2" not in os.environ.get(VARIABLE, "").split(",")
HAS_FALLOCATE = "fallocate" not in os.environ.get(VARIABLE, "").split(",")
HAS_MARKS = "xattr" not in os.environ.get(VARIABLE, "").split(",")
WEAKER = "names can't be exchanged here: a kill may leave the old folder under its hidden name, whole"
_SET_ASIDE = re.compile(r"\.(.+)\.[0-9a-f]{8}\.ckpt-replaced", re.DOTALL)


def set_aside_as(name: str) -> str:
    """Which output's hidden name it is, "" where it is none."""
    found = _SET_ASIDE.fullmatch(name)
    return found[1] if found else ""


def is_left_of(hidden: Mapping[str, Any], old: Mapping[str, Any], *, replaced: bool) -> bool:
    """Is what lies under a hidden name the old output, whole, or what is left of it once the new one is in place?"""
    content = {path: what for path, what in hidden.items() if not path.endswith("/" + FILES)}
    return content == old or (replaced and content.items() <= old.items())


def is_asked_about(staged: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """Where names are exchanged and there are no marks: is the old output under the staging name, whole, so that the
    next run asks about it (E0504)? staged: what is in the staging folder."""
    return not HAS_MARKS and {path: row for path, row in staged.items() if path != FILES} == old


def restored(path: str) -> str:
    """A path below a folder, with the old output's own name in place of the hidden one.

    >>> restored(".out.0123abcd.ckpt-replaced/config.json"), restored("notes.txt")
    ('out/config.json', '')
    """
    first, slash, rest = path.partition("/")
    name = set_aside_as(first)
    return f"{name}{slash}{rest}" if name else ""
