"""Hostile pickles inside the files of the formats of several files: each file kind of each format in turn.

`CASES` as in the other tables. A sound fixture is copied and one file's pickle gets opcodes in front of its value (a
call whose result is thrown away, D3) or is replaced. Payloads would create a file `canary` in the folder, if anything
ran them. Nothing here uses torch, and nothing here unpickles.
"""

from __future__ import annotations

import shutil
import struct
import zipfile
from pathlib import Path

FIXTURES = Path(__file__).parents[2] / "fixtures"
SHOWN = {"inspect": 0, "*": 4}  # inspect shows the name in red, everything else refuses
DS, STAGE3, PIPE, MOE = (
    f"deepspeed/{name}" for name in ("z1_bf16_dp4", "z3_bf16_dp4", "pipe_pp2_dp2_z1", "moe_z2_ep2_dp4")
)
UNI = "deepspeed-universal/z1_bf16_dp2"
UNI3 = "deepspeed-universal/z3_bf16_dp2"
DIST = "megatron-dist/llama_tp2"
RANKS = "torch/ranks_fsdp2_dp4"
MEGATRON = "megatron/moe_tp2ep2etp1"
KINDS = [
    ("module", DS, "mp_rank_00_model_states.pt"),
    ("optim", DS, "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"),
    ("module3", STAGE3, "zero_pp_rank_1_mp_rank_00_model_states.pt"),
    ("optim3", STAGE3, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("layer", PIPE, "layer_02-model_states.pt"),
    ("stage", PIPE, "mp_rank_01_model_states.pt"),
    ("expert", MOE, "layer_1_expert_2_mp_rank_00_model_states.pt"),
    ("universal-fp32", UNI, "zero/embed.weight/fp32.pt"),
    ("universal-moment", UNI, "zero/layers.0.w1.weight/exp_avg_sq.pt"),
    ("universal-step", UNI, "zero/embed.weight/step.pt"),
    ("universal-state", UNI, "zero/optimizer_state.pt"),
    ("universal-module", UNI, "mp_rank_00_model_states.pt"),
    ("universal-module3", UNI3, "zero_pp_rank_1_mp_rank_00_model_states.pt"),
    ("dist-common", DIST, "iter_0000001/common.pt"),
    ("dist-metadata", DIST, "iter_0000001/.metadata"),
    ("megatron-model", MEGATRON, "iter_0000002/mp_rank_01_001/model_optim_rng.pt"),
    ("megatron-optim", MEGATRON, "iter_0000002/mp_rank_00_000/distrib_optim.pt"),
    ("rank-model", RANKS, "model_world_size_4_rank_2.pt"),
    ("rank-optim", RANKS, "optim_world_size_4_rank_1.pt"),
    ("rank-extra", RANKS, "extra_state_world_size_4_rank_3.pt"),
]


# -- opcodes -----------------------------------------------------------------------------------------------------------


def text(value):
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def name(module, qualname):
    return b"c" + f"{module}\n{qualname}\n".encode()


def system(folder):
    """posix.system("touch CANARY")"""
    return name("posix", "system") + text(f"touch {folder}/canary") + b"\x85R"


def built(folder):
    """An object of a class that we do not know, with a state: BUILD calls its `__setstate__`."""
    return name("canary_module", "Loader") + b")\x81}" + text("command") + text(f"touch {folder}/canary") + b"sb"


def object_array(folder):
    """A NumPy array of Python objects, whole: its values are read as a list."""
    return objects(b"](K\1K\2e")


def addresses(folder):
    """A NumPy array of Python objects with bytes for values, which NumPy would follow as addresses."""
    return objects(b"C\x10" + b"A" * 16)


def objects(values):
    """A NumPy array of two Python objects. values: the opcodes of what its state has for them."""
    kind = (
        name("numpy", "dtype")
        + text("O8")
        + b"\x89\x88\x87R(K\3"
        + text("|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb"
    )
    empty = name("numpy.core.multiarray", "_reconstruct") + name("numpy", "ndarray") + b"K\0\x85" + text("b") + b"\x87R"
    return empty + b"(K\1K\2\x85" + kind + b"\x89" + values + b"tb"


def bomb(folder):
    """A memo index that makes the C unpickler allocate gigabytes."""
    return b"]r" + struct.pack("<I", (1 << 31) - 1)


# -- files -------------------------------------------------------------------------------------------------------------


def rewritten(path, change):
    """The pickle of a torch zip (or a bare one) changed, everything else as it was."""
    if path.read_bytes()[:2] != b"PK":
        path.write_bytes(change(path.read_bytes()))
        return
    with zipfile.ZipFile(path) as packed:
        members = [(info.filename, packed.read(info)) for info in packed.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as packed:
        for member, data in members:
            packed.writestr(zipfile.ZipInfo(member), change(data) if member.endswith("/data.pkl") else data)


def poisoned(fixture, filename, payload):
    """payload(folder): opcodes that leave one value, run and dropped before the file's own."""

    def make(folder):
        root = folder / "checkpoint"
        shutil.copytree(FIXTURES / fixture, root)
        rewritten(root / filename, lambda pickled: pickled[:2] + payload(folder) + b"0" + pickled[2:])
        return root

    return make


INDEX = ".metadata"  # without it nothing is left that verify could judge

ARGUMENT = b"tp_comm_bootstrap_backend"  # which decides nothing


def numbered(folder):
    """An argument of Megatron whose name is a number, in one rank alone."""
    root = folder / "checkpoint"
    shutil.copytree(FIXTURES / "megatron/lion_files_tp2", root)
    name = b"X" + struct.pack("<I", len(ARGUMENT)) + ARGUMENT
    rewritten(root / "iter_0000002/mp_rank_00/model_optim_rng.pt", lambda pickled: pickled.replace(name, b"K\x7f", 1))
    return root


CASES = [
    ("N1-argument", numbered, 0, ()),
    *(
        (f"D3-{kind}", poisoned(fixture, filename, system), SHOWN, ("posix.system", filename))
        for kind, fixture, filename in KINDS
    ),
    *(
        (f"D14-build-{kind}", poisoned(fixture, filename, built), SHOWN, ("canary_module.loader", filename))
        for kind, fixture, filename in KINDS[::3]
    ),
    *(
        (f"D7-{kind}", poisoned(fixture, filename, bomb), {"*": 3, "verify": 1}, ("memo index", filename))
        for kind, fixture, filename in KINDS[1::3]
    ),
    *(
        (
            f"D17-{kind}",
            poisoned(fixture, filename, addresses),
            {"*": 3, "verify": 3 if filename.endswith(INDEX) else 1},
            ("python objects", filename),
        )
        for kind, fixture, filename in KINDS[2::3]
    ),
    *(
        (f"D25-objects-{kind}", poisoned(fixture, filename, object_array), 0, ())
        for kind, fixture, filename in KINDS[2::3]
    ),
]
