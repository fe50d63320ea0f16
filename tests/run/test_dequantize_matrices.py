"""GPTQ and AWQ as floats, and repacked as compressed-tensors has them: against GPTQModel's and AutoAWQ's own kernels,
and against a plain decode of what is packed here. What compressed-tensors makes of it is
`commands/test_repack_peers.py`.

`fixtures/quantized-inputs/` was made by these libraries on a CPU; the truth are the floats of their own modules.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

from ckpt_tool.cli import run
from ckpt_tool.weight_schemes.declared_scheme import quantisation

INPUTS = Path(__file__).parents[2] / "fixtures/quantized-inputs"
FIXTURE = INPUTS / "gptq_int4"
WRITTEN = sorted(path.name for path in INPUTS.iterdir() if path.is_dir())  # by the libraries themselves
# in the order of activations; AutoAWQ's
ACT = "gptq_int4_act"
AWQ = "awq_gemm"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def streams(codes: np.ndarray, bits: int) -> np.ndarray:
    """Each row of codes as little-endian words, bit by bit."""
    bits_of = (codes[..., None] >> np.arange(bits)) & 1
    return np.packbits(bits_of.reshape(len(codes), -1).astype(np.uint8), axis=1, bitorder="little").view(np.int32)


def nibbles(codes: np.ndarray) -> np.ndarray:
    """AWQ: eight columns a word, in its own order."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for place, column in enumerate(AWQ_ORDER):
        words |= codes[:, column::8].astype(np.uint32) << (4 * place)
    return words.view(np.int32)


def packed(folder: Path, method: str, bits: int, *, act: bool = False, **config: object) -> np.ndarray:
    """A model of one matrix of 96 inputs and 64 outputs in groups of 32; returns its floats, (outputs, inputs)."""
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (96, 64))
    zeros = rng.integers(0, 1 << bits, (3, 64)) if not config.get("sym") else np.full((3, 64), 1 << (bits - 1))
    scales = rng.normal(size=(3, 64)).astype(np.float16)
    groups = (rng.permutation(96) if act else np.arange(96)) // 32
    tensors = {"m.scales": scales, "norm.weight": np.ones(4, np.float16)}
    if method == "awq":
        tensors |= {"m.qweight": nibbles(codes), "m.qzeros": nibbles(zeros)}
    else:
        words = streams((zeros - 1) % 8 if bits == 3 else zeros, bits)
        if bits != 3 and config.get("checkpoint_format") != "gptq_v2":  # one word after another, as GPTQModel does
            ones = sum(1 << place for place in range(0, 32, bits))
            words = ((words.astype(np.int64) - ones) % 2**32).astype(np.uint32).view(np.int32)
        tensors |= {"m.qweight": streams(codes.T, bits).T.copy(), "m.qzeros": words}
        tensors["m.g_idx"] = groups.astype(np.int32)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    stated = {"quant_method": method, "bits": bits, "group_size": 32, "desc_act": act, **config}
    (folder / "config.json").write_text(json.dumps({"dtype": "float32", "quantization_config": stated}))
    return (scales.astype(np.float32)[groups] * (codes - zeros[groups]).astype(np.float32)).T


def converted(source: Path, out: Path, *words: str) -> dict[str, np.ndarray]:
    assert run(["convert", str(source), str(out), "--to", "safetensors", *words, "-q"]) == 0
    return tensors_of(out)


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """All tensors; safetensors' NumPy road knows no bf16."""
    raw = (folder / "model.safetensors").read_bytes()
    base = 8 + int.from_bytes(raw[:8], "little")
    found = {}
    dtypes = {"BF16": bfloat16, "F16": np.float16, "F32": np.float32, "I32": np.int32, "I64": np.int64}
    for name, row in json.loads(raw[8:base]).items():
        if name != "__metadata__":
            low, high = row["data_offsets"]
            found[name] = np.frombuffer(raw[base + low : base + high], dtypes[row["dtype"]]).reshape(row["shape"])
    return found


@pytest.mark.parametrize("case", [case for case in WRITTEN if case != AWQ])
def test_it_is_what_gptqmodel_computes_with(case: str, tmp_path: Path) -> None:
    same_floats(case, tmp_path)


def test_it_is_what_autoawq_computes_with(tmp_path: Path) -> None:
    same_floats(AWQ, tmp_path)
    same_model(AWQ, tmp_path)


