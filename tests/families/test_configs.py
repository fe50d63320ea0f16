"""Configs to Megatron's arguments and back: nothing that decides what a model computes is lost, and no class is
guessed.

The oracles: what transformers' own config classes hold (defaults, both spellings of rope), and facts of Megatron-LM
spelled out.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from family_models import REMOTE

from ckpt_tool.conversion.output_config import corrected
from ckpt_tool.families.config.translation import (
    contradictions,
    differing,
    from_megatron,
    kind_of,
    megatron_args,
)
from ckpt_tool.families.config.words import OTHER_WORDS
from ckpt_tool.families.models import CLASSES, family_of
from ckpt_tool.systems.paddle.config import from_paddle, paddle_config

transformers = pytest.importorskip("transformers")
remote_models = pytest.importorskip("remote_models")
# what says nothing about what a model computes, or is said in another spelling
SILENT = {
    "architectures",
    "transformers_version",
    "dtype",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "pretraining_tp",
    "router_jitter_noise",
    "output_router_logits",
    "_name_or_path",
    "max_window_layers",
    "no_rope_layer_interval",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
LATENT = {
    "q_lora_rank": 7,
    "kv_lora_rank": 9,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 8,
    "moe_intermediate_size": 5,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
}
MIXER = {"mamba_n_heads": 4, "mamba_d_ssm": 24, "mamba_d_head": 6}
TWINS = ("seed_oss",)  # Qwen2's arguments are the same: --family says which of the two
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "rope_theta": 500000.0}),
    ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0, "tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": 6, "head_dim": 8, "rms_norm_eps": 1e-5}),
    ("mistral", {"sliding_window": 16}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("qwen3", {"head_dim": 8}),
    (
        "qwen2_moe",
        {"num_experts": 3, "num_experts_per_tok": 2, "mlp_only_layers": [0], "norm_topk_prob": False, "qkv_bias": True},
    ),
    (
        "qwen2_moe",
        {
            "num_experts": 3,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 9,
            "num_experts_per_tok": 3,
        },
    ),
    ("qwen3_moe", {"num_experts": 3, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    ("mixtral", {"num_local_experts": 3, "sliding_window": 64}),
    ("deepseek_v3", {**LATENT, "rope_scaling": YARN, "num_nextn_predict_layers": 1}),
    (
        "deepseek_v3",
        {
            **LATENT,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "q_lora_rank": None,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    (
        "glm4_moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_shared_experts": 2,
            "moe_intermediate_size": 5,
        },
    ),
    ("seed_oss", {"attention_bias": True, "head_dim": 8, "attention_dropout": 0.0}),
    ("seed_oss", {"head_dim": 4, "rope_theta": 1e7}),
    ("smollm3", {"no_rope_layers": [1, 1, 0, 1], "tie_word_embeddings": True}),
    ("smollm3", {"no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True}),
    ("starcoder2", {"sliding_window": 16, "tie_word_embeddings": False}),
    ("starcoder2", {"hidden_act": "gelu", "use_bias": False}),
    ("nemotron", {"partial_rotary_factor": 0.25, "head_dim": 8}),
    ("dots1", {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2, "norm_topk_prob": True}),
    ("exaone4", {"sliding_window": 16, "tie_word_embeddings": True}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4, "rope_scaling": LLAMA3}),
    ("exaone_moe", {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 2, "first_k_dense_replace": 2}),
    (
        "falcon_h1",
        {"mamba_n_heads": 4, "mamba_d_ssm": 24, "mamba_d_head": 6, "ssm_multipliers": [0.5, 1.0, 2.0, 1.0, 0.25]},
    ),
    (
        "falcon_h1",
        {"mamba_n_heads": 4, "mamba_d_head": 2, "mamba_d_ssm": 8, "mamba_rms_norm": True, "rope_theta": 1e11},
    ),
    ("ernie4_5", {"use_bias": True, "head_dim": 4}),
    ("ernie4_5", {"tie_word_embeddings": False}),
    ("ernie4_5_moe", {"moe_num_experts": 3, "moe_k": 2, "moe_layer_start_index": 1, "moe_intermediate_size": 5}),
]


def config_of(kind: str, change: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model_type": kind,
        "num_hidden_layers": 4,
        "hidden_size": 24,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 10,
        "vocab_size": 22,
    }
    if "kv_lora_rank" in change:
        base["num_key_value_heads"] = 6
    return {**base, **change}


def held(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers' class holds of a config.json: in one spelling, with every default."""
    loaded = transformers.AutoConfig.for_model(**config)
    return {key: value for key, value in loaded.to_dict().items() if key not in SILENT}


