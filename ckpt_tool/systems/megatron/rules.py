"""How Megatron cuts each parameter between tensor-parallel ranks, by name; and which degrees a model can take.

The one idea: a rule is (dim, parts, axis). `dim` is the dim that ranks share, None where each keeps a copy; `parts` are
the proportions of what lies end to end along it, each cut on its own: (1, 1) for a gated fc1, whose rank r keeps rows r
of the gate and rows r of the up half; `axis` says whose ranks share: the dense ones (tp) or the experts' (etp). From a
rule follow the boxes of a rank, both ways:

    mlp.linear_fc1.weight [gate; up] of 48 + 48 rows, tp 2, rank 1:
        rows 24..48 of the tensor are rows 0..24 of the rank, rows 72..96 are rows 24..48
    mixer.in_proj.weight [z; x; B; C; dt] of 20, 20, 6, 6, 4 rows, parts (10, 10, 3, 3, 2), tp 2, rank 1:
        rows 10..20, 30..40, 43..46, 49..52, 54..56 of the tensor, one below the other

    embeddings, output_layer             rows (vocabulary, padded)
    linear_qkv, linear_q_proj, _up_proj  rows: whole query groups, whole heads (or more ranks than groups share each
                                         group)
    linear_proj, linear_fc2              columns; their biases on every rank
    the same under the hub's names       q_proj, q_b_proj, ...: rows; o_proj: columns; f_a_proj, q_a_proj, ...: a copy
                                         each (Kimi K3)
    linear_fc1                           rows, of each half where gated
    MLA's down projections               a copy each with Transformer Engine; rows with the local spec
    MTP's eh_proj, embeddings of layers  rows
    gated delta net, Mamba               in_proj and conv1d: rows, of each section; A_log, dt_bias, D, Mamba's own norm:
                                         rows; out_proj: columns; out_norm: a copy each
    Kimi's delta attention               the same, and beta_proj, f_b_proj, g_b_proj: rows; f_a_proj, g_a_proj: a copy
    indexer of sparse attention          a copy each
    DeepSeek V4's attention              one rank alone, as core has it: its key and value are all heads'
    norms, routers, positions            a copy each
    q and k norms over all heads         rows (`norms_span`)
    towers of Megatron's modules         as above; of others (`visual.`, `vision_tower.`): a copy each

The lengths of sections follow from the other tensors of the module, of a rank or of the whole model alike, for what
counts is their proportion; where these are not there, from the arguments (`sections_of`).

Sources (NVIDIA/Megatron-LM core 0.16.1): `core/tensor_parallel/layers.py`, `core/transformer/attention.py`, `mlp.py`,
`multi_latent_attention.py` (`parallel_mode="duplicated"` for TE), `moe/experts.py`, `moe/shared_experts.py`,
`multi_token_prediction.py`, `dot_product_attention.py` (`softmax_offset`); 0.19.2 `ssm/mamba_mixer.py`,
`ssm/gated_delta_net/`, `transformer/experimental_attention_variant/dsa.py`, `models/vision/`; dev of 2026-08-21
`transformer/experimental_attention_variant/deepseek_v4_hybrid_attention.py`, `csa.py`, `hyper_connection.py`.
megatron-bridge 0.6.2
`models/minimax_m2/minimax_m2_provider.py`, `models/olmoe/` (norms over all heads), `models/gemma/modeling_gemma4.py`
(embeddings of each layer), `models/*/modeling_*.py` (towers); of August 2026 `models/kimi/kimi_k3_layers.py`.

mcore-bridge 1.6.5 has rows of a gated delta net by key head, all that belongs to one together: such tensors bear
another name (`BY_HEAD`), and ranks share their rows plainly. torch_dist's keys tell them from core's, and so do two
projections where core has one (Qwen4-Exp); nothing else does.

Cost: about a us a name. What it does not do: k norms over all heads where more ranks than groups share them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import gcd
from types import MappingProxyType
from typing import NamedTuple

from ckpt_tool.core.box import Box, whole
from ckpt_tool.errors import UsageError
from ckpt_tool.systems.megatron.args import MegatronFacts
from ckpt_tool.systems.megatron.stages import nearest
from ckpt_tool.systems.megatron.stored_names import BY_HEAD, is_foreign, is_tower, stem

DEGREE = "E0273"
TP = "tp"
ETP = "etp"


class MegatronRule(NamedTuple):
    """dim: shared between ranks, None: each keeps a copy. parts: the proportions of what lies end to end along `dim`,
    each cut on its own. axis: `tp` or `etp`. known: False for a name that no rule knows (a copy each is then only right
    for one rank). lacks: what has to be known for a rule."""

    dim: int | None
    parts: tuple[int, ...] = (1,)
    axis: str = TP
    known: bool = True
    lacks: str = ""

    def sections(self, extent: int) -> tuple[int, ...]:
        """The lengths of the parts along `dim` of so many elements; () when they do not come out even."""
        unit, rest = divmod(extent, sum(self.parts))
        return () if rest else tuple(unit * part for part in self.parts)


class RankPiece(NamedTuple):
    """`box` of the whole tensor is `within` of a rank's."""

    box: Box
    within: Box


