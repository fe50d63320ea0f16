"""Forms of models whose MLP is no SwiGLU, of those whose layers take turns in what they see, and Falcon's.

    gelu    activation_function = "gelu_new"         Megatron's fused bias and GELU, which is its default: the tanh form
    gated_gelu  hidden_activation = "gelu_pytorch_tanh"
          geglu = True, a word of ours: Megatron-LM has no argument for it
    clamp         swiglu_limit = 7.0                       activation_func_clamp_value = 7.0
    falcon        multi_query = True                       num_query_groups = 1, parallel_attention = True (NeMo's word)
    every_second  sliding_window = 128, 4 layers           window_size = (127, 0), window_attn_skip_freq = [1, 0, 1, 0]
    no_rope       no_rope_layers = [1, 1, 1, 0]            no_rope_freq = [0, 0, 0, 1]: 1 is a layer without, there
    window_rope   layers that see all have no rope         no_rope_freq, the turns of the window the other way round
    norms_after   EXAONE 4's, by class                     norms_after = True, a word of ours: no norm before a module
    wide_norms    OLMoE's and MiniMax-M2's, by class       qk_norms_over_heads = True, a word of ours: one for all heads
    chunks        use_qk_norm = True, Llama 4's            qk_l2_norm = True; the hub's words for chunks and temperatures
    block_indexer layer_types, MiniMax-M3's                lightning_indexer_layers = [3, 4, ...], Megatron-Bridge's words

Sources: Megatron-LM core 0.16.1 (`core/fusions/fused_bias_gelu.py`, `training/arguments.py`,
`core/transformer/mlp.py`, `transformer_config.py`), transformers 5.23 (`models/{gpt2,gemma2,gemma3,gpt_oss,smollm3,exaone_moe,llama4,minimax_m3_vl}`), Megatron-Bridge of August
2026 (`models/gemma`, `models/gpt_oss`), 0.6.2 (`models/{olmoe,minimax_m2,minimax_m3}`), mcore-bridge 1.6.5 `config/parser.py`, NeMo 1 `scripts/checkpoint_converters/convert_falcon_hf_to_nemo.py`. Cost: none.
What it does not do: see `families.config.forms`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tool.core.attention_window import window_pattern
from ckpt_tool.families.config.words import (
    LAYERS,
    Arguments,
    ConfigWords,
    Form,
    Values,
    no_rope_pattern,
    same,
)

_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate")


def _gelu_to(model: ConfigWords, out: Values) -> None:
    activation = model.get("activation_function")
    out["bias_gelu_fusion"] = activation in _TANH
    if activation not in (*_TANH, "gelu"):
        model.lost(f"activation_function: Megatron's arguments have no plain {activation}")
    if out.get("ffn_hidden_size") is None:
        out["ffn_hidden_size"] = 4 * (model.count("hidden_size") or 0)


def _gelu_back(args: Arguments, out: Values) -> None:
    tanh = args.facts.defaults.get("activation_function", "gelu_new")
    out[args.key("activation_function")] = "gelu" if args.get("bias_gelu_fusion") is False else tanh
    if args.get("ffn_hidden_size") is None and type(args.get("hidden_size")) is int:
        out[args.key("intermediate_size")] = 4 * args.get("hidden_size")


def _gated_gelu_to(model: ConfigWords, out: Values) -> None:
    out["geglu"] = True
    model.lost(
        f"hidden_activation {model.get('hidden_activation')}: Megatron-LM's arguments have no gated GELU; "
        "Megatron-Bridge's layer has"
    )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if model.get(key) is not None:
            model.lost(f"{key} {model.get(key)}: Megatron-LM has none; Megatron-Bridge's layer has")
    scale = model.get("query_pre_attn_scalar")
    width = model.count("head_dim")
    if scale is not None and scale != width:
        model.lost(f"query_pre_attn_scalar {scale}: Megatron-LM scales by heads of {width}")
    if isinstance(model.get("rope_local_base_freq"), int | float) or "sliding_attention" in _rope(model):
        model.lost("rope_local_base_freq: Megatron-LM has one rope for all layers; Megatron-Bridge's layer has two")


def _rope(model: ConfigWords) -> Mapping[str, object]:
    rope = model.config.get("rope_parameters")
    return rope if isinstance(rope, Mapping) else {}


def _gated_gelu_back(args: Arguments, out: Values) -> None:
    out[args.key("hidden_activation")] = "gelu_pytorch_tanh"


def _turns(every: int) -> Form:
    """Layers that see a window, but for each `every`-th, which sees all."""

    def to(model: ConfigWords, out: Values) -> None:
        size = model.get("sliding_window")
        layers = min(model.count("num_hidden_layers") or 0, LAYERS)
        kinds = model.config.get("layer_types")
        turn = model.config.get("sliding_window_pattern")
        turn = turn if type(turn) is int and turn > 0 else every
        if not isinstance(kinds, list):
            kinds = ["sliding_attention" if (i + 1) % turn else "full_attention" for i in range(layers)]
        if type(size) is int:
            out["window_size"] = (size - 1, 0)
            out["window_attn_skip_freq"] = [int(kind == "sliding_attention") for kind in kinds]

    def back(args: Arguments, out: Values) -> None:
        window = args.get("window_size")
        layers = args.get("num_layers") or 0
        if isinstance(window, tuple | list) and len(window) == 2 and type(window[0]) is int:
            seen = window_pattern(args.get("window_attn_skip_freq"), layers)
            out["sliding_window"] = window[0] + 1
            out["layer_types"] = ["sliding_attention" if each else "full_attention" for each in seen]

    return Form(to, back)


def _no_rope_to(model: ConfigWords, out: Values) -> None:
    layers = min(model.count("num_hidden_layers") or 0, LAYERS)
    has_rope = model.config.get("no_rope_layers")
    interval = model.count("no_rope_layer_interval") or 4
    if not isinstance(has_rope, list):
        has_rope = [(i + 1) % interval != 0 for i in range(layers)]
    out["no_rope_freq"] = [int(not each) for each in has_rope]


def _no_rope_back(args: Arguments, out: Values) -> None:
    layers = args.get("num_layers") or 0
    skipped = no_rope_pattern(args.get("no_rope_freq"), layers) or [0] * min(layers, LAYERS)
    out["no_rope_layers"] = [1 - is_skipped for is_skipped in skipped]


def _window_rope_to(model: ConfigWords, out: Values) -> None:
    if out.get("window_size") is not None:
        out["no_rope_freq"] = [1 - is_windowed for is_windowed in out["window_attn_skip_freq"]]


def _window_rope_back(args: Arguments, out: Values) -> None:
    """What the turns of the window say; without any, every layer sees all and turns."""
    if "layer_types" not in out:
        layers = min(args.get("num_layers") or 0, LAYERS)
        out |= {"sliding_window": None, "layer_types": ["full_attention"] * layers}


def _norms_after_to(model: ConfigWords, out: Values) -> None:
    out["norms_after"] = True
    model.lost("norms after the modules alone: Megatron-LM's arguments have none; Megatron-Bridge's layer has")


def _norms_after_back(args: Arguments, out: Values) -> None:
    """What the class always does."""


def _wide_norms_to(model: ConfigWords, out: Values) -> None:
    out["qk_norms_over_heads"] = True
    model.lost("norms over all heads of q and of k: Megatron-LM's arguments have none; Megatron-Bridge's layer has")


def _wide_norms_back(args: Arguments, out: Values) -> None:
    """What the class always does."""


_CHUNKS = same(("attention_chunk_size", "attention_chunk_size"), ("attn_temperature_tuning", "attn_temperature_tuning"))


def _chunks_to(model: ConfigWords, out: Values) -> None:
    _CHUNKS.to(model, out)
    out["qk_l2_norm"] = bool(model.get("use_qk_norm"))
    if out.get("attention_chunk_size") is not None:
        model.lost(f"attention_chunk_size {out['attention_chunk_size']}: Megatron's layers see all that is before")
    if out.get("attn_temperature_tuning"):
        model.lost("attn_temperature_tuning: Megatron does not scale queries by their position")


def _chunks_back(args: Arguments, out: Values) -> None:
    out["attention_chunk_size"] = args.get("attention_chunk_size")
    out["attn_temperature_tuning"] = bool(args.get("attn_temperature_tuning"))
    out["use_qk_norm"] = bool(args.get("qk_l2_norm"))


_INDEXER = same(("index_n_heads", "index_n_heads"), ("index_head_dim", "index_head_dim"))


def _block_indexer_to(model: ConfigWords, out: Values) -> None:
    kinds = model.get("layer_types")
    sparse = model.config.get("sparse_attention_config")
    freq = sparse.get("sparse_attention_freq") if isinstance(sparse, Mapping) else None
    if isinstance(kinds, list):
        indexed = [i for i, kind in enumerate(kinds) if kind == "minimax_m3_sparse"]
    else:
        indexed = [i for i, is_indexed in enumerate(freq) if is_indexed] if isinstance(freq, list) else []
    if indexed:
        _INDEXER.to(model, out)
        out["lightning_indexer_layers"] = indexed
        model.lost(
            "layers that see chosen blocks of keys: Megatron-LM has none; Megatron-Bridge keeps their indexers and sees "
            "all keys; sizes of blocks are in no argument"
        )


def _block_indexer_back(args: Arguments, out: Values) -> None:
    indexed = args.get("lightning_indexer_layers")
    layers = min(args.get("num_layers") or 0, LAYERS)
    if isinstance(indexed, list):
        _INDEXER.back(args, out)
        out["layer_types"] = ["minimax_m3_sparse" if i in indexed else "full_attention" for i in range(layers)]


def _falcon_to(model: ConfigWords, out: Values) -> None:
    heads = model.count("num_attention_heads")
    hidden = model.count("hidden_size") or 0
    is_new_architecture = bool(model.get("new_decoder_architecture"))
    groups = 1 if model.get("multi_query") else heads
    if is_new_architecture:
        groups = model.count("num_kv_heads") or heads
    out["group_query_attention"] = groups != heads
    out["num_query_groups"] = groups if groups != heads else 1
    out["kv_channels"] = hidden // (heads or 1)
    out["add_bias_linear"] = bool(model.get("bias"))
    out |= {
        "new_decoder_architecture": is_new_architecture,
        "parallel_attention": is_new_architecture or bool(model.get("parallel_attn")),
    }
    norms = model.count("num_ln_in_parallel_attn")
    if norms is not None:
        out["num_ln_in_parallel_attn"] = norms
    if out.get("ffn_hidden_size") is None:
        out["ffn_hidden_size"] = 4 * hidden
    if out["parallel_attention"]:
        model.lost(
            "parallel_attn: Megatron-Core has no layer whose attention and MLP run side by side; NeMo's Falcon has"
        )
    if model.get("alibi"):
        model.lost("alibi: Megatron-Core has no such positions")


def _falcon_back(args: Arguments, out: Values) -> None:
    heads = args.get("num_attention_heads")
    is_new_architecture = bool(args.get("new_decoder_architecture"))
    groups = args.args.get("num_query_groups") if args.get("group_query_attention") else heads
    out |= {"new_decoder_architecture": is_new_architecture, "parallel_attn": bool(args.get("parallel_attention"))}
    norms = args.args.get("num_ln_in_parallel_attn")
    if type(norms) is int:
        out["num_ln_in_parallel_attn"] = norms
    out |= {"num_kv_heads": groups} if is_new_architecture else {"multi_query": groups == 1 and heads != 1}
    out |= {"bias": bool(args.get("add_bias_linear")), "alibi": False, "activation": "gelu"}


GATE_FORMS: Mapping[str, Form] = {
    "gelu": Form(_gelu_to, _gelu_back),
    "gated_gelu": Form(_gated_gelu_to, _gated_gelu_back),
    "clamp": same(("swiglu_limit", "activation_func_clamp_value")),
    "falcon": Form(_falcon_to, _falcon_back),
    "every_second": _turns(2),
    "every_fourth": _turns(4),
    "every_sixth": _turns(6),
    "no_rope": Form(_no_rope_to, _no_rope_back),
    "norms_after": Form(_norms_after_to, _norms_after_back),
    "wide_norms": Form(_wide_norms_to, _wide_norms_back),
    "chunks": Form(_chunks_to, _chunks_back),
    "block_indexer": Form(_block_indexer_to, _block_indexer_back),
    "window_rope": Form(_window_rope_to, _window_rope_back),
}
