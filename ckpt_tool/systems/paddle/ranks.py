"""Per-rank files of a Paddle checkpoint: which they are, which rank each belongs to, and which are missing; from their
names, and from `model_meta.json` (in older versions `shard_meta.*.json`) of a sharded job.

    model_state.tp00_pp01.pdparams            tensor rank 0, stage 1
    optimizer.tp00_pp01_shard02.pdopt         ... sharding rank 2, its own part of the optimizer
    model_state.tp01_moe_sharding03.pdparams  expert rank 3;
          model_state.moe01.pdparams: data rank 1, which is an expert rank
    ema.tp00_shard00.pdopt                    an average of the weights, cut as the optimizer is
    lora_model_state.tp00.pdparams            an adapter;     model_state-00001-of-00002.pdparams: a file in two

A name contains a coordinate only if its degree is larger than 1, so names alone show the smallest possible grid of
ranks, and a hole in the grid is a missing file. `model_meta.json` states the degrees, so that a missing last rank is
noticed too. A model file of a bf16 job lacks every parameter that has a master weight, so only the meta has their
names, the shapes of a tensor rank's parts and their dtype. It is untrusted, and compared with the files:

    {"parallel_config": {"pp_degree": 1, "mp_degree": 2, "sharding_degree": 2, "ep_degree": 1, "moe_sharding_degree":
     1}, "sharding_metas": {"tp00_pp00": {
        "param2rank": {"linear_0.w_0": 1},                                      v1: who keeps a parameter's states
        "structure_name_mapping": {"model.layers.0.mlp.up_proj.weight": "linear_0.w_0"},
        "param_meta": {"model.layers.0.mlp.up_proj.weight": [[32, 24], 16, true, false]},
        "sharding_strategy": "ShardingV1", "enable_overlap": false}}}

Specification: PaddleFormers 1.2.0 `trainer/training_args.py` (`weight_name_suffix`, `optimizer_name_suffix`,
`sharded_name_suffix`), `trainer/utils/helper.py`, `utils/env.py` (stems), `trainer/utils/sharding_io.py`
(`_gather_sharding_metas`, `_sharding_meta_suffix`: a key `tpTT_ppPP`, with expert parallelism `tpTT_ppPP_epEE`;
`_load_sharding_meta` for the older file a rank). `param_meta` is [shape, dtype, is_distributed, no_sync], dtype by the
numbers of Paddle's `phi/common/data_type.h`. Cost: the listing, and a JSON of some 200 bytes a parameter and rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.missing import report_missing
from ckpt_tool.errors import CorruptFile, Incomplete, InconsistentCheckpoint
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.texts.strict_json import parse
from ckpt_tool.systems.paddle.dtypes import DTYPE_NUMBERS
from ckpt_tool.systems.paddle.job import V1, V2, JobDegrees, PaddleRank

# -- names of files ----------------------------------------------------------------------------------------------------

MISSING = "E0302"
CONTRADICTION = "E0305"
MODEL_FILE = "model"
OPTIMIZER_FILE = "optimizer"
EMA_FILE = "ema"
EXTENSIONS = (".pdparams", ".pdopt", ".pd", ".pdema")
BESIDE = ("scheduler.pdparams", "scaler.pdparams")
_LARGEST = 1 << 16  # of a coordinate: above is no rank
_TOKEN = r"(?:tp|pp|shard|moe_sharding|moe)\d{2,5}"
_NAME = re.compile(
    rf"(?P<stem>[^./]+?)(?:\.(?P<at>{_TOKEN}(?:_{_TOKEN})*))?(?:-(?P<part>\d{{5}})-of-(?P<of>\d{{5}}))?"
    r"\.(?P<kind>pdparams|pdopt)"
)
_COORDINATE = re.compile(r"(tp|pp|shard|moe_sharding|moe)(\d+)")
_STEMS = tuple(f"{kind}model_state" for kind in ("", "lora_", "vera_", "lokr_", "reft_", "prefix_"))
SIGNAL = r"saved_signal_(\d{1,6})"  # of a rank that is done
_SIGNAL = re.compile(SIGNAL)


class RankFile(NamedTuple):
    """A file of one rank, as its name describes it."""

    name: str
    kind: str  # model, optimizer or ema
    stem: str
    at: Mapping[str, int]  # coordinate by token, in the name's order
    part: int  # number of this part, from 1
    of: int  # number of parts, 1 for a file in one piece

    @property
    def tokens(self) -> tuple[str, ...]:
        """The names of the coordinates, in the name's order."""
        return tuple(self.at)


