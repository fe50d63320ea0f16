"""Megatron-Core's tensor names: a rank's name, the name in the whole model, and the order in which a model registers
them.

The one idea: a rank's name is the logical name with three differences: the layer's number counts from the chunk's first
layer, the expert's number from the rank's first expert, and a norm may be stored under the linear that fuses it.

    stage 1 of 2 (layers 4..7), expert rank 1 (experts 2, 3)
    decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight      <- the rank's
    decoder.layers.5.mlp.experts.local_experts.2.linear_fc1.weight      <- the model's

Containers of experts, all one logical tensor an expert:
    sequential   mlp.experts.local_experts.<e>.linear_fc1.weight   (2f, h)
    te_grouped   mlp.experts.linear_fc1.weight<e>                  (2f, h)
    grouped      mlp.experts.weight1 (h, E*2f) and weight2 (E*f, h), viewed as (E, h, 2f) and (E, f, h), each transposed
Norms: the local spec's names are the logical ones; Transformer Engine fuses them into the linear that follows. Mamba's
convolution is `mixer.conv1d_weight`, as core 0.19 has it (`mixer.conv1d.weight` before, and in torch_dist).

A multimodal model has its language model under `language_model.` (Bridge's qwen_omni and nemotron_vl put a word before
it); all of the above holds there. A module next to the language model is a tower: its layers are not pipelined.

Order: the flat buffers of the distributed optimizer hold no names, so the order in which modules register their
parameters is part of the format. `registration_order` gives it from names alone.

Sources (NVIDIA/Megatron-LM, core 0.16.1): `core/transformer/transformer_layer.py`, `attention.py`,
`multi_latent_attention.py`, `mlp.py`, `moe/moe_layer.py`, `moe/experts.py`, `multi_token_prediction.py`,
`models/gpt/gpt_model.py` (order of the `self.x = build_module(...)` lines); `models/gpt/gpt_layer_specs.py` (which
norms TE fuses); 0.19.2 `multi_token_prediction.py` (`mtp_model_layer`), `ssm/mamba_layer.py`, `ssm/mamba_mixer.py`,
`ssm/gated_delta_net/common.py`, `models/hybrid/hybrid_layer_specs.py`, `post_training/modelopt/hybrid/model_specs.py`.
TransformerEngine 2.x `module/layernorm_linear.py`, `grouped_linear.py` (order inside a module). megatron-bridge 0.6.2
`models/*/*_bridge.py` (words before the language model).

Cost: a few us a name. What it does not do: shapes, boxes (`megatron.rules`), files.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from ckpt_tool.core.bounds import check_count, numeral

CONTAINERS = SEQUENTIAL, TE_GROUPED, GROUPED = "sequential", "te_grouped", "grouped"
TIED_HEAD = "output_layer.weight"
EMBEDDING = "embedding.word_embeddings.weight"

ROOT = r"(?:(?:thinker\.|llava_model\.)?language_model\.)?"  # prefix of the language model's names
_ROOT = re.compile(ROOT)
_TOWER = re.compile(
    r"(?:thinker\.|llava_model\.)?(?:(vision_model|vision_projection)|vision_tower|visual|multi_modal_projector|"
    r"audio_model|audio_tower|audio_projection|sound_model|sound_projection|embed_vision|embed_audio|mm_projector|"
    r"patch_merge_mlp|resampler_model|image_insert_embedding|lightning_indexers|talker|code2wav|token2wav)\."
)
# Prefix of the names of repeated modules; torch_dist may store all modules of such a stack under one key.
STACK = r"(?:[a-z_]+\.){0,2}(?:decoder|encoder)\.(?:layers|deepstack_merger_list)"
_LAYER = re.compile(rf"({ROOT}(?:decoder|encoder)\.layers\.)(\d{{1,9}})(\..+)", re.DOTALL)
_LOCAL_EXPERT = re.compile(r"(.*\.experts\.local_experts\.)(\d{1,9})(\..+)", re.DOTALL)
_TE_EXPERT = re.compile(r"(.*\.experts\.)(linear_fc[12])\.(weight|bias)(\d{1,9})", re.DOTALL)
_GROUPED = re.compile(r"(.*\.experts)\.weight([12])", re.DOTALL)
_MTP = re.compile(rf"({ROOT}mtp\.layers\.)(\d{{1,9}})\.", re.DOTALL)
BY_HEAD = "_by_head"  # suffix of our names: rows are ordered by key head, as in mcore-bridge, not in core's sections
_BY_HEAD = re.compile(r".*\.self_attention\.(?:in_proj|conv1d)\.(?:weight|bias)", re.DOTALL)
_CONVOLUTION = re.compile(r"(.*\.(?:mixer|mamba_mixer)\.conv1d)([._])(weight|bias)", re.DOTALL)

# What a fused linear (or a key of a distributed checkpoint) calls a norm -> the local spec's name, inside a layer.
NORM_ALIASES = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."),
    ("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."),
    ("self_attention.in_proj.layer_norm_", "input_layernorm."),  # gated delta net
    ("mixer.in_proj.layer_norm_", "norm."),  # Mamba
)
# Linear layers, each of which has an extra state.
LINEARS = frozenset(
    "linear_proj linear_qkv linear_fc1 linear_fc2 linear_q_proj linear_q_down_proj linear_q_up_proj "
    "linear_kv_down_proj linear_kv_up_proj eh_proj in_proj out_proj fc1_latent_proj fc2_latent_proj "
    "q_proj k_proj v_proj g_proj o_proj b_proj f_a_proj f_b_proj q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj".split()
)
# Norms of Kimi K3's own modules, which have none with Transformer Engine either.
PLAIN_NORMS = frozenset(
    "self_attention_res_norm mlp_res_norm output_attn_res_norm routed_expert_norm o_norm q_a_layernorm "
    "kv_a_layernorm".split()
)
DEEPSEEK_V4 = "self_attention.linear_kv_proj"  # of its attention: one key and value for all heads
# Linears of an attention that takes what is normed, so that no norm of it is fused
NORMED_BEFORE = ("self_attention.core_attention.indexer.linear_wq_b", DEEPSEEK_V4)
RESIDUAL = "mlp_res_norm"  # of a layer with attention residuals
# Layers of Megatron-Bridge's Gemma 4, by tensors that core's layers lack: layers without experts are its own modules,
# where no norm is fused, layers with experts are Transformer Engine's. ms-swift's layers have neither norm.
GEMMA4 = "layer_scalar"
GEMMA4_DENSE = "post_self_attn_layernorm.weight"
GEMMA4_SPARSE = "post_ffn_layernorm.weight"
# Last words of buffers: they are in the model's state, but no optimizer has states of them.
BUFFERS = frozenset(
    "expert_bias tid2eid local_tokens_per_expert global_tokens_per_expert inv_freq layer_multipliers "
    "ngram_heads_vocab_sizes ngram_heads_offsets".split()
)


class ExpertName(NamedTuple):
    """A name of one expert's tensor, taken apart: `front` ends in `.experts.`, `rest` is `linear_fc1.weight`."""

    front: str
    expert: int
    rest: str

    def logical(self) -> str:
        """Return the name in the sequential container, which is the logical one."""
        return f"{self.front}local_experts.{self.expert}.{self.rest}"


