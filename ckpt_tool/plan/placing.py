"""Placing: which mesh dims cut which dims of every tensor, when all that is known is names, shapes and the source's cut.

First hit wins: the rules of `--layout FILE`, the family's axes (once a family is known), the table of common names
below, the source's own cut, dim 0. The decision is taken once a parameter; its states inherit it, and the data dims come
on top for the states that ZeRO shards. Nothing here can lose a value: a wrong guess gives other boxes, recorded as such.

The table holds the names under which transformers, torchtitan, Megatron and Meta keep column-parallel weights (cut
along dim 0: their outputs), row-parallel ones (dim 1: their inputs) and embeddings (dim 0: the vocabulary).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from ckpt_tool.core.layout import Choice, Layout, Placement, place
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.target import WantedTensor
from ckpt_tool.core.tensor import EMA, EXTRAS, MODEL
from ckpt_tool.errors import UsageError

_COLUMN = re.compile(
    r"(?:^|\.)(?:q_proj|k_proj|v_proj|qkv_proj|query_key_value|gate_proj|up_proj|gate_up_proj|w1|w3|wq|wk|wv|fc1|"
    r"linear_qkv|linear_fc1|q_b_proj|kv_b_proj|linear_q_up_proj|linear_kv_up_proj|dense_h_to_4h)\.(?:weight|bias)$"
)
_ROW = re.compile(r"(?:^|\.)(?:o_proj|down_proj|w2|wo|fc2|linear_proj|linear_fc2|dense_4h_to_h)\.weight$")
_VOCAB = re.compile(
    r"(?:^|\.)(?:embed_tokens|lm_head|tok_embeddings|word_embeddings|output_layer|wte|embed_out)\.weight$"
)
_WHOLE = re.compile(
    r"(?:norm|ln_\w+|ln|layernorm|router|gate|inv_freq|rotary_emb|position_embeddings)(?:\.\w+)*$|\.bias$"
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)\.")
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")
_STACKED = re.compile(r"(?:^|\.)experts\.(?!\d)")
_FIRST = re.compile(r"(?:embed|wte|wpe|tok(?:ens|en|_|\.|$)|position)")
_WEIGHTS = (MODEL, EMA)


@dataclass(frozen=True, slots=True)
class Rule:
    """A line of a layout file: tensors whose name matches `match` (and state `state`) are cut along `shard`: tensor dim
    -> mesh dims; `at`: the mesh coordinates where they live alone."""

    match: str
    state: str = "*"
    shard: tuple[tuple[int, tuple[str, ...]], ...] = ()
    at: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked for. zero: 0-3, how far DP shards the states. cuts: name -> tensor dim that the source's
    ranks cut. pp_split: layers of each stage, () for even stages."""

    mesh: Mesh
    zero: int = 0
    policy: str = "largest-dim"
    rules: tuple[Rule, ...] = ()
    cuts: Mapping[str, int] = field(default_factory=dict)
    pp_split: tuple[int, ...] = ()


def lay_out(tensors: Sequence[WantedTensor], wishes: Wishes) -> tuple[Layout, list[dict[str, Any]]]:
    """A placement for every tensor, and the fallbacks taken, one entry for each distinct case.

    Raises UsageError for degrees that the checkpoint can't take: more stages than layers, experts that don't divide.
    """
    if wishes.mesh.size == 1:
        return Layout(wishes.mesh, (Placement(),) * len(tensors), "one rank"), []
    stages = _stages(tensors, wishes)
    experts = _experts(tensors, wishes.mesh)
    shapes = {item.key.name: item.shape for item in reversed(tensors) if item.key.state != "step"}
    shapes |= {item.key.name: item.shape for item in tensors if item.key.state == MODEL}
    decided: dict[tuple[Any, ...], Placement] = {}
    placements, sources = [], dict[str, None]()
    for item in tensors:
        name, state = item.key.name, item.key.state
        at, wish, source = _wish(name, state, shapes.get(name, item.shape), wishes, stages, experts)
        if item.shape != shapes.get(name, item.shape):
            wish = ()  # a scalar twin (`step`) lives with its parameter, whole
        case = (item.shape, wish, at)
        if case not in decided:
            decided[case] = place(item.shape, wish, wishes.mesh, at=at, policy=wishes.policy)
        placements.append(decided[case])
        sources[source] = None
    layout = Layout(wishes.mesh, tuple(placements), ", ".join(sources))
    return layout, _fallbacks(tensors, placements, wishes.mesh)


