"""What NVIDIA's Megatron-Bridge, and ms-swift's mcore-bridge, make of small configs of many families: the fields of
their providers, which `test_arguments_against_bridge.py` holds our Megatron arguments against.

Run by hand in the environment of `bridge_golden.py`, and once more with the transformers that some cases name:

    python tests/families/bridge_arguments.py fixtures/bridge/arguments.json
    python tests/families/bridge_arguments.py fixtures/bridge/arguments.json gemma4 ...   # transformers 5.12.1

The configs are those of `bridge_cases.py` (`fixtures/bridge/CASE.config.json`) and `CONFIGS` below, of which there are
no tensors. arguments.json has a line for each case: `versions`, `provider` (its class; none of mcore-bridge), `config`
of those below, and `fields`: those of `AutoBridge.to_megatron_provider`, finalized of hybrid models alone, or what
`hf_to_mcore_config` gives, without what is of the job (`JOB`), None, and what states no more than the class of all GPT
models does.
"""

from __future__ import annotations

import bridge_on_cpu  # isort: skip  # before megatron

import dataclasses
import json
import logging
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from bridge_cases import CASES, GLM_EXPERTS, LATENT, MTP, SIZES, SWIFT, Case, kimi, without
from safetensors.torch import save_file

FIXTURES = Path(__file__).parents[2] / "fixtures" / "bridge"
# Of the job: precision, kernels, fusions, memory, initial values, how tokens travel, how experts are balanced, where
# towers are frozen; and what the provider keeps of the towers and their tokens.
JOB = frozenset(
    """
    autocast_dtype bf16 fp16 params_dtype deallocate_pipeline_outputs cross_entropy_fusion_impl
    cross_entropy_loss_fusion apply_rope_fusion bias_activation_fusion bias_dropout_fusion masked_softmax_fusion
    gradient_accumulation_fusion persist_layer_norm attention_backend attention_softmax_in_fp32
    first_last_layers_bf16 hetereogenous_dist_checkpoint microbatch_group_size_per_vp_stage recompute_modules
    cuda_graph_modules inference_cuda_graph_scope transformer_impl init_method output_layer_init_method
    embedding_init_method embedding_init_method_std expert_tensor_parallel_size
    async_tensor_model_parallel_allreduce use_cpu_initialization cache_mla_latents mla_down_proj_fusion
    moe_router_load_balancing_type moe_router_dtype moe_grouped_gemm moe_token_dispatcher_type moe_permute_fusion
    moe_shared_expert_overlap moe_router_bias_update_rate moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms
    moe_permute_fusion_into_hybridep moe_router_fusion moe_aux_loss_coeff make_vocab_size_divisible_by vocab_size
    padded_vocab_size should_pad_vocab hf_model_id hf_model_path hf_config hf_config_dict trust_remote_code
    generation_config transformer_layer_spec hybrid_stack_spec falconh1_stack_spec
    scatter_embedding_sequence_parallel mtp_loss_scaling_factor keep_mtp_spec_in_bf16 mtp_hybrid_override_pattern
    vision_config text_config audio_config thinker_config talker_config code2wav_config projector_config
    image_token_id video_token_id audio_token_id bos_token_id eos_token_id vision_start_token_id vision_end_token_id
    vision_soft_tokens_per_image media_placeholder_token_id pad_token_id ignore_index hf_model_type llm_model_type
    offload_modules cp_comm_type fp8_param_gather fp8_recipe moe_z_loss_coeff dist_train add_decoder add_encoder
    return_dict pretrained_model_name hf_text_config is_vision_language language_max_sequence_length
    apply_rotary_pos_emb_in_fp32 use_hf_vision_model use_mg_vit multimodal_attn_impl vit_gradient_checkpointing
    patch_size spatial_merge_size temporal_patch_size in_channels num_position_embeddings out_hidden_size
    deepstack_visual_indexes projector_hidden_size multimodal_projector_bias mm_tokens_per_image token2wav_config
    position_id_per_seconds seconds_per_chunk image_start_token_id image_end_token_id video_start_token_id
    video_end_token_id audio_start_token_id audio_end_token_id dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
    conv_init dt_init dt_init_floor dt_max dt_min dt_scale A_init_dist A_init_range mamba_chunk_size chunk_size
    dspark_num_layers
    """.split()
)


@dataclass(frozen=True)
class Config:
    """A model without tensors: config, what config.json says beside, what is called before."""

    name: str
    model_type: str
    architecture: str
    config: Mapping[str, Any]
    stated: Mapping[str, Any]
    before: Callable[[], None] | None = None
    swift: bool = False
    versions: str = Case.versions
    posing: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def mimo() -> None:
    """Its config class lies with its files; it is Qwen2's."""
    named = type("MiMoConfig", (transformers.Qwen2Config,), {"model_type": "mimo"})
    transformers.AutoConfig.register("mimo", named)


