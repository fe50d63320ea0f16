"""Flex checkpoints of Paddle that lie: metadata and files that are sound pickles and say what can't be.

`CASES` as in the other tables. A sound fixture is copied and one thing is changed: a number of the metadata (which is
read and written as data by our own pickle modules), a name, a file. Nothing here unpickles.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ckpt_tool.storage.pickles import pickle_reader as pickles
from ckpt_tool.storage.pickles.pickle_writer import dumps

FIXTURES = Path(__file__).parents[2] / "fixtures" / "paddle-flex"
SHOWN = {"inspect": 0, "*": 4}  # inspect shows the name in red, everything else refuses
FOUND = {"inspect": 0, "verify": 1, "*": 3}


def copied(folder, case):
    target = folder / case
    shutil.copytree(FIXTURES / case, target)
    return target


def edited(case, change, name="0.metadata"):
    """A case whose metadata `change` has edited: the record, by its fields."""

    def make(folder):
        target = copied(folder, case)
        path = target / name
        value = pickles.load(path.read_bytes(), path=str(path)).value
        left = change(value)
        path.write_bytes(dumps(value if left is None else left, protocol=4))
        return target

    return make


def index(value, key, number=0):
    return [one for one in value.storage_metadata if one.tensor_key == key][number]


def rows(value, key, number=0):
    """(row of state_dict_metadata, index of storage_metadata) of a key's shard."""
    return value.state_dict_metadata[key][number], index(value, key, number)


def both(key, number=0, **fields):
    """Set fields of a shard in both tables."""

    def change(value):
        stated, stored = rows(value, key, number)
        for name, said in fields.items():
            for record in (stated, stored):
                if name in record.state:
                    record.state[name] = said

    return change


def stated(key, number=0, **fields):
    return lambda value: value.state_dict_metadata[key][number].state.update(fields)


def stored(key, number=0, **fields):
    return lambda value: index(value, key, number).state.update(fields)


def every_stated(key, **fields):
    def change(value):
        for row in value.state_dict_metadata[key]:
            row.state.update(fields)

    return change


def without_storage(key, number=None):
    def change(value):
        gone = [one for one in value.storage_metadata if one.tensor_key == key]
        for one in gone if number is None else gone[number : number + 1]:
            del value.storage_metadata[one]

    return change


def lies_in(key, file, number=0):
    return lambda value: value.storage_metadata.update({index(value, key, number): file})


def put(field, said):
    return lambda value: value.state.update({field: said})


def long_key(value):
    """A layer's number of 5000 digits: `int` refuses those."""
    value.state_dict_metadata[f"layers.{'9' * 5000}.w"] = value.state_dict_metadata["tp"]


def at(case, name, change):
    def make(folder):
        target = copied(folder, case)
        change(target / name if name else target)
        return target

    return make


def evil_head(path):
    """Opcodes in front of the value: a call, then POP."""
    data = path.read_bytes()
    path.write_bytes(b"\x80\x04" + b"cposix\nsystem\n(X\x04\x00\x00\x00trueu"[:-1] + b"tR0" + data[2:])


def swapped(target):
    a = target / "model_state/0_0.distcp"
    b = target / "model_state/1_0.distcp"
    kept = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(kept)


def flipped(path):
    """One bit of the first array's values."""
    data = bytearray(path.read_bytes())
    begin = data.index(b"C@", data.index(b"both")) + 2
    data[begin + 5] ^= 1
    path.write_bytes(bytes(data))


def twin_key(folder):
    """A second key of master_weight/ for one parameter, which no file holds."""
    target = copied(folder, "ema")
    path = target / "master_weight/0.metadata"
    value = pickles.load(path.read_bytes(), path=str(path)).value
    value.state_dict_metadata["mlp.weight"] = value.state_dict_metadata["mlp.weight.w_0"]
    record = index(value, "mlp.weight.w_0")
    twin = type(record)(record.name, record.args, record.state | {"tensor_key": "mlp.weight"})
    value.storage_metadata[twin] = "0_0.distcp"
    path.write_bytes(dumps(value, protocol=4))
    return target


def linked(path):
    """The folder elsewhere, and a link to it in its place."""
    moved = path.parent.parent / "elsewhere"
    path.rename(moved)
    path.symlink_to(moved)