@pytest.mark.parametrize(("kind", "change"), CASES, ids=[f"{kind}-{n}" for n, (kind, _) in enumerate(CASES)])
def test_there_and_back(kind: str, change: dict[str, Any]) -> None:
    config = config_of(kind, change)
    args, notes = megatron_args(config)
    assert not notes or kind in ("ernie4_5_moe", "exaone4", "falcon_h1")
    back, lost = from_megatron(args, kind if kind in TWINS else None)
    assert not lost
    assert back["model_type"] == kind
    want = held(config)
    have = held(back)
    if "num_nextn_predict_layers" not in change:  # transformers leaves MTP layers out, and says there is one
        want.pop("num_nextn_predict_layers", None), have.pop("num_nextn_predict_layers", None)
    if have.get("head_dim") == 4 and want.get("head_dim") is None:
        want.pop("head_dim", None), have.pop("head_dim")
    for key in ("sliding_window", "layer_types"):  # a config without a window still has its size
        if kind not in ("mistral", "mixtral") and not change.get("use_sliding_window"):
            want.pop(key, None), have.pop(key, None)
    if change.get("decoder_sparse_step"):
        assert back["decoder_sparse_step"] == 2
    assert have == want


def real_config(kind: str, **change: Any) -> Any:
    """What transformers holds of a config that states nothing else, or the code that lies with the model's files."""
    like = CLASSES[kind].like
    if CLASSES[kind].architecture in REMOTE:
        return getattr(remote_models, CLASSES[kind].architecture).config_class(**change)
    made = getattr(transformers, like).config_class if like else partial(transformers.AutoConfig.for_model, kind)
    return made(**change)


@pytest.mark.parametrize("kind", CLASSES)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    facts = CLASSES[kind]
    loaded = real_config(kind).to_dict()
    if facts.part:  # what the whole says of the head
        whole = transformers.AutoConfig.for_model(family_of(kind).classes[0].model_type)
        loaded["tie_word_embeddings"] = getattr(whole, "tie_word_embeddings", False)
    rope = loaded.pop("rope_parameters", None) or {"rope_theta": loaded.get("rope_theta")}
    rope = rope.get("full_attention", rope)
    for key, value in facts.defaults.items():
        own = facts.keys.get(key, key)
        own = next((name for name in (own, *OTHER_WORDS.get(own, ())) if name in loaded), own)
        if own in ("rope_theta", "partial_rotary_factor"):
            assert rope[own] == value
        elif own == "rope_scaling":
            assert rope.items() >= value.items()
        elif key == "sliding_window":  # Qwen's classes drop it where it is not used
            assert loaded[own] in (value, None)
        elif own == "moe_layer_end_index":
            assert loaded[own] == loaded["num_hidden_layers"] - 1
        elif own == "first_k_dense_replace" and own not in loaded:  # in another shape
            assert loaded["mlp_layer_types"].index("sparse") == value
        else:
            assert loaded[own] == value, own
    assert hasattr(transformers, facts.architecture) or facts.like or facts.architecture in REMOTE


def test_args_as_megatron_names_them() -> None:
    args, _ = megatron_args(
        config_of("qwen3_moe", {"num_experts": 4, "norm_topk_prob": True, "mlp_only_layers": [0], "head_dim": 8})
    )
    want = {
        "num_layers": 4,
        "hidden_size": 24,
        "ffn_hidden_size": 10,
        "num_attention_heads": 6,
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 8,
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "qk_layernorm": True,
        "position_embedding_type": "rope",
        "rotary_base": 10000,
        "untie_embeddings_and_output_weights": True,
        "num_experts": 4,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_topk": 8,
        "moe_router_pre_softmax": False,
        "moe_ffn_hidden_size": 768,
        "layernorm_epsilon": 1e-6,
        "hidden_dropout": 0.0,
        "max_position_embeddings": 32768,
    }
    assert args.items() >= want.items()


def test_what_megatron_cannot_say_is_told() -> None:
    def notes(kind: str, **change: Any) -> str:
        return "; ".join(megatron_args(config_of(kind, change)).notes)

    assert "attention_bias" in notes("llama", attention_bias=True)
    assert "attention_bias" in notes("qwen3", attention_bias=True)
    assert "norm_topk_prob" in notes("deepseek_v3", **LATENT, norm_topk_prob=False)
    assert "longrope" in notes("llama", rope_scaling={"rope_type": "longrope"})
    assert "low_freq_factor" in notes("llama", rope_scaling={**LLAMA3, "low_freq_factor": 2.0})
    assert "best 4" in notes("deepseek_v3", **{**LATENT, "topk_group": 1})
    assert "gelu" in notes("llama", hidden_act="gelu")
    assert "low ranks" in notes("deepseek_v3", **LATENT, rms_norm_eps=1e-5)
    assert "has no translation" in notes("nobody")


