"""Hostile pickles, table D of the threat list row by row, made opcode by opcode.

`CASES` lists `(row, make(folder) -> path, exit code, words of the message)`; the exit code may be a dict by verb, `"*"`
for the others. Payloads would create a file `canary` in the folder, if anything ran them. Nothing here uses torch, and
nothing here unpickles.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile

FLOATS = struct.pack("<6f", *range(6))
SHOWN = {"inspect": 0, "*": 4}  # inspect shows the name in red, everything else refuses
UNREAD = {"inspect": 0, "*": 3}  # inspect names what can't be read, everything else refuses


def text(value):
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def plain(value):
    return pickle.dumps(value, protocol=2)[2:-1]


def name(module, qualname):
    return b"c" + f"{module}\n{qualname}\n".encode()


def named4(module, qualname):
    """STACK_GLOBAL, which takes dotted names."""
    return text(module) + text(qualname) + b"\x93"


def storage(key="0", kind="FloatStorage", location="cpu", numel=6):
    return b"(" + text("storage") + name("torch", kind) + text(key) + text(location) + b"K" + bytes([numel]) + b"tQ"


def tensor(ref=None):
    args = (ref or storage()) + b"K\0K\2K\3\x86K\3K\1\x86\x89" + name("collections", "OrderedDict") + b")R"
    return name("torch._utils", "_rebuild_tensor_v2") + b"(" + args + b"tR"


def state(**values):
    return b"\x80\x02}(" + b"".join(text(key) + value for key, value in values.items()) + b"u."


def beside(value, proto=2):
    """A state dict with one good tensor and, beside it, the opcodes of `value`."""
    return b"\x80" + bytes([proto]) + state(w=tensor(), x=value)[2:]


def zipped(data_pkl, data=FLOATS):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as packed:
        for member, value in (("data.pkl", data_pkl), ("byteorder", b"little"), ("data/0", data), ("version", b"3\n")):
            packed.writestr(zipfile.ZipInfo("model/" + member), value)
    return out.getvalue()


def put(stream, filename="model.pt", wrap=zipped):
    """stream: bytes, or a function of the folder (for payloads that name the canary)."""

    def make(folder):
        path = folder / filename
        path.write_bytes(wrap(stream(folder) if callable(stream) else stream))
        return path

    return make


def raw(data):
    return data


def touch(folder):
    return text(f"touch {folder}/canary")


def called(module, qualname, *args, call=b"R"):
    """`module.qualname(*args)`, args as opcodes."""
    return name(module, qualname) + b"(" + b"".join(args) + b"t" + call


def system(folder):
    return called("posix", "system", touch(folder))


def evil(module, qualname):
    """The name called beside a good tensor."""
    return put(lambda folder: beside(called(module, qualname, touch(folder))))


GADGETS = [
    ("os", "system"),
    ("posix", "system"),
    ("nt", "system"),
    ("builtins", "eval"),
    ("builtins", "exec"),
    ("__builtin__", "execfile"),
    ("builtins", "getattr"),
    ("builtins", "__import__"),
    ("builtins", "open"),
    ("builtins", "compile"),
    ("builtins", "breakpoint"),
    ("builtins", "map"),
    ("builtins", "type"),
    ("subprocess", "Popen"),
    ("subprocess", "check_output"),
    ("importlib", "import_module"),
    ("runpy", "run_path"),
    ("pkgutil", "resolve_name"),
    ("operator", "attrgetter"),
    ("operator", "methodcaller"),
    ("functools", "partial"),
    ("itertools", "starmap"),
    ("codecs", "decode"),
    ("socket", "create_connection"),
    ("shutil", "rmtree"),
    ("webbrowser", "open"),
    ("pty", "spawn"),
    ("timeit", "timeit"),
    ("cProfile", "runctx"),
    ("pdb", "run"),
    ("code", "InteractiveInterpreter"),
    ("asyncio", "run"),
    ("ctypes", "CDLL"),
    ("pickle", "loads"),
    ("_pickle", "loads"),
    ("marshal", "loads"),
    ("types", "FunctionType"),
    ("types", "CodeType"),
    ("sys", "settrace"),
    ("logging", "config.listen"),
    ("doctest", "testsource"),
    ("bdb", "Bdb"),
    ("urllib.request", "urlopen"),
    ("torch.hub", "load"),
    ("torch.hub", "load_state_dict_from_url"),
    ("torch", "load"),
    ("torch.serialization", "load"),
    ("torch.jit", "load"),
    ("torch.jit", "CompilationUnit"),
    ("torch.ops", "load_library"),
    ("torch._C", "_import_ir_module"),
    ("torch.storage", "_load_from_bytes"),
    ("torch.package", "PackageImporter"),
    ("torch.utils.cpp_extension", "load"),
    ("torch.utils._config_module", "ConfigModule"),
    ("torch.utils.collect_env", "run"),
    ("torch.utils.data.datapipes.utils.decoder", "basichandlers"),
    ("torch.utils.bottleneck.__main__", "run_cprofile"),
    ("torch._dynamo.guards", "GuardBuilder"),
    ("torch._inductor.codecache", "compile_file"),
    ("torch.fx.experimental.symbolic_shapes", "ShapeEnv"),
    ("torch.distributed.rpc", "rpc_sync"),
    ("torch.multiprocessing", "spawn"),
    ("torch.testing._internal.common_utils", "run_tests"),
    ("torch.nn.functional", "gelu"),
    ("numpy.f2py.crackfortran", "getlincoef"),
    ("numpy.f2py.diagnose", "run_command"),
    ("numpy.testing._private.utils", "runstring"),
    ("numpy", "load"),
    ("numpy", "fromfile"),
    ("numpy", "memmap"),
    ("numpy.ctypeslib", "load_library"),
    ("pandas", "read_pickle"),
    ("joblib", "load"),
    ("idlelib.run", "Executive"),
    ("lib2to3.pgen2.grammar", "Grammar"),
    ("ensurepip", "_run_pip"),
    ("site", "main"),
    ("transformers.utils.hub", "cached_file"),
    ("transformers.dynamic_module_utils", "get_class_in_module"),
    ("accelerate.commands.launch", "simple_launcher"),
    ("deepspeed.launcher.runner", "main"),
    ("megatron.core.utils", "some_function"),
    ("paddle.hub", "load"),
    ("paddle.utils.cpp_extension", "load"),
    ("unknown_module", "Thing"),
    ("", "x"),
    ("", ""),
]


def memo_tricks(folder):
    """`posix.system` put together from the memo, under a decoy (picklescan issue 22)."""
    parts = text("posix") + b"q\x050" + text("collections") + b"q\x060" + text("system") + b"q\x070"
    head = b"\x80\x04" + b"Nq\x00q\x01q\x02q\x03q\x04"
    return head + parts + b"h\x05h\x07\x93" + touch(folder) + b"\x85R" + b"."


def instance(folder):
    return b"\x80\x02(" + touch(folder) + b"iposix\nsystem\n."


def object_(folder):
    return b"\x80\x02(" + name("posix", "system") + touch(folder) + b"o."


def extended(folder):
    return beside(name("subprocess", "Popen") + b"(" + touch(folder) + b"t}" + text("shell") + b"\x88s\x92", proto=4)


def popped(folder):
    """The result is thrown away; what is left looks innocent (fickling)."""
    return b"\x80\x02" + system(folder) + b"0" + state(w=tensor())[2:]


def in_a_key(folder):
    return b"\x80\x02}(" + system(folder) + tensor() + b"u."


def built(folder):
    """A state that asks for code: BUILD on an object of a known class."""
    return beside(name("argparse", "Namespace") + b")\x81}" + text("x") + system(folder) + b"sb")


def in_a_tensor(folder):
    """As the backward hooks of a tensor."""
    return state(w=tensor().replace(name("collections", "OrderedDict") + b")R", system(folder)))


def laughs():
    """Sixty tuples of two of the one before: 2^60 parts when written out."""
    out = b"\x80\x02" + text("lol") + b"\x85q\x00"
    for i in range(60):
        out += b"0h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1])
    return out + b"."


def wide_laughs():
    """One list of 100,000 numbers in 100,000 places: 10^10 parts in half a megabyte."""
    items = b"](" + b"K\1" * 100_000 + b"e"
    return b"\x80\x02" + items + b"q\x000](" + b"h\x00" * 100_000 + b"e."


def long_laughs():
    """One text of a megabyte in 100,000 places."""
    return b"\x80\x02" + text("x" * 1_000_000) + b"q\x000](" + b"h\x00" * 100_000 + b"e."


def itself():
    return b"\x80\x02]q\x00h\x00a."


def itself_by_a_tuple():
    return b"\x80\x02]q\x00(h\x00t\x85a."


def deep_tuples():
    return b"\x80\x02)" + b"\x85" * 100_000 + b"."


def deep_lists():
    return b"\x80\x02" + b"(" * 100_000 + b"l" * 100_000 + b"."


def deep_key():
    """A dict key nested a million deep: hashing it would end the process."""
    return b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns."


def memory():
    """`]replace.` and its like: memo indexes that make the C unpickler allocate gigabytes (CPython 115952)."""
    return b"\x80\x02]r" + struct.pack("<I", (1 << 31) - 1) + b"."


def constructors():
    """`copyreg.__newobj__` of itself, of itself, ...: a reader that recursed would run out of stack."""
    return b"\x80\x02" + name("copyreg", "__newobj__") + b"q\x00(" + b"h\x00" * 5000 + b"tR."


def copies():
    """One long list, copied again and again by `builtins.list`."""
    items = b"](" + b"N" * 100_000 + b"e"
    return b"\x80\x02" + items + b"q\x00" + name("builtins", "list") + b"q\x010" + b"h\x01h\x00\x85R" * 20_000 + b"."


def second_stream(folder):
    return state(w=tensor()) + b"\x80\x02" + system(folder) + b"."


def before_an_error(folder):
    return b"\x80\x02" + system(folder) + b"\xff\xff\xff"


def opaque(module, qualname, **fields):
    out = name(module, qualname) + b")\x81"
    if fields:
        out += b"}(" + b"".join(text(key) + value for key, value in fields.items()) + b"ub"
    return out


def meta_tensor():
    """A tensor of 2 x 3 without values, as an offloaded model's state dict has them."""
    shape = name("torch", "Size") + b"K\2K\3\x86\x85R"
    return called(
        "torch._utils", "_rebuild_meta_tensor_no_storage", name("torch", "float32"), shape, b"K\3K\1\x86", b"\x89"
    )


