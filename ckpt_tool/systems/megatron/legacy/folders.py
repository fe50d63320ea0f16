"""The rank folders of a legacy Megatron checkpoint: the coordinates of each, and which are missing.

The one idea: a folder's name holds up to three numbers, `mp_rank_TT[_PPP][_EEE]`; if it has two, `args` decide whether
the second is the stage or the expert rank. Tensor rank and expert rank come from one number, the rank within the stage
(`r`): TT = r mod TP, EEE = (r div ETP) mod EP, and the experts' tensor rank is r mod ETP. So not every pair exists:

    TP 2, EP 2, ETP 1:   r = 0 -> 00_000   r = 1 -> 01_001   r = 2 -> 00_000   r = 3 -> 01_001

Dense tensors are cut by TT, experts by EEE and r mod ETP. Who writes: every pair with data rank 0 among the dense ranks
(r < TP) or among the experts' (r < ETP * EP). Up to core 0.18 only the latter did, so that with TP > EP * ETP some TT
were never written (NVIDIA/Megatron-LM#4200); with ETP > TP several expert shards share a name and overwrite each other
(#1836). A reader names what is missing; nothing can bring it back.

Sources (NVIDIA/Megatron-LM): core 0.16.1 `training/checkpointing.py` (`get_checkpoint_name`, `save_checkpoint`),
`core/parallel_state.py` (`RankGenerator`, order tp-cp-ep-dp-pp).

Cost: a list of names. What it does not do: read the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import lcm
from typing import Any

from ckpt_tool.core.mesh import divisors
from ckpt_tool.core.missing import report_missing
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint, UsageError
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.megatron.job import CONTRADICTION, MegatronRank, carve_out_experts, check_experts
from ckpt_tool.systems.megatron.stages import nearest

MISSING = "E0302"
DEGREES = "E0274"
MOST_FOLDERS = 1 << 14  # no job has more; arguments that state more are damaged
MODEL_FILE = "model_optim_rng.pt"
OPTIM_FILE = "distrib_optim.pt"
_FOLDER = re.compile(r"((?:iter_\d{7,}/|release/)?)(mp_rank_(\d{2,4})(?:_(\d{3,4}))?(?:_(\d{3,4}))?)/(.+)", re.ASCII)


def rank_folders(tree: Tree) -> dict[str, tuple[int, ...]]:
    """Every rank folder that holds a model file -> the numbers of its name, in the order of names; {} when there is
    none."""
    if tree.single is not None:
        return {}
    found = {}
    for path in sorted(tree.listing()):
        match = _FOLDER.fullmatch(path)
        if match and match[6] == MODEL_FILE:
            found[match[1] + match[2]] = tuple(int(n) for n in match.group(3, 4, 5) if n is not None)
    return found


def rank_in(path: str, mesh: Mapping[str, int]) -> dict[str, int] | None:
    """Whose file it is, by its folder's name. Of two numbers the second is the stage, or, with one stage, the expert
    rank; None where the mesh leaves open which."""
    found = _FOLDER.fullmatch(path)
    if found is None:
        return None
    numbers = [int(n) for n in found.group(3, 4, 5) if n is not None]
    if len(numbers) == 2 and mesh.get("pp", 1) == 1 == mesh.get("ep", 1):
        return None
    dims = ("tp", "pp", "ep") if len(numbers) > 2 or mesh.get("pp", 1) > 1 else ("tp", "ep")
    return dict(zip(dims, numbers, strict=False))


def folder_name(tp: int, pp: int, ep: int, degrees: Mapping[str, int]) -> str:
    """`mp_rank_TT[_PPP][_EEE]`, as Megatron spells it."""
    stage = f"_{pp:03d}" if degrees["pp"] > 1 else ""
    return f"mp_rank_{tp:02d}{stage}" + (f"_{ep:03d}" if degrees["ep"] > 1 else "")


def stage_ranks(degrees: Mapping[str, int]) -> int:
    """Ranks of one pipeline stage."""
    return degrees["tp"] * degrees["cp"] * degrees["dp"]


def pairs(degrees: Mapping[str, int]) -> dict[tuple[int, int], int]:
    """Every existing (tensor rank, expert rank) of a stage -> its first rank within the stage."""
    tp = degrees["tp"]
    ep = degrees["ep"]
    etp = degrees["etp"]
    found: dict[tuple[int, int], int] = {}
    for r in range(min(stage_ranks(degrees), lcm(tp, etp * ep))):
        found.setdefault((r % tp, r // etp % ep), r)
    return found


def expert_tensor_rank(tp_rank: int, ep_rank: int, degrees: Mapping[str, int], rank: int | None) -> int | None:
    """The experts' tensor rank of a folder; None when its name leaves it open. rank: the writer's own, if known."""
    tp = degrees["tp"]
    ep = degrees["ep"]
    etp = degrees["etp"]
    fits = {r % etp for r in range(tp_rank, lcm(tp, etp * ep), tp) if r // etp % ep == ep_rank}
    if len(fits) == 1:
        return fits.pop()
    if rank is None:
        return None
    own = rank % stage_ranks(degrees) % etp
    return own if own in fits else None


def coordinates(
    folders: Mapping[str, tuple[int, ...]],
    degrees: Mapping[str, int],
    ranks: Mapping[str, int | None],
    *,
    experts: bool,
    file: str = f"/{MODEL_FILE}",
) -> list[MegatronRank]:
    """Each folder's coordinates. ranks: the number of the writing rank by folder, where its arguments say it. file:
    what follows the folder's name in the name of the rank's file.

    Raises Incomplete E0302 naming every missing folder, InconsistentCheckpoint E0305 for folders beyond the degrees.
    """
    _possible(len(folders), degrees)
    out = []
    beyond = []

    for path, numbers in folders.items():
        tp = numbers[0]
        pp = 0
        ep = 0
        if len(numbers) == 3:
            pp, ep = numbers[1:]
        elif len(numbers) == 2:
            pp, ep = (numbers[1], 0) if degrees["pp"] > 1 or degrees["ep"] == 1 else (0, numbers[1])
        if tp >= degrees["tp"] or pp >= degrees["pp"] or ep >= degrees["ep"]:
            beyond.append(path)
            continue
        etp = expert_tensor_rank(tp, ep, degrees, ranks.get(path)) if experts else 0
        if etp is None:
            raise Incomplete(
                f"the experts' tensor rank of {path} is not known: ETP {degrees['etp']} over TP {degrees['tp']} lets "
                "several ranks write the same file",
                code="E2002",
                path=path,
                hint="Megatron kept one of them: expert shards are lost (NVIDIA/Megatron-LM#1836); save as torch_dist",
            )
        out.append(MegatronRank(path, tp, pp, ep, etp))

    if beyond:
        shown = ", ".join(f"{name} {size}" for name, size in degrees.items() if name in ("tp", "pp", "ep"))
        raise InconsistentCheckpoint(
            f"{len(beyond)} rank folders are beyond the degrees that the arguments state ({shown}): {beyond[0]}",
            code=CONTRADICTION,
            path=beyond[0],
            faults=beyond[1:50],
            hint="folders of another run are among them: keep one run's",
        )

    _whole(out, degrees, experts=experts, file=file)
    return out


def _possible(found: int, degrees: Mapping[str, int]) -> None:
    """Raise Incomplete E0302 for degrees of more folders than any job has.

    Without this check every missing folder would be listed, for damaged arguments billions of them.
    """
    wanted = degrees["pp"] * max(degrees["tp"], degrees["ep"] * degrees["etp"])
    if wanted > max(found, MOST_FOLDERS):
        stated = ", ".join(f"{name} {degrees[name]}" for name in ("tp", "pp", "ep", "etp"))
        raise Incomplete(
            f"the arguments state degrees ({stated}) of {wanted} rank folders, and there are {found}",
            code=MISSING,
            hint="no job is that large: the arguments are damaged",
        )


def _whole(ranks: Iterable[MegatronRank], degrees: Mapping[str, int], *, experts: bool, file: str) -> None:
    """Raise Incomplete E0302 if a shard of dense tensors or of experts has no folder."""
    every = list(ranks)
    dense = {(rank.pp, rank.tp) for rank in every}
    own = {(rank.pp, rank.ep, rank.etp) for rank in every}
    wanted = pairs({**degrees, "dp": max(degrees["dp"], degrees["ep"] * degrees["etp"])})
    missing: dict[str, None] = {}
    lost = []

    for pp in range(degrees["pp"]):
        for tp in range(degrees["tp"]):
            if (pp, tp) not in dense:
                ep = min((e for t, e in wanted if t == tp), default=0)
                missing[folder_name(tp, pp, ep, degrees)] = None
                lost.append(f"tensor rank {tp} of stage {pp}")
        for ep in range(degrees["ep"] if experts else 0):
            for etp in range(degrees["etp"]):
                if (pp, ep, etp) not in own:
                    tp = (etp + degrees["etp"] * ep) % degrees["tp"]
                    missing[folder_name(tp, pp, ep, degrees)] = None
                    lost.append(f"expert rank {ep} (tensor rank {etp}) of stage {pp}")

    if not missing:
        return

    names = list(missing)
    hint = "copy them from where the job wrote them: every rank writes its own"
    if experts and degrees["tp"] > degrees["ep"] * degrees["etp"]:
        hint = (
            "Megatron-Core up to 0.18 never writes them where TP > EP * ETP (NVIDIA/Megatron-LM#4200): go back to a "
            "save as torch_dist, or copy them from the job if it was patched"
        )
    elif degrees["etp"] > degrees["tp"]:
        hint = "Megatron writes expert shards of ETP > TP over each other (NVIDIA/Megatron-LM#1836): save as torch_dist"

    fault = Incomplete(
        f"{len(names)} rank folders are missing: {', '.join(names[:8])}",
        code=MISSING,
        path=names[0],
        place=lost[0],
        hint=hint,
        faults=lost[:50],
    )
    report_missing(fault, files=[f"{name}{file}" for name in names])


def fit(degrees: Mapping[str, int], experts: int | None) -> tuple[dict[str, int], list[str]]:
    """Return degrees that Megatron can run, with enough data ranks for the expert ranks, and notes.

    Raises UsageError E0274 for expert degrees that the model or the folder names can't take.
    """
    out = {name: max(1, degrees.get(name, 1)) for name in ("tp", "pp", "vpp", "ep", "etp", "dp", "cp")}
    if "etp" not in degrees:
        out["etp"] = out["tp"]
    notes: list[str] = []
    check_experts(out["ep"], experts, DEGREES)
    if not experts:
        if out["etp"] not in (1, out["tp"]):
            raise UsageError(f"--etp {out['etp']}: the model has no experts", code=DEGREES, hint="leave --etp off")
        return out | {"etp": out["tp"]}, notes
    if out["tp"] % out["etp"]:
        valid = divisors(out["tp"])
        raise UsageError(
            f"--etp {out['etp']} with --tp {out['tp']}: folder names hold the dense tensor rank, so that experts of "
            "more tensor ranks would overwrite each other",
            code=DEGREES,
            hint=f"--etp {nearest(out['etp'], valid)} (a divisor of --tp), or --to megatron-dist",
        )
    return carve_out_experts(out, notes), notes


def refuse_renamed(
    tree: Tree, ranks: Iterable[tuple[MegatronRank, Mapping[str, Any]]], degrees: Mapping[str, int]
) -> None:
    """Raise InconsistentCheckpoint E0305 if a folder's `args.rank` is that of another folder.

    Such a folder was renamed, and its slices would go to a wrong place. ranks: each with its arguments. A converter
    that runs in one process writes the same number into all files, which shows nothing.
    Order of ranks: tp-cp-ep-dp-pp, with --use-tp-pp-dp-mapping tp-cp-ep-pp-dp.
    """
    known = [(rank, args, args.get("rank"), args.get("world_size")) for rank, args in ranks]
    if len({number for _, _, number, _ in known if type(number) is int}) < 2 and len(known) > 1:
        return

    tp, pp, cp, ep, etp = (degrees[dim] for dim in ("tp", "pp", "cp", "ep", "etp"))
    faults = []
    for rank, args, number, world in known:
        if type(number) is not int or type(world) is not int or not 0 <= number < world or world % (tp * pp * cp):
            continue
        mixed = bool(args.get("use_tp_pp_dp_mapping"))
        within = tp * cp if mixed else world // pp
        inside = MegatronRank(
            "", number % tp, number // within % pp, rank.ep if mixed else number % within // etp % ep, 0
        )
        if inside[1:4] != rank[1:4]:
            others = [other.path for other, _, theirs, _ in known if theirs == number and other is not rank]
            faults.append((rank, f"{_coordinates(inside, degrees)} (args.rank {number} of {world}{_as(others)})"))

    if faults:
        rank, what = faults[0]
        raise InconsistentCheckpoint(
            f"the folder's name says {_coordinates(rank, degrees)}, the file in it {what}",
            code=CONTRADICTION,
            path=tree.display(f"{rank.path}/{MODEL_FILE}"),
            faults=[f"{rank.path} holds {what}" for rank, what in faults[1:50]],
            hint="folders were renamed, or one was copied over another: fetch every rank's own",
        )


def _coordinates(rank: MegatronRank, degrees: Mapping[str, int]) -> str:
    expert = f", expert rank {rank.ep}" if degrees["ep"] > 1 else ""
    return f"tensor rank {rank.tp} of stage {rank.pp}{expert}"


def _as(folders: list[str]) -> str:
    """The folders that hold the same rank's file."""
    return f", as in {', '.join(folders[:4])}" if folders else ""
