"""GGUF: every type as the gguf package has it, both byte orders, splits; models of llama.cpp's own converter both ways.

The goldens are `convert_hf_to_gguf.py`'s (fixtures/make/gguf_files.py), read here by our reader, which the hostile
table and the conformance suite hold to gguf's.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from ckpt_tool.cli import run
from ckpt_tool.commands.inspect import inspect
from ckpt_tool.families.models import FAMILIES, family_of
from ckpt_tool.options.reading import Reading
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.llamacpp.config import ARCHITECTURES, hub_config, metadata, rope_factors, shortest
from ckpt_tool.systems.llamacpp.gguf.header import read_header, value_of
from ckpt_tool.systems.llamacpp.gguf.tokenizer import PRE, pieces_of

FIXTURES = Path(__file__).parents[2] / "fixtures"
MADE = FIXTURES / "gguf-made"
_LABELS = ("general.name", "general.size_label")
MODELS = ("llama3", "qwen3_moe", "gemma3", "deepseek_v3", "gpt_oss")


def golden(name):
    return FIXTURES / "gguf" / f"{name}.gguf" if name == "llama3" else MADE / f"{name}.gguf"


def call(*words):
    return run([*map(str, words), "--json"])


def contents(path):
    """({tensor: (dtype, shape, bytes)}, {key: value})."""
    tree = Tree(path)
    header = read_header(tree, path.name)
    tensors = {}
    for info in header.tensors:
        nbytes = info.dtype.nbytes(int(np.prod(info.shape)))
        tensors[info.name] = (info.dtype.name, info.shape, tree.read(path.name, info.offset, nbytes))
    return tensors, {key: value_of(tree, header, key) for key in header.entries}


def test_every_type_is_listed_as_it_is() -> None:
    document = inspect(str(MADE / "every_type.gguf"), Reading())
    rows = {row["name"]: row for row in document["tensors"]}
    assert rows["q4_k.weight"] | {"state": ""} == {
        "name": "q4_k.weight", "state": "", "dtype": "Q4_K", "shape": [3, 512], "bytes": 3 * 2 * 144,
    }  # fmt: skip
    assert rows["mxfp4.weight"]["shape"] == [3, 64] and rows["f16.weight"]["dtype"] == "F16"
    floats = load_file(MADE / "every_type.floats.safetensors")
    assert document["total"]["parameters"] == sum(values.size for values in floats.values())
    assert document["metadata"]["number.large"] == 1 << 40 and document["metadata"]["list.long"] == "100 values"


@pytest.mark.parametrize("name", ["every_type", "big_endian", "quantised"])
def test_floats_are_those_of_the_library(name, tmp_path) -> None:
    pytest.importorskip("gguf", reason="the gguf package makes them")
    source = MADE / f"{name}.gguf"
    out = tmp_path / "out"
    assert call("convert", source, out, "--to", "safetensors", "--dialect", "keep") == 2
    assert (
        call("convert", source, out, "--to", "safetensors", "--dialect", "keep", "--dequantize", "--dtype", "f32") == 0
    )
    want = load_file(source.with_suffix(".floats.safetensors"))
    have = load_file(out / "model.safetensors")
    assert want.keys() == have.keys()
    for key, values in want.items():
        np.testing.assert_array_equal(
            have[key].reshape(values.shape).view("u4"), values.astype("f4").view("u4"), err_msg=key
        )


@pytest.mark.parametrize("kind", ["q8_0", "tq2_0", "mxfp4"])
def test_blocks_are_those_of_the_library(kind, tmp_path) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package makes them")
    source = tmp_path / "m.safetensors"
    out = tmp_path / "m.gguf"
    rng = np.random.default_rng(0)
    values = {
        "blk.0.attn_q.weight": rng.standard_normal((600, 512)),
        "blk.0.attn_norm.weight": rng.standard_normal(512),
    }
    values |= {"blk.0.ffn_up.weight": rng.standard_normal((4, 48))}  # rows that are no whole blocks
    save_file({key: each.astype("f4") for key, each in values.items()}, source)
    assert call("convert", source, out, "--to", "gguf", "--dialect", "keep", "--gguf-type", kind) == 0
    tensors, _ = contents(out)
    number = gguf.GGMLQuantizationType[kind.upper()]
    want = gguf.quants.quantize(values["blk.0.attn_q.weight"].astype("f4"), number)
    assert tensors["blk.0.attn_q.weight"][2] == want.tobytes()
    kinds = {key: dtype for key, (dtype, _, _) in tensors.items()}
    assert (kinds["blk.0.attn_norm.weight"], kinds["blk.0.ffn_up.weight"]) == ("F32", "F16")
    assert call("convert", out, tmp_path / "again.gguf", "--to", "gguf", "--gguf-type", "q5_0") == 2  # E1708


@pytest.mark.parametrize("odd", [np.nan, np.inf])
@pytest.mark.parametrize("rows", [8, 2048])  # by the package; by compiled code, where there is some
def test_what_is_no_finite_number_is_named(odd, rows, tmp_path, capsys) -> None:
    pytest.importorskip("gguf", reason="the gguf package makes them")
    values = np.random.default_rng(0).standard_normal((rows, 512)).astype("f4")
    values[rows - 3, 70] = odd
    save_file({"blk.0.attn_q.weight": values}, tmp_path / "m.safetensors")
    line = ["convert", tmp_path / "m.safetensors", tmp_path / "m.gguf", "--to", "gguf", "--dialect", "keep"]
    assert call(*line, "--gguf-type", "q8_0") == 3
    error = json.loads(capsys.readouterr().err)["error"]
    assert error["code"] == "E2720" and f"[{rows - 3}, 70]" in error["message"]


def test_matrices_that_do_not_get_the_type_are_named(tmp_path, capsys) -> None:
    save_file({"blk.0.ffn_up.weight": np.ones((4, 48), "f4")}, tmp_path / "m.safetensors")
    line = ["convert", tmp_path / "m.safetensors", tmp_path / "m.gguf", "--to", "gguf", "--dialect", "keep"]
    assert call(*line, "--gguf-type", "q8_0") == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert "1 tensor is F16, as their rows are no whole blocks of Q8_0: blk.0.ffn_up.weight" in notes
    assert "--gguf-type q8_0: no matrix here can have that type" in notes


def test_what_llama_cpp_s_quantiser_wrote_of_one_row_is_a_matrix(tmp_path) -> None:
    """It leaves out dims of 1, which the converter had written; the hub has the gate of a shared expert as one row."""
    pytest.importorskip("gguf", reason="the gguf package makes the floats")
    source = MADE / "quantised.gguf"
    out = tmp_path / "out"
    assert call("convert", source, out, "--to", "safetensors", "--dequantize") == 0
    have = load_torch(out / "model.safetensors")
    assert have["model.layers.0.mlp.shared_expert_gate.weight"].shape == (1, 64)
    assert have["model.layers.0.mlp.experts.2.down_proj.weight"].shape == (64, 64)
    assert call("convert", source, tmp_path / "again.gguf", "--to", "gguf") == 0
    assert call("diff", source, tmp_path / "again.gguf") == 0


def test_an_architecture_that_no_family_has_is_not_guessed_by_names(tmp_path, capsys) -> None:
    """Names of EXAONE 4 are Gemma 3's, whose norms are stored plus one."""
    source = tmp_path / "m.gguf"
    plain = (FIXTURES / "gguf" / "llama3.gguf").read_bytes()
    assert plain.count(b"\x05\0\0\0\0\0\0\0llama") == 2  # of general.architecture, of the tokenizer's model
    source.write_bytes(plain.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0plamo", 1))
    assert run(["convert", str(source), str(tmp_path / "out"), "--to", "safetensors"]) == 3
    said = capsys.readouterr().err
    assert "E1714" in said and "'plamo'" in said and str(source) in said and "--dialect keep" in said
    assert run(["audit", str(source)]) == 0
    assert "'plamo'" in capsys.readouterr().out
    for words in (["--to", "gguf"], ["--to", "safetensors", "--dialect", "keep"]):
        assert call("convert", source, tmp_path / words[1], *words) == 0


def test_a_split_is_what_the_whole_file_is(tmp_path) -> None:
    whole = golden("llama3")
    out = tmp_path / "split"
    joined = tmp_path / "joined.gguf"
    assert call("convert", whole, out, "--to", "gguf", "--max-shard-size", 20_000) == 0
    files = sorted(path.name for path in out.iterdir())
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.gguf"
    assert call("convert", out / files[1], joined, "--to", "gguf") == 0  # one of them stands for all
    assert contents(joined) == contents(whole)
    (out / files[2]).unlink()
    assert call("inspect", out) == 3


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_what_the_converter_makes_of_it(name, tmp_path) -> None:
    out = tmp_path / "m.gguf"
    assert call("convert", MADE / name, out, "--to", "gguf") == 0
    (tensors, pairs), (have, stated) = contents(golden(name)), contents(out)
    assert have == tensors
    assert {key: value for key, value in pairs.items() if key not in _LABELS} == stated


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back(name, tmp_path) -> None:
    out = tmp_path / "out"
    assert call("convert", golden(name), out, "--to", "safetensors", "--dtype", "bf16") == 0
    assert call("diff", MADE / name, out) == 0
    config, theirs = (json.loads((folder / "config.json").read_text()) for folder in (out, MADE / name))
    words = (
        "model_type",
        "hidden_size",
        "head_dim",
        "rms_norm_eps",
        "tie_word_embeddings",
        "kv_lora_rank",
        "num_experts",
    )
    both = [word for word in words if word in config and word in theirs]
    assert len(both) >= 4 and {word: config[word] for word in both} == {word: theirs[word] for word in both}


def test_a_release_of_gpt_oss_keeps_the_values_of_its_experts(tmp_path) -> None:
    """MXFP4 of the hub as GGUF's, which has other scales for some blocks and the same values; nothing else is cut."""
    pytest.importorskip("gguf", reason="the gguf package makes the blocks")
    source = tmp_path / "in"
    out = tmp_path / "m.gguf"
    shutil.copytree(FIXTURES / "quantized/mxfp4_gpt_oss", source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "layer_types": ["sliding_attention"]}))
    words = ("--to", "gguf", "--dequantize", "--gguf-type", "mxfp4", "--gguf-only", "*_exps.weight")
    assert call("convert", source, out, *words) == 0
    tensors, pairs = contents(out)
    experts = {name for name, (dtype, _, _) in tensors.items() if dtype == "MXFP4"}
    assert experts == {f"blk.0.ffn_{each}_exps.weight" for each in ("gate", "up", "down")}
    assert {dtype for name, (dtype, _, _) in tensors.items() if name not in experts} == {"BF16", "F32"}
    assert pairs["general.file_type"] == 38 and pairs["general.architecture"] == "gpt-oss"
    assert call("convert", out, tmp_path / "back", "--to", "safetensors", "--dequantize", "--dtype", "bf16") == 0
    truth = load_torch(FIXTURES / "quantized/mxfp4_gpt_oss.truth.safetensors")
    have = load_torch(tmp_path / "back/model.safetensors")
    assert {f"model/{name}" for name in have} == truth.keys()
    assert all(torch.equal(value, truth[f"model/{name}"]) for name, value in have.items())


