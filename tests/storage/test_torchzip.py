"""The torch containers against torch itself: what it writes we read, what we plan it loads; and table C."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import pathlib
import random
import subprocess
import sys
import textwrap
import zipfile
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.core.box import contiguous_strides
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.errors import CkptError, CorruptFile, InputError, UnsafeInput, UsageError
from ckpt_tool.storage.pickles import pickle_reader as pickles
from ckpt_tool.storage.pickles.pickle_values import TensorRef, WrapperRef
from ckpt_tool.storage.pickles.pickle_writer import dumps, stored
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.torch_files.torch_stream import TorchStream, is_stream, is_tar, refuse_tar
from ckpt_tool.storage.torch_files.torchzip import TorchZip, plan_zip

HERE = pathlib.Path(__file__).parent
FIXTURES = HERE.parents[1] / "fixtures"
TORCH_DTYPES = {name: getattr(torch, d.torch) for name, d in DTYPES.items() if d.torch and hasattr(torch, d.torch)}


def cases_of(name):
    spec = importlib.util.spec_from_file_location(name, HERE.parent / "hostile" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class CountingTree(Tree):
    """Remembers which bytes were read."""

    def __init__(self, path):
        super().__init__(path)
        self.reads = []

    def read(self, path, offset, nbytes):
        self.reads.append((offset, nbytes))
        return super().read(path, offset, nbytes)


def opened(path, cls=Tree):
    """(container, Pickled) of a torch file, by content."""
    tree = cls(path)
    head = tree.head(path.name, 512)
    if is_tar(head):
        refuse_tar(str(path))
    if is_stream(head):
        stream = TorchStream.open(tree, path.name)
        return stream, stream.pickled
    container = TorchZip.open(tree, path.name)
    return container, container.pickled()


def tensor_of(path, array):
    """The array's values as a torch tensor, straight from the file's bytes."""
    strides = array.strides or contiguous_strides(array.shape)
    dtype = getattr(torch, array.dtype.torch)
    if not array.numel:
        return torch.empty(array.shape, dtype=dtype)
    last = sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True))
    with path.open("rb") as file:
        file.seek(array.offset)
        raw = bytearray(file.read(array.dtype.nbytes(last + 1)))
    return torch.frombuffer(raw, dtype=dtype).as_strided(array.shape, strides)


def bits(tensor):
    flat = tensor.detach().resolve_conj().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8)


def compare(ours, theirs, container, path):
    """Every tensor that we found has torch's values, bit for bit; plain values are equal. Returns how many tensors."""
    if isinstance(ours, TensorRef):
        got = tensor_of(path, container.array(ours))
        assert got.dtype == theirs.dtype and got.shape == theirs.shape
        assert torch.equal(bits(got), bits(theirs))
        assert ours.requires_grad == theirs.requires_grad
        return 1
    if isinstance(ours, WrapperRef):
        assert ours.shape == tuple(theirs.shape)
        return compare(ours.local, theirs._local_tensor, container, path)
    if isinstance(ours, dict):
        assert list(ours) == list(theirs)
        return sum(compare(value, theirs[key], container, path) for key, value in ours.items())
    if type(ours) in (list, tuple):
        assert len(ours) == len(theirs)
        return sum(compare(a, b, container, path) for a, b in zip(ours, theirs, strict=True))
    if type(ours) in (int, float, str, bytes, bool, type(None)):
        assert ours == theirs or (isinstance(ours, float) and math.isnan(ours))
    return 0


def ramp(shape, dtype):
    numbers = torch.arange(math.prod(shape) if shape else 1) % 120
    return numbers.to(dtype).reshape(shape)


# -- reading ----------------------------------------------------------------------------------------------------------


def everything():
    """One state dict with what torch.save has ways to write."""
    base = torch.arange(1000, dtype=torch.float32)
    odd = {name: ramp((3, 5), dtype) for name, dtype in TORCH_DTYPES.items()}
    tied = torch.nn.Parameter(ramp((4, 6), torch.bfloat16))
    return {
        **odd,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 7),
        "views": [base[10:40].view(5, 6), base[::3], base.view(10, 100).t(), base[5], base[:0]],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 9),
        "channels_last": ramp((2, 3, 4, 5), torch.float16).to(memory_format=torch.channels_last),
        "tied": (tied, tied, {"again": tied}),
        "frozen": torch.nn.Parameter(torch.ones(3), requires_grad=False),
        "module": torch.nn.Linear(3, 4).state_dict(),
        "plain": {"lr": 1e-3, "betas": (0.9, 0.999), "name": "ü", "none": None, 7: [True, -(1 << 70), b"\x00"]},
    }