def two_jobs(
    code: str,
    what: str,
    path: str,
    key: str | None = None,
    hint: str = "files of two jobs are mixed: keep those of one",
) -> InconsistentCheckpoint:
    """The error about files that contradict one another."""
    return InconsistentCheckpoint(what, code=code, path=path, key=key, hint=hint)


def rank_of(file: RankFile, degrees: JobDegrees) -> PaddleRank:
    """The rank that a file belongs to. Coordinates that the name lacks are 0, or follow from the others (ep)."""
    at = file.at
    rank = degrees.rank(at.get("pp", 0), at.get("tp", 0), at.get("shard", 0))
    return rank._replace(ep=at.get("moe_sharding", at.get("moe", rank.ep)))


def file_name(stem: str, kind: str, at: Mapping[str, int], part: int = 1, of: int = 1) -> str:
    """The name of a rank's file, or of part `part` of `of`."""
    suffix = "_".join(f"{token}{number:02d}" for token, number in at.items())
    number = f"-{part:05d}-of-{of:05d}" if of > 1 else ""
    return f"{stem}{'.' if suffix else ''}{suffix}{number}{'.pdparams' if kind == MODEL_FILE else '.pdopt'}"


def rank_file(path: str) -> RankFile | None:
    """The description of a per-rank file by its name, None for any other file."""
    if path in BESIDE:  # these too are pickles with the extension of a model file
        return None
    found = _NAME.fullmatch(path)
    if found is None:
        return None
    pairs = [(m[1], int(m[2])) for m in _COORDINATE.finditer(found["at"] or "")]
    at = dict(pairs)
    if len(at) < len(pairs) or any(number >= _LARGEST for number in at.values()):
        return None
    stem = found["stem"]
    if found["kind"] == "pdparams":
        kind = MODEL_FILE
    else:
        kind = EMA_FILE if stem == "ema" else OPTIMIZER_FILE
    return RankFile(path, kind, stem, at, int(found["part"] or 1), int(found["of"] or 1))


def rank_files(names: Iterable[str], *, prefer: object = None) -> list[RankFile]:
    """The per-rank files of the checkpoint in a folder with these names; [] if there is none, or it is ambiguous.

    Stems of Paddle's Trainer go first; without them one model and one optimizer of any stem. prefer: the stem to take.
    """
    files = [file for file in map(rank_file, names) if file is not None]

    stems = list(dict.fromkeys(file.stem for file in files if file.kind == MODEL_FILE))
    known_stems = [stem for stem in (prefer, *_STEMS) if stem in stems]
    model_stem = ""
    if known_stems:
        model_stem = known_stems[0]
    elif len(stems) == 1:
        model_stem = stems[0]
    # Several models of unknown names: only the user can tell which one is meant (`--prefer`).
    if stems and not model_stem:
        return []

    optimizer_stems = {file.stem for file in files if file.kind == OPTIMIZER_FILE}
    optimizer_stem = ""
    if "optimizer" in optimizer_stems:
        optimizer_stem = "optimizer"
    elif model_stem in optimizer_stems:
        optimizer_stem = model_stem
    elif len(optimizer_stems) == 1 and not known_stems:
        optimizer_stem = next(iter(optimizer_stems))

    wanted = {MODEL_FILE: model_stem, OPTIMIZER_FILE: optimizer_stem, EMA_FILE: "ema"}
    return sorted(
        (file for file in files if wanted[file.kind] == file.stem),
        key=lambda file: (file.kind != MODEL_FILE, file.kind, *_order(file), file.part),
    )


def _order(file: RankFile) -> tuple[int, ...]:
    """The sort key of a file: stages first, then sharding, then tensor ranks, so that names come in model order."""
    at = file.at
    return at.get("pp", 0), at.get("moe_sharding", at.get("moe", 0)), at.get("shard", 0), at.get("tp", 0)