def test_patterns_of_types_want_a_type_and_a_matrix(tmp_path, capsys) -> None:
    for words, code in ((("--gguf-only", "*"), "E2724"), (("--gguf-type", "q8_0", "--gguf-only", "*absent*"), "E0255")):
        assert call("convert", MADE / "gpt_oss", tmp_path / "m.gguf", "--to", "gguf", *words) == 2
        assert json.loads(capsys.readouterr().err)["error"]["code"] == code and not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize("to", ["gguf", "safetensors"])
@pytest.mark.parametrize("name", ["llama3", "qwen3_moe"])
def test_the_header_is_read_once(name, to, tmp_path, monkeypatch) -> None:
    """And the pairs that are written, or that make a tokenizer, once more: where they lie, and nothing after them."""
    source = golden(name)
    reads = []
    whole = Tree.read
    header = read_header(Tree(source), source.name)
    pairs = sum(entry.stop - entry.start for entry in header.entries.values())

    def counted(tree, path, offset, nbytes):
        if path == source.name and offset < header.data:
            reads.append(min(nbytes, header.data - offset))
        return whole(tree, path, offset, nbytes)

    monkeypatch.setattr(Tree, "read", counted)
    assert call("convert", source, tmp_path / "out", "--to", to, "--verify", "off") == 0
    looks = 5000  # bytes that tell what a file is
    assert header.data <= sum(reads) <= looks + header.data + pairs