_ROWS = frozenset(
    "word_embeddings output_layer linear_qkv linear_q linear_kv linear_q_proj linear_q_up_proj linear_kv_proj "
    "linear_kv_up_proj eh_proj e_proj h_proj per_layer_embedding per_layer_model_proj "
    "embed_tokens_per_layer per_layer_model_projection ngram_embedding beta_proj "
    "q_proj k_proj v_proj g_proj b_proj f_b_proj g_b_proj q_b_proj kv_b_proj q_conv1d k_conv1d v_conv1d".split()
)
_COLUMNS = frozenset({"linear_proj", "linear_fc2", "out_proj", "o_proj"})
_DOWN = frozenset({"linear_q_down_proj", "linear_kv_down_proj"})
_COPIES = frozenset(
    "router experts_mlp position_embeddings tokentype_embeddings enorm hnorm q_layernorm k_layernorm kv_layernorm "
    "lm_head_bias out_norm fc1_latent_proj fc2_latent_proj per_layer_input_gate per_layer_projection "
    "f_a_proj g_a_proj q_a_proj kv_a_proj_with_mqa self_attention_res_proj mlp_res_proj output_attn_res_proj".split()
)
_BY_HEAD = frozenset(
    "linear_proj linear_q_proj linear_q_up_proj linear_kv_up_proj linear_q q_layernorm q_b_proj kv_b_proj".split()
)
_CUT_THERE = {"per_layer_input_gate": 0, "per_layer_projection": 1}  # by mcore-bridge alone
_WHOLE = frozenset(  # copies
    "indexer compressor ple hyper_connection attn_hyper_connection self_attention_hyper_connection "
    "mlp_hyper_connection hyper_connection_mixer".split()
)
_OF_DELTA = ("in_proj", "in_proj_qkvz", "in_proj_ba", "conv1d", "out_norm", "out_proj", "A_log", "D", "dt_bias")
_MIXER = ("mixer", "mamba_mixer")  # Mamba's module, core's and Bridge's falcon_h1's
_HEADS = frozenset("A_log D dt_bias".split())  # one element a head
_OWN = frozenset(  # a copy each
    "gate_weight layer_norm_weight layer_norm_bias layer_scalar linear_o_group_proj "
    "hc_head_fn hc_head_base hc_head_scale".split()
)
_SINKS = ("softmax_offset", "attn_sink")  # core's; that of DeepSeek V4's attention
_ADAPTER = re.compile(
    r"(.+?)\.(?:adapter(\.adapter_(?:q|k|v|gate|up))?\.)?"
    r"(linear_in\.weight|linear_out\.weight|weight_magnitude|lora_A|lora_B)(?:(?<=lora_[AB])\.[^.]+\.weight)?"
)
_NORM = re.compile(r"(?:.*_)?(?:layernorm|layer_norm|norm)(?:_\d)?")
VOCABULARY = frozenset({"embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"})
MAMBA = "mamba"
DELTA = "gated delta net"
KIMI = "kimi delta attention"
_PROJECTIONS = ("in_proj_qkvz", "in_proj_ba")  # mcore-bridge's, by key head
_WANTED = {  # what the arguments have to say where a module's other tensors are not there
    MAMBA: "mamba_num_heads, mamba_head_dim, mamba_num_groups and mamba_state_dim",
    DELTA: "linear_num_key_heads, linear_key_head_dim, linear_num_value_heads and linear_value_head_dim",
}


