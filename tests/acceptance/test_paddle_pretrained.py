"""Weights that transformers made, by `ckpt convert` in one hop, opened by PaddleFormers: transformers' logits (marker
`peers`).

Three ways in: a unified checkpoint (PaddleFormers' default road), safetensors in Paddle's layout, `.pdparams`. In fp32
the two systems' logits differ by less than 5e-6 where they reach 3. PaddleFormers can't run experts on CPU: the
dispatch kernel is replaced by its formula, with the real gate and expert modules (`load_paddle_pretrained.py`).

    CKPT_PADDLE_PYTHON=/venv/bin/python pytest tests/acceptance/test_paddle_pretrained.py -m peers
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peers import FIXTURES, ROOT, Runner
from safetensors.numpy import load_file

PYTHON = os.environ.get("CKPT_PADDLE_PYTHON", "")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not PYTHON, reason="set CKPT_PADDLE_PYTHON (a Python with paddlepaddle and paddleformers)"),
]
EYES = FIXTURES / "families" / "ernie4_5_vl_moe"
SIZES = {
    "vocab_size": 54,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "moe_num_experts": 4,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 1,
    "moe_k": 2,
    "moe_intermediate_size": 12,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", EXPERTS),
}
TARGETS = {
    "unified": ("--to", "paddle-unified"),
    "layout": ("--to", "safetensors", "--dialect", "paddle"),
    "pdparams": ("--to", "paddle"),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A random model, norms and router biases too, saved by transformers."""
    transformers = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    name, more = MODELS[request.param]
    made = getattr(transformers, name)(transformers.AutoConfig.for_model(request.param, **SIZES, **more))
    for key, tensor in (*made.named_parameters(), *made.named_buffers()):
        if tensor.is_floating_point() and "inv_freq" not in key:
            torch.nn.init.normal_(tensor, mean=1.0 if key.endswith("norm.weight") else 0.0, std=0.2)
    folder = tmp_path_factory.mktemp(request.param) / "hf"
    made.save_pretrained(folder)
    return name, folder


@pytest.mark.parametrize("target", TARGETS)
def test_the_logits_are_transformers(model: tuple[str, Path], target: str, ckpt: Runner, tmp_path: Path) -> None:
    import transformers

    name, folder = model
    ckpt("convert", folder, tmp_path / "paddle", *TARGETS[target])
    found = loaded(tmp_path, name, target)
    with torch.no_grad():
        want = transformers.AutoModelForCausalLM.from_pretrained(folder)(
            torch.from_numpy(found["tokens"])
        ).logits.numpy()
    assert found["logits"].shape == want.shape and np.abs(want).max() > 1
    assert np.abs(found["logits"] - want).max() < 5e-6
    ckpt("convert", tmp_path / "paddle", tmp_path / "back", "--to", "safetensors")
    assert ckpt("diff", folder, tmp_path / "back")["equal"]


@pytest.mark.parametrize("target", TARGETS)
def test_what_sees_is_loaded_whole(target: str, ckpt: Runner, tmp_path: Path) -> None:
    """ERNIE 4.5 VL, tower and resampler too: every parameter is that of the model that PaddleFormers saved for Hugging
    Face."""
    source = tmp_path / "hf"
    source.mkdir()
    shutil.copy(EYES / "config.json", source)
    shutil.copy(EYES / "hf.safetensors", source / "model.safetensors")
    ckpt("convert", source, tmp_path / "paddle", *TARGETS[target])
    found = loaded(tmp_path, "Ernie4_5_VLMoeForConditionalGeneration", target)
    want = load_file(EYES / "paddle.safetensors")
    assert {key.removeprefix("p/") for key in found if key.startswith("p/")} == want.keys()
    assert not [key for key, array in want.items() if not np.array_equal(found[f"p/{key}"], array)]


def test_what_transformers_saved_of_what_sees_has_paddle_s_config(ckpt: Runner, tmp_path: Path) -> None:
    """One nested config becomes Paddle's flat one: PaddleFormers builds the model by it, and finds every parameter."""
    transformers = pytest.importorskip("transformers", minversion="5")
    rope = {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [1, 1, 1]}
    text = {
        **SIZES,
        "moe_num_experts": 3,
        "moe_intermediate_size": [8, 4],
        "moe_num_shared_experts": 2,
        "moe_k": 2,
        "mlp_layer_types": ["dense", "sparse"],
        "rope_parameters": rope,
    }
    seen = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 2}
    torch.manual_seed(0)
    config = transformers.Ernie4_5_VLMoeConfig(text_config=text, vision_config=seen, tie_word_embeddings=False)
    transformers.Ernie4_5_VLMoeForConditionalGeneration(config).save_pretrained(tmp_path / "hf")
    ckpt("convert", tmp_path / "hf", tmp_path / "paddle", "--to", "paddle-unified")
    found = loaded(tmp_path, "Ernie4_5_VLMoeForConditionalGeneration", "unified")
    straight = ("mlp.gate.weight", "e_score_correction_bias", "embed_tokens.weight")
    hub = load_file(tmp_path / "hf" / "model.safetensors")
    want = {key.replace("model.vision_model.", "vision_model."): array for key, array in hub.items()}
    assert {key.removeprefix("p/") for key in found if key.startswith("p/")} == want.keys()
    for key, array in want.items():
        there = array if any(part in key for part in straight) else array.T
        np.testing.assert_array_equal(found[f"p/{key}"], there, err_msg=key)


def loaded(tmp_path: Path, name: str, target: str) -> Any:
    """What PaddleFormers' class `name` holds of `tmp_path/paddle`."""
    command = [
        PYTHON,
        "-W",
        "ignore",
        str(ROOT / "tests/acceptance/load_paddle_pretrained.py"),
        str(tmp_path / "paddle"),
        name,
        "1" if target == "unified" else "0",
        str(tmp_path / "found.npz"),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, "\n".join((ran.stdout + ran.stderr).splitlines()[-25:])
    return np.load(tmp_path / "found.npz")
