"""Placing: which mesh dims cut which dims of every tensor, when all that is known is names, shapes and the source's
cut.

First hit wins: the rules of `--layout FILE`, the family's axes (once a family is known), the table of common names
below, the source's own cut, dim 0. The decision is taken once a parameter; its states inherit it, and the data dims
come on top for the states that ZeRO shards. Nothing here can lose a value: a wrong guess gives other boxes, recorded as
such.

The table holds the names under which transformers, torchtitan, Megatron and Meta keep column-parallel weights (cut
along dim 0: their outputs), row-parallel ones (dim 1: their inputs) and embeddings (dim 0: the vocabulary).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ckpt_tool.core.bounds import DIGITS, bounded, numeral
from ckpt_tool.core.fallback import Choice
from ckpt_tool.core.layout import Layout, Placement, place
from ckpt_tool.core.mesh import Mesh, divisors_near
from ckpt_tool.core.target import WantedTensor
from ckpt_tool.core.tensor import EMA, EXTRAS, MODEL
from ckpt_tool.errors import UsageError
from ckpt_tool.plan.balance import balanced
from ckpt_tool.weight_schemes.weights import Units

_COLUMN = re.compile(
    r"(?:^|\.)(?:q_proj|k_proj|v_proj|qkv_proj|query_key_value|gate_proj|up_proj|(?:gate_up|up_gate|gate_up_fused)_proj|w1|w3|wq|wk|wv|fc1|"
    r"linear_qkv|linear_fc1|q_b_proj|kv_b_proj|linear_q_up_proj|linear_kv_up_proj|dense_h_to_4h)\.(?:weight|bias)$"
)
_ROW = re.compile(r"(?:^|\.)(?:o_proj|down_proj|w2|wo|fc2|linear_proj|linear_fc2|dense_4h_to_h)\.weight$")
_VOCAB = re.compile(
    r"(?:^|\.)(?:embed_tokens|lm_head|tok_embeddings|word_embeddings|output_layer|wte|embed_out)\.weight$|^output\.weight$"
)
_WHOLE = re.compile(
    r"(?:norm|ln_\w+|ln|layernorm|router|gate|inv_freq|rotary_emb|position_embeddings)(?:\.\w+)*$|\.bias$"
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d{1,9})\.")
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d{1,9})\.")
_STACKED = re.compile(r"(?:^|\.)experts\.(?!\d)")
_FIRST = re.compile(r"(?:embed|wte|wpe|tok(?:ens|en|_|\.|$)|position)")
_GLOB = 4096  # characters
_WEIGHTS = (MODEL, EMA)

Shape = tuple[int, ...]
At = tuple[tuple[str, int], ...]  # (mesh dim, coordinate) where a tensor lives alone
Cuts = tuple[tuple[int, tuple[str, ...]], ...]  # (tensor dim, mesh dims that shall cut it, major first)


class PlacingRule(NamedTuple):
    """A line of a layout file: tensors whose name matches `match` (and state `state`) are cut along `shard`: tensor dim
    -> mesh dims; `at`: the mesh coordinates where they live alone."""

    match: str
    state: str = "*"
    shard: tuple[tuple[int, tuple[str, ...]], ...] = ()
    at: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked for."""

    mesh: Mesh
    zero: int = 0  # 0-3, how far DP shards the states
    policy: str = "largest-dim"  # for dims that do not divide
    uneven: bool = False  # do data ranks cut those as DTensor does, whatever the policy?
    rules: tuple[PlacingRule, ...] = ()
    cuts: Mapping[str, int] = field(default_factory=dict)  # name -> tensor dim that the source's ranks cut
    # layers of each stage, () for even stages, of about the same bytes where the layers do not divide
    pp_split: tuple[int, ...] = ()
    # matrices lie as (inputs, outputs), Paddle's way round, so that what cuts outputs cuts dim 1
    in_out: bool = False
    # tensors of quantised weights, which are cut between blocks
    together: Mapping[str, Units] = field(default_factory=dict)