def _wish(
    name: str, state: str, shape: Sequence[int], wishes: Wishes, stages: Mapping[str, int], experts: Mapping[str, int]
) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[int, tuple[str, ...]], ...], str]:
    """(fixed coordinates, dims to cut with their mesh dims, where that came from) for one tensor."""
    mesh = wishes.mesh
    for rule in wishes.rules:
        if fnmatchcase(name, rule.match) and fnmatchcase(state, rule.state):
            return rule.at, rule.shard, "the layout file"
    at = [("pp", stages[name])] if name in stages else []
    expert = name in experts or _STACKED.search(name) is not None
    if name in experts:
        at.append(("ep", experts[name]))
    if state == EXTRAS:
        return tuple(at), (), "extras whole"
    cut: dict[int, list[str]] = {}
    source = "replicated"
    if not expert and mesh["tp"] > 1 or expert and mesh["tp"] > 1 and mesh["etp"] == 1:
        dim, source = _tensor_parallel_dim(name, shape, wishes.cuts)
        if dim is not None:
            cut.setdefault(dim, []).append("tp")
    if _STACKED.search(name) and len(shape) == 3 and mesh["ep"] > 1:
        cut.setdefault(0, []).insert(0, "ep")
    if wishes.zero >= (3 if state in _WEIGHTS else 1) and shape:
        data = ["dp"] if expert else ["ep", "dp"]
        cut.setdefault(0, []).extend(dim for dim in data if mesh[dim] > 1)
        source = source if cut.get(0) is None or source != "replicated" else "data shards along dim 0"
    return tuple(at), tuple((dim, tuple(names)) for dim, names in sorted(cut.items()) if names), source


def _tensor_parallel_dim(name: str, shape: Sequence[int], cuts: Mapping[str, int]) -> tuple[int | None, str]:
    if not shape:
        return None, "scalars whole"
    if _COLUMN.search(name) or _VOCAB.search(name):
        return 0, "the table of common names"
    if _ROW.search(name) and len(shape) > 1:
        return 1, "the table of common names"
    if _WHOLE.search(name):
        return None, "the table of common names"
    if name in cuts:
        return cuts[name], "the source's own cut"
    return (0, "dim 0") if len(shape) > 1 else (None, "vectors whole")


