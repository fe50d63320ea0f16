"""A checkpoint that Megatron-Bridge itself saved (`bridge_saved.py`): Gemma 4, its attentions apart by what they see.

Its keys say that of the windowed layers this is the first; which are windowed stands in the provider's fields beside.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_against_bridge import GOLDEN, arrays_of, config_of, golden, hub_of

import ckpt_tool as ckpt
from ckpt_tool.commands.convert import convert, reshard
from ckpt_tool.core.attention_window import stated_windows
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import InputError
from ckpt_tool.formats.dcp_container.dcp_metadata import read_listing
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.storage.source import Tree

SAVED = GOLDEN / "saved" / "gemma4"
RUN = "iter_0000000/run_config.yaml"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAVED, tmp_path / "saved"))


def config(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config_of("gemma4")))
    return str(tmp_path / "config.json")


def keys(folder: Path) -> dict[str, list[int]]:
    (file,) = folder.rglob(".metadata")
    found = read_listing(Tree(file.parent), "", [".metadata"]).tensors
    return {key: list(entry.shape) for key, entry in found.items()}


def test_layers_have_their_own_attentions() -> None:
    found = ckpt.open(str(SAVED))
    want = arrays_of(golden("gemma4")["megatron"])
    for name, array in want.items():  # the bridge leaves ones where the hub has nothing
        got = found[name].numpy()
        written = array != 0
        np.testing.assert_array_equal(got[written], array[written], err_msg=name)


def test_the_hub_s_files_come_back(tmp_path: Path) -> None:
    reading = Reading(config=config(tmp_path))
    convert(str(SAVED), str(tmp_path / "hub"), reading, Writing(to="safetensors", fsync=False), Silent())
    got = load_file(tmp_path / "hub" / "model.safetensors")
    want = hub_of(golden("gemma4"))
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


def test_another_job_gets_the_same_keys(tmp_path: Path) -> None:
    """Without arguments: what stood in run_config.yaml is remembered."""
    writing = Writing(degrees={"tp": 2}, fsync=False)
    reshard(str(SAVED), str(tmp_path / "two"), Reading(), writing, Silent())
    assert keys(tmp_path / "two") == golden("gemma4")["torch_dist"] == keys(SAVED)


def test_what_nothing_states_is_not_guessed(copy: Path, tmp_path: Path) -> None:
    (copy / RUN).unlink()
    with pytest.raises(InputError, match="nothing states which layers are which") as caught:
        ckpt.open(str(copy))
    assert caught.value.code == "E2006" and "--config" in (caught.value.hint or "")
    shutil.copy(config(tmp_path), copy / "iter_0000000")
    assert ckpt.open(str(copy))["decoder.layers.3.self_attention.q_layernorm.weight"].shape == (10,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {num_layers: 4, window_attn_skip_freq: [true, true, true, false]}", "2 layers of the kind"),
        ("model: {num_layers: 4, window_attn_skip_freq: [true, true", "run_config.yaml is not YAML"),
        ("model: !!python/object/apply:os.system [ls]", "asks for more than values"),
    ],
)
def test_a_run_config_of_another_model_is_refused(copy: Path, text: str, message: str) -> None:
    (copy / RUN).write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        ckpt.open(str(copy))
    assert caught.value.code == "E2006"


def test_every_spelling_of_windows() -> None:
    assert stated_windows({"num_layers": 6, "window_attn_skip_freq": 3}) == [True, True, False] * 2
    assert stated_windows({"num_layers": 6, "window_attn_skip_freq": None, "interleaved_attn_pattern": [2, 1]}) == (
        [True, True, False] * 2
    )
    assert stated_windows({"window_attn_skip_freq": ["sliding_attention", "full_attention"]}) == [True, False]
    assert stated_windows({"num_layers": 6}) == stated_windows({}) == []


def test_names_alone_do_not_say_whose_keys_they_are(tmp_path: Path) -> None:
    """Megatron's names without config or arguments: a key a layer, and a line."""
    (tmp_path / "bare").mkdir()
    arrays = {name: array.astype(np.float32) for name, array in arrays_of(golden("gemma4_moe")["megatron"]).items()}
    save_file(arrays, tmp_path / "bare" / "model.safetensors", {"format": "pt"})
    writing = Writing(to="megatron-dist", dialect="keep", fsync=False)
    report = convert(str(tmp_path / "bare"), str(tmp_path / "there"), Reading(), writing, Silent())
    assert any("nothing states which layers are which" in note for note in report["notes"])
    assert "decoder.layers.3.self_attention.linear_qkv.weight" in keys(tmp_path / "there")
    back = ckpt.open(str(tmp_path / "there"))
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name].numpy(), array, err_msg=name)
