"""Chooses tensors by state and by name pattern, and lists the removed ones for the report.

Patterns are shell globs on tensor names; `re:` starts a regular expression, which is searched in the name. Removing a
name also removes the optimizer, master and EMA states of that name, unless `model_only`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL, LogicalTensor, TensorKey
from ckpt_tool.errors import UsageError, near_misses

GROUPS = ("model", "master", "optimizer", "ema", "extras", "all")


def group_of(state: str) -> str:
    """The `--state` group of a state: every state of the optimizer (moments, step) is `optimizer`."""
    return state if state in (MODEL, MASTER, EMA, EXTRAS) else "optimizer"


def state_filter(requested: Sequence[str], present: Iterable[str], *, option: str = "--state") -> Callable[[str], bool]:
    """A function: does a state belong to those that `--state` requests?

    Args:
        requested: groups or exact states (`exp_avg`); () means all.
        present: the states of the checkpoint.
        option: the option that was given, for the error.

    Raises UsageError E0253 for a name that is neither a group nor a state of this checkpoint.
    """
    states = tuple(present)
    for name in requested:
        if name not in GROUPS and name not in states:
            raise UsageError(
                f"{option} {name}: no such state here",
                code="E0253",
                hint=near_misses(name, (*GROUPS, *states)) or f"this checkpoint holds {', '.join(states)}",
            )
    if not requested or "all" in requested:
        return lambda state: True
    wanted = frozenset(requested)
    return lambda state: state in wanted or group_of(state) in wanted


def left_by_word(requested: Sequence[str], dropped: Sequence[str] = ()) -> Callable[[str], bool]:
    """A function: is a state dropped at the user's request, because `--state` lists others or `--drop` names it?

    States that are dropped only because the format cannot store them do not count.
    """
    taken = frozenset(requested or ("all",))
    gone = frozenset(dropped)

    def left(state: str) -> bool:
        names = {state, group_of(state), "all"}
        return not names & taken or bool(names & gone)

    return left


def split_keys(
    keys: Iterable[TensorKey], *, remove: Sequence[str], keep: Sequence[str], model_only: bool = False
) -> tuple[list[TensorKey], list[TensorKey]]:
    """(kept, removed) in the given order.

    remove, keep: patterns; with `keep`, everything that matches none of them is removed. Raises UsageError E0255 for
    patterns that match nothing (one error for all, with near misses), E0256 if no weights would be left.
    """
    keys = list(keys)
    if not remove and not keep:
        return keys, []
    hits, misses, names = _matched(keys, remove, keep)
    if misses:
        from ckpt_tool.core.patterns import refuse_misses

        option = "--drop" if misses[0] in remove else "--state"
        refuse_misses(misses, names, _hint_states(misses[0], keys, option))
    gone = _gone(keys, hits, model_only=model_only)
    dropped = set(gone)
    kept = [key for key in keys if key not in dropped]
    weights = (MODEL,) if model_only else (MODEL, MASTER)  # a job may store most weights only as masters
    if not kept or (not any(key.state in weights for key in kept) and any(key.state == MODEL for key in keys)):
        raise UsageError(
            "the patterns would remove every tensor of the model",
            code="E0256",
            hint="narrow the pattern; ckpt inspect --match PATTERN shows what it matches",
        )
    return kept, gone


def _hint_states(pattern: str, keys: Iterable[TensorKey], option: str) -> str:
    """The hint for a pattern that names states (`optimizer`, `exp_avg*`) instead of tensors; "" for other patterns.

    option: the option for states that has the intended effect.
    """
    states = dict.fromkeys(key.state for key in keys)
    word = pattern.removeprefix("re:").strip("*.^$\\/").lower()
    meant = [state for state in states if state == word or fnmatchcase(state, pattern)]
    groups = {group_of(state) for state in states}
    if not meant and word.startswith("optim") and "optimizer" in groups:
        meant = ["optimizer"]
    if not meant:
        return ""

    kind, pronoun = ("is a state", "it") if len(meant) == 1 else ("are states", "them")
    effect = f"leaves {pronoun} out" if option == "--drop" else f"takes {pronoun} alone"
    return f"{' and '.join(meant)} {kind}, not a part of names: {option} {','.join(meant)} {effect}"


def removed_keys(
    keys: Sequence[TensorKey], *, remove: Sequence[str], keep: Sequence[str], model_only: bool = False
) -> list[TensorKey]:
    """The keys that the patterns remove."""
    return _gone(keys, _matched(keys, remove, keep)[0], model_only=model_only) if remove or keep else []


def _gone(keys: Iterable[TensorKey], names: Collection[str], *, model_only: bool) -> list[TensorKey]:
    return [key for key in keys if key.name in names and (not model_only or key.state == MODEL)]


def _matched(
    keys: Iterable[TensorKey], remove: Sequence[str], keep: Sequence[str]
) -> tuple[Collection[str], list[str], Sequence[str]]:
    """(names that the patterns remove, patterns that match nothing, all names)."""
    from ckpt_tool.core.patterns import Names

    known = Names(key.name for key in keys)
    removed, idle_removes = known.matched(remove)
    kept, idle_keeps = known.matched(keep)
    if keep:
        removed |= set(known.names) - kept
    return removed, [*idle_removes, *idle_keeps], known.names


def removed_rows(tensors: Iterable[LogicalTensor]) -> list[dict[str, object]]:
    """The report's rows for removed tensors: name, state, bytes."""
    return [{"name": t.key.name, "state": t.key.state, "bytes": t.nbytes} for t in tensors]
