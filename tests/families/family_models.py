"""Small models of every family: a config each, odd sizes on purpose, and the tensors that the real class has, on no
device.

A family brings `tiny`, what its config has beside the sizes below; what else differs (names of keys, heads as wide as
the model) follows from its class and its axes, so that a new family needs no line here.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Mapping
from copy import deepcopy
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from ckpt_tool.algebra.expression import expression
from ckpt_tool.families.models import FAMILIES, family_of
from ckpt_tool.families.registry import by_name
from ckpt_tool.families.rewrite import mapping
from ckpt_tool.families.table import instances

Shapes = dict[str, tuple[int, ...]]
NAMES = [family.name for family in FAMILIES]
EXPERTS = [
    family.name for family in FAMILIES if any("experts" in key for key in family.part(family.tiny) or family.tiny)
]
AHEAD = [  # layers of multi-token prediction under DeepSeek's names, or ERNIE's
    family.name
    for family in FAMILIES
    if "ahead" in family.classes[0].forms and re.search("shared_head|mtp_block", family.hub)
]
REMOTE = ("BailingMoeV2ForCausalLM", "KimiK3ForConditionalGeneration")  # classes of `remote_models.py`
SIZES = {
    "num_hidden_layers": 2,
    "vocab_size": 22,
    "hidden_size": 18,
    "intermediate_size": 10,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
}


def config_of(family: str, **change: Any) -> dict[str, Any]:
    """A config.json: 2 layers (the first dense), 6 heads in 2 groups of 4, hidden 18. change: by the keys of
    `SIZES`. Where `tiny` has a part of its own for the language model, the sizes stand there."""
    known = by_name(family)
    first = known.classes[0]
    read = set(re.findall(r"[a-z_]+", " ".join(known.axes.values())))
    named = {"model_type": first.model_type, "architectures": [first.architecture]}
    whole: dict[str, Any] = {"tie_word_embeddings": False, **deepcopy(dict(known.tiny))}
    part = whole
    for key in known.language.split("."):
        part = part.get(key, whole)
    given = {**SIZES, **part, **change}
    if "latent" in first.forms:  # every head has its own keys
        given["num_key_value_heads"] = given["num_attention_heads"]
        given["head_dim"] = given["qk_rope_head_dim"]  # as transformers reads it
    elif part.get("num_key_value_heads") == SIZES["num_attention_heads"]:
        given["num_key_value_heads"] = given["num_attention_heads"]
    elif "head_dim" not in read:
        given["hidden_size"] = given["num_attention_heads"] * given["head_dim"]
    for key in [key for key in given if key.endswith("layer_types")]:  # layers take turns, however many there are
        given[key] = [given[key][i % len(given[key])] for i in range(given["num_hidden_layers"])]
    given = {first.keys.get(key, key): value for key, value in given.items()}
    sizes = {first.keys.get(key, key) for key in SIZES}
    kept = {key: value for key, value in given.items() if key not in sizes or key in read or "latent" in first.forms}
    if part is whole:
        return {**named, **kept}
    part.clear()
    part.update(kept)
    return {**named, **whole}


def as_it_has_them(dialect: str, config: dict[str, Any]) -> dict[str, Any]:
    """The config of a model that the dialect's system has: MaxText's layers of experts are all alike, without those of
    multi-token prediction, in whole cycles (of Gemma 3 and one more), without embeddings for each layer where they are
    stacked; Gemma's library has no head."""
    if dialect == "gemma":
        return {**config, "tie_word_embeddings": True}
    if not dialect.startswith("maxtext"):
        return config
    family = family_of(config["model_type"])
    part = family.part(config)
    own = {**(config if part is None else part), "mlp_only_layers": [], "num_nextn_predict_layers": 0}
    if dialect == "maxtext" and "hidden_size_per_layer_input" in own:
        own["hidden_size_per_layer_input"] = 0
    if "interval" in family.axes:
        length = int(expression(family.axes["interval"]).value(own))
        own["num_hidden_layers"] = 2 * length + (family.name == "gemma3")
        for key in [key for key in own if key.endswith("layer_types")]:
            kinds = [*[own[key][0]] * (length - 1), own[key][-1]]
            own[key] = [kinds[i % length] for i in range(own["num_hidden_layers"])]
    whole = own if part is None else {**config, family.language: own}
    return whole if "lm_head.weight" in family.table(dialect).right else {**whole, "tie_word_embeddings": True}