CONFIGS = [
    Config("mimo", "qwen2", "MiMoForCausalLM", {**without(SIZES, "head_dim"), "hidden_size": 24},
           {"model_type": "mimo", **MTP, "attention_bias": True}, mimo),
    Config("kimi_k25", "kimi_k25", "KimiK25ForConditionalGeneration",
           {"text_config": {"model_type": "deepseek_v3", **without(SIZES, "head_dim"), **LATENT, **GLM_EXPERTS,
                            "n_group": 1, "topk_group": 1}},
           {}, kimi),
    Config("minimax_m3_vl", "minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration",
           {"text_config": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 14,
                            "shared_intermediate_size": 6, "rotary_dim": 2, "index_n_heads": 2, "index_head_dim": 4,
                            "mlp_layer_types": ["dense", "sparse", "sparse"],
                            "layer_types": ["full_attention", "full_attention", "minimax_m3_sparse"]},
            "vision_config": {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3,
                              "intermediate_size": 10}},
           {}),
    Config("swift_nemotron_h", "nemotron_h", "NemotronHForCausalLM",
           {"hidden_size": 12, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 26,
             "intermediate_size": 10},
           {}, None, True, SWIFT),
]  # fmt: skip


def plain(value: Any) -> Any:
    """As JSON has it; a function by its name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    return getattr(value, "__name__", None) or str(value)


def written(case: Case | Config, folder: Path) -> dict[str, Any]:
    """Writes the case's config.json, and a file of tensors for a bridge that looks for one; the config."""
    if isinstance(case, Case):
        config = json.loads((FIXTURES / f"{case.name}.config.json").read_text())
        names = json.loads((FIXTURES / f"{case.name}.json").read_text())["hub"]
    else:
        made = transformers.AutoConfig.for_model(case.model_type, **case.config)
        made.architectures = [case.architecture]
        made.save_pretrained(folder)
        config = {**json.loads((folder / "config.json").read_text()), **case.stated}
        names = ["model.norm.weight"]
    (folder / "config.json").write_text(json.dumps({**config, **case.posing}))
    save_file({name: torch.zeros(1) for name in names}, folder / "model.safetensors", metadata={"format": "pt"})
    return dict(config)


def row(case: Case | Config) -> dict[str, Any]:
    """The case's line."""
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    with tempfile.TemporaryDirectory() as temp, bridge_on_cpu.OnCpu():
        if case.before:
            case.before()
        config = written(case, Path(temp))
        out: dict[str, Any] = {"versions": case.versions}
        common: dict[str, Any] = {}
        if case.swift:
            from mcore_bridge import hf_to_mcore_config

            stated = hf_to_mcore_config(transformers.AutoConfig.from_pretrained(temp))
        else:
            provider = AutoBridge.from_hf_pretrained(temp, trust_remote_code=False).to_megatron_provider(
                load_weights=False
            )
            if getattr(provider, "hybrid_layer_pattern", None):
                provider.finalize()
            out["provider"] = type(provider).__name__
            stated = {field.name: getattr(provider, field.name) for field in dataclasses.fields(provider)}
            common = {field.name: field.default for field in dataclasses.fields(GPTModelProvider)}
    if isinstance(case, Config):
        out["config"] = config
    fields = {
        name: plain(value)
        for name, value in stated.items()
        if name not in JOB and not name.startswith(("freeze", "vision"))
    }
    kept = {
        name: value
        for name, value in fields.items()
        if value is not None and (name not in common or value != common[name])
    }
    return {**out, "fields": dict(sorted(kept.items()))}


def main(out: Path, names: list[str]) -> int:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    import megatron.bridge.models  # noqa: F401

    document = json.loads(out.read_text()) if out.exists() else {}
    failed = []
    for case in (*CASES, *CONFIGS):
        if case.swift and "gemma4" in case.name:
            continue  # mcore-bridge's model reads the hub's config itself, its parser states little of it
        if (names and case.name not in names) or f"transformers {transformers.__version__}" not in case.versions:
            continue
        try:
            document[case.name] = row(case)
        except Exception:
            traceback.print_exc()
            failed.append(case.name)
    lines = [f"{json.dumps(name)}: {json.dumps(document[name], separators=(',', ':'))}" for name in sorted(document)]
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(lines)} cases; failed: {failed}")
    return bool(failed)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
