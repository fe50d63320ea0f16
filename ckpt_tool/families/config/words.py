"""Words: a config and Megatron's arguments as forms look at them, and the form that says the same in the same shape.

    ConfigWords(config, facts).get("num_experts")        config["num_local_experts"] of a Mixtral, else the class's default
    Arguments(args, facts).get("rotary_percent")   1.0 where the arguments are silent, as in Megatron
    same(("num_hidden_layers", "num_layers"))      a form of one pair

Source of the defaults: the classes of `families.models`. Cost: none. What it does not do: forms of another shape
(`families.config.forms`, `families.config.experts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt_tool.core.bounds import LEAST
from ckpt_tool.families.config.megatron_arguments import (
    ARGUMENTS,
    BRIDGE_ARGUMENTS,
    DELTA_ARGUMENTS,
    EXPERT_ARGUMENTS,
    LATENT_ARGUMENTS,
    MAMBA_ARGUMENTS,
    OLD_NAMES,
    QWEN4_EXP_WORDS,
    ROPE_ARGUMENTS,
)
from ckpt_tool.families.model_class import DEFAULTS, EXPERT_DEFAULTS, ModelClass

Values = dict[str, Any]
LAYERS = LEAST  # a config that claims more layers is not spelled out
# What a key is called elsewhere too: transformers 5 saves by the names of its attribute maps
OTHER_WORDS: Mapping[str, tuple[str, ...]] = {
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "n_routed_experts": ("num_local_experts", "num_experts"),
    "num_local_experts": ("num_experts",),
    "moe_num_experts": ("num_experts",),
    "moe_k": ("num_experts_per_tok",),
    "num_nextn_predict_layers": ("num_mtp_layers",),
    "hidden_act": ("hidden_activation",),
    "head_dim": ("attention_head_dim",),
    "n_groups": ("mamba_n_groups",),
    "rms_norm_eps": ("layernorm_epsilon",),
}
_COUNTS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "sliding_window",
    "n_layer",
    "n_head",
    "n_embd",
    "n_inner",
    "num_layers",
    "ffn_hidden_size",
    "kv_channels",
    "num_query_groups",
    "mtp_num_layers",
    "moe_ffn_hidden_size",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_shared_expert_intermediate_size",
    "q_lora_rank",
    "num_kv_heads",
    "num_ln_in_parallel_attn",
    "window_attn_skip_freq",
    "window_size",
    "no_rope_freq",
    "padded_vocab_size",
    "n_shared_experts",
    "max_position_embeddings",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "max_window_layers",
    "query_pre_attn_scalar",
    "attention_head_dim",
    "mtp_num_hidden_layers",
    "full_attention_interval",
    "linear_attention_freq",
    "moe_latent_size",
    "mamba_n_groups",
    "mamba_num_heads",
    "rotary_dim",
    "global_head_dim",
    "global_kv_channels",
    "num_global_key_value_heads",
    "num_global_query_groups",
    "per_layer_embed_vocab_size",
    "sliding_window_size",
    "swa_head_dim",
    "swa_num_attention_heads",
    "swa_num_key_value_heads",
    "swa_num_query_groups",
    "swa_v_head_dim",
    "attention_chunk_size",
    "top_k_experts",
    "index_head_dim",
    "index_n_heads",
    "dense_intermediate_size",
    "shared_intermediate_size",
    "intermediate_size_mlp",
    "moe_intermediate_size",
    "hidden_size_per_layer_input",
    "vocab_size_per_layer_input",
    "seed",
    "ple_seed",
    *(name for name in QWEN4_EXP_WORDS if name not in ("ple_layer_ids", "output_gate_type")),
)
_NUMBERS = (
    "moe_router_topk_scaling_factor",
    "rotary_base",
    "rotary_seq_len_interpolation_factor",
    "partial_rotary_factor",
    "activation_func_clamp_value",
    "rope_theta",
    "beta_fast",
    "beta_slow",
    "rotary_scaling_factor",
    "attention_dropout",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "attention_value_scale",
    "sliding_window_rope_base",
    "swa_rope_theta",
    "layernorm_epsilon",
)
_ROPE_NUMBERS = frozenset(
    {
        "factor",
        "rope_theta",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "partial_rotary_factor",
        "attention_factor",
    }
)
_ROPE_DIVISORS = ("factor", "rope_theta", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
_LISTS = (
    "layer_types",
    "mlp_layer_types",
    "mlp_only_layers",
    "no_rope_layers",
    "moe_layers",
    "layers_block_type",
    "mtp_layers_block_type",
    "lightning_indexer_layers",
    "ple_layer_ids",
)
_WORDS = ("hidden_activation", "hybrid_layer_pattern", "hybrid_override_pattern", "mtp_hybrid_override_pattern")
_DEFAULTS = {
    **ARGUMENTS,
    **BRIDGE_ARGUMENTS,
    **ROPE_ARGUMENTS,
    **EXPERT_ARGUMENTS,
    **LATENT_ARGUMENTS,
    **DELTA_ARGUMENTS,
    **MAMBA_ARGUMENTS,
}


def kinds_of(facts: ModelClass) -> dict[str, type]:
    """What a value must be, by key or argument: what its default in the class is, or as listed above."""
    kinds: dict[str, type] = {}
    for key, value in {**DEFAULTS, **EXPERT_DEFAULTS, **facts.defaults}.items():
        kinds[facts.keys.get(key, key)] = kinds[key] = type(value)
    kinds |= {name: type(value) for name, value in _DEFAULTS.items() if value is not None}
    kinds |= dict.fromkeys(_COUNTS, int) | dict.fromkeys(_NUMBERS, float) | dict.fromkeys(_LISTS, list)
    kinds |= dict.fromkeys(_WORDS, str) | {"use_sliding_window": bool, "enable_moe_block": bool}
    return {**kinds, "rope_scaling": dict, "rope_parameters": dict}


_SEVERAL = (
    "moe_layer_freq",
    "window_attn_skip_freq",
    "window_size",
    "no_rope_freq",
    "moe_num_experts",
    "moe_intermediate_size",
    "linear_attention_freq",
    "hybrid_layer_pattern",  # Megatron's word for letters, MiMo-V2-Flash's for zeros and ones
)  # or a list
LARGEST = 1 << 40  # of a count


def fits(key: str, value: Any, kinds: Mapping[str, type]) -> bool:
    """Has the value the type of its key or argument? True for keys that are never read here. kinds: from `kinds_of`."""
    kind = kinds.get(key)
    if value is None or kind is None or kind is type(None):
        return True
    if key in _SEVERAL and isinstance(value, list | tuple):
        return len(value) <= LAYERS and all(type(item) in (int, bool) for item in value)
    if kind is int:
        return type(value) is int and -1 <= value < LARGEST
    if kind is float:
        return type(value) in (int, float) and abs(value) < 1e30  # false for NaN
    if kind is dict:
        return isinstance(value, Mapping) and all(_fits_rope(name, item) for name, item in value.items())
    if kind is list:
        return isinstance(value, list) and all(type(item) in (int, str, bool) for item in value)
    return isinstance(value, kind)


def _fits_rope(name: Any, value: Any) -> bool:
    """An entry of a rope's record, which may hold a record for each kind of layer."""
    if isinstance(value, Mapping):
        plain = name in _ROPE_NUMBERS or name in ("rope_type", "type")
        return not plain and all(_fits_rope(inner, part) for inner, part in value.items())
    if value is None or name in ("rope_type", "type"):
        return value is None or isinstance(value, str)
    if name not in _ROPE_NUMBERS:
        return True
    return type(value) in (int, float) and abs(value) < 1e30 and (value > 0 or name not in _ROPE_DIVISORS)


