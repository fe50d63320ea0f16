"""Fused tensors of the new families against NumPy: Megatron's tensors made by reshapes, as each system's own code words
them.

Falcon's oracle is how transformers takes query_key_value apart before attention (`FalconAttention._split_heads`),
GPT-2's the three thirds of a Conv1D, gpt-oss's the strides of two (`gate_up[..., ::2]`), Phi-3's the slices of its
forward pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from family_models import config_of, counted, hub_shapes, random_config

from ckpt_tool.algebra.piece import apply
from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.families.registry import by_name
from ckpt_tool.families.rewrite import mapping

Arrays = dict[str, np.ndarray]


def moved(name: str, source: str, target: str, arrays: Arrays, config: dict[str, Any]) -> Arrays:
    mapped = mapping(by_name(name), source, target, {key: array.shape for key, array in arrays.items()}, config)
    pieces = [piece for made in mapped.made for piece in made.pieces]
    return apply(pieces, arrays, {made.name: made.shape for made in mapped.made})


def grouped(q: np.ndarray, k: np.ndarray, v: np.ndarray, groups: int, d: int) -> np.ndarray:
    """Megatron's linear_qkv of whole q, k and v (rows first): a group's queries, its key, its value."""
    parts = [part.reshape(groups, -1, d, *part.shape[1:]) for part in (q, k, v)]
    return np.concatenate(parts, axis=1).reshape(-1, *q.shape[1:])


def of_phi3(hub: Arrays, at: str, config: dict[str, Any]) -> Arrays:
    groups = config["num_key_value_heads"]
    d = config["head_dim"]
    rows = config["num_attention_heads"] * d
    key_rows = groups * d
    whole = hub[f"{at}.self_attn.qkv_proj.weight"]
    q = whole[:rows]
    k = whole[rows : rows + key_rows]
    v = whole[rows + key_rows :]
    return {
        "input_layernorm.weight": hub[f"{at}.input_layernorm.weight"],
        "pre_mlp_layernorm.weight": hub[f"{at}.post_attention_layernorm.weight"],
        "self_attention.linear_qkv.weight": grouped(q, k, v, groups, d),
        "self_attention.linear_proj.weight": hub[f"{at}.self_attn.o_proj.weight"],
        "mlp.linear_fc1.weight": hub[f"{at}.mlp.gate_up_proj.weight"],
        "mlp.linear_fc2.weight": hub[f"{at}.mlp.down_proj.weight"],
    }


def of_llama(hub: Arrays, at: str, config: dict[str, Any]) -> Arrays:
    """The attention that glm4, gemma and gpt-oss share."""
    groups = config["num_key_value_heads"]
    d = config["head_dim"]
    out = {"self_attention.linear_proj.weight": hub[f"{at}.self_attn.o_proj.weight"]}
    for leaf in ("weight", "bias"):
        if f"{at}.self_attn.q_proj.{leaf}" in hub:
            q, k, v = (hub[f"{at}.self_attn.{x}_proj.{leaf}"] for x in "qkv")
            out[f"self_attention.linear_qkv.{leaf}"] = grouped(q, k, v, groups, d)
    return out | {"input_layernorm.weight": hub[f"{at}.input_layernorm.weight"]}


def of_glm4(hub: Arrays, at: str, config: dict[str, Any]) -> Arrays:
    return of_llama(hub, at, config) | {
        "pre_mlp_layernorm.weight": hub[f"{at}.post_attention_layernorm.weight"],
        "post_self_attn_layernorm.weight": hub[f"{at}.post_self_attn_layernorm.weight"],
        "post_mlp_layernorm.weight": hub[f"{at}.post_mlp_layernorm.weight"],
        "mlp.linear_fc1.weight": hub[f"{at}.mlp.gate_up_proj.weight"],
        "mlp.linear_fc2.weight": hub[f"{at}.mlp.down_proj.weight"],
    }


def of_gemma3(hub: Arrays, at: str, config: dict[str, Any]) -> Arrays:
    gate, up = (hub[f"{at}.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    return of_llama(hub, at, config) | {
        "self_attention.q_layernorm.weight": hub[f"{at}.self_attn.q_norm.weight"],
        "self_attention.k_layernorm.weight": hub[f"{at}.self_attn.k_norm.weight"],
        "self_attention.linear_proj.post_layernorm.weight": hub[f"{at}.post_attention_layernorm.weight"],
        "pre_mlp_layernorm.weight": hub[f"{at}.pre_feedforward_layernorm.weight"],
        "mlp.linear_fc2.post_layernorm.weight": hub[f"{at}.post_feedforward_layernorm.weight"],
        "mlp.linear_fc1.weight": np.vstack([gate, up]),
        "mlp.linear_fc2.weight": hub[f"{at}.mlp.down_proj.weight"],
    }


def of_gpt_oss(hub: Arrays, at: str, config: dict[str, Any]) -> Arrays:
    out = of_llama(hub, at, config) | {
        "pre_mlp_layernorm.weight": hub[f"{at}.post_attention_layernorm.weight"],
        "self_attention.linear_proj.bias": hub[f"{at}.self_attn.o_proj.bias"],
        "self_attention.core_attention.softmax_offset": hub[f"{at}.self_attn.sinks"],
        "mlp.router.weight": hub[f"{at}.mlp.router.weight"],
        "mlp.router.bias": hub[f"{at}.mlp.router.bias"],
    }
    for e in range(config["num_local_experts"]):
        there = f"mlp.experts.local_experts.{e}"
        for leaf, name in (("weight", "gate_up_proj"), ("bias", "gate_up_proj_bias")):
            both = hub[f"{at}.mlp.experts.{name}"][e]
            out[f"{there}.linear_fc1.{leaf}"] = np.concatenate([both[..., ::2].T, both[..., 1::2].T])
        out[f"{there}.linear_fc2.weight"] = hub[f"{at}.mlp.experts.down_proj"][e].T
        out[f"{there}.linear_fc2.bias"] = hub[f"{at}.mlp.experts.down_proj_bias"][e]
    return out


def of_gpt2(hub: Arrays, at: str, config: dict[str, Any]) -> Arrays:
    heads = config["n_head"]
    d = config["n_embd"] // heads
    out = {}
    for leaf in ("weight", "bias"):
        q, k, v = np.split(hub[f"{at}.attn.c_attn.{leaf}"], 3, axis=-1)
        out |= {
            f"input_layernorm.{leaf}": hub[f"{at}.ln_1.{leaf}"],
            f"pre_mlp_layernorm.{leaf}": hub[f"{at}.ln_2.{leaf}"],
            f"self_attention.linear_qkv.{leaf}": grouped(q.T, k.T, v.T, heads, d),
            f"self_attention.linear_proj.{leaf}": hub[f"{at}.attn.c_proj.{leaf}"].T,
            f"mlp.linear_fc1.{leaf}": hub[f"{at}.mlp.c_fc.{leaf}"].T,
            f"mlp.linear_fc2.{leaf}": hub[f"{at}.mlp.c_proj.{leaf}"].T,
        }
    return out


def of_falcon(hub: Arrays, at: str, config: dict[str, Any]) -> Arrays:
    heads = config["num_attention_heads"]
    h = config["hidden_size"]
    new = config["new_decoder_architecture"]
    d = h // heads
    norms = {
        "ln_attn": "input_layernorm",
        "ln_mlp": "pre_mlp_layernorm",
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_self_attn_layernorm",
    }
    out = {}
    for leaf in ("weight", "bias"):
        for name, there in norms.items():
            if f"{at}.{name}.{leaf}" in hub:
                out[f"{there}.{leaf}"] = hub[f"{at}.{name}.{leaf}"]
        if f"{at}.self_attention.dense.{leaf}" not in hub:
            continue
        whole = hub[f"{at}.self_attention.query_key_value.{leaf}"]
        tail = whole.shape[1:]
        if new:
            split = whole.reshape(-1, heads // config["num_kv_heads"] + 2, d, *tail)
            q = split[:, :-2]
            k = split[:, -2]
            v = split[:, -1]
            groups = config["num_kv_heads"]
        elif not config["multi_query"]:
            split = whole.reshape(heads, 3, d, *tail)
            q = split[:, 0]
            k = split[:, 1]
            v = split[:, 2]
            groups = heads
        else:
            split = whole.reshape(heads + 2, d, *tail)
            q = split[:-2]
            k = split[[-2]]
            v = split[[-1]]
            groups = 1
        q, k, v = (part.reshape(-1, *tail) for part in (q, k, v))
        out |= {
            f"self_attention.linear_qkv.{leaf}": grouped(q, k, v, groups, d),
            f"self_attention.linear_proj.{leaf}": hub[f"{at}.self_attention.dense.{leaf}"],
            f"mlp.linear_fc1.{leaf}": hub[f"{at}.mlp.dense_h_to_4h.{leaf}"],
            f"mlp.linear_fc2.{leaf}": hub[f"{at}.mlp.dense_4h_to_h.{leaf}"],
        }
    return out


OLD = {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True}
CASES: dict[str, tuple[str, Callable[[Arrays, str, dict[str, Any]], Arrays], dict[str, Any]]] = {
    "phi3": ("phi3", of_phi3, {}),
    "glm4": ("glm4", of_glm4, {}),
    "gemma3": ("gemma3", of_gemma3, {}),
    "gpt_oss": ("gpt_oss", of_gpt_oss, {}),
    "gpt2": ("gpt2", of_gpt2, {}),
    "falcon 40B": ("falcon", of_falcon, {}),
    "falcon 11B": ("falcon", of_falcon, {"num_ln_in_parallel_attn": 1}),
    "falcon 7B": ("falcon", of_falcon, OLD),
    "falcon RW": ("falcon", of_falcon, {**OLD, "multi_query": False, "parallel_attn": False, "bias": True}),
}
OUTSIDE = {
    "model.embed_tokens": "embedding.word_embeddings",
    "transformer.wte": "embedding.word_embeddings",
    "transformer.word_embeddings": "embedding.word_embeddings",
    "transformer.wpe": "embedding.position_embeddings",
    "lm_head": "output_layer",
    "model.norm": "decoder.final_layernorm",
    "transformer.ln_f": "decoder.final_layernorm",
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", CASES)
def test_megatron_equals_what_numpy_makes_of_the_hub(case: str, seed: int) -> None:
    name, layer, change = CASES[case]
    config = random_config(name, seed, **change)
    hub = counted(hub_shapes(name, config))
    want = {}
    for key, array in hub.items():
        module, _, leaf = key.rpartition(".")
        if module in OUTSIDE:
            want[f"{OUTSIDE[module]}.{leaf}"] = array
    layers = {found[0] for key in hub if (found := re.match(r"(?:model\.layers|transformer\.h)\.\d+", key))}
    for at in layers:
        number = at.rpartition(".")[2]
        want |= {f"decoder.layers.{number}.{key}": array for key, array in layer(hub, at, config).items()}
    got = moved(name, "hf", "megatron", hub, config)
    assert got.keys() == want.keys()
    for key, array in want.items():
        np.testing.assert_array_equal(got[key], array, err_msg=key)
    back = moved(name, "megatron", "hf", got, config)
    assert back.keys() == hub.keys() and all(np.array_equal(back[key], hub[key]) for key in hub)


def test_heads_of_bloom_lie_as_those_of_falcon_rw() -> None:
    config = random_config("bloom", 3)
    hub = counted(hub_shapes("bloom", config))
    told = {
        **OLD,
        "multi_query": False,
        "num_attention_heads": config["n_head"],
        "num_hidden_layers": config["n_layer"],
    }
    fused = {key: array for key, array in hub.items() if "query_key_value" in key}
    got = moved("falcon", "hf", "megatron", fused, {**config, **told})
    assert [a.tolist() for a in got.values()] == [a.tolist() for a in fused.values()]


def test_masks_of_old_gpt2_files_are_dropped_and_the_bare_names_read() -> None:
    config = config_of("gpt2", tie_word_embeddings=True)
    shapes = {
        key.removeprefix("transformer."): n for key, n in hub_shapes("gpt2", config).items() if key != "lm_head.weight"
    }
    shapes |= {"h.0.attn.bias": (1, 1, 12, 12), "h.0.attn.masked_bias": ()}
    mapped = mapping(by_name("gpt2"), "hf-bare", "megatron", shapes, config)
    assert set(mapped.dropped) == {"h.0.attn.bias", "h.0.attn.masked_bias"}
    assert "embedding.position_embeddings.weight" in {made.name for made in mapped.made}
    assert mapped.aliases == (("output_layer.weight", "embedding.word_embeddings.weight"),)


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3", "gpt2", "falcon", "bloom"])
@pytest.mark.parametrize("said", [{}, {"tie_word_embeddings": True}])
def test_these_heads_are_tied_unless_the_config_says_otherwise(name: str, said: dict[str, Any]) -> None:
    config = {key: value for key, value in config_of(name).items() if key != "tie_word_embeddings"} | said
    shapes = {key: n for key, n in hub_shapes(name, config_of(name)).items() if key != "lm_head.weight"}
    dialect = "megatron" if name != "bloom" else "hf-bare"
    (alias,) = mapping(by_name(name), "hf", dialect, shapes, config).aliases
    assert (alias[0] in ("output_layer.weight", "lm_head.weight") and "word_embeddings" in alias[1]) or "wte" in alias[
        1
    ]
    if dialect == "megatron":
        both = mapping(by_name(name), "hf", dialect, hub_shapes(name, config_of(name)), config)
        assert both.dropped == ("lm_head.weight",)


@pytest.mark.parametrize("target", ["megatron", "paddle"])
def test_experts_in_mxfp4_are_refused_by_name(target: str) -> None:
    config = config_of("gpt_oss", hidden_size=32, intermediate_size=32)
    shapes = {"model.norm.weight": (32,)}
    for name in ("gate_up_proj", "down_proj"):
        rows = 64 if name == "gate_up_proj" else 32
        shapes |= {f"model.layers.0.mlp.experts.{name}_blocks": (3, rows, 1, 16)}
        shapes |= {f"model.layers.0.mlp.experts.{name}_scales": (3, rows, 1)}
    with pytest.raises(InconsistentCheckpoint, match="experts.gate_up_proj_blocks") as error:
        mapping(by_name("gpt_oss"), "hf", target, shapes, config)
    assert "--dequantize" in (error.value.hint or "") and len(error.value.faults) == 3


def test_norms_of_falcon_that_the_config_does_not_have() -> None:
    config = config_of("falcon", num_ln_in_parallel_attn=1)
    shapes = hub_shapes("falcon", config_of("falcon"))
    with pytest.raises(InconsistentCheckpoint, match="ln_attn"):
        mapping(by_name("falcon"), "hf", "megatron", shapes, config)
