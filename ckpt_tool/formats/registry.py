"""Finds a format by its name, or detects which format a tree has.

Formats are imported on first use (`formats.entry`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ckpt_tool.errors import CkptError, UnknownFormat, UsageError, near_misses
from ckpt_tool.formats.base import Evidence, Format
from ckpt_tool.formats.entry import entries, load
from ckpt_tool.formats.lookalikes import LOOKALIKES, looks_like, part_of
from ckpt_tool.storage.source import Tree

NAMES = tuple(entries())
FOLDERS = 40  # how many folders `components` looks into at most


def by_name(name: str) -> Format:
    """The format called `name`. Raises UsageError E0251 with near misses."""
    if name not in NAMES:
        raise UsageError(
            f"this build has no format {name!r}",
            code="E0251",
            hint=near_misses(name, NAMES) or f"the formats are {', '.join(NAMES)}",
        )
    return load(name)


def of_dialect(dialect: str) -> Format:
    """The first format whose own tensor names are those of the dialect."""
    return next(fmt for fmt in map(by_name, NAMES) if fmt.holds.dialect == dialect)


def may_be(name: str, tree: Tree) -> bool:
    """Could the tree have the format `name`? False means that its `detect` would return None, so it need not run."""
    return entries()[name].may_be(tree)


class Claim(NamedTuple):
    """A format's claim on a tree."""

    name: str
    evidence: Evidence


def claims(tree: Tree) -> list[Claim]:
    """Every format's claim, in the order of the entries."""
    possible = [name for name in NAMES if may_be(name, tree)]
    evidence_of = ((name, by_name(name).detect(tree)) for name in possible)
    return [Claim(name, evidence) for name, evidence in evidence_of if evidence]


def settle(found: Sequence[Claim]) -> list[Claim]:
    """The claims that remain after conflicts are resolved. If two remain, the tree holds two checkpoints, or one that
    could have either format.

    A claim is discarded if a more specific one covers all of its files. Of the remaining claims with the same loader,
    only those with the lowest turn are kept, because the loader takes that form and ignores the others (`Evidence`).
    """
    standing: list[Claim] = []
    for claim in found:
        if not any(_covers(other.evidence, claim.evidence) for other in found):
            standing.append(claim)

    first_turns: dict[str, int] = {}  # by loader
    for claim in standing:
        loader = claim.evidence.loader
        first_turns[loader] = min(claim.evidence.turn, first_turns.get(loader, claim.evidence.turn))
    return [
        claim
        for claim in standing
        if not claim.evidence.loader or claim.evidence.turn == first_turns[claim.evidence.loader]
    ]


def _covers(other: Evidence, one: Evidence) -> bool:
    """Is `other` more specific than `one`, and does it account for all of its files?"""
    return other.specificity > one.specificity and one.files <= other.files


def detect(tree: Tree) -> tuple[Format, Evidence]:
    """The one format that claims the tree, and its evidence.

    Raises UnknownFormat: E0390 for none, E0391 for several, E1640 for a folder that is recognised but not supported.
    """
    whole = part_of(tree.single) if tree.single is not None else None
    if tree.single is not None and whole:
        raise UnknownFormat(
            f"{whole}, which is read with those next to it",
            code="E0390",
            path=tree.display(tree.single),
            hint="pass the folder that holds it; --from torch opens the file alone",
        )

    # Lookalikes make claims too, so that a folder that could be read only in part is refused by name.
    unread = {kind.name: kind for kind in LOOKALIKES} if tree.single is None else {}
    unread_evidence = ((name, kind.find(tree)) for name, kind in unread.items())
    known = [Claim(name, evidence) for name, evidence in unread_evidence if evidence]
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
    """The folders directly below the root that a format claims, of the first `FOLDERS`. Cost: a listing per folder."""
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
    """The error (E0391) for several claims that remain. shown: the folder, as displayed to the user."""
    choices = " or ".join(f"--from {claim.name}" for claim in found if claim.name in NAMES)
    return UnknownFormat(
        f"{'two' if len(found) == 2 else len(found)} formats claim it: {' and '.join(claim.name for claim in found)}",
        code="E0391",
        path=shown,
        hint=f"say which with {choices}" if choices else "neither is read as a whole: pass a part of it",
        faults=[f"{claim.name}: {claim.evidence.why}" for claim in found],
    )
