"""How Megatron cuts each parameter between tensor-parallel ranks, by name; and which degrees a model can take.

A rule is (dim, parts, axis). `dim` is the dim that ranks share, None where each keeps a copy; `parts` are the
proportions of the sections along it, each cut on its own: (1, 1) for a gated fc1, whose rank r keeps rows r of the gate
and rows r of the up half; `axis` says whose ranks share: the dense ones (tp) or the experts' (etp). From a rule follow
the boxes of a rank, both ways:

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

The lengths of sections follow from the other tensors of the module, be it a rank's or the whole model's, since only
their proportion counts; where these are missing, from the arguments (`sections_of`).

Sources (NVIDIA/Megatron-LM core 0.16.1): `core/tensor_parallel/layers.py`, `core/transformer/attention.py`, `mlp.py`,
`multi_latent_attention.py` (`parallel_mode="duplicated"` for TE), `moe/experts.py`, `moe/shared_experts.py`,
`multi_token_prediction.py`, `dot_product_attention.py` (`softmax_offset`); 0.19.2 `ssm/mamba_mixer.py`,
`ssm/gated_delta_net/`, `transformer/experimental_attention_variant/dsa.py`, `models/vision/`; dev of 2026-08-21
`transformer/experimental_attention_variant/deepseek_v4_hybrid_attention.py`, `csa.py`, `hyper_connection.py`.
megatron-bridge 0.6.2
`models/minimax_m2/minimax_m2_provider.py`, `models/olmoe/` (norms over all heads), `models/gemma/modeling_gemma4.py`
(embeddings of each layer), `models/*/modeling_*.py` (towers); of August 2026 `models/kimi/kimi_k3_layers.py`.

mcore-bridge 1.6.5 orders the rows of a gated delta net by key head, all that belongs to one together: such tensors have
another name here (`BY_HEAD`), and ranks share their rows plainly. Only torch_dist's keys distinguish them from core's,
and two projections where core has one (Qwen4-Exp).

Cost: about a us a name. Not supported: k norms over all heads where more ranks than groups share them.
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
    """How ranks share a parameter: which dim is cut, in which sections, between which ranks."""

    dim: int | None  # the dim that ranks share, None: each keeps a copy
    parts: tuple[int, ...] = (1,)  # the proportions of the sections along `dim`, each cut on its own
    axis: str = TP  # whose ranks: `tp` or `etp`
    known: bool = True  # False for a name that no rule knows: then the tensor is only right on a single rank
    lacks: str = ""  # the facts without which no rule can be made

    def sections(self, extent: int) -> tuple[int, ...]:
        """Return the lengths of the parts along a `dim` of `extent` elements, () if they do not divide evenly."""
        unit, rest = divmod(extent, sum(self.parts))
        return () if rest else tuple(unit * part for part in self.parts)


class RankPiece(NamedTuple):
    """A part of a tensor that a rank has: box `box` of the whole tensor is box `within` of the rank's tensor."""

    box: Box
    within: Box