@pytest.mark.parametrize("form", ["zip", "stream", "protocol4", "protocol5"])
def test_what_torch_saves_is_read_bit_for_bit(form, tmp_path):
    path = tmp_path / "a name.pt"
    value = everything()
    if form == "stream":
        for name in ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "U16", "U32", "U64"):
            value.pop(name)  # torch itself cannot save these in the old form
    options = {"_use_new_zipfile_serialization": form != "stream"}
    protocol = int(form[-1]) if form.startswith("protocol") else 2
    torch.save(value, path, pickle_protocol=protocol, **options)
    container, done = opened(path)
    assert not done.unsafe
    pickles.refuse_weight_bearing(done.value, str(path))
    assert compare(done.value, torch.load(path, weights_only=False), container, path) >= 20
    tied = done.value["tied"]
    assert tied[0].storage == tied[1].storage == tied[2]["again"].storage and tied[0].is_parameter
    assert container.array(done.value["expanded"]).strides == (1, 0)
    assert container.array(done.value["channels_last"]).strides == (60, 1, 15, 3)


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("torch/*.pt")), ids=lambda path: path.name)
def test_fixtures_are_read_as_torch_reads_them(path):
    container, done = opened(path)
    assert not done.unsafe
    assert compare(done.value, torch.load(path, weights_only=False), container, path)


