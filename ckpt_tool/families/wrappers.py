"""Wrapper prefixes: what a trainer's wrapper puts in front of every name of a model.

    module.model.layers.0.mlp.up_proj.weight     DistributedDataParallel, DeepSpeed
    model.model.layers.0.mlp.up_proj.weight      a LightningModule with `self.model`
    _orig_mod.model.layers.0...                  torch.compile

`find_wrapper` returns a known prefix if all names have it and the remaining names are completely a family's: a prefix
is never removed on suspicion. `describe_prefix` is for errors: it also finds unknown prefixes.

The words and their sources: `core.wrapper_words`. Cost: nothing where the names do not begin alike; else 2 us a kind
of name and dialect of the family, of all families where no config names one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ckpt_tool.core.wrapper_words import CERTAIN, DEEPEST, WRAPPERS, shared_wrappers
from ckpt_tool.families.table import instances, one_of_each

if TYPE_CHECKING:
    from ckpt_tool.families.base import Family

_OF_PEFT = ("base_model", "model")


def find_wrapper(names: Iterable[str], families: Iterable[Family]) -> str:
    """The prefix of wrappers that all names have, "" where there is none, or what is left without it is not completely
    one of the families' models.

    names: parameters, without the parts that wrappers leave inside names.
    """
    every = list(names)
    leading = shared_wrappers(every)
    if not leading:
        return ""

    kinds = one_of_each(every)
    candidates = list(families)
    if any(_knows_all(family, kinds) for family in candidates):
        return ""
    for depth in range(1, len(leading) + 1):
        prefix = ".".join(leading[:depth]) + "."
        bare = [name.removeprefix(prefix) for name in kinds]
        if any(_knows_all(family, bare) for family in candidates):
            return prefix
    return ""


def find_certain_wrapper(names: Sequence[str]) -> str:
    """The prefix of all names that only wrappers create, for a model of an unknown family.

    >>> find_certain_wrapper(["module.opt.w", "module.opt.b"]), find_certain_wrapper(["model.opt.w"])
    ('module.', '')
    """
    leading = shared_wrappers(names)
    count = 0
    while count < len(leading):
        if leading[count] in CERTAIN:
            count += 1
        elif tuple(leading[count : count + 2]) == _OF_PEFT:
            count += 2
        else:
            break
    return "".join(f"{word}." for word in leading[:count])


def describe_prefix(names: Collection[str], families: Iterable[Family]) -> str:
    """A phrase for errors if most names have one prefix and a family knows the rest of the names; "" otherwise."""
    kinds = one_of_each(names)
    most = 0
    prefix = ""
    family_names: list[str] = []
    candidates = list(families)
    for longer in _prefixes(kinds):
        having = [name for name in kinds if name.startswith(longer)]
        bare = [name.removeprefix(longer) for name in having]
        for family in candidates:
            known = _most_known(family, bare)
            if known == most and longer == prefix:
                family_names.append(family.name)
            elif 2 * known > len(having) and known > max(most, _most_known(family, having)):
                most = known
                prefix = longer
                family_names = [family.name]
    if not most:
        return ""

    family_name = family_names[0]
    if len(family_names) > 1:
        family_name += f" and of {len(family_names) - 1} more families, such as {family_names[1]}"
    having_all = sum(name.startswith(prefix) for name in names)
    if having_all == len(names):
        return f"all {len(names)} names begin with `{prefix}`, and without it they are names of {family_name}"
    others = next(name for name in names if not name.startswith(prefix))
    return (
        f"{having_all} of {len(names)} names begin with `{prefix}`, without which they are names of {family_name}; "
        f"others do not, such as {others}"
    )


def advise_on_prefix(prefix_text: str) -> str:
    """The options that help against what `describe_prefix` says."""
    if not prefix_text:
        return ""
    prefix = prefix_text.partition("`")[2].partition("`")[0]
    if prefix_text.startswith("all "):
        return f"--rename '{prefix}*=*' takes it off"
    if prefix.split(".")[0] in WRAPPERS:
        return f"--keep-keys '{prefix}*' takes these alone, and then the prefix is taken off"
    return f"--keep-keys '{prefix}*' takes these alone, --rename '{prefix}*=*' takes the prefix off"


def knows_most(family: Family, names: Collection[str]) -> bool:
    """Does a dialect of the family know more than half of the kinds of names?"""
    kinds = one_of_each(names)
    return 2 * _most_known(family, kinds) > len(kinds)


def _prefixes(names: Collection[str]) -> Iterator[str]:
    """Prefixes of whole words that more than half of the names have, the shortest first."""
    counts: dict[str, int] = {}
    for name in names:
        words = name.split(".")[:-1]
        for depth in range(1, min(len(words), DEEPEST) + 1):
            prefix = ".".join(words[:depth]) + "."
            counts[prefix] = counts.get(prefix, 0) + 1
    usual = [prefix for prefix, count in counts.items() if 2 * count > len(names)]
    yield from sorted(usual, key=len)


def _knows_all(family: Family, names: Collection[str]) -> bool:
    """Is every name one of a dialect of the family?"""
    for dialect in family.known_dialects:
        table = family.table(dialect)
        unknown = instances(table.left, names)[1]
        if len(unknown) < len(names) and not table.names_without_rule(unknown):
            return True
    return False


def _most_known(family: Family, names: Collection[str]) -> int:
    """How many of the names the dialect knows that knows the most."""
    tables = map(family.table, family.known_dialects)
    return max(len(names) - len(instances(table.left, names)[1]) for table in tables)
