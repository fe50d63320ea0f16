"""Merges of models end to end, in default tests against whole tensors in torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import whole_merges as oracle
from safetensors.torch import load_file, save_file

import ckpt_tool as ckpt
from ckpt_tool.cli import run
from ckpt_tool.errors import InputError, UsageError

Models = Callable[..., list[str]]
Tensors = dict[str, torch.Tensor]


def tensors_of(folder: Any) -> Tensors:
    out: Tensors = {}
    for file in Path(folder).glob("*.safetensors"):
        out |= load_file(file)
    return out


OPTIONS: dict[str, dict[str, Any]] = {
    "linear": {"weight": (0.3, 0.7)},
    "slerp": {"t": 0.3},
    "nuslerp": {"weight": (0.3, 0.7)},
    "task-arithmetic": {"base": 0, "weight": (0.5, 0.25), "lambda_": 0.8},
    "ties": {"base": 0, "density": 0.4},
    "breadcrumbs": {"base": 0, "density": 0.4, "gamma": 0.1},
    "breadcrumbs-ties": {"base": 0, "density": (0.4, 0.6)},
    "dare-linear": {"base": 0, "density": 0.4, "seed": 5},
    "dare-ties": {"base": 0, "density": 0.4, "seed": 5},
    "della": {"base": 0, "density": 0.4, "epsilon": 0.2},
    "della-linear": {"base": 0, "density": 0.4},
    "model-stock": {"base": 0},
    "ema": {"decay": 0.9},
}


def merged(method: str, paths: list[str], out: Path, **more: Any) -> dict[str, Any]:
    options = {**OPTIONS[method], **more}
    if "base" in options:
        options["base"] = paths[options["base"]]
    return ckpt.merge(paths[1:3], out, method=method, **options)


def wanted(method: str, base: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    """The merged tensor where nothing is left to chance."""
    given = OPTIONS[method]
    one = (1.0, 1.0)
    makers: dict[str, Callable[[], torch.Tensor]] = {
        "linear": lambda: oracle.linear([a, b], given["weight"]),
        "ema": lambda: oracle.linear([a, b], (0.9, 1 - 0.9)),
        "slerp": lambda: oracle.slerp(0.3, a, b),
        "nuslerp": lambda: oracle.nuslerp(0.7, a, b),
        "task-arithmetic": lambda: oracle.task_vectors(base, [a, b], given["weight"], factor=0.8),
        "ties": lambda: oracle.task_vectors(base, [a, b], one, oracle.largest(0.4), consensus=True, normalize=True),
        "breadcrumbs": lambda: oracle.task_vectors(base, [a, b], one, oracle.crumbs(0.4, 0.1)),
        "breadcrumbs-ties": lambda: oracle.task_vectors(
            base, [a, b], one, lambda k, d: oracle.crumbs((0.4, 0.6)[k], 0.01)(k, d), consensus=True
        ),
        "model-stock": lambda: oracle.model_stock(base, [a, b]),
    }
    return makers[method]() if method in makers else None


@pytest.mark.parametrize("method", OPTIONS)
def test_methods_by_options(method: str, models: Models, tmp_path: Path) -> None:
    paths = models(3)
    said = merged(method, paths, tmp_path / "out")
    base, a, b = map(tensors_of, paths)
    got = tensors_of(tmp_path / "out")
    assert list(got) == list(base) and said["states"]["model"]["tensors"] == len(base)
    assert any("by" in note for note in said["notes"])
    for name, tensor in got.items():
        want = wanted(method, base[name], a[name], b[name])
        if want is not None:
            torch.testing.assert_close(tensor, want.to(tensor.dtype), rtol=3e-6, atol=3e-7)
        assert not torch.equal(tensor, base[name])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


CONFIGURATION = """
merge_method: ties
base_model: {0}
models:
  - model: {1}
    parameters:
      weight: [0.1, 0.5, 0.9]
      density:
        - filter: self_attn
          value: [0.3, 0.7]
        - value: 0.6
  - model: {2}
    parameters: {{weight: 0.5}}
