"""Which checkpoint a path means: pointer files, folders of several, two formats in one folder (rows B14, B17)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_tool.errors import Incomplete, InconsistentCheckpoint, UnknownFormat, UnsafeInput
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.opening import open_source

FIXTURES = Path(__file__).parents[2] / "fixtures"


def step(folder, value):
    folder.mkdir(parents=True)
    save_file({"w": np.full(3, value, "f4")}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("pointer", "text", "name"),
    [("latest", "global_step3", "global_step3"), ("latest_checkpointed_iteration.txt", "12\n", "iter_0000012")],
)
def test_a_pointer_file_is_followed_and_named(tmp_path, pointer, text, name):
    step(tmp_path / name, 1)
    step(tmp_path / "global_step9", 2)
    (tmp_path / pointer).write_text(text)
    opened = open_source(str(tmp_path), Reading())
    assert opened.resolved == f"{pointer} points to {name}" and opened.path.endswith(name)


@pytest.mark.parametrize("text", ["", " ", "\n", "\t\n"])
@pytest.mark.parametrize("pointer", ["latest", "latest_checkpointed_iteration.txt", "refs/main"])
def test_a_blank_pointer_file_is_a_save_that_was_cut_off(tmp_path, pointer, text):
    folder = "snapshots/abc" if pointer == "refs/main" else "global_step9"
    step(tmp_path / folder, 2)
    (tmp_path / pointer).parent.mkdir(exist_ok=True)
    (tmp_path / pointer).write_text(text)
    with pytest.raises(Incomplete) as caught:
        open_source(str(tmp_path), Reading())
    assert caught.value.code == "E3062" and folder in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["../../x", "/etc", "a\nb", "a/../b", "x\0y"])
def test_a_pointer_out_of_the_folder_is_refused(tmp_path, text):
    step(tmp_path / "global_step9", 2)
    (tmp_path / "latest").write_text(text)
    with pytest.raises(UnsafeInput) as caught:
        open_source(str(tmp_path), Reading())
    assert caught.value.exit_code == 4 and "latest" in caught.value.path


def test_several_without_a_pointer_are_listed_and_one_is_taken(tmp_path):
    step(tmp_path / "checkpoint-10", 1)
    assert open_source(str(tmp_path), Reading()).path.endswith("checkpoint-10")
    step(tmp_path / "checkpoint-20", 2)
    with pytest.raises(UnknownFormat, match="2 checkpoints") as caught:
        open_source(str(tmp_path), Reading())
    assert "checkpoint-20" in caught.value.hint


def test_two_indexes_that_disagree_are_refused(tmp_path):
    shutil.copytree(FIXTURES / "safetensors" / "hf_llama_sharded", tmp_path / "m")
    index = {"metadata": {"total_size": 4}, "weight_map": {"w": "pytorch_model-00001-of-00001.bin"}}
    (tmp_path / "m" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(InconsistentCheckpoint, match="name different tensors") as caught:
        open_source(str(tmp_path / "m"), Reading())
    assert caught.value.exit_code == 3 and "--prefer" in caught.value.hint
    assert len(open_source(str(tmp_path / "m"), Reading(prefer="safetensors")).catalog.tensors) == 21
    real = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    (tmp_path / "m" / "pytorch_model.bin.index.json").write_text(
        json.dumps({**index, "weight_map": real["weight_map"]})
    )
    assert len(open_source(str(tmp_path / "m"), Reading()).catalog.tensors) == 21


def test_what_is_no_checkpoint_is_told(tmp_path):
    (tmp_path / "page.safetensors").write_text("<!DOCTYPE html><html>404</html>")
    (tmp_path / "empty").mkdir()
    for path, words in ((tmp_path / "page.safetensors", "HTML"), (tmp_path / "empty", "empty")):
        with pytest.raises(Exception, match=words) as caught:
            open_source(str(path), Reading())
        assert caught.value.exit_code == 3
