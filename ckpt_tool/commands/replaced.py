"""What `--force` may replace: a checkpoint, something empty, or what a run of ours had begun to replace.

Replacing deletes what is there, whole. A name mistyped by one letter must not cost a home folder, so what is no checkpoint by the
formats' own word stays, and so does a folder of several. Cost: names and at most 64 KiB.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckpt_tool.commands.reading import Reading
from ckpt_tool.commands.source import resolve, steps_in
from ckpt_tool.errors import CkptError, OutputExists
from ckpt_tool.formats import registry
from ckpt_tool.storage.destination import refuse_link
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.staging import was_replaced

_TWO_FORMATS = "E0391"


def check_replaced(destination: Path) -> None:
    """Raise OutputExists: E1603 for a link, E1604 for what is no checkpoint. Nothing is wrong where nothing is there."""
    refuse_link(destination)
    if not os.path.lexists(destination) or was_replaced(destination):
        return
    saw = _other_than_a_checkpoint(destination)
    if saw:
        raise OutputExists(
            f"--force would delete {destination}, which is not one checkpoint: {saw}",
            code="E1604",
            path=destination,
            hint="choose another name, or look at what is there and remove it yourself",
        )


def _other_than_a_checkpoint(path: Path) -> str:
    """What lies at the path, in words; "" for a checkpoint, an empty folder, an empty file."""
    try:
        if not (any(os.scandir(path)) if path.is_dir() else path.stat().st_size or not path.is_file()):
            return ""
        given = Tree(path)
        several = steps_in(given) if given.single is None else []
        if len(several) > 1:
            return f"the folder holds {len(several)} checkpoints, among them {', '.join(several[-3:])}"
        registry.detect(resolve(given, Reading())[0])
    except CkptError as e:
        return "" if e.code == _TWO_FORMATS else e.message
    except OSError as e:
        return os.strerror(e.errno) if e.errno else str(e)
    return ""
