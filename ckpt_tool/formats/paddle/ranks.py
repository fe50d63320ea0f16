"""Which files of a folder are a Paddle checkpoint a rank, whose each is, and which are missing: by their names.

    model_state.tp00_pp01.pdparams            tensor rank 0, stage 1
    optimizer.tp00_pp01_shard02.pdopt         ... sharding rank 2, its own part of the optimizer
    model_state.tp01_moe_sharding03.pdparams  expert rank 3;   model_state.moe01.pdparams: data rank 1, which is an expert rank
    ema.tp00_shard00.pdopt                    an average of the weights, cut as the optimizer is
    lora_model_state.tp00.pdparams            an adapter;      model_state-00001-of-00002.pdparams: a file in two

The one idea: a coordinate stands in a name only if its degree is larger than 1, so names alone tell the least grid of ranks,
and a hole in the grid is a file that is missing. `model_meta.json` states the degrees, then a lost last rank shows too.

Specification (PaddleFormers 1.2.0 `trainer/training_args.py`: `weight_name_suffix`, `optimizer_name_suffix`,
`sharded_name_suffix`; `trainer/utils/helper.py`, `utils/env.py` for the stems; paddlepaddle 3.3.1 `fleet/base/topology.py`,
`EPHybridCommunicateGroup`): within a stage rank r = shard * tp_degree + tp; its expert rank is r mod ep_degree.
Cost: the listing. What it does not do: read files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from ckpt_tool.errors import Incomplete, InconsistentCheckpoint
from ckpt_tool.storage.source import Tree

MISSING, CONTRADICTION = "E0302", "E0305"
MODEL_FILE, OPTIMIZER_FILE, EMA_FILE = "model", "optimizer", "ema"
EXTENSIONS = (".pdparams", ".pdopt", ".pd", ".pdema")
BESIDE = ("scheduler.pdparams", "scaler.pdparams")
_LARGEST = 1 << 16  # of a coordinate: above is no rank
_TOKEN = r"(?:tp|pp|shard|moe_sharding|moe)\d{2,5}"
_NAME = re.compile(
    rf"(?P<stem>[^./]+?)(?:\.(?P<at>{_TOKEN}(?:_{_TOKEN})*))?(?:-(?P<part>\d{{5}})-of-(?P<of>\d{{5}}))?"
    r"\.(?P<kind>pdparams|pdopt)"
)
_COORDINATE = re.compile(r"(tp|pp|shard|moe_sharding|moe)(\d+)")
_STEMS = (
    "model_state",
    "lora_model_state",
    "vera_model_state",
    "lokr_model_state",
    "reft_model_state",
    "prefix_model_state",
)
_SIGNAL = re.compile(r"saved_signal_(\d{1,6})")


class RankFile(NamedTuple):
    """One file. kind: model, optimizer or ema. at: coordinate by token, in the name's order. part, of: numbers of a file in
    several parts, (1, 1) else."""

    name: str
    kind: str
    stem: str
    at: Mapping[str, int]
    part: int
    of: int

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(self.at)


class Where(NamedTuple):
    """Coordinates of the rank that wrote a file. ep: expert rank."""

    tp: int
    pp: int
    shard: int
    ep: int


@dataclass(frozen=True, slots=True)
class Degrees:
    """Of the job. sharding: ranks that share the optimizer. dp: all data ranks, those included. by_data: expert ranks are
    data ranks (`moeNN`)."""

    tp: int = 1
    pp: int = 1
    sharding: int = 1
    ep: int = 1
    dp: int = 1
    by_data: bool = False

    def where(self, file: RankFile) -> Where:
        """Whose a file is. A model file without a sharding rank is rank 0's, or its expert rank's."""
        at = file.at
        tp, shard = at.get("tp", 0), at.get("shard", 0)
        if "moe_sharding" in at or "moe" in at:
            ep = at.get("moe_sharding", at.get("moe", 0))
        else:
            ep = 0 if self.by_data else (shard * self.tp + tp) % self.ep
        return Where(tp, at.get("pp", 0), shard, ep)

    def to_json(self) -> dict[str, int]:
        return {"tp": self.tp, "pp": self.pp, "ep": self.ep, "dp": self.dp}


def rank_file(path: str) -> RankFile | None:
    """What a file's name says, None for one that is no rank's."""
    if path in BESIDE:
        return None
    found = _NAME.fullmatch(path)
    if found is None:
        return None
    pairs = [(m[1], int(m[2])) for m in _COORDINATE.finditer(found["at"] or "")]
    at = dict(pairs)
    if len(at) < len(pairs) or any(number >= _LARGEST for number in at.values()):
        return None
    stem = found["stem"]
    kind = MODEL_FILE if found["kind"] == "pdparams" else EMA_FILE if stem == "ema" else OPTIMIZER_FILE
    return RankFile(path, kind, stem, at, int(found["part"] or 1), int(found["of"] or 1))


def rank_files(names: Iterable[str], *, prefer: object = None) -> list[RankFile]:
    """The files of the one checkpoint that `names` (of one folder) hold: [] when there is none, or it can't be told which.

    Stems of Paddle's Trainer go first; without them one model and one optimizer of any stem. prefer: the stem to take."""
    found = [file for name in names if (file := rank_file(name))]
    stems = list(dict.fromkeys(file.stem for file in found if file.kind == MODEL_FILE))
    known = [stem for stem in (prefer, *_STEMS) if stem in stems]
    stem = known[0] if known else stems[0] if len(stems) == 1 else ""
    if stems and not stem:
        return []
    optimizers = {file.stem for file in found if file.kind == OPTIMIZER_FILE}
    own = "optimizer" if "optimizer" in optimizers else stem if stem in optimizers else ""
    if not own and len(optimizers) == 1 and not known:
        own = next(iter(optimizers))
    wanted = {MODEL_FILE: stem, OPTIMIZER_FILE: own, EMA_FILE: "ema"}
    return sorted(
        (file for file in found if wanted[file.kind] == file.stem),
        key=lambda file: (file.kind != MODEL_FILE, file.kind, *_order(file), file.part),
    )


