"""Placing: which mesh dims cut which dims of every tensor, when all that is known is names, shapes and the source's
cut.

The first of these that has an answer wins: the rules of `--layout FILE`, the family's axes (once a family is known),
the table of common names below, the source's own cut, dim 0. The decision is made once for each parameter; its states
inherit it, and the data dims come on top for the states that ZeRO shards. Nothing in this module can lose a value: a
wrong guess gives other boxes, recorded as such.

The table holds the names under which transformers, torchtitan, Megatron and Meta keep column-parallel weights (cut
along dim 0: their outputs), row-parallel ones (dim 1: their inputs) and embeddings (dim 0: the vocabulary).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ckpt_tool.core.bounds import DIGITS, check_count, numeral
from ckpt_tool.core.fallback import Choice
from ckpt_tool.core.layout import Layout, Placement, place
from ckpt_tool.core.mesh import Mesh, divisors_near
from ckpt_tool.core.target import WantedTensor
from ckpt_tool.core.tensor import EMA, EXTRAS, MODEL
from ckpt_tool.errors import UsageError
from ckpt_tool.weight_schemes.quantised_weights import Units

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
At = tuple[tuple[str, int], ...]  # (mesh dim, coordinate) of the only ranks that hold a tensor
Cuts = tuple[tuple[int, tuple[str, ...]], ...]  # (tensor dim, mesh dims that shall cut it, major first)


class PlacingRule(NamedTuple):
    """A rule of a layout file: which tensors it is for, and how they are cut."""

    match: str  # pattern of tensor names
    state: str = "*"  # pattern of states
    shard: tuple[tuple[int, tuple[str, ...]], ...] = ()  # tensor dim -> mesh dims
    at: tuple[tuple[str, int], ...] = ()  # the mesh coordinates of the only ranks that hold them


@dataclass(frozen=True, slots=True)
class Wishes:
    """How the user wants tensors to be distributed."""

    mesh: Mesh
    zero: int = 0  # 0-3, how far DP shards the states
    policy: str = "largest-dim"  # for dims that do not divide
    uneven: bool = False  # do data ranks cut such dims as DTensor does, regardless of the policy?
    rules: tuple[PlacingRule, ...] = ()
    cuts: Mapping[str, int] = field(default_factory=dict)  # name -> tensor dim that the source's ranks cut
    # layers of each stage; () for as many layers in each, or about the same bytes if the layers do not divide
    pp_split: tuple[int, ...] = ()
    # are matrices stored as (inputs, outputs), as in Paddle? A cut along outputs then cuts dim 1
    in_out: bool = False
    # tensors of quantised weights, which are cut between blocks
    together: Mapping[str, Units] = field(default_factory=dict)


def lay_out(tensors: Sequence[WantedTensor], wishes: Wishes) -> tuple[Layout, list[dict[str, Any]]]:
    """A placement for every tensor, and the fallbacks, one entry for each distinct case.

    Raises UsageError for degrees that don't fit the checkpoint: more stages than layers, experts that don't divide.
    """
    if wishes.mesh.size == 1:
        return Layout(wishes.mesh, (Placement(),) * len(tensors), "one rank"), []

    states = _group_by_state(tensors)
    all_names = dict.fromkeys(name for columns in states.values() for name in columns.names)
    names = {name: _parse_name(name) for name in all_names}

    sizes = _sum_bytes_by_name(tensors) if wishes.mesh["pp"] > 1 else {}
    split = _split_layers(names, wishes, sizes)
    placer = _Placer(wishes, _assign_stages(names, split), _assign_experts(names, wishes.mesh), names)

    shapes = _find_shapes(states)
    placements: list[Placement] = [Placement()] * len(tensors)
    for state, columns in states.items():
        for index, placement in zip(columns.indexes, placer.place_state(state, columns, shapes), strict=True):
            placements[index] = placement

    sources = [*placer.sources, *filter(None, [describe_split(split)])]
    layout = Layout(wishes.mesh, tuple(placements), ", ".join(sources))
    return layout, _list_fallbacks(tensors, placements, wishes.mesh)


class _State(NamedTuple):
    """The tensors of one state as columns."""

    indexes: list[int]  # into the wanted tensors
    names: list[str]
    shapes: list[Shape]


def _group_by_state(tensors: Sequence[WantedTensor]) -> dict[str, _State]:
    """The tensors of each state, in their order."""
    indexes: dict[str, list[int]] = {}
    for index, item in enumerate(tensors):
        indexes.setdefault(item.key.state, []).append(index)
    return {
        state: _State(members, [tensors[i].key.name for i in members], [tensors[i].shape for i in members])
        for state, members in indexes.items()
    }


def _sum_bytes_by_name(tensors: Sequence[WantedTensor]) -> dict[str, int]:
    """Bytes of each parameter with all its states, by which pipeline stages are balanced."""
    sizes: dict[str, int] = {}
    for item in tensors:
        sizes[item.key.name] = sizes.get(item.key.name, 0) + item.nbytes
    return sizes


def _find_shapes(states: Mapping[str, _State]) -> dict[str, Shape]:
    """Name -> the parameter's shape: the model's, else that of its first state that is not a counter."""
    shapes: dict[str, Shape] = {}
    for state in sorted(states.keys() - {"step"}, key=lambda state: (state == MODEL, -states[state].indexes[0])):
        columns = states[state]
        shapes |= zip(columns.names, columns.shapes, strict=True)
    return shapes


class _Name(NamedTuple):
    """The tensor's place in the model, according to its name."""

    layer: int | None
    expert: int | None
    alike: str  # the name with # in place of the two numbers: tensors with equal ones are cut alike


