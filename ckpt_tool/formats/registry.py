"""Every format, by name. Modules are imported when first asked for.

To add a format: write `formats/NAME/format.py` with a `FORMAT`, add one row here, put fixtures under `fixtures/NAME/`;
the conformance suite does the rest. A row's second half is optional: a quick look at the names which is False only
where the format's own `detect` must say None; it spares the import (20 ms for those that read pickles).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ckpt_tool.errors import CkptError, UnknownFormat, UsageError, near_misses
from ckpt_tool.formats.base import Evidence, Format
from ckpt_tool.formats.lookalikes import LOOKALIKES, looks_like
from ckpt_tool.storage.source import Tree


def _safetensors() -> Format:
    from ckpt_tool.formats.hf.format import FORMAT

    return FORMAT


def _torch() -> Format:
    from ckpt_tool.formats.torch.format import FORMAT

    return FORMAT


def _dcp() -> Format:
    from ckpt_tool.formats.dcp.format import FORMAT

    return FORMAT


def _sharded() -> Format:
    from ckpt_tool.formats.sharded.format import FORMAT

    return FORMAT


def _megatron() -> Format:
    from ckpt_tool.formats.megatron.format import FORMAT

    return FORMAT


def _megatron_dist() -> Format:
    from ckpt_tool.formats.megatron_dist.format import FORMAT

    return FORMAT


def _deepspeed_universal() -> Format:
    from ckpt_tool.formats.deepspeed_universal.format import FORMAT

    return FORMAT


def _deepspeed() -> Format:
    from ckpt_tool.formats.deepspeed.format import FORMAT

    return FORMAT


def _paddle_unified() -> Format:
    from ckpt_tool.formats.paddle_unified.format import FORMAT

    return FORMAT


def _paddle() -> Format:
    from ckpt_tool.formats.paddle.format import FORMAT

    return FORMAT


def _paddle_flex() -> Format:
    from ckpt_tool.formats.paddle_flex.format import FORMAT

    return FORMAT


def _meta() -> Format:
    from ckpt_tool.formats.meta.format import FORMAT

    return FORMAT


def _peft() -> Format:
    from ckpt_tool.formats.peft.format import FORMAT

    return FORMAT


def _may_be_torch(tree: Tree) -> bool:
    names = tree.names()
    if tree.single is not None or not any(name.endswith(".safetensors") for name in names):
        return True
    return any("pytorch_model" in name or "_rank_" in name or name.endswith(".bin.index.json") for name in names)


def _may_be_dcp(tree: Tree) -> bool:
    return tree.single is None and any(".metadata" in path or path.endswith(".distcp") for path in tree.listing())


def _may_be_megatron(tree: Tree) -> bool:
    return tree.single is None and any("mp_rank_" in path for path in tree.listing())


def _may_be_megatron_dist(tree: Tree) -> bool:
    return _may_be_dcp(tree) or tree.single is None and "metadata.json" in tree.names()


def _may_be_universal(tree: Tree) -> bool:
    return tree.single is None and any(path.startswith("zero/") for path in tree.listing())


def _may_be_sharded(tree: Tree) -> bool:
    names = tree.names()
    return "ckpt.index.json" in names or any(n.endswith(".safetensors") and n.count(".") > 1 for n in names)


def _may_be_deepspeed(tree: Tree) -> bool:
    return tree.single is None and any(name.endswith("_states.pt") for name in tree.names())


def _may_be_paddle_unified(tree: Tree) -> bool:
    return tree.single is None and any(".safetensors" in name for name in tree.names())


def _may_be_paddle(tree: Tree) -> bool:
    return any(name.endswith((".pdparams", ".pdopt", ".pd", ".pdema")) for name in tree.names())


def _may_be_paddle_flex(tree: Tree) -> bool:
    ends = (".metadata", ".lock", ".distcp", ".safetensors")
    return tree.single is None and any(path.endswith(ends) for path in tree.listing())


def _may_be_meta(tree: Tree) -> bool:
    return tree.single is None and any(name.startswith("consolidated") for name in tree.names())


def _may_be_peft(tree: Tree) -> bool:
    return tree.single is None and "adapter_config.json" in tree.names()


def _may_be(tree: Tree) -> bool:
    return True


_ROWS: dict[str, tuple[Callable[[], Format], Callable[[Tree], bool]]] = {
    "safetensors": (_safetensors, _may_be),
    "torch": (_torch, _may_be_torch),
    "dcp": (_dcp, _may_be_dcp),
    "sharded": (_sharded, _may_be_sharded),
    "megatron": (_megatron, _may_be_megatron),
    "megatron-dist": (_megatron_dist, _may_be_megatron_dist),
    "deepspeed-universal": (_deepspeed_universal, _may_be_universal),
    "deepspeed": (_deepspeed, _may_be_deepspeed),
    "paddle": (_paddle, _may_be_paddle),
    "paddle-unified": (_paddle_unified, _may_be_paddle_unified),
    "paddle-flex": (_paddle_flex, _may_be_paddle_flex),
    "meta": (_meta, _may_be_meta),
    "peft": (_peft, _may_be_peft),
}
NAMES = tuple(_ROWS)
FOLDERS = 40  # that `components` looks into


def by_name(name: str) -> Format:
    """The format called `name`. Raises UsageError E0251 with near misses."""
    row = _ROWS.get(name)
    if row is None:
        raise UsageError(
            f"this build has no format {name!r}",
            code="E0251",
            hint=near_misses(name, NAMES) or f"the formats are {', '.join(NAMES)}",
        )
    return row[0]()


def of_dialect(dialect: str) -> Format:
    """The first format where these names are at home."""
    return next(fmt for fmt in map(by_name, NAMES) if fmt.holds.dialect == dialect)


def may_be(name: str, tree: Tree) -> bool:
    """False where format `name` need not be asked: its `detect` says None."""
    return _ROWS[name][1](tree)


class Claim(NamedTuple):
    """A format's claim on a tree."""

    name: str
    evidence: Evidence


