"""transformers opens what `--quantize` wrote, misses nothing, and gives the logits of our floats of it.

On a CPU it makes floats of FP8 and MXFP4 itself while it loads. What compressed-tensors opens is
`commands/test_quantize_peers.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.commands.convert import convert
from ckpt_tool.core.progress import Silent
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

pytestmark = pytest.mark.peers
SMALL = {"vocab_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}


def llama(transformers: Any) -> Any:
    config = transformers.LlamaConfig(**SMALL, hidden_size=256, intermediate_size=384, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def deepseek_v3(transformers: Any) -> Any:
    """Latent attention and experts one by one. All rows are whole blocks, or less than one: where transformers 5.23
    makes floats of FP8 it derives a block from the number of scales, and DeepSeek's own short blocks fail there."""
    config = transformers.DeepseekV3Config(
        **SMALL, hidden_size=128, intermediate_size=128, moe_intermediate_size=128, q_lora_rank=128, kv_lora_rank=64,
        qk_rope_head_dim=64, qk_nope_head_dim=64, v_head_dim=64, num_key_value_heads=4, n_routed_experts=4,
        num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


def gpt_oss(transformers: Any) -> Any:
    config = transformers.GptOssConfig(
        **SMALL, hidden_size=64, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, head_dim=16,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.GptOssForCausalLM(config)


@pytest.mark.parametrize(
    ("made", "scheme", "least"), [(llama, "fp8-block", 14), (deepseek_v3, "fp8-block", 28), (gpt_oss, "mxfp4", 4)]
)
def test_the_logits_are_those_of_our_floats(
    made: Callable[[Any], Any], scheme: str, least: int, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    made(transformers).to(torch.bfloat16).save_pretrained(tmp_path / "m")
    given = {"to": "safetensors", "fsync": False}
    report = convert(str(tmp_path / "m"), str(tmp_path / "q"), Reading(), Writing(quantize=scheme, **given), Silent())
    assert report["quantized"]["weights"] >= least
    convert(str(tmp_path / "q"), str(tmp_path / "f"), Reading(), Writing(dequantize=True, **given), Silent())
    tokens = torch.arange(12).reshape(2, 6)
    logits = []
    for folder in ("q", "f"):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, dtype=torch.bfloat16, output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        with torch.no_grad():
            logits.append(model.eval()(tokens).logits.float())
    assert torch.equal(*logits) and logits[0].abs().max() > 0