def lay_out(tensors: Sequence[WantedTensor], wishes: Wishes) -> tuple[Layout, list[dict[str, Any]]]:
    """A placement for every tensor, and the fallbacks taken, one entry for each distinct case.

    Raises UsageError for degrees that the checkpoint can't take: more stages than layers, experts that don't divide.
    """
    if wishes.mesh.size == 1:
        return Layout(wishes.mesh, (Placement(),) * len(tensors), "one rank"), []
    states = _by_state(tensors)
    names = {name: _numbered(name) for name in dict.fromkeys(name for held in states.values() for name in held.names)}
    sizes = _bytes_by_name(tensors) if wishes.mesh["pp"] > 1 else {}
    split = _split(names, wishes, sizes)
    deciding = _Deciding(wishes, _stages(names, split), _experts(names, wishes.mesh), names)
    shapes = _shapes(states)
    placements: list[Placement] = [Placement()] * len(tensors)
    for state, held in states.items():
        for index, placement in zip(held.indexes, deciding.placements(state, held, shapes), strict=True):
            placements[index] = placement
    sources = [*deciding.sources, *filter(None, [shown_split(split)])]
    layout = Layout(wishes.mesh, tuple(placements), ", ".join(sources))
    return layout, _fallbacks(tensors, placements, wishes.mesh)


class _State(NamedTuple):
    """The tensors of one state as columns."""

    indexes: list[int]  # into the wanted tensors
    names: list[str]
    shapes: list[Shape]


def _by_state(tensors: Sequence[WantedTensor]) -> dict[str, _State]:
    indexes: dict[str, list[int]] = {}
    for index, item in enumerate(tensors):
        indexes.setdefault(item.key.state, []).append(index)
    return {
        state: _State(found, [tensors[i].key.name for i in found], [tensors[i].shape for i in found])
        for state, found in indexes.items()
    }


