"""Weights that are tensor subclasses of torchao's: what headers state of them stays with them (`fixtures/quantized`).

That they become the floats that torchao makes is `test_dequantized_weights.py`; that transformers loads what is written
here, with torchao, is at the end and wants both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.inspect import inspect
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError, Incomplete, InconsistentCheckpoint, UsageError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

FIXTURES = Path(__file__).parents[2] / "fixtures/quantized"
MIXED = FIXTURES / "torchao_mixed"
CASES = sorted(path.name for path in FIXTURES.glob("torchao_*") if path.is_dir())
WRITTEN = ("fp8-channel:torchao", "int8:torchao")


def run(source: Path, out: Path, to: str = "safetensors", **writing: Any) -> dict[str, Any]:
    return convert(str(source), str(out), Reading(), Writing(to=to, fsync=False, **writing), Silent())


def headers(folder: Path) -> list[dict[str, str]]:
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found.append(file.metadata())
    return found


def llama(folder: Path) -> Path:
    """A small Llama of floats, with a config."""
    tensors = load_file(FIXTURES / "torchao_int8.truth.safetensors")
    config = json.loads((FIXTURES / "torchao_int8/config.json").read_text())
    folder.mkdir()
    save_file({name.removeprefix("model/"): value for name, value in tensors.items()}, folder / "model.safetensors")
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def stated(metadata: dict[str, str]) -> dict[str, Any]:
    """Tensor -> what a header says of it, as torchao's readers take it."""
    names = json.loads(metadata["tensor_names"])
    assert {"format", "tensor_names", *names} == metadata.keys() and metadata["format"] == "pt"
    return {name: json.loads(metadata[name]) for name in names}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for path in sorted(folder.glob("*.safetensors")) for key, value in load_file(path).items()}


@pytest.mark.parametrize("case", CASES)
def test_every_file_states_what_the_source_did(case: str, tmp_path: Path) -> None:
    (want,) = map(stated, headers(FIXTURES / case))
    run(FIXTURES / case, tmp_path / "out", max_shard_size=20_000)
    found = headers(tmp_path / "out")
    assert len(found) > 2 and all(stated(each) == want for each in found)


