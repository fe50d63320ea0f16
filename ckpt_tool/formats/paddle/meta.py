"""What `model_meta.json` (and, before it, `shard_meta.*.json`) says of a sharded Paddle job: data of a stranger, checked here.

    {"parallel_config": {"pp_degree": 1, "mp_degree": 2, "sharding_degree": 2, "ep_degree": 1, "moe_sharding_degree": 1},
     "sharding_metas": {"tp00_pp00": {
        "param2rank": {"linear_0.w_0": 1},                                      v1: who keeps a parameter's states
        "structure_name_mapping": {"model.layers.0.mlp.up_proj.weight": "linear_0.w_0"},
        "param_meta": {"model.layers.0.mlp.up_proj.weight": [[32, 24], 16, true, false]},
        "sharding_strategy": "ShardingV1", "enable_overlap": false}}}

The one idea: a file of model weights of a bf16 job lacks every parameter that has a master weight, so this file alone tells
their names, the shapes of a tensor rank's parts and their dtype. What it says is held against the files that are there.

Specification: PaddleFormers 1.2.0 `trainer/utils/sharding_io.py` (`_gather_sharding_metas`, `_sharding_meta_suffix`: a key
`tpTT_ppPP`, with expert parallelism `tpTT_ppPP_epEE`; `_load_sharding_meta` for the older file a rank). `param_meta` is
[shape, dtype, is_distributed, no_sync], dtype by the numbers of Paddle's `phi/common/data_type.h`.
Cost: a JSON of some 200 bytes a parameter and rank. What it does not do: files of the optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.errors import CorruptFile, InconsistentCheckpoint
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.strict_json import parse

MALFORMED, CONTRADICTS = "E1311", "E1312"
NAME = "model_meta.json"
LIMIT = 1 << 30  # bytes
_OLD = re.compile(r"shard_meta\.(tp\d+_pp\d+(?:_ep\d+)?)\.json")
_KEY = re.compile(r"tp(\d{2,5})_pp(\d{2,5})(?:_ep(\d{2,5}))?")
_DEGREES = {
    "mp_degree": "tp", "pp_degree": "pp", "sharding_degree": "sharding", "ep_degree": "ep",
    "moe_sharding_degree": "moe_sharding",
}  # fmt: skip
_LARGEST = 1 << 20
_STRATEGIES = {"ShardingV1": "v1", "ShardingV2": "v2"}
_CODES = {
    1: "BOOL", 2: "U8", 3: "I8", 4: "U16", 5: "I16", 6: "U32", 7: "I32", 8: "U64", 9: "I64", 10: "F32", 11: "F64",
    12: "C64", 13: "C128", 15: "F16", 16: "BF16", 17: "F8_E4M3", 18: "F8_E5M2",
}  # fmt: skip


class Param(NamedTuple):
    """A tensor rank's part of a parameter. distributed: is it a part (or an expert rank's own)? no_sync: an expert's."""

    shape: tuple[int, ...]
    dtype: DType | None
    distributed: bool
    no_sync: bool


@dataclass(frozen=True, slots=True)
class StageMeta:
    """Of one (tp, pp, ep). names: structured -> static. owners: static -> sharding rank, v1. strategy: v1, v2 or ""."""

    names: Mapping[str, str]
    params: Mapping[str, Param]
    owners: Mapping[str, int]
    strategy: str
    shown: str  # the file and place, for messages


@dataclass(frozen=True, slots=True)
class Meta:
    """degrees: dim -> size, of those stated. stages: by (tp, pp, ep)."""

    degrees: Mapping[str, int] = field(default_factory=dict)
    stages: Mapping[tuple[int, int, int], StageMeta] = field(default_factory=dict)
    files: tuple[str, ...] = ()

    @property
    def strategy(self) -> str:
        return next((stage.strategy for stage in self.stages.values() if stage.strategy), "")


def read_meta(tree: Tree) -> Meta:
    """The metas of a folder; an empty one where it has none. Raises CorruptFile E1311, what JSON raises, and
    InconsistentCheckpoint E1312 for numbers that can't be of one job."""
    if tree.single is not None:
        return Meta()
    names = tree.names()
    raw: dict[str, tuple[Any, str]] = {}
    files = []
    degrees: dict[str, int] = {}
    if NAME in names:
        files.append(NAME)
        shown = tree.display(NAME)
        whole = parse(tree.read_whole(NAME, limit=LIMIT), path=shown)
        degrees = _degrees(_mapping(whole, "parallel_config", shown), shown)
        for key, value in (_mapping(whole, "sharding_metas", shown) if whole.get("sharding_metas") else {}).items():
            raw[key] = (value, f"{shown}, /sharding_metas/{key}")
    for name in names:
        found = _OLD.fullmatch(name)
        if found and found[1] not in raw:
            files.append(name)
            raw[found[1]] = (parse(tree.read_whole(name, limit=LIMIT), path=tree.display(name)), tree.display(name))
    stages = {}
    for key, (value, shown) in raw.items():
        found = _KEY.fullmatch(key)
        if found is None:
            raise _malformed(f"a key {key[:60]!r}, want tpTT_ppPP or tpTT_ppPP_epEE", shown)
        at = (int(found[1]), int(found[2]), int(found[3] or 0))
        stages[at] = _stage(value, shown, degrees.get("sharding"))
    meta = Meta(degrees, stages, tuple(files))
    _check_degrees(meta, tree.display(NAME))
    return meta


