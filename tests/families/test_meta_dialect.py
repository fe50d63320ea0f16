"""Dialect `meta`: Meta's own forward pass, written anew here, gives the logits that transformers gives on our
mapping."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from family_models import config_of, hub_shapes
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt_tool.algebra.mapped import Mapped
from ckpt_tool.algebra.piece import apply
from ckpt_tool.errors import InconsistentCheckpoint, UsageError
from ckpt_tool.families.registry import by_name, find
from ckpt_tool.families.rewrite import mapping
from ckpt_tool.systems.meta.config import hub_config, params_of, width

LLAMA2 = {"dim": 48, "n_layers": 2, "n_heads": 6, "multiple_of": 16, "norm_eps": 1e-5, "vocab_size": -1}
LLAMA3 = {
    **LLAMA2,
    "n_kv_heads": 2,
    "ffn_dim_multiplier": 1.3,
    "vocab_size": 51,
    "rope_theta": 500000.0,
    "use_scaled_rope": True,
}
MISTRAL = {
    "dim": 48,
    "n_layers": 2,
    "n_heads": 6,
    "n_kv_heads": 3,
    "head_dim": 10,
    "hidden_dim": 80,
    "norm_eps": 1e-5,
    "vocab_size": 51,
    "rope_theta": 1e6,
}


MIXTRAL = {**MISTRAL, "hidden_dim": 32, "moe": {"num_experts": 4, "num_experts_per_tok": 2}}  # grouped_mm: no float64


def weights(params: dict[str, Any], vocabulary: int = 51) -> dict[str, np.ndarray]:
    """Random tensors under Meta's names, shapes as `model.py` builds them."""
    rng = np.random.default_rng(7)
    dim = params["dim"]
    heads = params["n_heads"]
    head = params.get("head_dim") or dim // heads
    kv = params.get("n_kv_heads") or heads
    rows = params.get("hidden_dim") or width(dim, params["multiple_of"], params.get("ffn_dim_multiplier"))
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (vocabulary, dim)}
    for i in range(params["n_layers"]):
        own = {
            "attention.wq": (heads * head, dim),
            "attention.wk": (kv * head, dim),
            "attention.wv": (kv * head, dim),
            "attention.wo": (dim, heads * head),
            "attention_norm": (dim,),
            "ffn_norm": (dim,),
        }
        experts = params.get("moe", {}).get("num_experts", 0)
        for at in [f"experts.{e}." for e in range(experts)] or [""]:
            own |= {
                f"feed_forward.{at}w1": (rows, dim),
                f"feed_forward.{at}w2": (dim, rows),
                f"feed_forward.{at}w3": (rows, dim),
            }
        own |= {"feed_forward.gate": (experts, dim)} if experts else {}
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in own.items()}
    shapes |= {"norm.weight": (dim,), "output.weight": (vocabulary, dim)}
    return {name: (rng.standard_normal(shape) / math.sqrt(shape[-1])).astype("f4") for name, shape in shapes.items()}


def frequencies(params: dict[str, Any], head: int) -> np.ndarray:
    freqs = params.get("rope_theta", 10000.0) ** -(np.arange(0, head, 2) / head)
    if not params.get("use_scaled_rope"):
        return freqs
    # wavelengths above the first are stretched by 8, below the second kept
    long = 8192 / 1
    short = 8192 / 4
    out = []
    for f in freqs:
        wave = 2 * math.pi / f
        mix = (8192 / wave - 1) / (4 - 1)
        out.append(f / 8 if wave > long else f if wave < short else (1 - mix) * f / 8 + mix * f)
    return np.array(out)


def mlp(w: dict[str, np.ndarray], at: str, y: np.ndarray) -> np.ndarray:
    gate, up = (y @ w[f"{at}{n}.weight"].T for n in ("w1", "w3"))
    return (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}w2.weight"].T