def claims(tree: Tree) -> list[Claim]:
    """Every format's claim, in the order of the registry."""
    asked = ((name, by_name(name)) for name in NAMES if may_be(name, tree))
    return [Claim(name, evidence) for name, fmt in asked if (evidence := fmt.detect(tree))]


def settle(found: Sequence[Claim]) -> list[Claim]:
    """The claims that stand; two of them are two checkpoints, or one that could be either.

    A claim falls to a more specific one that accounts for every file of it; of what is left, to one of an earlier turn
    where the same software loads both and takes one of them.
    """
    left = [one for one in found if not any(_covers(other.evidence, one.evidence) for other in found)]
    turns = [(claim.evidence.loader, claim.evidence.turn) for claim in left]
    first = {loader: min(turn for other, turn in turns if other == loader) for loader, _ in turns}
    return [claim for claim, (loader, turn) in zip(left, turns, strict=True) if not loader or turn == first[loader]]


def _covers(other: Evidence, one: Evidence) -> bool:
    return other.specificity > one.specificity and one.files <= other.files


def detect(tree: Tree) -> tuple[Format, Evidence]:
    """The one format that claims the tree.

    Raises UnknownFormat: E0390 for none, E0391 for several, E1640 for what is known and not read.
    """
    unread = {kind.name: kind for kind in LOOKALIKES} if tree.single is None else {}
    known = [Claim(name, evidence) for name, kind in unread.items() if (evidence := kind.find(tree))]
    found = settle([*claims(tree), *known])
    if not found:
        what, advice = looks_like(tree, components(tree))
        raise UnknownFormat(
            f"no known checkpoint: {what}",
            code="E0390",
            path=tree.display(),
            hint=advice or f"this build reads {', '.join(NAMES)}; if it is one of them, say which with --from",
        )
    if len(found) > 1:
        raise several(found, tree.display())
    if found[0].name in unread:
        raise UnknownFormat(
            f"{found[0].name}, which this build does not read as a whole ({found[0].evidence.why})",
            code="E1640",
            path=tree.display(),
            hint=unread[found[0].name].hint(tree, components(tree)),
        )
    return by_name(found[0].name), found[0].evidence


def components(tree: Tree) -> list[str]:
    """The folders directly below that a format claims, of the first `FOLDERS`. Lists each."""
    folders = (
        list(dict.fromkeys(path.split("/")[0] for path in tree.listing() if "/" in path)) if tree.single is None else []
    )
    found = []
    for folder in folders[:FOLDERS]:
        try:
            if claims(tree.below(folder)):
                found.append(folder)
        except CkptError:  # a link, or a folder that may not be read
            continue
    return found


def several(found: Sequence[Claim], shown: str) -> UnknownFormat:
    """The error (E0391) for several claims that stand. shown: the folder."""
    choices = " or ".join(f"--from {claim.name}" for claim in found if claim.name in NAMES)
    return UnknownFormat(
        f"{'two' if len(found) == 2 else len(found)} formats claim it: {' and '.join(claim.name for claim in found)}",
        code="E0391",
        path=shown,
        hint=f"say which with {choices}" if choices else "neither is read as a whole: pass a part of it",
        faults=[f"{claim.name}: {claim.evidence.why}" for claim in found],
    )