def degrees_of(tree: Tree, files: Sequence[RankFile], stated: Mapping[str, int]) -> JobDegrees:
    """The degrees of the job: those that the meta states, else the smallest that the file names allow.

    stated: may have tp, pp, sharding and ep. Raises InconsistentCheckpoint E0305 for a file beyond a stated degree.
    """

    def shown(*tokens: str) -> int:
        # A name has a coordinate only if its degree is at least 2.
        found = [file.at[token] for file in files for token in tokens if token in file.at]
        return max(2, max(found) + 1) if found else 1

    least = {"tp": shown("tp"), "pp": shown("pp"), "sharding": shown("shard"), "ep": shown("moe_sharding", "moe")}
    for dim, size in least.items():
        if dim in stated and size > max(stated[dim], 1):
            token = {"sharding": ("shard",), "ep": ("moe_sharding", "moe")}.get(dim, (dim,))
            beyond = [file.name for file in files for t in token if file.at.get(t, -1) >= stated[dim]]
            raise two_jobs(
                CONTRADICTION,
                f"model_meta.json states {dim} degree {stated[dim]}, the files show at least {size}",
                tree.display(beyond[0] if beyond else files[0].name),
            )
    tp, pp, sharding, ep = (stated.get(dim) or least[dim] for dim in ("tp", "pp", "sharding", "ep"))
    by_data = any("moe" in file.at for file in files)
    dp = _data_ranks(tree, tp * pp, max(sharding, ep if by_data else 1))
    return JobDegrees(tp, pp, ep, dp, sharding, by_data=by_data)


