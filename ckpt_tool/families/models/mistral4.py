"""Mistral 4, text: latent attention, experts and a shared one; a layer's experts are two tensors in the released files too.

transformers 5.23, models/mistral4. Neither Megatron-Bridge 0.6.2 nor mcore-bridge 1.6.5 maps it: the hub dialect alone.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import Family
from ckpt_tool.families.model_class import ModelClass

FAMILY = Family(
    name="mistral4",
    classes=(ModelClass("mistral4", "Mistral4ForCausalLM"),),
    axes={
        "i": "num_hidden_layers", "v": "vocab_size", "h": "hidden_size", "f": "intermediate_size",
        "a": "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)", "q": "q_lora_rank", "l": "kv_lora_rank",
        "b": "kv_lora_rank + qk_rope_head_dim", "c": "num_attention_heads * (qk_nope_head_dim + v_head_dim)",
        "u": "num_attention_heads * v_head_dim", "e": "n_routed_experts? or num_local_experts",
        "m": "moe_intermediate_size", "s": "m * n_shared_experts",
    },
    hub=hub.MODEL + hub.NORMS + hub.MLA + hub.MLP + hub.ROUTER + hub.SHARED_EXPERTS + """
        model.layers.{i}.mlp.experts.<gate_up_proj|down_proj> : e ((1 + 1) m) h, e h m
    """,
    tiny={"num_key_value_heads": 6, "n_routed_experts": 4, "moe_intermediate_size": 5, "n_shared_experts": 2,
          "first_k_dense_replace": 1, "q_lora_rank": 7, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
          "v_head_dim": 5, "num_experts_per_tok": 2, "pad_token_id": None},
)  # fmt: skip