def test_into_a_training_format_and_out_of_it(tmp_path) -> None:
    job = tmp_path / "job"
    out = tmp_path / "m.gguf"
    assert call("convert", golden("qwen3_moe"), job, "--to", "megatron-dist", "--tp", 2, "--dtype", "bf16") == 0
    shutil.copy(MADE / "qwen3_moe" / "config.json", job)
    assert call("convert", job, out, "--to", "gguf") == 0
    assert contents(out)[0] == contents(golden("qwen3_moe"))[0]


def test_a_merge_computes_with_floats_alone(tmp_path, capsys) -> None:
    a = golden("qwen3_moe")
    b = tmp_path / "b.gguf"
    whole, less, merged = (tmp_path / each for each in ("a.gguf", "less.gguf", "m.gguf"))
    for out in (whole, b):
        assert call("convert", a, out, "--to", "gguf", "--gguf-type", "q8_0") == 0
    capsys.readouterr()
    assert call("merge", whole, b, merged, "--method", "linear", "--to", "gguf") == 2
    error = json.loads(capsys.readouterr().err)["error"]
    assert error["code"] == "E1465" and "--dequantize" in error["hint"]
    assert call("merge", whole, b, merged, "--method", "linear", "--to", "gguf", "--dequantize") == 0
    assert call("convert", whole, tmp_path / "hub", "--to", "safetensors", "--dequantize", "--dtype", "bf16") == 0
    assert call("convert", merged, tmp_path / "back", "--to", "safetensors", "--dtype", "bf16") == 0
    assert call("diff", tmp_path / "hub", tmp_path / "back") == 0  # the average of two alike is either
    assert call("merge", whole, less, "--to", "gguf", "--remove-keys", "*token_embd*") == 0
    (have, _), (kept, _) = contents(whole), contents(less)
    assert kept == {key: value for key, value in have.items() if key != "token_embd.weight"}


