"""The inert pickle reader and the skeleton writer against CPython's pickle, NumPy and torch, and against table D."""

from __future__ import annotations

import argparse
import collections
import copyreg
import datetime
import importlib.util
import json
import math
import pathlib
import pickle
import pickletools
import signal
import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.extras import Opaque, Symbol, to_json
from ckpt_tool.errors import CkptError, CorruptFile, UnsafeInput, UsageError
from ckpt_tool.storage.pickles import pickle_machine
from ckpt_tool.storage.pickles import pickle_reader as pickles
from ckpt_tool.storage.pickles.pickle_globals import tier
from ckpt_tool.storage.pickles.pickle_machine import Machine
from ckpt_tool.storage.pickles.pickle_values import (
    Misuse,
    NumpyArray,
    OrderedMap,
    PickledRecord,
    StorageSpan,
    TensorRef,
    as_extras,
)
from ckpt_tool.storage.pickles.pickle_writer import TorchSize, dumps, plan_pickle, stored
from ckpt_tool.storage.source import Tree

HERE = pathlib.Path(__file__).parent
PROTOCOLS = range(6)


def cases_of(name):
    spec = importlib.util.spec_from_file_location(name, HERE.parent / "hostile" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(data, **options):
    return pickles.load(data, path="some.pkl", **options)


def value_of(data, **options):
    done = read(data, **options)
    assert not done.unsafe, done.unsafe
    return done.value


# -- plain values -----------------------------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(1 << 600), max_value=1 << 600)
    | st.floats()
    | st.text()
    | st.text(st.characters(exclude_categories=()), max_size=5)
    | st.binary()
)
keys = st.text() | st.integers() | st.binary() | st.tuples(st.text(), st.integers())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.lists(inner, max_size=6).map(tuple)
        | st.dictionaries(keys, inner)
        | st.sets(keys)
        | st.frozensets(keys)
    ),
    max_leaves=30,
)


def same(a, b):
    """Equal in type and value, NaN and -0.0 by their bits."""
    if isinstance(b, float):
        return (
            type(a) is float
            and (a == b or (math.isnan(a) and math.isnan(b)))
            and math.copysign(1, a) == math.copysign(1, b)
        )
    if isinstance(b, dict):
        return type(a) is dict and list(a) == list(b) and all(same(a[k], b[k]) for k in b)
    if isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(values, st.sampled_from(PROTOCOLS))
@settings(max_examples=400, deadline=None)
def test_plain_values_read_as_cpython_reads_them(value, protocol):
    data = pickle.dumps(value, protocol=protocol)
    value = pickle.loads(data)  # protocol 0 loses the sign of a NaN
    assert same(value_of(data), value)
    assert same(value_of(pickletools.optimize(data)), value)


