"""`--hybrid-layer-pattern`, held against what Megatron's own tool makes of the same names (`fixtures/hybrid.json`)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import ckpt_tool as ckpt
from ckpt_tool.api import convert, diff
from ckpt_tool.errors import Incomplete, UsageError
from ckpt_tool.systems.megatron.args import arguments
from ckpt_tool.systems.megatron.hybrid import Unfit, across, letters_of, shown

FIXTURES = Path(__file__).parents[2] / "fixtures"
GOLDEN = json.loads((FIXTURES / "hybrid.json").read_text())
OPTIMIZER = FIXTURES / "megatron-dist/dp2_model_space"


@pytest.mark.parametrize("case", GOLDEN)
def test_names_are_those_of_megatrons_tool(case: str) -> None:
    golden = GOLDEN[case]
    names = list(golden["there"].values())
    letters = letters_of(golden["pattern"])
    there = across(names, letters, back=False)
    assert {there.get(name, name): name for name in names} == golden["there"]
    own = list(golden["there"])
    back = across(own, letters, back=True)
    assert {back.get(name, name): name for name in own} == golden["back"]
    assert shown(own) == letters.replace("M", "") or "M" in letters
    if golden["mixers"]:
        with pytest.raises(Unfit, match=f"{len(golden['mixers'])} tensors have no place in GPTModel"):
            across([*own, *golden["mixers"]], letters, back=True)


@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_every_element_of_a_released_model_goes_there_and_back(case: str, tmp_path: Path) -> None:
    """From the hub in one hop, and from there back in one."""
    golden = GOLDEN[case]
    hub = FIXTURES / "convert" / case / "hf"
    convert(str(hub), str(tmp_path / "hybrid"), to="megatron-dist", tp=2, hybrid_layer_pattern=golden["pattern"])
    opened = ckpt.open(str(tmp_path / "hybrid"))
    live = load_file(FIXTURES / "convert" / case / "megatron.safetensors")
    for name, source in golden["there"].items():
        np.testing.assert_array_equal(opened[name].numpy(), live[source], err_msg=name)
    args = arguments(opened.catalog.extras)
    assert (args["num_layers"], args["hybrid_layer_pattern"]) == (len(golden["pattern"]), golden["pattern"])
    with pytest.raises(Incomplete) as caught:
        convert(str(tmp_path / "hybrid"), str(tmp_path / "no"), to="safetensors")
    assert "--hybrid-layer-pattern none" in str(caught.value.hint)
    convert(str(tmp_path / "hybrid"), str(tmp_path / "back"), to="safetensors", hybrid_layer_pattern="none")
    assert diff(str(hub), str(tmp_path / "back"))["equal"]


def test_the_optimizer_follows_and_layers_are_stacked_again(tmp_path: Path) -> None:
    there = str(tmp_path / "there")
    back = str(tmp_path / "back")
    report = convert(str(OPTIMIZER), there, to="megatron-dist", hybrid_layer_pattern="*-|*-", pp=2)
    assert any(note.startswith("layers: GPTModel to HybridModel") for note in report["notes"])
    source = ckpt.open(str(OPTIMIZER))
    made = ckpt.open(there)
    for state in ("model", "master", "exp_avg", "exp_avg_sq"):
        old = source.state(state)["decoder.layers.1.mlp.linear_fc1.weight"].numpy()
        np.testing.assert_array_equal(made.state(state)["decoder.layers.3.mlp.linear_fc1.weight"].numpy(), old)
    assert arguments(made.catalog.extras)["hybrid_layer_pattern"] == "*-|*-"
    convert(there, back, to="megatron-dist", hybrid_layer_pattern="none")
    assert diff(str(OPTIMIZER), back)["equal"]
    stacked = {key for key in _keys(Path(OPTIMIZER)) if key.startswith("decoder.") and "_extra_state" not in key}
    assert stacked <= _keys(Path(back))
    convert(there, str(tmp_path / "files"), to="megatron", hybrid_layer_pattern="none", tp=2)
    assert diff(str(OPTIMIZER), str(tmp_path / "files"))["equal"]


def test_weights_alone_have_the_arguments_of_what_they_are(tmp_path: Path) -> None:
    convert(str(OPTIMIZER), str(tmp_path / "out"), to="megatron-dist", state="model", hybrid_layer_pattern="*-*-")
    args = arguments(ckpt.open(str(tmp_path / "out")).catalog.extras)
    assert (args["num_layers"], args["hybrid_layer_pattern"], args["is_hybrid_model"]) == (4, "*-*-", True)


@pytest.mark.parametrize(
    "name",
    [
        "mtp.layers.0.eh_proj.weight",
        "decoder.layers.0.self_attention.linear_kv_down_proj.weight",
        "decoder.layers.0.self_attention.in_proj.weight",
        "decoder.layers.0.post_ffn_layernorm.weight",
    ],
)
def test_layers_of_another_kind_are_refused(name: str) -> None:
    plain = list(GOLDEN["llama"]["there"].values())
    assert across([*plain, "vision_model.decoder.final_layernorm.weight"], "*-*-*-", back=False).keys() < {*plain}
    with pytest.raises(Unfit, match=name):
        across([*plain, name], "*-*-*-", back=False)


def _keys(folder: Path) -> set[str]:
    from ckpt_tool.storage.source import Tree

    tree = Tree(str(folder))
    from ckpt_tool.formats.dcp_container.dcp_metadata import read_listing

    step = next(path.rpartition("/")[0] for path in tree.listing() if path.endswith("/.metadata"))
    return set(read_listing(tree, f"{step}/", (".metadata",)).tensors)


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("M*-*-", "has mixers"),
        ("*-*", "2 layers of attention and 1 of an MLP"),
        ("*-*E", "all of a kind"),
        ("*-*-*-", "no tensor of layer 2"),
        ("*-", "have no place in layers"),
        ("*E*E", "no tensor|have no place"),
        ("*-*-/*-", "multi-token prediction"),
        ("*G", "has G"),
        ("none", "no HybridModel"),
    ],
)
def test_what_has_no_counterpart_is_refused(pattern: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        convert(str(OPTIMIZER), str(tmp_path / "out"), to="megatron-dist", hybrid_layer_pattern=pattern)
    assert caught.value.code == "E2792"


def test_other_formats_names_are_no_layers_of_megatron(tmp_path: Path) -> None:
    hub = str(FIXTURES / "convert/llama/hf")
    with pytest.raises(UsageError, match="Megatron's layers"):
        convert(hub, str(tmp_path / "out"), to="safetensors", hybrid_layer_pattern="*-*-*-")
