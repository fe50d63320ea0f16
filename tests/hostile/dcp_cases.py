"""Hostile DCP folders, rows D12 and D13 of the threat list, by small edits of a sound folder.

`CASES` lists `(row, make(folder) -> path, exit code, words of the message)`; the exit code may be a dict by verb, `"*"`
for the others. The sound folder holds `model.w`, F32 (4, 3), rows 0-1 in `__0_0.distcp` and 2-3 in `__1_0.distcp`, and
the object `epoch`. Payloads would create a file `canary` in the folder, if anything ran them. Nothing here uses torch,
and nothing here unpickles: metadata is spelled opcode by opcode.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile

SHOWN = {"inspect": 0, "*": 4}  # inspect shows the name in red, everything else refuses
META = "torch.distributed.checkpoint.metadata"
STORE = "torch.distributed.checkpoint.filesystem"


# -- opcodes -----------------------------------------------------------------------------------------------------------


def plain(value):
    """The opcodes of a plain value, without PROTO, FRAME and STOP. Raw(...) stands for itself."""
    if isinstance(value, Raw):
        return value.code
    if isinstance(value, dict):
        return b"}(" + b"".join(plain(key) + plain(item) for key, item in value.items()) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(plain, value)) + b"e"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(plain, value)) + b"t"
    return pickle.dumps(value, protocol=2)[2:-1].replace(b"q\x00", b"")


class Raw:
    def __init__(self, code):
        self.code = code

    def __hash__(self):
        return hash(self.code)


def name(module, qualname):
    return b"c" + f"{module}\n{qualname}\n".encode()


def record(module, qualname, **state):
    return Raw(name(module, qualname) + b")\x81" + plain(state) + b"b")


def call(module, qualname, *args):
    return Raw(name(module, qualname) + plain(tuple(args)) + b"R")


def size(*numbers):
    return call("torch", "Size", numbers)


def touch(folder):
    return call("posix", "system", f"touch {folder}/canary")


# -- items -------------------------------------------------------------------------------------------------------------


def zipped(data_pkl, data=None):
    out = io.BytesIO()
    members = [("data.pkl", b"\x80\x02" + data_pkl + b"."), ("byteorder", b"little"), ("version", b"3\n")]
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as packed:
        for member, value in (*members, *([("data/0", data)] if data is not None else [])):
            packed.writestr(zipfile.ZipInfo("archive/" + member), value)
    return out.getvalue()


def tensor(rows, start, kind="FloatStorage"):
    """A zip of a bare (rows, 3) tensor."""
    storage = b"(" + plain("storage") + name("torch", kind) + plain("0") + plain("cpu") + plain(rows * 3) + b"tQ"
    args = storage + plain(0) + plain((rows, 3)) + plain((3, 1)) + b"\x89" + name("collections", "OrderedDict") + b")R"
    code = name("torch._utils", "_rebuild_tensor_v2") + b"(" + args + b"tR"
    return zipped(code, struct.pack(f"<{rows * 3}f", *range(start, start + rows * 3)))


class Save:
    """A sound save; the rows edit its parts before it is written."""

    def __init__(self):
        self.blobs = {"__0_0.distcp": [tensor(2, 0), zipped(plain(7))], "__1_0.distcp": [tensor(2, 6)]}
        self.chunks = [[(0, 0), (2, 3)], [(2, 0), (2, 3)]]
        self.size = (4, 3)
        self.dtype = "float32"
        self.planner = {"model.w": ("model", "w"), "epoch": ("epoch",)}
        self.info = {}  # key -> what to change in its _StorageInfo
        self.without = set()  # items that storage_data lacks
        self.meta = Raw(b"N")
        self.version = "1.0.0"

    def items(self):
        """(key, fqn, offset, file, byte, length)"""
        first = len(self.blobs["__0_0.distcp"][0])
        second = len(self.blobs["__0_0.distcp"][1])
        yield "w0", "model.w", self.chunks[0][0], "__0_0.distcp", 0, first
        yield "w1", "model.w", self.chunks[1][0], "__1_0.distcp", 0, len(self.blobs["__1_0.distcp"][0])
        yield "epoch", "epoch", None, "__0_0.distcp", first, second

    def metadata(self):
        properties = Raw(
            name(META, "TensorProperties")
            + b")\x81"
            + b"("
            + name("torch", self.dtype)
            + call("torch.serialization", "_get_layout", "torch.strided").code
            + b"\x89"
            + call(META, "_MEM_FORMAT_ENCODING", 0).code
            + b"\x89tb"
        )
        chunks = [record(META, "ChunkStorageMetadata", offsets=size(*o), sizes=size(*n)) for o, n in self.chunks]
        states = {
            "model.w": record(
                META, "TensorStorageMetadata", properties=properties, size=size(*self.size), chunks=chunks
            ),
            "epoch": Raw(name(META, "BytesStorageMetadata") + b")\x81"),
        }
        storage = {}
        for key, fqn, offset, file, at, length in self.items():
            if key not in self.without:
                index = record(
                    META, "MetadataIndex", fqn=fqn, offset=None if offset is None else size(*offset), index=0
                )
                info = {"relative_path": file, "offset": at, "length": length} | self.info.get(key, {})
                storage[index] = record(STORE, "_StorageInfo", **info)
        return record(
            META,
            "Metadata",
            state_dict_metadata=states,
            planner_data=self.planner,
            storage_data=storage,
            storage_meta=self.meta,
            version=self.version,
        )

    def write(self, folder, metadata=None, filename=".metadata"):
        for file, blobs in self.blobs.items():
            (folder / file).write_bytes(b"".join(blobs))
        code = self.metadata().code if metadata is None else metadata
        (folder / filename).write_bytes(b"\x80\x04" + code + b".")
        return folder


# -- rows --------------------------------------------------------------------------------------------------------------


def edit(change):
    def make(folder):
        save = Save()
        change(save, folder)
        return save.write(folder)

    return make


def setting(**values):
    return edit(lambda save, folder: [setattr(save, key, value) for key, value in values.items()])


def info(key, **values):
    return edit(lambda save, folder: save.info.update({key: values}))


def payload(folder):
    return Save().write(folder, touch(folder).code)


def popped(folder):
    return Save().write(folder, touch(folder).code + b"0" + Save().metadata().code)


def second_stream(folder):
    Save().write(folder)
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes() + b"\x80\x02" + touch(folder).code + b".")
    return folder


def in_object(save, folder):
    save.blobs["__0_0.distcp"][1] = zipped(plain({"epoch": touch(folder)}))


def in_tensor_item(save, folder):
    save.blobs["__1_0.distcp"][0] = zipped(touch(folder).code)


def unfinished(folder):
    save = Save().write(folder)
    (folder / ".metadata").unlink()
    return save


def overwriting(folder):
    Save().write(folder)
    return Save().write(folder, filename=".metadata.tmp")


def lost(folder):
    Save().write(folder)
    (folder / "__1_0.distcp").unlink()
    return folder


def link(folder):
    lost(folder)
    os.symlink("/dev/zero", folder / "__1_0.distcp")
    return folder


def fifo(folder):
    lost(folder)
    os.mkfifo(folder / "__1_0.distcp")
    return folder


def two_ranks(other):
    """`use_collectives=False`: a metadata file a rank; the second edited."""

    def make(folder):
        Save().write(folder, filename="__0.metadata")
        save = Save()
        other(save)
        return save.write(folder, filename="__1.metadata")

    return make


# `verify` counts damage of a file among others as a finding
DAMAGED = {"*": 3, "verify": 1}

CASES = [
    ("D13-sound", setting(), 0, ()),
    ("D13-without-planner-data", setting(planner=None), 0, ()),
    ("D13-without-version", setting(version=None), 0, ()),
    ("D12-whole", payload, 4, ("posix.system", ".metadata", "opcode")),
    ("D12-popped", popped, SHOWN, ("posix.system",)),
    ("D12-beside", edit(lambda save, folder: setattr(save, "meta", touch(folder))), SHOWN, ("posix.system",)),
    ("D12-planner", edit(lambda save, folder: setattr(save, "planner", touch(folder))), 4, ("posix.system",)),
    ("D12-second-stream", second_stream, 4, ("follow",)),
    ("D12-in-object-item", edit(in_object), SHOWN, ("posix.system", "epoch")),
    ("D12-in-tensor-item", edit(in_tensor_item), SHOWN, ("posix.system", "__1_0.distcp")),
    ("D13-another-class", lambda folder: Save().write(folder, plain({"a": 1})), 3, ("metadata is dict",)),
    ("D13-outside", setting(chunks=[[(0, 0), (2, 3)], [(3, 0), (2, 3)]]), 3, ("model.w", "leaves the tensor")),
    ("D13-outside-columns", setting(chunks=[[(0, 0), (2, 3)], [(2, 1), (2, 3)]]), 3, ("leaves the tensor",)),
    ("D13-rank", setting(chunks=[[(0, 0), (2, 3)], [(2,), (2,)]]), 3, ("model.w",)),
    ("D13-negative-offset-in-tensor", setting(chunks=[[(0, 0), (2, 3)], [(-2, 0), (2, 3)]]), 3, ("-2", ".metadata")),
    ("D13-overlap", setting(chunks=[[(0, 0), (2, 3)], [(1, 0), (2, 3)]]), 3, ("overlap", "__1_0.distcp")),
    ("D13-gap", setting(size=(5, 3)), 3, ("3 of 15 elements",)),
    ("D13-missing-item", setting(without={"w1"}), 3, ("no item", "model.w")),
    ("D13-missing-object", setting(without={"epoch"}), 3, ("no item", "epoch")),
    ("D13-volume", setting(chunks=[[(0, 0), (1, 3)], [(1, 0), (3, 3)]]), DAMAGED, ("model.w", "__0_0.distcp")),
    ("D13-huge", setting(size=(1 << 62, 1 << 62)), 3, ("in no file",)),
    ("D13-beyond-2-63", setting(size=(1 << 70, 3)), 3, ("size",)),
    ("D13-real-number", setting(size=(4.0, 3)), 3, ()),
    ("D13-rank-65", setting(size=(1,) * 65), 3, ()),
    ("D13-dtype", setting(dtype="float64"), DAMAGED, ("model.w", "f64")),
    ("D13-quantised", setting(dtype="qint8"), 3, ("qint8",)),
    ("D13-dotdot", info("w1", relative_path="../x"), 4, ("../x", ".metadata")),
    ("D13-absolute", info("w1", relative_path="/etc/passwd"), 4, ("absolute",)),
    ("D13-nested-dotdot", info("epoch", relative_path="a/../../x"), 4, ("..",)),
    ("D13-empty-path", info("w1", relative_path=""), 4, ("empty",)),
    ("D13-path-is-a-number", info("w1", relative_path=7), 3, ("relative_path",)),
    ("D13-negative-byte", info("w1", offset=-1), 3, ("model.w", "-1")),
    ("D13-negative-length", info("w1", length=-1), 3, ("model.w",)),
    ("D13-beyond-the-file", info("w1", offset=1 << 40), DAMAGED, ("__1_0.distcp", "model.w")),
    ("D13-too-long", info("w1", length=1 << 40), DAMAGED, ("__1_0.distcp", "model.w")),
    ("D13-too-short", info("w1", length=40), DAMAGED, ("__1_0.distcp", "model.w")),
    ("D13-shifted", info("w1", offset=1, length=400), DAMAGED, ("__1_0.distcp",)),
    ("D13-byte-is-text", info("w1", offset="0"), 3, ("model.w",)),
    ("D13-zstd", info("w0", transform_descriptors=["zstd"]), 3, ("zstd",)),
    ("D13-planner-list", setting(planner=[1]), 3, ("planner_data",)),
    ("D13-planner-path", setting(planner={"model.w": "model.w", "epoch": ("epoch",)}), 3, ("planner_data", "path")),
    ("D13-planner-number", setting(planner={"model.w": ("model", -1), "epoch": ("epoch",)}), 3, ("planner_data",)),
    ("D13-lost-file", lost, 3, ("1 of 2 files", "__1_0.distcp")),
    ("D13-symlink", link, 4, ("__1_0.distcp",)),
    ("D13-fifo", fifo, 4, ("__1_0.distcp",)),
    ("D13-unfinished", unfinished, 3, ("not finished",)),
    ("D13-overwriting", overwriting, 3, ("not finished", ".metadata.tmp")),
    ("D13-ranks-agree", two_ranks(lambda save: None), 0, ()),
    ("D13-ranks-differ", two_ranks(lambda save: setattr(save, "size", (6, 3))), 3, ("another rank", "model.w")),
]