def listed(*values):
    return b"](" + b"".join(values) + b"e"


def array(dtype, data, order=b"<"):
    """numpy.ndarray of 2 elements; data as opcodes."""
    kind = (
        called("numpy", "dtype", text(dtype), b"\x89\x88")
        + b"(K\3"
        + text(order.decode())
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    )
    empty = called("numpy.core.multiarray", "_reconstruct", name("numpy", "ndarray"), b"K\0\x85", text("b"))
    return empty + b"(K\1K\2\x85" + kind + b"\x89" + data + b"tb"


def safetensors():
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + FLOATS


def metadata_payload(folder):
    return b"\x80\x04" + system(folder) + b"."


def dcp_folder(stream):
    """A folder that looks like DCP, with this `.metadata`."""

    def make(folder):
        (folder / "__0_0.distcp").write_bytes(zipped(b"\x80\x02" + tensor() + b"."))
        (folder / ".metadata").write_bytes(stream(folder) if callable(stream) else stream)
        return folder

    return make


class Name(str):
    """A global, `module name`."""


class Spelled(pickle._Pickler):
    """Pickles our stand-ins under the names of torch's classes, which nobody has to import."""

    def reducer_override(self, obj):
        return obj if isinstance(obj, Name) else NotImplemented

    def save_global(self, obj, name=None):
        module, qualname = obj.split() if isinstance(obj, Name) else (obj.__module__, obj.__name__)
        self.write(globals()["name"](module, qualname))
        self.memoize(obj)