def meta_logits(w: dict[str, np.ndarray], params: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
    """Meta's `Transformer.forward` for one sequence, in float64: rotations of neighbouring pairs as complex numbers."""
    w = {name: value.astype("f8") for name, value in w.items()}
    heads = params["n_heads"]
    kv = params.get("n_kv_heads") or heads
    head = params.get("head_dim") or params["dim"] // heads
    turn = np.exp(1j * np.outer(np.arange(len(tokens)), frequencies(params, head)))[:, None]

    def norm(x: np.ndarray, by: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + params["norm_eps"]) * w[by]

    def rotated(x: np.ndarray) -> np.ndarray:
        pairs = (x[..., ::2] + 1j * x[..., 1::2]) * turn
        return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)

    x = w["tok_embeddings.weight"][tokens]
    for i in range(params["n_layers"]):
        at = f"layers.{i}."
        y = norm(x, f"{at}attention_norm.weight")
        q, k, v = (y @ w[f"{at}attention.w{c}.weight"].T for c in "qkv")
        q = rotated(q.reshape(len(tokens), heads, head))
        k = rotated(k.reshape(len(tokens), kv, head))
        k, v = (a.reshape(len(tokens), kv, head).repeat(heads // kv, 1) for a in (k, v))
        scores = np.einsum("shd,thd->hst", q, k) / math.sqrt(head)
        scores = np.where(np.tri(len(tokens), dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hst,thd->shd", scores / scores.sum(-1, keepdims=True), v).reshape(len(tokens), -1)
        x = x + mixed @ w[f"{at}attention.wo.weight"].T
        y = norm(x, f"{at}ffn_norm.weight")
        if "moe" not in params:
            x = x + mlp(w, f"{at}feed_forward.", y)
            continue
        scores = y @ w[f"{at}feed_forward.gate.weight"].T
        best = params["moe"]["num_experts_per_tok"]
        for t, row in enumerate(scores):  # softmax over the best alone
            chosen = np.argsort(row)[-best:]
            share = np.exp(row[chosen]) / np.exp(row[chosen]).sum()
            x[t] += sum(s * mlp(w, f"{at}feed_forward.experts.{e}.", y[t]) for s, e in zip(share, chosen, strict=True))
    return norm(x, "norm.weight") @ w["output.weight"].T


def turned(mapped: Mapped, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return apply(
        [piece for made in mapped.made for piece in made.pieces], arrays, {m.name: m.shape for m in mapped.made}
    )


@pytest.mark.parametrize("params", [LLAMA2, LLAMA3, MISTRAL, MIXTRAL], ids=["llama2", "llama3", "mistral", "mixtral"])
def test_the_same_logits_as_transformers(params: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5")
    w = weights(params)
    shapes = {name: value.shape for name, value in w.items()}
    config = hub_config(params, shapes)
    family = by_name("mixtral" if "moe" in params else "llama")
    assert find(config, shapes, stated="meta") == (family, "meta")
    hub = turned(mapping(family, "meta", "hf", shapes, config), w)
    if "moe" in params:  # the experts of a layer are one tensor in memory
        hub = turned(mapping(family, "hf", "hf-fused", {n: a.shape for n, a in hub.items()}, config), hub)
    model = getattr(transformers, config["architectures"][0])(transformers.AutoConfig.for_model(**config))
    model.load_state_dict({name: torch.from_numpy(value) for name, value in hub.items()}, strict=True)
    tokens = np.arange(40) * 7 % 51
    with torch.no_grad():
        theirs = (model if "moe" in params else model.double())(torch.from_numpy(tokens)[None]).logits[0].numpy()
    ours = meta_logits(w, params, tokens)
    assert np.abs(theirs - ours).max() < 2e-5 * np.abs(ours).max(), "transformers keeps its angles in float32"
    wrong = {**w, **{name: w[name][::-1].copy() for name in w if name.endswith("wq.weight")}}
    assert np.abs(theirs - meta_logits(wrong, params, tokens)).max() > 1e-2 * np.abs(ours).max()


@pytest.mark.parametrize(("g", "r", "d"), [(1, 1, 2), (2, 3, 4), (3, 1, 6), (4, 2, 10)])
def test_rows_lie_as_the_script_of_transformers_lays_them(g: int, r: int, d: int) -> None:
    """`permute` of convert_llama_weights_to_hf.py: view(heads, d / 2, 2, dim).transpose(1, 2)."""
    heads = g * r
    dim = g * r * d
    w = {
        "layers.3.attention.wq.weight": np.arange(dim * dim).reshape(dim, dim),
        "layers.3.attention.wk.weight": np.arange(g * d * dim).reshape(g * d, dim),
    }
    config = {"hidden_size": dim, "num_attention_heads": heads, "num_key_value_heads": g, "num_hidden_layers": 4}
    hub = turned(mapping(by_name("llama"), "meta", "hf", {n: a.shape for n, a in w.items()}, config), w)
    for name, n in (("q", heads), ("k", g)):
        mine = w[f"layers.3.attention.w{name}.weight"]
        want = mine.reshape(n, d // 2, 2, dim).transpose(0, 2, 1, 3).reshape(n * d, dim)
        np.testing.assert_array_equal(hub[f"model.layers.3.self_attn.{name}_proj.weight"], want)
    back = turned(mapping(by_name("llama"), "hf", "meta", {n: a.shape for n, a in hub.items()}, config), hub)
    for name, value in w.items():
        np.testing.assert_array_equal(back[name], value)


def test_the_buffer_of_angles_is_dropped_by_name_and_never_made() -> None:
    config = config_of("llama")
    shapes = {"norm.weight": (18,), "rope.freqs": (2,)}
    assert mapping(by_name("llama"), "meta", "hf", shapes, config).dropped == ("rope.freqs",)
    made = mapping(by_name("llama"), "hf", "meta", hub_shapes("llama", config), config).made
    assert "rope.freqs" not in {each.name for each in made} and len(made) == 21


def test_biases_have_no_place() -> None:
    config = config_of("llama", attention_bias=True)
    shapes = {**hub_shapes("llama", config), "model.layers.0.self_attn.q_proj.bias": (24,)}
    with pytest.raises(InconsistentCheckpoint) as e:
        mapping(by_name("llama"), "hf", "meta", shapes, config)
    assert e.value.code == "E1374"


# dim, n_heads, n_kv_heads, multiple_of, ffn_dim_multiplier as published, and the width that transformers has
RELEASES = {
    "llama-7b": (4096, 32, 32, 256, None, 11008),
    "llama-65b": (8192, 64, 64, 256, None, 22016),
    "llama2-70b": (8192, 64, 8, 4096, 1.3, 28672),
    "llama3-8b": (4096, 32, 8, 1024, 1.3, 14336),
    "llama3.1-405b": (16384, 128, 8, 4096, 1.2, 53248),
    "llama3.2-1b": (2048, 32, 8, 256, 1.5, 8192),
    "llama3.2-3b": (3072, 24, 8, 256, 1.0, 8192),
}


@pytest.mark.parametrize("name", RELEASES)
def test_widths_of_the_releases(name: str) -> None:
    dim, heads, kv, multiple, multiplier, rows = RELEASES[name]
    params = {"dim": dim, "n_heads": heads, "n_kv_heads": kv, "n_layers": 1, "multiple_of": multiple, "norm_eps": 1e-5}
    config = hub_config({**params, **({"ffn_dim_multiplier": multiplier} if multiplier else {})}, {})
    assert config["intermediate_size"] == rows and config["head_dim"] * heads == dim
    back, notes = params_of(config)
    assert width(dim, back["multiple_of"], back.get("ffn_dim_multiplier")) == rows and not notes


@example(19, 29)
@example(1, 1)
@given(st.integers(1, 20000), st.integers(1, 90000))
def test_any_width_can_be_said(dim: int, rows: int) -> None:
    back, _ = params_of(
        {"hidden_size": dim, "intermediate_size": rows, "num_hidden_layers": 1, "num_attention_heads": 1}
    )
    assert width(dim, back["multiple_of"], back.get("ffn_dim_multiplier")) == rows


@pytest.mark.parametrize(
    "params",
    [LLAMA2, LLAMA3, MISTRAL, MIXTRAL, {"model": LLAMA3}],
    ids=["llama2", "llama3", "mistral", "mixtral", "nested"],
)
def test_params_there_and_back(params: dict[str, Any]) -> None:
    own = params.get("model", params)
    shapes = {name: value.shape for name, value in weights(own).items()}
    config = hub_config(params, shapes)
    again, _ = params_of(config)
    assert hub_config(again, shapes) == config
    for key in ("dim", "n_layers", "n_heads", "norm_eps", "use_scaled_rope", "hidden_dim", "head_dim", "moe"):
        assert again.get(key) == own.get(key), key


@pytest.mark.parametrize(
    ("params", "theta"), [(LLAMA2, 1e4), (MISTRAL, 1e6), ({**MISTRAL, "sliding_window": "4096"}, 1e4)]
)
def test_a_rope_that_is_not_stated(params: dict[str, Any], theta: float) -> None:
    """Meta's Llama 2 has 10,000 as a constant (and no such argument); mistral-inference goes by the sliding window."""
    silent = {key: value for key, value in params.items() if key != "rope_theta"}
    config = hub_config(silent, {})
    assert config["rope_theta"] == theta
    assert ("rope_theta" in params_of(config)[0]) == ("hidden_dim" in params)


def test_what_meta_s_code_can_t_build_is_said() -> None:
    plain = config_of("llama", hidden_size=24, num_attention_heads=6, head_dim=4)
    scaled = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    }
    params, notes = params_of({**plain, "rope_parameters": scaled})
    assert params["use_scaled_rope"] is True and params["rope_theta"] == 500000.0 and "factor 32.0" in notes[0]
    for change in (
        {"head_dim": 8},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"type": "linear"}},
        {"intermediate_size": None},
    ):
        with pytest.raises(UsageError) as e:
            params_of({**plain, **change})
        assert e.value.code == "E1413"
