"""Megatron-Core's GPTModel or HybridModel loads a checkpoint and computes logits on the CPU (run as a program).

    python megatron_hybrid_logits.py PATTERN|none CHECKPOINT CONFIG.json OUT.safetensors

none: a GPTModel of the local layer spec; a pattern: a HybridModel of the ModelOpt spec, whose norms lie under the keys
that Transformer Engine's have. `dist_checkpointing.load` fills either, strictly. Of a Llama. Not Megatron's: CUDA
(`cuda_on_cpu`), and stand-ins for the kernels of mixers, which no layer here has.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "make"))

import cuda_on_cpu
import torch

cuda_on_cpu.redirect()

KERNELS = {
    "mamba_ssm.ops.triton.layernorm_gated": ("RMSNorm",),
    "mamba_ssm.ops.triton.ssd_combined": ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"),
    "causal_conv1d": ("causal_conv1d_fn", "causal_conv1d_update"),
    "causal_conv1d.causal_conv1d_varlen": ("causal_conv1d_varlen_states",),
    "fla.modules.convolution": ("causal_conv1d",),
}


def absent(*args: Any, **named: Any) -> None:
    """A kernel that no layer here calls."""
    raise NotImplementedError


for module, names in KERNELS.items():
    for word in [module.rsplit(".", n)[0] for n in range(module.count("."), -1, -1)]:
        if word not in sys.modules:
            sys.modules[word] = types.ModuleType(word)
            sys.modules[word].__spec__ = importlib.machinery.ModuleSpec(word, None)
            sys.modules[word].__path__ = []
    sys.modules[module].__dict__.update({each: torch.nn.Module if each == "RMSNorm" else absent for each in names})

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.models.hybrid import hybrid_block  # noqa: E402
from megatron.core.models.hybrid.hybrid_model import HybridModel  # noqa: E402
from megatron.core.post_training.modelopt.hybrid import model_specs  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

for own in (model_specs, hybrid_block):
    for name in ("Norm", "TENorm"):
        if hasattr(own, name):
            setattr(own, name, WrappedTorchNorm)


def model_of(pattern: str, c: dict[str, Any]) -> torch.nn.Module:
    layers = c["num_hidden_layers"] if pattern == "none" else len(pattern)
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=c["hidden_size"],
        ffn_hidden_size=c["intermediate_size"],
        kv_channels=c["head_dim"],
        num_attention_heads=c["num_attention_heads"],
        num_query_groups=c["num_key_value_heads"],
        normalization="RMSNorm",
        layernorm_epsilon=c["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        is_hybrid_model=pattern != "none",
    )
    common: dict[str, Any] = {"vocab_size": c["vocab_size"], "max_sequence_length": 64}
    common |= {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
    if pattern == "none":
        return GPTModel(config, get_gpt_layer_local_spec(normalization="RMSNorm"), **common)
    spec = model_specs.get_hybrid_stack_modelopt_spec(local_core_attention=True, remap_te_layernorm=True)
    return HybridModel(config, spec, hybrid_layer_pattern=pattern, **common)


def main(pattern: str, folder: str, config: str, out: str) -> None:
    with tempfile.TemporaryDirectory() as temp:
        store = f"file://{temp}/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        model = model_of(pattern, json.loads(Path(config).read_text()))
        state = {key: value for key, value in model.sharded_state_dict().items() if "_extra_state" not in key}
        model.load_state_dict(dist_checkpointing.load(state, folder), strict=False)
        tokens = torch.arange(8).reshape(1, 8)
        later = torch.triu(torch.ones(1, 1, 8, 8, dtype=torch.bool), 1)
        with torch.no_grad():
            save_file({"logits": model(tokens, tokens, later).contiguous()}, out)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