def _stages(tensors: Sequence[WantedTensor], wishes: Wishes) -> dict[str, int]:
    """Name -> pipeline stage; empty without pipeline ranks."""
    stages = wishes.mesh["pp"]
    if stages == 1:
        return {}
    layers = {item.key.name: int(m[1]) for item in tensors if (m := _LAYER.search(item.key.name))}
    count = max(layers.values(), default=-1) + 1
    if wishes.pp_split:
        split = wishes.pp_split
        if len(split) != stages or sum(split) != count or min(split) < 1:
            raise UsageError(
                f"--pp-split {','.join(map(str, split))} does not part {count} layers into {stages} stages", code="E0218",
                hint="give one positive number a stage, their sum the number of layers",
            )  # fmt: skip
    elif count % stages:
        near = sorted((d for d in range(1, count + 1) if count % d == 0), key=lambda d: abs(d - stages))[:3]
        raise UsageError(
            f"{count} layers do not divide into {stages} pipeline stages", code="E0217",
            hint=f"degrees that divide: {', '.join(map(str, sorted(near)))}"
            + ("; or an uneven split with --pp-split" if stages < count else "")
            if near else "the tensor names show no layers: leave --pp off",
        )  # fmt: skip
    else:
        split = (count // stages,) * stages
    owner = [stage for stage, layers_here in enumerate(split) for _ in range(layers_here)]
    out = {}
    for item in tensors:
        name = item.key.name
        out[name] = owner[layers[name]] if name in layers else 0 if _FIRST.search(name) else stages - 1
    return out


def _experts(tensors: Sequence[WantedTensor], mesh: Mesh) -> dict[str, int]:
    """Name -> expert-parallel rank, for tensors of one expert each; empty without expert ranks."""
    ranks = mesh["ep"]
    if ranks == 1:
        return {}
    numbers = {item.key.name: int(m[1]) for item in tensors if (m := _EXPERT.search(item.key.name))}
    count = max(numbers.values(), default=-1) + 1
    stacked = any(_STACKED.search(item.key.name) for item in tensors)
    if not count and stacked:
        return {}
    if not count or count % ranks:
        near = sorted((d for d in range(1, count + 1) if count % d == 0), key=lambda d: abs(d - ranks))[:3]
        raise UsageError(
            f"{count} experts do not divide over {ranks} expert-parallel ranks", code="E0219",
            hint=f"degrees that divide: {', '.join(map(str, sorted(near)))}" if near else "the checkpoint has no experts",
        )  # fmt: skip
    return {name: number * ranks // count for name, number in numbers.items()}


def _fallbacks(tensors: Sequence[WantedTensor], placements: Sequence[Placement], mesh: Mesh) -> list[dict[str, Any]]:
    """One entry a distinct (requested, used) case: how many tensors, an example, the extra bytes of its replicas."""
    sizes = dict(mesh.dims)
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}
    for item, placement in zip(tensors, placements, strict=True):
        for choice in placement.choices:
            if choice.reason == "even":
                continue
            entry = cases.setdefault(
                (choice.requested, choice.used, choice.reason),
                {
                    "requested": list(choice.requested), "used": list(choice.used), "reason": choice.reason,
                    "tensors": 0, "example": str(item.key), "shape": list(item.shape), "extra_bytes": 0,
                    "better": list(choice.better),
                },
            )  # fmt: skip
            entry["tensors"] += 1
            entry["extra_bytes"] += item.nbytes * (_lost_degree(choice, sizes) - 1)
    return list(cases.values())


def _lost_degree(choice: Choice, sizes: Mapping[str, int]) -> int:
    degree = 1
    for name in choice.requested:
        if name not in choice.used:
            degree *= sizes.get(name, 1)
    return degree


def rules_from(document: Mapping[str, Any], path: str) -> tuple[dict[str, int], tuple[Rule, ...]]:
    """(degrees, rules) of a layout file: `[mesh] tp = 4`, `[[rule]] match = "*.w1.weight" shard = {0 = ["tp"]}`.

    Raises UsageError E0252 naming the entry that does not read.
    """
    known = {"mesh", "rule"}
    if set(document) - known:
        raise UsageError(f"unknown table {sorted(set(document) - known)[0]!r}", code="E0252", path=path,
                         hint="a layout file has [mesh] and [[rule]] tables")  # fmt: skip
    try:
        degrees = {str(name): int(size) for name, size in document.get("mesh", {}).items()}
        rules = tuple(
            Rule(
                str(entry["match"]),
                str(entry.get("state", "*")),
                tuple(
                    (int(dim), (names,) if isinstance(names, str) else tuple(map(str, names)))
                    for dim, names in sorted(entry.get("shard", {}).items())
                ),
                tuple((str(name), int(index)) for name, index in entry.get("at", {}).items()),
            )
            for entry in document.get("rule", [])
        )
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise UsageError(
            f"the layout file does not read: {type(e).__name__} {e}", code="E0252", path=path,
            hint='want [[rule]] entries such as: match = "*.w1.weight", shard = { 0 = ["tp"] }',
        ) from e  # fmt: skip
    return degrees, rules