def _parse_name(name: str) -> _Name:
    layer = _LAYER.search(name)
    expert = _EXPERT.search(name)
    if expert is None:
        return (
            _Name(None, None, name) if layer is None else _Name(int(layer[1]), None, _mask_number(name, layer.span(1)))
        )
    if layer is None:
        return _Name(None, int(expert[1]), _mask_number(name, expert.span(1)))
    first, last = sorted((layer.span(1), expert.span(1)))
    return _Name(int(layer[1]), int(expert[1]), _mask_number(_mask_number(name, last), first))


def _mask_number(name: str, number: tuple[int, int]) -> str:
    return f"{name[: number[0]]}#{name[number[1] :]}"


class _Wish(NamedTuple):
    """How a tensor should be cut, before it is known whether its shape allows it."""

    cuts: Cuts = ()
    source: str = ""  # where the wish comes from, for the report
    spread: tuple[str, ...] = ()  # mesh dims of data ranks, which cut unevenly


class _Placer:
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

    def place_state(self, state: str, columns: _State, shapes: Mapping[str, Shape]) -> list[Placement]:
        """The placement of every tensor of the state."""
        known_placements = self._by_kind.setdefault(self._classify_state(state), {})
        shape_of = dict(zip(columns.names, columns.shapes, strict=True))
        new_names = [name for name in shape_of if name not in known_placements] if known_placements else shape_of
        for name in new_names:
            known_placements[name] = self._choose_placement(name, state, shapes.get(name, shape_of[name]))

        placements = list(map(known_placements.__getitem__, columns.names))
        if shape_of.items() <= shapes.items():
            return placements

        # A state of another shape than its parameter (`step`, a scalar) is on the same ranks, uncut.
        return [
            placement if shapes.get(name, shape) == shape else self._place(shape, _Wish(), placement.at)
            for name, shape, placement in zip(columns.names, columns.shapes, placements, strict=True)
        ]

    def _classify_state(self, state: str) -> str:
        """The kind of a state on which wishes depend: weights, extras or others. With rules, each state is a kind."""
        if self.wishes.rules or state == EXTRAS:
            return state
        return MODEL if state in _WEIGHTS or self.wishes.zero in (0, 3) else ""

    def _choose_placement(self, name: str, state: str, shape: Shape) -> Placement:
        """Decide how a tensor is cut: once for all tensors whose names are alike, unless a layout file has rules."""
        if name in self.wishes.together and state == MODEL:
            return self._place_together(name, self.wishes.together[name])
        if self.wishes.rules:
            at, wish = _choose_cuts(name, state, shape, self.wishes, self.stages, self.experts)
        else:
            parsed = self.names[name]
            alike = (
                parsed.alike,
                parsed.expert is None,
                self._classify_state(state),
                len(shape),
                self.wishes.cuts.get(name),
            )
            if alike not in self._wishes:
                self._wishes[alike] = _choose_cuts(name, state, shape, self.wishes, self.stages, self.experts)[1]
            at = _find_coordinates(name, self.stages, self.experts)
            wish = self._wishes[alike]
        self.sources[wish.source] = None
        return self._place(shape, wish, at)

    def _place_together(self, name: str, units: Units) -> Placement:
        """The placement of codes or scales of a quantised weight: cut like the weight, between blocks, or not at all if
        all pieces share them. Policies that cut unevenly are replaced by the default."""
        lead = units.lead
        parsed = self.names[units.lead]
        by_rule = any(fnmatchcase(lead, rule.match) for rule in self.wishes.rules)
        alike = (parsed.alike, parsed.expert is None, units.whole, self.wishes.cuts.get(lead), lead if by_rule else "")
        if alike not in self._wishes or self.wishes.rules:
            # The table of common names contains the weight's name (`units.made`), rules match the name of its codes.
            wish_name = lead if by_rule else units.made
            experts = {wish_name: self.experts[lead]} if lead in self.experts else {}
            cuts = {wish_name: self.wishes.cuts[lead]} if lead in self.wishes.cuts else {}
            stages = {wish_name: self.stages[lead]} if lead in self.stages else {}
            wishes = replace(self.wishes, cuts=cuts)
            at, wish = _choose_cuts(wish_name, MODEL, units.whole[:3], wishes, stages, experts)
            self._wishes[alike] = wish
        else:
            at = _find_coordinates(lead, self.stages, self.experts)
        wish = self._wishes[alike]
        self.sources[wish.source] = None

        # The codes are placed as a tensor with one element for each block.
        policy = "largest-dim" if self.wishes.policy in ("pad", "dtensor") else self.wishes.policy
        case = (units.whole, wish.cuts, at, "in blocks")
        if case not in self._placements:
            self._placements[case] = place(units.whole, wish.cuts, self.wishes.mesh, at=at, policy=policy)
        lead_placement = self._placements[case]
        if name == lead:
            return lead_placement

        # Scales are cut along the dims in which they have several pieces.
        shard = tuple(
            (dim, names) for dim, names in lead_placement.shard if dim < len(units.mine) and units.mine[dim] > 1
        )
        return lead_placement._replace(shard=shard, choices=())

    def _place(self, shape: Shape, wish: _Wish, at: At) -> Placement:
        """The placement that a wish gives a shape, computed once for each distinct case."""
        case = (shape, wish.cuts, wish.spread, at)
        placement = self._placements.get(case)
        if placement is None:
            placement = self._placements[case] = place(
                shape, wish.cuts, self.wishes.mesh, at=at, policy=self.wishes.policy, spread=wish.spread
            )
        return placement