@given(values, st.sampled_from(PROTOCOLS), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_a_moving_window_changes_nothing(value, protocol, width):
    data = pickle.dumps([value, value, "end"], protocol=protocol)
    machine = Machine(
        data[:width], origin=0, end=len(data), refill=lambda at, wanted: data[at : at + max(width, wanted)]
    )
    assert same(machine.run(), pickle.loads(data))
    assert machine.origin + machine.pos == len(data)
    assert machine.count + 1 == sum(1 for _ in pickletools.genops(data)) == read(data).opcodes


def test_python_2_strings_are_text_where_they_are_utf8_else_bytes():
    assert value_of(b"U\x03abc.") == "abc"
    assert value_of(b"T\x02\x00\x00\x00\xff\xfe.") == b"\xff\xfe"
    assert value_of(b"S'a\\x41\\n'\n.") == "aA\n"
    assert value_of(b"(lp1\nI01\naL12L\na.") == [True, 12]  # Python 2 numbers the memo from 1


def test_the_opcode_number_and_offset_of_a_name_are_told():
    data = pickle.dumps({"a": [1, 2, (3, {})], "b": datetime.date(2025, 3, 1)}, protocol=4)
    (use,) = read(data, origin=1000).globals
    ops = [(number, op.name, at) for number, (op, _, at) in enumerate(pickletools.genops(data))]
    assert (use.position, "STACK_GLOBAL", use.offset - 1000) in ops
    assert (use.module, use.name, use.tier) == ("datetime", "date", 1)


def test_a_value_may_share_parts():
    big = list(range(1000))
    value = [big] * 80 + [{"again": big}]
    assert value_of(pickle.dumps(value)) == value


def test_two_streams_are_read_one_by_one_and_refused_otherwise(tmp_path):
    data = b"".join(pickle.dumps(v, protocol=2) for v in (1, ["a", 2.5], {"k": None}))
    path = tmp_path / "many"
    path.write_bytes(data + b"raw bytes behind")
    found = pickles.load_many(Tree(path), "many", 3)
    assert [one.value for one in found] == [1, ["a", 2.5], {"k": None}] and found[-1].end == len(data)
    with pytest.raises(UnsafeInput, match="follow") as caught:
        read(data)
    assert caught.value.code == "E0422"
    assert read(data, multi=True).value == 1


def test_large_byte_strings_stay_in_the_file(tmp_path):
    arrays = {f"p{i}": np.arange(i * 40_000, dtype=np.float32).reshape(-1, 8) for i in range(1, 9)}
    data = pickle.dumps({"head": "x" * 100, **arrays, "tail": (1, 2)}, protocol=4)
    path = tmp_path / "model.pdparams"
    path.write_bytes(data)
    tree = Tree(path)
    done = pickles.load_file(tree, path.name)
    assert done.value["tail"] == (1, 2) and not done.unsafe and done.end == len(data)
    for name, want in arrays.items():
        array = done.value[name]
        assert isinstance(array.data, StorageSpan) and array.data.nbytes == want.nbytes
        raw = data[array.data.offset : array.data.offset + array.data.nbytes]
        np.testing.assert_array_equal(np.frombuffer(raw, array.dtype).reshape(array.shape), want)
    assert tree.bytes_read < 200_000 < len(data) / 20


# -- objects ----------------------------------------------------------------------------------------------------------


class Foreign:
    """A class that no table knows."""


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_standard_classes(protocol):
    ordered = collections.OrderedDict(a=1, b=[2])
    ordered.attribute = {"version": 1}
    value = {
        "ordered": ordered,
        "default": collections.defaultdict(list, {"k": [1]}),
        "counter": collections.Counter("aab"),
        "deque": collections.deque([1, 2], maxlen=5),
        "set": {1, 2},
        "namespace": argparse.Namespace(lr=0.5, tp=2),
        "simple": types.SimpleNamespace(x=(1, 2)),
        "path": pathlib.PosixPath("/a/b"),
        "date": datetime.datetime(2025, 3, 1, 12),
        "complex": 1 + 2j,
        "slice": slice(1, 5, None) if protocol >= 2 else None,
        "range": range(3),
        "bytearray": bytearray(b"\x00\xff"),
        "signal": signal.SIGTERM,
    }
    got = value_of(pickle.dumps(value, protocol=protocol))
    assert got["ordered"] == {"a": 1, "b": [2]} and isinstance(got["ordered"], OrderedMap)
    assert got["ordered"].attributes == {"attribute": {"version": 1}}
    assert got["default"] == {"k": [1]} and got["counter"] == {"a": 2, "b": 1} and got["deque"] == [1, 2]
    assert got["set"] == {1, 2} and got["bytearray"] == b"\x00\xff"
    assert got["namespace"].name == "argparse.Namespace" and got["namespace"].state == {"lr": 0.5, "tp": 2}
    assert got["simple"].state == {"x": (1, 2)}
    assert got["path"].name.endswith("PosixPath") and got["path"].args in (("/", "a", "b"), ("/a/b",))
    assert got["date"].name == "datetime.datetime" and type(got["date"].args[0]) is bytes
    assert got["complex"] == Opaque("builtins.complex", (1.0, 2.0)) and got["range"].args == (0, 3, 1)
    # Python 3.10 names the constant, newer ones the enum's class and value.
    by_name = Symbol("signal.SIGTERM", ())
    assert got["signal"] == (Symbol("signal.Signals", (15,)) if sys.version_info >= (3, 11) else by_name)
    assert value_of(b"csignal\nSIGTERM\n.") == by_name
    json.dumps(to_json(as_extras(got)))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", ["<f4", ">i2", "|u1", "|b1", "<c8", "<f2", ">f8", "<U3", "|S4", "<u8"])
def test_numpy_arrays_and_scalars(protocol, dtype):
    base = np.arange(24).astype(dtype).reshape(2, 3, 4)
    value = {
        "c": base,
        "f": np.asfortranarray(base),
        "t": base.T,
        "empty": base[:0],
        "scalar": base[1, 2, 3],
        "0d": base[0, 0, 1, ...],
    }
    got = value_of(pickle.dumps(value, protocol=protocol))
    for name, want in value.items():
        array = got[name]
        if name == "scalar" and not isinstance(array, Opaque):
            assert array == want.item() and type(array) is type(want.item())
        elif name not in ("scalar", "0d"):
            data = np.frombuffer(array.data, array.dtype).reshape(array.shape, order="F" if array.fortran else "C")
            np.testing.assert_array_equal(data, want)
            assert array.dtype == want.dtype.str


def test_numpy_arrays_of_objects_and_structures_are_values_that_nobody_writes():
    for array in (np.array([{}, []], dtype=object), np.zeros(2, dtype=[("a", "f4")])):
        kept = pickles.as_extras(read(pickle.dumps(array)).value)
        assert kept.name == "numpy.ndarray" and kept.args[1] == (2,)
        with pytest.raises(UsageError) as caught:
            dumps(kept)
        assert caught.value.code == "E0375"


def test_unknown_classes_are_unsafe_and_kept_as_records():
    thing = Foreign()
    thing.weights = [1, 2]
    done = read(pickle.dumps({"x": thing}, protocol=2))
    assert [use.tier for use in done.unsafe] == [3] and done.value["x"].state == {"weights": [1, 2]}
    with pytest.raises(UnsafeInput, match="Foreign") as caught:
        pickles.refuse_unsafe(done, "some.pt", member="some/data.pkl")
    assert caught.value.code == "E0420" and "some/data.pkl" in caught.value.where()


def test_enum_members_by_getattr_as_python_3_11_wrote_them():
    enum = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    good = b"\x80\x02cbuiltins\ngetattr\n" + enum + b"X\x12\x00\x00\x00TORCH_CHANNELS_LAST\x86R."
    good = good.replace(b"\x12", bytes([19]))
    done = read(good)
    assert not done.unsafe and done.value.args == (1,)
    for name in ("__class__", "mro", "x.y"):
        bad = (
            b"\x80\x02cbuiltins\ngetattr\nctorch\nfloat32\nX" + bytes([len(name), 0, 0, 0]) + name.encode() + b"\x86R."
        )
        assert [str(use) for use in read(bad).unsafe] == ["builtins.getattr"]
    assert read(b"cbuiltins\ngetattr\n.").unsafe


@pytest.mark.parametrize(
    ("module", "name", "want"),
    [
        ("collections", "OrderedDict", 1),
        ("torch", "bfloat16", 1),
        ("torch", "FloatStorage", 1),
        ("torch._utils", "_rebuild_tensor_v2", 1),
        ("argparse", "Namespace", 1),
        ("signal", "Signals", 1),
        ("numpy._core.multiarray", "_reconstruct", 1),
        ("megatron.core.transformer.enums", "AttnBackend", 1),
        ("transformers.training_args", "TrainingArguments", 2),
        ("torch.nn.functional", "gelu", 2),
        ("deepspeed.runtime.zero.stage3", "Thing", 2),
        ("paddle.base.core", "Generator", 2),
        ("enum", "Enum", 2),
        ("posix", "system", 3),
        ("collections", "OrderedDict.__reduce__", 3),
        ("torch", "_utils._rebuild_tensor_v2", 3),
        ("torch.hub", "load", 3),
        ("torch.jit._script", "ScriptModule", 3),
        ("torch", "load", 3),
        ("torchx", "Thing", 3),
        ("megatronx.core", "Thing", 3),
        ("datetime", "sys", 3),
        ("", "Namespace", 3),
        ("argparse", "", 3),
    ],
)
def test_tiers(module, name, want):
    assert tier(module, name) == want


def test_a_frameworks_function_is_a_value_but_not_to_be_called():
    assert not read(b"ctorch.nn.functional\ngelu\n.").unsafe
    assert read(b"ctorch.nn.functional\ngelu\n)R.").unsafe


def test_a_record_tells_its_fields():
    chunk = PickledRecord("a.Chunk", state={"offsets": (0,), "sizes": [1]})
    assert (
        chunk.offsets == (0,)
        and chunk.get("sizes", list) == [1]
        and "sizes" in chunk
        and list(chunk) == ["offsets", "sizes"]
    )
    assert getattr(chunk, "other", None) is None
    for wrong in (lambda: chunk.other, lambda: chunk.get("other"), lambda: chunk.get("sizes", tuple)):
        with pytest.raises(CorruptFile) as caught:
            wrong()
        assert caught.value.code == "E0378"


def test_weights_on_unknown_objects_are_refused():
    tensor = stored("0", (2,), DTYPES["F32"])
    plain = {"a": [tensor], "b": Opaque("megatron.core.X", (), {"lr": 1})}
    assert not list(pickles.weight_bearing(plain))
    pickles.refuse_weight_bearing(plain, "x.pt")
    with pytest.raises(UnsafeInput, match="Packed") as caught:
        pickles.refuse_weight_bearing({"a": ({"b": Opaque("foo.Packed", (), {"data": [tensor]})},)}, "x.pt")
    assert caught.value.code == "E0421"
    with pytest.raises(CkptError, match="sparse") as sparse:
        pickles.refuse_weight_bearing([Opaque("torch._utils._rebuild_sparse_tensor", ((tensor,),))], "x.pt")
    assert sparse.value.code == "E0374" and sparse.value.exit_code == 3


@pytest.mark.parametrize("end", [b".", b"\x94.", b"\x94\x94.", b"0N."], ids=repr)
def test_runs_of_opcodes_taken_in_one_step_mean_the_same(end):
    """`torch.Size((2, 3))` and `Class()` with a state, as CPython writes them and as it does not."""
    size = b"\x80\x04ctorch\nSize\n\x94K\x02K\x03\x86"
    want = None if end == b"0N." else (2, 3)
    for middle in (b"\x94\x85\x94R", b"\x85\x94R", b"\x94\x85R", b"\x85R"):
        done = read(size + middle + end)
        assert done.value == want and done.opcodes == len(middle + end) + 6
    record = b"\x80\x04ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n\x94"
    for middle in (b")\x81\x94}\x94(", b")\x81}\x94(", b")\x81\x94}("):
        done = read(record + middle + b"\x8c\x07offsetsK\x05ub.")
        assert done.value.offsets == 5 and done.opcodes == len(middle) + 8
    shared = b"\x80\x04(" + size[2:] + b"\x94\x85\x94R\x94h\x01h\x02h\x03t."
    assert value_of(shared) == ((2, 3), (2, 3), ((2, 3),), (2, 3))


# -- limits -----------------------------------------------------------------------------------------------------------


def test_limits_say_what_they_are(monkeypatch):
    with pytest.raises(CorruptFile, match="more than 100 opcodes"):
        read(b"\x80\x02" + b"N0" * 200 + b"N.", opcodes=100)
    monkeypatch.setattr(pickle_machine, "NAME_LIMIT", 50)
    with pytest.raises(UnsafeInput, match="50 names"):
        read(b"".join(b"cm%d\nx\n0" % i for i in range(60)) + b"N.")


def test_names_in_messages_cannot_move_the_cursor():
    error = pytest.raises(UnsafeInput, pickles.refuse_unsafe, read("cev\x1b[2Jil\nna‮me\n.".encode()), "x").value
    assert "\x1b" not in str(error) and "\u202e" not in str(error) and "\\x1b" in str(error)


def test_dict_keys_cost_little():
    """A key of many parts, hashed at each look-up, or one that two objects share."""
    wide = b"(" + b"N" * 1000 + b"tq\x00"
    with pytest.raises(CorruptFile, match="64 parts"):
        read(b"\x80\x02" + wide + b"0}h\x00Ns.")
    value = value_of(b"\x80\x02}cargparse\nNamespace\n)\x81K\x05s.")
    assert list(value) == [Symbol("argparse.Namespace")]
    with pytest.raises(CorruptFile, match="no dict key"):
        read(b"\x80\x02}]Ns.")


# -- hostile files ----------------------------------------------------------------------------------------------------

HOSTILE = cases_of("pickle_cases")


def payload(path):
    """The pickle inside a hostile file."""
    import zipfile

    if zipfile.is_zipfile(path):
        return zipfile.ZipFile(path).read("model/data.pkl")
    return path.read_bytes()


@pytest.mark.parametrize("case", HOSTILE.CASES, ids=lambda case: case[0])
def test_hostile_pickles(case, tmp_path):
    row, make, want, words = case
    if row.startswith(("D13-", "D16-safetensors", "D25-")):
        pytest.skip("judged by the formats")
    path = make(tmp_path)
    data = payload(path / ".metadata" if path.is_dir() else path)
    error = None
    try:
        done = pickles.load(data, path=str(path), member="model/data.pkl")
        if isinstance(want, dict):
            assert done.unsafe or list(pickles.weight_bearing(done.value)), "inspect would have nothing to show"
        pickles.refuse_unsafe(done, str(path))
        pickles.refuse_weight_bearing(done.value, str(path))
    except CkptError as e:
        error = e
    assert (error.exit_code if error else 0) == (want["*"] if isinstance(want, dict) else want), error
    if error is not None:
        text = json.dumps(error.to_json()).lower()
        assert all(word.lower() in text for word in words), text
        assert error.hint and error.path and (error.place or error.code == "E0421")
    assert not (tmp_path / "canary").exists()


def test_nothing_is_imported_or_run(tmp_path):
    """Every hostile pickle again in a fresh process whose audit hook ends it on an import, a call or an open."""
    for number, (_, make, _, _) in enumerate(HOSTILE.CASES):
        folder = tmp_path / f"{number:03}"
        folder.mkdir()
        path = make(folder)
        data = payload(path / ".metadata" if path.is_dir() else path)
        (tmp_path / f"{number:03}.pkl").write_bytes(data)
    script = """
    import sys, pathlib, gc
    from ckpt_tool.errors import CkptError
    from ckpt_tool.storage.pickles import pickle_reader as pickles, pickle_opcodes
    files = [(path.name, path.read_bytes()) for path in sorted(pathlib.Path(sys.argv[1]).glob("*.pkl"))]
    seen = []
    quiet = {"builtins.id"}
    sys.addaudithook(lambda event, args: seen.append((event, str(args)[:100])) if event not in quiet else None)
    for name, data in files:
        try:
            done = pickles.load(data, path=name)
            repr(done.globals)
            pickles.refuse_unsafe(done, name)
        except CkptError as e:
            e.to_json()
        if seen:
            print(name, seen[:3])
            break
    else:
        print(len(files), "quiet")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=HERE.parents[1],
        check=False,
    )
    assert done.stdout.split() == [str(len(HOSTILE.CASES)), "quiet"], done.stdout + done.stderr


def test_lying_lengths_cost_no_memory(tmp_path):
    """Rows D7 to D9 and D17 in a fresh process: none makes it grow by more than 100 MB (a deep key's file alone, of a
    million tuples, makes 56 MB)."""
    rows = [case for case in HOSTILE.CASES if case[0].startswith(("D7", "D8", "D9", "D17"))]
    assert len(rows) > 20
    for number, (_, make, _, _) in enumerate(rows):
        folder = tmp_path / f"{number:03}"
        folder.mkdir()
        (tmp_path / f"{number:03}.pkl").write_bytes(payload(make(folder)))
    script = """
    import pathlib, resource, sys
    from ckpt_tool.errors import CkptError
    from ckpt_tool.storage.pickles import pickle_reader as pickles, pickle_opcodes
    files = [path.read_bytes() for path in sorted(pathlib.Path(sys.argv[1]).glob("*.pkl"))]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data in files:
        try:
            pickles.load(data, path="x")
        except CkptError:
            pass
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=HERE.parents[1],
        check=False,
    )
    assert int(done.stdout) < 100, done.stdout + done.stderr


