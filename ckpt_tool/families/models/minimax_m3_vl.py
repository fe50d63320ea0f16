"""MiniMax-M3: dense layers first, then experts (Mixtral's names) and one shared; norms multiply by 1 + weight; an indexer in some
layers. `hf-5` is what transformers 5 has in memory.

Megatron: Megatron-Bridge 0.6.2, models/minimax_m3/minimax_m3_bridge.py: towers are the hub's own modules, indexers are outside
the language model, each on the pipeline stage of its layer (which makes no difference in torch_dist).
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family, Variant
from ckpt_tool.families.model_class import DEFAULTS, GEMMA, SIGMOID, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="minimax_m3_vl",
    classes=(
        ModelClass("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration"),
        ModelClass(
            "minimax_m3_vl_text", "MiniMaxM3VLTextModel", part=True,
            forms=("sizes", "heads", "rope", "tied", "dropout", "clamp", "experts", "listed", "scaled", "one_shared", "block_indexer"),
            keys={"num_experts": "num_local_experts", "intermediate_size": "dense_intermediate_size", "moe_intermediate_size": "intermediate_size"},
            megatron={**GEMMA, **SIGMOID, "quick_geglu": True, "glu_linear_offset": 1.0, "qk_layernorm": True, "moe_router_pre_softmax": False},
            unsayable={"swiglu_alpha": 1.702, "use_gemma_norm": True, "use_qk_norm": True, "n_shared_experts": 1},
            defaults={**DEFAULTS, "rope_theta": 5000000.0, "max_position_embeddings": 524288, "head_dim": 128, "rotary_dim": 64, "num_key_value_heads": 4,
                      "num_experts": 128, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.001, "routed_scaling_factor": 2.0, "swiglu_limit": 7.0,
                      "index_n_heads": 4, "index_head_dim": 128},
        ),
    ),
    axes={**DECODER, "f": "dense_intermediate_size", "m": "intermediate_size", "e": "num_local_experts", "s": "shared_intermediate_size"},
    language="text_config",
    centred=True,
    kinds={
        "sparse": "mlp_layer_types? and mlp_layer_types[i] == 'sparse' or moe_layer_freq? and moe_layer_freq[i] == 1",
        "indexed": "layer_types? and layer_types[i] == 'minimax_m3_sparse'"
                   " or sparse_attention_config.sparse_attention_freq? and sparse_attention_config.sparse_attention_freq[i] == 1",
    },
    hub=hub.inside(hub.MODEL + hub.NORMS + hub.ATTENTION + hub.QK_NORMS + """
        model.layers.{i}.mlp.<gate|up|down>_proj.weight : f h, f h, h f if not sparse
        model.layers.{i}.block_sparse_moe.<gate.weight|e_score_correction_bias> : e h, e if sparse
        model.layers.{i}.block_sparse_moe.experts.{e}.<w1|w2|w3>.weight : m h, h m, m h if sparse
        model.layers.{i}.block_sparse_moe.shared_experts.<gate|up|down>_proj.weight : s h, s h, h s if sparse
        model.layers.{i}.self_attn.<index_q_proj|index_k_proj|index_q_norm|index_k_norm>.weight : xq h, xk h, xk, xk if indexed
    """, "language_model.model.", "language_model.lm_head") + """
        vision_tower.vision_model.**
        multi_modal_projector.**
        patch_merge_mlp.**
    """,
    dialects={
        "megatron": megatron.inside(megatron.DENSE + megatron.QK_NORMS + """
            decoder.layers.{i}.mlp.router.<weight|expert_bias> : e h, e
                = model.layers.{i}.block_sparse_moe.<gate.weight|e_score_correction_bias> : e h, e
            decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc1.weight : ((1 + 1) m) h
                = model.layers.{i}.block_sparse_moe.experts.{e}.<w1|w3>.weight : m h
            decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc2.weight : h m
                = model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight : h m
            decoder.layers.{i}.mlp.shared_experts.linear_fc1.weight : ((1 + 1) s) h
                = model.layers.{i}.block_sparse_moe.shared_experts.<gate|up>_proj.weight : s h
            decoder.layers.{i}.mlp.shared_experts.linear_fc2.weight : h s
                = model.layers.{i}.block_sparse_moe.shared_experts.down_proj.weight : h s
            lightning_indexers.{i}.<q_proj|k_proj|q_norm|k_norm>.weight : xq h, xk h, xk, xk
                = model.layers.{i}.self_attn.<index_q_proj|index_k_proj|index_q_norm|index_k_norm>.weight : xq h, xk h, xk, xk
        """, "language_model.model.", "language_model.lm_head") + """
            vision_tower.vision_model.**
            multi_modal_projector.**
            patch_merge_mlp.**
        """,
        "hf-5": Variant("hf", instead="language_model.model.", root="model.language_model.", over="""
            lm_head.weight : v h = language_model.lm_head.weight : v h
            model.language_model.layers.{i}.mlp.gate_up_proj.weight : ((1 + 1) f) h
                = language_model.model.layers.{i}.mlp.<gate|up>_proj.weight : f h
            model.language_model.layers.{i}.mlp.gate.<weight|e_score_correction_bias> : e h, e
                = language_model.model.layers.{i}.block_sparse_moe.<gate.weight|e_score_correction_bias> : e h, e
            model.language_model.layers.{i}.mlp.experts.gate_up_proj : e ((1 + 1) m) h
                = language_model.model.layers.{i}.block_sparse_moe.experts.{e}.<w1|w3>.weight : m h
            model.language_model.layers.{i}.mlp.experts.down_proj : e h m
                = language_model.model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight : h m
            model.language_model.layers.{i}.mlp.shared_experts.gate_up_proj.weight : ((1 + 1) s) h
                = language_model.model.layers.{i}.block_sparse_moe.shared_experts.<gate|up>_proj.weight : s h
            model.language_model.layers.{i}.mlp.shared_experts.down_proj.weight : h s
                = language_model.model.layers.{i}.block_sparse_moe.shared_experts.down_proj.weight : h s
            model.language_model.layers.{i}.self_attn.indexer.<q_proj|k_proj|q_norm|k_norm>.weight : xq h, xk h, xk, xk
                = language_model.model.layers.{i}.self_attn.<index_q_proj|index_k_proj|index_q_norm|index_k_norm>.weight : xq h, xk h, xk, xk
                if indexed
            model.vision_tower.** = vision_tower.vision_model.**
            model.vision_tower.layers.** = vision_tower.vision_model.encoder.layers.**
            model.vision_tower.embeddings.proj.** = vision_tower.vision_model.embeddings.patch_embedding.**
            model.multi_modal_projector.linear_1.** = multi_modal_projector.linear_1.**
            model.multi_modal_projector.linear_2.** = multi_modal_projector.linear_2.**
            model.multi_modal_projector.merge_linear_1.** = patch_merge_mlp.linear_1.**
            model.multi_modal_projector.merge_linear_2.** = patch_merge_mlp.linear_2.**
        """),
    },
    tiny={"text_config": {"num_local_experts": 3, "num_experts_per_tok": 2, "dense_intermediate_size": 14, "shared_intermediate_size": 6, "pad_token_id": None,
                          "mlp_layer_types": ["dense", "sparse"], "layer_types": ["full_attention", "minimax_m3_sparse"],
                          "index_n_heads": 2, "index_head_dim": 4, "rotary_dim": 2},
          "vision_config": {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 10, "image_size": 8,
                            "patch_size": 2},
          "projector_hidden_size": 20},
)  # fmt: skip