SECTIONS = {  # what torch_dist calls the parts of such a tensor, each under a key of its own
    f"{MAMBA}.in_proj": ("z", "x", "B", "C", "dt"),
    f"{MAMBA}.conv1d": ("x", "B", "C"),
    f"{DELTA}.in_proj": ("query", "key", "value", "z", "beta", "alpha"),
    f"{DELTA}.conv1d": ("query", "key", "value"),
    f"{KIMI}.in_proj": ("query", "key", "value"),
    f"{KIMI}.conv1d": ("query", "key", "value"),
}


def section_names(name: str) -> tuple[str, ...]:
    """What lies end to end in a projection or convolution of a recurrent module; () for any other name."""
    words = name.split(".")
    kind = "" if is_tower(name) else _recurrent(words)
    return SECTIONS.get(f"{kind}.{_sectioned(words)}", ()) if kind else ()


def _sectioned(words: Sequence[str]) -> str:
    leaf = words[-1]
    module = words[-2]
    if leaf.endswith(BY_HEAD):
        return ""
    if module == "in_proj" and leaf == "weight":
        return "in_proj"
    return "conv1d" if "conv1d" in (module, leaf.partition("_")[0]) else ""


def is_vocabulary(name: str) -> bool:
    """Has the tensor a row for each token?"""
    return stem(name) in VOCABULARY


def rule_of(
    name: str,
    rank: int,
    *,
    gated: bool,
    down_shared: bool,
    sections: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    spanning: bool | None = False,
) -> MegatronRule:
    """The rule of a logical name. rank: of the tensor (1 for biases). gated: fc1 holds gate and up. down_shared: MLA's
    down projections are cut (the local spec). sections: of `sections_of`. spanning: of `norms_span`."""
    if (found := _ADAPTER.fullmatch(name)) is not None:
        base = rule_of(f"{found[1]}.weight", 2, gated=gated, down_shared=down_shared, sections=sections)
        return _of_adapter(base, found[3], apart=found[2] is not None)
    words = name.split(".")
    leaf = words[-1]
    module = words[-2] if len(words) > 1 else ""
    axis = ETP if "experts" in words else TP
    if is_tower(name):
        return _of_tower(name, words, rank, sections)
    kind = _recurrent(words)
    if kind:
        return _of_recurrent(kind, words, rank, sections)
    if not _WHOLE.isdisjoint(words) and module != "ngram_embedding":
        return MegatronRule(None)
    if module in _CUT_THERE and module in sections:
        return MegatronRule(_CUT_THERE[module])
    if module in ("q_layernorm", "k_layernorm") and spanning is not False:
        return MegatronRule(0 if spanning else None, known=spanning is not None)
    if module in _COPIES or _NORM.fullmatch(module) or leaf in _OWN:
        return MegatronRule(None, axis=axis)
    if module == "core_attention" and leaf in _SINKS:
        return MegatronRule(0)
    if leaf not in ("weight", "bias"):
        return MegatronRule(None, axis=axis, known=False)
    if module in _ROWS:
        return MegatronRule(0, axis=axis)
    if module in _COLUMNS:
        return MegatronRule(1 if leaf == "weight" and rank > 1 else None, axis=axis)
    if module == "linear_fc1":
        return MegatronRule(0, (1, 1) if gated else (1,), axis)
    if module in _DOWN:
        return MegatronRule(0 if down_shared and KIMI not in sections else None)  # which are Transformer Engine's
    return MegatronRule(None, axis=axis, known=False)


def _of_adapter(base: MegatronRule, part: str, *, apart: bool) -> MegatronRule:
    """The rule of a part of a LoRA beside a weight that has the rule `base`. megatron-bridge 0.6.2 `peft/utils.py`
    (`ParallelLinearAdapter`): A is cut as the inputs are, else its rank is; B always by outputs. apart: of one of
    several that the weight fuses."""
    if part in ("linear_in.weight", "lora_A"):
        return MegatronRule(1 if base.dim == 1 else 0, axis=base.axis)
    cut = base.dim == 0
    if part == "weight_magnitude":
        return MegatronRule(0 if cut else None, base.parts if cut else (1,), base.axis)
    return MegatronRule(0, base.parts if cut and not apart else (1,), base.axis)


