"""Unified checkpoints of Paddle that lie: indexes, headers and marks that contradict each other, and weights whose
layout or kind nothing tells.

`CASES` as in the other tables. A sound fixture is copied and one thing is changed, by `json` and by the safetensors
library.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes  # noqa: F401 - what NumPy calls bfloat16
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

FIXTURES = Path(__file__).parents[2] / "fixtures" / "paddle-unified"
SHOWN = {"inspect": 0, "*": 4}  # inspect shows the name in red, everything else refuses
TOLD = {"inspect": 0, "verify": 0, "*": 0}  # read as it is, and said in a note
UNSOUND = {"inspect": 0, "verify": 1, "*": 3}  # headers are sound, the tensors do not belong together
TIED = "llama_tied_hf"
RANKS = "ernie_nm_tp2"
LORA = "llama_lora_hf"
MODEL, OPTIMIZER, MASTERS = (f"{stem}.safetensors.index.json" for stem in ("model", "optimizer", "master_weights"))
ONE = "-00001-of-00001.safetensors"


def made(case, *changes):
    """A copy of the fixture, changed."""

    def make(folder):
        target = folder / case
        shutil.copytree(FIXTURES / case, target)
        for change in changes:
            change(target)
        return target

    return make


def index(name, change):
    def edit(folder):
        value = json.loads((folder / name).read_text())
        change(value)
        (folder / name).write_text(json.dumps(value, indent=4))

    return edit


def mapped(name, **entries):
    return index(name, lambda value: value["weight_map"].update(entries))


def tensors(file, change, layout=None):
    """A file whose tensors `change` has edited, its metadata kept unless `layout` says another."""

    def edit(folder):
        with safe_open(folder / file, "np") as opened:
            found = {name: opened.get_tensor(name) for name in opened.keys()}
            metadata = opened.metadata()
        change(found)
        save_file(
            {k: np.ascontiguousarray(v) for k, v in found.items()},
            folder / file,
            metadata=metadata if layout is None else {"format": layout},
        )

    return edit


def bits(found):
    for name, value in found.items():
        found[name] = value.view(np.uint16)


def gone(*patterns):
    def edit(folder):
        for pattern in patterns:
            for path in folder.glob(pattern):
                path.unlink()

    return edit


def written(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def renamed(old, new):
    return lambda folder: (folder / old).rename(folder / new)


def transposed(name):
    def change(found):
        found[name] = found[name].T

    return change


def of_another(found):
    found["model.layers.0.mlp.gate_proj.weight"] = found["model.layers.0.mlp.gate_proj.weight"][:, :7]


def rest(name):
    """Forget everything but `name` in the weight map."""
    return lambda value: value.update(weight_map={name: value["weight_map"][name]})


GATE = "model.layers.0.mlp.gate_proj.weight"
EVIL = b"\x80\x04cposix\nsystem\n(S'true'\ntR."
SCALAR = np.zeros((1,), np.float32)
CASES = [
    ("PU1 a file outside", made(TIED, mapped(MODEL, x="../../secret.safetensors")), 4, ("'..'", "only plain names")),
    ("PU2 an absolute file", made(TIED, mapped(OPTIMIZER, **{"x/moment1_0": "/etc/passwd"})), 4, ("absolute",)),
    ("PU3 a file that is not there", made(TIED, gone("optimizer-*")), 3, ("missing", "optimizer-00001-of-00001")),
    ("PU4 names that differ by case", made(TIED, mapped(MODEL, x="MODEL" + ONE)), 3, ("only in case",)),
    (
        "PU5 a tensor of no file",
        made(TIED, mapped(MASTERS, lost="master_weights" + ONE)),
        3,
        ("not in their files", "lost"),
    ),
    ("PU6 a tensor of no index", made(TIED, index(MODEL, rest("lm_head.weight"))), 3, ("not in the index",)),
    ("PU7 an index that is a list", made(TIED, written(MODEL, b"[]")), 3, ("want an object",)),
    ("PU8 an index without a map", made(TIED, index(MASTERS, lambda v: v.pop("weight_map"))), 3, ("no weight_map",)),
    ("PU9 a file name that is a number", made(TIED, mapped(MODEL, x=7)), 3, ("want a string",)),
    ("PU10 a lost index", made(TIED, gone(MASTERS)), 3, ("without master_weights",)),
    ("PU11 masters that one process promised", made(TIED, gone("master*")), 3, ("says master_weights",)),
    (
        "PU12 a key without a type",
        made(
            TIED,
            mapped(OPTIMIZER, odd="optimizer" + ONE),
            tensors("optimizer" + ONE, lambda found: found.update(odd=SCALAR)),
        ),
        3,
        ("without a type", "odd"),
    ),
    (
        "PU13 one weight another way round",
        made(TIED, tensors("model" + ONE, transposed(GATE))),
        3,
        ("different layouts",),
    ),
    (
        "PU14 a layout that nothing tells",
        made(TIED, gone("config.json")),
        3,
        ("may or may not be in the hugging face layout", "--config"),
    ),
    ("PU15 the masters of another run", made(TIED, tensors("master_weights" + ONE, of_another)), UNSOUND, ("shape",)),
    (
        "PU16 integers that may be bf16",
        made(TIED, gone("optimizer*", "master*", "config.json"), tensors("model" + ONE, bits, "np")),
        3,
        ("16-bit integers", "--config"),
    ),
    (
        "PU17 an unfinished asynchronous save",
        made(TIED, written(".model_weight.done.0", b""), written(".optimizer_weight.done.0", b"")),
        3,
        ("did not finish", ".master_weight.done.0"),
    ),
    (
        "PU18 a rank's file lost",
        made(RANKS, gone("optimizer.tp01*")),
        3,
        ("ranks' files are missing", "optimizer.tp01"),
    ),
    (
        "PU19 ranks of two jobs",
        made(RANKS, renamed("optimizer.tp01.safetensors", "optimizer.tp01_pp00.safetensors")),
        3,
        ("two jobs",),
    ),
    ("PU20 no rank's file at all", made(RANKS, gone("optimizer.tp*", "master*")), 3, ("names no files",)),
    (
        "PU21 parts of a rank's file that are missing",
        made(RANKS, index(OPTIMIZER, lambda v: v.update(optim_shard_num=2))),
        3,
        ("ranks' files are missing", "_shard_0001"),
    ),
    (
        "PU23 a share of another shape",
        made(
            RANKS,
            tensors(
                "optimizer.tp01.safetensors",
                lambda found: found.update({k: v[:-1] for k, v in found.items() if "qkv_proj.weight/moment1" in k}),
            ),
        ),
        3,
        ("qkv_proj",),
    ),
    ("PU24 a scheduler that asks for code", made(TIED, written("scheduler.pdparams", EVIL)), SHOWN, ("posix.system",)),
    (
        "PU25 a job's pickles, never opened",
        made(TIED, written("training_args.bin", EVIL), written("rng_state_0.pth", EVIL)),
        TOLD,
        (),
    ),
    (
        "PU26 an optimizer in a model's file",
        made(LORA, lambda f: shutil.copy(f / ("peft_model" + ONE), f / ("optimizer" + ONE))),
        3,
        ("not in their files",),
    ),
    (
        "PU27 a huge index",
        made(TIED, written(MODEL, b'{"weight_map": {' + b" " * 65_000_000 + b"}}")),
        3,
        ("want at most",),
    ),
    (
        "PU28 two keys, one state",
        made(
            TIED,
            mapped(OPTIMIZER, **{"norm/moment1": "optimizer" + ONE, "norm/moment1_0": "optimizer" + ONE}),
            tensors(
                "optimizer" + ONE, lambda found: found.update({"norm/exp_avg_0": SCALAR, "norm/moment1_0": SCALAR})
            ),
            index(
                OPTIMIZER,
                lambda v: (
                    v["weight_map"].pop("norm/moment1"),
                    v["weight_map"].update({"norm/exp_avg_0": "optimizer" + ONE}),
                ),
            ),
        ),
        3,
        ("mean one state",),
    ),
]
