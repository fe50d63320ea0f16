"""Per-rank checkpoints of Paddle that lie: files that are sound pickles and say what can't be, and files beside them.

`CASES` as in the other tables. A real job's checkpoint is copied and one thing is changed; pickles of plain NumPy
arrays are edited with pickle, as they are ours.
"""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np

FIXTURES = Path(__file__).parents[2] / "fixtures"
TABLE = "StructuredToParameterName@@"
MASTERS = "master_weights"
SHOWN = {"inspect": 0, "*": 4}  # inspect shows the name in red, everything else refuses
PLAIN = "paddle/llama_tied_bf16_legacy_single"
SLICED = "paddle/ernie_bf16_io_tp2sd2v2"
OWNED = "paddle/llama_bf16_io_ema_sd2v1"
CALL = b"cposix\nsystem\n(X\x04\x00\x00\x00truetR0"  # its result is thrown away
QUERY = "model.layers.0.self_attn.q_proj.weight"


def copied(folder, case):
    target = folder / "checkpoint"
    shutil.copytree(FIXTURES / case, target)
    return target


def edited(case, name, change):
    """A case of which one file's value was changed in place."""

    def make(folder):
        target = copied(folder, case)
        path = target / name
        value = json.loads(path.read_text()) if name.endswith(".json") else pickle.loads(path.read_bytes())
        change(value)
        path.write_bytes(json.dumps(value).encode() if name.endswith(".json") else pickle.dumps(value, protocol=4))
        return target

    return make


def added(case, name, data):
    def make(folder):
        target = copied(folder, case)
        (target / name).write_bytes(data)
        return target

    return make


def first(value, part):
    return next(key for key in value if part in key)


def shrunk(part, change):
    """The first array whose key has `part`, changed."""

    def edit(value):
        key = first(value, part)
        own = value[key]
        value[key] = (own[0], change(own[1])) if isinstance(own, tuple) else change(own)

    return edit


def straddling(folder):
    """The slice of a parameter that begins in one rank's file and ends in the next one's, taken out of the first."""
    target = copied(folder, SLICED)
    path, other = (target / f"optimizer.tp00_shard0{shard}.pdopt" for shard in (0, 1))
    value = pickle.loads(path.read_bytes())
    following = pickle.loads(other.read_bytes())
    (static,) = value[MASTERS].keys() & following[MASTERS].keys()
    del value[MASTERS][static]
    for key in [key for key in value if key.startswith(f"{static}_")]:
        del value[key]
    path.write_bytes(pickle.dumps(value, protocol=4))
    return target


def calling(folder):
    target = copied(folder, PLAIN)
    path = target / "model_state.pdparams"
    data = path.read_bytes()
    path.write_bytes(data[:2] + CALL + data[2:])
    return target


def stage(value):
    return next(iter(value["sharding_metas"].values()))


EVIL = b"\x80\x04" + CALL + b"}."
CASES = [
    (
        "PD1 a scheduler that calls",
        added(PLAIN, "scheduler.pdparams", EVIL),
        SHOWN,
        ("posix.system", "scheduler.pdparams"),
    ),
    ("PD2 a scaler that calls", added(PLAIN, "scaler.pdparams", EVIL), SHOWN, ("posix.system", "scaler.pdparams")),
    ("PD3 one beside flex", added("paddle-flex/llama_tied_pp2", "scheduler.pdparams", EVIL), SHOWN, ("posix.system",)),
    (
        "PD4 one beside unified",
        added("paddle-unified/llama_tied_hf", "scaler.pdparams", EVIL),
        SHOWN,
        ("posix.system",),
    ),
    ("PD5 a model that calls", calling, SHOWN, ("posix.system",)),
    ("PD6 an average that calls", added(PLAIN, "ema.pdopt", EVIL), SHOWN, ("posix.system",)),
    ("PD7 job files that call", added(PLAIN, "training_args.bin", EVIL), 0, ()),
    (
        "PD8 masters that are a number",
        edited(PLAIN, "optimizer.pdopt", lambda v: v.update({MASTERS: 7})),
        3,
        ("master",),
    ),
    ("PD9 masters lost", edited(PLAIN, "optimizer.pdopt", lambda v: v.pop(MASTERS)), 3, ("master weights",)),
    (
        "PD10 a master lost",
        edited(PLAIN, "optimizer.pdopt", lambda v: v[MASTERS].popitem()),
        3,
        ("1 master weight that",),
    ),
    (
        "PD11 a weight lost",
        edited(PLAIN, "model_state.pdparams", lambda v: v.pop(QUERY)),
        {"*": 3, "verify": 1},
        (TABLE, QUERY),
    ),
    (
        "PD12 a weight that is a number",
        edited(PLAIN, "model_state.pdparams", lambda v: v.update({QUERY: 7})),
        {"*": 3, "verify": 1},
        (TABLE, QUERY),
    ),
    (
        "PD13 a power of beta of two",
        edited(PLAIN, "optimizer.pdopt", shrunk("beta1", lambda a: np.repeat(a, 2))),
        3,
        ("one number a parameter",),
    ),
    ("PD14 one slice lost", straddling, 3, ("slices of",)),
    (
        "PD15 a slice cut",
        edited(SLICED, "optimizer.tp00_shard00.pdopt", shrunk("moment1", lambda a: a[:-1])),
        3,
        ("slices of",),
    ),
    (
        "PD18 averages lost",
        edited(OWNED, "ema.shard00.pdopt", lambda v: v.pop(MASTERS)),
        3,
        ("averages of", "ema.shard00"),
    ),
    (
        "PD16 degrees that can't be",
        edited(SLICED, "model_meta.json", lambda v: v["parallel_config"].update(mp_degree=3)),
        3,
        ("degree",),
    ),
    (
        "PD17 an owner that is none",
        edited(OWNED, "model_meta.json", lambda v: stage(v)["param2rank"].update(x=9)),
        3,
        ("param2rank", "rank 9"),
    ),
]
