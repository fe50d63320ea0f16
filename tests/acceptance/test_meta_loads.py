"""Meta's own code loads what `convert --to meta` writes, strictly, and gives transformers' logits (marker `peers`).

    CKPT_LLAMA=/path/llama CKPT_LLAMA_MODELS=/path/llama-models pytest tests/acceptance/test_meta_loads.py -m peers

Checkouts of meta-llama/llama (July 2023) and meta-llama/llama-models (July 2025). In fp32 the logits differ by less
than 2e-5 where they reach 5. The shards went through `--tp 2` first, so what is loaded was cut and joined.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import ROOT, Runner

SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("CKPT_LLAMA", {}),
    ("CKPT_LLAMA_MODELS", {"num_key_value_heads": 2, "rope_parameters": SCALED, "max_position_embeddings": 16384}),
]
pytestmark = pytest.mark.peers


@pytest.mark.parametrize(("code", "more"), CASES, ids=["llama2", "llama3"])
def test_meta_s_code_gives_transformers_logits(code: str, more: dict[str, Any], ckpt: Runner, tmp_path: Path) -> None:
    if not os.environ.get(code):
        pytest.skip(f"set {code} (a checkout of Meta's code)")
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = {
        "vocab_size": 72,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    model.save_pretrained(tmp_path / "hf")
    ckpt("convert", tmp_path / "hf", tmp_path / "two", "--to", "meta", "--tp", "2")
    ckpt("reshard", tmp_path / "two", tmp_path / "one", "--tp", "1")
    script = str(ROOT / "tests/acceptance/load_meta.py")
    command = [sys.executable, script, os.environ[code], str(tmp_path / "one"), str(tmp_path / "logits.pt")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, "\n".join((ran.stdout + ran.stderr).splitlines()[-25:])
    with torch.no_grad():
        want = model(torch.arange(40)[None]).logits
    assert want.abs().max() > 3
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt", weights_only=True), want, atol=2e-5, rtol=0)
