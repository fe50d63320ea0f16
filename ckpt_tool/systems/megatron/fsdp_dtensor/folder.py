"""Which folder below a root is a Megatron-FSDP checkpoint: a DCP whose keys are Megatron-FSDP's.

    latest_checkpointed_iteration.txt   "2"
    iter_0000002/.metadata, __0_0.distcp, __1_0.distcp
                 run_config.yaml        Megatron-Bridge's

What it is shows in the keys at the beginning of `.metadata` (`dcp_container.dcp_metadata`). A save without `.metadata`
was not finished, and no key says whose it is: that is `dcp`'s to refuse.
"""

from __future__ import annotations

import re

from ckpt_tool.formats.dcp_container.dcp_items import DATA
from ckpt_tool.formats.dcp_container.dcp_metadata import FSDP_MODEL, FSDP_OWN, METADATA
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.megatron.pointer import pointed

RUN_CONFIG = "run_config.yaml"
_HEAD = 48 << 10  # bytes of .metadata that are looked at
_ARGS = b"\x8c\x04args"  # as pickle has the text
_MODEL = re.compile(FSDP_MODEL.encode())


def find(tree: Tree) -> tuple[str, str] | None:
    """(folder with its slash, why) of the checkpoint in `tree`; None when there is none. Reads at most 48 KiB."""
    if tree.single is not None:
        return None
    for folder in ("", *pointed(tree)):
        why = _claims(tree, folder)
        if why:
            return folder, why
    return None


def _claims(tree: Tree, folder: str) -> str:
    """Why the DCP in `folder` is Megatron-FSDP's, "" where it is not."""
    path = folder + METADATA
    if not tree.exists(path):
        return ""
    head = tree.head(path, _HEAD)
    own = next((front for front in FSDP_OWN if front.encode() in head), "")
    if own:
        return f"{path} has keys {own}*"
    model = _MODEL.search(head)
    if model is None:
        return ""
    if _ARGS in head:
        witness = "args"
    elif tree.exists(folder + RUN_CONFIG):
        witness = RUN_CONFIG
    else:
        return ""
    return f"{path} has keys {model[0].decode()}*, and {witness}"


def files(tree: Tree, folder: str) -> frozenset[str]:
    """The files of the checkpoint in `folder`."""
    own = (path for path in tree.listing() if path.rpartition("/")[0] == folder.rstrip("/"))
    return frozenset(path for path in own if path == folder + METADATA or DATA.fullmatch(path.rpartition("/")[2]))
