"""`--quantize`: each code is the nearest, each scale as stated, whatever the shape; hostile values have stated results.

The oracle here is brute force in fp64: every code of a scheme is tried on every value. That the real libraries give the
same bits is `test_quantize_peers.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tool.cli import run as cli
from ckpt_tool.commands.convert import convert
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError, InconsistentCheckpoint, UsageError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.quantised import quantize_recipes
from ckpt_tool.quantised.error_stats import GRAIN, Figures
from ckpt_tool.weight_schemes.written_schemes import SCHEMES

FIXTURES = Path(__file__).parents[2] / "fixtures"
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
NAME = "model.layers.0.mlp.up_proj.weight"
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def model_of(folder: Path, weights: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir()
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def run(source: Path, out: Path, **writing: Any) -> dict[str, Any]:
    return convert(str(source), str(out), Reading(), Writing(to="safetensors", fsync=False, **writing), Silent())


def quantised(weight: torch.Tensor, folder: Path, scheme: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(the parts of the weight by the ends of their names, the report)."""
    folder.mkdir(exist_ok=True)
    source = model_of(folder / "floats", {NAME: weight})
    report = run(source, folder / scheme, quantize=scheme)
    found = load_file(folder / scheme / "model.safetensors")
    torchao = "._".join(NAME.rsplit(".", 1))  # its parts have names of their own
    return {name.removeprefix(NAME).removeprefix(torchao): value for name, value in found.items()}, report