def is_buffer(name: str) -> bool:
    """Return whether the tensor is a buffer, of which no optimizer has a state."""
    return name.rpartition(".")[2] in BUFFERS


def gemma4_layer(every: Iterable[str]) -> str:
    """Return `GEMMA4_DENSE` or `GEMMA4_SPARSE` if the layers are Megatron-Bridge's Gemma 4, "" otherwise.

    >>> gemma4_layer(["decoder.layers.0.layer_scalar", "decoder.layers.0.post_ffn_layernorm.weight"])
    'post_ffn_layernorm.weight'
    """
    inside = {match[3][1:] for match in map(_LAYER.fullmatch, every) if match}
    return next((norm for norm in (GEMMA4_DENSE, GEMMA4_SPARSE) if {GEMMA4, norm} <= inside), "")


def root_of(name: str) -> str:
    """Return the prefix before the language model's own name: `language_model.`, or "".

    >>> root_of("language_model.decoder.layers.3.mlp.router.weight"), root_of("output_layer.weight")
    ('language_model.', '')
    """
    found = _ROOT.match(name)
    return found[0] if found else ""


def stem(name: str) -> str:
    """Return the name without the prefix that a multimodal model puts before it."""
    return name[len(root_of(name)) :]


def is_tower(name: str) -> bool:
    """Return whether the name belongs to a module next to the language model: a vision or audio tower, a projector."""
    return _TOWER.match(name) is not None


def is_foreign(name: str) -> bool:
    """Is it a tower's or a projector's that other modules than Megatron's make, which no tensor rank cuts?"""
    found = _TOWER.match(name)
    return found is not None and found[1] is None


