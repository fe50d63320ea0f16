"""Low rank: the tables of a family's adapters, derived from those of its weights.

A LoRA's A has the inputs of the weight that it adapts, its B and DoRA's magnitudes have the outputs. So what a rule says
of the two dims of a weight says what becomes of its adapter, and a family has no line for it:

    linear_qkv.weight : (g (r + 1 + 1) d) h = <q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
      ->  linear_qkv.adapter.linear_in.weight  : rank h                  = q_proj.lora_A.weight : rank h      and k, v
          linear_qkv.adapter.linear_out.weight : (g (r + 1 + 1) d) rank  = <q|k|v>_proj.lora_B.weight : (g r d) rank, ...
          linear_qkv.adapter.weight_magnitude  : (g (r + 1 + 1) d)       = <q|k|v>_proj.lora_magnitude_vector : (g r d), ...

One A is that of all that is fused: read, each has it; written, they must be equal (`conversion.adapter_names`), and
dialect CANONICAL is the layout that has one for each (Megatron-Bridge's CanonicalLoRA: q, k, v, gate and up). Ranks are
settled by each tensor's own shape.

Names: PEFT 0.21.2 (`systems.hub.peft.format`); megatron-bridge 0.6.2 `peft/{utils,canonical_lora,dora_layers}.py`;
mcore-bridge 1.6.5 `tuners/lora.py` (SWIFT: PEFT's own names inside Megatron). Cost: as the family's own tables. What it
does not do: experts stacked in one tensor of the hub, biases, embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

from ckpt_tool.algebra.equation import Equation
from ckpt_tool.algebra.pattern import Pattern
from ckpt_tool.algebra.term import Term
from ckpt_tool.families.base import HUB, Family
from ckpt_tool.families.table import Table, table_of

MEGATRON = "megatron"
SWIFT = "megatron-swift"
CANONICAL = "megatron-canonical"
RANK = "rank"  # the axis
_WEIGHT = ".weight"


class Spelling(NamedTuple):
    """How a dialect calls the parts of the adapter of a module M: `prefix` M `a`, ..."""

    prefix: str
    a: str
    b: str
    magnitude: str


PEFT = Spelling("base_model.model.", ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector")
BRIDGE = Spelling("", ".adapter.linear_in.weight", ".adapter.linear_out.weight", ".adapter.weight_magnitude")
MS_SWIFT = Spelling("", ".lora_A.default.weight", ".lora_B.default.weight", ".lora_magnitude_vector.default.weight")
SPELLINGS: Mapping[str, Spelling] = {HUB: PEFT, MEGATRON: BRIDGE, CANONICAL: BRIDGE, SWIFT: MS_SWIFT}
# megatron-bridge 0.6.2 `models/conversion/peft_bridge.py` (ADAPTER_NAME_MAP)
APART: Mapping[str, str] = {f"{each}_proj": f"adapter_{each}" for each in ("q", "k", "v", "gate", "up")}
GROUPS = (("adapter_q", "adapter_k", "adapter_v"), ("adapter_gate", "adapter_up"))  # what one module keeps apart
_KEY = r"(?:\.(?P<key>adapter_(?:q|k|v|gate|up)))?"
_BRIDGE = re.compile(rf"(?P<module>.+)\.adapter{_KEY}\.(?P<part>linear_in\.weight|linear_out\.weight|weight_magnitude)")
_NAMED = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector)(?:\.(?!weight$)[^.]+)?(?:\.weight)?"
)
_PARTS = {"linear_in.weight": "a", "linear_out.weight": "b", "weight_magnitude": "magnitude", "lora_A": "a",
          "lora_B": "b", "lora_magnitude_vector": "magnitude"}  # fmt: skip


class LowRankPart(NamedTuple):
    """module: of the base. kind: `a`, `b` or `magnitude`. key: `adapter_q`, ... of a canonical LoRA, "" elsewhere."""

    module: str
    kind: str
    key: str = ""


def part_of(name: str) -> LowRankPart | None:
    """The part of an adapter that a tensor is, None for all other tensors.

    >>> part_of("decoder.layers.0.self_attention.linear_qkv.adapter.adapter_q.linear_in.weight")
    LowRankPart(module='decoder.layers.0.self_attention.linear_qkv', kind='a', key='adapter_q')
    >>> part_of("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight")
    LowRankPart(module='model.layers.0.self_attn.q_proj', kind='b', key='')
    """
    match = _BRIDGE.fullmatch(name)
    if match is not None:
        return LowRankPart(match["module"], _PARTS[match["part"]], match["key"] or "")
    match = _NAMED.fullmatch(name)
    return LowRankPart(match["module"].removeprefix(PEFT.prefix), _PARTS[match["part"]]) if match else None


def is_adapter(names: Iterable[str]) -> bool:
    """Are these the tensors of an adapter alone: pairs of A and B, and magnitudes?"""
    family_name = None
    for family_name in map(part_of, names):
        if family_name is None:  # a model's first tensor says so
            return False
    return family_name is not None


@dataclass(frozen=True, slots=True, eq=False)
class AdapterFamily(Family):
    """The rules for adapters of a family: for the same dialects, and for the additional dialect CANONICAL."""

    base: Family | None = None

    @property
    def known_dialects(self) -> tuple[str, ...]:
        """The dialects of adapters: the hub's, and Megatron's if the base family has one."""
        base_dialects = self.base.known_dialects if self.base is not None else ()
        return (HUB, MEGATRON, SWIFT, CANONICAL) if MEGATRON in base_dialects else (HUB,)

    def table(self, dialect: str) -> Table:
        """The dialect's rules of adapters. Raises UsageError as the family's own table."""
        return _derive_table(self.base, dialect) if self.base is not None else Family.table(self, dialect)


@lru_cache(maxsize=64)
def adapter_family(family: Family) -> AdapterFamily:
    """The family of the adapters of `family`."""
    values = {family_field.name: getattr(family, family_field.name) for family_field in fields(family)}
    values["own"] = (*family.own, RANK)
    return AdapterFamily(**values, base=family)


@lru_cache(maxsize=64)
def _derive_table(family: Family, dialect: str) -> Table:
    if dialect == HUB:
        return table_of("\n".join(_list_hub_rules(family)))
    spelling = SPELLINGS[dialect]
    source = family.table(SWIFT if dialect == SWIFT and SWIFT in family.dialects else MEGATRON)  # most have one layout
    unfused = [line for rule in source.rules for line in _canonical(rule)] if dialect in (MEGATRON, CANONICAL) else []
    fused = [line for rule in source.rules for line in _plain(rule, spelling)]
    return table_of("\n".join([*unfused, *fused] if dialect == CANONICAL else [*fused, *unfused]))


def _list_hub_rules(family: Family) -> Iterator[str]:
    """The rules for the hub's own names. Which dim of a weight is its inputs follows from Megatron's rule, whose weights
    are all (outputs, inputs): GPT-2's weights are transposed on the hub, but their adapters are not."""
    sides = [_sides(rule) for dialect in (MEGATRON, SWIFT) if dialect in family.dialects
             for rule in family.table(dialect).rules]  # fmt: skip
    dims_of = {_module(term): dims for side in sides if side is not None for term, dims in side[1]}
    for rule in family.table(HUB).rules:
        for term in rule.left:
            dims = _dims(term.pattern)
            if term.name is None or len(dims) != 2 or not term.name.text.endswith(_WEIGHT):
                continue
            outputs, inputs = dims_of.get(_module(term), (dims[0], dims[1]))
            for pattern, end in (
                (f"{RANK} {inputs}", PEFT.a),
                (f"{outputs} {RANK}", PEFT.b),
                (outputs, PEFT.magnitude),
            ):
                yield _line(term, pattern, end, PEFT, [(term, pattern, end)], rule)


