"""`systems.paddle.pickle_file` against files that PaddlePaddle 3.3.1 wrote: values, names, and the bytes that we
compose."""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest

from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.tensor import StoredArray
from ckpt_tool.errors import CkptError, CorruptFile, InputError, UnsafeInput, UsageError
from ckpt_tool.formats.state_dict.composer import StoragePart
from ckpt_tool.formats.state_dict.tree import SLOT
from ckpt_tool.storage.pickles import inline_arrays
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.paddle.pickle_file import NamedTensor, PaddleComposer, Saved, chunks_of, read_paddle

FILES = Path(__file__).resolve().parents[2] / "fixtures" / "paddle-files"
REAL = sorted(path.name for path in FILES.glob("*.pd*"))
PLAIN = [name for name in REAL if "proto" not in name]


def array_of(tree, saved):
    """The values, by the first part alone or the slices end to end."""
    flat = [np.frombuffer(tree.read(a.path, a.offset, a.dtype.nbytes(a.numel)), a.dtype.numpy) for a in saved.parts]
    return np.concatenate(flat).reshape(saved.shape) if flat else np.zeros(saved.shape)


def leaves(name):
    tree = Tree(FILES)
    content = read_paddle(tree, name)
    return content, {saved.path: (saved, array_of(tree, saved)) for saved in content.leaves}


def test_the_values_of_a_state_dict_and_its_names():
    content, found = leaves("fp32.pdparams")
    want = np.load(FILES / "fp32_ref.npz")
    assert {path[0] for path in found} == set(want.files) and content.table and content.extras == {}
    for key in want.files:
        assert np.array_equal(found[(key,)][1], want[key])
    assert found[("fc.weight",)][0].name == "linear_0.w_0"
    assert found[("norm.bias",)][0].dtype.name == "F32"


def test_protocol_2_is_read_through_its_view():
    tree = Tree(FILES)
    content, found = leaves("fp32_proto2.pdparams")
    want = np.load(FILES / "fp32_ref.npz")
    assert all(a.path.endswith("//arrays") for saved, _ in found.values() for a in saved.parts)
    for key in want.files:
        assert np.array_equal(found[(key,)][1], want[key])
    saved = content.leaves[-1]
    with pytest.raises(CorruptFile, match="of its arrays"):
        tree.read(saved.parts[0].path, saved.parts[0].offset + 1, saved.parts[0].dtype.nbytes(saved.parts[0].numel))


def test_a_large_file_of_protocol_2_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(inline_arrays, "LIMIT", 1000)
    with pytest.raises(InputError, match="protocol 2") as e:
        read_paddle(Tree(FILES), "fp32_proto2.pdparams")
    assert e.value.code == "E1301" and "protocol=4" in e.value.hint


def test_masters_nesting_empty_and_bare_tensors():
    content, found = leaves("bf16_master.pdopt")
    assert not content.table
    assert content.extras == {"LR_Scheduler": {"last_epoch": 0, "last_lr": 0.001}}
    master = found[("master_weights", "linear_1.w_0")][0]
    assert master.name == "linear_1.w_0_fp32_master_0" and master.shape == (8, 12)
    content, found = leaves("nested.pd")
    assert {path: a.shape for path, (_, a) in found.items()}[("a", "b")] == (2,)
    content, found = leaves("tensor.pd")
    assert found[("value",)][1].tolist() == [0, 1, 2, 3, 4] and content.extras == {}
    content, found = leaves("empty.pdparams")
    assert found == {} and content.extras == {} and content.table
    _, found = leaves("dtypes.pdparams")
    kinds = {path[0]: (saved.dtype.name, saved.shape) for path, (saved, _) in found.items()}
    assert kinds["b"] == ("BOOL", (2,)) and kinds["f16"][0] == "F16" and kinds["bf16"] == ("U16", (2,))
    assert kinds["scalar"] == ("F32", ()) and kinds["empty"] == ("F32", (0, 4)) and kinds["i64"][0] == "I64"


# -- the bytes that we compose -----------------------------------------------------------------------------------------


def compose(name):
    """The file again, from what was read of it."""
    tree = Tree(FILES)
    content = read_paddle(tree, name)
    composer = PaddleComposer()
    values = []
    names = {}
    state: dict = {}
    for saved in content.leaves:
        ref = composer.tensor(saved.shape, saved.dtype, [StoragePart(len(values), whole(saved.shape), 0)])
        values.append(array_of(tree, saved).tobytes())
        node = state
        for step in saved.path[:-1]:
            node = node.setdefault(step, {})
        node[saved.path[-1]] = ref if content.table else NamedTensor(saved.name, ref)
        if content.table:
            names[saved.path[0]] = saved.name
    state |= {key: item for key, item in content.extras.items() if item is not SLOT and key not in state}
    return filled(composer.file(name, state, names if content.table else None), values)


def filled(file, values):
    out = bytearray(file.size)
    for offset, data in file.literals:
        out[offset : offset + len(data)] = data
    for array in file.arrays:
        out[array.offset : array.offset + len(values[array.tensor])] = values[array.tensor]
    return bytes(out)


