"""Names: aliases both ways, containers, order."""

from __future__ import annotations

import random

import pytest

from ckpt_tool.formats.megatron import names

# Orders as named_parameters() of Megatron-Core 0.16.1 gives them (a dense, an MoE and an MLA layer, MTP).
ORDER = [
    "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight",
    "decoder.layers.0.input_layernorm.weight",
    "decoder.layers.0.input_layernorm.bias",
    "decoder.layers.0.self_attention.linear_proj.weight",
    "decoder.layers.0.self_attention.linear_proj.bias",
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.0.self_attention.linear_qkv.bias",
    "decoder.layers.0.self_attention.q_layernorm.weight",
    "decoder.layers.0.self_attention.k_layernorm.weight",
    "decoder.layers.0.pre_mlp_layernorm.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.0.mlp.linear_fc1.bias",
    "decoder.layers.0.mlp.linear_fc2.weight",
    "decoder.layers.1.input_layernorm.weight",
    "decoder.layers.1.self_attention.linear_proj.weight",
    "decoder.layers.1.self_attention.linear_q_down_proj.weight",
    "decoder.layers.1.self_attention.linear_q_up_proj.weight",
    "decoder.layers.1.self_attention.linear_kv_down_proj.weight",
    "decoder.layers.1.self_attention.linear_kv_up_proj.weight",
    "decoder.layers.1.self_attention.q_layernorm.weight",
    "decoder.layers.1.self_attention.kv_layernorm.weight",
    "decoder.layers.1.pre_mlp_layernorm.weight",
    "decoder.layers.1.mlp.router.weight",
    "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight",
    "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight",
    "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight",
    "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight",
    "decoder.layers.1.mlp.shared_experts.gate_weight",
    "decoder.layers.1.mlp.shared_experts.linear_fc1.weight",
    "decoder.layers.1.mlp.shared_experts.linear_fc2.weight",
    "decoder.layers.10.input_layernorm.weight",
    "decoder.final_layernorm.weight",
    "mtp.layers.0.enorm.weight",
    "mtp.layers.0.hnorm.weight",
    "mtp.layers.0.eh_proj.weight",
    "mtp.layers.0.transformer_layer.input_layernorm.weight",
    "mtp.layers.0.transformer_layer.mlp.linear_fc1.weight",
    "mtp.layers.0.final_layernorm.weight",
    "output_layer.weight",
]


@pytest.mark.parametrize("seed", range(5))
def test_registration_order_from_names_alone(seed):
    shuffled = random.Random(seed).sample(ORDER, len(ORDER))
    assert [shuffled[i] for i in names.registration_order(shuffled)] == ORDER


def test_an_order_of_unknown_words_stays():
    mixed = [
        "decoder.layers.0.mixer.in_proj.weight",
        "decoder.layers.0.mixer.conv1d.weight",
        "decoder.layers.0.mixer.A_log",
    ]
    ordered = [mixed[i] for i in names.registration_order(mixed)]
    assert ordered == [
        mixed[2],
        mixed[0],
        mixed[1],
    ]  # a module's own parameters first, then its submodules as they came


def test_grouped_linears_order_their_weights_by_number():
    fc1 = [f"decoder.layers.0.mlp.experts.linear_fc1.weight{e}" for e in range(11)]
    fc2 = [f"decoder.layers.0.mlp.experts.linear_fc2.weight{e}" for e in range(11)]
    shuffled = sorted(fc2 + fc1)
    assert [shuffled[i] for i in names.registration_order(shuffled)] == fc1 + fc2


FUSED = [  # logical, Transformer Engine's, in a layer with latent attention, with experts
    (
        "decoder.layers.2.input_layernorm.weight",
        "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
        False,
        False,
    ),
    (
        "decoder.layers.2.input_layernorm.bias",
        "decoder.layers.2.self_attention.linear_qkv.layer_norm_bias",
        False,
        True,
    ),
    ("decoder.layers.2.pre_mlp_layernorm.weight", "decoder.layers.2.mlp.linear_fc1.layer_norm_weight", True, False),
    (
        "decoder.layers.2.self_attention.q_layernorm.weight",
        "decoder.layers.2.self_attention.linear_q_up_proj.layer_norm_weight",
        True,
        True,
    ),
    (
        "decoder.layers.2.self_attention.kv_layernorm.weight",
        "decoder.layers.2.self_attention.linear_kv_up_proj.layer_norm_weight",
        True,
        False,
    ),
]
KEPT = [
    ("decoder.layers.2.input_layernorm.weight", True, False),
    ("decoder.layers.2.pre_mlp_layernorm.weight", False, True),
    ("decoder.layers.2.self_attention.q_layernorm.weight", False, False),
    ("decoder.layers.2.mlp.linear_fc1.weight", False, False),
    ("decoder.final_layernorm.weight", False, False),
]


@pytest.mark.parametrize(("plain", "fused", "mla", "moe"), FUSED)
def test_fused_norms_there_and_back(plain, fused, mla, moe):
    assert names.fused_norm(plain, mla=mla, moe=moe) == fused
    assert names.canonical(fused) == plain and names.is_fused_norm(fused) and not names.is_fused_norm(plain)


@pytest.mark.parametrize(("name", "mla", "moe"), KEPT)
def test_what_transformer_engine_does_not_fuse(name, mla, moe):
    assert names.fused_norm(name, mla=mla, moe=moe) == name == names.canonical(name)


def test_mtp_inner_layer_has_one_alias():
    assert names.canonical("mtp.layers.1.mtp_model_layer.mlp.linear_fc2.weight") == (
        "mtp.layers.1.transformer_layer.mlp.linear_fc2.weight"
    )
    assert names.canonical("mtp.layers.1.mtp_model_layer.self_attention.linear_qkv.layer_norm_weight") == (
        "mtp.layers.1.transformer_layer.input_layernorm.weight"
    )


@pytest.mark.parametrize("container", [names.SEQUENTIAL, names.TE_GROUPED])
@pytest.mark.parametrize("rest", ["linear_fc1.weight", "linear_fc2.bias"])
def test_containers_there_and_back(container, rest):
    want = names.ExpertName("decoder.layers.3.mlp.experts.", 12, rest)
    spelt = names.in_container(want, container)
    assert names.expert_of(spelt) == want and names.container_of(spelt) == container


def test_layers_shift_and_mtp_layers_do_not():
    assert names.shift_layer("decoder.layers.3.mlp.router.weight", 4) == "decoder.layers.7.mlp.router.weight"
    assert names.shift_layer("mtp.layers.0.enorm.weight", 4) == "mtp.layers.0.enorm.weight"
    assert names.layer_of("mtp.layers.0.enorm.weight") is None
