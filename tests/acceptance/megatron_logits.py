"""Megatron-Core loads a checkpoint and computes logits on the CPU (run as a program, on gloo ranks).

    python megatron_logits.py CHECKPOINT CONFIG.json TOKENS.safetensors OUT.safetensors TP EP

A GPTModel of the local layer spec is built from transformers' config.json, by a reading of it that is this program's
own; `megatron.core.dist_checkpointing.load` fills it (strict: every key that the model asks for and none other), and
the logits of TOKENS (`input_ids`, batch x sequence) go to OUT. Rank folders (`mp_rank_TT`) are loaded by torch. Of a
model with layers of multi-token prediction OUT has what those hold instead. Only two things are not Megatron's: CUDA
(`cuda_on_cpu`), and the attention core of latent attention, which its local spec has none of (torch's scaled dot
product).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "make"))

import cuda_on_cpu
import torch

cuda_on_cpu.redirect()

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt import gpt_layer_specs as specs  # noqa: E402
from megatron.core.tensor_parallel import random  # noqa: E402
from megatron.core.transformer import MLATransformerConfig, TransformerConfig  # noqa: E402
from megatron.core.transformer import multi_latent_attention as mla  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from ranks import on_ranks  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

SIGMOID = ("deepseek_v3", "glm4_moe")
LATENT = ("deepseek_v2", "deepseek_v3")
PAIRS = ("ernie4_5", "ernie4_5_moe", "glm4")  # rotary turns neighbours


class Core(torch.nn.Module):
    """Causal attention; query and key (s, b, heads, d), value (s, b, heads, v)."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return found.permute(2, 0, 1, 3).flatten(2).contiguous()