parameters: {{normalize: false, density: "4e-1"}}
dtype: float32
out_dtype: bfloat16
tokenizer_source: base
"""


def test_a_config_with_gradients_and_filters(models: Models, tmp_path: Path) -> None:
    paths = models(3)
    (tmp_path / "merge.yaml").write_text(CONFIGURATION.format(*paths))
    ckpt.merge([], tmp_path / "out", config=tmp_path / "merge.yaml")
    base, a, b = map(tensors_of, paths)
    for name, tensor in tensors_of(tmp_path / "out").items():
        layer = int(name.split(".")[2]) if ".layers." in name else None
        t = 0.0 if layer is None else layer / 2
        weight = 0.1 + 0.8 * t
        density = 0.3 + 0.4 * t if "self_attn" in name else 0.6
        want = oracle.task_vectors(
            base[name],
            [a[name], b[name]],
            (weight, 0.5),
            lambda k, d, s=(density, 0.4): oracle.largest(s[k])(k, d),
            consensus=True,
        )
        assert torch.equal(tensor, want.bfloat16()), name


def test_layers_laid_end_to_end(models: Models, tmp_path: Path) -> None:
    """Layers are renumbered, lists of the config follow them, tensors are moved byte for byte."""
    paths = models(3, config=None)
    for path in paths:
        config = json.loads((Path(path) / "config.json").read_text())
        (Path(path) / "config.json").write_text(json.dumps({**config, "layer_types": ["a", "b", "c"]}))
    (tmp_path / "merge.yaml").write_text(
        f"merge_method: passthrough\nslices:\n"
        f"  - sources: [{{model: {paths[1]}, layer_range: [0, 2]}}]\n"
        f"  - sources: [{{model: {paths[2]}, layer_range: [1, 3]}}]\n"
        f"  - sources: [{{model: {paths[1]}, layer_range: [2, 3], parameters: {{scale: [{{filter: o_proj, value: "
        f"0.5}}]}}}}]\n"
    )
    said = ckpt.merge([], tmp_path / "out", config=tmp_path / "merge.yaml")
    got = tensors_of(tmp_path / "out")
    one = tensors_of(paths[1])
    two = tensors_of(paths[2])
    origin = [(one, 0), (one, 1), (two, 1), (two, 2), (one, 2)]
    assert {name.split(".")[2] for name in got if ".layers." in name} == {"0", "1", "2", "3", "4"}
    for name, tensor in got.items():
        if ".layers." not in name:
            assert torch.equal(tensor, one[name])
            continue
        number = int(name.split(".")[2])
        model, layer = origin[number]
        half = 0.5 if number == 4 and "o_proj" in name else 1
        assert torch.equal(tensor, model[name.replace(f".{number}.", f".{layer}.", 1)] * half), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["layer_types"]) == (5, ["a", "b", "b", "c", "c"])
    assert "44 tensors" not in said["notes"][-1] and said["states"]["model"]["tensors"] == len(got)


def test_layers_of_a_source_that_records_its_digests(models: Models, tmp_path: Path) -> None:
    """What is recorded of layer 1 is not held against the layer 1 of the output, which was layer 2."""
    (path,) = models(1)
    ckpt.convert(path, tmp_path / "in", to="sharded", tp=2)
    (tmp_path / "merge.yaml").write_text(
        f"merge_method: passthrough\nslices: [{{sources: [{{model: {tmp_path / 'in'}, layer_range: [1, 3]}}]}}]\n"
    )
    ckpt.merge([], tmp_path / "out", config=tmp_path / "merge.yaml", to="safetensors")
    name = "model.layers.{}.mlp.up_proj.weight"
    assert torch.equal(tensors_of(tmp_path / "out")[name.format(0)], tensors_of(path)[name.format(1)])


@pytest.mark.parametrize("method", OPTIONS)
def test_keys_that_are_removed_are_left_out_and_counted(method: str, models: Models, tmp_path: Path) -> None:
    paths = models(3)
    said = merged(method, paths, tmp_path / "out", remove_keys=["lm_head.*"])
    assert "lm_head.weight" not in tensors_of(tmp_path / "out")
    assert said["removed_bytes"] == 48 * 16 * 4 and [row["name"] for row in said["removed"]] == ["lm_head.weight"]
    index = said["states"]["model"]["bytes"]
    assert index == sum(t.nbytes for t in tensors_of(tmp_path / "out").values())


def test_a_tensor_that_one_model_lacks_may_be_removed(models: Models, tmp_path: Path) -> None:
    paths = models(2)
    tensors = tensors_of(paths[1])
    del tensors["lm_head.weight"]
    save_file(tensors, Path(paths[1]) / "model.safetensors")
    with pytest.raises(InputError, match="lm_head.weight: not in"):
        ckpt.merge(paths, tmp_path / "out", method="linear")
    ckpt.merge(paths, tmp_path / "out", method="linear", remove_keys=["lm_head.weight"])


@pytest.mark.parametrize("name", ["checkpoint-{}", "iter_{:07d}"])
def test_the_last_checkpoints_of_a_folder(name: str, models: Models, tmp_path: Path) -> None:
    paths = models(4)
    (tmp_path / "run").mkdir()
    for step, path in zip((90, 100, 110, 1000), paths, strict=True):
        Path(path).rename(tmp_path / "run" / name.format(step))
    ckpt.merge([tmp_path / "run"], tmp_path / "out", method="linear", last=3)
    held = [tensors_of(tmp_path / "run" / name.format(step)) for step in (100, 110, 1000)]
    for key, tensor in tensors_of(tmp_path / "out").items():
        assert torch.equal(tensor, oracle.linear([each[key] for each in held], (1, 1, 1)))
    with pytest.raises(UsageError, match="the folder holds 4 checkpoints") as caught:
        ckpt.merge([tmp_path / "run"], tmp_path / "out5", method="linear", last=5)
    assert caught.value.code == "E1450"
    assert name.format(1000) in caught.value.hint and caught.value.hint.endswith("--last 4 takes all")
    ckpt.merge([tmp_path / "run"], tmp_path / "ema", method="ema", last=3, decay=0.9)
    average = held[0]["model.norm.weight"]
    for each in held[1:]:
        average = 0.9 * average + (1 - 0.9) * each["model.norm.weight"]
    torch.testing.assert_close(tensors_of(tmp_path / "ema")["model.norm.weight"], average, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("method", ["ties", "della", "dare-linear", "slerp", "model-stock"])
def test_the_same_bits_whatever_the_machine_does(method: str, models: Models, tmp_path: Path) -> None:
    """Threads, memory, formats and shards of the sources."""
    paths = models(3)
    merged(method, paths, tmp_path / "want", threads=1)
    want = tensors_of(tmp_path / "want")
    other = [paths[0], str(tmp_path / "tp4"), str(tmp_path / "megatron")]
    ckpt.convert(paths[1], other[1], to="sharded", tp=4, pp=3)
    ckpt.convert(paths[2], other[2], to="megatron-dist", tp=2)
    shards = [f"{path}.shards" for path in paths]
    for path, parts in zip(paths, shards, strict=True):
        ckpt.convert(path, parts, to="safetensors", max_shard_size="4kB")
    for number, (sources, options) in enumerate(
        [
            (paths, {"threads": 4}),
            (paths, {"memory": "16MiB", "threads": 2}),
            (other, {"to": "safetensors"}),
            (shards, {"max_shard_size": "8kB"}),
        ]
    ):
        if method == "slerp" and sources is other:
            options["base"] = 1
        merged(method, sources, tmp_path / f"out{number}", **options)
        got = tensors_of(tmp_path / f"out{number}")
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want), options
    if method in ("della", "dare-linear"):
        merged(method, paths, tmp_path / "again", seed=6)
        assert any(not torch.equal(want[k], v) for k, v in tensors_of(tmp_path / "again").items())


def test_models_of_megatron_come_back_as_megatrons(models: Models, tmp_path: Path) -> None:
    paths = models(2)
    for path in paths:
        ckpt.convert(path, f"{path}.megatron", to="megatron-dist", tp=2)
    ckpt.merge([f"{path}.megatron" for path in paths], tmp_path / "out", method="linear", weight=(0.25, 0.75))
    found = ckpt.open(tmp_path / "out")
    assert found.catalog.format == "megatron-dist" and any("linear_qkv" in name for name in found)
    ckpt.convert(tmp_path / "out", tmp_path / "back", to="safetensors")
    a = tensors_of(paths[0])
    b = tensors_of(paths[1])
    got = tensors_of(tmp_path / "back")
    assert got.keys() == a.keys()
    assert all(torch.equal(got[name], oracle.linear([a[name], b[name]], (0.25, 0.75))) for name in a)


def test_bf16_is_rounded_once_and_models_of_two_dtypes_make_fp32(models: Models, tmp_path: Path) -> None:
    paths = models(2)
    ckpt.convert(paths[1], tmp_path / "short", to="safetensors", dtype="bf16")
    ckpt.merge([tmp_path / "short", paths[0]], tmp_path / "out", method="linear")
    a = tensors_of(tmp_path / "short")
    b = tensors_of(paths[0])
    got = tensors_of(tmp_path / "out")
    assert all(torch.equal(got[name], oracle.linear([a[name], b[name]], (1, 1))) for name in a)
    ckpt.merge([tmp_path / "short", paths[0]], tmp_path / "out16", method="linear", dtype="bf16")
    got = tensors_of(tmp_path / "out16")
    assert all(torch.equal(got[name], oracle.linear([a[name], b[name]], (1, 1)).bfloat16()) for name in a)


def test_integers_must_be_equal(models: Models, tmp_path: Path) -> None:
    paths = models(2)
    for k, path in enumerate(paths):
        save_file({**tensors_of(path), "buffer": torch.arange(5) + k // 2}, Path(path) / "model.safetensors")
    ckpt.merge(paths, tmp_path / "out", method="linear")
    assert torch.equal(tensors_of(tmp_path / "out")["buffer"], torch.arange(5))
    save_file({**tensors_of(paths[0]), "buffer": torch.arange(5) + 1}, Path(paths[0]) / "model.safetensors")
    with pytest.raises(InputError, match="not floats are not merged") as caught:
        ckpt.merge(paths, tmp_path / "out2", method="linear")
    assert caught.value.code == "E1449"


def test_optimizer_states_stay_behind_by_name(tmp_path: Path) -> None:
    fixture = Path(__file__).resolve().parents[3] / "fixtures" / "dcp" / "fsdp2_dp4"
    shutil.copytree(fixture, tmp_path / "twin")
    said = ckpt.merge([fixture, tmp_path / "twin"], tmp_path / "out", method="linear")
    behind = {entry["state"] for entry in said["dropped"]}
    assert {"exp_avg", "exp_avg_sq"} <= behind and set(ckpt.open(tmp_path / "out").states) == {"model"}
    with pytest.raises(UsageError, match="optimizer states of several jobs"):
        ckpt.merge([fixture, tmp_path / "twin"], tmp_path / "o2", method="linear", state="optimizer")


def test_by_the_command_line(models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = models(3)
    line = [
        "merge",
        b,
        c,
        str(tmp_path / "out"),
        "--method",
        "ties",
        "--base",
        a,
        "--density",
        "0.5",
        "--no-normalize",
        "-q",
    ]
    assert run(line) == 0
    assert run(["merge", b, c, str(tmp_path / "o2"), "--method", "ties", "--json", "-q"]) == 2
    fault = json.loads(capsys.readouterr().err)["error"]
    assert fault["code"] == "E1442" and "needs a base" in fault["message"]


def test_passthrough_moves_what_no_merge_computes(tmp_path: Path) -> None:
    tensors = {
        "w": torch.arange(4, dtype=torch.float64),
        "q": torch.ones(3).to(torch.float8_e4m3fn),
        "i": torch.arange(3),
    }
    (tmp_path / "m").mkdir()
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    ckpt.merge([tmp_path / "m"], tmp_path / "out", method="passthrough")
    got = tensors_of(tmp_path / "out")
    assert all(got[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert torch.equal(got["w"], tensors["w"]) and torch.equal(got["q"].float(), tensors["q"].float())


def test_what_all_models_leave_out_is_one_entry(models: Models, tmp_path: Path) -> None:
    said = ckpt.merge(models(2), tmp_path / "out", method="linear", vocab_size=40)
    reasons = [entry["reason"] for entry in said["dropped"]]
    assert reasons == ["of 2 models: rows beyond --vocab-size 40"]