# What ranks share, by the last name of the module.
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
# Modules whose rows or columns belong to attention heads, so that ranks must divide the heads.
_BY_HEAD = frozenset(
    "linear_proj linear_q_proj linear_q_up_proj linear_kv_up_proj linear_q q_layernorm q_b_proj kv_b_proj".split()
)
_CUT_BY_MCORE_BRIDGE = {"per_layer_input_gate": 0, "per_layer_projection": 1}  # module -> dim; core keeps copies
_COPIED_BLOCKS = frozenset(  # modules all of whose tensors are copies
    "indexer compressor ple hyper_connection attn_hyper_connection self_attention_hyper_connection "
    "mlp_hyper_connection hyper_connection_mixer".split()
)
_DELTA_MODULES = ("in_proj", "in_proj_qkvz", "in_proj_ba", "conv1d", "out_norm", "out_proj", "A_log", "D", "dt_bias")
_MIXER = ("mixer", "mamba_mixer")  # Mamba's module, core's and Bridge's falcon_h1's
_HEADS = frozenset("A_log D dt_bias".split())  # one element a head
_COPIED_LEAVES = frozenset(  # a copy each, whatever the module
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
_PROJECTIONS = ("in_proj_qkvz", "in_proj_ba")  # mcore-bridge's, whose rows are ordered by key head
_NEEDED_ARGUMENTS = {  # the arguments that are needed if a module's other tensors are missing
    MAMBA: "mamba_num_heads, mamba_head_dim, mamba_num_groups and mamba_state_dim",
    DELTA: "linear_num_key_heads, linear_key_head_dim, linear_num_value_heads and linear_value_head_dim",
}


SECTIONS = {  # the suffixes of the keys under which torch_dist stores the sections of a recurrent module's tensor
    f"{MAMBA}.in_proj": ("z", "x", "B", "C", "dt"),
    f"{MAMBA}.conv1d": ("x", "B", "C"),
    f"{DELTA}.in_proj": ("query", "key", "value", "z", "beta", "alpha"),
    f"{DELTA}.conv1d": ("query", "key", "value"),
    f"{KIMI}.in_proj": ("query", "key", "value"),
    f"{KIMI}.conv1d": ("query", "key", "value"),
}


def section_names(name: str) -> tuple[str, ...]:
    """Return the names of the sections of a recurrent module's projection or convolution, () for any other name."""
    words = name.split(".")
    kind = "" if is_tower(name) else _recurrent_kind(words)
    return SECTIONS.get(f"{kind}.{_sectioned_part(words)}", ()) if kind else ()


def _sectioned_part(words: Sequence[str]) -> str:
    """Return `in_proj` or `conv1d` for a tensor with sections, else ""."""
    leaf = words[-1]
    module = words[-2]
    if leaf.endswith(BY_HEAD):
        return ""
    if module == "in_proj" and leaf == "weight":
        return "in_proj"
    return "conv1d" if "conv1d" in (module, leaf.partition("_")[0]) else ""


def is_vocabulary(name: str) -> bool:
    """Return whether the tensor has a row for each token of the vocabulary."""
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
    """Return the rule of a logical name.

    Args:
        name: of the tensor.
        rank: its number of dims (1 for biases).
        gated: whether fc1 holds gate and up.
        down_shared: whether MLA's down projections are cut (the local spec).
        sections: of `sections_of`.
        spanning: of `norms_span`.
    """
    adapter = _ADAPTER.fullmatch(name)
    if adapter is not None:
        base = rule_of(f"{adapter[1]}.weight", 2, gated=gated, down_shared=down_shared, sections=sections)
        return _adapter_rule(base, adapter[3], apart=adapter[2] is not None)

    words = name.split(".")
    leaf = words[-1]
    module = words[-2] if len(words) > 1 else ""
    axis = ETP if "experts" in words else TP

    # Modules with rules of their own come before the language model's.
    if is_tower(name):
        return _tower_rule(name, words, rank, sections)
    kind = _recurrent_kind(words)
    if kind:
        return _recurrent_rule(kind, words, rank, sections)
    if not _COPIED_BLOCKS.isdisjoint(words) and module != "ngram_embedding":
        return MegatronRule(None)

    # Exceptions of modules that are copies otherwise.
    if module in _CUT_BY_MCORE_BRIDGE and module in sections:
        return MegatronRule(_CUT_BY_MCORE_BRIDGE[module])
    if module in ("q_layernorm", "k_layernorm") and spanning is not False:
        return MegatronRule(0 if spanning else None, known=spanning is not None)

    if module in _COPIES or _NORM.fullmatch(module) or leaf in _COPIED_LEAVES:
        return MegatronRule(None, axis=axis)
    if module == "core_attention" and leaf in _SINKS:
        return MegatronRule(0)

    # Whatever is left is a linear: its weight, or the bias of its outputs.
    if leaf not in ("weight", "bias"):
        return MegatronRule(None, axis=axis, known=False)
    if module in _ROWS:
        return MegatronRule(0, axis=axis)
    if module in _COLUMNS:
        return MegatronRule(1 if leaf == "weight" and rank > 1 else None, axis=axis)
    if module == "linear_fc1":
        return MegatronRule(0, (1, 1) if gated else (1,), axis)
    if module in _DOWN:
        # Kimi's are Transformer Engine's in every job.
        return MegatronRule(0 if down_shared and KIMI not in sections else None)
    return MegatronRule(None, axis=axis, known=False)


def _adapter_rule(base: MegatronRule, part: str, *, apart: bool) -> MegatronRule:
    """Return the rule of a part of a LoRA on a weight that has the rule `base`.

    A is cut like the weight's inputs, or along its rank if the inputs are not cut; B is always cut along its outputs.
    Source: megatron-bridge 0.6.2 `peft/utils.py` (`ParallelLinearAdapter`).

    Args:
        base: the weight's rule.
        part: which part of the adapter, as named at the end of its name.
        apart: whether the LoRA is on one of several projections that the weight fuses.
    """
    if part in ("linear_in.weight", "lora_A"):
        return MegatronRule(1 if base.dim == 1 else 0, axis=base.axis)
    outputs_are_cut = base.dim == 0
    if part == "weight_magnitude":
        return MegatronRule(0 if outputs_are_cut else None, base.parts if outputs_are_cut else (1,), base.axis)
    return MegatronRule(0, base.parts if outputs_are_cut and not apart else (1,), base.axis)


def _recurrent_kind(words: Sequence[str]) -> str:
    """Return the kind of recurrent module that the name is in: `MAMBA`, `DELTA`, `KIMI`, or "" if it is in none.

    Kimi's delta attention has the names of a gated delta net, but hyper-connections wrap its layer (GLM-5.3).
    """
    if any(word in _MIXER for word in words):
        return MAMBA
    words_inside = words[words.index("self_attention") + 1 :] if "self_attention" in words else ()
    kind = KIMI if "inner_layer" in words else DELTA
    return kind if words_inside and words_inside[0] in _DELTA_MODULES else ""


def _is_by_key_head(words: Sequence[str]) -> bool:
    return words[-1].endswith(BY_HEAD) or words[-2] in _PROJECTIONS


def _recurrent_rule(
    kind: str, words: Sequence[str], rank: int, sections: Mapping[str, tuple[int, ...]]
) -> MegatronRule:
    leaf = words[-1]
    module = words[-2]
    if leaf in _HEADS or module == "norm" or _is_by_key_head(words):
        return MegatronRule(0)
    if module == "out_norm" or leaf in ("layer_norm_weight", "layer_norm_bias"):
        return MegatronRule(None)
    if module == "out_proj":
        return MegatronRule(1 if leaf == "weight" and rank > 1 else None, known=leaf in ("weight", "bias"))
    sectioned_part = _sectioned_part(words)

    # Kimi's query, key and value have the same length; those of others depend on the model.
    if kind == KIMI and sectioned_part:
        return MegatronRule(0, (1, 1, 1))
    part_sizes = sections.get(f"{kind}.{sectioned_part}")
    if part_sizes:
        return MegatronRule(0, part_sizes)
    return MegatronRule(None, known=False, lacks=_NEEDED_ARGUMENTS[kind] if sectioned_part else "")


def _tower_rule(name: str, words: Sequence[str], rank: int, sections: Mapping[str, tuple[int, ...]]) -> MegatronRule:
    """Return the rule of a tensor outside the language model.

    Towers built from transformers' modules are copied on every rank; those built from Megatron's modules are cut like a
    language model's layers.
    """
    words = words[1:] if words[0] in ("thinker", "llava_model") else words
    root = words[0]
    submodule = words[1] if len(words) > 2 else ""
    leaf = words[-1]
    if root == "multi_modal_projector":  # Bridge's gemma3_vl has a ColumnParallelLinear there
        return MegatronRule(0 if submodule == "proj" else None)
    if not is_foreign(name) and submodule in ("decoder", "merger", "encoder"):
        module = words[-2]
        if module == "linear_fc1":
            return MegatronRule(0, sections.get(f"{root}.linear_fc1", (1,)))
        if module in _ROWS or module == "encoder":  # an affine projection is a ColumnParallelLinear of that name
            return MegatronRule(0)
        if module in _COLUMNS:
            return MegatronRule(1 if leaf == "weight" and rank > 1 else None)
        return MegatronRule(None, known=_NORM.fullmatch(module) is not None or leaf.startswith("layer_norm_"))
    if root == "vision_model" and submodule in ("embedder", "video_embedder"):  # core's RADIO
        return MegatronRule(0)
    return MegatronRule(None)


def gated(shapes: Mapping[str, tuple[int, ...]], facts: MegatronFacts) -> bool:
    """Return whether the language model's fc1 holds gate and up: by its size relative to fc2's, else by the
    arguments."""
    by_size = _find_gated(shapes, "")
    return bool(facts.gated) if by_size is None else by_size


def _find_gated(shapes: Mapping[str, tuple[int, ...]], tower: str) -> bool | None:
    """Return whether fc1 of a tower, or of the language model (""), holds gate and up; None if no size shows it."""
    for name, shape in shapes.items():
        if not name.endswith("linear_fc1.weight") or len(shape) != 2 or not _is_in_tower(name, tower):
            continue
        fc2_shape = shapes.get(f"{name.removesuffix('linear_fc1.weight')}linear_fc2.weight")
        if fc2_shape and len(fc2_shape) == 2 and shape[0] in (fc2_shape[1], 2 * fc2_shape[1]):
            return shape[0] == 2 * fc2_shape[1]
    return None


def _is_in_tower(name: str, tower: str) -> bool:
    return tower in name.split(".")[:2] if is_tower(name) else not tower


def sections_of(shapes: Mapping[str, tuple[int, ...]], facts: MegatronFacts) -> dict[str, tuple[int, ...]]:
    """Return the proportions of the sections in recurrent modules' projections and convolutions and in towers' gated
    fc1.

    They follow from the shapes of one rank or of the whole model, else from the arguments; a kind of module whose
    layers differ gets no entry. The keys `BY_HEAD`, `KIMI` and the modules that only mcore-bridge cuts are present if
    names show that the model is mcore-bridge's.
    """
    measured: dict[str, set[tuple[int, ...]]] = {MAMBA: set(), DELTA: set()}
    for name in shapes:
        front, _, rest = name.rpartition("in_proj.weight")
        kind = _recurrent_kind(name.split(".")) if front and not rest else ""
        if kind in measured:
            measured[kind].add(_measure_sections(kind, front, shapes) or ())

    sections: dict[str, tuple[int, ...]] = {}
    for kind, stated in ((MAMBA, facts.mamba), (DELTA, facts.delta)):
        candidates = measured[kind] - {()} or {stated or ()}
        sizes = candidates.pop()
        if not sizes or candidates:  # unknown, or layers differ
            continue
        a, b, c = sizes
        in_proj: tuple[int, ...]
        if kind == MAMBA:
            in_proj = (a, a, b, b, c)
            conv1d = (a, b, b)
        else:
            in_proj = (a, a, b, b, c, c)
            conv1d = (a, a, b)
        sections[f"{kind}.in_proj"] = tuple(n // gcd(*in_proj) for n in in_proj)
        sections[f"{kind}.conv1d"] = tuple(n // gcd(*conv1d) for n in conv1d)

    # Marks of mcore-bridge's models.
    if any(name.endswith(f".self_attention.{_PROJECTIONS[0]}.weight") for name in shapes):
        sections[BY_HEAD] = (1,)
    if any(".inner_layer." in name for name in shapes):
        sections[KIMI] = (1,)
    if any(stem(name).endswith("embed_tokens_per_layer.weight") for name in shapes):
        sections |= dict.fromkeys(_CUT_BY_MCORE_BRIDGE, (1,))

    for root in ("vision_model", "vision_projection"):
        if _find_gated(shapes, root):
            sections[f"{root}.linear_fc1"] = (1, 1)
    return sections


def _measure_sections(kind: str, front: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int, int] | None:
    """Return the rows of a module's sections: Mamba (inner, group, heads), gated delta net (keys, values, value heads).

    None if a tensor that shows them is missing, or if the tensors contradict each other. front: the module's prefix.
    """
    rows = _extent(shapes, [f"{front}in_proj.weight"])
    width = _extent(shapes, [f"{front}out_proj.weight"], dim=1)
    heads = _extent(shapes, [f"{front}A_log", f"{front}dt_bias"])
    if rows is None or width is None or heads is None:
        return None

    # in_proj has two sections of the width, two unknown ones of one length, and one (Mamba) or two of the heads.
    rest = rows - 2 * width - (heads if kind == MAMBA else 2 * heads)
    half = rest // 2
    if rest % 2 or half <= 0:
        return None

    # conv1d covers one section of the width and the two unknown ones: it must agree.
    convolved = _extent(shapes, [f"{front}conv1d_weight", f"{front}conv1d.weight"])
    if convolved and convolved != width + 2 * half:
        return None
    return (width, half, heads) if kind == MAMBA else (half, width, heads)


def _extent(shapes: Mapping[str, tuple[int, ...]], names: Iterable[str], dim: int = 0) -> int | None:
    """Return the extent along `dim` of the first of these tensors that exists; None if none does, or it lacks the
    dim."""
    for name in names:
        if name in shapes:
            return shapes[name][dim] if len(shapes[name]) > dim else None
    return None


def norms_span(shapes: Mapping[str, tuple[int, ...]], facts: MegatronFacts, degree: int) -> bool | None:
    """Return whether q and k norms span all heads, so that ranks share them; None if the number of heads is unknown.

    Bridge's minimax_m2 cuts such norms with the heads; its olmoe, which has as many keys as queries, copies them to
    every rank. A rank with one head does not show the difference: then they count as core's, of one head's length.

    Args:
        shapes: of one rank of `degree`, or of the whole model (1).
        facts: of the arguments.
        degree: how many ranks share a layer.
    """
    for name, shape in shapes.items():
        front, suffix, _ = name.rpartition("q_layernorm.weight")
        if not suffix or is_tower(name) or f"{front}linear_qkv.weight" not in shapes:
            continue
        attention_width = shapes.get(f"{front}linear_proj.weight", ())[1:2]
        if shape[:1] != attention_width:  # a norm of each head
            continue

        if shapes.get(f"{front}k_layernorm.weight", shape) != shape:
            return True  # a norm of one head's length is as long for k as for q
        if degree == 1:
            return False
        return facts.heads > degree if facts.heads else None
    return False


def global_shape(rule: MegatronRule, local: Sequence[int], size: int) -> tuple[int, ...]:
    """Return the whole tensor's shape from the shape on one of `size` ranks."""
    if rule.dim is None or rule.dim >= len(local):
        return tuple(local)
    return tuple(n * size if dim == rule.dim else n for dim, n in enumerate(local))


def local_shape(rule: MegatronRule, shape: Sequence[int], size: int) -> tuple[int, ...]:
    """Return a rank's shape from the whole tensor's; `size` must divide the shared dim (`check_degree`)."""
    if rule.dim is None or rule.dim >= len(shape):
        return tuple(shape)
    return tuple(n // size if dim == rule.dim else n for dim, n in enumerate(shape))


def pieces(rule: MegatronRule, shape: Sequence[int], rank: int, size: int, *, apart: bool = False) -> list[RankPiece]:
    """Return the pieces of a tensor of `shape` (the whole one) that rank `rank` of `size` has, in its own order.

    apart: whether each section is a piece of its own even if one rank has them all.
    """
    if rule.dim is None or rule.dim >= len(shape) or (size == 1 and not apart):
        return [RankPiece(whole(shape), whole(shape))]
    dim = rule.dim
    zero = [0] * len(shape)
    rank_pieces = []
    section_start = 0  # along `dim` of the whole tensor
    local_start = 0  # along `dim` of the rank's
    for section in rule.sections(shape[dim]) or (shape[dim] // len(rule.parts),) * len(rule.parts):
        extent = section // size
        piece_shape = tuple(extent if d == dim else n for d, n in enumerate(shape))
        offset = list(zero)
        offset[dim] = section_start + rank * extent
        local_offset = list(zero)
        local_offset[dim] = local_start
        rank_pieces.append(RankPiece(Box(tuple(offset), piece_shape), Box(tuple(local_offset), piece_shape)))
        section_start += section
        local_start += extent
    return rank_pieces


# -- degrees -----------------------------------------------------------------------------------------------------------


class DivisibleUnits(NamedTuple):
    """A number that a degree must divide: `amount` units, described by `what`, in tensor `name`."""

    amount: int
    what: str
    name: str
    # More ranks than units can share them if the degree is a multiple of `amount` and divides these rows; 0: never.
    rows: int = 0

    def can_be_shared(self, degree: int) -> bool:
        """Return whether `degree` ranks can share the units."""
        if self.amount % degree == 0:
            return True
        return self.rows > 0 and degree % self.amount == 0 and self.rows % degree == 0


def units_of(name: str, rule: MegatronRule, shape: Sequence[int], facts: MegatronFacts) -> DivisibleUnits | None:
    """Return the units of a tensor that the degree of `rule.axis` must divide; None if any degree works.

    Any degree works for vocabularies, because they are padded, and for tensors that every rank has whole.
    """
    if rule.dim is None or rule.dim >= len(shape) or is_vocabulary(name):
        return None
    words = name.split(".")
    module = words[-2] if len(words) > 1 else ""

    section_sizes = rule.sections(shape[rule.dim])
    if not section_sizes:
        if len(rule.parts) == 2:
            what = f"rows that are no two halves ({shape[rule.dim]})"
        else:
            proportions = ", ".join(map(str, rule.parts))
            what = f"rows that are no {len(rule.parts)} parts of {proportions} ({shape[rule.dim]})"
        return DivisibleUnits(1, what, name)
    if module == "linear_kv_proj":
        return DivisibleUnits(1, "key and value that all heads share", name)
    extent = gcd(*section_sizes)

    # Recurrent modules are shared by heads or groups, or by what divides all their sections.
    kind = "" if is_tower(name) else _recurrent_kind(words)
    if kind and len(section_sizes) > 1:
        heads = facts.mamba_groups if kind == MAMBA else facts.delta_heads
        if heads and extent % heads == 0:
            return DivisibleUnits(heads, "groups" if kind == MAMBA else "key heads", name)
        return DivisibleUnits(extent, f"rows that divide all {len(section_sizes)} sections", name)
    if kind and _is_by_key_head(words) and facts.delta_heads and extent % facts.delta_heads == 0:
        return DivisibleUnits(facts.delta_heads, "key heads", name)
    if kind and words[-1] in _HEADS:
        return DivisibleUnits(extent, "heads", name)

    # Attention is shared by query groups and heads, where the arguments say how many.
    if not is_tower(name):
        if module == "linear_qkv" and facts.groups and extent % facts.groups == 0:
            return DivisibleUnits(facts.groups, "query groups", name, 0 if facts.groups_whole else shape[0])
        if module == "k_layernorm" and facts.groups and extent % facts.groups == 0:
            return DivisibleUnits(facts.groups, "query groups", name)
        if module in _BY_HEAD and facts.heads and extent % facts.heads == 0:
            return DivisibleUnits(facts.heads, "attention heads", name)

    what = {"linear_fc1": "ffn rows", "linear_fc2": "ffn columns"}.get(module, "rows" if rule.dim == 0 else "columns")
    return DivisibleUnits(extent, what, name)


def _can_share(units: Iterable[DivisibleUnits], degree: int) -> bool:
    return all(unit.can_be_shared(degree) for unit in units)


def check_degree(flag: str, degree: int, units: Iterable[DivisibleUnits]) -> list[str]:
    """Return notes on a valid degree.

    Raises UsageError E0273, with the nearest valid degrees, if `degree` ranks can't share all `units`.
    """
    all_units = list(units)
    indivisible = next((unit for unit in all_units if not unit.can_be_shared(degree)), None)
    if indivisible is None:
        # More ranks than units: each unit is shared by several.
        scarce = next((unit for unit in all_units if unit.amount % degree), None)
        if scarce is None:
            return []
        what = f"ranks share the {scarce.amount} {scarce.what}"
        return [f"--{flag} {degree}: {what}, which Megatron-Core takes since 0.16 and earlier ones refuse"]

    common = gcd(*(unit.rows or unit.amount for unit in all_units))
    valid = [n for n in range(1, min(common, 65536) + 1) if _can_share(all_units, n)]
    raise UsageError(
        f"--{flag} {degree}: {indivisible.amount} {indivisible.what} do not divide by {degree}",
        code=DEGREE,
        key=indivisible.name,
        hint=f"the nearest degrees that do: {nearest(degree, valid)}",
    )