# -- the writer -------------------------------------------------------------------------------------------------------

writable = st.recursive(
    scalars.filter(lambda v: not isinstance(v, int) or abs(v) < 1 << 2000),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner, inner, inner)
        | st.dictionaries(st.text(), inner)
        | st.sets(st.integers())
    ),
    max_leaves=20,
)


@given(writable, st.sampled_from([2, 3, 4]))
@settings(max_examples=200, deadline=None)
def test_what_is_written_is_what_cpython_reads(value, protocol):
    data = dumps(value, protocol=protocol)
    assert same(pickle.loads(data), value)
    assert same(value_of(data), value)
    assert dumps(value_of(data), protocol=protocol) == data


def test_long_containers_are_written_in_batches():
    value = {"list": list(range(2500)), "dict": {str(i): i for i in range(1001)}}
    assert pickle.loads(dumps(value)) == value


def test_objects_written_are_the_real_ones():
    from torch import Size

    value = {
        "ordered": OrderedMap({"a": 1}),
        "namespace": Opaque("argparse.Namespace", (), {"lr": 0.5}),
        "path": Opaque("pathlib.PosixPath", ("/", "a")),
        "signal": Symbol("signal.Signals", (15,)),
        "size": TorchSize((2, 3)),
        "complex": Opaque("builtins.complex", (1.0, 2.0)),
        "array": NumpyArray("<f4", (2, 2), True, np.arange(4, dtype="<f4").tobytes()),
        "extra": Opaque("numpy.ndarray", (">i2", (2,), False, b"\x00\x01\x00\x02")),
    }
    for protocol in (2, 4):
        got = pickle.loads(dumps(value, protocol=protocol))
        assert got["ordered"] == collections.OrderedDict(a=1) and type(got["ordered"]) is collections.OrderedDict
        assert got["namespace"] == argparse.Namespace(lr=0.5) and got["path"] == pathlib.PosixPath("/a")
        assert got["signal"] is signal.SIGTERM and got["complex"] == 1 + 2j and type(got["size"]) is Size
        np.testing.assert_array_equal(got["array"], np.arange(4, dtype="f4").reshape(2, 2, order="F"))
        np.testing.assert_array_equal(got["extra"], [1, 2])


