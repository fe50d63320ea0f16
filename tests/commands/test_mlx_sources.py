"""What MLX saved, over every family: read by rules of MLX, as the hub's where mlx-lm changes nothing, else refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import ckpt_tool as ckpt
from ckpt_tool.errors import CkptError, InputError
from ckpt_tool.families.models import FAMILIES
from ckpt_tool.families.registry import by_name, find
from ckpt_tool.formats.hub_folder.saved_by import MLX
from ckpt_tool.systems.hub import mlx_names as mlx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "families"))

from family_models import config_of, counted, hub_shapes

NAMES = [family.name for family in FAMILIES]
TYPES = [kind for family in FAMILIES for kind in family.model_types]
# Neither as on the hub nor named by rules: mlx-lm changes them, leaves out their towers, or has no such model
REFUSED = [
    kind
    for family in FAMILIES
    for kind in family.model_types
    if MLX not in family.dialects and kind not in mlx.AS_ON_THE_HUB
]


def source(folder: Path, kind: str, saved_by: str = "mlx", **config: Any) -> str:
    """A folder with a tensor for each of the family's rules, as a library saved it."""
    family = next(family for family in FAMILIES if kind in family.model_types)
    names = [form.replace("%d", "0") for form in family.table("hf").left]
    folder.mkdir()
    save_file({name: np.ones(2, np.float32) for name in names}, folder / "model.safetensors", {"format": saved_by})
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **config}))
    return str(folder)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_layout_without_rules_is_refused(kind: str, tmp_path: Path) -> None:
    model = source(tmp_path / "in", kind)
    for target in ({"to": "safetensors"}, {"to": "safetensors", "dialect": "hf"}, {"to": "gguf"}, {"to": "megatron"}):
        with pytest.raises(InputError, match="MLX saved this model") as caught:
            ckpt.convert(model, str(tmp_path / "out"), **target)
        assert caught.value.code == "E2911"
    ckpt.convert(model, str(tmp_path / "kept"), to="safetensors", dialect="keep")
    plain = source(tmp_path / "plain", kind, "pt")
    ckpt.convert(plain, str(tmp_path / "copy"), to="safetensors")


@pytest.mark.parametrize("kind", sorted(mlx.AS_ON_THE_HUB & set(TYPES)))
def test_what_mlx_leaves_as_on_the_hub_passes(kind: str, tmp_path: Path) -> None:
    model = source(tmp_path / "in", kind)
    ckpt.convert(model, str(tmp_path / "out"), to="safetensors")
    assert ckpt.diff(model, str(tmp_path / "out"))["equal"]


def test_every_type_that_is_as_on_the_hub_is_one_of_a_family() -> None:
    assert set(TYPES) >= mlx.AS_ON_THE_HUB
    assert not any(MLX in by_name(name).dialects and mlx.AS_ON_THE_HUB & {*by_name(name).model_types} for name in NAMES)


