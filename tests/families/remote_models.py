"""Models whose code lies with their files, not in transformers: modules with the same names and shapes, without a
forward pass.

Ling 2.0: the config and the modules of `modeling_bailing_moe_v2.py` (a copy: Megatron-Bridge 0.6.2, models/bailing),
held against what that code saves (`fixtures/bridge/bailing_moe_v2.json`) in `test_variants.py`.

Kimi K3: the modules of `modeling_kimi_k3.py` and `modeling_kimi_linear.py` of moonshotai/Kimi-K3, by public copies of
both that agree with what readers of the released shards' headers list (July to September 2026).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


class BailingMoeV2Config(PreTrainedConfig):  # type: ignore[misc]
    model_type = "bailing_moe_v2"
    rms_norm_eps: float = 1e-06
    rope_theta: float = 600000.0
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    initializer_range: float = 0.02
    max_position_embeddings: int = 32768
    hidden_size: int = 2048
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 128
    use_qkv_bias: bool = False
    num_experts: int = 256
    num_experts_per_tok: int = 8
    num_shared_experts: int = 1
    n_group: int = 8
    topk_group: int = 4
    moe_intermediate_size: int = 512
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 1.0


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class Gate(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))


class Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        heads = config.num_attention_heads
        groups = config.num_key_value_heads
        d = config.head_dim
        h = config.hidden_size
        self.query_key_value = nn.Linear(h, (heads + 2 * groups) * d, bias=getattr(config, "use_qkv_bias", False))
        self.query_layernorm = Norm(d)
        self.key_layernorm = Norm(d)
        self.dense = nn.Linear(heads * d, h, bias=getattr(config, "use_bias", False))


class Mlp(nn.Module):
    def __init__(self, h: int, f: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(h, f, bias=False)
        self.up_proj = nn.Linear(h, f, bias=False)
        self.down_proj = nn.Linear(f, h, bias=False)


class Experts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        h = config.hidden_size
        m = config.moe_intermediate_size
        self.gate = Gate(config)
        self.experts = nn.ModuleList(Mlp(h, m) for _ in range(config.num_experts))
        self.shared_experts = Mlp(h, m * config.num_shared_experts)


class Layer(nn.Module):
    """Of the decoder, or (`ahead`) of multi-token prediction."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        h = config.hidden_size
        self.input_layernorm = Norm(h)
        self.post_attention_layernorm = Norm(h)
        self.attention = Attention(config)
        dense = number < config.first_k_dense_replace
        self.mlp = Mlp(h, config.intermediate_size) if dense else Experts(config)
        if number >= config.num_hidden_layers:
            self.enorm = Norm(h)
            self.hnorm = Norm(h)
            self.final_layernorm = Norm(h)
            self.eh_proj = nn.Linear(2 * h, h, bias=False)


class Decoder(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        layers = config.num_hidden_layers + getattr(config, "num_nextn_predict_layers", 0)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(layers))
        self.norm = Norm(config.hidden_size)


class BailingMoeV2ForCausalLM(PreTrainedModel):  # type: ignore[misc]
    config_class = BailingMoeV2Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class KimiLinearTextConfig(PreTrainedConfig):  # type: ignore[misc]
    model_type = "kimi_linear"


class KimiK3Config(PreTrainedConfig):  # type: ignore[misc]
    model_type = "kimi_k3"

    def __init__(self, text_config: Any = None, vision_config: Any = None, **kwargs: Any) -> None:
        self.text_config = KimiLinearTextConfig(**(text_config or {}))
        self.vision_config = PreTrainedConfig(**(vision_config or {}))
        super().__init__(**kwargs)


class KimiDelta(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        stated = config.linear_attn_config
        h = config.hidden_size
        heads = stated["num_heads"]
        d = stated["head_dim"]
        kernel = stated["short_conv_kernel_size"]
        for name in ("q", "k", "v"):
            setattr(self, f"{name}_proj", nn.Linear(h, heads * d, bias=False))
            convolution = nn.Conv1d(heads * d, heads * d, kernel, groups=heads * d, bias=False)
            setattr(self, f"{name}_conv1d", convolution)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads * d))
        self.f_a_proj = nn.Linear(h, d, bias=False)
        self.f_b_proj = nn.Linear(d, heads * d, bias=False)
        self.b_proj = nn.Linear(h, heads, bias=False)
        if stated.get("use_full_rank_gate", False):
            self.g_proj = nn.Linear(h, heads * d, bias=False)
        else:
            self.g_a_proj = nn.Linear(h, d, bias=False)
            self.g_b_proj = nn.Linear(d, heads * d, bias=False)
        self.o_norm = Norm(d)
        self.o_proj = nn.Linear(heads * d, h, bias=False)