PARTS = "parts"
TIED = "llama_tied_pp2"
CASES = [
    ("PF1 offset beyond", edited(PARTS, both("uneven", 2, global_offset=(9, 0))), 3, ("leaves the tensor", "uneven")),
    ("PF2 offset negative", edited(PARTS, both("uneven", 1, global_offset=(-3, 0))), 3, ("whole numbers", "uneven")),
    ("PF3 range beyond", edited(PARTS, both("flat", 3, flattened_range=(27, 36))), 3, ("leave the block", "flat")),
    ("PF4 range backwards", edited(PARTS, both("flat", 0, flattened_range=(9, 0))), 3, ("begin and end", "flat")),
    ("PF5 ranges overlap", edited(PARTS, both("flat", 1, flattened_range=(5, 14))), 3, ("overlap", "flat")),
    ("PF6 blocks overlap", edited(PARTS, both("uneven", 1, global_offset=(2, 0))), 3, ("overlap", "uneven")),
    ("PF7 a shard in no file", edited(PARTS, without_storage("uneven", 1)), 3, ("in no file", "uneven")),
    ("PF8 a key in no file", edited(PARTS, without_storage("tp")), 3, ("no file holds it", "tp")),
    ("PF9 a file outside", edited(PARTS, lies_in("tp", "../../secret.distcp")), 4, ("'..'", "only plain names")),
    ("PF10 an absolute file", edited(PARTS, lies_in("tp", "/etc/passwd")), 4, ("absolute",)),
    ("PF11 another rank's file", edited(PARTS, lies_in("uneven", "3_0.distcp")), 3, ("3_0.distcp", "uneven")),
    ("PF12 a file that is not there", edited(PARTS, lies_in("tp", "9_0.distcp")), 3, ("9_0.distcp", "missing")),
    ("PF13 another dtype", edited(PARTS, every_stated("uneven", dtype="float16")), 3, ("f16", "f32")),
    ("PF14 an unknown dtype", edited(PARTS, every_stated("uneven", dtype="pstring")), 3, ("pstring",)),
    ("PF15 dtypes that differ", edited(PARTS, stated("uneven", 1, dtype="float16")), 3, ("float16", "uneven")),
    ("PF16 a shape that is none", edited(PARTS, both("uneven", 1, local_shape=(2, 3))), 3, ("uneven",)),
    (
        "PF17 shapes that differ",
        edited(PARTS, stated("uneven", 1, global_shape=(11, 3))),
        3,
        ("do not agree", "uneven"),
    ),
    ("PF18 a huge shape", edited(PARTS, every_stated("uneven", global_shape=(1 << 62, 1 << 62))), 3, ("uneven",)),
    ("PF19 a rank too many", edited(PARTS, both("uneven", 1, global_offset=(3, 0, 0))), 3, ("uneven",)),
    ("PF20 flattened without range", edited(PARTS, both("flat", 1, flattened_range=None)), 3, ("flat",)),
    ("PF21 a range, not flattened", edited(PARTS, both("uneven", 1, flattened_range=(0, 9))), 3, ("uneven",)),
    ("PF22 a list for a dict", edited(PARTS, put("storage_metadata", [])), 3, ("want a dict",)),
    ("PF23 plain values", edited(PARTS, lambda value: {"a": 1}), 3, ("want paddle's metadata",)),
    ("PF24 a path of numbers", edited(PARTS, put("flat_mapping", {"tp": (1, 2)})), 3, ("path of keys",)),
    (
        "PF25 shapeless old metadata",
        edited(PARTS, stored("uneven", 1, local_shape=None, global_offset=(2, 0))),
        3,
        ("uneven",),
    ),
    ("PF26 a call in the metadata", at(PARTS, "0.metadata", evil_head), SHOWN, ("posix.system",)),
    ("PF27 a call in a data file", at(PARTS, "1_0.distcp", evil_head), SHOWN, ("posix.system",)),
    ("PF28 files of two ranks swapped", at(TIED, "", swapped), 3, ("two saves",)),
    ("PF29 replicas that differ", at("replicas", "1_0.distcp", flipped), FOUND, ("replica",)),
    ("PF30 a save under way", at(PARTS, "0.metadata.lock", lambda p: p.write_bytes(b"")), 3, ("not finished", "lock")),
    (
        "PF31 the metadata lost",
        at(TIED, "optimizer_state/0.metadata", Path.unlink),
        3,
        ("not finished", "optimizer_state"),
    ),
    ("PF32 two kinds of files", at(PARTS, "4_0.safetensors", lambda p: p.write_bytes(b"x")), 3, ("both kinds",)),
    ("PF33 the newest save unfinished", at("twice", "3.metadata", Path.unlink), 3, ("save 3 was not finished",)),
    (
        "PF34 averages that nothing places",
        at("ema_old", "master_weight", shutil.rmtree),
        3,
        ("no save in master_weight", "ema_state"),
    ),
    ("PF36 a number that Python will not read", edited(PARTS, long_key), 3, ("a key of 50", "want at most")),
    (
        "PF36 the model's folder lost",
        at(TIED, "model_state", shutil.rmtree),
        3,
        ("no save in model_state", "--lenient"),
    ),
    ("PF37 a link for a folder", at(TIED, "model_state", linked), 3, ("no save in model_state", "link")),
    ("PF35 a key that its file lacks", twin_key, 3, ("does not hold it", "mlp.weight")),
]
