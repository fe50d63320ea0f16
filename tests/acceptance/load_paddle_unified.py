"""A PaddleFormers job of one process resumes from a unified checkpoint and says what it holds: run by a Python with
Paddle.

    python load_paddle_unified.py CHECKPOINT MODEL DTYPE TRUTH CONVERT
          # CONVERT: 1 as by default, 0 for Paddle's layout

The last line printed: `N compared, M differ`. The truth has STATE/NAME; what the job keeps no state for is not
compared.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

MAKERS = Path(__file__).resolve().parents[2] / "fixtures" / "make"
sys.path.insert(0, str(MAKERS))

UNIFIED = "unified_checkpoint"


def main(folder: str, kind: str, dtype: str, truth: str, convert: str) -> None:
    import paddle
    from paddle_tiny import STATES, build, plain, trainer
    from safetensors.numpy import load_file

    model = build(kind, dtype)
    live = model.state_dict()
    for tensor in live.values():
        tensor.set_value(paddle.zeros_like(tensor))
    kinds = {state: kind for kind, state in STATES.items()}
    compared = 0
    wrong = []
    with tempfile.TemporaryDirectory() as scratch:
        job = trainer(
            model,
            Path(scratch),
            dtype,
            save_checkpoint_format=UNIFIED,
            load_checkpoint_format=UNIFIED,
            convert_from_hf=convert == "1",
        )
        handler = job.unified_checkpoint_handler
        handler.load_unified_checkpoint(job.model, folder, convert_from_hf=job.args.convert_from_hf)
        loaded = handler.load_unified_optimizer(job.model, job.optimizer, folder)
        job.optimizer.set_state_dict(loaded)
        for key, want in load_file(truth).items():
            state, name = key.split("/", 1)
            static = live[name].name
            if state == "model":
                have = live[name]
            elif state == "master":
                have = loaded["master_weights"].get(static)
            else:
                names = (f"{static}_fp32_master_0_{kinds[state]}", f"{static}_{kinds[state]}")
                have = next((loaded[each] for each in names if each in loaded), None)
            if have is None and want.ndim == 2 and state == "master":
                continue  # fp32 weights have no master of their own
            compared += 1
            if have is None or plain(have).tobytes() != want.tobytes():
                wrong.append(key)
    print("\n".join(wrong[:20]))
    print(f"{compared} compared, {len(wrong)} differ")


if __name__ == "__main__":
    main(*sys.argv[1:6])
