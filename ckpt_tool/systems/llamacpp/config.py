"""The metadata of GGUF files as a hub config, and back: two pure functions over one table.

    llama.block_count 32, llama.attention.head_count_kv 8, ...   <->   num_hidden_layers 32, num_key_value_heads 8, ...

Each row of the table has an architecture of llama.cpp, the hub's model type for it, and the keys that it has in addition
to those of every decoder. What the metadata does not state is taken from the tensors (vocabulary, tied head, kind of
experts), or is the default of transformers. Numbers of 32 bits are converted to the shortest decimal that is the same
fp32: 9.99999997e-07 is 1e-06.

Sources: llama.cpp of October 2026 `conversion/{base,llama,qwen,gemma,deepseek,phi,gpt_oss}.py` (`set_gguf_parameters`), gguf
0.19.0 `constants.py` (`Keys`). Cost: none. What it does not do: the tokenizer (`systems.llamacpp.gguf.tokenizer`), names of
models, licences and authors (`general.*`), which are in no config.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ckpt_tool.errors import InputError, UsageError

Config = Mapping[str, Any]
Pair = tuple[str, str, Any]  # key, the type of its value, the value
UNSAYABLE = "E1711"
UNKNOWN = "E1712"
FOREIGN = "E1714"
ARCHITECTURE = "general.architecture"
QUANTIZATION_VERSION = 2  # `GGML_QUANT_VERSION`
INT = "UINT32"
FLOAT = "FLOAT32"
TRUTH = "BOOL"


class Key(NamedTuple):
    """A row of the table: the metadata's key without its prefix `ARCH.`, the config's key, the type of the value."""

    stated: str
    hub: str
    kind: str = INT


class Architecture(NamedTuple):
    """An architecture of llama.cpp, and how the hub's config describes the same model."""

    name: str  # llama.cpp's
    model_type: str  # the hub's
    more: tuple[Key, ...] = ()  # keys in addition to those of every decoder
    experts: str = ""  # the config's key for the number of experts, "" for a dense model
    act: str = "silu"  # the activation
    fixed: Config = {}  # constants of llama.cpp's implementation: a config with other values can't be converted


