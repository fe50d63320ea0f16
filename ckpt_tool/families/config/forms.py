"""Forms: what a config and Megatron's arguments say in other shapes, each as a pair of functions that undo each other.

The one idea: `to(model, out)` writes arguments from a config, `back(arguments, out)` the config from arguments; a class
lists its forms (`families.config.facts`). What the other side has no word for is a line in `notes`, never a guess.

    heads   num_key_value_heads = 2, head_dim = 8    group_query_attention = True, num_query_groups = 2, kv_channels = 8
    rope    rope_scaling = {rope_type: llama3, factor: 8}  use_rope_scaling = True, rope_scaling_factor = 8.0
    first_dense   first_k_dense_replace = 1, 3 layers      moe_layer_freq = [0, 1, 1]

Sources: Megatron-LM core 0.16.1 (`training/arguments.py`, `core/transformer/moe/moe_utils.py`,
`core/transformer/utils.py` `is_layer_window_attention`, `core/models/common/embeddings/rotary_pos_embedding.py`),
transformers 5.23 (`modeling_*.py`, `modeling_rope_utils.py`), Megatron-Bridge of August 2026
(`conversion/model_bridge.py`). Cost: none. What it does not do: choose the class, check shapes
(`families.config.translation`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.core.attention_window import window_pattern
from ckpt_tool.families.config.experts import EXPERT_FORMS
from ckpt_tool.families.config.gates import GATE_FORMS
from ckpt_tool.families.config.kinds import KIND_FORMS
from ckpt_tool.families.config.mixers import MIXER_FORMS
from ckpt_tool.families.config.words import LAYERS, Arguments, ConfigWords, Form, Values, same

_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fixed in Megatron
_YARN = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}  # MLATransformerConfig's own

_SIZES = same(
    ("num_hidden_layers", "num_layers"),
    ("hidden_size", "hidden_size"),
    ("intermediate_size", "ffn_hidden_size"),
    ("num_attention_heads", "num_attention_heads"),
    ("vocab_size", "vocab_size"),
    ("rms_norm_eps", "layernorm_epsilon"),
    ("max_position_embeddings", "max_position_embeddings"),
    ("initializer_range", "init_method_std"),
)

# -- attention ---------------------------------------------------------------------------------------------------------


def _heads_to(model: ConfigWords, out: Values) -> None:
    heads = model.count("num_attention_heads")
    groups = model.count("num_key_value_heads")
    out["group_query_attention"] = groups is not None and groups != heads
    out["num_query_groups"] = groups if out["group_query_attention"] else 1
    width = model.count("head_dim") or (model.count("hidden_size") or 0) // (heads or 1)
    if width:
        out["kv_channels"] = width


def _heads_back(args: Arguments, out: Values) -> None:
    heads = args.get("num_attention_heads")
    groups = args.args.get("num_query_groups")
    out["num_key_value_heads"] = groups if args.get("group_query_attention") and groups else heads
    hidden = args.get("hidden_size")
    width = args.get("kv_channels")
    even = hidden // heads if heads and type(hidden) is int else None
    if (width or even) and (width not in (None, even) or "head_dim" in args.facts.defaults):
        out["head_dim"] = width or even


def _latent_to(model: ConfigWords, out: Values) -> None:
    out |= {"multi_latent_attention": True, "group_query_attention": False, "num_query_groups": 1}
    pairs = (
        ("q_lora_rank", "q_lora_rank"),
        ("kv_lora_rank", "kv_lora_rank"),
        ("qk_nope_head_dim", "qk_head_dim"),
        ("qk_rope_head_dim", "qk_pos_emb_head_dim"),
        ("v_head_dim", "v_head_dim"),
        ("v_head_dim", "kv_channels"),
    )
    out |= {name: model.get(key) for key, name in pairs}
    if model.get("rms_norm_eps") != 1e-6:  # transformers gives the norms of the low ranks none of its own
        model.lost(
            f"rms_norm_eps {model.get('rms_norm_eps')}: Megatron has it at the norms of the low ranks too, "
            "transformers 1e-6"
        )


def _latent_back(args: Arguments, out: Values) -> None:
    out["num_key_value_heads"] = args.get("num_attention_heads")
    out |= {
        key: args.get(name)
        for key, name in (
            ("q_lora_rank", "q_lora_rank"),
            ("kv_lora_rank", "kv_lora_rank"),
            ("qk_nope_head_dim", "qk_head_dim"),
            ("qk_rope_head_dim", "qk_pos_emb_head_dim"),
            ("v_head_dim", "v_head_dim"),
        )
    }


def windowed_layers(model: ConfigWords) -> tuple[int | None, list[bool]]:
    """(tokens that a windowed layer sees, whether each layer is one)."""
    size = model.get("sliding_window")
    layers = min(model.count("num_hidden_layers") or 0, LAYERS)
    kinds = model.get("layer_types")
    if type(size) is not int or model.get("use_sliding_window") is False:
        return None, [False] * layers
    if isinstance(kinds, list) and len(kinds) == layers:
        return size, [kind == "sliding_attention" for kind in kinds]
    full_count = model.count("max_window_layers") or 0
    return size, [i >= full_count for i in range(layers)]


def _window_to(model: ConfigWords, out: Values) -> None:
    size, layers = windowed_layers(model)
    if size is not None and any(layers):
        out["window_size"] = (size - 1, 0)
        out["window_attn_skip_freq"] = None if all(layers) else [int(is_windowed) for is_windowed in layers]


def _window_back(args: Arguments, out: Values) -> None:
    window = args.get("window_size")
    layers = args.get("num_layers") or 0
    has_no_maximum = "max_window_layers" not in args.facts.defaults
    if not (isinstance(window, tuple | list) and len(window) == 2 and type(window[0]) is int):
        out |= {"sliding_window": None} if has_no_maximum else {"use_sliding_window": False}
        return
    kinds = window_pattern(args.get("window_attn_skip_freq"), layers)
    out["sliding_window"] = window[0] + 1
    if not has_no_maximum:
        out |= {"use_sliding_window": True, "max_window_layers": 0}
    if not all(kinds):
        out["layer_types"] = ["sliding_attention" if is_windowed else "full_attention" for is_windowed in kinds]
        if not has_no_maximum and kinds == sorted(kinds):
            out["max_window_layers"] = kinds.index(True) if True in kinds else layers


# -- rope --------------------------------------------------------------------------------------------------------------


def rope_of(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Values:
    """What a config says of rope, whatever its age: {theta, factor_of_dims, type, ...scaling}."""
    rope: Values = {}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(name), Mapping):
            rope |= config[name]
    full_layers = rope.get("full_attention")
    if isinstance(full_layers, Mapping):  # Gemma 3 by transformers 5: windowed layers have their own
        rope = {key: value for key, value in rope.items() if not isinstance(value, Mapping)} | dict(full_layers)
    rope = {key: value for key, value in rope.items() if value is not None}  # null says nothing
    if not rope and "rope_parameters" not in config:  # a class may have a rope of its own
        rope |= defaults.get("rope_scaling", {})
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or defaults.get("rope_theta")
    part = (
        rope.pop("partial_rotary_factor", None)
        or config.get("partial_rotary_factor")
        or _compute_rotary_share(config, defaults)
    )
    return {"theta": theta, "part": part or defaults.get("partial_rotary_factor") or 1.0, "type": kind, **rope}


def _compute_rotary_share(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> float | None:
    """The part of a head that turns, of a config that counts its dims (MiniMax)."""
    dims, width = (config.get(key, defaults.get(key)) for key in ("rotary_dim", "head_dim"))
    return dims / width if type(dims) is int and type(width) is int and 0 < dims <= width else None


def _rope_to(model: ConfigWords, out: Values) -> None:
    rope = rope_of(model.config, model.facts.defaults)
    theta = rope["theta"]
    out["rotary_base"] = int(theta) if isinstance(theta, float) and theta.is_integer() else theta
    out["rotary_percent"] = float(rope["part"])
    if isinstance(rope.get("mrope_section"), list):
        out["mrope_section"] = rope["mrope_section"]

    if "latent" in model.facts.forms:
        _latent_rope_to(rope, model, out)
    elif rope["type"] == "llama3":
        out |= {"use_rope_scaling": True, "rope_scaling_factor": float(rope.get("factor", 8.0))}
        for key, value in _LLAMA3.items():
            if rope.get(key, value) != value:
                model.lost(f"rope_scaling: Megatron's rope for Llama 3 has {key} {value}, the model {rope[key]}")
        if out["rope_scaling_factor"] != 8.0:
            model.lost(
                f"rope_scaling: gpt_builders.py of Megatron-LM 0.16.1 does not pass rope_scaling_factor"
                f" {out['rope_scaling_factor']} on, it takes 8"
            )
    elif rope["type"] == "linear":
        out["rotary_seq_len_interpolation_factor"] = rope.get("factor")
        model.lost("rope_scaling: gpt_builders.py of Megatron-LM 0.16.1 does not pass a linear factor on")
    elif rope["type"] == "yarn":
        out["position_embedding_type"] = "yarn"
        rope.pop("max_position_embeddings", None)  # the config has it outside the rope too
        if (beta := rope.pop("llama_4_scaling_beta", None)) is not None:
            model.lost(
                f"rope_scaling: llama_4_scaling_beta {beta}, by which queries grow with their position, is in no argument "
                "of Megatron; Megatron-Bridge's layer of Ministral 3 has it"
            )
        out |= {f"yarn_{_yarn_name(key)}": value for key, value in rope.items() if key not in ("theta", "part", "type")}
        model.lost(
            "rope_scaling: Megatron-LM 0.16.1 has no arguments for yarn outside MLA; Megatron-Bridge's are written"
        )
    elif rope["type"] == "proportional":
        model.lost("rope_parameters: Megatron-LM has no rope of type proportional; Megatron-Bridge's model has")
    elif rope["type"] not in ("default", "mrope"):
        model.lost(f"rope_scaling: Megatron has no rope of type {rope['type']}")


def _yarn_name(key: str) -> str:
    return {"factor": "rotary_scaling_factor", "truncate": "correction_range_round_to_int"}.get(key, key)


def _latent_rope_to(rope: Values, model: ConfigWords, out: Values) -> None:
    out["rope_type"] = "rope" if rope["type"] == "default" else "yarn"
    if rope["type"] not in ("default", "yarn"):
        model.lost(f"rope_scaling: MLA of Megatron has no rope of type {rope['type']}")
    if rope["type"] == "yarn":
        out["rotary_scaling_factor"] = float(rope.get("factor", 1.0))
        out["mscale"] = float(rope.get("mscale", 1.0) or 1.0)
        out["mscale_all_dim"] = float(rope.get("mscale_all_dim", 0.0) or 0.0)
        for key, value in _YARN.items():
            out[key] = rope.get(
                key, value if key != "original_max_position_embeddings" else model.get("max_position_embeddings")
            )
            if out[key] != value:
                model.lost(
                    f"rope_scaling: Megatron-LM 0.16.1 has no argument for {key}, it takes {value}, the model "
                    f"has {out[key]}"
                )


def _rope_back(args: Arguments, out: Values) -> None:
    base = args.get("rotary_base")
    out["rope_theta"] = float(base) if type(base) is int else base
    percent = args.get("rotary_percent")
    if percent != 1.0 or "partial_rotary_factor" in args.facts.defaults:
        out["partial_rotary_factor"] = percent
    if "rotary_dim" in args.facts.defaults and type(percent) is float and type(out.get("head_dim")) is int:
        out["rotary_dim"] = round(percent * out["head_dim"])

    scaling: Values | None = None
    if "latent" in args.facts.forms:
        factor = args.get("rotary_scaling_factor")
        if args.get("rope_type") != "rope" and factor != 1.0:
            names = ("mscale", "mscale_all_dim", *_YARN)
            scaling = {
                "type": "yarn",
                "rope_type": "yarn",
                "factor": factor,
                **{name: args.get(name) for name in names},
            }
    elif args.get("use_rope_scaling"):
        scaling = {"rope_type": "llama3", "factor": float(args.get("rope_scaling_factor")), **_LLAMA3}
    elif args.get("position_embedding_type") == "yarn":
        spelt = {
            f"yarn_{_yarn_name(key)}": key
            for key in ("factor", "truncate", "mscale", "mscale_all_dim", *_YARN, "attention_factor")
        }
        scaling = {"rope_type": "yarn"} | {key: args.args[name] for name, key in spelt.items() if name in args.args}
    elif isinstance(args.get("mrope_section"), list):
        scaling = {"rope_type": "default", "mrope_section": args.get("mrope_section")}
    elif args.get("rotary_seq_len_interpolation_factor"):
        scaling = {"rope_type": "linear", "factor": float(args.get("rotary_seq_len_interpolation_factor"))}

    if scaling:
        out["rope_scaling"] = scaling
    elif "rope_scaling" in args.facts.defaults:  # said in words, or the class takes its own
        out["rope_parameters"] = {"rope_type": "default", "rope_theta": out["rope_theta"]}


# -- switches ----------------------------------------------------------------------------------------------------------


def _tied_to(model: ConfigWords, out: Values) -> None:
    out["untie_embeddings_and_output_weights"] = not model.get("tie_word_embeddings")


def _tied_back(args: Arguments, out: Values) -> None:
    out["tie_word_embeddings"] = not args.get("untie_embeddings_and_output_weights")


def _silu_to(model: ConfigWords, out: Values) -> None:
    if model.get("hidden_act") not in ("silu", "swish"):
        out["swiglu"] = False
        model.lost(f"hidden_act: Megatron's arguments have no gated {model.get('hidden_act')}")


def _silu_back(args: Arguments, out: Values) -> None:
    out["hidden_act"] = "silu"


def _biases_to(model: ConfigWords, out: Values) -> None:
    attention = bool(model.get("attention_bias"))
    mlp = bool(model.get("mlp_bias"))
    out["add_bias_linear"] = attention and mlp
    if attention != mlp:
        model.lost(f"attention_bias {attention}, mlp_bias {mlp}: Megatron has biases at all linear layers or at none")


def _biases_back(args: Arguments, out: Values) -> None:
    out |= {"attention_bias": bool(args.get("add_bias_linear")), "mlp_bias": bool(args.get("add_bias_linear"))}


FORMS: Mapping[str, Form] = {
    **EXPERT_FORMS,
    **GATE_FORMS,
    **KIND_FORMS,
    **MIXER_FORMS,
    "sizes": _SIZES,
    "heads": Form(_heads_to, _heads_back),
    "latent": Form(_latent_to, _latent_back),
    "window": Form(_window_to, _window_back),
    "rope": Form(_rope_to, _rope_back),
    "tied": Form(_tied_to, _tied_back),
    "silu": Form(_silu_to, _silu_back),
    "biases": Form(_biases_to, _biases_back),
    "indexer": same(
        ("index_n_heads", "dsa_indexer_n_heads"),
        ("index_head_dim", "dsa_indexer_head_dim"),
        ("index_topk", "dsa_indexer_topk"),
        ("index_topk_freq", "dsa_indexer_topk_freq"),
        ("index_skip_topk_offset", "dsa_indexer_skip_topk_offset"),
    ),
    "dropout": same(("attention_dropout", "attention_dropout")),
    "qkv_bias": same(("qkv_bias", "add_qkv_bias")),
    "use_bias": same(("use_bias", "add_bias_linear")),
    "qk_norm": same(("use_qk_norm", "qk_layernorm")),
}