@pytest.mark.parametrize(
    "value",
    [
        Symbol("posix.system"),
        Opaque("posix.system", ("true",)),
        PickledRecord("foo.Bar"),
        Opaque("megatron.core.X"),
        object(),
        1 << 3000,
        Symbol("torch.load"),
        {"a": [Opaque("builtins.eval", ("1",))]},
        Symbol("torch.device"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_names_of_our_own_are_written(value):
    with pytest.raises(UsageError) as caught:
        dumps(value)
    assert caught.value.code == "E0375"


def test_a_value_that_holds_itself_is_not_written():
    value = []
    value.append(value)
    with pytest.raises(UsageError, match="deep"):
        dumps(value)


def test_arrays_are_laid_out_before_their_bytes_exist():
    one = np.arange(3000, dtype="<f4").reshape(30, 100)
    two = np.arange(3, dtype="<u2")
    value = {
        "a": NumpyArray("<f4", (30, 100), False, StorageSpan(0, one.nbytes)),
        "b": ("static", NumpyArray("<u2", (3,), False, StorageSpan(0, 6))),
    }
    plan = plan_pickle(value)
    out = bytearray(plan.size)
    for at, data in (*plan.literals, *zip(plan.offsets, (one.tobytes(), two.tobytes()), strict=True)):
        out[at : at + len(data)] = data
    got = pickle.loads(out)
    np.testing.assert_array_equal(got["a"], one)
    np.testing.assert_array_equal(got["b"][1], two)
    with pytest.raises(UsageError):
        plan_pickle(value, protocol=2)


def test_dcp_metadata_there_and_back():
    """torch's own metadata object, read by us, written by us, unpickled by torch: the same object."""
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    properties = dcp.TensorProperties(dtype=torch.bfloat16, requires_grad=True)
    chunks = [dcp.ChunkStorageMetadata(torch.Size([0, i]), torch.Size([4, 1])) for i in range(3)]
    state = {"w.x": dcp.TensorStorageMetadata(properties, torch.Size([4, 3]), chunks), "lr": dcp.BytesStorageMetadata()}
    storage = {
        dcp.MetadataIndex("w.x", chunk.offsets, i): _StorageInfo("__0_0.distcp", 100 * i, 100)
        for i, chunk in enumerate(chunks)
    }
    storage[dcp.MetadataIndex("lr")] = _StorageInfo("__1_0.distcp", 0, 77)
    planner = {"w.x": ("w", "x"), "lr": ("optim", 0, "lr")}
    meta = dcp.Metadata(state, planner, storage, dcp.StorageMeta(checkpoint_id=pathlib.Path("/a/b")))
    for protocol in PROTOCOLS[2:]:
        value = value_of(pickle.dumps(meta, protocol=protocol))
        assert value.state_dict_metadata["w.x"].chunks[2].offsets == (0, 2)
        assert value.state_dict_metadata["w.x"].properties.dtype == Symbol("torch.bfloat16")
        assert value.state_dict_metadata["w.x"].properties.get("memory_format").args == (0,)
        keys = {(key.fqn, getattr(key, "offset", None)): info for key, info in value.storage_data.items()}
        assert keys["w.x", (0, 1)].relative_path == "__0_0.distcp" and keys["lr", None].length == 77
        again = pickle.loads(dumps(value, protocol=4))
        assert again == meta and type(again.state_dict_metadata["w.x"].size) is torch.Size
        assert again.storage_data[dcp.MetadataIndex("w.x", torch.Size([0, 2]))].offset == 200
        assert again.state_dict_metadata["w.x"].properties == properties


def test_extension_codes_never_resolve():
    copyreg.add_extension("collections", "OrderedDict", 0xF3)
    try:
        data = pickle.dumps(collections.OrderedDict, protocol=2)
        assert b"\x82\xf3" in data and read(data).unsafe
    finally:
        copyreg.remove_extension("collections", "OrderedDict", 0xF3)


def test_misuse_never_leaves_the_reader():
    with pytest.raises(CorruptFile):
        read(b"a.")
    with pytest.raises(Misuse):
        Machine(b"a.", origin=0).run()
    assert TensorRef._fields[0] == "storage"
