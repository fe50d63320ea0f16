"""reshard and merge keep names: a target with names of its own refuses others, and names `ckpt convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckpt_tool as ckpt
from ckpt_tool.errors import UsageError

HUB = Path(__file__).parents[2] / "fixtures" / "convert" / "llama" / "hf"
OWN_NAMES = ["megatron", "megatron-dist", "megatron-fsdp", "gguf", "paddle", "paddle-flex", "paddle-unified", "meta"]


def run_verb(verb: str, sources: list[Path], out: Path, **options: Any) -> Any:
    """merge or reshard, with their different ways of taking sources."""
    return ckpt.merge(sources, out, **options) if verb == "merge" else ckpt.reshard(sources[0], out, **options)


@pytest.mark.parametrize("verb", ["merge", "reshard"])
@pytest.mark.parametrize("source", ["safetensors", "dcp"])
@pytest.mark.parametrize("to", OWN_NAMES)
def test_names_of_the_hub_are_refused_by_name(verb: str, source: str, to: str, tmp_path: Path) -> None:
    path = HUB
    if source == "dcp":
        path = tmp_path / "dcp"
        ckpt.convert(HUB, path, to="dcp")
    with pytest.raises(UsageError) as caught:
        run_verb(verb, [path], tmp_path / "out", to=to)

    error = caught.value
    assert (error.code, error.exit_code) == ("E3060", 2)
    assert f"ckpt convert {path} OUT --to {to}" in (error.hint or "") and "--dialect keep" in (error.hint or "")
    assert not (tmp_path / "out").exists()


def test_sources_that_are_joined_are_refused_too(tmp_path: Path) -> None:
    ckpt.convert(HUB, tmp_path / "a", to="safetensors", keep_keys=["model.layers.0.*"])
    ckpt.convert(HUB, tmp_path / "b", to="safetensors", remove_keys=["model.layers.0.*"], lenient=True)
    with pytest.raises(UsageError) as caught:
        ckpt.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out", to="megatron")
    assert caught.value.code == "E3060" and "then ckpt convert" in (caught.value.hint or "")


@pytest.mark.parametrize("verb", ["merge", "reshard"])
def test_names_of_the_target_and_names_that_are_asked_for_pass(verb: str, tmp_path: Path) -> None:
    ckpt.convert(HUB, tmp_path / "megatron", to="megatron")
    ckpt.convert(tmp_path / "megatron", tmp_path / "dcp", to="dcp", dialect="keep")
    for number, source in enumerate((tmp_path / "megatron", tmp_path / "dcp")):
        run_verb(verb, [source], tmp_path / f"out{number}", to="megatron-dist")
        assert any(name.startswith("decoder.layers.0.") for name in ckpt.open(tmp_path / f"out{number}"))

    run_verb(verb, [HUB], tmp_path / "kept", to="megatron", dialect="keep")
    assert "model.norm.weight" in ckpt.open(tmp_path / "kept")
