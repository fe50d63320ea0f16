"""Models whose code lies with their files, not in transformers: modules with the same names and shapes, without a
forward pass.

Ling 2.0: the modules of `modeling_bailing_moe_v2.py` (a copy: Megatron-Bridge 0.6.2, models/bailing), held against what
that code saves (`fixtures/bridge/bailing_moe_v2.json`) in `test_variants.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


class BailingMoeV2Config(PreTrainedConfig):  # type: ignore[misc]
    model_type = "bailing_moe_v2"


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
        heads, groups, d, h = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.hidden_size,
        )
        self.query_key_value = nn.Linear(h, (heads + 2 * groups) * d, bias=getattr(config, "use_qkv_bias", False))
        self.query_layernorm, self.key_layernorm = Norm(d), Norm(d)
        self.dense = nn.Linear(heads * d, h, bias=getattr(config, "use_bias", False))


class Mlp(nn.Module):
    def __init__(self, h: int, f: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(h, f, bias=False), nn.Linear(h, f, bias=False)
        self.down_proj = nn.Linear(f, h, bias=False)


class Experts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        h, m = config.hidden_size, config.moe_intermediate_size
        self.gate = Gate(config)
        self.experts = nn.ModuleList(Mlp(h, m) for _ in range(config.num_experts))
        self.shared_experts = Mlp(h, m * config.num_shared_experts)


class Layer(nn.Module):
    """Of the decoder, or (`ahead`) of multi-token prediction."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        h = config.hidden_size
        self.input_layernorm, self.post_attention_layernorm = Norm(h), Norm(h)
        self.attention = Attention(config)
        dense = number < config.first_k_dense_replace
        self.mlp = Mlp(h, config.intermediate_size) if dense else Experts(config)
        if number >= config.num_hidden_layers:
            self.enorm, self.hnorm, self.final_layernorm = Norm(h), Norm(h), Norm(h)
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
