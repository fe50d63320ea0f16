"""Families in other forms of their configs: released spellings, kinds of layers, biases, tied heads.

The oracle is transformers' class of that very config, on no device. Every dialect takes all of it and gives it back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_models import config_of, counted, hub_shapes, in_a_tower

from ckpt_tool.algebra.piece import apply
from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.families.completeness import missing, strange
from ckpt_tool.families.registry import by_name
from ckpt_tool.families.rewrite import mapping

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("olmo2", {"attention_bias": True}),
    ("olmo2", {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 4}),
    ("olmoe", {"attention_bias": True}),
    ("hy_v3", {"tie_word_embeddings": True, "num_shared_experts": 1}),
    ("hy_v3", {"mlp_layer_types": ["sparse", "dense"], "attention_bias": True, "mlp_bias": True}),
    ("mimo_v2_flash", {"num_hidden_layers": 7, "attention_bias": True}),
    ("mimo_v2_flash", {"layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True}),
    ("qwen4_exp", {"text_config": {"split_ngram_parts": 4, "ple_layer_ids": [2, 5], "tie_word_embeddings": True}}),
    ("qwen4_exp", {"text_config": {"ple_layer_ids": [], "num_hidden_layers": 4, "hc_count": 3}}),
    ("step3p5", {"text_config": {"num_hidden_layers": 4, "layer_types": ["full_attention", "sliding_attention"] * 2}}),
    ("step3p5", {"text_config": {"mlp_layer_types": ["sparse", "dense"], "attention_other_setting": None}}),
    ("glm5_next", {"text_config": {"indexer_types": ["full", "shared"] * 4, "attention_bias": True}}),
    (
        "glm5_next",
        {
            "text_config": {
                "num_hidden_layers": 3,
                "layer_types": ["indexed_attention", "linear_attention", "linear_attention"],
                "mlp_layer_types": ["sparse", "dense", "sparse"],
            }
        },
    ),
    ("llama", {"model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"], "head_dim": 8}),
    ("mistral4", {"attention_bias": True, "tie_word_embeddings": True}),
    ("mistral4", {"q_lora_rank": None, "first_k_dense_replace": 0}),
    ("bailing_hybrid", {"attention_bias": True, "num_hidden_layers": 4, "layer_group_size": 3}),
    ("bailing_hybrid", {"layer_types": ["full_attention", "linear_attention"], "tie_word_embeddings": True}),
    ("kimi_linear", {"q_lora_rank": 7, "attention_bias": True, "num_hidden_layers": 5}),
    ("kimi_linear", {"layer_types": ["full_attention", "linear_attention"], "mlp_layer_types": ["sparse", "dense"]}),
    (
        "kimi_linear",
        {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2], "num_heads": 3, "head_dim": 2}},
    ),
    ("bailing_moe_v2", {"num_nextn_predict_layers": 1, "num_hidden_layers": 3, "num_shared_experts": 1}),
    ("bailing_moe_v2", {"use_qkv_bias": True, "first_k_dense_replace": 0}),
    ("nemotron_h", {"hybrid_override_pattern": "M-M*", "num_hidden_layers": 4, "n_groups": 1}),
    ("nemotron_h", {"moe_latent_size": None, "tie_word_embeddings": True, "use_conv_bias": False}),
    ("seed_oss", {"attention_bias": False}),
    ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    ("smollm3", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("cohere2", {"attention_bias": True, "tie_word_embeddings": True}),
    ("cohere2", {"model_type": "cohere", "architectures": ["CohereForCausalLM"], "use_qk_norm": True}),
    ("starcoder2", {"use_bias": False, "tie_word_embeddings": True}),
    ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    ("phimoe", {"attention_bias": False, "lm_head_bias": False, "tie_word_embeddings": True}),
    ("exaone4", {"tie_word_embeddings": True, "layer_types": ["full_attention"] * 2, "sliding_window": None}),
    ("exaone_moe", {"tie_word_embeddings": True, "first_k_dense_replace": 0}),
    ("dots1", {"attention_bias": True, "first_k_dense_replace": 0, "tie_word_embeddings": True}),
    ("dots1", {"first_k_dense_replace": 2}),
    ("granitemoehybrid", {"num_local_experts": 0, "tie_word_embeddings": True}),
    ("granitemoehybrid", {"attention_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False}),
    ("granitemoehybrid", {"layer_types": ["linear_attention", "linear_attention"]}),
    ("granitemoehybrid", {"model_type": "granitemoe", "architectures": ["GraniteMoeForCausalLM"]}),
    ("granitemoehybrid", {"model_type": "granitemoeshared", "architectures": ["GraniteMoeSharedForCausalLM"]}),
    ("lfm2_moe", {"num_dense_layers": 0, "conv_bias": False, "tie_word_embeddings": True}),
    ("lfm2_moe", {"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "intermediate_size": 384}),
    ("falcon_h1", {"mamba_rms_norm": False, "mamba_conv_bias": False, "tie_word_embeddings": True}),
    ("longcat_flash", {"attention_bias": True, "tie_word_embeddings": True}),
    ("gemma3n", {"attention_bias": False, "tie_word_embeddings": True}),
]
BIASED = [
    ("nemotron_h", {"use_bias": True, "mlp_bias": True}, "mixer.in_proj.bias"),
]


@pytest.mark.parametrize(("family", "change", "example"), BIASED)
def test_biases_that_megatron_s_bridge_does_not_map_are_refused_there(
    family: str, change: dict[str, Any], example: str
) -> None:
    config = {**config_of(family), **change}
    shapes = hub_shapes(family, config)
    assert any(name.endswith(example) for name in shapes)
    made = {each.name: each.shape for each in mapping(by_name(family), "hf", "hf-5", shapes, config).made}
    assert {each.name: each.shape for each in mapping(by_name(family), "hf-5", "hf", made, config).made} == shapes
    with pytest.raises(InconsistentCheckpoint) as caught:
        mapping(by_name(family), "hf", "megatron", shapes, config)
    assert caught.value.code == "E1374"


@pytest.mark.share(3)
@pytest.mark.parametrize(("family", "change"), VARIANTS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_a_variant_is_known_whole_and_comes_back(family: str, change: dict[str, Any]) -> None:
    config = config_of(family)
    config |= {key: {**config[key], **own} if isinstance(config.get(key), dict) else own for key, own in change.items()}
    known = by_name(family)
    shapes = hub_shapes(family, config)
    shapes = {name: shape for name, shape in shapes.items() if not in_a_tower(family, name)}
    arrays = {name: array.astype(np.float64) for name, array in counted(shapes).items()}  # some dialects divide
    for dialect in known.known_dialects:
        there = mapping(known, "hf", dialect, shapes, config)
        assert not there.dropped or (dialect == "megatron" and change.get("tie_word_embeddings"))
        made = {each.name: each.shape for each in there.made}
        assert missing(known, dialect, made, config) == [] and strange(known, dialect, made) == []
        moved = apply([piece for each in there.made for piece in each.pieces], arrays, made)
        back = mapping(known, dialect, "hf", made, config)
        found = apply([p for each in back.made for p in each.pieces], moved, {e.name: e.shape for e in back.made})
        assert found.keys() == shapes.keys() - ({"lm_head.weight"} if there.dropped else set())
        for name, array in found.items():
            np.testing.assert_array_equal(np.rint(array), arrays[name], err_msg=f"{dialect} {name}")


def test_the_released_config_of_mimo_states_heads_and_kinds() -> None:
    """`swa_num_key_value_heads` and `hybrid_layer_pattern`, as Megatron-Bridge reads them; transformers
    has twice the key-value heads in windowed layers, the released config any number."""
    config = {**config_of("mimo_v2_flash"), "num_hidden_layers": 3}
    own = {**config, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    released = {**config, "hybrid_layer_pattern": [0, 1, 0], "swa_num_key_value_heads": 4}
    shapes = hub_shapes("mimo_v2_flash", own)
    family = by_name("mimo_v2_flash")
    assert mapping(family, "hf", "megatron", shapes, released) == mapping(family, "hf", "megatron", shapes, own)
    other = {**released, "swa_num_key_value_heads": 8}
    shapes["model.layers.1.self_attn.k_proj.weight"] = (8 * 4, 18)
    shapes["model.layers.1.self_attn.v_proj.weight"] = (8 * 3, 18)
    made = {each.name: each.shape for each in mapping(family, "hf", "megatron", shapes, other).made}
    heights = [made[f"decoder.layers.{i}.self_attention.linear_qkv.weight"][0] for i in range(3)]
    assert heights == [8 * 4 + 2 * (4 + 3), 8 * 4 + 8 * (4 + 3), 8 * 4 + 2 * (4 + 3)]


def test_layers_ahead_of_mimo() -> None:
    """Windowed and dense, under their own root (Megatron-Bridge's names); they come back."""
    config = config_of("mimo_v2_flash")
    family = by_name("mimo_v2_flash")
    shapes = hub_shapes("mimo_v2_flash", config)
    windowed = {name: shape for name, shape in shapes.items() if ".1.self_attn." in name}
    inner = {name.replace("layers.1", "mtp.layers.0"): shape for name, shape in windowed.items()}
    dense = {n.replace("layers.0", "mtp.layers.0"): shape for n, shape in shapes.items() if ".0.mlp." in n}
    norms = ("enorm", "hnorm", "final_layernorm", "input_layernorm", "pre_mlp_layernorm")
    own = {f"model.mtp.layers.0.{norm}.weight": (18,) for norm in norms} | {
        "model.mtp.layers.0.eh_proj.weight": (18, 36)
    }
    shapes |= inner | dense | own
    there = {each.name: each.shape for each in mapping(family, "hf", "megatron", shapes, config).made}
    assert {name for name in there if name.startswith("mtp.")} == {
        f"mtp.layers.0.{name}"
        for name in (
            "enorm.weight hnorm.weight eh_proj.weight final_layernorm.weight transformer_layer.input_layernorm.weight "
            "transformer_layer.pre_mlp_layernorm.weight transformer_layer.self_attention.linear_qkv.weight "
            "transformer_layer.self_attention.linear_proj.weight transformer_layer.mlp.linear_fc1.weight "
            "transformer_layer.self_attention.core_attention.softmax_offset transformer_layer.mlp.linear_fc2.weight"
        ).split()
    }
    assert {each.name: each.shape for each in mapping(family, "megatron", "hf", there, config).made} == shapes


def test_the_stand_in_for_ling_has_what_the_real_code_saves() -> None:
    """The golden file's hub tensors were saved by the code that lies with the model's files."""
    golden = Path(__file__).parents[2] / "fixtures" / "bridge"
    config = json.loads((golden / "bailing_moe_v2.config.json").read_text())
    want = json.loads((golden / "bailing_moe_v2.json").read_text())["hub"]
    assert hub_shapes("bailing_moe_v2", config) == {name: tuple(shape) for name, shape in want.items()}


def test_layers_ahead_of_step_and_glm() -> None:
    """As the released files have them behind the decoder's layers: dense and windowed, or sparse with an indexer."""
    config = config_of("step3p5", num_hidden_layers=3)
    config["text_config"] |= {"layer_types": ["full_attention"] * 3, "mtp_layer_types": ["sliding_attention"]}
    norms = {f"model.layers.3.{name}.weight": (18,) for name in ("enorm", "hnorm", "transformer.shared_head.norm")}
    own = {"model.layers.3.self_attn.q_proj.weight": (8 * 4, 18), "model.layers.3.self_attn.g_proj.weight": (8, 18)}
    joined = {
        "model.layers.3.eh_proj.weight": (18, 36),
        "model.layers.3.transformer.shared_head.output.weight": (22, 18),
    }
    shapes = hub_shapes("step3p5", config) | norms | own | joined
    there_and_back("step3p5", shapes, config)
    config = config_of("glm5_next", num_hidden_layers=4)
    shapes = hub_shapes("glm5_next", config)
    root = "model.language_model.layers"
    last = {name.replace(f"{root}.3.", f"{root}.4."): shape for name, shape in shapes.items() if f"{root}.3." in name}
    last = {name: shape for name, shape in last.items() if ".hc_" not in name}
    norms = {f"{root}.4.{name}.weight": (18,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes |= last | norms | {f"{root}.4.eh_proj.weight": (18, 36)}
    there_and_back("glm5_next", shapes, config)
    there_and_back("glm5_next", shapes, config, "megatron")


def test_the_layer_ahead_of_qwen4() -> None:
    """As mcore-bridge reads it from the released files: a layer as the last of the decoder's, a mixer of its own, and
    two projections where others have one."""
    config = config_of("qwen4_exp")
    family = by_name("qwen4_exp")
    shapes = hub_shapes("qwen4_exp", config)
    root = "model.language_model."
    inner = {f"mtp.{n.removeprefix(root).replace('.7.', '.0.')}": s for n, s in shapes.items() if ".layers.7." in n}
    mixer = {
        f"mtp.{n.removeprefix(root)}": s for n, s in shapes.items() if n.startswith(f"{root}hyper_connection_mixer")
    }
    joined = {
        "pre_fc_norm_embedding": (18,),
        "pre_fc_norm_hidden": (36,),
        "fc_embedding": (18,) * 2,
        "fc_hidden": (18,) * 2,
    }
    shapes |= inner | mixer | {f"mtp.{name}.weight": shape for name, shape in joined.items()}
    assert strange(family, "hf", shapes) == []
    there = {each.name: each.shape for each in mapping(family, "hf", "megatron", shapes, config).made}
    ahead = {n.removeprefix("language_model.mtp.layers.0."): s for n, s in there.items() if ".mtp." in n}
    assert {name: shape for name, shape in ahead.items() if not name.startswith("transformer_layer.")} == {
        "e_proj.weight": (18, 18),
        "h_proj.weight": (18, 18),
        "enorm.weight": (18,),
        "hnorm.weight": (36,),
        "hyper_connection_mixer.hc_norm.weight": (36,),
        "hyper_connection_mixer.input_mix_weight_down.weight": (3, 36),
        "hyper_connection_mixer.input_mix_weight_up.weight": (36, 3),
    }
    last = {
        n.removeprefix("language_model.decoder.layers.7."): s for n, s in there.items() if ".decoder.layers.7." in n
    }
    assert {f"transformer_layer.{name}": shape for name, shape in last.items()}.items() <= ahead.items()
    assert {each.name: each.shape for each in mapping(family, "megatron", "hf", there, config).made} == shapes


def test_glm_5_3_is_two_layers_a_layer_in_megatron() -> None:
    """As `Glm5NextBridge` of mcore-bridge 1.6.5 has it, read and not run. Layer 3 is of latent attention, the last one
    of multi-token prediction."""
    config = config_of("glm5_next", num_hidden_layers=4)
    root = "model.language_model.layers"
    family = by_name("glm5_next")
    shapes = {n: s for n, s in hub_shapes("glm5_next", config).items() if not in_a_tower("glm5_next", n)}
    last = {
        n.replace(f"{root}.3.", f"{root}.4."): s for n, s in shapes.items() if f"{root}.3." in n and ".hc_" not in n
    }
    hub = counted(shapes | last)
    there = mapping(family, "hf", "megatron", {name: array.shape for name, array in hub.items()}, config)
    got = apply([p for each in there.made for p in each.pieces], hub, {each.name: each.shape for each in there.made})
    at = f"{root}.1."
    lm = "language_model.decoder.layers"
    for mine, kind in (("in_proj.weight", "proj"), ("conv1d.weight", "conv1d")):
        parts = [hub[f"{at}self_attn.{each}_{kind}.weight"] for each in "qkv"]
        np.testing.assert_array_equal(got[f"{lm}.2.inner_layer.self_attention.{mine}"], np.concatenate(parts))
    for number, branch in ((2, "attn"), (3, "ffn")):
        alphas = [got[f"{lm}.{number}.hyper_connection.alpha_{name}"] for name in ("pre", "post", "res")]
        np.testing.assert_array_equal(np.concatenate(alphas), hub[f"{at}hc_{branch}_scale"])
        np.testing.assert_array_equal(got[f"{lm}.{number}.hyper_connection.bias"], hub[f"{at}hc_{branch}_base"])
    for here, inside in (
        ("6.inner_layer.self_attention.linear_proj.weight", "3.self_attn.o_proj.weight"),
        ("7.inner_layer.pre_mlp_layernorm.weight", "3.post_attention_layernorm.weight"),
    ):
        np.testing.assert_array_equal(got[f"{lm}.{here}"], hub[f"{root}.{inside}"])
    ahead = "language_model.mtp.layers.0.transformer_layer.layers"
    np.testing.assert_array_equal(
        got[f"{ahead}.1.mlp.experts.local_experts.2.linear_fc2.weight"], hub[f"{root}.4.mlp.experts.2.down_proj.weight"]
    )
    assert f"{ahead}.0.self_attention.core_attention.indexer.linear_wk.weight" in got


def there_and_back(
    family: str, shapes: dict[str, tuple[int, ...]], config: dict[str, Any], dialect: str = "hf-5"
) -> None:
    known = by_name(family)
    assert strange(known, "hf", shapes) == []
    shapes = {name: shape for name, shape in shapes.items() if not in_a_tower(family, name)}
    made = {each.name: each.shape for each in mapping(known, "hf", dialect, shapes, config).made}
    back = {each.name: each.shape for each in mapping(known, dialect, "hf", made, config).made}
    assert back == shapes


def test_shards_of_unequal_height_are_no_part_of_one_table_in_memory() -> None:
    """transformers cuts a table whose rows do not divide into a last shard that is lower: known on the hub, refused in
    memory, where a rule would have to say which shard is the last."""
    config = config_of("qwen4_exp")
    config["text_config"] |= {"split_ngram_parts": 3, "tie_word_embeddings": False}
    known = by_name("qwen4_exp")
    shapes = hub_shapes("qwen4_exp", config)
    heights = {shape for name, shape in shapes.items() if ".layers.2.ple.ple_embedding.ngram_embedding.shard" in name}
    assert len(heights) == 2
    made = {each.name: each.shape for each in mapping(known, "hf", "hf", shapes, config).made}
    assert made == {name: shape for name, shape in shapes.items() if not in_a_tower("qwen4_exp", name)}
    with pytest.raises(InconsistentCheckpoint):
        mapping(known, "hf", "hf-5", shapes, config)
