"""LoRA folders of PaddleFormers against its own `merge()`, on bases of either world."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ckpt_tool.adapters.fold import fold
from ckpt_tool.commands.convert import convert
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.run.lazy import OpenCatalog
from ckpt_tool.sources.opening import open_source

ROOT = Path(__file__).parents[2] / "fixtures/paddle-lora"


def values(path, **reading):
    opened = open_source(str(path), Reading(**reading))
    model = OpenCatalog(opened.tree, opened.catalog).state("model")
    return {name: model[name].numpy() for name in model}


def run(base, out, adapter=ROOT / "adapter", reading=None, **writing):
    return fold([str(base), str(adapter)], str(out), reading or Reading(), Writing(verify="full", **writing), Silent())


def test_equals_paddleformers_own_merge(tmp_path):
    run(ROOT / "base", tmp_path / "out")
    ours = values(tmp_path / "out")
    theirs = load_file(ROOT / "merged.safetensors")
    before = load_file(ROOT / "base/model.safetensors")
    assert ours.keys() == theirs.keys() and any((theirs[name] != before[name]).any() for name in theirs)
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)


@pytest.mark.parametrize("to", ["safetensors", "paddle-flex"])
def test_on_a_base_of_another_format(to, tmp_path):
    convert(
        str(ROOT / "base"),
        str(tmp_path / "base"),
        Reading(),
        Writing(to=to, degrees={"tp": 2} if to == "paddle-flex" else {}),
        Silent(),
    )
    config = Reading(config=str(ROOT / "base/config.json"))
    run(tmp_path / "base", tmp_path / "same", reading=config)
    opened = open_source(str(tmp_path / "same"), Reading())
    assert opened.catalog.format == to
    run(tmp_path / "base", tmp_path / "paddle", reading=config, to="paddle-unified", force=True)
    ours = values(tmp_path / "paddle")
    theirs = load_file(ROOT / "merged.safetensors")
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)
    if to == "safetensors":
        down = "model.layers.1.mlp.down_proj.weight"
        np.testing.assert_array_equal(values(tmp_path / "same")[down], theirs[down].T)


def with_settings(folder, **settings):
    """A copy of the adapter whose config has other settings."""
    shutil.copytree(ROOT / "adapter", folder)
    file = folder / "lora_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {"do_qat": True},
        {"enable_lora_list": [[True, False]]},
        {"loraga": True},
        {"pissa": True, "scaling": 1.0},
        {"use_mora": True},
        {"lora_use_mixer": True},
        {"scaling": 1.0},  # the factor of the library is another than the one that rank and alpha give
        {"rslora": False},  # so too
        # settings of a release to come
        {"next_method": True},
        {"next_scale": 2.0},
        {"next_config": {"a": 1}},
        {"next_mode": "fast"},
    ],
)
def test_what_is_no_sum_is_refused(settings, tmp_path):
    adapter = with_settings(tmp_path / "adapter", **settings)
    with pytest.raises(CkptError, match=next(iter(settings)) if settings != {"rslora": False} else "scaling") as e:
        run(ROOT / "base", tmp_path / "out", adapter)
    assert e.value.code == "E1422" and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"pissa": False, "use_mora": False, "lora_use_mixer": False, "lorapro": True, "use_quick_lora": True},
        {"tensor_parallel_degree": 4, "head_dim": 8, "lora_plus_scale": 4.0, "merge_weights": True},
        {
            "use_intermediate_api": True,
            "pipeline_parallel_degree": 2,
            "pipeline_model_parallel_size": 2,
        },  # auto parallel
        {"next_method": False, "next_config": None},
    ],
)
def test_settings_that_change_no_product_pass(settings, tmp_path):
    run(ROOT / "base", tmp_path / "out", with_settings(tmp_path / "adapter", **settings))
    ours = values(tmp_path / "out")
    theirs = load_file(ROOT / "merged.safetensors")
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)


def test_an_unknown_setting_passes_where_the_user_says_so(tmp_path):
    adapter = with_settings(tmp_path / "adapter", next_method=True)
    run(ROOT / "base", tmp_path / "out", adapter, reading=Reading(lenient=True))
    assert (tmp_path / "out").is_dir()


def test_two_worlds_are_folded_one_by_one(tmp_path):
    with pytest.raises(CkptError) as e:
        fold(
            [str(ROOT / "base"), str(ROOT / "adapter"), str(ROOT.parent / "peft/lora_bf16")],
            str(tmp_path / "out"),
            Reading(),
            Writing(),
            Silent(),
        )
    assert e.value.code == "E2402"


@pytest.mark.parametrize("to", ["peft", "megatron-dist", "safetensors"])
def test_other_systems_have_no_rules_for_it(to, tmp_path):
    """Taken for an adapter of Megatron's it would be written with its factors transposed and without its scaling."""
    with pytest.raises(CkptError, match="PaddleFormers") as e:
        convert(str(ROOT / "adapter"), str(tmp_path / "out"), Reading(), Writing(to=to), Silent())
    assert (e.value.code, e.value.exit_code) == ("E1436", 2) and "ckpt merge" in e.value.hint