@pytest.mark.parametrize("to", ["dcp", "torch", "sharded"])
def test_another_format_keeps_it_and_gives_it_back(to: str, tmp_path: Path) -> None:
    (want,) = map(stated, headers(MIXED))
    run(MIXED, tmp_path / "there", to)
    run(tmp_path / "there", tmp_path / "back")
    (found,) = headers(tmp_path / "back")
    assert stated(found) == want
    before = tensors_of(MIXED)
    after = tensors_of(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_headers_that_differ_are_joined_as_transformers_joins_them(tmp_path: Path) -> None:
    """Here each file states its own tensors alone."""
    tensors, (want,) = load_file(MIXED / "model.safetensors"), map(stated, headers(MIXED))
    (tmp_path / "in").mkdir()
    for number, module in enumerate(("mlp", "self_attn", ""), 1):
        own = [name for name in want if module in name and (module or ("mlp" not in name and "self_attn" not in name))]
        files = {name: tensors.pop(name) for name in [*tensors] if module in name}
        said = {name: json.dumps(want[name]) for name in own} | {"tensor_names": json.dumps(own), "format": "pt"}
        save_file(files, tmp_path / f"in/model-{number:05}-of-00003.safetensors", said)
    run(tmp_path / "in", tmp_path / "out")
    assert stated(*headers(tmp_path / "out")) == want


def test_removed_weights_are_stated_no_more_and_floats_are_plain(tmp_path: Path) -> None:
    (want,) = map(stated, headers(MIXED))
    run(MIXED, tmp_path / "less", remove_keys=("*.mlp.*qdata", "*.mlp.*.weight"))
    found = stated(*headers(tmp_path / "less"))
    assert found == {name: each for name, each in want.items() if ".mlp." not in name}
    report = run(MIXED, tmp_path / "floats", dequantize=True)
    assert headers(tmp_path / "floats") == [{"format": "pt"}]
    assert not [entry for entry in report["dropped"] if entry["state"] == "extras"]
    assert not inspect(str(tmp_path / "less"), Reading())["quantization"].get("faults")


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> Path:
    """The mixed model with other tensors or another config."""
    tensors, (metadata,) = load_file(MIXED / "model.safetensors"), headers(MIXED)
    config = json.loads((MIXED / "config.json").read_text())
    change(tensors, config)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


QUERY, VALUE = (f"model.layers.0.self_attn.{name}_proj._weight_" for name in "qv")


def without_a_scale(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    del tensors[f"{QUERY}scale"]


def with_a_pre_scale(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    tensors[f"{QUERY}act_pre_scale"] = torch.ones(64)


def with_another_grid(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    tensors[f"{VALUE}scale"] = tensors[f"{VALUE}scale"][:, :1].repeat(1, 3)


def with_zero_points_of_floats(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    tensors[f"{VALUE}zero_point"] = tensors[f"{VALUE}zero_point"].float() + 0.5


def as_int4(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config["quantization_config"]["quant_type"] = {"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}}


def of_another_age(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config["quantization_config"]["quant_type"] = "int4_weight_only"


@pytest.mark.parametrize(
    ("change", "kind", "code", "says"),
    [
        (without_a_scale, Incomplete, "E1460", "_weight_scale"),
        (with_a_pre_scale, InconsistentCheckpoint, "E1461", "act_pre_scale"),
        (with_another_grid, InconsistentCheckpoint, "E1461", "scales of shape [32, 3]"),
        (with_zero_points_of_floats, InconsistentCheckpoint, "E1462", "no integers"),
        (as_int4, UsageError, "E1464", "Int4WeightOnlyConfig"),
        (of_another_age, UsageError, "E1464", "Int4WeightOnlyConfig"),
    ],
)
def test_what_has_no_floats_says_why(change: Any, kind: type[CkptError], code: str, says: str, tmp_path: Path) -> None:
    source = changed(tmp_path / "in", change)
    with pytest.raises(kind) as error:
        run(source, tmp_path / "out", dequantize=True)
    assert error.value.code == code and says in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_lacks_a_part_of_a_weight_is_not_written_anew(tmp_path: Path) -> None:
    source = changed(tmp_path / "in", without_a_scale)
    with pytest.raises(Incomplete) as error:
        run(source, tmp_path / "out")
    assert error.value.code == "E1460" and error.value.key == f"{QUERY}scale"


def test_without_a_sound_header_codes_are_not_written(tmp_path: Path) -> None:
    tensors, (metadata,) = load_file(MIXED / "model.safetensors"), headers(MIXED)
    (tmp_path / "in").mkdir()
    for broken in ("[", '["nothing"]', '"text"', "[1]"):
        save_file(tensors, tmp_path / "in/model.safetensors", {**metadata, "tensor_names": broken})
        with pytest.raises(UsageError) as error:
            run(tmp_path / "in", tmp_path / "out")
        assert error.value.code == "E1474" and not (tmp_path / "out").exists()
    run(tmp_path / "in", tmp_path / "floats", dequantize=True)


@pytest.mark.parametrize("scheme", WRITTEN)
def test_what_quantize_writes_for_torchao_is_found_and_stated(scheme: str, tmp_path: Path) -> None:
    source = llama(tmp_path / "in")
    run(source, tmp_path / "out", quantize=scheme, max_shard_size=30_000)
    quantised = inspect(str(tmp_path / "out"), Reading())["quantization"]
    assert quantised["dequantizes"] and quantised["weights"] == 7 and "faults" not in quantised
    tensors = tensors_of(tmp_path / "out")
    found = [stated(each) for each in headers(tmp_path / "out")]
    assert len(found) > 1 and all(each == found[0] for each in found)
    for name, each in found[0].items():
        if each["_type"] == "Tensor":
            assert name in tensors
            continue
        module, _, parameter = name.rpartition(".")
        parts = {part: tensors[f"{module}._{parameter}_{part}"] for part in each["_tensor_data_names"]}
        assert each["_data"]["block_size"] == [1, parts["qdata"].shape[1]] and parts["scale"].dtype == torch.float32
        assert parts["scale"].shape == (len(parts["qdata"]), 1)
    plain = tmp_path / "plain"
    whole = tmp_path / "whole"
    run(tmp_path / "out", plain, dequantize=True, dtypes={"": "F32"})
    run(source, whole, dtypes={"": "F32"})
    made = tensors_of(plain)
    before = tensors_of(whole)
    for name, value in before.items():
        steps = value.abs().amax(-1, keepdim=True) / (127.5 if scheme.startswith("int8") else 448 / 32)
        assert bool(((made[name] - value).abs() <= steps * 0.5001).all()), name


def test_sizes_that_the_product_does_not_take_stay(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    shapes = {"a": (32, 40), "b": (40, 32), "c": (32, 32)}
    weights = {f"model.layers.0.mlp.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "in/model.safetensors")
    (tmp_path / "in/config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
    report = run(tmp_path / "in", tmp_path / "out", quantize="fp8-channel:torchao")
    (why,) = report["quantized"]["stays"]
    assert report["quantized"]["stays"][why] == 2 and "multiples of 16" in why


# -- with the libraries ------------------------------------------------------------------------------------------------


ON_A_GPU = "torchao_mxfp8"  # torch has no product of such weights on a CPU


def loaded(folder: Path, *, runs: bool = True) -> tuple[dict[str, torch.Tensor], torch.Tensor, set[str]]:
    """(floats, logits, classes) of a folder as transformers has it. runs: here; no logits are empty."""
    pytest.importorskip("torchao")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    weights = model.state_dict()
    classes = {type(value).__name__ for value in weights.values()}
    plain = {name: getattr(value, "dequantize", lambda value=value: value)() for name, value in weights.items()}
    with torch.no_grad():
        return plain, model(torch.arange(20)[None]).logits if runs else torch.empty(0), classes


@pytest.mark.peers
@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_what_was_cut_anew(case: str, tmp_path: Path) -> None:
    run(FIXTURES / case, tmp_path / "out", max_shard_size=20_000)
    before, after = (loaded(folder, runs=case != ON_A_GPU) for folder in (FIXTURES / case, tmp_path / "out"))
    assert before[2] == after[2] and before[2] - {"Tensor"}
    assert all(torch.equal(value, after[0][name]) for name, value in before[0].items())
    assert torch.equal(before[1], after[1])


@pytest.mark.peers
@pytest.mark.parametrize("scheme", WRITTEN)
def test_transformers_loads_what_quantize_wrote(scheme: str, tmp_path: Path) -> None:
    run(llama(tmp_path / "in"), tmp_path / "out", quantize=scheme, max_shard_size=30_000)
    run(tmp_path / "out", tmp_path / "floats", dequantize=True)
    weights, logits, classes = loaded(tmp_path / "out")
    assert classes == {"Tensor", "Float8Tensor" if "fp8" in scheme else "Int8Tensor"}
    ours = tensors_of(tmp_path / "floats")
    assert all(torch.equal(value, ours[name]) for name, value in weights.items() if name in ours)
    assert len(ours) == 12
    exact = loaded(tmp_path / "floats")[1]
    assert (logits - exact).norm() < 0.2 * exact.norm()  # its activations are rounded too