@pytest.mark.parametrize("sign", ["quantization", "switch_mlp", "format"])
def test_each_sign_of_mlx_is_one(sign: str, tmp_path: Path) -> None:
    config = {"quantization": {"group_size": 64, "bits": 4}} if sign == "quantization" else {}
    model = Path(source(tmp_path / "in", "falcon_h1", "mlx" if sign == "format" else "pt", **config))
    if sign == "switch_mlp":
        extra = {"model.layers.0.mlp.switch_mlp.up_proj.weight": np.ones((2, 3, 4), np.float32)}
        save_file(extra, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(CkptError) as caught:
        ckpt.convert(str(model), str(tmp_path / "out"), to="safetensors")
    assert caught.value.code == "E2911"


def test_names_that_mlx_gave_are_known_as_such_after_a_copy(tmp_path: Path) -> None:
    """A folder with MLX's names and values that said of itself to be torch's would be another model to every reader."""
    model = source(tmp_path / "in", "falcon_h1")
    ckpt.convert(model, str(tmp_path / "kept"), to="safetensors", dialect="keep")
    ckpt.merge([str(tmp_path / "kept")], str(tmp_path / "less"), remove_keys=["lm_head.*"])
    for copy in ("kept", "less"):
        with safe_open(tmp_path / copy / "model.safetensors", "np") as file:
            assert file.metadata()["format"] == "mlx"
        with pytest.raises(InputError, match="multipliers") as caught:
            ckpt.convert(str(tmp_path / copy), str(tmp_path / "out"), to="safetensors", dialect="hf")
        assert caught.value.code == "E2911"

    ckpt.convert(source(tmp_path / "llama", "llama"), str(tmp_path / "hub"), to="safetensors")
    with safe_open(tmp_path / "hub/model.safetensors", "np") as file:  # names and values are the hub's
        assert file.metadata()["format"] == "pt"


def test_a_format_that_can_t_say_whose_the_names_are_has_a_note(tmp_path: Path) -> None:
    for target in ("dcp", "torch"):
        model = source(tmp_path / f"{target}_in", "falcon_h1")
        report = ckpt.convert(model, str(tmp_path / target), to=target)
        assert any("as MLX has them" in note for note in report["notes"])
        hub = source(tmp_path / f"{target}_hub", "llama")
        report = ckpt.convert(hub, str(tmp_path / f"{target}_llama"), to=target)
        assert not any("as MLX has them" in note for note in report["notes"])


def test_a_turned_kernel_shows_mlx_where_nothing_else_does(tmp_path: Path) -> None:
    for name, shape in (("mamba.conv1d.weight", (8, 4, 1)), ("conv.conv.weight", (8, 3, 1))):
        folder = tmp_path / name
        folder.mkdir()
        save_file({f"model.layers.0.{name}": np.ones(shape, np.float32)}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": "falcon_h1"}))
        ckpt.convert(str(folder), str(folder) + ".dcp", to="dcp")
        with pytest.raises(InputError) as caught:
            ckpt.convert(str(folder) + ".dcp", str(folder) + ".hub", to="safetensors")
        assert caught.value.code == "E2911"


def test_a_model_of_nobody_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file({"model.layers.0.x.weight": np.ones(2, np.float32)}, tmp_path / "in/model.safetensors", {"format": "mlx"})
    (tmp_path / "in/config.json").write_text(json.dumps({"model_type": "phixtral"}))
    with pytest.raises(InputError, match="phixtral") as caught:
        ckpt.convert(str(tmp_path / "in"), str(tmp_path / "out"), to="safetensors")
    assert caught.value.code == "E2911"


def sanitized(hub: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """What mlx-lm 0.32.2 makes of Qwen3-Next's files when it loads them, and saves (`qwen3_next.py`, `sanitize`)."""
    weights = {name: value for name, value in hub.items() if "mtp." not in name}
    for layer in range(config["num_hidden_layers"]):
        front = f"model.layers.{layer}.mlp"
        for part in ("up_proj", "down_proj", "gate_proj"):
            names = [f"{front}.experts.{expert}.{part}.weight" for expert in range(config["num_experts"])]
            if names[0] in weights:
                weights[f"{front}.switch_mlp.{part}.weight"] = np.stack([weights.pop(name) for name in names])
    ends = (".input_layernorm.weight", ".post_attention_layernorm.weight", ".q_norm.weight", ".k_norm.weight")
    for name, value in weights.items():
        if "conv1d.weight" in name and value.shape[-1] != 1:
            weights[name] = np.moveaxis(value, 2, 1)
        if name.endswith((*ends, "model.norm.weight")):
            weights[name] = value + 1
    return {name: np.ascontiguousarray(value) for name, value in weights.items()}


def test_a_part_of_the_hub_s_files_is_not_taken_for_mlx_s() -> None:
    """Norms alone have the same names and shapes in both, and other values."""
    part = {"model.norm.weight": (8,), "lm_head.weight": (96, 8)}
    assert find(None, part, family="qwen3_next").dialect == "hf"
    assert find(None, part, family="qwen3_next", stated="mlx").dialect == "mlx"


def test_qwen3_next_comes_back_as_the_hub_has_it(tmp_path: Path) -> None:
    config = {**config_of("qwen3_next"), "mlp_only_layers": []}
    shapes = hub_shapes("qwen3_next", config)
    hub = {name: array.astype(np.float32) % 64 for name, array in counted(shapes).items()}
    saved = sanitized(hub, config)
    assert any(".switch_mlp." in name for name in saved) and any("conv1d" in name for name in saved)
    (tmp_path / "in").mkdir()
    save_file(saved, tmp_path / "in" / "model.safetensors", {"format": "mlx"})
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))

    ckpt.convert(str(tmp_path / "in"), str(tmp_path / "out"), to="safetensors")

    written = load_file(tmp_path / "out" / "model.safetensors")
    wanted = {name: value for name, value in hub.items() if not name.startswith("mtp.")}
    assert written.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(written[name], value, err_msg=name)
