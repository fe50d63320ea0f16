"""The `safetensors` format against transformers, huggingface_hub and torch's own writer, and tables A and B row by row.

Values of the fixtures are compared with their truth by the conformance suite.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.cli import run
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.layout import Layout, Mesh
from ckpt_tool.core.target import Wanted, WantedTensor
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import CkptError, InternalError, UsageError
from ckpt_tool.formats.base import ReadOptions, Specificity
from ckpt_tool.formats.hub_folder import index as hf_index
from ckpt_tool.formats.hub_folder import model_files as hf_files
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.hub.safetensors.format import FORMAT, pack

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures" / "safetensors"
NO_LAYOUT = Layout(Mesh(), ())


def _load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / "hostile" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


table_a, table_b = _load("safetensors_cases"), _load("index_cases")


def read(path, **options):
    return FORMAT.read(Tree(path), ReadOptions(**options))


def codes(catalog):
    return [note.code for note in catalog.notes]


# -- tables A and B ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "make", "want", "words"), [pytest.param(*case, id=case[0]) for case in table_a.CASES + table_b.CASES]
)
def test_bad_input_is_told(row, make, want, words, tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    source = make(folder)
    code = want if isinstance(want, int) else want["*"]
    try:
        tree = Tree(source)
        evidence = FORMAT.detect(tree)
        assert evidence is not None and evidence.why
        catalog = FORMAT.read(tree)
        catalog.check()
        assert code == 0 and len(catalog.tensors)
        if row == "B9":
            assert "W-total-size" in codes(catalog)
    except CkptError as fault:
        assert fault.exit_code == code, fault
        text = json.dumps(fault.to_json(), ensure_ascii=False).lower()
        assert all(word.lower() in text for word in words), (words, text)
        assert fault.path and fault.hint


def test_a_file_outside_the_folder_is_never_opened(tmp_path, monkeypatch):
    source = {row: make for row, make, *_ in table_b.CASES}["B2"](tmp_path)
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *args, **more: opened.append(str(path)) or real(path, *args, **more))
    with pytest.raises(CkptError):
        read(source)
    assert opened and not any("other" in path for path in opened)


@pytest.mark.slow
def test_a_million_entries_within_the_cap_are_read(tmp_path):
    pairs = ",".join(f'"{i}":"{table_b.ONE if i % 2 else table_b.TWO}"' for i in range(1_000_000))
    table_b.write_index(tmp_path, f'{{"weight_map":{{{pairs}}}}}'.encode())
    index = hf_index.read_index(Tree(tmp_path), table_b.INDEX)
    assert len(index) == 1_000_000 and sorted(index.shards) == [table_b.ONE, table_b.TWO]


def test_leniency_reads_what_the_index_names_alone(tmp_path):
    table_b.model(tmp_path)
    (tmp_path / table_b.TWO).write_bytes(table_b.shard("extra", "b", "a"))
    catalog = read(tmp_path, lenient=True)
    assert [key.name for key in catalog.tensors] == ["a", "b"] and "W-extra-tensors" in codes(catalog)
    assert catalog.tensors[TensorKey("b")].chunks[0].array.offset == (tmp_path / table_b.TWO).stat().st_size - 6


# -- which files ------------------------------------------------------------------------------------------------------

SHARDS = [f"shard-0000{r}-model-00001-of-00001.safetensors" for r in (1, 2)]
TWO_FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("names", "kind", "files"),
    [
        (["model.safetensors", "config.json"], "one", ["model.safetensors"]),
        (["model.safetensors", "other.safetensors"], "one", ["model.safetensors"]),
        (["vae.safetensors"], "one", ["vae.safetensors"]),
        ([*TWO_FILES, "consolidated.safetensors"], "numbered", TWO_FILES),
        ([*TWO_FILES, "model.safetensors.index.json"], "index", []),
        (["unet.safetensors.index.json", "x.safetensors"], "index", []),
        (["a.safetensors", "b.safetensors"], "union", ["a.safetensors", "b.safetensors"]),
        (SHARDS, "ranks", SHARDS),
        ([f"sharded/{name}" for name in SHARDS], "ranks", [f"sharded/{name}" for name in SHARDS]),
        ([*TWO_FILES, *(f"sharded/{name}" for name in SHARDS)], "numbered", TWO_FILES),
        (["adapter_config.json", "adapter_model.safetensors"], None, []),
        (["adapter_model.safetensors", "model.safetensors"], "one", ["model.safetensors"]),
        (["model.tp00.safetensors", "model.tp01.safetensors"], None, []),
        (["ckpt.index.json", "model.safetensors"], "one", ["model.safetensors"]),
        ([".metadata", "__0_0.distcp", "model.safetensors"], "one", ["model.safetensors"]),
        (["model.safetensors.index.json", "optimizer.safetensors.index.json"], "index", []),
        (["pytorch_model.bin", "config.json"], None, []),
        (["sub/model.safetensors"], None, []),
        ([], None, []),
    ],
)
def test_the_files_that_count(names, kind, files):
    chosen = hf_files.choose(names)
    assert (chosen and chosen.kind) == kind
    assert chosen is None or (list(chosen.files) == files and chosen.why)


def test_the_usual_index_is_taken_unless_another_is_preferred():
    names = ["model.safetensors.index.json", "model.fp16.safetensors.index.json"]
    usual = hf_files.choose(names)
    assert usual.index == names[0] and "model.fp16" in usual.notes[0].message
    assert hf_files.choose(names, prefer="model.fp16").index == names[1]


@pytest.mark.parametrize(
    ("numbers", "total", "words"),
    [
        ([1, 2, 3], 3, None),
        ([0, 1, 2], 3, None),
        ([1, 3], 3, "1 of 3 numbers are missing: x-00002"),
        ([2, 3], 3, "x-00001"),
        ([1, 4], 3, "x-00004 of 3"),
        ([1], 9_999_999, "9999998 of 9999999 numbers are missing"),
    ],
)
def test_numbers_are_counted(numbers, total, words):
    chosen = hf_files.choose([f"x-{n:05d}-of-{total:05d}.safetensors" for n in numbers])
    if words is None:
        hf_files.check(chosen, path="folder")
        return
    with pytest.raises(CkptError, match=words) as caught:
        hf_files.check(chosen, path="folder")
    assert caught.value.exit_code == 3


def test_two_saves_in_one_folder_are_not_mixed():
    chosen = hf_files.choose(["model-00001-of-00002.safetensors", "model-00002-of-00003.safetensors"])
    with pytest.raises(CkptError, match="two saves"):
        hf_files.check(chosen, path="folder")


def test_single_files_are_known_by_content(tmp_path):
    for name in ("model.safetensors", "weights.bin", "noextension"):
        (tmp_path / name).write_bytes(table_b.shard("a"))
        assert FORMAT.detect(Tree(tmp_path / name)).why == "a safetensors header"
        assert [key.name for key in read(tmp_path / name).tensors] == ["a"]
    for name, content in {
        "x.safetensors": table_a.zip_of(b""),
        "y.safetensors": table_a.PICKLE,
        "z.pt": b"hello there",
    }.items():
        (tmp_path / name).write_bytes(content)
        claim = FORMAT.detect(Tree(tmp_path / name))
        assert claim is None or claim.specificity == Specificity.CONTAINER, "by its name alone"
    with pytest.raises(CkptError, match="zip archive"):  # --from safetensors
        read(tmp_path / "x.safetensors")


def test_an_index_may_be_the_source(tmp_path):
    table_b.model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    catalog = read(tmp_path / table_b.INDEX)
    assert catalog.files == (table_b.INDEX, table_b.ONE, table_b.TWO) and catalog.sidefiles == ("config.json",)
    one = read(tmp_path / table_b.ONE)
    assert codes(one) == ["W-one-of-many"] and len(one.tensors) == 1


def test_what_lies_beside_is_told(tmp_path):
    table_b.model(tmp_path, total_size=6)
    for name in ("config.json", "tokenizer.model", "README.md", "optimizer.pt", ".gitattributes", "old.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    catalog = read(tmp_path)
    assert catalog.sidefiles == ("README.md", "config.json", "tokenizer.model")
    unread, left = (note.message for note in catalog.notes)
    assert unread.startswith("optimizer.pt is not read: ")
    assert left == "not part of the model, not read: old.safetensors, optimizer.pt"


def test_torchs_consolidated_files_come_before_their_shards(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "dcp_consolidated", source)
    whole = read(source)
    assert codes(whole) == ["W-sharded-folder"] and "not read" in whole.notes[0].message
    for path in source.glob("model*"):
        path.unlink()
    shards = read(source)
    assert codes(shards) == ["W-sharded-folder", "W-no-global-shape"] and all("sharded/" in f for f in shards.files)
    assert {(r.name, r.dtype, r.shape) for r in shards.rows()} == {(r.name, r.dtype, r.shape) for r in whole.rows()}
    assert max(len(tensor.chunks) for tensor in shards.tensors.values()) == 2


def test_torch_reads_the_shapes_that_we_read():
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    for case in ("dcp_uneven", "dcp_hf_sharded"):
        theirs = HuggingFaceStorageReader(str(FIXTURES / case)).read_metadata().state_dict_metadata
        catalog = read(FIXTURES / case)
        ours = {
            key.name: (tensor.shape, sorted((c.box.offset, c.box.shape) for c in tensor.chunks))
            for key, tensor in catalog.tensors.items()
        }
        assert ours == {
            name: (tuple(m.size), sorted((tuple(c.offsets), tuple(c.sizes)) for c in m.chunks))
            for name, m in theirs.items()
        }
        assert codes(catalog) == ["W-no-global-shape"]


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_missing_rank_is_seen_where_it_can_be(rank, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "dcp_uneven", source)
    for path in source.glob(f"shard-0000{rank}-*"):
        path.unlink()
    if rank == 3:  # nothing shows it: the note says so
        assert "W-no-global-shape" in codes(read(source))
        return
    with pytest.raises(CkptError, match=f"shard-0000{rank}") as caught:
        read(source)
    assert caught.value.exit_code == 3


def test_metadata_of_files_is_kept_where_it_differs(tmp_path):
    for number, metadata in enumerate(({"format": "pt", "step": "5", "rank": "0"}, {"step": "5", "rank": "1"})):
        head = {"__metadata__": metadata, f"t{number}": table_a.entry()}
        (tmp_path / f"{number}.safetensors").write_bytes(table_a.file_of(head, b"abc"))
    assert read(tmp_path).extras == {
        "metadata": {"step": "5"},
        "metadata_by_file": {"0.safetensors": {"rank": "0"}, "1.safetensors": {"rank": "1"}},
    }


# -- the index --------------------------------------------------------------------------------------------------------

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
FILES = st.sampled_from(["a.safetensors", "b.safetensors", "sub/c.safetensors", "é.safetensors"])


@given(
    st.dictionaries(NAMES, FILES, min_size=1, max_size=30),
    st.sampled_from([None, {}, {"total_size": 7}, {"x": {"y": [1]}, "s": "}{"}]),
    st.sampled_from([(2, None), (None, (",", ":")), (None, None), (1, (" ,", "  : "))]),
    st.booleans(),
    st.booleans(),
    st.integers(8, 200),
)
def test_both_roads_read_one_index_alike(tmp_path_factory, weight_map, metadata, spelling, first, ascii_only, piece):
    index = {"weight_map": weight_map} if metadata is None else {"metadata": metadata, "weight_map": weight_map}
    index = index if first else dict(reversed(index.items()))
    indent, separators = spelling
    text = json.dumps(index, indent=indent, separators=separators, ensure_ascii=ascii_only)
    folder = tmp_path_factory.mktemp("index")
    (folder / "i.json").write_text(text, encoding="utf-8")
    tree = Tree(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_index, "PIECE", piece)
        quick = hf_index._quick(tree, "i.json", tree.size("i.json"))
    strict = hf_index._strict(tree, "i.json", "i.json")
    for index in (strict, quick or strict):
        assert {name: file for file, names in index.shards.items() for name in names} == weight_map
        assert index.metadata == (metadata or {}) and len(index) == len(weight_map)


@pytest.mark.share(4)
@pytest.mark.parametrize("byte", b'";:,x }\\\n\x01\xff')
@pytest.mark.parametrize("indent", [None, 2])
def test_no_changed_byte_passes_the_quick_road_alone(byte, indent, tmp_path):
    """Whatever the quick road reads, the strict one reads too, and the same."""
    index = {"weight_map": {f"{name}.w": f"{file}.safetensors" for name, file in ("ax", "bx", "cy", "dx", "ez")}}
    text = json.dumps(index, indent=indent).encode()
    path = tmp_path / "i.json"
    both = 0
    for at in range(len(text)):
        path.write_bytes(text[:at] + bytes([byte]) + text[at + 1 :])
        tree = Tree(tmp_path)
        quick = hf_index._quick(tree, path.name, len(text))
        if quick is not None:
            strict = hf_index._strict(tree, path.name, path.name)
            assert {file: list(names) for file, names in quick.shards.items()} == {
                file: list(names) for file, names in strict.shards.items()
            }
            both += 1
    assert both or byte in b"\\\x01\xff", "these can stand nowhere"


def test_the_quick_road_reads_what_is_written_in_practice(monkeypatch):
    for case in ("hf_llama_sharded", "llama_tied", "dcp_rank0", "dcp_consolidated"):
        tree = Tree(FIXTURES / case)
        path = "model.safetensors.index.json"
        for piece in (1 << 18, 300):
            monkeypatch.setattr(hf_index, "PIECE", piece)
            quick = hf_index._quick(tree, path, tree.size(path))
            strict = hf_index._strict(tree, path, path)
            assert quick is not None and quick.metadata == strict.metadata
            assert {file: list(names) for file, names in quick.shards.items()} == {
                file: list(names) for file, names in strict.shards.items()
            }


@pytest.mark.parametrize("piece", [1 << 18, 40, 41, 60, 77])
@pytest.mark.parametrize("names", ["aab", "aba", "abca", "aa", "abcdefaf"])
def test_the_quick_road_leaves_duplicates_to_the_strict_one(names, piece, tmp_path, monkeypatch):
    monkeypatch.setattr(hf_index, "PIECE", piece)
    pairs = ", ".join(f'"{name}": "x{i}.safetensors"' for i, name in enumerate(names))
    (tmp_path / "i.json").write_text(f'{{"weight_map": {{{pairs}}}}}')
    tree = Tree(tmp_path)
    assert hf_index._quick(tree, "i.json", tree.size("i.json")) is None
    with pytest.raises(CkptError, match="duplicate key: '[af]'"):
        hf_index.read_index(tree, "i.json")


# -- writing ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 50))
def test_packing_is_huggingface_hubs(sizes, limit):
    from huggingface_hub.serialization import split_state_dict_into_shards_factory

    state = {f"t{i}": size for i, size in enumerate(sizes)}
    split = split_state_dict_into_shards_factory(
        state, get_storage_size=lambda size: size, filename_pattern="m{suffix}", max_shard_size=limit
    )
    theirs = [[int(name[1:]) for name in names] for names in split.filename_to_tensors.values()]
    assert pack(sizes, limit) == theirs


def wanted_of(state, dtype, **more):
    tensors = tuple(WantedTensor(TensorKey(name), tuple(value.shape), DTYPES[dtype]) for name, value in state.items())
    return Wanted(tensors, **more)


def written(target, state, folder):
    """The target's files with the tensors' bytes, by the simplest writer there is."""
    import torch

    values = [value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for value in state.values()]
    for file in target.files:
        out = bytearray(file.size)
        for offset, data in file.literals:
            out[offset : offset + len(data)] = data
        for array in file.arrays:
            out[array.offset : array.offset + len(values[array.tensor])] = values[array.tensor]
        (folder / file.path).write_bytes(out)


@pytest.mark.parametrize("limit", [10**9, 20_000, 9_000, 3_000, 2_000])
@pytest.mark.parametrize("tied", [False, True])
def test_the_files_are_those_of_save_pretrained(limit, tied, tmp_path):
    """Byte for byte, the index too. 3,408 bytes is the largest tensor: the last two limits are passed by some."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=71,
        hidden_size=24,
        intermediate_size=52,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).bfloat16()
    theirs = tmp_path / "theirs"
    ours = tmp_path / "ours"
    ours.mkdir()
    model.save_pretrained(theirs, max_shard_size=limit)
    state = {name: value for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    written(FORMAT.target(wanted_of(state, "BF16", shard_size=limit), NO_LAYOUT), state, ours)
    for path in theirs.iterdir():
        if path.name not in ("config.json", "generation_config.json"):
            assert (ours / path.name).read_bytes() == path.read_bytes(), path.name
            (ours / path.name).unlink()
    assert not list(ours.iterdir())


def test_one_file_where_one_is_asked_for():
    import torch

    state = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
    target = FORMAT.target(
        wanted_of(state, "F32", shard_size=10, single="out.safetensors", sidefiles=(("c", 1),)), NO_LAYOUT
    )
    assert target.single == "out.safetensors" and [file.path for file in target.files] == ["out.safetensors"]
    many = FORMAT.target(wanted_of(state, "F32", shard_size=10, sidefiles=(("config.json", 9),)), NO_LAYOUT)
    assert [(file.path, file.copy_of) for file in many.files] == [
        (TWO_FILES[0], None),
        (TWO_FILES[1], None),
        ("model.safetensors.index.json", None),
        ("config.json", "config.json"),
    ]
    assert many.files[3].size == 9 and FORMAT.target(Wanted(()), NO_LAYOUT).files[0].path == "model.safetensors"


def test_what_it_cannot_hold_is_refused():
    with pytest.raises(UsageError, match="C128"):
        FORMAT.target(Wanted((WantedTensor(TensorKey("a"), (1,), DTYPES["C128"]),)), NO_LAYOUT)
    with pytest.raises(InternalError):
        FORMAT.target(Wanted((WantedTensor(TensorKey("a", "exp_avg"), (1,), DTYPES["F32"]),)), NO_LAYOUT)
    assert not FORMAT.holds.all_states and "C128" in FORMAT.holds.dtypes


# -- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_deepseek_v3_opens_in_little_memory_without_numpy(tmp_path):
    """92,000 tensors in 163 files. Memory is stable on any machine, time is not: it is for the bench to say."""
    script = ROOT / "tests" / "bench" / "deepseek_shape.py"
    subprocess.run([sys.executable, script, "build", tmp_path / "big"], check=True)
    out = subprocess.run([sys.executable, script, "time", tmp_path / "big"], check=True, capture_output=True, text=True)
    peak = [float(line.split("peak RSS ")[1].split()[0]) for line in out.stdout.splitlines() if "peak RSS" in line]
    assert max(peak) <= 30, out.stdout


def test_a_component_of_diffusers_keeps_its_name_and_has_variants(tmp_path):
    np = pytest.importorskip("numpy")
    stored = pytest.importorskip("safetensors.numpy")
    source = tmp_path / "unet"
    source.mkdir()
    (source / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    stored.save_file({"w": np.ones((4, 3), "f4")}, source / "diffusion_pytorch_model.safetensors")
    stored.save_file({"w": np.zeros((4, 3), "f2")}, source / "diffusion_pytorch_model.fp16.safetensors")
    for more, dtype in (((), "f4"), (("--prefer", "fp16"), "f2")):
        out = tmp_path / dtype
        assert run(["convert", str(source), str(out), "--to", "safetensors", "-q", *more]) == 0
        assert sorted(path.name for path in out.iterdir()) == ["config.json", "diffusion_pytorch_model.safetensors"]
        assert stored.load_file(out / "diffusion_pytorch_model.safetensors")["w"].dtype == dtype
    (note,) = (n.message for n in read(source).notes if n.code == "W-variants")
    assert "--prefer" in note and "fp16" in note