def _recurrent(words: Sequence[str]) -> str:
    """`mamba`, `gated delta net` or, where hyper-connections wrap the layer (GLM-5.3), `kimi delta attention` of a name
    inside such a module, else nothing."""
    if any(word in _MIXER for word in words):
        return MAMBA
    inside = words[words.index("self_attention") + 1 :] if "self_attention" in words else ()
    kind = KIMI if "inner_layer" in words else DELTA
    return kind if inside and inside[0] in _OF_DELTA else ""


def _by_key_head(words: Sequence[str]) -> bool:
    return words[-1].endswith(BY_HEAD) or words[-2] in _PROJECTIONS


def _of_recurrent(kind: str, words: Sequence[str], rank: int, sections: Mapping[str, tuple[int, ...]]) -> MegatronRule:
    leaf = words[-1]
    module = words[-2]
    if leaf in _HEADS or module == "norm" or _by_key_head(words):
        return MegatronRule(0)
    if module == "out_norm" or leaf in ("layer_norm_weight", "layer_norm_bias"):
        return MegatronRule(None)
    if module == "out_proj":
        return MegatronRule(1 if leaf == "weight" and rank > 1 else None, known=leaf in ("weight", "bias"))
    which = _sectioned(words)
    found = (1, 1, 1) if kind == KIMI and which else sections.get(f"{kind}.{which}")
    if found:
        return MegatronRule(0, found)
    return MegatronRule(None, known=False, lacks=_WANTED[kind] if which else "")


def _of_tower(name: str, words: Sequence[str], rank: int, sections: Mapping[str, tuple[int, ...]]) -> MegatronRule:
    """The rule of a tensor beside the language model. Towers that transformers' own modules make are copies; those of
    Megatron's modules are cut like a language model's layers."""
    words = words[1:] if words[0] in ("thinker", "llava_model") else words
    root = words[0]
    inside = words[1] if len(words) > 2 else ""
    leaf = words[-1]
    if root == "multi_modal_projector":  # Bridge's gemma3_vl has a ColumnParallelLinear there
        return MegatronRule(0 if inside == "proj" else None)
    if not is_foreign(name) and inside in ("decoder", "merger", "encoder"):
        module = words[-2]
        if module == "linear_fc1":
            return MegatronRule(0, sections.get(f"{root}.linear_fc1", (1,)))
        if module in _ROWS or module == "encoder":  # an affine projection is a ColumnParallelLinear of that name
            return MegatronRule(0)
        if module in _COLUMNS:
            return MegatronRule(1 if leaf == "weight" and rank > 1 else None)
        return MegatronRule(None, known=_NORM.fullmatch(module) is not None or leaf.startswith("layer_norm_"))
    if root == "vision_model" and inside in ("embedder", "video_embedder"):  # core's RADIO
        return MegatronRule(0)
    return MegatronRule(None)


def gated(shapes: Mapping[str, tuple[int, ...]], facts: MegatronFacts) -> bool:
    """Does the language model's fc1 hold gate and up? By its size beside fc2's, else as the arguments say."""
    found = _gated(shapes, "")
    return bool(facts.gated) if found is None else found


def _gated(shapes: Mapping[str, tuple[int, ...]], tower: str) -> bool | None:
    """The same of a tower, or of the language model (""); None where no size shows it."""
    for name, shape in shapes.items():
        if name.endswith("linear_fc1.weight") and len(shape) == 2 and _in_tower(name, tower):
            other = shapes.get(f"{name.removesuffix('linear_fc1.weight')}linear_fc2.weight")
            if other and len(other) == 2 and shape[0] in (other[1], 2 * other[1]):
                return shape[0] == 2 * other[1]
    return None


def _in_tower(name: str, tower: str) -> bool:
    return tower in name.split(".")[:2] if is_tower(name) else not tower