class KimiLatent(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        heads = config.num_attention_heads
        h = config.hidden_size
        query = config.qk_nope_head_dim + config.qk_rope_head_dim
        values = config.v_head_dim
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(h, heads * query, bias=False)
        else:
            self.q_a_proj = nn.Linear(h, config.q_lora_rank, bias=False)
            self.q_a_layernorm = Norm(config.q_lora_rank)
            self.q_b_proj = nn.Linear(config.q_lora_rank, heads * query, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(h, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = Norm(config.kv_lora_rank)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, heads * (config.qk_nope_head_dim + values), bias=False)
        self.o_proj = nn.Linear(heads * values, h, bias=False)
        if config.mla_use_output_gate:
            self.g_proj = nn.Linear(h, heads * values, bias=False)


class KimiExpert(nn.Module):
    def __init__(self, h: int, m: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(h, m, bias=False)
        self.w2 = nn.Linear(m, h, bias=False)
        self.w3 = nn.Linear(h, m, bias=False)


class KimiExperts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        h = config.hidden_size
        m = config.moe_intermediate_size
        inner = config.routed_expert_hidden_size or h
        self.experts = nn.ModuleList(KimiExpert(inner, m) for _ in range(config.num_experts))
        self.gate = nn.Module()
        self.gate.weight = nn.Parameter(torch.empty(config.num_experts, h))
        self.gate.e_score_correction_bias = nn.Parameter(torch.empty(config.num_experts))
        self.shared_experts = Mlp(h, m * config.num_shared_experts)
        if config.routed_expert_hidden_size is not None:
            self.routed_expert_down_proj = nn.Linear(h, inner, bias=False)
            self.routed_expert_up_proj = nn.Linear(inner, h, bias=False)
            if config.latent_moe_use_norm:
                self.routed_expert_norm = Norm(inner)


class KimiK3Layer(nn.Module):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        h = config.hidden_size
        linear = number + 1 in config.linear_attn_config["kda_layers"]
        self.self_attn = KimiDelta(config) if linear else KimiLatent(config)
        if number < config.first_k_dense_replace:
            self.mlp = Mlp(h, config.intermediate_size)
        else:
            self.block_sparse_moe = KimiExperts(config)
        self.input_layernorm = Norm(h)
        self.post_attention_layernorm = Norm(h)
        if config.attn_res_block_size is not None:
            self.self_attention_res_norm = Norm(h)
            self.mlp_res_norm = Norm(h)
            self.self_attention_res_proj = nn.Linear(h, 1, bias=False)
            self.mlp_res_proj = nn.Linear(h, 1, bias=False)


class KimiK3Decoder(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        h = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, h)
        self.layers = nn.ModuleList(KimiK3Layer(config, number) for number in range(config.num_hidden_layers))
        self.norm = Norm(h)
        if config.attn_res_block_size is not None:
            self.output_attn_res_norm = Norm(h)
            self.output_attn_res_proj = nn.Linear(h, 1, bias=False)


class KimiK3Language(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = KimiK3Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class KimiK3Block(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        h = config.vt_hidden_size
        wide = config.qkv_hidden_size
        self.norm0 = Norm(h)
        self.norm1 = Norm(h)
        self.mlp = nn.Module()
        self.mlp.fc0 = nn.Linear(h, config.vt_intermediate_size, bias=False)
        self.mlp.fc1 = nn.Linear(config.vt_intermediate_size, h, bias=False)
        self.wqkv = nn.Linear(h, 3 * wide, bias=False)
        self.wo = nn.Linear(wide, h, bias=False)


class KimiK3Tower(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        h = config.vt_hidden_size
        patch = config.patch_size
        self.patch_embed = nn.Module()
        self.encoder = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, h, patch, patch, bias=False)
        self.patch_embed.pos_emb = nn.Module()
        sizes = config.init_pos_emb_height, config.init_pos_emb_width
        self.patch_embed.pos_emb.weight = nn.Parameter(torch.empty(*sizes, h))
        self.encoder.blocks = nn.ModuleList(KimiK3Block(config) for _ in range(config.vt_num_hidden_layers))
        self.encoder.final_layernorm = Norm(h)


class KimiK3Projector(nn.Module):
    """`patchmergerv2`: four patches to one."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        wide = 4 * config.vt_hidden_size
        linears = nn.Linear(wide, wide, bias=False), nn.Linear(wide, config.text_hidden_size, bias=False)
        self.proj = nn.Sequential(linears[0], nn.GELU(), linears[1])
        self.post_norm = Norm(config.text_hidden_size)


class KimiK3ForConditionalGeneration(PreTrainedModel):  # type: ignore[misc]
    config_class = KimiK3Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.vision_tower = KimiK3Tower(config.vision_config)
        self.mm_projector = KimiK3Projector(config.vision_config)
        self.language_model = KimiK3Language(config.text_config)
