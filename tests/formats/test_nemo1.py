"""`.nemo` archives: a torch_dist that megatron-core saved, packed and described as NeMo does
(fixtures/make/nemo1.py)."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import ckpt_tool as ckpt
from ckpt_tool.api import convert, diff, verify
from ckpt_tool.commands.apply import apply
from ckpt_tool.commands.inspect import inspect
from ckpt_tool.core.inner_path import FOLDERS
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError, CorruptFile, SourceChanged, UnknownFormat, UnsafeInput
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.verbs import Share
from ckpt_tool.options.writing import Writing
from ckpt_tool.storage.archive import ArchiveTree
from ckpt_tool.storage.opening import open_tree
from ckpt_tool.systems.megatron.args import arguments
from ckpt_tool.systems.megatron.torch_dist.nemo import arguments_of_1

NEMO = Path(__file__).parents[2] / "fixtures/nemo1/gpt.nemo"
TRUTH = load_file(NEMO.with_name("gpt.truth.safetensors"))


def packed(path: Path, members: dict[str, bytes], **attributes: object) -> Path:
    """A tar archive; attributes: of its last member."""
    with tarfile.open(path, "w:") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            if name == list(members)[-1]:
                for key, value in attributes.items():
                    setattr(info, key, value)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_it_is_read_where_it_lies_and_becomes_a_model_of_the_hub(tmp_path: Path) -> None:
    opened = ckpt.open(str(NEMO))
    assert {key.name for key in opened.catalog.tensors} == TRUTH.keys()
    for name, want in TRUTH.items():
        np.testing.assert_array_equal(opened[name].numpy(), want, err_msg=name)
    args = arguments(opened.catalog.extras)
    wanted = {"swiglu": True, "normalization": "RMSNorm", "num_query_groups": 1, "disable_bias_linear": True}
    assert wanted.items() <= args.items() and "tensor_model_parallel_size" not in args
    convert(str(NEMO), str(tmp_path / "hub"), to="safetensors")
    config = json.loads((tmp_path / "hub/config.json").read_text())
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["vocab_size"]) == (2, 1, 40)
    convert(str(tmp_path / "hub"), str(tmp_path / "back"), to="megatron-dist", tp=1)
    assert diff(str(NEMO), str(tmp_path / "back"))["equal"]
    assert verify(str(NEMO))["ok"]


def test_the_unpacked_folder_is_the_same_and_a_plan_reads_the_archive(tmp_path: Path) -> None:
    with tarfile.open(NEMO) as tar:
        tar.extractall(tmp_path / "folder", filter="data")
    assert diff(str(NEMO), str(tmp_path / "folder"))["equal"]
    copy = tmp_path / "copy.nemo"
    copy.write_bytes(NEMO.read_bytes())
    for name in ("a", "b"):
        convert(str(copy), str(tmp_path / name), to="dcp", plan=str(tmp_path / f"{name}.plan"))
    apply(str(tmp_path / "a.plan"), Share(), Writing(), Silent())
    assert diff(str(tmp_path / "a"), str(NEMO))["equal"]
    copy.write_bytes(NEMO.read_bytes() + bytes(512))
    with pytest.raises(SourceChanged):
        apply(str(tmp_path / "b.plan"), Share(), Writing(), Silent())


def test_an_output_never_takes_the_place_of_its_archive(tmp_path: Path) -> None:
    copy = tmp_path / "copy.nemo"
    copy.write_bytes(NEMO.read_bytes())
    for force in (False, True):
        with pytest.raises(CkptError) as caught:
            convert(str(copy), str(copy), to="dcp", force=force)
        assert caught.value.exit_code == 5
    assert copy.read_bytes() == NEMO.read_bytes()


def test_an_archive_with_one_torch_file_is_that_file(tmp_path: Path) -> None:
    """NeMo's models of speech: `model_weights.ckpt` beside the config."""
    weights = io.BytesIO()
    torch.save({"encoder.w": torch.arange(6.0).reshape(2, 3)}, weights)
    path = packed(tmp_path / "asr.nemo", {"./model_config.yaml": b"a: 1\n", "./model_weights.ckpt": weights.getvalue()})
    opened = ckpt.open(str(path))
    np.testing.assert_array_equal(opened["encoder.w"].numpy(), np.arange(6.0).reshape(2, 3))


