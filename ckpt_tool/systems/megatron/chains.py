"""Which optimizer of a chain updates which parameter, and which parameters a layer-wise optimizer assigns to a data
rank.

The one idea: the files of an optimizer hold no names, but two rules assign the parameters, and the files hold enough to
check the rules against (the groups' hyperparameters, the number of parameters of each group, every shape).

* Muon and Lion leave the embedding, the output layer and everything that is not a matrix to another optimizer: a chain
  of two, one for the model's matrices and one for the rest. The rest's is the one that has a group without weight decay
  (norms). Parallel experts have an optimizer of their own in the chain, or groups of their own in one of its
  optimizers.
* The layer-wise optimizer assigns the parameters of the WHOLE chain to data ranks before any of them has a state:
  sorted by size (a stable sort of chain, group, parameter), to the ranks in ascending and descending order by turns;
  parallel experts' parameters are assigned separately.

      10 parameters of growing size, 4 ranks: p0-p3 to ranks 0 1 2 3, p4-p7 to ranks 3 2 1 0, p8 p9 to ranks 0 1

Files `layer_wise_optimizer_<data rank>.pt` next to `model_optim_rng.pt` hold the states of the rank's parameters, which
are numbered from 0 in each file.

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

SHARE = re.compile(r"layer_wise_optimizer_(\d{1,6})\.pt")  # the file of a data rank's share of the optimizer
Members = list[list["RankArray"]]  # the parameters of each group of an optimizer


def is_layer_wise(args: Mapping[str, Any]) -> bool:
    """Return whether the job distributed optimizer states by parameter, so that no rank's model file has all of
    them."""
    return args.get("optimizer") == "dist_muon" or bool(args.get("use_layer_wise_distributed_optimizer"))


class RankShare(NamedTuple):
    """The optimizer file of one data rank, and the rank's place among those that share parameters."""

    file: str
    # dense, experts: (its number, how many there are) among the ranks that share dense parameters, parallel experts
    dense: tuple[int, int]
    experts: tuple[int, int]


def share_files(tree: Tree, folders: Iterable[str]) -> list[str]:
    """Return the files of data ranks in these folders, by folder and rank."""
    own = frozenset(folders)
    found = ((path, SHARE.fullmatch(path.rpartition("/")[2])) for path in tree.listing())
    named = [(path.rpartition("/")[0], int(name[1]), path) for path, name in found if name]
    return [path for folder, _, path in sorted(named) if folder in own]


def is_share(path: str) -> bool:
    """Return whether the path is one of a data rank's optimizer file."""
    return SHARE.fullmatch(path.rpartition("/")[2]) is not None


def shares_beside(
    path: str, where: MegatronRank, degrees: Mapping[str, int], files: Container[str], tree: Tree
) -> Iterator[RankShare]:
    """Yield the data ranks' optimizer files in the folder of a model-parallel rank.

    Args:
        path: the folder.
        where: the model-parallel rank.
        degrees: of the job.
        files: the files that exist.
        tree: the checkpoint, for the messages.

    Raises:
        Incomplete: E0302 naming every file that is missing, E2002 if ranks overwrote each other's files.
    """
    tp, ep, etp, dp, cp = (degrees[dim] for dim in ("tp", "ep", "etp", "dp", "cp"))
    if cp > 1:  # files are numbered without the context-parallel rank, so ranks of one group write the same file
        raise Incomplete(
            f"{cp} context-parallel ranks were dealt shares of the optimizer and wrote them over each other",
            code="E2002",
            path=tree.display(path),
            hint="shares are lost: save as torch_dist from the running job, or take the model with --state model",
        )

    # Data rank -> rank inside the stage. With parallel experts a folder has only the data ranks of its expert rank.
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
    """Return the position of the optimizer that updates dense matrices, None unless two optimizers are for dense
    parameters."""
    dense = [at for at, one in enumerate(chain) if groups_of(one) and not all(map(is_expert_group, groups_of(one)))]
    if len(dense) != 2:
        return None

    # Weight decay is for matrices: the optimizer whose groups all decay is theirs.
    first_decays, second_decays = (_always_decays(chain[at], facts) for at in dense)
    return dense[1] if second_decays and not first_decays else dense[0]


def _always_decays(optimizer: Any, facts: MegatronFacts) -> bool:
    return all(key_of_group(group, facts).decay for group in groups_of(optimizer))


def held_by(optimizer: Any, at: int | None, facts: MegatronFacts) -> Callable[[str, Sequence[int]], bool]:
    """Return a test whether optimizer number `at` of a stored chain updates a parameter, given its name and shape.

    The test does not distinguish experts' optimizers from the dense ones; it accepts everything if the chain does not
    split matrices from the rest.
    """
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
    """Mark the groups of Adam in a chain with Muon as Adam's, and return whether any lacked the mark.

    Core 0.19 looks a group up by that word too (`core/optimizer/optimizer.py`, `param_group_identifier_keys`). 0.18 and
    newer write it; 0.16 and 0.17 don't, because Adam is the only optimizer that they combine with Muon.
    """
    # Muon's groups have `momentum`, Adam's have `betas`.
    if not any("momentum" in group and "betas" not in group for groups in chain for group in groups):
        return False
    silent = [group for groups in chain for group in groups if "betas" in group and ADAM.keys().isdisjoint(group)]
    for group in silent:
        group.update(ADAM)
    return bool(silent)


def chain_members(chain: Sequence[Any], params: Sequence[RankArray], facts: MegatronFacts) -> list[Members] | None:
    """Return the parameters of each group of each optimizer, in the order of their numbers; None if the rules don't
    produce such groups."""
    every = [groups_of(one) for one in chain]
    parallel = any(is_expert_group(group) for groups in every for group in groups)
    first = matrices_at(chain, facts)
    # `alone`: all groups of the optimizer are experts'. Experts have one or two optimizers of their own, or groups next
    # to the dense ones; other chains are not understood.
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
    """Do the same as `members_of` for an optimizer that may have groups of dense and groups of expert parameters."""
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
    """Return the parameters of a chain that the layer-wise optimizer assigns to one data rank.

    Args:
        every: the parameters of each group of each optimizer.
        chain: the stored optimizers.
        dense: (the rank's number, number of ranks) among the ranks that share dense parameters.
        experts: the same among those that share parallel experts.
    """
    shares: list[Members] = []
    for members in every:
        shares.append([[] for _ in members])

    places: list[tuple[list[RankArray], bool, RankArray]] = []  # where an array goes, is it an expert's, the array
    for group_shares, members, optimizer in zip(shares, every, chain, strict=True):
        for share, arrays, group in zip(group_shares, members, groups_of(optimizer), strict=True):
            places += [(share, is_expert_group(group), array) for array in arrays]

    # By size, to ranks 0, 1, ..., n - 1, n - 1, ..., 0 and so on; experts' parameters are assigned separately.
    counts = {False: 0, True: 0}
    for share, is_expert, array in sorted(places, key=lambda place: place[2].numel):
        rank, ranks = experts if is_expert else dense
        turn = counts[is_expert] % (2 * ranks)
        counts[is_expert] += 1
        owner = turn if turn < ranks else 2 * ranks - 1 - turn
        if owner == rank:
            share.append(array)
    return shares
