"""Whole models of every family lack nothing in any dialect; one tensor taken away, anywhere, is named."""

from __future__ import annotations

import random
import re

import pytest
from family_models import as_it_has_them, config_of, hub_shapes

from ckpt_tool.families.completeness import _find_decoders, list_expected_tensors, missing, strange
from ckpt_tool.families.models import FAMILIES
from ckpt_tool.families.rewrite import mapping
from ckpt_tool.families.table import instances

LAST_NORMS = "norm|output_norm|ln_f|norm_f|final_layernorm|final_norm|embedding_norm"
ALONE = (".0.mlp.", ".0.feed_forward.", "blk.0.ffn_", ".shared_expert")  # nothing like it
CASES = [(family, dialect) for family in FAMILIES for dialect in family.known_dialects]


def names_in(family, dialect, config):  # type: ignore[no-untyped-def]
    shapes = hub_shapes(family.name, config)
    if family.exact(dialect):
        left = ("lm_head.weight", "model.visual.")  # where the dialect has no place for them
        right = family.table(dialect).right
        shapes = {name: n for name, n in shapes.items() if name in right or not name.startswith(left)}
    return [made.name for made in mapping(family, "hf", dialect, shapes, config).made]


@pytest.mark.share(6)
@pytest.mark.parametrize(("family", "dialect"), CASES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_whole_models_lack_nothing(family, dialect):  # type: ignore[no-untyped-def]
    tiny = family.part(family.tiny) or family.tiny
    config = config_of(family.name, num_hidden_layers=max(4, tiny.get("num_hidden_layers", 4)))
    config = as_it_has_them(dialect, config)
    names = names_in(family, dialect, config)
    assert missing(family, dialect, names, config) == [] and strange(family, dialect, names) == []
    assert missing(family, dialect, names, None) == []
    if family.exact(dialect):  # every tensor of it is in its rules
        head = {"decoder.logits_dense.kernel"} & set(names)
        assert {*(list_expected_tensors(family, dialect, config) or ()), *head} == set(names) and len(names) > 3
        for gone in (
            names
            if config["architectures"][0].endswith("ForCausalLM")
            else list_expected_tensors(family, dialect, config)
        ):
            assert missing(family, dialect, [name for name in names if name != gone], config) == [gone]
        return
    norms = [
        name
        for name in names
        if re.fullmatch(rf"([a-z0-9_]+[./])*?({LAST_NORMS})(\.rms_norm)?\.(weight|scale)", name)
        and not re.search(r"\.\d+\.", name)
        and instances(family.table(dialect).left, [name])[0]
        and _module(name)
        in {_module(f"{front}0") for front in _find_decoders(family.table(dialect))} | {"lm_head.", "norm."}
    ]
    if family.name != "qwen4_exp":  # hyper-connections end there in a mixer
        (norm,) = norms
        assert missing(family, dialect, [name for name in names if name != norm], config) == [norm]
    draw = random.Random(7)
    inside = [name for name in names if re.search(r"(^|[._])\d+[./]", name)]
    table = family.table(dialect)
    alone = [name for name in instances(table.left, inside)[1] if not re.search(r"\.(blocks|layers)\.\d", name)]
    inside = sorted(set(inside) - set(alone))  # of a tower only its blocks are counted
    inside = [name for name in inside if not any(alone in name for alone in ALONE)]
    for gone in draw.sample(inside, 12):
        left = [name for name in names if name != gone]
        found = missing(family, dialect, left, config)
        pattern = [each for each in found if each == gone or _fits(each, gone)]
        assert pattern, (gone, found)


def _module(name: str) -> str:
    """`model.` of `model.norm.weight`."""
    return "".join(f"{part}." for part in name.split(".")[:-2])


def _fits(told: str, gone: str) -> bool:
    """`layers.2.experts.*.up` names `layers.2.experts.0.up`."""
    return len(told.split(".")) == len(gone.split(".")) and all(
        a in ("*", b) for a, b in zip(told.split("."), gone.split("."), strict=True)
    )


def test_a_layer_that_is_not_there_and_what_no_rule_knows() -> None:
    llama = next(family for family in FAMILIES if family.name == "llama")
    config = {**config_of("llama"), "num_hidden_layers": 3}
    names = names_in(llama, "hf", config)
    left = [name for name in names if ".layers.1." not in name]
    assert missing(llama, "hf", left, config) == ["model.layers.1.*"]
    assert missing(llama, "hf", [name for name in names if ".layers." not in name], config) == ["model.layers.*"]
    assert missing(llama, "hf", [name for name in names if "embed_tokens" not in name], config) == [
        "model.embed_tokens.weight"
    ]
    more = [*names, "model.layers.0.self_attn.q_projj.weight", "vision_tower.blocks.0.w", "model.layers.norm.weight"]
    assert strange(llama, "hf", more) == ["model.layers.0.self_attn.q_projj.weight"]


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "ernie4_5_moe"])
def test_layers_that_the_config_calls_sparse_have_experts(name: str) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    config = {**config_of(name), "num_hidden_layers": 3}
    for dialect in ("hf", "megatron"):
        names = [
            each for each in names_in(family, dialect, config) if "expert" not in each and "moe_statics" not in each
        ]
        found = missing(family, dialect, names, config)
        assert {each for each in found if each.endswith(".*experts*")} >= {
            f"{front}.{layer}.*experts*" for layer in (1, 2) for front in [found[-1].split("layers.")[0] + "layers"]
        }


def test_a_config_of_experts_beside_a_dense_model_is_told() -> None:
    moe = next(family for family in FAMILIES if family.name == "qwen3_moe")
    dense = hub_shapes("qwen3", {**config_of("qwen3"), "num_hidden_layers": 3})
    told = missing(moe, "hf", dense, {**config_of("qwen3_moe"), "num_hidden_layers": 3})
    assert told == ["model.layers.1.*experts*", "model.layers.2.*experts*"]
