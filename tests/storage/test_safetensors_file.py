"""The header reader and the head writer against the safetensors library, and the library's own order of things."""

from __future__ import annotations

import gc
import importlib.util
import io
import json
import time
import zipfile
from math import prod
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool import api
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import CkptError, CorruptFile, UnsafeInput, UsageError
from ckpt_tool.storage.magic import what_is
from ckpt_tool.storage.safetensors_files import safetensors_entries as entries
from ckpt_tool.storage.safetensors_files.safetensors_file import build_header, parse_header, read_header, refuse_twin
from ckpt_tool.storage.safetensors_files.safetensors_table import HeaderTable, first_twice
from ckpt_tool.storage.source import Tree

TABLE_A = Path(__file__).parents[1] / "hostile" / "safetensors_cases.py"
spec = importlib.util.spec_from_file_location("safetensors_cases", TABLE_A)
hostile = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hostile)

# Our name -> the name that the library's `serialize` takes. F6_* it can read but not be given.
THEIRS = {d.name: d.torch for d in DTYPES.values() if d.torch and d.name != "C128"}
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__")
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
TENSORS = st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(THEIRS)), SHAPES), max_size=8)


def fill(number, nbytes):
    """Bytes that tell one tensor from another."""
    return bytes((number * 37 + i) % 251 for i in range(nbytes))


def library_file(tensors, metadata=None):
    """The file that the library writes: {name: (our dtype name, shape)}, bytes by `fill` in the order given."""
    kept = []
    specs = {}
    for number, (name, (dtype, shape)) in enumerate(tensors.items()):
        data = np.frombuffer(fill(number, DTYPES[dtype].nbytes(prod(shape))) or b"\0", np.uint8)
        kept.append(data)
        nbytes = DTYPES[dtype].nbytes(prod(shape))
        specs[name] = safetensors.TensorSpec(
            dtype=THEIRS[dtype], shape=list(shape), data_ptr=data.ctypes.data, data_len=nbytes
        )
    return bytes(safetensors.serialize(specs, metadata))


def our_file(tensors, metadata=None):
    head, offsets, size = build_header(
        [(name, DTYPES[dtype], shape) for name, (dtype, shape) in tensors.items()], metadata or {}
    )
    out = bytearray(size)
    out[: len(head)] = head
    for number, ((dtype, shape), offset) in enumerate(zip(tensors.values(), offsets, strict=True)):
        data = fill(number, DTYPES[dtype].nbytes(prod(shape)))
        out[offset : offset + len(data)] = data
    return bytes(out)


def on_disk(folder, content, name="model.safetensors"):
    (folder / name).write_bytes(content)
    return Tree(folder)


def text_of(raw):
    return raw[8 : 8 + int.from_bytes(raw[:8], "little")]


# -- writing ----------------------------------------------------------------------------------------------------------


@given(TENSORS, st.none() | st.dictionaries(NAMES, NAMES, min_size=1, max_size=1))
def test_the_writer_is_the_library_byte_for_byte(tensors, metadata):
    assert our_file(tensors, metadata) == library_file(tensors, metadata)


def test_metadata_is_sorted_and_otherwise_the_librarys():
    metadata = {key: key.upper() for key in "qwertyuiop"}
    ours = our_file({"a": ("U8", (3,))}, metadata)
    theirs = library_file({"a": ("U8", (3,))}, metadata)  # in the order of a hash map, another one each time
    assert len(ours) == len(theirs) and json.loads(text_of(ours)) == json.loads(text_of(theirs))
    assert list(json.loads(text_of(ours))["__metadata__"]) == sorted(metadata)


def test_every_dtype_stands_where_the_library_puts_it():
    everything = {name: (name, (2,)) for name in sorted(THEIRS)}
    assert our_file(everything) == library_file(everything)
    # What the library can't be given, it reads: the places of F6_* are those of its enum.
    everything |= {name: (name, (4,)) for name in ("F4", "F6_E2M3", "F6_E3M2")}
    order = list(json.loads(text_of(our_file(everything))))
    assert order[-4:] == ["F6_E3M2", "F6_E2M3", "F4", "BOOL"] and order[0] == "U64"
    assert len(safetensors.deserialize(our_file(everything))) == len(DTYPES) - 1


