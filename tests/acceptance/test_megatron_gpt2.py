"""A GPT-2 that Megatron-LM itself trained and saved (fixtures/megatron), as transformers' GPT2LMHeadModel: told from
its arguments alone, loaded without a key missing, each tensor the truth's by NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from peers import FIXTURES
from safetensors import safe_open
from safetensors.torch import load_file

from ckpt_tool.commands.convert import convert
from ckpt_tool.core.progress import Silent
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

HEADS = 4


def test_transformers_takes_a_gpt2_of_megatron(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    source = FIXTURES / "megatron" / "gpt2_tied_pp2_adamw"
    report = convert(str(source), str(tmp_path / "hf"), Reading(), Writing(to="safetensors", fsync=False), Silent())
    assert any("the family gpt2, megatron to hf" in note for note in report["notes"])
    model, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found = {name: tensor.float().numpy() for name, tensor in load_file(tmp_path / "hf" / "model.safetensors").items()}
    with safe_open(f"{source}.truth.safetensors", "pt") as truth:
        want = {
            key.removeprefix("model/"): truth.get_tensor(key).float().numpy()
            for key in truth.keys()
            if key[:6] == "model/"
        }
    tokens = found["transformer.wte.weight"]
    np.testing.assert_array_equal(tokens, want["embedding.word_embeddings.weight"][: len(tokens)])
    np.testing.assert_array_equal(found["transformer.wpe.weight"], want["embedding.position_embeddings.weight"])
    for i in range(4):
        here = f"transformer.h.{i}"
        there = f"decoder.layers.{i}"
        for leaf in ("weight", "bias"):
            whole = want[f"{there}.self_attention.linear_qkv.{leaf}"]
            split = whole.reshape(HEADS, 3, -1, *whole.shape[1:])
            q, k, v = (split[:, n].reshape(-1, *whole.shape[1:]).T for n in range(3))
            np.testing.assert_array_equal(found[f"{here}.attn.c_attn.{leaf}"], np.concatenate([q, k, v], axis=-1))
            for name, other in (
                ("attn.c_proj", "self_attention.linear_proj"),
                ("mlp.c_fc", "mlp.linear_fc1"),
                ("mlp.c_proj", "mlp.linear_fc2"),
                ("ln_1", "input_layernorm"),
                ("ln_2", "pre_mlp_layernorm"),
            ):
                np.testing.assert_array_equal(found[f"{here}.{name}.{leaf}"], want[f"{there}.{other}.{leaf}"].T)