def _bytes_by_name(tensors: Sequence[WantedTensor]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for item in tensors:
        sizes[item.key.name] = sizes.get(item.key.name, 0) + item.nbytes
    return sizes


def _shapes(states: Mapping[str, _State]) -> dict[str, Shape]:
    """Name -> the parameter's shape: the model's, else that of its first state that is not a counter."""
    shapes: dict[str, Shape] = {}
    for state in sorted(states.keys() - {"step"}, key=lambda state: (state == MODEL, -states[state].indexes[0])):
        held = states[state]
        shapes |= zip(held.names, held.shapes, strict=True)
    return shapes


class _Name(NamedTuple):
    """What a name says of its place."""

    layer: int | None
    expert: int | None
    alike: str  # the name without those numbers: equal for what is cut alike


def _numbered(name: str) -> _Name:
    layer = _LAYER.search(name)
    expert = _EXPERT.search(name)
    if expert is None:
        return _Name(None, None, name) if layer is None else _Name(int(layer[1]), None, _without(name, layer.span(1)))
    if layer is None:
        return _Name(None, int(expert[1]), _without(name, expert.span(1)))
    first, last = sorted((layer.span(1), expert.span(1)))
    return _Name(int(layer[1]), int(expert[1]), _without(_without(name, last), first))


def _without(name: str, number: tuple[int, int]) -> str:
    return f"{name[: number[0]]}#{name[number[1] :]}"


class _Wish(NamedTuple):
    """How a tensor shall be cut."""

    cuts: Cuts = ()
    source: str = ""  # where that came from
    spread: tuple[str, ...] = ()  # mesh dims of data ranks, which cut unevenly


class _Deciding:
    """Placements, each distinct case decided once."""

    def __init__(
        self, wishes: Wishes, stages: Mapping[str, int], experts: Mapping[str, int], names: Mapping[str, _Name]
    ) -> None:
        self.wishes = wishes
        self.stages = stages
        self.experts = experts
        self.names = names
        self.sources: dict[str, None] = {}
        self._wishes: dict[tuple[Any, ...], _Wish] = {}
        self._placements: dict[tuple[Any, ...], Placement] = {}
        self._by_kind: dict[str, dict[str, Placement]] = {}

    def placements(self, state: str, held: _State, shapes: Mapping[str, Shape]) -> list[Placement]:
        """The placement of every tensor of the state."""
        known = self._by_kind.setdefault(self._kind(state), {})
        mine = dict(zip(held.names, held.shapes, strict=True))
        for name in [name for name in mine if name not in known] if known else mine:
            known[name] = self._placement(name, state, shapes.get(name, mine[name]))
        found = list(map(known.__getitem__, held.names))
        if mine.items() <= shapes.items():
            return found
        return [  # a scalar twin (`step`) lives with its parameter, whole
            placement if shapes.get(name, shape) == shape else self._decided(shape, _Wish(), placement.at)
            for name, shape, placement in zip(held.names, held.shapes, found, strict=True)
        ]

    def _kind(self, state: str) -> str:
        """What the wishes depend on of a state: weights, extras or other; with rules each is its own."""
        if self.wishes.rules or state == EXTRAS:
            return state
        return MODEL if state in _WEIGHTS or self.wishes.zero in (0, 3) else ""

    def _placement(self, name: str, state: str, shape: Shape) -> Placement:
        if name in self.wishes.together and state == MODEL:
            return self._joint(name, self.wishes.together[name])
        if self.wishes.rules:
            at, wish = _wish(name, state, shape, self.wishes, self.stages, self.experts)
        else:
            found = self.names[name]
            alike = (found.alike, found.expert is None, self._kind(state), len(shape), self.wishes.cuts.get(name))
            if alike not in self._wishes:
                self._wishes[alike] = _wish(name, state, shape, self.wishes, self.stages, self.experts)[1]
            at = _at(name, self.stages, self.experts)
            wish = self._wishes[alike]
        self.sources[wish.source] = None
        return self._decided(shape, wish, at)

    def _joint(self, name: str, units: Units) -> Placement:
        """Where codes or scales of a quantised weight lie: as the weight is cut, in whole blocks, shared where they
        serve all pieces. The policies that cut unevenly fall back as the default does."""
        lead = units.lead
        found = self.names[units.lead]
        by_rule = any(fnmatchcase(lead, rule.match) for rule in self.wishes.rules)
        alike = (found.alike, found.expert is None, units.whole, self.wishes.cuts.get(lead), lead if by_rule else "")
        if alike not in self._wishes or self.wishes.rules:
            known = lead if by_rule else units.made
            experts = {known: self.experts[lead]} if lead in self.experts else {}
            cuts = {known: self.wishes.cuts[lead]} if lead in self.wishes.cuts else {}
            stages = {known: self.stages[lead]} if lead in self.stages else {}
            wishes = replace(self.wishes, cuts=cuts)
            at, wish = _wish(known, MODEL, units.whole[:3], wishes, stages, experts)
            self._wishes[alike] = wish
        else:
            at = _at(lead, self.stages, self.experts)
        wish = self._wishes[alike]
        self.sources[wish.source] = None
        policy = "largest-dim" if self.wishes.policy in ("pad", "dtensor") else self.wishes.policy
        case = (units.whole, wish.cuts, at, "in blocks")
        if case not in self._placements:
            self._placements[case] = place(units.whole, wish.cuts, self.wishes.mesh, at=at, policy=policy)
        lead_placed = self._placements[case]
        if name == lead:
            return lead_placed
        shard = tuple((dim, names) for dim, names in lead_placed.shard if dim < len(units.mine) and units.mine[dim] > 1)
        return lead_placed._replace(shard=shard, choices=())

    def _decided(self, shape: Shape, wish: _Wish, at: At) -> Placement:
        case = (shape, wish.cuts, wish.spread, at)
        found = self._placements.get(case)
        if found is None:
            found = self._placements[case] = place(
                shape, wish.cuts, self.wishes.mesh, at=at, policy=self.wishes.policy, spread=wish.spread
            )
        return found


def _wish(
    name: str, state: str, shape: Sequence[int], wishes: Wishes, stages: Mapping[str, int], experts: Mapping[str, int]
) -> tuple[At, _Wish]:
    """(fixed coordinates, how it shall be cut) for one tensor."""
    mesh = wishes.mesh
    for rule in wishes.rules:
        if fnmatchcase(name, rule.match) and fnmatchcase(state, rule.state):
            return rule.at, _Wish(rule.shard, "the layout file")
    at = _at(name, stages, experts)
    expert = name in experts or _STACKED.search(name) is not None
    if state == EXTRAS:
        return at, _Wish(source="extras whole")
    cut: dict[int, list[str]] = {}
    data: list[str] = []
    source = "replicated"
    if (not expert and mesh["tp"] > 1) or (expert and mesh["tp"] > 1 and mesh["etp"] == 1):
        dim, source = _tensor_parallel_dim(name, shape, wishes)
        if dim is not None:
            cut.setdefault(dim, []).append("tp")
    if _STACKED.search(name) and len(shape) == 3 and mesh["ep"] > 1:
        cut.setdefault(0, []).insert(0, "ep")
    if wishes.zero >= (3 if state in _WEIGHTS else 1) and shape:
        data = ["dp"] if expert else ["ep", "dp"]
        cut.setdefault(0, []).extend(dim for dim in data if mesh[dim] > 1)
        source = source if cut.get(0) is None or source != "replicated" else "data shards along dim 0"
    cuts = tuple((dim, tuple(names)) for dim, names in sorted(cut.items()) if names)
    return at, _Wish(cuts, source, tuple(data) if wishes.uneven else ())


def _at(name: str, stages: Mapping[str, int], experts: Mapping[str, int]) -> At:
    at = (("pp", stages[name]),) if name in stages else ()
    return (*at, ("ep", experts[name])) if name in experts else at


def _tensor_parallel_dim(name: str, shape: Sequence[int], wishes: Wishes) -> tuple[int | None, str]:
    if not shape:
        return None, "scalars whole"
    inputs = 0 if wishes.in_out else 1
    if _VOCAB.search(name) or _COLUMN.search(name):
        outputs = 0 if len(shape) == 1 or _VOCAB.search(name) else 1 - inputs
        return outputs, "the table of common names"
    if _ROW.search(name) and len(shape) > 1:
        return inputs, "the table of common names"
    if _WHOLE.search(name):
        return None, "the table of common names"
    if name in wishes.cuts:
        return wishes.cuts[name], "the source's own cut"
    return (0, "dim 0") if len(shape) > 1 else (None, "vectors whole")


def _split(names: Mapping[str, _Name], wishes: Wishes, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Layers of each pipeline stage; () without pipeline ranks. sizes: name -> bytes."""
    stages = wishes.mesh["pp"]
    if stages == 1:
        return ()
    count = _layers(names)
    if wishes.pp_split:
        split = wishes.pp_split
        if len(split) != stages or sum(split) != count or min(split) < 1:
            raise UsageError(
                f"--pp-split {','.join(map(str, split))} does not split {count} layers into {stages} stages",
                code="E0218",
                hint="give one positive number a stage, their sum the number of layers",
            )
        return split
    if count % stages or not count:
        return _by_bytes(names, sizes, stages)
    return (count // stages,) * stages


def shown_split(split: Sequence[int]) -> str:
    """In words of the report, "" for even stages."""
    return f"stages of {','.join(map(str, split))} layers" if len(set(split)) > 1 else ""


def _stages(names: Mapping[str, _Name], split: Sequence[int]) -> dict[str, int]:
    """Name -> pipeline stage; empty without pipeline ranks."""
    if not split:
        return {}
    stages = len(split)
    owner = [stage for stage, layers_here in enumerate(split) for _ in range(layers_here)]
    return {
        name: owner[found.layer] if found.layer is not None else 0 if _FIRST.search(name) else stages - 1
        for name, found in names.items()
    }


def stages_by_bytes(sizes: Mapping[str, int], stages: int) -> tuple[int, ...]:
    """Layers of each pipeline stage, so that stages have about the same bytes. sizes: parameter -> bytes, its states
    with it. Embeddings count to the first layer, what else has no layer to the last. Raises UsageError E0217 for fewer
    layers than stages."""
    return _by_bytes({name: _numbered(name) for name in sizes}, sizes, stages)


def _by_bytes(names: Mapping[str, _Name], sizes: Mapping[str, int], stages: int) -> tuple[int, ...]:
    count = _layers(names)
    if count < stages:
        near = divisors_near(count, stages) if count else ()
        raise UsageError(
            f"{count} layers are fewer than {stages} pipeline stages",
            code="E0217",
            hint=f"--pp {count} at most; degrees that divide: {', '.join(map(str, near))}"
            if near
            else "the tensor names show no layers: leave --pp off, or give the layers of each stage with --pp-split",
        )
    layers = [0] * count
    for name, found in names.items():
        at = found.layer if found.layer is not None else 0 if _FIRST.search(name) else -1
        layers[at] += sizes[name]
    return balanced(layers, stages)


def _layers(names: Mapping[str, _Name]) -> int:
    layers = (found.layer for found in names.values() if found.layer is not None)
    return bounded(max(layers, default=-1) + 1, len(names), "layers by the tensors' names")


def _experts(names: Mapping[str, _Name], mesh: Mesh) -> dict[str, int]:
    """Name -> expert-parallel rank, for tensors of one expert each; empty without expert ranks."""
    ranks = mesh["ep"]
    if ranks == 1:
        return {}
    numbers = {name: found.expert for name, found in names.items() if found.expert is not None}
    count = bounded(max(numbers.values(), default=-1) + 1, len(names), "experts by the tensors' names")
    stacked = any(_STACKED.search(alike) for alike in {found.alike for found in names.values() if found.expert is None})
    if not count and stacked:
        return {}
    if not count or count % ranks:
        near = divisors_near(count, ranks)
        raise UsageError(
            f"{count} experts do not divide over {ranks} expert-parallel ranks",
            code="E0219",
            hint=f"degrees that divide: {', '.join(map(str, near))}" if near else "the checkpoint has no experts",
        )
    return {name: number * ranks // count for name, number in numbers.items()}


def _fallbacks(tensors: Sequence[WantedTensor], placements: Sequence[Placement], mesh: Mesh) -> list[dict[str, Any]]:
    """One entry a distinct (requested, used) case: how many tensors, an example, the extra bytes of its replicas."""
    sizes = dict(mesh.dims)
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}
    odd = {
        number
        for number, placement in dict(zip(map(id, placements), placements, strict=True)).items()
        if any(choice.reason != "even" for choice in placement.choices)
    }
    for item, placement in zip(tensors, placements, strict=True) if odd else ():
        for choice in placement.choices if id(placement) in odd else ():
            if choice.reason == "even":
                continue
            entry = cases.setdefault(
                (choice.requested, choice.used, choice.reason),
                {
                    "requested": list(choice.requested),
                    "used": list(choice.used),
                    "reason": choice.reason,
                    "tensors": 0,
                    "example": str(item.key),
                    "shape": list(item.shape),
                    "extra_bytes": 0,
                    "better": list(choice.better),
                },
            )
            entry["tensors"] += 1
            entry["extra_bytes"] += item.nbytes * (_lost_degree(choice, sizes) - 1)
    return list(cases.values())


def _lost_degree(choice: Choice, sizes: Mapping[str, int]) -> int:
    degree = 1
    for name in choice.requested:
        if name not in choice.used:
            degree *= sizes.get(name, 1)
    return degree


def rules_from(document: Mapping[str, Any], path: str) -> tuple[dict[str, int], tuple[PlacingRule, ...]]:
    """(degrees, rules) of a layout file: `[mesh] tp = 4`, `[[rule]] match = "*.w1.weight" shard = {0 = ["tp"]}`.

    Raises UsageError E0252 naming the entry that does not read.
    """
    known = {"mesh", "rule"}
    if set(document) - known:
        raise UsageError(
            f"unknown table {sorted(set(document) - known)[0]!r}",
            code="E0252",
            path=path,
            hint="a layout file has [mesh] and [[rule]] tables",
        )
    try:
        degrees = {str(name): _whole(size) for name, size in document.get("mesh", {}).items()}
        rules = tuple(
            PlacingRule(
                _glob(entry["match"]),
                _glob(entry.get("state", "*")),
                tuple(
                    (
                        _whole(int(dim) if numeral(dim) else dim),
                        (names,) if isinstance(names, str) else tuple(map(str, names)),
                    )
                    for dim, names in sorted(entry.get("shard", {}).items())
                ),
                tuple((str(name), _whole(index)) for name, index in entry.get("at", {}).items()),
            )
            for entry in document.get("rule", [])
        )
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        what = e if isinstance(e, ValueError) else f"{type(e).__name__} {e}"
        raise UsageError(
            f"the layout file does not read: {what}",
            code="E0252",
            path=path,
            hint='want [[rule]] entries such as: match = "*.w1.weight", shard = { 0 = ["tp"] }',
        ) from e
    return degrees, rules


def _glob(value: object) -> str:
    """A pattern of a layout file: of a length that takes no time to compile."""
    if isinstance(value, str) and len(value) <= _GLOB:
        return value
    raise ValueError(f"expected a pattern of at most {_GLOB} characters, got {str(value)[:80]!r}")


def _whole(value: object) -> int:
    """A number of a layout file. Raises ValueError for what is none, or has more digits than can be shown."""
    if type(value) is int and abs(value) < 10**DIGITS:
        return value
    shown = f"one of {value.bit_length()} bits" if isinstance(value, int) else repr(value)[:80]
    raise ValueError(f"expected a whole number, got {shown}")