def test_arguments_of_no_class_name_none() -> None:
    args, _ = megatron_args(config_of("llama", {}))
    told = from_megatron({**args, "qk_l2_norm": True})
    assert "model_type" not in told.config and "qk_l2_norm" in told.notes[0]
    assert told.config["num_key_value_heads"] == 2
    forced = from_megatron({**args, "qk_l2_norm": True}, "qwen3")
    assert forced.config["model_type"] == "qwen3" and any("qk_l2_norm" in note for note in forced.notes)


def test_shared_experts_that_no_class_has_are_told() -> None:
    args, _ = megatron_args(
        config_of("glm4_moe", {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8})
    )
    told = from_megatron({**args, "moe_shared_expert_intermediate_size": 12}, "glm4_moe")
    assert "n_shared_experts" not in told.config and "shared experts of 12 next to experts of 8" in "".join(told.notes)


def test_differing_looks_through_spellings() -> None:
    args, _ = megatron_args(config_of("mixtral", {"num_local_experts": 3}))
    same = {**args, "moe_layer_freq": [1, 1, 1, 1], "rotary_base": 1e6, "bf16": True, "lr": 3.0}
    del same["layernorm_epsilon"]  # core <= 0.15 calls it norm_epsilon
    assert list(differing(args, same)) == []
    assert list(differing({**args, "ffn_hidden_size": 99}, args)) == []  # no layer is dense
    assert list(differing(args, {**same, "num_query_groups": 3})) == ["num_query_groups 2, not 3"]


def test_contradictions_are_told_all_at_once() -> None:
    wrong = {
        "num_attention_heads": 7,
        "num_local_experts": 2,
        "num_experts_per_tok": 3,
        "vocab_size": 0,
        "layer_types": ["full_attention"],
    }
    assert len(list(contradictions(config_of("mixtral", wrong)))) == 5
    for kind, change in CASES:
        assert list(contradictions(config_of(kind, change))) == []


@pytest.mark.parametrize("kind", CLASSES)
def test_no_class_of_transformers_contradicts_itself(kind: str) -> None:
    width = (
        {"head_dim": 128} if kind in ("glm4_moe", "glm4v_moe_text", "qwen3_omni_moe_text") else {}
    )  # 4096 over 96 heads is the class's default, and no model's
    assert list(contradictions(real_config(kind, **width).to_dict())) == []
    both = {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": [4, 4],
        "moe_layer_start_index": [1, 1],
        "moe_layer_end_index": [3, 3],
    }
    assert list(contradictions(both)) == []  # text and vision


def test_a_width_a_layer_is_no_contradiction() -> None:
    config = {"model_type": "gemma3n_text", "num_hidden_layers": 2, "intermediate_size": [8, 12]}
    assert list(contradictions(config)) == []
    wrong: list[Any]
    for wrong in ([8, 0], ["8", 8], []):
        assert list(contradictions({**config, "intermediate_size": wrong})) == [f"intermediate_size is {wrong!r}"]


def test_kind_of_a_config() -> None:
    assert kind_of({"architectures": ["Qwen3ForCausalLMPipe"]}) == "qwen3"
    assert kind_of({"model_type": "unheard_of", "architectures": ["Qwen3ForCausalLM"]}) is None


def test_the_language_model_of_a_model_that_sees() -> None:
    """Nested as transformers 5 saves it, or flat as Qwen2.5-VL's released files have it: the same arguments; back, its
    part of the whole."""
    text = config_of("qwen2_5_vl_text", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]}})
    whole = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    nested = megatron_args({**whole, "text_config": text, "tie_word_embeddings": False})
    flat = megatron_args({**text, **whole})
    assert nested == flat and not nested.notes
    assert nested.config["position_embedding_type"] == "mrope" and nested.config["mrope_section"] == [1, 1, 0]
    assert nested.config["num_query_groups"] == 2
    several = from_megatron(nested.config)  # Qwen2-VL and the Omni have such a language model too
    assert "model_type" not in several.config and "qwen2_5_vl, qwen2_vl" in several.notes[0]
    back, notes = from_megatron(nested.config, "qwen2_5_vl")
    assert (
        {key: back[key] for key in whole} == whole and "vision_config" not in back and "image or audio part" in notes[0]
    )
    assert back["text_config"].items() >= {"model_type": "qwen2_5_vl_text", "num_key_value_heads": 2}.items()
    assert megatron_args(back).config == nested.config
    assert (
        megatron_args({**whole, "text_config": text, "tie_word_embeddings": True}).config[
            "untie_embeddings_and_output_weights"
        ]
        is False
    )


JUNK: list[Any] = [
    None,
    "x",
    "",
    [],
    {},
    -1,
    0,
    10**30,
    1.5,
    float("nan"),
    True,
    [1],
    ["x"],
    {"a": 1},
    {"rope_type": []},
    {"factor": "x"},
    {"partial_rotary_factor": {"a": 1}},
    {"full_attention": {"factor": {"a": 1}}},
]