def test_attributes_of_a_tensor_are_kept(tmp_path):
    weight = torch.nn.Parameter(ramp((2, 3), torch.float32))
    weight.tensor_model_parallel = True
    weight.partition_dim = 0
    torch.save({"w": weight, "t": torch.ones(2)}, tmp_path / "a.pt")
    _, done = opened(tmp_path / "a.pt")
    assert done.value["w"].attributes == {"tensor_model_parallel": True, "partition_dim": 0}
    assert done.value["w"].is_parameter and done.value["t"].attributes is None


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: torch.ones(3, 3).to_sparse(), "sparse"),
        (lambda: torch.ones(3, 3).to_sparse_csr(), "sparse"),
        (lambda: torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8), "quantised"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "conjugated"),
        (lambda: torch.empty(3, device="meta"), "meta"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    ],
    ids=["sparse", "csr", "quantised", "conjugated", "meta", "nested"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_bytes_are_refused_by_name(make, word, tmp_path):
    torch.save({"fine": torch.ones(2), "odd": make()}, tmp_path / "a.pt")
    _, done = opened(tmp_path / "a.pt")
    assert not done.unsafe
    if word == "meta":  # it has no values, so nothing is lost: a record
        assert done.value["odd"].name.endswith("_rebuild_meta_tensor_no_storage")
        return
    with pytest.raises(InputError, match=word) as caught:
        pickles.refuse_weight_bearing(done.value, "a.pt")
    assert caught.value.code == "E0374" and caught.value.exit_code == 3


@given(st.integers(0, 10**9))
@settings(max_examples=40, deadline=None)
def test_random_views(tmp_path_factory, seed):
    draw = random.Random(seed)
    path = tmp_path_factory.mktemp("views") / "a.pt"
    base = ramp((draw.randint(1, 6), draw.randint(1, 6), draw.randint(1, 6)), draw.choice(list(TORCH_DTYPES.values())))
    value = {}
    for number in range(6):
        view = base.permute(draw.sample(range(3), 3))
        dim = draw.randrange(3)
        start = draw.randrange(view.shape[dim])
        view = view.narrow(dim, start, draw.randint(0, view.shape[dim] - start))
        value[str(number)] = view[:: draw.randint(1, 2)]
    torch.save(value, path)
    container, done = opened(path)
    assert compare(done.value, value, container, path) == 6


def test_reading_touches_no_storage(tmp_path):
    path = tmp_path / "big.pt"
    torch.save({str(i): torch.arange(i * 5_000, dtype=torch.float32) for i in range(1, 40)}, path)
    container, done = opened(path, CountingTree)
    storages = [(array.offset, array.dtype.nbytes(array.numel)) for array in map(container.array, done.value.values())]
    for at, nbytes in container.tree.reads:
        assert not any(start < at + nbytes and at < start + length for start, length in storages)
    assert len(container.tree.reads) < len(storages) + 6


def test_an_item_inside_a_file_takes_two_reads(tmp_path):
    """A DCP file is zips end to end: items are opened at their offset, offsets come back absolute."""
    path = tmp_path / "__0_0.distcp"
    items = []
    tensors = []
    with path.open("wb") as file:
        for i in range(20):
            buffer = io.BytesIO()
            tensors.append(ramp((i, 16 + i % 3), torch.float32))
            torch.save(tensors[-1], buffer)
            items.append((file.tell(), buffer.tell()))
            file.write(buffer.getvalue())
    tree = CountingTree(path)
    head = TorchZip.open(tree, path.name, *items[0]).head
    for number, (start, length) in enumerate(items):
        tree.reads.clear()
        guess = length - head - tensors[number].nbytes
        item = TorchZip.open(tree, path.name, start, length, tail=guess)
        done = item.pickled()
        assert torch.equal(tensor_of(path, item.array(done.value)), tensors[number])
        storage = item.array(done.value).offset
        assert len(tree.reads) <= 2
        for at, nbytes in tree.reads:
            assert at + nbytes <= storage or at >= storage + tensors[number].nbytes
        head = item.head


def test_bytes_of_no_member_are_not_read(tmp_path):
    raw = HOSTILE._gap(bytes(20 << 20))
    (tmp_path / "model.pt").write_bytes(raw)
    tree = Tree(tmp_path / "model.pt")
    with pytest.raises(UnsafeInput, match="belong"):
        TorchZip.open(tree, "model.pt")
    assert tree.bytes_read < 300_000


def test_a_directory_repacked_by_another_zip_tool_is_read(tmp_path):
    """No descriptors, no alignment, folder entries, other order of members."""
    torch.save({"w": ramp((4, 5), torch.int64)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as source, zipfile.ZipFile(tmp_path / "b.pt", "w") as target:
        target.writestr(zipfile.ZipInfo("x/data/"), b"")
        for info in reversed(source.infolist()):
            target.writestr(zipfile.ZipInfo("x/" + info.filename.partition("/")[2]), source.read(info))
    container, done = opened(tmp_path / "b.pt")
    assert (
        container.root == "x" and compare(done.value, torch.load(tmp_path / "a.pt"), container, tmp_path / "b.pt") == 1
    )


# -- writing ----------------------------------------------------------------------------------------------------------


def written(path, root, pickle, blobs):
    """Run a plan: literals, storages, CRC holes. blobs: [(key, bytes)]."""
    plan = plan_zip(root, pickle, [(key, len(blob)) for key, blob in blobs])
    with path.open("wb") as file:
        file.truncate(plan.size)
        for at, data in plan.literals:
            file.seek(at)
            file.write(data)
        for at, holes, (_, blob) in zip(plan.offsets, plan.crcs, blobs, strict=True):
            file.seek(at)
            file.write(blob)
            for hole in holes:
                file.seek(hole)
                file.write(zlib.crc32(blob).to_bytes(4, "little"))
    return plan


def sample():
    """(value for dumps, blobs): one tensor of each dtype that torch has, scalars and empties among them."""
    value = {}
    blobs = []
    for number, (name, torch_dtype) in enumerate(TORCH_DTYPES.items()):
        shape = ((3, number), (), (number + 1,), (0, 4))[number % 4]
        float_ = DTYPES[name].is_float and number % 3 == 0
        value[name] = stored(str(number), shape, DTYPES[name], parameter=float_, requires_grad=float_)
        blobs.append((str(number), bits(ramp(shape, torch_dtype)).numpy().tobytes()))
    return value | {"step": 7, "args": {"lr": 0.1, "tags": ["a", None, (1, 2.5)]}}, blobs


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("calculate", [False, True])
def test_torch_loads_what_was_planned(mmap, calculate, tmp_path, monkeypatch):
    from torch.utils.serialization import config

    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")  # torch then checks the offsets that it computes
    config.load.calculate_storage_offsets = calculate
    path = tmp_path / "out.pt"
    value, blobs = sample()
    plan = written(path, "out", dumps(value), blobs)
    assert path.stat().st_size == plan.size and all(offset % 64 == 0 for offset in plan.offsets)
    got = torch.load(path, weights_only=True, mmap=mmap)
    assert got["step"] == 7 and got["args"] == value["args"]
    for (name, ref), (_, blob) in zip(value.items(), blobs, strict=False):
        assert got[name].dtype == TORCH_DTYPES[name] and got[name].shape == ref.shape
        assert bits(got[name]).numpy().tobytes() == blob
        assert got[name].requires_grad == ref.requires_grad
        assert isinstance(got[name], torch.nn.Parameter) == ref.is_parameter
    assert zipfile.ZipFile(path).testzip() is None
    meta = torch.load(path, weights_only=True, map_location="meta")
    config.load.calculate_storage_offsets = False
    assert [meta[name].untyped_storage()._checkpoint_offset for name in TORCH_DTYPES] == list(plan.offsets)


def test_the_plan_is_torchs_own_layout(tmp_path):
    """Byte for byte what torch wrote, but for the serialization id, a hash whose recipe is torch's own."""
    value = {"a": ramp((5, 7), torch.float32), "e": torch.empty(0, 3), "b": ramp((33,), torch.int16)}
    torch.save(value, tmp_path / "a.pt")
    want = bytearray((tmp_path / "a.pt").read_bytes())
    with zipfile.ZipFile(tmp_path / "a.pt") as zipped:
        pickle = zipped.read("a/data.pkl")
    written(tmp_path / "b.pt", "a", pickle, [(str(i), bits(t).numpy().tobytes()) for i, t in enumerate(value.values())])
    got = bytearray((tmp_path / "b.pt").read_bytes())
    assert len(got) == len(want)
    for raw in (got, want):
        record = raw.index(b".data/serialization_id") + 22
        record = raw.index(b"Z", record)
        while raw[record] == ord("Z"):
            record += 1
        raw[record : record + 40 + 8] = bytes(48)  # the id, the descriptor's mark and its CRC
        entry = raw.rindex(b".data/serialization_id")
        at = raw.rindex(b"PK\x01\x02", 0, entry)
        raw[at + 16 : at + 20] = bytes(4)
    assert got == want


def test_equal_input_gives_equal_bytes():
    value, blobs = sample()
    sizes = [(key, len(blob)) for key, blob in blobs]
    assert plan_zip("out", dumps(value), sizes) == plan_zip("out", dumps(value), sizes)
    assert plan_zip("out", dumps(value), sizes).literals != plan_zip("other", dumps(value), sizes).literals


def test_an_item_is_planned_at_its_place():
    plain, moved = (plan_zip("archive", b"\x80\x02N.", [("0", 10)], base=base) for base in (0, 1577))
    assert moved.size == plain.size
    assert [at - 1577 for at, _ in moved.literals] == [at for at, _ in plain.literals]
    assert moved.offsets == (plain.offsets[0] + 1577,) and moved.crcs[0] == tuple(h + 1577 for h in plain.crcs[0])


@pytest.mark.parametrize("root", ["", "a/b", "..", "a\\b"])
def test_a_root_is_a_plain_name(root):
    with pytest.raises(UsageError):
        plan_zip(root, b"", [])


def test_archives_beyond_4_gib(tmp_path, monkeypatch):
    """Zip64: a storage of more than 4 GiB, one behind it, and a directory behind that; the storages are holes."""
    path = tmp_path / "big.pt"
    # the zip64 offset of the second header moves its data by an alignment step
    big = (1 << 32) + 116
    small = 40
    value = {"a": stored("0", (big,), DTYPES["U8"]), "b": stored("1", (10,), DTYPES["F32"])}
    plan = plan_zip("big", dumps(value), [("0", big), ("1", small)])
    blob = ramp((10,), torch.float32).numpy().tobytes()
    with path.open("wb") as file:
        file.truncate(plan.size)
        for at, data in (*plan.literals, (plan.offsets[1], blob), (plan.offsets[0] + big - 1, b"\x07")):
            file.seek(at)
            file.write(data)
        for hole in plan.crcs[1]:
            file.seek(hole)
            file.write(zlib.crc32(blob).to_bytes(4, "little"))
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")  # torch then checks the offsets that it computes
    got = torch.load(path, weights_only=True, mmap=True)
    from torch.utils.serialization import config

    config.load.calculate_storage_offsets = True
    calculated = torch.load(path, weights_only=True, mmap=True)
    config.load.calculate_storage_offsets = False
    assert torch.equal(calculated["b"], got["b"])
    assert got["a"].shape == (big,) and got["a"][-1] == 7 and got["a"][:5].sum() == 0
    assert torch.equal(got["b"], ramp((10,), torch.float32))
    with zipfile.ZipFile(path) as zipped:
        assert zipped.read("big/data/1") == blob and zipped.getinfo("big/data/0").file_size == big
        assert zipped.read("big/version") == b"3\n"
    container, done = opened(path)
    assert container.array(done.value["b"]).offset == plan.offsets[1] > 1 << 32
    assert container.array(done.value["a"]).crc is None and container.array(done.value["b"]).crc[2] == zlib.crc32(blob)


# -- hostile files ----------------------------------------------------------------------------------------------------

HOSTILE = cases_of("zip_cases")


@pytest.mark.parametrize("case", HOSTILE.CASES, ids=lambda case: case[0])
def test_hostile_zips(case, tmp_path):
    row, make, want, words = case
    path = make(tmp_path)
    before = path.read_bytes()
    error = None
    try:
        container, done = opened(path)
        pickles.refuse_unsafe(done, str(path))
        arrays = [container.array(ref) for ref in done.value.values()]
        for array in arrays:  # as whoever reads the values does
            if array.crc is not None and zlib.crc32(before[array.crc[0] : array.crc[0] + array.crc[1]]) != array.crc[2]:
                raise CorruptFile("CRC", code="E0347", path=path, hint="damaged")
    except CkptError as e:
        error = e
    assert (error.exit_code if error else 0) == (want["*"] if isinstance(want, dict) else want), error
    if error is not None:
        text = json.dumps(error.to_json()).lower()
        assert all(word.lower() in text for word in words), text
        assert error.hint and error.path and isinstance(error, CorruptFile | UnsafeInput | InputError)
    assert path.read_bytes() == before


def test_reading_opens_the_file_and_does_nothing_else(tmp_path):
    """Every hostile zip again in a fresh process whose audit hook records what the interpreter is asked to do."""
    for number, (_, make, _, _) in enumerate(HOSTILE.CASES):
        folder = tmp_path / f"{number:03}"
        folder.mkdir()
        make(folder)
    script = """
    import os, sys
    from ckpt_tool.errors import CkptError
    from ckpt_tool.storage import magic, source  # the one is imported where a file is refused
    from ckpt_tool.storage.pickles import pickle_reader as pickles, pickle_opcodes
    from ckpt_tool.storage.torch_files import torch_stream, torchzip
    trees = [source.Tree(os.path.join(sys.argv[1], folder, "model.pt")) for folder in sorted(os.listdir(sys.argv[1]))]
    seen = set()
    sys.addaudithook(lambda event, args: seen.add((event, str(args[0]) if event != "builtins.id" else "")))
    for tree in trees:
        try:
            if torch_stream.is_stream(tree.head("model.pt")):
                torch_stream.TorchStream.open(tree, "model.pt")
            else:
                torchzip.TorchZip.open(tree, "model.pt").pickled()
        except CkptError as e:
            e.to_json()
    print(len(trees), sorted({event for event, _ in seen} - {"builtins.id"}))
    print({name for event, name in seen if event == "open" and not name.endswith("model.pt")})
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=HERE.parents[1],
        check=False,
    )
    assert done.stdout.splitlines() == [f"{len(HOSTILE.CASES)} ['open']", "set()"], done.stdout + done.stderr


@pytest.mark.parametrize("form", ["zip", "stream"])
def test_every_truncation_is_told(form, tmp_path):
    """Cut anywhere, the file is refused with exit 3 or 4, quickly, and never read as something smaller."""
    whole = tmp_path / "whole.pt"
    torch.save(
        {"a": ramp((3,), torch.float32), "b": ramp((2,), torch.int64)},
        whole,
        _use_new_zipfile_serialization=form == "zip",
    )
    data = whole.read_bytes()
    path = tmp_path / "cut.pt"
    for size in {*range(200), *range(len(data) - 130, len(data)), *range(200, len(data), 17)}:
        path.write_bytes(data[:size])
        with pytest.raises((CorruptFile, UnsafeInput, InputError)):
            opened(path)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_flipped_byte_outside_storages_is_told_or_harmless(tmp_path_factory, data):
    """One byte of a header, name, size or pickle changed: an error of ours, or the same tensors as before."""
    folder = tmp_path_factory.mktemp("flip")
    raw = bytearray(SOUND)
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    path = folder / "a.pt"
    path.write_bytes(raw)
    try:
        container, done = opened(path)
        arrays = [container.array(ref) for ref in done.value.values()]
    except (CorruptFile, UnsafeInput, InputError) as e:
        assert e.code.startswith(("E03", "E04"))
        return
    assert [(a.offset, a.shape, a.dtype.name) for a in arrays] == SOUND_ARRAYS


def _sound():
    buffer = io.BytesIO()
    torch.save({"w": ramp((3, 4), torch.float32), "v": ramp((5,), torch.bfloat16)}, buffer)
    return buffer.getvalue()


SOUND = _sound()
SOUND_ARRAYS = [(SOUND.index(ramp((3, 4), torch.float32).numpy().tobytes()), (3, 4), "F32")]
SOUND_ARRAYS.append((SOUND.index(bits(ramp((5,), torch.bfloat16)).numpy().tobytes()), (5,), "BF16"))
