"""Hidden names by which a run recognises what it has renamed itself, on file systems without extended attributes.

    step-100  ->  .step-100.3f9c21aa.ckpt-removed       the digits are a hash of the suffix, the name and the inode

A folder that a user named like this, a copy, or another folder that got the name, has other digits: a name that only
looks right is never touched. What this does not do: decide what may happen to a path with such a name.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_DIGITS = 8


def proven_name(name: str, inode: int, suffix: str) -> str:
    """The hidden name of the path `name` with this inode. Unique in its folder."""
    return f".{name}.{_digits_of(name, inode, suffix)}{suffix}"


def extra_bytes(suffix: str) -> int:
    """By how many bytes a hidden name is longer than the name."""
    return len(proven_name("", 0, suffix))


def name_in(hidden: str, suffix: str) -> str:
    """The original name in a hidden name.

    >>> name_in(".step-100.3f9c21aa.ckpt-removed", ".ckpt-removed")
    'step-100'
    """
    return hidden.removesuffix(suffix)[1:].rpartition(".")[0]


def is_proven(hidden: Path, suffix: str) -> bool:
    """Do the digits of this hidden name match its inode, so that `proven_name` made it? Raises OSError."""
    inode = os.lstat(hidden).st_ino
    return hidden.name == proven_name(name_in(hidden.name, suffix), inode, suffix)


def _digits_of(name: str, inode: int, suffix: str) -> str:
    text = b"%s\0%d\0%s" % (suffix.encode(), inode, os.fsencode(name))
    return hashlib.sha256(text).hexdigest()[:_DIGITS]