def test_the_words_of_nemo_1() -> None:
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    assert arguments_of_1({**sizes, "mcore_gpt": False}) == {}
    plain = arguments_of_1(sizes)
    assert (plain["swiglu"], plain["normalization"], plain["disable_bias_linear"]) == (False, "LayerNorm", False)
    assert plain["untie_embeddings_and_output_weights"] is False
    other = arguments_of_1({**sizes, "activation": "squared-relu", "normalization": "layernorm1p", "bias": False})
    assert (other["squared_relu"], other["layernorm_zero_centered_gamma"], other["disable_bias_linear"]) == (True,) * 3


def test_a_compressed_one_says_what_to_do(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "z.nemo", "w:gz") as tar:
        tar.add(NEMO, arcname="./model_weights")
    with pytest.raises(UnknownFormat, match="gzip-compressed") as caught:
        inspect(str(tmp_path / "z.nemo"), Reading())
    assert "tar -xzf" in str(caught.value.hint)


CONFIG = {"model_config.yaml": b"x: 1\n"}
HOSTILE = {
    "a link": ({**CONFIG, "w": b""}, {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "E2796"),
    "a hard link": ({**CONFIG, "w": b""}, {"type": tarfile.LNKTYPE, "linkname": "model_config.yaml"}, "E2796"),
    "a device": ({**CONFIG, "w": b""}, {"type": tarfile.CHRTYPE}, "E2796"),
    "out of the folder": ({**CONFIG, "../w": b"1"}, {}, "E0410"),
    "absolute": ({**CONFIG, "/etc/w": b"1"}, {}, "E0410"),
    "twice": ({**CONFIG, "./model_config.yaml": b"y"}, {}, "E2796"),
    "case": ({**CONFIG, "MODEL_config.yaml": b"y"}, {}, "E0387"),
    "deep": ({**CONFIG, "a/" * (FOLDERS + 1) + "w": b"y"}, {}, "E0410"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_members_that_are_no_plain_files_are_refused(case: str, tmp_path: Path) -> None:
    members, attributes, code = HOSTILE[case]
    path = packed(tmp_path / "x.nemo", members, **attributes)
    with pytest.raises((UnsafeInput, CkptError)) as caught:
        open_tree(path).listing()
    assert caught.value.code == code


def test_headers_that_say_more_than_there_is_are_damage(tmp_path: Path) -> None:
    path = packed(tmp_path / "x.nemo", {**CONFIG, "model_weights.ckpt": bytes(4096)})
    whole = path.read_bytes()
    path.write_bytes(whole[:3000])
    with pytest.raises(CorruptFile) as caught:
        open_tree(path)
    assert caught.value.code == "E2795"
    for at, word in ((512 * 2 + 124, b"77777777777"), (512 * 2 + 148, b"0000000")):  # the second member's size, its sum
        path.write_bytes(whole[:at] + word + whole[at + len(word) :])
        try:
            tree = open_tree(path)
        except CorruptFile as e:
            assert e.code == "E2795"
        else:
            assert "model_weights.ckpt" not in tree.listing()
    path.write_bytes(whole[:512] + bytes(512))  # the archive's end in its middle
    with pytest.raises(CorruptFile):
        open_tree(path)


def test_a_huge_name_costs_no_memory(tmp_path: Path) -> None:
    path = packed(tmp_path / "x.nemo", {**CONFIG, "n" * (3 << 20): b"1"})
    with pytest.raises(CorruptFile, match="header of"):
        open_tree(path)


def test_any_other_archive_is_no_folder(tmp_path: Path) -> None:
    path = packed(tmp_path / "x.tar", {"a": b"1", "b": b"2"})
    tree = open_tree(path)
    assert tree.single == "x.tar"
    assert isinstance(open_tree(NEMO), ArchiveTree)
