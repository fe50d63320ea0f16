"""What PaddleFormers' own Trainer and PaddlePaddle hold after loading a flex checkpoint, against the truth of a maker's
case.

    python load_paddle_flex.py trainer FOLDER TRUTH KIND DTYPE      # the Trainer's loader, one process
    python load_paddle_flex.py merged FOLDER TRUTH TP               # load_merged_state_dict of every folder, any layout

Prints the names that differ and a last line `N values, M differ`. Run by `test_paddle_flex_loads.py` with Paddle's
Python.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import paddle
import paddle.distributed as dist
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "make"))


def truth_of(path: str) -> dict[str, bytes]:
    """STATE/NAME -> the bytes, by a reader that knows bfloat16."""
    with safe_open(path, framework="paddle") as file:
        return {key: raw(file.get_tensor(key)) for key in file.keys()}


def raw(tensor: paddle.Tensor) -> bytes:
    if tensor.dtype == paddle.bfloat16:
        return tensor.astype("float32").numpy().astype(ml_dtypes.bfloat16).tobytes()
    return tensor.numpy().tobytes()


def trainer(folder: str, kind: str, dtype: str) -> dict[str, bytes]:
    """The model and the optimizer of a job whose values were all zero before it loaded."""
    from paddle_tiny import STATES, build, named, optimizer_state, split_key
    from paddle_tiny import trainer as started

    model = build(kind, dtype)
    job = started(model, Path(tempfile.mkdtemp()), dtype, save_checkpoint_format="flex_checkpoint")
    optimizer_state(job)
    states = job.optimizer.state_dict()
    masters = states.get("master_weights", {})
    moments = {key: value for key, value in states.items() if key not in ("master_weights", "LR_Scheduler")}
    for tensor in (*model.state_dict().values(), *masters.values(), *moments.values()):
        paddle.assign(paddle.zeros_like(tensor), tensor)
    # one process has no groups and no wrapped optimizer; the loader asks for both
    job.args.flex_ckpt_comm_method = "broadcast"
    dist.fleet.get_hybrid_communicate_group = lambda: None
    job.optimizer._inner_opt = None
    job._load_flex_checkpoint(folder)
    statics = named(job.model)
    names = dict[str, str]()
    for name, tensor in sorted(model.state_dict().items()):  # a tied pair's states have the first name
        names.setdefault(tensor.name, name)
    found = {f"model/{name}": raw(tensor) for name, tensor in model.state_dict().items()}
    found |= {f"master/{names[static]}": raw(tensor) for static, tensor in masters.items()}
    for key, tensor in moments.items():
        static, state = split_key(key, statics)
        found[f"{STATES[state]}/{names[static]}"] = raw(tensor)
    return found


def merged(folder: str, tp: int) -> dict[str, bytes]:
    """What Paddle makes of the folders; a fused weight comes rank after rank and is put in order by its definition."""
    from paddle_tiny import STATES

    found = {}
    for part in ("model_state", "optimizer_state", "master_weight"):
        for key, tensor in dist.load_merged_state_dict(f"{folder}/{part}").items():
            name, _, last = key.rpartition(".")
            known = part != "model_state"
            label = f"{'master' if last == 'w_0' else STATES[last]}/{name}" if known else f"model/{key}"
            if tp > 1 and "up_gate_proj" in key and "beta" not in last:
                gates = [half for block in tensor.split(tp, -1) for half in block.split(2, -1)]
                tensor = paddle.concat([*gates[::2], *gates[1::2]], -1)
            found[label] = raw(tensor)
    return found


if __name__ == "__main__":
    mode, folder, truth = sys.argv[1:4]
    have = trainer(folder, *sys.argv[4:6]) if mode == "trainer" else merged(folder, int(sys.argv[4]))
    want = truth_of(truth)
    wrong = sorted(key for key in want if not np.array_equal(have.get(key, b""), want[key]))
    for key in wrong[:20]:
        print("differs:", key)
    print(f"{len(want)} values, {len(wrong)} differ")