def _data_ranks(tree: Tree, others: int, least: int) -> int:
    """The number of data ranks, from the markers `saved_signal_R` of finished ranks; `least` if they do not fit."""
    names = tree.names() if tree.single is None else ()
    ranks = [int(match[1]) for match in map(_SIGNAL.fullmatch, names) if match]
    world = max(ranks, default=-1) + 1
    # A gap in the markers, or a number that the degrees do not divide, proves nothing about the job's size.
    if world == len(ranks) and world % others == 0 and world // others % least == 0:
        return max(world // others, least)
    return least


def check_whole(tree: Tree, files: Sequence[RankFile], degrees: JobDegrees) -> None:
    """Raise Incomplete E0302 listing all missing files of ranks, InconsistentCheckpoint E0305 for files of two jobs."""
    missing: list[str] = []
    for kind in (MODEL_FILE, OPTIMIZER_FILE, EMA_FILE):
        own = [file for file in files if file.kind == kind]
        if not own:
            continue
        tokens = {frozenset(file.at) for file in own}
        if len(tokens) > 1:
            raise two_jobs(
                CONTRADICTION,
                f"{own[0].name} and {next(f.name for f in own if f.tokens != own[0].tokens)} name "
                "different coordinates",
                tree.display(own[0].name),
            )
        have = {file.name for file in own}
        missing += [name for name in _expected_files(own, degrees) if name not in have]
    # One error for all kinds of files, so that they can be fetched at once.
    if missing:
        fault = Incomplete(
            f"{len(missing)} of {len(files) + len(missing)} ranks' files are missing: {', '.join(missing[:8])}",
            code=MISSING,
            path=tree.display(missing[0]),
            faults=[f"missing: {name}" for name in missing[8:100]],
            hint="every rank writes its own: copy them from all machines of the job",
        )
        report_missing(fault, files=missing)


def _expected_files(own: Sequence[RankFile], degrees: JobDegrees) -> Iterable[str]:
    """The names that the files of all ranks have, for one kind of file."""
    first = own[0]
    sizes = {
        "tp": degrees.tp,
        "pp": degrees.pp,
        "shard": degrees.sharding,
        "moe_sharding": degrees.ep,
        "moe": degrees.ep,
    }
    # A stated degree is expected in the names too: files without it are then missing.
    order = [t for t in ("tp", "pp") if sizes[t] > 1 or t in first.at]
    if (first.kind != MODEL_FILE and degrees.sharding > 1) or "shard" in first.at:
        order.append("shard")
    order += [t for t in ("moe_sharding", "moe") if t in first.at]
    of: dict[tuple[int, ...], int] = {}
    for file in own:
        at = tuple(file.at.get(token, 0) for token in order)
        of[at] = max(of.get(at, 1), file.of)
    for at in product(*(range(sizes[token]) for token in order)):
        here = dict(zip(order, at, strict=True))
        if "moe_sharding" in here and here.get("tp", 0) != here["moe_sharding"] % degrees.tp and at not in of:
            continue  # an expert rank is on one tensor rank
        count = of.get(at, 1)
        for part in range(1, count + 1):
            yield file_name(first.stem, first.kind, here, part, count)


# -- model_meta.json ---------------------------------------------------------------------------------------------------

MALFORMED = "E1311"
CONTRADICTS = "E1312"
NAME = "model_meta.json"
LIMIT = 1 << 30  # bytes
_OLD = re.compile(r"shard_meta\.(tp\d+_pp\d+(?:_ep\d+)?)\.json")
_KEY = re.compile(r"tp(\d{2,5})_pp(\d{2,5})(?:_ep(\d{2,5}))?")
_DEGREES = {
    "pp_degree": "pp",
    "mp_degree": "tp",
    "sharding_degree": "sharding",
    "ep_degree": "ep",
    "moe_sharding_degree": "moe_sharding",
}
_MOST = 1 << 20
_STRATEGIES = {"ShardingV1": V1, "ShardingV2": V2}
_NUMBERS = {name: number for number, name in DTYPE_NUMBERS.items()}


class Param(NamedTuple):
    """A tensor rank's part of a parameter."""

    shape: tuple[int, ...]
    dtype: DType | None
    distributed: bool  # it is a part of the parameter, or an expert of one rank
    no_sync: bool  # its gradients are not synchronised: an expert's


@dataclass(frozen=True, slots=True)
class StageMeta:
    """The meta of one (tp, pp, ep)."""

    names: Mapping[str, str]  # structured -> static
    params: Mapping[str, Param]
    owners: Mapping[str, int]  # static -> sharding rank, v1
    strategy: str  # v1, v2 or ""
    shown: str = ""  # the file and place, for messages


@dataclass(frozen=True, slots=True)
class Meta:
    """The content of `model_meta.json`, or of the older files."""

    degrees: Mapping[str, int] = field(default_factory=dict)  # dim -> size, of those that are stated
    stages: Mapping[tuple[int, int, int], StageMeta] = field(default_factory=dict)  # by (tp, pp, ep)
    files: tuple[str, ...] = ()

    @property
    def strategy(self) -> str:
        """The sharding version, `v1` or `v2`; "" if no stage states one."""
        return next((stage.strategy for stage in self.stages.values() if stage.strategy), "")


def read_meta(tree: Tree) -> Meta:
    """The meta of a folder; an empty one if it has none.

    Raises CorruptFile E1311, what JSON raises, and InconsistentCheckpoint E1312 for numbers that contradict each other.
    """
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
            raise _malformed_error(f"a key {key[:60]!r}, want tpTT_ppPP or tpTT_ppPP_epEE", shown)
        at = (int(found[1]), int(found[2]), int(found[3] or 0))
        stages[at] = _stage(value, shown, degrees.get("sharding"))

    meta = Meta(degrees, stages, tuple(files))
    _check_degrees(meta, tree.display(NAME))
    return meta


def meta_json(degrees: JobDegrees, stages: Mapping[tuple[int, int, int], StageMeta]) -> bytes:
    """`model_meta.json` as Paddle writes it. The degree of expert sharding is 0 if there are no expert ranks."""
    config = {key: getattr(degrees, dim) for key, dim in _DEGREES.items()}
    if degrees.ep == 1:
        config["moe_sharding_degree"] = 0

    metas = {}
    for (tp, pp, ep), stage in stages.items():
        key = f"tp{tp:02d}_pp{pp:02d}"
        if degrees.ep > 1:
            key += f"_ep{ep:02d}"
        metas[key] = _describe_stage(stage)
    return json.dumps({"parallel_config": config, "sharding_metas": metas}).encode("ascii")


def _describe_stage(stage: StageMeta) -> dict[str, Any]:
    """The meta of one (tp, pp, ep) as JSON, with keys in Paddle's order."""
    params = {}
    for name, param in stage.params.items():
        dtype_number = _NUMBERS[param.dtype.name] if param.dtype else 0
        params[name] = [list(param.shape), dtype_number, *param[2:]]

    strategies = {version: name for name, version in reversed(_STRATEGIES.items())}
    return {
        "param2rank": stage.owners,
        "structure_name_mapping": stage.names,
        "param_meta": params,
        "param_meta_keys": ["shape", "dtype", "is_distributed", "no_sync"],
        "sharding_strategy": strategies[stage.strategy],
        "enable_overlap": False,
    }


def _malformed_error(what: str, shown: str, key: str | None = None) -> CorruptFile:
    return CorruptFile(what, code=MALFORMED, path=shown, key=key, hint="the file was edited or damaged: fetch it again")


def _mapping(value: Any, key: str, shown: str, kind: type = object) -> dict[str, Any]:
    """Member `key` of a JSON object, itself an object with values of type `kind`. Raises CorruptFile E1311."""
    inner = value.get(key) if isinstance(value, dict) else None
    if not isinstance(inner, dict):
        raise _malformed_error(f"{key} is missing, or no object", shown)
    for name, item in inner.items():
        if not isinstance(item, kind) or (kind is int and type(item) is not int):
            raise _malformed_error(f"{key} holds a {type(item).__name__}, want {kind.__name__}", shown, name[:200])
    return inner


def _degrees(config: Mapping[str, Any], shown: str) -> dict[str, int]:
    out = {}
    for key, dim in _DEGREES.items():
        value = config.get(key)
        if value is None:
            continue
        if type(value) is not int or not 0 <= value <= _MOST:
            raise _malformed_error(f"{key} is {str(value)[:40]}, want a number of ranks", shown)
        out[dim] = max(value, 1)  # 0: without expert parallelism
    return out


def _stage(value: Any, shown: str, sharding: int | None) -> StageMeta:
    names = _mapping(value, "structure_name_mapping", shown, str)
    owners = _mapping(value, "param2rank", shown, int)
    for static, rank in owners.items():
        if not 0 <= rank < (sharding or _MOST):
            raise InconsistentCheckpoint(
                f"param2rank gives {static[:100]} to sharding rank {rank} of {sharding or 'few'}",
                code=CONTRADICTS,
                path=shown,
                hint="the file was edited, or comes from another job",
            )
    params = {}
    if value.get("param_meta") is not None:
        for name, item in _mapping(value, "param_meta", shown, list).items():
            params[name] = _param(name, item, shown)
    stated = value.get("sharding_strategy")
    strategy = _STRATEGIES.get(stated, "") if isinstance(stated, str) else ""
    if stated is not None and not strategy:
        raise _malformed_error(f"sharding_strategy is {str(stated)[:40]!r}, want ShardingV1 or ShardingV2", shown)
    return StageMeta(names, params, owners, strategy or (V1 if owners else ""), shown)


def _param(name: str, item: list[Any], shown: str) -> Param:
    shape = item[0] if item else None
    if not isinstance(shape, list) or len(shape) > 16 or any(type(n) is not int or not 0 <= n < 1 << 48 for n in shape):
        raise _malformed_error("param_meta states no usable shape", shown, name[:200])
    if len(item) < 3 or type(item[1]) is not int or any(type(flag) is not bool for flag in item[2:4]):
        raise _malformed_error("param_meta wants [shape, dtype, is_distributed, no_sync]", shown, name[:200])
    code = DTYPE_NUMBERS.get(item[1])
    return Param(tuple(shape), DTYPES[code] if code else None, item[2], len(item) > 3 and item[3])


def _check_degrees(meta: Meta, shown: str) -> None:
    """Raise InconsistentCheckpoint E1312 if degrees contradict each other, or the ranks described do not match them."""
    tp, pp, ep = (meta.degrees.get(dim, 1) for dim in ("tp", "pp", "ep"))
    sharding = meta.degrees.get("sharding", 1)
    moe = meta.degrees.get("moe_sharding", 1)
    # Both products count the ranks of one stage (`paddle.job`).
    if ep > 1 and tp * sharding != ep * moe:
        raise InconsistentCheckpoint(
            f"parallel_config: {tp} x {sharding} tensor and sharding ranks, {ep} x {moe} expert ranks",
            code=CONTRADICTS,
            path=shown,
            hint="the file was edited: both products are the ranks of a stage",
        )

    if not meta.stages or not meta.degrees:  # the older files state no degrees
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
            f" tp {tp}, pp {pp}, ep {ep}",
            code=CONTRADICTS,
            path=shown,
            hint="the file was edited, or comes from another job",
        )