def canonical(name: str) -> str:
    """Return the name with norms, MTP's inner layer and Mamba's convolution spelled as in logical names.

    The numbers of layers and experts stay as they are.

    >>> canonical("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight")
    'decoder.layers.3.input_layernorm.weight'
    """
    if ".mtp_model_layer." in name and _MTP.match(name):
        name = name.replace(".mtp_model_layer.", ".transformer_layer.", 1)
    if ".layer_norm_" in name:
        for fused, plain in NORM_ALIASES:
            front, found, rest = name.rpartition(fused)
            if found and (not front or front.endswith(".")) and "." not in rest:
                return f"{front}{plain}{rest}"
    return convolution(name, "_") if ".conv1d." in name else name


def mtp_inner(name: str, inner: str) -> str:
    """Return the name with MTP's inner layer called `inner`; a hybrid model's, a stack of layers, has only one name."""
    if ".transformer_layer." not in name or not _MTP.match(name):
        return name
    stack = ".transformer_layer.layers." in name
    return name.replace(".transformer_layer.", f".{'mtp_model_layer' if stack else inner}.", 1)


def by_head(name: str) -> str:
    """Return the name with the mark for rows by key head if it is a gated delta net's projection or convolution.

    >>> by_head("decoder.layers.0.self_attention.conv1d.weight"), by_head("decoder.layers.0.self_attention.dt_bias")
    ('decoder.layers.0.self_attention.conv1d.weight_by_head', 'decoder.layers.0.self_attention.dt_bias')
    """
    return f"{name}{BY_HEAD}" if _BY_HEAD.fullmatch(name) and not is_tower(name) else name


def convolution(name: str, separator: str) -> str:
    """Return the name with Mamba's convolution as a module (`.`: `conv1d.weight`) or as parameters of the mixer (`_`:
    `conv1d_weight`)."""
    found = _CONVOLUTION.fullmatch(name) if ".conv1d" in name else None
    return f"{found[1]}{separator}{found[3]}" if found else name


def is_fused_norm(name: str) -> bool:
    """Return whether the name is Transformer Engine's name of a fused norm."""
    return ".layer_norm_" in name and canonical(name) != name


class NormPlace(NamedTuple):
    """Both names of a norm: `front + plain + rest` is the logical one, `front + fused + rest` Transformer Engine's."""

    front: str
    fused: str  # of `NORM_ALIASES`, like `plain`
    plain: str
    rest: str
    there: bool  # the layer has the linear that would fuse the norm


def norm_place(name: str, every: Container[str]) -> NormPlace | None:
    """Return both names of a norm, from its logical name; None for a tensor that is never fused.

    every: all logical names of the model.
    """
    found = None
    if ".inner_layer." in name:  # wrapped in hyper-connections
        return None
    for fused, plain in NORM_ALIASES:
        front, here, rest = name.rpartition(plain)
        if not here or "." in rest or (front and not front.endswith(".")):
            continue
        linear = f"{front}{fused.removesuffix('layer_norm_')}weight"
        there = linear in every or f"{linear}{BY_HEAD}" in every
        if there:
            return NormPlace(front, fused, plain, rest, True)
        if plain != "norm." and found is None:
            found = NormPlace(front, fused, plain, rest, False)
    return found


def fused_norm(name: str, every: Container[str]) -> str:
    """Return Transformer Engine's name of a tensor: a norm is fused into the linear that follows.

    A norm keeps its own name if the layer has no such linear (latent attention, experts), and so do the norms of an
    attention whose indexer reads the normed values. every: all logical names of the model.
    """
    place = norm_place(name, every)
    if place is None or not place.there:
        return name
    before = (f"{place.front}{each}.weight" for each in NORMED_BEFORE)
    if place.plain.startswith("self_attention.") and any(each in every for each in before):
        return name
    return f"{place.front}{place.fused}{place.rest}"


def layer_of(name: str) -> tuple[str, int] | None:
    """Return (`decoder.layers.`, number) of a name in a pipelined layer; None otherwise (MTP layers are not pipelined).

    >>> layer_of("decoder.layers.7.mlp.linear_fc1.weight")
    ('decoder.layers.', 7)
    """
    found = _LAYER.fullmatch(name)
    return (found[1], int(found[2])) if found else None


def shift_layer(name: str, by: int) -> str:
    """Return the name with `by` added to its layer's number."""
    found = _LAYER.fullmatch(name) if by else None
    return f"{found[1]}{int(found[2]) + by}{found[3]}" if found else name


