"""Static names behind the structured ones of a flex checkpoint, as far as its files say them.

Flex keys are structured; Paddle's other formats, and averages without metadata, go by static names. They stand in three places:

    the name tables of optimizer_state/ and master_weight/    "w.moment1_0": "linear_3.w_0_fp32_master_0_moment1_0"
    model_meta.json, where a zero-cost save left one          sharding_metas.tp00_pp00.structure_name_mapping
    the name table of model_state/, in some versions          "w": "linear_3.w_0"

Tensors that were made for saving have names of no use (`generated_tensor_7`, `eager_tmp_7`): those are left out. Static names
count anew on each pipeline stage, so one may stand for several parameters.
Source: PaddleFormers 1.2.0 `trainer/trainer.py` (`_save_flex_model_state` wraps its tensors), runs of it. Cost: a pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ckpt_tool.core.tensor import MASTER, MODEL
from ckpt_tool.formats.paddle_flex.folders import EMA_FOLDER
from ckpt_tool.formats.paddle_flex.keys import suffix_of, trainer_key
from ckpt_tool.formats.paddle_flex.metadata import Listing
from ckpt_tool.formats.paddle_flex.read import DataFiles
from ckpt_tool.storage.strict_json import parse

META, META_LIMIT = "model_meta.json", 256 << 20  # bytes
MASTER_INFIX = "_fp32_master_0"
_MADE = re.compile(r"(?:generated_tensor|eager_tmp|eager_in_tmp|auto)_\d+.*")


def statics(listings: Mapping[str, Listing], files: DataFiles) -> dict[str, set[str]]:
    """Structured name -> its static names (one; several where files contradict each other or stages count anew)."""
    out: dict[str, set[str]] = {}
    for structured, static in (*_of_tables(listings, files), *_of_meta(files)):
        if not _MADE.fullmatch(static):
            out.setdefault(structured, set()).add(static)
    return out


def _of_tables(listings: Mapping[str, Listing], files: DataFiles) -> Iterator[tuple[str, str]]:
    for folder, listing in listings.items():
        kind = folder.rstrip("/")
        if kind == EMA_FOLDER or not kind:
            continue
        for file in listing.files:
            files.of(file)
            for key, static in files.names.get(file, {}).items():
                name = trainer_key(kind, key)
                suffix = "" if name.state in (MODEL, MASTER) else f"_{suffix_of(name)[1:]}"
                if static.endswith(suffix):
                    yield name.name, static.removesuffix(suffix).removesuffix(MASTER_INFIX)


def _of_meta(files: DataFiles) -> Iterator[tuple[str, str]]:
    if not files.tree.exists(META):
        return
    value = parse(files.tree.read_whole(META, limit=META_LIMIT), path=files.tree.display(META))
    metas = value.get("sharding_metas") if isinstance(value, dict) else None
    for meta in metas.values() if isinstance(metas, dict) else ():
        names = meta.get("structure_name_mapping") if isinstance(meta, dict) else None
        for structured, static in names.items() if isinstance(names, dict) else ():
            if isinstance(static, str):
                yield structured, static
