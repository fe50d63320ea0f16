"""`--config` of a folder takes along what else makes it a model's folder; an adapter's config goes where its tensors
go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ckpt_tool as ckpt
from ckpt_tool.errors import UsageError

FIXTURES = Path(__file__).parents[2] / "fixtures"
HUB = FIXTURES / "safetensors" / "llama_one_file"
ADAPTER = FIXTURES / "peft" / "on_llama"
TAKEN = {
    "generation_config.json": '{"eos_token_id": 2}',
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "preprocessor_config.json": "{}",
    "modeling_llama.py": "raise SystemExit('nobody runs this')\n",
}
LEFT = {
    "README.md": "# the base model",
    "LICENSE": "its own",
    "model.safetensors.index.json": '{"weight_map": {}}',
    "pytorch_model.bin": "weights of another model",
    "notes.txt": "mine",
    "quantize_config.json": '{"bits": 4}',
}


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "config.json").write_bytes((HUB / "config.json").read_bytes())
    for name, text in {**TAKEN, **LEFT}.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("source", ["torch", "dcp", "megatron-dist"])
def test_the_folder_of_the_config_completes_the_output(source: str, hub: Path, tmp_path: Path) -> None:
    """Values from a job, everything else that a library opens from the folder of the model that it began with."""
    trained = tmp_path / ("trained.pt" if source == "torch" else "trained")
    ckpt.convert(HUB, trained, to=source)
    written = ckpt.convert(trained, tmp_path / "out", to="safetensors", config=hub)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.safetensors", "config.json", *TAKEN}
    for name in TAKEN.keys() - {"generation_config.json"}:  # that one may be the source's own
        assert (tmp_path / "out" / name).read_text() == TAKEN[name]
    assert any(note.startswith("taken from the folder of --config") for note in written["notes"])
    assert ckpt.diff(tmp_path / "out", HUB)["equal"]


def test_what_the_source_has_itself_is_kept(hub: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    ckpt.convert(HUB, source, to="safetensors")
    (source / "tokenizer_config.json").write_text('{"of": "the source"}')
    ckpt.convert(source, tmp_path / "out", to="safetensors", config=hub)
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == {"of": "the source"}
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_a_config_alone_brings_no_other_files(hub: Path, tmp_path: Path) -> None:
    ckpt.convert(HUB, tmp_path / "out", to="safetensors", config=hub / "config.json")
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_formats_without_a_config_take_none(hub: Path, tmp_path: Path) -> None:
    ckpt.convert(HUB, tmp_path / "trained.pt", to="torch")
    ckpt.convert(tmp_path / "trained.pt", tmp_path / "out", to="sharded", config=hub)
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(Exception, match="config") as caught:
        ckpt.convert(HUB, tmp_path / "out", to="safetensors", config=tmp_path / "empty")
    assert str(tmp_path / "empty") in str(caught.value.path)


def test_a_file_that_is_too_large_is_refused(hub: Path, tmp_path: Path) -> None:
    with (hub / "tokenizer.model").open("wb") as file:
        file.truncate(200 << 20)  # sparse
    with pytest.raises(UsageError) as caught:
        ckpt.convert(HUB, tmp_path / "out", to="safetensors", config=hub)
    assert caught.value.code == "E0239"


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp", "sharded", "orbax", "deepspeed", "paddle-flex"])
def test_an_adapters_config_goes_along_and_comes_back(to: str, tmp_path: Path) -> None:
    ckpt.convert(ADAPTER, tmp_path / "there", to=to, dialect="keep")
    assert (tmp_path / "there" / "adapter_config.json").read_bytes() == (ADAPTER / "adapter_config.json").read_bytes()
    ckpt.convert(tmp_path / "there", tmp_path / "back", to="peft")
    assert ckpt.diff(ADAPTER, tmp_path / "back")["equal"]
    before = json.loads((ADAPTER / "adapter_config.json").read_text())
    assert json.loads((tmp_path / "back" / "adapter_config.json").read_text())["lora_alpha"] == before["lora_alpha"]


def test_a_single_file_says_that_alpha_is_not_in_it(tmp_path: Path) -> None:
    written = ckpt.convert(ADAPTER, tmp_path / "adapter.pt", to="torch")
    assert any("alpha" in note for note in written["notes"])