def same_floats(case: str, tmp_path: Path) -> None:
    made = converted(INPUTS / case, tmp_path / "out", "--dequantize", "--dtype", "fp16")
    truth = load_file(f"{INPUTS / case}.truth.safetensors")
    assert {f"model/{name}" for name in made} == truth.keys()
    assert all(np.array_equal(value, truth[f"model/{name}"]) for name, value in made.items())
    assert "quantization_config" not in (tmp_path / "out/config.json").read_text()


@pytest.mark.parametrize(
    ("method", "bits", "config"),
    [("gptq", bits, {}) for bits in (2, 3, 4, 8)]
    + [("gptq", 4, {"act": True}), ("gptq", 4, {"checkpoint_format": "gptq_v2"}), ("awq", 4, {"version": "gemm"})],
    ids=str,
)
def test_every_layout_is_a_plain_decode(method: str, bits: int, config: dict[str, object], tmp_path: Path) -> None:
    want = packed(tmp_path / "in", method, bits, **config)
    words = ["--dequantize", "--dtype", "fp32", "-q"]
    assert run(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "safetensors", *words]) == 0
    made = load_file(tmp_path / "out/model.safetensors")
    assert made.keys() == {"m.weight", "norm.weight"} and np.array_equal(made["m.weight"], want)


def test_floats_of_it_are_a_model_that_megatron_takes(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    ranks = tmp_path / "ranks"
    assert run(["convert", str(FIXTURE), str(hub), "--to", "safetensors", "--dequantize", "-q"]) == 0
    words = ["--to", "megatron-dist", "--tp", "2", "--dequantize", "-q"]
    assert run(["convert", str(FIXTURE), str(ranks), *words]) == 0
    assert run(["convert", str(ranks), str(tmp_path / "back"), "--to", "safetensors", "-q"]) == 0
    assert run(["diff", str(hub), str(tmp_path / "back"), "-q"]) == 0


@pytest.mark.parametrize(
    ("name", "change", "code"),
    [
        ("m.g_idx", lambda value: value + 1, "E1468"),
        ("m.scales", lambda value: value[:, :32].copy(), "E1461"),
        ("m.qzeros", None, "E1460"),
    ],
)
def test_parts_that_do_not_belong_together(name: str, change, code: str, tmp_path: Path, capfd) -> None:
    packed(tmp_path / "in", "gptq", 4)
    tensors = load_file(tmp_path / "in/model.safetensors")
    tensors = {key: change(value) if key == name else value for key, value in tensors.items() if change or key != name}
    save_file(tensors, tmp_path / "in/model.safetensors")
    assert run(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "dcp", "--dequantize", "--json"]) == 3
    assert json.loads(capfd.readouterr().err)["error"]["code"] == code and not (tmp_path / "out").exists()


def test_a_layout_that_nobody_here_knows(tmp_path: Path, capfd) -> None:
    packed(tmp_path / "in", "gptq", 4, checkpoint_format="marlin")
    assert run(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "dcp", "--dequantize", "--json"]) == 2
    assert json.loads(capfd.readouterr().err)["error"]["code"] == "E1464"


def test_codes_under_the_names_of_a_family_are_one_cause(tmp_path: Path, capfd) -> None:
    assert run(["convert", str(FIXTURE), str(tmp_path / "out"), "--to", "megatron-dist", "--json"]) == 3
    error = json.loads(capfd.readouterr().err)["error"]
    assert error["code"] == "E1486" and "gptq" in error["message"] and not error.get("faults")
    assert "--dequantize" in error["hint"]


# -- repacked ----------------------------------------------------------------------------------------------------------

RULES = {"-:m.off": {}, "+:m.(a|b)$": {"bits": 8, "sym": False}, "m.a": {"bits": 2}, "m.c": {"group_size": 64}}


@pytest.mark.parametrize(
    ("module", "bits", "symmetric"),
    [("m.a", 8, False), ("m.b", 8, False), ("m.aa", 2, True), ("m.c", 4, True), ("n.m.a", 4, True)],
)
def test_of_gptqmodel_s_dynamic_the_first_rule_counts(module: str, bits: int, symmetric: bool) -> None:
    scheme = quantisation({"quantization_config": {"quant_method": "gptq", "bits": 4, "sym": True, "dynamic": RULES}})
    assert scheme is not None and scheme.known
    assert (scheme.bits_of(module), scheme.symmetric_in(module)) == (bits, symmetric)


