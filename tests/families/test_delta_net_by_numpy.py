"""Gated delta nets and gated attention in Megatron against NumPy: Megatron-Bridge's layout and mcore-bridge's, made by
splits and reshapes of the hub's tensors, as transformers takes them apart before it computes.

Sources: transformers 5.23 `Qwen3NextGatedDeltaNet.fix_query_key_value_ordering`, `Qwen3NextAttention.forward`;
Megatron-Bridge 0.6.2 `merge_gdn_linear_weights`, `merge_qkv_weights`; mcore-bridge 1.6.5 `_set_linear_in_proj`,
`_set_qkv`.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from family_models import config_of, counted, hub_shapes

from ckpt_tool.algebra.piece import apply
from ckpt_tool.errors import InconsistentCheckpoint, UsageError
from ckpt_tool.families.base import SHIFTED
from ckpt_tool.families.models import FAMILIES
from ckpt_tool.families.registry import by_name, find
from ckpt_tool.families.rewrite import mapping

Arrays = dict[str, np.ndarray]
NAMES = [f.name for f in FAMILIES if "megatron-swift" in f.dialects and "linear_num_key_heads" in f.axes.values()]
BIASED = {"attention_bias": True}
JOINED = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "final_layernorm"}


def moved(name: str, source: str, target: str, arrays: Arrays, config: dict[str, Any]) -> Arrays:
    mapped = mapping(by_name(name), source, target, {key: array.shape for key, array in arrays.items()}, config)
    assert not mapped.dropped
    pieces = [piece for made in mapped.made for piece in made.pieces]
    return apply(pieces, arrays, {made.name: made.shape for made in mapped.made})


def with_ahead(name: str, config: dict[str, Any]) -> tuple[Arrays, str]:
    """(hub tensors with the layer of multi-token prediction that transformers leaves out: the last attention layer
    again, and what joins it; how the names of the layers begin)."""
    shapes = hub_shapes(name, config)
    root = next(key for key in shapes if key.endswith("embed_tokens.weight")).removesuffix("embed_tokens.weight")
    text = by_name(name).facts(config)
    last = f"{root}layers.{text['num_hidden_layers'] - 1}."
    h = text["hidden_size"]
    layer = {key.replace(last, "mtp.layers.0."): n for key, n in shapes.items() if key.startswith(last)}
    fused = layer.pop("mtp.layers.0.mlp.experts.gate_up_proj", None)  # released one by one here, whatever the others
    layer.pop("mtp.layers.0.mlp.experts.down_proj", None)
    for e in range(fused[0] if fused else 0):
        m = text["moe_intermediate_size"]
        layer |= {f"mtp.layers.0.mlp.experts.{e}.{x}_proj.weight": (m, h) for x in ("gate", "up")}
        layer[f"mtp.layers.0.mlp.experts.{e}.down_proj.weight"] = (h, m)
    shapes |= layer
    return counted(
        shapes | {f"mtp.{key}.weight": (h, 2 * h) if key == "fc" else (h,) for key in JOINED}
    ), f"{root}layers."


def attention(hub: Arrays, at: str, config: dict[str, Any], swift: bool) -> Arrays:
    groups = config["num_key_value_heads"]
    d = config["head_dim"]
    out = {}
    for leaf in ("weight", "bias"):
        if f"{at}q_proj.{leaf}" not in hub:
            continue
        q, k, v = (hub[f"{at}{x}_proj.{leaf}"] for x in "qkv")
        tail = q.shape[1:]
        query, gate = np.split(q.reshape(-1, 2 * d, *tail), 2, axis=1)
        parts = [part.reshape(groups, -1, d, *tail) for part in (query, gate, k, v)]
        if swift:
            parts[:2] = [np.stack(parts[:2], axis=2).reshape(groups, -1, d, *tail)]
        out[f"linear_qkv.{leaf}"] = np.concatenate(parts, axis=1).reshape(-1, *tail)
        out[f"linear_proj.{leaf}"] = hub[f"{at}o_proj.{leaf}"]
    return out | {f"{x}_layernorm.weight": hub[f"{at}{x}_norm.weight"] for x in "qk"}


def delta_net(hub: Arrays, at: str, config: dict[str, Any], swift: bool) -> Arrays:
    heads, k, u = (config[f"linear_{key}"] for key in ("num_key_heads", "key_head_dim", "value_head_dim"))
    values = config["linear_num_value_heads"] // heads

    def by_key_head(whole: np.ndarray, *rows: int) -> list[np.ndarray]:
        return np.split(whole.reshape(heads, sum(rows), -1), np.cumsum(rows)[:-1], axis=1)

    def end_to_end(whole: np.ndarray, *rows: int) -> list[np.ndarray]:
        sections = np.split(whole, np.cumsum([heads * n for n in rows])[:-1])
        return [section.reshape(heads, n, -1) for section, n in zip(sections, rows, strict=True)]

    def joined(parts: list[np.ndarray]) -> np.ndarray:
        return (
            np.concatenate(parts, axis=1)
            if swift
            else np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])
        )

    wide = (k, k, values * u)
    if f"{at}in_proj_qkvz.weight" in hub:
        parts = by_key_head(hub[f"{at}in_proj_qkvz.weight"], *wide, values * u)
        parts += by_key_head(hub[f"{at}in_proj_ba.weight"], values, values)
    else:
        parts = end_to_end(hub[f"{at}in_proj_qkv.weight"], *wide)
        parts += [hub[f"{at}in_proj_{x}.weight"].reshape(heads, -1, parts[0].shape[-1]) for x in "zba"]
    kernel = hub[f"{at}conv1d.weight"]
    mark = "_by_head" if swift else ""
    return {
        f"in_proj.weight{mark}": joined(parts).reshape(-1, parts[0].shape[-1]),
        f"conv1d.weight{mark}": joined(end_to_end(kernel, *wide)).reshape(kernel.shape),
        "out_norm.weight": hub[f"{at}norm.weight"] - (0 if swift else 1),
        "out_proj.weight": hub[f"{at}out_proj.weight"],
        **{key: hub[f"{at}{key}"] for key in ("A_log", "dt_bias")},
    }


@pytest.mark.parametrize("change", [{}, BIASED], ids=["plain", "biased"])
@pytest.mark.parametrize("dialect", ["megatron", "megatron-swift"])
@pytest.mark.parametrize("name", NAMES)
def test_both_layouts_equal_what_numpy_makes_of_the_hub(name: str, dialect: str, change: dict[str, Any]) -> None:
    config = config_of(name, num_hidden_layers=4, **change)
    hub, root = with_ahead(name, config)
    text = by_name(name).facts(config)
    swift = dialect.endswith("swift")
    got = moved(name, "hf", dialect, hub, config)
    front = "language_model." if root.count("language_model") else ""
    want: Arrays = {f"{front}mtp.layers.0.{there}.weight": hub[f"mtp.{here}.weight"] for here, there in JOINED.items()}
    places = {f"{root}{i}.": f"{front}decoder.layers.{i}." for i in range(4)}
    places["mtp.layers.0."] = f"{front}mtp.layers.0.transformer_layer."
    for at, there in places.items():
        kind, sub = (attention, "self_attn.") if f"{at}self_attn.q_proj.weight" in hub else (delta_net, "linear_attn.")
        want |= {f"{there}self_attention.{key}": array for key, array in kind(hub, at + sub, text, swift).items()}
        want[f"{there}input_layernorm.weight"] = hub[f"{at}input_layernorm.weight"]
    assert sum("linear_qkv.bias" in key for key in want) == (3 if change else 0)
    seen = {key: array for key, array in got.items() if not key.startswith("vision_model.")}
    found = {key: array for key, array in seen.items() if ".self_attention." in key or key in want}
    assert found.keys() == want.keys()
    for key, array in want.items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)
    back = moved(name, dialect, "hf", got, config)
    assert back.keys() == hub.keys() and all(np.array_equal(back[key], hub[key]) for key in hub)


@pytest.mark.parametrize("name", NAMES)
def test_without_zero_centred_norms_the_delta_net_s_is_as_in_the_hub(name: str) -> None:
    """A job without --apply-layernorm-1p: one is added to every other norm, and this one is left alone."""
    config = config_of(name)
    hub, root = with_ahead(name, config)
    got = moved(name, "hf", SHIFTED, hub, config)
    norm = next(key for key in got if key.endswith("layers.0.self_attention.out_norm.weight"))
    np.testing.assert_array_equal(got[norm], hub[f"{root}0.linear_attn.norm.weight"])
    norms = [key for key in got if re.search(r"(?<!vision_model\.)decoder\.layers\.\d+\.input_layernorm", key)]
    assert norms and all(
        np.array_equal(got[key], hub[f"{root}{key.split('.')[-3]}.input_layernorm.weight"] + 1) for key in norms
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_second_layer_ahead_is_a_fault(name: str) -> None:
    """The hub has one `mtp.fc`, so more layers than one have no place there."""
    config = config_of(name)
    hub, _ = with_ahead(name, config)
    there = moved(name, "hf", "megatron", hub, config)
    there |= {
        key.replace("mtp.layers.0.", "mtp.layers.1."): array for key, array in there.items() if "mtp.layers" in key
    }
    with pytest.raises(InconsistentCheckpoint, match="t=1, the family has 1 of them"):
        moved(name, "megatron", "hf", there, config)


@pytest.mark.parametrize("name", NAMES)
def test_bare_names_of_mcore_bridge_are_read_where_the_user_says_so(name: str) -> None:
    """Its state dicts have core's names; nothing states the two layouts apart."""
    config = config_of(name)
    hub, _ = with_ahead(name, config)
    marked = moved(name, "hf", "megatron-swift", hub, config)
    bare = {key.removesuffix("_by_head"): array for key, array in marked.items()}
    assert len(bare.keys() - marked.keys()) == 2 * sum(key.endswith("out_norm.weight") for key in bare)
    shapes = {key: array.shape for key, array in bare.items() if not key.startswith("visual.")}  # a tower tells
    with pytest.raises(UsageError, match="arrange the elements differently") as error:
        find(config, shapes)
    assert error.value.code == "E1233"
    told = find(config, {key: array.shape for key, array in marked.items()}, stated="megatron")
    assert told.dialect == "megatron-swift"
    back = moved(name, "megatron-swift", "hf", bare, config)
    assert back.keys() == hub.keys() and all(np.array_equal(back[key], hub[key]) for key in hub)