def expert_of(name: str) -> ExpertName | None:
    """Return the parts of an expert's name in the sequential or the TE-grouped container, None for anything else.

    >>> expert_of("decoder.layers.1.mlp.experts.linear_fc1.weight3").logical()
    'decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight'
    """
    found = _LOCAL_EXPERT.fullmatch(name)
    if found:
        return ExpertName(found[1].removesuffix("local_experts."), int(found[2]), found[3][1:])
    found = _TE_EXPERT.fullmatch(name)
    return ExpertName(found[1], int(found[4]), f"{found[2]}.{found[3]}") if found else None


def grouped_of(name: str) -> tuple[str, int] | None:
    """Return (front up to `.experts.`, 1 or 2) for GroupedMLP's `weight1` and `weight2`, None for anything else."""
    found = _GROUPED.fullmatch(name)
    return (f"{found[1]}.", int(found[2])) if found else None


def container_of(name: str) -> str | None:
    """Return the container of experts that the name shows, None for names outside experts."""
    if ".experts." not in name:
        return None
    if _LOCAL_EXPERT.fullmatch(name):
        return SEQUENTIAL
    if _TE_EXPERT.fullmatch(name):
        return TE_GROUPED
    return GROUPED if _GROUPED.fullmatch(name) else None


def in_container(name: ExpertName, container: str) -> str:
    """Return the name in the sequential or the TE-grouped container. `name.expert` is the rank's own number."""
    if container == TE_GROUPED:
        module, _, leaf = name.rest.rpartition(".")
        return f"{name.front}{module}.{leaf}{name.expert}"
    return name.logical()


# -- order ------------------------------------------------------------------------------------------------------------

# Modules in the order in which Megatron's classes register them (see Sources); a word has one place for all classes.
_FIRST = (
    "embedding word_embeddings position_embeddings tokentype_embeddings encoder decoder layers "
    # embeddings of n-grams; a layer of Mamba, whose norm comes after it and the mixer's own norm before out_proj; a
    # gated delta net; falcon_h1's layer
    "ple_embedding key_proj value_proj norm_key norm_query norm_conv "
    "input_layernorm mixer in_proj conv1d linear_wkv linear_wgate norm out_norm out_proj in_proj_qkvz in_proj_ba "
    "mamba_mixer self_attention pre_cross_attn_layernorm cross_attention pre_mlp_layernorm mlp experts_mlp "
    # attention, what chooses for a sparse one
    "core_attention linear_proj linear_qkv linear_q linear_kv linear_q_proj linear_q_down_proj linear_q_up_proj "
    "linear_kv_proj linear_kv_down_proj linear_kv_up_proj linear_wq_b linear_wk index_qk_proj q_norm k_norm "
    "linear_weights_proj q_layernorm k_layernorm kv_layernorm compressor indexer "
    # Kimi K3's
    "q_a_proj q_a_layernorm q_b_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj q_proj k_proj v_proj "
    "q_conv1d k_conv1d v_conv1d f_a_proj f_b_proj b_proj g_proj o_norm o_proj "
    # experts
    "router fc1_latent_proj fc2_latent_proj experts local_experts text_moe_layer vision_moe_layer shared_experts "
    "linear_fc1 linear_fc2 routed_expert_norm post_moe_layernorm post_shared_expert_layernorm "
    # what a layer has behind its modules
    "ple self_attention_hyper_connection attn_hyper_connection mlp_hyper_connection hc_norm input_mix_weight_down "
    "input_mix_weight_up block_inject_weight self_attention_res_norm self_attention_res_proj mlp_res_norm mlp_res_proj "
    "output_attn_res_norm output_attn_res_proj "
    "pre_feedforward_layernorm_2 post_self_attn_layernorm post_attention_layernorm post_mlp_layernorm "
    "post_feedforward_layernorm post_feedforward_layernorm_1 post_feedforward_layernorm_2 "
    "pre_shared_expert_layernorm post_ffn_layernorm "
    "per_layer_input_gate per_layer_projection post_per_layer_input_norm "
    # MTP
    "enorm hnorm eh_proj e_proj h_proj transformer_layer mtp_model_layer hyper_connection_mixer "
    "final_layernorm final_norm per_layer_embedding per_layer_model_proj per_layer_proj_norm "
    "embed_tokens_per_layer per_layer_model_projection per_layer_projection_norm mtp output_layer"
).split()
_RANK = {word: i for i, word in enumerate(_FIRST)}
# These words have a rank only inside layers: models of the hub have them elsewhere, in other orders.
_IN_LAYERS = frozenset(
    "mixer mamba_mixer in_proj conv1d norm out_norm out_proj key_proj value_proj q_norm k_norm indexer "
    "q_a_proj q_a_layernorm q_b_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj q_proj k_proj v_proj "
    "q_conv1d k_conv1d v_conv1d f_a_proj f_b_proj b_proj g_proj o_norm o_proj pre_feedforward_layernorm_2 "
    "post_self_attn_layernorm post_attention_layernorm post_mlp_layernorm post_feedforward_layernorm "
    "post_feedforward_layernorm_1 post_feedforward_layernorm_2 per_layer_input_gate per_layer_projection "
    "post_per_layer_input_norm".split()
)
# Parameters of one module, in the order of registration.
_LEAF_ORDER = (
    "hc_head_fn hc_head_base hc_head_scale linear_o_group_proj attn_sink ape alpha_pre alpha_post alpha_res "
    "softmax_offset conv1d_weight conv1d_bias dt_bias A_log D gate_weight layer_norm_weight layer_norm_bias weight "
    "weight1 weight2 bias expert_bias per_expert_scale scale"
)
# Kimi K3's and DeepSeek V4's own modules and ms-swift's Gemma 4 register two of these in the opposite order:
# a part of a name that shows such a model -> the two words.
_TURNED = {
    ".q_conv1d.": ("A_log", "dt_bias"),
    f".{DEEPSEEK_V4}.": ("q_layernorm", "kv_layernorm"),
    ".experts_mlp.": ("scale", "per_expert_scale"),
}
_LEAVES = {word: i for i, word in enumerate(_LEAF_ORDER.split())}
_NUMBERED = re.compile(r"(weight|bias)(\d{1,9})")