def test_offsets_come_in_the_order_given():
    head, offsets, size = build_header(
        [("z", DTYPES["U8"], (5,)), ("b", DTYPES["F32"], (2,)), ("a", DTYPES["F32"], ())], {}
    )
    assert len(head) % 8 == 0 and size == len(head) + 17
    assert offsets == [len(head) + 12, len(head) + 4, len(head)]


@pytest.mark.parametrize(
    ("tensors", "metadata", "words"),
    [
        ([("a", "C128", (1,))], {}, "no dtype C128"),
        ([("__metadata__", "U8", (1,))], {}, "__metadata__"),
        ([("a", "U8", (1,)), ("a", "U8", (2,))], {}, "two tensors"),
        ([("\ud800", "U8", (1,))], {}, "not Unicode"),
        ([("n" * 4097, "U8", (1,))], {}, "4096"),
        ([("a", "U8", (1,))], {"k": 1}, "strings"),
        ([("a", "U8", (1,))], {"k": "\udc00"}, "strings"),
        ([("a", "U8", (1,))], {"k": "x" * 100_000_001}, "the limit is 100000000"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(tensors, metadata, words):
    with pytest.raises(UsageError, match=words):
        build_header([(name, DTYPES[dtype], shape) for name, dtype, shape in tensors], metadata)


def test_sub_byte_tensors_must_fill_bytes():
    with pytest.raises(CkptError, match="not whole bytes"):
        build_header([("a", DTYPES["F4"], (3,))], {})


# -- reading ----------------------------------------------------------------------------------------------------------


@given(TENSORS, st.none() | st.dictionaries(NAMES, NAMES, min_size=1, max_size=3))
def test_the_reader_finds_what_the_library_wrote(tensors, metadata):
    raw = library_file(tensors, metadata)
    header = parse_header(raw, path="x", size=len(raw))
    theirs = {
        name: (found["dtype"], tuple(found["shape"]), bytes(found["data"]))
        for name, found in safetensors.deserialize(raw)
    }
    ours = {}
    for row, name in enumerate(header.names):
        stored = header.stored(row)
        data = raw[stored.offset : stored.offset + stored.dtype.nbytes(stored.numel)]
        ours[name] = (stored.dtype.name, stored.shape, data)
        assert header.end[row] - header.begin[row] == len(data)
        assert (header.dtype[row], header.shape[row]) == (stored.dtype, stored.shape)
    assert (
        ours == theirs
        and len(header) == len(tensors)
        and header.nbytes == sum(len(each[2]) for each in theirs.values())
    )
    assert header.metadata == (metadata or {})


def columns(found):
    return (list(found.names), found.kinds, found.begins, found.filled, found.metadata)


@given(
    TENSORS.filter(bool), st.none() | st.dictionaries(NAMES, NAMES, min_size=1, max_size=2), st.booleans(), st.data()
)
def test_both_roads_read_one_header_alike(tensors, metadata, spaced, data):
    """Compact or spaced as `json.dumps` does, in any order."""
    head = json.loads(text_of(library_file(tensors, metadata)))
    first = [key for key in head if key == "__metadata__"]
    rest = data.draw(st.permutations([key for key in head if key != "__metadata__"]))
    shuffled = {key: head[key] for key in [*first, *rest]}
    text = json.dumps(shuffled, ensure_ascii=False, separators=(", ", ": ") if spaced else (",", ":")).encode()
    strict = entries.strict(text, path="x")
    quick = entries.quick(text + b" " * data.draw(st.integers(0, 9)), path="x")
    escaped = any(json.dumps(name, ensure_ascii=False) != f'"{name}"' for name in tensors)
    assert escaped or quick is not None, "the quick road must take what writers write"
    if quick is not None:
        assert columns(quick) == columns(strict)


MUTATIONS = list(b'{}[],:"\\0123456789-eE. \t\n\0\xffUF') + [
    b"null",
    b"-0",
    b"1.0",
    b'"a"',
    b"[]",
    b"{}",
    b"99999999999999999999",
]


@settings(max_examples=400)
@given(TENSORS.filter(bool), st.data())
def test_what_we_accept_the_library_accepts_and_both_roads_agree(tensors, data):
    raw = library_file(tensors, data.draw(st.sampled_from([None, {"format": "pt"}])))
    text = bytearray(text_of(raw))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        piece = data.draw(st.sampled_from(MUTATIONS))
        piece = piece if isinstance(piece, bytes) else bytes([piece])
        text[at : at + data.draw(st.integers(0, 2))] = piece
    text = bytes(text)
    raw = len(text).to_bytes(8, "little") + text + raw[8 + len(text_of(raw)) :]
    try:
        quick = entries.quick(text, path="x")
    except CorruptFile:
        quick = None
    if quick is not None:
        assert columns(quick) == columns(entries.strict(text.rstrip(b" \t\r\n"), path="x"))
    try:
        header = parse_header(raw, path="x", size=len(raw))
    except CorruptFile as fault:
        assert fault.code.startswith("E03") and fault.path == "x" and fault.hint
        return
    theirs = {name: (found["dtype"], tuple(found["shape"])) for name, found in safetensors.deserialize(raw)}
    assert {name: (k.dtype.name, k.shape) for name, k in zip(header.names, header.kinds, strict=True)} == theirs


@pytest.mark.parametrize(
    ("row", "make", "want", "words"),
    [pytest.param(*case, id=case[0]) for case in hostile.CASES if case[0] != "A31-zip"],
)
def test_table_a(row, make, want, words, tmp_path):
    source = make(tmp_path)
    tree = Tree(source)
    names = [tree.single] if tree.single else sorted(path for path in tree.names() if path.endswith(".safetensors"))
    start = time.perf_counter()
    code = want if isinstance(want, int) else want["*"]
    try:
        for name in names:
            read_header(tree, name)
        assert code == 0
    except CkptError as fault:
        assert fault.exit_code == code, fault
        text = json.dumps(fault.to_json(), ensure_ascii=False).lower()
        assert all(word.lower() in text for word in words), (words, text)
        assert fault.path == tree.display(name) and fault.hint and (fault.offset is not None or fault.place)
    assert time.perf_counter() - start < 2
    if row == "A4":
        assert tree.bytes_read <= 72


def test_only_the_header_is_read(tmp_path):
    raw = library_file({"a": ("F32", (100, 100)), "b": ("U8", (7,))})
    tree = on_disk(tmp_path, raw)
    header = read_header(tree, "model.safetensors")
    assert tree.bytes_read == header.data_start == 8 + len(text_of(raw))


def test_leniency_tells_instead_of_refusing(tmp_path):
    text = b' \t{"__metadata__":null,"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3],"x":{}}}'
    tree = on_disk(tmp_path, len(text).to_bytes(8, "little") + text + b"abc")
    with pytest.raises(CorruptFile, match="must begin with"):
        read_header(tree, "model.safetensors")
    header = read_header(tree, "model.safetensors", lenient=True)
    assert header.stored(0).offset == 8 + len(text) and len(header.warnings) == 3


def test_an_unknown_field_is_told_and_a_line_feed_may_pad():
    text = b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3],"extra":[1,{"b":2}]}}\n\t '
    raw = len(text).to_bytes(8, "little") + text + b"abc"
    header = parse_header(raw, path="x", size=len(raw))
    assert header.warnings == ("tensor a: unknown field extra, not copied",) and list(header.names) == ["a"]