DECODER = (
    Key("block_count", "num_hidden_layers"),
    Key("context_length", "max_position_embeddings"),
    Key("embedding_length", "hidden_size"),
    Key("feed_forward_length", "intermediate_size"),
    Key("attention.head_count", "num_attention_heads"),
    Key("attention.head_count_kv", "num_key_value_heads"),
    Key("attention.layer_norm_rms_epsilon", "rms_norm_eps", FLOAT),
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_USED = Key("expert_used_count", "num_experts_per_tok")
_EXPERT_WIDTH = Key("expert_feed_forward_length", "moe_intermediate_size")
_WINDOW = Key("attention.sliding_window", "sliding_window")
_CAP = Key("final_logit_softcapping", "final_logit_softcapping", FLOAT)
_HEAD = Key("attention.key_length", "head_dim")
_LATENT = (
    Key("leading_dense_block_count", "first_k_dense_replace"),
    Key("attention.q_lora_rank", "q_lora_rank"),
    Key("attention.kv_lora_rank", "kv_lora_rank"),
    Key("attention.value_length_mla", "v_head_dim"),
    Key("rope.dimension_count", "qk_rope_head_dim"),
    Key("expert_shared_count", "n_shared_experts"),
    Key("expert_weights_scale", "routed_scaling_factor", FLOAT),
    Key("expert_weights_norm", "norm_topk_prob", TRUTH),
    Key("expert_group_count", "n_group"),
    Key("expert_group_used_count", "topk_group"),
    _USED,
    _EXPERT_WIDTH,
)
ROPE_FREQS = "rope_freqs.weight"
_GELU = "gelu_pytorch_tanh"
ARCHITECTURES = (
    Architecture("llama", "mixtral", (_USED, _HEAD), "num_local_experts"),
    Architecture("llama", "llama", (_HEAD,)),
    Architecture("llama", "mistral", (_HEAD,)),
    Architecture("qwen2", "qwen2"),
    Architecture(
        "qwen2moe", "qwen2_moe",
        (_USED, _EXPERT_WIDTH, Key("expert_shared_feed_forward_length", "shared_expert_intermediate_size")),
        "num_experts", fixed={"norm_topk_prob": False},
    ),
    Architecture("qwen3", "qwen3", (_HEAD,)),
    Architecture(
        "qwen3moe", "qwen3_moe", (_USED, _EXPERT_WIDTH, _HEAD), "num_experts",
        fixed={"norm_topk_prob": True},
    ),
    Architecture("gemma", "gemma", (_HEAD,), act=_GELU),
    Architecture(
        "gemma2", "gemma2",
        (_HEAD, Key("attn_logit_softcapping", "attn_logit_softcapping", FLOAT), _CAP, _WINDOW), act=_GELU,
    ),
    Architecture("gemma3", "gemma3_text", (_HEAD, _CAP, _WINDOW), act=_GELU),
    Architecture(
        "deepseek2", "deepseek_v3", _LATENT, "n_routed_experts",
        fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    Architecture(
        "deepseek2", "deepseek_v2", _LATENT, "n_routed_experts",
        fixed={"scoring_func": "softmax", "norm_topk_prob": False},
    ),
    Architecture("phi3", "phi3", (_WINDOW,)),
    Architecture(
        "gpt-oss", "gpt_oss", (_USED, _HEAD, _WINDOW, Key("expert_feed_forward_length", "intermediate_size")),
        "num_local_experts", fixed={"swiglu_limit": 7.0},
    ),
)  # fmt: skip
_DENSE_FIRST = frozenset(("deepseek_v2", "deepseek_v3"))
_WITHOUT_ROPE = frozenset(("gemma", "gemma2"))  # llama.cpp has their rope bases as constants
_TURNS = {"gemma3": 6, "gpt-oss": 2}  # every n-th layer has full attention, the others a sliding window
_ROPE_WORDS = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "extrapolation_factor": "rope.scaling.yarn_ext_factor",
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}


# -- from a config -----------------------------------------------------------------------------------------------------


def metadata(config: Config) -> tuple[list[Pair], list[str]]:
    """The metadata pairs of a hub config, as (pairs, lines about settings that GGUF has no key for).

    Raises UsageError E1711 for a model type without an architecture, and for all settings that llama.cpp computes
    differently, at once.
    """
    config = _language_part(config)
    found = next((each for each in ARCHITECTURES if each.model_type == config.get("model_type")), None)
    if found is None:
        names = ", ".join(sorted({each.model_type for each in ARCHITECTURES}))
        raise UsageError(
            f"no architecture of GGUF is known here for the model type {config.get('model_type')!r}",
            code=UNSAYABLE,
            hint=f"there are {names}; llama.cpp's own converter may know it",
        )

    faults = list(_faults(config, found))
    out: list[Pair] = [(ARCHITECTURE, "STRING", found.name), ("general.type", "STRING", "model")]
    own = {**config, "num_key_value_heads": config.get("num_key_value_heads", config.get("num_attention_heads"))}
    # llama.cpp runs latent attention in its compressed form, in which all heads share one key.
    if found.model_type in _DENSE_FIRST:
        own = {**_deepseek(own), "num_key_value_heads": 1}  # latent attention is that of one head of keys

    for key in (*DECODER, *found.more):
        value = own.get(key.hub)
        if value is None or (key is _HEAD and "head_dim" not in config):
            continue
        out.append((f"{found.name}.{key.stated}", key.kind, _number(value, key, faults)))
        if key is _HEAD:
            out.append((f"{found.name}.attention.value_length", INT, value))

    # A config may have the number under another model type's key.
    experts = next((own[word] for word in (found.experts, *_EXPERTS) if own.get(word) is not None), None)
    if found.experts and experts is not None:
        out.append((f"{found.name}.expert_count", INT, experts))
    if not faults:
        out += [(f"{found.name}.{key}", kind, value) for key, kind, value in _computed_pairs(own, found)]

    out += [(f"{found.name}.{key}", kind, value) for key, kind, value in _rope(config, found, faults)]
    if faults:
        raise UsageError(
            faults[0], code=UNSAYABLE, faults=faults[1:], hint="llama.cpp has no words for it, or not here"
        )

    return [*out, ("general.quantization_version", INT, QUANTIZATION_VERSION)], list(_unsaid(config, found))


def rope_factors(config: Config) -> list[float] | None:
    """The numbers by which llama.cpp divides the frequencies of Llama 3's rope (`rope_freqs.weight`); None for other
    ropes.

    Each step is rounded to fp32 where llama.cpp's converter does so, so that the tensor is equal byte for byte.
    Source: `conversion/llama.py`, `generate_extra_tensors`.
    """
    rope = rope_of(_language_part(config))
    if str(rope.get("rope_type", "")).lower() != "llama3" or config.get("model_type") not in ("llama", "mistral"):
        return None
    import math

    hidden = config.get("hidden_size")
    heads = config.get("num_attention_heads")
    dim = config.get("head_dim") or (hidden // heads if type(hidden) is int and type(heads) is int and heads else 0)
    if dim > 1 << 16:  # no head is so wide: the metadata is damaged
        return None
    base = rope.get("rope_theta", 10000.0)
    factor = rope.get("factor", 8.0)
    low = rope.get("low_freq_factor", 1.0)
    high = rope.get("high_freq_factor", 4.0)
    old = rope.get("original_max_position_embeddings", 8192)
    out = []
    for at in range(0, dim, 2):
        frequency = _single(1.0 / _single(base ** _single(at / dim)))
        wave = _single(_single(1.0 / frequency) * _single(2 * math.pi))  # torch divides a number by a tensor this way
        if wave < old / high:
            out.append(1.0)
        elif wave > old / low or high == low:
            out.append(float(factor))
        else:
            smooth = _single(_single(_single(_single(1.0 / wave) * old) - low) / (high - low))
            out.append(_single(1 / _single(_single(_single(1 - smooth) / factor) + smooth)))
    return out


def rope_of(config: Config) -> dict[str, Any]:
    """The rope of the layers with full attention under the keys of transformers 5, for configs of 4 too."""
    new = config.get("rope_parameters")
    rope: Config = new if isinstance(new, Mapping) else {}
    if isinstance(rope.get("full_attention"), Mapping):
        rope = rope["full_attention"]
    old = config.get("rope_scaling")
    stated = {**(old if isinstance(old, Mapping) else {}), **rope}
    out = {key: value for key, value in stated.items() if value is not None}
    if "rope_theta" not in out and config.get("rope_theta") is not None:
        out["rope_theta"] = config["rope_theta"]
    if "rope_type" not in out and "type" in out:
        out["rope_type"] = out["type"]
    out.setdefault("rope_type", "default")
    return out


def _language_part(config: Config) -> Config:
    part = config.get("text_config")
    return part if isinstance(part, Mapping) and "model_type" in part else config


def _is(value: Any, kind: str) -> bool:
    """Whether a metadata pair of this type can hold the value."""
    if kind == TRUTH:
        return isinstance(value, bool)
    if kind == FLOAT:
        return type(value) in (int, float) and abs(value) < 1e38
    return type(value) is int and 0 <= value < 1 << 32


def _number(value: Any, key: Key, faults: list[str]) -> Any:
    if _is(value, key.kind):
        return value
    faults.append(f"{key.hub} is {str(value)[:60]}, want a number")
    return 0


def _deepseek(config: Config) -> Config:
    """A DeepSeek config with the defaults that llama.cpp's converter writes explicitly."""
    out = dict(config)
    if out.get("first_k_dense_replace") is None:
        out["first_k_dense_replace"] = 0
    out.setdefault("n_shared_experts", 0)
    if not out.get("norm_topk_prob"):
        out.pop("norm_topk_prob", None)
    return out


def _computed_pairs(config: Config, found: Architecture) -> Iterable[Pair]:
    """The pairs that are computed from several keys of the config."""
    heads = config["num_attention_heads"]
    hidden = config["hidden_size"]
    if found.name == "llama":
        yield "vocab_size", INT, config["vocab_size"]
        yield "rope.dimension_count", INT, config.get("head_dim") or hidden // heads
    if found.name == "phi3":
        share = rope_of(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        yield "rope.dimension_count", INT, int(share * hidden) // heads
        if config.get("sliding_window") is None:
            yield "attention.sliding_window", INT, 0
    if found.name == "deepseek2":
        rank = config["kv_lora_rank"]
        turned = config["qk_rope_head_dim"]
        yield "vocab_size", INT, config["vocab_size"]
        yield "attention.key_length", INT, rank + turned
        yield "attention.value_length", INT, rank
        yield "attention.key_length_mla", INT, config["qk_nope_head_dim"] + turned
    gating = {"softmax": 1, "sigmoid": 2}.get(str(config.get("scoring_func")))
    if gating is not None:
        yield "expert_gating_func", INT, gating


def _rope(config: Config, found: Architecture, faults: list[str]) -> Iterable[Pair]:
    """The pairs of the rope; a kind that the architecture lacks is added to `faults`."""
    if found.model_type in _WITHOUT_ROPE:
        return

    rope = rope_of(config)
    kind = str(rope["rope_type"]).lower()
    if found.name == "phi3":
        yield "rope.scaling.original_context_length", INT, rope.get("original_max_position_embeddings", config.get(
            "original_max_position_embeddings", 4096))  # fmt: skip
    elif kind in ("linear", "yarn"):
        yield "rope.scaling.type", "STRING", kind
        for key, stated in _ROPE_WORDS.items() if kind == "yarn" else [("factor", _ROPE_WORDS["factor"])]:
            if rope.get(key) is not None:
                whole = key == "original_max_position_embeddings"
                yield stated, INT if whole else FLOAT, int(rope[key]) if whole else rope[key]

    # Llama 3's scaling is written as a tensor (`rope_factors`), so it needs no pair.
    known = ("default",) if found.name == "phi3" else ("default", "linear", "yarn")
    if kind not in known and not (kind == "llama3" and found.model_type in ("llama", "mistral")):
        faults.append(f"rope of type {kind}")
    if found.name == "deepseek2" and kind == "yarn" and rope.get("mscale_all_dim"):
        yield "rope.scaling.yarn_log_multiplier", FLOAT, 0.1 * rope["mscale_all_dim"]
    if rope.get("rope_theta") is not None:
        yield "rope.freq_base", FLOAT, rope["rope_theta"]

    new = config.get("rope_parameters")
    sliding = new.get("sliding_attention") if isinstance(new, Mapping) else None
    local = sliding.get("rope_theta") if isinstance(sliding, Mapping) else config.get("rope_local_base_freq")
    if found.name == "gemma3" and local is not None:
        yield "rope.freq_base_swa", FLOAT, local


def _faults(config: Config, found: Architecture) -> Iterable[str]:
    """One line for each setting of the config that llama.cpp's implementation does not follow."""
    act = config.get("hidden_activation") or config.get("hidden_act") or found.act
    if act not in (found.act, "gelu" if found.act == _GELU else found.act):
        yield f"the activation {act}: {found.name} computes {found.act}"
    for key, value in found.fixed.items():
        if config.get(key, False if key == "norm_topk_prob" else value) != value and key != "topk_method":
            yield f"{key} {config.get(key, False)}: {found.name} computes {value}"

    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if type(config.get(key)) is not int:
            yield f"{key} is {str(config.get(key))[:60]}, want a whole number"

    dense = config.get("mlp_only_layers") or (config.get("decoder_sparse_step") or 1) != 1
    if found.experts and dense:
        yield f"layers without experts (mlp_only_layers, decoder_sparse_step): {found.name} has them in every layer"
    if config.get("use_sliding_window"):
        yield f"use_sliding_window: {found.name} has no windows"

    turn = _TURNS.get(found.name)
    kinds = config.get("layer_types")
    if turn and (
        config.get("sliding_window_pattern", turn) != turn
        or (
            isinstance(kinds, list)
            and kinds != ["full_attention" if (i + 1) % turn == 0 else "sliding_attention" for i in range(len(kinds))]
        )
    ):
        yield f"windows in other layers than {turn - 1} of {turn}"

    if found.name == "gemma3" and config.get("attn_logit_softcapping") is not None:
        yield "attn_logit_softcapping"


def _unsaid(config: Config, found: Architecture) -> Iterable[str]:
    """One line for each setting of the config that the metadata has no key for."""
    if found.name == "llama" and config.get("sliding_window") is not None:
        yield f"sliding_window {config['sliding_window']} has no word in llama's metadata: llama.cpp attends to all"
    ahead = config.get("num_nextn_predict_layers")
    if found.name == "deepseek2" and ahead:
        yield "llama.cpp reads no layers of multi-token prediction of this model"
    scalar = config.get("query_pre_attn_scalar")
    head = config.get("head_dim")
    if found.act == _GELU and scalar is not None and scalar != head:
        yield f"query_pre_attn_scalar {scalar} has no word: llama.cpp takes it by the model's size"


# -- from the metadata -------------------------------------------------------------------------------------------------


def foreign(stated: Config) -> InputError | None:
    """The error for metadata with an architecture that has no row here; None if it has one.

    Names alone must not decide: other architectures use the same names for tensors of another layout or meaning (the
    norms of EXAONE 4 are named like those of Gemma 3, which are stored plus one).
    """
    name = stated.get(ARCHITECTURE)
    known = dict.fromkeys(each.name for each in ARCHITECTURES)
    if name is None or name in known:
        return None
    return InputError(
        f"its metadata states the architecture {str(name)[:80]!r} ({ARCHITECTURE}), whose tensors no family has under "
        "llama.cpp's names",
        code=FOREIGN,
        hint=f"known are {', '.join(known)}; --dialect keep keeps llama.cpp's names, --to gguf moves it as it is, "
        "--family NAME says that it is laid out as one of these",
    )


def hub_config(
    stated: Config, shapes: Mapping[str, tuple[int, ...]], factors: tuple[float, ...] = ()
) -> dict[str, Any] | None:
    """The config.json of the model that the metadata describes; None for an architecture without a row here.

    Args:
        stated: The metadata (`core.hints.Stated`).
        shapes: {tensor: shape} under llama.cpp's names.
        factors: The values of `rope_freqs.weight`, from which the settings of Llama 3's rope are recovered.

    Raises:
        InputError: E1712, values that no config has a key for, all at once.
    """
    name = stated.get(ARCHITECTURE)
    rows = [each for each in ARCHITECTURES if each.name == name]
    if not rows:
        return None
    found = rows[0] if len(rows) == 1 else _choose_by_tensors(rows, shapes)
    faults: list[str] = []
    own = {key.removeprefix(f"{name}."): value for key, value in stated.items() if key.startswith(f"{name}.")}
    from ckpt_tool.families.models import CLASSES

    kind = CLASSES[found.model_type].architecture
    config: dict[str, Any] = {"architectures": [kind], "model_type": found.model_type}
    for key in (*DECODER, *found.more):
        value = own.get(key.stated)
        if value is None:
            continue
        if not _is(value, key.kind):
            faults.append(f"{name}.{key.stated} is {str(value)[:60]}, want a number")
        config[key.hub] = shortest(value) if key.kind == FLOAT and isinstance(value, float) else value
    if found.experts and type(own.get("expert_count")) is int:
        config[found.experts] = own["expert_count"]
    # What llama.cpp has as constants is written explicitly: transformers' defaults may differ.
    config |= {key: value for key, value in found.fixed.items() if key not in config}
    config["hidden_activation" if found.act == _GELU and name != "gemma" else "hidden_act"] = found.act
    _backwards(config, own, found, faults)
    config |= _hub_rope(config, own, found, faults)
    # Not in the metadata of most architectures: the tensors show it.
    embedding = shapes.get("token_embd.weight")
    if embedding:
        config["vocab_size"] = embedding[0]
        config["tie_word_embeddings"] = "output.weight" not in shapes
    for word, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        number = stated.get(f"tokenizer.ggml.{theirs}_token_id")
        if type(number) is int:
            config[f"{word}_token_id"] = number
    biased = [end for end in ("attn_q.bias", "ffn_up.bias") if f"blk.0.{end}" in shapes]
    if name in ("llama", "qwen3", "qwen3moe", "gpt-oss"):
        config["attention_bias"] = "attn_q.bias" in biased
    if name == "llama":
        config["mlp_bias"] = "ffn_up.bias" in biased
    if factors and name == "llama":
        scaling = _llama3(config, factors)
        if scaling is None:
            faults.append(f"{ROPE_FREQS} is no rope that Llama 3 has")
        else:
            config["rope_scaling"] = scaling
    if faults:
        raise InputError(
            f"the metadata says what no config of {found.model_type} does: {faults[0]}",
            code=UNKNOWN,
            faults=faults[1:],
            hint="give the model's own config.json with --config FILE",
        )
    return config


def _choose_by_tensors(rows: list[Architecture], shapes: Mapping[str, tuple[int, ...]]) -> Architecture:
    """The model type of a shared architecture, by tensors that only one of them has (router bias, experts)."""
    ends = {name.partition(".")[2].partition(".")[2] for name in shapes if name.startswith("blk.")}
    if rows[0].name == "deepseek2":
        return rows[0] if "exp_probs_b.bias" in ends else rows[1]
    return rows[0] if "ffn_gate_exps.weight" in ends else rows[1]


def _backwards(config: dict[str, Any], own: Config, found: Architecture, faults: list[str]) -> None:
    """Add the config keys from which `_computed_pairs` computes its pairs: the inverse of that function."""
    if found.name == "deepseek2":
        config["num_key_value_heads"] = config.get("num_attention_heads")
        whole = own.get("attention.key_length_mla")
        turned = config.get("qk_rope_head_dim")
        if type(whole) is int and type(turned) is int:
            config["qk_nope_head_dim"] = whole - turned
        else:
            faults.append(
                "deepseek2.attention.key_length_mla is not there: a file from before latent attention was split"
            )
        config.setdefault("q_lora_rank", None)
        config["num_nextn_predict_layers"] = 0
        if found.model_type == "deepseek_v2":
            config["topk_method"] = "group_limited_greedy" if "n_group" in config else "greedy"

    if found.name == "phi3":
        if config.get("sliding_window") == 0:
            config["sliding_window"] = None
        heads = config.get("num_attention_heads")
        hidden = config.get("hidden_size")
        turned = own.get("rope.dimension_count")
        if type(turned) is int and type(heads) is int and type(hidden) is int and turned * heads != hidden > 0:
            config["partial_rotary_factor"] = turned * heads / hidden
        original_length = own.get("rope.scaling.original_context_length")
        if type(original_length) is int:
            config["original_max_position_embeddings"] = original_length

    if found.name in ("gemma2", "gemma3") and type(config.get("head_dim")) is int:
        config["query_pre_attn_scalar"] = _scalar(config, found)
    if found.name == "gemma2":
        config.setdefault("sliding_window", 4096)


def _scalar(config: Config, found: Architecture) -> int:
    """`query_pre_attn_scalar`, which the metadata does not state.

    It is hidden / heads for the largest model of each generation and the head size for all others, as in llama.cpp's
    `src/models/gemma2.cpp` and `gemma3.cpp`.
    """
    largest = {"gemma2": 46, "gemma3": 62}[found.name]  # layers
    hidden = config.get("hidden_size")
    heads = config.get("num_attention_heads")
    if config.get("num_hidden_layers") == largest and hidden and heads:
        return int(hidden // heads)
    return int(config["head_dim"])


def _hub_rope(config: Config, own: Config, found: Architecture, faults: list[str]) -> dict[str, Any]:
    base = own.get("rope.freq_base")
    theta = 1000000.0 if found.name == "gemma3" else 10000.0
    if isinstance(base, float):
        theta = shortest(base)
    out: dict[str, Any] = {"rope_theta": theta}
    kind = own.get("rope.scaling.type")
    if found.name == "gemma3":
        local = own.get("rope.freq_base_swa")
        out["rope_local_base_freq"] = shortest(local) if isinstance(local, float) else 10000.0
    if kind in (None, "none") or found.name == "phi3":
        return out
    if kind not in ("linear", "yarn"):
        faults.append(f"{found.name}.rope.scaling.type is {str(kind)[:60]}")
        return out
    scaling: dict[str, Any] = {"rope_type": kind}
    if found.name == "gpt-oss":
        scaling["truncate"] = False  # gpt-oss was trained this way; GGUF has no key for it, and ggml rounds the bounds
    for key, stated in _ROPE_WORDS.items():
        if own.get(stated) is not None:
            scaling[key] = shortest(own[stated]) if isinstance(own[stated], float) else own[stated]
    multiplier = own.get("rope.scaling.yarn_log_multiplier")
    if isinstance(multiplier, float):
        scaling |= {"mscale": shortest(10 * multiplier), "mscale_all_dim": shortest(10 * multiplier)}
    return {**out, "rope_scaling": scaling}


def _llama3(config: Config, factors: tuple[float, ...]) -> dict[str, Any] | None:
    """The settings of Llama 3's rope that give these factors, None if there are none.

    The values of Meta's releases are tried first. Factors are compared with a tolerance, as `pow` differs in the last
    bit between machines.
    """
    for old in (8192, *(1 << n for n in range(4, 18))):
        scaling = {
            "rope_type": "llama3", "factor": shortest(max(factors)), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": old,
        }  # fmt: skip
        made = rope_factors({**config, "rope_scaling": scaling}) or []
        if len(made) == len(factors) and all(abs(a - b) <= 1e-6 * b for a, b in zip(made, factors, strict=True)):
            return scaling
    return None


def shortest(value: float) -> float:
    """The shortest decimal whose fp32 is that of `value`.

    >>> shortest(9.999999974752427e-07)
    1e-06
    """
    for digits in range(1, 10) if _is(value, FLOAT) else ():
        short = float(f"{value:.{digits}g}")
        if _single(short) == _single(value):
            return short
    return value


def _single(value: float) -> float:
    """`value` rounded to fp32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
