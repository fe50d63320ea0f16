"""Hidden names that prove that we gave them, on file systems that have no extended attributes.

    step-100  ->  .step-100.3f9c21aa.ckpt-removed       the digits are a hash of the suffix, the name and the inode

A folder that a person called so, or copied, or a name that went to another folder, has others: what a name only looks
like is never touched. What this does not do: say what may happen to what bears such a name.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_DIGITS = 8


def proven_name(name: str, inode: int, suffix: str) -> str:
    """What `name`, of this inode, is called while it is hidden. Two such names in one folder are never the same."""
    return f".{name}.{_digits_of(name, inode, suffix)}{suffix}"


def extra_bytes(suffix: str) -> int:
    """How much longer than a name its hidden name is."""
    return len(proven_name("", 0, suffix))


def name_in(hidden: str, suffix: str) -> str:
    """What a hidden name was made of.

    >>> name_in(".step-100.3f9c21aa.ckpt-removed", ".ckpt-removed")
    'step-100'
    """
    return hidden.removesuffix(suffix)[1:].rpartition(".")[0]


def is_proven(hidden: Path, suffix: str) -> bool:
    """Did `proven_name` make this name for what bears it? Raises OSError."""
    inode = os.lstat(hidden).st_ino
    return hidden.name == proven_name(name_in(hidden.name, suffix), inode, suffix)


def _digits_of(name: str, inode: int, suffix: str) -> str:
    text = b"%s\0%d\0%s" % (suffix.encode(), inode, os.fsencode(name))
    return hashlib.sha256(text).hexdigest()[:_DIGITS]