def _choose_cuts(
    name: str, state: str, shape: Sequence[int], wishes: Wishes, stages: Mapping[str, int], experts: Mapping[str, int]
) -> tuple[At, _Wish]:
    """(fixed coordinates, wish) for one tensor: by the first rule that matches, else by tensor parallelism and ZeRO."""
    mesh = wishes.mesh
    for rule in wishes.rules:
        if fnmatchcase(name, rule.match) and fnmatchcase(state, rule.state):
            return rule.at, _Wish(rule.shard, "the layout file")

    at = _find_coordinates(name, stages, experts)
    is_expert = name in experts or _STACKED.search(name) is not None
    if state == EXTRAS:
        return at, _Wish(source="extras whole")

    cuts_by_dim: dict[int, list[str]] = {}
    data_dims: list[str] = []
    source = "replicated"

    # Tensor parallelism: experts have ranks of their own for it (etp), or use those of the rest.
    if mesh["tp"] > 1 and (not is_expert or mesh["etp"] == 1):
        dim, source = _tensor_parallel_dim(name, shape, wishes)
        if dim is not None:
            cuts_by_dim.setdefault(dim, []).append("tp")
    if _STACKED.search(name) and len(shape) == 3 and mesh["ep"] > 1:
        cuts_by_dim.setdefault(0, []).insert(0, "ep")

    # ZeRO: the data ranks cut dim 0 further, of weights at level 3, of other states at any level.
    if wishes.zero >= (3 if state in _WEIGHTS else 1) and shape:
        data_dims = ["dp"] if is_expert else ["ep", "dp"]
        cuts_by_dim.setdefault(0, []).extend(dim for dim in data_dims if mesh[dim] > 1)
        source = source if cuts_by_dim.get(0) is None or source != "replicated" else "data shards along dim 0"
    cuts = tuple((dim, tuple(names)) for dim, names in sorted(cuts_by_dim.items()) if names)
    return at, _Wish(cuts, source, tuple(data_dims) if wishes.uneven else ())