@pytest.mark.share(3)
@pytest.mark.parametrize(
    "kind",
    [
        *(
            "llama",
            "mistral",
            "qwen2_moe",
            "deepseek_v3",
            "ernie4_5_moe",
            "gpt2",
            "gpt_oss",
            "gemma2",
            "smollm3",
            "exaone4",
        ),
        *(
            "qwen3_next",
            "nemotron_h",
            "mimo_v2_flash",
            "gemma4_text",
            "llama4_text",
            "minimax_m2",
            "minimax_m3_vl_text",
        ),
    ],
)
def test_junk_in_a_config_is_no_bug_of_ours(kind: str) -> None:
    """Values of any type: told, left out or called a contradiction, never a crash. (Wrong sizes are found by the
    shapes.)"""
    config = config_of(kind, {"num_nextn_predict_layers": 1})
    keys = {*config, *(CLASSES[kind].keys.get(key, key) for key in CLASSES[kind].defaults)}
    more = "rope_parameters rope_scaling layer_types partial_rotary_factor mlp_only_layers full_attention_interval"
    kinds = "hybrid_layer_pattern hybrid_override_pattern layers_block_type moe_layers mlp_layer_types moe_layer_freq"
    records = "per_layer_config sparse_attention_config time_step_limit rotary_dim"
    for key in (*keys, *more.split(), *kinds.split(), *records.split()):
        for junk in JUNK:
            wrong = {**config, key: junk}
            list(contradictions(wrong))
            told = megatron_args(wrong)
            corrected(from_paddle(paddle_config(wrong).config).config, rows=5, dtype="bfloat16", tied=True)
            from_megatron(told.config, family_of(kind).name)


def test_junk_in_arguments_is_no_bug_of_ours() -> None:
    for kind in ("deepseek_v3", "gpt2", "qwen3_next", "nemotron_h", "gemma4_text", "minimax_m3_vl_text"):
        args, _ = megatron_args(config_of(kind, {"sliding_window": 4}))
        for name in (*args, "hybrid_override_pattern", "mtp_hybrid_override_pattern", "lightning_indexer_layers"):
            for junk in JUNK:
                from_megatron({**args, name: junk}, family_of(kind).name)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("deepseek_v3", "norm_topk_prob", False),
        ("glm4_moe", "partial_rotary_factor", 1.0),
        ("glm4_moe", "norm_topk_prob", False),
    ],
)
def test_paddle_is_told_what_is_not_the_class_s_own(kind: str, key: str, value: object) -> None:
    """PaddleFormers 1.2.0 takes both as config.json says."""
    config = {"model_type": kind, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, key: value}
    if key == "partial_rotary_factor":
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, key: config.pop(key)}
    told = paddle_config(config).config
    assert told[key] == value and from_paddle(told).config[key] == value


def test_a_rope_for_each_kind_of_layers() -> None:
    """Gemma 3 as transformers 5 saves it: the base and the scaling of the layers that see all are Megatron's and
    Paddle's."""
    ropes = {
        "full_attention": {"rope_theta": 5e5, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
    }
    config = {"model_type": "gemma3_text", "num_hidden_layers": 6, "rope_parameters": ropes}
    args = megatron_args(config).config
    assert (args["rotary_base"], args["rotary_seq_len_interpolation_factor"]) == (500000, 8.0)
    back = from_megatron({**args, "num_attention_heads": 4, "hidden_size": 32}).config
    assert (back["rope_theta"], back["rope_scaling"]) == (5e5, {"rope_type": "linear", "factor": 8.0})
    told = paddle_config(config)
    assert any("one rope" in note for note in told.notes) and "rope_parameters" not in told.config
    found = transformers.Gemma3TextConfig(**from_paddle(told.config).config)
    rope = {
        kind: {key: value for key, value in said.items() if key != "type"}
        for kind, said in found.rope_parameters.items()
    }
    assert rope == ropes


def test_layers_of_experts_are_read_in_the_shape_of_transformers_5() -> None:
    """`mlp_layer_types` for `first_k_dense_replace`; the way back says what released configs say."""
    kinds = ["dense", "dense", "sparse", "sparse"]
    config = config_of("glm4_moe_lite", {**LATENT, "n_group": 1, "topk_group": 1})
    del config["first_k_dense_replace"]
    assert megatron_args(config).config["moe_layer_freq"] == [0, 1, 1, 1]  # the class's default
    args = megatron_args({**config, "mlp_layer_types": kinds}).config
    assert args["moe_layer_freq"] == [0, 0, 1, 1]
    assert from_megatron(args, "glm4_moe_lite").config["first_k_dense_replace"] == 2