def random_config(family: str, seed: int, **change: Any) -> dict[str, Any]:
    """Odd sizes that the real class takes: heads divide the hidden size, and rotary halves a head."""
    rng = random.Random(seed)
    groups = rng.randint(1, 3)
    repeats = rng.randint(1, 3)
    repeats *= 2 if any("2 * g" in size for size in by_name(family).axes.values()) else 1  # layers of twice the groups
    sizes = {
        "hidden_size": groups * repeats * rng.randint(1, 3),
        "intermediate_size": rng.randint(1, 9),
        "vocab_size": rng.randint(1, 9),
        "num_attention_heads": groups * repeats,
        "num_key_value_heads": groups,
        "head_dim": 2 * rng.randint(1, 3),
        "num_hidden_layers": rng.randint(1, 6),
    }
    return config_of(family, **{**sizes, **change})


def class_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers' config class is made with: ERNIE's flat config.json is two there."""
    given = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    if "vision_config" not in given or "text_config" in given:
        return given
    vision = given.pop("vision_config")
    tied = given["tie_word_embeddings"]
    layers = ["dense"] + ["sparse"] * (given["num_hidden_layers"] - 1)
    text = {**given, "moe_num_experts": given["moe_num_experts"][0], "mlp_layer_types": layers}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


def real_class(config: Mapping[str, Any]) -> Any:
    """The model of this config, as transformers makes it, or the code that lies with the model's files."""
    import transformers

    known = next(each for each in family_of(config["model_type"]).classes if each.model_type == config["model_type"])
    name = known.like or known.architecture
    if name in REMOTE:
        import remote_models

        built = getattr(remote_models, name)
    else:
        built = getattr(transformers, name)
    return built(built.config_class(**class_arguments(config)))


def hub_shapes(family: str, config: Mapping[str, Any], *, mtp: bool = False) -> Shapes:
    """{name: shape} in dialect `hf`, as the real class saves them, or by the family's rules where it saves in another;
    with `mtp`, one layer of multi-token prediction as published files have it (transformers builds none: it is a layer
    like the others, and what joins it to them)."""
    shapes = saved_shapes(config)
    known = by_name(family)
    if known.saved != "hf":
        made = mapping(known, known.saved, "hf", shapes, config).made
        used = {piece.src.name for each in made for piece in each.pieces}
        shapes = {name: n for name, n in shapes.items() if name not in used} | {each.name: each.shape for each in made}
    if not mtp:
        return shapes
    h = config["hidden_size"]
    v = config["vocab_size"]
    layers = config["num_hidden_layers"]
    more = _saved(json.dumps({**config, "num_hidden_layers": layers + 1}))
    if family == "ernie4_5_moe":
        shapes |= {
            name.replace("model.layers.0.", "model.mtp_block.0."): shape
            for name, shape in more.items()
            if name.startswith("model.layers.0.")
        }
        shapes |= {f"model.mtp_{kind}_norm.0.weight": (h,) for kind in ("emb", "hidden")}
        return shapes | {"model.mtp_linear_proj.0.weight": (h, 2 * h)}
    there = f"model.layers.{layers}"
    shapes |= {name: shape for name, shape in more.items() if name.startswith(f"{there}.")}
    shapes |= {f"{there}.{name}.weight": (h,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes |= {f"{there}.{name}.weight": (v, h) for name in ("embed_tokens", "shared_head.head")}
    return shapes | {f"{there}.eh_proj.weight": (h, 2 * h)}


def saved_shapes(config: Mapping[str, Any]) -> Shapes:
    """{name: shape} as the real class saves them."""
    return dict(_saved(json.dumps(config)))


@lru_cache(maxsize=512)
def _saved(text: str) -> Shapes:
    """What the class of this config saves: transformers 5 fuses experts in memory and undoes it on saving."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch = pytest.importorskip("torch", reason="the real classes need torch")
    pytest.importorskip("transformers", minversion="5")
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = real_class(json.loads(text))
    return {name: tuple(each.shape) for name, each in revert_weight_conversion(model, model.state_dict()).items()}


def in_a_tower(family: str, name: str) -> bool:
    """Is it one of the tensors that the family's hub table knows by how their names begin alone?"""
    table = by_name(family).table("hf")
    return table.in_tower(name) is not None and not instances(table.left, [name])[0]


def counted(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Arrays of those shapes in which no two elements are alike."""
    arrays = {}
    start = 0
    for name, shape in shapes.items():
        n = int(np.prod(shape))
        arrays[name] = np.arange(start, start + n, dtype=np.int64).reshape(shape)
        start += n
    return arrays