def test_one_of_several_models_may_be_quantised(tmp_path) -> None:
    plain = golden("qwen3_moe")
    eight = tmp_path / "a.gguf"
    merged = tmp_path / "m.gguf"
    assert call("convert", plain, eight, "--to", "gguf", "--gguf-type", "q8_0") == 0
    words = ["--method", "linear", "--to", "gguf", "--dequantize"]
    assert call("merge", eight, plain, merged, *words) == 0
    (have, _), (floats, _) = contents(merged), contents(plain)
    assert have.keys() == floats.keys() and "Q8_0" not in {dtype for dtype, _, _ in have.values()}
    assert call("merge", plain, plain, tmp_path / "n.gguf", *words) == 2  # E2403: none is


@pytest.mark.parametrize("name", ["llama3", "qwen3_moe"])
def test_the_metadata_counts_the_layers_that_stay(name, tmp_path, capsys) -> None:
    tensors, pairs = contents(golden(name))
    key = f"{pairs['general.architecture']}.block_count"
    last = pairs[key] - 1
    for number, (source, root) in enumerate(((golden(name), "blk"), (MADE / name, "model.layers"))):
        out = tmp_path / f"{number}.gguf"
        words = ("--to", "gguf", "--remove-keys")
        assert call("convert", source, out, *words, f"{root}.0.*") == 2
        assert json.loads(capsys.readouterr().err)["error"]["code"] == "E2820" and not out.exists()
        assert call("convert", source, out, *words, f"{root}.{last}.*") == 0
        assert any(f"{key} is {last}" in note for note in json.loads(capsys.readouterr().out)["notes"])
        have, counted = contents(out)
        assert have == {each: value for each, value in tensors.items() if f"blk.{last}." not in each}
        want = {**pairs, key: last}
        assert {k: v for k, v in counted.items() if k not in _LABELS} == {
            k: v for k, v in want.items() if k not in _LABELS
        }