@pytest.mark.parametrize(
    ("pattern", "values", "why"),
    [
        ("m(?!.a)", {"bits": 8}, "look-around"),
        ("m", {"bits": 5}, "codes of 5 bits"),
        ("m", {"bits": [8]}, "bits"),
        ("m", {"pack_dtype": "int64"}, "packs 'm' as int64"),
    ],
)
def test_rules_that_are_not_read_are_named(pattern: str, values: dict[str, Any], why: str) -> None:
    stated = {"quant_method": "gptq", "bits": 4, "dynamic": {pattern: values}}
    scheme = quantisation({"quantization_config": stated})
    assert scheme is not None and not scheme.known and why in scheme.why


REPACK = ("--repack", "compressed-tensors")


def codes_in(words: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """The codes of each row of 32-bit words, bit by bit."""
    bits_of = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    return bits_of[:, : columns * bits].reshape(len(words), columns, bits) @ (1 << np.arange(bits))


@pytest.mark.parametrize("case", [case for case in WRITTEN if case not in (ACT, AWQ)])
def test_what_is_repacked_is_the_same_model(case: str, tmp_path: Path) -> None:
    same_model(case, tmp_path)


def same_model(case: str, tmp_path: Path) -> None:
    made = converted(INPUTS / case, tmp_path / "packed", *REPACK)
    floats = converted(tmp_path / "packed", tmp_path / "floats", "--dequantize", "--dtype", "fp16")
    truth = load_file(f"{INPUTS / case}.truth.safetensors")
    assert {f"model/{name}" for name in floats} == truth.keys()
    assert all(np.array_equal(value, truth[f"model/{name}"]) for name, value in floats.items())
    before = tensors_of(INPUTS / case)  # and what is not quantised is as it was
    others = {name for name in before if not name.endswith((".qweight", ".qzeros", ".scales", ".g_idx"))}
    assert {name for name in made if ".weight_" not in name} == others
    assert all(
        made[name].dtype == before[name].dtype and made[name].tobytes() == before[name].tobytes() for name in others
    )
    assert not (tmp_path / "packed/quantize_config.json").exists()


@pytest.mark.parametrize(
    ("method", "bits", "config"),
    [("gptq", bits, {"sym": sym}) for bits in (2, 3, 4, 8) for sym in (False, True)]
    + [("gptq", 4, {"checkpoint_format": "gptq_v2"}), ("awq", 4, {"version": "gemm"})],
    ids=str,
)
def test_every_part_is_a_plain_decode(method: str, bits: int, config: dict[str, Any], tmp_path: Path) -> None:
    want = packed(tmp_path / "in", method, bits, **config)
    before = tensors_of(tmp_path / "in")
    made = converted(tmp_path / "in", tmp_path / "out", *REPACK)
    symmetric = bool(config.get("sym"))
    assert made.keys() - before.keys() == {
        f"m.weight_{part}" for part in ("packed", "scale", "shape", *(() if symmetric else ("zero_point",)))
    }
    assert made["m.weight_packed"].dtype == np.int32 and made["m.weight_packed"].shape == (64, 96 * bits // 32)
    assert made["m.weight_shape"].dtype == np.int64 and made["m.weight_shape"].tolist() == [64, 96]
    assert made["m.weight_scale"].dtype == np.float16 and np.array_equal(made["m.weight_scale"], before["m.scales"].T)
    codes = codes_in(made["m.weight_packed"], bits, 96)
    zeros = np.full((64, 3), 1 << (bits - 1))
    if not symmetric:
        assert made["m.weight_zero_point"].shape == (64 * bits // 32, 3)
        zeros = codes_in(made["m.weight_zero_point"].T, bits, 64).T
    groups = np.arange(96) // 32
    assert np.array_equal((codes - zeros[:, groups]) * made["m.weight_scale"].astype(np.float32)[:, groups], want)
    stated = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert stated["config_groups"]["group_0"]["weights"] == {
        "num_bits": bits,
        "type": "int",
        "strategy": "group",
        "group_size": 32,
        "symmetric": symmetric,
        "dynamic": False,
    }
    assert stated["ignore"] == ["lm_head"] and stated["quant_method"] == "compressed-tensors"


def test_modules_that_were_left_are_ignored_and_sizes_of_groups_may_differ(tmp_path: Path) -> None:
    made = converted(INPUTS / AWQ, tmp_path / "a", *REPACK)
    stated = json.loads((tmp_path / "a/config.json").read_text())["quantization_config"]
    assert stated["ignore"] == ["lm_head", "model.layers.0.self_attn.o_proj"]
    assert "model.layers.0.self_attn.o_proj.weight" in made
    packed(tmp_path / "in", "gptq", 4, dynamic={"n": {"group_size": -1}})
    tensors = load_file(tmp_path / "in/model.safetensors")
    tensors |= {f"n.{name[2:]}": value for name, value in tensors.items() if name.startswith("m.")}
    tensors |= {
        "n.scales": tensors["m.scales"][:1],
        "n.qzeros": tensors["m.qzeros"][:1],
        "n.g_idx": np.zeros(96, np.int32),
    }
    save_file(tensors, tmp_path / "in/model.safetensors")
    converted(tmp_path / "in", tmp_path / "b", *REPACK)
    stated = json.loads((tmp_path / "b/config.json").read_text())["quantization_config"]
    kinds = {tuple(each["targets"]): each["weights"] for each in stated["config_groups"].values()}
    assert kinds[("m",)]["group_size"] == 32 and kinds[("n",)]["strategy"] == "channel"


def refused(source: Path, out: Path, capfd: Any, *words: str) -> dict[str, Any]:
    code = run(["convert", str(source), str(out), "--to", "safetensors", *(words or REPACK), "--json"])
    assert code in (2, 3) and not out.exists()
    error: dict[str, Any] = json.loads(capfd.readouterr().err)["error"]
    return error


@pytest.mark.parametrize(
    "case", [f"quantized-inputs/{ACT}", *(f"quantized/{name}" for name in ("bnb_nf4", "bnb_int8", "mlx_4bit"))]
)
def test_what_has_no_exact_like_names_the_way_out(case: str, tmp_path: Path, capfd) -> None:
    error = refused(INPUTS.parent / case, tmp_path / "out", capfd)
    assert error["code"] == "E1471" and "--dequantize" in error["hint"]


@pytest.mark.parametrize(
    ("config", "name", "change", "code"),
    [
        ({"sym": True}, "m.qzeros", lambda value: value ^ 1, "E1472"),
        ({}, "m.g_idx", lambda value: value[::-1].copy(), "E1471"),
        ({}, "m.qzeros", None, "E1460"),
    ],
)
def test_values_that_would_be_lost_are_looked_at(config, name: str, change, code: str, tmp_path: Path, capfd) -> None:
    packed(tmp_path / "in", "gptq", 4, **config)
    tensors = load_file(tmp_path / "in/model.safetensors")
    tensors = {key: change(value) if key == name else value for key, value in tensors.items() if change or key != name}
    save_file(tensors, tmp_path / "in/model.safetensors")
    assert refused(tmp_path / "in", tmp_path / "out", capfd)["code"] == code


def test_groups_that_do_not_divide_the_inputs(tmp_path: Path, capfd) -> None:
    packed(tmp_path / "in", "gptq", 4, group_size=20)
    tensors = load_file(tmp_path / "in/model.safetensors")
    tensors |= {"m.scales": np.ones((5, 64), np.float16), "m.qzeros": np.zeros((5, 8), np.int32)}
    save_file(tensors, tmp_path / "in/model.safetensors")
    assert refused(tmp_path / "in", tmp_path / "out", capfd)["code"] == "E1471"


def test_there_is_nothing_to_repack(tmp_path: Path, capfd) -> None:
    for case in ("quantized/int4_group", "quantized/fp8_block", "safetensors/llama_one_file"):
        assert refused(INPUTS.parent / case, tmp_path / "out", capfd)["code"] == "E1473"
    assert run(["convert", str(FIXTURE), str(tmp_path / "out"), "--to", "dcp", *REPACK, "--json"]) == 2
    assert json.loads(capfd.readouterr().err)["error"]["code"] == "E0261"


def test_a_weight_that_goes_takes_its_parts_along(tmp_path: Path) -> None:
    kept = converted(FIXTURE, tmp_path / "a", "--remove-keys", "*.o_proj.qweight")
    assert not any("o_proj" in name for name in kept) and any("q_proj.scales" in name for name in kept)


def test_a_dtype_leaves_codes_and_scales_alone(tmp_path: Path) -> None:
    plain = converted(FIXTURE, tmp_path / "a", "--dtype", "fp32")
    before = tensors_of(FIXTURE)
    assert plain["model.norm.weight"].dtype == np.float32
    for name, value in plain.items():
        assert name.rpartition(".")[2] == "weight" or value.tobytes() == before[name].tobytes(), name
    made = converted(FIXTURE, tmp_path / "b", "--dtype", "fp32", *REPACK)
    assert made["model.norm.weight"].dtype == np.float32
    assert {value.dtype.name for name, value in made.items() if ".weight_" in name} == {"int32", "int64", "float16"}