def sizes(c: dict[str, Any], tp: int, ep: int) -> dict[str, Any]:
    """TransformerConfig's arguments."""
    kind = c["model_type"]
    heads = c["num_attention_heads"]
    out: dict[str, Any] = {
        "num_layers": c["num_hidden_layers"],
        "hidden_size": c["hidden_size"],
        "num_attention_heads": heads,
        "ffn_hidden_size": c["intermediate_size"],
        "num_query_groups": c["num_key_value_heads"],
        "kv_channels": c.get("head_dim") or c["hidden_size"] // heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": c["rms_norm_eps"],
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": kind in ("qwen2", "qwen2_moe") or bool(c.get("attention_bias")),
        "qk_layernorm": kind in ("qwen3", "qwen3_moe", *LATENT) or bool(c.get("use_qk_norm")),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
        "tensor_model_parallel_size": tp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": 1,
        "rotary_interleaved": kind in PAIRS,
        "pipeline_dtype": torch.float32,
        "mtp_num_layers": c.get("num_nextn_predict_layers") or None,
    }
    if experts_of(c) is not None:
        out |= routed(c)
    if kind in LATENT:
        out |= {
            "multi_latent_attention": True,
            "q_lora_rank": c["q_lora_rank"],
            "kv_lora_rank": c["kv_lora_rank"],
            "qk_head_dim": c["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": c["qk_rope_head_dim"],
            "v_head_dim": c["v_head_dim"],
            "rope_type": "rope",
            "rotary_base": rope(c)["rope_theta"],
            "rotary_percent": 1.0,
            "num_query_groups": heads,
        }
    return out


def experts_of(c: dict[str, Any]) -> int | None:
    return next(
        (c[k] for k in ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts") if c.get(k)), None
    )


def routed(c: dict[str, Any]) -> dict[str, Any]:
    """What MoE layers need."""
    kind = c["model_type"]
    layers = c["num_hidden_layers"]
    sigmoid = c["model_type"] in SIGMOID
    dense = set(
        c.get("mlp_only_layers") or range(c.get("first_k_dense_replace") or c.get("moe_layer_start_index") or 0)
    )
    shared = c.get("n_shared_experts") or c.get("moe_num_shared_experts")
    m = c.get("moe_intermediate_size") or c["intermediate_size"]
    out = {
        "num_moe_experts": experts_of(c),
        "moe_router_topk": c.get("moe_k") or c["num_experts_per_tok"],
        "moe_ffn_hidden_size": m,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
        "moe_layer_freq": [int(i not in dense) for i in range(layers)] if dense else 1,
        "moe_router_pre_softmax": not sigmoid
        and kind not in ("mixtral", "ernie4_5_moe")
        and not c.get("norm_topk_prob"),
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_enable_expert_bias": sigmoid,
        "moe_router_topk_scaling_factor": c.get("routed_scaling_factor") if sigmoid or kind in LATENT else None,
        "moe_shared_expert_intermediate_size": c.get("shared_expert_intermediate_size")
        or (m * shared if shared else None),
        "moe_shared_expert_gate": kind == "qwen2_moe",
    }
    return out


def rope(c: dict[str, Any]) -> dict[str, Any]:
    return {"rope_theta": c.get("rope_theta"), **(c.get("rope_parameters") or {})}


def model_of(c: dict[str, Any], tp: int, ep: int, rows: int) -> GPTModel:
    told = sizes(c, tp, ep)
    latent = told.get("multi_latent_attention")
    config = (MLATransformerConfig if latent else TransformerConfig)(**told)
    spec = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        if latent:
            layer.submodules.self_attention.submodules.core_attention = Core
    ahead = {}
    if config.mtp_num_layers:
        inner = spec.layer_specs[-1]
        ahead["mtp_block_spec"] = specs.get_gpt_mtp_block_spec(config, inner, use_transformer_engine=False)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=rows,
        max_sequence_length=64,
        parallel_output=False,
        share_embeddings_and_output_weights=bool(c.get("tie_word_embeddings")),
        position_embedding_type="rope",
        rotary_base=rope(c)["rope_theta"],
        rotary_percent=float(rope(c).get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1.0),
        **ahead,
    ).eval()


def with_mtp(checkpoint: Path) -> bool:
    """Has a torch_dist folder layers of multi-token prediction?"""
    if not (checkpoint / ".metadata").exists():
        return False
    return any(name.startswith("mtp.") for name in dist_checkpointing.load_tensors_metadata(str(checkpoint)))


def load(model: GPTModel, checkpoint: Path) -> None:
    """A torch_dist folder by Megatron's own library; of rank folders this rank's file. Strict both ways."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    legacy = checkpoint / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
    if legacy.exists():
        model.load_state_dict(torch.load(legacy, weights_only=False)["model"], strict=True)
        return
    wanted = model.sharded_state_dict(metadata=dist_checkpointing.load_content_metadata(str(checkpoint)))
    names = list(wanted)
    state = dist_checkpointing.load(wanted, str(checkpoint), strict="raise_all")
    model.load_state_dict({name: state[name] for name in names}, strict=True)  # beside it the common state: args, ...


def body(rank: int, world: int, checkpoint: str, config: str, tokens: str, out: str, tp: int, ep: int) -> None:
    parallel_state.initialize_model_parallel(tp, 1, expert_model_parallel_size=ep, expert_tensor_parallel_size=1)
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    random.model_parallel_cuda_manual_seed(1)
    if not isinstance(getattr(mla, "TELinear", None), type):
        mla.TELinear = mla.TEColumnParallelLinear = cuda_on_cpu.Nothing
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # 0.16.1 has no name for it without TE
    c = json.loads(Path(config).read_text())
    if not with_mtp(Path(checkpoint)):  # GLM's configs state such layers, transformers leaves them out
        c["num_nextn_predict_layers"] = None
    model = model_of(c, tp, ep, c["vocab_size"])
    for parameter in model.parameters():
        parameter.data.fill_(7)
    load(model, Path(checkpoint))
    if c.get("num_nextn_predict_layers"):  # Megatron runs these in training alone: what they hold is told
        held = {
            name: tensor.contiguous() for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)
        }
        save_file({name: tensor for name, tensor in held.items() if name.startswith("mtp.")}, out)
        return
    ids = load_file(tokens)["input_ids"]
    s = ids.shape[1]
    mask = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1)
    with torch.no_grad():
        found = model(ids, torch.arange(s).expand_as(ids), mask)
    if rank == 0:
        save_file({"logits": found.contiguous()}, out)


if __name__ == "__main__":
    folder, config, tokens, out, *degrees = sys.argv[1:]
    tp, ep = map(int, degrees)
    on_ranks(max(tp, ep), body, folder, config, tokens, out, tp, ep)
