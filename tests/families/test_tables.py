"""The tables of the families: they parse, agree with the hub, tile, and lead there and back; a family file is a
table."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_models import AHEAD, as_it_has_them, config_of, counted, hub_shapes, in_a_tower, random_config
from tiling import check_tiling

import ckpt_tool.families.models
from ckpt_tool.algebra.mapped import Mapped
from ckpt_tool.algebra.piece import apply
from ckpt_tool.families.base import Family
from ckpt_tool.families.models import FAMILIES
from ckpt_tool.families.registry import by_name
from ckpt_tool.families.rewrite import mapping, sizes_of
from ckpt_tool.families.table import form_of, instances
from ckpt_tool.systems.jax import maxtext_names as maxtext

FOLDER = Path(ckpt_tool.families.models.__file__).parent
PAIRS = [(family.name, dialect) for family in FAMILIES for dialect in family.dialects]
# Megatron's MTP layers have a last norm of their own, ERNIE's none; they share the embedding and the head with the
# model
NOT_MEGATRON = re.compile(r"model\.mtp_|model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.")


def shapes_of(name: str, dialect: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The hub's tensors, MTP layers among them, that the dialect has."""
    # llama.cpp, MLX and MaxText have none of these layers
    ahead = dialect not in ("gguf", "mlx") and not dialect.startswith("maxtext")
    shapes = hub_shapes(name, config, mtp=name in AHEAD and ahead)
    table = by_name(name).table(dialect)
    kept = {key for key in shapes if in_a_tower(name, key) and table.from_tower(key) is None}  # under their own names
    return {
        key: n
        for key, n in shapes.items()
        if key not in kept
        and (dialect != "megatron" or not NOT_MEGATRON.match(key))
        and (
            key != "lm_head.weight" or key in table.right or not dialect.startswith(("gemma", "maxtext"))
        )  # the embedding, again
        and not (dialect.startswith("maxtext") and key.startswith("model.visual."))  # of Qwen3.5: left behind
    }


