"""PaddleFormers opens weights that `ckpt` made of a Hugging Face model: its parameters, and its logits where CPU can
run it.

    python load_paddle_pretrained.py FOLDER CLASS CONVERT OUT     # CONVERT: 1 its default, 0 files in Paddle's layout

OUT (npz): `p/NAME` every parameter of the live model; `tokens`, `logits`. CPU lacks two kinds of kernels, which are
replaced by their formulas: the fused RMSNorm (`fixtures/make/paddle_tiny.py`) and the dispatch of tokens to experts
(`plain_moe`, after `nn/moe/moe_allgather_layer.py` of PaddleFormers 1.2.0). Gate, bias, experts and shared experts are
the real modules. ERNIE 4.5 VL is loaded alone, its logits are empty: its forward is GPU kernels throughout, and its
module wants paddlefleet (stood in for).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

MAKERS = Path(__file__).resolve().parents[2] / "fixtures" / "make"
sys.path.insert(0, str(MAKERS))


def plain_moe(layer: Any, hidden: Any, *_: Any, **__: Any) -> tuple[Any, Any, Any, Any]:
    """A layer of experts, each token through the k best: what the fused kernels compute, token by token."""
    import paddle

    x = hidden.reshape([-1, hidden.shape[-1]])
    logits = x.astype("float32") @ layer.gate.weight.astype("float32")
    scores = layer.gate.act(logits)
    _, best = (scores + layer.moe_statics.e_score_correction_bias[0]).topk(k=layer.k, axis=-1)
    weights = paddle.take_along_axis(scores, best, axis=-1)
    weights = weights / weights.sum(-1, keepdim=True).clip(min=1e-12)
    rows = []
    for token in range(x.shape[0]):
        parts = [weights[token, n] * layer.experts[int(best[token, n])](x[token : token + 1]) for n in range(layer.k)]
        rows.append(sum(parts[1:], parts[0]))
    out = paddle.concat(rows)
    if layer.shared_experts is not None:
        out = out + layer.shared_experts(x)
    return out.reshape(hidden.shape), None, paddle.zeros([1]), logits


def main(folder: str, name: str, convert: str, out: str) -> None:
    import numpy as np
    import paddle
    import paddle_tiny  # noqa: F401  (the norm of CPU)
    import paddleformers.transformers as classes

    sees = "_VL" in name
    if sees:
        import paddle_families
        import paddleformers.utils.import_utils as available

        sys.meta_path.insert(0, paddle_families._Finder())
        available.is_paddlefleet_available = lambda: True
        import paddleformers.transformers.ernie4_5_moe_vl.modeling as classes
    how = {} if convert == "1" else {"convert_from_hf": False, "load_checkpoint_format": ""}
    model = getattr(classes, name).from_pretrained(folder, dtype="float32", **how)
    model.eval()
    for layer in model.sublayers():
        if hasattr(layer, "fused_gate_and_dispatch"):
            type(layer).forward = plain_moe
    tokens = paddle.arange(1, 11).reshape([2, 5])
    logits = np.zeros(0) if sees else np.asarray(model(input_ids=tokens)[0].numpy())
    found = {f"p/{key}": np.asarray(tensor.astype("float32").numpy()) for key, tensor in model.state_dict().items()}
    np.savez(out, tokens=np.asarray(tokens.numpy()), logits=logits, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
