"""transformers opens what `--dequantize` wrote as any other model, and gives the logits of the quantised one.

On a CPU transformers makes floats of FP8 and MXFP4 itself while it loads, so both are the same model by another road.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tool.commands.convert import convert
from ckpt_tool.core.progress import Silent
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

FIXTURES = Path(__file__).parents[2] / "fixtures" / "quantized"
pytestmark = pytest.mark.peers


@pytest.mark.parametrize("case", ["fp8_block", "fp8_ue8m0", "fp8_experts", "mxfp4_gpt_oss", "int4_group", "nvfp4"])
def test_the_logits_are_those_of_the_quantised_model(case: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if not case.startswith(("fp8", "mxfp4")):
        pytest.importorskip("compressed_tensors")
    writing = Writing(to="safetensors", fsync=False, dequantize=True)
    convert(str(FIXTURES / case), str(tmp_path / "floats"), Reading(), writing, Silent())
    tokens = torch.arange(12).reshape(2, 6)
    logits = []
    info = {}
    for folder in (FIXTURES / case, tmp_path / "floats"):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, output_loading_info=True
        )
        model = model.eval()
        with torch.no_grad():
            logits.append(model(tokens).logits.float())
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert torch.equal(*logits) and logits[0].abs().max() > 0
