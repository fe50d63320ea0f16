"""Which optimizer of a chain steps which parameter, and which of them a data rank of a layer-wise one does.

The one idea: nothing of an optimizer's file is named, but two rules share the parameters out, and the file says enough
to hold them against it (the groups' hyperparameters, how many parameters each has, every shape).

* Muon and Lion leave embedding, output layer and all that is no matrix to another optimizer: a chain of two, each for
  the model's matrices or for the rest. The rest's is the one with a group without weight decay (norms). Experts, where
  they are parallel, have an optimizer of their own in the chain, or groups of their own in it.
* The layer-wise optimizer deals the parameters of ALL its chain out to data ranks before any of them has a state:
  sorted by size (a stable sort of chain, group, parameter), dealt to and fro; parallel experts' by themselves.

      10 parameters of growing size, 4 ranks: p0-p3 to ranks 0 1 2 3, p4-p7 to ranks 3 2 1 0, p8 p9 to ranks 0 1

Files `layer_wise_optimizer_<data rank>.pt` beside `model_optim_rng.pt` hold what the rank was dealt, numbered anew.

Sources (NVIDIA/Megatron-LM): core 0.16.1 `core/optimizer/muon.py` (`get_megatron_muon_optimizer`),
`layer_wise_optimizer.py` (`shard_params`), core 0.18.0 `core/optimizer/__init__.py`
(`_get_megatron_emerging_optimizer`), `layer_wise_optimizer.py` (`_shard_params_ping_pong`; with a layout of its
buffers, the default since 0.18, it writes no such file), `training/checkpointing.py` (`mpu.get_data_parallel_rank()`:
ranks of one context-parallel group write the same file). Cost: some us a parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_tool.core.missing import report_missing
from ckpt_tool.errors import Incomplete
from ckpt_tool.systems.megatron.groups import chained, groups_of, is_expert_group, is_matrix, key_of_group, members_of

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree
    from ckpt_tool.systems.megatron.args import MegatronFacts
    from ckpt_tool.systems.megatron.job import MegatronRank, RankArray

SHARE = re.compile(r"layer_wise_optimizer_(\d{1,6})\.pt")
Members = list[list["RankArray"]]  # of each group of an optimizer


def is_layer_wise(args: Mapping[str, Any]) -> bool:
    """Did the job share optimizer states out by parameter, so that no rank's model file has all of them?"""
    return args.get("optimizer") == "dist_muon" or bool(args.get("use_layer_wise_distributed_optimizer"))


class RankShare(NamedTuple):
    """A data rank's file."""

    file: str
    # dense, experts: (its number, how many there are) among the ranks that share dense parameters, parallel experts
    dense: tuple[int, int]
    experts: tuple[int, int]


def share_files(tree: Tree, folders: Iterable[str]) -> list[str]:
    """The files of data ranks in these folders, in order."""
    own = frozenset(folders)
    found = ((path, SHARE.fullmatch(path.rpartition("/")[2])) for path in tree.listing())
    named = [(path.rpartition("/")[0], int(name[1]), path) for path, name in found if name]
    return [path for folder, _, path in sorted(named) if folder in own]


def is_share(path: str) -> bool:
    return SHARE.fullmatch(path.rpartition("/")[2]) is not None