@pytest.mark.parametrize("name", [n for n in PLAIN if n not in ("tensor.pd", "nested.pd")])
def test_our_bytes_are_those_of_paddle_save(name):
    assert compose(name) == (FILES / name).read_bytes()


class _Pickler(pickle.Pickler):
    """NumPy's arrays under the module name that NumPy 1 and 2 both know."""

    def reducer_override(self, value):
        if isinstance(value, np.ndarray):
            return (_reconstruct, *value.__reduce__()[1:])
        return NotImplemented


def _reconstruct(*args):
    raise AssertionError("never called")


_reconstruct.__module__ = "numpy.core.multiarray"
_reconstruct.__qualname__ = "_reconstruct"


def theirs(value):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import numpy.core.multiarray as old

        kept = old._reconstruct
        old._reconstruct = _reconstruct
        try:
            stream = io.BytesIO()
            _Pickler(stream, 4).dump(value)
            return stream.getvalue()
        finally:
            old._reconstruct = kept


STATES = {
    "frames of many small arrays": {f"k{i}": np.arange(3 + i % 50, dtype="f4") for i in range(2500)},
    "arrays around the size of a frame": {f"k{n}": np.zeros(n, "u1") for n in (65534, 65535, 65536, 65537, 300_000)},
    "a batch to the item": {f"k{i}": i for i in range(1000)},
    "one more than a batch": {f"k{i}": [i] for i in range(1001)},
    "long texts, scalars, nothing": {"x" * 70_000: None, "s": np.zeros((), "f8"), "e": np.zeros((0, 4), "i2"), "l": []},
    "the second empty one": {"a": np.zeros((0,), "f4"), "b": np.zeros((3, 0), "f4"), "c": (1, (2,), (1, 2, 3, 4))},
    "numbers": {"a": [0, 255, 256, 65536, -1, 1 << 40, -(1 << 70), 1.5, True, None, b"xy"], "y": {}},
}


@pytest.mark.parametrize("state", list(STATES))
def test_frames_and_memo_are_those_of_cpython(state):
    composer = PaddleComposer()
    values = []

    def ours(value):
        if not isinstance(value, np.ndarray):
            return value
        dtype = next(d for d in DTYPES.values() if d.exact and d.numpy == value.dtype.name)
        values.append(value.tobytes())
        return composer.tensor(value.shape, dtype, [StoragePart(len(values) - 1, whole(value.shape), 0)])

    table = {"StructuredToParameterName@@": {}}
    file = composer.file("x", {key: ours(value) for key, value in STATES[state].items()}, {})
    assert filled(file, values) == theirs(STATES[state] | table)


def test_parts_fill_a_tensor_and_known_values_are_literals():
    composer = PaddleComposer()
    padded = composer.tensor((6,), DTYPES["BF16"], [StoragePart(0, Box((1,), (2,)), 3)])
    known = composer.value((1,), DTYPES["F32"], b"\0\0\x80?")
    file = composer.file("x.pdopt", {"p": NamedTensor("n", padded), "q": NamedTensor("b", known)}, None)
    assert [(a.tensor, a.box) for a in file.arrays] == [(0, Box((1,), (2,)))]
    out = filled(file, [b"\1\2\3\4"])
    assert b"\0\0\0\0\0\0\1\2\3\4\0\0" in out and b"\0\0\x80?" in out and b"u2" in out
    with pytest.raises(UsageError, match="F4"):
        composer.tensor((2,), DTYPES["F4"], [])


# -- slices, other protocols, what is refused --------------------------------------------------------------------------