def sound(values: Mapping[str, Any], facts: ModelClass) -> Mapping[str, Any]:
    """The values without those of a wrong type for their keys. facts: the model's class."""
    kinds = kinds_of(facts)
    if all(fits(key, value, kinds) for key, value in values.items()):
        return values
    return {key: value for key, value in values.items() if fits(key, value, kinds)}


@dataclass(slots=True)
class ConfigWords:
    """A config during its translation into Megatron's arguments."""

    config: Mapping[str, Any]
    facts: ModelClass
    notes: list[str] = field(default_factory=list)

    def key(self, key: str) -> str:
        """The class's own key for a common key, such as n_embd for hidden_size."""
        return self.facts.keys.get(key, key)

    def get(self, key: str) -> Any:
        """The value of a common key, the class's default if the config does not have it."""
        config_key = self.key(key)
        for name in (config_key, *OTHER_WORDS.get(config_key, ())):
            if name in self.config:
                return self.config[name]
        return self.facts.defaults.get(config_key, self.facts.defaults.get(key))

    def count(self, key: str) -> int | None:
        """The value of a key if it is an integer >= 0, else None."""
        value = self.get(key)
        return value if type(value) is int and 0 <= value else None

    def lost(self, what: str) -> None:
        self.notes.append(what)


@dataclass(slots=True)
class Arguments:
    """Megatron's arguments during their translation into a config."""

    args: Mapping[str, Any]
    facts: ModelClass
    notes: list[str] = field(default_factory=list)

    def key(self, key: str) -> str:
        return self.facts.keys.get(key, key)

    def get(self, name: str) -> Any:
        """The value of an argument, also under its older name; Megatron's default if it is absent."""
        for spelling in (name, OLD_NAMES.get(name, name)):
            if spelling in self.args and (self.args[spelling] is not None or spelling == name):
                return self.args[spelling]
        return _DEFAULTS.get(name)

    def lost(self, what: str) -> None:
        self.notes.append(what)


class Form(NamedTuple):
    to: Callable[[ConfigWords, Values], None]
    back: Callable[[Arguments, Values], None]


def same(*pairs: tuple[str, str]) -> Form:
    """The translation of keys into arguments with the same meaning and form. pairs: (key, argument)."""

    def to(model: ConfigWords, out: Values) -> None:
        for key, name in pairs:
            if (value := model.get(key)) is not None:
                out[name] = value

    def back(args: Arguments, out: Values) -> None:
        for key, name in pairs:
            if (value := args.get(name)) is not None:
                out[args.key(key)] = value

    return Form(to, back)


def no_rope_pattern(freq: Any, layers: int) -> list[int] | None:
    """1 for each layer that does not turn q and k, as `TransformerConfig` reads `no_rope_freq`; None where all do."""
    if type(freq) is int and freq > 0:
        freq = [int((i + 1) % freq == 0) for i in range(min(layers, LAYERS))]
    return [int(bool(is_skipped)) for is_skipped in freq] if isinstance(freq, list) and any(freq) else None


def linear_pattern(freq: Any, layers: int) -> list[int] | None:
    """1 for each layer with linear attention, as `get_linear_attention_pattern` of core 0.19.2 reads
    `linear_attention_freq`; None where it says nothing."""
    if type(freq) is int and freq > 0:
        return [int((i + 1) % freq != 0) for i in range(min(layers, LAYERS))]
    return [int(bool(is_linear)) for is_linear in freq] if isinstance(freq, list) and freq else None