def stand_in(module, qualname):
    return type(qualname, (), {"__module__": module})


_DCP = "torch.distributed.checkpoint"
METADATA, TENSOR, CHUNK, INDEX, PROPERTIES = (
    stand_in(f"{_DCP}.metadata", each)
    for each in ("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "MetadataIndex", "TensorProperties")
)
INFO = stand_in(f"{_DCP}.filesystem", "_StorageInfo")


def made(kind, **fields):
    out = kind()
    out.__dict__.update(fields)
    return out


def metadata(
    shape=(4, 3), chunks=(((0, 0), (2, 3)), ((2, 0), (2, 3))), places=None, planner=None, tensors=None, before=b""
):
    """The `.metadata` of one tensor `w` in boxes (offset, shape). places: (file, offset, length) of each box."""
    item = len(ITEM)
    places = places or [("__0_0.distcp", i * item, item) for i in range(len(chunks))]
    properties = made(PROPERTIES, dtype=Name("torch float32"), layout=None, requires_grad=False, pin_memory=False)
    boxes = [made(CHUNK, offsets=offset, sizes=size) for offset, size in chunks]
    tensor_ = made(TENSOR, properties=properties, size=shape, chunks=boxes)
    storage = {
        made(INDEX, fqn="w", offset=chunks[i][0], index=i): made(INFO, relative_path=file, offset=at, length=nbytes)
        for i, (file, at, nbytes) in enumerate(places)
    }
    planner = {"w": ("w",)} if planner is None else planner
    whole = made(
        METADATA,
        state_dict_metadata={"w": tensor_} if tensors is None else tensors,
        planner_data=planner,
        storage_data=storage,
        storage_meta=None,
        version="1.0.0",
    )
    out = io.BytesIO()
    Spelled(out, protocol=4).dump(whole)
    return out.getvalue()[:2] + before + out.getvalue()[2:]


ITEM = zipped(b"\x80\x02" + tensor() + b".")


def saved(before=None, **changes):
    """A DCP folder of two boxes of [2, 3]; `before`: opcodes of the folder, run and dropped before the metadata."""

    def make(folder):
        (folder / "__0_0.distcp").write_bytes(ITEM * 2)
        payload = before(folder) + b"0" if before else b""
        (folder / ".metadata").write_bytes(metadata(before=payload, **changes))
        return folder

    return make


def box(*offset_and_shape):
    return tuple((tuple(offset), tuple(shape)) for offset, shape in offset_and_shape)


# `verify` counts damage of a file among others as a finding
DAMAGED = {"*": 3, "verify": 1}

CASES = [
    ("D0-sound", put(state(w=tensor())), 0, ()),
    *((f"D1-D2-{module}.{qualname}", evil(module, qualname), SHOWN, (qualname,)) for module, qualname in GADGETS),
    ("D1-value-only", put(beside(name("posix", "system"))), SHOWN, ("posix.system", "opcode")),
    ("D2-memo", put(memo_tricks), SHOWN, ("posix.system",)),
    ("D2-inst", put(instance), SHOWN, ("posix.system",)),
    ("D2-obj", put(object_), SHOWN, ("posix.system",)),
    ("D2-newobj-ex", put(extended), SHOWN, ("subprocess.popen",)),
    ("D2-ext1", put(beside(b"\x82\x05)R")), SHOWN, ("copyreg",)),
    ("D2-ext4", put(beside(b"\x84\x05\0\0\0)R")), SHOWN, ("copyreg",)),
    (
        "D2-call-of-a-call",
        put(
            lambda folder: beside(
                called("operator", "methodcaller", text("system"), touch(folder)) + name("posix", "error") + b"\x85R"
            )
        ),
        SHOWN,
        ("operator.methodcaller",),
    ),
    ("D2-in-a-key", put(in_a_key), SHOWN, ("posix.system",)),
    ("D2-in-a-state", put(built), SHOWN, ("posix.system",)),
    ("D2-in-a-tensor", put(in_a_tensor), SHOWN, ("posix.system",)),
    (
        "D2-getattr-chain",
        put(beside(called("builtins", "getattr", name("torch", "float32"), text("__class__")))),
        SHOWN,
        ("getattr",),
    ),
    ("D3-popped", put(popped), SHOWN, ("posix.system",)),
    ("D4-second-stream", put(second_stream), 4, ("follow",)),
    ("D4-junk", put(state(w=tensor()) + b"junk"), 4, ("follow",)),
    ("D5-before-an-error", put(before_an_error), 4, ("posix.system", "broken")),
    ("D6-setitem-on-list", put(beside(b"]" + text("a") + b"Ns")), 3, ("setitem on a list",)),
    ("D6-setitem-on-tensor", put(beside(tensor() + text("a") + b"Ns")), 3, ("setitem",)),
    ("D6-setitem-on-int", put(beside(b"K\5(NNu")), 3, ("setitem on a int",)),
    ("D6-build-on-builtin", put(beside(name("builtins", "dict") + b"}b")), 3, ("build",)),
    ("D6-build-on-tensor", put(beside(tensor() + b"}b")), 3, ("build",)),
    ("D6-append-on-dict", put(beside(b"}Na")), 3, ("append on a dict",)),
    ("D6-append-on-tuple", put(beside(b")(Ne")), 3, ("append on a tuple",)),
    ("D6-additems-on-list", put(beside(b"](N\x90", proto=4)), 3, ("additems on a list",)),
    ("D7-long-binput", put(memory()), 3, ("memo index",)),
    ("D7-put", put(b"\x80\x02]p2147483647\n."), 3, ("memo index",)),
    ("D7-negative-get", put(b"\x80\x02]q\0g-1\n."), 3, ("memo index",)),
    ("D7-copies", put(copies()), 3, ("again",)),
    ("D8-constructors", put(constructors()), 3, ("copyreg",)),
    ("D8-laughs", put(laughs()), 3, ("parts",)),
    ("D8-wide-laughs", put(wide_laughs()), 3, ("parts",)),
    ("D8-long-laughs", put(long_laughs()), 3, ("characters",)),
    ("D25-itself", put(itself()), UNREAD, ()),
    ("D25-itself-beside-a-weight", put(beside(b"}q\x00X\x01\0\0\0ah\x00s")), UNREAD, ("holds itself",)),
    ("D25-meta-tensor", put(beside(meta_tensor())), UNREAD, ("meta tensor", "accelerator.save_model")),
    ("D25-object-array", put(beside(array("O8", b"](K\1K\2e"))), UNREAD, ("numpy array of python objects",)),
    ("D25-array-of-big-endian", put(beside(array("f4", b"U\x08" + b"\0" * 8, b">"))), UNREAD, (">f4", "little-endian")),
    ("D25-array-as-a-weight", put(beside(array("f4", b"U\x08" + b"\0" * 8))), 0, ()),
    ("D25-list-of-averages", put(state(w=tensor(), shadow_params=listed(tensor(), tensor()))), UNREAD, ("shadow",)),
    ("D8-itself-by-a-tuple", put(itself_by_a_tuple()), 3, ("holds itself",)),
    ("D8-deep-tuples", put(deep_tuples()), 3, ("deep",)),
    ("D8-deep-lists", put(deep_lists()), 3, ("marks",)),
    ("D8-deep-key", put(deep_key()), 3, ("key",)),
    ("D9-long4", put(b"\x80\x02\x8b" + struct.pack("<i", (1 << 31) - 1) + b"."), 3, ("bytes",)),
    ("D9-long4-negative", put(b"\x80\x02\x8b\xff\xff\xff\xff."), 3, ("bytes",)),
    ("D9-binbytes8", put(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"."), 3, ("bytes",)),
    ("D9-bytearray8", put(b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b"."), 3, ("bytes",)),
    ("D9-frame", put(b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N."), 3, ("frame",)),
    ("D9-binunicode", put(b"\x80\x02X\xff\xff\xff\xff."), 3, ("bytes",)),
    ("D10-unterminated", put(state(w=tensor())[:-1]), 3, ("opcode", "stop")),
    ("D10-empty", put(b""), 3, ()),
    ("D10-only-proto", put(b"\x80\x02"), 3, ("stop",)),
    ("D10-protocol-6", put(b"\x80\x06N."), 3, ("protocol 6", "opcode 0")),
    ("D10-unknown-opcode", put(b"\x80\x02\x7f."), 3, ("0x7f",)),
    ("D10-underflow", put(b"\x80\x02a."), 3, ("opcode 1",)),
    ("D10-stop-alone", put(b"\x80\x02."), 3, ()),
    ("D11-text-persid", put(b"\x80\x02Pdata\n."), 3, ("persistent id",)),
    ("D11-persid-list", put(b"\x80\x02]Q."), 3, ("persistent id",)),
    ("D11-unknown-class", put(state(w=tensor(storage(kind="EvilStorage")))), 3, ("evilstorage",)),
    ("D11-cuda-99", put(state(w=tensor(storage(location="cuda:99")))), 0, ()),
    ("D11-key-dotdot", put(state(w=tensor(storage(key="../0")))), 4, ("../0",)),
    ("D11-two-sizes", put(state(w=tensor(), x=tensor(storage(kind="IntStorage")))), 3, ("storage 0",)),
    ("D12-metadata", dcp_folder(metadata_payload), 4, ("posix.system",)),
    ("D12-behind-metadata", saved(before=system), SHOWN, ("posix.system",)),
    ("D13-sound", saved(), 0, ()),
    ("D13-chunk-outside", saved(chunks=box(((0, 0), (2, 3)), ((3, 0), (2, 3)))), 3, ("w",)),
    ("D13-chunks-overlap", saved(shape=(3, 3), chunks=box(((0, 0), (2, 3)), ((1, 0), (2, 3)))), 3, ("overlap",)),
    ("D13-chunk-missing", saved(chunks=box(((0, 0), (2, 3)))), 3, ("w",)),
    ("D13-item-missing", saved(places=[("__0_0.distcp", 0, len(ITEM))]), 3, ("w",)),
    ("D13-other-shape", saved(chunks=box(((0, 0), (2, 3)), ((2, 0), (2, 2))), shape=(4, 3)), DAMAGED, ("w",)),
    ("D13-rank", saved(chunks=box(((0,), (2,)), ((2, 0), (2, 3)))), 3, ("w",)),
    ("D13-path-dotdot", saved(places=[("../__0_0.distcp", 0, len(ITEM))] * 2), 4, ("..",)),
    ("D13-path-absolute", saved(places=[("/etc/passwd", 0, len(ITEM))] * 2), 4, ("absolute",)),
    ("D13-negative-offset", saved(places=[("__0_0.distcp", -len(ITEM), len(ITEM))] * 2), 3, ()),
    ("D13-beyond-the-file", saved(places=[("__0_0.distcp", len(ITEM) * 2, len(ITEM))] * 2), DAMAGED, ()),
    ("D13-length-too-short", saved(places=[("__0_0.distcp", 0, 100)] * 2), DAMAGED, ()),
    ("D13-planner-list", saved(planner=["w"]), 3, ("planner_data",)),
    ("D13-tensors-list", saved(tensors=["w"]), 3, ()),
    ("D13-huge", saved(shape=(1 << 62, 1 << 62), chunks=box(((0, 0), (1 << 62, 1 << 62)))), DAMAGED, ()),
    ("D14-namespace", put(beside(opaque("argparse", "Namespace", lr=b"K\1"))), 0, ()),
    ("D14-enum", put(beside(called("megatron.core.enums", "ModelType", b"K\1"))), 0, ()),
    (
        "D14-training-arguments",
        put(beside(opaque("transformers.training_args", "TrainingArguments", lr=b"K\1"))),
        0,
        (),
    ),
    ("D14-deepspeed", put(beside(opaque("deepspeed.runtime.fp16.loss_scaler", "LossScaler", cur_scale=b"K\1"))), 0, ()),
    ("D14-weight-bearing", put(beside(opaque("megatron.core.tensor", "Packed", data=tensor()))), SHOWN, ("packed",)),
    ("D15-dotted", put(b"\x80\x04" + named4("collections", "OrderedDict.__reduce__") + b")R."), SHOWN, ("__reduce__",)),
    ("D15-dotted-torch", put(beside(named4("torch", "_utils._rebuild_tensor_v2"), proto=4)), SHOWN, ("_rebuild",)),
    ("D16-zip-named-safetensors", put(state(w=tensor()), "model.safetensors"), 0, ()),
    ("D16-zip-without-extension", put(state(w=tensor()), "weights"), 0, ()),
    ("D16-safetensors-named-pkl", put(safetensors(), "model.pkl", raw), 0, ()),
    ("D17-array-too-short", put(beside(array("f4", text("abc")))), 3, ("bytes",)),
    ("D17-codec", put(beside(called("_codecs", "encode", text("abc"), text("rot13")))), SHOWN, ("_codecs.encode",)),
    ("D17-bytearray", put(beside(called("builtins", "bytearray", plain(10_000_000_000)))), 3, ("bytes",)),
    ("D17-range", put(beside(called("builtins", "list", called("builtins", "range", plain(10**12))))), 3, ("list",)),
]
