"""A Hugging Face cache folder (`models--ORG--NAME`) as a source: which of its snapshots is meant.

    blobs/HASH...   refs/main ("5f0b02c7...")   snapshots/5f0b02c7.../model.safetensors -> ../../blobs/HASH

`refs/main` says which commit was fetched last; a folder fetched by a commit's hash has no refs. Source: huggingface_hub 2.4.0
`file_download.py`, `utils/_cache_manager.py`. Cost: the listing.
"""

from __future__ import annotations

from ckpt_tool.errors import UnknownFormat
from ckpt_tool.storage.source import Tree, safe_relative

MAIN, SNAPSHOTS = "refs/main", "snapshots/"
UNKNOWN_SNAPSHOT = "E1641"


def snapshot(tree: Tree) -> tuple[str, str] | None:
    """(the snapshot's folder below `tree`, why that one), None where the tree is no cache folder.

    Raises UnknownFormat E1641 when `refs/main` names a snapshot that is not there, or is not there itself and there are
    several; UnsafeInput E0410 when it names a path.
    """
    paths = [path for path in tree.listing() if path.startswith((SNAPSHOTS, "refs/", "blobs/"))]
    there = list(
        dict.fromkeys(path.split("/")[1] for path in paths if path.startswith(SNAPSHOTS) and path.count("/") > 1)
    )
    if not there or all(path.startswith(SNAPSHOTS) for path in paths):
        return None
    if MAIN not in paths:
        if len(there) == 1:
            return SNAPSHOTS + there[0], f"{there[0]} is the only snapshot in the cache"
        raise _unknown(tree, f"the cache holds {len(there)} snapshots and no {MAIN}", there)
    commit = tree.read_whole(MAIN, limit=4096).decode("utf-8", "replace").strip()
    safe_relative(commit, named_in=tree.display(MAIN))
    if commit not in there:
        raise _unknown(tree, f"{MAIN} names the snapshot {commit[:80]}, which is not there", there)
    return SNAPSHOTS + commit, f"{MAIN} names the snapshot {commit}"


def _unknown(tree: Tree, message: str, there: list[str]) -> UnknownFormat:
    return UnknownFormat(
        message,
        code=UNKNOWN_SNAPSHOT,
        path=tree.display(),
        hint=f"pass one of them: {', '.join(SNAPSHOTS + name for name in there[:20])}",
    )