def test_all_entries_at_fault_are_told_at_once():
    head = {f"t{i}": {"dtype": "f32" if i % 2 else "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(6)}
    text = json.dumps(head).encode()
    with pytest.raises(CorruptFile) as caught:
        parse_header(len(text).to_bytes(8, "little") + text, path="x", size=8 + len(text))
    assert caught.value.place == "/t1/dtype" and len(caught.value.faults) == 2 and "/t5/dtype" in caught.value.faults[1]
    at = text.index(b'{"dtype": "f32"')
    assert caught.value.offset == 8 + at


def test_many_tensors_open_in_linear_time():
    took = []
    for count in (75_000, 300_000):
        text = hostile.many(count)
        start = time.process_time()
        header = parse_header(len(text).to_bytes(8, "little") + text, path="x", size=8 + len(text))
        took.append(time.process_time() - start)
        assert len(header) == count
    assert took[1] < 2 and took[1] < 10 * took[0]


def test_a_header_of_many_blocks_is_read_whole(monkeypatch):
    monkeypatch.setattr(entries, "_BLOCK", 200)
    tensors = {f"layer.{i}.weight": ("F32", (i % 5, 3)) for i in range(300)}
    text = text_of(library_file(tensors, {"format": "pt"}))
    assert columns(entries.quick(text, path="x")) == columns(entries.strict(text.rstrip(), path="x"))


def test_the_collector_runs_again_whatever_happens():
    assert gc.isenabled()
    for raw in (hostile.SOUND, hostile.SOUND[:-1]):
        try:
            parse_header(raw, path="x", size=len(raw))
        except CorruptFile:
            pass
        assert gc.isenabled()


def test_a_zip_inside_a_tensor_is_data_unless_it_claims_the_file(tmp_path):
    inner = hostile.zip_of(hostile.PICKLE)  # as TransformerEngine's `_extra_state` holds
    embedded = hostile.file_of({"_extra_state": hostile.entry("U8", [len(inner)], [0, len(inner)])}, inner)
    tree = on_disk(tmp_path, embedded, "embedded.safetensors")
    refuse_twin(tree, read_header(tree, "embedded.safetensors"))
    out = io.BytesIO(embedded[: -len(inner)])
    out.seek(0, io.SEEK_END)
    with zipfile.ZipFile(out, "a") as archive:  # offsets count from the start of the file
        archive.writestr("archive/data.pkl", hostile.PICKLE)
    grown = len(out.getvalue()) - (len(embedded) - len(inner))
    head = hostile.file_of({"_extra_state": hostile.entry("U8", [grown], [0, grown])})
    if len(head) != len(embedded) - len(inner):
        pytest.skip("the sizes have another number of digits")
    tree = on_disk(tmp_path, head + out.getvalue()[len(head) :], "twin.safetensors")
    assert zipfile.is_zipfile(tmp_path / "twin.safetensors")
    header = read_header(tree, "twin.safetensors")
    with pytest.raises(UnsafeInput, match="parses as zip"):
        refuse_twin(tree, header)
    with pytest.raises(UnsafeInput, match="parses as zip"):
        api.verify(str(tmp_path / "twin.safetensors"))


def test_what_a_file_is():
    assert what_is(b"\n <!doctype HTML>") == "an HTML or XML page"
    assert (
        "pickle" in what_is(hostile.PICKLE) and "zip" in what_is(hostile.zip_of(b"")) and what_is(hostile.SOUND) is None
    )


# -- the table --------------------------------------------------------------------------------------------------------


@given(TENSORS, TENSORS)
def test_the_table_is_a_mapping_of_all_headers(left, right):
    right = {name: value for name, value in right.items() if name not in left}
    headers = [
        parse_header(raw, path=path, size=len(raw))
        for path, raw in (("l", library_file(left)), ("r", library_file(right)))
    ]
    table = HeaderTable(headers)
    assert len(table) == len(left) + len(right) and first_twice(headers) is None
    assert list(table.values()) == [table[key] for key in table] == [value for _, value in table.items()]
    assert [(r.name, r.dtype, r.shape, r.nbytes) for r in table.rows()] == [
        (t.key.name, t.dtype, t.shape, t.nbytes) for t in table.values()
    ]
    for name, (dtype, shape) in {**left, **right}.items():
        tensor = table[TensorKey(name)]
        assert (tensor.dtype.name, tensor.shape, tensor.chunks[0].array.path) == (
            dtype,
            shape,
            "l" if name in left else "r",
        )
    for absent in (TensorKey("no such name, at 13"), *(TensorKey(name, "exp_avg") for name in left)):
        assert absent not in table
    if left:
        assert first_twice([headers[0], headers[0]]) is not None


def test_kept_rows_keep_their_places():
    raw = library_file({name: ("U8", (i,)) for i, name in enumerate("abcd")})
    header = parse_header(raw, path="x", size=len(raw))
    kept = header.keep([False, True, False, True])
    assert list(kept.names) == ["b", "d"] and [kept.stored(i) for i in (0, 1)] == [header.stored(1), header.stored(3)]
