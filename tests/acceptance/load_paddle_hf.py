"""PaddleFormers opens a Hugging Face folder of ours: parameters, and logits where CPU can run the model.

    python load_paddle_hf.py FOLDER KIND REPORT    # KIND: llama, llama_tied, ernie, moe of fixtures/make/paddle_tiny.py

REPORT (JSON): {"parameters": n, "wrong": [names], "logits": the source model's or null, "difference": the largest to
those of the loaded one}. The
source model is built here with the planned values, as the makers build it. The MoE forward needs a GPU kernel
(expand_modality_expert_id), so for it equal parameters must do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

MAKERS = Path(__file__).resolve().parents[2] / "fixtures" / "make"
sys.path.insert(0, str(MAKERS))


def main(folder: str, kind: str, report: str) -> None:
    import numpy as np
    import paddle
    from paddle_tiny import MODELS, build, named, plain, put, rounded, whole

    def planned(name: str, static: str, names: dict[str, str], shape: list[int]) -> np.ndarray:
        return rounded(whole("model", names[static], shape), "bfloat16").astype("float32")

    loaded = MODELS[kind][1].from_pretrained(folder, dtype="float32", convert_from_hf=True)
    source = build(kind, "float32")
    names = named(source)
    wrong = []
    for name, tensor in source.state_dict().items():
        values = planned(name, tensor.name, names, tensor.shape)
        if "mlp.gate.weight" in name or "e_score_correction_bias" in name:  # fp32 islands of the bf16 run
            values = whole("model", names[tensor.name], tensor.shape)
        put(tensor, values)
        found = plain(loaded.state_dict()[name])
        if found.shape != values.shape or not np.array_equal(found, values):
            wrong.append(name)
    difference = None
    kept = None
    if kind != "moe":
        tokens = paddle.arange(1, 11).reshape([2, 5])  # token 0 is padding
        loaded.eval()
        logits = [np.asarray(model(input_ids=tokens)[0].numpy()) for model in (loaded, source)]
        difference = float(np.abs(logits[0] - logits[1]).max())
        kept = logits[1].tolist()
    found = {"parameters": len(names), "wrong": wrong, "difference": difference, "logits": kept}
    Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
