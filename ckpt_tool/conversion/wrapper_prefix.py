"""Removes from names what a trainer's wrappers put into them, before a family's rules are applied.

    module.model.layers.0.mlp.up_proj.weight             DDP           -> model.layers.0.mlp.up_proj.weight
    model._orig_mod.model.layers.0.mlp.up_proj.weight    Lightning     -> the same
    student.model.layers.0.mlp.up_proj.weight            unknown       -> as it is

A prefix is removed if all names have it and the remaining names are completely the family's (`families.wrappers`);
parts that only wrappers create (`_orig_mod.`, ...) are removed wherever they are. All states of a parameter follow it,
and so do the optimizer's groups. A format that keeps names (a job's own) keeps the prefix too, because the job resumes
under the names that it saved; the report gives the option that removes it. Cost: one look at each name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_tool.conversion.optimizer_groups import renamed_groups
from ckpt_tool.core.tensor import EXTRAS, LogicalTensor, TensorKey
from ckpt_tool.core.wrapper_words import clean, shared_wrappers
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.state_dict.roots import Roots
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.options.reading import Reading
from ckpt_tool.plan.moves import Stored
from ckpt_tool.sources.chosen import Chosen, Conversion
from ckpt_tool.sources.config import config_of

if TYPE_CHECKING:
    from ckpt_tool.families.base import Family

_TWICE = "E2910"


def unwrapped(chosen: Chosen, job: Conversion) -> Chosen:
    """The pass: `chosen` under names without wrappers' parts. Raises UsageError E2910 where two tensors would have one
    name then."""
    if job.writing.dialect == "keep" or job.writing.aoa:
        return chosen
    parameters = dict.fromkeys(row.tensor.key.name for row in chosen.stored if row.tensor.key.state != EXTRAS)
    cleaned = {name: clean(name) for name in parameters}

    prefix = find_prefix([*cleaned.values()], chosen, job.reading) if _begin_alike(cleaned.values()) else ""
    if prefix and job.dialect == "keep":
        # A job goes on with the names that it saved, so a format of jobs keeps them.
        chosen = chosen.noted(f"names keep their wrapper's prefix `{prefix}`: --dialect hf takes it off")
        prefix = ""

    names = {name: inner.removeprefix(prefix) for name, inner in cleaned.items()}
    changed = {name: bare for name, bare in names.items() if name != bare}
    _refuse_one_name(names)
    if changed:
        example = next(iter(changed))
        what = f"the wrapper's prefix `{prefix}` was taken off" if prefix else "parts of wrappers were taken out of"
        chosen = _renamed(chosen, names).noted(f"{what} {len(changed)} names, such as {example}")
    return _without_wrapped_paths(chosen)


def find_prefix(names: Sequence[str], chosen: Chosen, reading: Reading) -> str:
    """The wrappers' prefix that all names have, "" where there is none that can be taken off."""
    from ckpt_tool.families.registry import configured_family, names_a_model
    from ckpt_tool.families.wrappers import find_certain_wrapper, find_wrapper

    if not shared_wrappers(names):
        return ""
    config = chosen.config
    if config is None:
        config = config_of(chosen.sources[0], reading).config
    prefix = find_wrapper(names, _families(config, reading))
    if (
        not prefix
        and reading.family is None
        and names_a_model(config or {})
        and configured_family(config or {}) is None
    ):
        return find_certain_wrapper(names)
    return prefix


def _families(config: Mapping[str, Any] | None, reading: Reading) -> Iterable[Family]:
    """The family that the user or the config names, else all of them."""
    from ckpt_tool.families.models import FAMILIES
    from ckpt_tool.families.registry import by_name, configured_family

    if reading.family is not None:
        return [by_name(reading.family.partition(":")[0])]
    family = configured_family(config or {})
    return FAMILIES if family is None else [family]


def _begin_alike(names: Iterable[str]) -> bool:
    """Do all names begin with one word? A quick look that spares the families."""
    first = {name.partition(".")[0] for name in names}
    return len(first) == 1


def _refuse_one_name(names: Mapping[str, str]) -> None:
    seen: dict[str, str] = {}
    for name, bare in names.items():
        other = seen.setdefault(bare, name)
        if other != name:
            raise UsageError(
                f"without wrappers' parts {other} and {name} are both {bare}",
                code=_TWICE,
                key=name,
                hint="leave one out with --remove-keys, or keep the names with --dialect keep",
            )


def _renamed(chosen: Chosen, names: Mapping[str, str]) -> Chosen:
    """`chosen` under other names, one for each; the optimizer's groups and what is known of its numbers too."""
    moved = {name: (bare,) for name, bare in names.items()}
    earlier: dict[str, tuple[str, ...]] = {}
    for old, made in chosen.names.items():
        earlier[old] = tuple(names.get(name, name) for name in made)
    hints = chosen.all_hints
    roots = hints.get(Roots)
    if roots is not None and roots.ids:
        ids = {}
        for path, known in roots.ids.items():
            ids[path] = {number: names.get(name, name) for number, name in known.items()}
        hints = hints.having(replace(roots, ids=ids))
    numbered = {name for known in roots.ids.values() for name in known.values()} if roots is not None else set()

    return replace(
        chosen,
        stored=tuple(_renamed_row(row, names, numbered) for row in chosen.stored),
        extras=renamed_groups(chosen.extras, moved),
        names={**earlier, **moved},
        casts={TensorKey(names.get(key.name, key.name), key.state): dtype for key, dtype in chosen.casts.items()},
        renewed=frozenset(TensorKey(names.get(key.name, key.name), key.state) for key in chosen.renewed),
        hints=hints,
    )


def _renamed_row(row: Stored, names: Mapping[str, str], numbered: set[str]) -> Stored:
    key = row.tensor.key
    if key.state == EXTRAS:
        return row
    # An optimizer that numbers its parameters keeps its numbers: their names are in its roots.
    keeps_path = key.name in numbered and key.name not in dotted(row.tensor.path)
    return row._replace(
        tensor=row.tensor._replace(key=key._replace(name=names[key.name]), path=row.tensor.path if keeps_path else ())
    )


def _without_wrapped_paths(chosen: Chosen) -> Chosen:
    """`chosen`, whose tensors go back to paths that have no wrappers' parts either."""
    stored = tuple(row._replace(tensor=_at_clean_path(row.tensor)) for row in chosen.stored)
    if all(new.tensor is old.tensor for new, old in zip(stored, chosen.stored, strict=True)):
        return chosen
    same = {row.tensor.key.name: (row.tensor.key.name,) for row in stored if row.tensor.key.state != EXTRAS}
    return replace(chosen, stored=stored, extras=renamed_groups(chosen.extras, same))


def _at_clean_path(tensor: LogicalTensor) -> LogicalTensor:
    if tensor.key.state == EXTRAS or not any("_" in str(step) for step in tensor.path):
        return tensor
    path = tuple(clean(step) if isinstance(step, str) else step for step in tensor.path)
    return tensor if path == tensor.path else tensor._replace(path=path)