def moved(mapped: Mapped, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Where the elements go. Whole numbers have no roots, so changes of scale are left out."""
    pieces = [
        piece._replace(maps=tuple(each for each in piece.maps if each.kind.startswith("add")))
        for made in mapped.made
        for piece in made.pieces
    ]
    return apply(pieces, arrays, {made.name: made.shape for made in mapped.made})


@pytest.mark.parametrize(("name", "dialect"), PAIRS)
def test_a_dialect_speaks_of_every_hub_tensor_in_the_hub_s_shape(name: str, dialect: str) -> None:
    family = by_name(name)
    config = as_it_has_them(dialect, config_of(name))
    shapes = shapes_of(name, dialect, config)
    hub = family.table("hf")
    table = family.table(dialect)
    facts = family.facts(config)
    assert {form_of(each)[0] for each in shapes if not in_a_tower(name, each)} <= table.right.keys()
    assert table.right.keys() <= hub.right.keys()
    assert all(hub.in_tower(tower.right) is not None for tower in table.towers)
    named, _ = instances(hub.left, shapes)
    sizes, _ = sizes_of(family, hub, named, shapes, facts)
    there: dict[str, set[tuple[int, ...]]] = {}
    for rule in hub.rules:
        for each, shape in rule.shapes({**dict.fromkeys(rule.axes, 1), **sizes}, facts)[1].items():
            there.setdefault(form_of(each)[0], set()).add(shape)
    for rule in table.rules:
        for each, shape in rule.shapes({**dict.fromkeys(rule.axes, 1), **sizes}, facts)[1].items():
            assert shape in there[form_of(each)[0]], each


@pytest.mark.share(15)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "dialect"), PAIRS)
def test_there_and_back(name: str, dialect: str, seed: int) -> None:
    config = as_it_has_them(dialect, random_config(name, seed))
    if dialect == "meta":
        config["head_dim"] *= 2  # pairs of rows
    shapes = shapes_of(name, dialect, config)
    arrays = counted(shapes)
    there = mapping(by_name(name), "hf", dialect, shapes, config)
    made = {each.name: each.shape for each in there.made}
    pieces = [piece for each in there.made for piece in each.pieces]
    check_tiling(pieces, made, "dst")
    twice = any(len(set(map(str, rule.right))) < len(rule.right) for rule in by_name(name).table(dialect).rules)
    if twice:  # keys that are values too: of the places of an element one counts
        pieces = list({(piece.src, piece.ext): piece for piece in pieces}.values())
    check_tiling(pieces, shapes, "src")
    there_arrays = moved(there, arrays)
    plain = [made._replace(pieces=tuple(each._replace(maps=()) for each in made.pieces)) for made in there.made]
    values = np.concatenate([a.reshape(-1) for a in moved(Mapped(tuple(plain)), arrays).values()])
    assert sorted(set(values) if twice else values) == list(range(sum(a.size for a in arrays.values())))
    back = mapping(by_name(name), dialect, "hf", made, config)
    found = moved(back, there_arrays)
    assert found.keys() == arrays.keys()
    for each, array in arrays.items():
        np.testing.assert_array_equal(found[each], array, err_msg=each)


def paddle_by_hand(name: str, config: dict[str, Any], hub: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """PaddleFormers' tensors from the hub's, by the prose of its AOA statements: one name at a time, in NumPy."""
    out: dict[str, np.ndarray] = {}
    fused = name not in ("llama", "mixtral", "deepseek_v3", "gpt_oss")
    g = config["num_key_value_heads"]
    d = config["head_dim"]
    layers = config["num_hidden_layers"]
    if name == "ernie4_5_vl_moe":  # nothing is fused, the tower has a root of its own, routers lie as in the hub
        straight = ("mlp.gate.weight", "e_score_correction_bias", "embed_tokens.weight")
        there = {key.replace("model.vision_model.", "vision_model."): value for key, value in hub.items()}
        return {key: a if any(part in key for part in straight) else a.T for key, a in there.items()}
    for key, value in hub.items():
        place, _, leaf = key.rpartition("_proj.")
        if name == "glm4_moe" and key.startswith(f"model.layers.{layers}."):
            inside = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
            if key.split(".")[3] in inside:
                place = place.replace(f".{layers}.", f".{layers}.transformer_layer.", 1)
                key_there = key.replace(f".{layers}.", f".{layers}.transformer_layer.", 1)
            else:
                key_there = key.replace("shared_head.norm", "norm")
        else:
            key_there = key
        if fused and place.endswith("self_attn.q"):
            parts = [hub[key.replace(".q_proj", f".{x}_proj")] for x in "qkv"]
            heads = [part.reshape(g, -1, d, *part.shape[1:]) for part in parts]
            whole = np.concatenate(heads, axis=1).reshape(-1, *parts[0].shape[1:])
            out[f"{place.removesuffix('q')}qkv_proj.{leaf}"] = whole.T
        elif fused and place.endswith(".gate"):
            whole = np.concatenate([value, hub[key.replace(".gate_proj", ".up_proj")]], axis=0)
            out[f"{place.removesuffix('gate')}up_gate_proj.{leaf}"] = whole.T
        elif fused and place.endswith((".k", ".v", ".up")) and "mtp_" not in place.rpartition(".")[2]:
            continue
        elif value.ndim == 1 or "embed_tokens" in key or "head" in key or "e_score" in key:
            out[key_there] = value
        else:
            straight = (
                (name == "glm4_moe" and key.endswith("mlp.gate.weight")) or "router" in key or "experts.gate_up" in key
            )
            straight |= name == "gpt_oss" and "experts.down" in key
            out[key_there] = value if straight else value.T
    if name == "mixtral":  # PaddleNLP: its own root, and a head that is a Linear
        out = {key.replace("model.", "mixtral."): value for key, value in out.items()}
        out["lm_head.weight"] = out["lm_head.weight"].T
    return out


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", [family.name for family in FAMILIES if "paddle" in family.dialects])
def test_paddle_equals_what_numpy_makes_of_the_hub(name: str, seed: int) -> None:
    config = random_config(name, 100 + seed)
    hub = counted(hub_shapes(name, config, mtp=name in AHEAD))
    want = paddle_by_hand(name, config, hub)
    got = moved(mapping(by_name(name), "hf", "paddle", {k: a.shape for k, a in hub.items()}, config), hub)
    assert got.keys() == want.keys()
    for key, array in want.items():
        np.testing.assert_array_equal(got[key], array, err_msg=key)


@pytest.mark.parametrize(
    "name", ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "ernie4_5", "ernie4_5_moe", "glm4_moe", "gemma3"]
)
def test_what_is_fused_today_is_read_apart_too(name: str) -> None:
    """PaddleFormers 0.4 and PaddleNLP hold q, k, v, gate and up each in a tensor: the hub's names, matrices turned."""
    config = random_config(name, 7)
    hub = counted(hub_shapes(name, config))
    kept = ("embed_tokens", "lm_head", "e_score", *(["mlp.gate.weight"] if name == "glm4_moe" else []))
    apart = {key: array if any(part in key for part in kept) else array.T for key, array in hub.items()}
    got = moved(mapping(by_name(name), "paddle", "hf", {k: a.shape for k, a in apart.items()}, config), apart)
    assert got.keys() == hub.keys()
    for key, array in hub.items():
        np.testing.assert_array_equal(got[key], array, err_msg=key)


def test_dialects_meet_without_the_hub() -> None:
    """Grouped to contiguous: heads regrouped in one step, no transposition."""
    config = config_of("ernie4_5")
    shapes = hub_shapes("ernie4_5", config)
    family = by_name("ernie4_5")
    grouped = moved(mapping(family, "hf", "paddle", shapes, config), counted(shapes))
    got = mapping(family, "paddle", "paddle-contiguous", {k: a.shape for k, a in grouped.items()}, config)
    name = "ernie.layers.1.self_attn.qkv_proj.weight"
    want = np.concatenate([counted(shapes)[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"]).T
    np.testing.assert_array_equal(moved(got, grouped)[name], want)
    assert {piece.src.name for made in got.made if made.name == name for piece in made.pieces} == {
        "model.layers.1.self_attn.qkv_proj.weight"
    }


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_file_is_a_table(family: Family) -> None:
    """Data alone, which a person reads in one go: texts, constants, `Family`, `Variant`, `ModelClass`, and the shared
    texts of another place."""
    text = (FOLDER / f"{family.name}.py").read_text()
    doc, *rest = ast.parse(text).body
    imported = [each for each in rest if isinstance(each, ast.ImportFrom)]
    assert len(text.splitlines()) - len(imported) <= 100
    tables = rest[len(imported) :]
    assert isinstance(doc, ast.Expr) and all(
        each.module.startswith(("ckpt_tool.families", "ckpt_tool.systems")) for each in imported
    )
    assert all(isinstance(each, ast.Assign) for each in tables)
    assert ast.unparse(tables[-1].targets[0]) == "FAMILY"
    nodes = [node for table in tables for node in ast.walk(table)]
    texts = {f"{room}.{where}" for room in ("hub", "megatron") for where in ("ahead", "inside")}
    texts |= {f"maxtext.{name}" for name, each in vars(maxtext).items() if inspect.isfunction(each)}
    assert {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)} <= {
        "Family",
        "Variant",
        "ModelClass",
        *texts,
    }
    code = (
        ast.Lambda,
        ast.IfExp,
        ast.ListComp,
        ast.DictComp,
        ast.SetComp,
        ast.GeneratorExp,
        ast.JoinedStr,
        ast.Subscript,
    )
    assert not [node for node in nodes if isinstance(node, code)]


def test_a_family_is_called_as_its_file_is() -> None:
    assert {path.stem for path in FOLDER.glob("[a-z]*.py")} == {family.name for family in FAMILIES}
