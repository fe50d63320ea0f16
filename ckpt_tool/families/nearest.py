"""Nearest: which family a checkpoint of no family is most like, and what sets it apart.

    nearest(FAMILIES, shapes, config, "qwen3_plus")
      -> Near(QWEN3, "hf", kinds=14, known=13, strange=("model.layers.0.mlp.scale [64]",), lacking=(), unfit=())

The family whose rules know the most kinds of the names, with shapes that fit; of those alike the one that knows more
with other shapes, then the one that leaves fewer rules without a tensor, then the one whose model type is written most
like the unknown one. A kind is a name but for its numbers. Cost: it parses every table, 1 ms each, so it is for errors.
What it does not do: choose a family. Only people know whether a model with the same tensors computes the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpt_tool.algebra.equation import Equation
from ckpt_tool.algebra.expression import Expression
from ckpt_tool.algebra.term import Name
from ckpt_tool.errors import UsageError
from ckpt_tool.families.base import HUB, Config, Family, Shape
from ckpt_tool.families.rewrite import Unfitting, unfitting
from ckpt_tool.families.table import form_of

_EXAMPLES = 3  # of a list in a message
_BY_CHANCE = 0.6  # of how alike two words are; `difflib.get_close_matches` has the same


class Near(NamedTuple):
    """How near a family is."""

    family: Family
    dialect: str
    kinds: int  # of names in the checkpoint
    known: int  # those that the rules know, with shapes that fit
    strange: tuple[str, ...] = ()  # names that no rule knows, one of each kind
    lacking: tuple[str, ...] = ()  # names of rules that find no tensor
    unfit: tuple[str, ...] = ()  # shapes that do not fit
    also: tuple[str, ...] = ()  # other families of which all of this holds in like measure

    @property
    def close(self) -> bool:
        """Is it worth a try? Most of the kinds are known."""
        return 2 * self.known > self.kinds

    @property
    def headline(self) -> str:
        """`the nearest, qwen3, knows 13 of 14 kinds of tensors`."""
        share = "all" if self.known == self.kinds else f"{'' if self.close else 'only '}{self.known} of"
        return f"the nearest, {self.family.name}, knows {share} {_many(self.kinds, 'kind')} of tensors"

    @property
    def differences(self) -> list[str]:
        """What sets the checkpoint apart from the family, a line a sort of difference."""
        name = self.family.name
        lines = (
            (f"{_many(len(self.strange), 'kind')} of tensors in no rule of {name}", self.strange),
            (f"{_many(len(self.lacking), 'name')} of {name} without a tensor (optional ones count)", self.lacking),
            (f"{_many(len(self.unfit), 'shape')} unlike those of {name}", self.unfit),
        )
        return [f"{head}: {_some(names)}" for head, names in lines if names]

    @property
    def advice(self) -> str:
        """How to use the family anyway; "" where its rules do not fit."""
        if not self.close or self.unfit:
            return ""
        name = self.family.name
        also = f" (or {', '.join(self.also)}, as near)" if self.also else ""
        converts = "--lenient converts what its rules know and keeps the rest" if self.strange else "converts it"
        return f"if it computes like {name}{also}, --family {name} {converts}"


def nearest(
    families: Iterable[Family],
    names: Mapping[str, Shape] | Sequence[str],
    config: Config,
    kind: str = "",
    stated: str | None = None,
) -> Near | None:
    """The family that is most like the checkpoint, None where none knows a name.

    Args:
        names: {parameter: shape}, or the names alone.
        kind: the model type that no family has.
        stated: what the format says of the dialect: `paddle` is also any `paddle-...`.
    """
    shapes = names if isinstance(names, Mapping) else {}
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(form_of(name)[0], name)
    candidates = []
    for family in families:
        for dialect in family.known_dialects:
            if stated in (None, dialect) or dialect.startswith(f"{stated}-"):
                near = _near(family, dialect, kinds, shapes, config)
                if near.known:
                    candidates.append(near)
    if not candidates:
        return None
    best = max((near.known, -len(near.strange)) for near in candidates)
    candidates = [_lacking(near, kinds, config) for near in candidates if (near.known, -len(near.strange)) == best]
    fewest = min(len(near.lacking) for near in candidates)
    candidates = [near for near in candidates if len(near.lacking) == fewest]
    candidates.sort(key=lambda near: _rank(near, kind))  # stable: in order of names
    also = dict.fromkeys(near.family.name for near in candidates if near.family is not candidates[0].family)
    return candidates[0]._replace(also=tuple(also)[:_EXAMPLES])


def _rank(near: Near, kind: str) -> tuple[float, bool, bool, int]:
    """Of families that are as near the first is called alike, reads the hub's names, keeps norms as they are, and is
    that of most models."""
    return -_alike(near.family, kind), near.dialect != HUB, near.family.centred, -len(near.family.classes)


def _near(family: Family, dialect: str, kinds: Mapping[str, str], shapes: Mapping[str, Shape], config: Config) -> Near:
    """All but what the family has and the checkpoint lacks."""
    table = family.table(dialect)
    unknown = (name for form, name in kinds.items() if form not in table.left and table.in_tower(name) is None)
    strange = tuple(_append_shape(name, shapes) for name in unknown)
    first_shapes = {name: shapes[name] for name in kinds.values() if name in shapes}
    try:
        unfit = tuple(
            _unfit(unfit_tensor) for unfit_tensor in unfitting(family, dialect, first_shapes, family.facts(config))
        )
    except UsageError:  # a config in which the family's words mean something else
        unfit = ()
    return Near(family, dialect, len(kinds), len(kinds) - len(strange) - len(unfit), strange, (), unfit)


def _lacking(near: Near, kinds: Mapping[str, str], config: Config) -> Near:
    """`near` with the names of rules that find no tensor: not biases and layers of multi-token prediction where the
    checkpoint has none at all, what no model computes with, second spellings of what is there, a head that is the
    embedding."""
    table = near.family.table(near.dialect)
    config = near.family.facts(config)
    biased = any(form.endswith("bias") for form in kinds)
    ahead = any("mtp" in form.split(".") for form in kinds)
    rules = [(rule.condition, *term) for rule in table.rules for term in _terms(rule)]
    present = {form for _, name, hub in rules if name.form in kinds for form in hub}
    present |= {alias.name.form for alias in near.family.table(HUB).aliases if alias.of.form in present}
    absent_names = {
        name.text: None
        for condition, name, hub in rules
        if not hub <= present and (condition is None or _holds(condition, config))
        if (biased or not name.form.endswith("bias")) and (ahead or "mtp" not in name.form.split("."))
    }
    return near._replace(lacking=tuple(absent_names))


def _terms(rule: Equation) -> Iterator[tuple[Name, set[str]]]:
    """Each name of the left with the forms of the hub's that it holds: the one in its place where both sides have as
    many."""
    left = [term.name for term in rule.left]
    right = [term.name for term in rule.right]
    for number, name in enumerate(left):
        hub_names = [right[number]] if len(left) == len(right) else right
        if name is not None:
            yield name, {hub_name.form for hub_name in hub_names if hub_name is not None}


def _holds(condition: Expression, config: Config) -> bool:
    """Does the condition hold by the config? True if it depends on more, such as the layer."""
    try:
        return bool(condition.value(config))
    except UsageError:
        return True


def _alike(family: Family, kind: str) -> float:
    """How alike the model types are written, 0 to 1; 0 for what any two words have in common."""
    from difflib import SequenceMatcher

    most = max(SequenceMatcher(None, kind, known).ratio() for known in (family.name, *family.model_types))
    return most if most > _BY_CHANCE else 0


def _unfit(found: Unfitting) -> str:
    wanted = ", ".join("?" if size is None else str(size) for size in found.wanted)
    return f"{found.name} {list(found.shape)}, where `{found.pattern}` is [{wanted}]"


def _append_shape(name: str, shapes: Mapping[str, Shape]) -> str:
    return f"{name} {list(shapes[name])}" if name in shapes else name


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _some(found: Sequence[str]) -> str:
    return "; ".join(found[:_EXAMPLES]) + (f"; {len(found) - _EXAMPLES} more" if len(found) > _EXAMPLES else "")
