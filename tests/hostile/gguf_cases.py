"""Hostile GGUF files: lengths, counts, types, nesting, offsets and names that no sound file has.

`CASES` lists `(row, make(folder) -> path, exit code, words of the message)`. The sound file that
they edit holds `a` and `b`, F32 (2, 8). Nothing here uses the gguf package.
"""

from __future__ import annotations

import struct

BIG = 1 << 62


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def info(name, dims, kind, offset):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


NAME = ("general.architecture", struct.pack("<I", 8) + text("llama"))
A = ("a", (8, 2), 0, 0)
B = ("b", (8, 2), 0, 64)


def built(pairs=(NAME,), tensors=(A, B), version=3, count=None, many=None, values=128, magic=b"GGUF"):
    head = magic + struct.pack(
        "<IQQ", version, len(tensors) if count is None else count, len(pairs) if many is None else many
    )
    head += b"".join(text(key) + value for key, value in pairs) + b"".join(info(*row) for row in tensors)
    return head + bytes(-len(head) % 32) + bytes(range(128))[:values]


def file(**changes):
    def make(folder):
        path = folder / "model.gguf"
        path.write_bytes(built(**changes))
        return path

    return make


def cut(nbytes):
    def make(folder):
        path = folder / "model.gguf"
        path.write_bytes(built()[:nbytes])
        return path

    return make


def splits(*states, names=None):
    """Files of a split, each with what it states: (no, count, tensors)."""

    def make(folder):
        for number, (no, count, total) in enumerate(states):
            words = zip(("split.no", "split.count", "split.tensors.count"), (2, 2, 5), (no, count, total), strict=True)
            pairs = [
                (key, struct.pack("<I", kind) + struct.pack("<H" if kind == 2 else "<i", value))
                for key, kind, value in words
            ]
            name = names[number] if names else f"m-{number + 1:05d}-of-{len(states):05d}.gguf"
            tensors = [(f"t{number}", (8, 2), 0, 0)]
            (folder / name).write_bytes(built([NAME, *pairs], tensors, values=64))
        return folder

    return make


def array(kind, count, rest=b""):
    return struct.pack("<IIQ", 9, kind, count) + rest


def nested(deep):
    value = array(4, 0)[4:]
    for _ in range(deep):
        value = struct.pack("<IQ", 9, 1) + value
    return struct.pack("<I", 9) + value


def pair(key, value):
    return {"pairs": (NAME, (key, value))}


def u32(number):
    return struct.pack("<II", 4, number)


def double(number):
    return struct.pack("<Id", 12, number)


def config(architecture, tensors=(A, B), values=128, **own):
    """Metadata of which the model's config is made. own: pairs of the architecture's."""
    name = ("general.architecture", struct.pack("<I", 8) + text(architecture))
    pairs = (name, *((f"{architecture}.{key}", value) for key, value in own.items()))
    return file(pairs=pairs, tensors=tensors, values=values)