def sections_of(shapes: Mapping[str, tuple[int, ...]], facts: MegatronFacts) -> dict[str, tuple[int, ...]]:
    """The proportions of what lies end to end in the projections and convolutions of recurrent modules, and in a
    tower's gated fc1: by the shapes of one rank or of the whole model, else by the arguments; none where layers
    differ. `BY_HEAD`, `KIMI` and what mcore-bridge alone cuts, where names show that the model is mcore-bridge's."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for name in shapes:
        front, _, rest = name.rpartition("in_proj.weight")
        kind = _recurrent(name.split(".")) if front and not rest else ""
        if kind in (MAMBA, DELTA):
            found.setdefault(kind, set()).add(_shown(kind, front, shapes) or ())
    out: dict[str, tuple[int, ...]] = {}
    for kind, stated in ((MAMBA, facts.mamba), (DELTA, facts.delta)):
        every = found.get(kind, set()) - {()} or {stated or ()}
        sizes = every.pop()
        if sizes and not every:
            a, b, c = sizes
            which = ((a, a, b, b, c), (a, b, b)) if kind == MAMBA else ((a, a, b, b, c, c), (a, a, b))
            for part, lengths in zip(("in_proj", "conv1d"), which, strict=True):
                out[f"{kind}.{part}"] = tuple(n // gcd(*lengths) for n in lengths)
    if any(name.endswith(f".self_attention.{_PROJECTIONS[0]}.weight") for name in shapes):
        out[BY_HEAD] = (1,)
    if any(".inner_layer." in name for name in shapes):
        out[KIMI] = (1,)
    if any(stem(name).endswith("embed_tokens_per_layer.weight") for name in shapes):
        out |= dict.fromkeys(_CUT_THERE, (1,))
    for root in ("vision_model", "vision_projection"):
        if _gated(shapes, root):
            out[f"{root}.linear_fc1"] = (1, 1)
    return out


def _shown(kind: str, front: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int, int] | None:
    """Of Mamba (inner, group, heads), of a gated delta net (keys, values, value heads), in rows, as the module's
    tensors show them; None where one is missing or they contradict each other."""
    rows = shapes[f"{front}in_proj.weight"][:1]
    wide = shapes.get(f"{front}out_proj.weight", ())[1:2]
    heads = next((shapes[f"{front}{leaf}"][:1] for leaf in ("A_log", "dt_bias") if f"{front}{leaf}" in shapes), ())
    if not (rows and wide and heads):
        return None
    rest = rows[0] - 2 * wide[0] - (heads[0] if kind == MAMBA else 2 * heads[0])
    half = rest // 2
    if rest % 2 or half <= 0:
        return None
    convolved = next((shapes[n][0] for leaf in ("conv1d_weight", "conv1d.weight") if shapes.get(n := front + leaf)), 0)
    if convolved and convolved != wide[0] + 2 * half:
        return None
    return (wide[0], half, heads[0]) if kind == MAMBA else (half, wide[0], heads[0])


def norms_span(shapes: Mapping[str, tuple[int, ...]], facts: MegatronFacts, degree: int) -> bool | None:
    """Do q and k norms span all heads, so that ranks share them? By the shapes of one rank of `degree` (1: of the whole
    model). Bridge's minimax_m2 cuts such norms with the heads; its olmoe, which has as many keys as queries, has them
    whole on every rank. A rank of one head does not show it: then they are core's, of one head's length. None: nothing
    says how many heads."""
    for name, shape in shapes.items():
        front, found, _ = name.rpartition("q_layernorm.weight")
        wide = shapes.get(f"{front}linear_proj.weight", ())[1:2]
        if not found or f"{front}linear_qkv.weight" not in shapes or shape[:1] != wide or is_tower(name):
            continue
        if shapes.get(f"{front}k_layernorm.weight", shape) != shape:
            return True  # a norm of one head's length is as long for k as for q
        if degree == 1:
            return False
        return facts.heads > degree if facts.heads else None
    return False


def global_shape(rule: MegatronRule, local: Sequence[int], size: int) -> tuple[int, ...]:
    """The whole tensor's shape from a rank's, of `size` ranks."""
    if rule.dim is None or rule.dim >= len(local):
        return tuple(local)
    return tuple(n * size if dim == rule.dim else n for dim, n in enumerate(local))


def local_shape(rule: MegatronRule, shape: Sequence[int], size: int) -> tuple[int, ...]:
    """A rank's shape from the whole tensor's; the dim must divide (`check_degrees`)."""
    if rule.dim is None or rule.dim >= len(shape):
        return tuple(shape)
    return tuple(n // size if dim == rule.dim else n for dim, n in enumerate(shape))


def pieces(rule: MegatronRule, shape: Sequence[int], rank: int, size: int, *, apart: bool = False) -> list[RankPiece]:
    """What rank `rank` of `size` keeps of a tensor of `shape` (whole), in the order of its own rows. apart: are parts
    pieces of their own even where one rank has all?"""
    if rule.dim is None or rule.dim >= len(shape) or (size == 1 and not apart):
        return [RankPiece(whole(shape), whole(shape))]
    dim = rule.dim
    zero = [0] * len(shape)
    out = []
    first = 0
    row = 0
    for part in rule.sections(shape[dim]) or (shape[dim] // len(rule.parts),) * len(rule.parts):
        own = part // size
        mine = tuple(own if d == dim else n for d, n in enumerate(shape))
        at = list(zero)
        inside = list(zero)
        at[dim], inside[dim] = first + rank * own, row
        out.append(RankPiece(Box(tuple(at), mine), Box(tuple(inside), mine)))
        first = first + part
        row = row + own
    return out


# -- degrees -----------------------------------------------------------------------------------------------------------


class DivisibleUnits(NamedTuple):
    """What a degree must divide: `amount` of `what` (of tensor `name`)."""

    amount: int
    what: str
    name: str
    # those that a degree must divide which is a multiple of `amount` itself; 0: that is no way to share them
    rows: int = 0

    def shared_by(self, degree: int) -> bool:
        """Can so many ranks share them?"""
        if self.amount % degree == 0:
            return True
        return self.rows > 0 and degree % self.amount == 0 and self.rows % degree == 0


def units_of(name: str, rule: MegatronRule, shape: Sequence[int], facts: MegatronFacts) -> DivisibleUnits | None:
    """What the axis of `rule` must divide for this tensor; None where any degree will do (vocabularies are padded)."""
    if rule.dim is None or rule.dim >= len(shape) or is_vocabulary(name):
        return None
    words = name.split(".")
    module = words[-2] if len(words) > 1 else ""
    own = rule.sections(shape[rule.dim])
    if not own:
        what = f"rows that are no {len(rule.parts)} parts of {', '.join(map(str, rule.parts))} ({shape[rule.dim]})"
        return DivisibleUnits(
            1, what if len(rule.parts) != 2 else f"rows that are no two halves ({shape[rule.dim]})", name
        )
    if module == "linear_kv_proj":
        return DivisibleUnits(1, "key and value that all heads share", name)
    extent = gcd(*own)
    kind = "" if is_tower(name) else _recurrent(words)
    if kind and len(own) > 1:
        heads = facts.mamba_groups if kind == MAMBA else facts.delta_heads
        if heads and extent % heads == 0:
            return DivisibleUnits(heads, "groups" if kind == MAMBA else "key heads", name)
        return DivisibleUnits(extent, f"rows that divide all {len(own)} sections", name)
    if kind and _by_key_head(words) and facts.delta_heads and extent % facts.delta_heads == 0:
        return DivisibleUnits(facts.delta_heads, "key heads", name)
    if kind and words[-1] in _HEADS:
        return DivisibleUnits(extent, "heads", name)
    if not is_tower(name):
        if module == "linear_qkv" and facts.groups and extent % facts.groups == 0:
            return DivisibleUnits(facts.groups, "query groups", name, 0 if facts.groups_whole else shape[0])
        if module == "k_layernorm" and facts.groups and extent % facts.groups == 0:
            return DivisibleUnits(facts.groups, "query groups", name)
        if module in _BY_HEAD and facts.heads and extent % facts.heads == 0:
            return DivisibleUnits(facts.heads, "attention heads", name)
    what = {"linear_fc1": "ffn rows", "linear_fc2": "ffn columns"}.get(module, "rows" if rule.dim == 0 else "columns")
    return DivisibleUnits(extent, what, name)


def check_degree(flag: str, degree: int, units: Iterable[DivisibleUnits]) -> list[str]:
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