def _malformed(what: str, shown: str, key: str | None = None) -> CorruptFile:
    return CorruptFile(what, code=MALFORMED, path=shown, key=key, hint="the file was edited or damaged: fetch it again")


def _mapping(value: Any, key: str, shown: str, kind: type = object) -> dict[str, Any]:
    """Member `key` of an object, an object itself whose values are of `kind`."""
    inner = value.get(key) if isinstance(value, dict) else None
    if not isinstance(inner, dict):
        raise _malformed(f"{key} is missing, or no object", shown)
    for name, item in inner.items():
        if not isinstance(item, kind) or kind is int and type(item) is not int:
            raise _malformed(f"{key} holds a {type(item).__name__}, want {kind.__name__}", shown, name[:200])
    return inner


def _degrees(config: Mapping[str, Any], shown: str) -> dict[str, int]:
    out = {}
    for key, dim in _DEGREES.items():
        value = config.get(key)
        if value is None:
            continue
        if type(value) is not int or not 0 <= value <= _LARGEST:
            raise _malformed(f"{key} is {str(value)[:40]}, want a number of ranks", shown)
        out[dim] = max(value, 1)  # 0: without expert parallelism
    return out


def _stage(value: Any, shown: str, sharding: int | None) -> StageMeta:
    names = _mapping(value, "structure_name_mapping", shown, str)
    owners = _mapping(value, "param2rank", shown, int)
    for static, rank in owners.items():
        if not 0 <= rank < (sharding or _LARGEST):
            raise InconsistentCheckpoint(
                f"param2rank gives {static[:100]} to sharding rank {rank} of {sharding or 'few'}", code=CONTRADICTS,
                path=shown, hint="the file was edited, or is of another job",
            )  # fmt: skip
    params = {}
    if value.get("param_meta") is not None:
        for name, item in _mapping(value, "param_meta", shown, list).items():
            params[name] = _param(name, item, shown)
    said = value.get("sharding_strategy")
    strategy = _STRATEGIES.get(said, "") if isinstance(said, str) else ""
    if said is not None and not strategy:
        raise _malformed(f"sharding_strategy is {str(said)[:40]!r}, want ShardingV1 or ShardingV2", shown)
    return StageMeta(names, params, owners, strategy or ("v1" if owners else ""), shown)


def _param(name: str, item: list[Any], shown: str) -> Param:
    shape = item[0] if item else None
    if not isinstance(shape, list) or len(shape) > 16 or any(type(n) is not int or not 0 <= n < 1 << 48 for n in shape):
        raise _malformed("param_meta states no usable shape", shown, name[:200])
    if len(item) < 3 or type(item[1]) is not int or any(type(flag) is not bool for flag in item[2:4]):
        raise _malformed("param_meta wants [shape, dtype, is_distributed, no_sync]", shown, name[:200])
    code = _CODES.get(item[1])
    return Param(tuple(shape), DTYPES[code] if code else None, item[2], len(item) > 3 and item[3])


def _check_degrees(meta: Meta, shown: str) -> None:
    """Do the degrees go together, and is every rank of the grid described?"""
    tp, pp, ep = (meta.degrees.get(dim, 1) for dim in ("tp", "pp", "ep"))
    sharding, moe = meta.degrees.get("sharding", 1), meta.degrees.get("moe_sharding", 1)
    if ep > 1 and tp * sharding != ep * moe:
        raise InconsistentCheckpoint(
            f"parallel_config: {tp} x {sharding} tensor and sharding ranks, {ep} x {moe} expert ranks", code=CONTRADICTS,
            path=shown, hint="the file was edited: both products are the ranks of a stage",
        )  # fmt: skip
    if not meta.stages or not meta.degrees:
        return
    experts = any(at[2] for at in meta.stages)
    want = {
        (t, p, e)
        for p in range(pp)
        for e in (range(ep) if experts else (0,))
        for t in (range(tp) if not experts else (e % tp,))
    }
    lost = sorted(want - meta.stages.keys())
    beyond = sorted(at for at in meta.stages if at[0] >= tp or at[1] >= pp or at[2] >= max(ep, 1))
    if lost or beyond:
        at = (lost or beyond)[0]
        raise InconsistentCheckpoint(
            f"sharding_metas {'lacks' if lost else 'has'} tp{at[0]:02d}_pp{at[1]:02d}, ep {at[2]}: the degrees are"
            f" tp {tp}, pp {pp}, ep {ep}", code=CONTRADICTS, path=shown, hint="the file was edited, or is of another job",
        )  # fmt: skip
