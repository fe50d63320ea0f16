"""`--rename`: the chosen tensors, every state of them, under the names that the rules give.

The rules see the names that `ckpt inspect` shows, after --keep-keys and --remove-keys. Families are matched afterwards,
so a model that was renamed to names they know is recognised. The optimizer's groups in the extras follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckpt_tool.conversion.optimizer_groups import renamed_groups, renamed_records
from ckpt_tool.core.patterns import near_names
from ckpt_tool.core.renaming import Renamed, read_rule, rename
from ckpt_tool.core.tensor import LogicalTensor, TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.sources.chosen import Chosen, Conversion
from ckpt_tool.sources.opening import Opened

MATCHES_NOTHING = "E2970"
ONE_NAME = "E2971"
NO_NAME = "E2972"


def rename_tensors(chosen: Chosen, job: Conversion) -> Chosen:
    """`chosen` under the names that `--rename` gives.

    Raises UsageError E2970 for rules that match nothing (not for one of several sources, whose names are checked
    together), E2971 where two tensors would have one name, E2972 for an empty name.
    """
    if not job.writing.rename:
        return chosen

    keys = [row.tensor.key for row in chosen.stored]
    renamed = apply_rules(job.writing.rename, keys)
    if not job.of_several:
        refuse_unmatched(renamed, keys)

    new_keys = renamed_keys(keys, renamed)
    stored = []
    changed: set[TensorKey] = set()
    for row, key in zip(chosen.stored, new_keys, strict=True):
        if key == row.tensor.key:
            stored.append(row)
        else:
            stored.append(row._replace(tensor=with_key(row.tensor, key)))
            changed.add(key)

    names = {old: (new,) for old, new in renamed.names.items()}
    return replace(
        chosen,
        stored=tuple(stored),
        extras=renamed_groups(renamed_records(chosen.extras, names), names),
        renewed=chosen.renewed | changed,
        names=names,
    ).noted(*_notes(renamed))


def apply_rules(rules: Sequence[str], keys: Iterable[TensorKey]) -> Renamed:
    """What the rules make of the names of some tensors."""
    return rename((key.name for key in keys), [read_rule(rule) for rule in rules])


def with_key(tensor: LogicalTensor, key: TensorKey) -> LogicalTensor:
    """The tensor under another key, without its path, so that its place in a nested file follows from the new name."""
    return tensor._replace(key=key, path=())


def renamed_keys(keys: Sequence[TensorKey], renamed: Renamed) -> list[TensorKey]:
    """The new key of each. Raises UsageError E2971, E2972, all faults at once."""
    empty = [old for old, new in renamed.names.items() if not new]
    if empty:
        raise UsageError(
            f"--rename leaves nothing of the name {empty[0]}",
            code=NO_NAME,
            key=empty[0],
            faults=empty[1:],
            hint="a new name has at least one character",
        )

    owners: dict[TensorKey, TensorKey] = {}
    clashes: list[tuple[TensorKey, TensorKey, TensorKey]] = []
    new_keys = []
    for key in keys:
        new_key = TensorKey(renamed.names.get(key.name, key.name), key.state)
        owner = owners.setdefault(new_key, key)
        if owner is not key:
            clashes.append((new_key, owner, key))
        new_keys.append(new_key)

    if clashes:
        lines = [f"{first} and {second} would both be called {new}" for new, first, second in clashes]
        raise UsageError(
            f"--rename: {lines[0]}",
            code=ONE_NAME,
            key=clashes[0][2].name,
            faults=lines[1:],
            hint="narrow the rule, or leave one of the two out with --remove-keys",
        )
    return new_keys


def refuse_unmatched(renamed: Renamed, keys: Iterable[TensorKey]) -> None:
    """Raise UsageError E2970 for rules that match no name, all at once, with near misses."""
    if not renamed.unmatched:
        return
    names = list(dict.fromkeys(key.name for key in keys))
    first, *others = renamed.unmatched
    raise UsageError(
        f"--rename: the rule {first!r} matches no tensor",
        code=MATCHES_NOTHING,
        faults=[f"the rule {rule!r} matches no tensor" for rule in others],
        hint=_hint_stars(first, names)
        or near_names(read_rule(first).pattern, names)
        or f"the checkpoint has {len(names)} names, such as {', '.join(names[:3])}",
    )


def _hint_stars(rule: str, names: Iterable[str]) -> str:
    """The rule with `*` around both sides, for one that gives a part of a name (`mlp=ffn`): a rule is for whole
    names. Empty where that would match nothing either, and for rules that have a wildcard already."""
    pattern = read_rule(rule).pattern
    example = next((name for name in names if pattern in name), None)
    if example is None or pattern.startswith("re:") or "*" in pattern or rule.count("=") != 1:
        return ""
    new = rule.partition("=")[2]
    if "*" in new:
        return ""

    before = "" if all(not name.find(pattern) for name in names if pattern in name) else "*"
    starred = f"{before}{pattern}*={before}{new}*"
    return f"a rule is compared with whole names, such as {example}: --rename '{starred}' changes a part of them"


def refuse_unmatched_in_all(rules: Sequence[str], sources: Iterable[Opened]) -> None:
    """Raise UsageError E2970 for rules that match a name in none of several sources."""
    if rules:
        keys = [key for source in sources for key in source.catalog.tensors]
        refuse_unmatched(apply_rules(rules, keys), keys)


def _notes(renamed: Renamed) -> list[str]:
    changed: Mapping[str, str] = {old: new for old, new in renamed.names.items() if old != new}
    notes = []
    if changed:
        old, new = next(iter(changed.items()))
        notes.append(f"--rename: {len(changed)} names changed, such as {old} -> {new}")
    notes += [
        f"--rename: the rule {rule!r} has no effect: earlier rules rename all that it matches"
        for rule in renamed.shadowed
    ]
    return notes
