"""How Megatron cuts each parameter between tensor-parallel ranks, by name; and which degrees a model can take.

The one idea: a rule is (dim, parts, axis). `dim` is the dim that ranks share, None where each keeps a copy; `parts` is
2 for a gated fc1, whose rank r keeps rows r of the gate and rows r of the up half; `axis` says whose ranks share: the
dense ones (tp) or the experts' (etp). From a rule follow the boxes of a rank, both ways:

    mlp.linear_fc1.weight [gate; up] of 48 + 48 rows, tp 2, rank 1:
        rows 24..48 of the tensor are rows 0..24 of the rank, rows 72..96 are rows 24..48

    embeddings, output_layer             rows (vocabulary, padded)
    linear_qkv, linear_q_proj, _up_proj  rows: whole query groups, whole heads (or more ranks than groups share each
                                         group)
    linear_proj, linear_fc2              columns; their biases on every rank
    linear_fc1                           rows, of each half where gated
    MLA's down projections               a copy each with Transformer Engine; rows with the local spec
    MTP's eh_proj                        rows
    norms, routers, positions            a copy each

Sources (NVIDIA/Megatron-LM core 0.16.1): `core/tensor_parallel/layers.py`, `core/transformer/attention.py`, `mlp.py`,
`multi_latent_attention.py` (`parallel_mode="duplicated"` for TE), `moe/experts.py`, `moe/shared_experts.py`,
`multi_token_prediction.py`, `dot_product_attention.py` (`softmax_offset`).

Cost: about a us a name. What it does not do: Mamba's and DeltaNet's segmented projections (they raise where ranks
share).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import gcd
from typing import NamedTuple

from ckpt_tool.core.box import Box, whole
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.megatron.args import Facts
from ckpt_tool.formats.megatron.stages import nearest

DEGREE = "E0273"
TP, ETP = "tp", "etp"


class Rule(NamedTuple):
    """dim: shared between ranks, None: each keeps a copy. parts: laid end to end along `dim`, each cut on its own.
    axis: `tp` or `etp`. known: False for a name that no rule knows (a copy each is then only right for one rank)."""

    dim: int | None
    parts: int = 1
    axis: str = TP
    known: bool = True


class Piece(NamedTuple):
    """`box` of the whole tensor is `within` of a rank's."""

    box: Box
    within: Box


_ROWS = frozenset(
    "word_embeddings output_layer linear_qkv linear_q linear_kv linear_q_proj linear_q_up_proj "
    "linear_kv_up_proj eh_proj".split()
)
_COLUMNS = frozenset({"linear_proj", "linear_fc2"})
_DOWN = frozenset({"linear_q_down_proj", "linear_kv_down_proj"})
_COPIES = frozenset(
    "router position_embeddings tokentype_embeddings enorm hnorm q_layernorm k_layernorm kv_layernorm "
    "lm_head_bias".split()
)
_NORM = re.compile(r"(?:.*_)?(?:layernorm|layer_norm|norm)")
VOCABULARY = frozenset({"embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"})


def rule_of(name: str, rank: int, *, gated: bool, down_shared: bool) -> Rule:
    """The rule of a logical name. rank: of the tensor (1 for biases). gated: fc1 holds gate and up. down_shared: MLA's
    down projections are cut (the local spec)."""
    words = name.split(".")
    leaf, module = words[-1], words[-2] if len(words) > 1 else ""
    axis = ETP if "experts" in words else TP
    if module in _COPIES or _NORM.fullmatch(module) or leaf in ("gate_weight", "layer_norm_weight", "layer_norm_bias"):
        return Rule(None, axis=axis)
    if module == "core_attention" and leaf == "softmax_offset":
        return Rule(0)
    if leaf not in ("weight", "bias"):
        return Rule(None, axis=axis, known=False)
    if module in _ROWS:
        return Rule(0, axis=axis)
    if module in _COLUMNS:
        return Rule(1 if leaf == "weight" and rank > 1 else None, axis=axis)
    if module == "linear_fc1":
        return Rule(0, 2 if gated else 1, axis)
    if module in _DOWN:
        return Rule(0 if down_shared else None)
    return Rule(None, axis=axis, known=False)


