"""Names: aliases both ways, containers, order."""

from __future__ import annotations

import random

import pytest

from ckpt_tool.systems.megatron import stored_names as names

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
        "decoder.layers.0.strange.first.weight",
        "decoder.layers.0.strange.other.weight",
        "decoder.layers.0.strange.own",
    ]
    ordered = [mixed[i] for i in names.registration_order(mixed)]
    assert ordered == [
        mixed[2],
        mixed[0],
        mixed[1],
    ]  # a module's own parameters first, then its submodules as they came


def test_mamba_and_delta_net_in_the_order_of_core_0_19_2():
    # as the optimizer's buffer of a HybridModel of pattern "MG" lists them (fixtures/make/megatron_sections.py)
    mixer = "conv1d_weight conv1d_bias dt_bias A_log D in_proj.weight norm.weight out_proj.weight".split()
    delta = "dt_bias A_log in_proj.weight conv1d.weight out_norm.weight out_proj.weight".split()
    want = [
        *(f"decoder.layers.0.mixer.{leaf}" for leaf in mixer),
        "decoder.layers.0.norm.weight",
        "decoder.layers.1.input_layernorm.weight",
        *(f"decoder.layers.1.self_attention.{leaf}" for leaf in delta),
        "decoder.final_norm.weight",
    ]
    shuffled = random.Random(3).sample(want, len(want))
    assert [shuffled[i] for i in names.registration_order(shuffled)] == want


def test_a_tower_keeps_the_order_that_it_has():
    parts = "patch_embed.proj pos_embed decoder.layers.0.mlp.linear_fc1".split()
    tower = [f"vision_model.{part}.weight" for part in parts]
    every = [*tower, "language_model.embedding.word_embeddings.weight", "language_model.output_layer.weight"]
    assert names.registration_order(every) == list(range(5))


def test_grouped_linears_order_their_weights_by_number():
    fc1 = [f"decoder.layers.0.mlp.experts.linear_fc1.weight{e}" for e in range(11)]
    fc2 = [f"decoder.layers.0.mlp.experts.linear_fc2.weight{e}" for e in range(11)]
    shuffled = sorted(fc2 + fc1)
    assert [shuffled[i] for i in names.registration_order(shuffled)] == fc1 + fc2


LAYERS = {  # the linears of a layer, by its kind
    "dense": "self_attention.linear_qkv mlp.linear_fc1",
    "experts": "self_attention.linear_qkv mlp.router mlp.experts.local_experts.0.linear_fc1",
    "latent": "self_attention.linear_q_up_proj self_attention.linear_kv_up_proj mlp.linear_fc1",
    "sparse": "self_attention.linear_q_up_proj self_attention.linear_kv_up_proj "
    "self_attention.core_attention.indexer.linear_wq_b mlp.router",
    "delta": "self_attention.in_proj mlp.linear_fc1",
    "mamba": "mixer.in_proj mixer.norm",
}
FUSED = [  # kind of the layer, logical, Transformer Engine's
    ("dense", "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    ("experts", "input_layernorm.bias", "self_attention.linear_qkv.layer_norm_bias"),
    ("latent", "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ("latent", "self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
    ("latent", "self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
    ("delta", "input_layernorm.weight", "self_attention.in_proj.layer_norm_weight"),
    ("mamba", "norm.weight", "mixer.in_proj.layer_norm_weight"),
]
KEPT = [
    ("latent", "input_layernorm.weight"),
    ("experts", "pre_mlp_layernorm.weight"),
    ("dense", "self_attention.q_layernorm.weight"),
    ("sparse", "self_attention.q_layernorm.weight"),
    ("dense", "mlp.linear_fc1.weight"),
    ("mamba", "mixer.norm.weight"),
    ("delta", "self_attention.out_norm.weight"),
]


def layer(kind: str, front: str) -> set[str]:
    return {f"{front}{linear}.weight" for linear in LAYERS[kind].split()}


@pytest.mark.parametrize("front", ["decoder.layers.2.", "language_model.decoder.layers.2."])
@pytest.mark.parametrize(("kind", "plain", "fused"), FUSED)
def test_fused_norms_there_and_back(kind, plain, fused, front):
    assert names.fused_norm(front + plain, layer(kind, front)) == front + fused
    assert names.canonical(front + fused) == front + plain
    assert names.is_fused_norm(front + fused) and not names.is_fused_norm(front + plain)


@pytest.mark.parametrize(("kind", "plain"), KEPT)
def test_what_transformer_engine_does_not_fuse(kind, plain):
    name = f"decoder.layers.2.{plain}"
    assert names.fused_norm(name, layer(kind, "decoder.layers.2.")) == name == names.canonical(name)
    assert names.fused_norm("decoder.final_layernorm.weight", layer(kind, "decoder.layers.2.")) == (
        "decoder.final_layernorm.weight"
    )


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
