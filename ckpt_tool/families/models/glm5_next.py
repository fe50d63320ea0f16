"""GLM-5.3-Flash (sees): Kimi's delta attention, every fourth layer latent attention with a sparse indexer, hyper-connections
around both modules, experts with a bias and shared ones; MTP as layer N, without hyper-connections.

transformers 5.23, models/glm5_next and conversion_mapping.py: in memory experts and the three convolutions are fused, gates
and hyper-connections have other names (`hf-5`). Megatron: mcore-bridge 1.6.5, mm_gpts/glm5_next.py, read and not run, since it
wants a patched Megatron-LM of after core 0.19.2 (`require_glm5_hybrid`): a layer is two there, an attention and an MLP, each in
hyper-connections, whose `scale` is three tensors. Megatron-Bridge 0.6.2 has none.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import FUSED_EXPERTS, Family, Variant
from ckpt_tool.families.model_class import ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="glm5_next",
    classes=(ModelClass("glm5_next", "Glm5NextForConditionalGeneration"),),
    axes={
        "i": "num_hidden_layers + (num_nextn_predict_layers? or 1)", "v": "vocab_size", "h": "hidden_size", "f": "intermediate_size",
        "n": "num_attention_heads? or num_key_value_heads", "a": "n * (qk_nope_head_dim + qk_rope_head_dim)", "q": "q_lora_rank", "l": "kv_lora_rank",
        "b": "kv_lora_rank + qk_rope_head_dim", "c": "n * (qk_nope_head_dim + v_head_dim)", "u": "n * v_head_dim",
        "y": "linear_attn_config.num_heads? or linear_num_heads", "z": "linear_attn_config.head_dim? or linear_head_dim", "x": "z",
        "t": "index_n_heads", "d": "index_head_dim", "p": "index_kpool? or 16", "w": "2 * h",
        "ha": "hc_mult * (hc_mult + 2)", "hb": "hc_mult * h",
        "e": "n_routed_experts? or num_local_experts", "m": "moe_intermediate_size", "s": "m * n_shared_experts",
    },
    language="text_config",
    kinds={
        "linear": "i < num_hidden_layers and layer_types? and layer_types[i] == 'linear_attention'"
                  " or i < num_hidden_layers and not layer_types? and i % 4 != 3",
    },
    hub=hub.inside(
        hub.MODEL + hub.NORMS + hub.MLP + hub.LATENT + hub.KDA + hub.ROUTER + hub.EXPERT_BIAS + hub.EXPERTS + hub.SHARED_EXPERTS + hub.AHEAD + """
        model.layers.{i}.self_attn.A_log : y
        model.layers.{i}.self_attn.<q|k|v|o>_proj.weight : (y z) h, (y z) h, (y z) h, h (y z) if linear
        model.layers.{i}.self_attn.o_proj.weight : h u if not linear
        model.layers.{i}.self_attn.indexer.<wq_b.weight|wk.weight|weights_proj.weight|k_norm.weight|k_norm.bias> : (t d) q, d h, t h, d, d
        model.layers.{i}.self_attn.indexer.index_kpool_compress_<ape|gate> : p d, d h
        model.layers.{i}.hc_[attn|ffn]_<fn|base|scale> : ha hb, ha, 3
    """) + "model.visual.**\n",
    dialects={
        "megatron": megatron.inside(megatron.SWIFT_GLM5) + "visual.visual.** = model.visual.**\n",
        "hf-5": Variant("hf", over=hub.inside(FUSED_EXPERTS + hub.KDA_IN_MEMORY + """
            model.layers.{i}.self_attn.forget_gate.A_log : y = model.layers.{i}.self_attn.A_log : y
            model.layers.{i}.attn_hc.<fn|base|scale> : ha hb, ha, 3 = model.layers.{i}.hc_attn_<fn|base|scale> : ha hb, ha, 3
            model.layers.{i}.ffn_hc.<fn|base|scale> : ha hb, ha, 3 = model.layers.{i}.hc_ffn_<fn|base|scale> : ha hb, ha, 3
        """)),
    },
    tiny={"text_config": {"num_key_value_heads": 6, "q_lora_rank": 7, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 0,
                          "v_head_dim": 5, "n_routed_experts": 4, "moe_intermediate_size": 5, "n_shared_experts": 2, "index_head_dim": 3,
                          "index_n_heads": 2, "index_kpool": 2, "index_topk": 4, "linear_head_dim": 3, "linear_num_heads": 4, "hc_mult": 2,
                          "num_experts_per_tok": 2, "num_hidden_layers": 8, "pad_token_id": None, "eos_token_id": None},
          "vision_config": {"depth": 2, "hidden_size": 16, "intermediate_size": 8, "num_heads": 2, "patch_size": 2, "image_size": 8,
                            "out_hidden_size": 18, "projection_intermediate_size": 9}},
)  # fmt: skip
