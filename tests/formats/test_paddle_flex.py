"""`paddle-flex`: against the files of real jobs (values and Paddle's own metadata), and there and back at any degrees.

The writer's oracle is Paddle: from one checkpoint the layout of another job's is made, and the metadata must be that
job's own, key by key, shard by shard, file by file. Fused weights are checked by what a rank's file holds, cut by
NumPy.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from writings import writing_of

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.hints import Degrees, Dialect, Hints
from ckpt_tool.core.progress import Silent
from ckpt_tool.core.target import LayoutWish, Wanted, WantedTensor
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import CkptError, UsageError
from ckpt_tool.formats.base import ReadOptions
from ckpt_tool.options.reading import Reading
from ckpt_tool.storage.pickles import pickle_reader as pickles
from ckpt_tool.storage.pickles.pickle_values import PickledRecord
from ckpt_tool.storage.pickles.pickle_writer import dumps
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.paddle.flex.folders import folder_of, plain_keys, suffix_of, trainer_key
from ckpt_tool.systems.paddle.flex.format import FORMAT
from ckpt_tool.systems.paddle.flex.metadata import MODULE, FlexEntry, FlexListing, Shard, read_metadata
from ckpt_tool.systems.paddle.flex.read import degrees_of, fused_blocks
from ckpt_tool.systems.paddle.flex.target import FlexBlock, kept
from ckpt_tool.systems.paddle.job import PaddleHints
from ckpt_tool.systems.paddle.options import PaddleOptions
from ckpt_tool.systems.paddle.pickle_file import read_paddle

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "paddle-flex"
ERNIE = {
    "model_type": "ernie4_5",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 24,
    "vocab_size": 54,
}
MOE = {**ERNIE, "model_type": "ernie4_5_moe"}
LLAMA = {**ERNIE, "model_type": "llama", "tie_word_embeddings": True}


def lay_out(target, folder, values):
    """The slow executor: byte by byte as `core.target` says, strides included."""
    for file in target.files:
        data = np.zeros(file.size, "u1")
        for offset, piece in file.literals:
            data[offset : offset + len(piece)] = np.frombuffer(piece, "u1")
        for array in file.arrays:
            value = values[array.tensor][
                tuple(slice(o, e) for o, e in zip(array.box.offset, array.box.end, strict=True))
            ]
            item = value.dtype.itemsize
            strides = array.strides or [s // item for s in np.zeros(value.shape, value.dtype).strides]
            out = np.lib.stride_tricks.as_strided(
                data[array.offset :], (*value.shape, item), (*(s * item for s in strides), 1)
            )
            assert not out.any(), f"{file.path}: two things lie at {array.offset}"
            out[...] = np.ascontiguousarray(value).reshape(*value.shape, 1).view("u1").reshape(*value.shape, item)
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.tobytes())


def gather(tree, tensor):
    """The whole tensor from the first replica of each box, as unsigned integers of its width."""
    kind = np.dtype(f"u{tensor.dtype.bits // 8}")
    out = np.zeros(tensor.shape, kind)
    filled = np.zeros(tensor.shape, int)
    for chunk in tensor.chunks:
        if chunk.replica or not chunk.box.numel:
            continue
        start, strides = chunk.region()
        last = start + sum((n - 1) * s for n, s in zip(chunk.box.shape, strides, strict=True))
        raw = np.frombuffer(tree.read(chunk.array.path, chunk.array.offset, (last + 1) * kind.itemsize), kind)
        where = tuple(slice(o, e) for o, e in zip(chunk.box.offset, chunk.box.end, strict=True))
        out[where] = np.lib.stride_tricks.as_strided(raw[start:], chunk.box.shape, [s * kind.itemsize for s in strides])
        filled[where] += 1
    assert (filled == 1).all() or not tensor.numel, tensor.key
    return out


def values_of(path):
    tree = Tree(path)
    catalog = FORMAT.read(tree)
    return catalog, {key: gather(tree, tensor) for key, tensor in catalog.tensors.items()}


def rewrite(path, out, degrees, sharding=None, config=None, **hints):
    """What `convert` would make of a checkpoint at these degrees."""
    catalog, values = values_of(path)
    zero = 1 if degrees.get("dp", 1) > 1 else None
    known = catalog.hints.having(dataclasses.replace(catalog.hints.get(PaddleHints), **hints))
    wish = LayoutWish(Degrees(**degrees), zero, config=config, of_systems=(PaddleOptions(sharding),))
    fitted = FORMAT.fit(list(catalog.tensors.values()), catalog.extras, known, wish)
    tensors = tuple(WantedTensor(t.key, t.shape, fitted.casts.get(t.key, t.dtype), t.path) for _, t in fitted.tensors)
    assert not fitted.casts
    wanted = Wanted(tensors, catalog.extras, known, "paddle-flex", wish=wish)
    rows = list(values.values())
    lay_out(FORMAT.target(wanted, None), out, [rows[index] for index, _ in fitted.tensors])
    return catalog, values


# -- against real jobs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "degrees", "sharding", "config"),
    [
        ("ernie_ema_tp2sd2v2", {"tp": 2, "dp": 2}, "v2", ERNIE),
        ("llama_tied_pp2", {"pp": 2}, None, LLAMA),
    ],
)
def test_the_metadata_is_what_paddle_wrote(case, degrees, sharding, config, tmp_path):
    """From one rank's checkpoint, laid out for the job: Paddle's own order, shards, ranges, files."""
    _, want = values_of(FIXTURES / case)
    rewrite(FIXTURES / case, tmp_path / "one", {}, config=config)
    assert sorted(p.name for p in (tmp_path / "one/model_state").iterdir()) == ["0.metadata", "0_0.distcp"]
    rewrite(tmp_path / "one", tmp_path / "job", degrees, sharding, config)
    ours = Tree(tmp_path / "job")
    theirs = Tree(FIXTURES / case)
    folders = ("model_state/", "optimizer_state/", "master_weight/", "ema_state/")
    for folder in folders if case == "ernie_ema_tp2sd2v2" else folders[:3]:
        a = read_metadata(ours, folder, "0.metadata")
        b = read_metadata(theirs, folder, "0.metadata")
        if case == "ernie_ema_tp2sd2v2":
            assert list(a.entries) == list(b.entries) and list(a.files) == list(b.files)
        assert a.entries.keys() == b.entries.keys()
        for key, entry in b.entries.items():
            assert a.entries[key] == entry, key
        mine = {p.name for p in (tmp_path / "job" / folder).iterdir()}
        assert mine == {p.name for p in (FIXTURES / case / folder).iterdir()}
    if case == "ernie_ema_tp2sd2v2":
        metas = [
            json.loads((path / "model_meta.json").read_text())["parallel_config"]
            for path in (tmp_path / "job", FIXTURES / case)
        ]
        assert metas[0] == metas[1]
    _, have = values_of(tmp_path / "job")
    assert have.keys() == want.keys() and all(np.array_equal(have[key], want[key]) for key in want)
    assert (tmp_path / "job/saved_signal_1").read_bytes() == b"1"
    assert (tmp_path / "job/scheduler.pdparams").stat().st_size


def test_empty_ranks_and_empty_folders_are_there(tmp_path):
    """fp32 has no masters, sharding leaves some ranks without states: 47 bytes, and a metadata file, as Paddle has
    it."""
    keys = (TensorKey("norm.weight"), TensorKey("norm.weight", "exp_avg"))
    tensors = tuple(WantedTensor(key, (3,), DTYPES["F32"]) for key in keys)
    target = FORMAT.target(Wanted(tensors, wish=LayoutWish(Degrees(dp=2), 1, of_systems=(PaddleOptions("v1"),))), None)
    sizes = {file.path: file.size for file in target.files}
    assert sizes["master_weight/0_0.distcp"] == sizes["optimizer_state/1_0.distcp"] == 47
    assert {"model_state/0.metadata", "optimizer_state/0.metadata", "master_weight/0.metadata"} <= sizes.keys()
    lay_out(target, tmp_path, [np.arange(3, dtype="f4")] * 2)
    empty = read_paddle(Tree(tmp_path), "master_weight/0_0.distcp")
    assert empty.leaves == [] and empty.table
    assert read_metadata(Tree(tmp_path), "master_weight/", "0.metadata").entries == {}


# -- there and back at any degrees -------------------------------------------------------------------------------------

WIDTHS = {
    "norm.weight": (8,),
    "q_proj.weight": (8, 8),
    "up_gate_proj.weight": (8, 96),
    "down_proj.weight": (48, 8),
    "qkv_proj.bias": (16,),
}
STATES = ("model", "master", "exp_avg", "exp_avg_sq", "beta1_pow_acc", "step", "ema")


@st.composite
def jobs(draw):
    layers = draw(st.integers(1, 3))
    pp = draw(st.integers(1, layers))
    names = draw(st.lists(st.sampled_from(sorted(WIDTHS)), min_size=1, max_size=4, unique=True))
    states = ["model", *draw(st.lists(st.sampled_from(STATES[1:]), max_size=4, unique=True))]
    whole = any("qkv_proj" in name for name in names)  # 2 groups of fused heads are not parted
    first = {"tp": draw(st.sampled_from((1, 2) if whole else (1, 2, 4))), "pp": pp, "dp": draw(st.integers(1, 3))}
    second = {"tp": draw(st.sampled_from((1, 2))), "dp": draw(st.integers(1, 2))}
    experts = draw(st.sampled_from((0, 0, 4)))
    if experts and first["tp"] < 4:
        first["ep"] = draw(st.sampled_from((1, first["tp"], 4)))
    return layers, names, states, first, second, draw(st.sampled_from(("v1", "v2"))), experts


def model_of(layers, names, states, experts):
    tensors = []
    values = []
    routed = [
        f"experts.{number}.{name}" for number in range(experts) for name in ("up_gate_proj.weight", "down_proj.weight")
    ]
    for layer in range(layers):
        for name in (*names, *routed):
            for state in states:
                shape = (
                    (1,)
                    if state in ("beta1_pow_acc",)
                    else ()
                    if state == "step"
                    else WIDTHS[name.rpartition("s.")[2].lstrip("0123.")]
                )
                dtype = DTYPES["BF16" if state == "model" else "F32"]
                key = TensorKey(
                    f"model.layers.{layer}.{'mlp' if 'up' in name or 'down' in name else 'x'}.{name}", state
                )
                tensors.append(WantedTensor(key, shape, dtype))
                start = 1 + len(values) * 1000
                values.append(
                    np.arange(start, start + int(np.prod(shape)))
                    .reshape(shape)
                    .astype("u2" if dtype.bits == 16 else "u4")
                )
    return tuple(tensors), values


def of_state(wanted, state):
    return [t for t in wanted if t.key.state == state]


@settings(max_examples=15, deadline=None)
@given(jobs())
def test_there_and_back_at_any_degrees(tmp_path_factory, job):
    layers, names, states, first, second, sharding, experts = job
    tensors, values = model_of(layers, names, states, experts)
    folder = tmp_path_factory.mktemp("job")
    try:
        for number, degrees in enumerate((first, second)):
            config = MOE if experts else ERNIE
            wish = LayoutWish(Degrees(**degrees), 1, config=config, of_systems=(PaddleOptions(sharding),))
            target = FORMAT.target(Wanted(tensors, {}, Hints.of(Dialect("paddle")), wish=wish), None)
            lay_out(target, folder / str(number), values)
            catalog, have = values_of(folder / str(number))
            assert set(have) == {t.key for t in tensors}
            for tensor, value in zip(tensors, values, strict=True):
                read = catalog.tensors[tensor.key]
                assert read.shape == tensor.shape and read.dtype == tensor.dtype
                assert np.array_equal(have[tensor.key], value), (tensor.key, degrees)
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_holds_its_gate_beside_its_up(tmp_path, tp):
    """What PaddleFormers' forward takes apart: the first half of a rank's columns is gate."""
    name = "model.layers.0.mlp.up_gate_proj.weight"
    whole = np.arange(8 * 24, dtype="u4").reshape(8, 24) + 1
    tensors = (WantedTensor(TensorKey(name), (8, 24), DTYPES["F32"]),)
    wish = LayoutWish(Degrees(tp=tp), config=ERNIE)
    lay_out(FORMAT.target(Wanted(tensors, wish=wish), None), tmp_path, [whole])
    gate = whole[:, :12]
    up = whole[:, 12:]
    for rank in range(tp):
        tree = Tree(tmp_path)
        (saved,) = read_paddle(tree, f"model_state/{rank}_0.distcp").leaves
        array = saved.parts[0]
        mine = np.frombuffer(tree.read(array.path, array.offset, 4 * array.numel), "u4").reshape(array.shape)
        width = 12 // tp
        cut = slice(rank * width, (rank + 1) * width)
        assert np.array_equal(mine, np.concatenate([gate[:, cut], up[:, cut]], axis=1))
    metadata = read_metadata(Tree(tmp_path), "model_state/", "0.metadata").entries[name]
    assert [shard.offset for shard in metadata.shards] == [(0, rank * 24 // tp) for rank in range(tp)]


def test_a_folder_of_the_trainer_alone_is_read_as_one(tmp_path):
    """`model_state/` passed by itself: the same fused weights. Under another name nobody can know: as recorded, and
    said."""
    _, every = values_of(FIXTURES / "ernie_ema_tp2sd2v2")
    for folder, state in (("model_state", "model"), ("master_weight", "master"), ("ema_state", "ema")):
        catalog, values = values_of(FIXTURES / "ernie_ema_tp2sd2v2" / folder)
        assert {key.state for key in values} == {state} and not catalog.notes
        assert all(np.array_equal(values[key], every[key]) for key in values)
    shutil.copytree(FIXTURES / "ernie_ema_tp2sd2v2/model_state", tmp_path / "mine")
    catalog, values = values_of(tmp_path / "mine")
    (note,) = catalog.notes
    assert note.code == "N-fused-as-recorded" and note.key == "model.layers.0.mlp.up_gate_proj.weight"
    key = TensorKey(note.key)
    assert values[key].shape == every[key].shape and not np.array_equal(values[key], every[key])


# -- keys and states ---------------------------------------------------------------------------------------------------


@given(
    st.text("ab._0w", min_size=1, max_size=12),
    st.sampled_from((*STATES, "max_exp_avg_sq", "momentum_buffer", "odd", "extras")),
)
def test_keys_come_back(name, state):
    key = TensorKey(name, state)
    folder = folder_of(key)
    assert trainer_key(folder, name + (".w_0" if state == "ema" else suffix_of(key))) == key


@pytest.mark.parametrize("state", ["moment1", "w", "a.b", ""])
def test_states_that_would_be_read_as_others_are_refused(state):
    with pytest.raises(UsageError, match="can't be written"):
        suffix_of(TensorKey("w", state))


def test_plain_keys_are_read_with_care():
    paths = [
        ("linear_0.w_0",),
        ("opt.linear_1.w_0",),
        ("fc.weight.w_0",),
        ("fc.weight.moment2_0",),
        ("layers.0.weight",),
    ]
    found = plain_keys([(".".join(path), path) for path in paths]).keys
    assert [key.state for key in found] == ["model", "model", "master", "exp_avg_sq", "model"]
    nested = [("model", "w"), ("opt", "w.moment1_0"), ("ema", "w"), ("master_weights", "w"), ("other", "w")]
    plain = plain_keys([(".".join(path), path) for path in nested])
    assert plain.keys == [
        TensorKey("w"),
        TensorKey("w", "exp_avg"),
        TensorKey("w", "ema"),
        TensorKey("w", "master"),
        TensorKey("other.w"),
    ]
    assert plain.roots == {"model": "model", "optimizer": "opt", "ema": "ema", "master": "master_weights"}
    twice = plain_keys([("model.w", ("model", "w")), ("net.w", ("net", "w"))])
    assert twice.keys == [TensorKey("model.w"), TensorKey("net.w")] and twice.roots == {}


def test_a_plain_folder_stays_one(tmp_path):
    for case in ("nested", "twice", "kinds", "parts", "replicas"):
        catalog, values = rewrite(FIXTURES / case, tmp_path / case, {})
        names = {path.name for path in (tmp_path / case).iterdir()}
        assert names == {"0.metadata", "0_0.safetensors" if case == "nested" else "0_0.distcp"}
        again, have = values_of(tmp_path / case)
        assert have.keys() == values.keys() and all(np.array_equal(have[key], values[key]) for key in values)
        assert {k: t.path for k, t in again.tensors.items()} == {k: t.path for k, t in catalog.tensors.items()}
    theirs = read_metadata(Tree(FIXTURES / "nested"), "", "0.metadata").entries
    assert read_metadata(Tree(tmp_path / "nested"), "", "0.metadata").entries == theirs


def test_hints_say_what_the_files_show():
    catalog = FORMAT.read(Tree(FIXTURES / "ernie_ema_tp2sd2v2"))
    assert catalog.hints.get(Degrees) == Degrees(tp=2, dp=2)
    own = catalog.hints.plain["paddle"]
    assert (own["flex"], own["sharding"], own["sharding_degree"]) == ("trainer", "v2", 2)
    tied = FORMAT.read(Tree(FIXTURES / "llama_tied_pp2")).hints
    assert tied.get(Degrees) == Degrees(pp=2)
    assert (
        FORMAT.read(Tree(FIXTURES / "llama_tied_pp2"), ReadOptions(config=LLAMA)).hints.get(PaddleHints).config == LLAMA
    )


def test_averages_keep_the_key_that_no_metadata_lists():
    catalog, values = values_of(FIXTURES / "ema")
    assert TensorKey("scaling_factor", "ema") in values
    stray = [note for note in FORMAT.read(Tree(FIXTURES / "twice")).notes if note.code == "N-several-saves"]
    assert len(stray) == 1 and "number 3" in stray[0].message


# -- old metadata, odd saves -------------------------------------------------------------------------------------------


def old_metadata(folder, module):
    """A folder as Paddle 2.x wrote it: the old module, offsets and keys alone."""
    shutil.copytree(FIXTURES / "parts", folder)
    stated = {}
    stored = {}
    for rank, (low, high) in enumerate(((0, 3), (3, 6), (6, 9), (9, 10))):
        state = {"global_offset": (low, 0), "local_shape": (high - low, 3), "dtype": "float32"}
        stated.setdefault("uneven", []).append(PickledRecord(f"{module}.LocalTensorMetadata", state=state))
        index = {"tensor_key": "uneven", "global_offset": (low, 0)}
        stored[PickledRecord(f"{module}.LocalTensorIndex", state=index)] = f"{rank}_0.distcp"
    state = {"state_dict_metadata": stated, "storage_metadata": stored, "flat_mapping": None}
    (folder / "0.metadata").write_bytes(dumps(PickledRecord(f"{module}.Metadata", state=state), protocol=4))


@pytest.mark.parametrize("module", [MODULE, "paddle.distributed.checkpoint.metadata"])
def test_old_metadata_is_read(tmp_path, module):
    old_metadata(tmp_path / "old", module)
    catalog, values = values_of(tmp_path / "old")
    assert np.array_equal(values[TensorKey("uneven")].view("f4"), np.arange(30, dtype="f4").reshape(10, 3))
    assert [note.code for note in catalog.notes] == ["N-unlisted-keys"]


def test_newer_files_are_read(tmp_path):
    """Paddle after 3.3: four more fields in the metadata, and data files of protocol 5 (`_frombuffer` of a byte
    array)."""
    shutil.copytree(FIXTURES / "parts", tmp_path / "new")
    path = tmp_path / "new/0.metadata"
    value = pickles.load(path.read_bytes(), path=str(path)).value
    value.state |= {
        "model_type": "ernie",
        "checkpoint_version": "1",
        "erniebot_commit_id": None,
        "paddle_commit_id": "x",
    }
    path.write_bytes(dumps(value, protocol=4))
    want = values_of(FIXTURES / "parts")[1]
    tree = Tree(FIXTURES / "parts")
    for rank in range(4):
        content = read_paddle(tree, f"{rank}_0.distcp")
        state = {}
        for number, saved in enumerate(content.leaves):
            (array,) = saved.parts
            data = np.frombuffer(tree.read(array.path, array.offset, array.dtype.nbytes(array.numel)), "f4")
            state[saved.path[0]] = (data if number % 2 else data.copy()).reshape(saved.shape)  # read-only and not
        (tmp_path / f"new/{rank}_0.distcp").write_bytes(pickle.dumps(state, 5))
    have = values_of(tmp_path / "new")[1]
    assert have.keys() == want.keys() and all(np.array_equal(have[key], want[key]) for key in want)


def test_what_is_no_tensor_parallel_fuse_is_left_as_recorded():
    def entry(*widths):
        shards = []
        start = 0
        for width in widths:
            shards.append(Shard((0, start), (4, width), None, "f", 0))
            start += width
        return FlexEntry("x.up_gate_proj.weight", ("x",), DTYPES["F32"], (4, start), shards)

    assert fused_blocks(entry(8), (1, 1)) is None
    assert fused_blocks(entry(6, 2), (1, 1)) is None
    assert fused_blocks(entry(3, 3), (1, 1)) is None
    assert fused_blocks(entry(4, 4), ()) is None
    found = fused_blocks(entry(4, 4), (1, 1))
    assert found[4] == [(Box((2,), (2,)), Box((0,), (2,))), (Box((6,), (2,)), Box((2,), (2,)))]


def test_ties_go_to_the_file_with_the_least_in_the_order_of_names():
    def item(key):
        return FlexBlock(key, (key,), key, DTYPES["F32"], (0,), (4,), (4,), None, 0, ())

    found = kept([(rank, [item("a"), item("b"), item("c")]) for rank in (2, 10)])
    assert [(one.key, rank) for one, rank in found.storage] == [("a", 10), ("b", 2), ("c", 10)]


def test_a_hugging_face_folder_with_paddles_cache_is_none(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "flex-ckpt.auto_generated.metadata").write_bytes(b"")
    (tmp_path / "0_0.safetensors").write_bytes(b"")
    assert FORMAT.detect(Tree(tmp_path)) is None


def test_a_lost_rank_of_averages_is_named(tmp_path):
    shutil.copytree(FIXTURES / "ema_old", tmp_path / "x")
    (tmp_path / "x/ema_state/1_0.distcp").unlink()
    with pytest.raises(CkptError, match="in no file") as e:
        FORMAT.read(Tree(tmp_path / "x"))
    assert e.value.exit_code == 3 and "mlp.weight [ema]" in e.value.key


def test_degrees_are_told_by_who_holds_what():
    def listing(homes):
        """key -> ranks, a block each."""
        entries = {}
        for key, ranks in homes.items():
            shards = [Shard((0, 4 * i), (2, 4), None, f"m/{rank}_0.distcp", 0) for i, rank in enumerate(ranks)]
            entries[key] = FlexEntry(key, (key,), DTYPES["F32"], (2, 4 * len(ranks)), shards)
        return FlexListing("m/", entries)

    stages = {f"layers.{layer}.q.weight": (layer // 2 * 2, layer // 2 * 2 + 1) for layer in range(6)}
    assert degrees_of([listing(stages)], 6) == ({"tp": 2, "pp": 3}, "")
    assert degrees_of([listing(stages)], 12) == ({"tp": 2, "pp": 3, "dp": 2}, "v1")
    assert degrees_of([listing(stages)], 7) == ({"tp": 2}, "")  # what does not multiply out is left unsaid
    assert degrees_of([listing({**stages, "layers.0.x": (0, 5)})], 6)[0] == {"tp": 2, "dp": 3}
    experts = {f"layers.0.mlp.experts.{n}.w": (n // 2,) for n in range(8)}
    assert degrees_of([listing(experts)], 4)[0] == {"dp": 4, "ep": 4}
    assert degrees_of([listing({**experts, "layers.0.mlp.experts.0.v": (3,)})], 4)[0] == {"dp": 4}
    many = {f"layers.{n}.w": (n,) for n in range(20_000)} | {f"a.experts.{n}.w": (n,) for n in range(20_000)}
    assert degrees_of([listing(many)], 20_000)[0]["pp"] == 20_000
    assert degrees_of([listing({f"layers.{'9' * 5000}.experts.{'9' * 5000}.w": (0,)})], 2)[0] == {"dp": 2}


def test_a_tied_pair_on_two_stages_is_cut_by_each_for_itself(tmp_path: Path) -> None:
    """The embedding's ranks and the head's cut the same matrix at other borders: each under its own name, once."""
    source = Path(__file__).parents[2] / "fixtures" / "paddle" / "llama_tied_bf16_legacy_single"
    writing = writing_of(to="paddle-flex", degrees={"pp": 3, "dp": 2}, sharding="v2", dialect="keep", fsync=False)
    convert(str(source), str(tmp_path / "out"), Reading(), writing, Silent())
    found = diff(str(source), str(tmp_path / "out"), Reading(), progress=Silent())["differences"]
    assert {(d["kind"], d["name"]) for d in found} == {("missing_left", "lm_head.weight")}
