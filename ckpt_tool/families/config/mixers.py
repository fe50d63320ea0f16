"""Forms of models with recurrent layers: gated delta nets, Mamba mixers.

    delta_net   full_attention_interval = 4, 4 layers      linear_attention_freq = [1, 1, 1, 0]
    hybrid      hybrid_override_pattern = "M-*E"           hybrid_layer_pattern = "M-*E", mamba_num_heads, ...
    falcon_h1   mamba_n_heads = 24, mamba_d_head = 64      mamba_num_heads = 24, mamba_head_dim = 64, falconh1_ratio = 1.0

A hybrid model's layers have one module each, by a letter: M a mixer, * attention, - an MLP, E experts. Megatron has those
of multi-token prediction in the same pattern, behind a slash for each depth. Megatron-LM has arguments for a mixer's
sizes, and no layer with a mixer and an attention side by side (Falcon-H1); the words for that and for the factors are
those of Megatron-Bridge's provider. Sources: Megatron-LM core 0.19.2 `training/arguments.py`,
`core/models/hybrid/hybrid_layer_allocation.py`, `core/models/gpt/experimental_attention_variant_module_specs.py`;
Megatron-Bridge 0.6.2 `models/qwen/{qwen3_next,qwen35}_bridge.py`, `models/nemotronh/nemotron_h_bridge.py`,
`models/falcon_h1/falconh1_bridge.py`, `modeling_falconh1/falconh1_model.py`; transformers 5.23
`models/nemotron_h/configuration_nemotron_h.py`. Cost: none. What it does not do: see `families.config.forms`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tool.families.config.experts import without_experts
from ckpt_tool.families.config.megatron_arguments import DELTA_ARGUMENTS, QWEN4_EXP_WORDS
from ckpt_tool.families.config.words import LAYERS, Arguments, ConfigWords, Form, Values, linear_pattern, same

_DELTA = same(*((name, name) for name in DELTA_ARGUMENTS if name != "linear_attention_freq"))


def _delta_net_to(model: ConfigWords, out: Values) -> None:
    _DELTA.to(model, out)
    layers = min(model.count("num_hidden_layers") or 0, LAYERS)
    kinds = model.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        out["linear_attention_freq"] = [int(kind == "linear_attention") for kind in kinds]
    else:
        out["linear_attention_freq"] = linear_pattern(model.count("full_attention_interval") or 4, layers)


def _delta_net_back(args: Arguments, out: Values) -> None:
    _DELTA.back(args, out)
    pattern = linear_pattern(args.get("linear_attention_freq"), args.get("num_layers") or 0)
    if pattern is None:
        return
    out["layer_types"] = ["linear_attention" if is_linear else "full_attention" for is_linear in pattern]
    if 0 in pattern and pattern == linear_pattern(pattern.index(0) + 1, len(pattern)):
        out["full_attention_interval"] = pattern.index(0) + 1


_QWEN4_EXP = same(*((name, name) for name in QWEN4_EXP_WORDS), ("seed", "ple_seed"))


def _qwen4_exp_to(model: ConfigWords, out: Values) -> None:
    _QWEN4_EXP.to(model, out)
    model.lost(
        "hyper-connections, embeddings of n-grams and an indexer: Megatron-Core 0.19.2 has none; mcore-bridge's layers have"
    )


def _qwen4_exp_back(args: Arguments, out: Values) -> None:
    """Whose layers of attention have an indexer."""
    _QWEN4_EXP.back(args, out)
    out.pop("full_attention_interval", None)
    kinds = out.get("layer_types", [])
    out["layer_types"] = ["indexed_attention" if kind == "full_attention" else kind for kind in kinds]


_HYBRID = same(
    ("ssm_state_size", "mamba_state_dim"),
    ("mamba_head_dim", "mamba_head_dim"),
    ("mamba_num_heads", "mamba_num_heads"),
    ("n_groups", "mamba_num_groups"),
    ("residual_in_fp32", "fp32_residual_connection"),
)
_SPARSE = same(
    ("moe_shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    ("moe_latent_size", "moe_latent_size"),
)
_LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
_DEPTHS = 64  # of multi-token prediction that are spelled out


def hybrid_pattern(args: Arguments) -> tuple[str, list[str]]:
    """(a letter for each layer of the decoder, those of each depth of MTP), without the ends of stages. Before core 0.17
    two arguments said it."""
    pattern = args.get("hybrid_layer_pattern") or args.args.get("hybrid_override_pattern")
    main, *ahead = pattern.replace("|", "").split("/") if isinstance(pattern, str) else [""]
    inner = args.args.get("mtp_hybrid_override_pattern")
    depths = args.get("mtp_num_layers") or 0
    if not any(ahead) and isinstance(inner, str):
        ahead = [inner] * min(depths, _DEPTHS)
    return main, [letters for letters in ahead if letters]


def _letters(model: ConfigWords, pattern: str, kinds: str) -> str:
    text = model.get(pattern)
    layer_kinds = model.get(kinds)
    if isinstance(text, str):
        return text
    return "".join(_LETTERS.get(str(kind), "?") for kind in layer_kinds) if isinstance(layer_kinds, list) else ""


def _hybrid_to(model: ConfigWords, out: Values) -> None:
    _HYBRID.to(model, out)
    main = _letters(model, "hybrid_override_pattern", "layers_block_type")
    inner = _letters(model, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    depths = model.count("num_nextn_predict_layers") or 0
    if depths > _DEPTHS:
        model.lost(f"num_nextn_predict_layers {depths}: {_DEPTHS} are written")
        depths = _DEPTHS
    out |= {"num_layers": len(main), "hybrid_layer_pattern": "/".join([main, *[inner] * depths])}
    out |= {"mtp_num_layers": depths or None, "mtp_use_repeated_layer": bool(depths)}
    if "E" not in main:
        without_experts(out)
    else:
        _SPARSE.to(model, out)
    limit = model.config.get("time_step_limit")
    if isinstance(limit, list) and limit[:1] not in ([], [0], [0.0]):
        model.lost(f"time_step_limit {limit}: Megatron's mixer has none")


def _hybrid_back(args: Arguments, out: Values) -> None:
    _HYBRID.back(args, out)
    if args.get("num_experts"):
        _SPARSE.back(args, out)
    main, ahead = hybrid_pattern(args)
    unknown = sorted(set(main) - set(_LETTERS.values()))
    if unknown:
        args.lost(f"hybrid_layer_pattern: the class has no layers {', '.join(unknown)}")
    out |= {"num_hidden_layers": len(main), "hybrid_override_pattern": main}
    out["num_nextn_predict_layers"] = len(ahead)
    if ahead:
        out["mtp_hybrid_override_pattern"] = ahead[0]


_OWN = (
    "embedding_multiplier lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier "
    "ssm_in_multiplier ssm_out_multiplier mlp_multipliers ssm_multipliers".split()
)
_SAME = same(
    ("mamba_n_heads", "mamba_num_heads"),
    ("mamba_d_state", "mamba_state_dim"),
    ("mamba_n_groups", "mamba_num_groups"),
    ("mamba_d_conv", "d_conv"),
    ("mamba_conv_bias", "conv_bias"),
    ("mamba_chunk_size", "chunk_size"),
    ("mamba_rms_norm", "rmsnorm"),
    ("mamba_norm_before_gate", "norm_before_gate"),
    *((name, name) for name in _OWN),
)


def _falcon_h1_to(model: ConfigWords, out: Values) -> None:
    _SAME.to(model, out)
    heads = model.count("mamba_n_heads")
    wide = model.count("mamba_d_ssm")
    wide = wide or (model.count("mamba_expand") or 2) * (model.count("hidden_size") or 0)
    if heads and wide % heads == 0:
        out["mamba_head_dim"] = wide // heads
    out["falconh1_ratio"] = 1.0
    model.lost("a mixer next to the attention: Megatron-LM has no such layer; Megatron-Bridge's model has")


def _falcon_h1_back(args: Arguments, out: Values) -> None:
    _SAME.back(args, out)
    heads = args.args.get("mamba_num_heads")
    width = args.args.get("mamba_head_dim")
    if type(heads) is int and type(width) is int:
        out |= {"mamba_d_ssm": heads * width, "mamba_d_head": width}


MIXER_FORMS: Mapping[str, Form] = {
    "delta_net": Form(_delta_net_to, _delta_net_back),
    "qwen4_exp": Form(_qwen4_exp_to, _qwen4_exp_back),
    "hybrid": Form(_hybrid_to, _hybrid_back),
    "falcon_h1": Form(_falcon_h1_to, _falcon_h1_back),
}
FALCON_H1_ARGUMENTS = (
    *"mamba_num_heads mamba_head_dim mamba_state_dim mamba_num_groups d_conv conv_bias rmsnorm norm_before_gate".split(),
    *_OWN,
)
