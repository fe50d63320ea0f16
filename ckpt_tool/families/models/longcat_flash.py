"""LongCat-Flash: a layer is two of latent attention and two dense MLPs, and experts across both. transformers 5.23,
models/longcat_flash; MTP's tensors (`model.mtp.`) keep their names.

`hf-fused`: experts as in memory, where gate and up have rows for the experts that only pass on (`zero_expert_num`), which
nothing reads: they are zeros there. Files that transformers 5 saved have these rows one by one, without a `down_proj`:
that is an error, which names them (--remove-keys). No project maps it to Megatron.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import Family, Variant
from ckpt_tool.families.model_class import ModelClass

FAMILY = Family(
    name="longcat_flash",
    classes=(ModelClass("longcat_flash", "LongcatFlashForCausalLM", keys={"num_hidden_layers": "num_layers", "intermediate_size": "ffn_hidden_size"}),),
    axes={
        "i": "num_layers? or num_hidden_layers // 2", "j": "2", "v": "vocab_size", "h": "hidden_size",
        "f": "ffn_hidden_size? or intermediate_size", "a": "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)",
        "q": "q_lora_rank", "l": "kv_lora_rank", "b": "kv_lora_rank + qk_rope_head_dim",
        "c": "num_attention_heads * (qk_nope_head_dim + v_head_dim)", "u": "num_attention_heads * v_head_dim",
        "e": "n_routed_experts? or num_local_experts", "m": "expert_ffn_hidden_size? or moe_intermediate_size",
        "z": "zero_expert_num? or 0", "y": "e + z",
    },
    hub=hub.MODEL + """
        model.layers.{i}.[input|post_attention]_layernorm.{j}.weight : h
        model.layers.{i}.self_attn.{j}.q_proj.weight : a h
        model.layers.{i}.self_attn.{j}.<q_a_proj|q_b_proj|q_a_layernorm>.weight : q h, a q, q
        model.layers.{i}.self_attn.{j}.<kv_a_proj_with_mqa|kv_b_proj|kv_a_layernorm|o_proj>.weight : b h, c l, l, h u
        model.layers.{i}.self_attn.{j}.q_a_proj.bias : q
        model.layers.{i}.self_attn.{j}.<kv_a_proj_with_mqa|o_proj>.bias : b, h
        model.layers.{i}.mlps.{j}.<gate|up|down>_proj.weight : f h, f h, h f
        model.layers.{i}.mlp.router.classifier.<weight|bias> : y h, y
        model.layers.{i}.mlp.router.e_score_correction_bias : y
        model.layers.{i}.mlp.experts.{e}.<gate|up|down>_proj.weight : m h, m h, h m
    """,
    dialects={
        "hf-fused": Variant("hf", over="""
            model.layers.{i}.mlp.experts.gate_up_proj : (e + z) ((1 + 1) m) h
                = model.layers.{i}.mlp.experts.{e}.<gate|up>_proj.weight : m h ; _ : z ((1 + 1) m) h
            model.layers.{i}.mlp.experts.down_proj : e h m = model.layers.{i}.mlp.experts.{e}.down_proj.weight : h m
        """),
    },
    tiny={"num_layers": 2, "n_routed_experts": 4, "expert_ffn_hidden_size": 5, "zero_expert_num": 0, "moe_topk": 2,
          "q_lora_rank": 7, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
          "head_dim": 4, "num_key_value_heads": None},
)  # fmt: skip