def _plain(rule: Equation, own: Spelling) -> Iterator[str]:
    """The rules of A, B and magnitudes of the adapter of one rule's weight."""
    sides = _sides(rule)
    if sides is None:
        return
    (left_term, left_dims), right = sides
    yield from (_line(left_term, f"{RANK} {left_dims[1]}", own.a, own,
                      [(term, f"{RANK} {dims[1]}", PEFT.a)], rule) for term, dims in right)  # fmt: skip
    yield _line(left_term, f"{left_dims[0]} {RANK}", own.b, own,
                [(term, f"{dims[0]} {RANK}", PEFT.b) for term, dims in right], rule)  # fmt: skip
    yield _line(
        left_term, left_dims[0], own.magnitude, own, [(term, dims[0], PEFT.magnitude) for term, dims in right], rule
    )


def _canonical(rule: Equation) -> Iterator[str]:
    """The rules for separate adapters of the projections that are fused in one rule's weight."""
    sides = _sides(rule)
    if sides is None or len(sides[1]) < 2 or ".experts." in _module(sides[0][0]):
        return
    (left_term, _), right = sides
    keys = [APART.get(_module(term).rpartition(".")[2]) for term, _ in right]
    if None in keys or len(set(keys)) != len(keys):
        return
    for key, (term, dims) in zip(keys, right, strict=True):
        yield _line(left_term, f"{RANK} {dims[1]}", f".adapter.{key}.linear_in.weight", BRIDGE,
                    [(term, f"{RANK} {dims[1]}", PEFT.a)], rule)  # fmt: skip
        yield _line(left_term, f"{dims[0]} {RANK}", f".adapter.{key}.linear_out.weight", BRIDGE,
                    [(term, f"{dims[0]} {RANK}", PEFT.b)], rule)  # fmt: skip