def gated(shapes: Mapping[str, tuple[int, ...]], facts: Facts) -> bool:
    """Does fc1 hold gate and up? By its size beside fc2's, else as the arguments say."""
    for name, shape in shapes.items():
        if name.endswith("linear_fc1.weight") and len(shape) == 2:
            other = shapes.get(f"{name.removesuffix('linear_fc1.weight')}linear_fc2.weight")
            if other and len(other) == 2 and shape[0] in (other[1], 2 * other[1]):
                return shape[0] == 2 * other[1]
    return bool(facts.gated)


def global_shape(rule: Rule, local: Sequence[int], size: int) -> tuple[int, ...]:
    """The whole tensor's shape from a rank's, of `size` ranks."""
    if rule.dim is None or rule.dim >= len(local):
        return tuple(local)
    return tuple(n * size if dim == rule.dim else n for dim, n in enumerate(local))


def local_shape(rule: Rule, shape: Sequence[int], size: int) -> tuple[int, ...]:
    """A rank's shape from the whole tensor's; the dim must divide (`check_degrees`)."""
    if rule.dim is None or rule.dim >= len(shape):
        return tuple(shape)
    return tuple(n // size if dim == rule.dim else n for dim, n in enumerate(shape))


def pieces(rule: Rule, shape: Sequence[int], rank: int, size: int, *, apart: bool = False) -> list[Piece]:
    """What rank `rank` of `size` keeps of a tensor of `shape` (whole), in the order of its own rows. apart: are gate
    and up two pieces even where one rank has both?"""
    if rule.dim is None or rule.dim >= len(shape) or size == 1 and not apart:
        return [Piece(whole(shape), whole(shape))]
    dim, parts = rule.dim, rule.parts
    part = shape[dim] // parts  # rows of a half
    own = part // size
    mine = tuple(own if d == dim else n for d, n in enumerate(shape))
    zero = [0] * len(shape)
    out = []
    for number in range(parts):
        at, inside = list(zero), list(zero)
        at[dim] = number * part + rank * own
        inside[dim] = number * own
        out.append(Piece(Box(tuple(at), mine), Box(tuple(inside), mine)))
    return out


# -- degrees -----------------------------------------------------------------------------------------------------------


class Units(NamedTuple):
    """What a degree must divide: `amount` of `what` (of tensor `name`). rows: those that a degree must divide which is
    a multiple of `amount` itself; 0: that is no way to share them."""

    amount: int
    what: str
    name: str
    rows: int = 0

    def shared_by(self, degree: int) -> bool:
        """Can so many ranks share them?"""
        if self.amount % degree == 0:
            return True
        return self.rows > 0 and degree % self.amount == 0 and self.rows % degree == 0


def units_of(name: str, rule: Rule, shape: Sequence[int], facts: Facts) -> Units | None:
    """What the axis of `rule` must divide for this tensor; None where any degree will do (vocabularies are padded)."""
    if rule.dim is None or rule.dim >= len(shape) or name in VOCABULARY:
        return None
    words = name.split(".")
    module = words[-2] if len(words) > 1 else ""
    extent = shape[rule.dim] // rule.parts
    if module == "linear_qkv" and facts.groups and extent % facts.groups == 0:
        return Units(facts.groups, "query groups", name, shape[0])
    if module in ("linear_proj", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "linear_q") and facts.heads:
        if extent % facts.heads == 0:
            return Units(facts.heads, "attention heads", name)
    what = {"linear_fc1": "ffn rows", "linear_fc2": "ffn columns"}.get(module, "rows" if rule.dim == 0 else "columns")
    if shape[rule.dim] % rule.parts:
        return Units(1, f"rows that are no two halves ({shape[rule.dim]})", name)
    return Units(extent, what, name)


def check_degree(flag: str, degree: int, units: Iterable[Units]) -> list[str]:
    """Notes. Raises UsageError E0273 with the nearest valid degrees when so many ranks can't share everything that they
    must."""
    every = list(units)
    bad = next((one for one in every if not one.shared_by(degree)), None)
    if bad is None:
        more = next((one for one in every if one.amount % degree), None)
        shared = f"--{flag} {degree}: ranks share the {more.amount} {more.what}" if more else ""
        return [f"{shared}, which Megatron-Core takes since 0.16 and earlier ones refuse"] if more else []
    common = gcd(*(one.rows or one.amount for one in every))
    valid = [n for n in range(1, min(common, 65536) + 1) if all(one.shared_by(n) for one in every)]
    raise UsageError(
        f"--{flag} {degree}: {bad.amount} {bad.what} do not divide by {degree}",
        code=DEGREE,
        key=bad.name,
        hint=f"the nearest degrees that do: {nearest(degree, valid)}",
    )