def registration_order(names: Sequence[str]) -> list[int]:
    """Return the positions of `names` in the order in which the model registers them.

    `names` are those of one chunk, in the rank's own spelling. A module's own parameters come before those of its
    submodules. Words that Megatron's GPT models do not have keep the order in which they are first seen, so names that
    are already in the right order stay in it.
    """
    seen: dict[str, int] = {}
    for name in names:
        for word in name.split("."):
            seen.setdefault(word, len(seen))
    turned = dict[str, str]()
    for sign, (one, other) in _TURNED.items():
        turned |= {one: other, other: one} if any(sign in name for name in names) else {}
    keys = [_order_key(name, seen, turned) for name in names]
    return sorted(range(len(names)), key=keys.__getitem__)


def _order_key(name: str, seen: dict[str, int], turned: Mapping[str, str]) -> tuple[tuple[int, int, int], ...]:
    *modules, leaf = name.split(".")
    key: list[tuple[int, int, int]] = []
    if is_tower(name):  # a tower's names keep the given order
        return ((1, len(_RANK), seen[modules[0]]),)
    inside = _LAYER.match(name) or _MTP.match(name)
    grouped = "experts" in modules and modules[-1] in ("linear_fc1", "linear_fc2") and _NUMBERED.fullmatch(leaf)
    for word in modules:
        if numeral(word):
            key.append((1, int(word), 0))
        else:
            rank = _RANK.get(turned.get(word, word)) if inside or word not in _IN_LAYERS else None
            key.append((1, rank, 0) if rank is not None else (1, len(_RANK), seen[word]))
    if grouped:
        key.append((0, int(grouped[2]), grouped[1] == "bias"))
    else:
        rank = _LEAVES.get(turned.get(leaf, leaf))
        key.append((0, rank, 0) if rank is not None else (0, len(_LEAVES), seen[leaf]))
    return tuple(key)


def experts_count(names: Iterable[str]) -> int:
    """Return the number of experts in a layer, from logical names; 0 without experts.

    Raises InconsistentCheckpoint E1650 if the highest number is implausible for so many tensors.
    """
    experts = map(expert_of, filter(lambda name: ".experts." in name, names))
    numbers = [expert.expert for expert in experts if expert]
    return check_count(max(numbers, default=-1) + 1, len(numbers), "experts by the tensors' names")


def layers_count(names: Iterable[str]) -> int:
    """Return the number of layers, from logical names, without MTP layers.

    Raises InconsistentCheckpoint E1650 if the highest number is implausible for so many tensors.
    """
    numbers = [layer[1] for layer in map(layer_of, names) if layer]
    return check_count(max(numbers, default=-1) + 1, len(numbers), "layers by the tensors' names")


def mtp_count(names: Iterable[str]) -> int:
    """Return the number of MTP layers."""
    matches = (_MTP.match(name) for name in names if "mtp.layers." in name)
    return len({match[2] for match in matches if match})