Dims = tuple[str, str]  # (outputs, inputs)


def _sides(rule: Equation) -> tuple[tuple[Term, Dims], list[tuple[Term, Dims]]] | None:
    """(the dialect's weight, the hub's) with their dims, None for a rule that is none of linear weights."""
    if len(rule.left) != 1 or rule.left[0].maps or any(term.maps for term in rule.right):
        return None
    (left_term,) = rule.left
    dims = _dims(left_term.pattern)
    if left_term.name is None or len(dims) != 2 or not left_term.name.text.endswith(_WEIGHT):
        return None
    inputs = _axes(dims[1])
    right = list[tuple[Term, Dims]]()
    if any(term.name is None or {*term.name.axes} != {*left_term.name.axes} for term in rule.right):
        return None
    for term in rule.right:
        left_dims = _dims(term.pattern)
        if term.name is None or len(left_dims) != 2 or not term.name.text.endswith(_WEIGHT):
            return None
        input_dim = next((k for k in (1, 0) if _axes(left_dims[k]) == inputs), None)
        if input_dim is None:
            return None
        right.append((term, (left_dims[1 - input_dim], left_dims[input_dim])))
    if len({term.name.text for term, _ in right if term.name}) != len(right):
        return None
    return (left_term, (dims[0], dims[1])), right


def _module(term: Term) -> str:
    return term.name.text.removesuffix(_WEIGHT) if term.name is not None else ""


def _line(
    left: Term, pattern: str, ending: str, own: Spelling, right: list[tuple[Term, str, str]], rule: Equation
) -> str:
    target = " ; ".join(f"{PEFT.prefix}{_module(term)}{end} : {dims}" for term, dims, end in right)
    condition = f" if {rule.condition.text}" if rule.condition is not None else ""
    return f"{own.prefix}{_module(left)}{ending} : {pattern} = {target}{condition}"


def _dims(pattern: Pattern) -> list[str]:
    """The dims of a pattern, as they are written."""
    groups: list[list[str]] = []
    depth = 0
    for word in re.findall(r"[()]|[^()\s]+", pattern.text):
        if depth == 0:
            groups.append([])
        depth += (word == "(") - (word == ")")
        groups[-1].append(word)
    return [" ".join(dim) for dim in groups]


def _axes(dim: str) -> frozenset[str]:
    return frozenset(re.findall(r"[A-Za-z_]\w*", dim))