def written(tmp_path, value, protocol=4):
    (tmp_path / "x.pdparams").write_bytes(pickle.dumps(value, protocol))
    return Tree(tmp_path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_slices_are_joined_under_their_key(tmp_path, protocol):
    whole_ = np.arange(35, dtype="f4").reshape(7, 5)
    flat = whole_.reshape(-1)
    state = {
        "a": np.arange(3),
        "w@@.0": flat[:12],
        "w@@.1": flat[12:24],
        "w@@.2": flat[24:],
        "UnpackBigParamInfor@@": {"w": {"OriginShape": (7, 5), "slices": ["w@@.0", "w@@.1", "w@@.2"]}},
    }
    tree = written(tmp_path, state, protocol)
    content = read_paddle(tree, "x.pdparams")
    assert [saved.path for saved in content.leaves] == [("a",), ("w",)] and content.extras == {}
    saved = content.leaves[1]
    assert np.array_equal(array_of(tree, saved), whole_)
    for within, at in ((whole((7, 5)), (0, 0)), (Box((1, 2), (5, 3)), (1, 2)), (Box((2, 0), (1, 5)), (9, 1))):
        out = np.full((20, 20), -1, "f4")
        for chunk in chunks_of(saved, Box(at, within.shape), within):
            start, strides = chunk.region()
            raw = np.frombuffer(tree.read(chunk.array.path, 0, tree_end(tree, chunk.array)), "u1")[chunk.array.offset :]
            lines = np.frombuffer(raw[: len(raw) // 4 * 4].tobytes(), "f4")[start:]
            view = np.lib.stride_tricks.as_strided(lines, chunk.box.shape, [4 * s for s in strides])
            out[tuple(slice(o, e) for o, e in zip(chunk.box.offset, chunk.box.end, strict=True))] = view
        part = whole_[tuple(slice(o, e) for o, e in zip(within.offset, within.end, strict=True))]
        assert np.array_equal(out[at[0] : at[0] + part.shape[0], at[1] : at[1] + part.shape[1]], part)
        assert (out != -1).sum() == part.size - (part == -1).sum()


def tree_end(tree, array):
    """Bytes up to the end of the file or view that the array lies in."""
    return tree.size(array.path)


def test_a_flat_slice_and_a_transposed_array(tmp_path):
    stored = StoredArray("f", 100, DTYPES["U16"], (12,))
    saved = Saved(("w",), "", (12,), DTYPES["U16"], (stored,))
    (chunk,) = chunks_of(saved, Box((1, 0), (2, 4)), Box((3,), (8,)), DTYPES["BF16"])
    assert chunk.array.dtype.name == "BF16" and chunk.region() == (3, (4, 1))
    tree = written(tmp_path, {"w": np.asfortranarray(np.arange(6, dtype="i8").reshape(2, 3))})
    (leaf,) = read_paddle(tree, "x.pdparams").leaves
    assert leaf.shape == (2, 3) and leaf.parts[0].strides == (1, 2)


@pytest.mark.parametrize(
    ("value", "kind", "code"),
    [
        ({"w": np.zeros(3, ">f4")}, InputError, "E1303"),
        ({"w": np.array(["a", "bc"])}, InputError, "E1302"),
        ({"w": np.array([{}], dtype=object)}, InputError, "E1302"),
        ({"s": {frozenset((1,))}, "w": slice(1)}, None, ""),
        ({"StructuredToParameterName@@": 3}, CorruptFile, "E1304"),
        ({"UnpackBigParamInfor@@": {"w": {"OriginShape": (2,), "slices": ["w@@.0"]}}}, CorruptFile, "E1304"),
        (
            {"w@@.0": np.zeros(3), "UnpackBigParamInfor@@": {"w": {"OriginShape": (2,), "slices": ["w@@.0"]}}},
            CorruptFile,
            "E1304",
        ),
        (
            {"w@@.0": np.zeros(3), "UnpackBigParamInfor@@": {"w": {"OriginShape": (-3,), "slices": ["w@@.0"]}}},
            CorruptFile,
            "E1304",
        ),
        (
            {"w@@.0": np.zeros(3), "UnpackBigParamInfor@@": {"w": {"OriginShape": (6,), "slices": ["w@@.0"] * 2}}},
            CorruptFile,
            "E1304",
        ),
        ({"w@@.0": np.zeros(3), "UnpackBigParamInfor@@": {"w": ["w@@.0"]}}, CorruptFile, "E1304"),
    ],
)
def test_what_is_no_state_is_named(tmp_path, value, kind, code):
    tree = written(tmp_path, value)
    if kind is None:
        read_paddle(tree, "x.pdparams")
        return
    with pytest.raises(kind) as e:
        read_paddle(tree, "x.pdparams")
    assert e.value.code == code and "x.pdparams" in e.value.path


def test_a_tensor_on_an_unknown_object_and_other_files(tmp_path):
    from types import SimpleNamespace

    tree = written(tmp_path, {"w": SimpleNamespace(t=np.zeros(3))})
    with pytest.raises(UnsafeInput, match="SimpleNamespace"):
        read_paddle(tree, "x.pdparams")
    for head in (b"\0\0\0\0\0\0\0\0rest", b"PK\3\4", b""):
        (tmp_path / "y.pdparams").write_bytes(head)
        with pytest.raises(CkptError) as e:
            read_paddle(Tree(tmp_path), "y.pdparams")
        assert e.value.exit_code == 3 and e.value.code == "E1305"
    tree = written(tmp_path, {"LR": {"lr": np.float64(0.5), "b": b"\1", "k": {b"z": 1}}, "w": np.zeros(1, "?")})
    content = read_paddle(tree, "x.pdparams")
    assert content.extras == {"LR": {"lr": 0.5, "b": b"\1", "k": {b"z": 1}}}
    assert [type(v) for v in content.extras["LR"].values()] == [float, bytes, dict]


def test_an_evil_pickle_is_listed_not_run(tmp_path):
    (tmp_path / "x.pdparams").write_bytes(b"\x80\x02cposix\nsystem\n(U\x04truetR.")
    content = read_paddle(Tree(tmp_path), "x.pdparams")
    assert content.unsafe and "posix.system" in content.unsafe[0]


def test_headers_only(tmp_path):
    tree = written(tmp_path, {f"w{i}": np.zeros(1 << 20, "f4") for i in range(4)})
    read_paddle(tree, "x.pdparams")
    assert tree.bytes_read < 128 << 10
