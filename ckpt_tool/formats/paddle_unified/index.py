"""The indexes of a Paddle unified checkpoint: which file holds which tensor, and what the writer said beside it.

    {"metadata": {"total_size": 78680},
     "weight_map": {"lm_head.weight/moment1_0": "optimizer-00001-of-00001.safetensors", ...},
     "master_weights": true}

The one idea: an index is the authority on names and files, and every word beside `weight_map` means something: `type`
("lora"), `master_weights`, `ckpt_quant_stage` ("O1", "O2"), `quant_ckpt_resume_times`, `optim_shard_num`. An optimizer index
without `weight_map` says that ranks wrote files of their own (`ignore_merge_optimizer`): Paddle's loader tells it the same way.
`total_size` may be a float in old files (a bool counted an eighth of a byte). An empty `weight_map` is no fault: the dict
of the states was empty.

Source: PaddleFormers 1.2.0 `trainer/unified_checkpoint/{unified_checkpoint,utils,load_save_single_card}.py` (indent 4, the
order of the state dict). Cost: 1 us and 200 bytes a tensor. Reads no tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpt_tool.errors import CorruptFile, InconsistentCheckpoint
from ckpt_tool.formats.hf.index import COLLISION, FORM, INDEX_LIMIT, NOT_A_NAME, TENSOR_LIMIT, TOO_BIG
from ckpt_tool.storage import strict_json
from ckpt_tool.storage.source import Tree, safe_relative


class PaddleIndex(NamedTuple):
    """weight_map: tensor -> file, in the index's order; None where the optimizer was not merged. said: the other members."""

    path: str
    weight_map: Mapping[str, str] | None
    total_size: int | None
    said: Mapping[str, Any]

    def files(self) -> dict[str, list[str]]:
        """File -> its tensors, in order of first mention."""
        out: dict[str, list[str]] = {}
        for name, file in (self.weight_map or {}).items():
            out.setdefault(file, []).append(name)
        return out

    @property
    def stage(self) -> str:
        """`O1` or `O2` for a quantised optimizer, else ""."""
        said = self.said.get("ckpt_quant_stage")
        return said if said in ("O1", "O2") else ""


def read_index(tree: Tree, path: str, *, merged: bool = True) -> PaddleIndex:
    """The index at `path`. merged: must it have a `weight_map`?

    Raises CorruptFile (E0336 form, E0337 size, E0338 a value that is no text, and what JSON raises), UnsafeInput (E0410) for
    a file name that leaves the folder, InconsistentCheckpoint (E0387) for names that differ by case alone.
    """
    shown = tree.display(path)
    if tree.size(path) > INDEX_LIMIT:
        raise CorruptFile(
            f"an index of {tree.size(path)} bytes, want at most {INDEX_LIMIT}", code=TOO_BIG, path=shown,
            hint="no real index is this large",
        )  # fmt: skip
    value = strict_json.parse(tree.read_whole(path, limit=INDEX_LIMIT), path=shown)
    again = "an index is an object with `weight_map`: tensor name -> file name; get it from the source again"
    if type(value) is not dict:
        raise CorruptFile("the index is no object", code=FORM, path=shown, hint=again)
    weight_map = value.get("weight_map")
    if "weight_map" not in value and not merged:
        return PaddleIndex(path, None, None, value)
    if type(weight_map) is not dict:
        what = "weight_map is no object" if "weight_map" in value else "the index has no weight_map"
        raise CorruptFile(what, code=FORM, path=shown, place="/weight_map", hint=again)
    if len(weight_map) > TENSOR_LIMIT:
        raise CorruptFile(
            f"an index of {len(weight_map)} tensors", code=TOO_BIG, path=shown, hint="no real one is as large"
        )
    _check_files(weight_map, shown, again)
    said = {key: item for key, item in value.items() if key not in ("weight_map", "metadata")}
    return PaddleIndex(path, weight_map, _total(value.get("metadata")), said)


def _check_files(weight_map: Mapping[str, Any], shown: str, again: str) -> None:
    folded: dict[str, str] = {}
    seen: set[str] = set()
    for name, file in weight_map.items():
        if type(file) is not str:
            place = strict_json.pointer("weight_map", name)
            raise CorruptFile("the file name is no string", code=NOT_A_NAME, path=shown, place=place, hint=again)
        if file in seen:
            continue
        seen.add(file)
        place = strict_json.pointer("weight_map", name)
        safe_relative(file, named_in=shown, place=place)
        if folded.setdefault(file.casefold(), file) != file:
            raise InconsistentCheckpoint(
                f"the index names {folded[file.casefold()]!r} and {file!r}, which differ only in case",
                code=COLLISION, path=shown, place=place, hint="rename one of them, in the index too",
            )  # fmt: skip


def _total(metadata: Any) -> int | None:
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(said, bool) or not isinstance(said, int | float) or abs(said) >= 1 << 62:
        return None
    return int(said)


def write_index(weight_map: Mapping[str, str], total_size: int, said: Mapping[str, Any] | None = None) -> bytes:
    """The index as Paddle writes it. total_size: bytes. said: the members after `weight_map`."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map), **(said or {})}
    return json.dumps(index, indent=4).encode("ascii")