def _order(file: RankFile) -> tuple[int, ...]:
    """Stages first, then sharding, then tensor ranks: the order in which a model's names come."""
    at = file.at
    return at.get("pp", 0), at.get("moe_sharding", at.get("moe", 0)), at.get("shard", 0), at.get("tp", 0)


def degrees_of(tree: Tree, files: Sequence[RankFile], stated: Mapping[str, int]) -> Degrees:
    """The degrees: those that `stated` (tp, pp, sharding, ep) has, else the least that the names show. Raises
    InconsistentCheckpoint E0305 for a file beyond a stated degree."""

    def shown(*tokens: str) -> int:
        found = [file.at[token] for file in files for token in tokens if token in file.at]
        return max(2, max(found) + 1) if found else 1

    least = {"tp": shown("tp"), "pp": shown("pp"), "sharding": shown("shard"), "ep": shown("moe_sharding", "moe")}
    for dim, size in least.items():
        if dim in stated and size > max(stated[dim], 1):
            token = {"sharding": ("shard",), "ep": ("moe_sharding", "moe")}.get(dim, (dim,))
            beyond = [file.name for file in files for t in token if file.at.get(t, -1) >= stated[dim]]
            raise InconsistentCheckpoint(
                f"model_meta.json states {dim} degree {stated[dim]}, the files show at least {size}", code=CONTRADICTION,
                path=tree.display(beyond[0] if beyond else files[0].name),
                hint="files of two jobs lie together: keep those of one",
            )  # fmt: skip
    tp, pp, sharding, ep = (stated.get(dim) or least[dim] for dim in ("tp", "pp", "sharding", "ep"))
    by_data = any("moe" in file.at for file in files)
    return Degrees(tp, pp, sharding, ep, _data_ranks(tree, tp * pp, max(sharding, ep if by_data else 1)), by_data)


def _data_ranks(tree: Tree, others: int, least: int) -> int:
    """All data ranks, as the markers of finished ranks count them."""
    ranks = [int(m[1]) for name in (tree.names() if tree.single is None else ()) if (m := _SIGNAL.fullmatch(name))]
    world = max(ranks, default=-1) + 1
    if world == len(ranks) and world % others == 0 and world // others % least == 0:
        return max(world // others, least)
    return least


def check_whole(tree: Tree, files: Sequence[RankFile], degrees: Degrees) -> None:
    """Raise Incomplete E0302 naming every rank's file that is missing, InconsistentCheckpoint E0305 for a mixture."""
    missing: list[str] = []
    for kind in (MODEL_FILE, OPTIMIZER_FILE, EMA_FILE):
        own = [file for file in files if file.kind == kind]
        if not own:
            continue
        tokens = {frozenset(file.at) for file in own}
        if len(tokens) > 1:
            raise InconsistentCheckpoint(
                f"{own[0].name} and {next(f.name for f in own if f.tokens != own[0].tokens)} name different coordinates",
                code=CONTRADICTION, path=tree.display(own[0].name), hint="files of two jobs lie together: keep those of one",
            )  # fmt: skip
        have = {file.name for file in own}
        missing += [name for name in _expected(own, degrees) if name not in have]
    if missing:
        raise Incomplete(
            f"{len(missing)} of {len(files) + len(missing)} ranks' files are missing: {', '.join(missing[:8])}",
            code=MISSING, path=tree.display(missing[0]), faults=[f"missing: {name}" for name in missing[8:100]],
            hint="every rank writes its own: copy them from all machines of the job",
        )  # fmt: skip


def _expected(own: Sequence[RankFile], degrees: Degrees) -> Iterable[str]:
    """The names of all ranks' files of one kind."""
    first = own[0]
    sizes = {
        "tp": degrees.tp, "pp": degrees.pp, "shard": degrees.sharding, "moe_sharding": degrees.ep, "moe": degrees.ep,
    }  # fmt: skip
    # a stated degree that the names lack shows as a token that they lack
    order = [t for t in ("tp", "pp") if sizes[t] > 1 or t in first.at]
    if first.kind != MODEL_FILE and degrees.sharding > 1 or "shard" in first.at:
        order.append("shard")
    order += [t for t in ("moe_sharding", "moe") if t in first.at]
    of: dict[tuple[int, ...], int] = {}
    for file in own:
        at = tuple(file.at.get(token, 0) for token in order)
        of[at] = max(of.get(at, 1), file.of)
    for at in product(*(range(sizes[token]) for token in order)):
        here = dict(zip(order, at, strict=True))
        if "moe_sharding" in here and here.get("tp", 0) != here["moe_sharding"] % degrees.tp and at not in of:
            continue  # an expert rank lies on one tensor rank
        suffix = "_".join(f"{token}{number:02d}" for token, number in here.items())
        base = f"{first.stem}.{suffix}" if suffix else first.stem
        count = of.get(at, 1)
        for part in range(1, count + 1):
            number = f"-{part:05d}-of-{count:05d}" if count > 1 else ""
            yield f"{base}{number}{'.pdparams' if first.kind == MODEL_FILE else '.pdopt'}"