def _find_coordinates(name: str, stages: Mapping[str, int], experts: Mapping[str, int]) -> At:
    """The pipeline stage and the expert rank that alone hold a tensor, as mesh coordinates."""
    stage = (("pp", stages[name]),) if name in stages else ()
    return (*stage, ("ep", experts[name])) if name in experts else stage


def _tensor_parallel_dim(name: str, shape: Sequence[int], wishes: Wishes) -> tuple[int | None, str]:
    """(the dim that tensor parallelism cuts, None for none; the source of that answer, for the report)."""
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


def _split_layers(names: Mapping[str, _Name], wishes: Wishes, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Layers of each pipeline stage; () without pipeline ranks. sizes: name -> bytes."""
    stages = wishes.mesh["pp"]
    if stages == 1:
        return ()
    count = _count_layers(names)
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
        return _split_by_bytes(names, sizes, stages)
    return (count // stages,) * stages


def describe_split(split: Sequence[int]) -> str:
    """The split in words of the report, "" for even stages."""
    return f"stages of {','.join(map(str, split))} layers" if len(set(split)) > 1 else ""


def _assign_stages(names: Mapping[str, _Name], split: Sequence[int]) -> dict[str, int]:
    """Name -> pipeline stage; empty without pipeline ranks."""
    if not split:
        return {}

    # A tensor without a layer is on the first stage if its name is that of an embedding, else on the last.
    last_stage = len(split) - 1
    stage_of_layer = [stage for stage, layer_count in enumerate(split) for _ in range(layer_count)]
    stages: dict[str, int] = {}
    for name, parsed in names.items():
        if parsed.layer is not None:
            stages[name] = stage_of_layer[parsed.layer]
        else:
            stages[name] = 0 if _FIRST.search(name) else last_stage
    return stages


def stages_by_bytes(sizes: Mapping[str, int], stages: int) -> tuple[int, ...]:
    """Layers of each pipeline stage, so that stages have about the same bytes. sizes: parameter -> bytes, its states
    with it. Embeddings count to the first layer, what else has no layer to the last. Raises UsageError E0217 for fewer
    layers than stages."""
    return _split_by_bytes({name: _parse_name(name) for name in sizes}, sizes, stages)


def _split_by_bytes(names: Mapping[str, _Name], sizes: Mapping[str, int], stages: int) -> tuple[int, ...]:
    """The same of names that are parsed already."""
    count = _count_layers(names)
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
    for name, parsed in names.items():
        if parsed.layer is not None:
            layers[parsed.layer] += sizes[name]
        else:
            layers[0 if _FIRST.search(name) else -1] += sizes[name]
    from ckpt_tool.plan.balance import balance_stages

    return balance_stages(layers, stages)


def _count_layers(names: Mapping[str, _Name]) -> int:
    layers = (parsed.layer for parsed in names.values() if parsed.layer is not None)
    return check_count(max(layers, default=-1) + 1, len(names), "layers by the tensors' names")


def _assign_experts(names: Mapping[str, _Name], mesh: Mesh) -> dict[str, int]:
    """Name -> expert-parallel rank, for tensors of one expert each; empty without expert ranks."""
    ranks = mesh["ep"]
    if ranks == 1:
        return {}
    numbers = {name: parsed.expert for name, parsed in names.items() if parsed.expert is not None}
    count = check_count(max(numbers.values(), default=-1) + 1, len(names), "experts by the tensors' names")
    stacked = any(
        _STACKED.search(alike) for alike in {parsed.alike for parsed in names.values() if parsed.expert is None}
    )
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


def _list_fallbacks(
    tensors: Sequence[WantedTensor], placements: Sequence[Placement], mesh: Mesh
) -> list[dict[str, Any]]:
    """One entry for each distinct (requested, used) case: how many tensors, an example, the extra bytes of its
    replicas."""
    sizes = dict(mesh.dims)
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}

    # Many tensors share a placement object, so those that took no fallback are identified once for each object.
    distinct = dict(zip(map(id, placements), placements, strict=True))
    with_fallback = {
        number for number, placement in distinct.items() if any(choice.reason != "even" for choice in placement.choices)
    }
    for item, placement in zip(tensors, placements, strict=True) if with_fallback else ():
        for choice in placement.choices if id(placement) in with_fallback else ():
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
    """How many times a tensor is replicated because `choice` did not use what was requested."""
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
        degrees = {str(name): _read_number(size) for name, size in document.get("mesh", {}).items()}
        rules = tuple(map(_read_rule, document.get("rule", [])))
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        what = e if isinstance(e, ValueError) else f"{type(e).__name__} {e}"
        raise UsageError(
            f"the layout file does not read: {what}",
            code="E0252",
            path=path,
            hint='want [[rule]] entries such as: match = "*.w1.weight", shard = { 0 = ["tp"] }',
        ) from e
    return degrees, rules


def _read_rule(entry: Mapping[str, Any]) -> PlacingRule:
    """One [[rule]] entry. Raises KeyError, TypeError, ValueError or AttributeError for one that is malformed."""
    match = _read_pattern(entry["match"])
    state = _read_pattern(entry.get("state", "*"))
    shard: list[tuple[int, tuple[str, ...]]] = []
    for dim, names in sorted(entry.get("shard", {}).items()):
        # TOML's keys are texts.
        number = _read_number(int(dim) if numeral(dim) else dim)
        shard.append((number, (names,) if isinstance(names, str) else tuple(map(str, names))))
    at = tuple((str(name), _read_number(index)) for name, index in entry.get("at", {}).items())
    return PlacingRule(match, state, tuple(shard), at)


def _read_pattern(value: object) -> str:
    """A pattern of a layout file: of a length that takes no time to compile."""
    if isinstance(value, str) and len(value) <= _GLOB:
        return value
    raise ValueError(f"expected a pattern of at most {_GLOB} characters, got {str(value)[:80]!r}")


def _read_number(value: object) -> int:
    """A number of a layout file. Raises ValueError for what is none, or has more digits than can be shown."""
    if type(value) is int and abs(value) < 10**DIGITS:
        return value
    shown = f"one of {value.bit_length()} bits" if isinstance(value, int) else repr(value)[:80]
    raise ValueError(f"expected a whole number, got {shown}")
