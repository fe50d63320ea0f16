"""Finds the further modules of a sentence-transformers model, which are stored next to the first module's weights.

    modules.json                       [{"idx": 0, "path": "", ...}, {"idx": 1, "path": "1_Pooling", ...}, ...]
    1_Pooling/config.json              a module without weights
    2_Dense/config.json, model.safetensors        one with weights of its own, small and cast as the first is on loading

The first module is a model of transformers at the root. The others are copied with it byte for byte, except modules
with a pickle (`2_Dense/pytorch_model.bin`): such a folder is refused by name (`formats.lookalikes`).

Source: sentence-transformers 6.2.0 `base/model.py` (modules.json), `base/modules/module.py` (`load_torch_weights`).
Cost: one small file, where it is there.
"""

from __future__ import annotations

from ckpt_tool.core.catalog import Note
from ckpt_tool.core.inner_path import unfit
from ckpt_tool.errors import CkptError, StorageError
from ckpt_tool.storage.source import Tree

MODULES = "modules.json"
_LIMIT = 1 << 20  # bytes
_BESIDE = (MODULES, "config_sentence_transformers.json")
_CARRIED = (".json", ".txt", ".model", ".jinja", ".md", ".safetensors")


def module_files(tree: Tree) -> tuple[str, ...]:
    """The files of all modules but what transformers reads of the first; () where the tree is no such model."""
    listing = tree.listing() if tree.single is None else {}
    if listing.get(MODULES, -1) < 0:
        return ()
    folders = tuple(f"{path}/" for path in _paths(tree) if path)
    if not folders:
        return ()

    files = []
    for path, size in listing.items():
        is_beside = path in _BESIDE or (path.startswith("sentence_") and path.endswith("_config.json"))
        is_in_module = path.endswith(_CARRIED) and path.startswith(folders)
        if (is_beside and size >= 0) or is_in_module:
            files.append(path)
    return tuple(sorted(files))


def module_weights(tree: Tree) -> tuple[str, ...]:
    """Those of `module_files` that hold weights."""
    return tuple(path for path in module_files(tree) if path.endswith(".safetensors"))


def modules_note(tree: Tree) -> tuple[Note, ...]:
    """The line for a reader's report where other modules have weights."""
    weights = module_weights(tree)
    what = "weights of other modules of a sentence-transformers model, which go along as they are"
    return (Note("N-modules", f"{', '.join(weights)}: {what}"),) if weights else ()


def _paths(tree: Tree) -> list[str]:
    """The folders of the modules according to modules.json; invalid entries are left out."""
    from ckpt_tool.storage.texts import strict_json

    try:
        listed = strict_json.parse(tree.read_whole(MODULES, limit=_LIMIT), path=tree.display(MODULES))
    except StorageError:
        raise
    except CkptError:  # no library would open it either: it is named as not read
        return []
    paths = [each.get("path") for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    return [path for path in paths if isinstance(path, str) and not unfit(path)]