def shares_beside(
    path: str, where: MegatronRank, degrees: Mapping[str, int], files: Container[str], tree: Tree
) -> Iterator[RankShare]:
    """The shares in a rank's folder. files: those that there are.

    Raises Incomplete E0302 naming every file that is missing, E2002 for ranks that wrote over each other's.
    """
    tp, ep, etp, dp, cp = (degrees[dim] for dim in ("tp", "ep", "etp", "dp", "cp"))
    if cp > 1:
        raise Incomplete(
            f"{cp} context-parallel ranks were dealt shares of the optimizer and wrote them over each other",
            code="E2002",
            path=tree.display(path),
            hint="shares are lost: save as torch_dist from the running job, or take the model with --state model",
        )

    ranks = {d: where.tp + tp * d for d in range(dp)}
    own = {d: rank for d, rank in ranks.items() if ep == 1 or rank // etp % ep == where.ep}
    share_files = {d: f"{path}/layer_wise_optimizer_{d}.pt" for d in own}
    missing = [name for name in share_files.values() if name not in files]
    if missing:
        fault = Incomplete(
            f"{len(missing)} shares of the layer-wise optimizer are missing: {missing[0]}",
            code="E0302",
            path=tree.display(missing[0]),
            faults=missing[1:50],
            hint="copy them from where the job wrote them (each data rank writes its own; the optimizer in "
            "model_optim_rng.pt is one of them alone), or take the model with --state model",
        )
        report_missing(fault, files=missing)

    grid = etp * ep
    for d, rank in own.items():
        if share_files[d] not in missing:
            yield RankShare(share_files[d], (d, dp), (rank // grid, max(1, tp * dp // grid)))


def matrices_at(chain: Sequence[Any], facts: MegatronFacts) -> int | None:
    """Which of a chain's two optimizers for dense parameters steps the matrices; None where there are not two."""
    dense = [at for at, one in enumerate(chain) if groups_of(one) and not all(map(is_expert_group, groups_of(one)))]
    if len(dense) != 2:
        return None

    # Weight decay is for matrices: the optimizer whose groups all decay is theirs.
    first_decays, second_decays = (_always_decays(chain[at], facts) for at in dense)
    return dense[1] if second_decays and not first_decays else dense[0]


def _always_decays(optimizer: Any, facts: MegatronFacts) -> bool:
    return all(key_of_group(group, facts).decay for group in groups_of(optimizer))


def held_by(optimizer: Any, at: int | None, facts: MegatronFacts) -> Callable[[str, Sequence[int]], bool]:
    """Whether number `at` of a stored chain steps a parameter (its name, its shape); experts' optimizers are not told
    from the dense ones."""
    first = matrices_at(chained(optimizer), facts)
    if first is None or at is None:
        return lambda name, shape: True
    return lambda name, shape: is_matrix(name, shape) == (at == first)


ADAM = {"optimizer": "adam"}  # in the groups of a chain's Adam
SAYS_ADAM = (
    "the groups of Adam next to Muon say `optimizer: adam`, by which Megatron-core 0.19 and newer find them; those of "
    "0.16 and 0.17 don't"
)


def say_adam(chain: Sequence[Sequence[dict[str, Any]]]) -> bool:
    """Put into the groups of each optimizer of a chain with Muon what tells that it is Adam, where they lack it: core
    0.19 finds a group by that word too (`core/optimizer/optimizer.py`, `param_group_identifier_keys`), which 0.18 and
    newer write, and 0.16 and 0.17, whose Muon has Adam alone beside it, don't. True where any lacked it."""
    if not any("momentum" in group and "betas" not in group for groups in chain for group in groups):
        return False
    silent = [group for groups in chain for group in groups if "betas" in group and ADAM.keys().isdisjoint(group)]
    for group in silent:
        group.update(ADAM)
    return bool(silent)


def chain_members(chain: Sequence[Any], params: Sequence[RankArray], facts: MegatronFacts) -> list[Members] | None:
    """The parameters of each group of each optimizer, in the order of their numbers; None where the groups are of a
    kind that the rules don't make."""
    every = [groups_of(one) for one in chain]
    parallel = any(is_expert_group(group) for groups in every for group in groups)
    first = matrices_at(chain, facts)
    alone = [bool(groups) and all(map(is_expert_group, groups)) for groups in every]
    if not all(every) or sum(not one for one in alone) > 2 or sum(alone) > 2:
        return None
    seconds = sum(alone) == 2  # the experts' matrices, then the rest of theirs
    out = list[Members]()
    met = 0
    for at, groups in enumerate(every):
        own = [array for array in params if not parallel or array.expert == alone[at] or _has_mixed_groups(groups)]
        if alone[at]:
            met += 1
            own = [array for array in own if not seconds or is_matrix(array.local, array.shape) == (met == 1)]
            own = own if seconds or first is None else [a for a in own if is_matrix(a.local, a.shape)]
        elif first is not None:
            own = [array for array in own if is_matrix(array.local, array.shape) == (at == first)]
        members = _split_by_kind(groups, own, facts)
        if members is None:
            return None
        out.append(members)
    return out


def _has_mixed_groups(groups: Sequence[Mapping[str, Any]]) -> bool:
    return len({is_expert_group(group) for group in groups}) > 1


def _split_by_kind(
    groups: Sequence[Mapping[str, Any]], own: Sequence[RankArray], facts: MegatronFacts
) -> Members | None:
    """As `members_of`, where dense and expert parameters have groups in one optimizer."""
    if not _has_mixed_groups(groups):
        return members_of(groups, own, facts)
    out: Members = [[] for _ in groups]
    for experts in (False, True):
        at = [i for i, group in enumerate(groups) if is_expert_group(group) == experts]
        found = members_of([groups[i] for i in at], [array for array in own if array.expert == experts], facts)
        if found is None:
            return None
        for i, members in zip(at, found, strict=True):
            out[i] = members
    return out


def dealt(
    every: Sequence[Members], chain: Sequence[Any], dense: tuple[int, int], experts: tuple[int, int]
) -> list[Members]:
    """What of a chain's parameters one data rank was dealt. dense, experts: (its number, how many ranks there are)
    among those that share dense parameters, parallel experts."""
    shares: list[Members] = []
    for members in every:
        shares.append([[] for _ in members])

    places: list[tuple[list[RankArray], bool, RankArray]] = []  # where an array goes, is it an expert's, the array
    for group_shares, members, optimizer in zip(shares, every, chain, strict=True):
        for share, arrays, group in zip(group_shares, members, groups_of(optimizer), strict=True):
            places += [(share, is_expert_group(group), array) for array in arrays]

    # By size, to ranks 0, 1, ..., n - 1, n - 1, ..., 0 and so on; experts' parameters are dealt by themselves.
    counts = {False: 0, True: 0}
    for share, is_expert, array in sorted(places, key=lambda place: place[2].numel):
        rank, ranks = experts if is_expert else dense
        turn = counts[is_expert] % (2 * ranks)
        counts[is_expert] += 1
        owner = turn if turn < ranks else 2 * ranks - 1 - turn
        if owner == rank:
            share.append(array)
    return shares
