"""`params.json` of Meta and Mistral AI as a hub config, and back: two pure functions.

The one idea: both files state the same sizes, except for the width of the MLP, which Meta computes. Writing finds
numbers from which Meta's own rule gives exactly that width, and checks it.

    width = multiple_of * ceil(int(ffn_dim_multiplier * int(8 dim / 3)) / multiple_of)
    {"dim": 4096, "multiple_of": 1024, "ffn_dim_multiplier": 1.3}  <->  hidden_size 4096, intermediate_size 14336

What params.json does not state is taken from the tensors (vocabulary, width), or from constants of Meta's code (the
rope scaling that `use_scaled_rope` switches on: factor 8), or is left out (positions of Llama 1 and 2). Sources:
llama-models (July 2025) `models/llama3/{args,model}.py`; transformers 4.45 `convert_llama_weights_to_hf.py` and
`convert_mistral_weights_to_hf.py`; mistral-inference 1.6 `args.py`, `moe.py`. Cost: none. What it does not do: Llama 4,
vision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpt_tool.core.bounds import numeral
from ckpt_tool.errors import UsageError

UNSAYABLE = "E1413"
LLAMA3_VOCABULARY = 128256  # with begin of text 128000, end of text 128001
# Constants of Meta's code that `use_scaled_rope` switches on, under the hub's keys
_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_EXPERTS = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
_MULTIPLES = (256, 1024, 4096, 512, 2048, 128, 64, 32, 16, 8, 4, 2, 1)  # the ones of Meta's releases first
_MULTIPLIERS = (1.3, 1.0, 1.5, 1.2, 1.1, 1.4)  # values of `ffn_dim_multiplier` to try first


def width(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """The width of the MLP (rows of w1) by Meta's rule (`model.py`, `FeedForward`)."""
    rows = int(2 * (4 * dim) / 3)
    if multiplier is not None:
        rows = int(multiplier * rows)
    return multiple_of * ((rows + multiple_of - 1) // multiple_of)


def hub_config(params: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The config.json of the model that a params.json describes.

    Args:
        params: params.json, its sizes checked (`systems.meta.consolidated.params.sizes_of`).
        shapes: {tensor: shape} under Meta's names, for the vocabulary and the width, which params.json may not state.
    """
    inner = params.get("model")
    params = inner if isinstance(inner, Mapping) else params
    dim = params["dim"]
    heads = params["n_heads"]
    mistral = any(name in params for name in ("hidden_dim", "sliding_window", "head_dim"))  # keys Meta does not have
    moe = params.get("moe") if isinstance(params.get("moe"), Mapping) else None
    # The stored tensor is the best source of the width; then Mistral's key, then Meta's rule.
    first = f"layers.0.feed_forward.{'experts.0.' if moe else ''}w1.weight"
    rows = shapes.get(first, (params.get("hidden_dim"),))[0]
    if rows is None:
        rows = width(dim, params.get("multiple_of", 256), params.get("ffn_dim_multiplier"))

    vocabulary = shapes.get("tok_embeddings.weight", (params.get("vocab_size"),))[0]
    theta = params.get("rope_theta")
    if theta is None:  # the default of Mistral AI's code; Meta's Llama 1 and 2 have 10,000 as a constant
        theta = 1000000.0 if (mistral or moe) and params.get("sliding_window") is None else 10000.0

    kind = "Mistral" if mistral else "Llama"
    if moe:
        kind = "Mixtral"
    config: dict[str, Any] = {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "hidden_size": dim,
        "intermediate_size": rows,
        "num_hidden_layers": params["n_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": params.get("n_kv_heads") or heads,
        "head_dim": params.get("head_dim") or dim // heads,
        "rms_norm_eps": params.get("norm_eps", 1e-5),
        "vocab_size": vocabulary,
        "rope_theta": theta,
        "hidden_act": "silu",
        "tie_word_embeddings": "tok_embeddings.weight" in shapes and "output.weight" not in shapes,
    }
    if mistral or moe:
        config["sliding_window"] = _window(params)
    if moe:
        config |= {name: moe[key] for key, name in _EXPERTS.items() if key in moe}

    if params.get("use_scaled_rope"):
        config |= {"rope_scaling": dict(_SCALING), "max_position_embeddings": 131072}
    elif isinstance(params.get("max_seq_len"), int):
        config["max_position_embeddings"] = params["max_seq_len"]
    elif theta == 500000.0:  # Llama 3, before 3.1 scaled its rope
        config["max_position_embeddings"] = 8192

    if vocabulary == LLAMA3_VOCABULARY:
        config |= {"bos_token_id": 128000, "eos_token_id": 128001}
    return {key: value for key, value in config.items() if value is not None or key == "sliding_window"}


def _window(params: Mapping[str, Any]) -> int | None:
    """The sliding window, which some releases give as text. Raises UsageError E1413 for several windows."""
    window = params.get("sliding_window", params.get("_sliding_window"))
    if window is None or numeral(window):
        return int(str(window)) if window is not None else None
    raise UsageError(
        f"sliding_window {str(window)[:80]}: no config of the hub that is known here says that",
        code=UNSAYABLE,
        hint="give the model's config.json with --config FILE",
    )


def params_of(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The params.json of a hub config: (its content, lines about settings that it can't express).

    Raises UsageError E1413 for a model that Meta's code can't build.
    """
    need = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    odd = [name for name in need if type(config.get(name)) is not int or config[name] < 1]
    if odd:
        raise UsageError(
            f"the config has no {odd[0]}, from which params.json is made",
            code=UNSAYABLE,
            faults=odd[1:],
            hint="give the model's own config.json with --config FILE",
        )

    dim = config["hidden_size"]
    rows = config["intermediate_size"]
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or dim // heads
    mistral = config.get("model_type") in ("mistral", "mixtral")
    out: dict[str, Any] = {
        "dim": dim,
        "n_layers": config["num_hidden_layers"],
        "n_heads": heads,
        "n_kv_heads": config.get("num_key_value_heads") or heads,
    }
    if isinstance(config.get("vocab_size"), int):
        out["vocab_size"] = config["vocab_size"]

    if mistral:
        out |= {"head_dim": head, "hidden_dim": rows}  # Mistral's code reads the width instead of computing it
        if config.get("sliding_window") is not None:
            out["sliding_window"] = config["sliding_window"]
        if config.get("num_local_experts") is not None:
            out["moe"] = {key: config[name] for key, name in _EXPERTS.items() if name in config}
    elif head * heads != dim:  # Meta's Llama computes the size of a head from these two
        raise UsageError(
            f"head_dim {head} x {heads} heads is not hidden_size {dim}: Meta's code has no other heads",
            code=UNSAYABLE,
            hint="write another format, or --dialect keep",
        )
    else:
        out |= _mlp(dim, rows)

    out["norm_eps"] = config.get("rms_norm_eps", 1e-6)
    notes = _rope(config, out)
    if config.get("hidden_act", "silu") != "silu":
        raise UsageError(
            f"hidden_act {config['hidden_act']!r}: Meta's code has SiLU alone",
            code=UNSAYABLE,
            hint="write another format",
        )

    return out, notes


def _mlp(dim: int, rows: int) -> dict[str, Any]:
    """`multiple_of` and, if needed, `ffn_dim_multiplier`, from which Meta's rule gives a width of `rows`.

    Raises UsageError E1413 if there are no such numbers.
    """
    for multiple, multiplier in _ways(dim, rows):
        if width(dim, multiple, multiplier) == rows:
            return {"multiple_of": multiple} | ({"ffn_dim_multiplier": multiplier} if multiplier is not None else {})
    raise UsageError(
        f"Meta's rule gives no MLP of {rows} rows at dim {dim}",
        code=UNSAYABLE,
        hint="write another format, or --dialect keep",
    )


def _ways(dim: int, rows: int) -> Iterator[tuple[int, float | None]]:
    """Candidates (multiple_of, ffn_dim_multiplier), the simplest first.

    No multiplier, then those of Meta's releases, then computed ones of more and more digits.
    """
    for multiplier in (None, *_MULTIPLIERS):
        for multiple in _MULTIPLES:
            yield multiple, multiplier
    plain = int(2 * (4 * dim) / 3)
    multiple = next(each for each in (256, *_MULTIPLES) if rows % each == 0)
    for digits in range(1, 18) if plain else ():
        yield multiple, round((rows - multiple / 2 + 1) / plain, digits)  # mid of the range that rounds up to `rows`


def _rope(config: Mapping[str, Any], out: dict[str, Any]) -> list[str]:
    """Set `rope_theta` and `use_scaled_rope` in `out`; returns lines about settings that params.json can't express.

    Configs of transformers 4 (`rope_scaling`) and 5 (`rope_parameters`) are understood.
    """
    new = config.get("rope_parameters")
    own: Mapping[str, Any] = new if isinstance(new, Mapping) else {}
    scaling = config.get("rope_scaling") or own
    theta = config.get("rope_theta", own.get("rope_theta", 10000.0))
    if theta != 10000.0 or "hidden_dim" in out:
        out["rope_theta"] = theta  # the loader of Llama 1 and 2 knows no such key
    kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, Mapping) else "default"
    if kind in (None, "default"):
        return []
    if kind != "llama3":
        raise UsageError(
            f"rope scaling {kind!r}: Meta's code has Llama 3's alone", code=UNSAYABLE, hint="write another format"
        )
    out["use_scaled_rope"] = True
    other = [f"{key} {scaling[key]}" for key, value in _SCALING.items() if scaling.get(key, value) != value]
    return [f"params.json can't say {', '.join(other)}: Meta's code has 8, 1, 4, 8192 as constants"] if other else []