def scales_in(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    return next(value for end, value in parts.items() if end in ("_scale_inv", "_scale"))


def wide(
    parts: dict[str, torch.Tensor], scheme: str, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, divisors, every code) of a matrix in fp64, by code of the test's own."""
    row, (rows, columns) = SCHEMES[scheme], shape
    scales = scales_in(parts)
    stored = 2.0 ** (scales.double() - 127) if scales.dtype == torch.uint8 else scales.double()
    if "_global_scale" in parts:  # the quotient is rounded to fp32, as in the library
        stored = (scales.float() / parts["_global_scale"]).double()
    height = row.block[0]
    width = row.block[1] or columns
    divisors = np.repeat(np.repeat(stored.numpy(), height, 0)[:rows], width, 1)[:, :columns]
    four = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    if scheme in ("mxfp4", "nvfp4"):
        halves = parts["_packed"].numpy()
        table = np.array([*four, *(-np.array(four))])
        codes = table[np.stack([halves & 15, halves >> 4], -1).reshape(shape)]
        return codes, divisors, np.array([*four, *(-np.array(four))])
    if scheme == "int4-g128":
        halves = parts["_packed"].numpy().view(np.uint8)
        codes = np.stack([halves & 15, halves >> 4], -1).reshape(shape).astype(float) - 8
        assert parts["_shape"].tolist() == list(shape)
        return codes, divisors, np.arange(-8.0, 8)
    codes = next(parts[end] for end in ("", "_qdata") if end in parts).double().numpy()
    if row.codes_of == "int8":
        return codes, divisors, np.arange(-128.0, 128)
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(float)
    return codes, divisors, every[np.isfinite(every)]


@pytest.mark.parametrize("floats", FLOATS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_code_is_the_nearest(scheme: str, floats: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(304, 256, generator=generator) * torch.logspace(-3, 1, 304).reshape(-1, 1)
    weight = weight.to(FLOATS[floats])
    parts, report = quantised(weight, tmp_path / "m", scheme)
    codes, divisors, every = wide(parts, scheme, (304, 256))
    exact = weight.double().numpy()
    distance = np.abs(exact - codes * divisors)
    for at in range(0, 304, 19):
        best = np.abs(exact[at : at + 19, :, None] - every * divisors[at : at + 19, :, None]).min(-1)
        # the quotient is rounded to fp32: of two codes that are as near to seven digits either may be taken
        assert (distance[at : at + 19] <= best * (1 + 1e-4)).all()
    entry = report["quantized"]["errors"][0]
    assert entry["name"] == NAME
    assert entry["max_abs_error"] == pytest.approx(distance.max(), rel=1e-4)
    assert entry["relative_norm"] == pytest.approx(np.linalg.norm(distance) / np.linalg.norm(exact), rel=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_our_floats_of_it_are_codes_times_scales(scheme: str, tmp_path: Path) -> None:
    weight = torch.randn(144, 384, generator=torch.Generator().manual_seed(1)).bfloat16()
    parts, _ = quantised(weight, tmp_path / "m", scheme)
    run(tmp_path / "m" / scheme, tmp_path / "again", dequantize=True, dtypes={"": "F32"})
    codes, divisors, _ = wide(parts, scheme, (144, 384))
    again = load_file(tmp_path / "again" / "model.safetensors")[NAME]
    assert torch.equal(again, torch.from_numpy((codes * divisors).astype(np.float32)))
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert "quantization_config" not in config


@pytest.mark.parametrize("shape", [(1, 1), (127, 129), (128, 128), (129, 127), (5, 1000), (640, 3), (128, 40_000)])
def test_blocks_may_be_short(shape: tuple[int, int], tmp_path: Path) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    parts, _ = quantised(weight, tmp_path / "m", "fp8-block")
    rows, columns = shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
    tiles = padded.reshape(ceil_div(rows, 128), 128, ceil_div(columns, 128), 128)
    scales = tiles.abs().amax((1, 3)) / 448
    codes = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn).reshape(padded.shape)[:rows, :columns]
    assert torch.equal(parts["_scale_inv"], scales)
    assert torch.equal(parts[""].view(torch.uint8), codes.contiguous().view(torch.uint8))


def test_stacked_experts_have_blocks_of_their_own(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    weight = torch.randn(3, 200, 130, generator=torch.Generator().manual_seed(3)).bfloat16()
    report = run(model_of(tmp_path / "m", {name: weight}), tmp_path / "out", quantize="fp8-block")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found[f"{name}_scale_inv"].shape == (3, 2, 2) and report["quantized"]["weights"] == 1
    for expert in range(3):
        parts, _ = quantised(weight[expert], tmp_path / str(expert), "fp8-block")
        assert torch.equal(found[f"{name}_scale_inv"][expert], parts["_scale_inv"])
        assert torch.equal(found[name][expert].view(torch.uint8), parts[""].view(torch.uint8))
    with pytest.raises(UsageError) as caught:
        run(tmp_path / "m", tmp_path / "no", quantize="int8")
    assert caught.value.code == "E2723" and "--experts split" in str(caught.value.hint)


# -- hostile values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_no_finite_number_is_named(scheme: str, bad: float, tmp_path: Path) -> None:
    weight = torch.ones(208, 256, dtype=torch.bfloat16)
    weight[137, 201] = bad
    with pytest.raises(InconsistentCheckpoint) as caught:
        quantised(weight, tmp_path / "m", scheme)
    assert caught.value.code == "E2720" and caught.value.key == NAME and "[137, 201]" in caught.value.message
    assert not (tmp_path / "m" / scheme).exists()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_stay_zeros(scheme: str, tmp_path: Path) -> None:
    weight = torch.zeros(144, 256, dtype=torch.bfloat16)
    weight[129, 255] = 3.0
    parts, report = quantised(weight, tmp_path / "m", scheme)
    codes, divisors, _ = wide(parts, scheme, (144, 256))
    assert np.isfinite(divisors).all() and (divisors > 0).all()
    assert np.count_nonzero(codes) == 1 and codes[129, 255] * divisors[129, 255] == pytest.approx(3.0, rel=0.1)
    first = scales_in(parts).flatten()[0].item()
    least = {"fp8-block": 1.0, "mxfp8": 0, "mxfp4": 0, "nvfp4": 0.125}
    epsilon = torch.finfo(scales_in(parts).dtype).eps if scheme not in least else 0
    assert first == least.get(scheme, epsilon)
    assert report["quantized"]["errors"][0]["max_abs_error"] < 0.3
    parts, report = quantised(torch.zeros(16, 256), tmp_path / "all", scheme)
    assert not np.count_nonzero(wide(parts, scheme, (16, 256))[0])
    assert report["quantized"]["errors"][0] == {"name": NAME, "max_abs_error": 0.0, "relative_norm": 0.0}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", [1.401298464324817e-45, 1e-40, 1e-38, 3e38])
def test_the_smallest_and_the_largest_numbers(scheme: str, size: float, tmp_path: Path) -> None:
    weight = torch.linspace(-1, 1, 16 * 256, dtype=torch.float64).reshape(16, 256).mul(size).float()
    parts, report = quantised(weight, tmp_path / "m", scheme)
    codes, divisors, _ = wide(parts, scheme, (16, 256))
    assert np.isfinite(codes * divisors).all()
    error = report["quantized"]["errors"][0]
    assert np.abs(weight.double().numpy() - codes * divisors).max() == pytest.approx(error["max_abs_error"], rel=1e-4)
    assert error["max_abs_error"] <= size * (1.01 if size < 1e-37 else 0.2)


def test_a_weight_that_groups_do_not_divide_stays(tmp_path: Path) -> None:
    odd = "model.layers.0.mlp.down_proj.weight"
    weights = {NAME: torch.randn(4, 256).bfloat16(), odd: torch.randn(4, 130).bfloat16()}
    report = run(model_of(tmp_path / "m", weights), tmp_path / "out", quantize="int4-g128")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[odd], weights[odd])
    assert any(odd in note and "do not divide" in note for note in report["notes"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == [odd.removesuffix(".weight"), "lm_head"]


# -- which, and how it travels -----------------------------------------------------------------------------------------


MIXED = {
    "model.embed_tokens.weight": (32, 256),
    "model.layers.0.input_layernorm.weight": (256,),
    "model.layers.0.mlp.gate.weight": (8, 256),
    "model.layers.0.mlp.up_proj.weight": (128, 256),
    "model.layers.0.self_attn.q_proj.weight": (256, 256),
    "visual.blocks.0.attn.qkv.weight": (256, 256),
    "lm_head.weight": (32, 256),
}


def test_what_stays_and_what_the_patterns_say(tmp_path: Path) -> None:
    source = model_of(tmp_path / "m", {name: torch.randn(shape).bfloat16() for name, shape in MIXED.items()})

    def scales_of(out: str, **writing: Any) -> set[str]:
        run(source, tmp_path / out, quantize="fp8-block", **writing)
        names = load_file(tmp_path / out / "model.safetensors")
        return {name.removesuffix("_scale_inv") for name in names if name.endswith("_scale_inv")}

    up = "model.layers.0.mlp.up_proj.weight"
    q = "model.layers.0.self_attn.q_proj.weight"
    assert scales_of("rule") == {up, q}
    config = json.loads((tmp_path / "rule" / "config.json").read_text())["quantization_config"]
    assert set(config["modules_to_not_convert"]) == {"model.layers.0.mlp.gate", "visual.blocks.0.attn.qkv", "lm_head"}
    assert scales_of("skip", quantize_skip=("*.q_proj.*",)) == {up}
    assert scales_of("only", quantize_only=("lm_head.weight", "*.q_proj.*")) == {"lm_head.weight", q}
    config = json.loads((tmp_path / "only" / "config.json").read_text())["quantization_config"]
    assert "lm_head" not in config["modules_to_not_convert"] and "model.layers.0.mlp.up_proj" in str(config)
    for lone in ("quantize_skip", "quantize_only"):
        with pytest.raises(UsageError) as caught:
            run(source, tmp_path / "no", **{lone: ("*",)})
        assert caught.value.code == "E2724"
    for given, code in (({"quantize_skip": ("*.kk_proj.*",)}, "E0255"), ({"quantize_skip": ("*",)}, "E2721")):
        with pytest.raises(UsageError) as caught:
            run(source, tmp_path / "no", quantize="fp8-block", **given)
        assert caught.value.code == code


def test_codes_are_not_quantised_again_but_by_way_of_floats(tmp_path: Path) -> None:
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(9)).bfloat16()
    quantised(weight, tmp_path / "m", "fp8-block")
    first = tmp_path / "m" / "fp8-block"
    with pytest.raises(UsageError) as caught:
        run(first, tmp_path / "no", quantize="int4-g128")
    assert caught.value.code == "E1465"
    run(first, tmp_path / "hop", dequantize=True, quantize="int4-g128")
    run(first, tmp_path / "floats", dequantize=True)
    run(tmp_path / "floats", tmp_path / "two", quantize="int4-g128")
    assert (tmp_path / "hop" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()
    for out in ("hop", "two"):
        config = json.loads((tmp_path / out / "config.json").read_text())
        assert config["quantization_config"]["format"] == "pack-quantized"


def test_a_cast_comes_first(tmp_path: Path) -> None:
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(9))
    source = model_of(tmp_path / "m", {NAME: weight, "model.norm.weight": torch.ones(256)}, dtype="float32")
    run(source, tmp_path / "hop", quantize="int8", dtypes={"": "BF16"})
    run(source, tmp_path / "half", dtypes={"": "BF16"})
    run(tmp_path / "half", tmp_path / "two", quantize="int8")
    hop, two = (load_file(tmp_path / out / "model.safetensors") for out in ("hop", "two"))
    assert {name: (value.dtype, value.tolist()) for name, value in hop.items()} == {
        name: (value.dtype, value.tolist()) for name, value in two.items()
    }
    assert hop["model.norm.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "hop" / "config.json").read_text())["dtype"] == "bfloat16"


def test_where_no_config_can_say_so_nothing_is_quantised(tmp_path: Path) -> None:
    source = model_of(tmp_path / "m", {NAME: torch.randn(128, 128).bfloat16()})
    for change, out in ((source / "config.json", "folder"), (None, "one.safetensors")):
        with pytest.raises(UsageError) as caught:
            if change is not None:
                change.rename(tmp_path / "config.json")
            run(source, tmp_path / out, quantize="fp8-block")
        assert caught.value.code == "E2722"
        if change is not None:
            (tmp_path / "config.json").rename(change)


@pytest.mark.parametrize("to", ["dcp", "torch", "sharded"])
def test_other_formats_say_whose_it_is(to: str, tmp_path: Path) -> None:
    source = model_of(tmp_path / "m", {NAME: torch.randn(128, 128).bfloat16()})
    with pytest.raises(CkptError) as caught:
        convert(str(source), str(tmp_path / "o"), Reading(), Writing(to=to, quantize="fp8-block"), Silent())
    assert caught.value.code == "E0261" and "safetensors" in str(caught.value.hint)


def test_any_threads_and_any_blocks_give_the_same_bytes_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,843,200 elements, seven grains; bands of 128 rows that are read in parts as well."""
    weight = torch.randn(1800, 1024, generator=torch.Generator().manual_seed(2)).bfloat16()
    source = model_of(tmp_path / "m", {NAME: weight})

    def made(out: str, scheme: str, **writing: Any) -> tuple[bytes, Any]:
        report = run(source, tmp_path / out, quantize=scheme, **writing)
        return (tmp_path / out / "model.safetensors").read_bytes(), report["quantized"]["errors"]

    for scheme in ("fp8-block", "int8", "nvfp4"):
        want = made(f"{scheme}-one", scheme, threads=1)
        assert made(f"{scheme}-four", scheme, threads=4) == want
        lost = {0, 3 * GRAIN, 7 * GRAIN}
        with monkeypatch.context() as patch:
            patch.setattr(Figures, "note", but(lost))
            patch.setattr(quantize_recipes, "_BAND", 1000)
            patch.setattr(quantize_recipes, "_NOTED", 0)
            assert made(f"{scheme}-lost", scheme) == want
        assert not lost


@pytest.mark.parametrize("scheme", ["fp8-block", "mxfp8"])
@pytest.mark.parametrize("room", [2 * 600 * 300, 0])
def test_scales_read_what_the_codes_have_not(
    scheme: str, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model_of(tmp_path / "m", {NAME.replace("0", str(n)): torch.randn(600, 320) for n in range(3)})
    readers = list[str]()
    read_values = quantize_recipes.Codes.read_values

    def read(self: Any, *where: Any) -> Any:
        readers.append(type(self).__name__)
        return read_values(self, *where)

    monkeypatch.setattr(quantize_recipes._QuantisedPart, "read_values", read)
    monkeypatch.setattr(quantize_recipes, "_NOTED", room)
    run(source, tmp_path / "o", quantize=scheme, threads=1)
    assert ("Scales" in readers) == (not room)


def test_maxima_of_the_weights_that_came_last_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_recipes, "_NOTED", 40)
    maxima = quantize_recipes.KnownMaxima()
    a, b, c = (quantize_recipes.TensorKey(name) for name in "abc")
    for key, total in ((a, 4), (b, 4), (c, 11)):
        maxima.note(key, 1, np.ones(2, np.float32), total)
    assert list(maxima.recall(b, 1, 3)) == [1, 1]
    assert maxima.recall(b, 0, 2) is None and maxima.recall(c, 1, 3) is None
    maxima.note(c, 0, np.zeros(5, np.float32), 5)
    assert maxima.recall(a, 1, 3) is None and list(maxima.recall(c, 0, 5)) == [0] * 5


def but(lost: set[int]) -> Any:
    """`Figures.note` that hears nothing of the grains that begin at `lost`, once: as in a run that goes on, which does
    not make again what is done."""
    noted = Figures.note

    def note(self: Figures, start: int, stop: int, error: Any) -> None:
        if start not in lost:
            noted(self, start, stop, error)
        lost.discard(start)

    return note


@pytest.mark.parametrize(
    ("source", "more"),
    [
        ("megatron-dist/llama_tp2", {}),
        ("sharded/llama_tp4_pp2", {}),
        ("dcp/fsdp2_dp4", {}),
        ("quantized/fp8_block", {"dequantize": True}),
        ("gguf/llama3.gguf", {"dtypes": {"": "BF16"}}),
    ],
)
def test_one_run_is_two(source: str, more: dict[str, Any], tmp_path: Path) -> None:
    """From any format, under the hub's names: what is quantised is what would be written without the option."""
    given = FIXTURES / source
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    reading = Reading(config=str(tmp_path / "config.json") if source.startswith(("dcp", "sharded")) else None)
    writing = Writing(to="safetensors", fsync=False, states=("model",), **more)
    convert(str(given), str(tmp_path / "plain"), reading, writing, Silent())
    for scheme in ("fp8-block", "int8"):
        hop = replace(writing, quantize=scheme)
        convert(str(given), str(tmp_path / f"{scheme}-hop"), reading, hop, Silent())
        run(tmp_path / "plain", tmp_path / f"{scheme}-two", quantize=scheme)
        files = [(tmp_path / f"{scheme}-{way}" / "model.safetensors").read_bytes() for way in ("hop", "two")]
        assert files[0] == files[1]
        stated = [json.loads((tmp_path / f"{scheme}-{way}" / "config.json").read_text()) for way in ("hop", "two")]
        assert stated[0]["quantization_config"] == stated[1]["quantization_config"]


def test_the_report_names_the_worst(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = model_of(tmp_path / "m", {name: torch.randn(shape).bfloat16() for name, shape in MIXED.items()})
    assert cli(["convert", str(source), str(tmp_path / "o"), "--to", "safetensors", "--quantize", "mxfp4"]) == 0
    shown = capsys.readouterr().out
    assert "quantised as mxfp4, 2 weights" in shown and "routers, gates" in shown and "2 weights are quantised" in shown
    assert cli(["inspect", str(tmp_path / "o")]) == 0
    assert "mxfp4-pack-quantized" in capsys.readouterr().out
    assert cli(["verify", str(tmp_path / "o")]) == 0


@pytest.mark.parametrize(
    ("source", "dialect"),
    [("megatron-dist/llama_tp2", "keep"), ("megatron-dist/llama_tp2", "megatron"), ("convert/llama/hf", "megatron")],
)
def test_names_are_the_hubs(source: str, dialect: str, tmp_path: Path) -> None:
    writing = Writing(to="safetensors", dialect=dialect, states=("model",), quantize="fp8-block")
    with pytest.raises(UsageError) as caught:
        convert(str(FIXTURES / source), str(tmp_path / "o"), Reading(), writing, Silent())
    assert caught.value.code == "E2725"


def test_a_merge_is_quantised_on_the_way(tmp_path: Path) -> None:
    sources = [
        model_of(tmp_path / name, {NAME: torch.randn(130, 256, generator=torch.Generator().manual_seed(n)).bfloat16()})
        for n, name in enumerate("ab")
    ]
    lines = ["merge", *map(str, sources)]
    way = ["--method", "linear", "--weight", "0.3", "--weight", "0.7"]
    assert cli([*lines, str(tmp_path / "hop"), *way, "--quantize", "int8"]) == 0
    assert cli([*lines, str(tmp_path / "plain"), *way]) == 0
    run(tmp_path / "plain", tmp_path / "two", quantize="int8")
    assert (tmp_path / "hop/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()


# -- experts of gpt-oss ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("panel", [1 << 24, 1 << 10])
def test_experts_of_gpt_oss_are_turned(panel: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of each expert are those of its matrix turned; attention stays."""
    monkeypatch.setattr(quantize_recipes, "_PANEL", panel)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    q = "model.layers.0.self_attn.q_proj.weight"
    weight = torch.randn(3, 64, 200, generator=torch.Generator().manual_seed(5)).bfloat16()
    beside = {q: torch.randn(64, 64).bfloat16(), f"{name}_bias": torch.randn(3, 200).bfloat16()}
    source = model_of(tmp_path / "m", {name: weight, **beside}, model_type="gpt_oss")
    report = run(source, tmp_path / "out", quantize="mxfp4")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {f"{name}_blocks", f"{name}_scales", *beside} and report["quantized"]["weights"] == 1
    assert found[f"{name}_blocks"].shape == (3, 200, 2, 16) and found[f"{name}_scales"].shape == (3, 200, 2)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "mxfp4" and q.removesuffix(".weight") in config["modules_to_not_convert"]
    for expert in range(3):
        turned, _ = quantised(weight[expert].T, tmp_path / str(expert), "mxfp4")
        assert torch.equal(found[f"{name}_blocks"][expert].reshape(200, 32), turned["_packed"])
        assert torch.equal(found[f"{name}_scales"][expert], turned["_scale"])
    run(tmp_path / "out", tmp_path / "again", dequantize=True)
    again = load_file(tmp_path / "again" / "model.safetensors")[name].float()
    assert again.shape == weight.shape
    entry = report["quantized"]["errors"][0]
    assert entry["relative_norm"] == pytest.approx(
        ((again - weight.float()).norm() / weight.float().norm()).item(), rel=1e-4
    )
    weight[1, 5, 7] = float("nan")
    with pytest.raises(InconsistentCheckpoint) as caught:
        run(model_of(tmp_path / "bad", {name: weight}, model_type="gpt_oss"), tmp_path / "no", quantize="mxfp4")
    assert "[1, 5, 7]" in caught.value.message