COUNT = "attention.head_count"
WIDTH = "attention.key_length"
HEADS, NO_HEADS, WIDE = {COUNT: u32(4), WIDTH: u32(8)}, {COUNT: u32(0), WIDTH: u32(8)}, {WIDTH: u32(1 << 31)}
TURNED, LARGEST = {"rope.dimension_count": u32(8)}, {"block_count": u32(46)}
ROPE = ("rope_freqs.weight", (8,), 0, 0)
BEHIND_ROPE = ("b", (8, 2), 0, 32)
# the model's config is made of it where other names are wanted, and there alone
MADE = {"convert": 3, "*": 0}
HUB = ("--to", "safetensors")
NAMED = (MADE, "want a number", HUB)
STRANGE = (MADE, "has a tensor a", HUB)
NO_ROPE = (MADE, "no rope that Llama 3 has", HUB)
CASES = [
    ("G1 cut in the head", cut(20), 3, "bytes"),
    ("G2 cut in the pairs", cut(50), 3, "cut short"),
    ("G3 cut in the table", cut(110), 3, "cut short"),
    ("G4 cut in the values", cut(200), 3, "of the data"),
    ("G5 version 1", file(version=1), 3, "version 1"),
    ("G6 version 4", file(version=4), 3, "version 4"),
    ("G7 count of tensors", file(count=BIG), 3, "tensors and"),
    ("G8 count of pairs", file(many=BIG), 3, "metadata pairs"),
    ("G9 length of a key", file(pairs=((b"", b""),), many=1), 3, "is empty"),
    ("G10 length of a string", file(**pair("x", struct.pack("<IQ", 8, BIG))), 3, "bytes"),
    ("G11 length of an array", file(**pair("x", array(4, BIG))), 3, "values"),
    ("G12 length of an array of strings", file(**pair("x", array(8, 1 << 40))), 3, "values"),
    ("G13 a string in a long array", file(**pair("x", array(8, 100, struct.pack("<Q", BIG) * 99))), 3, "of 46116"),
    ("G14 type of a value", file(**pair("x", struct.pack("<II", 77, 0))), 3, "type 77"),
    ("G15 type of an array", file(**pair("x", array(77, 1))), 3, "type 77"),
    ("G16 nesting", file(**pair("x", nested(900))), 3, "arrays in arrays"),
    ("G17 a key twice", file(pairs=(NAME, NAME)), 3, "appears there twice"),
    ("G18 alignment 0", file(**pair("general.alignment", struct.pack("<II", 4, 0))), 3, "power of two"),
    ("G19 alignment 24", file(**pair("general.alignment", struct.pack("<II", 4, 24))), 3, "power of two"),
    ("G20 alignment in words", file(**pair("general.alignment", struct.pack("<I", 8) + text("x"))), 3, "power of two"),
    ("G21 dims", file(tensors=(A, ("b", (1,) * 900, 0, 64))), 3, "900 dims"),
    ("G22 a shape that overflows", file(tensors=(A, ("b", (1 << 32, 1 << 31), 0, 64))), 3, "out of range"),
    ("G23 a shape beyond the file", file(tensors=(A, ("b", (8, 1 << 30), 0, 64))), 3, "of the data"),
    ("G24 type of a tensor", file(tensors=(A, ("b", (8, 2), 99, 64))), 3, "type 99"),
    ("G25 a type that was given up", file(tensors=(A, ("b", (32, 2), 4, 64))), 3, "type 4"),
    ("G26 rows that are no blocks", file(tensors=(A, ("b", (33, 1), 8, 64))), 3, "blocks of 32"),
    ("G27 an offset beyond the file", file(tensors=(A, ("b", (8, 2), 0, 1 << 40))), 3, "of the data"),
    ("G28 an offset that wraps", file(tensors=(A, ("b", (8, 2), 0, (1 << 64) - 64))), 3, "of the data"),
    ("G29 an unaligned offset", file(tensors=(A, ("b", (8, 2), 0, 36))), 3, "multiple of 32"),
    ("G30 overlap", file(tensors=(A, ("b", (8, 2), 0, 32))), 3, "before a ends"),
    ("G31 a tensor twice", file(tensors=(A, ("a", (8, 2), 0, 64))), 3, "appears there twice"),
    ("G32 a name that is no text", file(tensors=(A, (b"\xff\xfe", (8, 2), 0, 64))), 3, "not UTF-8"),
    ("G33 a name as long as the file", file(tensors=(A, ("b" * 70_000, (8, 2), 0, 64))), 3, "at most 65535"),
    ("G34 a split without a file", splits((0, 2, 2), names=["m-00001-of-00002.gguf"]), 3, "missing"),
    ("G35 a split of another count", splits((0, 2, 2), (1, 3, 2)), 3, "split.count is 3"),
    ("G36 files of a split changed about", splits((1, 2, 2), (0, 2, 2)), 3, "split.no is 1"),
    ("G37 a split that lacks tensors", splits((0, 2, 9), (1, 2, 9)), 3, "split.tensors.count is 9"),
    ("G38 two models", splits((0, 1, 1), (0, 1, 1), names=["one.gguf", "two.gguf"]), 3, "2 GGUF models"),
    ("G40 a number that is a list", config("llama", block_count=array(9, 1, array(4, 0)[4:])), *NAMED),
    ("G41 a count that is no whole number", config("llama", block_count=struct.pack("<If", 6, 2.0)), *NAMED),
    ("G42 an epsilon beyond fp32", config("llama", **{"attention.layer_norm_rms_epsilon": double(1e300)}), *NAMED),
    ("G43 a base beyond fp32", config("llama", **{"rope.freq_base": double(1e300)}), *STRANGE),
    ("G44 a width of 0", config("phi3", embedding_length=u32(0), **HEADS, **TURNED), *STRANGE),
    ("G45 no heads", config("gemma2", embedding_length=u32(8), **LARGEST, **NO_HEADS), *STRANGE),
    ("G46 a model without a width", config("gemma2", **LARGEST, **HEADS), *STRANGE),
    ("G47 rope without a width", config("llama", (ROPE, BEHIND_ROPE), 96), *NO_ROPE),
    ("G48 rope of the widest head", config("llama", (ROPE, BEHIND_ROPE), 96, **WIDE), *NO_ROPE),
    ("G49 a count that is too small", file(count=1), 3, "more rows than are counted"),
    ("G50 a row that was taken out", file(tensors=(A,)), 3, "after the last tensor"),
    ("G51 values in another order", file(tensors=(("a", (8, 2), 0, 64), ("b", (8, 2), 0, 0))), 3, "begins at byte"),
    ("G52 a type of fewer bytes", file(tensors=(("a", (8, 2), 1, 0), B)), 3, "begins at byte"),
    ("G53 an alignment that was not used", file(**pair("general.alignment", u32(1))), 3, "after the last tensor"),
    ("G39 files that are not there", splits((0, 9999, 1), names=["m-00001-of-09999.gguf"]), 3, "9998 of 9999"),
]  # fmt: skip