def test_layers_that_llama_cpp_leaves_out_are_reported(tmp_path, capsys) -> None:
    """A layer of multi-token prediction, as DeepSeek publishes it: `conversion/deepseek.py` skips it whole."""
    folder = tmp_path / "m"
    out = tmp_path / "m.gguf"
    shutil.copytree(MADE / "deepseek_v3", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    last = config["num_hidden_layers"]
    hidden = config["hidden_size"]
    tensors = load_torch(folder / "model.safetensors")
    ahead = {k.replace(f".{last - 1}.", f".{last}.", 1): v for k, v in tensors.items() if f"layers.{last - 1}." in k}
    root = f"model.layers.{last}"
    ahead |= {f"{root}.{each}.weight": tensors["model.norm.weight"] for each in ("enorm", "hnorm", "shared_head.norm")}
    ahead |= {f"{root}.embed_tokens.weight": tensors["model.embed_tokens.weight"]}
    ahead |= {f"{root}.eh_proj.weight": tensors["model.embed_tokens.weight"][:hidden].repeat(1, 2)}
    save_torch({key: each.clone() for key, each in (tensors | ahead).items()}, folder / "model.safetensors")
    assert call("convert", folder, out, "--to", "gguf") == 0
    (left,) = json.loads(capsys.readouterr().out)["dropped"]
    assert left["tensors"] == len(ahead) and "deepseek_v3, hf to gguf" in left["reason"]
    assert contents(out)[0] == contents(golden("deepseek_v3"))[0]


def test_shards_of_a_training_job_and_fp8_become_blocks(tmp_path) -> None:
    job = tmp_path / "job"
    straight = tmp_path / "s.gguf"
    out = tmp_path / "m.gguf"
    assert call("convert", MADE / "qwen3_moe", straight, "--to", "gguf", "--gguf-type", "q8_0") == 0
    assert call("convert", MADE / "qwen3_moe", job, "--to", "dcp", "--tp", 2) == 0
    assert call("convert", job, out, "--to", "gguf", "--gguf-type", "q8_0") == 0
    assert out.read_bytes() == straight.read_bytes()
    fp8 = FIXTURES / "quantized" / "fp8_block"
    back = tmp_path / "back"
    floats = tmp_path / "floats"
    assert call("convert", fp8, tmp_path / "f.gguf", "--to", "gguf") == 3  # scales can't follow rotated rows
    assert call("convert", fp8, tmp_path / "f.gguf", "--to", "gguf", "--dequantize") == 0
    assert call("convert", tmp_path / "f.gguf", back, "--to", "safetensors", "--dtype", "bf16") == 0
    assert call("convert", fp8, floats, "--to", "safetensors", "--dequantize") == 0
    assert call("diff", back, floats) == 0


def test_fp8_values_want_an_option_that_the_error_names(tmp_path, capsys) -> None:
    """In a family that rotates no rows: codes with their scale are dequantised, values without one are cast."""
    name = "model.layers.0.self_attn.o_proj.weight"
    folder = tmp_path / "m"
    out = tmp_path / "m.gguf"
    shutil.copytree(MADE / "qwen3_moe", folder)
    tensors = load_torch(folder / "model.safetensors")
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_torch(tensors | {f"{name}_scale_inv": torch.ones(1, 1)}, folder / "model.safetensors")
    assert call("convert", folder, out, "--to", "gguf") == 3
    error = json.loads(capsys.readouterr().err)["error"]
    assert error["code"] == "E1486" and "--dequantize" in error["hint"]
    assert call("convert", folder, out, "--to", "gguf", "--dequantize") == 0
    save_torch(tensors, folder / "model.safetensors")
    assert call("convert", folder, out, "--to", "gguf", "--force") == 2
    assert call("convert", folder, out, "--to", "gguf", "--force", "--dtype", "bf16") == 0
    assert contents(out)[0]["blk.0.attn_output.weight"][0] == "BF16"


def test_what_has_no_words_is_refused(tmp_path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(MADE / "qwen3_moe", folder)
    config = json.loads((folder / "config.json").read_text())
    for change in ({"norm_topk_prob": False}, {"hidden_act": "relu"}, {"mlp_only_layers": [0]}):
        (folder / "config.json").write_text(json.dumps(config | change))
        assert call("convert", folder, tmp_path / "m.gguf", "--to", "gguf") == 2, change


def test_architectures_are_of_families() -> None:
    for each in ARCHITECTURES:
        assert "gguf" in family_of(each.model_type).known_dialects
    having = {model_type for family in FAMILIES if "gguf" in family.dialects for model_type in family.model_types}
    assert having - {each.model_type for each in ARCHITECTURES} == {"kimi_k2", "ministral3"}  # E1711 says so


def test_numbers_come_back_as_they_were_written() -> None:
    assert [shortest(struct.unpack("<f", struct.pack("<f", n))[0]) for n in (1e-6, 1e-5, 500000.0, 0.1)] == [
        1e-6, 1e-5, 500000.0, 0.1,
    ]  # fmt: skip
    config = json.loads((MADE / "llama3" / "config.json").read_text())
    factors = tuple(struct.unpack("<f", struct.pack("<f", n))[0] for n in rope_factors(config))
    pairs, _ = metadata(config)
    found = hub_config({key: value for key, _, value in pairs}, {"token_embd.weight": (320, 32)}, factors)
    assert found["rope_scaling"]["original_max_position_embeddings"] == 64 and found["rope_scaling"]["factor"] == 8.0


def test_pieces_are_those_of_the_model() -> None:
    pieces = list(pieces_of((MADE / "llama3" / "tokenizer.model").read_bytes()))
    assert pieces[:3] == [(b"<unk>", 0.0, 2), (b"<s>", 0.0, 3), (b"</s>", 0.0, 3)]
    assert pieces[3] == (b"<0x00>", 0.0, 6) and len(pieces) > 259 and len(PRE) == len(set(PRE.values()))
